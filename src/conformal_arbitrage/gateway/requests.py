"""The road of a request: claim, decide, render, commit, send; idempotency, sessions, replies while a review is pending."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from enum import Enum
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
    streamed_reply,
)
from conformal_arbitrage.gateway.decider import Decider, Outcome, still_unanswered
from conformal_arbitrage.gateway.http import DECISION_ID, Incoming, caller_left, error_document
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.policies import LivePolicy, PolicyTable, remedy_of
from conformal_arbitrage.gateway.responses_api import ResponseShape, read_response
from conformal_arbitrage.gateway.review_queue import (
    EXPIRED,
    HAS_PLACE,
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

DECIDING = DECISIONS, CHAT, RESPONSES = "/v1/decisions", "/v1/chat/completions", "/v1/responses"
LEASE = 6.0
LONGEST_WAIT = 120.0
ENDED = ReviewWork(ended=True)
_PACE_DAYS = 1 / 24
"""How many days of votes tell how long people take now."""
_SHORTEST_RETRY, _SOON, _LONGEST_RETRY = 1, 3, 30
"""Seconds after which a caller is told to come back: a quarter of the forecast, if there is one."""
_Result = TypeVar("_Result")


class ParsedRequest(Struct, frozen=True, kw_only=True):
    """A request as it was read, whether or not its caller waits for the reply.

    Attributes:
        route: the path that it was sent to.
        content: its body, from which any gateway can read it again.
        caller_id: whose key it came with.
        key: its idempotency key, if any.
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

    @property
    def content_sha256(self) -> str:
        """Digest of the body: a key belongs to one."""
        return sha256(self.content).hexdigest()

    def identity(self, place: int) -> tuple[object, ...]:
        """Return what a retry without a key is recognized by: a question with its caller and policy."""
        question, origin = self.questions[place], (self.caller_id, self.policy.name)
        if isinstance(question, Query):
            return (*origin, question.context, question.actions, question.group)
        if self.policy.settings.sticky is not None:
            return (*origin, question.body, self.session)
        return (*origin, question.body)


class Waiting(Struct, frozen=True):
    """A request that people have yet to decide, with what its caller is told meanwhile."""

    error: RequestError


class Replied(Struct, frozen=True):
    """A reply that is durable.

    Attributes:
        replayed: whether another attempt made it.
    """

    response: SavedResponse
    replayed: bool = False


class QuestionProgress(Struct, frozen=True):
    """How far an attempt has come with one question.

    Attributes:
        recorded: whether the decision is in the store already.
        reviewed: whether people are asked about it.
    """

    outcome: Outcome
    recorded: bool = False
    reviewed: bool = False


class AttemptState(Enum):
    """How far the reply of an attempt has come."""

    DECIDING = "nothing of the answer was sent, and nothing is durable that ends the attempt"
    SENDING = "the answer is being sent while it is written"
    CUT_OFF = "it is recorded that the answer which was being sent has no end"
    REPLIED = "the reply is durable"


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
        self._reviews = ReviewedRequests(store, queue, self._idempotency, decider)

    async def finish(self, request: ReviewRequest) -> None:
        """Finish a request that people have decided, and keep the reply for its caller, who does not wait here.

        Raises:
            RequestError: people have not decided all of it.
        """
        await self._reply(self._read(request.route, Caller(request.key_id, "call"), request.name, request.body))

    async def answer(self, route: str, incoming: Incoming) -> Response | EventStream:
        """Answer a request to one of the routes."""
        request = self._read(route, incoming.caller, incoming.idempotency_key, incoming.content)
        incoming.exchange.policy = request.policy.name
        if not request.streams:
            return _response(await self._reply(request, incoming.receive))
        reviewed = request.policy.pair.review is not None
        async with event_stream(incoming.send, request.policy.name, hold_headers=reviewed) as events:
            reply = await self._reply(request, incoming.receive, events)
            if reply.response.status != 200:
                raise error_again(reply.response)
            if reply.replayed:
                await events.replay(reply.response)
        return events

    async def _reply(
        self, request: ParsedRequest, receive: Receive | None = None, events: EventStream | None = None
    ) -> Replied:
        """Return the reply to a request; one that streams has been sent then, unless it was given before.

        Args:
            receive: tells when the caller disconnects; None if nobody waits for the reply.
            events: where a reply is sent that streams.
        """
        result = await self._idempotency.reply(request, partial(self._decide_and_send, events), receive)
        if isinstance(result, Waiting):
            raise result.error
        return result

    async def _decide_and_send(self, events: EventStream | None, attempt: "Attempt") -> Replied | Waiting:
        """Decide, commit and send; however that ends, every decision whose Primary answered is recorded.

        Otherwise rows whose Guardian failed, or was too slow for the caller, would be missing from an export, and those
        that remain would be selected by their scores.
        """
        finish = "failed"
        try:
            if events is not None and attempt.request.live is not None:
                result = await self._stream_text(attempt, attempt.request.live, events)
            else:
                result = await self._decide_all(attempt)
                if events is not None and isinstance(result, Replied):
                    await self._send(attempt, result.response, events)
        except QuotaError:
            finish = "limited"
            raise
        except asyncio.CancelledError:
            finish = "cancelled"
            raise
        except StoreError:
            finish = ""  # nothing can be recorded, or another gateway records it
            raise
        else:
            finish = "waiting"  # unless there is a reply, people have yet to decide
            return result
        finally:
            if finish and attempt.progress and attempt.state is not AttemptState.REPLIED:
                await self._end_undelivered(attempt, finish)

    async def _decide_all(self, attempt: "Attempt") -> Replied | Waiting:
        """Decide about every question of a request and commit the reply, unless people have yet to decide about one."""
        start = time.perf_counter()
        request, terms = attempt.request, attempt.request.policy.pair.review
        calls = [self._decide_one(attempt, place) for place in range(len(request.questions))]
        if terms is None:
            results = await all_settled(calls)
        else:
            with self._places.held(request.caller_id) as has_place:
                HAS_PLACE.set(has_place)
                results = await all_settled(calls)
        outcomes = [result for result in results if result is not None]
        if len(outcomes) < len(results) and terms is not None:
            return await self._reviews.waiting(attempt, terms)
        return await self._commit(attempt, outcomes, start)

    async def _decide_one(self, attempt: "Attempt", place: int) -> Outcome | None:
        """Decide about one question; None if people have yet to decide."""
        try:
            return await self._outcome(attempt, place)
        except StillDecidingError:
            return None

    async def _outcome(
        self, attempt: "Attempt", place: int, take: Callable[[Outcome, Chunk], Awaitable[None]] | None = None
    ) -> Outcome:
        """Decide about one question of a request, or continue what an earlier attempt decided.

        Each outcome is noted, and one that must not be lost is recorded before the next model is asked.

        Args:
            take: takes the Guardian's chunks as they come, with the outcome so far.
        """
        request, policy = attempt.request, attempt.request.policy
        question = request.questions[place]
        by_session = policy.settings.sticky is not None and isinstance(question, ChatRequest)
        conversation = await self._conversation(request) if by_session else None
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
        case = self._decider.begin(
            policy, question, request.caller_id, earlier, conversation=conversation,
            session=None if by_session else request.conversation, live=take is not None,
        )  # fmt: skip
        unsettled = request.session if by_session else None
        outcome: Outcome | None = None
        async with aclosing(case.steps):
            async for step in case.steps:
                if isinstance(step, Decision):
                    outcome = self._decider.outcome(case, step)
                    attempt.note(place, outcome, recorded=earlier is not None)
                    await self._keep(attempt, place, question)
                    if unsettled is not None:
                        version = policy.version if conversation is None else conversation.version
                        await self._settle(request, unsettled, outcome, version)
                        unsettled = None
                elif outcome is not None and take is not None:
                    await take(outcome, step)
        if outcome is None:
            raise AssertionError("a decision ends with its outcome")
        return outcome

    async def _earlier(self, attempt: "Attempt", place: int) -> DecisionRecord | None:
        """Return the decision that an earlier attempt at the same question began under the same version, if any.

        Raises:
            RequestError: it was begun under this idempotency key, and cannot be continued: a key has one decision.
        """
        request, id = attempt.request, None
        if attempt.claim is not None:
            id = attempt.claim.begun.get(place)
        elif self._store.has_undelivered:
            id = await self._store.run(claims.take_undelivered, self._decider.digest(request.identity(place)))
        record = None if id is None else await self._store.run(pages.intact_record, id)
        if record is None or is_continuable(record, request.policy):
            return record
        if attempt.claim is not None:
            raise begun_otherwise(request.policy.name)
        return None

    async def _keep(self, attempt: "Attempt", place: int, question: Query | ChatRequest) -> None:
        """Record a decision before the next model is asked, if neither a crash nor a retry may lose it.

        A question for people is put into their queue with it.
        """
        terms, progress = attempt.request.policy.pair.review, attempt.progress[place]
        outcome = progress.outcome
        if outcome.awaits_guardian:
            if terms is not None and isinstance(question, Query):
                await self._reviews.put(attempt, place, terms, question)
                return
            lasting = attempt.claim is not None or outcome.audit is not None or outcome.session is not None
        else:  # or the ledger would have the deferred questions of a request first
            lasting = len(attempt.request.questions) > 1 and outcome.audit is not None
        if lasting and not progress.recorded:
            await attempt.begin(place, outcome.audit)

    async def _stream_text(
        self, attempt: "Attempt", render: Callable[[Outcome], LiveEvents], events: EventStream
    ) -> Replied:
        """Pass on the Guardian's words as they come; any other answer is sent once it is complete."""
        start = time.perf_counter()
        live = _LiveAnswer(attempt, events, self._metrics, render)
        try:
            outcome = await self._outcome(attempt, 0, live.take)
            if live.chunks is not None:
                return await live.finish(outcome, self._decider)
            reply = await self._commit(attempt, [outcome], start)
            await self._send(attempt, reply.response, events)
        except (GuardianError, LostClaimError):
            await attempt.cut_off("failed")
            raise
        return reply

    async def _send(self, attempt: "Attempt", response: SavedResponse, events: EventStream) -> None:
        """Send a reply that was committed, in pieces; record it if the caller leaves before the last."""
        if response.status != 200:
            return
        events.headers = response.headers
        for piece in pieces_of(response):
            await events.put(piece)
            await asyncio.sleep(0)  # sending alone never waits, and a caller who left would go unnoticed
            if attempt.left:
                await attempt.note_cut_off("cancelled")
                return

    async def _commit(self, attempt: "Attempt", outcomes: Sequence[Outcome], start: float) -> Replied:
        """Render the reply and commit it with the decisions."""
        policy, reviewed = attempt.request.policy, attempt.is_reviewed
        if reviewed and any(outcome.decision.answer is None for outcome in outcomes):
            return await self._reviews.commit_expired(attempt)
        _require_answers(policy, outcomes)
        reply = Replied(attempt.request.render(outcomes))
        events: list[Event] = []
        audits: list[Audit] = []
        news: list[str] = []
        for place, outcome in enumerate(outcomes):
            if not attempt.progress[place].recorded:
                events.append(outcome.event)
                audits += _listed(outcome.audit)
                continue
            events.append(self._decider.completion(policy, outcome, _finish_of(policy, outcome)))
            if outcome.audit is not None and (outcome.known_legs or outcome.decision.decided_by == "fallback"):
                news.append(outcome.event.id)  # what was served is another answer than the ledger expects
                audits += [] if reviewed else _listed(still_unanswered(outcome.audit, outcome.decision))
        if reviewed:
            events = await self._reviews.with_facts(events)
        await attempt.commit(events, audits=audits, reply=reply, news=news, reviews=ENDED if reviewed else None)
        self._metrics.decided(policy.name, outcomes, time.perf_counter() - start)
        return reply

    async def _end_undelivered(self, attempt: "Attempt", finish: str) -> None:
        """Record how far each decision came, and keep those of which nothing was sent for another attempt."""
        if attempt.state is not AttemptState.DECIDING:
            await attempt.cut_off(finish)
            return
        if finish == "cancelled":
            await self._reviews.withdraw(attempt)
        policy, reviewed = attempt.request.policy, attempt.is_reviewed
        outcomes = {place: progress.outcome for place, progress in attempt.progress.items()}
        self._metrics.undelivered(policy.name, outcomes.values(), finish)
        events: list[Event] = []
        audits: list[Audit] = []
        for place, outcome in outcomes.items():
            audit = None if reviewed else still_unanswered(outcome.audit, outcome.decision)
            if attempt.progress[place].recorded:
                events += [] if finish == "waiting" else [self._decider.completion(policy, outcome, finish)]
            else:
                events += [outcome.event, Event(id=outcome.event.id, body=CompletionBody(finish=finish))]
                audit = audit or outcome.audit
            audits += _listed(audit)
        digests = {
            outcome.event.id: self._decider.digest(attempt.request.identity(place))
            for place, outcome in outcomes.items()
        }
        await attempt.end_undelivered(events, audits, digests)

    # The session of a request

    async def _conversation(self, request: ParsedRequest) -> Conversation | None:
        """Return the session that a request goes on with, unless it has not begun or is over."""
        if request.session is None:
            return None
        name = _digest(request.session)
        return await self._store.run(claims.find_conversation, request.caller_id, request.policy.name, name)

    async def _settle(self, request: ParsedRequest, name: str, outcome: Outcome, version: int) -> None:
        """Let a session begin or go on with the first outcome of a turn, before anything is sent.

        Args:
            name: the session's.
            version: of the policy when the session began.

        Raises:
            RequestError: 409 if another request has begun the session meanwhile.
        """
        session = outcome.session or str(outcome.decision.id)
        chosen = outcome.held or ("primary" if outcome.decision.decided_by == "primary" else "guardian")
        policy = request.policy
        conversation = Conversation(request.caller_id, policy.name, _digest(name), session, chosen, version)
        in_force = await self._store.run(claims.settle_conversation, conversation, idle=policy.settings.session_idle)
        if in_force.id != session:
            raise RequestError(
                "another request has begun this session meanwhile; send this turn again", status=409, code="session_begun",
                param="arbitrage.session", headers={"x-should-retry": "true"},
            )  # fmt: skip

    # From bytes to a request

    def _read(self, route: str, caller: Caller, key: str | None, content: bytes) -> ParsedRequest:
        """Read a request to one of the routes, whose caller must be allowed to use the policy that it names."""
        if route == DECISIONS:
            return self._read_decisions(caller, key, content)
        if route == CHAT:
            chat = read_completion(content, self._config)
            return self._read_chat(route, caller, key, content, chat, ChatShape(chat.include_usage))
        body = read_response(content, self._config)
        return self._read_chat(route, caller, key, content, body.chat, ResponseShape(body.echo))

    def _read_decisions(self, caller: Caller, key: str | None, content: bytes) -> ParsedRequest:
        body = read_decisions(content, self._config)
        policy = self._policies.named(body.model, caller)
        group = policy.settings.group and body.group_at(policy.settings.group, caller.label)
        return ParsedRequest(
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
    ) -> ParsedRequest:
        policy = self._policies.named(chat.model, caller)
        settings = policy.settings
        chat = chat if settings.group != KEY_LABEL else replace(chat, label=caller.label)
        text = policy.pair.form == "text" and chat.menu is not None and chat.menu.field is not None
        menu = None if text else chat.menu  # in free text, a schema with one enum is a schema like any other
        group = settings.group and chat.group_at(settings.group)
        if menu is not None:
            questions = [Query(chat.messages, menu.actions, id=new_id(), group=group)]
        else:
            questions = [ChatRequest(chat.body, id=new_id(), group=group if settings.sticky is None else None)]
        whole = partial(streamed_reply, shape) if chat.stream else shape.whole
        name = chat.body.get("user") if settings.session == "user" else chat.session
        return ParsedRequest(
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
            conversation=name if isinstance(name, str) else None,
        )


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


def _require_answers(policy: LivePolicy, outcomes: Sequence[Outcome]) -> None:
    """Refuse to answer if the Guardian failed; the records are kept nevertheless."""
    for outcome in outcomes:
        if outcome.decision.answer is None:
            passed_on = policy.pair.form == "text"  # on a menu, models are asked in a prompt of ours
            raise guardian_failure(outcome.decision.legs[-1], remedy_of(policy.pair), passed_on=passed_on)


def _finish_of(policy: LivePolicy, outcome: Outcome) -> str:
    return "stop" if policy.pair.form == "menu" else message_of_decision(outcome.decision, None)[1]


def _response(reply: Replied) -> Response:
    """Return the response to a request that does not stream."""
    saved = reply.response
    if saved.status != 200 and not reply.replayed:
        raise error_again(saved)
    headers = {**saved.headers, "x-arbitrage-replayed": "true"} if reply.replayed else saved.headers
    return Response(saved.body, status_code=saved.status, headers=dict(headers))


def other_session() -> RequestError:
    """Return the error for a key whose decision is not part of the session in force: a key has one decision."""
    return RequestError(
        "the session began otherwise, or ended, since this Idempotency-Key was first used; send the turn with a new key",
        status=409, code="session_begun", param="arbitrage.session", headers={"x-should-retry": "false"},
    )  # fmt: skip


def _digest(name: str) -> str:
    return sha256(name.encode(errors="surrogatepass")).hexdigest()


# --- One attempt to answer ---


class Attempt:
    """One attempt to answer a request: what was decided so far, and what of it is durable. Only its methods change it.

    A commit that has begun is never cancelled: if the caller leaves meanwhile, the decision stands. An answer under an
    idempotency key that is being sent is finished even if the caller leaves, so that the key has one reply.

    Attributes:
        claim: of its idempotency key; a request without one has a claim once people are asked.
        progress: how far each decision has come, by the place of its question.
        state: how far the reply has come.
        left: whether the caller has disconnected.
    """

    def __init__(self, request: ParsedRequest, store: Store, metrics: Metrics) -> None:
        self.request = request
        self.claim: Claim | None = None
        self.progress: dict[int, QuestionProgress] = {}
        self.state = AttemptState.DECIDING
        self.left = False
        self._store = store
        self._metrics = metrics
        self._task = asyncio.current_task()
        self._committing = 0

    @property
    def is_reviewed(self) -> bool:
        """Whether people are asked about a question."""
        return any(progress.reviewed for progress in self.progress.values())

    def note(self, place: int, outcome: Outcome, *, recorded: bool) -> None:
        """Note how far a decision has come; its first outcome may be of an earlier attempt that recorded it."""
        before = self.progress.get(place)
        self.progress[place] = (
            QuestionProgress(outcome, recorded) if before is None else replace(before, outcome=outcome)
        )

    def hold(self, claim: Claim) -> None:
        """Answer under a claim from now on."""
        self.claim = claim

    def replay(self, response: SavedResponse) -> Replied:
        """End with a reply that another attempt made."""
        self.state = AttemptState.REPLIED
        return Replied(response, replayed=True)

    async def commit(
        self,
        events: Sequence[Event],
        *,
        audits: Sequence[Audit] = (),
        reply: Replied | None = None,
        begun: Mapping[int, str] | None = None,
        news: Sequence[str] = (),
        reviews: ReviewWork | None = None,
    ) -> None:
        """Make events durable, with audits, with the reply that ends the attempt, and as news of these decisions.

        Raises:
            LostClaimError: another gateway took over the idempotency key; nothing was written.
        """
        start = time.perf_counter()
        self._committing += 1
        try:
            claim, response = self.claim, None if reply is None else reply.response
            await self._store.run(
                stored_events.commit, events, audits=audits, news=news, claim=claim, response=claim and response,
                begun=claim and begun, reviews=claim and reviews,
            )  # fmt: skip
            if reply is not None:
                self.state = AttemptState.REPLIED
        finally:
            self._committing -= 1
            if self.left:
                self._stop()
        self._metrics.commit.observe(time.perf_counter() - start)

    async def begin(self, place: int, audit: Audit | None, reviews: ReviewWork | None = None) -> None:
        """Make a pending decision durable before the Guardian is asked; one that is recorded needs only its reviews."""
        progress = replace(self.progress[place], reviewed=reviews is not None)
        self.progress[place] = progress
        event = progress.outcome.event
        new = [] if progress.recorded else [event]
        await self.commit(new, audits=_listed(audit) if new else (), begun={place: event.id}, reviews=reviews)
        self.progress[place] = replace(progress, recorded=True)

    async def open(self, event: Event, audit: Audit | None) -> None:
        """Make a decision durable whose answer is about to be sent; one that is recorded needs only its claim."""
        progress = self.progress[0]
        self.state = AttemptState.SENDING  # it stands even if the Guardian times out during the commit
        try:
            if not progress.recorded:
                await self.commit([event], audits=_listed(audit))
            elif self.claim is not None:
                await self.commit([])
        except StoreError:
            self.state = AttemptState.DECIDING
            raise
        self.progress[0] = replace(progress, recorded=True)

    async def end_undelivered(
        self, events: Sequence[Event], audits: Sequence[Audit], digests: Mapping[str, str]
    ) -> None:
        """Record decisions of which nothing was delivered, for another attempt to continue.

        Args:
            events: how far each came.
            audits: of those that are new.
            digests: of their questions by id, by which a retry without a key finds them.
        """
        claim, outcomes = self.claim, [progress.outcome for progress in self.progress.values()]
        begun = {place: progress.outcome.event.id for place, progress in self.progress.items()}
        await self._store.run(
            stored_events.commit, events, audits=audits, claim=claim, begun=claim and begun,
            news=[outcome.event.id for outcome in outcomes if outcome.audit is not None],
            undelivered=digests if claim is None or self.request.key is None else None,
        )  # fmt: skip
        # Known here at once: a retry may come before the store is next asked how it stands.
        self._store.has_undelivered = True

    async def cut_off(self, finish: str) -> None:
        """Record that the answer which is being sent has no end; it is not kept under the idempotency key."""
        if self.state is AttemptState.SENDING:
            self.state = AttemptState.CUT_OFF
            await self.note_cut_off(finish)

    async def note_cut_off(self, finish: str) -> None:
        """Record that the only answer of the request was not sent to its end."""
        outcome = self.progress[0].outcome
        await self._store.run(
            stored_events.commit,
            [Event(id=outcome.event.id, body=CompletionBody(finish=finish))],
            audits=_listed(still_unanswered(outcome.audit, outcome.decision)),
            news=[outcome.event.id],
        )

    @contextmanager
    def watching(self, receive: Receive | None) -> Generator[None]:
        """Cancel the attempt if its caller leaves; None if there is no caller who waits."""
        if receive is None:
            yield
            return
        watching = asyncio.create_task(_disconnected(receive))
        watching.add_done_callback(self._leave)
        try:
            yield
        finally:
            watching.remove_done_callback(self._leave)
            watching.cancel()

    def _leave(self, _: object) -> None:
        """Cancel the attempt because its caller has left; a commit finishes first, and after the last it is too late."""
        self.left = True
        self._stop()

    def _stop(self) -> None:
        """Cancel the attempt, unless it is being committed, is over, or is an answer that its key will be asked for."""
        kept = self.state is not AttemptState.DECIDING and (
            self.state is AttemptState.REPLIED or self.claim is not None
        )
        if self._task is not None and not self._committing and not kept:
            self._task.cancel()

    def was_cancelled_by_caller(self) -> bool:
        """Return whether the caller's leaving is the only reason for a cancellation."""
        return self.left and self._task is not None and self._task.uncancel() == 0


async def _disconnected(receive: Receive) -> None:
    """Wait until the caller disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _listed(audit: Audit | None) -> list[Audit]:
    return [] if audit is None else [audit]


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
        self._policy = attempt.request.policy
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

    async def finish(self, outcome: Outcome, decider: Decider) -> Replied:
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
        body = b"".join([*self._sent, last])
        reply = Replied(SavedResponse(status=200, headers=self._events.headers, body=body))
        await self._attempt.commit([decider.completion(self._policy, outcome, finish)], reply=reply)
        await self._events.put(last)
        return reply


def _is_answer(delta: Mapping[str, Any]) -> bool:
    """Return whether a delta holds an answer: visible text, or tool calls."""
    content, calls = delta.get("content"), delta.get("tool_calls")
    return (isinstance(content, str) and content.strip() != "") or (isinstance(calls, list) and calls != [])


# --- One reply per idempotency key ---


class Idempotency:
    """Gives each idempotency key one reply.

    Args:
        places: of requests that wait for another with the same key.
    """

    def __init__(self, store: Store, metrics: Metrics, places: WaitingPlaces) -> None:
        self._store = store
        self._places = places
        self._metrics = metrics
        self._renewing: dict[str, asyncio.Task[None]] = {}  # claims that are held, by owner

    async def reply(
        self, request: ParsedRequest, answer: Callable[[Attempt], Awaitable[Replied | Waiting]], receive: Receive | None
    ) -> Replied | Waiting:
        """Return the reply that was given under the request's key, else answer while its caller waits.

        Args:
            answer: makes the attempt.
            receive: tells when the caller disconnects; None if nobody waits for the reply.

        Raises:
            RequestError: 422 if the key belongs to another body, 409 if its first request does not end, 499 if the caller
                left before the reply was complete, which is recorded.
            LostClaimError: another gateway took over after part of the answer was sent.
        """
        attempt = Attempt(request, self._store, self._metrics)
        with attempt.watching(receive):
            try:
                return await self._claimed(attempt, answer)
            except asyncio.CancelledError:
                if not attempt.was_cancelled_by_caller():
                    raise
                if not attempt.progress:  # else each decision has its own record
                    await self._record_departure(request)
                raise caller_left() from None

    async def _claimed(
        self, attempt: Attempt, answer: Callable[[Attempt], Awaitable[Replied | Waiting]]
    ) -> Replied | Waiting:
        """Answer under a claim of the request's key, if there is one, or find what another attempt replied."""
        request = attempt.request
        try:
            if request.key is not None:
                claimed = await self._claim(request, request.key)
                if isinstance(claimed, SavedResponse):
                    return self._replay(attempt, claimed)
                self._hold(attempt, claimed)
            return await answer(attempt)
        except LostClaimError:
            if request.key is None or attempt.state in (AttemptState.SENDING, AttemptState.CUT_OFF):
                raise  # what was sent cannot be taken back
            return self._replay(attempt, await self._taken_over(request, request.key))
        finally:
            if attempt.claim is not None:
                self._renewing.pop(attempt.claim.owner).cancel()
                if attempt.state is not AttemptState.REPLIED:
                    await asyncio.shield(self._store.run(claims.release, attempt.claim))

    async def _record_departure(self, request: ParsedRequest) -> None:
        """Record that a caller left before any model had answered."""
        body = DecisionBody(cancelled=True)
        event = Event(
            id=new_id(), body=body, policy=request.policy.name, key_id=request.caller_id, decided_by="cancelled"
        )
        await self._store.run(stored_events.commit, [event])

    async def hold(self, attempt: Attempt, name: str) -> Claim:
        """Return the claim of an attempt; one without a key gets a claim under a name, by which its caller can come back.

        Raises:
            RequestError: 409 if another attempt holds that name.
        """
        if attempt.claim is not None:
            return attempt.claim
        claimed = await self._try_claim(attempt.request, name)
        if not isinstance(claimed, Claim):
            raise _in_progress()
        return self._hold(attempt, claimed)

    def _hold(self, attempt: Attempt, claim: Claim) -> Claim:
        attempt.hold(claim)
        self._renewing[claim.owner] = asyncio.create_task(self._renew(claim))
        return claim

    def _replay(self, attempt: Attempt, response: SavedResponse) -> Replied:
        if response.status == GONE:
            raise RequestError("the reply under this Idempotency-Key was erased", status=GONE, code="erased")
        self._metrics.replays.inc()
        return attempt.replay(response)

    async def _claim(self, request: ParsedRequest, key: str) -> Claim | SavedResponse:
        """Wait for the claim, or for the response of whoever holds it."""
        if not 0 < len(key) <= 255 or not key.isprintable():
            raise RequestError("Idempotency-Key must have 1 to 255 printable characters", code="bad_idempotency_key")
        claimed = await self._try_claim(request, key)
        if claimed == "under way":
            with self._places.held(request.caller_id) as has_place:
                ends = time.monotonic() + (LONGEST_WAIT if has_place else 0.0)
                while claimed == "under way" and time.monotonic() < ends:
                    await asyncio.sleep(0.05)
                    claimed = await self._try_claim(request, key)
        if claimed == "under way":
            raise _in_progress()
        if claimed == "other body":
            raise RequestError(
                "this Idempotency-Key was used with another request", status=422, code="idempotency_key_reused",
                headers={"x-should-retry": "false"},
            )  # fmt: skip
        return claimed

    async def _taken_over(self, request: ParsedRequest, key: str) -> SavedResponse:
        """Return the response of the gateway that took over a claim."""
        claimed = await self._claim(request, key)
        if isinstance(claimed, SavedResponse):
            return claimed
        await asyncio.shield(
            self._store.run(claims.release, claimed)
        )  # it failed too: let the caller's retry start over
        raise _in_progress()

    async def _try_claim(self, request: ParsedRequest, name: str) -> Claimed:
        """Ask for the claim; release one that is granted after the request was cancelled."""
        claim = self._store.run(claims.take, request.caller_id, name, request.content_sha256, lease=LEASE)
        claiming = asyncio.ensure_future(claim)
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

    async def put(self, attempt: Attempt, place: int, terms: ReviewTerms, query: Query) -> None:
        """Record a pending decision and put its question into the queue, in one transaction."""
        policy, outcome = attempt.request.policy, attempt.progress[place].outcome
        pending, size = outcome.decision, len(query.actions)
        async with self._claiming:  # several questions of one request share its claim
            claim = await self._idempotency.hold(attempt, f"review:{outcome.event.id}")
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
        request = ReviewRequest(
            key_id=claim.key_id, name=claim.name, policy=policy.name, route=attempt.request.route,
            body=attempt.request.content,
        )  # fmt: skip
        work = ReviewWork(items=items, request=request, deadline=terms.settings.deadline)
        audit = None if outcome.audit is None else replace(outcome.audit, ask=outcome.audit.ask and not whole)
        await attempt.begin(place, audit, work)

    async def commit_expired(self, attempt: Attempt) -> Replied:
        """Keep the reply to a request that people have not decided, and record that its decisions have no action."""
        policy, progress = attempt.request.policy, attempt.progress.values()
        outcomes = [entry.outcome for entry in progress]
        new = [entry.outcome for entry in progress if not entry.recorded]
        ends = [self._decider.completion(policy, outcome, "failed") for outcome in outcomes]
        reply = Replied(saved_error(_expired(policy, outcomes)))
        await attempt.commit(
            [*(outcome.event for outcome in new), *ends],
            audits=[outcome.audit for outcome in new if outcome.audit is not None],
            news=[outcome.event.id for outcome in outcomes if outcome.audit is not None],
            reply=reply,
            reviews=ENDED,
        )
        return reply

    async def waiting(self, attempt: Attempt, terms: ReviewTerms) -> Waiting:
        """Return what a caller is told until people have decided."""
        outcomes = [progress.outcome for progress in attempt.progress.values()]
        id = next(outcome.event.id for outcome in outcomes if outcome.decision.answer is None)
        team = terms.name
        keyed = attempt.request.key is not None
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
        if attempt.request.key is None and attempt.claim is not None:
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
