"""One request from claim to committed reply: idempotency keys, cancelled callers, decisions made durable first.

No content leaves before its decision is committed: replies are bytes that exist only once `commit` has returned.

Knows nothing of routes.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from conformal_arbitrage.errors import LostClaimError, RequestError, StoreError
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.store import new_id
from conformal_arbitrage.store.base import Audit, Claim, Claimed, Event, Replay, Store

LEASE = 6.0
LONGEST_WAIT = 120.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """A reply, and whether it was given before."""

    reply: Replay
    again: bool


class Turn:
    """One request under way: what it commits, for which claim, and its caller, who may leave.

    A commit that has begun is not called back: the decision of a caller who leaves meanwhile stands.

    Attributes:
        claim: the idempotency key it works for, if any.
        begun: the decision whose answer is being sent already, as it comes.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.claim: Claim | None = None
        self.begun: str | None = None
        self._left = False
        self._store = store
        self._metrics = metrics
        self._task = asyncio.current_task()
        self._committing = False

    async def commit(
        self, events: Sequence[Event], *, audits: Sequence[Audit] = (), reply: Replay | None = None
    ) -> None:
        """Make events durable, with audits, and with the reply that ends the claim."""
        start = time.perf_counter()
        self._committing, whole = True, False
        try:
            await self._store.commit(
                events, claim=self.claim, replay=None if self.claim is None else reply, audits=audits
            )
            whole = reply is not None
        finally:
            self._committing = False
            if self._left and not whole:
                self._stop()
        self._metrics.commit.observe(time.perf_counter() - start)

    def leave(self, _: object) -> None:
        """The caller went away: stop, after a commit under way; after the last one it is too late for that."""
        self._left = True
        if not self._committing:
            self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def stopped(self) -> bool:
        """Whether it was stopped because the caller left, and for no other reason."""
        return self._left and self._task is not None and self._task.uncancel() == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Who asked what: the caller's id, the policy's name, the body, and its idempotency key, if any."""

    caller: str
    policy: str
    body: bytes
    name: str | None


Work = Callable[[Turn], Awaitable[Replay]]


class Answering:
    """Gives each idempotency key one reply.

    Args:
        store: the record.
        metrics: counts commits and replays.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    async def answer(self, asked: Asked, work: Work, gone: Coroutine[Any, Any, None]) -> Replayed | None:
        """Do the work, once per idempotency key if there is one.

        Returns:
            The reply; None if the caller went away before it was whole, which is recorded.

        Raises:
            RequestError: 422 for another body, 409 if the first request does not end.
            LostClaimError: another gateway took over after a part of the answer was sent.
        """
        turn = Turn(self._store, self._metrics)
        watching = asyncio.create_task(gone)
        watching.add_done_callback(turn.leave)
        try:
            if asked.name is None:
                return Replayed(await work(turn), again=False)
            return await self._once(asked.caller, asked.name, hashlib.sha256(asked.body).hexdigest(), work, turn)
        except asyncio.CancelledError:
            if not turn.stopped():
                raise
        finally:
            watching.remove_done_callback(turn.leave)
            watching.cancel()
        await self._abandoned(asked, turn)
        return None

    async def _once(self, caller: str, name: str, body: str, work: Work, turn: Turn) -> Replayed:
        if not 0 < len(name) <= 255 or not name.isprintable():
            raise RequestError("Idempotency-Key must have 1 to 255 printable characters", code="bad_idempotency_key")
        ends = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < ends:
            claimed = await self._claimed(caller, name, body)
            if isinstance(claimed, Replay):
                self._metrics.replays.inc()
                return Replayed(claimed, again=True)
            if claimed == "other body":
                raise RequestError(
                    "this Idempotency-Key was used with another request", status=422, code="idempotency_key_reused",
                    headers={"x-should-retry": "false"},
                )  # fmt: skip
            if isinstance(claimed, Claim):
                turn.claim = claimed
                try:
                    return Replayed(await self._working(claimed, work, turn), again=False)
                except LostClaimError:
                    if turn.begun is not None:
                        raise  # what was sent cannot be taken back
                    continue  # whoever took over has the answer, or will
            await asyncio.sleep(0.05)
        raise RequestError(
            "the first request with this Idempotency-Key is still under way", status=409, code="under_way"
        )

    async def _claimed(self, caller: str, name: str, body: str) -> Claimed:
        """Ask for the claim; one that is granted after the request was stopped is given up."""
        claiming = asyncio.ensure_future(self._store.claim(caller, name, body, lease=LEASE))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.shield(self._given_up(claiming))
            raise

    async def _given_up(self, claiming: Awaitable[Claimed]) -> None:
        with suppress(StoreError):  # then its lease ends it
            claimed = await claiming
            if isinstance(claimed, Claim):
                await self._store.release(claimed)

    async def _working(self, claim: Claim, work: Work, turn: Turn) -> Replay:
        """Do the work while keeping the claim; give it up if the work fails."""
        keeping = asyncio.create_task(self._keep(claim))
        finished = False
        try:
            reply = await work(turn)
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

    async def _abandoned(self, asked: Asked, turn: Turn) -> None:
        """Record that the caller went away before an answer was there, or in the middle of it."""
        if turn.begun is not None:
            await self.broken_off(turn.begun)
            return
        told: dict[str, Any] = {"policy": asked.policy, "key_id": asked.caller, "decided_by": "cancelled"}
        await self._store.commit([Event(id=new_id(), kind="decision", body={"cancelled": True}, **told)])

    async def broken_off(self, id: str) -> None:
        """Record that the caller went away in the middle of the answer."""
        await self._store.commit([Event(id=id, kind="completion", body={"finish": "cancelled"})])
