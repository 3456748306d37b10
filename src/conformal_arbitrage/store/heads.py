"""Signed heads: how far each writer's chain had come, who the writers are, and which policy versions are the newest.

A chain shows by itself that its middle was changed. That its end, a whole writer or the newest version of a policy is
missing shows only against a signed head; that everything was taken back to an earlier state, only against a copy of one
that is kept elsewhere.

Knows nothing of threads, or of how a transaction begins and ends.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.hash_chain import Checkpoint, Link, Reading, StoredLink

LINK = "writer, seq, hash, id, kind, at, body, policy, key_id, decided_by"
CHUNK = 500
"""How many rows a long operation handles at a time."""


class Roster(Struct, frozen=True, kw_only=True):
    """All writers, and the newest version of each policy with its seal."""

    writers: tuple[str, ...] = ()
    policies: Mapping[str, tuple[int, str]] = {}


class Head(Struct, frozen=True, kw_only=True):
    """The state of a store, for safe keeping elsewhere.

    Attributes:
        at: when it was read.
        writers: number and hash of each writer's last event.
        policies: newest version of each policy, and its seal.
        seal: the signature over everything else; None if the store was opened without keys.
    """

    at: float
    writers: Mapping[str, tuple[int, str]]
    policies: Mapping[str, tuple[int, str]]
    seal: str | None = None

    def content(self) -> tuple[object, ...]:
        """Return what the seal covers."""
        return self.at, sorted(self.writers.items()), sorted(self.policies.items())


def read_roster(session: Session) -> tuple[Roster | None, bool]:
    """Return the list of writers and policies, and whether its signature is valid; None if there is none."""
    rows = session.rows("select document, seal from roster")
    if not rows:
        return None, False
    document, seal = rows[0]
    try:
        roster = msgspec.json.decode(document, type=Roster)
    except (msgspec.DecodeError, UnicodeError):
        return Roster(), False
    return roster, len(rows) == 1 and session.seals.fits(seal, "roster", document)


def enrol(session: Session, writers: Iterable[str] = (), policies: Mapping[str, tuple[int, str]] | None = None) -> None:
    """Add to the signed list; one that is not there, or not as it was signed, stays so, for `verify` to find.

    Every change of the list locks the same row first, so that two gateways do not lose each other's.
    """
    if not session.seals:
        return
    session.run("update changes set count = count")
    roster, valid = read_roster(session)
    if roster is None or not valid:
        return
    new = Roster(writers=tuple(sorted({*roster.writers, *writers})), policies={**roster.policies, **(policies or {})})
    if new != roster:
        session.run("delete from roster")
        _write_roster(session, new)


def start_roster(session: Session) -> None:
    """Sign the list of writers and policies of an empty database, once.

    Raises:
        StoreError: the database is not empty, so its list was removed, or it was filled without the project's secret.
    """
    if session.rows("select 1 from roster"):
        return
    session.run("update changes set count = count")
    if session.rows("select 1 from roster"):  # another gateway was first
        return
    for table in ("events", "checkpoints", "heads", "policies", "replays"):
        if session.rows(f"select 1 from {table} limit 1"):
            raise StoreError(
                "the database has no signed list of writers: someone removed it, or filled the database without the "
                "project's secret; run `arbitrage records verify`, and restore a backup or name another database"
            )
    _write_roster(session, Roster())


def _write_roster(session: Session, roster: Roster) -> None:
    document = msgspec.json.encode(roster).decode()
    session.run("insert into roster (document, seal) values (?, ?)", document, session.seals.sign("roster", document))


def sign_own_heads(session: Session) -> None:
    """Sign the ends of this process's chains that have grown.

    What counts is what the database has committed. A chain that was cut there since the last head keeps that head, which
    shows it.
    """
    grown: dict[str, Checkpoint] = {}
    for writer, known in list(session.seals.signed.items()):
        rows = session.rows("select seq from heads where writer = ?", writer)
        signed = max([known, *(int(seq) for (seq,) in rows)])
        end = _end(session, writer)
        session.seals.note_signed(writer, signed, complete=end.seq <= signed)
        if end.seq > signed:
            grown[writer] = end
    _sign(session, grown)


def sign_all_heads(session: Session) -> None:
    """Sign the ends of all chains, such as those whose process was killed.

    Of a chain that has a head, only events that follow from it under its key are added.

    Raises:
        StoreError: the database has no signed list of writers, and is not empty.
    """
    if not session.seals:
        return
    start_roster(session)
    writers = [writer for (writer,) in session.rows("select writer from events union select writer from checkpoints")]
    heads = dict(_heads(session))
    ends = {
        writer: _intact_end(session, writer, heads.get(writer, Checkpoint())) for writer in writers if "-" in writer
    }
    _sign(session, {writer: end for writer, end in ends.items() if end.seq > heads.get(writer, Checkpoint()).seq})


def _sign(session: Session, ends: Mapping[str, Checkpoint]) -> None:
    """Sign these ends; all gateways lock them in the same order, or two of them would wait for each other."""
    for writer, (seq, hash) in sorted(ends.items()):
        now = time.time()
        session.run(
            "insert into heads (writer, seq, hash, at, seal) values (?, ?, ?, ?, ?) on conflict (writer) do update "
            "set seq = excluded.seq, hash = excluded.hash, at = excluded.at, seal = excluded.seal "
            "where excluded.seq > heads.seq",
            *(writer, seq, hash, now, session.seals.sign("head", writer, seq, hash, now)),
        )
    if any(session.seals.signed.get(writer, 0) == 0 for writer in ends):
        enrol(session, ends)


def _heads(session: Session) -> list[tuple[str, Checkpoint]]:
    return [
        (writer, Checkpoint(seq, hash)) for writer, seq, hash in session.rows("select writer, seq, hash from heads")
    ]


def _end(session: Session, writer: str) -> Checkpoint:
    """Return the last event of a writer."""
    for table in ("events", "checkpoints"):
        rows = session.rows(f"select seq, hash from {table} where writer = ? order by seq desc limit 1", writer)
        if rows:
            return Checkpoint(*rows[0])
    return Checkpoint()


def _intact_end(session: Session, writer: str, head: Checkpoint) -> Checkpoint:
    """Return the last event of a writer that follows from its head without a fault."""
    try:
        reading = Reading(session.seals.key_of(writer), vouches(session), needs_seal=True)
    except KeyError:
        return head
    while rows := _rows(session, "writer = ? and seq > ?", writer, head.seq):
        for row in rows:
            if any(reading.faults([row], head)):
                return head
            head = reading.end
    return head


def rows_of(session: Session) -> Iterable[StoredLink]:
    """Yield all events by writer and number, reading some at a time."""
    last: tuple[Any, ...] = ("", 0)
    while rows := _rows(session, "(writer, seq) > (?, ?)", *last):
        yield from rows
        last = rows[-1].link[:2]


def _rows(session: Session, where: str, *values: Any) -> list[StoredLink]:
    rows = session.rows(f"select {LINK}, seal from events where {where} order by writer, seq limit ?", *values, CHUNK)
    return [StoredLink(Link._make(row[:-1]), row[-1]) for row in rows]


def vouches(session: Session) -> Callable[[StoredLink], bool]:
    """Return a function that tells whether a replaced event is signed."""
    return lambda row: session.seals.fits(row.seal, "event", *row.link)


VERSION = "name, version, origin, certificate, installed, installed_by"


def version_seal(session: Session, row: Sequence[Any], previous: str) -> str | None:
    """Return the seal of a policy's version, chained to the seal of the version before it."""
    return session.seals.sign("policy", previous, *row)


def check_versions(session: Session, name: str, newest: int) -> None:
    """Refuse to add a version to a policy whose newest versions were removed.

    Raises:
        StoreError: they were.
    """
    roster, _ = read_roster(session) if session.seals else (None, False)
    version = 0 if roster is None else roster.policies.get(name, (0, ""))[0]
    if version > newest:
        raise StoreError(
            f"policy {name}: version {version} was installed, and the store has {newest or 'none'}; someone removed "
            "versions: run `arbitrage records verify` and restore a backup"
        )


def head(session: Session) -> Head:
    """Return the present state, signed."""
    writers = [writer for (writer,) in session.rows("select writer from events union select writer from checkpoints")]
    ends: dict[str, tuple[int, str]] = {writer: _end(session, writer) for writer in writers}
    roster, _ = read_roster(session)
    state = Head(at=time.time(), writers=ends, policies={} if roster is None else roster.policies)
    return msgspec.structs.replace(state, seal=session.seals.sign("copy", *state.content()))
