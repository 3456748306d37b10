"""A function whose body changes under the same name is another model: its old certificate must not promise anything."""

import asyncio

import numpy as np
import pytest

from conformal_arbitrage import ConformalArbitrage, Query, StaleCalibrationError, calibrate
from conformal_arbitrage.collecting.collect import collect_menus
from conformal_arbitrage.collecting.questions import Menus
from conformal_arbitrage.models import FunctionScorer
from tests.validity.simulation import keeps
from tests.validity.test_rendering import ACTIONS, draws, truth

pytestmark = pytest.mark.proof
N, ALPHA, TIMES, QUERIES = 30, 0.15, 40, 40


def careful(query):
    lead = draws(query.text)[0]
    return [(1 + lead) / 2, (1 - lead) / 2]


def hasty(query):
    lead = draws(query.text)[0] ** 0.25
    return [(1 + lead) / 2, (1 - lead) / 2]


async def losses(served):
    """Calibrate with the first body, serve with another; return the mean loss and its standard error."""
    primary, guardian = FunctionScorer(careful, name="rule"), FunctionScorer(truth, name="truth")
    now = FunctionScorer(served, name="rule")
    means = []
    for k in range(TIMES):
        rows = Menus(queries=[Query(f"<row {k} {j}>", ACTIONS, id=f"{j}") for j in range(N)])
        certificate = calibrate(await collect_menus(rows, primary, guardian, concurrency=8), ALPHA, guardian_sees="all")
        policy = ConformalArbitrage(primary=now, guardian=guardian, certificate=certificate)
        queries = [Query(f"<live {k} {j}>", ACTIONS) for j in range(QUERIES)]
        decisions = [await policy.decide(query) for query in queries]
        assert all(decision.no_guarantee is None for decision in decisions)
        means.append(np.mean([1 - truth(q)[d.action] for q, d in zip(queries, decisions, strict=True)]))
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


def test_the_same_body_keeps_the_quota_and_a_changed_one_is_refused():
    measured = asyncio.run(losses(careful))
    assert keeps(ALPHA, measured), measured
    with pytest.raises(StaleCalibrationError, match=r"primary\.source_sha256"):
        asyncio.run(losses(hasty))


def test_a_changed_body_that_is_pinned_by_its_name_only_breaks_the_quota(monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.models.others.source_identity", lambda code: {})
    measured = asyncio.run(losses(hasty))
    assert not keeps(ALPHA, measured), measured
