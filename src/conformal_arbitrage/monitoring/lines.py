"""The lines a monitor watches: alpha, and the line that bad luck in calibration cannot explain.

The long-run loss of one certificate of conformal risk control lies above alpha in about half of all calibrations, so a
monitor at alpha would raise false alarms on valid certificates. Red stands at the loss that a calibration on n rows exceeds
with probability 0.025 at most: for that, a relaxation of larger risk must have shown a total of at most alpha (n + 1) - B,
as the loss falls with the relaxation. A high-probability certificate promises alpha itself, so red stands there.

A net loss can be negative: x in [-1, 1] is watched as y = (x + 1) / 2, against (c + 1) / 2, in blocks of five. Its red line
uses the first passage: if the risk where the walk stopped is above the line, then the walk came past the first relaxation,
from the side that defers, at which it is; there the total was at most alpha (n + 1) - B, and no more rows had changed than
where the walk stopped.

Losses are shares of the loss bound: a = alpha / B. Knows nothing of ledgers or certificates.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import floor, log
from typing import Literal

from conformal_arbitrage.core.bounds import (
    binomial_cdf,
    binomial_interval,
    hoeffding_bentkus,
    largest_plausible,
    signed_tail,
)
from conformal_arbitrage.core.losses import Number, as_fraction
from conformal_arbitrage.core.risk import check_alpha
from conformal_arbitrage.errors import OptionError

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
        alpha: its risk budget.
        loss_bound: its loss bound.
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
        note="; ".join(one for one in (note, _SAFE_MODE if signed else None) if one is not None) or None,
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
        return None, None, f"{n} rows say too little about this certificate for red to fire; calibrate on more rows"
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
        raise OptionError(f"{n} rows cannot certify alpha {float(a):g}, so every query is deferred: there is no line")
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
