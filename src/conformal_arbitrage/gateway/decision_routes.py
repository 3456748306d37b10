"""The routes that decide. A request takes one road: claim, decide, render, commit, send.

The reply is rendered before the commit because it is stored with the decision, in one transaction, under the request's
idempotency key; nothing is sent before the commit. A live stream commits twice: its decision before the first word, its
end before the last.

Knows nothing of keys, limits or how models are asked.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from msgspec.structs import replace
from starlette.responses import Response

from conformal_arbitrage.errors import GuardianError, LostClaimError, QuotaError, RequestError, StoreError
from conformal_arbitrage.gateway.attempts import all_settled, end_undelivered, is_continuable
from conformal_arbitrage.gateway.audit_rows import still_unanswered
from conformal_arbitrage.gateway.chat_replies import (
    EVENT_STREAM,
    ChatShape,
    LiveEvents,
    ReplyShape,
    decisions_reply,
    message_of_decision,
    reply_headers,
)
from conformal_arbitrage.gateway.chat_requests import CompletionRequest, Menu, query_of, read_completion, read_decisions
from conformal_arbitrage.gateway.decider import Decider, Outcome
from conformal_arbitrage.gateway.idempotency import Idempotency, Turn, begun_otherwise
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.middleware import POLICY, Incoming
from conformal_arbitrage.gateway.policy_table import LivePolicy, PolicyTable, remedy_of
from conformal_arbitrage.gateway.responses_replies import ResponseShape
from conformal_arbitrage.gateway.responses_requests import read_response
from conformal_arbitrage.gateway.review_turns import ENDED, ReviewTurns, error_again, request_again
from conformal_arbitrage.gateway.reviewing import Desk
from conformal_arbitrage.gateway.sessions import Sessions, other_session
from conformal_arbitrage.gateway.shadow import cancelled
from conformal_arbitrage.gateway.streaming import EventStream, event_stream, pieces_of
from conformal_arbitrage.live.config import KEY_LABEL, GatewayConfig
from conformal_arbitrage.live.policy import guardian_failure
from conformal_arbitrage.store.base import Audit, SavedResponse, Store
from conformal_arbitrage.store.ids import new_id
from conformal_arbitrage.store.record import DecisionBody, DecisionRecord, Event
from conformal_arbitrage.store.review_base import ReviewRequest
from conformal_arbitrage.types import ChatRequest, Chunk, Query
from conformal_arbitrage.upstream.sse import delta_of


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
        steps = self._decider.text(policy, chat_request, caller, earlier, session=_session(chat), live=live)
        return self._noted(turn, 0, steps)

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
        options: dict[str, Any] = {"conversation": conversation, "live": live}
        steps = self._noted(turn, 0, self._decider.text(policy, chat_request, caller, earlier, **options))
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
        start = await self._decider.begin_menu(policy, query, caller, earlier, session)
        outcome = turn.outcomes[place] = start.outcome
        decided = outcome.decision.answer is not None
        if decided and (outcome.audit is None or not turn.several):
            return outcome
        try:
            if policy.pair.review is None or decided:
                await _keep_pending(turn, place, outcome)  # or the ledger would have the deferred of a request first
            else:
                await self._reviews.put(turn, place, policy.pair.review, start, request)
            if not decided:
                outcome = turn.outcomes[place] = await self._decider.complete_menu(start)
        finally:
            if start.asking is not None:
                await cancelled(start.asking)
        return outcome

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
            id = await self._store.take_undelivered(self._decider.digest(question))
        record = None if id is None else await self._store.record(id)
        if record is None or not is_continuable(record, policy):
            if record is not None and turn.claim is not None:
                raise begun_otherwise(policy.name)
            return None
        turn.recorded.add(record.id)
        return record

    async def _noted(
        self, turn: Turn, place: int, steps: AsyncGenerator[Outcome | Chunk]
    ) -> AsyncGenerator[Outcome | Chunk]:
        """Pass steps on, noting each outcome; a pending one that must not be lost is recorded first."""
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, Outcome):
                    turn.outcomes[place] = step
                    if step.decision.answer is None:
                        await _keep_pending(turn, place, step)
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
