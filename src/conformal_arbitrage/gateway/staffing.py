"""How many people a policy's questions take: the busiest hour of the week, how long votes take, and what follows.

A plan under arrivals at random, and no promise; `arbitrage plan --reviews` does the same arithmetic.

Knows nothing of pages or HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.live.reviews import ReviewTerms
from conformal_arbitrage.monitoring.reviewing import MOST_PEOPLE, Staffing, StaffingPlan, plan_staffing
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.store.console_base import PolicyTally
from conformal_arbitrage.store.review_base import CastVote

ASSUMED_SECONDS = 60.0
"""That a vote takes, as long as nobody has voted."""
_WEEK, _MONDAY = 168, 3 * 24
"""Hours of a week, and from its beginning to Thursday, with which 1970 began."""
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_HOUR, _COUNTED = 3600, 28 * 86400.0
_FEW = 0.05
_LONGEST_HELD = 20 * 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamTraffic:
    """What comes to people, and how fast they are.

    Attributes:
        calls: questions in the hour to plan for.
        busiest: the hour of the week that this is, as words; None if nothing was counted, or it was assumed.
        seconds: that a vote takes on average.
        measured: whether that was measured; otherwise it is assumed.
    """

    calls: float
    busiest: str | None
    seconds: float
    measured: bool

    def assuming(self, *, calls: float | None = None, seconds: float | None = None) -> "TeamTraffic":
        """Return it with other figures, where they are given."""
        changed = self if calls is None else replace(self, calls=calls, busiest=None)
        return changed if seconds is None else replace(changed, seconds=seconds, measured=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How many people it takes."""

    plan: StaffingPlan

    @property
    def enough(self) -> Staffing:
        """The fewest people who leave at most a twentieth of the questions untaken for longer than callers are held."""
        return next(row for row in self.plan.rows if row.waiting <= _FEW)

    @property
    def fewer(self) -> Staffing | None:
        """One person less, if they could keep up."""
        place = self.plan.rows.index(self.enough)
        return self.plan.rows[place - 1] if place else None


async def team_traffic(store: Store, live: LivePolicy, terms: ReviewTerms, *, now: float) -> TeamTraffic:
    """Return what came to people in the busiest hour of the week, over four weeks, and how fast they were."""
    hours = await store.hourly_decisions(live.name, since=now - _COUNTED)
    calls, busiest = busiest_hour({hour: count for hour, count in hours.items() if hour < now // _HOUR} or hours)
    seconds = mean_held(await store.cast_votes(), terms.name)
    return TeamTraffic(
        calls=calls, busiest=busiest, seconds=ASSUMED_SECONDS if seconds is None else seconds,
        measured=seconds is not None,
    )  # fmt: skip


def workload(live: LivePolicy, terms: ReviewTerms, traffic: TeamTraffic, *, share: float) -> Workload | None:
    """Return how many people it takes if a share of the questions is deferred; None if all would take too many to plan.

    A panel is counted in full, though the first votes often decide; a second opinion is one more vote.
    """
    if not traffic.calls or _busy(traffic.calls * (terms.panel + terms.overlap), traffic.seconds) > MOST_PEOPLE:
        return None
    plan = plan_staffing(
        calls_per_hour=traffic.calls, guardian_share=share, seconds=traffic.seconds, votes_per_item=terms.panel,
        audit_rate=live.settings.audit_rate, overlap=terms.overlap / terms.panel, wait=terms.settings.wait,
    )  # fmt: skip
    return Workload(plan=plan)


def joint(workloads: Sequence[Workload], seconds: float) -> Workload | None:
    """Return how many people it takes for the questions of several policies, as if their busiest hours were the same."""
    votes = sum(one.plan.reviews_per_hour for one in workloads)
    if not workloads or _busy(votes, seconds) > MOST_PEOPLE:
        return None
    plan = plan_staffing(
        calls_per_hour=votes, guardian_share=1.0, seconds=seconds,
        wait=min(one.plan.wait for one in workloads),
    )  # fmt: skip
    return Workload(plan=plan)


def _busy(votes: float, seconds: float) -> float:
    """Return how many people some votes an hour keep busy."""
    return votes * seconds / _HOUR


def share_now(live: LivePolicy, tally: PolicyTally) -> float:
    """Return which share of the questions goes to the Guardian now."""
    counted = tally.by_guardian / tally.decisions if tally.decisions else 1.0
    return counted if live.mode == "enforce" else 1.0


def mean_held(votes: Sequence[CastVote], team: str) -> float | None:
    """Return how many seconds a vote of a team takes on average; None without votes.

    Those that lay open for longer than a question can be held are cut there.
    """
    held = [min(vote.held, _LONGEST_HELD) for vote in votes if vote.team == team and not vote.skipped]
    return max(sum(held) / len(held), 0.1) if held else None


def busiest_hour(decisions: Mapping[int, int]) -> tuple[float, str | None]:
    """Return the mean number of decisions in the busiest hour of the week, and which that is.

    Args:
        decisions: by the hour since 1970; hours between the first and the last that are not there had none.
    """
    if not decisions:
        return 0.0, None
    means: dict[int, list[int]] = {}
    for hour in range(min(decisions), max(decisions) + 1):
        means.setdefault((hour + _MONDAY) % _WEEK, []).append(decisions.get(hour, 0))
    place = max(means, key=lambda one: sum(means[one]) / len(means[one]))
    day, hour = divmod(place, 24)
    return sum(means[place]) / len(means[place]), f"{_DAYS[day]}, {hour}:00 UTC"
