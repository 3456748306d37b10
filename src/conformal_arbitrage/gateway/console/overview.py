"""The overview: how every policy does, from ledgers and tallies; no record is read.

Knows nothing of how losses are computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from msgspec.structs import replace
from starlette.responses import Response

from conformal_arbitrage.gateway.console.charts import LossCourse, loss_chart
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.rendering import count_text, loss_text, moment
from conformal_arbitrage.gateway.console.standing import Courses, ShownStanding, shown_standing
from conformal_arbitrage.gateway.console.visits import Visit
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.store.console_base import PolicyTally
from conformal_arbitrage.store.review_base import TeamBacklog
from conformal_arbitrage.types import DAY

DAYS = 30
_TABLE_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a policy saved against always asking the Guardian.

    Attributes:
        dollars: None if it is unknown.
        basis: what the Guardian's mean cost is over, or why nothing is known.
    """

    dollars: float | None
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCourse:
    """A course as a page draws it: the picture, its points as words for the cursor, and a table of some of them."""

    chart: object
    points: list[tuple[float, str]]
    table: list[tuple[str, str, str, str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCard:
    """A policy on the overview."""

    live: LivePolicy
    standing: ShownStanding
    guardian: str
    course: DrawnCourse | None
    tally: PolicyTally
    saved: Saved
    waiting: TeamBacklog | None
    rows: int | None
    rows_needed: int | None


class OverviewPage:
    """GET /console."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts
        self._courses = Courses(parts.store)
        self._drawn: dict[str, tuple[LossCourse, DrawnCourse]] = {}

    async def overview(self, visit: Visit) -> Response:
        """Show how every policy does."""
        parts = self._parts
        since = await parts.changes(visit)
        now = parts.clock()
        tallies = summed(await parts.store.tallies(since=now - DAYS * DAY))
        visible = [live for live in parts.policies.all() if visit.who.sees(live.name)]
        # what needs someone first
        visible.sort(key=lambda live: (live.alarm is None, live.mode == "shadow", live.name))
        cards = [await self.card(live, tallies) for live in visible]
        broken = {name: error for name, error in parts.policies.out_of_service().items() if visit.who.sees(name)}
        return parts.pages.page(
            "overview.html", visit, since=since, cards=cards, broken=broken, days=DAYS, now=now,
            alarms=[card for card in cards if card.live.alarm is not None],
        )  # fmt: skip

    async def card(self, live: LivePolicy, tallies: Mapping[str, PolicyTally]) -> PolicyCard:
        """Return what is shown of a policy."""
        standing = shown_standing(live, self._parts.watcher)
        course = await self._courses.course(live, standing.group)
        tally = tallies.get(live.name, PolicyTally(policy=live.name, version=live.version))
        shadow = live.mode == "shadow"
        rows = None
        if shadow:
            identities = live.identities_sha256
            rows = await self._parts.store.count_rows(live.name, identities_sha256=identities, since=0.0)
        return PolicyCard(
            live=live,
            standing=standing,
            guardian=guardian_name(live),
            course=None if course is None else self._picture(live.name, course),
            tally=tally,
            saved=saved(tally),
            waiting=await self._waiting(live),
            rows=rows,
            rows_needed=ceil(1 / self._parts.config.alpha) - 1 if shadow else None,
        )

    def _picture(self, policy: str, course: LossCourse) -> DrawnCourse:
        """Return the picture of a course, which is drawn once."""
        picture = self._drawn.get(policy)
        if picture is None or picture[0] is not course:
            picture = self._drawn[policy] = course, drawn(course)
        return picture[1]

    async def _waiting(self, live: LivePolicy) -> TeamBacklog | None:
        """Return what the team behind a policy has before it; None if no people answer."""
        name, people = guardian_name(live), self._parts.desk.people()
        if live.pair.guardian.identity.get("kind") != "human" or name not in people:
            return None
        [backlog] = await self._parts.store.team_backlogs({name: people[name]})
        return backlog


def guardian_name(live: LivePolicy) -> str:
    """Return what the Guardian is called: its model, its name, the column that it replays, or its kind."""
    identity = live.pair.guardian.identity
    return str(next((identity[name] for name in ("model", "name", "column", "kind") if identity.get(name)), "unknown"))


def summed(tallies: Sequence[PolicyTally]) -> dict[str, PolicyTally]:
    """Return the counts of each policy, over all of its versions."""
    sums: dict[str, PolicyTally] = {}
    for one in tallies:
        so_far = sums.get(one.policy, PolicyTally(policy=one.policy, version=0))
        names = PolicyTally.__struct_fields__[2:]
        added = {name: getattr(so_far, name) + getattr(one, name) for name in names}
        sums[one.policy] = replace(so_far, version=one.version, **added)
    return sums


def saved(tally: PolicyTally) -> Saved:
    """Return what was saved: the decisions with a known cost, times the Guardian's mean cost, less what was spent."""
    priced, mean = tally.decisions - tally.unknown_cost, guardian_cost(tally)
    if mean is None or not priced:
        return Saved(dollars=None, basis="no answer of the Guardian has a known cost yet")
    each, basis = mean
    return Saved(
        dollars=priced * each - tally.cost,
        basis=f"against always asking the Guardian, at its mean cost over {basis}",
    )


def guardian_cost(tally: PolicyTally) -> tuple[float, str] | None:
    """Return what an answer of the Guardian costs on average, and over what; None if that is unknown.

    Audits come first: deferred questions are the harder ones.
    """
    for calls, cost, of in (
        (tally.audit_calls, tally.audit_cost, "audit"),
        (tally.guardian_calls, tally.guardian_cost, "deferral"),
    ):
        if calls:
            return cost / calls, count_text(calls, of)
    return None


def drawn(course: LossCourse) -> DrawnCourse:
    """Return a course with its picture, and in words."""
    points = course.points
    first, last = points[0].time, max(points[-1].time, points[0].time + 1)
    words = [
        (
            round((point.time - first) / (last - first), 4),
            f"{moment(point.time)}: loss {loss_text(point.mean)}, between {loss_text(point.lower)} and "
            f"{loss_text(point.upper)}, after {point.audits:,} audits",
        )
        for point in points
    ]
    step = max(1, len(points) // _TABLE_ROWS)
    chosen = [*points[::-1][::step]]
    table = [
        (moment(one.time), f"{one.audits:,}", loss_text(one.mean), loss_text(one.lower), loss_text(one.upper))
        for one in chosen
    ]
    return DrawnCourse(chart=loss_chart(course), points=words, table=table)
