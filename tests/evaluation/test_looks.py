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
    note_look(LOG.lineage(), "inspect", path=path)
    explore, certify = split(LOG)
    for other in (LOG, LOG.select(np.arange(50)[::-1]), explore, certify, split(certify)[0]):
        assert looks_at(other.lineage(), path=path).commands == {"inspect": 1}
    for name in ("c.parquet", "c.jsonl"):
        certify.write(tmp_path / name)
        assert ScoreLog.read(tmp_path / name).lineage() == certify.lineage()


def test_a_look_at_a_part_counts_for_the_whole_and_not_for_the_other_part(path):
    explore, certify = split(LOG)
    note_look(explore.lineage(), "evaluate", path=path)
    assert looks_at(LOG.lineage(), path=path).commands == {"evaluate": 1}
    assert not looks_at(certify.lineage(), path=path).commands


def test_nothing_is_inferred_from_rows_that_resemble_each_other(path):
    note_look(LOG.lineage(), "inspect", path=path)
    other = ScoreLog.from_arrays(RNG.random((50, 3)), RNG.random((50, 3)), id=LOG.id.tolist())
    for log in (other, LOG.select(np.arange(49))):
        assert not looks_at(log.lineage(), path=path).commands


def test_looks_are_counted_and_only_the_latest_are_kept(path, monkeypatch):
    monkeypatch.setattr(looks, "MOST_LOOKS", 3)
    for _ in range(2):
        note_look(LOG.lineage(), "inspect", path=path)
    assert len(json.loads(path.read_text())["looks"]) == 1
    assert looks_at(LOG.lineage(), path=path).commands == {"inspect": 2}
    for k in range(5):
        note_look(LOG.select([k]).lineage(), "evaluate", path=path)
    assert len(json.loads(path.read_text())["looks"]) == 3


def test_a_run_that_looked_at_two_parts_counts_once_whichever_is_calibrated(path, tmp_path):
    explore, certify = split(LOG)
    note_look(certify.lineage(), "recommend", beside=explore.lineage()[-1:], terms="a", path=path)
    copied = explore.taken_from()
    assert copied.lineage()[-1] == explore.lineage()[-1]
    for log, terms in ((LOG, "a"), (explore, "a"), (copied, "a"), (certify, "b")):
        assert looks_at(log.lineage(), terms=terms, path=path).commands == {"recommend": 1}
    assert not looks_at(certify.lineage(), terms="a", path=path).commands
    note_look(certify.lineage(), "recommend", terms="b", path=path)
    assert looks_at(LOG.lineage(), path=path).commands == {"recommend": 2}


def test_a_calibration_with_the_same_terms_does_not_count(path):
    note_look(LOG.lineage(), "calibrate", terms="a", path=path)
    assert not looks_at(LOG.lineage(), terms="a", path=path).commands
    assert looks_at(LOG.lineage(), terms="b", path=path).commands == {"calibrate": 1}


def test_a_damaged_file_is_named_and_damaged_entries_count_as_none(path, tmp_path):
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(OutputError, match="record of looks cannot be read"):
        looks_at(LOG.lineage(), path=path)
    path.write_text(json.dumps({"looks": [{"command": "inspect"}, {"time": 1}]}))
    assert not looks_at(LOG.lineage(), path=path).commands
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be"):
        note_look(LOG.lineage(), "inspect", path=tmp_path / "file" / "in" / LOOKS_FILE)


def test_calibrations_of_parts_of_one_log_count_for_each_other(path):
    explore, certify = split(LOG)
    note_look(explore.lineage(), "calibrate", terms="a", path=path)
    seen = looks_at(certify.lineage(), terms="a", path=path)
    assert (seen.commands, seen.calibrations) == ({"calibrate": 1}, 1)
    assert not looks_at(explore.lineage(), terms="a", path=path).commands
    note_look(explore.lineage(), "calibrate", terms="a", path=path)
    note_look(LOG.lineage(), "recommend", terms="b", path=path)
    seen = looks_at(certify.lineage(), terms="c", path=path)
    assert (seen.commands, seen.calibrations) == ({"calibrate": 2, "recommend": 1}, 2)
