"""Conformal Arbitrage: route between a Primary and a Guardian model, with a guarantee on the loss."""

import typing as _typing

if _typing.TYPE_CHECKING:  # loaded on first use: a command, or a script, should not wait for what it does not need
    from conformal_arbitrage.calibration.batch import (
        BatchColumns,
        BatchDraw,
        BatchLabels,
        BatchPlan,
        DrawnBatch,
        certify_batch,
        draw_batch,
        open_batch,
        plan_batch,
    )
    from conformal_arbitrage.calibration.calibrate import calibrate
    from conformal_arbitrage.calibration.certificate import Certificate, Decisions
    from conformal_arbitrage.calibration.learned import Features
    from conformal_arbitrage.calibration.learning import learn
    from conformal_arbitrage.calibration.options import CalibrationOptions
    from conformal_arbitrage.calibration.planning import Plan, plan, rows_needed, split
    from conformal_arbitrage.calibration.secret import ProjectSecret
    from conformal_arbitrage.calibration.verify import Verification, verify
    from conformal_arbitrage.collecting.collect import collect
    from conformal_arbitrage.core.risk import RiskCurve
    from conformal_arbitrage.errors import (
        ArbitrageError,
        CertificateError,
        ConfigError,
        CostLimitError,
        CutOffError,
        DeadlineError,
        EngineError,
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
    from conformal_arbitrage.evaluation.assessment import Assessment, Swap, assess, model_grades, swap
    from conformal_arbitrage.evaluation.compare import RuleComparison, compare
    from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint, evaluate
    from conformal_arbitrage.evaluation.inspection import Inspection, inspect
    from conformal_arbitrage.evaluation.recommendation import Recommendation, recommend
    from conformal_arbitrage.live.rule import ConformalArbitrage, ConformalRouter, Policy, RandomRouter, SingleModel
    from conformal_arbitrage.models.resilience import Price
    from conformal_arbitrage.scorelog.log import CostOptions, ScoreLog, Usage
    from conformal_arbitrage.scorelog.parts import ScoreParts
    from conformal_arbitrage.scorelog.spark import SparkTable
    from conformal_arbitrage.types import ChatRequest, Decision, Leg, Query, Row, Spent

    __version__: str

__all__ = [
    "ArbitrageError",
    "Assessment",
    "BatchColumns",
    "BatchDraw",
    "BatchLabels",
    "BatchPlan",
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
    "DrawnBatch",
    "EngineError",
    "Features",
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
    "ProjectSecret",
    "Query",
    "RandomRouter",
    "Recommendation",
    "RefusalError",
    "ReplyError",
    "RiskCurve",
    "Row",
    "RuleComparison",
    "ScoreLog",
    "ScoreLogError",
    "ScoreParts",
    "ScorerError",
    "SingleModel",
    "SourceError",
    "SparkTable",
    "Spent",
    "StaleCalibrationError",
    "Swap",
    "UpstreamError",
    "Usage",
    "Verification",
    "assess",
    "calibrate",
    "certify_batch",
    "collect",
    "compare",
    "draw_batch",
    "evaluate",
    "inspect",
    "learn",
    "model_grades",
    "open_batch",
    "plan",
    "plan_batch",
    "recommend",
    "rows_needed",
    "split",
    "swap",
    "verify",
]


if not _typing.TYPE_CHECKING:  # a type checker would take every unknown name for one of these
    _NAMES = {
        "calibration.batch": (
            "BatchColumns BatchDraw BatchLabels BatchPlan DrawnBatch certify_batch draw_batch open_batch plan_batch "
        ),
        "calibration.calibrate": ("calibrate "),
        "calibration.certificate": ("Certificate Decisions "),
        "calibration.learned": ("Features "),
        "calibration.learning": ("learn "),
        "calibration.options": ("CalibrationOptions "),
        "calibration.planning": ("Plan plan rows_needed split "),
        "calibration.secret": ("ProjectSecret "),
        "calibration.verify": ("Verification verify "),
        "collecting.collect": ("collect "),
        "core.risk": ("RiskCurve "),
        "errors": (
            "ArbitrageError CertificateError ConfigError CostLimitError CutOffError DeadlineError "
            "EngineError GuardianError InfeasibleError OptionError OutputError RefusalError ReplyError "
            "ScoreLogError ScorerError SourceError StaleCalibrationError UpstreamError "
        ),
        "evaluation.assessment": ("Assessment Swap assess model_grades swap "),
        "evaluation.compare": ("RuleComparison compare "),
        "evaluation.frontier": ("Frontier FrontierPoint evaluate "),
        "evaluation.inspection": ("Inspection inspect "),
        "evaluation.recommendation": ("Recommendation recommend "),
        "live.rule": ("ConformalArbitrage ConformalRouter Policy RandomRouter SingleModel "),
        "models.resilience": ("Price "),
        "scorelog.log": ("CostOptions ScoreLog Usage "),
        "scorelog.parts": ("ScoreParts "),
        "scorelog.spark": ("SparkTable "),
        "types": ("ChatRequest Decision Leg Query Row Spent "),
    }
    _HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        """Load a name on first use."""
        from importlib import import_module

        if name == "__version__":
            value = import_module("importlib.metadata").version("conformal-arbitrage")
        elif name in _HOMES:
            value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """List the names that are loaded on first use as well."""
        return sorted({*globals(), *__all__, "__version__"})
