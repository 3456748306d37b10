"""The routes that decide. A request takes one road: claim, decide, render, commit, send.

The reply is rendered before the commit because it is stored with the decision, in one transaction, under the request's
idempotency key; nothing is sent before the commit. A live stream commits twice: its decision before the first word, its
end before the last.

Knows nothing of keys, limits or how models are asked.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from conformal_arbitrage.errors import GuardianError, LostClaimError, RequestError
from conformal_arbitrage.gateway.chat_replies import (
    EVENT_STREAM,
    Chunks,
    completion_reply,
    decisions_reply,
    reply_headers,
    stream_reply,
)
from conformal_arbitrage.gateway.chat_requests import CompletionRequest, Menu, query_of, read_completion, read_decisions
from conformal_arbitrage.gateway.decider import Decider, Outcome
from conformal_arbitrage.gateway.idempotency import Idempotency, Turn
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.middleware import Incoming
from conformal_arbitrage.gateway.policy_table import LivePolicy, PolicyTable
from conformal_arbitrage.gateway.streaming import EventStream, event_stream, pieces_of
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.live.policy import guardian_failure
from conformal_arbitrage.store.base import SavedResponse, Store
from conformal_arbitrage.store.ids import new_id
from conformal_arbitrage.types import ChatRequest, Chunk, Query
from conformal_arbitrage.upstream.base import together
from conformal_arbitrage.upstream.sse import delta_of


class DecisionRoutes:
    """POST /v1/decisions and /v1/chat/completions."""

    def __init__(
        self, config: GatewayConfig, store: Store, policies: PolicyTable, decider: Decider, metrics: Metrics
    ) -> None:
        self._config = config
        self._store = store
        self._policies = policies
        self._decider = decider
        self._metrics = metrics
        self._idempotency = Idempotency(store, metrics)

    async def decisions(self, request: Incoming) -> Response:
        """Answer POST /v1/decisions."""
        body = read_decisions(request.content, self._config)
        policy = self._policies.named(body.model)
        async with self._idempotency.turn(request, policy.name) as turn:
            if turn.response is None:
                start = time.perf_counter()
                queries = [query_of(body, question, new_id()) for question in body.questions]
                outcomes = await together([self._decider.menu(policy, q, request.caller.id) for q in queries])
                await self._require_answers(outcomes)
                reply = decisions_reply(policy, body.questions, outcomes)
                await self._commit(turn, policy, outcomes, reply, start)
        return _response(turn)

    async def completions(self, request: Incoming) -> Response | EventStream:
        """Answer POST /v1/chat/completions."""
        chat = read_completion(request.content, self._config)
        policy = self._policies.named(chat.model)
        text = policy.pair.form == "text" and chat.menu is not None and chat.menu.field is not None
        menu = None if text else chat.menu  # in free text, a schema with one enum is a schema like any other
        if chat.stream:
            async with event_stream(request.send) as events:
                await self._stream(request, chat, policy, menu, events)
            return events
        async with self._idempotency.turn(request, policy.name) as turn:
            if turn.response is None:
                start = time.perf_counter()
                outcome = await self._decide(policy, chat, menu, request.caller.id)
                await self._require_answers([outcome])
                reply = completion_reply(policy, outcome, menu)
                await self._commit(turn, policy, [outcome], reply, start)
        return _response(turn)

    async def _stream(
        self, request: Incoming, chat: CompletionRequest, policy: LivePolicy, menu: Menu | None, events: EventStream
    ) -> None:
        async with self._idempotency.turn(request, policy.name) as turn:
            if turn.response is not None:
                pass
            elif menu is None:
                await self._stream_text(turn, events, policy, chat, request.caller.id)
            else:
                start = time.perf_counter()
                outcome = await self._decide(policy, chat, menu, request.caller.id)
                await self._send_whole(turn, events, policy, chat, outcome, menu, start)
        if turn.replayed and turn.response is not None:
            await events.replay(turn.response)

    async def _decide(self, policy: LivePolicy, chat: CompletionRequest, menu: Menu | None, caller_id: str) -> Outcome:
        id = new_id()
        if menu is None:
            return await self._decider.text(policy, ChatRequest(chat.body, id=id), caller_id)
        return await self._decider.menu(policy, Query(chat.messages, menu.actions, id=id), caller_id, chat.body)

    async def _stream_text(
        self, turn: Turn, events: EventStream, policy: LivePolicy, chat: CompletionRequest, caller_id: str
    ) -> None:
        """Pass on the Guardian's words as they come; any other answer is sent once it is complete."""
        start = time.perf_counter()
        live = _LiveAnswer(turn, events, policy, self._metrics, include_usage=chat.include_usage)
        outcome: Outcome | None = None
        try:
            async with aclosing(self._decider.stream(policy, ChatRequest(chat.body, id=new_id()), caller_id)) as steps:
                async for step in steps:
                    if isinstance(step, Outcome):
                        outcome = step
                    elif outcome is not None:
                        await live.take(outcome, step)
            if outcome is None:
                raise AssertionError("a stream ends with its outcome")
            if live.chunks is None:
                await self._send_whole(turn, events, policy, chat, outcome, None, start)
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
        chat: CompletionRequest,
        outcome: Outcome,
        menu: Menu | None,
        start: float,
    ) -> None:
        """Commit a finished answer and send it in pieces; record it if the caller leaves before the last."""
        await self._require_answers([outcome])
        reply = stream_reply(policy, outcome, menu, include_usage=chat.include_usage)
        await self._commit(turn, policy, [outcome], reply, start)
        turn.opened = str(outcome.decision.id)
        events.headers = reply.headers
        for piece in pieces_of(reply):
            await events.put(piece)
            await asyncio.sleep(0)  # sending alone never waits, and a caller who left would go unnoticed
            if turn.left:
                await turn.end_early("cancelled")
                return

    async def _require_answers(self, outcomes: Sequence[Outcome]) -> None:
        """Refuse to answer in shadow mode if the Guardian failed; its record, without a choice, is kept.

        Raises:
            GuardianError: the Guardian failed.
        """
        failed = [outcome for outcome in outcomes if outcome.decision.action is None]
        if failed:
            await self._store.commit([outcome.event for outcome in outcomes])
            raise guardian_failure(failed[0].decision.legs[-1])

    async def _commit(
        self, turn: Turn, policy: LivePolicy, outcomes: Sequence[Outcome], reply: SavedResponse, start: float
    ) -> None:
        audits = [outcome.audit for outcome in outcomes if outcome.audit is not None]
        await turn.commit([outcome.event for outcome in outcomes], audits=audits, response=reply)
        self._metrics.decided(policy.name, outcomes, time.perf_counter() - start)


class _LiveAnswer:
    """The Guardian's answer while it is being written.

    Nothing leaves before a visible word or a tool call: until then the Guardian may still fail and be replaced.

    Attributes:
        chunks: renders what is sent; None until the decision has been recorded.
    """

    def __init__(
        self, turn: Turn, events: EventStream, policy: LivePolicy, metrics: Metrics, *, include_usage: bool
    ) -> None:
        self.chunks: Chunks | None = None
        self._turn = turn
        self._events = events
        self._policy = policy
        self._metrics = metrics
        self._include_usage = include_usage
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
        await self._turn.open(outcome.event, [] if outcome.audit is None else [outcome.audit])
        self._metrics.decided(self._policy.name, [outcome])
        self._events.headers = {**reply_headers(self._policy, outcome), "x-arbitrage-cost": "unknown", **EVENT_STREAM}
        self.chunks = Chunks(self._policy, outcome, include_usage=self._include_usage)
        await self._put(self.chunks.first(outcome, self._held))

    async def _put(self, piece: bytes) -> None:
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
