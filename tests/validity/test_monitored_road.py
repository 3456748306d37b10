"""The road that a certificate in service takes: calibrated, its lines drawn, its ledger read by the monitor itself."""

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.live.service import lines_of
from conformal_arbitrage.monitoring.monitor import Monitor
from tests.validity.test_monitoring import ALPHA, most

pytestmark = pytest.mark.proof
RUNS, ROWS, AUDITS = 120, 200, 1500
NOW = 10.0


def certified(rng, **options):
    """Return a certificate and its true loss: P(loss | margin s) = 0.3 (1 - s), margins uniform."""
    margin = rng.random(ROWS)
    lost = rng.random(ROWS) < 0.3 * (1 - margin)
    guardian = np.where(lost[:, None], [0.0, 1.0], [1.0, 0.0])
    log = ScoreLog.from_arrays(np.stack([margin, np.zeros(ROWS)], axis=1), guardian)
    certificate = calibrate(log, ALPHA, zero_one=True, **options)
    return certificate, 0.15 * (1 - certificate.relaxation) ** 2


@pytest.fixture(scope="module")
def certificates():
    rng = np.random.default_rng(31)
    return [certified(rng) for _ in range(RUNS)]


def monitor(certificate, losses, known=None, **options):
    """Return the monitor of a ledger whose outcomes are known or overdue; with `known` the others are not due yet."""
    [lines] = lines_of(certificate, **options).values()
    shown = losses if known is None else np.where(known, losses, np.nan)
    return Monitor.from_ledger(lines, shown, np.full(len(losses), NOW if known is None else 2 * NOW))


def test_valid_certificates_rarely_turn_red_and_a_line_at_alpha_is_caught(certificates):
    rng = np.random.default_rng(32)
    reds = at_alpha = 0
    for certificate, risk in certificates:
        losses = (rng.random(AUDITS) < risk).astype(float)
        reds += monitor(certificate, losses).red(NOW)
        at_alpha += monitor(certificate, losses, alarm_line="alpha").red(NOW)
    assert reds <= most(lines_of(certificates[0][0])[""].false_red, RUNS)
    assert at_alpha > most(0.05, RUNS)


def test_audits_that_fail_cannot_hide_losses(certificates):
    """Three times alpha, and the audits of most losses fail: left out or counted as 0, they would hide it."""
    rng = np.random.default_rng(33)
    reds = hidden = 0
    for certificate, _ in certificates[:40]:
        losses = (rng.random(AUDITS) < 3 * ALPHA).astype(float)
        fails = rng.random(AUDITS) < np.where(losses > 0, 0.8, 0.05)
        reds += monitor(certificate, np.where(fails, np.nan, losses)).red(NOW)
        hidden += monitor(certificate, np.where(fails, 0.0, losses)).red(NOW)
    assert (reds, hidden) == (40, 0)


def test_kept_is_hardly_ever_said_of_a_loss_above_alpha_whatever_is_still_unknown(certificates):
    """A fifth more than alpha; losses take long to become known, and only those that are known show less than half of it."""
    rng = np.random.default_rng(34)
    kept = blinded = 0
    for certificate, _ in certificates:
        losses = (rng.random(AUDITS) < 1.2 * ALPHA).astype(float)
        known = rng.random(AUDITS) < np.where(losses > 0, 0.3, 0.95)
        kept += monitor(certificate, losses, known).standing(NOW).state == "kept"
        blinded += monitor(certificate, losses[known]).standing(NOW).state == "kept"
    assert kept <= most(0.025, RUNS)
    assert blinded > most(0.025, RUNS)
