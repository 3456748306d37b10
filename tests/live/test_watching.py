from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration.promises import Cluster, Own, PerSession, Threshold
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.live.service import deferring, served_figure, watchable
from conformal_arbitrage.monitoring.lines import watch_lines
from conformal_arbitrage.store.ledger import LedgerRows

ROWS = [[0.9, 0.1, 0.0]] * 100 + [[0.6, 0.3, 0.1]] * 100
RIGHT = [[1.0, 0.0, 0.0]] * 100 + [[0.0, 1.0, 0.0]] * 100


@pytest.fixture(scope="module")
def certificate():
    return calibrate(ScoreLog.from_arrays(ROWS, RIGHT), 0.05, guardian_sees="all")


def test_a_plain_certificate_is_watched_with_a_red_line(certificate):
    lines, reason = watchable(certificate)
    assert reason is None
    assert lines[""].alpha == 0.05 < lines[""].red


NO_THRESHOLD = Threshold(relaxation=None, boundary_u=None, guardian_sees="all", boundary="include")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rule": NO_THRESHOLD}, "nothing to watch"),
        ({"promise": PerSession(alpha=0.05)}, "whole sessions"),
        ({"loss": Own(bound=1.0, name="mine")}, "registered with it by name"),
    ],
)
def test_what_has_no_monitor_says_why(certificate, change, words):
    lines, reason = watchable(replace(certificate, **change))
    assert lines is None
    assert words in reason


def test_clusters_are_watched_for_amber_only_and_red_at_alpha_is_refused(certificate):
    clustered = replace(
        certificate, promise=Cluster(alpha=certificate.alpha, cluster="conversation", clusters=50, max_cluster_size=4)
    )
    lines, _ = watchable(clustered)
    assert lines[""].red is None
    assert "no red" in lines[""].note
    with pytest.raises(OptionError, match="red line and cluster do not go together"):
        watchable(clustered, "alpha")


def test_safe_mode_has_everything_in_sight(certificate):
    assert certificate.sight((0.9, 0.1, 0.0))[0] == [0]
    assert deferring(certificate).sight((0.9, 0.1, 0.0))[0] == [0, 1, 2]


def test_what_was_served_leaves_out_what_was_not_delivered_and_counts_fallbacks():
    facts = [(1, np.nan, 0), (0, np.nan, 1), (0, 1.0, 0), (0, np.nan, 0)]  # loss, served, undelivered
    rows = [(0.0, 9.0, *fact, k + 1, 0.0) for k, fact in enumerate(facts)]
    figure = served_figure(LedgerRows.of(rows, 4), watch_lines(0.05, n=2000), 1.0)
    assert (figure.answers, figure.mean) == (3, pytest.approx(2 / 3))
