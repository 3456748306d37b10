"""evaluate: what a budget buys on held-out rows, compared with simpler policies.

Baselines: the Primary alone, the Guardian alone, random routing, which sends each query to the Guardian with a given
probability, and, for each conformal policy, random routing at the same cost. Random routing is computed in expectation.

Knows nothing of tables or figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from conformal_arbitrage.calibration.notebook import html_bars, html_table
from conformal_arbitrage.calibration.options import (
    CalibrationKeywords,
    CalibrationOptions,
    check_keywords,
    resolve_options,
)
from conformal_arbitrage.calibration.search import binomial_spendable
from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.core.losses import GuardianSees, Number
from conformal_arbitrage.core.risk import check_alpha, check_bound, grid_points
from conformal_arbitrage.core.trials import (
    Name,
    Split,
    Steps,
    TrialResults,
    build_steps,
    draw_splits,
    run_trials,
)
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.costs import CostKeywords, CostOptions, Costs, costs_of
from conformal_arbitrage.evaluation.sure_trials import trial_calibration
from conformal_arbitrage.scorelog.fitness import refuse_unfit
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Boundary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from conformal_arbitrage.evaluation.frontier_dial import FrontierDial

PolicyName = Literal["primary", "guardian", "random", "cost_matched", "conformal"]
_FIGURES = ("loss", "relaxation", "deferred", "candidates", "cost_per_1000", "delta")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrontierPoint:
    """One policy on all trials.

    Attributes:
        policy: its name.
        alpha: the risk budget of a conformal policy, or of the one that cost-matched random routing is compared with.
        probability: how often random routing uses the Guardian (mean over trials).
        guardian_sees: what a conformal policy shows the Guardian.
        boundary: the boundary rule of a conformal policy.
        always_defer: share of the trials in which no relaxation kept the budget.
        figures: per trial, by name; None where a figure is undefined. `loss` is the calibrated loss on the test rows,
            `deferred` the share of queries sent to the Guardian.
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
        """Return mean and standard deviation over trials of a figure or an outcome; empty if it is undefined."""
        return _summary(self.values(name))

    def mean(self, name: str) -> float | None:
        """Return the mean over trials of a figure or an outcome, or None if it is undefined."""
        return self.summary(name).get("mean")

    def values(self, name: str) -> Floats | None:
        """Return a figure or an outcome, trial by trial, or None if it is undefined."""
        return self.outcomes[name] if name in self.outcomes else self.figures.get(name)

    def to_dict(self, *, per_trial: bool = False) -> dict[str, Any]:
        """Return the point as a JSON document."""
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
    """A sweep over alpha, with its baselines.

    Attributes:
        n: rows of the log.
        trials: number of random splits.
        calibration_size: rows to calibrate on in each trial.
        test_size: rows to test on in each trial.
        seed: of the splits.
        loss_bound: the largest possible loss.
        points: every policy, the single models first.
    """

    n: int
    trials: int
    calibration_size: int
    test_size: int
    seed: int
    loss_bound: float
    points: tuple[FrontierPoint, ...]

    def to_dict(self, *, per_trial: bool = False) -> dict[str, Any]:
        """Return the frontier as a JSON document."""
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
        """Return all points of one policy."""
        return tuple(point for point in self.points if point.policy == policy)

    def plot(self, ax: "Axes | None" = None, *, x: str | None = None, y: str | None = None) -> "Axes":
        """Draw the frontier and return its axes; needs matplotlib.

        Args:
            ax: the axes to draw on; a new figure if None.
            x: "cost", "loss" or the name of an outcome; by default the cost if it is known, otherwise the loss.
            y: the name of an outcome, or "loss"; by default the first outcome.
        """
        from conformal_arbitrage.evaluation.figures import draw_frontier, new_axes

        return draw_frontier(new_axes() if ax is None else ax, self, x=x, y=y)

    def __repr__(self) -> str:
        alphas = ", ".join(f"{point.alpha:g}" for point in self.of("conformal"))
        return (
            f"Frontier(alphas=[{alphas}], trials={self.trials}, calibration_size={self.calibration_size}, n={self.n})"
        )

    def _repr_html_(self) -> str:
        from conformal_arbitrage.evaluation.tables import cells

        header, rows = cells(self)
        shares = [(f"alpha {point.alpha:g}", point.mean("deferred") or 0.0) for point in self.of("conformal")]
        bars = [(name, share, f"{100 * share:.1f} %") for name, share in shares]
        return html_table(rows, header=header) + html_bars("queries sent to the Guardian", bars)

    def dial(self) -> "FrontierDial":
        """Return the budgets as a dial for notebooks, in plain HTML: one button each, with what it buys."""
        from conformal_arbitrage.evaluation.frontier_dial import FrontierDial

        return FrontierDial(self)


def _summary(values: Floats | None) -> dict[str, float | None]:
    """Return mean and sample standard deviation over the trials that have a value; one trial has no deviation."""
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


class EvaluationKeywords(CalibrationKeywords, CostKeywords, total=False):
    """The single keywords that `evaluate` takes instead of `options` and `costs`."""


def evaluate(
    log: ScoreLog,
    alphas: Sequence[Number],
    *,
    calibration_size: int,
    test_size: int | None = None,
    trials: int = 30,
    seed: int = 0,
    balance_by: str | None = None,
    sample_size: int | None = None,
    probabilities: Sequence[float] = (),
    delta_x: Literal["cost", "loss"] = "cost",
    delta_of: str = "correct",
    options: CalibrationOptions | None = None,
    costs: CostOptions | None = None,
    **keywords: Unpack[EvaluationKeywords],
) -> Frontier:
    """Calibrate on random parts of a log and test on the rest, for every alpha and every baseline.

    The spread over splits of one log is right for checking the budget on that log; it understates the uncertainty
    about new questions.

    Args:
        log: the recorded scores.
        alphas: the risk budgets.
        calibration_size: rows to calibrate on in each trial.
        test_size: other rows to test on; by default all of them.
        trials: number of fresh random splits.
        seed: of the splits and, for boundary="random", of the key.
        balance_by: a text column such as "group"; each trial first draws `sample_size` rows balanced over it.
        sample_size: rows that `balance_by` draws.
        probabilities: add random routers that send each query to the Guardian with these probabilities.
        delta_x: measure delta against the chord between the single models at the same cost, or at the same loss.
        delta_of: the outcome that delta is measured in.
        options: how to calibrate; or pass the fields of `CalibrationOptions` as keywords (`guardian_sees=`, ...).
        costs: what the models cost; or pass the fields of `CostOptions` as keywords (`primary_cost=`, ...).
        **keywords: the fields of `options` and `costs`, one by one.
    """
    refuse_unfit(log)
    chosen, prices = _resolve(options, costs, keywords)
    if chosen.cluster is not None:
        raise OptionError("evaluate splits rows, not clusters, so it takes no cluster; leave it out")
    _check_sweep(seed, trials, probabilities, balance_by, sample_size, delta_x)
    _check_outcomes(log, alphas, delta_of)
    rng = np.random.default_rng(seed)
    if chosen.boundary == "random" or chosen.confidence is not None:
        chosen = chosen.with_key(rng.bytes(32))
    splits = draw_splits(
        len(log), calibration_size=calibration_size, test_size=test_size, sample_size=sample_size, trials=trials,
        rng=rng, groups=None if balance_by is None else _groups(log, balance_by),
    )  # fmt: skip
    points, bound = _points(log, alphas, chosen, costs_of(log, prices), splits, probabilities, (delta_x, delta_of))
    return Frontier(
        n=len(log), trials=trials, calibration_size=calibration_size, test_size=len(splits[0][1]), seed=seed,
        loss_bound=bound, points=points,
    )  # fmt: skip


def _resolve(
    options: CalibrationOptions | None, costs: CostOptions | None, keywords: Mapping[str, Any]
) -> tuple[CalibrationOptions, CostOptions]:
    """Return both option objects, built from single keywords where those were given."""
    check_keywords("evaluate", keywords, EvaluationKeywords)
    rule = {name: value for name, value in keywords.items() if name in CalibrationKeywords.__annotations__}
    prices = {name: value for name, value in keywords.items() if name in CostKeywords.__annotations__}
    return (
        resolve_options(options, CalibrationOptions, rule, name="options"),
        resolve_options(costs, CostOptions, prices, name="costs"),
    )


def _points(
    log: ScoreLog,
    alphas: Sequence[Number],
    options: CalibrationOptions,
    costs: Costs | None,
    splits: Sequence[Split],
    probabilities: Sequence[float],
    delta: tuple[Literal["cost", "loss"], str],
) -> tuple[tuple[FrontierPoint, ...], float]:
    """Return all points of a sweep, and the loss bound."""
    steps = build_steps(
        log,
        options.stairs(log),
        guardian_sees=options.guardian_sees,
        outcomes={name: log.outcome(name) for name in log.outcome_names},
        leg=None if costs is None else costs.guardian,
        u=options.draws(log),
    )
    bound = _loss_bound(log, steps, options)
    tick = Fraction(1, 10**steps.tick_digits)
    for alpha in alphas:
        options.check_full_sight(check_alpha(alpha, bound), steps.in_full_sight, tick=tick, source=log.source)
    fixed = {} if costs is None else {"primary": costs.primary, "guardian": costs.guardian.full()}
    grid = None if options.grid is None else grid_points(options.grid)
    limits = _limits(log, alphas, options, bound, len(splits[0][0]), steps.tick_digits)
    rule = trial_calibration(log, steps, alphas, options, bound)
    results = run_trials(steps, splits, alphas, bound=bound, limits=limits, calibrate=rule, grid=grid, fixed=fixed)
    sweep = _Sweep(results, log.outcome_names, *delta)
    conformal = [sweep.conformal(k, float(check_alpha(alpha, bound)), options) for k, alpha in enumerate(alphas)]
    matched = [sweep.cost_matched(point) for point in conformal]
    singles = [sweep.single("primary"), sweep.single("guardian")]
    random = [sweep.random_routing(np.full(len(splits), q), "random") for q in probabilities]
    return (*singles, *random, *conformal, *(point for point in matched if point is not None)), float(bound)


def _limits(
    log: ScoreLog, alphas: Sequence[Number], options: CalibrationOptions, bound: Fraction, n: int, tick_digits: int
) -> list[int] | None:
    """Return the largest total loss for each alpha by the binomial test; None if another rule applies."""
    delta = options.delta()
    if delta is None or not options.is_binary(log, bound):
        return None
    return [binomial_spendable(check_alpha(alpha, bound), bound, n, tick_digits, delta) for alpha in alphas]


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
            raise OptionError(f"a probability must lie in [0, 1]; got {q!r}")
    if (balance_by is None) != (sample_size is None):
        raise OptionError("balance_by and sample_size belong together; give both or neither")
    if delta_x not in ("cost", "loss"):
        raise OptionError(f"delta_x must be 'cost' or 'loss'; got {delta_x!r}")
    if seed < 0:
        raise OptionError(f"seed must be 0 or more; got {seed}")


def _check_outcomes(log: ScoreLog, alphas: object, delta_of: str) -> None:
    if isinstance(alphas, str | float | int):
        raise OptionError(f"alphas must be a list of budgets; got {alphas!r}")
    clashes = set(log.outcome_names) & set(_FIGURES)
    if clashes:
        raise OptionError(
            f"{log.source}: an outcome cannot be named '{min(clashes)}', which is a figure; rename the column"
        )
    if delta_of != "correct":
        log.outcome(delta_of)


def _loss_bound(log: ScoreLog, steps: Steps, options: CalibrationOptions) -> Fraction:
    return check_bound(
        options.loss_bound,
        steps.largest_loss,
        tick=Fraction(1, 10**steps.tick_digits),
        unit_scores=options.unit_scores(log),
        source=log.source,
    )


def _share(worth: Floats, known: Floats | None) -> Floats:
    if known is None:
        return worth
    return np.divide(worth, known, out=np.full(worth.shape, np.nan), where=known > 0)


def _groups(log: ScoreLog, name: str) -> Integers:
    column = log.group if name == "group" else log.extra.get(name)
    if column is None:
        raise OptionError(f"{log.source}: no column '{name}' to balance by")
    return np.unique(column, return_inverse=True)[1]


@dataclass(frozen=True, slots=True)
class _Sweep:
    """The means of all trials, turned into points."""

    results: TrialResults
    outcomes: tuple[str, ...]
    delta_x: Literal["cost", "loss"]
    delta_of: str

    def single(self, policy: Literal["primary", "guardian"]) -> FrontierPoint:
        means = self.results.primary if policy == "primary" else self.results.guardian
        deferred = np.full(len(means["loss"]), 1.0 if policy == "guardian" else 0.0)
        cost = self.results.fixed.get(policy)
        return FrontierPoint(
            policy=policy,
            figures={
                "loss": means["loss"],
                "deferred": deferred,
                "cost_per_1000": None if cost is None else 1000 * cost,
            },
            outcomes=self._outcomes(means),
        )

    def random_routing(
        self, q: Floats, policy: Literal["random", "cost_matched"], alpha: float | None = None
    ) -> FrontierPoint:
        """Send each query to the Guardian with probability q and to the Primary otherwise, in expectation."""
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

    def conformal(self, k: int, alpha: float, options: CalibrationOptions) -> FrontierPoint:
        means = {name: values[:, k] for name, values in self.results.conformal.items()}
        relaxation = self.results.relaxation[:, k]
        leg, primary_cost = means.get("leg"), self.results.fixed.get("primary")
        cost = None if leg is None or primary_cost is None else 1000 * (leg + primary_cost)
        outcomes = self._outcomes(means)
        return FrontierPoint(
            policy="conformal",
            alpha=alpha,
            guardian_sees=options.guardian_sees,
            boundary=options.boundary,
            always_defer=float(np.isnan(relaxation).mean()),
            figures={
                "loss": means["loss"],
                "relaxation": None if options.learned else relaxation,
                "deferred": means["deferred"],
                "candidates": means["candidates"],
                "cost_per_1000": cost,
                "delta": self._delta(means["loss"], cost, outcomes),
            },
            outcomes=outcomes,
        )

    def cost_matched(self, conformal: FrontierPoint) -> FrontierPoint | None:
        """Route at random for what a conformal policy costs; None unless the Guardian costs more than the Primary."""
        cost = conformal.figures["cost_per_1000"]
        q = None if cost is None else self._position("cost_per_1000", cost)
        return None if q is None else self.random_routing(q, "cost_matched", conformal.alpha)

    def _outcomes(self, means: Mapping[Name, Floats]) -> dict[str, Floats]:
        """Average over rows with a known outcome; a row whose Guardian did not answer has none."""
        return {name: _share(means["worth", name], means.get(("known", name))) for name in self.outcomes}

    def _position(self, name: str, x: Floats) -> Floats | None:
        """Return where x lies between the Primary alone (0) and the Guardian alone (1), trial by trial."""
        start, end = self.single("primary").values(name), self.single("guardian").values(name)
        if start is None or end is None or not (end > start if name != "loss" else start > end).all():
            return None
        return np.clip((x - start) / (end - start), 0.0, 1.0)

    def _delta(self, loss: Floats, cost: Floats | None, outcomes: Mapping[str, Floats]) -> Floats | None:
        """Return the outcome gained over the chord between the single models, on the same test rows."""
        if self.delta_of not in outcomes or ("known", self.delta_of) in self.results.primary:
            return None  # with unknown outcomes the three means are not over the same rows
        x, name = (loss, "loss") if self.delta_x == "loss" else (cost, "cost_per_1000")
        position = None if x is None else self._position(name, x)
        if position is None:
            return None
        start = self._outcomes(self.results.primary)[self.delta_of]
        end = self._outcomes(self.results.guardian)[self.delta_of]
        return outcomes[self.delta_of] - ((1 - position) * start + position * end)
