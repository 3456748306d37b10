"""A budget that was chosen on the looking part is kept if the other rows certify it; on the same rows it is not."""

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.collecting.renewal import BUDGETS, LookingPart
from tests.validity.simulation import keeps

pytestmark = pytest.mark.proof
ROWS, TIMES, FRESH = 150, 250, 1500
ALPHAS = np.array([float(one) for one in BUDGETS])
PART = LookingPart([b"a project's secret key of 32 b"])


def draw(rng, n):
    """Return margin and loss of each query: the Primary is wrong more often where it is less sure."""
    margin = rng.random(n)
    return margin, (rng.random(n) < 0.5 * (1 - margin)).astype(float)


def best_bargain(margin, loss):
    """Return the budget whose saving is largest for what may be lost, as someone with a slider would choose it."""
    order = np.argsort(-margin)
    lost = np.concatenate([[0.0], np.cumsum(loss[order])])
    alone = np.searchsorted(lost, ALPHAS * (len(loss) + 1) - 1, side="right") - 1
    return float(ALPHAS[np.argmax(np.maximum(alone, 0) / len(loss) - 4 * ALPHAS)])


def log_of(margin, loss):
    guardian = np.column_stack([np.ones(len(loss)), 1 - loss])
    return ScoreLog.from_arrays(np.column_stack([np.zeros(len(margin)), margin]), guardian)


def excess(*, same_rows):
    """Return mean and standard error of the loss beyond the chosen budget."""
    rng, beyond = np.random.default_rng(9), []
    for t in range(TIMES):
        margin, loss = draw(rng, ROWS)
        shown = np.array([PART.shows(f"{t}-{k}") for k in range(ROWS)])
        unseen = np.array([PART.is_unseen(f"{t}-{k}") for k in range(ROWS)])
        looked = unseen if same_rows else shown
        alpha = best_bargain(margin[looked], loss[looked])
        certificate = calibrate(log_of(margin[unseen], loss[unseen]), alpha)
        margin, loss = draw(rng, FRESH)
        threshold = np.inf if certificate.relaxation is None else certificate.relaxation
        beyond.append((loss * (margin > threshold)).mean() - alpha)
    return float(np.mean(beyond)), float(np.std(beyond, ddof=1) / TIMES**0.5)


@pytest.mark.parametrize("same_rows", [False, True])
def test_a_budget_chosen_by_looking_needs_other_rows_to_certify_it(same_rows):
    measured = excess(same_rows=same_rows)
    assert keeps(0.0, measured) is not same_rows, measured
