"""evaluate: what a budget buys on held-out rows, compared with simpler policies; pairs and cascades."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from html import escape
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from conformal_arbitrage.calibration.calibrate import Fit, LogSurvey, find_fits, refuse_graded
from conformal_arbitrage.calibration.cascade import TUNING_SHARE, apply_cascade, calibrate_cascade
from conformal_arbitrage.calibration.learned import Features, refuse_row_count
from conformal_arbitrage.calibration.learning import LearnedRows, learned_rows
from conformal_arbitrage.calibration.notebook import html_bars, html_paragraph, html_table
from conformal_arbitrage.calibration.options import (
    CalibrationKeywords,
    CalibrationOptions,
    check_keywords,
    resolve_options,
    threshold_rows,
)
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.sentences import chain_text
from conformal_arbitrage.core.bounds import binomial_spendable
from conformal_arbitrage.core.exact import Bools, Floats, Indices, Integers, n_rows
from conformal_arbitrage.core.features import decide_variants, feature_matrix, spendable_losses, unseen_groups
from conformal_arbitrage.core.risk import GuardianSees, Number, check_alpha, events_of
from conformal_arbitrage.core.trials import (
    Name,
    Split,
    Steps,
    TrialPart,
    TrialResults,
    build_steps,
    draw_splits,
    run_trials,
)
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.scorelog.fitness import group_rows, refuse_floor, refuse_unfit
from conformal_arbitrage.scorelog.log import CostKeywords, CostOptions, Costs, ScoreLog, costs_of
from conformal_arbitrage.types import Boundary, MissingGuardian

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- Held-out trials of a learned score ---


def learned_calibration(
    log: ScoreLog, steps: Steps, alphas: Sequence[Number], options: CalibrationOptions, bound: Fraction
) -> Callable[[Indices, Indices], Sequence[TrialPart]]:
    """Return how each trial decides its test rows by a score that is learned on its calibration rows."""
    budgets = [check_alpha(alpha, bound) for alpha in alphas]
    rows, features = learned_rows(log, options, bound), options.features or Features()
    draws = options.draws(log)
    u: Floats = np.zeros(len(log)) if draws is None else draws
    alone = log.sizes == 1

    def calibrate(calibration: Indices, test: Indices) -> list[TrialPart]:
        refuse_row_count(len(calibration), log.source)
        spendable = [spendable_losses(alpha, bound, len(calibration)) for alpha in budgets]
        kept = _kept(rows, calibration, test, u, spendable, features.menu_size, with_margin=options.score == "auto")
        return _parts(kept | alone, np.array(spendable) > 0, len(steps.row))

    return calibrate


def _kept(
    rows: LearnedRows,
    calibration: Indices,
    test: Indices,
    u: Floats,
    spendable: Sequence[int],
    menu_size: int | None,
    *,
    with_margin: bool,
) -> Bools:
    """Return which test rows are kept under each budget: budgets x rows, false for all others."""
    chosen = rows.score_rows(calibration[rows.inputs.used[calibration]], u, menu_size)
    index = test[rows.inputs.used[test]]
    queries, features = rows.inputs.feature_rows(index), chosen.features
    decided = decide_variants(
        chosen.fits(), feature_matrix(features, queries), u[index], rows.inputs.margin[index], budgets=spendable,
        unseen=unseen_groups(features, queries), answer=queries.answer, with_margin=with_margin,
    )  # fmt: skip
    kept = np.zeros((len(spendable), len(rows.loss)), np.bool_)
    for k, (decisions, most) in enumerate(zip(decided, spendable, strict=True)):
        kept[k, index] = decisions.kept & (most > 0)
    return kept


def _parts(kept: Bools, possible: Bools, steps: int) -> list[TrialPart]:
    """Return rows that are kept under the same budgets as parts: each is kept before any step, or deferred after all."""
    patterns, member = np.unique(kept, axis=1, return_inverse=True)
    relaxation = np.where(possible, 0.0, np.nan)
    return [
        TrialPart(rows=member == k, relaxation=relaxation, stop=np.where(pattern, 0, steps).astype(np.intp))
        for k, pattern in enumerate(patterns.T)
    ]


# --- Held-out trials of calibrations that are not one search for a total ---


def trial_calibration(
    log: ScoreLog, steps: Steps, alphas: Sequence[Number], options: CalibrationOptions, bound: Fraction
) -> Callable[[Indices, Indices], Sequence[TrialPart]] | None:
    """Return how each trial finds its thresholds; None if a limit on the total loss, or the usual rule, will do."""
    if options.zero_one:
        refuse_graded(log, options, bound)
    if options.learned:
        return learned_calibration(log, steps, alphas, options, bound)
    if options.by is None and (options.confidence is None or options.is_binary(log, bound)):
        return None
    budgets = [check_alpha(alpha, bound) for alpha in alphas]
    alone, masks = replace(options, by=None, small_groups="defer", group_source=None), _masks(log, options.by)

    def calibrate(rows: Indices, _: Indices) -> list[TrialPart]:
        groups = [rows[mask[rows]] for mask in masks]
        delta = options.delta(sum(group.size > 0 for group in groups))
        fewest = [rows_needed(alpha, bound) if options.merges else None for alpha in budgets]
        sources = list(zip(*(threshold_rows(groups, least) for least in fewest), strict=True))
        return [
            _part(steps, mask, _fits(log, of, budgets, alone, delta) if group.size else [None] * len(budgets))
            for mask, group, of in zip(masks, groups, sources, strict=True)
        ]

    return calibrate


def _masks(log: ScoreLog, by: str | None) -> list[Bools]:
    if by is None:
        return [np.ones(len(log), dtype=np.bool_)]
    return [np.isin(np.arange(len(log)), rows) for rows in group_rows(log, by).values()]


def _fits(
    log: ScoreLog,
    sources: Sequence[Indices],
    budgets: Sequence[Fraction],
    options: CalibrationOptions,
    delta: float | None,
) -> list[Fit]:
    """Calibrate a group on the rows that its threshold comes from at each budget, mostly the same ones."""
    parts = {id(source): LogSurvey(log.select(source), options) for source in sources}
    return [
        find_fits(parts[id(source)], [alpha], options, delta)[0] for source, alpha in zip(sources, budgets, strict=True)
    ]


def _part(steps: Steps, mask: Bools, fits: Sequence[Fit | None]) -> TrialPart:
    """Return what a trial does with the rows of a group; without a threshold they are deferred."""
    known = [
        (np.nan, np.nan) if fit is None or fit.relaxation is None else (fit.relaxation, fit.boundary_u) for fit in fits
    ]
    relaxation, draws = (np.array(column, dtype=np.float64) for column in zip(*known, strict=True))
    stop = np.where(np.isnan(relaxation), len(steps.row), steps.taken(relaxation, None if steps.u is None else draws))
    return TrialPart(rows=mask, relaxation=relaxation, stop=stop)


# --- evaluate ---


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

    def plot(self, ax: "Axes | str | Path | None" = None, *, x: str | None = None, y: str | None = None) -> "Axes":
        """Draw the frontier and return its axes; needs matplotlib.

        Args:
            ax: the axes to draw on, or a file to save a new figure to (.png, .svg, .pdf); a new figure if None.
            x: "cost", "loss" or the name of an outcome; by default the cost if it is known, otherwise the loss.
            y: the name of an outcome, or "loss"; by default the first outcome.
        """
        from conformal_arbitrage.evaluation.show import draw_frontier, plotted

        return plotted(ax, lambda axes: draw_frontier(axes, self, x=x, y=y))

    def __repr__(self) -> str:
        alphas = ", ".join(f"{point.alpha:g}" for point in self.of("conformal"))
        return (
            f"Frontier(alphas=[{alphas}], trials={self.trials}, calibration_size={self.calibration_size}, n={self.n})"
        )

    def _repr_html_(self) -> str:
        from conformal_arbitrage.evaluation.show import cells

        header, rows = cells(self)
        shares = [(f"alpha {point.alpha:g}", point.mean("deferred") or 0.0) for point in self.of("conformal")]
        bars = [(name, share, f"{100 * share:.1f} %") for name, share in shares]
        return html_table(rows, header=header) + html_bars("queries sent to the Guardian", bars)

    def dial(self) -> "FrontierDial":
        """Return the budgets as a dial for notebooks, in plain HTML: one button each, with what it buys."""
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
        seed: of the splits, and of the key behind the draws.
        balance_by: a text column such as "group"; each trial first draws `sample_size` rows balanced over it.
        sample_size: rows that `balance_by` draws.
        probabilities: add random routers that send each query to the Guardian with these probabilities.
        delta_x: measure delta against the chord between the single models at the same cost, or at the same loss.
        delta_of: the outcome that delta is measured in.
        options: how to calibrate; or pass the fields of `CalibrationOptions` as keywords (`guardian_sees=`, ...).
        costs: what the models cost; or pass the fields of `CostOptions` as keywords (`primary_cost=`, ...).
        **keywords: the fields of `options` and `costs`, one by one.
    """
    refuse_unfit(log.source, log.extra)
    refuse_floor(log)
    chosen, prices = _resolve(options, costs, keywords)
    if chosen.cluster is not None:
        raise OptionError("evaluate splits rows, not clusters, so it takes no cluster; leave it out")
    _check_sweep(seed, trials, probabilities, balance_by, sample_size, delta_x)
    _check_outcomes(log, alphas, delta_of)
    rng = np.random.default_rng(seed)
    chosen = chosen.settled(log, lambda: rng.bytes(32))
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
    losses = options.losses(log)
    losses = replace(losses, blocks=list(losses.blocks))  # read twice, and made once: a user's loss may be slow
    curve = options.curve(log, events_of(losses, len(log)))
    steps = build_steps(
        log,
        losses,
        guardian_sees=options.guardian_sees,
        outcomes={name: log.outcome(name) for name in log.outcome_names},
        leg=None if costs is None else costs.guardian,
        u=options.draws(log),
    )
    bound = curve.bound(options.loss_bound)
    tick = Fraction(1, 10**curve.tick_digits)
    for alpha in alphas:
        options.check_full_sight(check_alpha(alpha, bound), curve.in_full_sight, tick=tick, source=log.source)
    fixed = {} if costs is None else {"primary": costs.primary, "guardian": costs.guardian.full()}
    limits = _limits(log, alphas, options, bound, len(splits[0][0]), curve.tick_digits)
    rule = trial_calibration(log, steps, alphas, options, bound)
    results = run_trials(steps, curve, splits, alphas, bound=bound, limits=limits, calibrate=rule, fixed=fixed)
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


# --- A frontier as a dial in a notebook ---


_NOTE = "Choose a budget on these rows, and certify it on others: a budget chosen after looking has no guarantee."


@dataclass(frozen=True, slots=True)
class FrontierDial:
    """The conformal policies of a frontier, one in sight at a time."""

    frontier: Frontier

    def _repr_html_(self) -> str:
        points = self.frontier.of("conformal")
        name = f"ca{token_hex(4)}"  # of this picture: two dials on one page have buttons of their own
        shown = "".join(f"#{name}-{k}:checked~.{name}-{k}{{display:block}}" for k in range(len(points)))
        buttons = "".join(
            f'<input type="radio" name="{name}" id="{name}-{k}"{" checked" if k == 0 else ""}>'
            f'<label for="{name}-{k}"> {escape(f"alpha {point.alpha:g}")} </label>'
            for k, point in enumerate(points)
        )
        figures = "".join(
            f'<div class="{name} {name}-{k}">{self._figure(point)}</div>' for k, point in enumerate(points)
        )
        style = f"<style>.{name}{{display:none}}{shown}</style>"
        return f"<div>{style}{buttons}{figures}{html_paragraph(_NOTE)}</div>"

    def _figure(self, point: FrontierPoint) -> str:
        """Draw one budget beside the models alone."""
        (primary,), (guardian,) = self.frontier.of("primary"), self.frontier.of("guardian")
        shares = [("to the Guardian", point.mean("deferred") or 0.0)]
        bars = [(label, share, f"{100 * share:.1f} %") for label, share in shares]
        loss = point.mean("loss") or 0.0
        bars.append(("loss", loss / self.frontier.loss_bound, f"{loss:.3f} of {point.alpha:g}"))
        for outcome in point.outcomes:
            value, ends = point.mean(outcome) or 0.0, [end.mean(outcome) or 0.0 for end in (primary, guardian)]
            bars.append((outcome, value, f"{value:.3f} ({ends[0]:.3f} to {ends[1]:.3f})"))
        return html_bars(f"alpha {point.alpha:g}, mean of {self.frontier.trials} trials", bars)


# --- evaluate_cascade ---


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadePoint:
    """What cascades certified for one budget did on rows that they had not seen, on average over trials.

    Attributes:
        loss_error: its standard error over trials.
        over: share of trials whose loss lies above alpha; about half is what a promise on average gives.
        cost: of all models asked, relative to asking the Guardian alone.
        cost_error: its standard error.
        guardian_share: share of queries that the Guardian answers.
        chains: how often each chain was chosen.
    """

    alpha: float
    loss: float
    loss_error: float
    over: float
    cost: float
    cost_error: float
    guardian_share: float
    chains: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeEvaluation:
    """Held-out trials of cascades.

    Attributes:
        calibration_size: rows to choose, fit and calibrate on in each.
    """

    points: tuple[CascadePoint, ...]
    trials: int
    calibration_size: int
    test_size: int

    def to_dict(self) -> dict[str, Any]:
        """Return the evaluation as a JSON document."""
        return asdict(self)


def evaluate_cascade(
    log: CascadeLog,
    alphas: Iterable[Number],
    *,
    calibration_size: int,
    test_size: int | None = None,
    trials: int = 30,
    seed: int = 0,
    loss: Literal["net"] | None = None,
    chain: Sequence[str] | None = None,
    tuning_share: float = TUNING_SHARE,
    missing_guardian: MissingGuardian | None = None,
) -> CascadeEvaluation:
    """Certify a cascade on random parts of a log, and measure it on the rest.

    Args:
        calibration_size: rows of each trial to choose, fit and calibrate on.
        test_size: rows to measure on; by default all others.
        loss: as the further arguments, that of `calibrate_cascade`.
        chain: models to ask in this order; by default each trial chooses.
        tuning_share: the share of the calibration rows to choose and fit on.
        missing_guardian: how rows without a grade count.
    """
    tested = len(log) - calibration_size if test_size is None else test_size
    if not calibration_size > 0 or not 0 < tested <= len(log) - calibration_size or trials < 1:
        raise OptionError(
            f"{log.source}: {n_rows(calibration_size)} to calibrate on and {tested} to test on do not fit into {len(log)} "
            f"rows, or there are no trials ({trials}); choose smaller sizes"
        )
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(log)) for _ in range(trials)]
    parts = [(log.select(o[:calibration_size]), log.select(o[calibration_size:][:tested])) for o in orders]
    points: list[CascadePoint] = []
    for alpha in alphas:
        results: list[tuple[float, float, float]] = []
        chains: Counter[str] = Counter()
        for trial, (rows, new) in enumerate(parts):
            certificate = calibrate_cascade(
                rows,
                alpha,
                key=f"evaluation {seed} {trial}".encode(),
                loss=loss,
                chain=chain,
                tuning_share=tuning_share,
                seed=seed * trials + trial,  # a tuning part of its own, as the rows have ids of their own only once
                missing_guardian=missing_guardian,
            )
            decisions = apply_cascade(certificate, new)
            relative = float(decisions.cost.mean() / new.guardian_cost.mean())
            results.append((float(decisions.loss.mean()), relative, decisions.guardian_share))
            chains[chain_text(certificate.path.chain.models)] += 1
        points.append(_point(float(alpha), np.array(results), chains))
    return CascadeEvaluation(points=tuple(points), trials=trials, calibration_size=calibration_size, test_size=tested)


def _point(alpha: float, results: Any, chains: "Counter[str]") -> CascadePoint:
    means, errors = results.mean(axis=0).tolist(), (results.std(axis=0) / np.sqrt(len(results))).tolist()
    return CascadePoint(
        alpha=alpha,
        loss=means[0],
        loss_error=errors[0],
        over=float((results[:, 0] > alpha).mean()),
        cost=means[1],
        cost_error=errors[1],
        guardian_share=means[2],
        chains=dict(chains.most_common()),
    )
