"""A month of a policy as one HTML page that can be filed: no scripts, nothing loaded from elsewhere, fit for print.

Everything that people or models wrote is escaped. Knows nothing of stores.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.errors import CertificateError
from conformal_arbitrage.live.aging import luck_words
from conformal_arbitrage.live.monitored import PolicyStanding, drawn_ledgers, drawn_moments
from conformal_arbitrage.live.report_figure import figure_svg
from conformal_arbitrage.live.report_style import STYLE
from conformal_arbitrage.live.reporting import MonthReport, Use
from conformal_arbitrage.live.watching import as_evidence, voided
from conformal_arbitrage.monitoring.states import Standing
from conformal_arbitrage.store.base import PolicyVersion
from conformal_arbitrage.store.record import AlarmBody, LiftBody
from conformal_arbitrage.types import DAY

_MEANING = {
    "kept": "With the confidence stated below, the loss so far is at most alpha.",
    "within calibration luck": "The loss so far is at most what bad luck in calibration explains.",
    "no evidence": "Audits neither confirm nor refute that the budget is kept; more of them will.",
    "blind": "There are too few audits to say anything.",
    "amber": "Something needs attention.",
    "red": "The loss is over the risk budget; in safe mode every query goes to the Guardian until this is settled.",
    "not watched": "This certificate has no monitor.",
}
_REASONS = 5
_CLASSES = {"kept": "good", "within calibration luck": "good", "amber": "warn", "red": "bad"}


def report_page(report: MonthReport) -> str:
    """Return the whole page."""
    name, month = escape(report.history.name), escape(report.month.title)
    parts = (_summary, _promise, _evidence, _use, _notices, _certificates, _record)
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
        ("alarms", str(sum(isinstance(one.body, AlarmBody) for one in report.notices)), ""),
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
    luck = f"<p class=small>About many decisions: {escape(luck_words(certificate))}.</p>"
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
    for one in report.standings:
        key, standing = one.ledger.key, one.standing
        name = f"version {key.version}{_after_lifts(key.lifts)}"
        name += f", models {key.identities_sha256[:8]}" + (f", group {key.group}" if key.group else "")
        if standing is None or one.ledger.certificate is None:
            rows.append((name, one.state, f"{len(one.ledger.rows):,}", "", one.ledger.unwatched or ""))
            continue
        bound = one.ledger.certificate.loss_bound
        mean = "unknown" if standing.mean is None else f"{bound * standing.mean:.4f}"
        limits = f"{bound * standing.limits[0]:.4f} to {bound * standing.limits[1]:.4f}"
        rows.append((name, one.state, f"{len(one.ledger.rows):,}", mean, limits))
    return f"<h3>All ledgers of the period</h3>{_table(('ledger', 'state', 'audits', 'mean loss', 'limits'), rows)}"


def _first_day(report: MonthReport) -> float:
    return min((float(one.rows.drawn[0]) for one in report.history.ledgers), default=report.month.start) / DAY


def _use(report: MonthReport) -> str:
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
    use = report.use
    if use.always is None or use.guardian_cost is None:
        return "unknown: no call of the Guardian has a known price"
    mean = f"{_dollars(use.guardian_cost)} each, the mean of {use.guardian_calls:,} recorded calls"
    return f"{_dollars(use.always)} for the decisions with a known cost, at {mean}"


def _saved(report: MonthReport) -> str:
    use = report.use
    if use.always is None:
        return "unknown"
    saved = use.always - use.spent - use.audit_cost
    return f"{_dollars(saved)} of {_dollars(use.always)}"


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
        unchecked = "but without the project's secret no signature was checked"
        checked = "and every signature fits" if report.signed else unchecked
        verdict = f"<p>The hash chains are intact, {checked}.</p>"
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
        return Certificate.from_dict(dict(version.certificate))
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
