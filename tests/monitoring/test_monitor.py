"""A monitor is a function of the ledger and the clock, however the ledger arrives."""

import re
from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.lines import watch_lines
from conformal_arbitrage.monitoring.monitor import Figures, LedgerRow, Monitor, judge

LINES = watch_lines(0.05, n=2000, binary=True)
SURE = watch_lines(0.05, n=2000, confidence=0.95)
BLIND = watch_lines(0.6, n=1)


def ledger(n=4000, *, rate=0.05, seed=0, values=(1.0,)):
    """Return losses, due dates and the times at which outcomes become known (infinite: never)."""
    rng = np.random.default_rng(seed)
    losses = np.where(rng.random(n) < rate, rng.choice(values, n), 0.0)
    drawn = np.arange(n, dtype=float)
    known = drawn + rng.exponential(150.0, n)
    known[rng.random(n) < 0.01] = np.inf
    return losses, drawn + 500, known


def fed(losses, due, known, order, *, lines=LINES, asking=False):
    """Return a monitor that saw all rows and outcomes in some order."""
    monitor = Monitor(lines)
    for time, place, settled in order:
        loss = float(losses[place]) if settled else None
        monitor.observe([LedgerRow(place + 1, float(due[place]), loss)])
        if asking:
            monitor.red(time)
    return monitor


def in_time(due, known):
    drawn = due - 500
    events = [(t, k, False) for k, t in enumerate(drawn.tolist())]
    return sorted(events + [(t, k, True) for k, t in enumerate(known.tolist()) if np.isfinite(t)])


@pytest.mark.parametrize("values", [(1.0,), (0.25, 1 / 3, 1.0)], ids=["0/1", "graded"])
def test_any_order_of_arrival_gives_the_same_numbers_as_a_recomputation(values):
    losses, due, known = ledger(values=values)
    order = in_time(due, known)
    shuffled = [order[k] for k in np.random.default_rng(1).permutation(len(order))]
    monitors = [
        fed(losses, due, known, order),
        fed(losses, due, known, order, asking=True),
        fed(losses, due, known, shuffled),
        fed(losses, due, known, [*order, *shuffled]),
        Monitor.from_ledger(LINES, np.where(np.isfinite(known), losses, np.nan), due),
    ]
    standings = [monitor.standing(1e9) for monitor in monitors]
    assert all(standing == standings[0] for standing in standings)
    assert standings[0].figures.missing > 20


def test_a_monitor_that_stopped_in_the_middle_goes_on_as_if_it_had_not():
    losses, due, known = ledger()
    order = in_time(due, known)
    for share in (0.2, 0.5, 0.9):
        time = order[int(share * len(order))][0]
        running = fed(losses, due, known, [event for event in order if event[0] <= time], asking=True)
        rows = int((due - 500 <= time).sum())
        revived = Monitor.from_ledger(LINES, np.where(known <= time, losses, np.nan)[:rows], due[:rows])
        assert revived.standing(time) == running.standing(time)


def test_evidence_never_falls_when_a_pending_outcome_becomes_known():
    losses = ledger(1000)[0]
    monitor, before = Monitor(LINES), 0.0
    monitor.observe(LedgerRow(k + 1, 1e9) for k in range(1000))
    start = monitor.standing(0.0).figures.log_evidence
    for k in np.random.default_rng(4).permutation(1000).tolist():
        monitor.observe([LedgerRow(k + 1, 1e9, losses[k])])
        evidence = monitor.standing(0.0).figures.log_evidence[0]
        assert evidence >= (before or start[0])
        before = evidence


def test_only_whole_blocks_without_a_gap_count():
    monitor = Monitor(SURE)
    monitor.observe(LedgerRow(seq, 0.0, 1.0) for seq in range(2, 101))
    assert monitor.standing(0.0).figures.log_evidence == (0.0, 0.0)
    assert not monitor.red(0.0)
    monitor.observe([LedgerRow(1, 0.0, 1.0)])
    assert monitor.red(0.0)
    assert monitor.standing(0.0).state == "red"


def test_a_pending_outcome_counts_nothing_and_an_overdue_one_counts_whole():
    monitor = Monitor(SURE)
    monitor.observe(LedgerRow(seq, 100.0) for seq in range(1, 101))
    assert monitor.standing(99.0).state == "blind"
    assert monitor.standing(99.0).figures.pending == 100
    standing = monitor.standing(100.0)
    assert (standing.state, standing.cause) == ("red", "failing audits")
    assert "audits fail" in standing.reasons[0]
    assert monitor.standing(0.0) == standing  # a clock that goes back stands still


def test_a_late_outcome_replaces_a_missing_one_and_the_alarm_stands():
    monitor = Monitor(SURE)
    monitor.observe(LedgerRow(seq, 100.0) for seq in range(1, 401))
    cause = monitor.standing(100.0).cause
    monitor.observe(LedgerRow(seq, 100.0, 0.0) for seq in range(1, 401))
    assert not monitor.red(100.0)
    assert monitor.standing(100.0).state == "kept"
    assert monitor.standing(100.0, alarmed=cause).state == "red"


def test_losses_are_told_from_failing_audits():
    lost = np.where(np.arange(400) % 4 == 0, 1.0, 0.0)
    failing = np.where(np.arange(400) % 50 == 1, np.nan, lost)
    standing = Monitor.from_ledger(SURE, failing, np.zeros(400)).standing(1.0)
    assert (standing.state, standing.cause, standing.figures.missing) == ("red", "losses", 8)
    assert standing.known_limits is None
    assert "the loss is above the red line" in standing.reasons


def test_a_corrected_loss_is_taken_over():
    monitor = Monitor(SURE)
    monitor.observe(LedgerRow(seq, 0.0, 1.0) for seq in range(1, 101))
    monitor.observe(LedgerRow(seq, 0.0, 0.0) for seq in range(1, 101))
    assert monitor.standing(0.0) == Monitor.from_ledger(SURE, np.zeros(100)).standing(0.0)


def test_an_empty_ledger_is_blind_with_limits_from_0_to_1():
    for monitor in (Monitor(LINES), Monitor.from_ledger(LINES, np.zeros(0))):
        standing = monitor.standing(0.0)
        assert standing.state == "blind"
        assert standing.mean is None
        assert standing.limits == standing.known_limits == (0.0, 1.0)
        assert standing.figures.log_evidence == (0.0, 0.0)


def test_an_unknown_outcome_widens_the_limits_on_both_sides():
    losses = np.where(np.arange(1000) % 25 == 0, 1.0, 0.0)
    some = losses.copy()
    some[np.arange(1000) % 10 == 7] = np.nan
    full = Monitor.from_ledger(LINES, losses).standing(0.0)
    partly = Monitor.from_ledger(LINES, some, np.full(1000, 9.0)).standing(0.0)
    assert partly.limits[0] <= full.limits[0] < full.limits[1] < partly.limits[1]
    assert partly.known_limits is not None


def test_losses_a_tick_beyond_the_bound_are_clipped():
    monitor = Monitor(SURE)
    monitor.observe([LedgerRow(1, 0.0, 1 + 1e-12), LedgerRow(2, 0.0, -1e-13)])
    assert monitor.standing(0.0).mean == 0.5


def test_impossible_rows_are_refused():
    with pytest.raises(OptionError, match="from 1"):
        Monitor(LINES).observe([LedgerRow(0, 0.0)])
    with pytest.raises(OptionError, match="nan"):
        Monitor(LINES).observe([LedgerRow(1, 0.0, float("nan"))])


def test_many_distinct_losses_are_counted_alike():
    losses = np.random.default_rng(5).random(6000) * 0.1
    monitor = Monitor(LINES)
    monitor.observe(LedgerRow(k + 1, 0.0, loss) for k, loss in enumerate(losses.tolist()))
    assert monitor.standing(0.0) == Monitor.from_ledger(LINES, losses).standing(0.0)


def test_without_a_red_line_there_is_amber_only():
    standing = Monitor.from_ledger(BLIND, np.ones(200)).standing(0.0)
    assert standing.state == "amber"
    assert standing.cause == "losses"
    assert standing.figures.log_peak[1] is None
    failing = Monitor.from_ledger(BLIND, np.full(200, np.nan), np.zeros(200)).standing(1.0)
    assert (failing.state, failing.cause) == ("amber", "failing audits")
    assert any("audits fail" in reason for reason in failing.reasons)
    assert not Monitor.from_ledger(BLIND, np.ones(200)).red(0.0)


QUIET = Figures(
    lines=LINES,
    audit_rate=0.05,
    known=1000,
    pending=0,
    missing=0,
    log_evidence=(0.0, 0.0),
    log_peak=(0.0, 0.0),
    within_alpha=False,
    within_red=False,
)


@pytest.mark.parametrize(
    ("figures", "state", "reason"),
    [
        ({}, "no evidence", None),
        ({"within_red": True}, "within calibration luck", None),
        ({"within_red": True, "within_alpha": True}, "kept", None),
        ({"audit_rate": 0.0, "within_alpha": True}, "blind", "audit rate is 0"),
        ({"known": 219}, "blind", "219 of the 220 needed"),
        ({"pending": 1001}, "blind", "more than half"),
        ({"missing": 26}, "amber", "more than 2.5 %"),
        ({"known": 1, "collapsed": 119}, "amber", "119 of 120 draws fell into sessions"),
        ({"known": 100, "collapsed": 20}, "blind", "20 more draws fell into sessions"),
        ({"collapsed": 300}, "no evidence", None),
        ({"log_evidence": (0.0, 1.4), "log_peak": (0.0, 1.4)}, "amber", "may be above the red line"),
        ({"log_peak": (3.0, 0.0)}, "amber", "above alpha"),
        ({"log_peak": (9.0, 3.69)}, "red", "above the red line"),
    ],
)
def test_states_follow_from_the_figures(figures, state, reason):
    told, reasons = judge(replace(QUIET, **figures))
    assert told == state
    assert (reason is None and reasons == ()) or any(reason in text for text in reasons)


def test_what_the_ledger_does_not_know_turns_amber_too():
    assert judge(QUIET, guardian_fails=True)[0] == "amber"
    assert judge(QUIET, stale="stale: not looked at yet") == ("amber", ("stale: not looked at yet",))
    assert judge(replace(QUIET, log_peak=(9.0, 9.0)), stale="old")[0] == "red"


def test_evidence_that_crossed_the_line_and_fell_again_in_one_reading_is_red():
    losses = np.concatenate([np.ones(100), np.zeros(20_000)])
    monitor = Monitor.from_ledger(LINES, losses)
    assert monitor.red(0.0)
    shown = monitor.standing(0.0)
    assert shown.figures.log_evidence[1] < LINES.log_red < shown.figures.log_peak[1]
    assert shown.state == "red"


def test_kept_is_not_said_while_what_is_unknown_could_break_it():
    losses = np.zeros(1000)
    assert Monitor.from_ledger(LINES, losses).standing(0.0).state == "kept"
    losses[::8] = np.nan  # an eighth may still turn out to be losses
    shown = Monitor.from_ledger(LINES, losses, np.full(1000, 9.0)).standing(0.0)
    assert (shown.state, shown.figures.pending) == ("no evidence", 125)


def test_gains_and_losses_above_the_bound_are_refused():
    lines = watch_lines(0.05, n=500)
    for loss in (-0.2, 1.5, float("nan")):
        with pytest.raises(OptionError, match="a loss is a number from 0 to 1"):
            Monitor(lines).observe([LedgerRow(seq=1, due=0.0, loss=loss)])
    with pytest.raises(OptionError, match="a loss is a number from 0 to 1"):
        Monitor.from_ledger(lines, np.array([0.0, -1.0]))


NET = watch_lines(0.05, n=2000, confidence=0.95, absolute=0.2)


def test_net_losses_are_watched_with_their_gains_in_any_order():
    rng = np.random.default_rng(8)
    losses = rng.choice([-1.0, 0.0, 0.5, 1.0], 2000, p=[0.1, 0.7, 0.1, 0.1])
    whole = Monitor.from_ledger(NET, losses)
    single = Monitor(NET)
    for place in rng.permutation(2000).tolist():
        single.observe([LedgerRow(place + 1, 1e9)])
    for place in rng.permutation(2000).tolist():
        single.observe([LedgerRow(place + 1, 1e9, float(losses[place]))])
    assert single.standing(0.0) == whole.standing(0.0)
    standing = whole.standing(0.0)
    assert standing.mean == pytest.approx(losses.mean())
    assert standing.limits[0] < losses.mean() < standing.limits[1]
    assert -1 < standing.limits[0] < standing.limits[1] < 1


def test_a_pending_net_loss_counts_as_the_largest_gain_and_a_missing_one_as_a_loss():
    monitor = Monitor(NET)
    monitor.observe(LedgerRow(seq, 100.0, 1.0 if seq % 2 else None) for seq in range(1, 201))
    assert not monitor.red(50.0), "half lost, and the other half may have gained"
    assert monitor.standing(50.0).limits[0] < 0
    assert monitor.red(100.0)
    assert monitor.standing(100.0).cause == "failing audits"
    assert Monitor(NET).standing(0.0).limits == (-1.0, 1.0)


def test_a_kept_net_loss_is_told_and_one_out_of_range_is_refused():
    assert Monitor.from_ledger(NET, np.zeros(1000)).standing(0.0).state == "kept"
    with pytest.raises(OptionError, match="a loss is a number from -1 to 1"):
        Monitor(NET).observe([LedgerRow(1, 0.0, -1.2)])
    with pytest.raises(OptionError, match="a loss is a number from -1 to 1"):
        Monitor.from_ledger(NET, np.array([2.0]))


def test_a_standing_is_shown_as_a_table_with_a_scale():
    lines = watch_lines(0.05, n=1000)
    for losses, state in ((np.zeros(0), "blind"), (np.ones(400), "red")):
        page = Monitor.from_ledger(lines, losses).standing(0.0)._repr_html_()
        assert re.search(rf"^<table><tr><th [^>]+>state</th><td [^>]+>{state}", page)
        assert "alpha 0.05" in page
