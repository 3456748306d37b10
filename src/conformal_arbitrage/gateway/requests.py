"""The road of a request: claim, decide, render, commit, send; idempotency, sessions, replies while a review is pending."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from hashlib import sha256
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive

from conformal_arbitrage.errors import (
    ArbitrageError,
    GuardianError,
    LostClaimError,
    QuotaError,
    RequestError,
    StoreError,
)
from conformal_arbitrage.gateway.audit_rows import still_unanswered
from conformal_arbitrage.gateway.auth import Caller
from conformal_arbitrage.gateway.chat import (
    EVENT_STREAM,
    ChatShape,
    CompletionRequest,
    EventStream,
    LiveEvents,
    Menu,
    ReplyShape,
    decisions_reply,
    event_stream,
    message_of_decision,
    pieces_of,
    query_of,
    read_completion,
    read_decisions,
    reply_headers,
)
from conformal_arbitrage.gateway.decider import Decider, Outcome, awaits_guardian
from conformal_arbitrage.gateway.http import DECISION_ID, POLICY, Incoming, caller_left, error_document, incoming_again
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.people import EXPIRED, PENDING, Desk
from conformal_arbitrage.gateway.policies import LivePolicy, PolicyTable, remedy_of
from conformal_arbitrage.gateway.responses import ResponseShape, read_response
from conformal_arbitrage.live.config import KEY_LABEL, GatewayConfig
from conformal_arbitrage.live.people import ReviewTerms
from conformal_arbitrage.live.rule import ConformalArbitrage, guardian_failure
from conformal_arbitrage.models.endpoint import delta_of
from conformal_arbitrage.monitoring.people import waiting_time
from conformal_arbitrage.store import claims, pages
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import reviews as stored_reviews
from conformal_arbitrage.store.claims import Claim, Claimed, Conversation, SavedResponse
from conformal_arbitrage.store.integrity import GONE
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import CompletionBody, DecisionBody, DecisionRecord, Event, new_id
from conformal_arbitrage.store.reviews import ReviewRequest, ReviewWork
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import ChatRequest, Chunk, Query

# --- Sessions ---


class Sessions:
    """The sessions of sticky policies, in the store, so that every gateway on it keeps them alike.

    Args:
        store: where they are kept; names only as digests.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def current(self, policy: LivePolicy, caller_id: str, name: str | None) -> Conversation | None:
        """Return the caller's session of that name, unless it has not begun or is over."""
        return (
            None
            if name is None
            else await self._store.run(claims.find_conversation, caller_id, policy.name, _digest(name))
        )

    async def settled(
        self, steps: AsyncGenerator[Outcome | Chunk], policy: LivePolicy, caller_id: str, name: str, version: int
    ) -> AsyncGenerator[Outcome | Chunk]:
        """Pass on the steps of a turn; with the first outcome its session begins or goes on, before anything is sent.

        Args:
            steps: of the turn.
            policy: a sticky policy.
            caller_id: whose session it is.
            name: the session's name.
            version: of the policy when the session began.

        Raises:
            RequestError: 409 if another request has begun the session meanwhile.
        """
        begun = False
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, Outcome) and not begun:
                    await self._settle(step, policy, caller_id, name, version)
                    begun = True
                yield step

    async def _settle(self, outcome: Outcome, policy: LivePolicy, caller_id: str, name: str, version: int) -> None:
        session = outcome.session or str(outcome.decision.id)
        chosen = outcome.held or ("primary" if outcome.decision.decided_by == "primary" else "guardian")
        mine = Conversation(caller_id, policy.name, _digest(name), session, chosen, version)
        in_force = await self._store.run(claims.settle_conversation, mine, idle=policy.settings.session_idle)
        if in_force.id != session:
            raise RequestError(
                "another request has begun this session meanwhile; send this turn again", status=409, code="session_begun",
                param="arbitrage.session", headers={"x-should-retry": "true"},
            )  # fmt: skip


def other_session() -> RequestError:
    """Return the error for a key whose decision is not part of the session in force: a key has one decision."""
    return RequestError(
        "the session began otherwise, or ended, since this Idempotency-Key was first used; send the turn with a new key",
        status=409, code="session_begun", param="arbitrage.session", headers={"x-should-retry": "false"},
    )  # fmt: skip


def _digest(name: str) -> str:
    return sha256(name.encode(errors="surrogatepass")).hexdigest()


# --- One reply per idempotency key, and a caller who may leave at any moment ---


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
                await self._store.run(stored_events.commit, events, audits=audits, news=news)
            else:
                await self._store.run(
                    stored_events.commit,
                    events,
                    claim=self.claim,
                    response=response,
                    audits=audits,
                    begun=begun,
                    news=news,
                    reviews=reviews,
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
            await self._store.run(stored_events.commit, events, audits=audits, undelivered=digests, news=news)
        else:
            without_key = digests if self.renewing is not None else None
            await self._store.run(
                stored_events.commit,
                events,
                claim=self.claim,
                audits=audits,
                begun=begun,
                news=news,
                undelivered=without_key,
            )

    async def end_early(self, finish: str) -> None:
        """Record that an answer which was opened has no end; it is not kept under the idempotency key."""
        if self.opened is not None and not self._ended:
            self._ended = True
            event = Event(id=self.opened, body=CompletionBody(finish=finish))
            own = [outcome for outcome in self.outcomes.values() if outcome.event.id == self.opened]
            audits = [still_unanswered(outcome.audit, outcome.decision) for outcome in own]
            await self._store.run(
                stored_events.commit,
                [event],
                audits=[audit for audit in audits if audit is not None],
                news=[self.opened],
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
                    await asyncio.shield(self._store.run(claims.release, turn.claim))

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
                await asyncio.shield(self._store.run(claims.release, claimed))

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
        await asyncio.shield(
            self._store.run(claims.release, claimed)
        )  # it failed too: let the caller's retry start over
        raise _in_progress()

    async def _try_claim(self, caller_id: str, key: str, sha256: str) -> Claimed:
        """Ask for the claim; release one that is granted after the request was cancelled."""
        claiming = asyncio.ensure_future(self._store.run(claims.take, caller_id, key, sha256, lease=LEASE))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.shield(self._release_late(claiming))
            raise

    async def _release_late(self, claiming: Awaitable[Claimed]) -> None:
        with suppress(StoreError):  # then its lease ends it
            claimed = await claiming
            if isinstance(claimed, Claim):
                await self._store.run(claims.release, claimed)

    async def _renew(self, claim: Claim) -> None:
        held = True
        while held:
            await asyncio.sleep(LEASE / 3)
            with suppress(StoreError):  # unreachable for now; the lease leaves time for another attempt
                held = await self._store.run(claims.renew, claim, lease=LEASE)

    async def _record_departure(self, turn: Turn, caller_id: str, policy: str) -> None:
        """Record that the caller left before the answer, or in the middle of it."""
        if turn.opened is not None:
            await turn.end_early("cancelled")
            return
        if turn.outcomes:
            return  # each has its own record
        body = DecisionBody(cancelled=True)
        event = Event(id=new_id(), body=body, policy=policy, key_id=caller_id, decided_by="cancelled")
        await self._store.run(stored_events.commit, [event])


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


# --- Requests that people decide ---


ENDED = ReviewWork(ended=True)
_PACE_DAYS = 1 / 24
"""How many days of votes tell how long people take now."""
_SHORTEST_RETRY, _SOON, _LONGEST_RETRY = 1, 3, 30
"""Seconds after which a caller is told to come back: a quarter of the forecast, if there is one."""


class ReviewTurns:
    """The part of a request's road that leads past people.

    Args:
        store: holds the queue.
        desk: where callers wait.
        idempotency: gives a request without a key a name to come back under.
        decider: says what to record.
    """

    def __init__(self, store: Store, desk: Desk, idempotency: Idempotency, decider: Decider) -> None:
        self._store = store
        self._decider = decider
        self._desk = desk
        self._idempotency = idempotency
        self._claiming = asyncio.Lock()

    async def put(
        self,
        turn: Turn,
        place: int,
        policy: LivePolicy,
        terms: ReviewTerms,
        query: Query,
        outcome: Outcome,
        request: Incoming,
    ) -> None:
        """Record a pending decision and put its question into the queue, in one transaction."""
        id, pending, size = outcome.event.id, outcome.decision, len(query.actions)
        async with self._claiming:  # several questions of one request share its claim
            claim = await self._idempotency.hold(turn, request, f"review:{id}")
        turn.reviewed = True
        rule = policy.rule
        if isinstance(rule, ConformalArbitrage) and policy.mode != "shadow":
            query = rule.menu(query, pending)
        whole = len(query.actions) == size  # then it is its own audit, whenever it is answered
        items = self._desk.items(
            terms,
            "decide",
            query,
            size=size,
            policy=policy.name,
            identities=policy.identities_sha256,
            drawn=outcome.audit is not None and whole,
            primary=next((leg.scores for leg in pending.legs if leg.role == "primary"), None),
        )
        path = str(request.scope["path"])
        waiting = ReviewRequest(
            key_id=claim.key_id, name=claim.name, policy=policy.name, route=path, body=request.content
        )
        work = ReviewWork(items=items, request=waiting, deadline=terms.settings.deadline)
        if id in turn.recorded:
            await turn.commit([], begun={place: id}, reviews=work)
            return
        audits = [] if outcome.audit is None else [replace(outcome.audit, ask=outcome.audit.ask and not whole)]
        await turn.commit([outcome.event], audits=audits, begun={place: id}, reviews=work)
        turn.recorded.add(id)

    async def refusal(self, turn: Turn, policy: LivePolicy, error: ArbitrageError) -> RequestError | None:
        """Return what a caller is told whose request people have not decided, for now or for good; None of other errors.

        What is for good is recorded, and kept as the reply.
        """
        if isinstance(error, RequestError) and error.code == PENDING:
            return error if policy.pair.review is None else await self._pending(turn, policy.pair.review)
        if not isinstance(error, GuardianError):
            return None
        refusal = _expired(policy, list(turn.outcomes.values()))
        await self._commit_refusal(turn, policy, saved_error(refusal))
        return refusal

    async def _commit_refusal(self, turn: Turn, policy: LivePolicy, reply: SavedResponse) -> None:
        """Keep the reply to a request that people have not decided, and record that its decisions have no action."""
        outcomes = turn.outcomes.values()
        ends = [self._decider.completion(policy, outcome, "failed") for outcome in outcomes]
        news = [outcome.event.id for outcome in outcomes if outcome.audit is not None]
        new = [outcome for outcome in outcomes if outcome.event.id not in turn.recorded]
        audits = [outcome.audit for outcome in new if outcome.audit is not None]
        events = [*(outcome.event for outcome in new), *ends]
        await turn.commit(events, audits=audits, response=reply, news=news, reviews=ENDED)

    async def _pending(self, turn: Turn, terms: ReviewTerms) -> RequestError:
        id = next(outcome.event.id for outcome in turn.outcomes.values() if outcome.decision.answer is None)
        team = terms.name
        keyed = turn.renewing is None
        [backlog] = await self._store.run(stored_reviews.backlogs, {team: self._desk.people()[team]})
        votes = [
            vote.held
            for vote in await self._store.run(stored_reviews.cast_votes, days=_PACE_DAYS)
            if vote.team == team and vote.held
        ]
        median = sorted(votes)[len(votes) // 2] if votes else None
        forecast = waiting_time(backlog.votes_needed, median, len(backlog.present))
        soon = _SOON if backlog.present else _LONGEST_RETRY
        retry = soon if forecast is None else round(forecast / 4)
        location = f"/v1/arbitrage/reviews/{id}"
        name = "" if turn.claim is None else turn.claim.name
        again = (
            "send the same request with the same Idempotency-Key again to wait for their decision"
            if keyed
            else f"ask for {location}, or send the same body again with the header Idempotency-Key: {name}"
        )
        headers = {
            "retry-after": str(min(max(retry, _SHORTEST_RETRY), _LONGEST_RETRY)),
            "x-should-retry": str(keyed).lower(),
            "location": location,
            DECISION_ID: id,
        }
        return RequestError(f"people are still deciding; {again}", status=409, code=PENDING, headers=headers)

    async def withdraw(self, turn: Turn) -> None:
        """Withdraw the questions of a caller who left without a key to come back with."""
        if turn.renewing is not None and turn.claim is not None:
            await self._store.run(stored_reviews.withdraw_request, turn.claim.key_id, turn.claim.name)

    async def with_facts(self, events: Sequence[Event]) -> list[Event]:
        """Return events in which the completions of decisions by people say how they voted."""
        outcomes = await self._store.run(stored_reviews.outcomes, {event.id for event in events})
        return [
            replace(event, body=replace(event.body, review=outcomes[event.id].facts))
            if isinstance(event.body, CompletionBody) and event.id in outcomes
            else event
            for event in events
        ]


def _expired(policy: LivePolicy, outcomes: Sequence[Outcome]) -> RequestError:
    """Return what a caller is told about whose question people have not decided in time."""
    id = next(outcome.event.id for outcome in outcomes if outcome.decision.answer is None)
    headers = {DECISION_ID: id, "x-should-retry": "false"}
    message = f"nobody decided in time, or nobody could tell; {remedy_of(policy.pair)}"
    return RequestError(message, status=504, code=EXPIRED, headers=headers)


def saved_error(error: RequestError) -> SavedResponse:
    """Return an error as the reply that is kept under an idempotency key."""
    document = error_document(str(error), code=error.code, status=error.status, param=error.param)
    headers = {**error.headers, "content-type": "application/json"}
    return SavedResponse(status=error.status, headers=headers, body=msgspec.json.encode(document))


def error_again(saved: SavedResponse) -> RequestError:
    """Return the error that was kept under an idempotency key."""
    error = msgspec.json.decode(saved.body, type=dict[str, dict[str, str | None]])["error"]
    headers = {name: value for name, value in saved.headers.items() if name != "content-type"}
    return RequestError(str(error["message"]), status=saved.status, code=str(error["code"]), headers=headers)


def request_again(request: ReviewRequest) -> Incoming:
    """Return a stored request as if its caller had sent it again, and did not leave."""
    return incoming_again(Caller(request.key_id, "call"), request.route, request.name, request.body)


# --- Attempts at a request ---


async def all_settled(calls: Sequence[Coroutine[Any, Any, Outcome]]) -> list[Outcome]:
    """Run calls concurrently, all to their end, then raise the first error: what the others decided is not lost."""
    if len(calls) == 1:
        return [await calls[0]]
    outcomes: list[Outcome] = []
    errors: list[BaseException] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            errors.append(result)
        else:
            outcomes.append(result)
    if errors:
        raise errors[0]
    return outcomes


def is_continuable(record: DecisionRecord, policy: LivePolicy) -> bool:
    """Return whether another attempt may continue a decision: same version and mode, and its answer can be rebuilt.

    People may take longer than a version lasts. What they are asked about is continued under any, then without a guarantee.
    """
    body = record.decision
    same = body.version == policy.version and body.mode == policy.mode
    same = (same or policy.pair.review is not None) and body.form == policy.pair.form
    return same and (body.pending or (body.form == "menu" and body.action is not None))


async def end_undelivered(
    turn: Turn, policy: LivePolicy, finish: str, decider: Decider, metrics: Metrics, reviews: ReviewTurns
) -> None:
    """Record how far each decision of a turn came, and keep those of which nothing was sent for another attempt."""
    if turn.opened is not None:
        await turn.end_early(finish)
        return
    if finish == "cancelled":
        await reviews.withdraw(turn)
    metrics.undelivered(policy.name, turn.outcomes.values(), finish)
    events: list[Event] = []
    audits: list[Audit] = []
    news = [outcome.event.id for outcome in turn.outcomes.values() if outcome.audit is not None]
    for outcome in turn.outcomes.values():
        audit = None if turn.reviewed else still_unanswered(outcome.audit, outcome.decision)
        if outcome.event.id in turn.recorded:
            events += [] if finish == "waiting" else [decider.completion(policy, outcome, finish)]
        else:
            events += [outcome.event, Event(id=outcome.event.id, body=CompletionBody(finish=finish))]
            audit = audit or outcome.audit
        audits += [] if audit is None else [audit]
    begun = {place: outcome.event.id for place, outcome in turn.outcomes.items()}
    digests = {id: decider.digest(turn.questions[place]) for place, id in begun.items()}
    await turn.end_undelivered(events, audits, begun, digests, news)


# --- The routes that decide. A request takes one road ---


class DecisionRoutes:
    """POST /v1/decisions, /v1/chat/completions and /v1/responses."""

    def __init__(
        self, config: GatewayConfig, store: Store, policies: PolicyTable, decider: Decider, metrics: Metrics, desk: Desk
    ) -> None:
        self._config = config
        self._store = store
        self._policies = policies
        self._decider = decider
        self._metrics = metrics
        self._idempotency = Idempotency(store, metrics)
        self._sessions = Sessions(store)
        self._reviews = ReviewTurns(store, desk, self._idempotency, decider)

    async def decisions(self, request: Incoming) -> Response:
        """Answer POST /v1/decisions."""
        body = read_decisions(request.content, self._config)
        policy = self._policy_of(request, body.model)
        async with self._turn(request, policy) as turn:
            if turn.response is None:
                start = time.perf_counter()
                group = policy.settings.group and body.group_at(policy.settings.group, request.caller.label)
                queries = [query_of(body, question, new_id(), group) for question in body.questions]
                turn.several = len(queries) > 1
                calls = [self._choose(turn, place, policy, query, request) for place, query in enumerate(queries)]
                outcomes = await all_settled(calls)
                _require_answers(policy, outcomes)
                await self._commit(turn, policy, outcomes, decisions_reply(policy, body.questions, outcomes), start)
        return _response(turn)

    async def completions(self, request: Incoming) -> Response | EventStream:
        """Answer POST /v1/chat/completions."""
        chat = read_completion(request.content, self._config)
        return await self._answer(request, chat, ChatShape(chat.include_usage))

    async def responses(self, request: Incoming) -> Response | EventStream:
        """Answer POST /v1/responses."""
        body = read_response(request.content, self._config)
        return await self._answer(request, body.chat, ResponseShape(body.echo))

    def _policy_of(self, request: Incoming, model: str) -> LivePolicy:
        """Return the policy that a request names, once its caller is known to be allowed to use it."""
        policy = self._policies.named(model)
        if request.caller.policies is not None:
            request.caller.check_policy(policy.name)
        request.scope[POLICY] = policy.name
        return policy

    async def _answer(self, request: Incoming, chat: CompletionRequest, shape: ReplyShape) -> Response | EventStream:
        policy = self._policy_of(request, chat.model)
        chat = chat if policy.settings.group != KEY_LABEL else replace(chat, label=request.caller.label)
        text = policy.pair.form == "text" and chat.menu is not None and chat.menu.field is not None
        menu = None if text else chat.menu  # in free text, a schema with one enum is a schema like any other
        if chat.stream:
            async with event_stream(request.send, policy.name, patient=policy.pair.review is not None) as events:
                await self._stream(request, chat, policy, menu, events, shape)
            return events
        async with self._turn(request, policy) as turn:
            if turn.response is None:
                start = time.perf_counter()
                outcome = await self._decide(turn, policy, chat, menu, request)
                _require_answers(policy, [outcome])
                reply = shape.whole(policy, outcome, menu)
                await self._commit(turn, policy, [outcome], reply, start)
        return _response(turn)

    @asynccontextmanager
    async def _turn(self, request: Incoming, policy: LivePolicy) -> AsyncGenerator[Turn]:
        """Take a request's turn; however it ends, every decision whose Primary answered is recorded.

        Otherwise rows whose Guardian failed, or was too slow for the caller, would be missing from an export, and those
        that remain would be selected by their scores.
        """
        async with self._idempotency.turn(request, policy.name) as turn:
            finish = "failed"
            try:
                yield turn
            except QuotaError:
                finish = "limited"
                raise
            except asyncio.CancelledError:
                finish = "cancelled"
                raise
            except StoreError:
                finish = ""  # nothing can be recorded, or another gateway records it
                raise
            except (RequestError, GuardianError) as error:
                refusal = await self._reviews.refusal(turn, policy, error) if turn.reviewed else None
                if refusal is None:
                    raise
                finish = "waiting"
                raise refusal from error
            finally:
                if finish and turn.response is None and turn.outcomes:
                    await end_undelivered(turn, policy, finish, self._decider, self._metrics, self._reviews)

    async def _stream(
        self,
        request: Incoming,
        chat: CompletionRequest,
        policy: LivePolicy,
        menu: Menu | None,
        events: EventStream,
        shape: ReplyShape,
    ) -> None:
        async with self._turn(request, policy) as turn:
            if turn.response is not None:
                pass
            elif menu is None:
                await self._stream_text(turn, events, policy, chat, request, shape)
            else:
                start = time.perf_counter()
                outcome = await self._decide(turn, policy, chat, menu, request)
                await self._send_whole(turn, events, policy, shape, outcome, menu, start)
        if turn.replayed and turn.response is not None:
            if turn.response.status != 200:
                raise error_again(turn.response)
            await events.replay(turn.response)

    async def _decide(
        self, turn: Turn, policy: LivePolicy, chat: CompletionRequest, menu: Menu | None, request: Incoming
    ) -> Outcome:
        if menu is not None:
            group = policy.settings.group and chat.group_at(policy.settings.group)
            query = Query(chat.messages, menu.actions, id=new_id(), group=group)
            return await self._choose(turn, 0, policy, query, request, _session(chat))
        return await _last(await self._text(turn, policy, chat, request))

    async def _text(
        self, turn: Turn, policy: LivePolicy, chat: CompletionRequest, request: Incoming, *, live: bool = False
    ) -> AsyncGenerator[Outcome | Chunk]:
        """Return the steps that answer a chat request in free text."""
        if policy.settings.sticky is not None:
            return await self._session_text(turn, policy, chat, request, live=live)
        caller = request.caller.id
        earlier = await self._earlier(turn, 0, policy, (caller, policy.name, chat.body))
        group = policy.settings.group and chat.group_at(policy.settings.group)
        chat_request = ChatRequest(chat.body, id=new_id() if earlier is None else earlier.id, group=group)
        steps = self._decider.steps(policy, chat_request, caller, earlier, session=_session(chat), live=live)
        return self._noted(turn, 0, policy, chat_request, request, steps)

    async def _session_text(
        self, turn: Turn, policy: LivePolicy, chat: CompletionRequest, request: Incoming, *, live: bool
    ) -> AsyncGenerator[Outcome | Chunk]:
        """Return the steps that answer one turn of a session; a request that names none is a session of its own."""
        caller = request.caller.id
        conversation = await self._sessions.current(policy, caller, chat.session)
        earlier = await self._earlier(turn, 0, policy, (caller, policy.name, chat.body, chat.session))
        if earlier is not None and earlier.decision.session != (conversation or earlier).id:
            if turn.claim is not None:
                raise other_session()
            turn.recorded.discard(earlier.id)  # the session began, or ended, since
            earlier = None
        chat_request = ChatRequest(chat.body, id=new_id() if earlier is None else earlier.id)
        if earlier is not None and earlier.id == (conversation or earlier).id:
            conversation = None  # another attempt at the first turn
        steps = self._decider.steps(policy, chat_request, caller, earlier, conversation=conversation, live=live)
        steps = self._noted(turn, 0, policy, chat_request, request, steps)
        if chat.session is None:
            return steps
        version = policy.version if conversation is None else conversation.version
        return self._sessions.settled(steps, policy, caller, chat.session, version)

    async def _choose(
        self, turn: Turn, place: int, policy: LivePolicy, query: Query, request: Incoming, session: str | None = None
    ) -> Outcome:
        """Decide about one question of a request, or continue what an earlier attempt decided."""
        caller = request.caller.id
        question = (caller, policy.name, query.context, query.actions, query.group)
        earlier = await self._earlier(turn, place, policy, question)
        if earlier is not None:
            query = replace(query, id=earlier.id)
        steps = self._decider.steps(policy, query, caller, earlier, session=session)
        return await _last(self._noted(turn, place, policy, query, request, steps))

    async def _earlier(self, turn: Turn, place: int, policy: LivePolicy, question: object) -> DecisionRecord | None:
        """Return the decision that an earlier attempt at the same question began under the same version, if any.

        Raises:
            RequestError: it was begun under this idempotency key, and cannot be continued: a key has one decision.
        """
        turn.questions[place] = question
        id = None
        if turn.claim is not None:
            id = turn.claim.begun.get(place)
        elif self._store.has_undelivered:
            id = await self._store.run(claims.take_undelivered, self._decider.digest(question))
        record = None if id is None else await self._store.run(pages.record, id)
        if record is None or not is_continuable(record, policy):
            if record is not None and turn.claim is not None:
                raise begun_otherwise(policy.name)
            return None
        turn.recorded.add(record.id)
        return record

    async def _noted(
        self,
        turn: Turn,
        place: int,
        policy: LivePolicy,
        question: Query | ChatRequest,
        request: Incoming,
        steps: AsyncGenerator[Outcome | Chunk],
    ) -> AsyncGenerator[Outcome | Chunk]:
        """Pass steps on, noting each outcome; one that must not be lost is recorded before the next model is asked."""
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, Outcome):
                    turn.outcomes[place] = step
                    if awaits_guardian(step.decision):
                        if policy.pair.review is not None and isinstance(question, Query):
                            await self._reviews.put(turn, place, policy, policy.pair.review, question, step, request)
                        else:
                            await _keep_pending(turn, place, step)
                    elif turn.several and step.audit is not None:
                        await _keep_pending(
                            turn, place, step
                        )  # or the ledger would have the deferred of a request first
                yield step

    async def _stream_text(
        self,
        turn: Turn,
        events: EventStream,
        policy: LivePolicy,
        chat: CompletionRequest,
        request: Incoming,
        shape: ReplyShape,
    ) -> None:
        """Pass on the Guardian's words as they come; any other answer is sent once it is complete."""
        start = time.perf_counter()
        live = _LiveAnswer(turn, events, policy, self._metrics, shape)
        outcome: Outcome | None = None
        try:
            steps = await self._text(turn, policy, chat, request, live=True)
            async with aclosing(steps):
                async for step in steps:
                    if isinstance(step, Outcome):
                        outcome = step
                    elif outcome is not None:
                        await live.take(outcome, step)
            if outcome is None:
                raise AssertionError("a stream ends with its outcome")
            if live.chunks is None:
                await self._send_whole(turn, events, policy, shape, outcome, None, start)
            else:
                await live.finish(outcome, self._decider)
        except (GuardianError, LostClaimError):
            await turn.end_early("failed")
            raise

    async def _send_whole(
        self,
        turn: Turn,
        events: EventStream,
        policy: LivePolicy,
        shape: ReplyShape,
        outcome: Outcome,
        menu: Menu | None,
        start: float,
    ) -> None:
        """Commit a finished answer and send it in pieces; record it if the caller leaves before the last."""
        _require_answers(policy, [outcome])
        reply = shape.streamed(policy, outcome, menu)
        await self._commit(turn, policy, [outcome], reply, start)
        turn.opened = str(outcome.decision.id)
        events.headers = reply.headers
        for piece in pieces_of(reply):
            await events.put(piece)
            await asyncio.sleep(0)  # sending alone never waits, and a caller who left would go unnoticed
            if turn.left:
                await turn.end_early("cancelled")
                return

    async def _commit(
        self, turn: Turn, policy: LivePolicy, outcomes: Sequence[Outcome], reply: SavedResponse, start: float
    ) -> None:
        events: list[Event] = []
        audits: list[Audit] = []
        news: list[str] = []
        for outcome in outcomes:
            if outcome.event.id in turn.recorded:
                events.append(self._decider.completion(policy, outcome, _finish_of(policy, outcome)))
                if outcome.audit is not None and (outcome.known_legs or outcome.decision.decided_by == "fallback"):
                    news.append(outcome.event.id)  # what was served is another answer than the ledger expects
                    audit = None if turn.reviewed else still_unanswered(outcome.audit, outcome.decision)
                    audits += [] if audit is None else [audit]
                continue
            events.append(outcome.event)
            if outcome.audit is not None:
                audits.append(outcome.audit)
        if turn.reviewed:
            events = await self._reviews.with_facts(events)
            await turn.commit(events, audits=audits, response=reply, news=news, reviews=ENDED)
        else:
            await turn.commit(events, audits=audits, response=reply, news=news)
        self._metrics.decided(policy.name, outcomes, time.perf_counter() - start)

    async def complete(self, request: ReviewRequest) -> None:
        """Complete a request that people have decided, and keep the reply for its caller, who is not waiting here."""
        handlers = {"/v1/decisions": self.decisions, "/v1/chat/completions": self.completions}
        await handlers.get(request.route, self.responses)(request_again(request))


async def _keep_pending(turn: Turn, place: int, outcome: Outcome) -> None:
    """Record a decision before any Guardian is asked, if neither a crash nor a retry may lose it."""
    lasting = turn.claim is not None or outcome.audit is not None or outcome.session is not None
    if lasting and outcome.event.id not in turn.recorded:
        await turn.begin(place, outcome)


def _session(chat: CompletionRequest) -> str | None:
    """Return the caller's name for the conversation: its own field, or whose request it is."""
    user = chat.body.get("user")
    return chat.session or (user if isinstance(user, str) else None)


async def _last(steps: AsyncGenerator[Outcome | Chunk]) -> Outcome:
    """Return the last outcome."""
    outcome: Outcome | None = None
    async with aclosing(steps):
        async for step in steps:
            outcome = step if isinstance(step, Outcome) else outcome
    if outcome is None:
        raise AssertionError("a decision ends with its outcome")
    return outcome


def _require_answers(policy: LivePolicy, outcomes: Sequence[Outcome]) -> None:
    """Refuse to answer if the Guardian failed; the records are kept nevertheless.

    Raises:
        GuardianError: the Guardian failed.
    """
    for outcome in outcomes:
        if outcome.decision.answer is None:
            raise guardian_failure(outcome.decision.legs[-1], remedy_of(policy.pair))


def _finish_of(policy: LivePolicy, outcome: Outcome) -> str:
    return "stop" if policy.pair.form == "menu" else message_of_decision(outcome.decision, None)[1]


class _LiveAnswer:
    """The Guardian's answer while it is being written.

    Nothing leaves before a visible word or a tool call: until then the Guardian may still fail and be replaced.

    Attributes:
        chunks: renders what is sent; None until the decision has been recorded.
    """

    def __init__(
        self, turn: Turn, events: EventStream, policy: LivePolicy, metrics: Metrics, shape: ReplyShape
    ) -> None:
        self.chunks: LiveEvents | None = None
        self._turn = turn
        self._events = events
        self._policy = policy
        self._metrics = metrics
        self._shape = shape
        self._held: list[Mapping[str, Any]] = []
        self._sent: list[bytes] = []

    async def take(self, outcome: Outcome, chunk: Chunk) -> None:
        """Pass a chunk on, or hold it until the answer has begun."""
        delta = {name: value for name, value in delta_of(chunk).items() if name != "role"}
        if self.chunks is not None:
            if delta:
                await self._put(self.chunks.delta(delta))
            return
        self._held.append(delta)
        if _is_answer(delta):
            await self._open(outcome)

    async def _open(self, outcome: Outcome) -> None:
        """Record the decision, then send what was held."""
        body = outcome.event.body
        if isinstance(body, DecisionBody):  # the Guardian has begun to answer
            body = replace(body, action=outcome.decision.action, pending=False)
        await self._turn.open(replace(outcome.event, body=body), outcome.audit)
        self._metrics.decided(self._policy.name, [outcome])
        self._events.headers = {**reply_headers(self._policy, outcome), "x-arbitrage-cost": "unknown", **EVENT_STREAM}
        self.chunks = self._shape.live(self._policy, outcome)
        await self._put(self.chunks.first(outcome, self._held))

    async def _put(self, piece: bytes) -> None:
        if self._turn.claim is not None:  # only a key's response is ever sent again
            self._sent.append(piece)
        await self._events.put(piece)

    async def finish(self, outcome: Outcome, decider: Decider) -> None:
        """Record how the answer ended, then send the last chunks.

        Raises:
            GuardianError: the Guardian failed after its first word.
            LostClaimError: another gateway took over the idempotency key.
        """
        leg = outcome.decision.legs[-1]
        self._metrics.leg(self._policy.name, leg)
        if leg.error is not None or self.chunks is None:
            raise guardian_failure(leg)
        finish, last = self.chunks.last(outcome)
        reply = SavedResponse(status=200, headers=self._events.headers, body=b"".join([*self._sent, last]))
        await self._turn.commit([decider.completion(self._policy, outcome, finish)], response=reply)
        await self._events.put(last)


def _is_answer(delta: Mapping[str, Any]) -> bool:
    """Return whether a delta holds an answer: visible text, or tool calls."""
    content, calls = delta.get("content"), delta.get("tool_calls")
    return (isinstance(content, str) and content.strip() != "") or (isinstance(calls, list) and calls != [])


def _response(turn: Turn) -> Response:
    """Return the response that a turn ended with."""
    saved = turn.response
    if saved is None:
        raise RequestError("the caller disconnected", status=499, code="caller_left")
    headers = {**saved.headers, "x-arbitrage-replayed": "true"} if turn.replayed else saved.headers
    return Response(saved.body, status_code=saved.status, headers=dict(headers))
