"""The operations of a store, each the body of one short transaction, the same for both databases.

Leases and expiry depend on the clock of the calling gateway: the clocks of gateways that share a database must agree to
well within a lease.

Knows nothing of threads, event loops or how a transaction begins and ends.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from msgspec import Struct

from conformal_arbitrage.errors import LostClaimError
from conformal_arbitrage.store.audits import queue_audits
from conformal_arbitrage.store.base import Audit, Claim, Claimed, KeyInfo, PolicyVersion, SavedResponse, Scope
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_decision, decode_json, decode_later, encode_json
from conformal_arbitrage.store.hash_chain import Checkpoint, Link, faults
from conformal_arbitrage.store.record import (
    AuditBody,
    CompletionBody,
    DecisionRecord,
    Event,
    FeedbackBody,
    LaterBody,
    completion_of_record,
    with_outcome,
)

_CHUNK = 500
"""How many rows a long operation handles at a time."""

CHANGE_COUNT = "select count from changes"

_DAY = 86400.0
_BEYOND = 2**62  # above the number of any event
_CHANGED = "update changes set count = count + 1"
_LINK = "writer, seq, hash, id, kind, at, body, policy, key_id, decided_by"
_BURY = (
    "update events set id = null, kind = null, at = null, body = null, policy = null, key_id = null, decided_by = null "
)


class Commit(Struct, frozen=True):
    """Append events, each with the text of its body; settle a claim; queue audits, each with the text of its question."""

    events: Sequence[tuple[Event, str]]
    claim: Claim | None
    response: SavedResponse | None
    audits: Sequence[tuple[Audit, str]]
    begun: Mapping[int, str] = {}

    @property
    def only_appends(self) -> bool:
        """Whether a single statement suffices, which several commits can share."""
        return self.claim is None and not self.audits and not any(isinstance(e.body, AuditBody) for e, _ in self.events)

    def __call__(self, session: Session) -> None:
        """Run within the transaction of a session."""
        if self.claim is not None:
            _settle(session, self.claim, self.response, time.time())
            _note_begun(session, self.claim, self.begun)
        append(session, self.events)
        for event, _ in self.events:
            if isinstance(event.body, AuditBody):
                session.run("delete from audits where id = ?", event.id)
        queue_audits(session, self.audits)


def append(session: Session, events: Sequence[tuple[Event, str]]) -> None:
    """Append events, up to `_CHUNK` in one statement, since the number of values in a statement is limited."""
    now = time.time()
    for start in range(0, len(events), _CHUNK):
        links = [session.chain.append(event, body, now) for event, body in events[start : start + _CHUNK]]
        rows = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"] * len(links))
        session.run(f"insert into events ({_LINK}) values {rows}", *chain.from_iterable(links))


def _settle(session: Session, claim: Claim, response: SavedResponse | None, now: float) -> None:
    """Mark a claim as decided, or as finished with a response, if the owner still holds it."""
    held = session.run(
        "update claims set state = ?, expires = ? where key_id = ? and name = ? and owner = ? and state <> 'finished'",
        *("decided" if response is None else "finished", now + _DAY, claim.key_id, claim.name, claim.owner),
    )
    if not held:
        raise LostClaimError(f"the idempotency key {claim.name!r} is no longer held by this request; send it again")
    if response is not None:
        headers = encode_json(response.headers, "the headers of a response")
        session.run(
            "insert into replays (key_id, name, status, headers, body, expires) values (?, ?, ?, ?, ?, ?) "
            "on conflict (key_id, name) do update set status = excluded.status, headers = excluded.headers, "
            "body = excluded.body, expires = excluded.expires",
            *(claim.key_id, claim.name, response.status, headers, response.body, now + _DAY),
        )


def _note_begun(session: Session, claim: Claim, begun: Mapping[int, str]) -> None:
    """Note the decisions that were begun under a claim, for another attempt to continue."""
    for place, id in begun.items():
        session.run(
            "insert into begun (key_id, name, place, body_sha256, id, expires) "
            "select key_id, name, ?, body_sha256, ?, expires from claims where key_id = ? and name = ? "
            "on conflict (key_id, name, place) do update set body_sha256 = excluded.body_sha256, id = excluded.id, "
            "expires = excluded.expires",
            *(place, id, claim.key_id, claim.name),
        )


def _begun(session: Session, key_id: str, name: str, body_sha256: str, now: float) -> dict[int, str]:
    """Return the decisions that earlier attempts at the same request began, by the question's place."""
    rows = session.rows(
        "select place, id from begun where key_id = ? and name = ? and body_sha256 = ? and expires > ?",
        *(key_id, name, body_sha256, now),
    )
    return {int(place): id for place, id in rows}


def claim(session: Session, key_id: str, name: str, body_sha256: str, *, lease: float) -> Claimed:
    """Take a claim that is new, expired, or pending past its lease with the same body; else return the reason."""
    now, owner = time.time(), secrets.token_hex(16)
    taken = session.run(
        "insert into claims (key_id, name, body_sha256, owner, state, lease, expires) "
        "values (?, ?, ?, ?, 'pending', ?, ?) on conflict (key_id, name) do update set owner = excluded.owner, "
        "body_sha256 = excluded.body_sha256, state = 'pending', lease = excluded.lease, expires = excluded.expires "
        "where claims.expires <= ? or (claims.state <> 'finished' and claims.lease <= ? "
        "and claims.body_sha256 = excluded.body_sha256)",
        *(key_id, name, body_sha256, owner, now + lease, now + _DAY, now, now),
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
    rows = session.rows("select status, headers, body from replays where key_id = ? and name = ?", key_id, name)
    [(status, text, content)] = rows
    headers = {name: str(value) for name, value in decode_json(text, "the headers of a response").items()}
    return SavedResponse(status=status, headers=headers, body=content)


def renew(session: Session, claim: Claim, *, lease: float) -> bool:
    """Extend a claim's lease, if the owner still holds it."""
    now = time.time()
    held = session.run(
        "update claims set lease = ?, expires = ? where key_id = ? and name = ? and owner = ? and state <> 'finished'",
        *(now + lease, now + _DAY, claim.key_id, claim.name, claim.owner),
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
    now = time.time()
    counts = [
        session.run(
            f"delete from {table} where (key_id, name) in "
            f"(select key_id, name from {table} where expires <= ? limit ?{session.dialect.skip_locked})",
            *(now, _CHUNK),
        )
        for table in ("claims", "replays", "begun")
    ]
    return _CHUNK in counts


def record(session: Session, id: str) -> DecisionRecord | None:
    """Return a decision with its later events."""
    return next(iter(_records(session, {"id = ?": id}, limit=1)), None)


def records(session: Session, *, conditions: Mapping[str, Any], limit: int) -> list[DecisionRecord]:
    """Return the decisions that meet all conditions, newest first; a condition whose value is None is ignored."""
    return _records(session, {sql: value for sql, value in conditions.items() if value is not None}, limit)


def _records(session: Session, conditions: Mapping[str, Any], limit: int) -> list[DecisionRecord]:
    where = " and ".join(["kind = 'decision'", *conditions])
    rows = session.rows(
        "select d.id, d.at, d.policy, d.key_id, d.decided_by, d.body, e.kind, e.at, e.body from "
        f"(select id, at, policy, key_id, decided_by, body from events where {where} order by id desc limit ?) d "
        "left join events e on e.id = d.id and e.kind <> 'decision' order by d.id desc, e.at, e.writer, e.seq",
        *(*conditions.values(), limit),
    )
    return [_decision(decision, [row[6:] for row in group]) for decision, group in groupby(rows, lambda row: row[:6])]


def _decision(row: Sequence[Any], later: Iterable[Sequence[Any]]) -> DecisionRecord:
    """Build a record."""
    id, created, policy, key_id, decided_by, body = row
    bodies: list[LaterBody] = [decode_later(kind, text, id, at) for kind, at, text in later if kind is not None]
    completion = completion_of_record([body for body in bodies if isinstance(body, CompletionBody)])
    return DecisionRecord(
        id=id,
        created=created,
        policy=policy,
        key_id=key_id,
        decided_by=decided_by if completion is None else completion.decided_by or decided_by,
        decision=with_outcome(decode_decision(body, id), completion),
        completion=completion,
        feedback=tuple(body for body in bodies if isinstance(body, FeedbackBody)),
        audit=next((body for body in bodies if isinstance(body, AuditBody)), None),
    )


_VERSIONS = (
    "select p.name, p.version, p.origin, p.certificate, p.installed, p.installed_by, "
    "p.version = (select max(version) from policies q where q.name = p.name) from policies p "
)


def policies(session: Session) -> list[PolicyVersion]:
    """Return the newest version of every policy."""
    newest = "where p.version = (select max(version) from policies q where q.name = p.name) order by p.name"
    return [_version(row) for row in session.rows(_VERSIONS + newest)]


def policy_history(session: Session, name: str) -> list[PolicyVersion]:
    """Return all versions of a policy, newest first."""
    return [_version(row) for row in session.rows(_VERSIONS + "where p.name = ? order by p.version desc", name)]


def _version(row: Sequence[Any]) -> PolicyVersion:
    name, version, origin, certificate, installed, by, active = row
    return PolicyVersion(
        name=name,
        version=version,
        origin=origin,
        certificate=decode_json(certificate, f"the certificate of {name}"),
        installed=installed,
        installed_by=by,
        active=bool(active),
    )


def install(session: Session, name: str, certificate: str, *, by: str) -> PolicyVersion:
    """Add a version with a new certificate."""
    version = _next_version(session, name)
    return _add_version(session, name, version, origin=version, certificate=certificate, by=by)


def rollback(session: Session, name: str, *, by: str) -> PolicyVersion | None:
    """Add a version with the certificate that was active before the active one was first installed.

    A version's origin is the version that first installed its certificate; the certificate active before that has the
    number below. So a second rollback goes back a second step.
    """
    version = _next_version(session, name)
    rows = session.rows(
        "select b.origin, b.certificate from policies a join policies b on b.name = a.name and b.version = a.origin - 1 "
        "where a.name = ? and a.version = ?",
        *(name, version - 1),
    )
    if not rows:
        return None
    [(origin, certificate)] = rows
    return _add_version(session, name, version, origin=origin, certificate=certificate, by=by)


def _next_version(session: Session, name: str) -> int:
    """Return the number of a policy's next version, after locking the row that every installation must lock."""
    session.run("update changes set count = count")
    [(newest,)] = session.rows("select coalesce(max(version), 0) from policies where name = ?", name)
    return int(newest) + 1


def _add_version(session: Session, name: str, version: int, *, origin: int, certificate: str, by: str) -> PolicyVersion:
    now = time.time()
    session.run(
        "insert into policies (name, version, origin, certificate, installed, installed_by) values (?, ?, ?, ?, ?, ?)",
        *(name, version, origin, certificate, now, by),
    )
    session.run(_CHANGED)
    return _version((name, version, origin, certificate, now, by, True))


def change_count(session: Session) -> int:
    """Return how often a policy was installed, or a key created or revoked."""
    [(count,)] = session.rows(CHANGE_COUNT)
    return int(count)


_KEYS = "select id, scope, label, created, revoked from keys "


def create_key(session: Session, *, id: str, sha256: str, scope: Scope, label: str) -> None:
    """Store a key's digest."""
    values = (id, sha256, scope, label, time.time())
    session.run("insert into keys (id, sha256, scope, label, created) values (?, ?, ?, ?, ?)", *values)
    session.run(_CHANGED)


def find_key(session: Session, sha256: str) -> KeyInfo | None:
    """Return the key with a digest."""
    rows = session.rows(_KEYS + "where sha256 = ?", sha256)
    return _key(rows[0]) if rows else None


def keys(session: Session) -> list[KeyInfo]:
    """Return all keys, oldest first."""
    return [_key(row) for row in session.rows(_KEYS + "order by created, id")]


def _key(row: Sequence[Any]) -> KeyInfo:
    id, scope, label, created, revoked = row
    return KeyInfo(id=id, scope=scope, label=label, created=created, revoked=revoked)


def revoke_key(session: Session, id: str) -> bool:
    """Mark a key as revoked, keeping the time of the first revocation; return whether there is such a key."""
    count = session.run("update keys set revoked = coalesce(revoked, ?) where id = ?", time.time(), id)
    session.run(_CHANGED)
    return count == 1


def prune(session: Session, *, before: float) -> int:
    """Turn the events of some old decisions into tombstones; return how many decisions."""
    rows = session.rows(
        f"select id from events where kind = 'decision' and at < ? order by at limit ?{session.dialect.skip_locked}",
        *(before, _CHUNK),
    )
    for (id,) in rows:
        session.run(f"{_BURY} where id = ? and kind <> 'decision'", id)
        session.run(f"{_BURY} where id = ? and kind = 'decision'", id)
        session.run("delete from audits where id = ?", id)
    return len(rows)


def compact(session: Session) -> None:
    """Replace the tombstones at the start of each chain by a checkpoint."""
    for (writer,) in session.rows("select distinct writer from events where body is null"):
        end = session.rows(
            "select seq, hash from events where writer = ? and body is null and seq < coalesce("
            "(select min(seq) from events where writer = ? and body is not null), ?) order by seq desc limit 1",
            *(writer, writer, _BEYOND),
        )
        for seq, hash in end:
            session.run(
                "insert into checkpoints (writer, seq, hash) values (?, ?, ?) on conflict (writer) do update "
                "set seq = excluded.seq, hash = excluded.hash where excluded.seq > checkpoints.seq",
                *(writer, seq, hash),
            )
            session.run("delete from events where writer = ? and seq <= ?", writer, seq)


def chain_faults(session: Session) -> list[str]:
    """Return every fault of every chain; the transaction must be a snapshot."""
    rows = session.rows("select writer, seq, hash from checkpoints")
    starts = {writer: Checkpoint(seq, hash) for writer, seq, hash in rows}
    by_writer = groupby(_links(session), lambda link: link.writer)
    return [fault for writer, links in by_writer for fault in faults(links, starts.get(writer, Checkpoint()))]


def _links(session: Session) -> Iterator[Link]:
    """Yield all events by writer and number, reading some at a time."""
    last = ("", 0)
    while rows := session.rows(
        f"select {_LINK} from events where (writer, seq) > (?, ?) order by writer, seq limit ?", *last, _CHUNK
    ):
        yield from map(Link._make, rows)
        last = rows[-1][:2]
