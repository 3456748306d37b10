"""An order by loss per dollar: exact like any order fixed on other rows, cheaper where costs differ, else refused."""

import numpy as np
import pytest

from conformal_arbitrage import OptionError, ScoreLog, Usage, calibrate, learn, verify
from conformal_arbitrage.calibration.cost_order import cost_predictor

KEY = b"k" * 32


def world(n=2000, seed=0, *, spread=1.2, unknown=0, tokens=True, cost=True):
    """Return a log whose Guardian costs as many dollars as the Primary's answer has tokens, more or less."""
    rng = np.random.default_rng(seed)
    length = np.round(np.exp(rng.normal(4, spread, n)))
    confidence = rng.random(n)
    wrong = rng.random(n) < 0.6 * (1 - confidence)
    length[:unknown] = np.nan
    return ScoreLog.from_router(
        confidence=confidence, primary_grade=1.0 - wrong, guardian_grade=np.ones(n), id=[f"{seed}-{k}" for k in range(n)],
        primary_usage=Usage(input_tokens=np.full(n, 20.0), output_tokens=length) if tokens else None,
        guardian_usage=Usage(cost=1.0 + np.nan_to_num(length, nan=55.0)) if cost else None,
    )  # fmt: skip


def dollars(log):
    """Return what deferrals cost under a certificate, and the loss of what it keeps, on rows that it has not seen."""
    half = len(log) // 2
    rest = log.select(np.arange(half, len(log)))
    certificate = calibrate(log.select(np.arange(half)), 0.1, boundary="random", key=KEY)
    deferred = certificate.apply(rest).deferred
    return (rest.guardian_usage.cost * deferred).mean(), (1 - rest.guardian[1::2])[~deferred].sum() / len(rest)


def test_the_same_budget_costs_fewer_dollars_where_costs_differ():
    by_risk, by_cost = (np.mean([dollars(learn(world(4000, seed), order=order).scored) for seed in range(6)], axis=0)
                        for order in ("risk", "cost"))  # fmt: skip
    assert by_cost[0] < 0.9 * by_risk[0]
    assert by_cost[1] <= 0.1 + 3 * 0.005


def test_new_rows_are_scored_as_those_of_the_log_were():
    log = world()
    learned = learn(log, order="cost")
    place = {name: k for k, name in enumerate(log.id.tolist())}
    rows = log.select([place[name] for name in learned.scored.id.tolist()])
    assert learned.confidence(rows) == pytest.approx(learned.scored.primary[1::2])
    assert learned.costs.variation > 0.4
    assert verify(calibrate(learned.scored, 0.1), learned.scored)
    assert learn(log).costs is None


def test_rows_without_token_counts_have_the_mean_cost():
    log = world(unknown=50)
    predictor = cost_predictor(log)
    assert (predictor.relative(log)[:50] == 1.0).all()
    assert (predictor.relative(log) >= 0.1).all()


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (
            world(spread=0.2),
            r"has a coefficient of variation of 0\.\d+ on the rows to learn on, and it takes more than 0.4",
        ),
        (world(cost=False), "needs the Guardian's cost of each row"),
        (world(tokens=False), "and the Primary's tokens"),
    ],
)
def test_where_it_cannot_pay_it_is_refused_with_the_reason(log, why):
    with pytest.raises(OptionError, match=why):
        learn(log, order="cost")


def test_an_unknown_order_is_refused():
    with pytest.raises(OptionError, match="order must be 'risk' or 'cost'; got 'size'"):
        learn(world(), order="size")
