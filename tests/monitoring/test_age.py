import pytest

from conformal_arbitrage.core.bounds import next_range
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.lines import audits_to_see_doubling, blind_decisions, freshness


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [(100, (0.010, 0.100)), (1000, (0.029, 0.075)), (10_000, (0.032, 0.071)), (10**6, (0.033, 0.071))],
)
def test_ranges_have_the_values_of_the_specification(decisions, expected):
    assert next_range(500, 0.05, decisions) == pytest.approx(expected, abs=6e-4)


def test_more_traffic_does_not_average_calibration_luck_out():
    assert next_range(500, 0.05, 10**9) == next_range(500, 0.05, 10**6)
    low, high = next_range(500, 0.05, 10**6)
    narrow = next_range(50_000, 0.05, 10**6)
    assert low < narrow[0] < 0.05 < narrow[1] < high


def test_too_few_rows_have_no_range():
    assert next_range(18, 0.05, 100) is None
    with pytest.raises(OptionError, match="1 or more"):
        next_range(500, 0.05, 0)


def test_evidence_is_fresh_if_it_would_show_a_doubling():
    assert audits_to_see_doubling(0.05) == 540
    assert blind_decisions(0.05, 0.05) == 10_800
    assert blind_decisions(0.05, 0) is None
    assert freshness(540, 0.05) is None
    assert "not looked at yet" in freshness(0, 0.05)
    assert "since May" in freshness(539, 0.05, last_known="May")
