"""What a collection pays, or would pay: its stored replies, the limit on its whole cost, and dry runs that send nothing.

Knows nothing of questions, scores or grades.
"""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.types import Spent
from conformal_arbitrage.upstream.base import Port
from conformal_arbitrage.upstream.budget import SpendingLimit
from conformal_arbitrage.upstream.cache import Cache, stored_cost
from conformal_arbitrage.upstream.estimate import Estimate
from conformal_arbitrage.upstream.limit import RateLimit
from conformal_arbitrage.upstream.pricing import Pricing


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointEstimate:
    """What the calls to one endpoint, in one role, would take."""

    origin: str
    spent: Spent
    role: str


def replies_path(output: str | Path) -> Path:
    """Return the file in which a collection stores its replies."""
    path = Path(output)
    return path.with_name(path.name + ".replies.sqlite")


def resumable(output: str | Path, *, concurrency: int, max_cost: float | None) -> Extras:
    """Return what wraps the models of a collection: stored replies, the calls in flight, the limit on its whole cost.

    Args:
        output: the log's name; replies are stored beside it.
        concurrency: upstream calls in flight at once, over all models.
        max_cost: dollars that the whole collection may cost, including earlier runs.

    Raises:
        OptionError: the cost of earlier runs is unknown, so that a limit cannot count it.
    """
    replies = replies_path(output)
    known, unknown = stored_cost(replies)
    if max_cost is not None and unknown:
        raise OptionError(
            f"{replies}: the cost of {unknown} stored replies is unknown, so --max-cost cannot count them; drop "
            "--max-cost, or collect into another file"
        )
    limit = None if max_cost is None else SpendingLimit(max_cost, spent=known)
    return Extras(gate=RateLimit(concurrency=concurrency), spending_limit=limit, replies=replies)


async def estimated(
    config: Config, work: Callable[[Models], Awaitable[object]], *, replies: Path | None = None
) -> list[EndpointEstimate]:
    """Return what work with models would take, endpoint by endpoint, without sending anything.

    Args:
        config: the models.
        work: asks them.
        replies: where replies are stored, which count nothing.
    """
    estimates: list[Estimate] = []

    def instead(port: Port, pricing: Pricing | None, role: str) -> Port:
        stored = None
        if replies is not None and replies.exists():
            stored = Cache(port, replies, per_query=True, role=role)
            files.callback(stored.close)
        estimates.append(Estimate(port, pricing, stored, role=role))
        return estimates[-1]

    with ExitStack() as files:
        async with Models(config, Extras(instead=instead, keyless=True)) as models:
            await work(models)
    return [EndpointEstimate(origin=one.origin, spent=one.spent, role=one.role) for one in estimates if one.spent.calls]
