"""One request from claim to committed reply: idempotency keys, cancelled callers, decisions made durable first.

No content leaves before its decision is committed: replies are bytes that exist only once `commit` has returned.

Knows nothing of routes.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from conformal_arbitrage.errors import LostClaimError, RequestError, StoreError
from conformal_arbitrage.gateway.deciding import Made
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.store.base import Claim, Event, Replay, Store

LEASE = 6.0
LONGEST_WAIT = 120.0
Result = TypeVar("Result")
Work = Callable[[Claim | None], Awaitable[Replay]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A reply, and whether it was given before."""

    reply: Replay
    again: bool


class Answering:
    """Makes replies durable and gives each idempotency key one.

    Args:
        store: the record.
        metrics: counts commits and replays.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    async def answer(self, caller: str, name: str | None, data: bytes, work: Work) -> Replayed:
        """Do the work once per idempotency key; without a key, just do it.

        Raises:
            RequestError: 422 for another body, 409 if the first request does not end.
        """
        if name is None:
            return Replayed(await work(None), again=False)
        if not 0 < len(name) <= 255 or not name.isprintable():
            raise RequestError("Idempotency-Key must have 1 to 255 printable characters", code="bad_idempotency_key")
        body = hashlib.sha256(data).hexdigest()
        ends = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < ends:
            claimed = await self._store.claim(caller, name, body, lease=LEASE)
            if isinstance(claimed, Replay):
                self._metrics.replays.inc()
                return Replayed(claimed, again=True)
            if claimed == "other body":
                raise RequestError(
                    "this Idempotency-Key was used with another request", status=422, code="idempotency_key_reused",
                    headers={"x-should-retry": "false"},
                )  # fmt: skip
            if isinstance(claimed, Claim):
                try:
                    return Replayed(await self._working(claimed, work), again=False)
                except LostClaimError:
                    continue  # whoever took over has the answer, or will
            await asyncio.sleep(0.05)
        raise RequestError(
            "the first request with this Idempotency-Key is still under way", status=409, code="under_way"
        )

    async def _working(self, claim: Claim, work: Work) -> Replay:
        """Do the work while keeping the claim; give it up if the work fails."""
        keeping = asyncio.create_task(self._keep(claim))
        finished = False
        try:
            reply = await work(claim)
            finished = True
        finally:
            keeping.cancel()
            if not finished:
                await asyncio.shield(self._store.release(claim))
        return reply

    async def _keep(self, claim: Claim) -> None:
        held = True
        while held:
            await asyncio.sleep(LEASE / 3)
            with suppress(StoreError):  # the database is away for now; there is time for another try within the lease
                held = await self._store.renew(claim, lease=LEASE)

    async def commit(self, made: Sequence[Made], claim: Claim | None, reply: Replay) -> Replay:
        """Make decisions durable, with the reply of their claim and their audits; then the reply may go out.

        A commit that has begun cannot be called back: if it is cancelled and yet succeeds, the decision stands.
        """
        start = time.perf_counter()
        writing = self._store.commit(
            [one.event for one in made],
            claim=claim,
            replay=None if claim is None else reply,
            audits=[one.audit for one in made if one.audit is not None],
        )
        committing = asyncio.ensure_future(writing)
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            await asyncio.wait({committing})
            if committing.cancelled() or committing.exception() is not None:
                raise
        self._metrics.commit.observe(time.perf_counter() - start)
        return reply

    async def cancelled(self, id: str, policy: str, caller: str) -> None:
        """Record that the caller went away before an answer was there."""
        body: dict[str, Any] = {"cancelled": True}
        event = Event(id=id, kind="decision", body=body, policy=policy, key_id=caller, decided_by="cancelled")
        await self._store.commit([event])

    async def broken_off(self, id: str) -> None:
        """Record that the caller went away in the middle of the answer."""
        await self._store.commit([Event(id=id, kind="completion", body={"finish": "cancelled"})])


async def unless_gone(work: Awaitable[Result], gone: Awaitable[Any]) -> Result | None:
    """The result; if the caller goes away first, the work is cancelled, and None unless it was past cancelling."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    return None if working.cancelled() else working.result()
