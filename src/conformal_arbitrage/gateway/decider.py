"""From a checked request to a decision and its record: modes, the audit coin, and how much content is kept.

Knows nothing of HTTP.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from conformal_arbitrage.calibration.draws import draw
from conformal_arbitrage.calibration.project_secret import subkey
from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.audit_rows import drawn_audit, rule_candidates
from conformal_arbitrage.gateway.cascades import chain_answers
from conformal_arbitrage.gateway.held_turns import held_turn
from conformal_arbitrage.gateway.policy_table import LivePolicy, MenuPair, TextPair, identities_of_pair
from conformal_arbitrage.gateway.shadow import concluded, shadow_menu, shadow_text
from conformal_arbitrage.live.cascade import CascadeChooser, CascadeRouter
from conformal_arbitrage.live.policy import ConformalArbitrage, ConformalRouter, scored
from conformal_arbitrage.scorers.answers import answer_text
from conformal_arbitrage.scorers.rendering import unseen, unseen_by
from conformal_arbitrage.scorers.request_fields import SETTINGS, overridden
from conformal_arbitrage.store.base import Audit, Conversation
from conformal_arbitrage.store.record import (
    AuditQuestion,
    CompletionBody,
    Content,
    DecisionBody,
    DecisionRecord,
    Event,
    MenuQuestion,
    TextQuestion,
)
from conformal_arbitrage.types import ChatRequest, Chunk, DecidedBy, Decision, Leg, Query, Spent

_sorted = msgspec.json.Encoder(order="sorted")
_lenient = msgspec.json.Encoder(order="sorted", enc_hook=str)
_DECIDERS: Mapping[str, DecidedBy] = {"primary": "primary", "fallback": "fallback"}


class Outcome(Struct, frozen=True, kw_only=True):
    """A decision, the event that records it, and the audit it was drawn for, if any.

    Attributes:
        decision: pending, without an answer, until the Guardian has given its own, or if it failed.
        event: what is recorded unless an earlier event recorded the decision.
        audit: what is queued with that event.
        known_legs: how many of the legs belong to an earlier attempt.
        session: id of the session, under a policy that decides by session.
        held: the model that the session's first turn chose, if this is a later turn.
    """

    decision: Decision
    event: Event
    audit: Audit | None
    known_legs: int = 0
    session: str | None = None
    held: str | None = None


class _Case(Struct, frozen=True):
    """What is known of a decision before any model is asked.

    Attributes:
        earlier: the record of an earlier attempt.
        conversation: the session that a sticky policy goes on with.
        session: the caller's name for the conversation, under any other.
        group: what the request names; of another attempt, what the first one named.
    """

    policy: LivePolicy
    caller_id: str
    question: AuditQuestion
    overridden: str | None
    earlier: DecisionRecord | None
    conversation: Conversation | None = None
    session: str | None = None
    group: str | None = None


class MenuStart(Struct, frozen=True):
    """A choice from a menu after the Primary's part.

    Attributes:
        outcome: the outcome so far.
        case: what was known before.
        pair: the models.
        query: the question.
        pending: the decision so far.
        asking: in shadow mode the call to the Guardian, which began with that to the Primary; whoever abandons the choice
            ends it with `cancelled`.
    """

    outcome: Outcome
    case: _Case
    pair: MenuPair
    query: Query
    pending: Decision
    asking: asyncio.Task[Leg] | None


class Decider:
    """Decides under a policy and says what to record.

    Args:
        secret: the project's; the keys of content digests and of the audit coin are derived from it.
    """

    def __init__(self, secret: bytes) -> None:
        self._audit_key, self._digest_key = subkey(secret, "audit v1"), subkey(secret, "digest v1")

    async def begin_menu(
        self,
        policy: LivePolicy,
        query: Query,
        caller_id: str,
        earlier: DecisionRecord | None = None,
        session: str | None = None,
    ) -> MenuStart:
        """Begin a choice from a menu: the Primary's part.

        Args:
            policy: the policy in force.
            query: the question and its menu.
            caller_id: whose call it is.
            earlier: the record of an earlier attempt, which is continued: its Primary is not asked again.
            session: the caller's name for the conversation, if it has one.

        Returns:
            The outcome so far; if it is pending, pass it to `complete_menu`.

        Raises:
            RequestError: the policy answers in free text.
        """
        pair = policy.pair
        if not isinstance(pair, MenuPair):
            raise RequestError(
                f"policy {policy.name} answers in free text, not from menus", status=422, code="wrong_form"
            )
        if not isinstance(query.context, str):
            _require_seen(pair, query)
        question = MenuQuestion(context=query.context, actions=query.actions, ordered=query.ordered)
        group = query.group if earlier is None else earlier.decision.group
        case = _Case(policy, caller_id, question, None, earlier, None, session, group)
        asking: asyncio.Task[Leg] | None = None
        if earlier is not None:
            decision = _continued(earlier, query.actions)
            decision = _under_version(decision, earlier, policy)
        elif (rule := _menu_rule(policy)) is not None:
            decision = await rule.ask_primary(query)
        else:
            decision, asking = await shadow_menu(policy, pair, query)
        return MenuStart(self._outcome(case, decision), case, pair, query, decision, asking)

    async def complete_menu(self, start: MenuStart) -> Outcome:
        """Complete a pending choice: the Guardian's part; without an answer if it failed."""
        query, rule = start.query, _menu_rule(start.case.policy)
        if rule is not None:
            return self._outcome(start.case, await rule.ask_guardian(query, start.pending))
        leg = await (start.asking or scored("guardian", start.pair.guardian, query))
        return self._outcome(start.case, concluded(start.pair, query, start.pending, leg))

    async def text(
        self,
        policy: LivePolicy,
        request: ChatRequest,
        caller_id: str,
        earlier: DecisionRecord | None = None,
        *,
        conversation: Conversation | None = None,
        session: str | None = None,
        live: bool = False,
    ) -> AsyncGenerator[Outcome | Chunk]:
        """Answer in free text or with tool calls.

        Args:
            policy: the policy in force.
            request: the chat request.
            caller_id: whose call it is.
            earlier: the record of an earlier attempt, which is continued: its Primary is not asked again.
            conversation: the session that the request goes on with, if it is not its first turn.
            session: the caller's name for the conversation, if it has one.
            live: pass on the Guardian's words as they come; in shadow mode they never do.

        Yields:
            The outcome so far, once the Primary has answered; if that is pending, the Guardian's chunks, if they come
            live, and the final outcome.

        Raises:
            RequestError: the policy chooses from menus, or the request overrides a pinned setting.
        """
        pair, overridden = _text_pair(policy), _overridden(policy, request.body)
        group = request.group if earlier is None else earlier.decision.group
        question = TextQuestion(request=request.body)
        case = _Case(policy, caller_id, question, overridden, earlier, conversation, session, group)
        pending = None
        if earlier is not None:
            pending = _continued(earlier, ())
            yield self._outcome(case, pending)
        if isinstance(policy.rule, CascadeRouter) and policy.mode != "shadow":
            steps = policy.rule.steps(request, pending, live=live)
        elif isinstance(policy.rule, ConformalRouter) and policy.mode != "shadow":
            if conversation is None or policy.mode == "safe":
                steps = policy.rule.steps(request, pending, live=live)
            else:
                steps = self._held(policy, policy.rule, request, conversation, pending, live=live)
        else:
            steps = shadow_text(policy, pair, request, pending)
        async with aclosing(steps):
            async for step in steps:
                yield self._outcome(case, step) if isinstance(step, Decision) else step

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
        last = decision.legs[-1] if decision.legs and not _awaits_guardian(decision) else None
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

    def _outcome(self, case: _Case, decision: Decision) -> Outcome:
        """Put a decision together with its event, and with an audit if the coin says so."""
        policy, question, overridden = case.policy, case.question, case.overridden
        if overridden is not None and decision.no_guarantee is None:
            decision = replace(decision, no_guarantee=overridden)
        id, legs, pending = str(decision.id), decision.legs, decision.answer is None
        session = None
        if policy.settings.sticky is not None:
            session = id if case.conversation is None else case.conversation.id
        if case.earlier is not None:
            audited = case.earlier.decision.audited  # in whatever mode, and at whatever rate, it goes on
        else:
            audited = policy.mode == "enforce" and self._drawn(session or id, policy.settings.audit_rate)
        body = DecisionBody(
            action=None if pending else decision.action,
            candidates=decision.candidates
            if policy.mode != "safe"
            else rule_candidates(policy.certificate, decision, case.group),
            margin=None if decision.margin == float("inf") else decision.margin,
            relaxation=decision.relaxation,
            no_guarantee=decision.no_guarantee,
            legs=tuple([leg if leg.reply is leg.error is None else recorded_leg(leg, policy) for leg in legs]),
            cost=decision.spent.cost,
            alpha=policy.alpha,
            version=policy.version,
            mode=policy.mode,
            form=policy.pair.form,
            content=self._kept(policy, _content(question, decision)),
            identities_sha256=policy.identities_sha256,
            size=len(question.actions) if isinstance(question, MenuQuestion) else 2,
            overridden=overridden is not None,  # settings the certificate does not cover: other traffic
            audited=audited,
            pending=pending,
            session=session,
            guarded=policy.guarded if policy.mode == "enforce" else None,
            held=case.conversation is not None and policy.mode == "enforce",
            learned=decision.learned,
            group=case.group,
        )
        event = Event(id=id, body=body, policy=policy.name, key_id=case.caller_id, decided_by=decision.decided_by)
        audit = self._audit(case, decision) if audited else None
        known = 0 if case.earlier is None else len(_known_legs(case.earlier))
        held = None if case.conversation is None else case.conversation.decided_by
        return Outcome(decision=decision, event=event, audit=audit, known_legs=known, session=session, held=held)

    def _audit(self, case: _Case, decision: Decision) -> Audit:
        """Return the audit of a decision that the coin drew."""
        policy, name = case.policy, case.session
        if policy.watched is None:
            identities = policy.identities_sha256
            return Audit(id=str(decision.id), policy=policy.name, question=case.question, identities_sha256=identities)
        session = None if name is None else self._digest([case.caller_id, name])
        overridden = case.overridden is not None
        return drawn_audit(
            policy.watched, decision, case.question, overridden=overridden, session=session, group=case.group
        )

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


def recorded_leg(leg: Leg, policy: LivePolicy) -> Leg:
    """Return a leg as it is recorded: without its reply, and without an endpoint's words unless content is kept in full."""
    return replace(leg, reply=None, error=recorded_error(leg.error, policy))


def recorded_error(error: str | None, policy: LivePolicy) -> str | None:
    """Return why a model failed: its kind and HTTP status, and the whole text if content is kept in full."""
    if error is None or policy.settings.content == "full":
        return error
    kind, _, text = error.partition(":")
    status = re.search(r": status (\d{3}) ", text)
    return kind if status is None else f"{kind}: status {status[1]}"


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
    """Return why a request has no guarantee that overrides a pinned setting of either model.

    Raises:
        RequestError: the policy refuses such requests.
    """
    if SETTINGS.keys().isdisjoint(body):
        return None
    differing = overridden(body, identities_of_pair(policy.pair))
    if not differing:
        return None
    if policy.settings.overrides == "refuse":
        name, remedies = next(iter(differing.items()))
        raise RequestError(remedies, status=422, code="pinned_setting", param=name)
    return f"the request overrides {', '.join(differing)}"


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
        decided_by=_DECIDERS.get(earlier.decided_by, "guardian"),
        margin=float("inf") if body.margin is None else body.margin,
        relaxation=body.relaxation,
        legs=legs,
        spent=sum((leg.spent for leg in legs), start=Spent()),
        no_guarantee=body.no_guarantee,
        learned=body.learned,
    )


def _awaits_guardian(decision: Decision) -> bool:
    """Return whether the Guardian has neither answered nor failed yet."""
    return decision.answer is None and (not decision.legs or decision.legs[-1].role == "primary")


def _menu_rule(policy: LivePolicy) -> ConformalArbitrage | CascadeChooser | None:
    """Return the rule that decides; None in shadow mode, where the Guardian does."""
    rule = policy.rule
    return rule if isinstance(rule, ConformalArbitrage | CascadeChooser) and policy.mode != "shadow" else None
