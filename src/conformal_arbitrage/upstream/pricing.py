"""Tokens to money. A model without a price has an unknown cost, None, and never 0.

Knows nothing of calls or logs.
"""

from dataclasses import dataclass
from typing import Protocol

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.types import Spent


class Pricing(Protocol):
    """What calls cost."""

    def cost(self, spent: Spent) -> float | None:
        """Dollars, or None if unknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A price of one's own: dollars per million tokens, and per call."""

    input: float = 0.0
    output: float = 0.0
    per_call: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is not a price."""
        for name in ("input", "output", "per_call"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"a price is 0 or more dollars; got {name} {getattr(self, name)!r}")

    def cost(self, spent: Spent) -> float | None:
        """Dollars; unknown where tokens are priced and their number is not known."""
        tokens = ((self.input, spent.input_tokens), (self.output, spent.output_tokens))
        if any(price and count is None for price, count in tokens):
            return None
        return sum(price * (count or 0) / 1e6 for price, count in tokens) + self.per_call * spent.calls


@dataclass(frozen=True, slots=True)
class ListPrice:
    """The provider's list price, from the table that genai-prices carries; no network."""

    model: str
    url: str

    def cost(self, spent: Spent) -> float | None:
        """Dollars; tokens read from the provider's cache are cheaper where the list says so."""
        from genai_prices import Usage, calc_price  # 150 ms, when money is asked for

        if spent.input_tokens is None or spent.output_tokens is None:
            return None
        usage = Usage(
            input_tokens=spent.input_tokens,
            output_tokens=spent.output_tokens,
            cache_read_tokens=min(spent.cached_tokens, spent.input_tokens),
        )
        return float(calc_price(usage, self.model, provider_api_url=self.url).total_price)


def list_price(model: str, url: str) -> ListPrice | None:
    """The list price of a model at an endpoint; None where the table has none."""
    priced = ListPrice(model, url)
    try:
        priced.cost(Spent(calls=1, input_tokens=1, output_tokens=1))
    except LookupError:
        return None
    return priced


def dollars(cost: float | None) -> str:
    """Money as people read it; an unknown cost is said to be unknown."""
    if cost is None:
        return "unknown"
    return f"${cost:.2f}" if cost >= 1 or cost == 0 else f"${cost:.2g}"
