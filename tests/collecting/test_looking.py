"""What budgets would give on rows that may be looked at: from menus and graded answers, and what is refused."""

import time
from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration.promises import ByGroup, Cluster, Learned, Net
from conformal_arbitrage.collecting.renewal import BUDGETS, looked_frontier
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.store.events import CalibrationRow
from conformal_arbitrage.store.record import Grades, new_id

RNG = np.random.default_rng(4)
MARGIN = RNG.random(600)
LOST = RNG.random(600) < 0.5 * (1 - MARGIN)


def menu_rows():
    return [
        CalibrationRow(id=new_id(), size=2, primary=(0.0, m), guardian=(1.0, 0.0) if lost else (0.0, 1.0))
        for m, lost in zip(MARGIN.tolist(), LOST.tolist(), strict=True)
    ]


def text_rows():
    return [
        CalibrationRow(id=new_id(), form="text", size=2, primary=(m,), grades=Grades(primary=float(not lost), guardian=1.0))
        for m, lost in zip(MARGIN.tolist(), LOST.tolist(), strict=True)
    ]  # fmt: skip


def frontier(rows, certificate=None, **options):
    return looked_frontier(
        rows, certificate, **{"alpha": 0.05, "guardian_sees": "all", "settled": time.time() + 60, **options}
    )


def certificate(**options):
    scores, best = np.column_stack([np.zeros(600), MARGIN]), np.column_stack([LOST, ~LOST]).astype(float)
    return calibrate(ScoreLog.from_arrays(scores, best), 0.05, **options)


@pytest.mark.parametrize("rows", [menu_rows, text_rows])
def test_a_larger_budget_asks_the_guardian_less_and_loses_more(rows):
    found = frontier(rows())
    assert (found.rows, found.pending, found.missing) == (600, 0, 0)
    assert [point.alpha for point in found.points] == [float(one) for one in BUDGETS]
    shares, losses = ([getattr(point, name) for point in found.points] for name in ("share", "loss"))
    assert shares == sorted(shares, reverse=True)
    assert losses == sorted(losses)
    assert all(point.loss <= point.alpha + 0.02 for point in found.points)
    assert found.nearest(0.051).alpha == 0.05


def test_the_options_of_the_certificate_in_force_are_kept():
    average, sure = (
        frontier(menu_rows(), certificate()),
        frontier(menu_rows(), certificate(confidence=0.9, zero_one=True)),
    )
    assert (average.confidence, sure.confidence) == (None, 0.9)
    assert sure.nearest(0.05).share > average.nearest(0.05).share
    own = frontier(menu_rows(), certificate(), alpha=0.033)
    assert own.nearest(0.033).alpha == 0.033


def test_what_is_not_known_yet_is_left_out_and_what_is_overdue_counts_as_lost():
    rows = [replaced if k % 4 == 0 else row for k, row in enumerate(menu_rows())
            for replaced in [CalibrationRow(id=row.id, size=2, primary=row.primary)]]  # fmt: skip
    waiting, overdue = frontier(rows, settled=0.0), frontier(rows)
    assert (waiting.rows, waiting.pending, waiting.missing) == (450, 150, 0)
    assert (overdue.rows, overdue.pending, overdue.missing) == (600, 0, 150)
    assert overdue.nearest(0.1).share > waiting.nearest(0.1).share
    assert frontier(rows[:100], settled=0.0) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rule": ByGroup(by="group", groups={}, guardian_sees="all", boundary="include")}, "looking and groups"),
        ({"promise": Cluster(alpha=0.1, cluster="talk", clusters=3, max_cluster_size=9)}, "looking and cluster"),
        ({"loss": Net(bound=1.0, regret=0.0)}, "looking and net"),
        ({"rule": Learned(score="learned", terms=None)}, "looking and learned"),
    ],
)
def test_what_single_rows_would_misjudge_is_refused(changed, words):
    with pytest.raises(OptionError, match=words):
        frontier(menu_rows(), replace(certificate(), **changed))


def test_turns_of_sessions_are_refused():
    rows = [CalibrationRow(id=new_id(), size=2, primary=(0.0, 1.0), guardian=(0.0, 1.0), session="s")] * 120
    with pytest.raises(OptionError, match="looking and session"):
        frontier(rows)
