"""Requests that people decide: putting their questions into the queue, and what callers are told while and after they wait.

Knows nothing of votes or of how a reply is rendered.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from conformal_arbitrage.errors import ArbitrageError, GuardianError, RequestError
from conformal_arbitrage.gateway.auth import Caller
from conformal_arbitrage.gateway.decider import Decider, MenuStart, Outcome
from conformal_arbitrage.gateway.idempotency import Idempotency, Turn
from conformal_arbitrage.gateway.middleware import DECISION_ID, Incoming, error_document, incoming_again
from conformal_arbitrage.gateway.policy_table import LivePolicy, remedy_of
from conformal_arbitrage.gateway.reviewing import EXPIRED, PENDING, Desk
from conformal_arbitrage.live.policy import ConformalArbitrage
from conformal_arbitrage.live.reviews import ReviewTerms
from conformal_arbitrage.monitoring.reviewing import waiting_time
from conformal_arbitrage.store.base import SavedResponse, Store
from conformal_arbitrage.store.record import CompletionBody, Event
from conformal_arbitrage.store.review_base import ReviewRequest, ReviewWork

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

    async def put(self, turn: Turn, place: int, terms: ReviewTerms, start: MenuStart, request: Incoming) -> None:
        """Record a pending decision and put its question into the queue, in one transaction."""
        policy, outcome = start.case.policy, start.outcome
        id = outcome.event.id
        async with self._claiming:  # several questions of one request share its claim
            claim = await self._idempotency.hold(turn, request, f"review:{id}")
        turn.reviewed = True
        rule, query = policy.rule, start.query
        if isinstance(rule, ConformalArbitrage) and policy.mode != "shadow":
            query = rule.menu(query, start.pending)
        whole = len(query.actions) == len(start.query.actions)  # then it is its own audit, whenever it is answered
        items = self._desk.items(
            terms,
            "decide",
            query,
            size=len(start.query.actions),
            policy=policy.name,
            identities=policy.identities_sha256,
            drawn=outcome.audit is not None and whole,
            primary=next((leg.scores for leg in start.pending.legs if leg.role == "primary"), None),
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
        [backlog] = await self._store.team_backlogs({team: self._desk.people()[team]})
        votes = [vote.held for vote in await self._store.cast_votes(days=_PACE_DAYS) if vote.team == team and vote.held]
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
            await self._store.withdraw_request(turn.claim.key_id, turn.claim.name)

    async def with_facts(self, events: Sequence[Event]) -> list[Event]:
        """Return events in which the completions of decisions by people say how they voted."""
        outcomes = await self._store.review_outcomes({event.id for event in events})
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
