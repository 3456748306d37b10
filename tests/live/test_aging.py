import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.live.service import AgeLimits, KnownLosses, age_of
from conformal_arbitrage.store.ledger import LedgerRows

DAY = 86400.0
NOW = 1_800_000_000.0


def certificate(n=500, **options):
    rng = np.random.default_rng(4)
    primary = rng.dirichlet(np.ones(2), n)
    guardian = np.eye(2)[np.where(rng.random(n) < 0.8, primary.argmax(axis=1), 1 - primary.argmax(axis=1))]
    log = ScoreLog.from_arrays(primary.tolist(), guardian.tolist(), id=[f"q{k}" for k in range(n)])
    return calibrate(log, 0.05, **options)


def known(count, at):
    losses = KnownLosses()
    losses.take_all(LedgerRows.of([(at, at + DAY, 0.0, None, 0, k + 1, at) for k in range(count)], count))
    return losses


def age(losses, days, **options):
    return age_of(certificate(zero_one=True), losses, installed=NOW - days * DAY, now=NOW, audit_rate=0.05, **options)


def test_a_certificate_goes_stale_by_evidence():
    assert age(known(0, NOW), 29.9).stale is None  # its own rows are recent enough
    shown = age(known(0, NOW), 31)
    assert "not looked at yet" in shown.stale
    assert (shown.needed, shown.blind_decisions, shown.last_known) == (540, 10_800, None)
    assert age(known(540, NOW - 29 * DAY), 400).stale is None
    old = age(known(540, NOW - 31 * DAY), 400)
    assert "not looked at enough since 2026-12-15" in old.stale
    assert (old.known_lately, old.installed) == (0, NOW - 400 * DAY)


def test_a_clock_that_went_back_makes_no_certificate_older():
    assert age(known(0, NOW), -5, limits=AgeLimits(max_age=1)).expired is None


def test_expiry_is_off_unless_set():
    assert age(known(0, NOW), 10_000).expired is None
    limits = AgeLimits(max_age=90, max_decisions=1000)
    assert limits.expiry(89.9, 999) is None
    assert limits.expiry(90) == "expired: the certificate has been in force for 90 days, and max_age is 90"
    reason = "expired: the certificate has been in force for 1,000 decisions, and max_decisions is 1,000"
    assert age(known(0, NOW), 1, limits=limits, decisions=1000).expired == limits.expiry(1, 1000) == reason


def test_how_fresh_audits_have_to_be_is_configured():
    limits = AgeLimits(fresh_days=7)
    assert age(known(540, NOW - 6 * DAY), 10, limits=limits).stale is None
    assert "in the last 7 days" in age(known(540, NOW - 8 * DAY), 10, limits=limits).stale
    assert age(known(0, NOW), 6.9, limits=limits).stale is None


def test_the_range_of_the_next_decisions_is_shown_where_its_law_is_known():
    low, high = certificate(zero_one=True).next_range()
    assert 0.02 < low < 0.05 < high < 0.09
    assert age(known(0, NOW), 1).next_decisions == 500
    assert certificate().next_range() is None  # graded losses
    assert certificate(zero_one=True, confidence=0.9).next_range() is None
    words = certificate(zero_one=True).luck
    assert words.startswith(
        f"over the next 500, the mean loss lies in {low:.3g} to {high:.3g} for 95 % of calibrations"
    )
    assert "only audits say" in certificate().luck
    assert certificate(n=10).luck == "all are deferred, so they lose nothing"


@pytest.mark.parametrize("rate", [0.0])
def test_without_audits_every_decision_is_blind(rate):
    shown = age_of(certificate(), known(0, NOW), installed=NOW, now=NOW, audit_rate=rate)
    assert shown.blind_decisions is None
