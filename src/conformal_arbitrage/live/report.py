"""A month of a policy as one page that can be filed: read from a store, drawn, and written as HTML."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from math import ceil, floor, log10

import numpy as np
from msgspec.structs import replace as replaced

from conformal_arbitrage.calibration.certificate import Certificate, read_pair
from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.errors import CertificateError, OptionError
from conformal_arbitrage.evaluation.show import DrawnLedger, DrawnMoment
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.live.service import (
    PolicyHistory,
    PolicyStanding,
    WatchedLedger,
    as_evidence,
    read_history,
    stand,
    voided,
)
from conformal_arbitrage.monitoring.monitor import SEVERITY, Standing, ledger_history
from conformal_arbitrage.store import integrity, pages
from conformal_arbitrage.store.integrity import Head
from conformal_arbitrage.store.ledger import LedgerKey, LedgerRows
from conformal_arbitrage.store.policies import Notice, PolicyVersion
from conformal_arbitrage.store.record import AlarmBody, DecisionBody, DecisionRecord, LiftBody
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY, Leg

# --- The style sheet of report pages ---


STYLE = """
:root { color-scheme:light }
body { font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif; color:#1c1c1c; background:#fff;
    max-width:52rem; margin:2rem auto; padding:0 1.2rem }
h1 { font-size:1.7rem; margin:0 }
header p { color:#555; margin:.2rem 0 1.2rem }
h2 { font-size:1.15rem; margin:2rem 0 .6rem; border-bottom:1px solid #ccc; padding-bottom:.2rem }
h3 { font-size:.95rem; margin:.8rem 0 .3rem }
.tiles { display:grid; grid-template-columns:repeat(3,1fr); gap:.6rem; margin:0 }
.tiles div { border:1px solid #ccc; border-radius:6px; padding:.5rem .8rem; overflow-wrap:anywhere }
.tiles dt { color:#555; font-size:.8rem }
.tiles dd { margin:0; font-size:1.1rem; font-weight:600 }
.tiles .good { border-color:#00735c; background:#eef8f5 }
.tiles .warn { border-color:#b26a00; background:#fff6e5 }
.tiles .bad { border-color:#b3261e; background:#fdeeee }
p.bad { color:#b3261e; font-weight:600 }
.lead { margin:.9rem 0 0 }
blockquote { margin:.3rem 0 1rem; padding:.5rem .9rem; border-left:3px solid #888; background:#f6f6f6;
    font-size:.88rem }
table { border-collapse:collapse; width:100%; font-size:.88rem; margin:.4rem 0 }
th,td { text-align:left; padding:.28rem .7rem .28rem 0; border-bottom:1px solid #e3e3e3; vertical-align:top }
td:first-child { white-space:nowrap }
td:last-child { overflow-wrap:anywhere }
thead th { color:#555; font-weight:600; white-space:nowrap }
.facts th { font-weight:400; color:#555; width:17rem }
.facts td { font-variant-numeric:tabular-nums }
.small,figcaption { font-size:.8rem; color:#555 }
figure { margin:1rem 0; break-inside:avoid }
svg { width:100%; height:auto; display:block }
svg text { font:11px system-ui,sans-serif }
.tick { fill:#555 }
.grid { stroke:#e6e6e6; fill:none }
.band { fill:#0072b2; fill-opacity:.16 }
.mean { stroke:#0072b2; stroke-width:2; fill:none }
.alpha { stroke:#1c1c1c; stroke-width:1.3; fill:none }
.red { stroke:#b3261e; stroke-width:1.3; stroke-dasharray:6 4; fill:none }
code { font-size:.75rem; overflow-wrap:anywhere }
footer { margin-top:2.5rem; color:#555; font-size:.8rem; border-top:1px solid #ccc; padding-top:.5rem }
@page { margin:18mm 16mm }
@media print {
  body { margin:0; max-width:none; padding:0; font-size:10.5pt }
  h2,h3 { break-after:avoid }
  tr,blockquote,.tiles { break-inside:avoid }
  * { print-color-adjust:exact; -webkit-print-color-adjust:exact }
}
@media(max-width:34rem) {
  .tiles { grid-template-columns:1fr 1fr }
  .facts th { width:9rem }
}
"""


# --- The figure of a report ---


_WIDTH, _HEIGHT = 760, 310
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 46, 26
_FEWEST = 20
_FEW_DAYS = 5
"""Below this many, dates have hours."""
_AN_HOUR = 1 / 24
"""Up to this many days, only the time is shown, with seconds."""
_ROWS = {"change": 11, "installed": 11, "red": 23, "lifted": 35}
"""How far down the words of a mark stand, so that marks of different kinds do not meet."""
_COLORS = {"change": "#b26a00", "red": "#b3261e", "installed": "#00735c", "lifted": "#555"}


def drawn_ledgers(history: PolicyHistory, now: float, *, group: str = "") -> list[DrawnLedger]:
    """Return the ledgers of a policy, or of one of its groups, to draw, by days since 1970; empty ones are left out."""
    drawn: list[DrawnLedger] = []
    starts = sorted(moment.x for moment in drawn_moments(history) if moment.kind != "red")
    for ledger in history.ledgers:
        if ledger.lines is None or not len(ledger.rows) or ledger.key.group != group:
            continue
        past = ledger.rows.due <= now
        unknown = np.isnan(ledger.rows.loss)
        points = ledger_history(ledger.lines, ledger.rows.loss, (unknown & past).astype(np.float64))
        days = ledger.rows.drawn / DAY
        ended = min([start for start in starts if start > days[-1]], default=now / DAY)
        bound = 1.0 if ledger.certificate is None else ledger.certificate.loss_bound
        drawn.append(
            DrawnLedger(x=days[points.audits - 1], start=float(days[0]), stop=ended, history=points, bound=bound)
        )
    return drawn


def drawn_moments(history: PolicyHistory) -> list[DrawnMoment]:
    """Return installations, alarms and lifts of a policy to mark, in order."""
    moments = [
        DrawnMoment(kind="installed", x=version.installed / DAY, text=f"version {version.version}")
        for version in history.versions
    ]
    for notice in history.notices:
        kind = "red" if isinstance(notice.body, AlarmBody) else "lifted"
        text = f"red: {notice.body.cause}" if isinstance(notice.body, AlarmBody) else "lifted"
        moments.append(DrawnMoment(kind=kind, x=(notice.body.at or 0.0) / DAY, text=text))
    return sorted(moments, key=lambda moment: moment.x)


def figure_svg(ledgers: Sequence[DrawnLedger], moments: Sequence[DrawnMoment], *, start: float, stop: float) -> str:
    """Return the figure between two times; x is in days since 1970.

    Args:
        ledgers: what to draw.
        moments: what to mark.
        start: the first day in sight.
        stop: the last one.
    """
    shown = [ledger for ledger in ledgers if (ledger.history.audits >= _FEWEST).any()]
    if not shown:
        return ""
    frame = _Frame(shown, start, stop)
    parts = [*frame.axes(), *(part for ledger in shown for part in frame.ledger(ledger))]
    parts += [part for moment in moments if start <= moment.x <= stop for part in frame.moment(moment)]
    title = "Loss of audited decisions over time with its limits, alpha and the red line"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f'<clipPath id="inside"><rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}"/></clipPath>{"".join(parts)}</svg>'
    )


class _Frame:
    """Turns days and losses into places in the picture."""

    def __init__(self, ledgers: Sequence[DrawnLedger], start: float, stop: float) -> None:
        self._start, self._stop = start, max(stop, start + 1e-6)
        highest = lowest = 0.0
        for ledger in ledgers:
            enough = ledger.history.audits >= 5 * _FEWEST
            upper = float(ledger.history.upper[enough][:1].max(initial=0.0))
            red = ledger.history.lines.red or 0.0
            mean = float(np.nan_to_num(ledger.history.mean[ledger.history.audits >= _FEWEST]).max(initial=0.0))
            highest = max(highest, ledger.bound * max(upper, 1.3 * red, 1.6 * ledger.history.lines.alpha, 1.2 * mean))
            lower = float(ledger.history.lower[enough][:1].min(initial=0.0))
            lowest = min(lowest, ledger.bound * lower)  # below 0 where gains count
        self._step = _round_step((highest - lowest) / 4)
        self._top = self._step * ceil(highest / self._step)
        self._low = self._step * floor(lowest / self._step)

    def x(self, day: float) -> float:
        inside = min(max(day, self._start), self._stop)
        return round(_LEFT + (inside - self._start) / (self._stop - self._start) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, loss: float) -> float:
        share = min(max((loss - self._low) / (self._top - self._low), -0.05), 1.2)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def axes(self) -> list[str]:
        """Draw the grid with its numbers and dates."""
        parts: list[str] = []
        for k in range(round(self._low / self._step), round(self._top / self._step) + 1):
            y = self.y(k * self._step)
            parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{k * self._step:.4g}</text>'
            )
        days, form = np.linspace(self._start, self._stop, 6), "%d %b"
        if self._stop - self._start < _FEW_DAYS:
            form = "%d %b %H:%M" if self._stop - self._start > _AN_HOUR else "%H:%M:%S"
        for k, day in enumerate(days.tolist()):
            anchor = "start" if k == 0 else "end" if k == len(days) - 1 else "middle"
            text = datetime.fromtimestamp(86400 * day, UTC).strftime(form).lstrip("0")
            parts.append(f'<text class="tick" x="{self.x(day)}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{text}</text>')
        return parts

    def ledger(self, ledger: DrawnLedger) -> list[str]:
        """Draw limits, mean and lines of one ledger."""
        history = ledger.history
        shown = (history.audits >= _FEWEST) & (ledger.x >= self._start) & (ledger.x <= self._stop)
        if ledger.stop < self._start or ledger.start > self._stop:
            return []
        x, bound, lines = ledger.x[shown], ledger.bound, history.lines
        from_, to = self.x(ledger.start), self.x(ledger.stop)
        parts = [f'<path class="alpha" d="M{from_} {self.y(bound * lines.alpha)}H{to}"/>']
        if lines.red is not None and lines.red > lines.alpha:
            parts.append(f'<path class="red" d="M{from_} {self.y(bound * lines.red)}H{to}"/>')
        if not x.size:
            return parts
        up, down = self._points(x, bound * history.upper[shown]), self._points(x, bound * history.lower[shown])
        band = f'<path class="band" clip-path="url(#inside)" d="M{"L".join([*up, *reversed(down)])}Z"/>'
        mean = self._points(x, bound * history.mean[shown])
        return [band, *parts, f'<path class="mean" clip-path="url(#inside)" d="M{"L".join(mean)}"/>']

    def moment(self, moment: DrawnMoment) -> list[str]:
        """Mark one moment, with its words above."""
        x, color = self.x(moment.x), _COLORS[moment.kind]
        anchor = "end" if x > _WIDTH - 120 else "start"
        row = _ROWS[moment.kind]
        words = (
            f'<text class="mark" fill="{color}" x="{x}" y="{row}" text-anchor="{anchor}">{escape(moment.text)}</text>'
        )
        return [f'<path stroke="{color}" stroke-dasharray="4 3" d="M{x} {row + 4}V{_HEIGHT - _BOTTOM}"/>', words]

    def _points(self, x: Floats, losses: Floats) -> list[str]:
        known = np.nan_to_num(losses)
        return [f"{self.x(day)} {self.y(loss)}" for day, loss in zip(x.tolist(), known.tolist(), strict=True)]


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... times a power of ten that is not below a number."""
    power = 10.0 ** floor(log10(rough)) if rough > 0 else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


# --- A month of a policy, read from a store ---


_PAGE = 500


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Who decided in a month, and what it cost, as far as it is recorded.

    Attributes:
        decisions: recorded decisions.
        by: how many each of Primary, Guardian and fallback decided.
        safe: decisions in safe mode.
        undelivered: decisions without an answer.
        unpromised: how many decisions have no guarantee, by the reason.
        unpriced: decisions whose cost is unknown.
        spent: dollars of the others, without audits.
        audits: audits that were answered.
        audit_cost: dollars of those whose cost is known.
        guardian_cost: mean dollars of a call of the Guardian; None if none is known.
        guardian_calls: how many calls that mean is over.
    """

    decisions: int = 0
    by: dict[str, int]
    safe: int = 0
    undelivered: int = 0
    unpromised: dict[str, int] = field(default_factory=dict[str, int])
    unpriced: int = 0
    spent: float = 0.0
    audits: int = 0
    audit_cost: float = 0.0
    guardian_cost: float | None = None
    guardian_calls: int = 0

    @property
    def guardian_share(self) -> float | None:
        """The share of decisions that the Guardian made."""
        return self.by.get("guardian", 0) / self.decisions if self.decisions else None

    @property
    def savings(self) -> "Savings":
        """What was saved against always asking the Guardian."""
        return Savings.of(
            priced=self.decisions - self.unpriced,
            spent=self.spent + self.audit_cost,
            calls=self.guardian_calls,
            calls_cost=self.guardian_calls * (self.guardian_cost or 0.0),
        )


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

    @classmethod
    def of(cls, *, priced: int, spent: float, calls: int, calls_cost: float) -> "Savings":
        """Return the savings.

        Args:
            priced: decisions with a known cost.
            spent: dollars of these, and of audits.
            calls: recorded calls of the Guardian with a known cost, audits included.
            calls_cost: their dollars.
        """
        if not calls or not priced:
            return cls(always=None, dollars=None, basis="no call of the Guardian has a known price")
        always = priced * calls_cost / calls
        mean = f"at the mean cost of {calls:,} recorded call{'s' if calls > 1 else ''}"
        basis = f"against always asking the Guardian {mean}, after what audits cost"
        return cls(always=always, dollars=always - spent, basis=basis)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthReport:
    """A month of a policy.

    Attributes:
        history: everything that is known about the policy.
        month: which month.
        now: when it was read.
        standings: where each ledger of the month stands, or would stand without later decisions; the last one last.
        in_force: versions that were in force in the month, in order.
        notices: alarms and lifts in the month.
        use: who decided, and what it cost.
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
        last = key_of_groups(self.standings[-1])
        groups = [standing for standing in self.standings if key_of_groups(standing) == last]
        return min(groups, key=lambda standing: [*SEVERITY, "not watched"].index(standing.state))

    @property
    def until(self) -> float:
        """The end of the month, or now if that is earlier."""
        return min(self.month.end, self.now)


def key_of_groups(standing: PolicyStanding) -> LedgerKey:
    """Return the key of a ledger without its group: the same for all groups of a version with the same models."""
    return replaced(standing.ledger.key, group="")


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
    return MonthReport(
        history=replace(history, ledgers=tuple(ledgers)),
        month=month,
        now=now,
        standings=tuple(stand(ledger, settings, until) for ledger in lately),
        in_force=_in_force(history.versions, month),
        notices=tuple(notice for notice in history.notices if month.has(notice.body.at)),
        use=await _use(store, policy, month),
        head=await store.run(integrity.head),
        problems=tuple(await integrity.verify(store)),
    )


def _until(ledger: WatchedLedger, until: float) -> WatchedLedger:
    """Return a ledger without decisions drawn later."""
    rows, kept = ledger.rows, int((ledger.rows.drawn < until).sum())
    return replace(
        ledger,
        rows=LedgerRows(
            drawn=rows.drawn[:kept],
            due=rows.due[:kept],
            loss=rows.loss[:kept],
            served=rows.served[:kept],
            delivered=rows.delivered[:kept],
            known_order=rows.known_order[:kept],
            known_at=rows.known_at[:kept],
            change=rows.change,
        ),
    )


def _in_force(versions: tuple[PolicyVersion, ...], month: Month) -> tuple[PolicyVersion, ...]:
    ends = [*(version.installed for version in versions[1:]), np.inf]
    return tuple(
        version
        for version, end in zip(versions, ends, strict=True)
        if version.installed < month.end and end > month.start
    )


async def _use(store: Store, policy: str, month: Month) -> Use:
    """Count the recorded decisions of a month, page by page."""
    tally, before = _Tally(), None
    while True:
        page = await store.run(
            pages.records, policy=policy, since=month.start, until=month.end, before=before, limit=_PAGE
        )
        if not page:
            return tally.use()
        for record in page:
            tally.add(record)
        before = page[-1].id


def _answered(decision: DecisionBody) -> list[Leg]:
    return [leg for leg in decision.legs if leg.role == "guardian" and leg.error is None]


class _Tally:
    """Adds up records."""

    def __init__(self) -> None:
        self._use = Use(by={})
        self._calls, self._cost = 0, 0.0
        self._unpromised: dict[str, int] = {}

    def add(self, record: DecisionRecord) -> None:
        use, decision = self._use, record.decision
        audit = None if record.audit is None or record.audit.error is not None else record.audit
        for cost in (*(leg.spent.cost for leg in _answered(decision)), audit and audit.cost):
            if cost is not None:
                self._calls, self._cost = self._calls + 1, self._cost + cost
        if decision.no_guarantee is not None:
            self._unpromised[decision.no_guarantee] = self._unpromised.get(decision.no_guarantee, 0) + 1
        by = {**use.by, record.decided_by: use.by.get(record.decided_by, 0) + 1}
        self._use = replace(
            use,
            decisions=use.decisions + 1,
            by=by,
            safe=use.safe + (str(decision.mode) == "safe"),
            undelivered=use.undelivered + (decision.cancelled or decision.pending),
            unpriced=use.unpriced + (decision.cost is None),
            spent=use.spent + (decision.cost or 0.0),
            audits=use.audits + (audit is not None),
            audit_cost=use.audit_cost + ((audit.cost if audit is not None else None) or 0.0),
        )

    def use(self) -> Use:
        """Return the sums."""
        mean = self._cost / self._calls if self._calls else None
        return replace(self._use, guardian_cost=mean, guardian_calls=self._calls, unpromised=self._unpromised)


# --- A month of a policy as one HTML page that can be filed ---


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
_REASONS = 5
_CLASSES = {"kept": "good", "within calibration luck": "good", "amber": "warn", "red": "bad"}


def report_page(report: MonthReport) -> str:
    """Return the whole page."""
    name, month = escape(report.history.name), escape(report.month.title)
    parts = (_summary, _promise, _evidence, _use_section, _notices, _certificates, _record)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}, {month}</title><style>{STYLE}</style></head><body>\n"
        f"<header><h1>Policy {name}</h1><p>Report for {month}{_so_far(report)}</p></header>\n"
        f"{''.join(part(report) for part in parts)}"
        f"<footer>Written {_time(report.now)} UTC by conformal-arbitrage {_version()}. Times are in UTC. "
        "All figures are recomputed from the ledger and the decision record.</footer>\n</body></html>\n"
    )


def _so_far(report: MonthReport) -> str:
    return f", up to {_time(report.now)}" if report.now < report.month.end else ""


def _summary(report: MonthReport) -> str:
    standing = report.standing
    state = "no audits" if standing is None else standing.state
    loss = "" if standing is None or standing.standing is None else _loss_fact(report, standing.standing)
    use = report.use
    share = "unknown" if use.guardian_share is None else _percent(use.guardian_share)
    cells = [
        ("state", state, _CLASSES.get(state, "none")),
        ("loss of audits", loss or "unknown", ""),
        ("decided by the Guardian", share, ""),
        ("saved", _saved(report), ""),
        ("alarms", str(sum(isinstance(notice.body, AlarmBody) for notice in report.notices)), ""),
        ("record", "verified" if not report.problems else "does not verify", "" if not report.problems else "bad"),
    ]
    tiles = "".join(f'<div class="{kind}"><dt>{name}</dt><dd>{escape(text)}</dd></div>' for name, text, kind in cells)
    meaning = "No decision was drawn for an audit until then." if standing is None else _meaning(standing)
    return f"<dl class=tiles>{tiles}</dl><p class=lead>{escape(meaning)}</p>\n"


def _meaning(shown: PolicyStanding) -> str:
    """Return the state in a sentence, with its reasons."""
    reasons = () if shown.standing is None else shown.standing.reasons
    return _MEANING[shown.state] + (f" {_sentence('; '.join(reasons))}" if reasons else "")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _loss_fact(report: MonthReport, standing: Standing) -> str:
    bound = _bound(report)
    return "unknown" if standing.mean is None else f"{bound * standing.mean:.4f}"


def _promise(report: MonthReport) -> str:
    if not report.in_force:
        return _section("What was promised", "<p>No certificate was in force in this month.</p>")
    bodies = [notice.body for notice in report.history.notices]
    lifts = [body for body in bodies if isinstance(body, LiftBody) and (body.at or 0.0) < report.month.end]
    texts = [
        _promise_of(version, [lift for lift in lifts if lift.version == version.version]) for version in report.in_force
    ]
    return _section("What was promised", "".join(texts) + _unpromised(report.use))


def _unpromised(use: Use) -> str:
    """Return how many decisions say that they have no guarantee, and why, most frequent reasons first."""
    if not use.unpromised:
        return ""
    reasons = sorted(use.unpromised, key=lambda reason: -use.unpromised[reason])
    listed = [f"{reason} ({use.unpromised[reason]:,})" for reason in reasons[:_REASONS]]
    listed += [f"{len(reasons) - _REASONS} more reasons"] if len(reasons) > _REASONS else []
    count = _count(sum(use.unpromised.values()), use.decisions)
    return f"<p class=bad>Decisions without a guarantee: {count}. Why: {escape('; '.join(listed))}.</p>"


def _promise_of(version: PolicyVersion, lifts: Sequence[LiftBody]) -> str:
    certificate = _certificate(version)
    since = f"Version {version.version}, installed {_time(version.installed)} by {escape(version.installed_by)}"
    if certificate is None:
        return f"<p>{since}: the stored certificate cannot be read.</p>"
    changed = "" if version.intact else " <strong>It is not what was installed.</strong>"
    void = "".join(f"<p class=bad>{escape(_VOID.format(at=_time(lift.at), by=lift.by))}</p>" for lift in lifts)
    if not lifts and (reason := voided(version)) is not None:
        void = f"<p class=bad>{escape(_VOID_FROM_THE_START.format(reason=_sentence(reason)))}</p>"
    luck = f"<p class=small>About many decisions: {escape(certificate.luck)}.</p>"
    return f"<h3>{since}.{changed}</h3><blockquote>{escape(certificate.guarantee)}</blockquote>{luck}{void}"


def _evidence(report: MonthReport) -> str:
    shown = report.standing
    if shown is None:
        return _section("What audits say", "<p>No decision was drawn for an audit.</p>")
    ledger, standing = shown.ledger, shown.standing
    if standing is None:
        return _section("What audits say", f"<p>There is no monitor: {escape(ledger.unwatched or '')}.</p>")
    bound, figures, lines = _bound(report), standing.figures, standing.figures.lines
    red = "none" if lines.red is None else f"{bound * lines.red:.4g}"
    logs = figures.log_evidence
    facts = [
        ("Certificate", f"version {ledger.key.version}{_after_lifts(ledger.key.lifts)}"),
        *([("Group, the one that matters most", ledger.key.group)] if ledger.key.group else []),
        ("State", shown.state),
        *(("Reason", reason) for reason in standing.reasons),
        ("Mean loss of known audits", "unknown" if standing.mean is None else f"{bound * standing.mean:.4f}"),
        ("Limits of the mean loss", f"{bound * standing.limits[0]:.4f} to {bound * standing.limits[1]:.4f}"),
        ("Alpha; red line", f"{bound * lines.alpha:.4g}; {red}"),
        ("Evidence against the red line", "none" if logs[1] is None else f"{as_evidence(logs[1]):.3g} (red from 40)"),
        ("Audits", f"{figures.known:,} known, {figures.pending:,} pending, {figures.missing:,} missing"),
        ("Last audit", "none" if ledger.last_audit is None else _time(ledger.last_audit)),
        ("Audit rate, as configured", _percent(shown.audit_rate)),
    ]
    if shown.served is not None:
        served = "unknown" if shown.served.mean is None else f"{bound * shown.served.mean:.4f}"
        facts.append(("Loss of delivered answers, fallbacks included", served))
    note = "" if lines.note is None else f"<p>{escape(_sentence(lines.note))}</p>"
    figure = figure_svg(
        drawn_ledgers(report.history, report.until, group=ledger.key.group),
        drawn_moments(report.history),
        start=max(report.month.start, _first_day(report) * DAY) / DAY,
        stop=report.until / DAY,
    )
    drawn = f"<figure>{figure}<figcaption>{_CAPTION}</figcaption></figure>" if figure else ""
    several = _ledgers(report) if len(report.standings) > 1 or ledger.key.group else ""
    return _section("What audits say", f"{_facts(facts)}{note}{drawn}{several}<p class=small>{_LIMITS}</p>")


def _after_lifts(lifts: int) -> str:
    return f", after {lifts} lifted alarm{'' if lifts == 1 else 's'}" if lifts else ""


def _ledgers(report: MonthReport) -> str:
    """Return a table of all ledgers of the month."""
    rows: list[Sequence[str]] = []
    for place in report.standings:
        key, standing = place.ledger.key, place.standing
        name = f"version {key.version}{_after_lifts(key.lifts)}"
        name += f", models {key.identities_sha256[:8]}" + (f", group {key.group}" if key.group else "")
        if standing is None or place.ledger.certificate is None:
            rows.append((name, place.state, f"{len(place.ledger.rows):,}", "", place.ledger.unwatched or ""))
            continue
        bound = place.ledger.certificate.loss_bound
        mean = "unknown" if standing.mean is None else f"{bound * standing.mean:.4f}"
        limits = f"{bound * standing.limits[0]:.4f} to {bound * standing.limits[1]:.4f}"
        rows.append((name, place.state, f"{len(place.ledger.rows):,}", mean, limits))
    return f"<h3>All ledgers of the period</h3>{_table(('ledger', 'state', 'audits', 'mean loss', 'limits'), rows)}"


def _first_day(report: MonthReport) -> float:
    return min((float(ledger.rows.drawn[0]) for ledger in report.history.ledgers), default=report.month.start) / DAY


def _use_section(report: MonthReport) -> str:
    use = report.use
    if not use.decisions:
        text = "<p>No decision of this month is recorded; pruned records are not counted.</p>"
        return _section("Who decided, and what it cost", text)
    facts = [("Recorded decisions", f"{use.decisions:,}")]
    known = {"primary": "the Primary", "guardian": "the Guardian", "fallback": "a fallback"}
    facts += [
        (f"Decided by {known.get(name, name)}", _count(use.by[name], use.decisions))
        for name in sorted(use.by, key=[*known, *use.by].index)
    ]
    facts += [("In safe mode", _count(use.safe, use.decisions))] if use.safe else []
    facts += [("Without an answer", _count(use.undelivered, use.decisions))] if use.undelivered else []
    unknown = f"; the cost of {use.unpriced:,} decisions is unknown" if use.unpriced else ""
    facts += [
        ("Spent on decisions", f"{_dollars(use.spent)}{unknown}" if use.unpriced < use.decisions else "unknown"),
        ("Spent on audits", f"{_dollars(use.audit_cost)} for {use.audits:,} audits"),
        ("Always asking the Guardian", _always(report)),
        ("Saved", _saved(report)),
    ]
    return _section("Who decided, and what it cost", f"{_facts(facts)}<p class=small>{_MONEY}</p>")


def _always(report: MonthReport) -> str:
    use, always = report.use, report.use.savings.always
    if always is None or use.guardian_cost is None:
        return "unknown: no call of the Guardian has a known price"
    mean = f"{_dollars(use.guardian_cost)} each, the mean of {use.guardian_calls:,} recorded calls"
    return f"{_dollars(always)} for the decisions with a known cost, at {mean}"


def _saved(report: MonthReport) -> str:
    savings = report.use.savings
    if savings.dollars is None or savings.always is None:
        return "unknown"
    return f"{_dollars(savings.dollars)} of {_dollars(savings.always)}"


def _notices(report: MonthReport) -> str:
    rows: list[Sequence[str]] = []
    for notice in report.notices:
        body = notice.body
        if isinstance(body, AlarmBody):
            mean = "" if body.mean is None else f", mean loss {body.mean:.4f} of the bound"
            what = f"{body.audits:,} audits ({body.missing:,} missing){mean}, red line {body.line:.4f}"
            group = f"group {body.group}: " if body.group else ""
            rows.append((_time(body.at), "alarm", str(body.version), f"{group}{body.cause}: {what}"))
        else:
            rows.append((_time(body.at), "lift", str(body.version), f"by {body.by}: {body.reason}"))
    table = _table(("time", "event", "version", "details"), rows)
    return _section("Alarms and lifts", table if rows else "<p>There was none.</p>")


def _certificates(report: MonthReport) -> str:
    earlier = [version for version in report.history.versions if version.installed < report.month.end]
    rows = [
        (
            _time(version.installed),
            str(version.version),
            *_terms(_certificate(version)),
            version.installed_by,
            "as installed" if version.intact else "CHANGED",
        )
        for version in earlier
    ]
    header = ("installed", "version", "alpha", "confidence", "rows", "by", "content")
    return _section("Certificates so far", _table(header, rows) if rows else "<p>There is none.</p>")


def _terms(certificate: Certificate | None) -> tuple[str, str, str]:
    if certificate is None:
        return "unreadable", "", ""
    sure = "on average" if certificate.confidence is None else f"{certificate.confidence:g}"
    return f"{certificate.alpha:g}", sure, f"{certificate.n:,}"


def _record(report: MonthReport) -> str:
    if report.problems:
        listed = "".join(f"<li>{escape(problem)}</li>" for problem in report.problems)
        verdict = f"<p class=bad>The record does not verify:</p><ul>{listed}</ul>"
    else:
        verdict = "<p>The hash chains are intact, and every signature fits.</p>"
    rows = [(writer, f"{number:,}", digest) for writer, (number, digest) in sorted(report.head.writers.items())]
    seal = report.head.seal or "unsigned: the record was read without the project's secret"
    head = f"<p class=small>Head of {_time(report.head.at)}; seal <code>{escape(seal)}</code></p>"
    return _section("The record", f"{verdict}{_table(('writer', 'events', 'hash of the last'), rows)}{head}")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<table class=facts>{rows}</table>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _certificate(version: PolicyVersion) -> Certificate | None:
    try:
        return read_pair(version.certificate)
    except CertificateError:
        return None


def _bound(report: MonthReport) -> float:
    shown = report.standing
    return 1.0 if shown is None or shown.ledger.certificate is None else shown.ledger.certificate.loss_bound


def _count(part: int, whole: int) -> str:
    return f"{part:,} ({_percent(part / whole)})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _dollars(amount: float) -> str:
    sign, size = ("-" if amount < 0 else ""), abs(amount)
    return f"{sign}${size:,.2f}" if size >= 0.1 or size == 0 else f"{sign}${size:.2g}"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _version() -> str:
    from importlib.metadata import version

    return version("conformal-arbitrage")


_VOID = (
    "On {at} an alarm of this version was lifted by {by} without a new certificate: from then on this promise is void, and "
    "its decisions carry no guarantee."
)
_VOID_FROM_THE_START = "This promise is void, and decisions of this version carry no guarantee. {reason}"
_CAPTION = (
    "Blue: running mean loss of audits, with its limits as a band. Black: alpha. Dashed red: the red line, where it is not "
    "alpha itself. A new certificate, a lift and a change of models begin a new ledger."
)
_LIMITS = (
    "Each limit fails, at any time ever, with probability at most 0.025, whatever the loss does over time, if decisions are "
    "not clustered. An audit without an outcome counts as no loss in the lower limit, as the largest gain if gains count, "
    "and as a whole loss in the upper. The state is that of decisions drawn until the end of the period, with outcomes as "
    "they are known at the time of writing."
)
_MONEY = (
    "From recorded costs. Records that were pruned are not counted. Savings are what always asking the Guardian would have "
    "cost, minus what decisions and audits cost; other costs are not in it."
)
