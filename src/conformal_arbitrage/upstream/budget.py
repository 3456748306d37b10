"""Capped: refuse calls that could take the bill past a limit.

Knows nothing of prompts or providers.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec

from conformal_arbitrage.errors import CostLimitError, UpstreamError
from conformal_arbitrage.types import Chunk, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, Wrapper, spent_of
from conformal_arbitrage.upstream.pricing import Pricing

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


class Capped(Wrapper):
    """Refuse calls that could take the bill past a limit.

    The largest possible cost of a call has one input token for each byte of the request, and all the output tokens that
    its limit allows.
    """

    def __init__(self, port: Port, pricing: Pricing, limit: Spending[Any]) -> None:
        super().__init__(port)
        self._pricing = pricing
        self._limit = limit

    async def call(self, call: Call) -> Reply:
        """Return the port's reply, paid from the limit."""
        reservation = await self._limit.reserve(self._worst(call))
        cost: float | None = None
        try:
            reply = await self.port.call(call)
            cost = reply.spent.cost
        except UpstreamError as error:
            cost = spent_of(error).cost
            raise
        finally:
            self._limit.settle(reservation, cost)
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the port's stream, paid from the limit; one that is abandoned counts in full."""
        reservation = await self._limit.reserve(self._worst(call))
        cost: float | None = None
        try:
            async with aclosing(self.port.stream(call)) as items:
                async for item in items:
                    if isinstance(item, Reply):
                        cost = item.spent.cost
                    yield item
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
    """Return the bytes of a call's body as JSON.

    Raises:
        UpstreamError: the body cannot be encoded.
    """
    try:
        return len(msgspec.json.encode(call.body))
    except UnicodeEncodeError as error:
        raise UpstreamError("the request contains text that is not valid Unicode, so it cannot be sent") from error
