"""Chain: each writer's events linked by hash, and the search for what does not fit.

A hash covers the hash before it and the event as it is kept, with its writer, number and time.

Knows nothing of databases.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store.base import Event

_strict = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False)
_sorted = msgspec.json.Encoder(order="sorted")
_lenient = msgspec.json.Encoder(enc_hook=str)  # a damaged row may hold anything


def canonical(document: Mapping[str, Any], what: str) -> str:
    """A document as a JSON text: sorted and dense.

    Raises:
        StoreError: it is not JSON.
    """
    with suppress(UnicodeEncodeError, OverflowError, RecursionError):  # json can write half a character, a huge number
        if _plain(document):
            return _sorted.encode(document).decode()
    try:
        return _strict.encode(dict(document))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{what} is not JSON ({error}); give text, finite numbers, lists and objects") from error


def _plain(value: Any) -> bool:
    """Whether msgspec writes a document as it is: it would make NaN null, and text of bytes and dates."""
    kind: Any = value.__class__
    if kind is str or kind is int or value is None or kind is bool:
        return True
    if kind is float:
        return isfinite(value)
    if kind is dict:
        return set(map(type, value)) <= {str} and all(map(_plain, value.values()))
    return (kind is list or kind is tuple) and all(map(_plain, value))


class Link(NamedTuple):
    """An event as it is kept; without a body, the tombstone of one that was pruned."""

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
        """The hash this event must have after another."""
        told = _lenient.encode([previous, *self[:2], *self[3:]])
        return hashlib.sha256(told).hexdigest()

    def follows(self, previous: str) -> bool:
        """Whether this event is whole and comes after that hash; a tombstone's hash is taken as given."""
        return self.body is None or self.hash == self.digest(previous)


class Checkpoint(NamedTuple):
    """Where a writer's chain starts: the last event that was pruned without a trace."""

    seq: int = 0
    hash: str = ""


class Chain:
    """One writer: a random id, and how far its committed events go."""

    def __init__(self) -> None:
        self.writer = secrets.token_hex(8)
        self.end = Checkpoint()

    def append(self, event: Event, body: str, at: float) -> Link:
        """The next event; set `end` back if its transaction fails."""
        seq, previous = self.end.seq + 1, self.end.hash
        told = (event.id, event.kind, at, body, event.policy, event.key_id, event.decided_by)
        digest = Link(self.writer, seq, "", *told).digest(previous)
        self.end = Checkpoint(seq, digest)
        return Link(self.writer, seq, digest, *told)


def faults(links: Iterable[Link], start: Checkpoint) -> Iterator[str]:
    """What is wrong with one writer's chain, in words; links come in the order of their numbers."""
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
            yield f"{_name(link)}: it is not what was written, or the hash before it was changed"
        link = after


def _swapped(link: Link, after: Link, previous: str) -> bool:
    """Whether two neighbours would fit if each had the other's number."""
    first, second = after._replace(seq=link.seq), link._replace(seq=after.seq)
    return after.body is not None and first.follows(previous) and second.follows(first.hash)


def _only_hash(link: Link, after: Link, previous: str) -> bool:
    """Whether the next event follows from what this one says, though its hash does not."""
    return after.body is not None and after.follows(link.digest(previous))


def _name(link: Link) -> str:
    what = "pruned" if link.body is None else f"{link.kind} of {link.id}"
    return f"writer {link.writer}, event {link.seq} ({what})"
