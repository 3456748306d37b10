import numpy as np
import pytest

from conformal_arbitrage.core.chains import (
    confidence_logits,
    fit_ridge_logistic,
    path_corners,
    path_entries,
    predicted_losses,
    stage_features,
)


def rows(seed=0, n=300, models=3):
    rng = np.random.default_rng(seed)
    confidence = rng.random((n, models))
    confidence[rng.random((n, models)) < 0.05] = np.nan
    return rng, confidence, rng.integers(-1, 3, (n, models))


def test_one_row_alone_gives_the_same_bits_as_among_others():
    _, confidence, answers = rows(n=2000)
    features = stage_features(confidence, answers, 2)
    coefficients = np.linspace(-1, 1, features.shape[1])
    together = predicted_losses(features, coefficients)
    for k in range(len(confidence)):
        alone = stage_features(confidence[[k]], answers[[k]], 2)
        assert np.array_equal(alone[0], features[k])
        assert predicted_losses(alone, coefficients)[0] == together[k]


def test_features_tell_agreement_with_earlier_models_and_no_answer_agrees_with_none():
    confidence, answers = np.array([[0.5, 0.9, 0.8], [0.5, 0.9, np.nan]]), np.array([[1, 2, 1], [-1, -1, -1]])
    first, second = stage_features(confidence, answers, 2).tolist()
    z = confidence_logits(confidence[0]).tolist()
    assert first == [1, *z, 1, 0, z[0], 0]
    assert second[3:] == [0, 0, 0, 0, 0]
    assert stage_features(confidence, answers, 0).shape == (2, 2)


def test_certainty_is_told_apart_up_to_a_millionth():
    z = confidence_logits(np.array([0.0, 0.999, 0.99999, 1.0]))
    assert (np.diff(z) > 0).all()
    assert z[0] == confidence_logits(np.array([0.001]))[0]


def test_the_fit_is_the_minimum_of_the_penalised_likelihood():
    rng, confidence, answers = rows(1)
    features = stage_features(confidence, answers, 1)
    targets = (rng.random(len(features)) < 0.3).astype(float)
    fit = fit_ridge_logistic(features, targets)
    fitted = 1 / (1 + np.exp(-features @ fit))
    slope = features.T @ (fitted - targets) + np.array([1e-3, 1, 1, 1, 1]) * fit
    assert np.abs(slope).max() < 1e-6


def test_a_fit_to_separable_rows_stays_finite():
    features = np.column_stack([np.ones(40), np.repeat([-1.0, 1.0], 20)])
    fit = fit_ridge_logistic(features, np.repeat([0.0, 1.0], 20))
    assert np.isfinite(fit).all()
    assert fit[1] > 1
    assert fit_ridge_logistic(features, np.zeros(40))[0] < -3
    assert np.abs(fit_ridge_logistic(features, np.repeat([0.0, 1.0], 20), penalty=1e-12, steps=3)).max() <= 3


def test_corners_start_with_never_and_thresholds_never_fall():
    rng, confidence, _ = rows(2, models=2)
    risks = np.where(np.isnan(confidence), np.nan, 1 - confidence)
    losses = (rng.random(risks.shape) < np.nan_to_num(risks)).astype(float)
    costs = np.cumsum(np.tile([0.1, 0.2, 1.0], (len(risks), 1)), axis=1)
    corners = path_corners(risks, losses, costs, 24)
    assert (corners[0] == 0).all()
    assert (np.diff(corners, axis=0) >= 0).all()
    assert (np.diff(corners, axis=0) > 0).any(axis=1).all()
    assert corners[-1, 0] == 1, "the cheapest policy stops at the first model"


def test_a_stage_that_never_answers_is_never_entered():
    risks = np.column_stack([np.linspace(0.1, 0.9, 50), np.full(50, np.nan)])
    losses, costs = np.zeros((50, 2)), np.cumsum(np.tile([0.1, 0.2, 1.0], (50, 1)), axis=1)
    entries = path_entries(risks, path_corners(risks, losses, costs, 24))
    assert np.isinf(entries[:, 1]).all()
    assert np.isfinite(entries[:, 0]).all()


def test_models_that_cost_as_much_as_the_guardian_give_a_path_without_corners():
    risks = np.linspace(0.1, 0.9, 50)[:, None]
    corners = path_corners(risks, np.ones((50, 1)), np.tile([2.0, 2.0], (50, 1)), 24)
    assert corners.tolist() == [[0.0]]
    assert np.isinf(path_entries(risks, corners)).all()


def test_entries_interpolate_between_corners():
    corners = np.array([[0.0, 0.0], [0.2, 0.0], [0.2, 0.5], [1.0, 0.5]])
    risks = np.array([[0.0, 0.25], [0.1, 0.5], [0.2, 0.6], [0.6, np.nan], [1.0, 0.0]])
    entries = path_entries(risks, corners)
    assert entries[:, 0] == pytest.approx([0, 0.5, 1, 2.5, 3])
    assert entries[:3, 1] == pytest.approx([1.5, 2, np.inf])
    assert np.isinf(entries[3, 1])
    assert entries[4, 1] == 0
