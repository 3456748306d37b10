"""Price, ListPrice, Priced: the cost of calls. A model without a price has an unknown cost, None, and never 0.

Knows nothing of prompts or logs.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from conformal_arbitrage.errors import OptionError, UpstreamError
from conformal_arbitrage.types import COST_DIGITS, Chunk, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, Wrapper, spent_of


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


class Priced(Wrapper):
    """Add the cost to the tokens of every attempt.

    Args:
        port: the port to call.
        pricing: its price; None makes every cost unknown.
    """

    def __init__(self, port: Port, pricing: Pricing | None) -> None:
        super().__init__(port)
        self._pricing = pricing

    async def call(self, call: Call) -> Reply:
        """Return the port's reply with its cost."""
        try:
            reply = await self.port.call(call)
        except UpstreamError as error:
            error.spent = self._priced(spent_of(error))
            raise
        return Reply(document=reply.document, spent=self._priced(reply.spent))

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the port's stream; its reply comes with its cost."""
        try:
            async with aclosing(self.port.stream(call)) as items:
                async for item in items:
                    if isinstance(item, Reply):
                        yield Reply(document=item.document, spent=self._priced(item.spent))
                    else:
                        yield item
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
