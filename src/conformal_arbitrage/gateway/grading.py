"""Answers for people to grade: put both of every row that is fit for calibration into the review queue, blind.

Rows are found in the record, by what was appended to it, so that nothing depends on the road that a request took, and rows
from before grading was switched on are graded too: a choice among them could depend on their scores. Answers that are the
same, byte for byte, are not shown, since nobody could prefer either; their grades are equal.

Knows nothing of pages, or of how grades become a loss.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from conformal_arbitrage.calibration.draws import draw
from conformal_arbitrage.calibration.project_secret import subkey
from conformal_arbitrage.collecting.grade_records import Gradable, to_grade
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.live.reviews import GradingTerms, grading_terms
from conformal_arbitrage.monitoring.reviewing import GRADES
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.store.record import DecisionRecord, Event, FeedbackBody, Grades
from conformal_arbitrage.store.review_base import GradingNews, NewReview
from conformal_arbitrage.store.row_base import fit
from conformal_arbitrage.types import transcript
from conformal_arbitrage.upstream.base import fingerprint

_log = logging.getLogger("conformal_arbitrage.gateway")
IDENTICAL = "identical"
"""Who made the grades, as the record says, if nobody had to, since the answers are the same."""
PAUSE = 1.0
"""Seconds between two looks at the record."""
_DUE, _SECOND_OPINION_ENDS = 86400.0, 14 * 86400.0
"""Seconds until answers come before other questions, and until a second opinion is given up."""


class GradingFeed:
    """Puts answers into the review queue, in the background.

    Args:
        store: holds the record and the queue.
        config: which policies are graded by people.
        secret: the project's; decides which answer is shown first, and which pairs get a second opinion.
    """

    def __init__(self, store: Store, config: Config, secret: bytes) -> None:
        self._store = store
        every = {name: grading_terms(config, name) for name in config.policies}
        self._terms = {name: terms for name, terms in every.items() if terms is not None}
        self._key = subkey(secret, "review v1")

    async def run(self) -> None:
        """Look at the record until cancelled; return if nobody grades."""
        while self._terms:
            try:
                await self.run_once()
            except StoreError as error:
                _log.warning("answers wait to be graded: %s", error)
            await asyncio.sleep(PAUSE)

    async def run_once(self) -> None:
        """Deal with all that is new."""
        for policy, terms in self._terms.items():
            while (news := await self._store.grading_news(policy)).read:
                await self._deal_with(policy, terms, news)

    async def _deal_with(self, policy: str, terms: GradingTerms, news: GradingNews) -> None:
        items: list[NewReview] = []
        events: list[Event] = []
        graded: list[str] = []
        for record in news.records:
            row = _gradable(record)
            if row == "graded":
                graded.append(record.id)
            elif isinstance(row, Gradable):
                if row.answers["primary"] == row.answers["guardian"]:
                    grades = Grades(primary=1.0, guardian=1.0)
                    body = FeedbackBody(grades=grades, by=IDENTICAL, grader=dict(terms.identity))
                    events.append(Event(id=row.id, body=body))
                else:
                    items += self._items(record, row, terms)
        await self._store.put_grading(policy, news, items=items, events=events, graded=graded)

    def _items(self, record: DecisionRecord, row: Gradable, terms: GradingTerms) -> list[NewReview]:
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
            due=_DUE,
            lease=terms.settings.lease,
            undo=terms.settings.undo,
            menu=GRADES,
        )
        if draw(self._key, f"second opinion on grades {row.id}") >= terms.overlap:
            return [item]
        return [item, replace(item, purpose="overlap", panel=1, escalates=False, deadline=_SECOND_OPINION_ENDS)]


def _gradable(record: DecisionRecord) -> Gradable | str:
    """Return both answers of a row that needs grades, or why it does not."""
    if record.decision.cancelled or record.decision.form != "text" or not fit(record):
        return "not a row"
    return to_grade(record)


def awaits_grades(record: DecisionRecord, settings: PolicyConfig | None) -> bool:
    """Return whether people are to grade a decision, now or once its Guardian has answered.

    They must not see meanwhile who said what.
    """
    if settings is None or settings.grading != "review" or any(one.review is not None for one in record.feedback):
        return False
    row, lost = _gradable(record), record.audit is not None and record.audit.error is not None
    return isinstance(row, Gradable) or (row == "no_guardian" and not lost)


async def yet_to_judge(
    store: Store, policies: Mapping[str, PolicyConfig], records: Sequence[DecisionRecord]
) -> frozenset[str]:
    """Return the ids of decisions that people have yet to judge, or are about to."""
    about_to = [record.id for record in records if awaits_grades(record, policies.get(record.policy))]
    under_way = await store.under_review([record.id for record in records]) if records else frozenset[str]()
    return under_way.union(about_to)
