"""A month of a policy as one page that can be filed: read from the record, and drawn like the console's pages."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version as version_of

import numpy as np
from msgspec.structs import replace as with_fields

from conformal_arbitrage.calibration.certificate import Certificate, read_pair
from conformal_arbitrage.core.exact import Floats, Integers
from conformal_arbitrage.errors import CertificateError, OptionError
from conformal_arbitrage.gateway.console.charts import LossCourse, LossPoint, loss_chart
from conformal_arbitrage.gateway.console.render import count_text, environment, moment, money, percent, sentence
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.live.service import (
    PolicyHistory,
    PolicyStanding,
    WatchedLedger,
    as_evidence,
    read_history,
    stand,
    verify_record,
    voided,
)
from conformal_arbitrage.monitoring.lines import Lines
from conformal_arbitrage.monitoring.monitor import SEVERITY, Standing, ledger_history
from conformal_arbitrage.store import events, integrity, pages
from conformal_arbitrage.store.events import PolicyTally
from conformal_arbitrage.store.integrity import Head
from conformal_arbitrage.store.policies import Notice, PolicyVersion
from conformal_arbitrage.store.record import LiftBody
from conformal_arbitrage.store.session import Store

_PAGE = 500
_REASONS = 5
FEWEST_DRAWN = 5
"""Below this many audits the limits of a ledger say nothing that can be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """A calendar month in UTC: its name, such as 2026-11, and its first and last moment in seconds since 1970."""

    name: str
    start: float
    end: float

    @classmethod
    def of(cls, name: str) -> "Month":
        """Return the month of a name such as 2026-11.

        Raises:
            OptionError: the name is malformed.
        """
        try:
            first = datetime.strptime(name, "%Y-%m").replace(tzinfo=UTC)
        except ValueError as error:
            raise OptionError(f"a month is written as 2026-11; got {name!r}") from error
        years, month = divmod(first.month, 12)
        after = first.replace(year=first.year + years, month=month + 1)
        return cls(name=name, start=first.timestamp(), end=after.timestamp())

    @property
    def title(self) -> str:
        """The month as people write it."""
        return datetime.fromtimestamp(self.start, UTC).strftime("%B %Y")

    def has(self, time: float | None) -> bool:
        """Tell whether a time lies in it."""
        return time is not None and self.start <= time < self.end


# --- What decisions came to ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What a policy saved against always asking the Guardian.

    Attributes:
        always: dollars of always asking, for the decisions with a known cost; None if it is unknown.
        dollars: that, less what decisions and audits cost; None if it is unknown.
        basis: in words, what that rests on.
    """

    always: float | None
    dollars: float | None
    basis: str


def saved(tally: PolicyTally) -> Savings:
    """Return what decisions saved against always asking the Guardian, for which recorded calls say what one costs."""
    calls, mean = tally.guardian_calls + tally.audit_calls, guardian_cost(tally)
    priced = tally.decisions - tally.unknown_cost
    if mean is None or not priced:
        return Savings(always=None, dollars=None, basis="no call of the Guardian has a known price")
    mean_of = f"the mean cost of {count_text(calls, 'recorded call')}"
    basis = f"against always asking the Guardian at {mean_of}, after what audits cost"
    return Savings(always=priced * mean, dollars=priced * mean - tally.cost - tally.audit_cost, basis=basis)


def guardian_cost(tally: PolicyTally) -> float | None:
    """Return what an answer of the Guardian costs on average; None if that is unknown."""
    calls = tally.guardian_calls + tally.audit_calls
    return (tally.guardian_cost + tally.audit_cost) / calls if calls else None


def summed(tallies: Iterable[PolicyTally]) -> dict[str, PolicyTally]:
    """Return the counts of each policy, over all of its versions."""
    sums: dict[str, PolicyTally] = {}
    for tally in tallies:
        so_far = sums.get(tally.policy, PolicyTally(policy=tally.policy, version=0))
        names = PolicyTally.__struct_fields__[2:]
        added = {name: getattr(so_far, name) + getattr(tally, name) for name in names}
        sums[tally.policy] = with_fields(so_far, version=tally.version, **added)
    return sums


@dataclass(slots=True, kw_only=True)
class Use:
    """Who decided in a month and what it cost, counted from its records.

    Attributes:
        tally: the counts that the console shows as well.
        audits: audits that were answered, whether or not their cost is known.
        safe: decisions in safe mode.
        undelivered: decisions without an answer.
        reasons: how many decisions have no guarantee, by the reason.
    """

    tally: PolicyTally
    audits: int = 0
    safe: int = 0
    undelivered: int = 0
    reasons: Counter[str]


async def _use(store: Store, policy: str, month: Month) -> Use:
    """Count the recorded decisions of a month, page by page."""
    use = Use(tally=PolicyTally(policy=policy, version=0), reasons=Counter())
    wanted = pages.RecordFilter(policy=policy, since=month.start, until=month.end)
    while page := await store.run(pages.records, wanted, limit=_PAGE):
        tallies = [use.tally]
        for record in page:
            decision, audit = record.decision, record.audit
            tallies.append(with_fields(events.counts_of(decision, record.decided_by, ()), policy=policy))
            if audit is not None and audit.error is None:
                use.audits += 1
                if audit.cost is not None:
                    tallies.append(PolicyTally(policy=policy, version=0, audit_calls=1, audit_cost=audit.cost))
            use.safe += str(decision.mode) == "safe"
            use.undelivered += decision.cancelled or decision.pending
            use.reasons.update([] if decision.no_guarantee is None else [decision.no_guarantee])
        use.tally, wanted = summed(tallies)[policy], with_fields(wanted, before=page[-1].id)
    return use


# --- The course of a ledger ---


def loss_course(
    lines: Lines,
    bound: float,
    times: Sequence[float],
    figures: tuple[Integers, Floats, Floats, Floats],
    marks: Sequence[tuple[float, str]],
) -> LossCourse:
    """Return a ledger's course to draw.

    Args:
        times: when the audit of each point was drawn.
        figures: audits, mean, lower and upper limit of each point.
        marks: times of alarms and other events, with a word each.
    """
    points = [
        LossPoint(time=time, audits=int(audits), mean=bound * mean, lower=bound * lower, upper=bound * upper)
        for time, audits, mean, lower, upper in zip(times, *(figure.tolist() for figure in figures), strict=True)
        if audits >= FEWEST_DRAWN
    ]
    red = None if lines.red is None or lines.red == lines.alpha else bound * lines.red
    return LossCourse(points=points, alpha=bound * lines.alpha, red=red, marks=marks)


_MARKS = {"alarm": "alarm", "lift": "lifted", "exclusion": "excluded"}


def _charts(report: "MonthReport", group: str) -> list[tuple[str, object]]:
    """Return a picture of each ledger of the month, or of one of its groups, under what it is about."""
    marks = [(version.installed, f"version {version.version}") for version in report.history.versions]
    marks += [(notice.body.at or 0.0, _MARKS[notice.body.kind]) for notice in report.history.notices]
    drawn: list[tuple[str, object]] = []
    for ledger in (standing.ledger for standing in report.standings):
        if ledger.lines is None or ledger.certificate is None or ledger.key.group != group:
            continue
        if len(ledger.rows) < FEWEST_DRAWN:
            continue
        past = ledger.rows.due <= report.until
        missing = (np.isnan(ledger.rows.loss) & past).astype(np.float64)
        history = ledger_history(ledger.lines, ledger.rows.loss, missing)
        figures = (history.audits, history.mean, history.lower, history.upper)
        times = np.maximum.accumulate(ledger.rows.drawn)[history.audits - 1].tolist()
        course = loss_course(ledger.lines, ledger.certificate.loss_bound, times, figures, sorted(marks))
        drawn.append((_ledger_name(ledger), loss_chart(course)))
    return drawn


# --- A month of a policy, read from a store ---


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthReport:
    """A month of a policy.

    Attributes:
        now: when it was read.
        standings: where each ledger of the month stands, or would stand without later decisions; the last one last.
        in_force: versions that were in force in the month, in order.
        notices: alarms, lifts and exclusions of keys in the month.
        head: how far the record has come.
        problems: what is not as it was written; empty if the record verifies.
    """

    history: PolicyHistory
    month: Month
    now: float
    standings: tuple[PolicyStanding, ...]
    in_force: tuple[PolicyVersion, ...]
    notices: tuple[Notice, ...]
    use: Use
    head: Head
    problems: tuple[str, ...]

    @property
    def standing(self) -> PolicyStanding | None:
        """Where the last ledger of the month stands, of groups the worst; None if there is none."""
        if not self.standings:
            return None
        last = with_fields(self.standings[-1].ledger.key, group="")  # the same for all groups of a version
        groups = [standing for standing in self.standings if with_fields(standing.ledger.key, group="") == last]
        return min(groups, key=lambda standing: [*SEVERITY, "not watched"].index(standing.state))

    @property
    def until(self) -> float:
        """The end of the month, or now if that is earlier."""
        return min(self.month.end, self.now)


async def read_month(store: Store, config: Config, policy: str, month: Month, *, now: float) -> MonthReport:
    """Read a month of a policy.

    Raises:
        OptionError: there is no policy of that name, or the month has not begun.
    """
    if month.start > now:
        raise OptionError(f"{month.name} has not begun yet; choose an earlier month")
    history, until = await read_history(store, config, policy), min(month.end, now)
    settings = config.policies.get(policy, PolicyConfig())
    ledgers = [ledger for ledger in (_until(ledger, until) for ledger in history.ledgers) if len(ledger.rows)]
    ledgers.sort(key=lambda ledger: (ledger.key.version, ledger.key.lifts, float(ledger.rows.drawn[-1])))
    lately = [ledger for ledger in ledgers if ledger.rows.drawn[-1] >= month.start] or ledgers[-1:]
    ends = [*(version.installed for version in history.versions[1:]), np.inf]
    return MonthReport(
        history=replace(history, ledgers=tuple(ledgers)),
        month=month,
        now=now,
        standings=tuple(stand(ledger, settings, until) for ledger in lately),
        in_force=tuple(
            version
            for version, end in zip(history.versions, ends, strict=True)
            if version.installed < month.end and end > month.start
        ),
        notices=tuple(notice for notice in history.notices if month.has(notice.body.at)),
        use=await _use(store, policy, month),
        head=await store.run(integrity.head),
        problems=tuple(await verify_record(store)),
    )


def _until(ledger: WatchedLedger, until: float) -> WatchedLedger:
    """Return a ledger without decisions drawn later."""
    return replace(ledger, rows=ledger.rows.first(int((ledger.rows.drawn < until).sum())))


# --- The page ---


_MEANING = {
    "kept": "With the confidence stated below, the loss so far is at most alpha.",
    "within calibration luck": "With the confidence stated below, the loss so far is at most the red line: what bad luck in "
    "calibration explains, except for one valid calibration in forty.",
    "no evidence": "Audits neither confirm nor refute that the budget is kept; more of them will.",
    "blind": "There are too few audits to say anything.",
    "amber": "Something needs attention.",
    "red": "The evidence says that the loss, audits without an outcome counted, lies above the red line; in safe mode every "
    "query goes to the Guardian until this is settled.",
    "not watched": "This certificate has no monitor.",
}


def report_page(report: MonthReport) -> str:
    """Return the whole page."""
    shown = report.standing
    bodies = [notice.body for notice in report.history.notices]
    lifts = [body for body in bodies if isinstance(body, LiftBody) and (body.at or 0.0) < report.month.end]
    return environment().get_template("report.html").render(
        report=report,
        shown=shown,
        meaning=_meaning(shown),
        lifts=lifts,
        certificate_of=_certificate,
        voided=voided,
        reasons=report.use.reasons.most_common(_REASONS),
        evidence=[] if shown is None or shown.standing is None else _evidence(shown, shown.standing),
        charts=[] if shown is None else _charts(report, shown.ledger.key.group),
        ledgers=[_ledger_row(standing) for standing in report.standings],
        use=_use_facts(report.use),
        software=version_of("conformal-arbitrage"),
    )  # fmt: skip


def _meaning(shown: PolicyStanding | None) -> str:
    """Return the state in a sentence, with its reasons."""
    if shown is None:
        return "No decision was drawn for an audit until then."
    reasons = () if shown.standing is None else shown.standing.reasons
    return _MEANING[shown.state] + (f" {sentence('; '.join(reasons))}" if reasons else "")


def _certificate(version: PolicyVersion) -> Certificate | None:
    try:
        return read_pair(version.certificate)
    except CertificateError:
        return None


def _bound(standing: PolicyStanding) -> float:
    return 1.0 if standing.ledger.certificate is None else standing.ledger.certificate.loss_bound


def _mean(standing: PolicyStanding) -> str:
    mean = None if standing.standing is None else standing.standing.mean
    return "unknown" if mean is None else f"{_bound(standing) * mean:.4f}"


def _limits(standing: PolicyStanding) -> str:
    if standing.standing is None:
        return standing.ledger.unwatched or ""
    return " to ".join(f"{_bound(standing) * limit:.4f}" for limit in standing.standing.limits)


def _evidence(shown: PolicyStanding, standing: Standing) -> list[tuple[str, str]]:
    """Return what audits say about a ledger."""
    ledger, figures, lines, bound = shown.ledger, standing.figures, standing.figures.lines, _bound(shown)
    log = figures.log_evidence[1]
    facts = [
        ("Ledger", _ledger_name(ledger)),
        *([("Group, the one that matters most", ledger.key.group)] if ledger.key.group else []),
        ("State", shown.state),
        *(("Reason", reason) for reason in standing.reasons),
        ("Mean loss of known audits", _mean(shown)),
        ("Limits of the mean loss", _limits(shown)),
        ("Alpha", f"{bound * lines.alpha:.4g}"),
        ("Red line", "none" if lines.red is None else f"{bound * lines.red:.4g}"),
        ("Evidence against the red line", "none" if log is None else f"{as_evidence(log):.3g} (red from 40)"),
        ("Audits", f"{figures.known:,} known, {figures.pending:,} pending, {figures.missing:,} missing"),
        ("Last audit", "none" if ledger.last_audit is None else moment(ledger.last_audit)),
        ("Audit rate, as configured", percent(shown.audit_rate)),
    ]
    if shown.served is not None:
        served = "unknown" if shown.served.mean is None else f"{bound * shown.served.mean:.4f}"
        facts.append(("Loss of delivered answers, fallbacks included", served))
    return facts


def _ledger_name(ledger: WatchedLedger) -> str:
    lifts = f", after {count_text(ledger.key.lifts, 'lifted alarm')}" if ledger.key.lifts else ""
    return f"version {ledger.key.version}{lifts}"


def _ledger_row(standing: PolicyStanding) -> tuple[str, str, str, str, str]:
    key = standing.ledger.key
    name = f"{_ledger_name(standing.ledger)}, models {key.identities_sha256[:8]}"
    name += f", group {key.group}" if key.group else ""
    return name, standing.state, f"{len(standing.ledger.rows):,}", _mean(standing), _limits(standing)


def _use_facts(use: Use) -> list[tuple[str, str]]:
    """Return who decided, and what it cost; nothing without decisions."""
    tally, savings = use.tally, saved(use.tally)
    if not tally.decisions:
        return []
    counts = [
        ("Decided by the Primary", tally.by_primary),
        ("Decided by the Guardian", tally.by_guardian),
        ("Decided by a fallback", tally.by_fallback),
        ("In safe mode", use.safe),
        ("Without an answer", use.undelivered),
    ]
    unknown = f"; the cost of {count_text(tally.unknown_cost, 'decision')} is unknown" if tally.unknown_cost else ""
    always = f"unknown: {savings.basis}"
    if savings.always is not None:
        calls = count_text(tally.guardian_calls + tally.audit_calls, "recorded call")
        mean = f"{money(guardian_cost(tally))} each, the mean of {calls}"
        always = f"{money(savings.always)} for the decisions with a known cost, at {mean}"
    return [
        ("Recorded decisions", f"{tally.decisions:,}"),
        *((name, f"{count:,} ({percent(count / tally.decisions)})") for name, count in counts if count),
        ("Spent on decisions", "unknown" if tally.unknown_cost == tally.decisions else f"{money(tally.cost)}{unknown}"),
        ("Spent on audits", f"{money(tally.audit_cost)} for {count_text(use.audits, 'audit')}"),
        ("Always asking the Guardian", always),
        ("Saved", "unknown" if savings.dollars is None else f"{money(savings.dollars)} of {money(savings.always)}"),
    ]
