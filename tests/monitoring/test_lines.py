import pytest

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.lines import block_size, luck_line, net_line, watch_lines


def test_blocks_have_the_sizes_of_the_specification():
    sizes = {0.005: 50, 0.02: 25, 0.05: 10, 0.1: 5, 0.3: 2, 0.6: 1}
    assert {a: block_size(a) for a in sizes} == sizes


@pytest.mark.parametrize(
    ("n", "a", "binary", "line"),
    [
        (100, 0.05, True, 0.099257),
        (500, 0.05, True, 0.070581),
        (2000, 0.05, True, 0.059937),
        (500, 0.02, True, 0.033894),
        (500, 0.05, False, 0.077885),
        (2000, 0.05, False, 0.062684),
    ],
)
def test_the_red_line_has_the_values_of_the_specification(n, a, binary, line):
    assert luck_line(n, a, binary=binary) == pytest.approx(line, abs=5e-7)


def test_a_certificate_of_the_average_has_red_above_alpha():
    lines = watch_lines("0.15", loss_bound=3, n=500, binary=True)
    assert lines.alpha == 0.05
    assert lines.red == pytest.approx(0.070581, abs=5e-7)
    assert lines.false_red == pytest.approx(0.05)
    assert lines.block == 10
    assert lines.note is None


def test_a_high_probability_certificate_has_red_at_alpha():
    lines = watch_lines(0.05, n=500, confidence=0.95)
    assert lines.red == lines.alpha == 0.05
    assert lines.false_red == pytest.approx(0.075)


def test_red_at_alpha_by_request_bounds_no_false_reds():
    lines = watch_lines(0.05, n=500, alarm_line="alpha")
    assert lines.red == 0.05
    assert lines.false_red is None
    assert "no bound on false reds" in lines.note


def test_too_few_rows_have_no_red_line():
    lines = watch_lines(0.6, n=1)
    assert lines.red is None
    assert "too little" in lines.note
    with pytest.raises(OptionError, match="every query is deferred"):
        watch_lines(0.05, n=18)


def test_several_policies_share_one_level():
    lines = watch_lines(0.05, n=500, confidence=0.99, policies=10)
    assert lines.false_red == pytest.approx(10 * 0.01 + 0.025)
    assert lines.log_red > watch_lines(0.05, n=500, confidence=0.99).log_red
    one, ten = (watch_lines(0.05, n=500, binary=True, policies=policies) for policies in (1, 10))
    assert one.false_red == ten.false_red == pytest.approx(0.05)
    assert ten.red > one.red, "each has a tenth of the luck"
    with pytest.raises(OptionError, match="1 or more"):
        watch_lines(0.05, n=500, policies=0)


@pytest.mark.parametrize(("absolute", "line"), [(0.1, 0.092), (0.2, 0.109), (0.3, 0.121)])
def test_the_red_line_of_net_losses_has_the_values_of_the_specification(absolute, line):
    exact = net_line(500, 0.05, absolute, binary=True)
    assert exact == pytest.approx(line, abs=5e-4)
    assert exact < net_line(500, 0.05, absolute, binary=False) < 1.1 * exact


def test_net_lines_are_signed_and_say_what_is_not_proved():
    lines = watch_lines(0.05, n=500, absolute=0.2, binary=True)
    assert (lines.signed, lines.block, lines.least) == (True, 5, -1.0)
    assert lines.false_red == pytest.approx(0.05)
    assert lines.levels == ((1 + 0.05) / 2, (1 + lines.red) / 2)
    assert lines.as_loss(lines.as_share(-0.3)) == pytest.approx(-0.3)
    assert "not proved" in lines.note
    both = watch_lines(0.05, n=500, absolute=0.2, alarm_line="alpha").note
    assert "no bound on false reds" in both
    assert "not proved" in both


def test_the_red_line_of_net_losses_lies_between_alpha_and_what_is_possible():
    assert net_line(2000, 0.05, 0.0, binary=True) == 0.05
    assert 0.2 < net_line(20, 0.05, 0.0, binary=True) < 1 - 0.005 ** (1 / 20)
    for absolute in (-0.1, 1.1):
        with pytest.raises(OptionError, match="lies in"):
            net_line(500, 0.05, absolute, binary=True)
