"""What changes about a policy in force while its version stays: the guard's threshold, and expiry.

Knows nothing of stores, or of when these changes are looked for.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.errors import CertificateError
from conformal_arbitrage.live.aging import AgeLimits
from conformal_arbitrage.live.cascade import CascadeChooser, CascadeRouter
from conformal_arbitrage.live.config import PolicyConfig
from conformal_arbitrage.live.guarding import CertificateGuard
from conformal_arbitrage.types import DAY

if TYPE_CHECKING:
    from conformal_arbitrage.gateway.policy_table import LivePolicy


def is_guarded(live: "LivePolicy", certificate: Certificate) -> bool:
    """Return whether a guard watches over a policy.

    Raises:
        CertificateError, OptionError: one is configured, and there is no proof or no quantiles for it.
    """
    if not live.settings.guard or live.settings.mode != "enforce" or certificate.status == "always_defer":
        return False
    if live.watched is None:
        raise CertificateError(f"policy {live.name}: guard = true needs a monitor; {live.unwatched}")
    CertificateGuard(certificate)
    return True


def guarded_policy(live: "LivePolicy", guard: CertificateGuard) -> "LivePolicy":
    """Return a policy with the threshold that its guard puts in force."""
    known = guard.standing().known
    if live.rule is None or isinstance(live.rule, CascadeRouter | CascadeChooser):
        return live  # a cascade has no guard
    if live.mode != "enforce" or known == live.guarded:
        return live
    now, certificate = live.rule.certificate, guard.in_force()
    same = (now.relaxation, now.boundary_u) == (certificate.relaxation, certificate.boundary_u)
    return replace(live, rule=live.rule if same else replace(live.rule, certificate=certificate), guarded=known)


def age_limits(settings: PolicyConfig) -> AgeLimits:
    """Return what a policy says of the age of its certificate."""
    return AgeLimits(max_age=settings.max_age, max_decisions=settings.max_decisions, fresh_days=settings.fresh_days)


def expired_policy(live: "LivePolicy", now: float, decisions: int | None) -> "LivePolicy":
    """Return a policy without its guarantee if its certificate has expired, and in shadow mode if so set.

    Args:
        live: the policy.
        now: the time.
        decisions: how many there were under its certificate, if they are counted.
    """
    reason = age_limits(live.settings).expiry((now - live.installed) / DAY, decisions)
    if reason is None or live.expired or live.rule is None:
        return live
    forfeited = live.forfeited or reason
    stops = live.settings.at_expiry == "shadow" and live.mode == "enforce"
    return replace(
        live,
        rule=replace(live.rule, forfeited=forfeited),
        forfeited=forfeited,
        mode="shadow" if stops else live.mode,
        expired=True,
    )
