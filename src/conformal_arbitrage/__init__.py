"""Conformal Arbitrage: route between a Primary and a Guardian model, with a guarantee on the loss."""

import typing as _typing

from conformal_arbitrage.calibration.calibrate import calibrate
from conformal_arbitrage.calibration.certificate import Certificate, read_key
from conformal_arbitrage.calibration.decisions import Decisions
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.planning import Plan, plan, rows_needed, split
from conformal_arbitrage.calibration.verify import Verification, verify
from conformal_arbitrage.core.risk import RiskCurve
from conformal_arbitrage.errors import (
    ArbitrageError,
    CertificateError,
    ConfigError,
    CostLimitError,
    CutOffError,
    DeadlineError,
    GuardianError,
    InfeasibleError,
    OptionError,
    OutputError,
    RefusalError,
    ReplyError,
    ScoreLogError,
    ScorerError,
    SourceError,
    StaleCalibrationError,
    UpstreamError,
)
from conformal_arbitrage.evaluation.costs import CostOptions
from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint, evaluate
from conformal_arbitrage.evaluation.inspection import Inspection, inspect
from conformal_arbitrage.live.policy import ConformalArbitrage, ConformalRouter, Policy, RandomRouter, SingleModel
from conformal_arbitrage.scorelog.columns import Usage
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import ChatRequest, Decision, Leg, Query, Row, Spent
from conformal_arbitrage.upstream.pricing import Price

if _typing.TYPE_CHECKING:
    from conformal_arbitrage.collecting.collect import collect

    __version__: str

__all__ = [
    "ArbitrageError",
    "CalibrationOptions",
    "Certificate",
    "CertificateError",
    "ChatRequest",
    "ConfigError",
    "ConformalArbitrage",
    "ConformalRouter",
    "CostLimitError",
    "CostOptions",
    "CutOffError",
    "DeadlineError",
    "Decision",
    "Decisions",
    "Frontier",
    "FrontierPoint",
    "GuardianError",
    "InfeasibleError",
    "Inspection",
    "Leg",
    "OptionError",
    "OutputError",
    "Plan",
    "Policy",
    "Price",
    "Query",
    "RandomRouter",
    "RefusalError",
    "ReplyError",
    "RiskCurve",
    "Row",
    "ScoreLog",
    "ScoreLogError",
    "ScorerError",
    "SingleModel",
    "SourceError",
    "Spent",
    "StaleCalibrationError",
    "UpstreamError",
    "Usage",
    "Verification",
    "calibrate",
    "collect",
    "evaluate",
    "inspect",
    "plan",
    "read_key",
    "rows_needed",
    "split",
    "verify",
]


if not _typing.TYPE_CHECKING:  # a type checker would take every unknown name for one of these

    def __getattr__(name: str) -> object:
        """Load `collect` and the version when they are first used; both would slow down every import."""
        if name == "collect":
            from conformal_arbitrage.collecting.collect import collect as value
        elif name == "__version__":
            from importlib.metadata import version

            value = version("conformal-arbitrage")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """List the names that are loaded on first use as well."""
        return sorted({*globals(), *__all__, "__version__"})
