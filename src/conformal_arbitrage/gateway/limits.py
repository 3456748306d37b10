"""How many requests are served: per minute and key, and at the same time.

Knows nothing of what a request does.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.scorers.quota import Window


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
