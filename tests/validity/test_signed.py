"""The monitor of net losses keeps its level where the truth is known; each planted bug fails the same check.

A net loss x in {-1, 0, 1} is watched as y = (x + 1) / 2; worlds are runs x audits arrays of y.
"""

from math import log

import numpy as np
import pytest

from conformal_arbitrage import calibrate
from conformal_arbitrage.monitoring.evidence import log_evidence
from conformal_arbitrage.monitoring.lines import certificate_lines, watch_lines
from conformal_arbitrage.monitoring.monitor import LedgerRow, Monitor
from tests.validity.test_monitoring import blocks, most
from tests.validity.test_net import KEY, router_log

pytestmark = pytest.mark.proof
RUNS, AUDITS, LINE = 400, 5000, 0.05
BLOCK = 5


def net(rng, lost, gained, shape=(RUNS, AUDITS)):
    """Return net losses as y: 1 for a loss, 0 for a gain, 1/2 for neither."""
    u = rng.random(shape)
    return np.where(u < lost, 1.0, np.where(u < lost + gained, 0.0, 0.5))


def peaks(shares, line=LINE):
    return log_evidence(blocks(shares, BLOCK), (line + 1) / 2).max(axis=0)


def test_false_alarms_at_the_line_stay_within_their_level():
    shares = net(np.random.default_rng(1), 0.10, 0.05)
    assert (peaks(shares) >= log(40)).sum() <= most(0.025)
    assert (peaks(shares) >= log(20)).sum() <= most(0.05)


def test_a_doubled_net_loss_is_seen():
    logs = log_evidence(blocks(net(np.random.default_rng(2), 0.15, 0.05), BLOCK), (LINE + 1) / 2)
    reached = (logs >= log(40)).argmax(axis=0)[(logs >= log(40)).any(axis=0)]
    assert len(reached) == RUNS
    assert 500 <= BLOCK * (np.median(reached) + 1) <= 950


def alarmed_while_gains_wait(shares, pending):
    """Look at every 500th audit; gains are known 400 audits late, everything else at once."""
    alarmed = np.zeros(len(shares), dtype=bool)
    for now in range(500, AUDITS + 1, 500):
        known = np.arange(now) + np.where(shares[:, :now] == 0, 400, 0) < now
        alarmed |= peaks(np.where(known, shares[:, :now], pending)) >= log(40)
    return int(alarmed.sum())


def test_gains_that_are_known_late_raise_no_false_alarm_and_pending_as_0_is_caught():
    shares = net(np.random.default_rng(3), 0.30, 0.25, (200, AUDITS))
    assert alarmed_while_gains_wait(shares, pending=0.0) <= most(0.025, 200)
    assert alarmed_while_gains_wait(shares[:40], pending=0.5) > most(0.025, 40)


def test_blocks_blunt_sessions_and_single_losses_are_caught():
    rng, runs, length = np.random.default_rng(4), 200, 20
    sessions = net(rng, 0.10, 0.05, (runs, 2 * AUDITS // length * 5))
    decisions = np.repeat(sessions, length, axis=1)
    drawn = rng.random(decisions.shape) < 0.05
    audited = np.stack([row[coin][:2000] for row, coin in zip(decisions, drawn, strict=True)])
    assert (peaks(audited) >= log(40)).sum() <= most(0.05, runs)
    single = log_evidence(audited.T, (LINE + 1) / 2).max(axis=0)
    assert (single >= log(40)).sum() > most(0.025, runs)


def test_the_running_monitor_is_that_function():
    """Through `observe`, with gains that are known late: red fires in the block in which the function says so."""
    shares = net(np.random.default_rng(5), 0.25, 0.05, (1, 1500))[0]
    losses = 2 * shares - 1
    lines = watch_lines(LINE, n=2000, confidence=0.95, absolute=0.2)
    assert (lines.red, lines.block) == (LINE, BLOCK)
    monitor, first = Monitor(lines), None
    for now in range(1, 1500):
        rows = [LedgerRow(now, 1e9, None if losses[now - 1] < 0 else float(losses[now - 1]))]
        if now > 400 and losses[now - 401] < 0:
            rows.append(LedgerRow(now - 400, 1e9, -1.0))
        monitor.observe(rows)
        if first is None and monitor.red(float(now)):
            first = now
    known = np.where((shares == 0) & (np.arange(1500) > 0), 0.0, shares)
    reached = np.flatnonzero(log_evidence(blocks(known[None], BLOCK)[:, 0], (LINE + 1) / 2) >= log(40))
    assert first == (reached[0] + 1) * BLOCK


def drawn_world(rng, n):
    """Return confidences and grades: at confidence s, P(loss) = 0.4 (1 - s) and P(gain) = 0.15 (1 - s)."""
    s, u = rng.random(n), rng.random(n)
    lost, gained = u < 0.4 * (1 - s), (u >= 0.4 * (1 - s)) & (u < 0.55 * (1 - s))
    return router_log(s, np.where(lost, 0.0, 1.0), np.where(gained, 0.0, 1.0))


@pytest.fixture(scope="module")
def certified():
    """Return the true risk and the lines of 200 valid net certificates from 500 rows each."""
    rng = np.random.default_rng(6)
    certificates = [calibrate(drawn_world(rng, 500), LINE, loss="net", boundary="random", key=KEY) for _ in range(200)]
    risks = np.array([0.125 * (1 - one.relaxation) ** 2 for one in certificates])
    return risks, [certificate_lines(one) for one in certificates]


def test_valid_net_certificates_rarely_lie_above_their_red_line(certified):
    risks, lines = certified
    assert 0.04 < risks.mean() <= LINE + 3 * risks.std() / len(risks) ** 0.5
    assert (risks > [one.red for one in lines]).sum() <= most(0.025, 200)
    assert (risks > LINE).sum() > most(0.025, 200), "a red line at alpha would not do"


def test_valid_net_certificates_rarely_turn_red(certified):
    risks, lines = certified
    rng = np.random.default_rng(7)
    lost, gained = 1.6 * risks[:, None], 0.6 * risks[:, None]
    shares = net(rng, lost, gained, (200, AUDITS))
    red = [
        log_evidence(blocks(shares[k : k + 1], BLOCK)[:, 0], one.levels[1]).max() >= one.log_red
        for k, one in enumerate(lines)
    ]
    assert sum(red) <= most(0.05, 200)
