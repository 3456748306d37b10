"""The road of a request: claim, decide, render, commit, send; idempotency, sessions, replies while a review is pending."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive

from conformal_arbitrage.errors import (
    GuardianError,
    LostClaimError,
    QuotaError,
    RequestError,
    StoreError,
)
from conformal_arbitrage.gateway.audience import Caller
from conformal_arbitrage.gateway.chat import (
    EVENT_STREAM,
    ChatShape,
    CompletionRequest,
    EventStream,
    LiveEvents,
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
from conformal_arbitrage.gateway.decider import Decider, Outcome, still_unanswered
from conformal_arbitrage.gateway.http import DECISION_ID, Incoming, caller_left, error_document
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.policies import LivePolicy, PolicyTable, remedy_of
from conformal_arbitrage.gateway.responses_api import ResponseShape, read_response
from conformal_arbitrage.gateway.review_queue import (
    EXPIRED,
    PATIENT,
    PENDING,
    ReviewQueue,
    StillDecidingError,
    WaitingPlaces,
)
from conformal_arbitrage.live.config import KEY_LABEL, GatewayConfig
from conformal_arbitrage.live.reviewers import ReviewTerms
from conformal_arbitrage.live.rule import ConformalArbitrage, guardian_failure
from conformal_arbitrage.models.endpoint import delta_of
from conformal_arbitrage.monitoring.votes import waiting_time
from conformal_arbitrage.store import claims, pages
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import reviews as stored_reviews
from conformal_arbitrage.store.claims import Claim, Claimed, Conversation, SavedResponse
from conformal_arbitrage.store.integrity import GONE
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import CompletionBody, DecisionBody, DecisionRecord, Event, new_id
from conformal_arbitrage.store.reviews import ReviewRequest, ReviewWork
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import ChatRequest, Chunk, Decision, Query

DECISIONS, CHAT, RESPONSES = "/v1/decisions", "/v1/chat/completions", "/v1/responses"
LEASE = 6.0
LONGEST_WAIT = 120.0
ENDED = ReviewWork(ended=True)
_PACE_DAYS = 1 / 24
"""How many days of votes tell how long people take now."""
_SHORTEST_RETRY, _SOON, _LONGEST_RETRY = 1, 3, 30
"""Seconds after which a caller is told to come back: a quarter of the forecast, if there is one."""
_Result = TypeVar("_Result")


class Asked(Struct, frozen=True, kw_only=True):
    """A request as it was read, whether or not its caller waits for the reply.

    Attributes:
        route: the path that it was sent to.
        content: its body, from which any gateway can read it again.
        caller_id: whose key it came with.
        key: its idempotency key, if any.
        policy: the policy in force.
        questions: each with an id of its own.
        render: makes the reply from the outcomes, one for each question.
        live: renders an answer in free text while it is being written, if the reply is streamed.
        streams: whether the reply is a stream of events.
        session: the session that the request belongs to, under a policy that decides by session.
        conversation: the caller's name for the conversation, under any other.
    """

    route: str
    content: bytes
    caller_id: str
    key: str | None
    policy: LivePolicy
    questions: Sequence[Query] | Sequence[ChatRequest]
    render: Callable[[Sequence[Outcome]], SavedResponse]
    live: Callable[[Outcome], LiveEvents] | None = None
    streams: bool = False
    session: str | None = None
    conversation: str | None = None

    def identity(self, place: int) -> tuple[object, ...]:
        """Return what a retry without a key is recognized by: a question with its caller and policy."""
        question, asked_by = self.questions[place], (self.caller_id, self.policy.name)
        if isinstance(question, Query):
            return (*asked_by, question.context, question.actions, question.group)
        if self.policy.settings.sticky is not None:
            return (*asked_by, question.body, self.session)
        return (*asked_by, question.body)


class Waiting(Struct, frozen=True):
    """A request that people have yet to decide, with what its caller is told meanwhile."""

    error: RequestError


class Deciding(Struct, frozen=True):
    """Nothing of the answer was sent, and nothing is durable that ends the attempt."""


class Sending(Struct, frozen=True):
    """The answer of a decision is being sent while it is written.

    Attributes:
        id: of the decision.
        cut_off: whether it is recorded that the answer has no end.
    """

    id: str
    cut_off: bool = False


class Replied(Struct, frozen=True):
    """The reply is durable.

    Attributes:
        replayed: whether another attempt made it.
    """

    response: SavedResponse
    replayed: bool = False


AttemptState = Deciding | Sending | Replied
DECIDING = Deciding()


class Attempt:
    """One attempt to answer a request: what was decided so far, and what of it is durable.

    A commit that has begun is never cancelled: if the caller leaves meanwhile, the decision stands. An answer under an
    idempotency key that is being sent is finished even if the caller leaves, so that the key has one reply.

    Attributes:
        asked: the request.
        claim: of its idempotency key; a request without one has a claim once people are asked.
        outcomes: how far each decision has come, by the place of its question.
        recorded: ids of the decisions that are in the store already.
        reviewed: whether people are asked about a question.
        state: how far the reply has come.
        left: whether the caller has disconnected.
    """

    def __init__(self, asked: Asked, store: Store, metrics: Metrics) -> None:
        self.asked = asked
        self.claim: Claim | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.recorded: set[str] = set()
        self.reviewed = False
        self.state: AttemptState = DECIDING
        self.left = False
        self._store = store
        self._metrics = metrics
        self._task = asyncio.current_task()
        self._committing = 0

    @property
    def reply(self) -> "Replied | None":
        """The reply, once it is durable."""
        return self.state if isinstance(self.state, Replied) else None

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
        """Make events durable, with audits, with the response that ends the attempt, and as news of these decisions.

        Raises:
            LostClaimError: another gateway took over the idempotency key; nothing was written.
        """
        start = time.perf_counter()
        self._committing += 1
        try:
            claim = self.claim
            await self._store.run(
                stored_events.commit, events, audits=audits, news=news, claim=claim, response=claim and response,
                begun=claim and begun, reviews=claim and reviews,
            )  # fmt: skip
            if response is not None:
                self.state = Replied(response)
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
        self.state = Sending(event.id)  # it stands even if the Guardian times out during the commit
        try:
            if not known or self.claim is not None:
                await self.commit([] if known else [event], audits=[] if known else _listed(audit))
        except StoreError:
            self.state = DECIDING
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
        claim = self.claim
        await self._store.run(
            stored_events.commit, events, audits=audits, news=news, claim=claim, begun=claim and begun,
            undelivered=digests if claim is None or self.asked.key is None else None,
        )  # fmt: skip
        # Known here at once: a retry may come before the store is next asked how it stands.
        self._store.has_undelivered = True

    async def cut_off(self, finish: str) -> None:
        """Record that the answer which is being sent has no end; it is not kept under the idempotency key."""
        if isinstance(self.state, Sending) and not self.state.cut_off:
            self.state = replace(self.state, cut_off=True)
            await self.note_cut_off(self.state.id, finish)

    async def note_cut_off(self, id: str, finish: str) -> None:
        """Record that the answer of a decision was not sent to its end."""
        outcomes = [outcome for outcome in self.outcomes.values() if outcome.event.id == id]
        audits = [still_unanswered(outcome.audit, outcome.decision) for outcome in outcomes]
        await self._store.run(
            stored_events.commit,
            [Event(id=id, body=CompletionBody(finish=finish))],
            audits=[audit for audit in audits if audit is not None],
            news=[id],
        )

    def leave(self, _: object) -> None:
        """Cancel the attempt because its caller has left; a commit finishes first, and after the last it is too late."""
        self.left = True
        self._stop()

    def _stop(self) -> None:
        """Cancel the attempt, unless it is being committed, is over, or is an answer that its key will be asked for."""
        kept = isinstance(self.state, Replied) or (isinstance(self.state, Sending) and self.claim is not None)
        if self._task is not None and not self._committing and not kept:
            self._task.cancel()

    def was_cancelled_by_caller(self) -> bool:
        """Return whether the caller's leaving is the only reason for a cancellation."""
        return self.left and self._task is not None and self._task.uncancel() == 0


# --- The road of a request ---


class DecisionRoutes:
    """POST /v1/decisions, /v1/chat/completions and /v1/responses.

    A request is read, its idempotency key claimed, its questions decided, the reply rendered and committed with the
    decisions, and only then sent.
    """

    def __init__(
        self,
        config: GatewayConfig,
        store: Store,
        policies: PolicyTable,
        decider: Decider,
        metrics: Metrics,
        queue: ReviewQueue,
    ) -> None:
        self._config = config
        self._store = store
        self._policies = policies
        self._decider = decider
        self._metrics = metrics
        self._places = queue.places
        self._idempotency = Idempotency(store, metrics, queue.places)
        self._sessions = Sessions(store)
        self._reviews = ReviewedRequests(store, queue, self._idempotency, decider)

    async def decisions(self, request: Incoming) -> Response | EventStream:
        """Answer POST /v1/decisions."""
        return await self._answer(request, DECISIONS)

    async def completions(self, request: Incoming) -> Response | EventStream:
        """Answer POST /v1/chat/completions."""
        return await self._answer(request, CHAT)

    async def responses(self, request: Incoming) -> Response | EventStream:
        """Answer POST /v1/responses."""
        return await self._answer(request, RESPONSES)

    async def finish(self, request: ReviewRequest) -> None:
        """Finish a request that people have decided, and keep the reply for its caller, who does not wait here.

        Raises:
            RequestError: people have not decided all of it.
        """
        asked = self._read(request.route, Caller(request.key_id, "call"), request.name, request.body)
        await self._replied(asked)

    async def _answer(self, request: Incoming, route: str) -> Response | EventStream:
        asked = self._read(route, request.caller, request.idempotency_key, request.content)
        request.exchange.policy = asked.policy.name
        if asked.streams:
            patient = asked.policy.pair.review is not None
            async with event_stream(request.send, asked.policy.name, patient=patient) as events:
                await self._stream(asked, request.receive, events)
            return events
        return _response(await self._replied(asked, request.receive))

    async def _replied(self, asked: Asked, receive: Receive | None = None) -> Attempt:
        """Return the attempt that ended with a reply."""
        waiting = None
        async with self._attempt(asked, receive) as attempt:
            if attempt.reply is None:  # else this key was answered before
                waiting = await self._reply(attempt)
        if waiting is not None:
            raise waiting.error
        return attempt

    async def _stream(self, asked: Asked, receive: Receive, events: EventStream) -> None:
        waiting = None
        async with self._attempt(asked, receive) as attempt:
            if attempt.reply is not None:
                pass  # this key was answered before
            elif asked.live is not None:
                await self._stream_text(attempt, asked.live, events)
            else:
                waiting = await self._reply(attempt)
                await self._send(attempt, events)
        if waiting is not None:
            raise waiting.error
        reply = attempt.reply
        if reply is not None and reply.response.status != 200:
            raise error_again(reply.response)
        if reply is not None and reply.replayed:
            await events.replay(reply.response)

    async def _reply(self, attempt: Attempt) -> Waiting | None:
        """Decide and commit the reply, unless people have yet to decide."""
        start = time.perf_counter()
        outcomes = await self._decide(attempt)
        if isinstance(outcomes, Waiting):
            return outcomes
        await self._commit(attempt, outcomes, start)
        return None

    @asynccontextmanager
    async def _attempt(self, asked: Asked, receive: Receive | None = None) -> AsyncGenerator[Attempt]:
        """Attempt to answer a request; however that ends, every decision whose Primary answered is recorded.

        Otherwise rows whose Guardian failed, or was too slow for the caller, would be missing from an export, and those
        that remain would be selected by their scores.
        """
        async with self._idempotency.attempt(asked, receive) as attempt:
            finish = "failed"
            try:
                yield attempt
                finish = "waiting"  # without a response, people have yet to decide
            except QuotaError:
                finish = "limited"
                raise
            except asyncio.CancelledError:
                finish = "cancelled"
                raise
            except StoreError:
                finish = ""  # nothing can be recorded, or another gateway records it
                raise
            finally:
                if finish and attempt.reply is None and attempt.outcomes:
                    await self._end_undelivered(attempt, finish)

    async def _decide(self, attempt: Attempt) -> list[Outcome] | Waiting:
        """Decide about every question of a request, or say that people have yet to decide about one."""
        terms = attempt.asked.policy.pair.review
        calls = [self._decide_one(attempt, place) for place in range(len(attempt.asked.questions))]
        if terms is None:
            results = await all_settled(calls)
        else:
            with self._places.held(attempt.asked.caller_id) as patient:
                PATIENT.set(patient)
                results = await all_settled(calls)
        outcomes = [result for result in results if isinstance(result, Outcome)]
        if len(outcomes) == len(results) or terms is None:
            return outcomes
        return await self._reviews.waiting(attempt, terms)

    async def _decide_one(self, attempt: Attempt, place: int) -> Outcome | None:
        """Decide about one question; None if people have yet to decide."""
        try:
            return await self._outcome(attempt, place)
        except StillDecidingError:
            return None

    async def _outcome(
        self, attempt: Attempt, place: int, take: Callable[[Outcome, Chunk], Awaitable[None]] | None = None
    ) -> Outcome:
        """Decide about one question of a request, or continue what an earlier attempt decided.

        Each outcome is noted, and one that must not be lost is recorded before the next model is asked.

        Args:
            attempt: at the request.
            place: of the question.
            take: takes the Guardian's chunks as they come, with the outcome so far.
        """
        asked, policy = attempt.asked, attempt.asked.policy
        question = asked.questions[place]
        by_session = policy.settings.sticky is not None and isinstance(question, ChatRequest)
        conversation = await self._sessions.current(policy, asked.caller_id, asked.session) if by_session else None
        earlier = await self._earlier(attempt, place)
        if by_session and earlier is not None:
            begun = earlier.id if conversation is None else conversation.id
            if earlier.decision.session != begun:  # the session began, or ended, since
                if attempt.claim is not None:
                    raise other_session()
                earlier = None
            elif earlier.id == begun:
                conversation = None  # another attempt at the first turn
        if earlier is not None:
            question = replace(question, id=earlier.id)
            attempt.recorded.add(earlier.id)
        case = self._decider.begin(
            policy, question, asked.caller_id, earlier, conversation=conversation,
            session=None if by_session else asked.conversation, live=take is not None,
        )  # fmt: skip
        unsettled = by_session and asked.session is not None
        outcome: Outcome | None = None
        async with aclosing(case.steps):
            async for step in case.steps:
                if isinstance(step, Decision):
                    outcome = attempt.outcomes[place] = self._decider.outcome(case, step)
                    await self._keep(attempt, place, question, outcome)
                    if unsettled and asked.session is not None:
                        version = policy.version if conversation is None else conversation.version
                        await self._sessions.settle(outcome, policy, asked.caller_id, asked.session, version)
                        unsettled = False
                elif outcome is not None and take is not None:
                    await take(outcome, step)
        if outcome is None:
            raise AssertionError("a decision ends with its outcome")
        return outcome

    async def _earlier(self, attempt: Attempt, place: int) -> DecisionRecord | None:
        """Return the decision that an earlier attempt at the same question began under the same version, if any.

        Raises:
            RequestError: it was begun under this idempotency key, and cannot be continued: a key has one decision.
        """
        id = None
        if attempt.claim is not None:
            id = attempt.claim.begun.get(place)
        elif self._store.has_undelivered:
            id = await self._store.run(claims.take_undelivered, self._decider.digest(attempt.asked.identity(place)))
        record = None if id is None else await self._store.run(pages.record, id)
        if record is None or is_continuable(record, attempt.asked.policy):
            return record
        if attempt.claim is not None:
            raise begun_otherwise(attempt.asked.policy.name)
        return None

    async def _keep(self, attempt: Attempt, place: int, question: Query | ChatRequest, outcome: Outcome) -> None:
        """Record an outcome that must not be lost; a question for people is put into their queue with it."""
        terms = attempt.asked.policy.pair.review
        if not outcome.awaits_guardian:
            if len(attempt.asked.questions) > 1 and outcome.audit is not None:
                await _keep_pending(attempt, place, outcome)  # or the ledger would have the deferred of a request first
        elif terms is not None and isinstance(question, Query):
            await self._reviews.put(attempt, place, terms, question, outcome)
        else:
            await _keep_pending(attempt, place, outcome)

    async def _stream_text(
        self, attempt: Attempt, render: Callable[[Outcome], LiveEvents], events: EventStream
    ) -> None:
        """Pass on the Guardian's words as they come; any other answer is sent once it is complete."""
        start = time.perf_counter()
        live = _LiveAnswer(attempt, events, self._metrics, render)
        try:
            outcome = await self._outcome(attempt, 0, live.take)
            if live.chunks is None:
                await self._commit(attempt, [outcome], start)
                await self._send(attempt, events)
            else:
                await live.finish(outcome, self._decider)
        except (GuardianError, LostClaimError):
            await attempt.cut_off("failed")
            raise

    async def _send(self, attempt: Attempt, events: EventStream) -> None:
        """Send a reply that was committed, in pieces; record it if the caller leaves before the last."""
        reply = attempt.reply
        if reply is None or reply.response.status != 200:
            return
        events.headers = reply.response.headers
        for piece in pieces_of(reply.response):
            await events.put(piece)
            await asyncio.sleep(0)  # sending alone never waits, and a caller who left would go unnoticed
            if attempt.left:
                await attempt.note_cut_off(attempt.outcomes[0].event.id, "cancelled")
                return

    async def _commit(self, attempt: Attempt, outcomes: Sequence[Outcome], start: float) -> None:
        """Render the reply and commit it with the decisions.

        Raises:
            GuardianError: the Guardian failed.
        """
        policy = attempt.asked.policy
        if attempt.reviewed and any(outcome.decision.answer is None for outcome in outcomes):
            await self._reviews.commit_expired(attempt)
            return
        _require_answers(policy, outcomes)
        reply = attempt.asked.render(outcomes)
        events: list[Event] = []
        audits: list[Audit] = []
        news: list[str] = []
        for outcome in outcomes:
            if outcome.event.id in attempt.recorded:
                events.append(self._decider.completion(policy, outcome, _finish_of(policy, outcome)))
                if outcome.audit is not None and (outcome.known_legs or outcome.decision.decided_by == "fallback"):
                    news.append(outcome.event.id)  # what was served is another answer than the ledger expects
                    audit = None if attempt.reviewed else still_unanswered(outcome.audit, outcome.decision)
                    audits += _listed(audit)
            else:
                events.append(outcome.event)
                audits += _listed(outcome.audit)
        if attempt.reviewed:
            events = await self._reviews.with_facts(events)
        await attempt.commit(
            events, audits=audits, response=reply, news=news, reviews=ENDED if attempt.reviewed else None
        )
        self._metrics.decided(policy.name, outcomes, time.perf_counter() - start)

    async def _end_undelivered(self, attempt: Attempt, finish: str) -> None:
        """Record how far each decision came, and keep those of which nothing was sent for another attempt."""
        if isinstance(attempt.state, Sending):
            await attempt.cut_off(finish)
            return
        if finish == "cancelled":
            await self._reviews.withdraw(attempt)
        policy, outcomes = attempt.asked.policy, attempt.outcomes
        self._metrics.undelivered(policy.name, outcomes.values(), finish)
        events: list[Event] = []
        audits: list[Audit] = []
        news = [outcome.event.id for outcome in outcomes.values() if outcome.audit is not None]
        for outcome in outcomes.values():
            audit = None if attempt.reviewed else still_unanswered(outcome.audit, outcome.decision)
            if outcome.event.id in attempt.recorded:
                events += [] if finish == "waiting" else [self._decider.completion(policy, outcome, finish)]
            else:
                events += [outcome.event, Event(id=outcome.event.id, body=CompletionBody(finish=finish))]
                audit = audit or outcome.audit
            audits += _listed(audit)
        begun = {place: outcome.event.id for place, outcome in outcomes.items()}
        digests = {id: self._decider.digest(attempt.asked.identity(place)) for place, id in begun.items()}
        await attempt.end_undelivered(events, audits, begun, digests, news)

    # From bytes to what is asked

    def _read(self, route: str, caller: Caller, key: str | None, content: bytes) -> Asked:
        """Read a request to one of the routes, whose caller must be allowed to use the policy that it names."""
        if route == DECISIONS:
            return self._read_decisions(caller, key, content)
        if route == CHAT:
            chat = read_completion(content, self._config)
            return self._read_chat(route, caller, key, content, chat, ChatShape(chat.include_usage))
        body = read_response(content, self._config)
        return self._read_chat(route, caller, key, content, body.chat, ResponseShape(body.echo))

    def _read_decisions(self, caller: Caller, key: str | None, content: bytes) -> Asked:
        body = read_decisions(content, self._config)
        policy = self._policy_of(caller, body.model)
        group = policy.settings.group and body.group_at(policy.settings.group, caller.label)
        return Asked(
            route=DECISIONS,
            content=content,
            caller_id=caller.id,
            key=key,
            policy=policy,
            questions=[query_of(body, question, new_id(), group) for question in body.questions],
            render=partial(decisions_reply, policy, body.questions),
        )

    def _read_chat(
        self, route: str, caller: Caller, key: str | None, content: bytes, chat: CompletionRequest, shape: ReplyShape
    ) -> Asked:
        policy = self._policy_of(caller, chat.model)
        settings = policy.settings
        chat = chat if settings.group != KEY_LABEL else replace(chat, label=caller.label)
        text = policy.pair.form == "text" and chat.menu is not None and chat.menu.field is not None
        menu = None if text else chat.menu  # in free text, a schema with one enum is a schema like any other
        group = settings.group and chat.group_at(settings.group)
        if menu is not None:
            questions = [Query(chat.messages, menu.actions, id=new_id(), group=group)]
        else:
            questions = [ChatRequest(chat.body, id=new_id(), group=group if settings.sticky is None else None)]
        whole = shape.streamed if chat.stream else shape.whole
        name = chat.body.get("user") if settings.session == "user" else chat.session
        return Asked(
            route=route,
            content=content,
            caller_id=caller.id,
            key=key,
            policy=policy,
            questions=questions,
            render=lambda outcomes: whole(policy, outcomes[0], menu),
            live=partial(shape.live, policy) if chat.stream and menu is None else None,
            streams=chat.stream,
            session=chat.session,
            conversation=name if settings.session is not None and isinstance(name, str) else None,
        )

    def _policy_of(self, caller: Caller, model: str) -> LivePolicy:
        """Return the policy that a request names, once its caller is known to be allowed to use it."""
        return self._policies.named(model, caller)


def is_continuable(record: DecisionRecord, policy: LivePolicy) -> bool:
    """Return whether another attempt may continue a decision: same version and mode, and its answer can be rebuilt.

    People may take longer than a version lasts. What they are asked about is continued under any, then without a guarantee.
    """
    body = record.decision
    same = body.version == policy.version and body.mode == policy.mode
    same = (same or policy.pair.review is not None) and body.form == policy.pair.form
    return same and (body.pending or (body.form == "menu" and body.action is not None))


async def all_settled(calls: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run calls concurrently, all to their end, then raise the first error: what the others decided is not lost."""
    if len(calls) == 1:
        return [await calls[0]]
    results: list[_Result] = []
    errors: list[BaseException] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            errors.append(result)
        else:
            results.append(result)
    if errors:
        raise errors[0]
    return results


async def _keep_pending(attempt: Attempt, place: int, outcome: Outcome) -> None:
    """Record a decision before any Guardian is asked, if neither a crash nor a retry may lose it."""
    lasting = attempt.claim is not None or outcome.audit is not None or outcome.session is not None
    if lasting and outcome.event.id not in attempt.recorded:
        await attempt.begin(place, outcome)


def _require_answers(policy: LivePolicy, outcomes: Sequence[Outcome]) -> None:
    """Refuse to answer if the Guardian failed; the records are kept nevertheless.

    Raises:
        GuardianError: the Guardian failed.
    """
    for outcome in outcomes:
        if outcome.decision.answer is None:
            passed_on = policy.pair.form == "text"  # on a menu, models are asked in a prompt of ours
            raise guardian_failure(outcome.decision.legs[-1], remedy_of(policy.pair), passed_on=passed_on)


def _finish_of(policy: LivePolicy, outcome: Outcome) -> str:
    return "stop" if policy.pair.form == "menu" else message_of_decision(outcome.decision, None)[1]


def _listed(audit: Audit | None) -> list[Audit]:
    return [] if audit is None else [audit]


def _response(attempt: Attempt) -> Response:
    """Return the response that an attempt ended with.

    Raises:
        RequestError: people have not decided in time.
    """
    reply = attempt.reply
    if reply is None:
        raise caller_left()
    saved = reply.response
    if saved.status != 200 and not reply.replayed:
        raise error_again(saved)
    headers = {**saved.headers, "x-arbitrage-replayed": "true"} if reply.replayed else saved.headers
    return Response(saved.body, status_code=saved.status, headers=dict(headers))


# --- An answer that is sent while it is written ---


class _LiveAnswer:
    """The Guardian's answer while it is being written.

    Nothing leaves before a visible word or a tool call: until then the Guardian may still fail and be replaced.

    Attributes:
        chunks: renders what is sent; None until the decision has been recorded.
    """

    def __init__(
        self, attempt: Attempt, events: EventStream, metrics: Metrics, render: Callable[[Outcome], LiveEvents]
    ) -> None:
        self.chunks: LiveEvents | None = None
        self._attempt = attempt
        self._events = events
        self._policy = attempt.asked.policy
        self._metrics = metrics
        self._render = render
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
        await self._attempt.open(replace(outcome.event, body=body), outcome.audit)
        self._metrics.decided(self._policy.name, [outcome])
        self._events.headers = {**reply_headers(self._policy, outcome), "x-arbitrage-cost": "unknown", **EVENT_STREAM}
        self.chunks = self._render(outcome)
        await self._put(self.chunks.first(outcome, self._held))

    async def _put(self, piece: bytes) -> None:
        if self._attempt.claim is not None:  # only a key's response is ever sent again
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
        await self._attempt.commit([decider.completion(self._policy, outcome, finish)], response=reply)
        await self._events.put(last)


def _is_answer(delta: Mapping[str, Any]) -> bool:
    """Return whether a delta holds an answer: visible text, or tool calls."""
    content, calls = delta.get("content"), delta.get("tool_calls")
    return (isinstance(content, str) and content.strip() != "") or (isinstance(calls, list) and calls != [])


# --- One reply per idempotency key ---


class Idempotency:
    """Gives each idempotency key one reply.

    Args:
        store: where keys and replies are kept.
        metrics: counts commits and replays.
        places: of requests that wait for another with the same key.
    """

    def __init__(self, store: Store, metrics: Metrics, places: WaitingPlaces) -> None:
        self._store = store
        self._places = places
        self._metrics = metrics
        self._renewing: dict[str, asyncio.Task[None]] = {}  # the claims of requests without a key, by owner

    @asynccontextmanager
    async def attempt(self, asked: Asked, receive: Receive | None = None) -> AsyncGenerator[Attempt]:
        """Attempt to answer a request; the body runs only while the caller waits, if there is one.

        If the attempt begins with a response, the key was used before and the body has nothing to do. A claim that another
        gateway takes over meanwhile ends it with that gateway's response.

        Args:
            asked: the request.
            receive: tells when the caller disconnects; None if nobody waits for the reply.

        Raises:
            RequestError: 422 if the key belongs to another body, 409 if its first request does not end, 499 if the caller
                left before the reply was complete, which is recorded.
            LostClaimError: another gateway took over after part of the answer was sent.
        """
        attempt = Attempt(asked, self._store, self._metrics)
        watching = None if receive is None else asyncio.create_task(_disconnected(receive))
        if watching is not None:
            watching.add_done_callback(attempt.leave)
        try:
            if asked.key is None:
                yield attempt
            else:
                async with self._claimed(attempt, asked.key):
                    yield attempt
        except asyncio.CancelledError:
            if not attempt.was_cancelled_by_caller():
                raise
            await self._record_departure(attempt)
            raise caller_left() from None
        finally:
            if watching is not None:
                watching.remove_done_callback(attempt.leave)
                watching.cancel()
            if asked.key is None and attempt.claim is not None:
                self._renewing.pop(attempt.claim.owner).cancel()
                if attempt.reply is None:
                    await asyncio.shield(self._store.run(claims.release, attempt.claim))

    async def hold(self, attempt: Attempt, name: str) -> Claim:
        """Return the claim of an attempt; one without a key gets a claim under a name, by which its caller can come back.

        Raises:
            RequestError: 409 if another attempt holds that name.
        """
        if attempt.claim is None:
            claimed = await self._try_claim(attempt.asked.caller_id, name, _sha256(attempt.asked))
            if not isinstance(claimed, Claim):
                raise _in_progress()
            attempt.claim = claimed
            self._renewing[claimed.owner] = asyncio.create_task(self._renew(claimed))
        return attempt.claim

    @asynccontextmanager
    async def _claimed(self, attempt: Attempt, key: str) -> AsyncGenerator[None]:
        """Hold a key's claim during an attempt, or find the response that was given before."""
        caller_id, sha256 = attempt.asked.caller_id, _sha256(attempt.asked)
        claimed = await self._claim(caller_id, key, sha256)
        if isinstance(claimed, SavedResponse):
            if claimed.status == GONE:
                raise RequestError("the reply under this Idempotency-Key was erased", status=GONE, code="erased")
            self._replay(attempt, claimed)
            yield
            return
        attempt.claim = claimed
        renewing = asyncio.create_task(self._renew(claimed))
        try:
            yield
        except LostClaimError:
            if isinstance(attempt.state, Sending):
                raise  # what was sent cannot be taken back
            self._replay(attempt, await self._taken_over(caller_id, key, sha256))
        finally:
            renewing.cancel()
            if attempt.reply is None:
                await asyncio.shield(self._store.run(claims.release, claimed))

    def _replay(self, attempt: Attempt, response: SavedResponse) -> None:
        attempt.state = Replied(response, replayed=True)
        self._metrics.replays.inc()

    async def _claim(self, caller_id: str, key: str, sha256: str) -> Claim | SavedResponse:
        """Wait for the claim, or for the response of whoever holds it."""
        if not 0 < len(key) <= 255 or not key.isprintable():
            raise RequestError("Idempotency-Key must have 1 to 255 printable characters", code="bad_idempotency_key")
        claimed = await self._try_claim(caller_id, key, sha256)
        if claimed == "under way":
            with self._places.held(caller_id) as patient:
                ends = time.monotonic() + (LONGEST_WAIT if patient else 0.0)
                while claimed == "under way" and time.monotonic() < ends:
                    await asyncio.sleep(0.05)
                    claimed = await self._try_claim(caller_id, key, sha256)
        if claimed == "under way":
            raise _in_progress()
        if claimed == "other body":
            raise RequestError(
                "this Idempotency-Key was used with another request", status=422, code="idempotency_key_reused",
                headers={"x-should-retry": "false"},
            )  # fmt: skip
        return claimed

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

    async def _record_departure(self, attempt: Attempt) -> None:
        """Record that the caller left before the answer, or in the middle of it."""
        if isinstance(attempt.state, Sending):
            await attempt.cut_off("cancelled")
            return
        if attempt.outcomes:
            return  # each has its own record
        asked, body = attempt.asked, DecisionBody(cancelled=True)
        event = Event(id=new_id(), body=body, policy=asked.policy.name, key_id=asked.caller_id, decided_by="cancelled")
        await self._store.run(stored_events.commit, [event])


async def _disconnected(receive: Receive) -> None:
    """Wait until the caller disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _sha256(asked: Asked) -> str:
    return sha256(asked.content).hexdigest()


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


# --- Requests that people decide ---


class ReviewedRequests:
    """The part of a request's road that leads past people.

    Args:
        store: holds the queue.
        queue: where callers wait.
        idempotency: gives a request without a key a name to come back under.
        decider: says what to record.
    """

    def __init__(self, store: Store, queue: ReviewQueue, idempotency: Idempotency, decider: Decider) -> None:
        self._store = store
        self._decider = decider
        self._queue = queue
        self._idempotency = idempotency
        self._claiming = asyncio.Lock()

    async def put(self, attempt: Attempt, place: int, terms: ReviewTerms, query: Query, outcome: Outcome) -> None:
        """Record a pending decision and put its question into the queue, in one transaction."""
        asked, policy = attempt.asked, attempt.asked.policy
        id, pending, size = outcome.event.id, outcome.decision, len(query.actions)
        async with self._claiming:  # several questions of one request share its claim
            claim = await self._idempotency.hold(attempt, f"review:{id}")
        attempt.reviewed = True
        rule = policy.rule
        if isinstance(rule, ConformalArbitrage) and policy.mode != "shadow":
            query = rule.menu(query, pending)
        whole = len(query.actions) == size  # then it is its own audit, whenever it is answered
        items = self._queue.items(
            terms,
            "decide",
            query,
            size=size,
            policy=policy.name,
            identities=policy.identities_sha256,
            drawn=outcome.audit is not None and whole,
            primary=next((leg.scores for leg in pending.legs if leg.role == "primary"), None),
        )
        waiting = ReviewRequest(
            key_id=claim.key_id, name=claim.name, policy=policy.name, route=asked.route, body=asked.content
        )
        work = ReviewWork(items=items, request=waiting, deadline=terms.settings.deadline)
        if id in attempt.recorded:
            await attempt.commit([], begun={place: id}, reviews=work)
            return
        audits = [] if outcome.audit is None else [replace(outcome.audit, ask=outcome.audit.ask and not whole)]
        await attempt.commit([outcome.event], audits=audits, begun={place: id}, reviews=work)
        attempt.recorded.add(id)

    async def commit_expired(self, attempt: Attempt) -> None:
        """Keep the reply to a request that people have not decided, and record that its decisions have no action."""
        policy, outcomes = attempt.asked.policy, attempt.outcomes.values()
        ends = [self._decider.completion(policy, outcome, "failed") for outcome in outcomes]
        news = [outcome.event.id for outcome in outcomes if outcome.audit is not None]
        new = [outcome for outcome in outcomes if outcome.event.id not in attempt.recorded]
        audits = [outcome.audit for outcome in new if outcome.audit is not None]
        events = [*(outcome.event for outcome in new), *ends]
        reply = saved_error(_expired(policy, list(outcomes)))
        await attempt.commit(events, audits=audits, response=reply, news=news, reviews=ENDED)

    async def waiting(self, attempt: Attempt, terms: ReviewTerms) -> Waiting:
        """Return what a caller is told until people have decided."""
        id = next(outcome.event.id for outcome in attempt.outcomes.values() if outcome.decision.answer is None)
        team = terms.name
        keyed = attempt.asked.key is not None
        [backlog] = await self._store.run(stored_reviews.backlogs, {team: self._queue.people()[team]})
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
        name = "" if attempt.claim is None else attempt.claim.name
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
        message = f"people are still deciding; {again}"
        return Waiting(RequestError(message, status=409, code=PENDING, headers=headers))

    async def withdraw(self, attempt: Attempt) -> None:
        """Withdraw the questions of a caller who left without a key to come back with."""
        if attempt.asked.key is None and attempt.claim is not None:
            await self._store.run(stored_reviews.withdraw_request, attempt.claim.key_id, attempt.claim.name)

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

    async def settle(self, outcome: Outcome, policy: LivePolicy, caller_id: str, name: str, version: int) -> None:
        """Let a session begin or go on with the first outcome of a turn, before anything is sent.

        Args:
            outcome: of the turn.
            policy: a sticky policy.
            caller_id: whose session it is.
            name: the session's name.
            version: of the policy when the session began.

        Raises:
            RequestError: 409 if another request has begun the session meanwhile.
        """
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
