import numpy as np
import pytest

from conformal_arbitrage.monitoring.limits import NO_LOSS, WHOLE_LOSS, LossSums, limits_of, loss_logs

SPARSE = np.where(np.arange(400) % 13 == 0, 1.0, 0.0)
GRADED = np.where(np.arange(400) % 7 == 0, 0.25, 0.0)


@pytest.mark.parametrize(
    ("losses", "limits"),
    [
        (SPARSE, (0.039618343, 0.131210054)),
        (GRADED, (0.022802599, 0.051815687)),
        (np.zeros(400), (0.0, 0.011778444)),
        (np.zeros(0), (0.0, 1.0)),
    ],
    ids=["sparse", "graded", "none", "empty"],
)
def test_limits_have_the_values_of_the_specification(losses, limits):
    assert LossSums.of(losses).limits() == pytest.approx(limits, abs=5e-10)


def test_sums_add_up_in_any_order_and_any_batches():
    losses = np.random.default_rng(1).random(200_000)
    whole = LossSums.of(losses)
    parts = LossSums.of(losses[150_000:]).plus(LossSums.of(losses[:150_000]))
    assert whole == parts
    one = LossSums.of(np.array([0.3]))
    assert whole.plus(one, 3).plus(one, -3) == whole
    assert whole.plus(NO_LOSS, 5).count == whole.count + 5


def test_many_sets_of_sums_at_once_give_the_same_limits():
    runs = np.random.default_rng(2).random((5, 300)) * 0.1
    lower, upper = limits_of(loss_logs(runs).sum(axis=1), np.full(5, 300))
    for k in range(5):
        assert LossSums.of(runs[k]).limits() == (lower[k], upper[k])


def test_the_upper_limit_is_compared_without_computing_it():
    for losses in (SPARSE, GRADED, np.zeros(400), np.ones(400), np.zeros(0)):
        sums = LossSums.of(losses)
        upper = sums.limits()[1]
        assert sums.below(upper + 1e-9) or upper == 1
        assert not sums.below(upper - 1e-9)


def test_only_losses_leave_only_the_top():
    lower, upper = WHOLE_LOSS.plus(WHOLE_LOSS, 499).limits()
    assert lower > 0.97
    assert upper == 1
