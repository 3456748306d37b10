"""Undelivered: decisions that a request without an idempotency key began and did not deliver, for its retry to continue.

A retry that asked the Primary again would give it another chance to be sure, and again until it is: the loss of what is
delivered would exceed the quota. Held in memory, so a retry has to reach the same gateway; idempotency keys need not.

Knows nothing of records or models.
"""

import time
from collections.abc import Callable
from hashlib import blake2b

import msgspec

KEEP_SECONDS = 600.0
_MOST = 10_000
_sorted = msgspec.json.Encoder(order="sorted", enc_hook=str)


class Undelivered:
    """Ids of decisions by question, each handed out once, within ten minutes of its first attempt.

    Args:
        clock: seconds, from any origin.

    Attributes:
        kept: id and end, by the digest of the question; usually empty, which is all that most requests look at.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.kept: dict[bytes, tuple[str, float]] = {}
        self._ends: dict[str, float] = {}

    def keep(self, question: object, id: str) -> None:
        """Keep a decision; one that was handed out and failed again keeps its first time."""
        now = self._clock()
        ends = self._ends.pop(id, now + KEEP_SECONDS)
        if ends > now:
            self.kept[_digest(question)] = id, ends
        while len(self.kept) > _MOST:
            del self.kept[next(iter(self.kept))]

    def take(self, question: object) -> str | None:
        """Hand out the decision that an earlier request about the same began, if there is one."""
        id, ends = self.kept.pop(_digest(question), ("", 0.0))
        if ends <= self._clock():
            return None
        self._ends[id] = ends
        while len(self._ends) > _MOST:
            del self._ends[next(iter(self._ends))]
        return id


def _digest(question: object) -> bytes:
    return blake2b(_sorted.encode(question), digest_size=32).digest()
