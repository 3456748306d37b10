"""A fleet behind pgbouncer is upgraded under load: another Guardian, another certificate, another release.

Old and new gateways serve side by side, each with the version of its own models; an old one restarts in the middle. No
request fails, none is decided without a policy, a key stays one decision wherever it is repeated, and the chains verify.

    ROLLING_ROUNDS=10 pytest tests/gateway/test_rolling.py     as `make rolling` does
"""

import asyncio
import json
import os
import random
import shutil
import sys
import time
from collections import Counter

import aiohttp
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.models import FunctionScorer
from conformal_arbitrage.store import integrity, policies
from conformal_arbitrage.store.location import open_store
from tests.certificates import said
from tests.database_faults import pooled
from tests.gateway import next_release
from tests.gateway.durability import (
    ACTIONS,
    OURS,
    ROOT,
    Gateway,
    all_records,
    chat_request,
    decision_request,
    decisions_by_name,
    encoded,
    named_in,
    numbers,
    primary,
    write_config,
)

pytestmark = pytest.mark.proof
ROUNDS = int(os.environ.get("ROLLING_ROUNDS", "1"))
CALLERS = 6
DRAIN = 1.5
FRESH = 1.0
"""Seconds for which a gateway that said it is ready is sent requests; below the drain."""


class Fleet(Gateway):
    """A gateway of a fleet: it changes nothing in the database at start."""

    def __init__(self, config, *, release="conformal_arbitrage"):
        super().__init__(config)
        self.release = release
        self._command = [
            sys.executable, "-m", release, "serve", "--config", str(config), "--port", "0", "--no-migrate",
        ]  # fmt: skip
        self.seen_ready = 0.0


async def migrate(config, release):
    """Run the job before a rollout."""
    command = [sys.executable, "-m", release, "records", "migrate", "--config", str(config), "--json"]
    job = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=Fleet(config)._environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(job.communicate(), 120)
    assert job.returncode == 0
    return json.loads(output)


class Balancer:
    """Sends requests to gateways that said they are ready a moment ago, in turn, as a load balancer does."""

    def __init__(self, session):
        self.session = session
        self.gateways = []
        self._turn = 0

    async def watch(self):
        while True:
            await asyncio.gather(*(self._look(gateway) for gateway in self.gateways))
            await asyncio.sleep(0.1)

    async def _look(self, gateway):
        begun = time.monotonic()
        try:
            async with self.session.get(f"{gateway.url}/health/ready", headers={"connection": "close"}) as reply:
                gateway.seen_ready = begun if reply.status == 200 else 0.0
        except aiohttp.ClientError:
            gateway.seen_ready = 0.0

    async def choose(self):
        while True:
            ready = [one for one in self.gateways if time.monotonic() - one.seen_ready < FRESH]
            if ready:
                self._turn += 1
                return ready[self._turn % len(ready)]
            await asyncio.sleep(0.01)

    async def ask(self, path, body, key):
        """The release that answered, the status and the body of its reply."""
        gateway = await self.choose()
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        async with self.session.post(gateway.url + path, data=encoded(body), headers=headers) as reply:
            return gateway.release, reply.status, await reply.read()


class Caller:
    """Asks one question after another, and some of them again under the same key, perhaps elsewhere."""

    def __init__(self, number, balancer):
        self.coin = random.Random(number)
        self.number, self.balancer = number, balancer
        self.replies = []

    async def run(self, stop):
        count = 0
        while not stop.is_set():
            count += 1
            name = f"c{self.number}n{count}"
            request = (decision_request, chat_request)[count % 2](name)
            first = await self.balancer.ask(*request, key=name)
            self.replies.append((name, *first))
            if self.coin.random() < 0.2:
                again = await self.balancer.ask(*request, key=name)
                assert again[1:] == first[1:], (first, again)


def successor_of(path, folder):
    """The configuration of the upgrade: another Guardian and its certificate."""
    texts = [f"calibration {k}" for k in range(400)]
    ours = [numbers("primary", text, len(ACTIONS)) for text in texts]
    theirs = [[1 - score for score in numbers("guardian", text, len(ACTIONS))] for text in texts]
    scorers = {"primary": primary, "guardian": next_release.guardian}
    identities = {role: dict(FunctionScorer(one, name=role).identity) for role, one in scorers.items()}
    log = ScoreLog.from_arrays(ours, theirs, identities=identities)
    folder.mkdir()
    calibrate(log, 0.2, guardian_sees="all").sign(OURS).save(folder / "certificate.json")
    text = path.read_text().replace("tests.gateway.durability:guardian", "tests.gateway.next_release:guardian")
    (folder / "arbitrage.toml").write_text(text)
    return folder / "arbitrage.toml"


def arbitrage_of(body):
    """What a reply says about its decision."""
    document = json.loads(body)
    return document["answers"][0]["arbitrage"] if "answers" in document else document["arbitrage"]


async def stop_one(balancer, gateway):
    gateway.process.terminate()
    assert await asyncio.wait_for(gateway.process.wait(), 120) == 0
    balancer.gateways.remove(gateway)


async def start_all(balancer, gateways):
    await asyncio.gather(*(gateway.start() for gateway in gateways))
    balancer.gateways += gateways


async def roll(balancer, old, new):
    """Replace a fleet; before the last of the old gateways goes, it restarts beside the new ones."""
    await start_all(balancer, new)
    await stop_one(balancer, old[0])
    await stop_one(balancer, old[1])
    await start_all(balancer, old[1:])
    await asyncio.sleep(FRESH)  # old and new side by side
    await stop_one(balancer, old[1])


async def upgraded_under_load(earlier, later):
    """The replies that callers got while fleets replaced each other, there and back again."""
    steps = [(later, "tests.gateway.next_release"), (earlier, "conformal_arbitrage")]
    await migrate(earlier, "conformal_arbitrage")
    fleet = [Fleet(earlier), Fleet(earlier)]
    started = list(fleet)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            balancer, stop = Balancer(session), asyncio.Event()
            await start_all(balancer, fleet)
            watching = asyncio.create_task(balancer.watch())
            callers = [Caller(k, balancer) for k in range(CALLERS)]
            calling = [asyncio.create_task(caller.run(stop)) for caller in callers]
            for round in range(ROUNDS):
                config, release = steps[round % 2]
                await migrate(config, release)
                following = [Fleet(config, release=release), Fleet(config, release=release)]
                started += following
                await roll(balancer, fleet, following)
                fleet = following
            await asyncio.sleep(FRESH)
            stop.set()
            await asyncio.gather(*calling)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        for gateway in started:
            if getattr(gateway, "process", None) is not None and gateway.process.returncode is None:
                gateway.process.kill()
                await gateway.process.wait()
    return [reply for caller in callers for reply in caller.replies]


@pytest.mark.skipif(
    shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None,
    reason="no pooler to test behind: apt install pgbouncer",
)
def test_a_rolling_upgrade_under_load_fails_no_request_and_leaves_none_without_its_own_policy(
    server,
    tmp_path,
):
    direct = server.new_database()
    with pooled(server, direct, tmp_path, size=4) as url:
        earlier = write_config(tmp_path, url, audit_rate=0)
        text = earlier.read_text().replace("[gateway]\n", f"[gateway]\ndrain = {DRAIN}\ndatabase_connections = 3\n")
        earlier.write_text(text)
        later = successor_of(earlier, tmp_path / "later")
        replies = asyncio.run(upgraded_under_load(earlier, later))
    check_replies(replies)
    asyncio.run(check_record(direct, replies))
    counts = Counter(release for _, release, _, _ in replies)
    print(f"{len(replies)} requests in {ROUNDS} upgrades, all answered: {dict(counts)}")


def check_replies(replies):
    assert [reply for reply in replies if reply[2] != 200] == []
    shown = [(release, arbitrage_of(body)) for _, release, _, body in replies]
    assert {one["guarantee"] for _, one in shown} == {"crc"}
    by_release = {}
    for release, one in shown:
        by_release.setdefault(release, set()).add(one["alpha"])
    assert by_release == {"conformal_arbitrage": {0.1}, "tests.gateway.next_release": {0.2}}


async def check_record(url, replies):
    async with await open_store(url, keys=OURS.record_keys) as store:
        records, faults = await all_records(store), await integrity.verify(store)
        history = {version.version: version for version in await store.run(policies.history, "support")}
    assert faults == []
    assert decisions_by_name(records) == {name: 1 for name, *_ in replies}
    alphas = {number: said(version.certificate, "alpha") for number, version in history.items()}
    answered = {name: arbitrage_of(body)["alpha"] for name, _, _, body in replies}
    models = {}
    for record in records:
        assert answered[named_in(str(record.decision.content.context))] == alphas[record.decision.version]
        models.setdefault(alphas[record.decision.version], set()).add(record.decision.identities_sha256)
    assert [len(one) for one in models.values()] == [1, 1]
    assert models[0.1] != models[0.2]
