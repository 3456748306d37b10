from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import OptionError, ScoreLog, calibrate
from conformal_arbitrage.calibration.promises import Own
from conformal_arbitrage.monitoring.lines import certificate_lines, ledger_names, net_line, watch_lines
from tests.calibration.test_sure import BINARY, GRADED, KEY
from tests.validity.test_net import router_log


def test_each_kind_of_certificate_has_the_lines_of_what_it_promises():
    assert certificate_lines(calibrate(GRADED, 0.05)) == watch_lines(0.05, n=800)
    assert certificate_lines(calibrate(BINARY, 0.05, zero_one=True)) == watch_lines(0.05, n=800, binary=True)
    sure = calibrate(BINARY, 0.05, confidence=0.95, zero_one=True)
    assert certificate_lines(sure).red == 0.05
    assert certificate_lines(calibrate(GRADED, 0.05), alarm_line="alpha").red == 0.05
    assert certificate_lines(sure, policies=3).policies == 3


def test_a_net_certificate_is_watched_by_how_often_outcomes_changed():
    rng = np.random.default_rng(0)
    right = rng.random((2, 600)) < [[0.7], [0.8]]
    log = router_log(rng.random(600), right[0].astype(float), right[1].astype(float))
    certificate = calibrate(log, 0.05, loss="net", boundary="random", key=KEY)
    decided = ~certificate.apply(log).deferred
    changed = (decided & (right[0] != right[1])).mean()
    lines = certificate_lines(certificate)
    assert lines.signed
    assert lines.red == pytest.approx(net_line(600, 0.05, changed, binary=False))


def test_groups_have_lines_of_their_own_and_small_ones_together():
    names = [f"g{k % 30}" if k < 360 else "large" for k in range(800)]
    log = ScoreLog.from_arrays(BINARY.primary.reshape(-1, 2), BINARY.guardian.reshape(-1, 2), group=names)
    merged = calibrate(log, 0.05, by="group", small_groups="merge", zero_one=True)
    assert certificate_lines(merged, group="large") == watch_lines(0.05, n=440, binary=True)
    shared = certificate_lines(merged, group="g3")
    assert (shared.red, shared.false_red) == (None, None)
    assert shared.note.startswith("there is no red: which groups are small depends on the log")
    assert certificate_lines(merged, group="g3", alarm_line="alpha").red == 0.05
    names = ledger_names(merged)
    assert (names["large"], names["g3"], len(set(names.values()))) == ("large", "small groups", 2)
    named = calibrate(
        replace(log, group=np.where(log.group == "large", "small groups", log.group)),
        0.05,
        by="group",
        small_groups="merge",
        zero_one=True,
    )
    assert set(ledger_names(named).values()) == {"small groups", "small groups'"}
    apart = calibrate(log, 0.05, by="group", zero_one=True)
    with pytest.raises(OptionError, match="every query of 'g3' is deferred"):
        certificate_lines(apart, group="g3")
    with pytest.raises(OptionError, match="one ledger for each"):
        certificate_lines(merged)


def test_clusters_have_amber_only():
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 60, [[1.0, 0.0]] * 60, group=[str(i // 2) for i in range(60)])
    lines = certificate_lines(calibrate(log, 0.2, cluster="group", max_cluster_size=2))
    assert lines.red is None
    assert "no red" in lines.note


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(OptionError, match="nothing to watch"):
        certificate_lines(calibrate(BINARY.select(range(10)), 0.05))
    with pytest.raises(OptionError, match="monitor and own loss do not go together"):
        certificate_lines(replace(calibrate(BINARY, 0.05), loss=Own(bound=1.0, name="mine")))
