"""Answers whose tool calls wait for a person: holding them back, and what is given out in the end.

The decision stands as it was made, and its record, its audit and its loss are about that. People decide afterwards whether
its calls leave the gateway: as they are, with other arguments, or not at all.

Knows nothing of votes, pages or how an answer is made.
"""

from collections.abc import AsyncGenerator, Mapping

from msgspec.structs import replace

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.chat_replies import message_of_decision
from conformal_arbitrage.gateway.chat_requests import CompletionRequest
from conformal_arbitrage.gateway.decider import Decider, Outcome
from conformal_arbitrage.gateway.idempotency import Idempotency, Turn
from conformal_arbitrage.gateway.middleware import Incoming
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.gateway.review_turns import ReviewTurns
from conformal_arbitrage.gateway.reviewing import Desk
from conformal_arbitrage.gateway.tool_calls import OPTIONS, call_question, given_answer, names_of, verdict_of
from conformal_arbitrage.store.base import Audit, Store
from conformal_arbitrage.store.record import CallReview, DecisionBody, DecisionRecord, Event
from conformal_arbitrage.store.review_base import HeldAnswer, NewReview, ReviewQuestion, ReviewRequest, ReviewWork
from conformal_arbitrage.types import Chunk
from conformal_arbitrage.upstream.base import fingerprint

_PROTOCOL = fingerprint({"kind": "human", "page": "tool calls 1", "options": OPTIONS})
"""A digest of how people are asked."""


class CallTurns:
    """The part of a request's road on which tool calls wait for a person.

    Args:
        store: holds the queue.
        desk: where callers wait.
        idempotency: gives a request without a key a name to come back under.
        decider: says what to record.
        reviews: says what callers are told while they wait.
    """

    def __init__(
        self, store: Store, desk: Desk, idempotency: Idempotency, decider: Decider, reviews: ReviewTurns
    ) -> None:
        self._store = store
        self._desk = desk
        self._idempotency = idempotency
        self._decider = decider
        self._reviews = reviews

    async def reviewed(
        self, turn: Turn, policy: LivePolicy, outcome: Outcome, chat: CompletionRequest, request: Incoming
    ) -> Outcome:
        """Hold an answer back until people have decided about its tool calls; return what is given out.

        Raises:
            RequestError: 409 if nobody has decided yet, and the caller is to come back.
        """
        answer, patterns = outcome.decision.answer, policy.settings.review.tool_calls
        if outcome.ending is not None or not isinstance(answer, Mapping):
            return outcome
        question = call_question(chat.messages, answer, chat.body.get("tools"), patterns)
        if question is None:
            return outcome
        known = outcome.event.id in turn.recorded
        event = self._decider.completion(policy, outcome, "waiting") if known else outcome.event
        audits = [] if known or outcome.audit is None else [outcome.audit]
        await self._put(turn, policy, outcome, question, request, [event], audits)
        return await self._ended(turn, policy, outcome)

    async def kept(self, policy: LivePolicy, record: DecisionRecord) -> Outcome | None:
        """Return a decision of an earlier attempt whose answer is held back; None if it is not."""
        held = await self._store.held_answer(record.id) if self._desk.teams else None
        answer = None if held is None else held.question.answer
        return None if answer is None else self._decider.kept(policy, record, answer)

    async def resumed(
        self, turn: Turn, policy: LivePolicy, outcome: Outcome, request: Incoming
    ) -> AsyncGenerator[Outcome | Chunk]:
        """Wait for people again who are looking at the tool calls of an earlier attempt; yield what is given out.

        Raises:
            RequestError: 409 if nobody has decided yet, and the caller is to come back.
        """
        held = await self._store.held_answer(outcome.event.id)
        if held is not None and held.outcome.state == "withdrawn":
            await self._put(turn, policy, outcome, held.question, request, [], [])
        else:
            await self._idempotency.hold(turn, request, f"review:{outcome.event.id}")
            turn.reviewed = True
        turn.outcomes[0] = outcome
        yield await self._ended(turn, policy, outcome)

    async def _put(
        self, turn: Turn, policy: LivePolicy, outcome: Outcome, question: ReviewQuestion, request: Incoming,
        events: list[Event], audits: list[Audit],
    ) -> None:  # fmt: skip
        """Record a decision and put its tool calls into the queue, in one transaction."""
        id, settings, team = outcome.event.id, policy.settings.review, self._team(policy)
        claim = await self._idempotency.hold(turn, request, f"review:{id}")
        turn.reviewed = True
        item = NewReview(
            decision=id,
            purpose="call",
            policy=policy.name,
            team=team,
            question=question,
            protocol=_PROTOCOL,
            identities_sha256=policy.identities_sha256,
            escalates=bool(self._desk.teams[team].leads),
            due=settings.wait / 2,
            deadline=settings.deadline,
            lease=settings.lease,
            undo=settings.undo,
        )
        waiting = ReviewRequest(
            key_id=claim.key_id,
            name=claim.name,
            policy=policy.name,
            route=str(request.scope["path"]),
            body=request.content,
        )
        work = ReviewWork(items=[item], request=waiting, deadline=settings.deadline)
        await turn.commit(events, audits=audits, begun={0: id}, reviews=work)
        turn.recorded.add(id)

    async def _ended(self, turn: Turn, policy: LivePolicy, outcome: Outcome) -> Outcome:
        """Wait for people; return the outcome with what is given out."""
        id, settings, team = outcome.event.id, policy.settings.review, self._team(policy)
        late = settings.late == "fallback"
        wait = 0.0 if late and not await self._desk.someone_is_there(team) else settings.wait
        state = (await self._desk.outcome(id, wait=wait)).state
        held = await self._store.held_answer(id)
        if held is None:
            raise RequestError("the answer that people were looking at was erased", status=410, code="erased")
        if state == "open" and not late:
            raise await self._reviews.pending(turn, id, team)
        return self._given(policy, outcome, held)

    def _given(self, policy: LivePolicy, outcome: Outcome, held: HeldAnswer) -> Outcome:
        decision = outcome.decision
        answer, reason = given_answer(held)
        legs = tuple(replace(leg, reply=None) for leg in decision.legs)  # a reply tells how the first answer ended
        given = replace(decision, answer=answer, legs=legs, no_guarantee=decision.no_guarantee or reason)
        recorded = outcome.event.body.no_guarantee if isinstance(outcome.event.body, DecisionBody) else None
        review = CallReview(
            verdict=verdict_of(held),
            names=names_of(held.question.calls),
            no_guarantee=reason or (None if recorded == given.no_guarantee else given.no_guarantee),
            facts=held.outcome.facts,
        )
        return self._decider.reviewed(policy, outcome, given, message_of_decision(given, None)[1], review)

    def _team(self, policy: LivePolicy) -> str:
        return policy.settings.review.team or next(iter(self._desk.teams))
