"""How long a certificate speaks: the range of the next N decisions' mean loss, and how fresh the evidence is.

All decisions under one certificate share its luck. For losses of 0 or the bound and continuous scores, the risk of a
calibration on n rows follows Beta(k, n + 1 - k) with k = floor(a (n + 1)), so the losses among the next N decisions follow a
beta-binomial law; more traffic does not average calibration luck out.

A certificate expires by evidence, not by date. Knows nothing of ledgers or clocks.
"""

from math import ceil

import numpy as np

from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.core.losses import Number, as_fraction
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.limits import Limits

FRESH_DAYS = 30
SEES_DOUBLING = 27
"""This many audits over a show, as amber, a loss that is doubled from installation on, with a probability of 90 %."""
_MOST_DECISIONS = 1_000_000
"""Beyond this the range no longer changes."""


def next_range(n: int, share: Number, decisions: int, *, confidence: float = 0.95) -> Limits | None:
    """Return the range of the mean loss over the next N decisions, as shares of the loss bound; None if all are deferred.

    It holds for a share `confidence` of calibrations and traffic if they are exchangeable, losses are 0 or the bound, and
    the budget is spent: scores without ties, or a random boundary, and a Primary that needs the Guardian. Where it is not
    spent, the mean may lie below. For graded losses there is no such law: watch the limits of the running mean.

    Args:
        n: rows of the certificate.
        share: its risk budget as a share of the loss bound.
        decisions: N.
        confidence: how often the mean lies inside.
    """
    if decisions < 1:
        raise OptionError(f"decisions must be 1 or more; got {decisions}")
    losses = int(as_fraction(share, name="alpha") * (n + 1) // 1)
    if losses < 1:
        return None
    total = min(decisions, _MOST_DECISIONS)
    reached = np.cumsum(_beta_binomial(total, losses, n + 1 - losses))
    tail = (1 - confidence) / 2
    low, high = np.searchsorted(reached, [tail, 1 - tail])
    return float(low / total), float(high / total)


def _beta_binomial(total: int, a: float, b: float) -> Floats:
    """Return the probability of 0 to `total` losses."""
    k = np.arange(total)
    steps = np.log(total - k) + np.log(a + k) - np.log(k + 1) - np.log(b + total - k - 1)
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


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
