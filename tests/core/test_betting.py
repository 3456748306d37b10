import numpy as np
import pytest

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.core.bounds import accepts, shared_bets
from conformal_arbitrage.core.risk import RiskCurve

GRADED = np.where(np.arange(400) % 7 == 0, 0.25, 0.0)


def test_bets_have_the_values_of_the_specification():
    bets = shared_bets(GRADED, 0.1, 0.1)
    assert bets[[0, 1, 8, 399]] == pytest.approx([0.357661004, 0.420858563, 0.468288179, 0.810118738], abs=5e-10)


@pytest.mark.parametrize("line", [0.05, 0.06, 0.07])
def test_the_graded_log_of_the_specification_is_accepted(line):
    assert accepts(GRADED, shared_bets(GRADED, line, 0.1), line, 0.1)


def test_acceptance_is_monotone_in_the_losses():
    rng = np.random.default_rng(0)
    first = rng.random(300) * 0.2
    bets = shared_bets(first, 0.1, 0.1)
    assert not accepts(first + 0.1, bets, 0.1, 0.1)
    lower = [accepts(first * share, bets, 0.1, 0.1) for share in np.linspace(1, 0, 40)]
    assert lower == sorted(lower)
    assert lower[-1]


def test_a_bet_never_costs_the_whole_wealth():
    bets = shared_bets(np.zeros(3), 0.4, 1e-9)
    assert (bets * 0.6 < 1).all()
    assert not accepts(np.ones(3), bets, 0.4, 0.1)


@pytest.mark.parametrize("sees", ["all", "candidates"])
@pytest.mark.parametrize("random", [False, True])
def test_row_losses_sum_up_to_the_curve(sees, random):
    rng = np.random.default_rng(1)
    primary, guardian = np.round(rng.random((200, 4)), 1), rng.random((200, 4))
    log = ScoreLog.from_arrays(primary, guardian)
    u = rng.random(200) if random else None
    curve = RiskCurve.from_log(log, guardian_sees=sees, u=u)
    for k, breakpoint_ in enumerate(curve.breakpoints.tolist()):
        losses = curve.row_losses(breakpoint_, None if u is None else float(curve.boundary_u[k]))
        assert losses.sum() == curve.totals[k]
        assert losses.min() >= 0
