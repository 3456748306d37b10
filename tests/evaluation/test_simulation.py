"""A simulation replays a log through the rule, the ledger and the monitor of production."""

import json
from math import inf

import numpy as np
import pytest

from conformal_arbitrage import OptionError, ScoreLog
from conformal_arbitrage.evaluation.show import save_simulation
from conformal_arbitrage.evaluation.simulation import Scenario, simulate
from conformal_arbitrage.monitoring.lines import watch_lines
from conformal_arbitrage.monitoring.monitor import LedgerRow, Monitor
from conformal_arbitrage.scorelog.log import CostOptions
from tests.validity.test_monitoring import most


def world(n=3000, seed=0):
    """Return a log of three actions; the chance that the Primary's choice is wrong falls with its margin."""
    rng = np.random.default_rng(seed)
    margin = rng.random(n)
    lost = rng.random(n) < 0.3 * (1 - margin)
    primary = np.stack([0.4 + margin / 2, np.full(n, 0.4), np.full(n, 0.1)], axis=1)
    guardian = np.where(lost[:, None], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0])
    return ScoreLog.from_arrays(primary, guardian, id=[f"q{k}" for k in range(n)], label=guardian.argmax(axis=1))


LOG = world()
SURE = {"confidence": 0.95, "zero_one": True}


@pytest.fixture(scope="module")
def shifted():
    return simulate(
        LOG, 0.05, scenario=Scenario(decisions=40_000, seed=1, renewal_rows=500),
        costs=CostOptions(primary_cost=0.001, guardian_cost=0.1), **SURE,
    )  # fmt: skip


def test_the_loss_grows_by_the_factor_asked_for_and_the_monitor_stops_it(shifted):
    before, after = shifted.outcomes["without"]["before"], shifted.outcomes["without"]["after"]
    assert after.loss == pytest.approx(3 * before.loss, rel=0.1)
    assert after.guardian_share == pytest.approx(before.guardian_share, abs=0.01), "margins do not change"
    assert [moment.kind for moment in shifted.moments] == ["change", "red", "renewal"]
    change, red, renewal = shifted.moments
    assert change.at == 20_000
    assert renewal.at == red.at + 500
    assert shifted.delay == red.at - 20_000
    assert shifted.outcomes["with"]["before"].loss == before.loss
    assert shifted.outcomes["with"]["after"].loss < 0.5 * after.loss
    assert shifted.outcomes["with"]["after"].guardian_share > after.guardian_share


def test_no_decision_after_red_is_the_primarys_until_there_is_a_new_certificate(shifted):
    _, red, renewal = shifted.moments
    course = shifted.courses["with"]
    assert course.deferred[red.at : renewal.at].all()
    assert not course.losses[red.at : renewal.at].any()
    assert not course.deferred[renewal.at :].all()
    assert (course.losses[: red.at] == shifted.courses["without"].losses[: red.at]).all()


def test_red_fires_where_the_monitor_of_production_fires(shifted):
    """Feed the audited losses one by one into a Monitor of our own."""
    ledger = shifted.courses["with"].watched[0]
    monitor = Monitor(watch_lines(0.05, n=1500, **{"confidence": 0.95, "binary": True}))
    losses = shifted.courses["without"].losses[ledger.drawn]
    fired = [
        monitor.observe([LedgerRow(k, inf, loss)]) or monitor.red(0.0) for k, loss in enumerate(losses.tolist(), 1)
    ]
    assert fired.index(True) + 1 == shifted.moments[1].audits == len(losses)
    assert shifted.moments[1].at == ledger.drawn[-1] + 1


def test_money_counts_both_models_and_the_audits(shifted):
    for way, parts in shifted.outcomes.items():
        one = parts["all"]
        asked = one.guardian_share * one.decisions + one.audit_calls
        assert one.cost == pytest.approx(0.001 * one.decisions + 0.1 * asked)
        assert (one.audit_calls > 0) == (way == "with")
    assert shifted.always == pytest.approx(0.1 * 40_000)


def test_the_same_seed_gives_the_same_document(shifted):
    again = simulate(
        LOG, 0.05, scenario=Scenario(decisions=40_000, seed=1, renewal_rows=500),
        costs=CostOptions(primary_cost=0.001, guardian_cost=0.1), **SURE,
    )  # fmt: skip
    assert json.loads(json.dumps(again.to_dict())) == json.loads(json.dumps(shifted.to_dict()))


def test_without_a_change_there_is_hardly_ever_an_alarm():
    """Valid certificates on traffic like their own: red with probability 0.075 at most."""
    runs = [
        simulate(LOG, 0.05, scenario=Scenario(decisions=4000, shift=1, seed=seed, audit_rate=0.2), **SURE)
        for seed in range(12)
    ]
    assert sum(bool(one.moments) for one in runs) <= most(0.075, 12)
    assert np.mean([one.outcomes["without"]["all"].loss for one in runs]) <= 0.05
    assert "after" in runs[0].outcomes["with"]
    assert runs[0].delay is None


@pytest.mark.parametrize(
    "options",
    [{"guardian_sees": "candidates"}, {"boundary": "random"}, {"confidence": 0.9}, {"loss_bound": 2}],
    ids=str,
)
def test_every_rule_is_replayed(options):
    alpha = 0.1 if "loss_bound" in options else 0.05
    one = simulate(LOG, alpha, scenario=Scenario(decisions=20_000, shift=4, renewal_rows=0), **options)
    without = one.outcomes["without"]
    assert without["after"].loss == pytest.approx(4 * without["before"].loss, rel=0.15)
    assert one.moments[-1].kind == "red"
    assert one.courses["with"].deferred[one.moments[-1].at :].all(), "without a renewal, safe mode lasts"
    assert one.outcomes["with"]["all"].cost is None


def test_binarized_and_router_logs_are_replayed():
    one = simulate(LOG.binarized(), 0.05, scenario=Scenario(decisions=10_000, shift=3, seed=2))
    assert one.outcomes["without"]["after"].loss == pytest.approx(3 * one.outcomes["without"]["before"].loss, rel=0.2)
    rng = np.random.default_rng(3)
    s = rng.random(2000)
    grades = 1 - 0.5 * (rng.random(2000) < 0.4 * (1 - s))
    router = ScoreLog.from_router(confidence=s, primary_grade=grades, guardian_grade=np.ones(2000))
    two = simulate(router, 0.05, scenario=Scenario(decisions=10_000, shift=3, seed=2))
    assert two.outcomes["without"]["after"].loss == pytest.approx(3 * two.outcomes["without"]["before"].loss, rel=0.2)


def test_a_new_certificate_that_defers_everything_ends_the_story():
    one = simulate(LOG, 0.05, scenario=Scenario(decisions=20_000, shift=5, renewal_rows=5, seed=4))
    assert one.moments[-1].kind == "renewal"
    assert one.courses["with"].deferred[one.moments[-1].at :].all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decisions": 10}, "100 or more"),
        ({"shift": 0.5}, "shift must be 1 or more"),
        ({"shift_at": 1.0}, r"shift_at must lie in \[0, 1\)"),
        ({"audit_rate": 0.0}, "audit_rate must lie above 0"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"calibration_rows": 3000}, "leave no traffic"),
        ({"shift": 1000.0}, "cannot grow 1000-fold"),
    ],
)
def test_impossible_scenarios_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        simulate(LOG, 0.05, scenario=Scenario(**options))


def test_logs_and_options_that_cannot_be_replayed_are_refused():
    for options in ({"loss": "net"}, {"score": "learned"}):
        with pytest.raises(OptionError, match="leave loss=, by=, cluster= and score= out"):
            simulate(LOG, 0.05, boundary="random", **options)
    missing = ScoreLog.from_arrays([[0.9, 0.1]] * 40, [[1, 0]] * 39 + [[None, None]])
    with pytest.raises(OptionError, match="1 row has no Guardian score"):
        simulate(missing, 0.1)
    with pytest.raises(OptionError, match="nothing to watch"):
        simulate(LOG, 0.05, scenario=Scenario(calibration_rows=10))
    with pytest.raises(TypeError, match="unexpected keyword"):
        simulate(LOG, 0.05, alphas=[0.1])


def test_the_figure_is_drawn_with_and_without_an_alarm(shifted, tmp_path):
    save_simulation(shifted, tmp_path / "one.png")
    quiet = simulate(LOG, 0.05, scenario=Scenario(decisions=2000, shift=1))
    save_simulation(quiet, tmp_path / "two.svg")
    assert (tmp_path / "one.png").stat().st_size > 20_000
    text = (tmp_path / "two.svg").read_text()
    assert text.startswith("<?xml")


def test_in_a_notebook_it_shows_what_happened_and_the_losses(shifted):
    page = shifted._repr_html_()
    assert "red after" in page
    assert page.count("<table>") == 2
    assert "with monitor, after it" in page
    assert page.count("<rect") == 3
