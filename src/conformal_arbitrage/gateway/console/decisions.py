"""Lists of decisions with filters; every filter is answered by an index, so a page costs what it holds.

Knows nothing of how a single decision is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.rendering import redirect
from conformal_arbitrage.gateway.console.visits import Visit, Visitor
from conformal_arbitrage.gateway.grading import yet_to_judge
from conformal_arbitrage.store.console_base import Mark
from conformal_arbitrage.store.ids import time_of
from conformal_arbitrage.store.record import DecisionRecord

PAGE = 50
_WHO = ("primary", "guardian", "fallback")
_MARKS: Mapping[str, Mark] = {"audited": "audited", "no guarantee": "no guarantee"}
_ID_LENGTH = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFilter:
    """Which decisions are wanted; empty where it does not matter. Days are in UTC, both included."""

    policy: str = ""
    who: str = ""
    mark: str = ""
    first: str = ""
    last: str = ""
    before: str = ""

    @property
    def since(self) -> float | None:
        """The first moment."""
        return None if not self.first else _midnight(self.first)

    @property
    def until(self) -> float | None:
        """The first moment after the last day."""
        return None if not self.last else _midnight(self.last, days=1)

    def words(self) -> list[tuple[str, str]]:
        """Return the filters in words, each with where to go without it."""
        texts = {
            "policy": f"policy {self.policy}",
            "who": f"decided by {self.who}",
            "mark": self.mark,
            "first": f"from {self.first}",
            "last": f"to {self.last}",
        }
        active = {name: text for name, text in texts.items() if getattr(self, name)}
        return [(text, self.link(**{name: "", "before": ""})) for name, text in active.items()]

    def link(self, **changed: str) -> str:
        """Return the address of these filters with some of them changed."""
        names = ("policy", "who", "mark", "first", "last", "before")
        values = {name: changed.get(name, getattr(self, name)) for name in names}
        query = urlencode({name: value for name, value in values.items() if value})
        return "/console/decisions" + (f"?{query}" if query else "")


def _midnight(text: str, days: int = 0) -> float:
    try:
        return (datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=days)).timestamp()
    except (ValueError, OverflowError) as error:
        raise RequestError(f"A day is written as 2026-11-16; got {text:.40}.", status=400) from error


def read_filter(query: Mapping[str, str], visitor: Visitor) -> DecisionFilter:
    """Return the filters of an address; a key that is bound to policies sees one of them at a time.

    Raises:
        RequestError: one of them has no meaning.
    """
    who, mark = query.get("who", ""), query.get("mark", "")
    if who not in ("", *_WHO) or mark not in ("", *_MARKS):
        raise RequestError(f"There is no filter {(who or mark)!r:.60}.", status=400)
    policy = query.get("policy", "") or (visitor.policies[0] if visitor.policies else "")
    if policy:
        visitor.check_policy(policy)
    days = {name: query.get(name, "") for name in ("first", "last")}
    before = query.get("before", "")[:_ID_LENGTH]
    return DecisionFilter(policy=policy, who=who, mark=mark, before=before, **days)


class DecisionsPage:
    """GET /console/decisions."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts

    async def decisions(self, visit: Visit) -> Response:
        """Show a page of decisions, the newest first."""
        if id := visit.query.get("id", "").strip():
            return redirect(
                f"/console/decisions/{id}" if id.isascii() and id.isalnum() else "/console/decisions/unknown"
            )
        wanted = read_filter(visit.query, visit.who)
        shown, before = await self._page(wanted)
        older = wanted.link(before=before) if before else None
        hidden = await self._hidden(shown)
        if wanted.who or wanted.mark:  # which would tell what is withheld
            shown = [one for one in shown if one.id not in hidden]
        names = [name for name in self._parts.config.policies if visit.who.sees(name)]
        return self._parts.pages.page(
            "decisions.html", visit, records=[(asked_at(one), one) for one in shown], wanted=wanted, older=older,
            names=names, who=_WHO, marks=_MARKS, hidden=hidden, bound=visit.who.policies is not None,
        )  # fmt: skip

    async def _page(self, wanted: DecisionFilter) -> tuple[list[DecisionRecord], str | None]:
        """Return a page of decisions, and the id before which there are more, or may be."""
        mark: Mark | None = _MARKS.get(wanted.mark)
        if wanted.who == "fallback" and mark != "audited":
            mark = "fallback"  # which are all without a guarantee
        return await (self._in_order(wanted) if mark is None else self._marked(wanted, mark))

    async def _in_order(self, wanted: DecisionFilter) -> tuple[list[DecisionRecord], str | None]:
        async def read(before: str | None, limit: int) -> list[DecisionRecord]:
            return await self._parts.store.records(
                policy=wanted.policy or None, decided_by=wanted.who or None, before=before, limit=limit,
                since=wanted.since, until=wanted.until,
            )  # fmt: skip

        page = await read(wanted.before or None, PAGE + 1)
        if len(page) > PAGE:
            return page[:PAGE], page[PAGE - 1].id
        return page, page[-1].id if page and await read(page[-1].id, 1) else None  # a page of large records ends early

    async def _marked(self, wanted: DecisionFilter, mark: Mark) -> tuple[list[DecisionRecord], str | None]:
        """Return those of marked decisions that someone in particular decided, as far as it is looked for them at once."""
        page = await self._parts.store.marked_decisions(
            mark, policy=wanted.policy or None, decided_by=wanted.who or None, since=wanted.since, until=wanted.until,
            before=wanted.before or None, limit=PAGE + 1,
        )  # fmt: skip
        records = list(page.records)
        return (records[:PAGE], records[PAGE - 1].id) if len(records) > PAGE else (records, page.end)

    async def _hidden(self, records: list[DecisionRecord]) -> frozenset[str]:
        """Return the ids of decisions that people are still deciding."""
        return await yet_to_judge(self._parts.store, self._parts.config.policies, records)


def asked_at(record: DecisionRecord) -> float:
    """Return when a decision was asked for; its record was written when it was made."""
    try:
        return time_of(record.id)
    except ValueError:
        return record.created
