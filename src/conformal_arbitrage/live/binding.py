"""Whether a certificate fits the models, and the requests, that it is to be used with."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from conformal_arbitrage.calibration.certificate import Certificate, group_source_of
from conformal_arbitrage.calibration.learned import text_embedding
from conformal_arbitrage.calibration.options import refusal
from conformal_arbitrage.calibration.promises import PerSession
from conformal_arbitrage.errors import CertificateError, StaleCalibrationError
from conformal_arbitrage.models.port import Answerer, Identity, Scorer

UNBOUND = "unbound"
UNSIGNED = "unsigned"
"""The name that lets a policy use a certificate without this project's signature."""


def check_router_form(certificate: Certificate, *, by_session: bool) -> None:
    """Refuse a certificate of menus, or of another unit.

    Raises:
        StaleCalibrationError: it was made from a log that is not in router form, or whose rows are another unit.
        CertificateError: it has groups, and the policy decides by session.
    """
    if by_session != isinstance(certificate.promise, PerSession):
        unit, other = ("session", "queries") if by_session else ("query", "sessions")
        raise StaleCalibrationError(
            f"the certificate was made for {other}, and this policy decides by {unit}; calibrate on rows of the right kind, "
            f'or {"leave out" if by_session else "set"} sticky = "session" in the policy'
        )
    if by_session and certificate.groups is not None:
        raise CertificateError(f"session and groups do not go together: {refusal('session', 'groups')}")
    if not certificate.evidence.router:
        raise StaleCalibrationError(
            "the certificate was made from menus, and free text needs one from two graded answers and a confidence; "
            "calibrate on a log in router form, or use ConformalArbitrage"
        )


def check_group_source(certificate: Certificate, source: str | None, *, policy: str) -> None:
    """Refuse a certificate by groups for a policy whose requests name no group: every one of them would be deferred.

    Raises:
        StaleCalibrationError: it has groups, and there is no source of theirs.
    """
    if certificate.groups is not None and source is None:
        raise StaleCalibrationError(
            f"policy {policy}: the certificate has a threshold for each '{certificate.by}', and requests name none; set "
            f'group = "metadata.NAME" in [policies.{policy}], the field that holds it'
        )


def check_identities(
    certificate: Certificate,
    primary: Scorer | Answerer,
    guardian: Scorer | Answerer,
    allow: Collection[str],
    *,
    session_idle: float | None = None,
    group_source: str | None = None,
) -> str | None:
    """Return why decisions have no guarantee; None if they have one.

    Raises:
        StaleCalibrationError: the models differ in a way that is not allowed.
    """
    certificate.refuse_cascade()
    different = differences(certificate, {"primary": primary.identity, "guardian": guardian.identity})
    if certificate.identities != "unbound" and session_idle is not None:
        then = certificate.identities.get("session", {}).get("idle")
        different |= {} if then == session_idle else {"session.idle": f"{then!r} then, {session_idle!r} now"}
    if certificate.learned is not None and "group" in certificate.learned.features:
        then = certificate.learned.group_source
        different |= {} if then == group_source else {"features.group": f"{then!r} then, {group_source!r} now"}
    if certificate.learned is not None and certificate.learned.text_sha256 is not None:
        then, now = certificate.learned.text_sha256, text_embedding().sha256
        different |= {} if then == now else {"features.text": f"embedding {then:.12} then, {now:.12} now"}
    if certificate.groups is not None and certificate.identities != "unbound":
        then = group_source_of(certificate)
        changed = f"{then!r} then, {group_source!r} now"
        unsaid = f"what named its groups was not said: calibrate with --group-source {group_source}"
        different |= {} if then == group_source else {"group.source": unsaid if then is None else changed}
    return _excused(different, allow)


def check_cascade(
    certificate: Certificate,
    models: Mapping[str, Scorer | Answerer],
    guardian: Scorer | Answerer,
    guardian_name: str,
    allow: Collection[str],
) -> str | None:
    """Return why decisions of a cascade have no guarantee; None if they have one.

    Raises:
        CertificateError: a model of the chain is missing, or the Guardian has another name.
        StaleCalibrationError: the models differ in a way that is not allowed.
    """
    certificate.secret()
    chain = certificate.path.chain.models
    absent = [name for name in chain if name not in models]
    if absent or certificate.path.guardian != guardian_name:
        expected = f"{', '.join(chain)} and the Guardian {certificate.path.guardian}"
        raise CertificateError(
            f"the certificate's cascade asks {expected}; this one has {', '.join(models) or 'none'} and the Guardian "
            f"{guardian_name}; correct [cascade] models, or calibrate again"
        )
    identities = {name: models[name].identity for name in chain} | {guardian_name: guardian.identity}
    return _excused(differences(certificate, identities), allow)


def differences(certificate: Certificate, identities: Mapping[str, Identity]) -> dict[str, str]:
    """Return how models, by role or name, differ from those of the certificate, by dotted name."""
    if certificate.identities == "unbound":
        return {UNBOUND: "its log does not name the scorers"}
    different: dict[str, str] = {}
    for model, now in identities.items():
        then: Mapping[str, Any] = certificate.identities.get(model, {})
        for name in dict.fromkeys([*then, *now]):
            if then.get(name) != now.get(name):
                different[f"{model}.{name}"] = f"{then.get(name)!r:.60} then, {now.get(name)!r:.60} now"
    return different


def allowable(then: Literal["unbound"] | Mapping[str, Identity], now: Mapping[str, Identity]) -> set[str]:
    """Return the names of all differences that there can be between a certificate and models.

    Args:
        then: the identities in the certificate.
        now: those of the models, by role or name.
    """
    before: Mapping[str, Identity] = {} if then == "unbound" else then
    fields = {f"{model}.{name}" for identities in (before, now) for model in identities for name in identities[model]}
    return fields | {UNBOUND, UNSIGNED, "session.idle", "features.group", "features.text", "group.source"}


def _excused(different: Mapping[str, str], allow: Collection[str]) -> str | None:
    """Return the differences, all of them allowed, as the reason for which there is no guarantee; None without any."""
    refused = [name for name in different if name not in allow]
    if refused:
        listed = "; ".join(f"{name}: {different[name]}" for name in refused)
        names = ", ".join(repr(name) for name in different)
        raise StaleCalibrationError(
            f"the certificate was made with other models ({listed}); collect and calibrate again, or continue without a "
            f"guarantee by allowing {names} by name"
        )
    return "allowed by name: " + ", ".join(different) if different else None
