"""How old the evidence on a certificate in service is, and what luck its next decisions share.

A certificate goes stale by evidence, not by date: once it has been in force for thirty days, or as many as are configured,
there have to be as many audits of the last thirty as show a doubled loss. Before that, the rows it was calibrated on are the
evidence.

Knows nothing of ledgers, clocks or policies.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.combinations import refusal
from conformal_arbitrage.calibration.options import NET
from conformal_arbitrage.live.guarding import kinds_of
from conformal_arbitrage.live.known_losses import KnownLosses
from conformal_arbitrage.monitoring.age import (
    FRESH_DAYS,
    audits_to_see_doubling,
    blind_decisions,
    freshness,
    next_range,
)
from conformal_arbitrage.monitoring.limits import Limits
from conformal_arbitrage.types import DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeLimits:
    """What a policy says of the age of its certificate.

    Attributes:
        max_age: days after which it is not to be relied on any more; None for never.
        max_decisions: decisions after which it is not; None for never.
        fresh_days: in how many days enough audits have to become known.
    """

    max_age: float | None = None
    max_decisions: int | None = None
    fresh_days: float = FRESH_DAYS

    def expiry(self, days: float, decisions: int | None = None) -> str | None:
        """Return why a certificate has expired; None if it has not."""
        force = "expired: the certificate has been in force for"
        if self.max_age is not None and days >= self.max_age:
            return f"{force} {days:.0f} days, and max_age is {self.max_age:g}"
        if self.max_decisions is not None and decisions is not None and decisions >= self.max_decisions:
            return f"{force} {decisions:,} decisions, and max_decisions is {self.max_decisions:,}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """How old what is known of a certificate is.

    Attributes:
        installed: when it was installed, in seconds since 1970.
        known_lately: audits that became known in the last `fresh_days`.
        needed: how many show a doubled loss with a probability of 90 %; where gains count, it takes no fewer.
        last_known: when the last audit became known, in seconds since 1970; None if none did.
        blind_decisions: how many decisions those audits take; None without audits, and where gains count.
        next_decisions: as many as the certificate has rows: beyond, the range hardly changes.
        range: of their mean loss, as shares of the loss bound, for 95 % of calibrations and traffic; None where its law is
            not known.
        stale: why the evidence is too old, in words; None if it is not.
        expired: why the certificate is no longer to be relied on, as configured; None if it is.
        decisions: how many there were under it; None unless they are counted, for max_decisions.
        fresh_days: in how many days audits have to become known, as configured.
    """

    installed: float
    known_lately: int
    needed: int
    last_known: float | None
    blind_decisions: int | None
    next_decisions: int
    range: Limits | None
    stale: str | None
    expired: str | None
    decisions: int | None = None
    fresh_days: float = FRESH_DAYS


def age_of(
    certificate: Certificate,
    known: KnownLosses,
    *,
    installed: float,
    now: float,
    audit_rate: float,
    limits: AgeLimits | None = None,
    decisions: int | None = None,
) -> Age:
    """Return how old what is known of a certificate is.

    Args:
        certificate: what is in force.
        known: the known losses of its ledger.
        installed: when it was installed, in seconds since 1970.
        now: the time.
        audit_rate: the share of decisions that the coin draws.
        limits: when it is not to be relied on any more.
        decisions: how many there were under it, if they are counted.
    """
    limits = limits or AgeLimits()
    share, days = certificate.alpha / certificate.loss_bound, max(0.0, now - installed) / DAY
    lately = known.since(now - limits.fresh_days * DAY)
    net, window = certificate.loss == NET, limits.fresh_days
    stale = freshness(lately, share, last_known=_date(known.last), days=window, signed=net) if days >= window else None
    return Age(
        installed=installed,
        known_lately=lately,
        needed=audits_to_see_doubling(share),
        last_known=known.last,
        blind_decisions=None if net else blind_decisions(share, audit_rate),
        next_decisions=certificate.n,
        range=range_of(certificate),
        stale=stale,
        expired=limits.expiry(days, decisions),
        decisions=decisions,
        fresh_days=limits.fresh_days,
    )


def range_of(certificate: Certificate) -> Limits | None:
    """Return the range of the mean loss over as many decisions as the certificate has rows; None where there is no law."""
    binary = certificate.zero_one is True or (certificate.binarized and certificate.loss_bound == 1)
    unproved = any(refusal("range", kind) is not None for kind in kinds_of(certificate))
    chosen = certificate.ancestry is not None and certificate.ancestry.step != "scheduled"
    if not binary or unproved or chosen or certificate.confidence is not None or certificate.groups is not None:
        return None
    return _next_range(certificate.n, certificate.alpha / certificate.loss_bound)


def luck_words(certificate: Certificate) -> str:
    """Return what is known of many decisions under one certificate, which share its luck, in a sentence."""
    if certificate.status == "always_defer":
        return "all are deferred, so they lose nothing"
    ends = range_of(certificate)
    if ends is None:
        return "they share this certificate's luck, and only audits say how far their mean loss lies from alpha"
    low, high = (certificate.loss_bound * end for end in ends)
    return (
        f"over the next {certificate.n:,}, the mean loss lies in {low:.3g} to {high:.3g} for 95 % of calibrations and "
        "traffic, if these are exchangeable and the budget is spent; more of them share the same luck, and hardly narrow it"
    )


@cache
def _next_range(n: int, share: float) -> Limits | None:
    return next_range(n, share, n)


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).date().isoformat()
