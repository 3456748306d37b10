"""Calibration on live traffic: randomly audited rows keep the quota; rows selected by the rule itself do not.

Decisions, audits, records and export are the gateway's own; only the models and the truth are simulated.
"""

import asyncio

import numpy as np
import pytest

from conformal_arbitrage import ConformalArbitrage, Query, calibrate
from conformal_arbitrage.collecting.records import score_log_of
from conformal_arbitrage.gateway.decider import Decider
from conformal_arbitrage.gateway.policies import LivePolicy, MenuPair
from conformal_arbitrage.live.config import PolicyConfig
from conformal_arbitrage.models import ReplayScorer
from conformal_arbitrage.store import events, pages
from conformal_arbitrage.store.pages import RecordFilter
from conformal_arbitrage.store.record import AuditBody, Event
from conformal_arbitrage.store.sqlite import SQLiteStore
from tests.validity.simulation import World, keeps, log_of, regret

pytestmark = pytest.mark.proof
N, ALPHA, TIMES, QUERIES = 20, 0.15, 150, 90
WORLD = World(one_hot=True)
ACTIONS = ("a", "b", "c")


def first_rule():
    """Return the certificate under which the traffic is served, calibrated on many rows."""
    primary, guardian, _ = WORLD.draw(np.random.default_rng(7), 4000)
    return calibrate(log_of(primary, guardian), ALPHA, guardian_sees="all")


async def serve(store, name, rng, rule):
    """Decide, record and audit some traffic."""
    primary, guardian, _ = WORLD.draw(rng, QUERIES)
    ids = [f"{name}-{k:04d}" for k in range(QUERIES)]
    offsets = np.arange(0, primary.size + 1, len(ACTIONS))
    models = {
        role: ReplayScorer.of_values(ids, scores.ravel(), offsets, column=role)
        for role, scores in (("primary", primary), ("guardian", guardian))
    }
    policy = LivePolicy(
        name=name, version=1, settings=PolicyConfig(audit_rate=0.5), pair=MenuPair(**models),
        certificate=rule, alpha=rule.alpha, identities_sha256="", mode="enforce",
        rule=ConformalArbitrage(**models, certificate=rule, allow=["unbound"]),
    )  # fmt: skip
    decider = Decider(rng.bytes(32))
    cases = [decider.begin(policy, Query("", ACTIONS, id=id), "caller") for id in ids]
    outcomes = [decider.outcome(case, [step async for step in case.steps][-1]) for case in cases]
    drawn = [one.audit.id for one in outcomes if one.audit]
    audits = [Event(id=id, body=await audited(models, id)) for id in drawn]
    await store.run(events.commit, [*(one.event for one in outcomes), *audits])


async def audited(models, id):
    scores = await models["guardian"].score(Query("", ACTIONS, id=id))
    return AuditBody(scores=scores.values)


async def calibration_rows(store, name, *, bug):
    """Return N rows of the export; the planted bug takes those that the rule deferred."""
    if not bug:
        return (await score_log_of(store, name)).select(np.arange(N))
    log = await score_log_of(store, name, everything=True)
    deferred = np.flatnonzero([record == "guardian" for record in await deciders(store, name)])
    object.__setattr__(log, "extra", {})  # removes the mark that calibrate rejects
    return log.select(deferred[:N])


async def deciders(store, name):
    return [
        record.decided_by for record in (await store.run(pages.records, RecordFilter(policy=name), limit=1000))[::-1]
    ]


async def losses(folder, *, bug):
    rng = np.random.default_rng(3)
    rule = first_rule()
    store = SQLiteStore(folder / "record.sqlite")
    means = []
    for k in range(TIMES):
        await serve(store, f"p{k}", rng, rule)
        certificate = calibrate(await calibration_rows(store, f"p{k}", bug=bug), ALPHA, guardian_sees="all")
        fresh, truth, _ = WORLD.draw(rng, 200)
        kept = certificate.apply(log_of(fresh, np.zeros(fresh.shape), "f")).candidate.reshape(fresh.shape)
        means.append(regret(truth, kept, sees_all=True).mean())
    await store.close()
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


@pytest.mark.parametrize("bug", [False, True])
def test_audited_rows_keep_the_quota_and_rows_chosen_by_their_scores_break_it(bug, tmp_path):
    measured = asyncio.run(losses(tmp_path, bug=bug))
    assert keeps(ALPHA, measured) is not bug, measured
