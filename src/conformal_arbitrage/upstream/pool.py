"""Pool: several endpoints that serve one model, under one name.

Calls are spread by weight. An endpoint that fails is passed over for a moment; one that keeps failing, or serves another
model than the pinned one, is left out until its breaker lets a trial through. A call goes to one endpoint: trying another
is a retry.

Knows nothing of prompts, prices or retries.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager

from conformal_arbitrage.errors import UpstreamError
from conformal_arbitrage.types import Chunk
from conformal_arbitrage.upstream.base import Call, Reply
from conformal_arbitrage.upstream.breaker import Breaker

FAILURES = 3
"""Failures in a row after which an endpoint of a pool is left out for a while."""
_MOMENT = 1.0


class Pool:
    """Several endpoints that serve one model.

    Args:
        name: stands for all of them in identities, so that endpoints can come and go.
        members: the endpoints, each behind a breaker of its own.
        weights: how often each is called, relative to the others; equally often if None.
        served: the model name that replies must carry, if pinned.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Breaker],
        *,
        weights: Sequence[float] | None = None,
        served: str | None = None,
    ) -> None:
        self.origin = f"pool:{name}"
        shares = weights or [1.0] * len(members)
        self._members = [_Member(breaker, weight) for breaker, weight in zip(members, shares, strict=True)]
        self._served = served

    async def call(self, call: Call) -> Reply:
        """Return the reply of one endpoint."""
        with self._chosen() as member:
            reply = await member.breaker.call(call)
        self._check_model(member, reply.document.get("model"))
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the stream of one endpoint."""
        with self._chosen() as member:
            async with aclosing(member.breaker.stream(call)) as items:
                async for item in items:
                    document = item.document if isinstance(item, Reply) else item
                    self._check_model(member, document.get("model") or self._served)  # not every chunk names it
                    yield item

    @contextmanager
    def _chosen(self) -> Generator["_Member"]:
        """Choose an endpoint; if it fails, pass over it for a moment and say how many others there are."""
        clock = asyncio.get_running_loop().time
        usable = [member for member in self._members if not member.breaker.resting]
        if not usable:
            message = f"{self.origin}: none of its {len(self._members)} endpoints is called for now"
            raise UpstreamError(message, retryable=True)
        member = _next([one for one in usable if one.failed <= clock() - _MOMENT] or usable)
        try:
            yield member
        except UpstreamError as error:
            if error.retryable:
                member.failed = clock()
                error.elsewhere = sum(one is not member and not one.breaker.resting for one in self._members)
            raise

    def _check_model(self, member: "_Member", served: object) -> None:
        """Leave an endpoint out that serves another model; whoever reads the reply refuses it."""
        if self._served is not None and served != self._served:
            member.breaker.open()


class _Member:
    """An endpoint of a pool, how far it is behind its share of calls, and when it last failed."""

    def __init__(self, breaker: Breaker, weight: float) -> None:
        self.breaker = breaker
        self.weight = weight
        self.due = 0.0
        self.failed = float("-inf")


def _next(members: Sequence[_Member]) -> _Member:
    """Return the endpoint that is furthest behind its share (smooth weighted round robin)."""
    for member in members:
        member.due += member.weight
    chosen = max(members, key=lambda member: member.due)
    chosen.due -= sum(member.weight for member in members)
    return chosen
