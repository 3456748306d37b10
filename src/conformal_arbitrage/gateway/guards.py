"""Who may call, and how much: API keys with scopes, rates, calls in flight, Guardian calls and money.

Knows nothing of policies or decisions.
"""

import hashlib
import ipaddress
import re
import secrets
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from conformal_arbitrage.errors import ConfigError, RequestError
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.scorers.base import Answer, Answerer, Identity, Scorer, Scores
from conformal_arbitrage.store.base import KeyInfo, Scope, Store
from conformal_arbitrage.types import ChatRequest, Query, Spent

_ALLOWS: dict[Scope, frozenset[str]] = {
    "call": frozenset({"call"}),
    "review": frozenset({"call", "review"}),
    "admin": frozenset({"call", "review", "admin"}),
}
ANONYMOUS = "loopback"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling."""

    id: str
    scope: Scope


def new_key() -> tuple[str, str]:
    """A fresh API key, and the digest that is kept of it."""
    key = "arb-" + secrets.token_urlsafe(32)
    return key, digest(key)


def digest(key: str) -> str:
    """SHA-256 of a key: it is random, so nothing slower is needed, and the database compares digests, not keys."""
    return hashlib.sha256(key.encode()).hexdigest()


def host_of(header: str) -> str:
    """The host of a Host header, without its port."""
    name = header.rsplit(":", 1)[0] if re.search(r":\d*$", header) and not header.endswith("]") else header
    return name.strip("[]")


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_binding(host: str, *, has_keys: bool) -> None:
    """Refuse to listen beyond this machine while anyone could call."""
    if not has_keys and not is_loopback(host):
        raise ConfigError(
            f"without API keys the gateway listens on loopback only, not on {host}; make a key first: "
            "arbitrage keys create --scope call"
        )


class Doorkeeper:
    """Finds out who calls.

    Args:
        store: where keys are.

    Attributes:
        open_house: no key was ever made, so callers on loopback need none; the first key ends that at once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = -1
        self._found: dict[str, KeyInfo] = {}
        self.open_house = True

    async def refresh(self, count: int) -> None:
        """Forget what was found before the store changed; `count` is its change count."""
        if count <= self._seen:
            return
        if self.open_house:
            none = not await self._store.keys()
            self.open_house = self.open_house and none  # meanwhile another refresh may have seen a key
        if count > self._seen:
            self._seen, self._found = count, {}

    async def caller(self, authorization: str, scope: Scope) -> Caller:
        """The caller, if the key allows what is asked for.

        Raises:
            RequestError: 401 without a good key, 403 if it allows less.
        """
        if self.open_house:
            return Caller(ANONYMOUS, "admin")
        kind, _, key = authorization.partition(" ")
        found = await self._find(digest(key.strip())) if kind.lower() == "bearer" and key else None
        if found is None or found.revoked is not None:
            raise RequestError(
                "a valid API key is needed: Authorization: Bearer arb-...", status=401, code="invalid_api_key"
            )
        if scope not in _ALLOWS[found.scope]:
            raise RequestError(
                f"this key has the scope {found.scope}; {scope} is needed", status=403, code="insufficient_scope"
            )
        return Caller(found.id, found.scope)

    async def _find(self, sha256: str) -> KeyInfo | None:
        known = self._found  # a refresh while the store is asked begins another: what was read then may be old
        found = known.get(sha256) or await self._store.find_key(sha256)
        if found is not None:
            known[sha256] = found
        return found


class Window:
    """At most so many units in any stretch of time."""

    def __init__(self, limit: float, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def wait(self, now: float) -> float:
        """Seconds until there is room; 0 if there is."""
        while self._taken and self._taken[0][0] <= now - self.seconds:
            self._sum -= self._taken.popleft()[1]
        return 0.0 if not self._taken or self._sum < self.limit else self._taken[0][0] + self.seconds - now

    def take(self, now: float, units: float) -> None:
        """Use some up."""
        self._taken.append((now, units))
        self._sum += units


class Limits:
    """Rates per key, and calls in flight."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._windows: dict[str, Window] = {}
        self.in_flight = 0

    @contextmanager
    def admitted(self, caller: Caller) -> Generator[None]:
        """Hold a place for one request.

        Raises:
            RequestError: 429 with Retry-After.
        """
        if self.in_flight >= self._config.max_in_flight:
            raise too_many(f"{self.in_flight} requests are under way, as many as this gateway takes", 1.0)
        rate = self._config.requests_per_minute
        if rate is not None:
            window = self._windows.setdefault(caller.id, Window(rate, 60.0))
            now = time.monotonic()
            if (wait := window.wait(now)) > 0:
                raise too_many(f"this key makes at most {rate} requests a minute", wait)
            window.take(now, 1)
        with self.held():
            yield

    @contextmanager
    def held(self) -> Generator[None]:
        """Count as under way, as a stream does that waits for its decision."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


def too_many(message: str, wait: float) -> RequestError:
    """A 429 that says when to come back."""
    seconds = str(max(1, round(wait)))
    return RequestError(message, status=429, code="rate_limit_exceeded", headers={"Retry-After": seconds})


class GuardianLimits:
    """How often and for how much the Guardian may be asked, over all callers."""

    def __init__(self, config: GatewayConfig) -> None:
        calls, cost = config.guardian_calls_per_minute, config.guardian_cost_per_hour
        self._calls = None if calls is None else Window(calls, 60.0)
        self._cost = None if cost is None else Window(cost, 3600.0)

    def check(self) -> None:
        """Take one call's room.

        Raises:
            RequestError: 429 with Retry-After.
        """
        now = time.monotonic()
        for window, what in ((self._calls, "calls"), (self._cost, "money")):
            if window is not None and (wait := window.wait(now)) > 0:
                raise too_many(f"the Guardian's limit on {what} is reached", wait)
        if self._calls is not None:
            self._calls.take(now, 1)

    def pay(self, spent: Spent) -> None:
        """Count what a call cost."""
        if self._cost is not None and spent.cost:
            self._cost.take(time.monotonic(), spent.cost)


@dataclass(frozen=True, slots=True)
class LimitedScorer:
    """A Guardian under limits, over menus."""

    scorer: Scorer
    limits: GuardianLimits

    @property
    def identity(self) -> Identity:
        """The scorer's."""
        return self.scorer.identity

    async def score(self, query: Query) -> Scores:
        """The scorer's, if the limits allow."""
        self.limits.check()
        scores = await self.scorer.score(query)
        self.limits.pay(scores.spent)
        return scores


@dataclass(frozen=True, slots=True)
class LimitedAnswerer:
    """A Guardian under limits, in free text."""

    answerer: Answerer
    limits: GuardianLimits

    @property
    def identity(self) -> Identity:
        """The answerer's."""
        return self.answerer.identity

    async def answer(self, request: ChatRequest) -> Answer:
        """The answerer's, if the limits allow."""
        self.limits.check()
        answer = await self.answerer.answer(request)
        self.limits.pay(answer.spent)
        return answer
