import numpy as np
import pytest

from conformal_arbitrage.core.chains import (
    NO_ANSWER,
    answer_numbers,
    confidence_logits,
    feature_count,
    fit_ridge,
    fit_ridge_logistic,
    linear,
    next_actions,
    probability,
    stage_features,
)


def rows(seed=0, n=300, models=3):
    rng = np.random.default_rng(seed)
    confidence = rng.random((n, models))
    confidence[rng.random((n, models)) < 0.05] = np.nan
    return rng, confidence, rng.integers(-1, 3, (n, models))


def test_one_row_alone_gives_the_same_bits_as_among_others():
    rng, confidence, answers = rows(n=2000)
    features, _ = stage_features(confidence, answers, (0, 2), 2)
    coefficients = rng.standard_normal((5, features.shape[1]))
    together, risks = linear(features, coefficients[:, None]), probability(features, coefficients[0])
    for k in range(len(confidence)):
        alone, _ = stage_features(confidence[[k]], answers[[k]], (0, 2), 2)
        assert np.array_equal(alone[0], features[k])
        assert np.array_equal(linear(alone, coefficients[:, None])[:, 0], together[:, k])
        assert probability(alone, coefficients[0])[0] == risks[k]


def test_features_tell_answers_and_agreement_and_no_answer_agrees_with_none():
    confidence, answers = np.array([[0.5, 0.9, 0.8], [0.5, 0.9, np.nan]]), np.array([[1, 2, 1], [-1, -1, -1]])
    (first, second), penalties = stage_features(confidence, answers, (0, 2), 2)
    a, _, b = confidence_logits(confidence[0]).tolist()
    assert first.tolist() == [1, a, 0, 1, 0, a, b, 0, 1, 0, b, 1, a, b]
    assert second[1:].tolist() == [a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert len(penalties) == len(first) == feature_count(2, 2)
    assert stage_features(confidence, answers, (), 2)[0].tolist() == [[1], [1]]
    assert [feature_count(size, 0) for size in range(4)] == [1, 2, 6, 13]


def test_answers_are_numbered_with_the_known_ones_first():
    numbers = answer_numbers([" B ", None, "c", "a", "", "C"], ("a", "b"))
    assert numbers.tolist() == [1, NO_ANSWER, 2, 0, NO_ANSWER, 2]


def test_certainty_is_told_apart_up_to_a_millionth():
    z = confidence_logits(np.array([0.0, 0.00001, 0.001, 0.999, 0.99999, 1.0]))
    assert (np.diff(z) > 0).all()
    assert z[0] == confidence_logits(np.array([0.000001]))[0]


def test_the_fits_are_the_minima_of_what_they_minimise():
    rng, confidence, answers = rows(1)
    features, penalties = stage_features(confidence, answers, (0, 1), 2)
    targets = (rng.random(len(features)) < 0.3).astype(float)
    fit = fit_ridge_logistic(features, targets, penalties)
    fitted = 1 / (1 + np.exp(-features @ fit))
    assert np.abs(features.T @ (fitted - targets) + penalties * fit).max() < 1e-5
    fit = fit_ridge(features, targets[:, None], penalties)[:, 0]
    assert np.abs(features.T @ (features @ fit - targets) + penalties * fit).max() < 1e-3


def test_a_fit_to_separable_rows_stays_finite():
    features, ones = np.column_stack([np.ones(40), np.repeat([-1.0, 1.0], 20)]), np.array([1e-3, 1.0])
    fit = fit_ridge_logistic(features, np.repeat([0.0, 1.0], 20), ones)
    assert np.isfinite(fit).all()
    assert fit[1] > 1
    assert fit_ridge_logistic(features, np.zeros(40), ones)[0] < -3
    assert np.abs(fit_ridge_logistic(features, np.repeat([0.0, 1.0], 20), 1e-12 * ones, steps=3)).max() <= 3


def test_what_costs_least_is_done_and_a_tie_asks_the_guardian():
    loss = np.array([[5.0, 1.0, np.inf], [1.5, 0.4, np.inf]])
    assert next_actions(loss, []).tolist() == [[0, 0, 0], [0, 1, 0]]
    assert next_actions(loss, [np.array([[0.5] * 3, [0.5] * 3])]).tolist() == [[2, 2, 2], [2, 1, 2]]


@pytest.mark.parametrize("column", [0, 1])
def test_confidence_alone_orders_rows_as_their_predicted_loss_does(column):
    rng, confidence, answers = rows(2, models=2)
    features, penalties = stage_features(confidence, answers, (column,), 0)
    wrong = (rng.random(len(features)) < 1 - np.nan_to_num(confidence[:, column])).astype(float)
    risks = probability(features, fit_ridge_logistic(features, wrong, penalties))
    order = np.argsort(np.nan_to_num(confidence[:, column], nan=0.5))
    assert (np.diff(risks[order]) <= 0).all()
