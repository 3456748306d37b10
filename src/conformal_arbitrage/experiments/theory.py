"""Theorem 1 and the bounds of conformal risk control, simulated.

Each query has two actions and a margin, uniform on [0, 1]; the Primary's choice has a regret of mean r, so the risk is
R(relaxation) = r (1 - relaxation), and the best relaxation for a budget is known: 1 - alpha / r.

Theorem 1 says that the utility lost by calibrating on n rows is of order 1/n. Its proof applies a bound on an
expectation to single samples. With a utility that is smooth at the best relaxation the order is 1/n; with one that has
a kink there it is n^(-1/2).
"""

import numpy as np

from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.core.risk import RiskCurve
from conformal_arbitrage.experiments.protocol import Experiment, Source
from conformal_arbitrage.experiments.report import Report, ReportTable
from conformal_arbitrage.scorelog.log import ScoreLog

NAME, TITLE = "theory", "Theorem 1 and the bounds of conformal risk control, simulated"
REGRET, ALPHA = 0.4, 0.1
SIZES = (400, 800, 1600, 3200, 6400)
REPETITIONS = 1500
Moments = tuple[float, float]
"""Mean and standard error."""


def run_theory(source: Source, seed: int) -> Report:
    """Simulate the expected loss against its two bounds, and the utility gap against n with fitted slopes."""
    del source  # a simulation needs no scores
    rng = np.random.default_rng(seed)
    rows = [_at_size(rng, n) for n in SIZES]
    slopes = (_slope([row[4][0] for row in rows]), _slope([row[5][0] for row in rows]))
    bounds = ReportTable(
        name="bounds",
        title="Loss and utility gap by number of rows",
        columns=("n", "expected loss", "lower bound", "alpha", "utility gap, smooth", "utility gap, kinked"),
        rows=tuple(rows),
        decimals=(0, 5, 5, 5, 5, 5),
        note="± is the standard error of the mean.",
    )
    fitted = ReportTable(
        name="slopes",
        title="Order of the utility gap: slope of log gap on log n",
        columns=("utility", "slope", "theory"),
        rows=(("smooth", slopes[0], -1.0), ("kinked", slopes[1], -0.5)),
        decimals=(0, 2, 1),
    )
    return Report(
        name=NAME,
        title=TITLE,
        source="a simulation with a known truth; no recorded scores",
        configuration={"repetitions": REPETITIONS, "alpha": ALPHA, "mean regret": REGRET},
        data_sha256=None,
        seed=seed,
        tables=(bounds, fitted),
        notes=(
            "The paper's Theorem 1 claims 1/n for both. It holds for the smooth utility; with a kink at the best relaxation "
            "the order is n^(-1/2), because an average of deviations of both signs is not an average of losses.",
        ),
        facts={"rows": rows, "slopes": slopes},
    )


def _at_size(rng: np.random.Generator, n: int) -> tuple[int, Moments, float, float, Moments, Moments]:
    """Return one line of the table: mean and standard error over many calibrations on n rows."""
    best = 1 - ALPHA / REGRET
    relaxation, at_best = np.transpose([_calibrated(rng, n, best) for _ in range(REPETITIONS)])
    # A control variate: the risk at the best relaxation has mean exactly alpha, so subtracting its noise keeps all means.
    smooth = relaxation - (at_best - ALPHA) / REGRET
    kinked = np.maximum(relaxation - best, 0.0)
    return n, _moments(REGRET * (1 - smooth)), ALPHA - 2 / (n + 1), ALPHA, _moments(smooth - best), _moments(kinked)


def _calibrated(rng: np.random.Generator, n: int, best: float) -> tuple[float, float]:
    """Return the relaxation calibrated on n fresh rows, and their empirical risk at the best one."""
    margin = rng.random(n)
    regret = 2 * REGRET * rng.random(n)
    log = ScoreLog.from_arrays(np.column_stack([margin, np.zeros(n)]), np.column_stack([1 - regret, np.ones(n)]))
    curve = RiskCurve.from_log(log, guardian_sees="candidates")
    relaxation = float(curve.relaxation(ALPHA))
    return (1.0 if np.isnan(relaxation) else relaxation), float(curve.mean(best))


def _moments(values: Floats) -> Moments:
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


def _slope(gaps: list[float]) -> float:
    return float(np.polyfit(np.log(SIZES), np.log(gaps), 1)[0])


EXPERIMENT = Experiment(name=NAME, title=TITLE, run=run_theory)
