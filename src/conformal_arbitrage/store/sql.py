"""The operations of a store, each the body of one short transaction; both databases run the same ones.

Leases and expiry are judged by the clock of the gateway that asks: gateways that share a database must agree on the time
to well within a lease.

Knows nothing of threads, event loops or how a transaction begins and ends.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from conformal_arbitrage.errors import LostClaimError
from conformal_arbitrage.store.base import (
    Audit,
    Claim,
    Claimed,
    DecisionRecord,
    Event,
    KeyInfo,
    PolicyVersion,
    Replay,
    Scope,
)
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.hash_chain import Checkpoint, Link, canonical, faults

CHUNK = 500
"""How many rows a long operation takes at a time."""

_DAY = 86400.0
_BEYOND = 2**62  # any event's number is below
_CHANGED = "update changes set count = count + 1"
_LINK = "writer, seq, hash, id, kind, at, body, policy, key_id, decided_by"
_BURY = (
    "update events set id = null, kind = null, at = null, body = null, policy = null, key_id = null, decided_by = null "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Append events, each with its body as text; settle a claim; queue audits."""

    events: Sequence[tuple[Event, str]]
    claim: Claim | None
    replay: Replay | None
    audits: Sequence[tuple[Audit, str]]

    @property
    def only_appends(self) -> bool:
        """Whether one statement is enough, which several commits can share."""
        return self.claim is None and not self.audits and all(event.kind != "audit" for event, _ in self.events)

    def __call__(self, session: Session) -> None:
        """Do it."""
        if self.claim is not None:
            _settle(session, self.claim, self.replay, time.time())
        append(session, self.events)
        for event, _ in self.events:
            if event.kind == "audit":
                session.run("delete from audits where id = ?", event.id)
        _queue(session, self.audits)


def append(session: Session, events: Sequence[tuple[Event, str]]) -> None:
    """Append events; up to `CHUNK` are one statement, since a statement can only take so many values."""
    now = time.time()
    for start in range(0, len(events), CHUNK):
        links = [session.chain.append(event, body, now) for event, body in events[start : start + CHUNK]]
        rows = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"] * len(links))
        session.run(f"insert into events ({_LINK}) values {rows}", *chain.from_iterable(links))


def _queue(session: Session, audits: Sequence[tuple[Audit, str]]) -> None:
    for queued, payload in audits:
        values = (queued.id, queued.policy, payload, 0.0)
        session.run("insert into audits (id, policy, payload, lease) values (?, ?, ?, ?)", *values)


def _settle(session: Session, claim: Claim, replay: Replay | None, now: float) -> None:
    """Mark a claim decided, or finished with a response, if it is still its owner's."""
    held = session.run(
        "update claims set state = ?, expires = ? where key_id = ? and name = ? and owner = ? and state <> 'finished'",
        *("decided" if replay is None else "finished", now + _DAY, claim.key_id, claim.name, claim.owner),
    )
    if not held:
        raise LostClaimError(f"the idempotency key {claim.name!r} is no longer held by this request; send it again")
    if replay is not None:
        session.run(
            "insert into replays (key_id, name, status, headers, body, expires) values (?, ?, ?, ?, ?, ?) "
            "on conflict (key_id, name) do update set status = excluded.status, headers = excluded.headers, "
            "body = excluded.body, expires = excluded.expires",
            *(claim.key_id, claim.name, replay.status, canonical(replay.headers, "headers"), replay.body, now + _DAY),
        )


def claim(session: Session, key_id: str, name: str, body_sha256: str, *, lease: float) -> Claimed:
    """Take a claim that is new, expired, or pending past its lease with the same body; else say why not."""
    now, owner = time.time(), secrets.token_hex(16)
    taken = session.run(
        "insert into claims (key_id, name, body_sha256, owner, state, lease, expires) "
        "values (?, ?, ?, ?, 'pending', ?, ?) on conflict (key_id, name) do update set owner = excluded.owner, "
        "body_sha256 = excluded.body_sha256, state = 'pending', lease = excluded.lease, expires = excluded.expires "
        "where claims.expires <= ? or (claims.state <> 'finished' and claims.lease <= ? "
        "and claims.body_sha256 = excluded.body_sha256)",
        *(key_id, name, body_sha256, owner, now + lease, now + _DAY, now, now),
    )
    return Claim(key_id, name, owner) if taken else _refusal(session, key_id, name, body_sha256)


def _refusal(session: Session, key_id: str, name: str, body_sha256: str) -> Claimed:
    """Why a claim is not to be had; the attempt to take it has locked its row."""
    [(body, state)] = session.rows("select body_sha256, state from claims where key_id = ? and name = ?", key_id, name)
    if body != body_sha256:
        return "other body"
    if state != "finished":
        return "under way"
    found = session.rows("select status, headers, body from replays where key_id = ? and name = ?", key_id, name)
    [(status, headers, content)] = found
    return Replay(status=status, headers=json.loads(headers), body=content)


def renew(session: Session, claim: Claim, *, lease: float) -> bool:
    """Move a claim's lease, if it is still its owner's."""
    now = time.time()
    held = session.run(
        "update claims set lease = ?, expires = ? where key_id = ? and name = ? and owner = ? and state <> 'finished'",
        *(now + lease, now + _DAY, claim.key_id, claim.name, claim.owner),
    )
    return held == 1


def release(session: Session, claim: Claim) -> None:
    """Forget a claim that is its owner's and not finished."""
    session.run(
        "delete from claims where key_id = ? and name = ? and owner = ? and state <> 'finished'",
        *(claim.key_id, claim.name, claim.owner),
    )


def sweep(session: Session) -> bool:
    """Remove claims and responses whose day is over, some at a time; whether there may be more."""
    now = time.time()
    counts = [
        session.run(
            f"delete from {table} where (key_id, name) in "
            f"(select key_id, name from {table} where expires <= ? limit ?{session.dialect.skip_locked})",
            *(now, CHUNK),
        )
        for table in ("claims", "replays")
    ]
    return CHUNK in counts


def record(session: Session, id: str) -> DecisionRecord | None:
    """One decision with its later events."""
    found = _records(session, {"id = ?": id}, limit=1)
    return found[0] if found else None


def records(session: Session, *, conditions: Mapping[str, Any], limit: int) -> list[DecisionRecord]:
    """Decisions that meet all conditions, newest first; a condition whose value is None does not count."""
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
    """A record; of several completions or audits the first counts."""
    id, created, policy, key_id, decided_by, body = row
    told: dict[str, list[dict[str, Any]]] = {"completion": [], "feedback": [], "audit": []}
    for kind, at, text in later:
        if kind is not None:  # the join's empty row
            told[kind].append({**json.loads(text), "at": at})
    return DecisionRecord(
        id=id,
        created=created,
        policy=policy,
        key_id=key_id,
        decided_by=decided_by,
        decision=json.loads(body),
        completion=next(iter(told["completion"]), None),
        feedback=tuple(told["feedback"]),
        audit=next(iter(told["audit"]), None),
    )


def take_audits(session: Session, *, limit: int, lease: float) -> list[Audit]:
    """The oldest audits that no one has, now leased."""
    now = time.time()
    rows = session.rows(
        f"select id, policy, payload from audits where lease <= ? order by id limit ?{session.dialect.skip_locked}",
        *(now, limit),
    )
    renew_audits(session, [id for id, _, _ in rows], lease=lease)
    return [Audit(id=id, policy=policy, payload=json.loads(payload)) for id, policy, payload in rows]


def renew_audits(session: Session, ids: Sequence[str], *, lease: float) -> None:
    """Move audits' leases."""
    until = time.time() + lease
    for id in ids:
        session.run("update audits set lease = ? where id = ?", until, id)


_VERSIONS = (
    "select p.name, p.version, p.origin, p.certificate, p.installed, p.installed_by, "
    "p.version = (select max(version) from policies q where q.name = p.name) from policies p "
)


def policies(session: Session) -> list[PolicyVersion]:
    """The newest version of every policy."""
    newest = "where p.version = (select max(version) from policies q where q.name = p.name) order by p.name"
    return [_version(row) for row in session.rows(_VERSIONS + newest)]


def policy_history(session: Session, name: str) -> list[PolicyVersion]:
    """All versions of a policy, newest first."""
    return [_version(row) for row in session.rows(_VERSIONS + "where p.name = ? order by p.version desc", name)]


def _version(row: Sequence[Any]) -> PolicyVersion:
    name, version, origin, certificate, installed, by, active = row
    return PolicyVersion(
        name=name,
        version=version,
        origin=origin,
        certificate=json.loads(certificate),
        installed=installed,
        installed_by=by,
        active=bool(active),
    )


def install(session: Session, name: str, certificate: str, *, by: str) -> PolicyVersion:
    """Add a version."""
    version = _next_version(session, name)
    return _add_version(session, name, version, origin=version, certificate=certificate, by=by)


def rollback(session: Session, name: str, *, by: str) -> PolicyVersion | None:
    """Add a version with the certificate that was active before the active one was first installed.

    Every version knows its origin, the version that first brought its certificate; what was active before that has
    the number below. So a second rollback goes back a second step.
    """
    version = _next_version(session, name)
    found = session.rows(
        "select b.origin, b.certificate from policies a join policies b on b.name = a.name and b.version = a.origin - 1 "
        "where a.name = ? and a.version = ?",
        *(name, version - 1),
    )
    if not found:
        return None
    [(origin, certificate)] = found
    return _add_version(session, name, version, origin=origin, certificate=certificate, by=by)


def _next_version(session: Session, name: str) -> int:
    """The number after a policy's newest, with the row locked that whoever installs must lock."""
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
    """How often a policy was installed, or a key made or revoked."""
    [(count,)] = session.rows("select count from changes")
    return int(count)


_KEYS = "select id, scope, label, created, revoked from keys "


def create_key(session: Session, *, id: str, sha256: str, scope: Scope, label: str) -> None:
    """Keep a key's digest."""
    values = (id, sha256, scope, label, time.time())
    session.run("insert into keys (id, sha256, scope, label, created) values (?, ?, ?, ?, ?)", *values)
    session.run(_CHANGED)


def find_key(session: Session, sha256: str) -> KeyInfo | None:
    """The key of a digest."""
    found = session.rows(_KEYS + "where sha256 = ?", sha256)
    return _key(found[0]) if found else None


def keys(session: Session) -> list[KeyInfo]:
    """All keys, oldest first."""
    return [_key(row) for row in session.rows(_KEYS + "order by created, id")]


def _key(row: Sequence[Any]) -> KeyInfo:
    id, scope, label, created, revoked = row
    return KeyInfo(id=id, scope=scope, label=label, created=created, revoked=revoked)


def revoke_key(session: Session, id: str) -> bool:
    """Note when a key was revoked, the first time."""
    found = session.run("update keys set revoked = coalesce(revoked, ?) where id = ?", time.time(), id) == 1
    session.run(_CHANGED)
    return found


def prune(session: Session, *, before: float) -> int:
    """Turn some old decisions' events into tombstones; how many decisions."""
    rows = session.rows(
        f"select id from events where kind = 'decision' and at < ? order by at limit ?{session.dialect.skip_locked}",
        *(before, CHUNK),
    )
    for (id,) in rows:
        session.run(f"{_BURY} where id = ? and kind <> 'decision'", id)
        session.run(f"{_BURY} where id = ? and kind = 'decision'", id)
        session.run("delete from audits where id = ?", id)
    return len(rows)


def compact(session: Session) -> None:
    """Replace the tombstones a chain begins with by a checkpoint."""
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


def verify(session: Session) -> list[str]:
    """Every fault of every chain; the transaction must be a snapshot."""
    rows = session.rows("select writer, seq, hash from checkpoints")
    starts = {writer: Checkpoint(seq, hash) for writer, seq, hash in rows}
    by_writer = groupby(_links(session), lambda link: link.writer)
    return [fault for writer, links in by_writer for fault in faults(links, starts.get(writer, Checkpoint()))]


def _links(session: Session) -> Iterator[Link]:
    """All events by writer and number, some at a time."""
    last = ("", 0)
    while rows := session.rows(
        f"select {_LINK} from events where (writer, seq) > (?, ?) order by writer, seq limit ?", *last, CHUNK
    ):
        yield from map(Link._make, rows)
        last = rows[-1][:2]
