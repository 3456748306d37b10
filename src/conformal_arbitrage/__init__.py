"""Conformal Arbitrage: route between a Primary and a Guardian model, with a guarantee on the loss."""

from conformal_arbitrage.certificate import Calibration, calibrate, read_key, rows_needed, verify
from conformal_arbitrage.columns import Usage
from conformal_arbitrage.core.risk import RiskCurve
from conformal_arbitrage.decisions import Decisions
from conformal_arbitrage.errors import (
    ArbitrageError,
    CertificateError,
    InfeasibleError,
    OptionError,
    OutputError,
    ScoreLogError,
    SourceError,
)
from conformal_arbitrage.frontier import Frontier, FrontierPoint, evaluate
from conformal_arbitrage.logs import ScoreLog
from conformal_arbitrage.types import Decision, Row

__all__ = [
    "ArbitrageError",
    "Calibration",
    "CertificateError",
    "Decision",
    "Decisions",
    "Frontier",
    "FrontierPoint",
    "InfeasibleError",
    "OptionError",
    "OutputError",
    "RiskCurve",
    "Row",
    "ScoreLog",
    "ScoreLogError",
    "SourceError",
    "Usage",
    "calibrate",
    "evaluate",
    "read_key",
    "rows_needed",
    "verify",
]
