"""Streams: chunks leave once their decision is recorded; the Guardian's leave as it writes them.

Knows nothing of callers, limits or how decisions are made.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from conformal_arbitrage.errors import GuardianError, LostClaimError, StoreError
from conformal_arbitrage.gateway import chat_replies as replies
from conformal_arbitrage.gateway.decider import Made
from conformal_arbitrage.gateway.idempotency import Replayed, Turn
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.store.base import Event, Replay
from conformal_arbitrage.types import Sink
from conformal_arbitrage.upstream.sse import delta_of

PATIENCE = 10.0
HEADERS = {"content-type": "text/event-stream"}
_WAITING = b": waiting for the decision\n\n"

Deciding = asyncio.Future[Replayed | None]


class Outlet:
    """The chunks of one reply, between whoever makes them and whoever sends them."""

    def __init__(self) -> None:
        self.headers: Mapping[str, str] = HEADERS
        self.pieces: list[bytes] = []
        self._more: asyncio.Future[None] | None = None

    def put(self, piece: bytes) -> None:
        """Hand a piece over."""
        self.pieces.append(piece)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def news(self, deciding: Deciding, sent: int) -> bool:
        """Wait for more than was sent, or the end; False if neither comes while patience lasts."""
        if len(self.pieces) == sent and not deciding.done():
            self._more = asyncio.get_running_loop().create_future()
            await asyncio.wait({deciding, self._more}, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        return len(self.pieces) > sent or deciding.done()


async def live_pieces(outlet: Outlet, deciding: Deciding, *, waited: bool) -> AsyncGenerator[bytes]:
    """What the outlet gets, until the reply is whole; comments keep the connection alive while nothing comes.

    Args:
        outlet: where pieces come from.
        deciding: ends when no more will come.
        waited: patience has been lost once already.
    """
    sent = 0
    while len(outlet.pieces) > sent or not deciding.done():
        if waited:
            yield _WAITING
        for piece in outlet.pieces[sent:]:
            yield piece
            sent += 1
        waited = not await outlet.news(deciding, sent)


class LiveAnswer:
    """The Guardian's answer as it comes: its decision is recorded before its first word leaves, its end before its last.

    Args:
        policy: whose decision.
        turn: what commits.
        outlet: where chunks go.
        include_usage: whether the caller wants a chunk with the tokens.
        metrics: counts the decision and its legs.
    """

    def __init__(
        self, policy: LivePolicy, turn: Turn, outlet: Outlet, metrics: Metrics, *, include_usage: bool
    ) -> None:
        self._policy = policy
        self._turn = turn
        self._outlet = outlet
        self._metrics = metrics
        self._include_usage = include_usage
        self._made: Made | None = None
        self._held: list[dict[str, Any]] = []
        self._chunks: replies.Chunks | None = None

    @property
    def started(self) -> bool:
        """Whether its decision was recorded, or is being."""
        return self._turn.begun is not None

    def begin(self, made: Made) -> Sink:
        """The Guardian is to answer; what takes its chunks."""
        self._made = made
        return self._take

    async def _take(self, chunk: Mapping[str, Any]) -> None:
        delta = {name: value for name, value in delta_of(chunk).items() if name != "role"}
        if self._chunks is not None:
            self._put(self._chunks, delta)
            return
        self._held.append(delta)
        if _is_answer(delta):
            await self._start()

    def _put(self, chunks: "replies.Chunks", delta: Mapping[str, Any]) -> None:
        if delta:
            self._outlet.put(chunks.delta(delta))

    async def _start(self) -> None:
        """Record the decision, then let what was held go out."""
        made, policy = self._made, self._policy
        if made is None:
            raise AssertionError("begin() comes first")
        decision = made.decision
        self._metrics.decided(policy.name, decision, audited=made.audit is not None)
        audits = [] if made.audit is None else [made.audit]
        self._turn.begun = str(decision.id)  # it stands even if the Guardian's time is up during the commit
        try:
            await self._turn.commit([made.event], audits=audits)
        except StoreError:
            self._turn.begun = None
            raise
        unpriced = {**replies.headers(decision, policy.alpha), "x-arbitrage-cost": "unknown"}
        self._outlet.headers = {**unpriced, **HEADERS}
        self._chunks = replies.Chunks(str(decision.id), policy.name, include_usage=self._include_usage)
        self._outlet.put(self._chunks.first(self._seen(made)))
        for delta in self._held:
            self._put(self._chunks, delta)

    def _seen(self, made: Made) -> dict[str, Any]:
        full = self._policy.settings.expose == "full"
        return replies.arbitrage_object(made.decision, alpha=self._policy.alpha, full=full)

    async def finish(self, made: Made, completion: Event) -> Replay:
        """Record how it ended, then let the last chunks go.

        Raises:
            GuardianError: the Guardian failed after its first word.
            LostClaimError: another gateway took over the idempotency key.
        """
        leg = made.decision.legs[-1]
        self._metrics.leg(self._policy.name, leg)
        if leg.error is not None or self._chunks is None:
            await self.broken()
            raise GuardianError(f"the Guardian failed in the middle of its answer: {leg.error}")
        _, finish = replies.said(made.decision, None)
        last = self._chunks.last(finish, self._seen(made), replies.usage(made.decision.spent))
        reply = Replay(status=200, headers=self._outlet.headers, body=b"".join([*self._outlet.pieces, last]))
        try:
            await self._turn.commit([completion], reply=reply)
        except LostClaimError:  # whoever took over has another answer
            await self.broken()
            raise
        self._outlet.put(last)
        return reply

    async def broken(self) -> None:
        """Record that an answer which had begun has no end; it is not kept under the idempotency key."""
        if self._turn.begun is not None:
            self._turn.claim = None
            await self._turn.commit([Event(id=self._turn.begun, kind="completion", body={"finish": "failed"})])


def _is_answer(delta: Mapping[str, Any]) -> bool:
    """Whether a reply that holds this has an answer: visible text, or tool calls."""
    content, calls = delta.get("content"), delta.get("tool_calls")
    return (isinstance(content, str) and content.strip() != "") or (isinstance(calls, list) and calls != [])
