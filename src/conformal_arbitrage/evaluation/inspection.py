"""inspect: what a score log holds, and whether its pair of models is worth routing at all.

A description of the log as it is, on the rule in which a deferral shows the Guardian everything; no promise about new
queries. Knows nothing of how it is shown.
"""

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from conformal_arbitrage.calibration.certificate import rows_needed
from conformal_arbitrage.core.gaps import Floats, Integers, margins
from conformal_arbitrage.core.losses import Number, loss_stairs
from conformal_arbitrage.core.risk import RiskCurve
from conformal_arbitrage.core.rows import row_argmax
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.frontier import Costs
from conformal_arbitrage.scorelog.log import ScoreLog

SHARES = tuple(Fraction(text) for text in ("0.01", "0.02", "0.05", "0.1", "0.2"))
"""Budgets to look at, as shares of the loss bound."""
LEAST_SAVING = 0.05
"""A pair that saves fewer Guardian calls than this, against a coin with the same loss, is not worth routing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUse:
    """What one budget buys on this log.

    Attributes:
        alpha: the risk budget.
        deferred: share of queries that go to the Guardian with boundary="include"; None if it always defers.
        deferred_random: the same with boundary="random".
        wasted: share of the budget that boundary="include" leaves unspent.
    """

    alpha: float
    deferred: float | None
    deferred_random: float | None
    wasted: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a log holds.

    Attributes:
        source: the file.
        rows: queries.
        fewest_actions: of any query.
        most_actions: of any query.
        router_form: two answers and a confidence rather than a menu.
        outcomes: mean of every outcome over the choices of each model alone.
        no_opinion_rows: the Primary gave no usable scores: they defer.
        missing_guardian_rows: the Guardian gave no usable scores.
        tied_rows: the Primary's top choice is tied: they defer.
        distinct_margins: different values of the Primary's lead.
        primary_loss: mean loss of the Primary alone.
        auc: how well a small margin predicts regret; 0.5 is not at all, 1 perfectly.
        auc_interval: about 95 %.
        calls_saved: share of Guardian calls saved against a coin with the same loss, mean over all budgets.
        worth_routing: whether that is enough.
        verdict: why.
        budgets: what some budgets buy.
        cost_per_1000: of each model alone, if costs are known.
        problems: what to mend, in words.
    """

    source: str
    rows: int
    fewest_actions: int
    most_actions: int
    router_form: bool
    outcomes: dict[str, dict[str, float | None]]
    no_opinion_rows: int
    missing_guardian_rows: int
    tied_rows: int
    distinct_margins: int
    primary_loss: float
    auc: float | None
    auc_interval: tuple[float, float] | None
    calls_saved: float | None
    worth_routing: bool
    verdict: str
    budgets: tuple[BudgetUse, ...]
    cost_per_1000: dict[str, float] | None
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The inspection as a JSON document."""
        return asdict(self)


def inspect(log: ScoreLog, *, loss_bound: Number | None = None, costs: Costs | None = None) -> Inspection:
    """Describe a log and judge its pair of models.

    Args:
        log: the recorded scores.
        loss_bound: the largest possible loss; without it, 1 if all Guardian scores lie in [0, 1].
        costs: what asking each model costs, from `costs_of`.
    """
    answered = log.select(~log.missing)
    if len(answered) == 0:
        raise OptionError(f"{log.source}: no row has a Guardian score; there is nothing to inspect")
    top, margin, regret = _primary_alone(answered)
    curve = RiskCurve.from_log(answered, guardian_sees="all")
    bound = curve.bound(loss_bound) if loss_bound is not None or curve.unit_scores else None
    auc, interval = _auc(margin, regret, float(regret.max() if bound is None else bound))
    saved = _calls_saved(margin, regret)
    worth, verdict = _verdict(saved, auc, costs)
    return Inspection(
        source=log.source,
        rows=len(log),
        fewest_actions=int(log.sizes.min()),
        most_actions=int(log.sizes.max()),
        router_form=log.is_router,
        outcomes=_outcomes(answered, top),
        no_opinion_rows=int(log.no_opinion.sum()),
        missing_guardian_rows=int(log.missing.sum()),
        tied_rows=int((margin == 0).sum()),
        distinct_margins=len(np.unique(margin)),
        primary_loss=float(regret.mean()),
        auc=auc,
        auc_interval=interval,
        calls_saved=saved,
        worth_routing=worth,
        verdict=verdict,
        budgets=() if bound is None else tuple(_use(curve, margin, share * bound, bound) for share in SHARES),
        cost_per_1000=None if costs is None else _cost_per_1000(costs),
        problems=tuple(_problems(log, bound)),
    )


def _primary_alone(log: ScoreLog) -> tuple[Integers, Floats, Floats]:
    """Each row's top action, how far it leads, and what is lost if it stands alone."""
    stairs = loss_stairs(log, guardian_sees="all")
    top, margin, regret = np.empty(len(log), dtype=np.int64), np.empty(len(log)), np.empty(len(log))
    for stair in stairs.blocks:
        rows = stair.block.rows
        top[rows], margin[rows] = stair.order[0], margins(stair.gaps)
        regret[rows] = stair.levels[0] / 10.0**stairs.tick_digits
    return top, margin, regret


def _calls_saved(margin: Floats, regret: Floats) -> float | None:
    """Guardian calls saved by the margin against a coin with the same loss, mean over all budgets the margin can reach.

    Rows tied at the top are always deferred. None if the Primary loses nothing.
    """
    if regret.sum() == 0:
        return None
    values, where = np.unique(margin, return_inverse=True)
    deferred = np.cumsum(np.bincount(where)) / len(margin)
    coin = np.cumsum(np.bincount(where, regret)) / regret.sum()
    if values[0] > 0:
        deferred, coin = np.concatenate([[0.0], deferred]), np.concatenate([[0.0], coin])
    if coin[-1] == coin[0]:
        return float(coin[-1] - deferred[0])
    return float(np.trapezoid(coin - deferred, coin) / (coin[-1] - coin[0]))


def _use(curve: RiskCurve, margin: Floats, alpha: Fraction, bound: Fraction) -> BudgetUse:
    """The exact rule at one budget, and in expectation the one that draws lots at the threshold margin."""
    found = curve.search([alpha], bound)[0]
    if found is None:
        return BudgetUse(alpha=float(alpha), deferred=None, deferred_random=None, wasted=None)
    relaxation = curve.breakpoints[found]
    deferred = float((margin <= relaxation).mean())
    left = alpha * (curve.n + 1) - bound - curve.exact_total(found)
    spare = 0.0
    if found > 0:
        here = curve.exact_total(found - 1) - curve.exact_total(found)
        spare = float(left / here) * float((margin == relaxation).mean())
    wasted = float(left / ((curve.n + 1) * alpha)) if found > 0 else 0.0
    return BudgetUse(alpha=float(alpha), deferred=deferred, deferred_random=deferred - spare, wasted=wasted)


def _auc(margin: Floats, regret: Floats, bound: float) -> tuple[float | None, tuple[float, float] | None]:
    """Area under the ROC curve of "small margin" for regret, each row a part r/B hit and 1 - r/B miss.

    The interval is Hanley and McNeil's.
    """
    part = regret / bound if bound > 0 else regret
    hits, misses = float(part.sum()), float((1 - part).sum())
    if hits == 0 or misses == 0:
        return None, None
    _, where = np.unique(margin, return_inverse=True)
    hit, miss = np.bincount(where, part), np.bincount(where, 1 - part)
    above = misses - np.cumsum(miss)
    area = float((hit * (above + miss / 2)).sum() / (hits * misses))
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + max(hits - 1, 0) * (q1 - area**2) + max(misses - 1, 0) * (q2 - area**2)
    half = 1.96 * float(np.sqrt(max(variance, 0.0) / (hits * misses)))
    return area, (max(0.0, area - half), min(1.0, area + half))


def _verdict(saved: float | None, auc: float | None, costs: Costs | None) -> tuple[bool, str]:
    if saved is None:
        return False, "Not worth routing: the Primary alone loses nothing here, so use it for every query."
    needed = LEAST_SAVING if costs is None else max(LEAST_SAVING, _price(costs) / 2)
    says = "" if auc is None else f" (AUC of the margin for regret {auc:.2f}; 0.50 would be a coin)"
    if saved < LEAST_SAVING:
        gain = f"saves only {100 * saved:.0f} points of" if saved >= 0.005 else "saves no"
        return False, (
            f"Not worth routing: at the same loss the margin {gain} Guardian calls over a coin{says}. Look for a "
            "Primary whose confidence tells right from wrong."
        )
    if saved < needed:
        return False, (
            f"Not worth routing: the margin saves {100 * saved:.0f} points of Guardian calls over a coin, but a deferral "
            f"also pays the Primary, and that costs more ({100 * needed:.0f} points). Look for a cheaper Primary."
        )
    return True, (
        f"Worth routing: at the same loss the margin saves {100 * saved:.0f} points of Guardian calls over a coin, on "
        f"average over all budgets{says}."
    )


def _outcomes(log: ScoreLog, primary: Integers) -> dict[str, dict[str, float | None]]:
    """What each model's own choice is worth; rows with an unknown outcome are left aside."""
    choices = {"primary": primary, "guardian": row_argmax(log.guardian, log.offsets)}
    return {
        name: {who: _known_mean(log.outcome(name)[log.offsets[:-1] + action]) for who, action in choices.items()}
        for name in log.outcome_names
    }


def _known_mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _price(costs: Costs) -> float:
    """The Primary's cost in units of the Guardian's; a Guardian that costs nothing is cheaper than any Primary."""
    guardian = float(costs.guardian.full().mean())
    return float(costs.primary.mean()) / guardian if guardian > 0 else float("inf")


def _cost_per_1000(costs: Costs) -> dict[str, float]:
    return {"primary": 1000 * float(costs.primary.mean()), "guardian": 1000 * float(costs.guardian.full().mean())}


def _problems(log: ScoreLog, bound: Fraction | None) -> list[str]:
    found: list[str] = []
    if log.id is None:
        found.append('no `id` column: boundary="random", joins and resuming need one')
    if log.missing.any():
        found.append(
            f"{log.missing.sum()} rows have no Guardian score and are left out of these figures: ask again, or "
            "calibrate with --missing-guardian worst_case, which asks the Guardian more often"
        )
    if bound is None:
        found.append("Guardian scores leave [0, 1]: state the largest possible loss with --loss-bound")
    elif bound > Fraction("0.05") and len(log) < rows_needed(0.05, bound):
        found.append(f"{len(log)} rows are few: alpha 0.05 needs at least {rows_needed(0.05, bound)}")
    if not log.outcome_names and not log.is_router:
        found.append("no `label` or `correct` column: accuracies cannot be shown")
    if log.identities is None:
        found.append("no scorer identities: certificates from this log will be unbound")
    return found
