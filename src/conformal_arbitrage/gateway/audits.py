"""The auditor, which asks the Guardian about decisions that the coin drew, and answers that people grade."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from conformal_arbitrage.calibration.secret import draw, subkey
from conformal_arbitrage.errors import (
    ArbitrageError,
    OtherModelError,
    QuotaError,
    RequestError,
    ScorerError,
    StoreError,
    UpstreamError,
)
from conformal_arbitrage.gateway.decider import recorded_error
from conformal_arbitrage.gateway.jobs import keep_up
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.policies import LivePolicy, MenuPair, PolicyTable
from conformal_arbitrage.gateway.review_queue import QUIET_DUE, with_second_opinion
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.live.reviewers import GradingTerms, grading_terms
from conformal_arbitrage.live.rule import leg_of
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.port import IN_BACKGROUND, Answer, Scores, checked_scores, fingerprint
from conformal_arbitrage.monitoring.votes import GRADES
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import outbox, reviews
from conformal_arbitrage.store.events import is_fit
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import AuditBody, DecisionRecord, Event, FeedbackBody, Grades, MenuQuestion
from conformal_arbitrage.store.reviews import GradingNews, NewReview
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import ChatRequest, Leg, Query, transcript

if TYPE_CHECKING:
    from conformal_arbitrage.collecting.grading import Gradable

# --- Answers for people to grade ---


_log = logging.getLogger("conformal_arbitrage.gateway")
IDENTICAL = "identical"
"""Who made the grades, as the record says, if nobody had to, since the answers are the same."""
GRADING_PAUSE = 1.0
"""Seconds between two looks at the record."""


class GradingFeed:
    """Puts answers into the review queue, in the background.

    Args:
        secret: the project's; decides which answer is shown first, and which pairs get a second opinion.
    """

    def __init__(self, store: Store, config: Config, secret: bytes) -> None:
        self._store = store
        every = {name: grading_terms(config, name) for name in config.policies}
        self._terms = {name: terms for name, terms in every.items() if terms is not None}
        self._key = subkey(secret, "review v1")

    async def run(self) -> None:
        """Look at the record until cancelled; return if nobody grades."""
        if self._terms:
            await keep_up(self.run_once, GRADING_PAUSE, said="answers wait to be graded")

    async def run_once(self) -> None:
        """Deal with all that is new."""
        for policy, terms in self._terms.items():
            while (news := await self._store.run(reviews.grading_news, policy)).read:
                await self._deal_with(policy, terms, news)

    async def _deal_with(self, policy: str, terms: GradingTerms, news: GradingNews) -> None:
        items: list[NewReview] = []
        events: list[Event] = []
        graded: list[str] = []
        for record in news.records:
            row = _gradable(record)
            if row == "graded":
                graded.append(record.id)
            elif not isinstance(row, str):
                if row.answers["primary"] == row.answers["guardian"]:
                    grades = Grades(primary=1.0, guardian=1.0)
                    body = FeedbackBody(grades=grades, by=IDENTICAL, grader=dict(terms.identity))
                    events.append(Event(id=row.id, body=body))
                else:
                    items += self._items(record, row, terms)
        await self._store.run(reviews.put_grading, policy, news, items=items, events=events, graded=graded)

    def _items(self, record: DecisionRecord, row: "Gradable", terms: GradingTerms) -> list[NewReview]:
        """Return what to put into the queue about a row: both answers, and perhaps a second opinion on them."""
        question = terms.question(
            transcript(row.request.messages),
            row.answers["primary"],
            str(row.answers["guardian"]),
            swapped=draw(self._key, f"order {row.id}") < 0.5,
        )
        item = NewReview(
            decision=row.id,
            purpose="grade",
            policy=record.policy,
            team=terms.name,
            question=question,
            protocol=fingerprint(terms.identity),
            identities_sha256=record.decision.identities_sha256 or "",
            panel=terms.panel,
            rule="median",
            escalates=bool(terms.team.leads),
            due=QUIET_DUE,
            lease=terms.settings.lease,
            undo=terms.settings.undo,
            menu=GRADES,
        )
        return with_second_opinion(item, asked=draw(self._key, f"second opinion on grades {row.id}") < terms.overlap)


def _gradable(record: DecisionRecord) -> "Gradable | str":
    """Return both answers of a row that needs grades, or why it does not."""
    if record.decision.cancelled or record.decision.form != "text" or not is_fit(record.decision):
        return "not a row"
    from conformal_arbitrage.collecting.grading import to_grade  # only where people grade

    return to_grade(record)


def awaits_grades(record: DecisionRecord, settings: PolicyConfig | None) -> bool:
    """Return whether people are to grade a decision, now or once its Guardian has answered.

    They must not see meanwhile who said what.
    """
    if (
        settings is None
        or settings.grading != "review"
        or any(feedback.review is not None for feedback in record.feedback)
    ):
        return False
    row, lost = _gradable(record), record.audit is not None and record.audit.error is not None
    return not isinstance(row, str) or (row == "no_guardian" and not lost)


def would_tell(record: DecisionRecord, settings: PolicyConfig | None) -> bool:
    """Return whether a decision would tell who said what in answers that people have yet to grade.

    A session keeps to one model, and is drawn as a whole: any of its turns tells about those to come.
    """
    graded = settings is not None and settings.grading == "review"
    return awaits_grades(record, settings) or (graded and record.decision.session is not None)


# --- Audits ---


LEASE = 10.0
AUDIT_PAUSE = 0.5
AT_ONCE = 8
FIRST_DELAY, LONGEST_DELAY = 2.0, 600.0
"""Seconds until an audit is retried after its first failure, doubled with each, and the most."""
LONGEST_REST = 60.0
"""The most seconds without any audit of a policy whose Guardian fails."""
_REFUSED = frozenset({400, 413, 422})
_Ending = Literal["answered", "failed", "missing", "postponed"]


class Auditor:
    """Runs audits queued in the store.

    Args:
        deadline: seconds after which an audit that keeps failing is recorded as missing.
    """

    def __init__(self, store: Store, policies: PolicyTable, metrics: Metrics, deadline: float) -> None:
        self._store = store
        self._policies = policies
        self._metrics = metrics
        self._deadline = deadline
        self._rests: dict[str, tuple[int, float]] = {}  # by policy: failed batches in a row, and until when it rests

    async def run(self) -> None:
        """Run queued audits until cancelled."""
        await keep_up(self.run_once, AUDIT_PAUSE)

    async def run_once(self) -> int:
        """Run a batch of queued audits; return how many there were."""
        audits = await self._store.run(
            outbox.take_audits, limit=AT_ONCE, lease=LEASE, policies=self._ready(), overdue=self._deadline
        )
        if not audits:
            return 0
        renewing = asyncio.create_task(self._renew([audit.id for audit in audits]))
        try:
            endings = await asyncio.gather(*(self._audit(audit) for audit in audits), return_exceptions=True)
        finally:
            renewing.cancel()
        for audit, ending in zip(audits, endings, strict=True):
            if isinstance(ending, StoreError):
                raise ending
            if isinstance(ending, BaseException):
                named = {"policy": audit.policy, "id": audit.id}
                _log.error("an audit failed and will be retried", exc_info=ending, extra=named)
        for policy in {audit.policy for audit in audits}:
            ended = [ending for audit, ending in zip(audits, endings, strict=True) if audit.policy == policy]
            self._rest(policy, failing=all(ending in ("postponed", "missing") for ending in ended))
        return len(audits)

    def _ready(self) -> dict[str, str]:
        """Return the policies in service whose Guardian has not just failed, each with whose models it has."""
        now = time.monotonic()
        ready = [live for live in self._policies.all() if self._rests.get(live.name, (0, 0.0))[1] <= now]
        return {live.name: live.identities_sha256 for live in ready}

    def _rest(self, policy: str, *, failing: bool) -> None:
        if not failing:
            self._rests.pop(policy, None)
            return
        failed = self._rests.get(policy, (0, 0.0))[0] + 1
        self._rests[policy] = (failed, time.monotonic() + min(LONGEST_REST, AUDIT_PAUSE * 2 ** min(failed, 16)))

    async def _renew(self, ids: Sequence[str]) -> None:
        """Renew the leases while the Guardian is busy; if this process dies, another soon takes over."""
        while True:
            await asyncio.sleep(LEASE / 3)
            with suppress(StoreError):  # unreachable for now
                await self._store.run(outbox.renew_audits, ids, lease=LEASE)

    async def _audit(self, audit: Audit) -> _Ending:
        IN_BACKGROUND.set(True)  # in the context of this task alone
        try:
            body = await self._ask(audit)
        except (QuotaError, RequestError, UpstreamError, OtherModelError) as error:
            return await self._try_later(audit, error)
        await self._store.run(stored_events.commit, [Event(id=audit.id, body=body)])
        return self._ended(audit, "answered" if body.error is None else "failed")

    def _of_same_models(self, audit: Audit) -> LivePolicy:
        policy = self._policies.named(audit.policy)
        if audit.identities_sha256 not in ("", policy.identities_sha256):
            raise RequestError(f"policy {audit.policy} has other models now", code="other_models")
        return policy

    async def _try_later(self, audit: Audit, error: ArbitrageError) -> _Ending:
        """Postpone an audit, or record it as missing once its deadline has passed."""
        left = self._deadline - audit.age
        if left > 0:
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(audit.attempts, 16)) * random.uniform(0.5, 1.0)
            wait = error.retry_after if isinstance(error, QuotaError | UpstreamError) else None
            await self._store.run(outbox.postpone_audit, audit.id, seconds=min(left, max(delay, wait or 0.0)))
            return self._ended(audit, "postponed")
        reason = f"missing: no answer in {audit.age:.0f} s, at the end {type(error).__name__}"
        await self._store.run(stored_events.commit, [Event(id=audit.id, body=AuditBody(error=reason))])
        return self._ended(audit, "missing")

    def _ended(self, audit: Audit, ending: _Ending) -> _Ending:
        self._metrics.audited(audit.policy, ending)
        return ending

    async def _ask(self, audit: Audit) -> AuditBody:
        """Return the Guardian's view.

        Raises:
            QuotaError: the share of its limits that audits may use is used up.
            RequestError: the policy is not served here, or has another form or other models now.
            UpstreamError, OtherModelError: the Guardian cannot be asked for now.
        """
        policy, start = self._of_same_models(audit), time.perf_counter()
        try:
            reply = await _guardian_reply(policy, audit)
        except ScorerError as error:
            leg = leg_of("guardian", error, start)
            self._metrics.leg(policy.name, leg)
            if _may_succeed_later(error):
                raise
        else:
            leg = leg_of("guardian", reply, start)
            self._metrics.leg(policy.name, leg)
            if isinstance(reply, Answer) and policy.settings.content == "full":
                return _body(policy, leg, answer=answer_text(reply.message))
        failure = recorded_error(leg.error, policy)
        return _body(policy, leg, scores=leg.scores, error=None if failure is None else str(failure))


def _body(
    policy: LivePolicy, leg: Leg, *, scores: tuple[float, ...] | None = None, error: str | None = None,
    answer: str | None = None,
) -> AuditBody:  # fmt: skip
    """Return the Guardian's view with whose it is."""
    return AuditBody(
        scores=scores,
        error=error,
        cost=leg.spent.cost,
        served=leg.served,
        answer=answer,
        identities_sha256=policy.identities_sha256,
    )


async def _guardian_reply(policy: LivePolicy, audit: Audit) -> Scores | Answer:
    pair, question = policy.pair, audit.question
    if isinstance(pair, MenuPair) and isinstance(question, MenuQuestion):
        return await checked_scores(pair.guardian, Query(question.context, question.actions, id=audit.id))
    if isinstance(pair, MenuPair) or isinstance(question, MenuQuestion):
        raise RequestError(f"policy {audit.policy} has another form now", code="wrong_form")
    return await pair.guardian.answer(ChatRequest(question.request, id=audit.id))


def _may_succeed_later(error: ScorerError) -> bool:
    """Tell whether the Guardian could not be asked; a reply of no use, or a request it refuses, stays what it is."""
    if isinstance(error, UpstreamError):
        return error.status not in _REFUSED
    return isinstance(error, OtherModelError)
