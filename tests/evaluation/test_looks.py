import json

import numpy as np
import pytest

from conformal_arbitrage import OutputError, ScoreLog
from conformal_arbitrage.calibration.planning import split
from conformal_arbitrage.evaluation import looks
from conformal_arbitrage.evaluation.looks import LOOKS_FILE, looks_at, note_look

RNG = np.random.default_rng(0)
LOG = ScoreLog.from_arrays(RNG.random((50, 3)), RNG.random((50, 3)), id=[f"q{k}" for k in range(50)])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / LOOKS_FILE


def test_a_look_is_known_for_the_log_in_any_order_and_for_what_was_taken_from_it(path, tmp_path):
    note_look(path, LOG.lineage(), "inspect")
    explore, certify = split(LOG)
    for other in (LOG, LOG.select(np.arange(50)[::-1]), explore, certify, split(certify)[0]):
        assert looks_at(path, other.lineage()).commands == {"inspect": 1}
    for name in ("c.parquet", "c.jsonl"):
        certify.write(tmp_path / name)
        assert ScoreLog.read(tmp_path / name).lineage() == certify.lineage()


def test_a_look_at_a_part_counts_for_the_whole_and_not_for_the_other_part(path):
    explore, certify = split(LOG)
    note_look(path, explore.lineage(), "evaluate")
    assert looks_at(path, LOG.lineage()).commands == {"evaluate": 1}
    assert not looks_at(path, certify.lineage()).commands


def test_nothing_is_inferred_from_rows_that_resemble_each_other(path):
    note_look(path, LOG.lineage(), "inspect")
    other = ScoreLog.from_arrays(RNG.random((50, 3)), RNG.random((50, 3)), id=LOG.id.tolist())
    for log in (other, LOG.select(np.arange(49))):
        assert not looks_at(path, log.lineage()).commands


def test_looks_are_counted_and_only_the_latest_are_kept(path, monkeypatch):
    monkeypatch.setattr(looks, "MOST_LOOKS", 3)
    for _ in range(2):
        note_look(path, LOG.lineage(), "inspect")
    assert len(json.loads(path.read_text())["looks"]) == 1
    assert looks_at(path, LOG.lineage()).commands == {"inspect": 2}
    for k in range(5):
        note_look(path, LOG.select([k]).lineage(), "evaluate")
    assert len(json.loads(path.read_text())["looks"]) == 3


def test_a_calibration_with_the_same_terms_does_not_count(path):
    note_look(path, LOG.lineage(), "calibrate", terms="a")
    assert not looks_at(path, LOG.lineage(), terms="a").commands
    assert looks_at(path, LOG.lineage(), terms="b").commands == {"calibrate": 1}


def test_a_damaged_file_is_named_and_damaged_entries_count_as_none(path, tmp_path):
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(OutputError, match="record of looks cannot be read"):
        looks_at(path, LOG.lineage())
    path.write_text(json.dumps({"looks": [{"command": "inspect"}, {"time": 1}]}))
    assert not looks_at(path, LOG.lineage()).commands
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be"):
        note_look(tmp_path / "file" / "in" / LOOKS_FILE, LOG.lineage(), "inspect")


def test_calibrations_of_parts_of_one_log_count_for_each_other(path):
    explore, certify = split(LOG)
    note_look(path, explore.lineage(), "calibrate", terms="a")
    seen = looks_at(path, certify.lineage(), terms="a")
    assert (seen.commands, seen.calibrations) == ({"calibrate": 1}, 1)
    assert not looks_at(path, explore.lineage(), terms="a").commands
    note_look(path, explore.lineage(), "calibrate", terms="a")
    note_look(path, LOG.lineage(), "recommend", terms="b")
    seen = looks_at(path, certify.lineage(), terms="c")
    assert (seen.commands, seen.calibrations) == ({"calibrate": 2, "recommend": 1}, 2)
