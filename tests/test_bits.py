"""What the product computes is what was recorded, to the bit: thresholds, draws, scores, digests, lines, replies."""

import json
from pathlib import Path

import pytest
from benchmarks.bits import PARTS, SHARED, differences, flat, record, seek

RECORDED = Path(__file__).parent / "recorded" / "bits.json"


def compared(part):
    """Return how a part differs from what was recorded."""
    known = json.loads(RECORDED.read_text())
    return differences({part: known[part]}, record([part]))


def test_calibrations_of_the_bundled_log_are_as_recorded():
    assert compared("bundled") == []


@pytest.mark.proof
def test_commands_on_the_bundled_log_say_and_write_what_was_recorded():
    assert compared("commands") == []


@pytest.mark.proof
def test_a_gateway_replies_as_recorded():
    assert compared("gateway") == []


@pytest.mark.proof
@pytest.mark.skipif(not SHARED.exists(), reason="the real score logs are not beside this checkout (../shared/data)")
def test_calibrations_of_the_shared_logs_are_as_recorded():
    assert compared("shared") == []


def test_the_recording_has_all_parts_and_is_small():
    known = json.loads(RECORDED.read_text())
    assert set(known) == set(PARTS)
    assert RECORDED.stat().st_size < 300_000


def test_a_value_that_changed_appeared_or_went_is_a_difference_and_null_is_absent():
    old = {"a": {"b": 1.0, "c": 2, "d": None}, "e": [1, 2]}
    new = {"a": {"b": 1.0000000000000002, "f": 3}, "e": [1, 2]}
    assert [line.partition(":")[0] for line in differences(old, new)] == ["a/b", "a/c", "a/f"]
    assert dict(flat(old)) == {"a/b": 1.0, "a/c": 2, "e": [1, 2]}


def test_a_field_is_found_in_any_layout_but_not_in_a_group():
    flat_document = {"relaxation": 0.5, "groups": {"a": {"relaxation": 0.1}}}
    nested = {"groups": {"a": {"relaxation": 0.1}}, "rule": {"kind": "threshold", "relaxation": 0.5}}
    assert seek(flat_document, "relaxation") == seek(nested, "relaxation") == 0.5
    assert seek({"groups": {"a": {"relaxation": 0.1}}}, "relaxation") is None
