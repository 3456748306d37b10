"""The lines a monitor watches: alpha, and the line that bad luck in calibration cannot explain.

The long-run loss of one certificate of conformal risk control lies above alpha in about half of all calibrations, so a
monitor at alpha would raise false alarms on valid certificates. Red stands at the loss that a calibration on n rows exceeds
with probability 0.025 at most: for that, a relaxation of larger risk must have shown a total of at most alpha (n + 1) - B,
as the loss falls with the relaxation. A high-probability certificate promises alpha itself, so red stands there.

Losses are shares of the loss bound: a = alpha / B. Knows nothing of ledgers or certificates.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import floor, log
from typing import Literal

from conformal_arbitrage.core.bounds import binomial_cdf, hoeffding_bentkus, largest_plausible
from conformal_arbitrage.core.losses import Number, as_fraction
from conformal_arbitrage.core.risk import check_alpha
from conformal_arbitrage.errors import OptionError

AMBER_EVIDENCE, RED_EVIDENCE, EARLY_EVIDENCE = 20.0, 40.0, 4.0
"""Evidence against alpha for amber, against the red line for red, and against the red line for an early amber."""
LOG_AMBER, LOG_EARLY = log(AMBER_EVIDENCE), log(EARLY_EVIDENCE)
LUCK = 0.025
"""The probability that the loss of a valid certificate lies above its red line."""
AlarmLine = Literal["luck", "alpha"]
_LONGEST_BLOCK = 50
_HIGHEST_LINE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """What a ledger is watched against.

    Attributes:
        alpha: the risk budget, as a share of the loss bound.
        red: the line whose crossing means safe mode, likewise; None if red cannot fire.
        block: audits per block of evidence.
        false_red: the most that the probability of red, ever, can be if traffic is exchangeable and no audit is missing,
            averaged over calibrations; None if red stands at alpha although the certificate only promises an average.
        note: why there is no red line, or no bound on false reds; None if there are both.
        policies: how many policies `false_red` covers together: each then has that share of the probability only.
    """

    alpha: float
    red: float | None
    block: int
    false_red: float | None
    note: str | None = None
    policies: int = 1

    @property
    def log_red(self) -> float:
        """The log evidence against the red line at which red fires."""
        return log(RED_EVIDENCE * self.policies)


def watch_lines(
    alpha: Number,
    *,
    loss_bound: Number = 1,
    n: int,
    binary: bool = False,
    confidence: Number | None = None,
    alarm_line: AlarmLine = "luck",
    policies: int = 1,
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
    """
    if policies < 1:
        raise OptionError(f"policies must be 1 or more; got {policies}")
    bound = as_fraction(loss_bound, name="loss_bound")
    share = check_alpha(alpha, bound) / bound
    red, luck, note = _red_line(
        share, n, binary=binary, confidence=confidence, alarm_line=alarm_line, policies=policies
    )
    return Lines(
        alpha=float(share),
        red=red,
        block=block_size(share),
        false_red=None if luck is None else luck + 1 / RED_EVIDENCE,
        note=note,
        policies=policies,
    )


def _red_line(
    share: Fraction, n: int, *, binary: bool, confidence: Number | None, alarm_line: AlarmLine, policies: int
) -> tuple[float | None, float | None, str | None]:
    """Return the red line, the probability that the loss of any of so many valid certificates lies above it, and a note."""
    if confidence is not None:
        return float(share), policies * (1 - float(as_fraction(confidence, name="confidence"))), None
    if alarm_line == "alpha":
        note = "red stands at alpha, which the loss of a valid certificate may exceed: there is no bound on false reds"
        return float(share), None, note
    red = luck_line(n, share, binary=binary, luck=LUCK / policies)
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
