"""Alarms, limits and guard keep their levels where the truth is known; each planted bug fails the same check.

Worlds are runs x audits arrays of losses; evidence and limits are the product's own functions, over all runs at once.
"""

from math import comb, log

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration.secret import draw, subkey
from conformal_arbitrage.gateway.decider import Decider
from conformal_arbitrage.monitoring import monitor
from conformal_arbitrage.monitoring.evidence import EvidenceProcess, log_evidence
from conformal_arbitrage.monitoring.limits import limits_of, loss_logs
from conformal_arbitrage.monitoring.lines import block_size, luck_line, plan_audits, watch_lines
from conformal_arbitrage.monitoring.monitor import Guard, LedgerRow, Monitor
from conformal_arbitrage.monitoring.outcomes import AuditedDecision, Verdict, decision_loss

RUNS, AUDITS, ALPHA = 400, 5000, 0.05
BLOCK = block_size(ALPHA)


def most(level, runs=RUNS):
    """Return the 99.9 % quantile of Bin(runs, level): more alarms than that refute the level."""
    reached = 0.0
    for k in range(runs + 1):
        reached += comb(runs, k) * level**k * (1 - level) ** (runs - k)
        if reached >= 0.999:
            return k
    return runs


def blocks(losses, size=BLOCK):
    """Return the block means of runs x audits losses, as blocks x runs."""
    whole = losses.shape[1] // size
    return losses[:, : whole * size].reshape(len(losses), whole, size).mean(axis=2).T


def alarms(losses, line=ALPHA, *, size=BLOCK, evidence=20.0):
    """Return in how many runs the evidence ever reaches a level."""
    return int((log_evidence(blocks(losses, size), line).max(axis=0) >= log(evidence)).sum())


def bernoulli(rng, rate, shape=(RUNS, AUDITS)):
    return (rng.random(shape) < rate).astype(float)


def test_false_alarms_at_the_line_stay_within_their_level():
    losses = bernoulli(np.random.default_rng(1), ALPHA)
    assert alarms(losses) <= most(0.05)
    assert alarms(losses, evidence=40) <= most(0.025)


def test_a_z_test_after_each_audit_is_caught():
    losses = bernoulli(np.random.default_rng(1), ALPHA)[:, :1000]
    count = np.arange(1, 1001)
    z = (losses.cumsum(axis=1) / count - ALPHA) / np.sqrt(ALPHA * (1 - ALPHA) / count)
    assert (z[:, 29:].max(axis=1) > 1.645).sum() > most(0.05)


def certified_risk(rng, n):
    """Return the true risk of one calibration: P(loss | margin s) = 0.3 (1 - s), margins uniform."""
    margin = rng.random(n)
    lost = rng.random(n) < 0.3 * (1 - margin)
    guardian = np.where(lost[:, None], [0.0, 1.0], [1.0, 0.0])
    certificate = calibrate(ScoreLog.from_arrays(np.stack([margin, np.zeros(n)], axis=1), guardian), ALPHA)
    return 0.15 * (1 - certificate.relaxation) ** 2


@pytest.fixture(scope="module")
def served():
    """Audited losses of 400 valid certificates from 500 rows each."""
    rng = np.random.default_rng(2)
    risks = np.array([certified_risk(rng, 500) for _ in range(RUNS)])
    assert risks.mean() == pytest.approx(ALPHA, abs=0.002)
    return bernoulli(rng, risks[:, None])


def test_valid_certificates_rarely_turn_red(served):
    assert alarms(served, luck_line(500, ALPHA, binary=True), evidence=40) <= most(0.05)


def test_a_red_line_at_alpha_is_caught(served):
    assert alarms(served, ALPHA, evidence=40) > most(0.05)


def arriving(losses, late):
    """Return losses in the order in which they become known: a loss after 5 audits, no loss after `late`."""
    known = np.arange(losses.shape[1]) + np.where(losses > 0, 5, late)
    return np.take_along_axis(losses, np.argsort(known, axis=1, kind="stable"), axis=1)


@pytest.mark.parametrize("late", [100, 400])
def test_outcomes_that_are_known_late_raise_no_false_alarm(late):
    """Look at every 250th audit, with what is known then, as a running monitor does."""
    losses = bernoulli(np.random.default_rng(3), ALPHA)
    alarmed = np.zeros(RUNS, dtype=bool)
    for now in range(250, AUDITS + 1, 250):
        known = np.arange(now) + np.where(losses[:, :now] > 0, 5, late) <= now
        seen = np.where(known, losses[:, :now], 0.0)
        alarmed |= log_evidence(blocks(seen), ALPHA).max(axis=0) >= log(20)
    assert alarmed.sum() <= most(0.05)


def test_counting_resolved_audits_in_order_of_arrival_is_caught():
    losses = bernoulli(np.random.default_rng(3), ALPHA)
    assert alarms(arriving(losses, 400)) > most(0.05)


def test_counting_pending_audits_as_losses_is_caught():
    losses = bernoulli(np.random.default_rng(3), ALPHA)[:, :1000]
    known = np.arange(1000) + np.where(losses > 0, 5, 400) <= 1000
    assert alarms(np.where(known, losses, 1.0)) > most(0.05)


def test_the_running_monitor_is_that_function():
    losses = bernoulli(np.random.default_rng(3), 2 * ALPHA, (3, 1000))
    for run in losses:
        monitor, first = Monitor(watch_lines(ALPHA, n=2000, confidence=0.95)), None
        for now in range(1, 1400):
            known = [k for k in (now - 6, now - 401) if 0 <= k < 1000 and (run[k] > 0) == (k == now - 6)]
            new = [] if now > 1000 else [LedgerRow(now, 1e9)]
            monitor.observe([*new, *(LedgerRow(k + 1, 1e9, float(run[k])) for k in known)])
            if first is None and monitor.red(float(now)):
                first = now
        reached = np.flatnonzero(log_evidence(blocks(run[None])[:, 0], ALPHA) >= log(40))
        assert first is not None
        assert 0 <= first - (reached[0] + 1) * BLOCK <= 6


def decisions(rng, loss, n=100_000, runs=60, rate=0.05):
    """Return decisions of which half are deferred: losses, whether deferred, whether the coin drew them."""
    deferred = rng.random((runs, n)) < 0.5
    lost = ~deferred & (rng.random((runs, n)) < 2 * loss)
    return lost, deferred, rng.random((runs, n)) < rate


def first_alarm(stream):
    """Return after how many audits the evidence reaches 40; infinite if never."""
    logs = log_evidence(blocks(stream[None].astype(float))[:, 0], ALPHA)
    reached = np.flatnonzero(logs >= log(40))
    return (reached[0] + 1) * BLOCK if len(reached) else np.inf


def test_a_doubled_loss_is_seen_and_counting_all_deferrals_is_caught():
    lost, deferred, drawn = decisions(np.random.default_rng(4), 2 * ALPHA)
    delays = [first_alarm(x[d]) for x, d in zip(lost, drawn, strict=True)]
    assert 120 <= np.median(delays) <= 330
    mixed = [first_alarm(x[d | a]) for x, d, a in zip(lost, deferred, drawn, strict=True)]
    assert np.isinf(mixed).all()


def test_a_coin_on_the_primarys_decisions_alone_is_caught():
    lost, deferred, drawn = decisions(np.random.default_rng(5), ALPHA, runs=100)
    fair = [first_alarm(x[d]) for x, d in zip(lost, drawn, strict=True)]
    assert np.isfinite(fair).sum() <= most(0.025, 100)
    chosen = [first_alarm(x[d & ~a]) for x, d, a in zip(lost, drawn, deferred, strict=True)]
    assert np.isfinite(chosen).sum() > most(0.025, 100)


def test_failing_audits_cannot_hide_losses_and_dropping_them_is_caught():
    rng = np.random.default_rng(6)
    losses = bernoulli(rng, 2 * ALPHA, (100, AUDITS))
    fails = rng.random(losses.shape) < np.where(losses > 0, 0.6, 0.05)
    assert alarms(np.where(fails, 1.0, losses), evidence=40) == 100
    assert alarms(np.where(fails, 0.0, losses), evidence=40) <= most(0.025, 100)
    dropped = [first_alarm(row[~gone]) for row, gone in zip(losses, fails, strict=True)]
    assert np.isfinite(dropped).sum() <= most(0.025, 100)


def test_blocks_blunt_sessions_and_single_losses_are_caught():
    rng = np.random.default_rng(7)
    length, rate, runs = 20, 0.2, 150
    bad = rng.random((runs, AUDITS * 5 // length + 200)) < 0.1
    losses = (np.repeat(bad, length, axis=1) * (rng.random((runs, bad.shape[1] * length)) < 0.5)).astype(float)
    drawn = rng.random(losses.shape) < rate
    audited = np.stack([row[d][:AUDITS] for row, d in zip(losses, drawn, strict=True)])
    assert audited.mean() == pytest.approx(ALPHA, abs=0.002)
    assert alarms(audited) <= most(0.05, runs)
    assert alarms(audited, size=1) > most(0.05, runs)


def ever_collapsing(lengths, rate, looks=None):
    """Return the share of runs in which draws of sessions with so many decisions an hour, runs x sessions, turn amber."""
    rng = np.random.default_rng(17)
    draws = rng.binomial(lengths, rate)
    audits, draws = (draws > 0).cumsum(axis=1), draws.cumsum(axis=1)
    pairs = zip(audits.tolist(), draws.tolist(), strict=True)
    return np.mean([
        any(monitor.is_collapsing(*counts, rate) for counts in zip(*run, strict=True)) for run in pairs
    ])  # fmt: skip


def natural_sessions(runs=100, sessions=1000):
    return np.minimum(np.random.default_rng(18).geometric(1 / 6, (runs, sessions)), 30)


RATES = (0.01, 0.05, 0.2, 1.0)


@pytest.mark.parametrize("rate", RATES)
def test_natural_sessions_stay_green(rate, monkeypatch):
    assert ever_collapsing(natural_sessions(), rate) == 0
    assert ever_collapsing(np.full((100, 1000), monitor.LONGEST_SESSION), rate) <= 0.05
    monkeypatch.setattr(monitor, "LONGEST_SESSION", 2)  # the planted bug: two decisions an hour are a session already
    assert ever_collapsing(natural_sessions(), rate) > 0.5


@pytest.mark.parametrize("rate", RATES)
def test_draws_that_share_few_sessions_turn_amber_within_the_documented_number(rate, monkeypatch):
    """One user for all requests, ten users, and one user for half of them beside natural sessions."""
    documented = 40
    merged = np.full((100, 1), round(documented / rate))
    few = np.full((100, 10), round(10 * documented / rate))
    mixed = natural_sessions()
    mixed[:, ::100] = round(1000 / rate)
    for lengths in (merged, few, mixed):
        assert ever_collapsing(lengths, rate) >= 0.99
    monkeypatch.setattr(monitor, "is_collapsing", lambda audits, draws, _: audits == 0 and draws > 0)  # the planted bug
    assert ever_collapsing(merged, rate) == 0


def test_a_restart_loses_nothing_and_a_lost_state_is_caught():
    """Fifty lives of 1,000 audits; a monitor that begins anew has a new chance of a false alarm in each."""
    losses = bernoulli(np.random.default_rng(8), ALPHA, (200, 50_000))
    process = EvidenceProcess(np.full(200, ALPHA))
    lives = blocks(losses)
    for life in range(50):
        first = process.resume(process.blocks)
        process.update(first, lives[first : (life + 1) * 100])
    assert (process.peak() >= log(20)).sum() <= most(0.05, 200)
    lost = [log_evidence(lives[k : k + 100], ALPHA).max(axis=0) >= log(20) for k in range(0, 5000, 100)]
    assert np.any(lost, axis=0).sum() > most(0.05, 200)


def test_limits_hold_for_a_mean_that_moves_and_their_intersection_is_caught():
    rng = np.random.default_rng(10)
    rates = np.where(np.arange(4000) < 2000, 0.02, 0.10)
    logs = np.zeros((RUNS, 28), dtype=np.int64)
    misses = np.zeros((2, RUNS), dtype=bool)
    lowest, crossed = np.ones(RUNS), np.zeros(RUNS, dtype=bool)
    for stop in range(50, 4001, 50):
        logs += loss_logs(bernoulli(rng, rates[stop - 50 : stop], (RUNS, 50))).sum(axis=1)
        truth = rates[:stop].mean()
        lower, upper = limits_of(logs, np.full(RUNS, stop), 0.05)
        misses |= [lower > truth, upper < truth]
        lowest = np.minimum(lowest, upper)
        crossed |= lowest < truth
    assert misses.sum(axis=1).max() <= most(0.05)
    assert crossed.sum() > most(0.05)


def test_the_audit_coin_is_independent_of_the_boundary_draw():
    """At a coarse margin the draw decides who answers, so a coin by the same hash would choose by outcome."""
    rng = np.random.default_rng(11)
    secret = rng.bytes(32)
    boundary, coin = subkey(secret, "boundary v1"), Decider(secret)
    margin = rng.choice([0.25, 0.75], 2000)
    lost = rng.random(2000) < np.where(margin < 0.5, 0.2, 0.02)
    guardian = np.where(lost[:, None], [0.0, 1.0], [1.0, 0.0])
    ids = [f"c{k}" for k in range(2000)]
    log_ = ScoreLog.from_arrays(np.stack([margin, np.zeros(2000)], axis=1), guardian, id=ids)
    certificate = calibrate(log_, ALPHA, boundary="random", key=boundary)
    n = 40_000
    live = rng.choice([0.25, 0.75], n)
    rows = ScoreLog.from_arrays(np.stack([live, np.zeros(n)], axis=1), id=[f"f{k}" for k in range(n)])
    loss = (rng.random(n) < np.where(live < 0.5, 0.2, 0.02)) & ~certificate.apply(rows).deferred

    def audited(draws):
        drawn = np.array([draws(f"f{k}") for k in range(n)])
        return loss[drawn].mean(), (loss[drawn].var() / drawn.sum()) ** 0.5

    mean, error = audited(lambda id: coin._drawn(id, 0.05))
    assert abs(mean - loss.mean()) <= 4 * error
    mean, error = audited(lambda id: draw(boundary, id) < 0.05)
    assert abs(mean - loss.mean()) > 4 * error


def test_a_deferral_loses_nothing_and_a_second_asking_is_caught():
    """A Guardian that repeats itself in 95 % of the cases would seem to lose 0.05 against itself."""
    rng = np.random.default_rng(12)
    deferral = AuditedDecision(decided_by="guardian", size=2, candidates=(0, 1), action=0)
    losses, seeming = [], []
    for repeats in rng.random(2000) < 0.95:
        again = (1.0, 0.0) if repeats else (0.0, 1.0)
        losses.append(decision_loss(deferral, Verdict(scores=again)))
        seeming.append(max(again) - again[0])
    assert max(losses) == 0
    assert np.mean(seeming) == pytest.approx(0.05, abs=0.02)


def guarded(guard, hostile, delay, shares):
    """Return the sum of (x - a) over known audits: a stream loses wherever the rule leaves it a chance."""
    known, pending, rho, worst = [], [], guard.base, 0.0
    for chance in hostile:
        pending.append(float(chance and rho < 1))
        if len(pending) > delay:
            known.append(pending.pop(0))
            rho = shares(rho, known)
            worst = max(worst, sum(known) - guard.alpha * len(known))
    return worst


def test_the_guard_bounds_losses_on_any_stream_and_a_cap_is_caught():
    guard = Guard(alpha=0.05, base=0.3)

    def step(rho, known):
        return max(guard.base, rho + guard.step * (known[-1] - guard.alpha))

    def capped(rho, known):
        return min(1 + guard.step, step(rho, known))

    def unweighted(rho, known):
        return rho + guard.step * (0.05 * known[-1] - guard.alpha)

    streams = [np.ones(4000, dtype=bool), np.arange(4000) % 50 < 25, np.random.default_rng(13).random(4000) < 0.5]
    for hostile in streams:
        for delay in (0, 5, 40):
            assert guarded(guard, hostile, delay, step) <= guard.excess_bound(delay) + 1e-9
    assert guarded(guard, streams[0], 5, capped) > guard.excess_bound(5)
    assert guarded(guard, streams[0], 0, unweighted) > guard.excess_bound(0)


def test_the_guards_shares_are_those_of_the_stream():
    guard, losses = Guard(alpha=0.05, base=0.3), bernoulli(np.random.default_rng(14), 0.3, (1, 3000))[0]
    rho = guard.base
    for k, loss in enumerate(losses):
        rho = max(guard.base, rho + guard.step * (loss - guard.alpha))
        if k % 500 == 0:
            assert guard.shares(losses[: k + 1])[-1] == pytest.approx(rho, abs=1e-9)


@pytest.mark.parametrize(("ratio", "audits"), [(1.5, 4000), (2.0, 1200), (5.0, 200)])
def test_planned_delays_are_those_of_the_monitor(ratio, audits):
    """In half of all runs red comes by the planned number of audits, in nine of ten by twice as many."""
    losses = bernoulli(np.random.default_rng(16), ratio * ALPHA, (200, audits))
    reached = log_evidence(blocks(losses), ALPHA) >= log(40)
    delays = np.where(reached.any(axis=0), BLOCK * (reached.argmax(axis=0) + 1), np.inf)
    [planned] = [
        row.audits for row in plan_audits(ALPHA, audit_rate=1, decisions_per_day=1).delays if row.ratio == ratio
    ]
    assert 0.7 * planned <= np.median(delays) <= 1.3 * planned
    assert np.mean(delays <= 2 * planned) >= 0.84
