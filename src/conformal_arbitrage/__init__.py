"""Conformal Arbitrage: route between a Primary and a Guardian model, with a guarantee on the loss."""

from conformal_arbitrage.calibration.certificate import Certificate, calibrate, read_key, rows_needed, verify
from conformal_arbitrage.calibration.decisions import Decisions
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
from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint, evaluate
from conformal_arbitrage.live.policy import ConformalArbitrage, ConformalRouter, Policy, RandomRouter, SingleModel
from conformal_arbitrage.scorelog.columns import Usage
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import ChatRequest, Decision, Leg, Query, Row, Spent
from conformal_arbitrage.upstream.pricing import Price

__all__ = [
    "ArbitrageError",
    "Certificate",
    "CertificateError",
    "ChatRequest",
    "ConfigError",
    "ConformalArbitrage",
    "ConformalRouter",
    "CostLimitError",
    "CutOffError",
    "DeadlineError",
    "Decision",
    "Decisions",
    "Frontier",
    "FrontierPoint",
    "GuardianError",
    "InfeasibleError",
    "Leg",
    "OptionError",
    "OutputError",
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
    "calibrate",
    "evaluate",
    "read_key",
    "rows_needed",
    "verify",
]
