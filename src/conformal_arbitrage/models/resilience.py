"""Wrappers around a port, all with its interface: retry, breaker, limits, spending, cache, price, estimate."""

import asyncio
import random
import sqlite3
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from conformal_arbitrage.errors import (
    CostLimitError,
    DeadlineError,
    OptionError,
    OutputError,
    ReplyError,
    UpstreamError,
)
from conformal_arbitrage.models.port import (
    IN_BACKGROUND,
    UNKNOWN,
    Call,
    Port,
    Reply,
    WholePort,
    Wrapper,
    fingerprint,
    spent_of,
    until,
)
from conformal_arbitrage.types import COST_DIGITS, Chunk, Spent

# --- Around ---


_ReplyReader = Callable[[Reply], Reply]


class Around(Wrapper, ABC):
    """Base of wrappers that do the same around a call whether or not it streams."""

    @abstractmethod
    def around(self, call: Call) -> AbstractAsyncContextManager[_ReplyReader]:
        """Surround a call, and give what takes its reply and returns the one to pass on."""

    async def call(self, call: Call) -> Reply:
        """Make the call."""
        async with self.around(call) as read:
            return read(await self.port.call(call))

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Make the call and yield its chunks, then its reply."""
        async with self.around(call) as read, aclosing(self.port.stream(call)) as items:
            async for item in items:
                yield read(item) if isinstance(item, Reply) else item


# --- Price, ListPrice, Priced ---


class Pricing(Protocol):
    """Anything that knows the cost of calls."""

    def cost(self, spent: Spent) -> float | None:
        """Return dollars, or None if unknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A custom price: dollars per million tokens, and per call."""

    input: float = 0.0
    output: float = 0.0
    per_call: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative and infinite prices."""
        for name in ("input", "output", "per_call"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"a price must be 0 or more dollars; got {name} {getattr(self, name)!r}")

    def cost(self, spent: Spent) -> float | None:
        """Return dollars; unknown if tokens have a price and their number is unknown."""
        into, out = spent.input_tokens, spent.output_tokens
        if (self.input and into is None) or (self.output and out is None):
            return None
        tokens = self.input * (into or 0) / 1e6 + self.output * (out or 0) / 1e6
        return round(tokens + self.per_call * spent.calls, COST_DIGITS)


@dataclass(frozen=True, slots=True)
class ListPrice:
    """The provider's list price, from the table bundled with genai-prices; no network."""

    model: str
    url: str

    def cost(self, spent: Spent) -> float | None:
        """Return dollars; tokens read from the provider's cache are cheaper where the list says so."""
        from genai_prices import Usage, calc_price  # takes 150 ms, so only when a cost is needed

        if spent.input_tokens is None or spent.output_tokens is None:
            return None
        usage = Usage(
            input_tokens=spent.input_tokens,
            output_tokens=spent.output_tokens,
            cache_read_tokens=min(spent.cached_tokens, spent.input_tokens),
        )
        return float(calc_price(usage, self.model, provider_api_url=self.url).total_price)


class Priced(Around):
    """Add the cost to the tokens of every attempt.

    Args:
        pricing: its price; None makes every cost unknown.
    """

    def __init__(self, port: Port, pricing: Pricing | None) -> None:
        super().__init__(port)
        self._pricing = pricing

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncGenerator[_ReplyReader]:
        """Add the cost, of failed calls too."""
        try:
            yield lambda reply: Reply(document=reply.document, spent=self._priced(reply.spent))
        except UpstreamError as error:
            error.spent = self._priced(spent_of(error))
            raise

    def _priced(self, spent: Spent) -> Spent:
        return Spent(
            calls=spent.calls,
            input_tokens=spent.input_tokens,
            output_tokens=spent.output_tokens,
            reasoning_tokens=spent.reasoning_tokens,
            cached_tokens=spent.cached_tokens,
            cost=None if self._pricing is None else self._pricing.cost(spent),
        )


def list_price(model: str, url: str) -> ListPrice | None:
    """Return the list price of a model at an endpoint; None if the table has none."""
    priced = ListPrice(model, url)
    try:
        priced.cost(Spent(calls=1, input_tokens=1, output_tokens=1))
    except LookupError:
        return None
    return priced


def dollars(cost: float | None) -> str:
    """Format a cost for people; None is "unknown"."""
    if cost is None:
        return "unknown"
    return f"${cost:.2f}" if cost >= 1 or cost == 0 else f"${cost:.2g}"


# --- Breaker ---


class Breaker(Around):
    """Fail calls immediately for a while after consecutive failures.

    Args:
        failures: consecutive failures that open the breaker.
        rest: seconds until one call is let through as a trial.
    """

    def __init__(self, port: Port, *, failures: int = 10, rest: float = 5.0) -> None:
        super().__init__(port)
        self._most = failures
        self._rest = rest
        self._failed = 0
        self._until = 0.0

    @property
    def resting(self) -> bool:
        """Whether calls currently fail immediately."""
        return self._failed >= self._most and asyncio.get_running_loop().time() < self._until

    def open(self) -> None:
        """Let calls fail immediately for a while, whatever came before."""
        self._failed = self._most
        self._until = asyncio.get_running_loop().time() + self._rest

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncGenerator[_ReplyReader]:
        """Refuse the call while the breaker is open, and count failures."""
        self._begin()
        try:
            yield self._close
        except UpstreamError as error:
            self._count(error)
            raise

    def _close(self, reply: Reply) -> Reply:
        self._failed = 0
        return reply

    def _begin(self) -> None:
        if self._failed < self._most:
            return
        if self.resting:
            raise UpstreamError(f"{self.origin}: not called for now, after {self._failed} failures in a row")
        self._rest_again()  # during a trial, other calls keep failing

    def _count(self, error: UpstreamError) -> None:
        if error.retryable or isinstance(error, DeadlineError):  # a refused request says nothing about others
            self._failed += 1
            self._rest_again()

    def _rest_again(self) -> None:
        self._until = asyncio.get_running_loop().time() + self._rest


# --- Capped ---


_Reservation = TypeVar("_Reservation")


class Spending(Protocol[_Reservation]):
    """A limit on money: the largest possible cost of a call is reserved before it is made, and settled afterwards."""

    @property
    def setting(self) -> str:
        """The setting that limits the money, for messages."""
        ...

    async def reserve(self, worst: float) -> _Reservation:
        """Reserve the largest possible cost of a call.

        Raises:
            ArbitrageError: there is not enough left.
        """
        ...

    def settle(self, reservation: _Reservation, cost: float | None) -> None:
        """Replace a reservation by the actual cost, or keep it in full if that is unknown."""
        ...


class SpendingLimit:
    """A limit in dollars that several ports share.

    A call that would fit but for reservations waits; one whose cost stays unknown counts in full.
    """

    setting = "--max-cost"

    def __init__(self, limit: float, *, spent: float = 0.0) -> None:
        self.limit = limit
        self.spent = spent
        self.reserved = 0.0
        self._in_flight = 0
        self._changed = asyncio.Event()

    async def reserve(self, worst: float) -> float:
        """Reserve the largest possible cost of a call.

        Raises:
            CostLimitError: there is not enough left.
        """
        while self.spent + self.reserved + worst > self.limit:
            if not self._in_flight:
                raise CostLimitError(
                    f"the next call could take the bill past ${self.limit:g} (${self.spent:.4g} spent); replies so far "
                    "are kept: run again with a higher --max-cost"
                )
            self._changed.clear()
            await self._changed.wait()
        self.reserved += worst
        self._in_flight += 1
        return worst

    def settle(self, reservation: float, cost: float | None) -> None:
        """Replace a reservation by the actual cost, or keep it in full if that is unknown."""
        self._in_flight -= 1
        self.reserved = self.reserved - reservation if self._in_flight else 0.0
        self.spent += reservation if cost is None else cost
        self._changed.set()


class Capped(Around):
    """Refuse calls that could take the bill past a limit.

    The largest possible cost of a call has one input token for each byte of the request, and all the output tokens that
    its limit allows.
    """

    def __init__(self, port: Port, pricing: Pricing, limit: Spending[Any]) -> None:
        super().__init__(port)
        self._pricing = pricing
        self._limit = limit

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncGenerator[_ReplyReader]:
        """Pay the call from the limit; one whose cost stays unknown, or a stream that is abandoned, counts in full."""
        reservation = await self._limit.reserve(self._worst(call))
        cost: float | None = None

        def read(reply: Reply) -> Reply:
            nonlocal cost
            cost = reply.spent.cost
            return reply

        try:
            yield read
        except UpstreamError as error:
            cost = spent_of(error).cost
            raise
        finally:
            self._limit.settle(reservation, cost)

    def _worst(self, call: Call) -> float:
        most = Spent(calls=1, input_tokens=request_size(call), output_tokens=call.output_limit)
        cost = self._pricing.cost(most)
        if cost is None:
            raise CostLimitError(
                f"{self.origin}: {self._limit.setting} needs a limit on the length of replies; set max_tokens for this "
                "model"
            )
        return cost


def request_size(call: Call) -> int:
    """Return the bytes of a call's body as JSON."""
    try:
        return len(msgspec.json.encode(call.body))
    except UnicodeEncodeError as error:
        raise UpstreamError("the request contains text that is not valid Unicode, so it cannot be sent") from error


# --- Cache ---


class Cache(Wrapper):
    """Store replies in a SQLite file, committed as they arrive, and answer repeated calls from it.

    Args:
        path: the file, created if absent.
        role: whose replies these are; a model that plays two roles is called for each.
        per_query: keep each query's own replies, at their original cost, as a collection does; otherwise equal
            requests share a reply, and a stored one costs nothing.
    """

    def __init__(self, port: Port, path: str | Path, *, per_query: bool = False, role: str = "") -> None:
        super().__init__(port)
        self._per_query = per_query
        self._role = role
        self._connection = _open(Path(path))
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    async def call(self, call: Call) -> Reply:
        """Return the stored reply, or the port's, which is stored first."""
        key = self._key(call)
        async with self._locks.setdefault(key, asyncio.Lock()):  # wait for an equal call in flight
            reply = self._find(key)
            if reply is None:
                reply = await self.port.call(call)
                self._keep(key, reply)
            return reply

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the stored reply alone, or the port's stream, whose reply is stored first."""
        key = self._key(call)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if (reply := self._find(key)) is not None:
                yield reply
                return
            async with aclosing(self.port.stream(call)) as items:
                async for item in items:
                    if isinstance(item, Reply):
                        self._keep(key, item)
                    yield item

    def find(self, call: Call) -> Reply | None:
        """Return the stored reply, if there is one."""
        return self._find(self._key(call))

    def _find(self, key: str) -> Reply | None:
        row = self._connection.execute("select reply from replies where key = ?", (key,)).fetchone()
        if row is None:
            return None
        stored = msgspec.json.decode(row[0], type=_Stored)
        return Reply(document=stored.document, spent=stored.spent if self._per_query else Spent())

    def _keep(self, key: str, reply: Reply) -> None:
        text = msgspec.json.encode(_Stored(document=reply.document, spent=reply.spent))
        try:
            self._connection.execute("insert or ignore into replies values (?, ?, ?)", (key, reply.spent.cost, text))
            self._connection.commit()
        except sqlite3.Error as error:
            raise OutputError(f"replies can no longer be stored ({error}); is the disk full?") from error

    def _key(self, call: Call) -> str:
        query = call.id if self._per_query else None
        return fingerprint([self._role, self.origin, call.path, call.body, call.sample, query])


class _Stored(msgspec.Struct):
    document: object
    spent: Spent


def _open(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, timeout=30)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        connection.execute("create table if not exists replies (key text primary key, cost real, reply blob not null)")
        connection.commit()
    except sqlite3.Error as error:
        raise OutputError(f"{path}: replies cannot be stored there ({error}); choose another file") from error
    return connection


def stored_cost(path: str | Path) -> tuple[float, int]:
    """Return the known cost of the replies in a file, and the number of replies whose cost is unknown."""
    if not Path(path).exists():
        return 0.0, 0
    with closing(_open(Path(path))) as connection:
        known, unknown = connection.execute("select total(cost), count(*) - count(cost) from replies").fetchone()
    return round(known, COST_DIGITS), unknown


def fixed_floor(path: str | Path, floor: float | None, *, keep: bool) -> float | None:
    """Return the floor that a collection began with, by its file of replies; this one if it has not begun.

    Args:
        floor: the floor of this run; None if every row is to be asked about.
        keep: whether this run begins the collection, so that its floor is written down.
    """
    if not keep and not Path(path).exists():
        return floor
    with closing(_open(Path(path))) as connection:
        connection.execute("create table if not exists floor (value real)")
        begun = connection.execute("select value from floor").fetchone()
        if begun is None and keep:
            connection.execute("insert into floor values (?)", (floor,))
            connection.commit()
    return floor if begun is None else begun[0]


# --- Estimate ---


class Estimate(WholePort):
    """Stand in for a port during a dry run: count what calls would take, and send nothing.

    Input is counted at four characters a token, output at the reply's limit, or 500 tokens where there is none.

    Args:
        stored: replies that are available already and cost nothing more.
        role: who would be asked: primary, guardian, judge.
    """

    def __init__(self, port: Port, pricing: Pricing | None, stored: Cache | None = None, *, role: str = "") -> None:
        self.origin = port.origin
        self.role = role
        self._pricing = pricing
        self._stored = stored
        self.spent = Spent()

    async def call(self, call: Call) -> Reply:
        """Count the call, and return a chat completion of the greatest length.

        Raises:
            ReplyError: the call was counted; paths other than chat completions have no placeholder reply.
        """
        stored = None if self._stored is None else self._stored.find(call)
        if stored is not None:
            return stored
        output = 500 if call.output_limit is None else call.output_limit
        spent = Spent(calls=1, input_tokens=request_size(call) // 4, output_tokens=output)
        self.spent += replace(spent, cost=None if self._pricing is None else self._pricing.cost(spent))
        if not call.path.startswith("/chat"):
            raise ReplyError("counted, not sent", spent=spent)
        message = {"role": "assistant", "content": "word " * output}
        return Reply(document={"choices": [{"message": message}]}, spent=spent)


# --- Limit ---


class Window:
    """What was used within the last seconds, so many of them, to be held to a limit."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def wait(self, now: float, limit: float | None) -> float:
        """Return the seconds after which there may be room below a limit; 0 if there is."""
        while self._taken and self._taken[0][0] <= now - self._seconds:
            self._sum -= self._taken.popleft()[1]
        return 0.0 if limit is None or self._sum < limit else self._taken[0][0] + self._seconds - now

    def take(self, now: float, units: float) -> None:
        """Use some units."""
        self._taken.append((now, units))
        self._sum += units


class RateLimit:
    """The most calls in flight, and the most requests and tokens in any minute; several ports may share one.

    Tokens are those that replies reported in the last minute; a new call waits while they are at the limit.

    Args:
        concurrency: calls in flight.
        requests_per_minute: calls begun in any minute.
        tokens_per_minute: tokens reported in any minute.
        live_share: the share of each that calls in the background leave to the others, down to one.
    """

    def __init__(
        self,
        *,
        concurrency: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        live_share: float = 0.0,
    ) -> None:
        self._slots = _semaphore(concurrency)
        self._background_slots = _semaphore(_less(concurrency, live_share))
        self._rates = {
            False: (requests_per_minute, tokens_per_minute),
            True: (_less(requests_per_minute, live_share), _less(tokens_per_minute, live_share)),
        }
        self._started, self._used = Window(60.0), Window(60.0)
        self._turns = {False: asyncio.Lock(), True: asyncio.Lock()}

    @property
    def slots(self) -> AbstractAsyncContextManager[None]:
        """Holds a place among the calls in flight."""
        return self._both_slots() if IN_BACKGROUND.get() else self._slots

    @asynccontextmanager
    async def _both_slots(self) -> AsyncGenerator[None]:
        async with self._background_slots, self._slots:
            yield

    async def start(self) -> None:
        """Wait until the rates allow another request, and count it."""
        background = IN_BACKGROUND.get()
        requests, tokens = self._rates[background]
        if requests is None and tokens is None:
            return
        async with self._turns[background]:  # in order of arrival
            clock = asyncio.get_running_loop().time
            while (wait := max(self._started.wait(clock(), requests), self._used.wait(clock(), tokens))) > 0:
                await asyncio.sleep(wait)
            self._started.take(clock(), 1)

    def count_tokens(self, spent: Spent) -> None:
        """Count the tokens of a reply."""
        if self._rates[False][1] is not None:
            tokens = (spent.input_tokens or 0) + (spent.output_tokens or 0)
            self._used.take(asyncio.get_running_loop().time(), tokens)


def _semaphore(places: int | None) -> AbstractAsyncContextManager[None]:
    return nullcontext() if places is None else asyncio.Semaphore(places)


def _less(limit: int | None, share: float) -> int | None:
    """Return what is left of a limit without a share of it, at least one."""
    return None if limit is None else max(1, int(limit * (1 - share)))


class Limit(Around):
    """Wait for a rate limit before each call."""

    def __init__(self, port: Port, rate_limit: RateLimit) -> None:
        super().__init__(port)
        self._rate_limit = rate_limit

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncGenerator[_ReplyReader]:
        """Hold a slot until the call, or the stream, ends."""
        async with self._rate_limit.slots:
            await self._rate_limit.start()
            yield self._counted

    def _counted(self, reply: Reply) -> Reply:
        self._rate_limit.count_tokens(reply.spent)
        return reply


# --- Retry ---


_LONGEST_PAUSE = 30.0
_Result = TypeVar("_Result")


class Retry(Wrapper):
    """Repeat calls after transient errors, within one deadline for all attempts together.

    A stream is retried only until its first chunk has been passed on. A pool's other endpoints are tried without a pause.

    Args:
        attempts: the most attempts.
        deadline: seconds for all attempts and the pauses between them.
        pause: seconds before the second attempt; doubles from then on, each drawn from the upper half. None tries other
            endpoints of a pool and nothing else, for a caller who has someone else to ask.
    """

    def __init__(self, port: Port, *, attempts: int = 5, deadline: float = 120.0, pause: float | None = 0.5) -> None:
        super().__init__(port)
        self._attempts = attempts
        self._deadline = deadline
        self._first_pause = pause

    async def call(self, call: Call) -> Reply:
        """Return the first reply; its `spent` includes failed attempts."""
        ends = asyncio.get_running_loop().time() + self._deadline
        spent, attempt = Spent(), 0
        try:
            async with asyncio.timeout_at(ends):
                while True:
                    attempt += 1
                    try:
                        reply = await self.port.call(call)
                        return reply if attempt == 1 else _with(reply, spent)
                    except UpstreamError as error:
                        spent = error.spent = spent + spent_of(error)
                        if (pause := self._pause_after(error, attempt, ends)) is None:
                            raise
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            raise self._late(spent) from error

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the first stream that begins; the reply's `spent` includes failed attempts."""
        ends = asyncio.get_running_loop().time() + self._deadline
        spent, attempt, begun = Spent(), 0, False
        while True:
            attempt += 1
            try:
                async with aclosing(self.port.stream(call)) as items:
                    while (item := await until(ends, anext(items, None))) is not None:
                        begun = True
                        yield _with(item, spent) if attempt > 1 and isinstance(item, Reply) else item
            except TimeoutError as error:
                raise self._late(spent) from error
            except UpstreamError as error:
                spent = error.spent = spent + spent_of(error)
                if begun or (pause := self._pause_after(error, attempt, ends)) is None:
                    raise
            else:
                return
            await asyncio.sleep(pause)

    def _pause_after(self, error: UpstreamError, attempt: int, ends: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None if there is none."""
        pause = 0.0 if attempt <= error.elsewhere else self._pause(attempt, error)
        if pause is None:
            return None
        late = asyncio.get_running_loop().time() + pause >= ends
        return None if not error.retryable or attempt >= self._attempts or late else pause

    def _pause(self, attempt: int, error: UpstreamError) -> float | None:
        if self._first_pause is None:
            return None
        backoff = min(_LONGEST_PAUSE, self._first_pause * 2 ** min(attempt - 1, 16))
        return max(error.retry_after or 0.0, backoff * random.uniform(0.5, 1.0))

    def _late(self, spent: Spent) -> DeadlineError:
        return DeadlineError(f"{self.origin}: no reply within {self._deadline:g} s", spent=spent + UNKNOWN)


def _with(reply: Reply, spent: Spent) -> Reply:
    return Reply(document=reply.document, spent=spent + reply.spent)
