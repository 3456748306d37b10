"""Retry, Limit, Cache, Priced and Capped: ports around a port, one concern each.

    Cache(Limit(Retry(Capped(Priced(port)))))

is the order that makes sense: what is stored is not asked again, a slot is held for a call and its retries, and every
attempt is priced and has to fit the purse.

Knows nothing of prompts or providers.
"""

import asyncio
import random
import sqlite3
from collections import deque
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from conformal_arbitrage.errors import CostLimitError, DeadlineError, OutputError, ReplyError, UpstreamError
from conformal_arbitrage.types import Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, fingerprint, spent_of

if TYPE_CHECKING:
    from conformal_arbitrage.upstream.pricing import Pricing

_LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after faults worth it, within one deadline for all attempts together.

    Attributes:
        port: what is called.
        attempts: how often at most.
        deadline: seconds for all attempts and the pauses between them.
        pause: seconds before the second attempt; doubles from then on, each drawn from the upper half.
    """

    port: Port
    attempts: int = 5
    deadline: float = 120.0
    pause: float = 0.5

    @property
    def origin(self) -> str:
        """The port's."""
        return self.port.origin

    async def call(self, call: Call) -> Reply:
        """The first reply; what failed attempts took is part of it."""
        ends = asyncio.get_running_loop().time() + self.deadline
        spent = Spent()
        try:
            async with asyncio.timeout_at(ends):
                for attempt in range(1, self.attempts + 1):
                    try:
                        reply = await self.port.call(call)
                        return reply if attempt == 1 else Reply(document=reply.document, spent=spent + reply.spent)
                    except UpstreamError as error:
                        spent += spent_of(error)
                        error.spent = spent
                        pause = self._pause(attempt, error)
                        late = asyncio.get_running_loop().time() + pause >= ends
                        if not error.retryable or attempt == self.attempts or late:
                            raise
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            unknown = Spent(calls=1, input_tokens=None, output_tokens=None, cost=None)
            raise DeadlineError(f"{self.origin}: no reply within {self.deadline:g} s", spent=spent + unknown) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _pause(self, attempt: int, error: UpstreamError) -> float:
        backoff = min(_LONGEST_PAUSE, self.pause * 2 ** min(attempt - 1, 16))
        return max(error.retry_after or 0.0, backoff * random.uniform(0.5, 1.0))


class Breaker:
    """Spare an endpoint that is down: after failures in a row, calls fail at once for a while.

    Args:
        port: what is called.
        failures: how many in a row open it.
        rest: seconds until one call is let through to try.
    """

    def __init__(self, port: Port, *, failures: int = 10, rest: float = 5.0) -> None:
        self.port = port
        self._most = failures
        self._rest = rest
        self._failed = 0
        self._until = 0.0

    @property
    def origin(self) -> str:
        """The port's."""
        return self.port.origin

    @property
    def resting(self) -> bool:
        """Whether calls fail at once for now."""
        return self._failed >= self._most and asyncio.get_running_loop().time() < self._until

    async def call(self, call: Call) -> Reply:
        """The port's reply, unless it is resting."""
        clock = asyncio.get_running_loop().time
        if self.resting:
            raise UpstreamError(f"{self.origin}: is not asked for now, after {self._failed} failures in a row")
        self._until = clock() + self._rest  # while one tries, the others rest
        try:
            reply = await self.port.call(call)
        except UpstreamError as error:
            if error.retryable or isinstance(error, DeadlineError):  # a request that it refuses says nothing of others
                self._failed += 1
                self._until = clock() + self._rest
            raise
        self._failed = 0
        return reply


class Gate:
    """How much may be under way: calls at once, and requests and tokens in any minute.

    Tokens are those that replies reported in the last minute; a new call waits while they are at the limit.
    """

    def __init__(
        self,
        *,
        concurrency: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> None:
        self.slots = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        self._requests = requests_per_minute
        self._tokens = tokens_per_minute
        self._started: deque[float] = deque()
        self._used: deque[tuple[float, int]] = deque()
        self._turn = asyncio.Lock()

    async def rates(self) -> None:
        """Wait for a turn in this minute."""
        if self._requests is None and self._tokens is None:
            return
        async with self._turn:  # in order of arrival
            clock = asyncio.get_running_loop().time
            while (wait := self._wait(clock())) > 0:
                await asyncio.sleep(wait)
            self._started.append(clock())

    def _wait(self, now: float) -> float:
        while self._started and self._started[0] <= now - 60:
            self._started.popleft()
        while self._used and self._used[0][0] <= now - 60:
            self._used.popleft()
        wait = 0.0
        if self._requests is not None and len(self._started) >= self._requests:
            wait = self._started[0] + 60 - now
        if self._tokens is not None and sum(n for _, n in self._used) >= self._tokens:
            wait = max(wait, self._used[0][0] + 60 - now)
        return wait

    def note(self, spent: Spent) -> None:
        """Count the tokens of a reply."""
        if self._tokens is not None:
            tokens = (spent.input_tokens or 0) + (spent.output_tokens or 0)
            self._used.append((asyncio.get_running_loop().time(), tokens))


@dataclass(frozen=True, slots=True)
class Limit:
    """Wait at a gate, which several ports may share."""

    port: Port
    gate: Gate

    @property
    def origin(self) -> str:
        """The port's."""
        return self.port.origin

    async def call(self, call: Call) -> Reply:
        """The port's reply, once the gate opens."""
        async with self.gate.slots:
            await self.gate.rates()
            reply = await self.port.call(call)
        self.gate.note(reply.spent)
        return reply


@dataclass(frozen=True, slots=True)
class Priced:
    """Put the cost beside the tokens of every attempt."""

    port: Port
    pricing: "Pricing | None"

    @property
    def origin(self) -> str:
        """The port's."""
        return self.port.origin

    async def call(self, call: Call) -> Reply:
        """The port's reply with its cost."""
        try:
            reply = await self.port.call(call)
        except UpstreamError as error:
            error.spent = self._priced(spent_of(error))
            raise
        return Reply(document=reply.document, spent=self._priced(reply.spent))

    def _priced(self, spent: Spent) -> Spent:
        return Spent(
            calls=spent.calls,
            input_tokens=spent.input_tokens,
            output_tokens=spent.output_tokens,
            reasoning_tokens=spent.reasoning_tokens,
            cached_tokens=spent.cached_tokens,
            cost=None if self.pricing is None else self.pricing.cost(spent),
        )


class Purse:
    """A limit on money that several ports share.

    Before a call its largest possible cost is set aside: as many input tokens as the request has bytes, and the
    output limit. A call that would fit but for what is set aside waits; one whose cost stays unknown counts in full.
    """

    def __init__(self, limit: float, *, spent: float = 0.0) -> None:
        self.limit = limit
        self.spent = spent
        self.reserved = 0.0
        self._under_way = 0
        self._changed = asyncio.Event()

    async def reserve(self, worst: float) -> None:
        """Set money aside.

        Raises:
            CostLimitError: there is not enough left.
        """
        while self.spent + self.reserved + worst > self.limit:
            if not self._under_way:
                raise CostLimitError(
                    f"the next call could take the bill past ${self.limit:g} (${self.spent:.4g} spent); what was answered "
                    "is kept: run again with a higher --max-cost"
                )
            self._changed.clear()
            await self._changed.wait()
        self.reserved += worst
        self._under_way += 1

    def settle(self, worst: float, cost: float | None) -> None:
        """Pay for a call that was set aside for."""
        self._under_way -= 1
        self.reserved = self.reserved - worst if self._under_way else 0.0
        self.spent += worst if cost is None else cost
        self._changed.set()


@dataclass(frozen=True, slots=True)
class Capped:
    """Refuse a call that could take the bill past the purse's limit."""

    port: Port
    pricing: "Pricing"
    purse: Purse

    @property
    def origin(self) -> str:
        """The port's."""
        return self.port.origin

    async def call(self, call: Call) -> Reply:
        """The port's reply, paid from the purse."""
        worst = self._worst(call)
        await self.purse.reserve(worst)
        cost: float | None = None
        try:
            reply = await self.port.call(call)
            cost = reply.spent.cost
        except UpstreamError as error:
            cost = spent_of(error).cost
            raise
        finally:
            self.purse.settle(worst, cost)
        return reply

    def _worst(self, call: Call) -> float:
        size = _size(call)
        most = Spent(calls=1, input_tokens=size, output_tokens=call.output_limit)
        cost = self.pricing.cost(most)
        if cost is None:
            raise CostLimitError(
                f"{self.origin}: --max-cost needs a limit on the length of replies; set max_tokens for this model"
            )
        return cost


def _size(call: Call) -> int:
    try:
        return len(msgspec.json.encode(call.body))
    except UnicodeEncodeError as error:
        raise UpstreamError("the request holds text that is not valid Unicode, so it cannot be sent") from error


class Cache:
    """Replies in a SQLite file, committed as they come: what is stored is not asked for again.

    Args:
        port: what is called for what is not stored.
        path: the file, made if absent.
        role: whose replies these are; a model that plays two roles is asked for each.
        per_query: keep each query's own replies, at what they cost when they were made, as a collection does; else
            equal requests share a reply, and one that is found costs nothing.
    """

    def __init__(self, port: Port, path: str | Path, *, per_query: bool = False, role: str = "") -> None:
        self.port = port
        self._per_query = per_query
        self._role = role
        self._connection = _open(Path(path))
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def origin(self) -> str:
        """The port's."""
        return self.port.origin

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    async def call(self, call: Call) -> Reply:
        """The stored reply, or the port's, stored before it is returned."""
        key = self._key(call)
        async with self._turns.setdefault(key, asyncio.Lock()):  # an equal call under way is waited for
            return self._find(key) or await self._ask(call, key)

    async def _ask(self, call: Call, key: str) -> Reply:
        reply = await self.port.call(call)
        text = msgspec.json.encode(_Stored(document=reply.document, spent=reply.spent))
        try:
            self._connection.execute("insert or ignore into replies values (?, ?, ?)", (key, reply.spent.cost, text))
            self._connection.commit()
        except sqlite3.Error as error:
            raise OutputError(f"replies cannot be kept any more ({error}); is the disk full?") from error
        return reply

    def find(self, call: Call) -> Reply | None:
        """The stored reply, if there is one."""
        return self._find(self._key(call))

    def _find(self, key: str) -> Reply | None:
        row = self._connection.execute("select reply from replies where key = ?", (key,)).fetchone()
        if row is None:
            return None
        stored = msgspec.json.decode(row[0], type=_Stored)
        return Reply(document=stored.document, spent=stored.spent if self._per_query else Spent())

    def _key(self, call: Call) -> str:
        whose = call.id if self._per_query else None
        return fingerprint([self._role, self.origin, call.path, call.body, call.sample, whose])


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
        raise OutputError(f"{path}: replies cannot be kept there ({error}); give another file") from error
    return connection


def stored_cost(path: str | Path) -> tuple[float, int]:
    """What the replies in a file cost as far as known, and of how many that is not known."""
    if not Path(path).exists():
        return 0.0, 0
    with closing(_open(Path(path))) as connection:
        return connection.execute("select total(cost), count(*) - count(cost) from replies").fetchone()


class Estimate:
    """Takes the place of a port before money is spent: counts what calls would take, and sends nothing.

    Input is counted at four characters a token, output at the reply's limit, or 500 tokens where there is none.

    Args:
        port: whose calls these would be.
        pricing: what they would cost.
        stored: replies that are there already and cost nothing more.
    """

    def __init__(self, port: Port, pricing: "Pricing | None", stored: Cache | None = None) -> None:
        self.origin = port.origin
        self._pricing = pricing
        self._stored = stored
        self.spent = Spent()

    async def call(self, call: Call) -> Reply:
        """A chat completion of the longest kind; no reply to anything else.

        Raises:
            ReplyError: the call was counted, and that is all.
        """
        found = None if self._stored is None else self._stored.find(call)
        if found is not None:
            return found
        output = 500 if call.output_limit is None else call.output_limit
        spent = Spent(calls=1, input_tokens=_size(call) // 4, output_tokens=output)
        self.spent += replace(spent, cost=None if self._pricing is None else self._pricing.cost(spent))
        if not call.path.startswith("/chat"):
            raise ReplyError("counted, not sent", spent=spent)
        message = {"role": "assistant", "content": "word " * output}
        return Reply(document={"choices": [{"message": message}]}, spent=spent)
