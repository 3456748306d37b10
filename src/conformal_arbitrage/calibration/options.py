"""CalibrationOptions: everything a calibration depends on besides the log and alpha, validated once.

Shared by calibrate, verify and evaluate. Knows nothing of budgets, certificates or trials.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, get_args

from conformal_arbitrage.calibration.draws import draws
from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.core.losses import GuardianSees, Loss, LossStairs, Number, loss_stairs
from conformal_arbitrage.core.risk import RiskCurve
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Boundary, MissingGuardian

REGRET = "guardian_regret"
_Options = TypeVar("_Options")


class CalibrationKeywords(TypedDict, total=False):
    """The fields of `CalibrationOptions` as single keywords; None counts as not given."""

    guardian_sees: GuardianSees | None
    boundary: Boundary | None
    loss_bound: Number | None
    loss: Loss | None
    grid: Number | None
    missing_guardian: MissingGuardian | None
    key: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """How to calibrate: the rule, the loss it is measured in, and how missing scores count.

    Attributes:
        guardian_sees: what a deferral shows the Guardian: "candidates" (the paper), "all" (calibrated on its own
            loss), or "all-restricted-loss" (the paper's CA*).
        boundary: "include" keeps every action exactly at the threshold gap (the paper); "random" keeps a share of
            them and so spends the whole budget.
        loss_bound: the largest possible loss B; may be omitted, and is then 1, if all Guardian scores lie in [0, 1].
        loss: a loss of your own over (row, indices in sight), raised to its monotone envelope; the Guardian regret if
            None.
        grid: restrict the relaxation to 0, grid, ..., 1.
        missing_guardian: "worst_case" counts a row without a Guardian score as a loss of B unless every action is in
            sight.
        key: the secret bytes behind the draws of boundary="random"; generated if None.
    """

    guardian_sees: GuardianSees = "candidates"
    boundary: Boundary = "include"
    loss_bound: Number | None = None
    loss: Loss | None = None
    grid: Number | None = None
    missing_guardian: MissingGuardian | None = None
    key: bytes | None = None

    def __post_init__(self) -> None:
        """Reject unknown values and options that exclude each other."""
        for name, known in (
            ("guardian_sees", get_args(GuardianSees)),
            ("boundary", get_args(Boundary)),
            ("missing_guardian", (None, *get_args(MissingGuardian))),
        ):
            if getattr(self, name) not in known:
                allowed = ", ".join(repr(value) for value in known)
                raise OptionError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}")
        if self.boundary == "include" and self.key is not None:
            raise OptionError('a key is used with boundary="random" only; drop one of the two')
        if self.boundary == "random" and self.grid is not None:
            raise OptionError('a grid is used with boundary="include" only; drop one of the two')
        if self.key is not None and not (isinstance(self.key, bytes) and self.key):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError("the key must be bytes and not empty; use 16 random bytes or more")
        if self.loss is not None and self.loss_name == REGRET:
            raise OptionError(f"your own loss cannot be named {REGRET}; rename the function")

    def with_key(self, key: bytes) -> "CalibrationOptions":
        """Return the same options with a key, if the boundary is random and none was given."""
        return replace(self, key=key) if self.boundary == "random" and self.key is None else self

    def stairs(self, log: ScoreLog) -> LossStairs:
        """Return the loss of every row as its candidate set grows."""
        return loss_stairs(log, guardian_sees=self.guardian_sees, loss=self.loss, missing_loss=self._missing_loss)

    def curve(self, log: ScoreLog) -> RiskCurve:
        """Return the risk of a log at every relaxation that these options allow."""
        curve = RiskCurve.from_log(
            log,
            guardian_sees=self.guardian_sees,
            loss=self.loss,
            missing_loss=self._missing_loss,
            u=self.draws(log),
        )
        return curve if self.grid is None else curve.on_grid(self.grid)

    def draws(self, log: ScoreLog) -> Floats | None:
        """Return one draw per row, or None unless the boundary is random."""
        if self.boundary != "random":
            return None
        if self.key is None:
            raise OptionError('boundary="random" needs a key here; add one with `with_key`')
        return draws(self.key, log)

    @property
    def loss_name(self) -> str:
        """The name of the loss in certificates."""
        return REGRET if self.loss is None else str(getattr(self.loss, "__name__", type(self.loss).__name__))

    @property
    def _missing_loss(self) -> Number | None:
        if self.missing_guardian is None:
            return None
        return 1 if self.loss_bound is None else self.loss_bound


def resolve_options(
    options: _Options | None, kind: type[_Options], keywords: Mapping[str, Any], *, name: str
) -> _Options:
    """Return `options`, or build them from single keywords; refuse both at once.

    Args:
        options: the options object, if the caller passed one.
        kind: its class.
        keywords: single keywords; None counts as not given.
        name: the parameter that takes the object, for the message.
    """
    present = {key: value for key, value in keywords.items() if value is not None}
    if options is None:
        return kind(**present)
    if present:
        first = next(iter(present))
        raise OptionError(f"{first}= and {name}= exclude each other; write {name}={kind.__name__}({first}=...)")
    return options
