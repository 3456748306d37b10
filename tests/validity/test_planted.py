"""Rules that look right and are not: each breaks the inequality that its exact counterpart keeps on the same sets of rows.

The counterparts have tests of their own: tests/core/test_learned.py (scores from all rows, a query without a loss),
tests/core/test_paths.py and tests/validity/test_net.py (last passage).
"""

from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage.core import features as ridge
from conformal_arbitrage.core.chains import PathStop, policies_of
from conformal_arbitrage.core.features import STRENGTHS, decide_learned, fit_ridges, spendable_losses

pytestmark = pytest.mark.proof
PENALTIES = np.array([0.001, 0.1, 1.0, 1.0])


def net_world(rng, n):
    """Return margins in few classes, losses of -1, 0 and 1, and draws."""
    return rng.integers(1, 4, n), rng.choice([-1, 0, 1], n, p=[0.4, 0.2, 0.4]), rng.random(n)


def first_passage(margin, loss, u, alpha, query, *, room=1, classes=False):
    """Keep the query if every prefix sum before it leaves room; with `classes`, tied rows are moved together."""
    others = np.arange(len(loss)) != query
    limit = alpha * len(loss) - room
    if classes:
        ends = [loss[others & (margin >= end)].sum() for end in np.unique(margin) if end >= margin[query]]
        return limit >= 0 and all(total <= limit for total in ends)
    before = others & ((margin > margin[query]) | ((margin == margin[query]) & (u < u[query])))
    order = np.lexsort((u[before], -margin[before]))
    return all(total <= limit for total in [0, *np.cumsum(loss[before][order])])


def net_violations(**planted):
    rng, alpha, found = np.random.default_rng(2), Fraction(1, 10), 0
    for _ in range(300):
        margin, loss, u = net_world(rng, int(rng.integers(8, 30)))
        kept = [first_passage(margin, loss, u, alpha, j, **planted) for j in range(len(loss))]
        found += int(loss[kept].sum()) > alpha * len(loss)
    return found


def test_walking_ties_one_by_one_with_room_for_the_query_never_breaks_the_budget():
    assert net_violations() == 0


@pytest.mark.parametrize("planted", [{"classes": True}, {"room": 0}], ids=["ties moved together", "no room"])
def test_moving_ties_together_or_leaving_no_room_is_caught(planted):
    assert net_violations(**planted) > 20


def unlimited_walk(losses, u, alpha):
    """Walk a path as `calibrate_path` does, without refusing any loss."""
    changes = np.diff(losses, axis=0, prepend=0)
    total = 0
    for place, draw, row in sorted((place + 1, u[row], row) for place, row in np.argwhere(changes).tolist()):
        total += int(changes[place - 1, row])
        if total > alpha * (len(u) + 1) - 1:
            return PathStop(place, float(draw))
    return PathStop(len(losses), 1.0)


def left_out_path_loss(losses, u, alpha):
    """Return the sum over rows of their loss where the walk over all other rows stops."""
    total = 0
    for j in range(len(u)):
        others = np.arange(len(u)) != j
        [place] = policies_of(unlimited_walk(losses[:, others], u[others], alpha), u[[j]])
        total += int(losses[place - 1, j]) if place else 0
    return total


def test_losses_below_minus_the_bound_break_the_walk_so_their_refusal_is_needed():
    """Such sets are rare, about 1 in 15,000 small ones; this is one, of five rows and three policies."""
    losses = np.array([[-2, 0, -2, 0, 0], [-1, -2, 0, -1, 1], [-2, 1, 1, 1, 0]])
    u, alpha = np.array([0.2, 0.5, 0.1, 0.4, 0.3]), Fraction(1, 5)
    assert left_out_path_loss(losses, u, alpha) == 2 > alpha * 5
    assert left_out_path_loss(np.maximum(losses, -1), u, alpha) <= alpha * 5


def tied_violations():
    """Count sets of rows that share their features with others, in which more is lost than the budget allows."""
    rng, alpha, found = np.random.default_rng(1), Fraction(1, 5), 0
    for _ in range(80):
        n = int(rng.integers(12, 40))
        features = np.column_stack([np.ones(n), rng.integers(0, 2, (n, 3)) / [1, 3, 3]])
        loss, u = (rng.random(n) < 0.4).astype(np.int64), rng.random(n)
        kept = 0
        for j in np.flatnonzero(loss):
            rows, one = np.delete(np.arange(n), j), [j]
            fits = fit_ridges(features[rows], PENALTIES, loss[rows], u[rows], np.full(n - 1, 0.5), strengths=STRENGTHS)
            budget = spendable_losses(alpha, Fraction(1), n - 1)
            decided = decide_learned(fits, features[one], u[one], np.array([0.5]), budget=budget, with_margin=False)
            kept += int(decided.kept[0])
        found += kept > alpha * n
    return found


def test_float_noise_among_equal_rows_is_caught_and_rounding_removes_it(monkeypatch):
    assert tied_violations() == 0
    monkeypatch.setattr(ridge, "rounded", lambda values: values)
    monkeypatch.setattr(ridge, "_copies", lambda fits, features: [])
    assert tied_violations() > 0


def sized_violations(*, inferred):
    """Count violations among sets with one row of another size, whose further columns are zero."""
    rng, alpha, found = np.random.default_rng(8), Fraction(1, 5), 0
    for _ in range(150):
        n = int(rng.integers(8, 16))
        features = np.column_stack([np.ones(n), rng.normal(size=(n, 3))])
        odd = int(rng.integers(n))
        features[odd, 2:] = 0.0
        loss = (rng.random(n) < 1 / (1 + np.exp(-2 * features[:, 2] - features[:, 1]))).astype(np.int64)
        u, margin = rng.random(n), rng.random(n) + 0.1
        kept = 0
        for j in np.flatnonzero(loss):
            rows = np.delete(np.arange(n), j)
            if not inferred:  # declared: a row of another size is always deferred
                rows = rows[rows != odd]
            wide = 4 if not inferred or odd == j else 2
            fits = fit_ridges(
                features[rows, :wide], PENALTIES[:wide], loss[rows], u[rows], margin[rows], strengths=STRENGTHS
            )
            one, budget = [j], spendable_losses(alpha, Fraction(1), n - 1)
            decided = decide_learned(fits, features[one, :wide], u[one], margin[one], budget=budget)
            kept += int(decided.kept[0]) if inferred or j != odd else 0
        found += kept > alpha * n
    return found


def test_a_menu_size_that_is_inferred_from_the_log_is_caught_and_a_declared_one_is_not():
    assert sized_violations(inferred=False) == 0
    assert sized_violations(inferred=True) > 0


def test_the_closed_form_equals_refitting_to_twelve_decimals(monkeypatch):
    monkeypatch.setattr(ridge, "rounded", lambda values: values)
    rng = np.random.default_rng(3)
    features, loss = np.column_stack([np.ones(60), rng.normal(size=(60, 3))]), rng.integers(0, 2, 60)
    u, margin = rng.random(60), rng.random(60)
    labels = np.append(loss[:59], 1)

    def refitted(rows, at, strength):
        x = features[rows]
        return features[at] @ np.linalg.solve(x.T @ x + strength * np.diag(PENALTIES), x.T @ labels[rows])

    fits = fit_ridges(features[:59], PENALTIES, loss[:59], u[:59], margin[:59], strengths=STRENGTHS)
    for k, strength in enumerate(STRENGTHS):
        scores, own = ridge._left_out_scores(fits, k, features[59:], None, [])
        for left_out in range(59):
            expected = refitted(np.arange(60) != left_out, left_out, strength)
            assert scores[0, left_out] == pytest.approx(expected, abs=1e-12)
        assert own[0] == pytest.approx(refitted(np.arange(60) < 59, 59, strength), abs=1e-12)
