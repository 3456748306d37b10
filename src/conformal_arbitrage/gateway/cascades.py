"""Cascades in the gateway: their certificates, and all their models in shadow mode.

Knows nothing of requests over HTTP, or of which policies there are.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.combinations import Feature
from conformal_arbitrage.calibration.documents import read_document
from conformal_arbitrage.calibration.path_certificate import PathCertificate, is_path_document
from conformal_arbitrage.errors import ScorerError, StaleCalibrationError
from conformal_arbitrage.live.config import PolicyConfig
from conformal_arbitrage.live.policy import Answered, answered, scored
from conformal_arbitrage.scorers.answers import answer_text
from conformal_arbitrage.scorers.base import Answerer, Scorer
from conformal_arbitrage.store.record import JSONObject
from conformal_arbitrage.types import ChatRequest, Decision, Leg, Query, is_object


def certificate_file(path: Path) -> Certificate | PathCertificate:
    """Read a certificate of either kind."""
    document = read_document(path)
    return (
        PathCertificate.from_dict(document, source=str(path)) if is_path_document(document) else Certificate.load(path)
    )


def certificate_document(path: Path) -> JSONObject:
    """Read a certificate of either kind as the document that is installed."""
    certificate = certificate_file(path)
    return certificate.to_dict(with_arrays=True) if isinstance(certificate, Certificate) else certificate.to_dict()


def cascade_features(settings: PolicyConfig) -> list[Feature]:
    """Return what a policy asks for that may have no proof for a cascade."""
    wanted: dict[Feature, bool] = {"red line": settings.alarm_line == "alpha", "guard": settings.guard}
    return [feature for feature, is_set in wanted.items() if is_set]


def served_cascade(name: str, document: JSONObject, *, cascade: bool) -> PathCertificate:
    """Return the certificate of a cascade for a policy that is served by one.

    Raises:
        StaleCalibrationError: the policy is served by a pair, or the certificate is for one.
    """
    if not is_path_document(dict(document)):
        raise StaleCalibrationError(
            f"policy {name}: the certificate is for two models, and the policy is served by a cascade; calibrate with "
            f"--path, or drop cascade in [policies.{name}]"
        )
    if not cascade:
        raise StaleCalibrationError(
            f"policy {name}: the certificate is for a cascade of several models; set cascade = true in [policies.{name}]"
        )
    return PathCertificate.from_dict(dict(document), source=f"policy {name}")


async def all_scored(models: Mapping[str, Scorer], query: Query) -> list[Leg]:
    """Ask every cheap model of a cascade, at once."""
    return await asyncio.gather(*(scored("primary", one, query) for one in models.values()))


async def all_answered(models: Mapping[str, Answerer], request: ChatRequest) -> list[Answered]:
    """Let every cheap model of a cascade answer, at once."""
    return await asyncio.gather(*(answered("primary", one, request) for one in models.values()))


def chain_answers(decision: Decision) -> tuple[str, ...] | None:
    """Return what each cheap model said, empty where it failed; None unless several were asked."""
    replies = [leg.reply for leg in decision.legs if leg.role == "primary"]
    return tuple(map(_said, replies)) if len(replies) > 1 else None


def _said(reply: object) -> str:
    try:
        return answer_text(reply["choices"][0]["message"]) if is_object(reply) else ""
    except ScorerError:
        return ""
