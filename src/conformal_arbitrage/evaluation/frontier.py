"""evaluate: what a budget buys on held-out rows, next to the policies anyone could use instead.

Baselines: the Primary alone, the Guardian alone, a coin that sends each query to the Guardian with a given
probability, and, for each conformal policy, the coin that costs the same. The coins are taken in expectation.

Knows nothing of how the result is shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from conformal_arbitrage.calibration.options import Terms
from conformal_arbitrage.core.gaps import Floats, Integers
from conformal_arbitrage.core.losses import GuardianSees, Loss, Number, within_unit
from conformal_arbitrage.core.risk import check_alpha, check_bound, grid_points
from conformal_arbitrage.core.trials import (
    LegCost,
    Name,
    Split,
    Steps,
    TrialResults,
    build_steps,
    draw_splits,
    run_trials,
)
from conformal_arbitrage.errors import InfeasibleError, OptionError
from conformal_arbitrage.scorelog.columns import Usage
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Boundary, MissingGuardian

PolicyName = Literal["primary", "guardian", "random", "cost_matched", "conformal"]
Price = tuple[float, float]
"""Dollars per million input tokens and per million output tokens."""
_FIGURES = ("loss", "relaxation", "deferred", "candidates", "cost_per_1000", "delta")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrontierPoint:
    """One policy on all trials.

    Attributes:
        policy: which one.
        alpha: the risk budget, of a conformal policy or of the one that a cost-matched coin goes with.
        probability: how often a coin asks the Guardian (mean over trials).
        guardian_sees: of a conformal policy.
        boundary: of a conformal policy.
        always_defer: share of the trials in which no relaxation kept the budget.
        figures: per trial, by name; None where a figure has no meaning. `loss` is the calibrated loss on the test rows,
            `deferred` a share.
        outcomes: per trial, by the outcome's name: the mean over chosen actions.
    """

    policy: PolicyName
    alpha: float | None = None
    probability: float | None = None
    guardian_sees: GuardianSees | None = None
    boundary: Boundary | None = None
    always_defer: float | None = None
    figures: Mapping[str, Floats | None]
    outcomes: Mapping[str, Floats]

    def summary(self, name: str) -> dict[str, float | None]:
        """Mean and standard deviation over trials of a figure or an outcome; empty where it has no meaning."""
        return _summary(self.values(name))

    def mean(self, name: str) -> float | None:
        """Mean over trials of a figure or an outcome, or None."""
        return self.summary(name).get("mean")

    def values(self, name: str) -> Floats | None:
        """A figure or an outcome, trial by trial."""
        return self.outcomes[name] if name in self.outcomes else self.figures.get(name)

    def to_dict(self, *, per_trial: bool = False) -> dict[str, Any]:
        """The point as a JSON document."""
        return {
            "policy": self.policy,
            "alpha": self.alpha,
            "probability": self.probability,
            "guardian_sees": self.guardian_sees,
            "boundary": self.boundary,
            "always_defer": self.always_defer,
            **{name: _document(self.figures.get(name), per_trial=per_trial) for name in _FIGURES},
            "outcomes": {name: _document(values, per_trial=per_trial) for name, values in self.outcomes.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frontier:
    """The sweep over alpha, with its baselines."""

    n: int
    trials: int
    calibration_size: int
    test_size: int
    seed: int
    loss_bound: float
    points: tuple[FrontierPoint, ...]

    def to_dict(self, *, per_trial: bool = False) -> dict[str, Any]:
        """The sweep as a JSON document."""
        return {
            "n": self.n,
            "trials": self.trials,
            "calibration_size": self.calibration_size,
            "test_size": self.test_size,
            "seed": self.seed,
            "loss_bound": self.loss_bound,
            "points": [point.to_dict(per_trial=per_trial) for point in self.points],
        }

    def of(self, policy: PolicyName) -> tuple[FrontierPoint, ...]:
        """All points of one policy."""
        return tuple(point for point in self.points if point.policy == policy)


def _summary(values: Floats | None) -> dict[str, float | None]:
    """Mean and sample standard deviation over the trials that have a value; one trial has no deviation."""
    known = np.zeros(0) if values is None else values[~np.isnan(values)]
    if known.size == 0:
        return {}
    return {"mean": float(known.mean()), "std": float(known.std(ddof=1)) if known.size > 1 else None}


def _document(values: Floats | None, *, per_trial: bool) -> dict[str, Any] | None:
    summary: dict[str, Any] = _summary(values)
    if not summary or values is None:
        return None
    listed = {"trials": [None if np.isnan(v) else float(v) for v in values]} if per_trial else {}
    return summary | listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What asking each model costs, per row."""

    primary: Floats
    guardian: LegCost


def costs_of(
    log: ScoreLog,
    *,
    primary_cost: float | None = None,
    guardian_cost: float | None = None,
    primary_price: Price | None = None,
    guardian_price: Price | None = None,
) -> Costs | None:
    """Dollars per query of each model: a constant, a price for recorded tokens, or the log's cost column.

    Returns:
        None unless both models have one.
    """
    primary = _leg(log, log.primary_usage, log.columns[0], primary_cost, primary_price)
    guardian = _leg(log, log.guardian_usage, log.columns[1], guardian_cost, guardian_price)
    if primary is None or guardian is None:
        if primary_cost is not None or guardian_cost is not None or primary_price or guardian_price:
            raise OptionError("a cost is given for one model only; give both, by constant, price or column")
        return None
    return Costs(primary=primary.full(), guardian=guardian)


def _leg(log: ScoreLog, usage: Usage, name: str, cost: float | None, price: Price | None) -> LegCost | None:
    if cost is not None and price is not None:
        raise OptionError(f"{name}: give a cost or a price per token, not both")
    if cost is not None:
        return LegCost(base=np.full(len(log), _money(cost, name)))
    if price is None:
        known = usage.cost is not None and not np.isnan(usage.cost).any()  # one unknown cost makes the mean unknown
        return LegCost(base=usage.cost) if known and usage.cost is not None else None
    if usage.input_tokens is None or usage.output_tokens is None:
        raise OptionError(f"{log.source}: a price needs the columns {name}_input_tokens and {name}_output_tokens")
    unknown = int(np.isnan(usage.input_tokens + usage.output_tokens).sum())
    if unknown:
        raise OptionError(f"{log.source}: the tokens of {name} are not known in {unknown} rows; give a cost instead")
    per_input, per_output = (_money(value, name) / 1e6 for value in price)
    tokens = usage.input_tokens.astype(np.int64)
    return LegCost(base=per_output * usage.output_tokens, rate=per_input, tokens=tokens)


def _money(value: float, name: str) -> float:
    if not 0 <= value < float("inf"):
        raise OptionError(f"{name}: a cost is 0 or more; got {value!r}")
    return value


def evaluate(
    log: ScoreLog,
    alphas: Sequence[Number],
    *,
    calibration_size: int,
    trials: int = 30,
    seed: int = 0,
    guardian_sees: GuardianSees = "candidates",
    boundary: Boundary = "include",
    loss_bound: Number | None = None,
    loss: Loss | None = None,
    grid: Number | None = None,
    missing_guardian: MissingGuardian | None = None,
    test_size: int | None = None,
    balance_by: str | None = None,
    sample_size: int | None = None,
    probabilities: Sequence[float] = (),
    primary_cost: float | None = None,
    guardian_cost: float | None = None,
    primary_price: Price | None = None,
    guardian_price: Price | None = None,
    delta_x: Literal["cost", "loss"] = "cost",
    delta_of: str = "correct",
) -> Frontier:
    """Calibrate on random parts of a log and look at the rest, for every alpha and every baseline.

    The spread over splits of one log is right for checking the budget on that log; it understates the uncertainty
    about new questions. `guardian_sees` to `missing_guardian` are those of `calibrate`, the costs those of `costs_of`.

    Args:
        log: the recorded scores.
        alphas: the risk budgets.
        calibration_size: rows to calibrate on in each trial; `test_size` others are tested, by default all.
        trials: number of fresh random splits.
        seed: of the splits and, for boundary="random", of the draws' key.
        balance_by: a text column such as "group"; each trial first draws `sample_size` rows balanced over it.
        probabilities: of the random routers.
        delta_x: measure delta against the chord between the single models at the same cost, or at the same loss.
        delta_of: the outcome that delta is measured in.
    """
    _check_sweep(seed, trials, probabilities, balance_by, sample_size, delta_x)
    _check_outcomes(log, alphas, delta_of)
    rng = np.random.default_rng(seed)
    terms = Terms(
        guardian_sees=guardian_sees, boundary=boundary, loss_bound=loss_bound, loss=loss, grid=grid,
        missing_guardian=missing_guardian, key=rng.bytes(32) if boundary == "random" else None,
    )  # fmt: skip
    costs = costs_of(
        log, primary_cost=primary_cost, guardian_cost=guardian_cost, primary_price=primary_price,
        guardian_price=guardian_price,
    )  # fmt: skip
    splits = draw_splits(
        len(log), calibration_size=calibration_size, test_size=test_size, sample_size=sample_size, trials=trials,
        rng=rng, groups=None if balance_by is None else _groups(log, balance_by),
    )  # fmt: skip
    points, bound = _points(log, alphas, terms, costs, splits, probabilities, (delta_x, delta_of))
    return Frontier(
        n=len(log), trials=trials, calibration_size=calibration_size, test_size=len(splits[0][1]), seed=seed,
        loss_bound=bound, points=points,
    )  # fmt: skip


def _points(
    log: ScoreLog,
    alphas: Sequence[Number],
    terms: Terms,
    costs: Costs | None,
    splits: Sequence[Split],
    probabilities: Sequence[float],
    delta: tuple[Literal["cost", "loss"], str],
) -> tuple[tuple[FrontierPoint, ...], float]:
    """All points of a sweep, and the loss bound."""
    steps = build_steps(
        log,
        terms.stairs(log),
        guardian_sees=terms.guardian_sees,
        outcomes={name: log.outcome(name) for name in log.outcome_names},
        leg=None if costs is None else costs.guardian,
        u=terms.draws(log),
    )
    bound = _bound(log, steps, terms)
    fixed = {} if costs is None else {"primary": costs.primary, "guardian": costs.guardian.full()}
    grid = None if terms.grid is None else grid_points(terms.grid)
    results = run_trials(steps, splits, alphas, bound=bound, grid=grid, fixed=fixed)
    if terms.loss is not None and steps.in_full_sight > 0 and np.isnan(results.relaxation).any():
        raise InfeasibleError(
            f"no relaxation keeps the smallest alpha in some trial, and the loss '{terms.loss_name}' is not 0 with every "
            "action in sight; give larger alphas or calibration sizes"
        )
    sweep = _Sweep(results, log.outcome_names, *delta)
    conformal = [sweep.conformal(k, float(check_alpha(alpha, bound)), terms) for k, alpha in enumerate(alphas)]
    matched = [sweep.cost_matched(point) for point in conformal]
    singles = [sweep.single("primary"), sweep.single("guardian")]
    coins = [sweep.coin(np.full(len(splits), q), "random") for q in probabilities]
    return (*singles, *coins, *conformal, *(point for point in matched if point is not None)), float(bound)


def _check_sweep(
    seed: int,
    trials: int,
    probabilities: Sequence[float],
    balance_by: str | None,
    sample_size: int | None,
    delta_x: str,
) -> None:
    if trials < 1:
        raise OptionError(f"trials must be 1 or more; got {trials}")
    for q in probabilities:
        if not 0 <= q <= 1:
            raise OptionError(f"a probability lies in [0, 1]; got {q!r}")
    if (balance_by is None) != (sample_size is None):
        raise OptionError("balance_by and sample_size go together; give both or neither")
    if delta_x not in ("cost", "loss"):
        raise OptionError(f"delta_x must be 'cost' or 'loss'; got {delta_x!r}")
    if seed < 0:
        raise OptionError(f"seed must be 0 or more; got {seed}")


def _check_outcomes(log: ScoreLog, alphas: object, delta_of: str) -> None:
    if isinstance(alphas, str | float | int):
        raise OptionError(f"alphas must be a list of budgets; got {alphas!r}")
    taken = set(log.outcome_names) & set(_FIGURES)
    if taken:
        raise OptionError(
            f"{log.source}: an outcome cannot be called '{min(taken)}', which is a figure; rename the column"
        )
    if delta_of != "correct":
        log.outcome(delta_of)


def _bound(log: ScoreLog, steps: Steps, terms: Terms) -> Fraction:
    return check_bound(
        terms.loss_bound,
        steps.largest_loss,
        tick=Fraction(1, 10**steps.tick_digits),
        unit_scores=within_unit(log.loss_scores),
        source=log.source,
    )


def _share(worth: Floats, known: Floats | None) -> Floats:
    if known is None:
        return worth
    return np.divide(worth, known, out=np.full(worth.shape, np.nan), where=known > 0)


def _groups(log: ScoreLog, name: str) -> Integers:
    column = log.group if name == "group" else log.extra.get(name)
    if column is None:
        raise OptionError(f"{log.source}: there is no column '{name}' to balance by")
    return np.unique(column, return_inverse=True)[1]


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Turns the means of all trials into points."""

    results: TrialResults
    outcomes: tuple[str, ...]
    delta_x: Literal["cost", "loss"]
    delta_of: str

    def single(self, policy: Literal["primary", "guardian"]) -> FrontierPoint:
        means = self.results.primary if policy == "primary" else self.results.guardian
        asked = np.full(len(means["loss"]), 1.0 if policy == "guardian" else 0.0)
        cost = self.results.fixed.get(policy)
        return FrontierPoint(
            policy=policy,
            figures={
                "loss": means["loss"],
                "deferred": asked,
                "cost_per_1000": None if cost is None else 1000 * cost,
            },
            outcomes=self._outcomes(means),
        )

    def coin(self, q: Floats, policy: Literal["random", "cost_matched"], alpha: float | None = None) -> FrontierPoint:
        """The router that asks the Guardian with probability q and the Primary otherwise, in expectation."""
        primary, guardian = self.single("primary"), self.single("guardian")

        def mixed(name: str) -> Floats | None:
            low, high = primary.values(name), guardian.values(name)
            return None if low is None or high is None else (1 - q) * low + q * high

        return FrontierPoint(
            policy=policy,
            alpha=alpha,
            probability=float(q.mean()),
            figures={"loss": mixed("loss"), "deferred": q, "cost_per_1000": mixed("cost_per_1000")},
            outcomes={name: value for name in self.outcomes if (value := mixed(name)) is not None},
        )

    def conformal(self, k: int, alpha: float, terms: Terms) -> FrontierPoint:
        means = {name: values[:, k] for name, values in self.results.conformal.items()}
        relaxation = self.results.relaxation[:, k]
        leg, primary_cost = means.get("leg"), self.results.fixed.get("primary")
        cost = None if leg is None or primary_cost is None else 1000 * (leg + primary_cost)
        outcomes = self._outcomes(means)
        return FrontierPoint(
            policy="conformal",
            alpha=alpha,
            guardian_sees=terms.guardian_sees,
            boundary=terms.boundary,
            always_defer=float(np.isnan(relaxation).mean()),
            figures={
                "loss": means["loss"],
                "relaxation": relaxation,
                "deferred": means["deferred"],
                "candidates": means["candidates"],
                "cost_per_1000": cost,
                "delta": self._delta(means["loss"], cost, outcomes),
            },
            outcomes=outcomes,
        )

    def cost_matched(self, conformal: FrontierPoint) -> FrontierPoint | None:
        """The coin that costs what a conformal policy costs; None if the Guardian is not dearer."""
        cost = conformal.figures["cost_per_1000"]
        q = None if cost is None else self._position("cost_per_1000", cost)
        return None if q is None else self.coin(q, "cost_matched", conformal.alpha)

    def _outcomes(self, means: Mapping[Name, Floats]) -> dict[str, Floats]:
        """Means over the rows whose outcome is known: a choice left to a Guardian that did not answer has none."""
        return {name: _share(means["worth", name], means.get(("known", name))) for name in self.outcomes}

    def _position(self, name: str, x: Floats) -> Floats | None:
        """Where x lies on the way from the Primary alone (0) to the Guardian alone (1), trial by trial."""
        start, end = self.single("primary").values(name), self.single("guardian").values(name)
        if start is None or end is None or not (end > start if name != "loss" else start > end).all():
            return None
        return np.clip((x - start) / (end - start), 0.0, 1.0)

    def _delta(self, loss: Floats, cost: Floats | None, outcomes: Mapping[str, Floats]) -> Floats | None:
        """Outcome gained over the chord between the single models, on the same test rows."""
        if self.delta_of not in outcomes or ("known", self.delta_of) in self.results.primary:
            return None  # where outcomes are unknown, the three means are not over the same rows
        x, name = (loss, "loss") if self.delta_x == "loss" else (cost, "cost_per_1000")
        position = None if x is None else self._position(name, x)
        if position is None:
            return None
        start = self._outcomes(self.results.primary)[self.delta_of]
        end = self._outcomes(self.results.guardian)[self.delta_of]
        return outcomes[self.delta_of] - ((1 - position) * start + position * end)
