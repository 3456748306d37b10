"""The rules that `compare` compares: when to keep the Primary's answer, as its authors would decide on our scores.

A rule sees calibration rows and test rows and returns which test rows it keeps. "Like" in a name means their rule on our
score, not their code. Rows tied at the top (margin 0) are deferred before any rule sees them.

Knows nothing of splits, tables or files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np

from conformal_arbitrage.core.arrays import Bools, Floats, Indices
from conformal_arbitrage.core.bounds import binomial_limit
from conformal_arbitrage.core.learned import STRENGTHS, decide_learned, fit_ridges, spendable_losses

DELTA = 0.1
"""The error level of rules that promise with probability 1 - delta."""
_LOGISTIC_PENALTY, _ITERATIONS = 3.0, 25
_GRID = np.arange(101) / 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuleRows:
    """Rows as a rule sees them.

    Attributes:
        margin: the lead of the top action; above 0, since ties are deferred by every rule.
        u: one draw per row.
        loss: of keeping the Primary's answer, in units of the bound.
        net: the same with gains counted; None if outcomes are unknown.
        features: rows x columns, for learned scores.
        penalties: the weight of each column.
        n: rows of the sample, those tied at the top included.
    """

    margin: Floats
    u: Floats
    loss: Floats
    net: Floats | None
    features: Floats
    penalties: Floats
    n: int


Rule = Callable[[RuleRows, RuleRows, float], Bools]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRule:
    """A rule with what people need to know of it.

    Attributes:
        name: as in the table.
        promise: what the rule promises, in a few words.
        keeps: the rule.
        binary: whether it needs losses of 0 or the bound.
        net: whether it promises the net loss.
        promises_loss: whether it promises a limit on the loss in which gains do not count.
    """

    name: str
    promise: str
    keeps: Rule
    binary: bool = False
    net: bool = False
    promises_loss: bool = False


def _before(rows: RuleRows, risk: Floats, count: int, queries: RuleRows, query_risk: Floats) -> Bools:
    """Keep the queries that come before row number `count` in the order of risk; all of them if there is no such row."""
    if count >= len(risk):
        return np.ones(len(query_risk), np.bool_)
    first_out = _by_risk(risk, rows.u)[count]
    line, line_u = risk[first_out], rows.u[first_out]
    return (query_risk < line) | ((query_risk == line) & (queries.u < line_u))


def _by_risk(risk: Floats, u: Floats) -> Indices:
    return np.lexsort((u, risk))


def _spent(rows: RuleRows, risk: Floats) -> Floats:
    """Return the losses added up in the order of risk."""
    return np.cumsum(rows.loss[_by_risk(risk, rows.u)])


def _longest(allowed: Bools) -> int:
    """Return how many rows the longest allowed prefix has."""
    return int(np.flatnonzero(allowed)[-1]) + 1 if allowed.any() else 0


def _unbroken(allowed: Bools) -> int:
    """Return how many rows come before the first that is not allowed."""
    return len(allowed) if allowed.all() else int(np.argmin(allowed))


def coin(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Keep at random, as often as the mean loss of the rows allows."""
    mean = rows.loss.sum() / rows.n
    return queries.u < (1.0 if mean <= alpha else alpha / mean)


def routellm_like(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Keep the longest prefix whose mean loss on the same rows is within alpha."""
    count = _longest(_spent(rows, -rows.margin) <= alpha * rows.n)
    return _before(rows, -rows.margin, count, queries, -queries.margin)


def automix_like(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Choose among confidence levels of 0.1 the one with the most rows kept whose mean loss is within alpha."""
    for level in np.arange(11) / 10:
        if rows.loss[rows.margin > level].sum() <= alpha * rows.n:
            return queries.margin > level
    return np.zeros(len(queries.margin), np.bool_)


def frugalgpt_like(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Learn the probability of a loss, and choose the threshold on the rows it was learned from."""
    weights = _logistic(rows.features, rows.penalties, rows.loss)
    risk = rows.features @ weights
    count = _longest(_spent(rows, risk) <= alpha * rows.n)
    return _before(rows, risk, count, queries, queries.features @ weights)


def frugalgpt_split(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Do the same with the threshold chosen on the other half of the rows."""
    half = np.arange(len(rows.loss)) < len(rows.loss) // 2
    weights = _logistic(rows.features[half], rows.penalties, rows.loss[half])
    rest = some_rows(rows, ~half, n=rows.n - rows.n // 2)
    risk = rest.features @ weights
    count = _longest(_spent(rest, risk) <= alpha * rest.n)
    return _before(rest, risk, count, queries, queries.features @ weights)


def some_rows(rows: RuleRows, chosen: Bools | Indices, *, n: int) -> RuleRows:
    """Return some of the rows, as those of a sample of n."""
    return RuleRows(
        margin=rows.margin[chosen],
        u=rows.u[chosen],
        loss=rows.loss[chosen],
        net=None if rows.net is None else rows.net[chosen],
        features=rows.features[chosen],
        penalties=rows.penalties,
        n=n,
    )


def _logistic(features: Floats, penalties: Floats, loss: Floats) -> Floats:
    """Fit a penalised logistic regression by Newton's steps."""
    penalty = np.diag(_LOGISTIC_PENALTY * penalties)
    weights = np.zeros(features.shape[1])
    for _ in range(_ITERATIONS):
        chance = 1 / (1 + np.exp(-np.clip(features @ weights, -30, 30)))
        slope = features.T @ (chance - loss) + penalty @ weights
        curvature = (features * (chance * (1 - chance))[:, None]).T @ features + penalty
        step = np.linalg.solve(curvature, slope)
        weights = weights - step
        if np.abs(step).max() < 1e-8:
            break
    return weights


def ucci_like(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Fit the loss as a monotone function of the margin, and keep whole blocks while their mean loss is within alpha."""
    margins, where = np.unique(rows.margin, return_inverse=True)
    size, loss = np.bincount(where)[::-1].astype(float), np.bincount(where, rows.loss)[::-1]
    blocks: list[list[float]] = []  # losses, rows, smallest margin; the largest margins come first
    for lost, count, margin in zip(loss.tolist(), size.tolist(), margins[::-1].tolist(), strict=True):
        blocks.append([lost, count, margin])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            last = blocks.pop()
            blocks[-1] = [blocks[-1][0] + last[0], blocks[-1][1] + last[1], last[2]]
    spent, least = 0.0, np.inf
    for lost, _, margin in blocks:
        spent += lost
        if spent > alpha * rows.n:
            break
        least = margin
    return queries.margin >= least


@cache
def _limit(n: int, alpha: float) -> int:
    return binomial_limit(n, alpha, DELTA)


def _limits(n: int, alpha: float) -> Floats:
    """Return, for 1 to n rows, the most losses that reject a rate of alpha or more."""
    return np.array([_limit(k, alpha) for k in range(1, n + 1)], dtype=np.float64)


def gate_marginal(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Keep the longest prefix whose Clopper-Pearson bound on the mean loss over all rows is within alpha."""
    count = _longest(_spent(rows, -rows.margin) <= _limit(rows.n, alpha))
    return _before(rows, -rows.margin, count, queries, -queries.margin)


def gate_among_kept(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Do the same with the bound on the mean loss among the rows kept."""
    count = _longest(_spent(rows, -rows.margin) <= _limits(len(rows.loss), alpha))
    return _before(rows, -rows.margin, count, queries, -queries.margin)


def _fixed_sequence(rows: RuleRows, passes: Bools, first: int) -> int:
    """Return the rows kept by tests in a fixed sequence of sizes, up to the first that fails."""
    sizes = np.arange(first, len(passes) + 1, max(10, rows.n // 50))
    tested = passes[sizes - 1]
    done = _unbroken(tested)
    return int(sizes[done - 1]) if done else 0


def cse_among_kept(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Test the rate among kept rows in a fixed sequence of thresholds, from the smallest set that can pass."""
    limits = _limits(len(rows.loss), alpha)
    if not (limits >= 0).any():  # also where no row has a top action that leads
        return np.zeros(len(queries.margin), np.bool_)
    passes = _spent(rows, -rows.margin) <= limits
    count = _fixed_sequence(rows, passes, int(np.argmax(limits >= 0)) + 1)
    return _before(rows, -rows.margin, count, queries, -queries.margin)


def cse_marginal(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Test the mean loss over all rows in the same sequence."""
    passes = _spent(rows, -rows.margin) <= _limit(rows.n, alpha)
    return _before(rows, -rows.margin, _fixed_sequence(rows, passes, 1), queries, -queries.margin)


def c3po_like(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Bound the Guardian's share by a conformal quantile, at the share that our rule has on the rows."""
    ours = _unbroken(_spent(rows, -rows.margin) <= alpha * (rows.n + 1) - 1)
    count = int(np.ceil((rows.n + 1) * ours / rows.n))
    return _before(rows, -rows.margin, count, queries, -queries.margin)


def crc_on_a_grid(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Run conformal risk control over relaxations 0, 0.01, ..., 1: the paper's rule, and MAPIE's."""
    totals = np.array([rows.loss[rows.margin > point].sum() for point in _GRID])
    within = totals + 1 <= alpha * (rows.n + 1) + 1e-9
    if not within.any():
        return np.zeros(len(queries.margin), np.bool_)
    return queries.margin > _GRID[np.argmax(within)]


def ours_margin(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Run exact conformal risk control on the margin, ties told apart by draws."""
    count = _unbroken(_spent(rows, -rows.margin) + 1 <= alpha * (rows.n + 1) + 1e-9)
    return _kept_if_affordable(rows, queries, alpha, count)


def ours_net(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Do the same with gains counted, up to the first passage."""
    net = rows.loss if rows.net is None else rows.net
    spent = np.cumsum(net[_by_risk(-rows.margin, rows.u)])
    return _kept_if_affordable(rows, queries, alpha, _unbroken(spent + 1 <= alpha * (rows.n + 1) + 1e-9))


def _kept_if_affordable(rows: RuleRows, queries: RuleRows, alpha: float, count: int) -> Bools:
    if alpha * (rows.n + 1) < 1:
        return np.zeros(len(queries.margin), np.bool_)
    return _before(rows, -rows.margin, count, queries, -queries.margin)


def ours_auto(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Score by the leave-one-out ridge or the margin, whichever keeps more rows."""
    loss = rows.loss.astype(np.int64)
    fits = fit_ridges(rows.features, rows.penalties, loss, rows.u, rows.margin, strengths=STRENGTHS)
    budget = spendable_losses(Fraction(repr(alpha)), Fraction(1), rows.n)
    return decide_learned(fits, queries.features, queries.u, queries.margin, budget=budget).kept


_SAME = "nothing: the threshold is fitted to the rows it is judged on"
_EXPECTED = "expected loss at most alpha"
_MARGINAL = f"loss at most alpha with probability {1 - DELTA:g}"
_AMONG = f"loss among kept queries at most alpha with probability {1 - DELTA:g}"

RULES = (
    NamedRule(name="random routing", promise="nothing: the mean loss is estimated", keeps=coin),
    NamedRule(name="RouteLLM-like", promise=_SAME, keeps=routellm_like),
    NamedRule(name="AutoMix-like", promise=_SAME, keeps=automix_like),
    NamedRule(name="FrugalGPT-like, same rows", promise=_SAME, keeps=frugalgpt_like),
    NamedRule(name="FrugalGPT-like, split", promise="nothing: no margin for the sample", keeps=frugalgpt_split),
    NamedRule(name="UCCI-like", promise=_SAME, keeps=ucci_like),
    NamedRule(name="conformal gate", promise=_MARGINAL, keeps=gate_marginal, binary=True, promises_loss=True),
    NamedRule(
        name="conformal gate, among kept", promise=_AMONG, keeps=gate_among_kept, binary=True, promises_loss=True
    ),
    NamedRule(name="CSE", promise=_MARGINAL, keeps=cse_marginal, binary=True, promises_loss=True),
    NamedRule(name="CSE, among kept", promise=_AMONG, keeps=cse_among_kept, binary=True, promises_loss=True),
    NamedRule(name="C3PO-like", promise="share of the Guardian, not the loss", keeps=c3po_like),
    NamedRule(name="CRC on a grid of 0.01", promise=_EXPECTED, keeps=crc_on_a_grid, promises_loss=True),
    NamedRule(name="ours, margin", promise=_EXPECTED, keeps=ours_margin, promises_loss=True),
    NamedRule(name="ours, learned score", promise=_EXPECTED, keeps=ours_auto, binary=True, promises_loss=True),
    NamedRule(name="ours, net loss", promise="expected net loss at most alpha", keeps=ours_net, net=True),
)
