"""Renewing a policy's certificate from the rows that the store keeps, and the part that people may look at."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conformal_arbitrage.calibration.calibrate import calibrate
from conformal_arbitrage.calibration.certificate import Certificate, document_sha256, is_cascade
from conformal_arbitrage.calibration.options import CalibrationOptions, refuse_combination
from conformal_arbitrage.calibration.planning import certified_rows
from conformal_arbitrage.calibration.promises import Step
from conformal_arbitrage.calibration.schedule import (
    RenewalChain,
    chain_of,
    refuse_renewal,
    refuse_tightening,
    renewed,
    tightened,
)
from conformal_arbitrage.calibration.secret import ProjectSecret, draw, subkey
from conformal_arbitrage.calibration.verify import options_of
from conformal_arbitrage.collecting.records import is_known, log_rows, one_of_each_session, rows_log, uncertified_log
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.core.risk import GuardianSees
from conformal_arbitrage.errors import ConfigError, OptionError, StoreError
from conformal_arbitrage.evaluation.frontier import evaluate
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.models.port import fingerprint
from conformal_arbitrage.monitoring.outcomes import AuditedDecision, due_days
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.store import events, policies
from conformal_arbitrage.store.events import CalibrationRow
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.store.record import AlarmBody, id_at
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY, as_object

# --- The looking part of a policy's rows ---


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
    due = [row for row in everything if is_known(row) or row.id <= end]
    counted = one_of_each_session(due)
    if len(counted) < FEWEST_LOOKED_AT:
        return None
    if certificate is None:
        options = CalibrationOptions(guardian_sees=guardian_sees, missing_guardian="worst_case")
        log, bound = uncertified_log(counted), Fraction(1)
    else:
        options = replace(options_of(certificate), missing_guardian="worst_case", dial=False, margins=False)
        log = rows_log(counted, certificate, None, source="the rows that may be looked at")
        bound = Fraction(repr(certificate.loss_bound))
    budgets = sorted({*(float(Fraction(budget) * bound) for budget in BUDGETS), alpha})
    frontier = evaluate(log, budgets, calibration_size=len(log) // 2, trials=_TRIALS, options=options)
    points = [
        LookedPoint(alpha=point.alpha or 0.0, share=point.mean("deferred") or 0.0, loss=point.mean("loss") or 0.0)
        for point in frontier.of("conformal")
    ]
    return LookedFrontier(
        rows=len(counted),
        pending=len(everything) - len(due),
        missing=sum(not is_known(row) for row in counted),
        points=tuple(points),
        confidence=None if certificate is None else certificate.confidence,
    )


def _refuse(rows: Sequence[CalibrationRow], certificate: Certificate | None) -> None:
    """Refuse what an exchange of single rows would misjudge."""
    if any(row.session is not None for row in rows):
        refuse_combination("looking", "session")
    if certificate is not None:
        refuse_combination("looking", *certificate.kinds)


# --- Renewing a policy's certificate from the rows that the store keeps ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewablePolicy:
    """A policy and what makes its rows comparable.

    Attributes:
        identities: of its models, by role.
        human_guardian: whether people answer as the Guardian, which takes days.
        secret: the project's; it signs.
    """

    name: str
    identities: Mapping[str, Any]
    human_guardian: bool
    secret: ProjectSecret

    @property
    def identities_sha256(self) -> str:
        """The fingerprint that rows carry."""
        return fingerprint(self.identities)

    def wait(self, certificate: Certificate) -> float:
        """Return the seconds after which an outcome that is not known counts as missing."""
        form: Literal["menu", "text"] = "text" if certificate.evidence.router else "menu"
        kind = AuditedDecision(decided_by="primary", form=form, binarized=certificate.loss.binarized)
        return due_days(kind, human_guardian=self.human_guardian) * DAY


def renewable(config: Config, policy: str, identities: Mapping[str, Any], secret: ProjectSecret) -> RenewablePolicy:
    """Return a policy of a configuration as renewal sees it."""
    person = config.section(config.section_of(policy, "guardian")).is_person
    return RenewablePolicy(name=policy, identities=identities, human_guardian=person, secret=secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Where a policy stands in its schedule. It says nothing of what a renewal would give: nobody is to look at that.

    Attributes:
        version: the version in force.
        certificate: the certificate in force, with its key.
        chain: where it stands.
        step: how the next certificate would follow: by the schedule, or after an alarm.
        renewal: the number of the renewal that is due, or else of the next one.
        rows: live rows that it takes.
        collected: rows of the log that the chain began with, which it takes as well.
        arrived: live rows so far.
        settled: those of them that are due: their outcomes are known, or count as missing.
        due: whether it is due.
        installed: when the version in force was installed, in seconds since 1970.
    """

    policy: str
    version: int
    certificate: Certificate
    chain: RenewalChain
    step: Step
    renewal: int
    rows: int
    collected: int
    arrived: int
    settled: int
    due: bool
    installed: float

    def document(self) -> dict[str, Any]:
        """Return it as plain values."""
        names = ("policy", "version", "step", "renewal", "rows", "collected", "arrived", "settled", "due")
        return {**{name: getattr(self, name) for name in names}, "since": self.chain.since}


async def outlook(store: Store, policy: RenewablePolicy, *, now: float) -> Outlook:
    """Return where a policy stands in its schedule.

    Raises:
        StoreError: it has no certificate, the one in force is not what was installed, or a later one replaces its models.
        CertificateError: it is not signed with the project's secret.
        OptionError: stored rows cannot renew this kind of certificate, or keys were excluded.
    """
    await events.gather_rows(store)
    history = await _history(store, policy.name)
    _refuse_replaced(history, policy)
    certificate = _certificate(history[0], policy.secret)
    refuse_renewal(certificate)
    installed = {version.version: version.installed for version in history}
    chain = chain_of(certificate, installed=installed[history[0].origin], alarm=await _last_alarm(store, policy.name))
    chain = replace(chain, renewal=max(chain.renewal, _renewals_made(history, chain)))
    await _refuse_excluded(store, policy.name, chain)
    rows = _Rows(store, policy)
    settled = await rows.count(chain.since, until=now - policy.wait(certificate))
    due = chain.due(settled)
    renewal = chain.renewal + 1 if due is None else due
    union = 0 if renewal > 1 or chain.alarmed else await rows.count_collected(history, chain)
    return Outlook(
        policy=policy.name,
        version=history[0].version,
        certificate=certificate,
        chain=chain,
        step="after red" if chain.alarmed else "scheduled",
        renewal=renewal,
        rows=chain.rows(renewal),
        collected=union,
        arrived=await rows.count(chain.since),
        settled=settled,
        due=due is not None,
        installed=history[0].installed,
    )


async def _refuse_excluded(store: Store, policy: str, chain: RenewalChain) -> None:
    """Refuse to mix rows from before and after a key was excluded, or an exclusion ended."""
    exclusions = (await store.run(policies.exclusions, [policy]))[policy]
    if exclusions.keys or exclusions.at > chain.since:
        raise OptionError(
            f"policy {policy} excluded API keys, and a renewal would mix rows from before and after: export the rows since "
            "(records export --since), calibrate, and install that certificate"
        )


def _renewals_made(history: Sequence[PolicyVersion], chain: RenewalChain) -> int:
    """Return the number of the last renewal of a chain, also if it was rolled back: none is made twice."""
    places = [as_object(version.certificate.get("ancestry")) for version in history]
    renewals = [
        place for place in places if (place.get("root_sha256"), place.get("since")) == (chain.root_sha256, chain.since)
    ]
    return max((int(place["renewal"]) for place in renewals), default=0)


async def _last_alarm(store: Store, policy: str) -> float | None:
    """Return when the last alarm of a policy was raised."""
    alarms = [
        notice.body.at for notice in await store.run(policies.notices, policy) if isinstance(notice.body, AlarmBody)
    ]
    return max((at for at in alarms if at is not None), default=None)


async def _history(store: Store, policy: str) -> list[PolicyVersion]:
    history = await store.run(policies.history, policy)
    if not history:
        raise StoreError(f"policy {policy!r} has no certificate to renew; calibrate one and start the gateway with it")
    if not history[0].intact:
        raise StoreError(f"policy {policy!r}: the certificate in force is not what was installed; restore a backup")
    return history


def _refuse_replaced(history: Sequence[PolicyVersion], policy: RenewablePolicy) -> None:
    """Refuse models that a later version replaces: their rows must not renew a certificate of other models."""
    if is_cascade(history[0].certificate):
        refuse_combination("renewal", "path")
    versions = [version for version in history if _made_with(version, policy.identities)]
    if versions and versions[0] is not history[0]:
        raise StoreError(
            f"policy {policy.name}: version {history[0].version} was made for other models, and these had version "
            f"{versions[0].version}; renew it with the configuration of the other models"
        )


def _made_with(version: PolicyVersion, identities: Mapping[str, Any]) -> bool:
    then = as_object(as_object(version.certificate.get("provenance")).get("identities"))
    models = {name: identity for name, identity in identities.items() if name != "group" or name in then}
    return bool(models) and all(then.get(role) == identity for role, identity in models.items())


def _certificate(version: PolicyVersion, secret: ProjectSecret) -> Certificate:
    source = f"policy {version.name}, version {version.version}"
    certificate = Certificate.from_dict(dict(version.certificate), source=source)
    certificate.check_signature(secret, source=source)
    return certificate.with_key_of(secret)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one policy that its models made."""

    store: Store
    policy: RenewablePolicy

    async def count(self, since: float, *, until: float | None = None) -> int:
        key = self.policy.identities_sha256
        return await self.store.run(
            events.count_rows, self.policy.name, identities_sha256=key, since=since, until=until
        )

    async def live(self, since: float, limit: int | None = None) -> list[CalibrationRow]:
        key = self.policy.identities_sha256
        return await self.store.run(
            events.calibration_rows, self.policy.name, identities_sha256=key, since=since, limit=limit
        )

    async def collected(self, history: Sequence[PolicyVersion], chain: RenewalChain) -> list[CalibrationRow]:
        """Return the rows of the log that the chain began with, if they were imported."""
        return await self.store.run(events.imported_rows, self.policy.name, _first_log(history, chain))

    async def count_collected(self, history: Sequence[PolicyVersion], chain: RenewalChain) -> int:
        """Count them."""
        return await self.store.run(events.count_imported, self.policy.name, _first_log(history, chain))


def _first_log(history: Sequence[PolicyVersion], chain: RenewalChain) -> str:
    """Return the digest of the log that a chain began with."""
    roots = [version for version in history if document_sha256(version.certificate) == chain.root_sha256]
    return str(as_object(roots[-1].certificate["evidence"])["log_sha256"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """A certificate that is ready to be installed, signed, and the log it was calibrated on."""

    certificate: Certificate
    log: ScoreLog

    def document(self) -> dict[str, Any]:
        """Return the certificate as it is installed: with the arrays of a learned score."""
        return self.certificate.to_dict(with_arrays=True)


async def successor(store: Store, policy: RenewablePolicy, ahead: Outlook) -> Successor:
    """Calibrate the renewal that is due, on exactly its rows; unknown outcomes count as the worst case.

    Raises:
        StoreError: none is due.
    """
    if not ahead.due:
        raise StoreError(
            f"policy {ahead.policy}: renewal {ahead.renewal} takes {n_rows(ahead.rows)} whose outcomes are due, and there "
            f"are {ahead.settled}; it is not due yet"
        )
    return await _calibrated(store, policy, ahead, step=ahead.step, renewal=ahead.renewal, limit=ahead.rows)


async def looked_at_successor(store: Store, policy: RenewablePolicy, ahead: Outlook) -> Successor:
    """Calibrate on all rows there are, outside the schedule; the certificate says that it has no guarantee.

    Raises:
        StoreError: there are no rows.
    """
    if not ahead.arrived:
        raise StoreError(
            f"policy {ahead.policy} has no rows fit for calibration; set audit_rate, or serve it in shadow"
        )
    return await _calibrated(store, policy, ahead, step="after looking", renewal=ahead.chain.renewal, limit=None)


async def _calibrated(
    store: Store, policy: RenewablePolicy, ahead: Outlook, *, step: Step, renewal: int, limit: int | None
) -> Successor:
    source, history = _Rows(store, policy), await _history(store, policy.name)
    union = await source.collected(history, ahead.chain) if ahead.collected else []
    rows = [*union, *await source.live(ahead.chain.since, limit)]
    groups = None if ahead.certificate.groups is None else _group_names(history)
    log, fresh = await asyncio.to_thread(_fitted, rows, ahead.certificate, policy, mixed=bool(union), groups=groups)
    certificate = renewed(fresh, ahead.certificate, ahead.chain, step=step, renewal=renewal, collected=len(union))
    return Successor(certificate=certificate.sign(policy.secret), log=log)


def _group_names(history: Sequence[PolicyVersion]) -> set[str]:
    """Return the groups of the certificates that an operator installed: one that had no rows for a while comes back."""
    return {name for version in history if not version.certificate.get("ancestry") for name in _groups_of(version)}


def _groups_of(version: PolicyVersion) -> Collection[str]:
    return as_object(as_object(version.certificate.get("rule")).get("groups")).keys()


def _fitted(
    rows: Sequence[CalibrationRow],
    certificate: Certificate,
    policy: RenewablePolicy,
    *,
    mixed: bool,
    groups: Collection[str] | None = None,
) -> tuple[ScoreLog, Certificate]:
    """Calibrate rows with the options of the certificate in force."""
    unknown = mixed and certificate.identities == "unbound"
    identities = None if unknown else policy.identities
    source = f"the stored rows of policy {policy.name}"
    log = rows_log(rows, certificate, identities, source=source, groups=groups)
    options = replace(options_of(certificate), missing_guardian="worst_case")
    return log, calibrate(log, certificate.alpha, options=options)


async def tighter(store: Store, policy: RenewablePolicy, ahead: Outlook, *, now: float) -> Successor | None:
    """Return the certificate in force with a larger relaxation, if the rows since its installation ask for one.

    This is allowed at any time, for any reason and by any rows: the loss only falls. Rows whose outcome is not due yet do
    not count.

    Raises:
        OptionError: the loss of this kind of certificate may rise with the relaxation.
        StoreError: there was an alarm, or there are no rows.
    """
    refuse_tightening(ahead.certificate)
    if ahead.chain.alarmed:
        raise StoreError(
            f"policy {ahead.policy} had an alarm, so that its certificate promises nothing to keep; renew it on rows since "
            "then, without --tighten"
        )
    source = _Rows(store, policy)
    settled = await source.count(ahead.installed, until=now - policy.wait(ahead.certificate))
    rows = await source.live(ahead.installed)
    rows = [row for k, row in enumerate(rows) if k < settled or is_known(row)]
    if not rows:
        raise StoreError(
            f"policy {ahead.policy} has no rows since version {ahead.version} was installed; wait for some"
        )
    log, fresh = await asyncio.to_thread(_fitted, rows, ahead.certificate, policy, mixed=False)
    margins = fresh.apply(log).margin
    largest = float(margins[np.isfinite(margins)].max(initial=0.0))
    certificate = tightened(ahead.certificate, fresh, largest, ahead.chain)
    return None if certificate is None else Successor(certificate=certificate.sign(policy.secret), log=log)


async def install_successor(store: Store, ahead: Outlook, next: Successor, *, by: str) -> PolicyVersion | None:
    """Install a successor, whatever came out; return None if a version was installed or an alarm raised meanwhile."""
    return await store.run(policies.succeed, ahead.policy, next.document(), by=by, after=ahead.version)


async def import_log(store: Store, policy: RenewablePolicy, path: Path) -> str | None:
    """Keep the rows of the log that the chain began with, for the first renewal; return why not, in words.

    Whether the first renewal takes them has to be settled before there are rows to look at.

    Raises:
        ConfigError: it is not the log of a certificate of this policy.
    """
    await events.gather_rows(store)
    history = await _history(store, policy.name)
    for version in reversed(history):
        certificate = Certificate.from_dict(dict(version.certificate), source=f"policy {policy.name}")
        if certificate.ancestry is not None:
            continue
        columns = certificate.evidence.columns
        log = ScoreLog.read(path, primary=columns["primary"], guardian=columns["guardian"])
        log = certified_rows(log, certificate.provenance.part)
        log = log.binarized() if certificate.loss.binarized else log
        if log.sha256() == certificate.evidence.log_sha256:
            return await _import(store, policy, version, log, certificate)
    raise ConfigError(
        f"[policies.{policy.name}] log = {str(path)!r} is not the log that a certificate of this policy was made from; "
        "name that one, or leave the setting out"
    )


async def _import(
    store: Store, policy: RenewablePolicy, version: PolicyVersion, log: ScoreLog, certificate: Certificate
) -> str | None:
    if await store.run(events.count_imported, policy.name, certificate.evidence.log_sha256):
        return None
    arrived = await _Rows(store, policy).count(version.installed)
    if arrived:
        return (
            f"the log was not imported: {n_rows(arrived, 'has', 'have')} arrived since version {version.version} was "
            "installed, and what the first renewal takes has to be settled before; it takes live rows only"
        )
    await store.run(events.import_rows, policy.name, certificate.evidence.log_sha256, log_rows(log, certificate))
    return None
