"""Verification: everything in a store that is not as it was written, in words.

Knows nothing of threads, or of how a transaction begins and ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.hash_chain import Checkpoint, Reading, StoredLink
from conformal_arbitrage.store.heads import CHUNK, VERSION, Head, Roster, read_roster, rows_of, vouches

_UNSIGNED = (
    "nothing vouches for these events: there is no signed list of writers; it was removed, or the database was filled "
    "without the project's secret"
)


def chain_faults(session: Session, copy: Head | None = None) -> list[str]:
    """Return every fault of the chains, their heads and the list of writers; the transaction must be a snapshot.

    Args:
        session: a connection.
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
        yield from self._roster_faults(seen)

    @property
    def _listed(self) -> set[str]:
        return set() if self._roster is None else set(self._roster.writers)

    def _copy_faults(self) -> Iterator[str]:
        seals, copy = self._session.seals, self._copy
        if copy is not None and seals and not seals.fits(copy.seal, "copy", *copy.content()):
            yield "the copy of the head is not as `arbitrage records head` signed it"

    def _checkpoint_faults(self) -> Iterator[str]:
        for writer, seq, hash, seal in self._session.rows("select writer, seq, hash, seal from checkpoints"):
            self._starts[writer] = Checkpoint(seq, hash)
            if self._session.seals and not self._session.seals.fits(seal, "checkpoint", writer, seq, hash):
                yield f"writer {writer}: its checkpoint at event {seq} is not signed"

    def _head_faults(self) -> Iterator[str]:
        for writer, seq, hash, at, seal in self._session.rows("select writer, seq, hash, at, seal from heads"):
            if self._session.seals and not self._session.seals.fits(seal, "head", writer, seq, hash, at):
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

    def _roster_faults(self, seen: set[str]) -> Iterator[str]:
        if not self._session.seals:
            return
        if self._roster is None:
            if seen or self._heads or self._starts:
                yield _UNSIGNED
        elif not self._roster_valid:
            yield "the list of writers and policies is not as it was signed"


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
    faults = [fault for _, group in groupby(rows, lambda row: row[0]) for fault in _history_faults(session, group)]
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
    return faults


def _history_faults(session: Session, rows: Iterator[Sequence[Any]]) -> Iterator[str]:
    """Yield the faults in the versions of one policy, oldest first."""
    previous, due = "", 1
    for row in rows:
        name, version, seal = row[0], int(row[1]), row[-1]
        if version != due:
            yield f"policy {name}: version {due} was removed"
        elif session.seals and not session.seals.fits(seal, "policy", previous, *row[:-1]):
            yield f"policy {name}, version {version}: it is not what was installed"
        previous, due = str(seal), version + 1


def replay_faults(session: Session) -> list[str]:
    """Return which stored responses were changed."""
    if not session.seals:
        return []
    faults: list[str] = []
    last: tuple[Any, ...] = ("", "")
    while rows := session.rows(
        "select key_id, name, status, headers, body, seal from replays where (key_id, name) > (?, ?) "
        "order by key_id, name limit ?",
        *(*last, CHUNK),
    ):
        changed = [row for row in rows if not session.seals.fits(row[-1], "replay", *row[:-1])]
        faults += [f"the response under the idempotency key {name!r:.80} was changed" for _, name, *_ in changed]
        last = rows[-1][:2]
    return faults
