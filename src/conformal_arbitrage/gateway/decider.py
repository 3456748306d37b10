"""Decider: run a policy's rule for a request, with shadow mode, held turns and shared limits on the Guardian."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from hashlib import blake2b
from math import ceil, floor
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.secret import draw, subkey
from conformal_arbitrage.errors import QuotaError, RequestError, StoreError
from conformal_arbitrage.gateway.policies import (
    LivePolicy,
    MenuPair,
    TextPair,
    WatchedPolicy,
    all_answered,
    all_scored,
    chain_answers,
    identities_of_pair,
)
from conformal_arbitrage.gateway.review_queue import ReviewQueue
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.live.rule import (
    CascadeChooser,
    CascadeRouter,
    ConformalArbitrage,
    ConformalRouter,
    answered,
    margin_of,
    scored,
    sighted,
    with_answer,
    with_choice,
)
from conformal_arbitrage.live.service import DECIDERS
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.completions import SETTINGS, overridden, unlogged_fields
from conformal_arbitrage.models.port import IN_BACKGROUND, Answer
from conformal_arbitrage.models.rendering import unseen, unseen_by
from conformal_arbitrage.monitoring.outcomes import decision_loss, due_days, is_counted, session_slot
from conformal_arbitrage.store import claims
from conformal_arbitrage.store.claims import Conversation, Reservation, Shortage
from conformal_arbitrage.store.ledger import NewRow
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import (
    AuditQuestion,
    CompletionBody,
    Content,
    DecisionBody,
    DecisionRecord,
    Event,
    MenuQuestion,
    TextQuestion,
    time_of,
)
from conformal_arbitrage.store.reviews import NewReview
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY, ChatRequest, Chunk, Decision, Failure, Leg, Query, Spent

_log = logging.getLogger("conformal_arbitrage.gateway")
_UNITS_PER_DOLLAR = 10**12
SETTLEMENT_WAIT = 5.0
"""Seconds that a live call waits for others in flight to turn out cheaper than they could have been."""
_POLL = 0.2
_sorted = msgspec.json.Encoder(order="sorted")
_lenient = msgspec.json.Encoder(order="sorted", enc_hook=str)
_Reply = TypeVar("_Reply")


class Outcome(Struct, frozen=True, kw_only=True):
    """A decision, the event that records it, and the audit it was drawn for, if any.

    Attributes:
        decision: pending, without an answer, until the Guardian has given its own, or if it failed.
        event: what is recorded unless an earlier event recorded the decision.
        audit: what is queued with that event.
        awaits_guardian: whether the Guardian has neither answered nor failed yet.
        known_legs: how many of the legs belong to an earlier attempt.
        session: id of the session, under a policy that decides by session.
        held: the model that the session's first turn chose, if this is a later turn.
    """

    decision: Decision
    event: Event
    audit: Audit | None
    awaits_guardian: bool
    known_legs: int = 0
    session: str | None = None
    held: str | None = None


class Case(Struct, frozen=True, kw_only=True):
    """A question that is being decided.

    Attributes:
        caller_id: whose call it is.
        question: what is recorded of it for an audit.
        overridden: why a request has no guarantee that overrides a pinned setting, or whose key is excluded; else None.
        steps: the decision so far, after each model that was asked, with the Guardian's chunks before the last if they come
            live; the last has no answer if the Guardian failed.
        earlier: the record of an earlier attempt.
        conversation: the session that a sticky policy goes on with.
        session: the caller's name for the conversation, under any other.
        group: what the request names; of another attempt, what the first one named.
    """

    policy: LivePolicy
    caller_id: str
    question: AuditQuestion
    overridden: str | None
    steps: AsyncGenerator[Decision] | AsyncGenerator[Decision | Chunk]
    earlier: DecisionRecord | None
    conversation: Conversation | None
    session: str | None
    group: str | None


class Decider:
    """Decides under a policy and says what to record.

    Args:
        secret: the project's; the keys of content digests and of the audit coin are derived from it.
        queue: where people are asked about what the coin draws; None where models answer.
    """

    def __init__(self, secret: bytes, queue: ReviewQueue | None = None) -> None:
        self._queue = queue
        self._audit_key, self._digest_key = subkey(secret, "audit v1"), subkey(secret, "digest v1")

    def begin(
        self,
        policy: LivePolicy,
        question: Query | ChatRequest,
        caller_id: str,
        earlier: DecisionRecord | None = None,
        *,
        conversation: Conversation | None = None,
        session: str | None = None,
        live: bool = False,
    ) -> Case:
        """Begin to choose from a menu, or to answer in free text or with tool calls; whoever takes the steps closes them.

        Args:
            question: the question with its menu, or the chat request.
            caller_id: whose call it is.
            earlier: the record of an earlier attempt, which is continued: its Primary is not asked again.
            conversation: the session that the request goes on with, if it is not its first turn.
            session: the caller's name for the conversation, if it has one.
            live: pass on the Guardian's words as they come; in shadow mode they never do.

        Raises:
            RequestError: the policy has the other form, a model would not be shown all of the question, or the request
                overrides a pinned setting.
        """
        overridden = _check_question(policy, question)
        if caller_id in policy.excluded:
            overridden = f"its API key is excluded from the promise of policy {policy.name}"
        if earlier is None:
            steps = self._rule_steps(policy, question, None, conversation, live=live)
        else:
            actions = question.actions if isinstance(question, Query) else ()
            pending = _under_version(_continued(earlier, actions), earlier, policy)
            steps = _steps_from(pending, self._rule_steps(policy, question, pending, conversation, live=live))
        return Case(
            policy=policy,
            caller_id=caller_id,
            question=_audit_question(question),
            overridden=overridden,
            steps=steps,
            earlier=earlier,
            conversation=conversation,
            session=session,
            group=question.group if earlier is None else earlier.decision.group,
        )

    def _rule_steps(
        self,
        policy: LivePolicy,
        question: Query | ChatRequest,
        pending: Decision | None,
        conversation: Conversation | None,
        *,
        live: bool,
    ) -> AsyncGenerator[Decision] | AsyncGenerator[Decision | Chunk]:
        """Return the steps of the rule in force; in shadow mode, those of the Guardian beside it."""
        rule = None if policy.mode == "shadow" else policy.rule
        if isinstance(question, Query):
            if isinstance(rule, ConformalArbitrage | CascadeChooser):
                return rule.steps(question, pending)
            return shadow_menu(policy, _menu_pair(policy), question, pending)
        if isinstance(rule, ConformalRouter) and conversation is not None and policy.mode != "safe":
            return self._held(policy, rule, question, conversation, pending, live=live)
        if isinstance(rule, ConformalRouter | CascadeRouter):
            return rule.steps(question, pending, live=live)
        return shadow_text(policy, _text_pair(policy), question, pending)

    def _held(
        self,
        policy: LivePolicy,
        rule: ConformalRouter,
        request: ChatRequest,
        conversation: Conversation,
        pending: Decision | None,
        *,
        live: bool,
    ) -> AsyncGenerator[Decision | Chunk]:
        """Return the steps of a later turn of a session."""
        reason = rule.no_guarantee or rule.other_settings(request)
        if conversation.version != policy.version:
            reason = reason or f"the session began under version {conversation.version} of the policy"
        audited = self._drawn(conversation.id, policy.settings.audit_rate)
        return held_turn(rule, request, conversation, pending, audited=audited, live=live, no_guarantee=reason)

    def completion(self, policy: LivePolicy, outcome: Outcome, finish: str) -> Event:
        """Return the event that says how an attempt to answer ended whose decision was recorded earlier."""
        decision = outcome.decision
        pending = decision.answer is None
        replaced = decision.decided_by == "fallback"
        last = decision.legs[-1] if decision.legs and not outcome.awaits_guardian else None
        chained = bool(policy.pair.models) and last is not None
        before = decision.legs[:-1] if chained else ()
        body = CompletionBody(
            finish=finish,
            leg=None if last is None else recorded_leg(last, policy),
            before=tuple([recorded_leg(leg, policy) for leg in before]),
            action=None if pending else decision.action,
            decided_by=decision.decided_by if replaced or chained else None,
            no_guarantee=decision.no_guarantee if replaced or policy.pair.review is not None else None,
            cost=None if last is None else decision.spent.cost,
            content=None if pending else self._kept(policy, Content(answer=decision.answer)),
        )
        return Event(id=str(decision.id), body=body)

    def outcome(self, case: Case, decision: Decision) -> Outcome:
        """Put a decision together with its event, and with an audit if the coin says so."""
        policy, conversation, earlier = case.policy, case.conversation, case.earlier
        if case.overridden is not None and decision.no_guarantee is None:
            decision = replace(decision, no_guarantee=case.overridden)
        id, legs = str(decision.id), decision.legs
        session = None
        if policy.settings.sticky is not None:
            session = id if conversation is None else conversation.id
        if earlier is not None:
            audited = earlier.decision.audited  # in whatever mode, and at whatever rate, it goes on
        else:
            covered = case.caller_id not in policy.excluded
            audited = covered and policy.mode == "enforce" and self._drawn(session or id, policy.settings.audit_rate)
        named = None if case.session is None else self._digest([case.caller_id, case.session])
        audit = self._audit(case, decision, named) if audited else None
        body = self._body(case, decision, audited=audited, audit=audit, session=session, named=named)
        return Outcome(
            decision=decision,
            event=Event(id=id, body=body, policy=policy.name, key_id=case.caller_id, decided_by=decision.decided_by),
            audit=audit,
            awaits_guardian=decision.answer is None and (not legs or legs[-1].role == "primary"),
            known_legs=0 if earlier is None else len(_known_legs(earlier)),
            session=session,
            held=None if conversation is None else conversation.decided_by,
        )

    def _body(
        self,
        case: Case,
        decision: Decision,
        *,
        audited: bool,
        audit: Audit | None,
        session: str | None,
        named: str | None,
    ) -> DecisionBody:
        """Return what is recorded of a decision."""
        policy, question, pending = case.policy, case.question, decision.answer is None
        row = None if audit is None else audit.row
        safe, enforced = policy.mode == "safe", policy.mode == "enforce"
        return DecisionBody(
            action=None if pending else decision.action,
            candidates=rule_candidates(policy.certificate, decision, case.group) if safe else decision.candidates,
            margin=None if decision.margin == float("inf") else decision.margin,
            relaxation=decision.relaxation,
            no_guarantee=decision.no_guarantee,
            legs=tuple([leg if leg.reply is leg.error is None else recorded_leg(leg, policy) for leg in decision.legs]),
            cost=decision.spent.cost,
            alpha=policy.alpha,
            version=policy.version,
            mode=policy.mode,
            form=policy.pair.form,
            content=self._kept(policy, _content(question, decision)),
            identities_sha256=policy.identities_sha256,
            size=len(question.actions) if isinstance(question, MenuQuestion) else 2,
            overridden=case.overridden is not None,  # settings or a key that the certificate does not cover
            audited=audited,
            pending=pending,
            session=session,
            named=named,
            ledger=None if row is None else (row.key.lifts, row.key.group),
            guarded=policy.guarded if enforced else None,
            held=case.conversation is not None and enforced,
            learned=decision.learned,
            group=case.group,
        )

    def _audit(self, case: Case, decision: Decision, named: str | None) -> Audit:
        """Return the audit of a decision that the coin drew, in a session with this digest."""
        policy, id = case.policy, str(decision.id)
        items = self._items(policy, case.question, decision)
        if policy.watched is None:
            identities = policy.identities_sha256
            return Audit(id=id, policy=policy.name, question=case.question, identities_sha256=identities, items=items)
        session = None if policy.settings.session is None else named
        overridden = case.overridden is not None
        audit = drawn_audit(
            policy.watched, decision, case.question, overridden=overridden, session=session, group=case.group
        )
        return replace(audit, items=items)

    def _items(self, policy: LivePolicy, question: AuditQuestion, decision: Decision) -> Sequence[NewReview]:
        """Return what people are asked of a decision that the coin drew; nothing where models answer."""
        terms = policy.pair.review
        if self._queue is None or terms is None or not isinstance(question, MenuQuestion):
            return ()
        query = Query(question.context, question.actions, id=decision.id, ordered=question.ordered)
        return self._queue.items(
            terms, "audit", query, size=len(question.actions), policy=policy.name,
            identities=policy.identities_sha256, drawn=True,
            primary=next((leg.scores for leg in decision.legs if leg.role == "primary"), None),
        )  # fmt: skip

    def _drawn(self, id: str, rate: float) -> bool:
        """Toss the audit coin; it depends on the id and the secret only, so not on any score."""
        return rate > 0 and draw(self._audit_key, id) < rate

    def _kept(self, policy: LivePolicy, content: Content) -> Content | None:
        if policy.settings.content == "full":
            return content
        if policy.settings.content == "off":
            return None
        return Content(**{name: self._digest(value) for name, value in asdict(content).items() if value is not None})

    def digest(self, question: object) -> str:
        """Return a keyed digest of a question with its caller and policy, by which a retry without a key is recognized."""
        return blake2b(_lenient.encode(question), key=self._digest_key, digest_size=32).hexdigest()

    def _digest(self, value: object) -> str:
        return "blake2b-256:" + blake2b(_sorted.encode(value), key=self._digest_key, digest_size=32).hexdigest()


def still_unanswered(audit: Audit | None, decision: Decision) -> Audit | None:
    """Return the audit of a drawn decision whose Guardian has not answered, for it to be asked later; None for any other.

    The loss is known without; as a row for calibration the decision needs the Guardian's view.
    """
    answered = any(leg.role == "guardian" and leg.error is None for leg in decision.legs)
    if audit is None or decision.decided_by == "primary" or answered:
        return None
    return replace(audit, ask=True)


def recorded_leg(leg: Leg, policy: LivePolicy) -> Leg:
    """Return a leg as it is recorded: without its reply, and without an endpoint's words unless content is kept in full."""
    return replace(leg, reply=None, error=recorded_error(leg.error, policy))


def recorded_error(failure: Failure | None, policy: LivePolicy) -> Failure | None:
    """Return why a model failed: its kind and HTTP status, and the whole text if content is kept in full."""
    if failure is None:
        return None
    kept = replace(failure, said="", code="")
    return kept if policy.settings.content == "full" else replace(kept, message="")


def _check_question(policy: LivePolicy, question: Query | ChatRequest) -> str | None:
    """Check a question against its policy; return why it has no guarantee if it overrides a pinned setting."""
    if isinstance(question, ChatRequest):
        _text_pair(policy)
        return _overridden(policy, question.body)
    pair = _menu_pair(policy)
    if not isinstance(question.context, str):
        _require_seen(pair, question)
    return None


def _audit_question(question: Query | ChatRequest) -> AuditQuestion:
    if isinstance(question, ChatRequest):
        return TextQuestion(request=question.body)
    return MenuQuestion(context=question.context, actions=question.actions, ordered=question.ordered)


async def _steps_from(
    pending: Decision, further: AsyncGenerator[Decision] | AsyncGenerator[Decision | Chunk]
) -> AsyncGenerator[Decision | Chunk]:
    """Yield what an earlier attempt came to and, if that has no answer, the further steps."""
    yield pending
    if pending.answer is None:
        async with aclosing(further):
            async for step in further:
                yield step


def _require_seen(pair: MenuPair, query: Query) -> None:
    """Refuse a question of which either model would not be shown everything."""
    if unseen(query, pictures=False) is None:
        return  # text alone, which every model is shown: identities need not be put together
    for role, identity in identities_of_pair(pair).items():
        lost = unseen_by(identity, query)
        if lost is not None:
            raise RequestError(
                f"the {role.capitalize()} would not be shown {lost!r:.60}; leave it out or, if that is a picture and the "
                f"model takes pictures, set pictures = true in [{role}], then collect and calibrate again",
                status=422, param="messages", code="unsupported_content",
            )  # fmt: skip


def _menu_pair(policy: LivePolicy) -> MenuPair:
    if not isinstance(policy.pair, MenuPair):
        raise RequestError(f"policy {policy.name} answers in free text, not from menus", status=422, code="wrong_form")
    return policy.pair


def _text_pair(policy: LivePolicy) -> TextPair:
    if not isinstance(policy.pair, TextPair):
        raise RequestError(
            f"policy {policy.name} chooses from menus: give arbitrage.actions, or a response_format (or a single tool "
            "that must be called) whose schema has one enum or boolean, and otherwise nothing but free text",
            status=422,
            code="wrong_form",
        )
    return policy.pair


def _overridden(policy: LivePolicy, body: Mapping[str, Any]) -> str | None:
    """Return why a request has no guarantee that overrides a pinned setting of either model."""
    differing = {} if SETTINGS.keys().isdisjoint(body) else overridden(body, identities_of_pair(policy.pair))
    if policy.settings.strict:
        _require_calibrated(policy, body, differing)
    return f"the request overrides {', '.join(differing)}" if differing else None


def _require_calibrated(policy: LivePolicy, body: Mapping[str, Any], differing: Mapping[str, str]) -> None:
    """Refuse a request whose settings, tools or schemas leave it without a guarantee."""
    for name, remedies in differing.items():
        raise RequestError(remedies, status=422, code="pinned_setting", param=name)
    if isinstance(policy.rule, ConformalRouter | CascadeRouter):
        for field in unlogged_fields(body, policy.rule.certificate.identities):
            raise RequestError(
                f"no request of the calibration log had {field}, and policy {policy.name} is strict; leave it as it was "
                "logged, or collect and calibrate with such requests",
                status=422, code="unlogged_setting", param=field.removeprefix("no ").partition(" ")[0],
            )  # fmt: skip


def _content(question: AuditQuestion, decision: Decision) -> Content:
    if isinstance(question, MenuQuestion):
        return Content(context=question.context, actions=question.actions, answer=decision.answer)
    said, chained = _primary_answer(decision), len(decision.legs) > 1 and decision.legs[1].role == "primary"
    every = chain_answers(decision) if chained else None
    return Content(request=question.request, primary_answer=said, answer=decision.answer, chain_answers=every)


def _primary_answer(decision: Decision) -> str | None:
    """Return what the Primary said if the Guardian's answer was given: both have to be graded."""
    reply = decision.legs[0].reply if decision.legs and decision.legs[0].role == "primary" else None
    return None if decision.decided_by == "primary" or reply is None else answer_text(reply["choices"][0]["message"])


def drawn_audit(
    watched: WatchedPolicy,
    decision: Decision,
    question: AuditQuestion,
    *,
    overridden: bool,
    session: str | None,
    group: str | None = None,
) -> Audit:
    """Return the audit of a decision that the coin drew in mode enforce, with its row of the ledger.

    Args:
        watched: the policy's ledger.
        decision: as far as it has come with the Primary's leg.
        question: what to ask the Guardian, unless the loss is known without.
        overridden: the request changed a pinned setting: it belongs in no ledger.
        session: a keyed digest of the request's session; None if it names none.
        group: what the request names; None if it names none.
    """
    id, key = str(decision.id), watched.key_of(group)
    menu = isinstance(question, MenuQuestion)
    audited = watched.facts.audited(
        decided_by=decision.decided_by, form="menu" if menu else "text", size=len(question.actions) if menu else 2,
        candidates=decision.candidates, action=decision.action,
    )  # fmt: skip
    loss = decision_loss(audited, loss_bound=watched.facts.loss_bound)
    primary_leg = any(leg.role == "primary" for leg in decision.legs)
    row = None
    if key is not None and is_counted(drawn=True, primary_leg=primary_leg, mode="enforce", overridden=overridden):
        drawn = time_of(id)
        row = NewRow(
            key=key,
            drawn=drawn,
            due=drawn + DAY * due_days(audited, human_guardian=watched.by_people),
            loss=loss,
            slot=None if session is None else session_slot(session, drawn),
        )
    return Audit(
        id=id,
        policy=watched.key.policy,
        question=question,
        ask=loss is None,
        identities_sha256=watched.key.identities_sha256,
        row=row,
    )


def rule_candidates(certificate: Certificate | None, decision: Decision, group: str | None) -> tuple[int, ...]:
    """Return what a certificate's rule makes of the Primary's scores, where safe mode defers everything."""
    scores = next((leg.scores for leg in decision.legs if leg.role == "primary"), None)
    if certificate is None or scores is None:
        return decision.candidates
    row = (0.0, *scores) if certificate.evidence.router else scores
    return tuple(certificate.sight(row, id=decision.id, group=group)[0])


# --- A decision that an earlier attempt began ---


def _known_legs(earlier: DecisionRecord) -> tuple[Leg, ...]:
    """Return the legs that another attempt keeps: all of a decision that was made, the Primary's of a pending one."""
    legs = earlier.decision.legs
    return tuple(leg for leg in legs if leg.role == "primary") if earlier.decision.pending else legs


def _under_version(decision: Decision, earlier: DecisionRecord, policy: LivePolicy) -> Decision:
    """Return a decision of an earlier attempt under what is in force: without a guarantee if that is something else."""
    if (earlier.decision.version, earlier.decision.mode) == (policy.version, policy.mode):
        return decision
    what = "safe mode" if policy.mode == "safe" else "another version of the policy"
    reason = decision.no_guarantee or f"{what} came into force while people decided"
    return replace(decision, no_guarantee=reason)


def _continued(earlier: DecisionRecord, actions: Sequence[str]) -> Decision:
    """Return the decision of an earlier attempt that delivered nothing: pending, or made if its answer is known."""
    body, legs = earlier.decision, _known_legs(earlier)
    action = body.action if not body.pending else 0 if body.form == "text" else None
    return Decision(
        id=earlier.id,
        action=action,
        answer=None if body.pending or action is None else actions[action],
        candidates=body.candidates,
        decided_by=DECIDERS.get(earlier.decided_by, "guardian"),
        margin=float("inf") if body.margin is None else body.margin,
        relaxation=body.relaxation,
        legs=legs,
        spent=sum((leg.spent for leg in legs), start=Spent()),
        no_guarantee=body.no_guarantee,
        learned=body.learned,
    )


# --- Shadow mode ---


async def shadow_menu(
    policy: LivePolicy, pair: MenuPair, query: Query, pending: Decision | None
) -> AsyncGenerator[Decision]:
    """Ask both models; the Guardian's choice is the answer, and the Primary's scores are recorded."""
    async with _asking(scored("guardian", pair.guardian, query)) as asking:
        if pending is None:
            first, *further = await all_scored(pair.models or {"primary": pair.primary}, query)
            pending = _shadowed(policy, query, first.scores or (None,) * len(query.actions), first, *further)
            yield pending
        yield with_choice(pending, query, await asking, pair.fallback)


async def shadow_text(
    policy: LivePolicy, pair: TextPair, request: ChatRequest, pending: Decision | None
) -> AsyncGenerator[Decision]:
    """Ask both models; the Guardian's answer is given, and the Primary's recorded."""
    async with _asking(answered("guardian", pair.guardian, request)) as asking:
        if pending is None:
            (first, answer), *others = await all_answered(pair.models or {"primary": pair.primary}, request)
            confidence = 0.0 if answer is None or answer.confidence is None else answer.confidence
            legs = (first, *(leg for leg, _ in others))
            pending = _shadowed(policy, request, (0.0, confidence), *legs, answer=answer)
            yield pending
        decision = with_answer(pending, await asking, pair.fallback)
        yield decision if decision.answer is None else replace(decision, action=0)


@asynccontextmanager
async def _asking(call: Coroutine[Any, Any, _Reply]) -> AsyncGenerator["asyncio.Task[_Reply]"]:
    """Run a call beside the block; one that is not awaited to its end is cancelled."""
    task = asyncio.create_task(call)
    try:
        yield task
    finally:
        await cancel(task)


async def cancel(task: "asyncio.Task[Any]") -> None:
    """Cancel a call, and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _shadowed(
    policy: LivePolicy,
    question: Query | ChatRequest,
    scores: tuple[float | None, ...],
    *legs: Leg,
    answer: Answer | None = None,
) -> Decision:
    """Return the Guardian's decision, pending, beside what the rule makes of the Primary's scores or answer."""
    certificate = policy.certificate
    if certificate is None:
        candidates, margin, relaxation, use = list(range(len(scores))), margin_of(scores, 12), None, None
    else:
        candidates, margin, relaxation, use, _ = sighted(certificate, scores, question, legs[0].spent, answer)
    return Decision(
        id=question.id,
        action=None,
        candidates=tuple(candidates),
        decided_by="guardian",
        margin=margin,
        relaxation=relaxation,
        legs=legs,
        spent=sum((leg.spent for leg in legs), start=Spent()),
        no_guarantee="there is no certificate yet; the Guardian decides" if policy.alpha is None else None,
        learned=use,
    )


# --- Later turns of a session ---


async def held_turn(
    rule: ConformalRouter,
    request: ChatRequest,
    conversation: Conversation,
    pending: Decision | None,
    *,
    audited: bool,
    live: bool,
    no_guarantee: str | None,
) -> AsyncGenerator[Decision | Chunk]:
    """Yield the decision of a later turn as `ConformalRouter.steps` does.

    Args:
        pending: what an earlier attempt at this turn came to.
        audited: whether the session was drawn for an audit.
        live: yield the Guardian's chunks as they arrive.
        no_guarantee: why the session has no guarantee.
    """
    if pending is None:
        pending = await _begun(rule, request, conversation, audited=audited, no_guarantee=no_guarantee)
        yield pending
    async with aclosing(rule.steps(request, pending, live=live)) as steps:
        async for step in steps:
            yield step


async def _begun(
    rule: ConformalRouter, request: ChatRequest, conversation: Conversation, *, audited: bool, no_guarantee: str | None
) -> Decision:
    """Return the Primary's decision, or the one that the Guardian has to complete."""
    keeps = conversation.decided_by == "primary"
    leg, answer = await answered("primary", rule.primary, request) if keeps or audited else (None, None)
    stands = answer.message if keeps and answer is not None else None
    return Decision(
        id=request.id,
        action=0 if stands is None else 1,
        candidates=(1,) if keeps else (0,),
        decided_by="guardian" if stands is None else "primary",
        margin=float("inf"),
        relaxation=rule.certificate.relaxation,
        answer=stands,
        legs=() if leg is None else (leg,),
        spent=Spent() if leg is None else leg.spent,
        no_guarantee=no_guarantee,
    )


# --- What the Guardian may use, over all callers and all gateways of one database ---


class GuardianCalls:
    """The most questions to the Guardian in any minute.

    Args:
        live_share: the share that audits leave.
    """

    def __init__(self, store: Store, limit: int, *, live_share: float) -> None:
        self._store = store
        self._limits = {False: limit, True: floor(limit * (1 - live_share))}

    async def start(self) -> None:
        """Count one question.

        Raises:
            QuotaError: the quota is used up.
        """
        limit = self._limits[IN_BACKGROUND.get()]
        outcome = await self._store.run(claims.reserve, "guardian_calls", 1, limit=limit, seconds=60.0, settled=True)
        if isinstance(outcome, Shortage):
            wait = 60.0 if outcome.wait is None else outcome.wait
            raise QuotaError("the Guardian's limit on calls is reached", retry_after=wait)


class GuardianSpending:
    """The most dollars for the Guardian in any hour.

    Args:
        live_share: the share that audits leave.
    """

    setting = "guardian_cost_per_hour"

    def __init__(self, store: Store, limit: float, *, live_share: float) -> None:
        self._store = store
        units = limit * _UNITS_PER_DOLLAR
        self._limits = {False: round(units), True: floor(units * (1 - live_share))}
        self._turn = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settling: set[asyncio.Task[None]] = set()

    async def reserve(self, worst: float) -> Reservation:
        """Reserve the largest possible cost of a call; a live call waits a while for others to be settled.

        Raises:
            QuotaError: there is not enough left.
        """
        units = ceil(worst * _UNITS_PER_DOLLAR)
        outcome = await self._try(units)
        if isinstance(outcome, Shortage) and outcome.in_flight and not IN_BACKGROUND.get():
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLEMENT_WAIT), self._turn:  # one call at a time asks again
                    while isinstance(outcome := await self._try(units), Shortage) and outcome.in_flight:
                        await self._next_settlement()
        if isinstance(outcome, Reservation):
            return outcome
        raise _refusal(outcome)

    async def _try(self, units: int) -> Reservation | Shortage:
        limit = self._limits[IN_BACKGROUND.get()]
        return await self._store.run(claims.reserve, "guardian_cost", units, limit=limit, seconds=3600.0)

    async def _next_settlement(self) -> None:
        """Wait until a call of this gateway is settled, or for a moment, since another gateway's may be."""
        self._settled.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL * random.uniform(1, 2)):
                await self._settled.wait()

    def settle(self, reservation: Reservation, cost: float | None) -> None:
        """Replace a reservation by the actual cost, or keep it in full if that is unknown."""
        units = reservation.amount if cost is None else ceil(cost * _UNITS_PER_DOLLAR)
        task = asyncio.create_task(self._settle(reservation, units))  # also if this call was cancelled
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, reservation: Reservation, units: int) -> None:
        try:
            await self._store.run(claims.settle, reservation, units)
        except StoreError as error:
            _log.error("the cost of a Guardian call could not be stored, so its reservation stays: %s", error)
        self._settled.set()

    async def close(self) -> None:
        """Wait until all calls are settled."""
        await asyncio.gather(*self._settling)


def _refusal(shortage: Shortage) -> QuotaError:
    if shortage.wait is None:
        message = "this call could cost more than guardian_cost_per_hour allows in all; raise that, or lower max_tokens"
        return QuotaError(message, retry_after=3600.0)
    return QuotaError(
        "the Guardian's limit on cost is reached", retry_after=1.0 if shortage.in_flight else shortage.wait
    )


def calls_limit(store: Store, config: GatewayConfig) -> GuardianCalls | None:
    """Return the configured limit on calls, if there is one."""
    limit = config.guardian_calls_per_minute
    return None if limit is None else GuardianCalls(store, limit, live_share=config.live_share)


def spending_limit(store: Store, config: GatewayConfig) -> GuardianSpending | None:
    """Return the configured limit on cost, if there is one."""
    limit = config.guardian_cost_per_hour
    return None if limit is None else GuardianSpending(store, limit, live_share=config.live_share)
