"""Hash chains: link each writer's events by hash, and find the events that do not fit.

A hash covers the previous hash and the event as it is stored, with its writer, number and time.

Knows nothing of databases.
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator
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

    def digest(self, previous: str) -> str:
        """Return the hash this event must have if it follows that hash."""
        return hashlib.sha256(_lenient.encode([previous, *self[:2], *self[3:]])).hexdigest()

    def follows(self, previous: str) -> bool:
        """Return whether this event is intact and follows that hash; a tombstone's hash is taken as given."""
        return self.body is None or self.hash == self.digest(previous)


class Checkpoint(NamedTuple):
    """Where a writer's chain starts: after the last event that was pruned without a tombstone."""

    seq: int = 0
    hash: str = ""


class Chain:
    """The chain of one writer: its random id and its last event."""

    def __init__(self) -> None:
        self.writer = secrets.token_hex(8)
        self.end = Checkpoint()

    def append(self, event: Event, body: str, at: float) -> Link:
        """Return the next event; reset `end` if its transaction fails."""
        seq, previous = self.end.seq + 1, self.end.hash
        fields = (event.id, event.body.kind, at, body, event.policy, event.key_id, event.decided_by)
        digest = Link(self.writer, seq, "", *fields).digest(previous)
        self.end = Checkpoint(seq, digest)
        return Link(self.writer, seq, digest, *fields)


def faults(links: Iterable[Link], start: Checkpoint) -> Iterator[str]:
    """Yield what is wrong with one writer's chain, in words; links come in the order of their numbers."""
    seq, previous = start
    rest = iter(links)
    link = next(rest, None)
    while link is not None:
        after = next(rest, None)
        due, expected = seq + 1, previous
        seq, previous = link.seq, link.hash
        if link.seq != due:
            yield f"{_name(link)}: event {due} should come here; events were removed"
        elif link.follows(expected):
            pass
        elif after is not None and _swapped(link, after, expected):
            yield f"{_name(link)}: it and event {after.seq} were swapped"
            seq, after = after.seq, next(rest, None)
        elif after is not None and _only_hash(link, after, expected):
            yield f"{_name(link)}: its hash was changed"
            previous = link.digest(expected)
        else:
            yield f"{_name(link)}: it is not what was written, or the previous hash was changed"
        link = after


def _swapped(link: Link, after: Link, previous: str) -> bool:
    """Return whether two adjacent events would fit with their numbers exchanged."""
    first, second = after._replace(seq=link.seq), link._replace(seq=after.seq)
    return after.body is not None and first.follows(previous) and second.follows(first.hash)


def _only_hash(link: Link, after: Link, previous: str) -> bool:
    """Return whether the next event follows from this one's content, although this one's hash does not."""
    return after.body is not None and after.follows(link.digest(previous))


def _name(link: Link) -> str:
    content = "pruned" if link.body is None else f"{link.kind} of {link.id}"
    return f"writer {link.writer}, event {link.seq} ({content})"
