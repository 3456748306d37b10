"""Two gateways on one PostgreSQL share one queue of reviews: callers and reviewers may sit at either."""

import threading

import pytest

from conformal_arbitrage.store import integrity, reviews
from tests.gateway.house import DECISION, UNSURE, until, votes
from tests.gateway.people import LONG, Later, PeopleHouse, Reviewer

pytestmark = pytest.mark.proof
CALLS, NAMES = 12, ("ann", "bob", "cid", "dan")


@pytest.fixture
def pair(house, request, monkeypatch):
    """Two gateways with one configuration, one secret and one database."""
    monkeypatch.setenv("ARBITRAGE_SECRET", "one-secret-for-both-gateways")
    where = request.getfixturevalue("server").new_database()
    first = house(PeopleHouse, primary=votes(*UNSURE), members=NAMES, gateway={"database": where})
    second = house(PeopleHouse, primary=votes(*UNSURE), certificate=False, policy={"mode": "shadow"})
    second.stop()
    second.config = first.config
    second.start()
    return first, second


class Worker(threading.Thread):
    """A reviewer who answers letter k with option k modulo 3, until it is over."""

    def __init__(self, reviewer, over):
        super().__init__()
        self.reviewer, self.over, self.votes = reviewer, over, []

    def run(self):
        while not self.over.is_set():
            if (held := self.reviewer.claim()) is None:
                self.over.wait(0.05)
                continue
            place = int(held["context"].split("Letter ")[1].split(".")[0]) % 3
            self.votes.append((held["token"], self.reviewer.vote(held, place).status_code))


def test_every_question_is_decided_once_whoever_asks_and_whoever_votes(pair):
    first, second = pair
    caller = first.keyed("call")

    def ask(k, gate):
        return gate.decide({**DECISION, "input": f"Letter {k}."}, headers={**caller, "Idempotency-Key": f"{k}"})

    keys = [{"Authorization": f"Bearer {first.key('review', name)[0]}"} for name in NAMES]
    over = threading.Event()
    workers = [Worker(Reviewer(pair[k % 2], key), over) for k, key in enumerate(keys)]
    calls = [Later(lambda k=k: ask(k, pair[k % 2])) for k in range(CALLS)]
    for worker in workers:
        worker.start()
    try:
        replies = [call.result() for call in calls]
    finally:
        over.set()
        for worker in workers:
            worker.join(60)
    assert [reply.status_code for reply in replies] == [200] * CALLS
    assert [reply.json()["answers"][0]["choice"] for reply in replies] == ["abc"[k % 3] for k in range(CALLS)]
    cast = [vote for worker in workers for vote in worker.votes]
    assert {status for _, status in cast} == {200}
    assert len({token for token, _ in cast}) == len(cast) == CALLS
    assert sorted(record.decided_by for record in first.records()) == ["guardian"] * CALLS
    assert ask(0, second).json() == ask(0, first).json() == replies[0].json()
    until(lambda: not first.with_store(lambda store: store.run(reviews.open_places)), LONG)
    assert first.with_store(lambda store: integrity.verify(store)) == []
