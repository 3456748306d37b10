"""The lines a monitor watches, which of them a certificate has, how long it speaks, how soon audits see a loss."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf, log
from typing import Literal

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.options import refusal, refuse_combination, shared_size
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.promises import Cluster, Net
from conformal_arbitrage.core.bounds import (
    binomial_cdf,
    binomial_interval,
    hoeffding_bentkus,
    largest_plausible,
    signed_tail,
)
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.core.risk import Number, as_fraction, check_alpha
from conformal_arbitrage.errors import OptionError

# --- How long a certificate speaks ---


FRESH_DAYS = 30
SEES_DOUBLING = 27
"""This many audits over a show, as amber, a loss that is doubled from installation on, with a probability of 90 %."""


def audits_to_see_doubling(share: float) -> int:
    """Return how many audits from installation on show a doubled loss, as amber, with a probability of 90 %.

    A loss that doubles later shows later: the evidence has earlier audits to outweigh.
    """
    return ceil(SEES_DOUBLING / share)


def blind_decisions(share: float, audit_rate: float) -> int | None:
    """Return how many decisions that takes, see `audits_to_see_doubling`; None without audits."""
    return ceil(SEES_DOUBLING / share / audit_rate) if audit_rate > 0 else None


def freshness(
    known_lately: int, share: float, *, last_known: str | None = None, days: float = FRESH_DAYS, signed: bool = False
) -> str | None:
    """Return why a certificate is stale; None if it is fresh.

    Args:
        known_lately: audits that became known in the last `days` days.
        share: the risk budget as a share of the loss bound.
        last_known: when the last audit became known, for the message.
        days: the window.
        signed: whether gains count: they hide losses, so a doubling takes longer to show, by how much depends on them.
    """
    needed = audits_to_see_doubling(share)
    if known_lately >= needed:
        return None
    since = "not looked at yet" if last_known is None else f"not looked at enough since {last_known}"
    known = f"{known_lately} audits became known in the last {days:g} days"
    least = "at least " if signed else ""
    return f"stale: {since}; {known}, and a new certificate's doubling takes {least}{needed} to show"


# --- The lines a monitor watches ---


AMBER_EVIDENCE, RED_EVIDENCE, EARLY_EVIDENCE = 20.0, 40.0, 4.0
"""Evidence against alpha for amber, against the red line for red, and against the red line for an early amber."""
LOG_AMBER, LOG_EARLY = log(AMBER_EVIDENCE), log(EARLY_EVIDENCE)
LUCK = 0.025
"""The probability that the loss of a valid certificate lies above its red line."""
AlarmLine = Literal["luck", "alpha"]
_LONGEST_BLOCK, _SIGNED_BLOCK = 50, 5
_HIGHEST_LINE = 0.99
_CHANGES = 0.2
"""The part of the luck of a net certificate that is spent on how many of its rows changed the outcome."""
_SAFE_MODE = "that safe mode lowers a net loss is not proved: it gives up the gains as well"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """What a ledger is watched against.

    Attributes:
        alpha: the risk budget, as a share of the loss bound.
        red: the line whose crossing means safe mode, likewise; None if red cannot fire.
        block: audits per block of evidence.
        false_red: the most that the probability of red, ever, can be if traffic is exchangeable and no audit is missing,
            averaged over calibrations; None if red stands at alpha although the certificate only promises an average.
        note: why there is no red line, no bound on false reds, or no proof for safe mode; None if there is all of it.
        policies: how many policies `false_red` covers together: each then has that share of the probability only.
        signed: whether losses lie in [-1, 1], gains counted, rather than in [0, 1].
    """

    alpha: float
    red: float | None
    block: int
    false_red: float | None
    note: str | None = None
    policies: int = 1
    signed: bool = False

    @property
    def log_red(self) -> float:
        """The log evidence against the red line at which red fires."""
        return log(RED_EVIDENCE * self.policies)

    @property
    def least(self) -> float:
        """The smallest loss: what a pending outcome counts as."""
        return -1.0 if self.signed else 0.0

    @property
    def levels(self) -> tuple[float, ...]:
        """The lines in [0, 1] that evidence is gathered against."""
        lines = (self.alpha,) if self.red is None else (self.alpha, self.red)
        return tuple(self.as_share(line) for line in lines)

    def as_share(self, loss: float) -> float:
        """Return where a loss lies between the smallest and the largest one, in [0, 1]."""
        return (loss + 1) / 2 if self.signed else loss

    def as_loss(self, share: float) -> float:
        """Return the loss that lies there; the inverse of `as_share`."""
        return 2 * share - 1 if self.signed else share


def watch_lines(
    alpha: Number,
    *,
    loss_bound: Number = 1,
    n: int,
    binary: bool = False,
    confidence: Number | None = None,
    alarm_line: AlarmLine = "luck",
    policies: int = 1,
    absolute: float | None = None,
) -> Lines:
    """Return the lines for a certificate.

    Args:
        n: its number of rows; for one group of a certificate by groups, the group's.
        binary: whether its losses are declared to be 0 or the bound.
        confidence: that of a high-probability certificate (of its dial, of all groups together); None for any other.
        alarm_line: "alpha" puts red at alpha whatever the certificate promises.
        policies: how many policies one statement about false reds is to cover; each then needs more evidence for red.
        absolute: of a net certificate, the mean absolute loss of its rows, 2 regret - empirical_risk, as a share of the
            bound; None if losses are never negative. `binary` then declares that they are -B, 0 or B.
    """
    if policies < 1:
        raise OptionError(f"policies must be 1 or more; got {policies}")
    bound = as_fraction(loss_bound, name="loss_bound")
    share = check_alpha(alpha, bound) / bound
    red, luck, note = _red_line(
        share, n, binary=binary, confidence=confidence, alarm_line=alarm_line, policies=policies, absolute=absolute
    )
    signed = absolute is not None
    return Lines(
        alpha=float(share),
        red=red,
        block=_SIGNED_BLOCK if signed else block_size(share),
        false_red=None if luck is None else luck + 1 / RED_EVIDENCE,
        note="; ".join(part for part in (note, _SAFE_MODE if signed else None) if part is not None) or None,
        policies=policies,
        signed=signed,
    )


def _red_line(
    share: Fraction,
    n: int,
    *,
    binary: bool,
    confidence: Number | None,
    alarm_line: AlarmLine,
    policies: int,
    absolute: float | None,
) -> tuple[float | None, float | None, str | None]:
    """Return the red line, the probability that the loss of any of so many valid certificates lies above it, and a note."""
    if confidence is not None:
        return float(share), policies * (1 - float(as_fraction(confidence, name="confidence"))), None
    if alarm_line == "alpha":
        note = "red stands at alpha, which the loss of a valid certificate may exceed: there is no bound on false reds"
        return float(share), None, note
    luck = LUCK / policies
    if absolute is None:
        red = luck_line(n, share, binary=binary, luck=luck)
    else:
        red = net_line(n, share, absolute, binary=binary, luck=luck)
    if red > _HIGHEST_LINE:
        few = f"{n_rows(n, 'says', 'say')} too little about this certificate for red to fire; calibrate on more rows"
        return None, None, few
    return red, LUCK, None


def block_size(share: Number) -> int:
    """Return the audits per block: 1 / (2 a) rounded up, from 1 to 50. Blocks blunt what neighbours have in common."""
    a = as_fraction(share, name="alpha")
    return min(max(-int(-1 // (2 * a)), 1), _LONGEST_BLOCK)


def luck_line(n: int, share: Number, *, binary: bool, luck: float = LUCK) -> float:
    """Return the loss that a valid calibration on n rows at a = `share` exceeds with probability at most `luck`.

    With T = a (n + 1) - 1 it is the p above a at which P(Bin(n, p) <= floor(T)) is `luck` if losses are 0 or the bound;
    if they are graded, at which the bound of Hoeffding and Bentkus is.
    """
    a: Fraction = as_fraction(share, name="alpha")
    total = a * (n + 1) - 1
    if total < 0:
        raise OptionError(
            f"{n_rows(n)} cannot certify alpha {float(a):g}, so every query is deferred: there is no line"
        )
    if binary:
        return largest_plausible(lambda p: binomial_cdf(floor(total), n, p), float(a), luck)
    return largest_plausible(lambda p: hoeffding_bentkus(float(total), n, p), float(a), luck)


def net_line(n: int, share: Number, absolute: float, *, binary: bool, luck: float = LUCK) -> float:
    """Return the net loss that a valid calibration on n rows at a = `share` exceeds with probability at most `luck`.

    With v the upper limit of the mean absolute loss at a fifth of `luck` (of Clopper and Pearson if losses are -B, 0 or B,
    else of Hoeffding and Bentkus), it is the p at which the bound of `signed_tail` for a total of a (n + 1) - 1 is the rest
    of `luck`; never below a, nor above v, which no mean loss exceeds.

    Args:
        n: rows.
        share: the risk budget as a share of the bound.
        absolute: the mean absolute loss of the rows, where the walk stopped.
        binary: whether losses are declared to be -B, 0 or B.
        luck: the probability.
    """
    a, total = float(as_fraction(share, name="alpha")), float(as_fraction(share, name="alpha") * (n + 1) - 1)
    if not 0 <= absolute <= 1:
        raise OptionError(f"a mean absolute loss lies in [0, 1] as a share of the bound; got {absolute:g}")
    changes, rest = _CHANGES * luck, (1 - _CHANGES) * luck
    if binary:
        most = binomial_interval(round(absolute * n), n, 1 - 2 * changes)[1]
    else:
        most = largest_plausible(lambda v: hoeffding_bentkus(absolute * n, n, v), absolute, changes)
    if most <= a:
        return a
    return largest_plausible(lambda p: signed_tail(total, n, p, absolute=most), a, rest, stop=most)


# --- Which lines the ledger of a certificate is watched against, or why it has none ---


SHARED = "small groups"
"""The ledger of groups that share a threshold, unless a group has that name."""


def certificate_lines(
    certificate: Certificate, *, group: str | None = None, alarm_line: AlarmLine = "luck", policies: int = 1
) -> Lines:
    """Return the lines for a certificate, or for one of its groups.

    Args:
        group: whose ledger it is, of a certificate by groups; small groups that share a threshold share a ledger.
        alarm_line: "alpha" puts red at alpha whatever the certificate promises.
        policies: how many policies one statement about false reds is to cover.

    Raises:
        OptionError: there is nothing to watch, or nothing that can be.
    """
    for kind in certificate.kinds:
        if kind in ("own loss", "path"):
            refuse_combination("monitor", kind)
    n = certificate.n if certificate.groups is None else _rows(certificate, group)
    if certificate.status == "always_defer":
        raise OptionError("every query is deferred, so the loss is 0 by definition: there is nothing to watch")
    unclear = refusal("red line", "cluster") if isinstance(certificate.promise, Cluster) else None
    unclear = refusal("red line", "learned") if certificate.learned is not None else unclear
    if group is not None and alarm_line == "luck" and ledger_names(certificate).get(group) != group:
        unclear = refusal("red line", "merged groups")
    if unclear is not None:
        share = certificate.alpha / certificate.loss_bound
        return Lines(alpha=share, red=None, block=block_size(share), false_red=None, note=f"there is no red: {unclear}")
    return watch_lines(
        certificate.alpha,
        loss_bound=certificate.loss_bound,
        n=n,
        binary=certificate.loss.binary,
        confidence=certificate.confidence,
        alarm_line=alarm_line,
        policies=policies,
        absolute=_absolute(certificate),
    )


def ledger_names(certificate: Certificate) -> dict[str, str]:
    """Return the ledger of each group whose queries are not all deferred; small groups share one, as they do a threshold."""
    groups = certificate.groups or {}
    fewest = rows_needed(certificate.alpha, certificate.loss_bound) if "merged groups" in certificate.kinds else 0
    shared = SHARED
    while shared in groups:
        shared += "'"
    thresholds = {name: threshold for name, threshold in groups.items() if threshold.relaxation is not None}
    return {name: shared if threshold.n < fewest else name for name, threshold in thresholds.items()}


def _rows(certificate: Certificate, group: str | None) -> int:
    """Return from how many rows the threshold of a group comes."""
    groups = certificate.groups or {}
    if group is None or group not in groups:
        raise OptionError(f"a certificate by groups has one ledger for each: {', '.join(groups)}; got {group!r}")
    if groups[group].relaxation is None:
        raise OptionError(f"every query of {group!r} is deferred: there is nothing to watch")
    fewest = rows_needed(certificate.alpha, certificate.loss_bound)
    if "merged groups" in certificate.kinds and groups[group].n < fewest:
        return shared_size({name: threshold.n for name, threshold in groups.items()}, fewest)
    return groups[group].n


def _absolute(certificate: Certificate) -> float | None:
    """Return the mean absolute loss of a net certificate's rows, as a share of the bound."""
    loss = certificate.loss
    return (
        min((2 * loss.regret - certificate.evidence.empirical_risk) / loss.bound, 1.0)
        if isinstance(loss, Net)
        else None
    )


# --- Planning audits ---


MEDIAN_DELAYS = {1.25: 150.0, 1.5: 43.0, 2.0: 13.0, 5.0: 2.5}
"""True loss over the line -> audits times a until red, in half of all cases; twice as many in nine of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayRow:
    """How soon a loss of `ratio` times the line is seen.

    Attributes:
        ratio: the true loss over the line.
        audits: audits until red, in half of all cases.
        decisions: decisions until then.
        days: days until then; twice as many in nine of ten cases.
        excess: losses above the line until then, in units of the loss bound.
    """

    ratio: float
    audits: int
    decisions: int
    days: float
    excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """What an audit rate buys and costs.

    Attributes:
        audit_rate: the share of decisions that are audited.
        decisions_per_day: the traffic.
        audits_per_day: audited decisions.
        guardian_calls_per_day: calls of the Guardian for audits alone, if the Primary decides this share.
        primary_share: the share of decisions that the Primary decides; those deferred need no call.
        cost_per_day: dollars of these calls; None if a call's price is unknown.
        fresh_after_days: days after which enough audits are known for a doubled loss to show in nine of ten cases.
        delays: how soon a loss above the line is seen.
    """

    audit_rate: float
    decisions_per_day: float
    audits_per_day: float
    guardian_calls_per_day: float
    primary_share: float
    cost_per_day: float | None
    fresh_after_days: float
    delays: tuple[DelayRow, ...]


def plan_audits(
    alpha: Number,
    *,
    loss_bound: Number = 1,
    audit_rate: float,
    decisions_per_day: float,
    primary_share: float = 1.0,
    guardian_cost: float | None = None,
) -> AuditPlan:
    """Plan audits: how soon a loss above the line is seen, and what they cost.

    The line is alpha for a high-probability certificate; for any other red stands higher, by what calibration luck explains.

    Args:
        loss_bound: the largest possible loss.
        audit_rate: the share of decisions to audit, above 0.
        decisions_per_day: the traffic.
        primary_share: the share of decisions that the Primary decides.
        guardian_cost: dollars per call of the Guardian.
    """
    if not 0 < audit_rate <= 1:
        raise OptionError(f"audit_rate must lie above 0 and be at most 1; got {audit_rate:g}")
    if not 0 < decisions_per_day < inf:
        raise OptionError(f"decisions_per_day must be a number above 0; got {decisions_per_day:g}")
    if guardian_cost is not None and not 0 <= guardian_cost < inf:
        raise OptionError(f"guardian_cost must be 0 dollars or more; got {guardian_cost:g}")
    if not 0 <= primary_share <= 1:
        raise OptionError(f"primary_share must lie in [0, 1]; got {primary_share:g}")
    bound = as_fraction(loss_bound, name="loss_bound")
    share = float(check_alpha(alpha, bound) / bound)
    audits = audit_rate * decisions_per_day
    calls = audits * primary_share
    return AuditPlan(
        audit_rate=audit_rate,
        decisions_per_day=decisions_per_day,
        audits_per_day=audits,
        guardian_calls_per_day=calls,
        primary_share=primary_share,
        cost_per_day=None if guardian_cost is None else calls * guardian_cost,
        fresh_after_days=audits_to_see_doubling(share) / audits,
        delays=tuple(
            _delay(ratio, unit, share, audit_rate, decisions_per_day) for ratio, unit in MEDIAN_DELAYS.items()
        ),
    )


def _delay(ratio: float, unit: float, share: float, audit_rate: float, per_day: float) -> DelayRow:
    audits = unit / share
    decisions = audits / audit_rate
    return DelayRow(
        ratio=ratio,
        audits=ceil(audits),
        decisions=ceil(decisions),
        days=decisions / per_day,
        excess=(ratio - 1) * share * decisions,
    )
