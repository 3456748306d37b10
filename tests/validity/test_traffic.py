"""Calibration on live traffic: rows that the audit coin drew keep the quota; rows that the rule itself chose do not.

Everything is real but the models: decisions, coin, record and export are the gateway's; the truth is drawn.
"""

import asyncio

import numpy as np
import pytest

from conformal_arbitrage import ConformalArbitrage, Query, calibrate
from conformal_arbitrage.collecting.from_records import score_log_of
from conformal_arbitrage.gateway.decider import Decider
from conformal_arbitrage.gateway.policy_table import LivePolicy, Pair
from conformal_arbitrage.live.config import PolicyConfig
from conformal_arbitrage.scorers import ReplayScorer
from conformal_arbitrage.store import Event, SQLiteStore
from tests.validity.simulation import World, keeps, log_of, regret

N, ALPHA, TIMES, QUERIES = 20, 0.15, 150, 90
WORLD = World(one_hot=True)
ACTIONS = ("a", "b", "c")


def first_rule():
    """The rule under which the traffic is served, calibrated on many rows."""
    primary, guardian, _ = WORLD.draw(np.random.default_rng(7), 4000)
    return calibrate(log_of(primary, guardian), ALPHA, guardian_sees="all")


async def serve(store, name, rng, rule):
    """One stretch of traffic: decided, recorded, audited."""
    primary, guardian, _ = WORLD.draw(rng, QUERIES)
    ids = [f"{name}-{k:04d}" for k in range(QUERIES)]
    offsets = np.arange(0, primary.size + 1, len(ACTIONS))
    models = {
        role: ReplayScorer.of_values(ids, scores.ravel(), offsets, column=role)
        for role, scores in (("primary", primary), ("guardian", guardian))
    }
    policy = LivePolicy(
        name=name, version=1, settings=PolicyConfig(audit_rate=0.5), pair=Pair(form="menu", **models), certificate=rule,
        rule=ConformalArbitrage(**models, certificate=rule, allow=["unbound"]), identities_sha256="",
    )  # fmt: skip
    decider = Decider(rng.bytes(32))
    made = [await decider.menu(policy, Query("", ACTIONS, id=id), "caller") for id in ids]
    audits = [
        Event(id=one.audit.id, kind="audit", body=await audited(models, one.audit.id)) for one in made if one.audit
    ]
    await store.commit([*(one.event for one in made), *audits])


async def audited(models, id):
    scores = await models["guardian"].score(Query("", ACTIONS, id=id))
    return {"scores": scores.values, "error": None, "cost": None, "served": None}


async def calibration_rows(store, name, *, bug):
    """N rows of the export; the planted bug takes those about which the rule asked the Guardian."""
    if not bug:
        return (await score_log_of(store, name)).select(np.arange(N))
    log = await score_log_of(store, name, everything=True)
    asked = np.flatnonzero([record == "guardian" for record in await deciders(store, name)])
    object.__setattr__(log, "extra", {})  # rubs out the mark that calibrate refuses
    return log.select(asked[:N])


async def deciders(store, name):
    return [record.decided_by for record in (await store.records(policy=name, limit=1000))[::-1]]


async def losses(folder, *, bug):
    rng = np.random.default_rng(3)
    rule = first_rule()
    store = SQLiteStore(folder / "record.sqlite")
    found = []
    for k in range(TIMES):
        await serve(store, f"p{k}", rng, rule)
        made = calibrate(await calibration_rows(store, f"p{k}", bug=bug), ALPHA, guardian_sees="all")
        fresh, truth, _ = WORLD.draw(rng, 200)
        kept = made.apply(log_of(fresh, np.zeros(fresh.shape), "f")).candidate.reshape(fresh.shape)
        found.append(regret(truth, kept, sees_all=True).mean())
    await store.close()
    return float(np.mean(found)), float(np.std(found, ddof=1) / TIMES**0.5)


@pytest.mark.parametrize("bug", [False, True])
def test_audited_rows_keep_the_quota_and_rows_chosen_by_their_scores_break_it(bug, tmp_path):
    measured = asyncio.run(losses(tmp_path, bug=bug))
    assert keeps(ALPHA, measured) is not bug, measured
