"""An export under faults, over HTTP with a gateway in a process of its own: limits, errors, callers who leave and kill -9.

Every decision is drawn for an audit. The Guardian fails, or is too slow for its caller, on 19 of 20 questions that the
rule defers, in the audit too. The planted bug is the former behaviour: a decision without an outcome leaves no row.
"""

import asyncio
import hashlib
import os

import aiohttp
import numpy as np
import pytest

from conformal_arbitrage import calibrate
from conformal_arbitrage.collecting.records import score_log_of
from conformal_arbitrage.errors import UpstreamError
from conformal_arbitrage.models import FunctionScorer
from conformal_arbitrage.store import integrity
from conformal_arbitrage.store.location import open_store
from tests.gateway.durability import LOST, OURS, Gateway, _note, all_records, calls_by_name, encoded, named_in, run_sql
from tests.validity.simulation import log_of

pytestmark = pytest.mark.proof
ACTIONS = ("a", "b")
SERVED, ALPHA = 0.05, 0.1
PER_ROUND, CALLERS = int(os.environ.get("FAULT_REQUESTS", "100")), 12
JSON = {"Content-Type": "application/json"}


def draws(text):
    """Four numbers that depend on the question only: margin, luck of the Primary, faults of the Guardian."""
    return np.random.default_rng(list(hashlib.sha256(f"{named_in(text)}".encode()).digest())).random(4)


def scores_of(text):
    margin, luck = draws(text)[:2]
    right = luck >= (1 - margin) ** 4
    return (float(margin), 0.0), (float(right), float(not right))


async def primary(query):
    _note("primary", query.text)
    return list(scores_of(query.text)[0])


async def guardian(query):
    margin, _, fails, how = draws(query.text)
    if margin <= float(os.environ["RELAXATION"]) and fails < 0.95:
        if how < 0.94:
            raise UpstreamError("it broke")
        await asyncio.sleep(1.0)  # longer than a caller waits
    return list(scores_of(query.text)[1])


def rows_of(names):
    primary_scores, guardian_scores = zip(*(scores_of(f"<{name}>") for name in names), strict=True)
    return np.array(primary_scores), np.array(guardian_scores)


def rule():
    log = log_of(*rows_of(f"calibration-{k}" for k in range(4000)))
    who = {f.__name__: dict(FunctionScorer(f, name=f.__name__).identity) for f in (primary, guardian)}
    object.__setattr__(log, "identities", who)
    return calibrate(log, SERVED, guardian_sees="all", key=OURS.boundary_key).sign(OURS)


def write_config(folder, limit):
    models = "\n".join(
        f'[{role}]\nkind = "function"\nfunction = "tests.validity.test_faults_over_http:{role}"\nname = "{role}"\n'
        "concurrency = 64\nattempts = 1\n"
        for role in ("primary", "guardian")
    )
    limits = "" if limit is None else f"guardian_calls_per_minute = {limit}\n"
    path = folder / "arbitrage.toml"
    path.write_text(
        f'{models}\n[gateway]\ndatabase = "{folder}/record.db"\naudit_deadline = 15.0\n{limits}'
        '[policies.p]\ncertificate = "rule.json"\naudit_rate = 1.0\ncontent = "full"\n'
    )
    return path


async def press(gateway, session, names, delivered):
    """Send each question once; note which were answered."""
    request_body = {"type": "choice", "instructions": "Which?", "choices": [{"value": action} for action in ACTIONS]}

    async def caller():
        for name in names:
            await gateway.up.wait()
            body = {"model": "p", "input": f"<{name}> which?", "questions": [request_body]}
            try:
                async with asyncio.timeout(0.7), session.post(
                    gateway.url + "/v1/decisions", data=encoded(body), headers=JSON
                ) as reply:  # fmt: skip
                    await reply.read()
                    delivered[name] = reply.status
            except LOST:
                delivered[name] = 0

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def story(folder, relaxation):
    """Three rounds: under a limit of the Guardian's calls, then twice without one, killed in the middle."""
    delivered, where = {}, f"{folder}/record.db"
    environment = {"CALLS": str(folder / "calls"), "RELAXATION": repr(relaxation)}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for turn, limit in enumerate((4, None, None)):
            gateway = Gateway(write_config(folder, limit), **environment)
            names = iter([f"q{turn}-{k}" for k in range(PER_ROUND)])
            async with gateway:
                pressing = asyncio.create_task(press(gateway, session, names, delivered))
                if limit is None:
                    await asyncio.sleep(0.6)
                    await gateway.kill()
                    await gateway.start()
                await pressing
                async with asyncio.timeout(60):
                    while limit is None and run_sql(where, "select count(*) from audits") != [(0,)]:
                        await asyncio.sleep(0.2)
    async with await open_store(where, keys=OURS.record_keys) as store:
        return delivered, await all_records(store), await score_log_of(store, "p"), await integrity.verify(store)


def loss(certificate):
    """The mean loss of a certificate on fresh questions."""
    primary_scores, guardian_scores = rows_of(f"fresh-{k}" for k in range(4000))
    kept = certificate.apply(log_of(primary_scores, np.zeros(primary_scores.shape), "f")).candidate
    alone = kept.reshape(primary_scores.shape).sum(axis=1) == 1
    return float(np.mean(alone & (guardian_scores[:, 0] == 0)))


def test_every_primary_leg_is_a_row_and_recalibration_at_twice_alpha_keeps_it(tmp_path):
    certificate = rule()
    certificate.save(tmp_path / "rule.json")
    delivered, records, log, faults = asyncio.run(story(tmp_path, certificate.relaxation))
    assert faults == []
    assert {200, 502, 429, 0} <= set(delivered.values()), set(delivered.values())
    legs = {record.id for record in records if any(leg.role == "primary" for leg in record.decision.legs)}
    assert set(log.id) == legs
    calls = calls_by_name(tmp_path / "calls")
    assert 0 <= calls.total() - len(legs) <= 2 * CALLERS  # what a kill met between the Primary's reply and its commit
    assert set(calls.values()) == {1}
    assert log.missing.sum() > len(log) / 20
    margin = 3 * (ALPHA * (1 - ALPHA) / len(log)) ** 0.5
    options = {"guardian_sees": "all", "missing_guardian": "worst_case"}
    assert loss(calibrate(log, ALPHA, **options)) <= ALPHA + margin
    bug = calibrate(log.select(np.flatnonzero(~log.missing)), ALPHA, **options)
    assert loss(bug) > ALPHA + margin, "rows without an outcome left out: the export is selected by its scores"
