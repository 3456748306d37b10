"""Integrity: signed heads, verification, and removing what is old or was to be erased, with the chains intact.

A chain shows by itself that its middle was changed. That its end, a whole writer or the newest version of a policy is
missing shows only against a signed head; that everything was taken back to an earlier state, only against a copy of one
that is kept elsewhere. A removed event leaves a tombstone with writer, number and hash; an erased one stays without its
content. Both are sealed, so that no one else can remove or change an event this way.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.store.claims import sweep_claims, sweep_conversations
from conformal_arbitrage.store.events import ROW, forget_pruned, keep, row_faults
from conformal_arbitrage.store.ledger import Losses, ledger_faults
from conformal_arbitrage.store.outbox import AUDIT, sweep_deliveries
from conformal_arbitrage.store.pages import events_of, intact_notices
from conformal_arbitrage.store.record import (
    EventBody,
    decode_decision,
    decode_later,
    encode,
    erased,
)
from conformal_arbitrage.store.reviews import erase_reviews, forget_reviews, review_faults, sweep_reviews
from conformal_arbitrage.store.session import CHUNK, LINK, Checkpoint, Job, Link, Session, Store, StoredLink, operation
from conformal_arbitrage.types import DAY

# --- Heads ---


class Roster(Struct, frozen=True, kw_only=True):
    """All writers, each policy's newest version with its seal, and its number of notices; each API key's seal."""

    writers: tuple[str, ...] = ()
    policies: Mapping[str, tuple[int, str]] = {}
    notices: Mapping[str, int] = {}
    keys: Mapping[str, str] = {}


class Head(Struct, frozen=True, kw_only=True):
    """The state of a store, for safe keeping elsewhere.

    Attributes:
        at: when it was read.
        writers: number and hash of each writer's last event.
        policies: newest version of each policy, and its seal.
        keys: the seal of each API key.
        seal: the signature over everything else; None if the store was opened without keys.
    """

    at: float
    writers: Mapping[str, tuple[int, str]]
    policies: Mapping[str, tuple[int, str]]
    keys: Mapping[str, str] = {}
    seal: str | None = None

    def content(self) -> tuple[object, ...]:
        """Return what the seal covers."""
        return self.at, sorted(self.writers.items()), sorted(self.policies.items()), sorted(self.keys.items())


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


def enrol(
    session: Session,
    writers: Iterable[str] = (),
    policies: Mapping[str, tuple[int, str]] | None = None,
    notices: Mapping[str, int] | None = None,
    keys: Mapping[str, str] | None = None,
) -> None:
    """Add to the signed list; one that is not there, or not as it was signed, stays so, for `verify` to find.

    Every change of the list locks the same row first, so that two gateways do not lose each other's.
    """
    if not session.seals:
        return
    session.run("update changes set count = count")
    roster, valid = read_roster(session)
    if roster is None or not valid:
        return
    new = Roster(
        writers=tuple(sorted({*roster.writers, *writers})),
        policies={**roster.policies, **(policies or {})},
        notices={**roster.notices, **(notices or {})},
        keys={**roster.keys, **(keys or {})},
    )
    if new != roster:
        session.run("delete from roster")
        _write_roster(session, new)


def start_roster(session: Session) -> None:
    """Sign the list of writers, policies and keys of a database that is being made; it never gets another."""
    if session.seals:
        _write_roster(session, Roster())


def _check_roster(session: Session) -> None:
    """Refuse a database whose list was not signed with the project's secret."""
    roster, valid = read_roster(session)
    if not valid:
        state = "no signed list of writers" if roster is None else "a list of writers that is not as it was signed"
        raise StoreError(
            f"the database has {state}: someone removed or changed it, or made the database without the project's secret; "
            "run `arbitrage records verify`, and restore a backup or name another database"
        )


def _write_roster(session: Session, roster: Roster) -> None:
    document = msgspec.json.encode(roster).decode()
    session.run("insert into roster (document, seal) values (?, ?)", document, session.seals.sign("roster", document))


@operation("read")
def secret_fingerprint(session: Session) -> str | None:
    """Return the fingerprint of the secret that the database was made with; None if it has none yet."""
    return next((str(fingerprint) for (fingerprint,) in session.rows("select fingerprint from secret")), None)


@operation("write")
def note_secret(session: Session, fingerprint: str) -> str:
    """Note the secret that the database is made with, once; return the one that is noted."""
    session.run("update changes set count = count")  # one at a time, as for the roster
    if session.rows("select 1 from secret") == []:
        session.run("insert into secret (fingerprint) values (?)", fingerprint)
    return str(session.rows("select fingerprint from secret")[0][0])


async def seal(store: Store, *, everything: bool = False) -> None:
    """Sign how far the chains of this process have come; with `everything`, all chains, as at the start."""
    if store.seals and (everything or store.seals.signed):
        await store.run(sign_all_heads if everything else sign_own_heads)


@operation("write")
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


@operation("write")
def sign_all_heads(session: Session) -> None:
    """Sign the ends of all chains, such as those whose process was killed.

    Of a chain that has a head, only events that follow from it under its key are added.

    Raises:
        StoreError: the database has no signed list of writers.
    """
    if not session.seals:
        return
    _check_roster(session)
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
    for row in rows_of(session, "events where writer = ? and seq > ?", writer, head.seq):
        if any(reading.faults([row], head)):
            break
        head = reading.end
    return head


def rows_of(session: Session, source: str = "events", *values: Any) -> Iterator[StoredLink]:
    """Yield events by writer and number, reading some at a time."""
    for rows in session.chunks(f"{LINK}, seal", source, "writer, seq", *values):
        yield from (StoredLink(Link._make(row[:-1]), row[-1]) for row in rows)


def vouches(session: Session) -> Callable[[StoredLink], bool]:
    """Return a function that tells whether a replaced event is signed."""
    return lambda row: session.seals.fits(row.seal, "event", *row.link)


VERSION = "name, version, origin, certificate, installed, installed_by"


def check_versions(session: Session, name: str, newest: int) -> None:
    """Refuse to add a version to a policy whose newest versions were removed."""
    roster, _ = read_roster(session) if session.seals else (None, False)
    version = 0 if roster is None else roster.policies.get(name, (0, ""))[0]
    if version > newest:
        raise StoreError(
            f"policy {name}: version {version} was installed, and the store has {newest or 'none'}; someone removed "
            "versions: run `arbitrage records verify` and restore a backup"
        )


@operation("scan")
def head(session: Session) -> Head:
    """Return the present state of all chains and policies, signed, for safe keeping elsewhere."""
    writers = [writer for (writer,) in session.rows("select writer from events union select writer from checkpoints")]
    ends: dict[str, tuple[int, str]] = {writer: _end(session, writer) for writer in writers}
    roster, _ = read_roster(session)
    roster = roster or Roster()
    state = Head(at=time.time(), writers=ends, policies=roster.policies, keys=roster.keys)
    return msgspec.structs.replace(state, seal=session.seals.sign("copy", *state.content()))


# --- Verification ---


class Reading:
    """One writer's chain being checked.

    Args:
        key: behind its hashes; None for plain ones.
        needs_seal: whether a tombstone without a signature is a fault.
    """

    def __init__(self, key: bytes | None, vouched: Callable[[StoredLink], bool], *, needs_seal: bool) -> None:
        self._key = key
        self._vouched = vouched
        self._needs_seal = needs_seal
        self.end = Checkpoint()

    def faults(self, rows: Iterable[StoredLink], start: Checkpoint) -> Iterator[str]:
        """Yield what is wrong, in words, and keep `end`; rows come in the order of their numbers."""
        self.end = start
        rest = iter(rows)
        row = next(rest, None)
        while row is not None:
            link, after = row.link, next(rest, None)
            due, expected = self.end.seq + 1, self.end.hash
            self.end = Checkpoint(link.seq, link.hash)
            if link.seq != due:
                yield f"{_name_of(link)}: event {due} should come here; events were removed"
            elif row.seal is not None or link.body is None:
                if not self._is_replacement(row):
                    yield f"{_name_of(link)}: it was replaced, and no valid signature says so"
            elif self._follows(link, expected):
                pass
            elif after is not None and self._swapped(link, after.link, expected):
                yield f"{_name_of(link)}: it and event {after.link.seq} were swapped"
                self.end, after = Checkpoint(after.link.seq, link.hash), next(rest, None)
            elif after is not None and self._only_hash(link, after.link, expected):
                yield f"{_name_of(link)}: its hash was changed"
                self.end = Checkpoint(link.seq, link.digest(expected, self._key))
            else:
                yield f"{_name_of(link)}: it is not what was written, or the previous hash was changed"
            row = after

    def _is_replacement(self, row: StoredLink) -> bool:
        """Return whether a replaced event is legitimate; the hash is taken as given, and its seal covers it."""
        if row.seal is None:
            return not self._needs_seal
        return self._vouched(row)

    def _follows(self, link: Link, previous: str) -> bool:
        """Return whether an event is intact and follows that hash."""
        return link.body is not None and link.hash == link.digest(previous, self._key)

    def _swapped(self, link: Link, after: Link, previous: str) -> bool:
        """Return whether two adjacent events would fit with their numbers exchanged."""
        first, second = after._replace(seq=link.seq), link._replace(seq=after.seq)
        return self._follows(first, previous) and self._follows(second, first.hash)

    def _only_hash(self, link: Link, after: Link, previous: str) -> bool:
        """Return whether the next event follows from this one's content, although this one's hash does not."""
        return self._follows(after, link.digest(previous, self._key))


def _name_of(link: Link) -> str:
    content = "pruned" if link.body is None else f"{link.kind} of {link.id}"
    return f"writer {link.writer}, event {link.seq} ({content})"


_UNSIGNED = (
    "nothing vouches for this database: there is no signed list of writers; it was removed, or the database was made "
    "without the project's secret"
)


async def verify(store: Store, copy: Head | None = None, losses: Losses | None = None) -> list[str]:
    """Return everything that is not as it was written, in words; an empty list if nothing is.

    Without keys it finds a changed event, a changed hash, events removed from the middle, and swapped events. With
    keys it also finds what an unsigned chain cannot show: a missing end, a missing writer, a tombstone that no one
    signed, changed responses and certificates. That everything was taken back to an earlier state shows only against
    a copy of a head.

    Args:
        copy: a head that was kept elsewhere, to compare with.
        losses: computes the losses of the ledgers again, to compare them with the record.
    """
    checks: Sequence[Job[list[str]]] = (
        _file_faults,
        lambda session: chain_faults(session, copy),
        lambda session: policy_faults(session, copy),
        lambda session: key_faults(session, copy),
        *(partial(changed_rows, sealed=sealed) for sealed in _SEALED),
        row_faults,
        lambda session: ledger_faults(session, losses),
        review_faults,
    )
    faults: list[str] = []
    for check in checks:
        try:
            faults += await store.execute("scan", check)
        except DamagedError as error:  # what stops one check must not hide what the others find
            faults.append(str(error))
    return list(dict.fromkeys(faults))


def _file_faults(session: Session) -> list[str]:
    """Return what the database itself finds wrong with its files."""
    rows: Sequence[Any] = () if session.dialect.check is None else session.rows(session.dialect.check)
    return [f"the database's file: {text}" for (text,) in rows if text != "ok"]


def chain_faults(session: Session, copy: Head | None = None) -> list[str]:
    """Return every fault of the chains, their heads and the list of writers; the transaction must be a snapshot.

    Args:
        copy: a head that was kept elsewhere, to compare with.
    """
    return list(_Chains(session, copy).faults())


class _Chains:
    """All chains against all heads."""

    def __init__(self, session: Session, copy: Head | None) -> None:
        self._session = session
        self._copy = copy
        self._roster, self._roster_valid = read_roster(session)
        self._writers = {} if copy is None else {name: Checkpoint(*end) for name, end in copy.writers.items()}
        self._starts: dict[str, Checkpoint] = {}
        self._heads: dict[str, Checkpoint] = {}

    def faults(self) -> Iterator[str]:
        """Yield them all."""
        yield from self._copy_faults()
        yield from self._checkpoint_faults()
        yield from self._head_faults()
        seen: set[str] = set()
        for writer, rows in groupby(rows_of(self._session), lambda row: row.link.writer):
            seen.add(writer)
            yield from self._writer_faults(writer, rows)
        for writer in sorted({*self._listed, *self._heads, *self._writers} - seen):
            yield from self._end_faults(writer, self._starts.get(writer, Checkpoint()), {}, has_events=False)
        yield from self._roster_faults()

    @property
    def _listed(self) -> set[str]:
        return set() if self._roster is None else set(self._roster.writers)

    def _copy_faults(self) -> Iterator[str]:
        seals, copy = self._session.seals, self._copy
        if copy is not None and not seals.accept(copy.seal, "copy", *copy.content()):
            yield "the copy of the head is not as `arbitrage records head` signed it"

    def _checkpoint_faults(self) -> Iterator[str]:
        for writer, seq, hash, seal in self._session.rows("select writer, seq, hash, seal from checkpoints"):
            self._starts[writer] = Checkpoint(seq, hash)
            if not self._session.seals.accept(seal, "checkpoint", writer, seq, hash):
                yield f"writer {writer}: its checkpoint at event {seq} is not signed"

    def _head_faults(self) -> Iterator[str]:
        for writer, seq, hash, at, seal in self._session.rows("select writer, seq, hash, at, seal from heads"):
            if not self._session.seals.accept(seal, "head", writer, seq, hash, at):
                yield f"writer {writer}: its head at event {seq} is not signed"
            self._heads[writer] = Checkpoint(seq, hash)

    def _writer_faults(self, writer: str, rows: Iterator[StoredLink]) -> Iterator[str]:
        """Yield the faults of one writer: in its chain, and between its chain and its heads."""
        start = self._starts.get(writer, Checkpoint())
        try:
            key = self._session.seals.key_of(writer)
        except KeyError:
            yield f"writer {writer}: its hashes need a secret that is not at hand; give every secret of the project"
            return
        reading = Reading(key, vouches(self._session), needs_seal=bool(self._session.seals))
        hashes: dict[int, str] = {}
        due = {head.seq for heads in (self._heads, self._writers) for head in [heads.get(writer)] if head is not None}
        yield from reading.faults(_noting(rows, due, hashes), start)
        yield from self._end_faults(writer, reading.end, hashes, has_events=True)
        if key is None and self._session.seals and self._roster is not None:
            yield f"writer {writer}: no secret vouches for its events"

    def _end_faults(
        self, writer: str, end: Checkpoint, hashes: Mapping[int, str], *, has_events: bool
    ) -> Iterator[str]:
        """Compare where a chain ends with its heads; what a checkpoint replaced was pruned legitimately."""
        start = self._starts.get(writer, Checkpoint())
        for heads, kind in ((self._heads, "signed head"), (self._writers, "copy of the head")):
            head = heads.get(writer)
            if head is None:
                continue
            at_checkpoint = start.hash if head.seq == start.seq else None
            if head.seq > end.seq:
                missing = f"events {end.seq + 1} to {head.seq} were" if has_events or end.seq else "all its events were"
                yield f"writer {writer}: {missing} removed; the {kind} has {head.seq}"
            elif head.seq >= start.seq and hashes.get(head.seq, at_checkpoint) not in (head.hash, None):
                yield f"writer {writer}, event {head.seq}: its hash is not that of the {kind}"
        if writer in self._listed and writer not in self._heads:
            gone = "its signed head was" if has_events or end.seq else "its events and its signed head were"
            yield f"writer {writer}: {gone} removed; the signed list of writers has it"

    def _roster_faults(self) -> Iterator[str]:
        if not self._session.seals:
            return
        if self._roster is None:
            yield _UNSIGNED
        elif not self._roster_valid:
            yield "the list of writers, policies and keys is not as it was signed"
        else:
            for writer in sorted(self._heads.keys() - self._listed):
                yield f"writer {writer}: the signed list of writers is an earlier one, without it"


def _noting(rows: Iterator[StoredLink], due: set[int], hashes: dict[int, str]) -> Iterator[StoredLink]:
    """Pass rows on, keeping the hashes of some."""
    for row in rows:
        if row.link.seq in due:
            hashes[row.link.seq] = row.link.hash
        yield row


def policy_faults(session: Session, copy: Head | None = None) -> list[str]:
    """Return what is wrong with the installed certificates."""
    rows = session.rows(f"select {VERSION}, seal from policies order by name, version")
    roster, _ = read_roster(session)
    faults = [fault for _, group in groupby(rows, lambda row: row[0]) for fault in history_faults(session, group)]
    newest = {name: (int(version), seal) for name, version, *_, seal in rows}
    listed: Mapping[str, tuple[int, str]] = (roster or Roster()).policies if session.seals else {}
    copied: Mapping[str, tuple[int, str]] = {} if copy is None else copy.policies
    for known, kind in ((listed, "signed list"), (copied, "copy of the head")):
        for name, (version, seal) in known.items():
            stored = {int(row[1]): row[-1] for row in rows if row[0] == name}
            if newest.get(name, (0, ""))[0] < version:
                faults.append(f"policy {name}: version {version} was removed; the {kind} has it")
            elif stored.get(version) != seal:
                faults.append(f"policy {name}, version {version}: it is not the one in the {kind}")
    notices = Counter(link.policy for link in intact_notices(session))
    for name, count in (roster or Roster()).notices.items() if session.seals else ():
        if notices[name] != count:
            faults.append(
                f"policy {name}: {notices[name]} of its alarms, lifts and exclusions are what was written; the signed list "
                f"has {count}"
            )
    return faults


def history_faults(session: Session, rows: Iterator[Sequence[Any]]) -> Iterator[str]:
    """Yield the faults in the versions of one policy, oldest first."""
    previous, due = "", 1
    for row in rows:
        name, version, seal = row[0], int(row[1]), row[-1]
        if version != due:
            yield f"policy {name}: version {due} was removed"
        elif not session.seals.accept(seal, "policy", previous, *row[:-1]):
            yield f"policy {name}, version {version}: it is not what was installed"
        previous, due = str(seal), version + 1


KEY = "id, sha256, scope, label, created, revoked, expires, policies"
SIGN_IN = "sha256, key_id, created, expires"


def is_intact_key(session: Session, row: Sequence[Any], roster: Roster | None) -> bool:
    """Return whether a key is what was created, or revoked, last; `row` has the columns of `KEY` and the seal."""
    *values, seal = row
    if not session.seals:
        return True
    listed = roster is not None and roster.keys.get(values[0]) == seal
    return listed and session.seals.fits(seal, "key", *values)


def key_faults(session: Session, copy: Head | None = None) -> list[str]:
    """Return which API keys and sign-ins were inserted, changed or removed, or taken back to before they were revoked."""
    if not session.seals:
        return []
    roster, _ = read_roster(session)
    rows = session.rows(f"select {KEY}, seal from keys order by id")
    faults = [
        f"key {row[0]!r:.80}: it is not what was created" for row in rows if not is_intact_key(session, row, roster)
    ]
    missing = sorted((roster or Roster()).keys.keys() - {row[0] for row in rows})
    faults += [f"key {id}: it was removed; the signed list has it" for id in missing]
    kept: Mapping[str, str] = {} if copy is None else copy.keys
    faults += [
        f"key {row[0]}: it is an earlier one than in the copy of the head"
        for row in rows if row[5] is None and kept.get(row[0], row[-1]) != row[-1]
    ]  # fmt: skip
    faults += [
        f"key {id}: it was removed; the copy of the head has it"
        for id in sorted(kept.keys() - {row[0] for row in rows})
    ]
    return faults


class Sealed(NamedTuple):
    """A table whose rows carry a seal over some columns; `fault` says of a row that it was changed."""

    table: str
    kind: str
    columns: str
    key: str
    fault: str


_REPLAY = "key_id, name, status, headers, body"
_SEALED = (
    Sealed("sign_ins", "sign-in", SIGN_IN, "sha256", "a sign-in to the console with key {1!r:.80} is not what was written"),
    Sealed("replays", "replay", _REPLAY, "key_id, name", "the response under the idempotency key {1!r:.80} was changed"),
    Sealed("calibration_rows", "calibration row", ROW, "policy, log, place, id",
           "policy {0}: the calibration row {3!r:.80} was changed"),
    Sealed("audits", "audit", AUDIT, "id", "the audit of {0!r:.80} is not what was queued"),
    Sealed("configured", "configured", "policy, sha256", "policy",
           "policy {0}: the noted digest of its certificate file was changed"),
)  # fmt: skip
"""The tables whose rows vouch for themselves: nothing else has to agree with them."""


def changed_rows(session: Session, sealed: Sealed) -> list[str]:
    """Return which rows of a table were changed."""
    rows = session.changed(sealed.kind, sealed.columns, sealed.table, sealed.key)
    return [sealed.fault.format(*row) for row in rows]


# --- Pruning and erasing ---

_BEYOND = 2**62  # above the number of any event
GONE = 410
"""The status of a stored response that was erased."""


async def prune(store: Store, *, before: float) -> int:
    """Remove decisions older than a time, with all their events, and stored responses of that age; return how many.

    A tombstone with writer, number and hash replaces each event; tombstones at the start of a chain become one checkpoint,
    which keeps the chain verifiable. Decisions with an open audit stay until it is closed, and those whose audited loss is
    not known until it is due. Runs many short transactions, so that other writers are not delayed.
    """
    total = await store.run_all(_prune_some, before=before, now=time.time())
    await store.run(_compact)
    await store.run(_prune_replays, before=before)
    await store.run(forget_pruned, before=before)
    await store.run_all(forget_reviews, before=before)
    await sweep(store)
    await store.scrub()
    return total


async def sweep(store: Store) -> None:
    """Remove what has expired.

    That is idempotency keys and their responses, decisions that retries may continue, sessions of callers, sign-ins,
    messages to webhooks, and the questions of reviews. Runs many short transactions, so that other writers are not delayed.
    """
    for some in (sweep_claims, sweep_conversations, sweep_deliveries):
        await store.run_all(some)
    await store.run(sweep_reviews)
    await store.run(_sweep_sign_ins)


@operation("write")
def _sweep_sign_ins(session: Session) -> None:
    session.run("delete from sign_ins where expires <= ?", session.now())


@operation("maintain")
def _prune_some(session: Session, *, before: float, now: float) -> int:
    """Turn the events of some old decisions into tombstones; return how many decisions.

    A decision whose audit is open stays until the audit is closed, since it needs the question; one whose loss a grade or
    a label can still tell stays until that is due. One that is fit for calibration leaves its row.
    """
    rows = session.rows(
        "select id from events where kind = 'decision' and at < ? "
        "and not exists (select 1 from audits where audits.id = events.id) "
        "and not exists (select 1 from reviews where reviews.decision = events.id and reviews.state in ('open', 'decided')) "
        "and not exists (select 1 from ledger where ledger.id = events.id and ledger.loss is null and ledger.due > ?) "
        f"order by at limit ?{session.dialect.skip_locked}",
        *(before, now, CHUNK),
    )
    for (id,) in rows:
        keep(session, id)
        for row in events_of(session, id):  # the decision last: a process that dies meanwhile is run again
            _replace(session, row, Link(*row.link[:3], *[None] * 7))  # pyright: ignore[reportArgumentType]
    return len(rows)


@operation("maintain")
def _prune_replays(session: Session, *, before: float) -> None:
    """Remove the responses, and the claims behind them, that were stored before a time."""
    for table in ("replays", "begun"):
        session.run(f"delete from {table} where expires < ?", before + DAY)
    session.run("delete from claims where expires < ? and state = 'finished'", before + DAY)


def _replace(session: Session, row: StoredLink, new: Link) -> None:
    """Put another row in the place of an event; it is sealed only if the event was what had been written."""
    link = row.link
    seal = session.seals.sign("event", *new) if session.is_intact(row) else None
    session.run(
        "update events set id = ?, kind = ?, at = ?, body = ?, policy = ?, key_id = ?, decided_by = ?, seal = ? "
        "where writer = ? and seq = ?",
        *(*new[3:], seal, link.writer, link.seq),
    )


@operation("maintain")
def _compact(session: Session) -> None:
    """Replace the tombstones at the start of each chain by a checkpoint, as far as they are sealed."""
    for (writer,) in session.rows("select distinct writer from events where body is null"):
        end = _sealed_end(session, writer)
        if end.seq:
            session.run(
                "insert into checkpoints (writer, seq, hash, seal) values (?, ?, ?, ?) on conflict (writer) do update "
                "set seq = excluded.seq, hash = excluded.hash, seal = excluded.seal where excluded.seq > checkpoints.seq",
                *(writer, *end, session.seals.sign("checkpoint", writer, *end)),
            )
            session.run("delete from events where writer = ? and seq <= ?", writer, end.seq)


def _sealed_end(session: Session, writer: str) -> Checkpoint:
    """Return the last of the tombstones that follow a chain's start without a gap or a missing seal."""
    start = session.rows("select seq, hash, seal from checkpoints where writer = ?", writer)
    due = 1
    if start:
        seq, hash, seal = start[0]
        if not session.seals.accept(seal, "checkpoint", writer, seq, hash):
            return Checkpoint()
        due = int(seq) + 1
    end = Checkpoint()
    while rows := session.rows(
        f"select {LINK}, seal from events where writer = ? and body is null and seq >= ? and seq < coalesce("
        "(select min(seq) from events where writer = ? and body is not null), ?) order by seq limit ?",
        *(writer, due, writer, _BEYOND, CHUNK),
    ):
        for row in rows:
            link = Link._make(row[:-1])
            if link.seq != due or not session.seals.accept(row[-1], "event", *link):
                return end
            end, due = Checkpoint(link.seq, link.hash), due + 1
    return end


async def erase(store: Store, id: str) -> bool:
    """Erase what is content or personal of a decision, from SQLite's files too; return False if there is none.

    Scores, costs and times stay, so the decision still counts in an export.
    """
    known = await store.run(_erase, id)
    await store.scrub()
    return known


@operation("write")
def _erase(session: Session, id: str) -> bool:
    rows = events_of(session, id)
    if not any(row.link.kind == "decision" for row in rows):
        return False
    for row in rows:
        _replace(session, row, row.link._replace(body=encode(_without_content(row.link), id)))
    session.run("delete from audits where id = ?", id)
    session.run("delete from undelivered where id = ?", id)
    erase_reviews(session, id)
    _erase_replays(session, id.encode())
    return True


def _without_content(link: Link) -> EventBody:
    text = str(link.body)
    if link.kind == "decision":
        return erased(decode_decision(text, link.id))
    return erased(replace(decode_later(link.kind, text, link.id, link.at), at=None))


def _erase_replays(session: Session, id: bytes) -> None:
    """Replace the stored responses that name a decision by one that says so."""
    for rows in session.chunks("key_id, name, body", "replays", "key_id, name"):
        for key_id, name, body in rows:
            if id in body:
                row = (key_id, name, GONE, "{}", b"")
                session.run(
                    "update replays set status = ?, headers = ?, body = ?, seal = ? where key_id = ? and name = ?",
                    *(*row[2:], session.seals.sign("replay", *row), key_id, name),
                )
