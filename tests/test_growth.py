"""docs/growth.md: its tables follow from its measured figures."""

import re
from dataclasses import replace

import pytest
from benchmarks.growth import PAGE, by_rate, by_rows, duration, figures_in, spoken, tables, with_tables


def test_the_tables_follow_from_the_measured_figures():
    page = PAGE.read_text()
    assert with_tables(page, figures_in(page)) == page
    assert figures_in(page).calibration_rows >= 1_000_000


def test_the_page_has_every_table_once_and_a_second_run_leaves_the_text_between_them():
    page = PAGE.read_text()
    figures = figures_in(page)
    emptied = re.sub(r"(<!-- (?:measured|rows|rate) -->\n).*?(<!-- end -->)", r"\1\2", page, flags=re.DOTALL)
    assert (page.count("<!-- end -->"), emptied.count("| ---")) == (3, 0)
    assert with_tables(emptied, figures) == page
    for table in tables(figures).values():
        assert page.count(table) == 1


def test_a_figure_that_was_changed_by_hand_is_found():
    page = PAGE.read_text()
    changed = replace(figures_in(page), request_ms=2 * figures_in(page).request_ms)
    assert with_tables(page, changed) != page


def test_what_is_beyond_the_measurement_says_so():
    figures = replace(figures_in(PAGE.read_text()), calibration_rows=1_000_000, parts_rows=10_000_000)
    assert [line[3] for line in by_rows(figures)] == ["both"] * 3 + ["in parts"] + ["neither"] * 2
    assert [line[1] == "-" for line in by_rows(figures)] == [False] * 4 + [True] * 2


def test_traffic_needs_gateways_in_proportion_and_never_fewer_than_two():
    figures = replace(figures_in(PAGE.read_text()), request_ms=0.6)
    assert [line[1] for line in by_rate(figures)] == ["2", "2", "2", "10", "100"]


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [(687_000, "B", "690 kB"), (6.9e9, "B", "6.9 GB"), (0, "B", "0 B"), (0.004, "", "0.004"), (12_345, "", "12,000")],
)
def test_numbers_have_two_digits_and_no_exponent(value, unit, shown):
    assert spoken(value, unit) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(1.04, "1 s"), (300, "5 min"), (9_000, "2.5 h"), (1e9, "32 years")])
def test_times_are_in_the_unit_that_people_would_use(seconds, shown):
    assert duration(seconds) == shown
