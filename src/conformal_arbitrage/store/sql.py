"""The operations of a store, each the body of one short transaction, the same for both databases.

Leases and expiry go by the database's clock, so gateways whose clocks disagree can share one.

Knows nothing of threads, event loops or how a transaction begins and ends.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import LostClaimError, StoreError
from conformal_arbitrage.store.audits import queue_audits
from conformal_arbitrage.store.base import (
    Audit,
    Claim,
    Claimed,
    KeyInfo,
    PolicyVersion,
    SavedResponse,
    Scope,
    Subscriptions,
)
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import (
    decode_json,
    decode_names,
    encode,
    encode_json,
)
from conformal_arbitrage.store.heads import CHUNK, LINK, VERSION, check_versions, enrol, read_roster, version_seal
from conformal_arbitrage.store.ids import time_of
from conformal_arbitrage.store.ledger import Notices, alarm_against, note_news, notice_id, notices
from conformal_arbitrage.store.record import (
    AlarmBody,
    AuditBody,
    Event,
    FeedbackBody,
    JSONObject,
    LiftBody,
    NoticeBody,
)
from conformal_arbitrage.store.review_base import ReviewWork
from conformal_arbitrage.store.review_ends import do_review_work
from conformal_arbitrage.types import DAY

CHANGE_COUNT = "select count, undelivered_until from changes"

KEEP_SECONDS = 600.0
"""How long a retry without a key may continue a decision, from its first attempt."""

_LONGEST_LEASE = 120.0
"""No lease ends later than that from now: one that does was written before the database's clock was set back."""

_CHANGED = "update changes set count = count + 1"


class Commit(Struct, frozen=True):
    """Append events, each with the text of its body; settle a claim; queue audits, each with the text of its question.

    Attributes:
        news: ids of decisions whose rows of the ledger the events concern.
    """

    events: Sequence[tuple[Event, str]]
    claim: Claim | None
    response: SavedResponse | None
    audits: Sequence[tuple[Audit, str | None]]
    begun: Mapping[int, str] = {}
    undelivered: Mapping[str, str] = {}
    news: Sequence[str] = ()
    reviews: ReviewWork | None = None
    webhooks: Subscriptions = {}

    @property
    def only_appends(self) -> bool:
        """Whether a single statement suffices, which several commits can share."""
        alone = self.claim is self.reviews is None and not self.audits and not self.undelivered and not self.news
        return alone and not any(isinstance(event.body, AuditBody | FeedbackBody) for event, _ in self.events)

    def __call__(self, session: Session) -> None:
        """Run within the transaction of a session."""
        if self.claim is not None:
            _settle(session, self.claim, self.response, session.now())
            _note_begun(session, self.claim, self.begun)
        append(session, self.events)
        for event, _ in self.events:
            if isinstance(event.body, AuditBody):
                session.run("delete from audits where id = ?", event.id)
        queue_audits(session, self.audits)
        settled = [event.id for event, _ in self.events if isinstance(event.body, AuditBody | FeedbackBody)]
        note_news(session, [*self.news, *settled])
        _keep_undelivered(session, self.undelivered)
        if self.reviews is not None:
            do_review_work(session, self.reviews, self.claim, self.webhooks)


def append(session: Session, events: Sequence[tuple[Event, str]]) -> None:
    """Append events, up to `CHUNK` in one statement, since the number of values in a statement is limited."""
    now = session.began or time.time()
    for start in range(0, len(events), CHUNK):
        links = [session.chain.append(event, body, now) for event, body in events[start : start + CHUNK]]
        rows = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"] * len(links))
        session.run(f"insert into events ({LINK}) values {rows}", *chain.from_iterable(links))


def _settle(session: Session, claim: Claim, response: SavedResponse | None, now: float) -> None:
    """Mark a claim as decided, or as finished with a response, if the owner still holds it."""
    held = session.run(
        "update claims set state = ?, expires = ? where key_id = ? and name = ? and owner = ? and state <> 'finished'",
        *("decided" if response is None else "finished", now + DAY, claim.key_id, claim.name, claim.owner),
    )
    if not held:
        raise LostClaimError(f"the idempotency key {claim.name!r} is no longer held by this request; send it again")
    if response is not None:
        headers = encode_json(response.headers, "the headers of a response")
        row = (claim.key_id, claim.name, response.status, headers, response.body)
        session.run(
            "insert into replays (key_id, name, status, headers, body, expires, seal) values (?, ?, ?, ?, ?, ?, ?) "
            "on conflict (key_id, name) do update set status = excluded.status, headers = excluded.headers, "
            "body = excluded.body, expires = excluded.expires, seal = excluded.seal",
            *(*row, now + DAY, session.seals.sign("replay", *row)),
        )


def _note_begun(session: Session, claim: Claim, begun: Mapping[int, str]) -> None:
    """Note the decisions that were begun under a claim, for another attempt to continue."""
    for place, id in begun.items():
        session.run(
            "insert into begun (key_id, name, place, body_sha256, id, expires) "
            "select key_id, name, ?, body_sha256, ?, expires from claims where key_id = ? and name = ? "
            "on conflict (key_id, name, place) do update set body_sha256 = excluded.body_sha256, id = excluded.id, "
            "expires = case when begun.expires > excluded.expires then begun.expires else excluded.expires end",
            *(place, id, claim.key_id, claim.name),
        )


def _begun(session: Session, key_id: str, name: str, body_sha256: str, now: float) -> dict[int, str]:
    """Return the decisions that earlier attempts at the same request began, by the question's place."""
    rows = session.rows(
        "select place, id from begun where key_id = ? and name = ? and body_sha256 = ? and expires > ?",
        *(key_id, name, body_sha256, now),
    )
    return {int(place): id for place, id in rows}


def _keep_undelivered(session: Session, digests: Mapping[str, str]) -> None:
    """Keep decisions for a retry without a key, for ten minutes from their first attempt, when their ids were made."""
    now = session.now() if digests else 0.0
    for id, digest in digests.items():
        session.run(
            "insert into undelivered (id, digest, expires) values (?, ?, ?) "
            "on conflict (id) do update set digest = excluded.digest, expires = excluded.expires",
            *(id, digest, time_of(id) + KEEP_SECONDS),
        )
    if digests:  # seldom, since every gateway waits for this row
        until = now + 2 * KEEP_SECONDS
        session.run("update changes set undelivered_until = ? where undelivered_until < ?", until, now + KEEP_SECONDS)


def take_undelivered(session: Session, digest: str) -> str | None:
    """Hand out the oldest decision about a question of which nothing was delivered; each is handed out once."""
    rows = session.rows(
        "select id from undelivered where digest = ? and expires > ? order by expires limit 1"
        f"{session.dialect.skip_locked}",
        *(digest, session.now()),
    )
    for (id,) in rows:
        session.run("delete from undelivered where id = ?", id)
        return str(id)
    return None


def claim(session: Session, key_id: str, name: str, body_sha256: str, *, lease: float) -> Claimed:
    """Take a claim that is new, expired, or pending past its lease with the same body; else return the reason."""
    now, owner = session.now(), secrets.token_hex(16)
    taken = session.run(
        "insert into claims (key_id, name, body_sha256, owner, state, lease, expires) "
        "values (?, ?, ?, ?, 'pending', ?, ?) on conflict (key_id, name) do update set owner = excluded.owner, "
        "body_sha256 = excluded.body_sha256, state = 'pending', lease = excluded.lease, expires = excluded.expires "
        "where claims.expires <= ? or (claims.state <> 'finished' and (claims.lease <= ? or claims.lease > ?) "
        "and claims.body_sha256 = excluded.body_sha256)",
        *(key_id, name, body_sha256, owner, now + lease, now + DAY, now, now, now + _LONGEST_LEASE),
    )
    if not taken:
        return _refusal(session, key_id, name, body_sha256)
    return Claim(key_id, name, owner, _begun(session, key_id, name, body_sha256, now))


def _refusal(session: Session, key_id: str, name: str, body_sha256: str) -> Claimed:
    """Return why a claim cannot be taken; the attempt to take it has locked its row."""
    [(body, state)] = session.rows("select body_sha256, state from claims where key_id = ? and name = ?", key_id, name)
    if body != body_sha256:
        return "other body"
    if state != "finished":
        return "under way"
    response = saved_response(session, key_id, name)
    if response is None:
        raise StoreError(f"the response under the idempotency key {name!r} is gone; send the request with a new one")
    return response


def saved_response(session: Session, key_id: str, name: str) -> SavedResponse | None:
    """Return the response under an idempotency key, if there is one.

    Raises:
        StoreError: it was changed.
    """
    rows = session.rows("select status, headers, body, seal from replays where key_id = ? and name = ?", key_id, name)
    if not rows:
        return None
    [(status, text, content, seal)] = rows
    if session.seals and not session.seals.fits(seal, "replay", key_id, name, status, text, content):
        raise StoreError(f"the response under the idempotency key {name!r} was changed; run `arbitrage records verify`")
    headers = {name: str(value) for name, value in decode_json(text, "the headers of a response").items()}
    return SavedResponse(status=status, headers=headers, body=content)


def renew(session: Session, claim: Claim, *, lease: float) -> bool:
    """Extend a claim's lease, if the owner still holds it."""
    now = session.now()
    held = session.run(
        "update claims set lease = ?, expires = ? where key_id = ? and name = ? and owner = ? and state <> 'finished'",
        *(now + lease, now + DAY, claim.key_id, claim.name, claim.owner),
    )
    return held == 1


def release(session: Session, claim: Claim) -> None:
    """Give up an unfinished claim, if the owner still holds it; its name stays bound to its body if a decision was begun."""
    held = "key_id = ? and name = ? and owner = ? and state <> 'finished'"
    values = (claim.key_id, claim.name, claim.owner)
    begun = "exists (select 1 from begun b where b.key_id = claims.key_id and b.name = claims.name and "
    begun += "b.body_sha256 = claims.body_sha256)"
    session.run(f"update claims set lease = 0 where {held} and {begun}", *values)
    session.run(f"delete from claims where {held} and not {begun}", *values)


def sweep(session: Session) -> bool:
    """Delete some of the expired claims and responses; return whether there may be more."""
    now = session.now()
    counts = [
        session.run(
            f"delete from {table} where (key_id, name) in "
            f"(select key_id, name from {table} where expires <= ? limit ?{session.dialect.skip_locked})",
            *(now, CHUNK),
        )
        for table in ("claims", "replays", "begun")
    ]
    session.run("delete from undelivered where expires <= ?", now)
    session.run("update changes set undelivered_until = 0 where undelivered_until > 0 and undelivered_until <= ?", now)
    return CHUNK in counts


_VERSIONS = (
    "select p.name, p.version, p.origin, p.certificate, p.installed, p.installed_by, p.seal, "
    "(select q.seal from policies q where q.name = p.name and q.version = p.version - 1), "
    "(select max(version) from policies q where q.name = p.name) from policies p "
)


def policies(session: Session) -> list[PolicyVersion]:
    """Return the newest version of every policy."""
    newest = "where p.version = (select max(version) from policies q where q.name = p.name) order by p.name"
    return _versions(session, session.rows(_VERSIONS + newest))


def policy_history(session: Session, name: str) -> list[PolicyVersion]:
    """Return all versions of a policy, newest first."""
    return _versions(session, session.rows(_VERSIONS + "where p.name = ? order by p.version desc", name))


def _versions(session: Session, rows: Sequence[Sequence[Any]]) -> list[PolicyVersion]:
    """Build versions, each with whether it is what was installed; the newest has to be the one in the signed list."""
    roster, valid = read_roster(session) if session.seals else (None, False)
    listed: Mapping[str, tuple[int, str]] = {} if roster is None else roster.policies
    raised = Notices(notices(session))
    return [
        _watched(session, raised, _version(row, intact=_is_intact(session, row, listed) and (roster is None or valid)))
        for row in rows
    ]


def _watched(session: Session, raised: Notices, version: PolicyVersion) -> PolicyVersion:
    """Return a version with the alarms that are about it."""
    name, number = version.name, version.version
    return replace(
        version,
        lifts=raised.lifts(name, number),
        alarm=raised.standing(name, number),
        alarmed=alarm_against(session, raised, version),
    )


def _is_intact(session: Session, row: Sequence[Any], listed: Mapping[str, tuple[int, str]]) -> bool:
    *values, seal, previous, newest = row
    if not session.seals:
        return True
    if listed.get(values[0], (0, ""))[0] != newest:
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


def prospect(session: Session, name: str, certificate: JSONObject) -> PolicyVersion:
    """Return the version that a certificate would be if it were installed now; nothing changes."""
    [(newest,)] = session.rows("select coalesce(max(version), 0) from policies where name = ?", name)
    version = PolicyVersion(
        name=name, version=int(newest) + 1, origin=int(newest) + 1, certificate=certificate, installed=session.now(),
        installed_by="", active=False,
    )  # fmt: skip
    return _watched(session, Notices(notices(session, name)), version)


def install(
    session: Session, name: str, certificate: str, *, by: str, after: int | None = None
) -> PolicyVersion | None:
    """Add a version with a new certificate, unless one was added since version `after`."""
    version = _next_version(session, name)
    if after is not None and version != after + 1:
        return None
    return _add_version(session, name, version, origin=version, certificate=certificate, by=by)


def succeed(
    session: Session, name: str, certificate: str, *, by: str, after: int, since: float
) -> PolicyVersion | None:
    """Add a version with a new certificate, unless one was added since version `after`, or an alarm raised since a time."""
    version = _next_version(session, name)
    if version != after + 1 or any((alarm.at or 0.0) > since for alarm in Notices(notices(session)).alarms(name)):
        return None
    return _add_version(session, name, version, origin=version, certificate=certificate, by=by)


def rollback(session: Session, name: str, *, by: str) -> PolicyVersion | None:
    """Add a version with the certificate that was active before the active one was first installed.

    A version's origin is the version that first installed its certificate; the certificate active before that has the
    number below. So a second rollback goes back a second step.

    Raises:
        StoreError: that version is not what was installed.
    """
    version = _next_version(session, name)
    history = {one.version: one for one in policy_history(session, name)}
    earlier = history.get(history[version - 1].origin - 1) if version - 1 in history else None
    if earlier is None:
        return None
    if not earlier.intact:
        raise StoreError(f"policy {name}, version {earlier.version}: it is not what was installed; restore a backup")
    certificate = encode_json(earlier.certificate, f"the certificate of {name}")
    return _add_version(session, name, version, origin=earlier.origin, certificate=certificate, by=by)


def _next_version(session: Session, name: str) -> int:
    """Return the number of a policy's next version, after locking the row that every installation must lock.

    Raises:
        StoreError: its newest versions were removed.
    """
    session.run("update changes set count = count")
    [(newest,)] = session.rows("select coalesce(max(version), 0) from policies where name = ?", name)
    check_versions(session, name, int(newest))
    return int(newest) + 1


def _add_version(session: Session, name: str, version: int, *, origin: int, certificate: str, by: str) -> PolicyVersion:
    rows = session.rows("select seal from policies where name = ? and version = ?", name, version - 1)
    previous = "" if not rows else rows[0][0] or ""
    row = (name, version, origin, certificate, session.now(), by)
    seal = version_seal(session, row, previous)
    session.run(f"insert into policies ({VERSION}, seal) values (?, ?, ?, ?, ?, ?, ?)", *row, seal)
    enrol(session, policies={name: (version, seal or "")})
    session.run(_CHANGED)
    added = _version((*row, seal, previous, version), intact=True)
    return _watched(session, Notices(notices(session, name)), added)


def raise_alarm(session: Session, policy: str, alarm: AlarmBody) -> bool:
    """Append an alarm to the chain, unless one stands or it is about another version or ledger than those in force.

    While gateways of two releases or two pairs of models serve side by side, each has a version of its own in force: one is
    out of force everywhere once a later one was installed for the same models.
    """
    history = _locked_history(session, policy)
    own = next((one for one in history if one.version == alarm.version), None)
    if own is None or own.alarm is not None or own.lifts != alarm.lifts:
        return False
    models = own.certificate.get("identities")
    if any(one.version > own.version and one.certificate.get("identities") == models for one in history):
        return False
    _append_notice(session, policy, alarm)
    return True


def lift(session: Session, policy: str, *, reason: str, by: str, version: int | None = None) -> LiftBody | None:
    """Append the lift of the alarm that stands on a version, the newest unless given, to the chain."""
    history = _locked_history(session, policy)
    own = next((one for one in history if version in (None, one.version)), None)
    if own is None or own.alarm is None:
        return None
    lifted = LiftBody(version=own.version, lifts=own.lifts + 1, reason=reason, by=by)
    _append_notice(session, policy, lifted)
    return lifted


def _locked_history(session: Session, policy: str) -> list[PolicyVersion]:
    """Return a policy's versions, newest first, after locking the row that every installation, alarm and lift must lock."""
    session.run("update changes set count = count")
    return policy_history(session, policy)


def _append_notice(session: Session, policy: str, body: NoticeBody) -> None:
    id = notice_id(policy, body)
    append(session, [(Event(id=id, body=body, policy=policy), encode(body, id))])
    session.run(_CHANGED)


def configured(session: Session, policy: str) -> str | None:
    """Return the digest of the certificate file that the last start found."""
    rows = session.rows("select sha256 from configured where policy = ?", policy)
    return rows[0][0] if rows else None


def note_configured(session: Session, policy: str, sha256: str) -> None:
    """Note the digest of a policy's certificate file."""
    session.run(
        "insert into configured (policy, sha256) values (?, ?) on conflict (policy) do update set sha256 = excluded.sha256",
        *(policy, sha256),
    )


_KEYS = "select id, scope, label, created, revoked, expires, policies from keys "


def create_key(
    session: Session, *, id: str, sha256: str, scope: Scope, label: str, expires: float | None, policies: str | None
) -> None:
    """Store a key's digest."""
    values = (id, sha256, scope, label, session.now(), expires, policies)
    session.run(
        "insert into keys (id, sha256, scope, label, created, expires, policies) values (?, ?, ?, ?, ?, ?, ?)", *values
    )
    session.run(_CHANGED)


def find_key(session: Session, sha256: str) -> KeyInfo | None:
    """Return the key with a digest."""
    rows = session.rows(_KEYS + "where sha256 = ?", sha256)
    return _key(rows[0]) if rows else None


def keys(session: Session) -> list[KeyInfo]:
    """Return all keys, oldest first."""
    return [_key(row) for row in session.rows(_KEYS + "order by created, id")]


def _key(row: Sequence[Any]) -> KeyInfo:
    id, scope, label, created, revoked, expires, policies = row
    return KeyInfo(
        id=id,
        scope=scope,
        label=label,
        created=created,
        revoked=revoked,
        expires=expires,
        policies=None if policies is None else decode_names(policies, f"the policies of key {id}"),
    )


def revoke_key(session: Session, id: str) -> bool:
    """Mark a key as revoked, keeping the time of the first revocation; return whether there is such a key."""
    count = session.run("update keys set revoked = coalesce(revoked, ?) where id = ?", session.now(), id)
    session.run(_CHANGED)
    return count == 1
