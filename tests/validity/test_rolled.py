"""An alias that its provider moves to another model: no answer of that model is given under the old certificate.

Collecting, the policy and the check of identities are the product's own; only the model is simulated. After the move it is
surer of itself than it should be.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ConformalArbitrage, Query, StaleCalibrationError, calibrate
from conformal_arbitrage.collecting.collect import collect_menus
from conformal_arbitrage.collecting.questions import Menus
from conformal_arbitrage.models import ChatScorer, FunctionScorer, Settings
from conformal_arbitrage.models.port import Reply, WholePort
from tests.scripted import scores
from tests.validity.simulation import keeps
from tests.validity.test_rendering import ACTIONS, draws, truth

pytestmark = pytest.mark.proof
N, ALPHA, TIMES, QUERIES = 30, 0.15, 40, 40


class Alias(WholePort):
    """What answers to the name "m": first m-1, whose lead says how often it is right, then m-2, which is too sure."""

    origin = "simulated"
    model = "m-1"

    async def call(self, call):
        shown = call.body["messages"][-1]["content"]
        lead = draws(shown[shown.index("<") : shown.index(">") + 1])[0]
        lead = lead if self.model == "m-1" else lead**0.25
        return Reply(document={**scores((1 + lead) / 2, (1 - lead) / 2), "model": self.model})


async def mean_losses(*, pinned):
    """Return the loss of policies after the move; `pinned` is the model that they accept replies from."""
    guardian, means = FunctionScorer(truth, name="truth"), []
    for k in range(TIMES):
        alias = Alias()
        primary = ChatScorer(port=alias, settings=Settings(model="m", served=None if pinned is None else "m-1"))
        rows = Menus(queries=[Query(f"<row {k} {j}>", ACTIONS, id=f"{j}") for j in range(N)])
        certificate = calibrate(await collect_menus(rows, primary, guardian, concurrency=8), ALPHA)
        alias.model = "m-2"
        primary = replace(primary, settings=replace(primary.settings, served=pinned))
        policy = ConformalArbitrage(primary=primary, guardian=guardian, certificate=certificate)
        queries = [Query(f"<live {k} {j}>", ACTIONS, id=f"live {j}") for j in range(QUERIES)]
        decisions = [await policy.decide(query) for query in queries]
        means.append(np.mean([1 - truth(q)[d.action] for q, d in zip(queries, decisions, strict=True)]))
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


def test_replies_of_another_model_than_the_pinned_one_do_not_stand():
    measured = asyncio.run(mean_losses(pinned="m-1"))
    assert keeps(ALPHA, measured), measured


def test_without_a_pinned_model_the_budget_would_be_broken():
    measured = asyncio.run(mean_losses(pinned=None))
    assert not keeps(ALPHA, measured), measured


def test_a_model_pinned_later_makes_the_certificate_stale():
    with pytest.raises(StaleCalibrationError, match="m-2"):
        asyncio.run(mean_losses(pinned="m-2"))
