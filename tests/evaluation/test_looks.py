import json
from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import OutputError, ScoreLog
from conformal_arbitrage.evaluation import looks
from conformal_arbitrage.evaluation.looks import LOOKS_FILE, looks_path, note_look, seen_rows

RNG = np.random.default_rng(0)
LOG = ScoreLog.from_arrays(RNG.random((50, 3)), RNG.random((50, 3)), id=[f"q{k}" for k in range(50)])


@pytest.fixture
def path(tmp_path):
    return tmp_path / LOOKS_FILE


def test_subsets_reordered_copies_and_other_primaries_are_recognised(path):
    note_look(path, LOG, "inspect")
    for other in (LOG, LOG.select([7, 3]), LOG.select(np.arange(50)[::-1]), replace(LOG, primary=1 - LOG.primary)):
        assert seen_rows(path, other).share == 1.0
    assert seen_rows(path, LOG).commands == ("inspect",)


def test_other_rows_are_not_recognised_and_a_mixture_by_its_share(path):
    note_look(path, LOG.select(np.arange(10)), "evaluate")
    assert seen_rows(path, LOG).share == pytest.approx(0.2)
    assert seen_rows(path, LOG.select(np.arange(10, 50))).share == 0.0
    other = ScoreLog.from_arrays(RNG.random((50, 3)), RNG.random((50, 3)), id=LOG.id.tolist())
    assert seen_rows(path, other).share == 0.0


def test_logs_without_ids_are_recognised_by_scores_or_context(path):
    bare = replace(LOG, id=None)
    asked = replace(bare, context=np.array([f"question {k}" for k in range(50)], dtype=object))
    for log in (bare, asked):
        note_look(path, log, "inspect")
        assert seen_rows(path, log.select([4])).share == 1.0
    assert seen_rows(path, replace(asked, primary=1 - LOG.primary)).share == 1.0


def test_the_same_look_is_noted_once_and_only_the_latest_looks_are_kept(path, monkeypatch):
    monkeypatch.setattr(looks, "MOST_LOOKS", 3)
    for _ in range(2):
        note_look(path, LOG, "inspect")
    assert len(json.loads(path.read_text())["looks"]) == 1
    for k in range(5):
        note_look(path, LOG.select([k]), "evaluate")
    assert len(json.loads(path.read_text())["looks"]) == 3


def test_large_looks_keep_a_sample_that_still_recognises_the_log(path, monkeypatch):
    monkeypatch.setattr(looks, "MOST_ROWS", 20)
    note_look(path, LOG, "inspect")
    assert seen_rows(path, LOG).share == 1.0
    assert len(path.read_text()) < 500


def test_a_damaged_file_is_named_and_damaged_entries_count_as_none(path):
    path.write_text("{")
    with pytest.raises(OutputError, match="record of looks cannot be read"):
        seen_rows(path, LOG)
    path.write_text(json.dumps({"looks": [{"command": "inspect", "rows": "abc"}, {"time": 1}]}))
    assert seen_rows(path, LOG).share == 0.0


def test_looks_stand_beside_the_configuration_or_else_the_log(tmp_path):
    (tmp_path / "logs").mkdir()
    config, log = tmp_path / "arbitrage.toml", tmp_path / "logs" / "log.parquet"
    assert looks_path(config, log) == log.with_name(LOOKS_FILE)
    config.write_text("")
    assert looks_path(config, log) == tmp_path / LOOKS_FILE
