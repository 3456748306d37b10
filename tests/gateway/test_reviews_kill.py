"""kill -9 while four people vote and eight callers wait: no vote is lost, no question decided twice, one reply for all.

REVIEW_KILL_ROUNDS sets how often the gateway is killed: once unless given; `make reviews-kills` does it 25 times.
"""

import asyncio
import hashlib
import os
import random
from collections import defaultdict

import aiohttp
import pytest

from conformal_arbitrage.store import integrity, keys
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.record import new_id
from tests.gateway.durability import LOST, OURS, Gateway, all_records, decision_request, encoded, named_in, run_sql

pytestmark = pytest.mark.proof
ROUNDS = int(os.environ.get("REVIEW_KILL_ROUNDS", "1"))
REVIEWERS, CALLERS = ("ann", "bob", "cid", "dan"), 8
ROOT = "/v1/arbitrage/reviews"


def write_people(folder, database):
    """A configuration in which people decide everything, three quarters by panels of three."""
    path = folder / "arbitrage.toml"
    path.write_text(f"""\
[primary]
kind = "function"
function = "tests.gateway.durability:primary"
name = "primary"

[guardian]
kind = "human"
name = "team"
panel = 3

[teams.team]
members = {list(REVIEWERS)}

[gateway]
database = "{database}"

[policies.support]
mode = "shadow"
content = "full"

[policies.support.review]
wait = 1
undo = 0.2
lease = 5
""")
    return path


async def new_key(where, scope, label):
    secret = f"arb-{new_id()}"
    async with await open_store(where, keys=OURS.record_keys) as store:
        sha256 = hashlib.sha256(secret.encode()).hexdigest()
        await store.run(keys.create, id=label, sha256=sha256, scope=scope, label=label)
    return {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}


class Crowd:
    """Reviewers and callers of one gateway, and all that it acknowledged to them."""

    def __init__(self, gateway, session, caller):
        self.gateway, self.session, self.caller = gateway, session, caller
        self.over = self.closing = False
        self.votes = {}
        self.replies = defaultdict(set)

    async def post(self, path, body, headers):
        await self.gateway.up.wait()
        async with self.session.post(self.gateway.url + path, data=encoded(body), headers=headers) as reply:
            return reply.status, await reply.read(), await reply.json() if reply.status not in (204, 502) else None

    async def review(self, name, headers):
        while not self.closing:
            try:
                status, _, held = await self.post(f"{ROOT}/claim", {}, headers)
                if status != 200:
                    await asyncio.sleep(0.05)
                    continue
                choice = len(held["context"]) % 3 if random.random() < 0.8 else random.randrange(3)
                status, _, _ = await self.post(f"{ROOT}/{held['token']}/vote", {"choice": choice}, headers)
                if status == 200:
                    self.votes[held["token"]] = (name, choice)
            except LOST:
                await asyncio.sleep(0.05)

    async def call(self, caller):
        count = 0
        while not self.over:
            count += 1
            name = f"{caller}-{count}"
            path, body = decision_request(name)
            headers = {**self.caller, "Idempotency-Key": name}
            for _ in range(2):  # and once more, for the same bytes
                self.replies[name].add(await self.insist(path, body, headers))

    async def insist(self, path, body, headers):
        while True:
            try:
                status, content, _ = await self.post(path, body, headers)
                if status == 200 or (status == 504 and b"review_expired" in content):
                    return content
                assert status in (409, 503), content
            except LOST:
                await asyncio.sleep(0.05)


async def disturb(gateway, crowd):
    for _ in range(ROUNDS):
        await asyncio.sleep(random.uniform(1.0, 2.5))
        await gateway.kill()
        await gateway.start()
    await asyncio.sleep(0.5)
    crowd.over = True


async def story(folder, where):
    config = write_people(folder, where)
    reviewers = {name: await new_key(where, "review", name) for name in REVIEWERS}
    caller = await new_key(where, "call", "caller")
    timeout = aiohttp.ClientTimeout(total=60)
    async with Gateway(config) as gateway, aiohttp.ClientSession(timeout=timeout) as session:
        crowd = Crowd(gateway, session, caller)
        voting = [asyncio.create_task(crowd.review(name, headers)) for name, headers in reviewers.items()]
        calling = [asyncio.create_task(crowd.call(f"c{k}")) for k in range(CALLERS)]
        await disturb(gateway, crowd)
        await asyncio.wait_for(asyncio.gather(*calling), 120)
        crowd.closing = True
        await asyncio.gather(*voting)
    async with await open_store(where, keys=OURS.record_keys) as store:
        return crowd, await all_records(store), await integrity.verify(store)


@pytest.fixture(params=["sqlite", "postgres"])
def where(request, tmp_path):
    if request.param == "sqlite":
        return str(tmp_path / "people.sqlite")
    return request.getfixturevalue("server").new_database()


def test_kills_lose_no_vote_and_decide_nothing_twice(where, tmp_path):
    crowd, records, faults = asyncio.run(story(tmp_path, where))
    assert not faults
    kept = {token: (who, choice) for token, who, choice in run_sql(where, "select token, reviewer, choice from votes")}
    lost = {token: vote for token, vote in crowd.votes.items() if kept.get(token) != vote}
    assert not lost
    assert len(crowd.votes) > 4 * ROUNDS
    assert {len(bodies) for bodies in crowd.replies.values()} == {1}
    by_name = defaultdict(list)
    for record in records:
        by_name[named_in(str(record.decision.content.context))].append(record)
    assert {name: len(by_name[name]) for name in crowd.replies} == dict.fromkeys(crowd.replies, 1)
    beyond = "select count(*) from votes where late = 0 and withdrawn is null group by item having count(*) > 3"
    assert run_sql(where, beyond) == []
    assert run_sql(where, "select decision from reviews group by decision, purpose having count(*) > 1") == []
    decided = 0
    for name, (reply,) in crowd.replies.items():
        [record] = by_name[name]
        split = b"review_expired" in reply  # three people, three options
        assert split == (record.decision.action is None)
        assert split or record.id.encode() in reply
        decided += not split
    assert decided
