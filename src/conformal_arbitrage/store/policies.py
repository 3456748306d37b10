"""The versions of policies, each an installed certificate, and the notices about them: alarms, lifts, excluded keys.

Every installation and every notice locks the same row, `changes`, whose count tells gateways to read policies again.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from conformal_arbitrage.calibration.schedule import preferred_to
from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.store.integrity import VERSION, check_versions, enrol, history_faults, read_roster
from conformal_arbitrage.store.keys import list_all
from conformal_arbitrage.store.outbox import WebhookEvent, announce
from conformal_arbitrage.store.pages import intact_notices
from conformal_arbitrage.store.record import (
    AlarmBody,
    Event,
    ExclusionBody,
    JSONObject,
    LiftBody,
    NoticeBody,
    decode_json,
    decode_notice,
    encode,
    encode_json,
)
from conformal_arbitrage.store.session import CHANGED, Session, operation, viewed
from conformal_arbitrage.types import as_object


class PolicyVersion(Struct, frozen=True, kw_only=True):
    """An installed certificate of a policy.

    Attributes:
        origin: the version that first installed this certificate.
        intact: whether it is what was installed, as far as the store's keys can tell.
        earlier_intact: whether all versions before it are; they tell what an alarm or a choice says of this one.
        lifts: how often alarms of this version were lifted.
        alarm: the alarm that stands, if any: the policy serves in safe mode.
        alarmed: the last alarm that speaks against this certificate: raised on this version; or, before it was installed,
            on the same certificate, on another from the same log, or on one of the same models after this one was made.
        preferred_to: the version that the schedule produced, if this one took its place and defers less.
    """

    name: str
    version: int
    origin: int
    certificate: JSONObject
    installed: float
    installed_by: str
    active: bool
    intact: bool = True
    earlier_intact: bool = True
    lifts: int = 0
    alarm: AlarmBody | None = None
    alarmed: AlarmBody | None = None
    preferred_to: int | None = None


class Notice(Struct, frozen=True, kw_only=True):
    """An alarm of a policy, its lift, or the exclusion of a key; `id` is its name in the record."""

    id: str
    policy: str
    body: NoticeBody


class Notices:
    """What notices say about the versions of policies."""

    def __init__(self, notices: Iterable[Notice]) -> None:
        self._by_policy: dict[str, list[NoticeBody]] = {}
        for notice in notices:
            self._by_policy.setdefault(notice.policy, []).append(notice.body)

    def lifts(self, policy: str, version: int) -> int:
        """Return how often alarms of a version were lifted."""
        lifts = (body.lifts for body in self._of(policy) if isinstance(body, LiftBody) and body.version == version)
        return max(lifts, default=0)

    def standing(self, policy: str, version: int) -> AlarmBody | None:
        """Return the alarm of a version that was not lifted."""
        lifts = self.lifts(policy, version)
        alarms = (alarm for alarm in self.alarms(policy) if (alarm.version, alarm.lifts) == (version, lifts))
        return next(alarms, None)

    def alarms(self, policy: str) -> list[AlarmBody]:
        """Return the alarms that were ever raised on a policy, oldest first."""
        return [body for body in self._of(policy) if isinstance(body, AlarmBody)]

    def exclusions(self, policy: str) -> "Exclusions":
        """Return which API keys the promise of a policy does not cover."""
        bodies = [body for body in self._of(policy) if isinstance(body, ExclusionBody)]
        last = {body.key: body.ends for body in bodies}
        keys = frozenset(key for key, ends in last.items() if not ends)
        return Exclusions(keys=keys, number=len(bodies), at=max((body.at or 0.0 for body in bodies), default=0.0))

    def are_all(self, policy: str, listed: Mapping[str, int]) -> bool:
        """Return whether a policy has as many notices as the signed list says."""
        return len(self._of(policy)) == listed.get(policy, 0)

    def _of(self, policy: str) -> Sequence[NoticeBody]:
        return self._by_policy.get(policy, ())


class Exclusions(Struct, frozen=True, kw_only=True):
    """The API keys that the promise of a policy does not cover.

    Attributes:
        keys: their ids.
        number: how often one was excluded, or that ended.
        at: when that was last.
    """

    keys: frozenset[str] = frozenset()
    number: int = 0
    at: float = 0.0


_VERSIONS = (
    "select p.name, p.version, p.origin, p.certificate, p.installed, p.installed_by, p.seal, "
    "(select q.seal from policies q where q.name = p.name and q.version = p.version - 1), "
    "(select max(version) from policies q where q.name = p.name) from policies p "
)


@operation("read")
def active(session: Session) -> list[PolicyVersion]:
    """Return the newest version of every policy."""
    newest = "where p.version = (select max(version) from policies q where q.name = p.name) order by p.name"
    return _versions(session, session.rows(_VERSIONS + newest))


@viewed("scan")
def history(session: Session, name: str) -> list[PolicyVersion]:
    """Return all versions of a policy that the view reaches, newest first."""
    if not session.view.reaches([name]):
        return []
    return _versions(session, session.rows(_VERSIONS + "where p.name = ? order by p.version desc", name))


@operation("scan")
def prospect(session: Session, name: str, certificate: JSONObject) -> PolicyVersion:
    """Return the version that a certificate would be if it were installed now, with the alarm that speaks against it."""
    [(newest,)] = session.rows("select coalesce(max(version), 0) from policies where name = ?", name)
    version = PolicyVersion(
        name=name, version=int(newest) + 1, origin=int(newest) + 1, certificate=certificate, installed=session.now(),
        installed_by="", active=False,
    )  # fmt: skip
    return _watched(session, Notices(notices(session, name)), version)


@operation("write")
def install(
    session: Session, name: str, certificate: JSONObject, *, by: str, after: int | None = None
) -> PolicyVersion | None:
    """Make a certificate the active version of a policy; return None if another one was since version `after`."""
    version = _next_version(session, name)
    if after is not None and version != after + 1:
        return None
    return _install(session, name, version, certificate, by=by)


@operation("write")
def succeed(session: Session, name: str, certificate: JSONObject, *, by: str, after: int) -> PolicyVersion | None:
    """Make a certificate the active version if version `after` still is; otherwise change nothing, return None.

    Nor is a renewal installed that takes rows from before an alarm: only a person ends safe mode.
    """
    since = float(as_object(certificate.get("ancestry")).get("since", inf))
    version = _next_version(session, name)
    if version != after + 1 or any((alarm.at or 0.0) > since for alarm in Notices(notices(session)).alarms(name)):
        return None
    return _install(session, name, version, certificate, by=by)


@operation("write")
def rollback(session: Session, name: str, *, by: str) -> PolicyVersion | None:
    """Add a version with the certificate that was active before the active one was first installed.

    A version's origin is the version that first installed its certificate; the certificate active before that has the
    number below. So a second rollback goes back a second step.

    Raises:
        StoreError: that version is not what was installed.
    """
    version = _next_version(session, name)
    versions = {known.version: known for known in history(session, name)}
    earlier = versions.get(versions[version - 1].origin - 1) if version - 1 in versions else None
    if earlier is None:
        return None
    if not earlier.intact:
        raise StoreError(f"policy {name}, version {earlier.version}: it is not what was installed; restore a backup")
    certificate = encode_json(earlier.certificate, f"the certificate of {name}")
    added = _add_version(session, name, version, origin=earlier.origin, certificate=certificate, by=by)
    announce(session, "certificate.rolled_back", _version_facts(added))
    return added


@operation("read")
def configured(session: Session, policy: str) -> str | None:
    """Return the digest of a policy's certificate file at the last start; None if there was none.

    Raises:
        DamagedError: it is not what was noted, and the file would be installed again.
    """
    for sha256, seal in session.rows("select sha256, seal from configured where policy = ?", policy):
        if not session.seals.accept(seal, "configured", policy, sha256):
            raise DamagedError(
                f"policy {policy}: the digest of its certificate file is not what was noted at the last start; run "
                "`arbitrage records verify`, and restore a backup"
            )
        return str(sha256)
    return None


@operation("write")
def note_configured(session: Session, policy: str, sha256: str) -> None:
    """Note the digest of a policy's certificate file."""
    session.run(
        "insert into configured (policy, sha256, seal) values (?, ?, ?) on conflict (policy) do update set "
        "sha256 = excluded.sha256, seal = excluded.seal",
        *(policy, sha256, session.seals.sign("configured", policy, sha256)),
    )


def _versions(session: Session, rows: Sequence[Sequence[Any]]) -> list[PolicyVersion]:
    """Build versions, each with whether it is what was installed; the newest has to be the one in the signed list."""
    roster, valid = read_roster(session) if session.seals else (None, False)
    listed: Mapping[str, tuple[int, str]] = {} if roster is None else roster.policies
    raised = Notices(notices(session))
    counts: Mapping[str, int] = {} if roster is None else roster.notices

    def is_intact(row: Sequence[Any]) -> bool:
        whole = roster is None or (valid and raised.are_all(row[0], counts))
        return whole and _is_intact(session, row, listed)

    return [_watched(session, raised, _version(row, intact=is_intact(row))) for row in rows]


def _watched(session: Session, raised: Notices, version: PolicyVersion) -> PolicyVersion:
    """Return a version with the alarms that are about it."""
    name, number = version.name, version.version
    rows = session.rows(
        f"select {VERSION}, seal from policies where name = ? and version < ? order by version", name, number
    )
    documents = {int(row[1]): decode_json(row[3], name) for row in rows} | {number: version.certificate}
    return replace(
        version,
        earlier_intact=not any(history_faults(session, iter(rows))),
        lifts=raised.lifts(name, number),
        alarm=raised.standing(name, number),
        alarmed=alarm_against(raised, version, documents),
        preferred_to=preferred_to(documents, number),
    )


def _is_intact(session: Session, row: Sequence[Any], listed: Mapping[str, tuple[int, str]]) -> bool:
    *values, seal, previous, newest = row
    if not session.seals:
        return True
    version, listed_seal = listed.get(values[0], (0, ""))
    if version != newest or (values[1] == newest and seal != listed_seal):
        return False
    return session.seals.fits(seal, "policy", previous or "", *values)


def _version(row: Sequence[Any], *, intact: bool) -> PolicyVersion:
    name, version, origin, certificate, installed, by, _, _, newest = row
    return PolicyVersion(
        name=name,
        version=version,
        origin=origin,
        certificate=decode_json(certificate, f"the certificate of {name}"),
        installed=installed,
        installed_by=by,
        active=version == newest,
        intact=intact,
    )


def _next_version(session: Session, name: str) -> int:
    """Return the number of a policy's next version, after locking the row that every installation must lock."""
    session.run("update changes set count = count")
    [(newest,)] = session.rows("select coalesce(max(version), 0) from policies where name = ?", name)
    check_versions(session, name, int(newest))
    return int(newest) + 1


def _install(session: Session, name: str, version: int, certificate: JSONObject, *, by: str) -> PolicyVersion:
    """Add a version with a new certificate, and announce it."""
    text = encode_json(certificate, f"the certificate of {name}")
    added = _add_version(session, name, version, origin=version, certificate=text, by=by)
    chain = as_object(certificate.get("ancestry"))
    if chain:
        data = {**_version_facts(added), "step": chain.get("step"), "renewal": chain.get("renewal")}
        announce(session, "certificate.renewed", data)
    else:
        announce(session, "certificate.installed", _version_facts(added))
    return added


def _add_version(session: Session, name: str, version: int, *, origin: int, certificate: str, by: str) -> PolicyVersion:
    rows = session.rows("select seal from policies where name = ? and version = ?", name, version - 1)
    previous = "" if not rows else rows[0][0] or ""
    row = (name, version, origin, certificate, session.now(), by)
    seal = session.seals.sign("policy", previous, *row)  # chained to the seal of the version before
    session.run(f"insert into policies ({VERSION}, seal) values (?, ?, ?, ?, ?, ?, ?)", *row, seal)
    enrol(session, policies={name: (version, seal or "")})
    session.run(CHANGED)
    added = _version((*row, seal, previous, version), intact=True)
    return _watched(session, Notices(notices(session, name)), added)


def _version_facts(version: PolicyVersion) -> dict[str, object]:
    return {
        "policy": version.name,
        "version": version.version,
        "origin": version.origin,
        "installed_by": version.installed_by,
        "alpha": as_object(version.certificate.get("promise")).get("alpha"),
    }


# --- Alarms ---


@operation("write")
def raise_alarm(session: Session, policy: str, alarm: AlarmBody) -> bool:
    """Record an alarm, as an event of the chain; return False if one stands already, or the version is not in force.

    Every gateway serves the policy in safe mode from its next request on: the change count grows. While gateways of two
    releases or two pairs of models serve side by side, each has a version of its own in force: one is out of force
    everywhere once a later one was installed for the same models.
    """
    versions = _locked_history(session, policy)
    alarmed = next((version for version in versions if version.version == alarm.version), None)
    if alarmed is None or alarmed.alarm is not None or alarmed.lifts != alarm.lifts:
        return False
    models = _models_of(alarmed)
    if any(later.version > alarmed.version and _models_of(later) == models for later in versions):
        return False
    _append_notice(session, policy, alarm)
    return True


def _models_of(version: PolicyVersion) -> object:
    return as_object(version.certificate.get("provenance")).get("identities")


@viewed("write")
def lift(session: Session, policy: str, *, reason: str, by: str, version: int | None = None) -> LiftBody | None:
    """Lift the alarm that stands on a version, the newest unless given, as an event of the chain; None if none does."""
    versions = _locked_history(session, policy)
    chosen = next((known for known in versions if version in (None, known.version)), None)
    if chosen is None or chosen.alarm is None:
        return None
    lifted = LiftBody(version=chosen.version, lifts=chosen.lifts + 1, reason=reason, by=by)
    _append_notice(session, policy, lifted)
    return lifted


def _locked_history(session: Session, policy: str) -> list[PolicyVersion]:
    """Return a policy's versions, newest first, after locking the row that every installation, alarm and lift must lock."""
    session.run("update changes set count = count")
    return history(session, policy)


@viewed("write")
def exclude(
    session: Session, policy: str, key: str, *, reason: str, by: str, ends: bool = False
) -> ExclusionBody | None:
    """Exclude an API key from the promise of a policy, or end that, as an event of the chain; None if it is so already.

    Raises:
        StoreError: the view does not reach the policy, or there is no such key in it.
    """
    session.run("update changes set count = count")
    if not session.view.reaches([policy]) or key not in {known.id for known in list_all(session)}:
        raise StoreError(f"there is no key {key!r:.80}; `arbitrage keys list` has their ids")
    before = exclusions(session, [policy])[policy]
    if ends != (key in before.keys):
        return None
    excluded = ExclusionBody(key=key, number=before.number + 1, reason=reason, by=by, ends=ends)
    _append_notice(session, policy, excluded)
    return excluded


@viewed("scan")
def exclusions(session: Session, policies: Collection[str]) -> dict[str, Exclusions]:
    """Return which API keys the promise of each of some policies does not cover."""
    raised = Notices(notices(session))
    return {policy: raised.exclusions(policy) for policy in policies}


def _append_notice(session: Session, policy: str, body: NoticeBody) -> None:
    """Append a notice to the chain, count it in the signed list, and announce an alarm or its lift."""
    id = notice_id(policy, body)
    session.append([(Event(id=id, body=body, policy=policy), encode(body, id))])
    roster, _ = read_roster(session)
    enrol(session, notices={policy: (0 if roster is None else roster.notices.get(policy, 0)) + 1})
    session.run(CHANGED)
    if isinstance(body, ExclusionBody):
        return
    event: WebhookEvent = "alarm.raised" if isinstance(body, AlarmBody) else "alarm.lifted"
    facts = {name: value for name, value in asdict(body).items() if name not in ("at", "identities_sha256")}
    announce(session, event, {"policy": policy, **facts})


@operation("scan")
def notices(session: Session, policy: str | None = None) -> list[Notice]:
    """Return all notices that are what was written, or those of a policy, oldest first."""
    return [
        Notice(
            id=link.id,
            policy=str(link.policy),
            body=decode_notice(link.kind, str(link.body), str(link.policy), link.at),
        )
        for link in intact_notices(session, policy)
    ]


def notice_id(policy: str, body: NoticeBody) -> str:
    """Return the name of a notice in the record; there is at most one event with it."""
    if isinstance(body, ExclusionBody):
        return f"{body.kind} {body.number} from {policy}"
    return f"{body.kind} {body.lifts} of version {body.version} of {policy}"


def alarm_against(raised: Notices, version: PolicyVersion, documents: Mapping[int, JSONObject]) -> AlarmBody | None:
    """Return the last alarm that speaks against a version: raised on it, or on another before it was installed.

    The rows of a certificate are older than an alarm on the same certificate or on another from the same log, and than one
    with the same models after it was made: they do not show what the alarm was about. Which came first is told by the
    numbers of versions where possible, since clocks are set now and then: no alarm is raised on a version once there is
    a later one for the same models.
    """
    against = [
        alarm
        for alarm in raised.alarms(version.name)
        if alarm.version == version.version
        or (alarm.version < version.version and _is_older(version, documents.get(alarm.version, {}), alarm))
    ]
    return against[-1] if against else None


def _is_older(version: PolicyVersion, alarmed: JSONObject, alarm: AlarmBody) -> bool:
    """Tell whether a version's rows are older than an alarm on another certificate, as far as the two documents say."""
    at, certificate = alarm.at or 0.0, version.certificate
    provenance, before = (as_object(document.get("provenance")) for document in (certificate, alarmed))
    log, other = (as_object(document.get("evidence")).get("log_sha256") for document in (certificate, alarmed))
    if certificate == alarmed or (log is not None and log == other):
        return True
    if provenance.get("identities") != before.get("identities"):
        return False
    if version.origin <= alarm.version:  # it was first installed before
        return True
    since, created = as_object(certificate.get("ancestry")).get("since"), provenance.get("created")
    if since is not None:  # the first row of a renewal; it may be made after the alarm, from rows before it
        return float(since) < at
    return isinstance(created, str) and created <= datetime.fromtimestamp(at, UTC).isoformat()
