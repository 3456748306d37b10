"""Drain: from the signal to stop until the gateway accepts nothing more, so that whatever sends requests can look elsewhere.

While it lasts, requests are served as ever, /health/ready says 503, and every reply closes its connection. At its end
callers who wait for people are told to come back.

Knows nothing of signals, or of how a server stops.
"""

from collections.abc import Callable

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.auth import is_loopback
from conformal_arbitrage.live.config import GatewayConfig

_BEYOND_LOOPBACK = 5.0


class Drain:
    """Whether a gateway is about to stop.

    Attributes:
        seconds: how long it goes on serving then.
        begun: whether it was told to stop.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begun = False
        self._at_end: list[Callable[[], None]] = []

    @classmethod
    def of(cls, config: GatewayConfig) -> "Drain":
        """Return the drain of a configuration."""
        usual = 0.0 if is_loopback(config.host) else _BEYOND_LOOPBACK
        return cls(usual if config.drain is None else config.drain)

    def at_end(self, act: Callable[[], None]) -> None:
        """Have something done once nothing more is accepted."""
        self._at_end.append(act)

    def end(self) -> None:
        """Do what was asked for at the end."""
        for act in self._at_end:
            act()

    def check(self) -> None:
        """Refuse to be called ready once it has begun.

        Raises:
            RequestError: it has.
        """
        if self.begun:
            raise RequestError("the gateway is about to stop; send requests elsewhere", status=503, code="draining")
