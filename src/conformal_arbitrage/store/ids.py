"""Ids of decisions: 26 characters that sort by time, as a ULID does.

Knows nothing of where an id is kept.
"""

import secrets
import threading
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS = 80
_PAIRS = [one + other for one in _ALPHABET for other in _ALPHABET]  # ten bits at a time
_SHIFTS = range(120, -1, -10)


class _Ids:
    """A source of ids, each above the one before even if the clock stands still or goes back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> str:
        drawn = (time.time_ns() // 1_000_000 << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)
        with self._lock:
            value = self._last = max(drawn, self._last + 1)
        return "".join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])


_ids = _Ids()


def new_id() -> str:
    """A fresh id: 48 bits of milliseconds, 80 random ones; later ids of one process are greater."""
    return _ids.next()
