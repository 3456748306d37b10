"""kill -9 at exact places: between vote and verdict, between verdict and reply, with half of a message sent.

After each, whoever comes next finds the vote, decides once, and gives every caller one and the same reply.
REVIEW_KILL_ROUNDS sets how often each place is tried: once unless given, and one time in five of the kills at random.
"""

import asyncio
import json
import os
import re
from collections import Counter, defaultdict

import aiohttp
import pytest
from standardwebhooks import Webhook

from conformal_arbitrage.store import integrity
from conformal_arbitrage.store.location import open_store
from tests.gateway.durability import LOST, OURS, all_records, decision_request, encoded, named_in, run_sql
from tests.gateway.failpoints import POINTS, Fuse, Process
from tests.gateway.test_reviews_kill import ROOT, new_key
from tests.receiver import SECRET

pytestmark = pytest.mark.proof
ROUNDS = max(1, int(os.environ.get("REVIEW_KILL_ROUNDS", "1")) // 5)
STATES = dict(zip(POINTS, ("open", "open", "decided", "decided", "closed", "closed"), strict=True))
"""What a kill at each place leaves of the question: that it was aimed well."""
ACTIONS = 3
LONG = aiohttp.ClientTimeout(total=120)


def write_team(folder, database, hook):
    """A configuration in which one person decides everything, and a webhook is told."""
    path = folder / "arbitrage.toml"
    path.write_text(f"""\
[primary]
kind = "function"
function = "tests.gateway.durability:primary"
name = "primary"

[guardian]
kind = "human"
name = "team"

[teams.team]
members = ["ann"]

[gateway]
database = "{database}"

[gateway.webhooks.pager]
url = "{hook}"
secret_env = "HOOK_SECRET"
events = ["review.decided"]

[policies.support]
mode = "shadow"
content = "full"

[policies.support.review]
undo = 0
""")
    return path


class Hook:
    """A receiver that keeps what it got of each message, halves too."""

    def __init__(self):
        self.halves, self.messages = [], []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        await self._server.wait_closed()

    async def _take(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        headers["webhook-signature"] = re.search(r"(?im)^webhook-signature: (.*)\r$", head)[1]
        try:
            body = await reader.readexactly(int(headers["content-length"]))
        except asyncio.IncompleteReadError as cut:
            self.halves.append(cut.partial)
        else:
            self.messages.append((headers["webhook-id"], Webhook(SECRET).verify(body, headers)))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()
        await writer.wait_closed()


class Story:
    """One database, a reviewer, callers in twos, and a gateway that is killed again and again."""

    def __init__(self, where, folder, session, hook, *, survivor):
        self.where, self.session, self.hook = where, session, hook
        self.fuse = Fuse(folder)
        config = write_team(folder, where, hook.url)
        self.doomed = Process(config, folder, HOOK_SECRET=SECRET)
        self.survivor = Process(config, folder, doomed=False, HOOK_SECRET=SECRET) if survivor else None
        self.url, self.replies, self.acknowledged = None, defaultdict(set), {}

    async def start(self):
        self.reviewer = await new_key(self.where, "review", "ann")
        self.caller = await new_key(self.where, "call", "caller")
        await self.doomed.start()
        self.url = self.doomed.url
        if self.survivor is not None:
            self.fuse.pause(True)
            await self.survivor.start()

    async def stop(self):
        await self.doomed.stop()
        if self.survivor is not None:
            await self.survivor.stop()

    async def post(self, path, body, headers):
        async with self.session.post(self.url + path, data=encoded(body), headers=headers) as reply:
            return reply.status, await reply.read()

    async def insist(self, path, body, headers, accepted=200):
        """Send a request until it is answered, by whichever gateway is there."""
        while True:
            try:
                status, content = await self.post(path, body, headers)
                if status == accepted:
                    return content
                assert status in (204, 409, 503), content
            except LOST:
                pass
            await asyncio.sleep(0.02)

    async def call(self, name):
        path, body = decision_request(name)
        self.replies[name].add(await self.insist(path, body, {**self.caller, "Idempotency-Key": name}))

    async def review(self, choice):
        """Take a question and vote; return the token and whether the vote was acknowledged."""
        held = json.loads(await self.insist(f"{ROOT}/claim", {}, self.reviewer))
        try:
            status, _ = await self.post(f"{ROOT}/{held['token']}/vote", {"choice": choice}, self.reviewer)
        except LOST:
            return held["token"], False
        assert status == 200
        self.acknowledged[held["token"]] = choice
        self.fuse.acknowledge()
        return held["token"], True

    async def kill_at(self, point, name, choice):
        """Let the gateway die at a place while two callers wait for one answer, and let another go on.

        Beside a second gateway they leave with the first, and come back once a message says that all is decided."""
        messages = len(self.hook.messages)
        self.fuse.arm(point)
        callers = [asyncio.create_task(self.call(name)) for _ in range(2)]
        token, known = await self.review(choice)
        await self.doomed.died()
        assert not self.fuse.armed(point)
        left = run_sql(self.where, f"select state from reviews join votes on item = id where token = '{token}'")
        assert [state for (state,) in left] == [STATES[point]]
        run_sql(self.where, "update claims set lease = 0 where state <> 'finished'")  # those of the dead have ended
        run_sql(self.where, "update deliveries set due = 0 where done is null")
        if self.survivor is not None:
            for caller in callers:
                caller.cancel()
        await self.go_on()
        await asyncio.gather(*callers, return_exceptions=self.survivor is not None)
        if self.survivor is not None:
            assert point == POINTS[-1] or not self.replies[name]  # a message is sent after the reply
            await self.told(messages)
        await asyncio.gather(self.call(name), self.call(name))  # once more, for the same bytes
        if not known:  # the reviewer sends the vote again, and would like to change it
            await self.insist(f"{ROOT}/{token}/vote", {"choice": (choice + 1) % ACTIONS}, self.reviewer)
            self.acknowledged[token] = choice
        await self.told(messages)
        if self.survivor is not None:
            self.fuse.pause(True)
            await self.doomed.start()
            self.url = self.doomed.url

    async def told(self, messages):
        """Wait until the webhook has more messages than these."""
        while len(self.hook.messages) <= messages:
            await asyncio.sleep(0.02)

    async def go_on(self):
        """Start the gateway again, or leave it to the other one."""
        if self.survivor is None:
            await self.doomed.start()
            self.url = self.doomed.url
        else:
            self.fuse.pause(False)
            self.url = self.survivor.url


async def kills(where, folder, *, survivor):
    async with Hook() as hook, aiohttp.ClientSession(timeout=LONG) as session:
        story = Story(where, folder, session, hook, survivor=survivor)
        try:
            await story.start()
            for number in range(ROUNDS * len(POINTS)):
                killed = story.kill_at(POINTS[number % len(POINTS)], f"q{number}", number % ACTIONS)
                await asyncio.wait_for(killed, 120)
        finally:
            await story.stop()
    async with await open_store(where, keys=OURS.record_keys) as store:
        return story, await all_records(store), await integrity.verify(store)


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "two gateways on postgres"])
def test_kills_between_vote_verdict_and_reply_leave_one_of_each(kind, request, tmp_path):
    one_file = kind == "sqlite"
    where = str(tmp_path / "people.sqlite") if one_file else request.getfixturevalue("server").new_database()
    story, records, faults = asyncio.run(kills(where, tmp_path, survivor="two" in kind))
    assert not faults
    count = ROUNDS * len(POINTS)
    kept = run_sql(where, "select token, choice from votes where withdrawn is null and late = 0")
    assert (len(kept), dict(kept)) == (count, story.acknowledged)
    assert run_sql(where, "select decision from reviews where state <> 'closed'") == []
    ends = Counter(id for (id,) in run_sql(where, "select id from events where kind = 'completion'"))
    by_name = {named_in(str(record.decision.content.context)): record for record in records}
    assert len(records) == len(by_name) == len(ends) == count
    assert set(ends.values()) == {1}
    for number in range(count):
        [reply] = story.replies[f"q{number}"]
        record = by_name[f"q{number}"]
        assert record.decision.action == number % ACTIONS
        assert record.id.encode() in reply
    told = defaultdict(set)
    for id, message in story.hook.messages:
        told[message["data"]["id"]].add(id)
    assert {id: len(ids) for id, ids in told.items()} == {record.id: 1 for record in records}
    assert len(story.hook.halves) == ROUNDS
    assert all(half.startswith(b'{"') and not half.endswith(b"}}") for half in story.hook.halves)
    assert run_sql(where, "select id from deliveries where done is null or error is not null") == []
