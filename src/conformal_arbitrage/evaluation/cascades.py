"""evaluate_cascade: held-out trials of a cascade, each with its own choice of models.

Knows nothing of the command line; what is measured is the certificate that `calibrate_cascade` would give.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from conformal_arbitrage.calibration.cascade import TUNING_SHARE, calibrate_cascade
from conformal_arbitrage.calibration.path_guarantee import chain_text
from conformal_arbitrage.core.losses import Number
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.types import MissingGuardian


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadePoint:
    """What cascades certified for one budget did on rows that they had not seen, on average over trials.

    Attributes:
        alpha: the risk budget.
        loss: mean loss.
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
        points: one per budget.
        trials: random splits behind each.
        calibration_size: rows to choose, fit and calibrate on in each.
        test_size: rows to measure on.
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
        log: the recorded answers of all models.
        alphas: risk budgets.
        calibration_size: rows of each trial to choose, fit and calibrate on.
        test_size: rows to measure on; by default all others.
        trials: number of random splits.
        seed: of the splits.
        loss: as the further arguments, that of `calibrate_cascade`.
        chain: models to ask in this order; by default each trial chooses.
        tuning_share: the share of the calibration rows to choose and fit on.
        missing_guardian: how rows without a grade count.
    """
    tested = len(log) - calibration_size if test_size is None else test_size
    if not calibration_size > 0 or not 0 < tested <= len(log) - calibration_size or trials < 1:
        raise OptionError(
            f"{log.source}: {calibration_size} rows to calibrate on and {tested} to test on do not fit into {len(log)} "
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
            decisions = certificate.apply(new)
            relative = float(decisions.cost.mean() / new.guardian_cost.mean())
            results.append((float(decisions.loss.mean()), relative, decisions.guardian_share))
            chains[chain_text(certificate.chain.models)] += 1
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
