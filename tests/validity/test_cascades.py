"""One promise for a whole cascade: on every set of rows, on average, and through the certificate that a user gets."""

from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage.calibration.cascade import (
    CascadeOptions,
    TunedChain,
    apply_cascade,
    calibrate_cascade,
    certify_chain,
)
from conformal_arbitrage.calibration.tuning import fit_chain, stop_losses
from conformal_arbitrage.core.chains import GUARDIAN
from tests.cascades import KEY, world

ALPHA = Fraction(1, 5)
CHAINS = [("small",), ("small", "middle"), ("small", "middle", "large")]


def left_out_sum(log, chain, options, certify=certify_chain):
    """Return the sum over rows of the loss of each, decided by the certificate of all others as a live query would be."""
    total, places = 0.0, log.columns_of(chain.models)
    losses = stop_losses(log, places, options.loss_name, None)
    for j in range(len(log)):
        others = np.delete(np.arange(len(log)), j)
        tuned = TunedChain(chain=chain, estimates=(), tuning=np.arange(1), rest=others)
        certificate = certify(log, "0.2", options, tuned)
        for stage in range(len(places)):
            seen = places[: stage + 1]
            if certificate.stops(log.confidence[j, seen].tolist(), log.texts[j, seen].tolist(), id=str(log.id[j])):
                total += losses[j, stage]
                break
    return total


def generous(log, alpha, options, tuned):
    """Plant a budget that leaves no room for the query."""
    return certify_chain(log, str(float(Fraction(alpha) + Fraction(1, len(tuned.rest) + 1)))[:15], options, tuned)


@pytest.mark.parametrize("loss", [None, "net"])
@pytest.mark.parametrize("models", CHAINS)
def test_on_every_set_of_rows_a_certified_cascade_loses_at_most_the_budget(models, loss):
    rng = np.random.default_rng(len(models))
    options = CascadeOptions(key=KEY, loss=loss, chain=models)
    chain = fit_chain(world(rng, 80), models, options.loss_name, None)
    violations = 0
    for k in range(8):
        log = world(rng, int(rng.integers(8, 24)), guardian=0.9, prefix=f"set{k}-")
        assert left_out_sum(log, chain, options) <= ALPHA * len(log)
        violations += left_out_sum(log, chain, options, generous) > ALPHA * len(log)
    assert violations > 0, "the planted certificate must be caught"


def mean_loss(tuned_on_others, *, runs=200, n=29):
    """Return the mean loss of new queries over many calibrations of a chain, with its standard error."""
    rng, means = np.random.default_rng(5), []
    options = CascadeOptions(key=KEY, chain=("small", "middle"))
    for k in range(runs):
        log, new = world(rng, n, guardian=0.9, prefix=f"{k}-"), world(rng, 40, guardian=0.9, prefix=f"new{k}-")
        others = world(rng, n, guardian=0.9, prefix=f"other{k}-") if tuned_on_others else log
        chain = fit_chain(others, ("small", "middle"), options.loss_name, None)
        tuned = TunedChain(chain=chain, estimates=(), tuning=np.arange(1), rest=np.arange(n))
        means.append(apply_cascade(certify_chain(log, "0.1", options, tuned), new).loss.mean())
    return np.mean(means), np.std(means) / np.sqrt(runs)


def test_a_cascade_keeps_its_budget_on_average_and_a_path_fitted_to_the_same_rows_is_caught():
    mean, error = mean_loss(tuned_on_others=True)
    assert 0.07 < mean <= 0.1 + 3 * error
    mean, error = mean_loss(tuned_on_others=False)
    assert mean > 0.1 + 3 * error


@pytest.mark.proof
@pytest.mark.parametrize("loss", [None, "net"])
def test_a_chosen_cascade_keeps_its_budget_on_average(loss):
    rng, means, skills = np.random.default_rng(7), [], {"small": 0.6, "middle": 0.62}
    for k in range(80):
        log, new = world(rng, 90, skills=skills, prefix=f"{k}-"), world(rng, 60, skills=skills, prefix=f"new{k}-")
        means.append(apply_cascade(calibrate_cascade(log, "0.1", key=KEY, loss=loss), new).loss.mean())
    assert 0.05 < np.mean(means) <= 0.1 + 3 * np.std(means) / np.sqrt(len(means))


@pytest.mark.proof
def test_graded_losses_rounded_by_a_draw_keep_the_budget():
    rng, means = np.random.default_rng(6), []
    for k in range(150):
        log = world(rng, 80, graded=True, prefix=f"{k}-")
        certificate = calibrate_cascade(log, "0.15", key=KEY, chain=("small", "middle"))
        means.append(apply_cascade(certificate, world(rng, 40, graded=True, prefix=f"new{k}-")).loss.mean())
    assert np.mean(means) <= 0.15 + 3 * np.std(means) / np.sqrt(len(means))
    assert np.mean(means) > 0.09


def test_guardian_is_the_last_of_all_models():
    log = world(np.random.default_rng(0), 100)
    certificate = calibrate_cascade(log, "0.1", key=KEY, chain=("small",))
    decisions = apply_cascade(certificate, log)
    asked = decisions.cost[decisions.answered_by == GUARDIAN]
    assert (asked > 1).all(), "both are paid"
    assert (decisions.loss[decisions.answered_by == GUARDIAN] == 0).all()
