import math
from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage import OptionError
from conformal_arbitrage.core.features import (
    STRENGTHS,
    FeatureRows,
    FeatureSet,
    decide_budgets,
    decide_learned,
    feature_matrix,
    fit_ridges,
    learned_rule,
    left_out_kept,
    query_features,
    spendable_losses,
    unseen_groups,
)
from conformal_arbitrage.core.features import _left_out_scores as left_out_scores


def world(rng, n, *, discrete, columns=4):
    """Return features, losses, draws and margins of n rows; the loss depends on the features."""
    features = rng.integers(0, 2, (n, columns)).astype(float) if discrete else rng.normal(size=(n, columns))
    features[:, 0] = 1.0
    margin = rng.integers(0, 4, n) / 3 if discrete else rng.random(n)
    loss = (rng.random(n) < 1 / (1 + np.exp(-features[:, 1] + 2 * margin))).astype(np.int64)
    return features, loss, rng.random(n), margin


PENALTIES = np.array([0.001, 0.1, 1.0, 1.0])


def kept_without(rows, features, loss, u, margin, query, alpha, **options):
    """Decide one row by the fit to some others."""
    used = rows[margin[rows] > 0]
    fits = fit_ridges(features[used], PENALTIES, loss[used], u[used], margin[used], strengths=STRENGTHS)
    one = np.array([query])
    budget = spendable_losses(alpha, Fraction(1), len(rows))
    return bool(decide_learned(fits, features[one], u[one], margin[one], budget=budget, **options).kept[0])


def left_out_losses(features, loss, u, margin, alpha, decide=kept_without):
    rows = np.arange(len(loss))
    return sum(int(loss[j]) * decide(rows[rows != j], features, loss, u, margin, j, alpha) for j in rows)


def in_sample(rows, features, loss, u, margin, query, alpha):
    """Plant scores by the fit to all rows, each row its own loss included, and the query left out of it."""
    used = rows[margin[rows] > 0]
    fits = fit_ridges(features[used], PENALTIES, loss[used], u[used], margin[used], strengths=(1.0,))
    own = features[query] @ fits.rotation @ fits.weights[0]
    return margin[query] > 0 and loss[used][fits.fitted[0] < own].sum() + 1 <= alpha * (len(rows) + 1)


def imputed_at_zero(rows, features, loss, u, margin, query, alpha):
    """Plant a query that counts as no loss."""
    used = rows[margin[rows] > 0]
    fits = fit_ridges(features[used], PENALTIES, loss[used], u[used], margin[used], strengths=(1.0,))
    own = features[query] @ fits.rotation @ fits.weights[0]
    left_out = fits.loss - (fits.loss - fits.fitted[0]) / (1 - fits.leverage[0])
    return margin[query] > 0 and loss[used][left_out < own].sum() <= alpha * (len(rows) + 1)


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("with_margin", [False, True])
def test_on_every_set_of_rows_the_left_out_losses_sum_to_at_most_the_budget(discrete, with_margin):
    rng = np.random.default_rng(int(discrete) + 2 * with_margin)

    def decide(*arguments):
        return kept_without(*arguments, with_margin=with_margin)

    for _ in range(60):
        n, alpha = int(rng.integers(8, 24)), Fraction(int(rng.integers(1, 4)), 10)
        rows = world(rng, n, discrete=discrete)
        assert left_out_losses(*rows, alpha, decide) <= alpha * n, (n, alpha)


@pytest.mark.parametrize("broken", [in_sample, imputed_at_zero])
def test_broken_rules_violate_the_inequality_on_many_sets(broken):
    rng, violations = np.random.default_rng(7), 0
    for _ in range(100):
        rows = world(rng, int(rng.integers(8, 24)), discrete=False)
        violations += left_out_losses(*rows, Fraction(1, 5), broken) > Fraction(1, 5) * len(rows[1])
    assert violations > 10


def test_the_closed_form_equals_refitting_without_each_row_and_with_the_query():
    rng = np.random.default_rng(3)
    features, loss, u, margin = world(rng, 40, discrete=False)
    fits = fit_ridges(features[:39], PENALTIES, loss[:39], u[:39], margin[:39], strengths=(5.0,))
    scores, own = left_out_scores(fits, 0, features[39:], None, [])
    with_query = np.append(loss[:39], 1)
    for left_out in range(39):
        rows = np.arange(40) != left_out
        x, y = features[rows], with_query[rows]
        weights = np.linalg.solve(x.T @ x + 5 * np.diag(PENALTIES), x.T @ y)
        assert scores[0, left_out] == pytest.approx(features[left_out] @ weights, abs=1e-9)
    weights = np.linalg.solve(features[:39].T @ features[:39] + 5 * np.diag(PENALTIES), features[:39].T @ loss[:39])
    assert own[0] == pytest.approx(features[39] @ weights, abs=1e-9)


def test_an_unseen_group_is_a_column_that_only_the_query_has():
    rng = np.random.default_rng(4)
    features, loss, u, margin = world(rng, 30, discrete=False)
    wide = np.column_stack([features, np.zeros(30)])
    wide[29, 4] = 1.0
    explicit = fit_ridges(wide[:29], np.append(PENALTIES, 1.0), loss[:29], u[:29], margin[:29], strengths=(5.0,))
    implied = fit_ridges(features[:29], PENALTIES, loss[:29], u[:29], margin[:29], strengths=(5.0,))
    expected, own = left_out_scores(explicit, 0, wide[29:], None, [])
    scores, same = left_out_scores(implied, 0, features[29:], np.ones(1), [])
    assert scores == pytest.approx(expected, abs=2e-9)
    assert same == pytest.approx(own, abs=2e-9)


def test_rows_equal_in_everything_are_told_apart_by_their_draws_only():
    rng = np.random.default_rng(5)
    n, kept = 60, 0
    for _ in range(200):
        loss, u = (rng.random(n + 1) < 0.4).astype(np.int64), rng.random(n + 1)
        features, margin = np.ones((n + 1, 4)), np.full(n + 1, 0.5)
        fits = fit_ridges(features[:n], PENALTIES, loss[:n], u[:n], margin[:n], strengths=STRENGTHS)
        budget = spendable_losses(Fraction(1, 10), Fraction(1), n)
        kept += int(decide_learned(fits, features[n:], u[n:], margin[n:], budget=budget).kept[0])
    assert 0.13 < kept / 200 < 0.37, "a share of about alpha over the rate of losses"


def test_no_loss_keeps_everything_and_no_budget_keeps_nothing():
    rng = np.random.default_rng(6)
    features, _, u, margin = world(rng, 20, discrete=False)
    for loss, alpha, kept in (
        (np.zeros(20, np.int64), Fraction(1, 10), 1),
        (np.ones(20, np.int64), Fraction(1, 30), 0),
    ):
        fits = fit_ridges(features, PENALTIES, loss, u, margin, strengths=STRENGTHS)
        decided = decide_learned(fits, features, u, margin, budget=spendable_losses(alpha, Fraction(1), 20))
        assert decided.kept.mean() == kept
    assert decide_learned(fits, features[:0], u[:0], margin[:0], budget=1).kept.size == 0


def test_many_queries_at_once_decide_as_one_by_one():
    rng = np.random.default_rng(8)
    features, loss, u, margin = world(rng, 160, discrete=True)
    used = np.flatnonzero(margin[:60] > 0)
    fits = fit_ridges(features[used], PENALTIES, loss[used], u[used], margin[used], strengths=STRENGTHS)
    rest = np.arange(60, 160)
    together = decide_learned(fits, features[rest], u[rest], margin[rest], budget=5)
    for k, row in enumerate(rest):
        alone = decide_learned(fits, features[[row]], u[[row]], margin[[row]], budget=5)
        assert (alone.kept[0], alone.candidate[0], alone.count[0]) == (
            together.kept[k], together.candidate[k], together.count[k],
        )  # fmt: skip


def test_features_are_fixed_transforms_of_one_row():
    rows = FeatureRows(
        margin=np.array([0.8, 0.0, 2.0]),
        top=np.array([1, 0, 12]),
        scores=np.array([[0.1, 0.9], [0.5, 0.5], [-1.0, 0.0]]),
        group=["law", "art", ""],
        tokens=np.array([49.0, np.nan, 500.0]),
    )
    features = FeatureSet(menu_size=2, groups=("law",), tokens=True)
    matrix = feature_matrix(features, rows)
    assert matrix.shape == (3, len(features.penalties()))
    assert matrix[0, 1] == pytest.approx(math.log(4) / 3)
    assert matrix[1, 1] == pytest.approx(math.log(1e-3 / (1 - 1e-3)) / 3)
    assert matrix[0, 8:18].tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert not matrix[2, 8:28].any(), "a position past the last column has none"
    assert not matrix[2, 28:42].any(), "scores that are no probabilities have no features"
    assert matrix[:, -3].tolist() == [1, 0, 0]
    assert matrix[0, -2] == pytest.approx(0.0)
    assert matrix[1, -2:].tolist() == [0, 0]
    assert unseen_groups(features, rows).tolist() == [0, 1, 0]
    assert unseen_groups(FeatureSet(), rows).tolist() == [1, 1, 0], (
        "where no logged row has a group, every group is new"
    )
    for k in range(3):
        one = FeatureRows(
            margin=rows.margin[[k]], top=rows.top[[k]], scores=rows.scores[[k]], group=[rows.group[k]],
            tokens=rows.tokens[[k]],
        )  # fmt: skip
        assert feature_matrix(features, one).tobytes() == matrix[[k]].tobytes()


def test_features_that_are_not_known_are_zero():
    bare = FeatureRows(margin=np.array([0.5]), top=np.array([0]))
    features = FeatureSet(menu_size=3, groups=("a",), tokens=True)
    matrix = feature_matrix(features, bare)
    assert not matrix[0, 28:].any()
    assert feature_matrix(FeatureSet(), bare).shape == (1, 28)


def test_a_fixed_menu_is_small():
    with pytest.raises(OptionError, match="menu_size must lie in 2 to 8; got 9"):
        FeatureSet(menu_size=9)


def test_a_new_group_is_no_copy_of_a_row_without_a_group():
    """A query with a column of its own has the features of a row without a group, yet the two are not alike."""
    features, groups = np.array([[1.0], [1.0], [1.0], [0.0]]), ["a", "", "b", ""]
    loss, u, margin = np.array([1, 1, 0, 0]), np.array([0.4, 0.3, 0.2, 0.1]), np.full(4, 0.5)
    kept = 0
    for j in range(4):
        others = [i for i in range(4) if i != j]
        known = [name for i, name in enumerate(groups) if i != j and name]
        one_hot = np.array([[float(groups[i] == name) for name in known] for i in range(4)])
        wide = np.column_stack([features, one_hot])
        fits = fit_ridges(
            wide[others], np.ones(wide.shape[1]), loss[others], u[others], margin[others], strengths=(1.0,)
        )
        new = np.array([float(groups[j] != "" and groups[j] not in known)])
        decided = decide_learned(fits, wide[[j]], u[[j]], margin[[j]], budget=1, unseen=new, with_margin=False)
        kept += int(loss[j] * decided.kept[0])
    assert kept <= 1


def test_scores_on_half_a_tick_tie_by_symmetry():
    """Classes of 1,024 rows have scores that lie exactly between two decimals of the ninth digit."""
    rng, n = np.random.default_rng(3), 2048
    features = np.repeat(np.eye(2), n // 2, axis=0)
    for _ in range(6):
        loss = np.zeros(n, dtype=np.int64)
        for half in (slice(0, n // 2), slice(n // 2, n)):
            loss[half][rng.permutation(n // 2)[:41]] = 1
        u, margin, budget = rng.random(n), np.full(n, 0.5), 30
        kept = 0
        for j in np.flatnonzero(loss):
            others = np.arange(n) != j
            fits = fit_ridges(features[others], np.ones(2), loss[others], u[others], margin[others], strengths=(1.0,))
            one = [j]
            kept += decide_learned(fits, features[one], u[one], margin[one], budget=budget, with_margin=False).kept[0]
        assert kept <= budget


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize(("gains", "answers"), [(False, False), (True, False), (True, True)])
def test_one_query_at_a_time_is_decided_as_many_at_once(discrete, with_margin, gains, answers):
    rng = np.random.default_rng(11)
    features, loss, u, margin = world(rng, 160, discrete=discrete)
    loss = np.where(rng.random(160) < 0.4, -loss, loss) if gains else loss
    used, rest = np.flatnonzero(margin[:60] > 0), np.flatnonzero(margin[60:] > 0) + 60
    said = rng.integers(-1, 3, 160)
    fits = fit_ridges(
        features[used], PENALTIES, loss[used], u[used], margin[used], strengths=STRENGTHS,
        answer=said[used] if answers else None,
    )  # fmt: skip
    new = (rng.random(160) < 0.2).astype(float)
    queries = np.concatenate([rest, used])  # logged rows too: each meets its own draw again
    for budget in (1, 5, max(1, int(loss[used].sum())), 100):
        together = decide_budgets(
            fits, features[queries], u[queries], margin[queries], budgets=[budget], unseen=new[queries],
            answer=said[queries], with_margin=with_margin,
        )[0]  # fmt: skip
        rule = learned_rule(fits, features[used], budget=budget, with_margin=with_margin)
        for k, row in enumerate(queries):
            places = np.flatnonzero(features[row]).tolist()
            values, new_group = features[row, places].tolist(), bool(new[row])
            one = rule.decide(places, values, u[row], margin[row], unseen=new_group, answer=said[row])
            expected = (together.kept[k], together.candidate[k], together.count[k])
            assert (one.kept, one.candidate, one.kept_rows) == expected, (budget, row)
            assert one.score == pytest.approx(together.score[k], abs=1e-9)


def test_several_budgets_are_decided_as_each_alone():
    rng = np.random.default_rng(12)
    features, loss, u, margin = world(rng, 120, discrete=True)
    used = np.flatnonzero(margin[:60] > 0)
    fits = fit_ridges(features[used], PENALTIES, loss[used], u[used], margin[used], strengths=STRENGTHS)
    several = decide_budgets(fits, features[60:], u[60:], margin[60:], budgets=[2, 6])
    for budget, one in zip([2, 6], several, strict=True):
        alone = decide_learned(fits, features[60:], u[60:], margin[60:], budget=budget)
        assert (one.kept == alone.kept).all()
        assert (one.count == alone.count).all()


def test_a_log_decides_its_own_rows_with_each_left_out_where_signs_of_passed_rows_count():
    rng = np.random.default_rng(15)
    features, loss, u, margin = world(rng, 40, discrete=False)
    loss, said = np.where(rng.random(40) < 0.3, -loss, loss), rng.integers(0, 2, 40)
    fits = fit_ridges(features, PENALTIES, loss, u, margin, strengths=STRENGTHS, answer=said)
    kept = left_out_kept([fits], budget=6, with_margin=False)
    for j in np.flatnonzero(loss):
        rows, one = np.delete(np.arange(40), j), [j]
        others = fit_ridges(
            features[rows], PENALTIES, loss[rows], u[rows], margin[rows], strengths=STRENGTHS, answer=said[rows]
        )
        [decided] = decide_budgets(
            others, features[one], u[one], margin[one], budgets=[6], answer=said[one], with_margin=False
        )
        assert decided.kept[0] == kept[j]
    assert loss[kept].sum() <= 6


def test_a_log_decides_its_own_rows_with_each_left_out():
    rng = np.random.default_rng(13)
    features, loss, u, margin = world(rng, 40, discrete=False)
    fits = fit_ridges(features, PENALTIES, loss, u, margin, strengths=STRENGTHS)
    kept = left_out_kept([fits], budget=6, with_margin=True)
    by_others = [
        kept_without(np.delete(np.arange(40), j), features, loss, u, margin, j, Fraction(6, 40)) for j in range(40)
    ]
    assert [k for k in np.flatnonzero(loss) if kept[k]] == [k for k in np.flatnonzero(loss) if by_others[k]]
    assert loss[kept].sum() == 6
    assert left_out_kept([fits], budget=40, with_margin=False).all()


def test_features_of_one_query_are_those_of_a_log_to_the_bit():
    rng = np.random.default_rng(14)
    n, size = 200, 4
    scores = np.round(rng.random((n, size)) * rng.choice([-1, 0, 1, 1, 1], (n, 1)), rng.integers(1, 4))
    margin, top = np.round(rng.random(n), 3), rng.integers(0, size, n)
    group, tokens = rng.choice(["a", "b", "c", ""], n).tolist(), rng.integers(0, 500, n).astype(float)
    text = rng.integers(-1, 2, (n, 3)).astype(float)
    rows = FeatureRows(margin=margin, top=top, scores=scores, group=group, tokens=tokens, text=text)
    everything = FeatureSet(menu_size=size, groups=("a", "b"), tokens=True, text=3)
    for features in (everything, FeatureSet(), FeatureSet(tokens=True)):
        matrix = feature_matrix(features, rows)
        for k in range(n):
            words = text[k].tolist() if features.text else ()
            places, values = query_features(
                features, float(margin[k]), int(top[k]), scores[k].tolist(), group[k] or None, float(tokens[k]), words
            )
            row = np.zeros(matrix.shape[1])
            row[places] = values
            assert row.tobytes() == matrix[k].tobytes()
    assert len(query_features(FeatureSet(tokens=True), 0.5, 12, [], None, None)[0]) == 2, "no place, no tokens"
