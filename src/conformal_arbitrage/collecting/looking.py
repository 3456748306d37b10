"""The looking part of a policy's rows: what people may look at to choose a budget, apart from what certifies the choice.

A keyed draw by id puts two fifths of all rows into it, whatever their scores are. Figures of other budgets come from these
rows alone; a certificate at a budget that was chosen by them takes the others (`records export --unseen`). Renewals at the
budget of the certificate in force take all rows: nothing that was looked at changes which rows, when, or at which budget.

Knows nothing of pages, databases or money.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.draws import draw
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.project_secret import subkey
from conformal_arbitrage.calibration.verify import options_of
from conformal_arbitrage.collecting.stored_rows import is_known, rows_log, uncertified_log
from conformal_arbitrage.core.losses import GuardianSees
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.frontier import evaluate
from conformal_arbitrage.store.ids import id_at
from conformal_arbitrage.store.row_base import CalibrationRow

LOOKING_SHARE = 0.4
FEWEST_LOOKED_AT = 100
"""With fewer rows in the looking part there is no figure."""
BUDGETS = (
    "0.005", "0.0075", "0.01", "0.0125", "0.015", "0.02", "0.025", "0.03", "0.035", "0.04", "0.045", "0.05", "0.055",
    "0.06", "0.07", "0.08", "0.09", "0.1", "0.12", "0.15", "0.2", "0.25", "0.3",
)  # fmt: skip
"""The budgets that are shown, as shares of the loss bound; the stops of a dial are among them."""
_TRIALS = 20


class LookingPart:
    """Which rows may be looked at.

    Args:
        secrets: the project's secret, and after a rotation its predecessors: rows that those showed count as seen.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._keys = [subkey(secret, "looking v1") for secret in secrets]

    def shows(self, id: str) -> bool:
        """Tell whether a row may be looked at."""
        return draw(self._keys[0], id) < LOOKING_SHARE

    def is_unseen(self, id: str) -> bool:
        """Tell whether a row was never in the looking part."""
        return all(draw(key, id) >= LOOKING_SHARE for key in self._keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedPoint:
    """What a budget would give, estimated on the looking part.

    Attributes:
        alpha: the risk budget.
        share: of the queries that go to the Guardian.
        loss: the mean loss of the others' answers and theirs.
    """

    alpha: float
    share: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedFrontier:
    """What budgets would give: each calibrated on random halves of the looking part, and measured on the other halves.

    Attributes:
        rows: how many rows that is.
        pending: rows of the looking part that are left out, since their outcome is neither known nor due.
        missing: rows whose outcome is overdue, which count as the worst case.
        points: by rising budget.
        confidence: that of the certificate, which every budget would be certified at; None for an average.
    """

    rows: int
    pending: int
    missing: int
    points: tuple[LookedPoint, ...]
    confidence: float | None = None

    def nearest(self, alpha: float) -> LookedPoint:
        """Return the point whose budget is nearest."""
        return min(self.points, key=lambda point: abs(point.alpha - alpha))


def looked_frontier(
    rows: Iterable[CalibrationRow],
    certificate: Certificate | None,
    *,
    alpha: float,
    guardian_sees: GuardianSees,
    settled: float,
) -> LookedFrontier | None:
    """Return what budgets would give on rows of the looking part; None if there are too few.

    Args:
        rows: of the looking part.
        certificate: the one in force, whose options are kept; None in shadow mode without one.
        alpha: a budget to show besides the fixed ones.
        guardian_sees: what a deferral shows the Guardian, without a certificate.
        settled: rows that arrived before this time and have no outcome count as missing, later ones as pending.

    Raises:
        OptionError: the figures of this kind of certificate cannot be estimated so.
    """
    everything, end = list(rows), id_at(settled)
    _refuse(everything, certificate)
    counted = [row for row in everything if is_known(row) or row.id <= end]
    if len(counted) < FEWEST_LOOKED_AT:
        return None
    if certificate is None:
        options = CalibrationOptions(guardian_sees=guardian_sees, missing_guardian="worst_case")
        log, bound = uncertified_log(counted), Fraction(1)
    else:
        options = replace(options_of(certificate), missing_guardian="worst_case", dial=False, margins=False)
        log = rows_log(counted, certificate, None, source="the rows that may be looked at")
        bound = Fraction(repr(certificate.loss_bound))
    budgets = sorted({*(float(Fraction(one) * bound) for one in BUDGETS), alpha})
    frontier = evaluate(log, budgets, calibration_size=len(log) // 2, trials=_TRIALS, options=options)
    points = [
        LookedPoint(alpha=point.alpha or 0.0, share=point.mean("deferred") or 0.0, loss=point.mean("loss") or 0.0)
        for point in frontier.of("conformal")
    ]
    return LookedFrontier(
        rows=len(counted),
        pending=len(everything) - len(counted),
        missing=sum(not is_known(row) for row in counted),
        points=tuple(points),
        confidence=None if certificate is None else certificate.confidence,
    )


def _refuse(rows: Sequence[CalibrationRow], certificate: Certificate | None) -> None:
    """Refuse what an exchange of single rows would misjudge."""
    if any(row.session is not None for row in rows):
        raise OptionError("this policy decides by session, and turns of one session resemble each other")
    if certificate is None:
        return
    for unfit, why in (
        (certificate.by is not None, "its certificate has one threshold for each group"),
        (certificate.cluster is not None, "its certificate is about clusters of rows"),
        (certificate.loss != "guardian_regret", f"its loss is {certificate.loss!r}"),
        ((certificate.score or "margin") != "margin", "its certificate orders queries by a learned score"),
    ):
        if unfit:
            raise OptionError(f"{why}; export a log and use `arbitrage evaluate`")
