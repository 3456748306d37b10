"""Asking a model over the wire: endpoints, and wrappers for retries, limits, spending and caching."""

from conformal_arbitrage.upstream.base import Call, Port, Reply, WholePort, Wrapper
from conformal_arbitrage.upstream.breaker import Breaker
from conformal_arbitrage.upstream.budget import Capped, SpendingLimit
from conformal_arbitrage.upstream.cache import Cache
from conformal_arbitrage.upstream.endpoint import Endpoint
from conformal_arbitrage.upstream.limit import Limit, RateLimit
from conformal_arbitrage.upstream.pool import Pool
from conformal_arbitrage.upstream.pricing import Price, Priced
from conformal_arbitrage.upstream.retry import Retry

__all__ = [
    "Breaker",
    "Cache",
    "Call",
    "Capped",
    "Endpoint",
    "Limit",
    "Pool",
    "Port",
    "Price",
    "Priced",
    "RateLimit",
    "Reply",
    "Retry",
    "SpendingLimit",
    "WholePort",
    "Wrapper",
]
