"""States: what the figures of a ledger mean, in the order red, amber, blind, kept, within calibration luck, no evidence.

Knows nothing of how the figures are computed, nor of what is done about them.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from conformal_arbitrage.calibration.notebook import html_interval, html_table
from conformal_arbitrage.monitoring.limits import Limits
from conformal_arbitrage.monitoring.lines import LOG_AMBER, LOG_EARLY, Lines

State = Literal["blind", "no evidence", "within calibration luck", "kept", "amber", "red"]
Cause = Literal["losses", "failing audits"]
SEVERITY: tuple[State, ...] = ("red", "amber", "blind", "no evidence", "within calibration luck", "kept")
"""The states of several ledgers of one policy, the one that matters most first: the policy is in that of the worst."""
FEWEST_KNOWN = 11
"""Fewer known audits than this over a say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a ledger shows at one moment.

    Attributes:
        lines: what it is watched against.
        audit_rate: the share of decisions that the coin draws now.
        known: audits with a known loss.
        pending: audits whose outcome is not due yet.
        missing: audits whose outcome is overdue.
        log_evidence: against alpha and against the red line, now; the second is None without a red line.
        log_peak: the largest it has ever been on this ledger.
        within_alpha: whether the upper limit of the running mean is at most alpha.
        within_red: whether it is at most the red line.
    """

    lines: Lines
    audit_rate: float
    known: int
    pending: int
    missing: int
    log_evidence: tuple[float, float | None]
    log_peak: tuple[float, float | None]
    within_alpha: bool
    within_red: bool

    @property
    def crossed(self) -> bool:
        """Whether the evidence is enough for red."""
        return _reaches(self.log_peak[1], self.lines.log_red)

    @property
    def above_alpha(self) -> bool:
        """Whether the evidence is enough for amber."""
        return _reaches(self.log_peak[0], LOG_AMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known about a certificate in production.

    Attributes:
        state: the verdict.
        reasons: why it is red, amber or blind, in words; empty otherwise.
        cause: of evidence above a line: losses, or audits that fail (without them the evidence would not do); else None.
        figures: what the verdict rests on.
        mean: mean loss of the audits with a known loss; None if there is none.
        limits: of the running mean over all audits, each side failing ever with probability 0.025: an unknown loss
            counts 0 in the lower limit (-1 if gains count) and 1 in the upper one.
        known_limits: of the known ones alone; None if an outcome is overdue. Outcomes that take long to become known
            are under-represented in it.
    """

    state: State
    reasons: tuple[str, ...]
    cause: Cause | None
    figures: Figures
    mean: float | None
    limits: Limits
    known_limits: Limits | None

    def _repr_html_(self) -> str:
        figures, lines = self.figures, self.figures.lines
        facts = [("state", self.state), *(("why", reason) for reason in self.reasons)]
        facts += [("audits", f"{figures.known} known, {figures.pending} pending, {figures.missing} missing")]
        facts += [("mean loss", "unknown" if self.mean is None else f"{self.mean:.4g}")]
        marks = [("alpha", lines.alpha), *([] if lines.red is None else [("red", lines.red)])]
        return html_table(facts) + html_interval(
            "limits of the loss of audited decisions", self.limits, self.mean, marks
        )


def judge(
    figures: Figures,
    *,
    cause: Cause | None = None,
    alarmed: bool = False,
    guardian_fails: bool = False,
    stale: str | None = None,
) -> tuple[State, tuple[str, ...]]:
    """Return the state that figures imply, and why.

    Args:
        figures: what the ledger shows.
        cause: why evidence is above a line, if it is.
        alarmed: an alarm was raised on this ledger: it stands, whatever late outcomes say.
        guardian_fails: the figure "as served" is above alpha.
        stale: why the evidence is old, in words.
    """
    if alarmed or figures.crossed:
        return "red", (_red_reason(cause),)
    amber = _amber_reasons(figures, cause, guardian_fails, stale)
    if amber:
        return "amber", amber
    blind = _blind_reasons(figures)
    if blind:
        return "blind", blind
    if figures.within_alpha:
        return "kept", ()
    return ("within calibration luck" if figures.within_red else "no evidence"), ()


def _red_reason(cause: Cause | None) -> str:
    if cause == "failing audits":
        return "audits fail: counted as losses, they put the loss above the red line"
    return "the loss is above the red line"


def _amber_reasons(figures: Figures, cause: Cause | None, guardian_fails: bool, stale: str | None) -> tuple[str, ...]:
    audits = figures.known + figures.pending + figures.missing
    allowed = figures.lines.alpha / 2
    failing = cause == "failing audits"
    reasons = {
        "audits fail: counted as losses, they put the long-run loss above alpha": figures.above_alpha and failing,
        "the long-run loss of this certificate is above alpha": figures.above_alpha and not failing,
        "the loss may be above the red line": _reaches(figures.log_evidence[1], LOG_EARLY),
        f"more than {100 * allowed:.3g} % of the audits have no outcome": figures.missing > allowed * audits,
        "the Guardian fails: the loss of delivered answers is above alpha": guardian_fails,
    }
    return (*(text for text, holds in reasons.items() if holds), *([] if stale is None else [stale]))


def _blind_reasons(figures: Figures) -> tuple[str, ...]:
    needed = ceil(FEWEST_KNOWN / figures.lines.alpha)
    unknown = figures.pending + figures.missing
    reasons = {
        "no decision is audited: the audit rate is 0": figures.audit_rate <= 0,
        f"too few audits: {figures.known} of the {needed} needed are known": figures.known < needed,
        "more than half of the audits have no outcome yet": unknown > figures.known,
    }
    return tuple(text for text, holds in reasons.items() if holds)


def _reaches(log_evidence: float | None, enough: float) -> bool:
    return log_evidence is not None and log_evidence >= enough
