"""Which certificates no longer fit the configuration: their models were pinned anew, or their grader has changed.

Looks at those of the policies, at the .json files beside the configuration, and at what a gateway has in force.

Knows nothing of how models are tested, or of databases.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.errors import ArbitrageError, CertificateError
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import ROLES, SECTIONS, Config
from conformal_arbitrage.live.grading import SEVERAL
from conformal_arbitrage.live.repinning import PinnedChange
from conformal_arbitrage.live.reviews import grading_terms
from conformal_arbitrage.store.base import PolicyVersion
from conformal_arbitrage.types import as_object

_UNKNOWN_GRADERS = ("feedback", "none")  # grades that were sent over HTTP: who made them is not on record


def certificates_at_hand(config: Config, installed: Sequence[PolicyVersion] = ()) -> dict[str, Certificate]:
    """Return every certificate that can be found, by a name for people.

    Args:
        config: names files, and its folder may hold others.
        installed: the versions in force in a gateway's database.
    """
    folder = Path(config.folder)
    named = {folder / one.certificate for one in config.policies.values() if one.certificate is not None}
    certificates: dict[str, Certificate] = {}
    for path in sorted({*named, *folder.glob("*.json")}):
        try:
            certificates[path.name] = Certificate.load(path)
        except CertificateError:  # absent, or another kind of JSON
            continue
    for version in installed:
        try:
            certificate = Certificate.from_dict(dict(version.certificate))
        except CertificateError:  # `serve` refuses it, with the reason
            continue
        if certificate not in certificates.values():
            certificates[f"version {version.version} of policy {version.name} in the database"] = certificate
    return certificates


def stale_certificates(
    certificates: Mapping[str, Certificate], config: Config, changes: Collection[PinnedChange]
) -> list[str]:
    """Return the names of the certificates that were made with the values to be replaced."""
    return [name for name, certificate in certificates.items() if _is_stale(certificate, config, changes)]


def _is_stale(certificate: Certificate, config: Config, changes: Collection[PinnedChange]) -> bool:
    identities = certificate.identities
    if identities == "unbound":
        return False
    models = {role: getattr(section, "model", None) for role, section in config.sections.items()}

    def hits(change: PinnedChange) -> bool:
        roles = [change.role] if change.role in SECTIONS else ROLES
        bound: list[dict[str, Any]] = [identities.get(role, {}) for role in roles]
        model = models[change.role]
        return any(one.get("model") == model and one.get(change.name) == change.before for one in bound)

    return any(map(hits, changes))


def stale_graders(certificates: Mapping[str, Certificate], config: Config) -> dict[str, str]:
    """Return why the losses of certificates were measured by another grader than today's, by the certificate's name."""
    reasons = {name: grader_change(config, certificate.identities) for name, certificate in certificates.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def grader_change(config: Config, identities: object) -> str | None:
    """Return how the grader of a log or certificate differs from the one of that name today; None if it does not.

    A changed grader measures another loss: what it certified holds for the loss of then, not for that of now.

    Args:
        config: the judge, and the folder of a function's module.
        identities: of a log or certificate.
    """
    grader = as_object(as_object(identities).get("grader"))
    if not grader:
        return None
    if grader.get("kind") == SEVERAL:
        kinds = ", ".join(sorted({str(as_object(one).get("kind")) for one in grader.get("graders", [])}))
        return f"several graders made the grades ({kinds}), so the loss is a mixture of what they measure"
    return None if grader.get("kind") in _UNKNOWN_GRADERS else _difference(config, grader)


def _difference(config: Config, then: Mapping[str, Any]) -> str | None:
    how = f"python:{then['name']}" if then.get("kind") == "python" else str(then.get("kind"))
    if "page" in then:
        return _team_difference(config, then)
    try:
        now = dict(Models(config, Extras(keyless=True)).grader(how).identity)
    except ArbitrageError as error:
        return f"the grader {how} cannot be had any more ({error})"
    return _changed(how, then, now)


def _team_difference(config: Config, then: Mapping[str, Any]) -> str | None:
    """Return how those who graded through the review queue differ from whoever does today."""
    everyone = [terms.identity for policy in config.policies if (terms := grading_terms(config, policy)) is not None]
    reasons = [_changed("human", then, now) for now in everyone]
    if not reasons:
        return 'people graded through the review queue, and no policy has grading = "review" any more'
    return None if None in reasons else reasons[0]


def _changed(how: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    changed = [name for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]
    return f"the grader {how} has changed since ({', '.join(changed)})" if changed else None
