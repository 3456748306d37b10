"""Simulated worlds with a known truth, and the expected loss of a calibrated rule in them.

Each repetition draws a calibration log and fresh queries, calibrates, runs the rule and measures the loss of what is in
sight with the truth, in plain NumPy: nothing of the product's losses or evaluation is used here.
"""

from dataclasses import dataclass

import numpy as np

from conformal_arbitrage import ScoreLog, calibrate

FRESH = 200
"""Queries per repetition; their mean counts as one observation."""


@dataclass(frozen=True)
class World:
    """How queries are generated. `decimals` rounds the Primary's scores: None for continuous ones.

    The Guardian's best action is the Primary's top one with a probability that grows with its lead, so a larger
    relaxation lowers the loss. `failing` is how much likelier the Guardian is to fail where it would disagree.
    """

    actions: int = 3
    decimals: int | None = None
    one_hot: bool = False
    scale: float = 1.0
    failing: float = 0.0

    def draw(self, rng, n):
        primary = rng.random((n, self.actions))
        if self.decimals is not None:
            primary = np.round(primary, self.decimals)
        noise = rng.normal(size=primary.shape)
        liking = 0.5 * primary + noise
        graded = 1 / (1 + np.exp(-4 * (liking - 1)))
        guardian = np.eye(self.actions)[liking.argmax(axis=1)] if self.one_hot else graded
        lost = guardian.max(axis=1) - guardian[np.arange(n), primary.argmax(axis=1)]
        fails = rng.random(n) < self.failing * lost
        return primary, self.scale * guardian, fails


def regret(guardian, kept, *, sees_all):
    """Return the true regret of the actions in sight, row by row."""
    sight = np.where(sees_all & (kept.sum(axis=1, keepdims=True) > 1), True, kept)
    return guardian.max(axis=1) - np.where(sight, guardian, -np.inf).max(axis=1)


def log_of(primary, guardian, prefix="c"):
    return ScoreLog.from_arrays(primary, guardian, id=[f"{prefix}{k}" for k in range(len(primary))])


def product(alpha, *, guardian_sees="candidates", **options):
    """Return the rule as shipped: calibrate on a log, then `apply` the certificate to fresh queries."""

    def rule(rng, primary, guardian, fails, fresh):
        seen = np.where(fails[:, None], np.nan, guardian)
        key = {"key": rng.bytes(16)} if options.get("boundary") == "random" else {}
        certificate = calibrate(log_of(primary, seen), alpha, guardian_sees=guardian_sees, **options, **key)
        zeros = np.zeros(fresh.shape)
        return certificate.apply(log_of(fresh, zeros, "f")).candidate.reshape(fresh.shape)

    return rule


def expected_loss(world, rule, n, repetitions, *, sees_all=False, seed=0):
    """Return the mean loss of the next decision over calibration logs and queries, and its standard error."""
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(repetitions):
        primary, guardian, fails = world.draw(rng, n)
        fresh, truth, _ = world.draw(rng, FRESH)
        means.append(regret(truth, rule(rng, primary, guardian, fails, fresh), sees_all=sees_all).mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / repetitions**0.5)


def keeps(alpha, measured, *, tolerance=3.0):
    """Tell whether a measured loss is within the budget, up to three standard errors."""
    mean, error = measured
    return mean <= alpha + tolerance * error


def spends(alpha, measured, n, bound, *, tolerance=3.0):
    """Tell whether a loss is at least alpha - 2 B / (n + 1), up to three standard errors."""
    mean, error = measured
    return mean >= alpha - 2 * bound / (n + 1) - tolerance * error
