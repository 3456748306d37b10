"""Where a policy stands, in words for people: a badge, a sentence, and the course of its audited loss.

Words say what the monitor says, and never more: a good mark needs a limit, not a mean.

Knows nothing of requests or pages.
"""

import asyncio
import time
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as with_fields

from conformal_arbitrage.gateway.console.charts import LossCourse, LossPoint
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.live.watching import ServedFigure
from conformal_arbitrage.monitoring.history import LedgerCourse
from conformal_arbitrage.monitoring.lines import Lines
from conformal_arbitrage.monitoring.states import Standing
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.store.ledger_base import Ledger, LedgerKey

_POINTS = 120
_FEWEST_DRAWN = 5
_ROWS_AT_ONCE = 2000
_COMPUTING_SHARE, _LONGEST_KEPT = 20, 5.0
"""A course is computed again after so many times the time it took, and at most so many seconds, at the earliest."""

_BADGES = {
    "kept": ("kept", "good"),
    "within calibration luck": ("within calibration luck", "good"),
    "no evidence": ("audits cannot tell yet", "none"),
    "blind": ("blind", "none"),
    "amber": ("amber", "warn"),
    "red": ("over budget: safe mode", "bad"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStanding:
    """Where a policy stands, as a page shows it; losses are in the units of the certificate.

    Attributes:
        badge: the state in a word or two.
        tone: good, warn, bad or none.
        sentence: how things are.
        reasons: why it is amber, red or blind.
        known, pending, missing: audits.
        served: the loss of delivered answers, where that is another figure.
        group: whose ledger it is, of a certificate by groups: the one that matters most.
    """

    badge: str
    tone: str
    sentence: str
    reasons: tuple[str, ...] = ()
    known: int = 0
    pending: int = 0
    missing: int = 0
    served: float | None = None
    group: str = ""


def shown_standing(live: LivePolicy, watcher: Watcher) -> ShownStanding:
    """Return where a policy stands."""
    if live.mode == "shadow":
        return ShownStanding(
            badge="shadow", tone="none",
            sentence="The Guardian answers everything; what the Primary would have said is recorded for a calibration.",
        )  # fmt: skip
    if live.watched is None:
        why = live.unwatched or "there is no certificate yet"
        return ShownStanding(badge="not watched", tone="none", sentence=f"This policy has no monitor: {why}.")
    shown = watcher.standing(live)
    if shown is None:
        return ShownStanding(badge="starting", tone="none", sentence="The ledger has not been read yet.")
    standing, watch = shown
    shown = _of_standing(standing, watch.served, _bound(live), live)
    if not watch.key.group:
        return shown
    sentence = f"Of {len(live.watched.lines)} groups, {watch.key.group} matters most. {shown.sentence}"
    return replace(shown, sentence=sentence, group=watch.key.group)


def _of_standing(standing: Standing, served: ServedFigure | None, bound: float, live: LivePolicy) -> ShownStanding:
    figures = standing.figures
    badge, tone = _BADGES[standing.state]
    if live.forfeited is not None and standing.state in ("kept", "within calibration luck"):
        badge, tone = f"{badge}, no guarantee", "warn"
    return ShownStanding(
        badge=badge,
        tone=tone,
        sentence=_sentence(standing, bound),
        reasons=standing.reasons,
        known=figures.known,
        pending=figures.pending,
        missing=figures.missing,
        served=None if served is None or served.mean is None else bound * served.mean,
    )


def _sentence(standing: Standing, bound: float) -> str:
    """Return what audits say in one or two sentences."""
    figures, lines = standing.figures, standing.figures.lines
    if standing.mean is None:
        return "No audit has an outcome yet, so nothing is known of the loss in production."
    lower, upper = (_loss(bound * limit) for limit in standing.limits)
    alpha, red = f"{bound * lines.alpha:.4g}", "" if lines.red is None else f"{bound * lines.red:.3g}"
    audits = "1 audited decision" if figures.known == 1 else f"{figures.known:,} audited decisions"
    first = f"On {audits} the loss is {_loss(bound * standing.mean)}. "
    between = f"It lies between {lower} and {upper} with 95\u00a0% confidence"
    endings = {
        "kept": f", so the budget of {alpha} is kept.",
        "within calibration luck": f", so it is at most {red}, which luck in calibration explains; the budget is {alpha}.",
        "no evidence": f", so it is not yet clear whether the budget of {alpha} is kept.",
        "blind": f"; that is too little to say anything about the budget of {alpha}.",
        "amber": f"; the budget is {alpha}.",
        "red": f"; the budget is {alpha}, and the red line {red or alpha}. Every query goes to the Guardian until a new "
        "certificate is installed or the alarm is lifted.",
    }  # fmt: skip
    return first + between + endings[standing.state]


def _loss(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _bound(live: LivePolicy) -> float:
    return 1.0 if live.certificate is None else live.certificate.loss_bound


class Courses:
    """The courses of ledgers; each is kept until its ledger has changed, and longer if it takes long to compute."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, tuple[LedgerKey, int, float, LossCourse | None]] = {}

    async def course(self, live: LivePolicy, group: str = "") -> LossCourse | None:
        """Return the course of the ledger of a policy, or of one of its groups; None if there is too little to draw."""
        watched = live.watched
        if watched is None or group not in watched.lines:
            return None
        key = with_fields(watched.key, group=group)
        ledger = next((one for one in await self._store.ledgers(live.name) if one.key == key), None)
        if ledger is None:
            return None
        cached = self._kept.get(live.name)
        begun = time.monotonic()
        if cached is not None and cached[0] == key and (cached[1] == ledger.change or begun < cached[2]):
            return cached[3]
        marks = [] if live.alarm is None or live.alarm.at is None else [(live.alarm.at, "alarm")]
        course = await self._computed(ledger, watched.lines[group], _bound(live), marks)
        ended = time.monotonic()
        again = ended + min(_COMPUTING_SHARE * (ended - begun), _LONGEST_KEPT)
        self._kept[live.name] = (key, ledger.change, again, course)
        return course

    async def _computed(
        self, ledger: Ledger, lines: Lines, bound: float, marks: list[tuple[float, str]]
    ) -> LossCourse | None:
        """Return the course of a ledger, of which a few thousand rows at a time are in memory."""
        if ledger.rows < _FEWEST_DRAWN:
            return None
        course, times, latest = LedgerCourse(lines, ledger.rows, points=_POINTS), list[float](), 0.0
        for after in range(0, ledger.rows, _ROWS_AT_ONCE):
            rows = await self._store.ledger(ledger.key, after=after, limit=min(_ROWS_AT_ONCE, ledger.rows - after))
            places = await asyncio.to_thread(course.take, rows.loss)
            # requests at the same time are numbered as they are recorded
            drawn = np.maximum(np.maximum.accumulate(rows.drawn), latest)
            times += drawn[places].tolist()
            latest = max(latest, float(drawn.max(initial=0.0)))
        figures = await asyncio.to_thread(course.figures)
        points = [
            LossPoint(time=time, audits=int(audits), mean=bound * mean, lower=bound * lower, upper=bound * upper)
            for time, audits, mean, lower, upper in zip(times, *(one.tolist() for one in figures), strict=True)
            if audits >= _FEWEST_DRAWN
        ]
        red = None if lines.red is None or lines.red == lines.alpha else bound * lines.red
        return LossCourse(points=points, alpha=bound * lines.alpha, red=red, marks=marks)
