"""One reply per idempotency key, and a caller who may leave at any moment.

Knows nothing of how a reply is made.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive

from conformal_arbitrage.errors import LostClaimError, RequestError, StoreError
from conformal_arbitrage.gateway.audit_rows import still_unanswered
from conformal_arbitrage.gateway.decider import Outcome
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.middleware import Incoming, caller_left
from conformal_arbitrage.store.base import Audit, Claim, Claimed, SavedResponse, Store
from conformal_arbitrage.store.ids import new_id
from conformal_arbitrage.store.pruning import GONE
from conformal_arbitrage.store.record import CompletionBody, DecisionBody, Event
from conformal_arbitrage.store.review_base import ReviewWork

LEASE = 6.0
LONGEST_WAIT = 120.0


class Turn:
    """One request being answered.

    A commit that has begun is never cancelled: if the caller leaves meanwhile, the decision stands. An answer under an
    idempotency key that is being sent is finished even if the caller leaves, so that the key has one reply.

    Attributes:
        response: the reply under the request's idempotency key; set before the turn if the key was used earlier, and
            after it if another gateway answered first.
        replayed: whether another turn made the response.
        opened: id of the decision whose answer is being sent already.
        outcomes: how far each decision of the request has come, by the place of its question.
        questions: each question with its caller, by place.
        recorded: ids of the decisions that are in the store already.
        left: whether the caller has disconnected.
        several: whether the request has several questions, of which one may wait for its Guardian while others are decided.
        reviewed: whether people are asked about a question of the request.
        renewing: renews the claim of a request without a key of its own, which has one once people are asked.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.response: SavedResponse | None = None
        self.replayed = False
        self.opened: str | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.recorded: set[str] = set()
        self.questions: dict[int, object] = {}
        self.left = self.several = False
        self.claim: Claim | None = None
        self.reviewed = False
        self.renewing: asyncio.Task[None] | None = None
        self._store = store
        self._metrics = metrics
        self._task = asyncio.current_task()
        self._committing = 0
        self._ended = False

    async def commit(
        self,
        events: Sequence[Event],
        *,
        audits: Sequence[Audit] = (),
        response: SavedResponse | None = None,
        begun: Mapping[int, str] | None = None,
        news: Sequence[str] = (),
        reviews: ReviewWork | None = None,
    ) -> None:
        """Make events durable, with audits, with the response that ends the turn, and as news of these decisions.

        Raises:
            LostClaimError: another gateway took over the idempotency key; nothing was written.
        """
        start = time.perf_counter()
        self._committing += 1
        try:
            if self.claim is None:
                await self._store.commit(events, audits=audits, news=news)
            else:
                await self._store.commit(
                    events, claim=self.claim, response=response, audits=audits, begun=begun, news=news, reviews=reviews
                )
            self.response = response
        finally:
            self._committing -= 1
            if self.left:
                self._stop()
        self._metrics.commit.observe(time.perf_counter() - start)

    async def begin(self, place: int, outcome: Outcome) -> None:
        """Make a pending decision durable before the Guardian is asked, so that neither a crash nor a retry loses it."""
        id = outcome.event.id
        await self.commit([outcome.event], audits=_listed(outcome.audit), begun={place: id})
        self.recorded.add(id)

    async def open(self, event: Event, audit: Audit | None) -> None:
        """Make a decision durable whose answer is about to be sent; one that is recorded needs only its claim."""
        known = event.id in self.recorded
        self.opened = event.id  # it stands even if the Guardian times out during the commit
        try:
            if not known or self.claim is not None:
                await self.commit([] if known else [event], audits=[] if known else _listed(audit))
        except StoreError:
            self.opened = None
            raise
        self.recorded.add(event.id)

    async def end_undelivered(
        self,
        events: Sequence[Event],
        audits: Sequence[Audit],
        begun: Mapping[int, str],
        digests: Mapping[str, str],
        news: Sequence[str],
    ) -> None:
        """Record decisions of which nothing was delivered, for another attempt to continue.

        Args:
            events: how far each came.
            audits: of those that are new.
            begun: their ids by place, by which another attempt under the same key finds them.
            digests: of their questions by id, by which a retry without a key does.
            news: ids of those drawn for an audit.
        """
        if self.claim is None:
            await self._store.commit(events, audits=audits, undelivered=digests, news=news)
        else:
            without_key = digests if self.renewing is not None else None
            await self._store.commit(
                events, claim=self.claim, audits=audits, begun=begun, news=news, undelivered=without_key
            )

    async def end_early(self, finish: str) -> None:
        """Record that an answer which was opened has no end; it is not kept under the idempotency key."""
        if self.opened is not None and not self._ended:
            self._ended = True
            event = Event(id=self.opened, body=CompletionBody(finish=finish))
            own = [outcome for outcome in self.outcomes.values() if outcome.event.id == self.opened]
            audits = [still_unanswered(outcome.audit, outcome.decision) for outcome in own]
            await self._store.commit(
                [event], audits=[audit for audit in audits if audit is not None], news=[self.opened]
            )

    def leave(self, _: object) -> None:
        """Cancel the turn because its caller has left; a commit finishes first, and after the last it is too late."""
        self.left = True
        self._stop()

    def _stop(self) -> None:
        """Cancel the turn, unless it is being committed, is over, or is an answer that its key will be asked for."""
        begun = self.opened is not None and self.claim is not None
        if self._task is not None and not self._committing and self.response is None and not begun:
            self._task.cancel()

    def was_cancelled_by_caller(self) -> bool:
        """Return whether the caller's leaving is the only reason for a cancellation."""
        return self.left and self._task is not None and self._task.uncancel() == 0


class Idempotency:
    """Gives each idempotency key one reply.

    Args:
        store: where keys and replies are kept.
        metrics: counts commits and replays.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    @asynccontextmanager
    async def turn(self, request: Incoming, policy: str) -> AsyncGenerator[Turn]:
        """Take a request's turn to be answered; its body runs only while the caller waits.

        If the turn begins with a response, the key was used before and the body has nothing to do. A claim that another
        gateway takes over during the turn ends it with that gateway's response.

        Raises:
            RequestError: 422 if the key belongs to another body, 409 if its first request does not end, 499 if the caller
                left before the reply was complete, which is recorded.
            LostClaimError: another gateway took over after part of the answer was sent.
        """
        turn = Turn(self._store, self._metrics)
        watching = asyncio.create_task(_disconnected(request.receive))
        watching.add_done_callback(turn.leave)
        try:
            key = request.idempotency_key
            if key is None:
                yield turn
            else:
                async with self._claimed(turn, request, key):
                    yield turn
        except asyncio.CancelledError:
            if not turn.was_cancelled_by_caller():
                raise
            await self._record_departure(turn, request.caller.id, policy)
            raise caller_left() from None
        finally:
            watching.remove_done_callback(turn.leave)
            watching.cancel()
            if turn.renewing is not None and turn.claim is not None:
                turn.renewing.cancel()
                if turn.response is None:
                    await asyncio.shield(self._store.release(turn.claim))

    async def hold(self, turn: Turn, request: Incoming, name: str) -> Claim:
        """Return the claim of a turn; one without a key gets a claim under a name, by which its caller can come back.

        Raises:
            RequestError: 409 if another attempt holds that name.
        """
        if turn.claim is None:
            sha256 = hashlib.sha256(request.content).hexdigest()
            claimed = await self._try_claim(request.caller.id, name, sha256)
            if not isinstance(claimed, Claim):
                raise _in_progress()
            turn.claim, turn.renewing = claimed, asyncio.create_task(self._renew(claimed))
        return turn.claim

    @asynccontextmanager
    async def _claimed(self, turn: Turn, request: Incoming, key: str) -> AsyncGenerator[None]:
        """Hold a key's claim during a turn, or find the response that was given before."""
        sha256 = hashlib.sha256(request.content).hexdigest()
        claimed = await self._claim(request.caller.id, key, sha256)
        if isinstance(claimed, SavedResponse):
            if claimed.status == GONE:
                raise RequestError("the reply under this Idempotency-Key was erased", status=GONE, code="erased")
            self._replay(turn, claimed)
            yield
            return
        turn.claim = claimed
        renewing = asyncio.create_task(self._renew(claimed))
        try:
            yield
        except LostClaimError:
            if turn.opened is not None:
                raise  # what was sent cannot be taken back
            self._replay(turn, await self._taken_over(request.caller.id, key, sha256))
        finally:
            renewing.cancel()
            if turn.response is None:
                await asyncio.shield(self._store.release(claimed))

    def _replay(self, turn: Turn, response: SavedResponse) -> None:
        turn.response, turn.replayed = response, True
        self._metrics.replays.inc()

    async def _claim(self, caller_id: str, key: str, sha256: str) -> Claim | SavedResponse:
        """Wait for the claim, or for the response of whoever holds it."""
        if not 0 < len(key) <= 255 or not key.isprintable():
            raise RequestError("Idempotency-Key must have 1 to 255 printable characters", code="bad_idempotency_key")
        ends = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < ends:
            claimed = await self._try_claim(caller_id, key, sha256)
            if isinstance(claimed, Claim | SavedResponse):
                return claimed
            if claimed == "other body":
                raise RequestError(
                    "this Idempotency-Key was used with another request", status=422, code="idempotency_key_reused",
                    headers={"x-should-retry": "false"},
                )  # fmt: skip
            await asyncio.sleep(0.05)
        raise _in_progress()

    async def _taken_over(self, caller_id: str, key: str, sha256: str) -> SavedResponse:
        """Return the response of the gateway that took over a claim."""
        claimed = await self._claim(caller_id, key, sha256)
        if isinstance(claimed, SavedResponse):
            return claimed
        await asyncio.shield(self._store.release(claimed))  # it failed too: let the caller's retry start over
        raise _in_progress()

    async def _try_claim(self, caller_id: str, key: str, sha256: str) -> Claimed:
        """Ask for the claim; release one that is granted after the request was cancelled."""
        claiming = asyncio.ensure_future(self._store.claim(caller_id, key, sha256, lease=LEASE))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.shield(self._release_late(claiming))
            raise

    async def _release_late(self, claiming: Awaitable[Claimed]) -> None:
        with suppress(StoreError):  # then its lease ends it
            claimed = await claiming
            if isinstance(claimed, Claim):
                await self._store.release(claimed)

    async def _renew(self, claim: Claim) -> None:
        held = True
        while held:
            await asyncio.sleep(LEASE / 3)
            with suppress(StoreError):  # unreachable for now; the lease leaves time for another attempt
                held = await self._store.renew(claim, lease=LEASE)

    async def _record_departure(self, turn: Turn, caller_id: str, policy: str) -> None:
        """Record that the caller left before the answer, or in the middle of it."""
        if turn.opened is not None:
            await turn.end_early("cancelled")
            return
        if turn.outcomes:
            return  # each has its own record
        body = DecisionBody(cancelled=True)
        event = Event(id=new_id(), body=body, policy=policy, key_id=caller_id, decided_by="cancelled")
        await self._store.commit([event])


def _listed(audit: Audit | None) -> list[Audit]:
    return [] if audit is None else [audit]


def begun_otherwise(policy: str) -> RequestError:
    """Return the refusal of a key whose decision cannot be continued."""
    return RequestError(
        f"this Idempotency-Key began a decision under another version or mode of policy {policy}, which cannot be "
        "continued; send the request with a new key",
        status=409, code="policy_changed",
    )  # fmt: skip


def _in_progress() -> RequestError:
    return RequestError(
        "the first request with this Idempotency-Key is still in progress", status=409, code="under_way",
        headers={"x-should-retry": "true"},
    )  # fmt: skip


async def _disconnected(receive: Receive) -> None:
    """Wait until the caller disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
