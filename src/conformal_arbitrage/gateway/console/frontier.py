"""What another budget would ask of the Guardian: a slider that only shows, over rows that may be looked at.

Nothing here changes a policy. A budget is chosen on a dial, whose stops were certified together, or with a new certificate
from rows that were not shown.

Knows nothing of how a frontier is estimated.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conformal_arbitrage.collecting.looking import (
    FEWEST_LOOKED_AT,
    LOOKING_SHARE,
    LookedFrontier,
    LookedPoint,
    LookingPart,
    looked_frontier,
)
from conformal_arbitrage.errors import ArbitrageError, StoreError
from conformal_arbitrage.gateway.console.charts import frontier_chart
from conformal_arbitrage.gateway.console.overview import guardian_cost
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.rendering import count_text, loss_text, money, percent
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.monitoring.outcomes import AuditedDecision, due_days
from conformal_arbitrage.store.console_base import PolicyTally
from conformal_arbitrage.types import DAY

_LATEST = 5_000
"""So many of the latest rows are looked through; those in the looking part are shown."""
_KEPT = 60.0
"""Seconds that a frontier is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBudget:
    """One budget of the slider: what it would ask, in figures and in words."""

    point: LookedPoint
    dollars: float | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFrontier:
    """The slider of a policy.

    Attributes:
        frontier: what it is drawn from; None if there is nothing to draw, and `why` says so.
        chart: the picture.
        budgets: its stops.
        chosen: which of them is shown.
    """

    frontier: LookedFrontier | None = None
    why: str = ""
    chart: object = None
    budgets: Sequence[ShownBudget] = field(default_factory=list[ShownBudget])
    chosen: int = 0

    @property
    def points(self) -> list[tuple[float, str]]:
        """The stops as a cursor takes them: where, and what it says there."""
        return [(round(one.point.share, 4), one.words) for one in self.budgets]


class Frontiers:
    """The frontiers of policies; each is kept for a minute, since many rows are read for it."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts
        self._looking = LookingPart((parts.secret,))
        self._kept: dict[str, tuple[tuple[str, int], float, LookedFrontier | str]] = {}
        self._computing = asyncio.Lock()

    async def shown(self, live: LivePolicy, tally: PolicyTally, query: Mapping[str, str]) -> ShownFrontier:
        """Return the slider of a policy, set where the address says."""
        frontier = await self._frontier(live)
        if isinstance(frontier, str):
            return ShownFrontier(why=frontier)
        points, here = frontier.points, frontier.nearest(self._alpha(live))
        chosen = frontier.nearest(_number(query.get("alpha", ""), 1e9) or here.alpha)
        places = [(point.share, point.loss) for point in (here, chosen)]
        return ShownFrontier(
            frontier=frontier,
            chart=frontier_chart([(point.share, point.loss) for point in points], places[0], places[1], here.alpha),
            budgets=[_budget(live, point, tally) for point in points],
            chosen=points.index(chosen),
        )

    def _alpha(self, live: LivePolicy) -> float:
        return self._parts.config.alpha if live.alpha is None else live.alpha

    async def _frontier(self, live: LivePolicy) -> LookedFrontier | str:
        """Return the frontier of a policy, or why there is none."""
        key = live.identities_sha256, live.version
        async with self._computing:  # one at a time: it takes a core
            kept = self._kept.get(live.name)
            if kept is None or kept[0] != key or time.monotonic() > kept[1]:
                frontier = await self._estimated(live)
                kept = self._kept[live.name] = key, time.monotonic() + _KEPT, frontier
        return kept[2]

    async def _estimated(self, live: LivePolicy) -> LookedFrontier | str:
        if live.pair.models:
            return "a cascade has several thresholds; export a log and use `arbitrage evaluate --path`"
        store, certificate = self._parts.store, live.certificate
        await store.gather_rows()
        rows = await store.latest_rows(
            live.name, identities_sha256=live.identities_sha256, limit=_LATEST, wanted=self._looking.shows
        )
        kind = AuditedDecision(
            decided_by="primary", form=live.pair.form, binarized=certificate is not None and certificate.binarized
        )
        wait = due_days(kind, human_guardian=live.pair.review is not None) * DAY
        try:
            frontier = await asyncio.to_thread(
                looked_frontier, rows, certificate, alpha=self._alpha(live), settled=self._parts.clock() - wait,
                guardian_sees=self._parts.config.guardian_sees,
            )  # fmt: skip
        except StoreError:
            raise
        except ArbitrageError as error:
            return str(error)
        return _too_few(len(rows), live) if frontier is None else frontier


def _too_few(rows: int, live: LivePolicy) -> str:
    more = (
        "" if live.mode != "enforce" or live.settings.audit_rate > 0 else "; set audit_rate, since nothing is audited"
    )
    return (
        f"{count_text(rows, 'row')} may be looked at, {percent(LOOKING_SHARE)} of those that were audited or served in "
        f"shadow mode, and {FEWEST_LOOKED_AT} with an outcome are needed{more}"
    )


def _budget(live: LivePolicy, point: LookedPoint, tally: PolicyTally) -> ShownBudget:
    dollars = _month(live, point.share, tally)
    parts = [
        f"Alpha {point.alpha:g}: the Guardian is asked about {percent(point.share)} of the questions",
        f"estimated loss {loss_text(point.loss)}",
    ]
    if dollars is not None:
        parts.append(f"{money(dollars)} a month")
    return ShownBudget(point=point, dollars=dollars, words=", ".join(parts))


def _month(live: LivePolicy, share: float, tally: PolicyTally) -> float | None:
    """Return what thirty days like the last would cost, with audits; None if a cost is unknown."""
    each, priced = guardian_cost(tally), tally.decisions - tally.unknown_cost
    if each is None or not priced:
        return None
    primary = max(tally.cost - tally.guardian_cost, 0.0) / priced
    asked = share + live.settings.audit_rate * (1 - share)
    return tally.decisions * (primary + asked * each[0])


def _number(text: str, most: float) -> float | None:
    """Return a number from the address; None unless it is a number above 0."""
    try:
        value = float(text)
    except ValueError:
        return None
    return min(value, most) if value > 0 else None
