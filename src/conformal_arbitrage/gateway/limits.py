"""How many requests one gateway serves: per minute and key, and at the same time.

Knows nothing of what a request does.
"""

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.live.config import GatewayConfig


class Window:
    """A sliding window: at most `limit` units within any `seconds`."""

    def __init__(self, limit: float, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until there is room; 0 if there is."""
        while self._taken and self._taken[0][0] <= now - self.seconds:
            self._sum -= self._taken.popleft()[1]
        return 0.0 if not self._taken or self._sum < self.limit else self._taken[0][0] + self.seconds - now

    def take(self, now: float, units: float) -> None:
        """Use some units."""
        self._taken.append((now, units))
        self._sum += units


class RequestLimits:
    """The limits on requests of one gateway.

    Attributes:
        in_flight: requests being served now.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._most_in_flight = config.max_in_flight
        self._per_minute = config.requests_per_minute
        self._windows: dict[str, Window] = {}
        self.in_flight = 0

    @contextmanager
    def admitted(self, caller_id: str) -> Generator[None]:
        """Count one request while it is served.

        Raises:
            RequestError: 429 with Retry-After.
        """
        if self.in_flight >= self._most_in_flight:
            raise too_many(f"{self.in_flight} requests are in flight, the most this gateway serves at once", 1.0)
        if self._per_minute is not None:
            self._take(caller_id, self._per_minute)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def _take(self, caller_id: str, per_minute: int) -> None:
        window = self._windows.setdefault(caller_id, Window(per_minute, 60.0))
        now = time.monotonic()
        if (wait := window.wait(now)) > 0:
            raise too_many(f"this key may make {per_minute} requests a minute", wait)
        window.take(now, 1)


def too_many(message: str, wait: float) -> RequestError:
    """Return a 429 that says when to retry."""
    seconds = str(max(1, round(wait)))
    return RequestError(message, status=429, code="rate_limit_exceeded", headers={"Retry-After": seconds})
