"""Terms: the options a rule is calibrated under, checked once and shared by calibrate, verify and evaluate.

Also the draws of boundary="random". Knows nothing of budgets, certificates or trials.
"""

import hmac
from dataclasses import dataclass
from typing import get_args

import numpy as np

from conformal_arbitrage.core.gaps import Floats
from conformal_arbitrage.core.losses import GuardianSees, Loss, LossStairs, Number, loss_stairs
from conformal_arbitrage.core.risk import RiskCurve
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Boundary, MissingGuardian

REGRET = "guardian_regret"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Everything but the budget and the log; see `calibrate` for what each option means."""

    guardian_sees: GuardianSees = "candidates"
    boundary: Boundary = "include"
    loss_bound: Number | None = None
    loss: Loss | None = None
    grid: Number | None = None
    missing_guardian: MissingGuardian | None = None
    key: bytes | None = None

    def __post_init__(self) -> None:
        """Refuse names that are not options, and options that do not go together."""
        for name, known in (
            ("boundary", get_args(Boundary)),
            ("missing_guardian", (None, *get_args(MissingGuardian))),
        ):
            if getattr(self, name) not in known:
                options = ", ".join(repr(k) for k in known)
                raise OptionError(f"{name} must be one of {options}; got {getattr(self, name)!r}")
        if self.boundary == "include" and self.key is not None:
            raise OptionError('a key goes with boundary="random" only; drop one of the two')
        if self.boundary == "random" and self.grid is not None:
            raise OptionError('grid goes with boundary="include" only; drop one of the two')
        if self.boundary == "random" and not (isinstance(self.key, bytes) and self.key):
            raise OptionError("the key must be bytes, and at least one; 16 or more random ones are safe")
        if self.loss is not None and self.loss_name == REGRET:
            raise OptionError(f"a loss of one's own cannot be called {REGRET}; rename the function")

    def stairs(self, log: ScoreLog) -> LossStairs:
        """The loss of every row as its candidate set grows."""
        return loss_stairs(log, guardian_sees=self.guardian_sees, loss=self.loss, missing_loss=self._missing_loss)

    def curve(self, log: ScoreLog) -> RiskCurve:
        """The risk of a log at every relaxation these terms allow."""
        curve = RiskCurve.from_log(
            log,
            guardian_sees=self.guardian_sees,
            loss=self.loss,
            missing_loss=self._missing_loss,
            u=self.draws(log),
        )
        return curve if self.grid is None else curve.on_grid(self.grid)

    def draws(self, log: ScoreLog) -> Floats | None:
        """One draw per row, or None where the boundary is not random."""
        return None if self.key is None else draws(self.key, log)

    @property
    def loss_name(self) -> str:
        """What certificates call the loss."""
        return REGRET if self.loss is None else str(getattr(self.loss, "__name__", type(self.loss).__name__))

    @property
    def _missing_loss(self) -> Number | None:
        if self.missing_guardian is None:
            return None
        return 1 if self.loss_bound is None else self.loss_bound


def draw(key: bytes, id: str) -> float:
    """The draw of one query: the first 53 bits of HMAC-SHA256(key, id), in [0, 1)."""
    digest = hmac.digest(key, id.encode(), "sha256")
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def draws(key: bytes, log: ScoreLog) -> Floats:
    """The draws of all rows of a log."""
    if log.id is None:
        raise OptionError(
            f'{log.source}: boundary="random" needs an `id` column, unique and fixed before the scores are known; '
            "row numbers will not do"
        )
    return np.array([draw(key, id) for id in log.id.tolist()])
