"""Hash chains: link each writer's events by hash, and find the events that do not fit.

A hash covers the previous hash and the event as it is stored, with its writer, number and time. It is keyed if the writer
had a key, so that no one without it can append or rewrite; the writer's name begins with the key's fingerprint then.

Knows nothing of databases or signatures.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from conformal_arbitrage.store.record import Event

_lenient = msgspec.json.Encoder(enc_hook=str)  # a damaged row may hold anything


class Link(NamedTuple):
    """An event as it is stored; without a body, the tombstone of a pruned one."""

    writer: str
    seq: int
    hash: str
    id: str
    kind: str
    at: float
    body: str | None
    policy: str | None
    key_id: str | None
    decided_by: str | None

    def digest(self, previous: str, key: bytes | None = None) -> str:
        """Return the hash this event must have if it follows that hash."""
        content = _lenient.encode([previous, *self[:2], *self[3:]])
        if key is None:
            return hashlib.sha256(content).hexdigest()
        return hashlib.blake2b(content, key=key, digest_size=32).hexdigest()


class StoredLink(NamedTuple):
    """A link with the seal of whatever replaced the event: a tombstone, or the event without its content."""

    link: Link
    seal: str | None


class Checkpoint(NamedTuple):
    """Where a writer's chain starts: after the last event that was pruned without a tombstone."""

    seq: int = 0
    hash: str = ""


class Chain:
    """The chain of one writer: its random id and its last event.

    Args:
        name: fingerprint of the key.
        key: makes hashes that only its holders can make; None for plain ones.
    """

    def __init__(self, name: str = "", key: bytes | None = None) -> None:
        self.writer = secrets.token_hex(8) if key is None else f"{name}-{secrets.token_hex(8)}"
        self.end = Checkpoint()
        self._key = key

    def append(self, event: Event, body: str, at: float) -> Link:
        """Return the next event; reset `end` if its transaction fails."""
        seq, previous = self.end.seq + 1, self.end.hash
        fields = (event.id, event.body.kind, at, body, event.policy, event.key_id, event.decided_by)
        digest = Link(self.writer, seq, "", *fields).digest(previous, self._key)
        self.end = Checkpoint(seq, digest)
        return Link(self.writer, seq, digest, *fields)


class Reading:
    """One writer's chain being checked.

    Args:
        key: behind its hashes; None for plain ones.
        vouched: tells whether a replaced event is signed.
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
                yield f"{_name(link)}: event {due} should come here; events were removed"
            elif row.seal is not None or link.body is None:
                if not self._is_replacement(row):
                    yield f"{_name(link)}: it was replaced, and no valid signature says so"
            elif self._follows(link, expected):
                pass
            elif after is not None and self._swapped(link, after.link, expected):
                yield f"{_name(link)}: it and event {after.link.seq} were swapped"
                self.end, after = Checkpoint(after.link.seq, link.hash), next(rest, None)
            elif after is not None and self._only_hash(link, after.link, expected):
                yield f"{_name(link)}: its hash was changed"
                self.end = Checkpoint(link.seq, link.digest(expected, self._key))
            else:
                yield f"{_name(link)}: it is not what was written, or the previous hash was changed"
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


def _name(link: Link) -> str:
    content = "pruned" if link.body is None else f"{link.kind} of {link.id}"
    return f"writer {link.writer}, event {link.seq} ({content})"
