"""One promise for a whole cascade: on every set of rows, on average, and through the certificate that a user gets."""

from dataclasses import replace
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
from conformal_arbitrage.calibration.tuning import fit_chain, stop_losses, tuning_rows
from conformal_arbitrage.core.chains import GUARDIAN
from conformal_arbitrage.scorelog.cascade import CascadeLog
from tests.cascades import KEY, world

ALPHA = Fraction(1, 5)
CHAINS = [("small",), ("small", "middle"), ("small", "middle", "large")]


def answering(certificate, log, row):
    """Return the place in the log of the model that a live query's replies lead to, asked one after the other."""
    known, (asked, following) = [], certificate.next_model([], [], id=str(log.id[row]))
    while following in log.models and following not in asked:
        known.append(log.models.index(following))
        replies = log.confidence[row, known].tolist(), log.texts[row, known].tolist()
        asked, following = certificate.next_model(*replies, id=str(log.id[row]))
    return log.models.index(following) if following in log.models else GUARDIAN


def left_out_sum(log, chain, options, certify=certify_chain):
    """Return the sum over rows of the loss of each, decided by the certificate of all others as a live query would be."""
    total, losses = 0.0, stop_losses(log, range(len(log.models)), options.loss_name, None)
    for row in range(len(log)):
        others = np.delete(np.arange(len(log)), row)
        tuned = TunedChain(chain=chain, estimates=(), tuning=np.arange(1), rest=others)
        answered_by = answering(certify(log, "0.2", options, tuned), log, row)
        total += 0.0 if answered_by == GUARDIAN else losses[row, answered_by]
    return total


def generous(log, alpha, options, tuned):
    """Plant a budget that leaves no room for the query."""
    return certify_chain(log, str(float(Fraction(alpha) + Fraction(1, len(tuned.rest) + 1)))[:15], options, tuned)


@pytest.mark.parametrize("loss", [None, "net"])
@pytest.mark.parametrize("models", CHAINS)
def test_on_every_set_of_rows_a_certified_cascade_loses_at_most_the_budget(models, loss):
    rng = np.random.default_rng(len(models))
    options = CascadeOptions(key=KEY, loss=loss, chain=models)
    chain = fit_chain(world(rng, 80), models, options.loss_name, None, gains=loss == "net")
    violations = 0
    for k in range(8):
        log = world(rng, int(rng.integers(8, 24)), guardian=0.9, prefix=f"set{k}-")
        assert left_out_sum(log, chain, options) <= ALPHA * len(log)
        violations += left_out_sum(log, chain, options, generous) > ALPHA * len(log)
    assert violations > 0, "the planted certificate must be caught"


# --- Thousands of calibrations, as a user makes them ---


def puzzles(rng, n, prefix, *, ungraded=0.0):
    """Draw questions on which the first answer says how far to trust it, and some wrong ones have no grade."""
    log = world(rng, n, skills={"small": 0.6, "middle": 0.62, "large": 0.64}, guardian=0.9, prefix=prefix)
    texts = log.texts.copy()
    wrong = log.grade[:, 0] == 0
    texts[:, 0] = np.where(rng.random(n) < 0.7, np.where(wrong, "no", "yes"), rng.choice(["yes", "no"], n))
    grade = np.where((log.grade == 0) & (rng.random(log.grade.shape) < ungraded), np.nan, log.grade)
    return replace(log, texts=texts, grade=grade)


def mean_loss(calibrate, *, runs, loss=None, n=50, seed=5, chain=CHAINS[2]):
    """Return the mean loss of new queries over many calibrations, with its standard error."""
    rng, means = np.random.default_rng(seed), []
    for k in range(runs):
        log, new = puzzles(rng, n, f"{k}-", ungraded=0.5), puzzles(rng, 30, f"new{k}-")
        means.append(apply_cascade(calibrate(log, loss, chain), new).loss.mean())
    return np.mean(means), np.std(means) / np.sqrt(runs)


def as_a_user(log, loss, chain):
    return calibrate_cascade(log, "0.1", key=KEY, chain=chain, loss=loss, missing_guardian="worst_case")


def fitted_to_the_certified_rows(log, loss, models):
    """Plant branches that were fitted on the rows that certify them."""
    options = CascadeOptions(key=KEY, loss=loss, chain=models, missing_guardian="worst_case")
    _, rest = tuning_rows(log, share=options.tuning_share, seed=0)
    chain = fit_chain(log.select(rest), models, options.loss_name, "worst_case", gains=loss == "net")
    return certify_chain(log, "0.1", options, TunedChain(chain=chain, estimates=(), tuning=np.arange(1), rest=rest))


def missing_grades_forgiven(log, loss, chain):
    """Plant a log whose missing outcomes count nothing."""
    forgiven: CascadeLog = replace(log, grade=np.where(np.isnan(log.grade), log.guardian_grade[:, None], log.grade))
    return as_a_user(forgiven, loss, chain)


def seldom_asked(log):
    """Return a log of which two rows in three never reached the later models."""
    unasked = (np.arange(len(log)) % 3 > 0)[:, None] & np.array([False, True, True])
    return replace(
        log, **{name: np.where(unasked, np.nan, getattr(log, name)) for name in ("confidence", "grade", "cost")}
    )


def of_models_seldom_asked(log, loss, chain):
    return as_a_user(seldom_asked(log), loss, chain)


def unasked_models_taken_for_failed(log, loss, chain):
    """Plant a log that says of models that nobody asked that they failed: nothing is lost where they are passed over."""
    partial = seldom_asked(log)
    return as_a_user(replace(partial, cost=np.nan_to_num(partial.cost)), loss, chain)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("calibrate", "loss", "chain"),
    [(as_a_user, None, CHAINS[2]), (as_a_user, "net", CHAINS[1]), (of_models_seldom_asked, None, CHAINS[2])],
)
def test_over_thousands_of_calibrations_a_cascade_keeps_its_budget(calibrate, loss, chain):
    mean, error = mean_loss(calibrate, runs=2000, loss=loss, chain=chain)
    assert 0.03 < mean <= 0.1 + 3 * error


@pytest.mark.proof
@pytest.mark.parametrize(
    "planted", [fitted_to_the_certified_rows, missing_grades_forgiven, unasked_models_taken_for_failed]
)
def test_the_same_trial_catches_planted_faults(planted):
    mean, error = mean_loss(planted, runs=300)
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
    assert np.mean(means) > 0.05


def test_all_models_asked_are_paid_and_the_guardian_alone_loses_nothing():
    log = world(np.random.default_rng(0), 100)
    certificate = calibrate_cascade(log, "0.05", key=KEY, chain=("small",))
    decisions = apply_cascade(certificate, log)
    deferred = decisions.answered_by == GUARDIAN
    assert deferred.any()
    assert (decisions.cost[deferred] >= 1).all()
    assert (decisions.loss[deferred] == 0).all()
