"""The overview of policies and the page of one: where it stands, its chart, and the slider over budgets."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace as with_fields
from starlette.responses import Response

from conformal_arbitrage.calibration.certificate import Certificate, read_pair
from conformal_arbitrage.collecting.renewal import (
    FEWEST_LOOKED_AT,
    LOOKING_SHARE,
    LookedFrontier,
    LookedPoint,
    LookingPart,
    Outlook,
    looked_frontier,
)
from conformal_arbitrage.errors import ArbitrageError, CertificateError, OptionError, RequestError, StoreError
from conformal_arbitrage.gateway.api import LONGEST_REASON
from conformal_arbitrage.gateway.audience import Caller
from conformal_arbitrage.gateway.console.charts import LossCourse, frontier_chart, loss_chart
from conformal_arbitrage.gateway.console.render import (
    Pages,
    Visit,
    changes,
    count_text,
    loss_text,
    moment,
    money,
    percent,
    redirect,
    sentence,
    visited_policy,
)
from conformal_arbitrage.gateway.console.report import (
    FEWEST_DRAWN,
    Savings,
    guardian_cost,
    loss_course,
    saved,
    summed,
)
from conformal_arbitrage.gateway.policies import LivePolicy, identities_of_pair
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.live.service import ServedFigure, voided
from conformal_arbitrage.monitoring.lines import Lines
from conformal_arbitrage.monitoring.monitor import LedgerCourse, Standing
from conformal_arbitrage.monitoring.outcomes import AuditedDecision, due_days
from conformal_arbitrage.store import events, policies, reviews
from conformal_arbitrage.store import ledger as stored_ledger
from conformal_arbitrage.store.events import PolicyTally
from conformal_arbitrage.store.ledger import Ledger, LedgerKey
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.store.record import JSONObject
from conformal_arbitrage.store.reviews import TeamBacklog
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY

if TYPE_CHECKING:
    from conformal_arbitrage.gateway.gateway import Gateway

# --- Where a policy stands, in words for people ---


_POINTS = 120
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
    lower, upper = (loss_text(bound * limit) for limit in standing.limits)
    alpha, red = f"{bound * lines.alpha:.4g}", "" if lines.red is None else f"{bound * lines.red:.3g}"
    audits = "1 audited decision" if figures.known == 1 else f"{figures.known:,} audited decisions"
    first = f"On {audits} the loss is {loss_text(bound * standing.mean)}. "
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
        ledger = next(
            (ledger for ledger in await self._store.run(stored_ledger.ledgers, live.name) if ledger.key == key), None
        )
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
        if ledger.rows < FEWEST_DRAWN:
            return None
        course, times, latest = LedgerCourse(lines, ledger.rows, points=_POINTS), list[float](), 0.0
        for after in range(0, ledger.rows, _ROWS_AT_ONCE):
            rows = await self._store.run(
                stored_ledger.read, ledger.key, after=after, limit=min(_ROWS_AT_ONCE, ledger.rows - after)
            )
            places = await asyncio.to_thread(course.take, rows.loss)
            # requests at the same time are numbered as they are recorded
            drawn = np.maximum(np.maximum.accumulate(rows.drawn), latest)
            times += drawn[places].tolist()
            latest = max(latest, float(drawn.max(initial=0.0)))
        figures = await asyncio.to_thread(course.figures)
        return loss_course(lines, bound, times, figures, marks)


# --- The overview ---


DAYS = 30
_TABLE_ROWS = 12


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
    saved: Savings
    waiting: TeamBacklog | None
    rows: int | None
    rows_needed: int | None


class OverviewPage:
    """GET /console."""

    def __init__(self, gateway: "Gateway", pages: Pages) -> None:
        self._pages = pages
        self._store = gateway.store
        self._views = gateway.views
        self._policies = gateway.policies
        self._watcher = gateway.watcher
        self._queue = gateway.queue
        self._alpha = gateway.config.alpha
        self._clock = gateway.clock
        self._courses = Courses(gateway.store)
        self._drawn: dict[str, tuple[LossCourse, DrawnCourse]] = {}

    async def overview(self, visit: Visit) -> Response:
        """Show how every policy does; reviewers, who must not know, are led to where they review."""
        caller = visit.who.caller
        if not caller.opens("operate"):
            return redirect("/console/review")
        since = await changes(self._store, visit)
        now = self._clock()
        tallies = summed(await self._views.of(caller).run(events.tallies, since=now - DAYS * DAY))
        visible = self._policies.all(caller)
        # what needs someone first
        visible.sort(key=lambda live: (live.alarm is None, live.mode == "shadow", live.name))
        cards = [await self.card(caller, live, tallies) for live in visible]
        broken = self._policies.out_of_service(caller)
        return self._pages.page(
            "overview.html", visit, since=since, cards=cards, broken=broken, days=DAYS, now=now,
            alarms=[card for card in cards if card.live.alarm is not None],
        )  # fmt: skip

    async def card(self, caller: Caller, live: LivePolicy, tallies: Mapping[str, PolicyTally]) -> PolicyCard:
        """Return what is shown of a policy; a team may have questions of others before it."""
        standing = shown_standing(live, self._watcher)
        course = await self._courses.course(live, standing.group)
        tally = tallies.get(live.name, PolicyTally(policy=live.name, version=live.version))
        shadow = live.mode == "shadow"
        rows = None
        if shadow:
            identities = live.identities_sha256
            rows = await self._store.run(events.count_rows, live.name, identities_sha256=identities, since=0.0)
        return PolicyCard(
            live=live,
            standing=standing,
            guardian=guardian_name(live),
            course=None if course is None else self._picture(live.name, course),
            tally=tally,
            saved=saved(tally),
            waiting=None if caller.policies is not None else await self._waiting(live),
            rows=rows,
            rows_needed=ceil(1 / self._alpha) - 1 if shadow else None,
        )

    def _picture(self, policy: str, course: LossCourse) -> DrawnCourse:
        """Return the picture of a course, which is drawn once."""
        picture = self._drawn.get(policy)
        if picture is None or picture[0] is not course:
            picture = self._drawn[policy] = course, drawn(course)
        return picture[1]

    async def _waiting(self, live: LivePolicy) -> TeamBacklog | None:
        """Return what the team behind a policy has before it; None if no people answer."""
        name, people = guardian_name(live), self._queue.people()
        if live.pair.guardian.identity.get("kind") != "human" or name not in people:
            return None
        [backlog] = await self._store.run(reviews.backlogs, {name: people[name]})
        return backlog


def guardian_name(live: LivePolicy) -> str:
    """Return what the Guardian is called: its model, its name, the column that it replays, or its kind."""
    identity = live.pair.guardian.identity
    return str(next((identity[name] for name in ("model", "name", "column", "kind") if identity.get(name)), "unknown"))


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
        (moment(point.time), f"{point.audits:,}", loss_text(point.mean), loss_text(point.lower), loss_text(point.upper))
        for point in chosen
    ]
    return DrawnCourse(chart=loss_chart(course), points=words, table=table)


# --- What another budget would ask of the Guardian ---


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
        return [(round(budget.point.share, 4), budget.words) for budget in self.budgets]


class Frontiers:
    """The frontiers of policies; each is kept for a minute, since many rows are read for it."""

    def __init__(self, gateway: "Gateway") -> None:
        self._store = gateway.store
        self._config = gateway.config
        self._clock = gateway.clock
        self._looking = LookingPart((gateway.secret,))
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
        return self._config.alpha if live.alpha is None else live.alpha

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
        store, certificate = self._store, live.certificate
        await events.gather_rows(store)
        rows = await store.run(
            events.latest_rows,
            live.name,
            identities_sha256=live.identities_sha256,
            limit=_LATEST,
            wanted=self._looking.shows,
        )
        kind = AuditedDecision(
            decided_by="primary", form=live.pair.form, binarized=certificate is not None and certificate.loss.binarized
        )
        wait = due_days(kind, human_guardian=live.pair.review is not None) * DAY
        try:
            frontier = await asyncio.to_thread(
                looked_frontier, rows, certificate, alpha=self._alpha(live), settled=self._clock() - wait,
                guardian_sees=self._config.guardian_sees,
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
    guardian_share = share + live.settings.audit_rate * (1 - share)
    return tally.decisions * (primary + guardian_share * each)


def _number(text: str, most: float) -> float | None:
    """Return a number from the address; None unless it is a number above 0."""
    try:
        value = float(text)
    except ValueError:
        return None
    return min(value, most) if value > 0 else None


# --- The page of a policy ---


_log = logging.getLogger("conformal_arbitrage.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownVersion:
    """A version of a policy as the page shows it; `certificate` is None if the stored document cannot be read."""

    version: PolicyVersion
    certificate: Certificate | None


class PolicyPage:
    """The routes under /console/policies/{name}."""

    def __init__(self, gateway: "Gateway", pages: Pages, overview: OverviewPage) -> None:
        self._pages = pages
        self._store = gateway.store
        self._views = gateway.views
        self._policies = gateway.policies
        self._renewer = gateway.renewer
        self._overview = overview
        self._frontiers = Frontiers(gateway)
        self._clock = gateway.clock

    async def policy(self, visit: Visit) -> Response:
        """GET: everything about a policy."""
        return await self._page(visit, visited_policy(self._policies, visit))

    async def _page(self, visit: Visit, live: LivePolicy, **more: Any) -> Response:
        since, store = await changes(self._store, visit), self._views.of(visit.who.caller)
        tallies = summed(await store.run(events.tallies, since=self._clock() - DAYS * DAY))
        history = [_shown(version) for version in await store.run(policies.history, live.name)]
        earlier = _earlier(history)
        void = (
            None
            if earlier is None
            else voided(await self._store.run(policies.prospect, live.name, earlier.version.certificate))
        )
        card = await self._overview.card(visit.who.caller, live, tallies)
        values: dict[str, Any] = {
            "live": live, "certificate": live.certificate, "days": DAYS, "history": history, "earlier": earlier,
            "void": void, "card": card, "ahead": await self._ahead(live), "identities": _identities(live),
            "install": None, "refused": None, "looked": await self._frontiers.shown(live, card.tally, visit.query),
        }  # fmt: skip
        return self._pages.page("policy.html", visit, since=since, **{**values, **more})

    async def _ahead(self, live: LivePolicy) -> Outlook | str:
        """Return where the policy stands in its schedule of renewals, or why it has none."""
        if live.certificate is None:
            return "there is no certificate of a single pair of models to renew"
        try:
            return await self._renewer.ahead(live.name)
        except StoreError:
            raise
        except ArbitrageError as error:
            return str(error)

    async def check(self, visit: Visit) -> Response:
        """POST .../check: say what installing a certificate would change; nothing is installed."""
        live = visited_policy(self._policies, visit)
        text = visit.form.get("certificate", "")
        try:
            new = await self._checked(live.name, text)
        except RequestError as error:
            return await self._page(visit, live, refused=str(error))
        forfeited = await self._policies.forfeits(live.name, new.to_dict())
        install = {"text": text, "certificate": new, "changes": _changes(live, new), "forfeited": forfeited}
        return await self._page(visit, live, install=install)

    async def _checked(self, name: str, text: str) -> Certificate:
        """Return a certificate that could be installed now."""
        document = _document(text)
        await self._policies.install(name, document, by="", dry_run=True)
        try:
            return read_pair(document)
        except CertificateError as error:
            raise RequestError(str(error), status=422) from error

    async def install(self, visit: Visit) -> Response:
        """POST .../install: put a certificate in force."""
        name = self._name(visit)
        version = await self._policies.install(
            name, _document(visit.form.get("certificate", "")), by=visit.who.key_id, dry_run=False
        )
        return self._done(visit, name, "installed", version)

    async def roll_back(self, visit: Visit) -> Response:
        """POST .../rollback: go back to the version before."""
        name = self._name(visit)
        return self._done(visit, name, "rolled back", await self._policies.rollback(name, by=visit.who.key_id))

    async def lift(self, visit: Visit) -> Response:
        """POST .../lift: end safe mode without a new certificate."""
        name, reason = self._name(visit), visit.form.get("reason", "").strip()
        if not 0 < len(reason) <= LONGEST_REASON:
            raise RequestError(f"Say why, in 1 to {LONGEST_REASON} characters: the record keeps it.", status=422)
        if await self._views.of(visit.who.caller).run(policies.lift, name, reason=reason, by=visit.who.key_id) is None:
            raise RequestError(f"Policy {name} has no alarm that stands.", status=409)
        await self._policies.refresh(await self._store.change_count())
        return self._done(visit, name, "lifted", None)

    async def renew(self, visit: Visit) -> Response:
        """POST .../renew: calibrate on the rows that the schedule names, and install whatever comes out."""
        name, ahead = self._name(visit), await self._ahead(visited_policy(self._policies, visit))
        if isinstance(ahead, str):
            raise RequestError(sentence(ahead), status=409)
        version = await self._renewer.renew_now(name, by=visit.who.key_id)
        if version is None:
            raise RequestError(
                "No renewal is due, or a version was installed or an alarm raised meanwhile.", status=409
            )
        return self._done(visit, name, "renewed", version)

    async def choose(self, visit: Visit) -> Response:
        """POST .../choose: set a dial to another of its stops."""
        name = self._name(visit)
        try:
            version = await self._renewer.choose(name, float(visit.form.get("alpha", "")), by=visit.who.key_id)
        except (ValueError, CertificateError, OptionError) as error:
            raise RequestError(f"The dial cannot be set to that: {error}", status=422) from error
        return self._done(visit, name, "chose a stop of the dial for", version)

    def _name(self, visit: Visit) -> str:
        """Return the policy that a form is about; one that is out of service may be repaired."""
        name = visit.named("name")
        visit.who.caller.check_policy(name)
        if not self._policies.is_configured(name):
            raise RequestError(f"There is no policy {name:.80}.", status=404)
        return name

    def _done(self, visit: Visit, name: str, what: str, version: PolicyVersion | None) -> Response:
        number = "" if version is None else f", version {version.version}"
        _log.info("%s %s policy %s%s", visit.who.key_id, what, name, number, extra={"policy": name})
        return redirect(f"/console/policies/{name}")


def _shown(version: PolicyVersion) -> ShownVersion:
    try:
        return ShownVersion(version=version, certificate=read_pair(version.certificate))
    except CertificateError:
        return ShownVersion(version=version, certificate=None)


def _earlier(history: list[ShownVersion]) -> ShownVersion | None:
    """Return the version that rolling back would reactivate."""
    if not history:
        return None
    wanted = history[0].version.origin - 1
    return next((entry for entry in history if entry.version.version == wanted), None)


def _document(text: str) -> JSONObject:
    try:
        document: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"That is not a certificate: it is not JSON ({error}).", status=422) from error
    if not isinstance(document, Mapping):
        raise RequestError("That is not a certificate: it is not a JSON object.", status=422)
    return document  # pyright: ignore[reportUnknownVariableType]


def _changes(live: LivePolicy, new: Certificate) -> list[tuple[str, str, str]]:
    """Return what a certificate would change: name, now, then."""
    old = live.certificate
    facts = {} if old is None else dict(old.facts())
    then = dict(new.facts())
    names = dict.fromkeys([*facts, *then])
    return [(name, facts.get(name, "–"), then.get(name, "–")) for name in names if facts.get(name) != then.get(name)]


def _identities(live: LivePolicy) -> dict[str, list[tuple[str, str]]]:
    """Return what is known of each model, as a table."""
    return {
        role: [(name, str(value)) for name, value in sorted(identity.items()) if value is not None]
        for role, identity in identities_of_pair(live.pair).items()
    }
