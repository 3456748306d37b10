"""Ids of decisions: 26 characters that sort by time, like a ULID.

Knows nothing of where an id is stored.
"""

import os
import threading
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS = 80
_PAIRS = [one + other for one in _ALPHABET for other in _ALPHABET]  # ten bits at a time
_SHIFTS = range(120, -1, -10)


class _Ids:
    """A source of ids, each above the previous one even if the clock stands still or goes back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> str:
        random = int.from_bytes(os.urandom(_RANDOM_BITS // 8))
        candidate = (time.time_ns() // 1_000_000 << _RANDOM_BITS) | random
        with self._lock:
            value = self._last = max(candidate, self._last + 1)
        return "".join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])


_ids = _Ids()


def new_id() -> str:
    """Return a new id: 48 bits of milliseconds, then 80 random bits; ids of one process only grow."""
    return _ids.next()


def time_of(id: str) -> float:
    """Return when an id was made, in seconds since the epoch."""
    value = 0
    for character in id:
        value = value << 5 | _ALPHABET.index(character)
    return (value >> _RANDOM_BITS) / 1000


def id_at(seconds: float) -> str:
    """Return what sorts after every id made before a time, and before every id made after it, to the millisecond."""
    value = (max(0, int(seconds * 1000)) + 1 << _RANDOM_BITS) - 1
    return "".join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])
