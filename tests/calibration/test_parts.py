"""Logs in parts: whatever the files, their order and the engine, the same certificate as from all rows in memory."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import OptionError, ScoreLog, ScoreLogError, ScoreParts, calibrate, verify
from conformal_arbitrage.calibration import calibrate as parts_module
from conformal_arbitrage.calibration.verify import decide_parts
from conformal_arbitrage.scorelog.log import join_logs
from conformal_arbitrage.scorelog.parts import Processes, Threads, as_engine
from tests.certificates import altered

KEY = b"0123456789abcdef"
IDENTITIES = {"primary": {"kind": "function", "name": "p"}, "guardian": {"kind": "label"}}


def some_log(n, seed=0, *, kind="unit", missing=0.0, ragged=True):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, n) if ragged else np.full(n, 3)
    coarse = kind == "coarse"
    primary = [rng.integers(0, 11, k) / 10 if coarse else rng.random(k) for k in sizes]
    guardian = [rng.integers(0, 3, k) / 2 if coarse else rng.random(k) for k in sizes]
    guardian = [None if rng.random() < missing else row for row in guardian]
    if kind == "single":
        primary = [row.astype(np.float32) for row in primary]
    return ScoreLog.from_arrays(
        primary,
        guardian,
        id=[f"q{k}" for k in range(n)],
        label=[int(rng.integers(0, k)) for k in sizes],
        group=rng.choice(["a", "b"], n).tolist(),
        identities=IDENTITIES,
    )


def write_parts(log, folder, cuts):
    """Write a log into files of its own; return the folder."""
    folder.mkdir(exist_ok=True)
    edges = [0, *sorted(cuts), len(log)]
    for k, (a, b) in enumerate(pairwise(edges)):
        if b > a:
            log.select(range(a, b)).write(folder / f"scores-{k:02d}.parquet")
    return folder


def same(one, other):
    return one.differences(other)


OPTIONS = [
    {},
    {"guardian_sees": "candidates"},
    {"guardian_sees": "all-restricted-loss", "grid": "0.05"},
    {"grid": "0.3"},
    {"boundary": "random", "key": KEY},
    {"boundary": "random", "key": KEY, "guardian_sees": "candidates"},
    {"loss_bound": 2},
]
GATHERED = [
    {"loss": "net", "boundary": "random", "key": KEY},
    {"by": "group"},
    {"confidence": "0.9", "key": KEY},
    {"margins": True},
    {"cluster": "group", "max_cluster_size": 400},
]


@pytest.mark.parametrize("keywords", [*OPTIONS, *GATHERED], ids=str)
@pytest.mark.parametrize("kind", ["unit", "coarse"])
def test_a_log_in_parts_gives_the_certificate_of_all_its_rows(tmp_path, monkeypatch, keywords, kind):
    log = some_log(700, kind=kind)
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [100, 101, 400]), rows_per_part=128)
    assert len(found.parts()) == 8
    expected, certificate = (calibrate(one, 0.2, **keywords) for one in (log, found))
    assert not same(expected, certificate)
    assert verify(certificate, found).ok


@pytest.mark.parametrize("keywords", [{}, {"confidence": "0.9"}, {"confidence": "0.9", "dial": True}], ids=str)
def test_binarised_logs_in_parts(tmp_path, keywords):
    log = some_log(600)
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [200]))
    expected, certificate = (calibrate(one.binarized(), 0.2, **keywords) for one in (log, found))
    assert not same(expected, certificate)
    assert verify(certificate, found).ok


@pytest.mark.parametrize("sees", ["all", "candidates"])
def test_missing_guardians_in_parts(tmp_path, sees):
    log = some_log(500, missing=0.05)
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [77, 300]))
    keywords = {"missing_guardian": "worst_case", "guardian_sees": sees}
    assert not same(calibrate(log, 0.3, **keywords), calibrate(found, 0.3, **keywords))
    first = int(log.missing.argmax())
    name, row = ("scores-00", first) if first < 77 else ("scores-01", first - 77)
    with pytest.raises(ScoreLogError, match=rf"{name}\.parquet: row {row + 1}: no Guardian score"):
        calibrate(found, 0.3)


def test_single_precision_and_large_scores_in_parts(tmp_path):
    single = some_log(400, kind="single")
    found = ScoreParts.read(write_parts(single, tmp_path / "p", [150]))
    assert calibrate(found, 0.2).evidence.score_digits == 6
    assert not same(calibrate(single, 0.2), calibrate(found, 0.2))
    rng = np.random.default_rng(3)
    large = ScoreLog.from_arrays(rng.random((300, 3)) * 50, rng.random((300, 3)) * 2e5)
    found = ScoreParts.read(write_parts(large, tmp_path / "q", [150]))
    keywords = {"loss_bound": 200_000, "guardian_sees": "candidates"}
    assert not same(calibrate(large, 20_000, **keywords), calibrate(found, 20_000, **keywords))


@pytest.mark.proof
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(max_examples=12, deadline=None)
def test_hostile_logs_in_parts(tmp_path_factory, seed, data):
    rng = np.random.default_rng(seed)
    log = some_log(int(rng.integers(2, 120)), seed, kind=str(rng.choice(["unit", "coarse", "single"])), missing=0.1)
    folder = tmp_path_factory.mktemp("hostile")
    cuts = rng.integers(0, len(log) + 1, 2).tolist()
    keywords = {**data.draw(st.sampled_from(OPTIONS)), "missing_guardian": "worst_case"}
    found = ScoreParts.read(write_parts(log, folder / "p", cuts))
    alpha = str(data.draw(st.sampled_from(["0.9", "0.5", "0.2", "0.05", "0.01"])))
    assert not same(calibrate(log, alpha, **keywords), calibrate(found, alpha, **keywords))
    shutil.rmtree(folder)


@pytest.mark.parametrize("engine", ["threads", "processes", Threads(2)], ids=["threads", "processes", "two threads"])
def test_engines_agree(tmp_path, engine):
    log = some_log(900, kind="coarse")
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [300, 600]))
    expected = calibrate(found, 0.1, boundary="random", key=KEY)
    certificate = calibrate(found, 0.1, boundary="random", key=KEY, engine=engine)
    assert altered(certificate, created=expected.provenance.created) == expected


def told(function):
    """Return the error of a function, with its notes, in words."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whichever it is
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "nothing was refused"


class Dying:
    """Work that kills its own process the first time it sees a part that is not the first."""

    def __init__(self, work, marker):
        self.work, self.marker = work, marker

    def __call__(self, part):
        if part.first and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.work(part)


class DyingProcesses(Processes):
    def run(self, work, parts, /):
        return super().run(Dying(work, DyingProcesses.marker), parts)


@pytest.mark.proof
def test_a_worker_that_dies_changes_nothing(tmp_path):
    log = some_log(600)
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [200, 400]))
    DyingProcesses.marker = str(tmp_path / "died")
    certificate = calibrate(found, 0.2, engine=DyingProcesses(2))
    assert (tmp_path / "died").exists()
    assert not same(calibrate(log, 0.2), certificate)


def test_names_and_order_of_files_do_not_matter_for_the_digest_but_their_rows_do(tmp_path):
    log = some_log(300)
    first = calibrate(ScoreParts.read(write_parts(log, tmp_path / "p", [100, 200])), 0.2)
    moved = tmp_path / "q"
    moved.mkdir()
    for k, path in enumerate(sorted((tmp_path / "p").iterdir(), reverse=True)):
        shutil.copy(path, moved / f"{k}.parquet")
    assert calibrate(ScoreParts.read(moved), 0.2).evidence.log_sha256 == first.evidence.log_sha256
    compacted = ScoreParts.read(write_parts(log, tmp_path / "r", [100]))
    assert verify(first, compacted)
    renamed = replace(log, id=np.array(["other", *log.id.tolist()[1:]], dtype=log.id.dtype))
    assert set(verify(first, ScoreParts.read(write_parts(renamed, tmp_path / "s", [100]))).differences) == {
        "log_sha256"
    }


def spoil(path, id):
    """Put an infinity into the row of a file with an id."""
    import duckdb

    bad = f"case when id = '{id}' then list_resize([]::double[], len(\"primary\"), 'infinity'::double) else \"primary\" end"
    with duckdb.connect() as connection:
        chosen = f"select * replace ({bad} as \"primary\") from '{path}'"
        connection.execute(f"copy ({chosen}) to '{path.with_suffix('.bad')}' (format parquet)")
    path.with_suffix(".bad").rename(path)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_fault_in_the_last_row_of_the_last_file_names_file_and_row(tmp_path, monkeypatch, engine):
    folder = write_parts(replace(some_log(300), identities=None), tmp_path / "p", [100])
    spoil(folder / "scores-01.parquet", "q299")
    found = ScoreParts.read(folder, rows_per_part=64)
    assert len(found.parts()) == 6
    with pytest.raises(ScoreLogError, match=r"scores-01\.parquet: row 200, column 'primary': inf"):
        calibrate(found, 0.2, engine=engine)


def test_an_id_in_two_files_is_refused(tmp_path):
    folder = write_parts(some_log(100), tmp_path / "p", [50])
    some_log(100).select([7]).write(folder / "again.parquet")
    with pytest.raises(ScoreLogError, match=r"'q7' is .* \(\S+/again.parquet, row 1 and \S+, row 8\)"):
        calibrate(ScoreParts.read(folder), 0.2)


def test_files_that_are_not_one_log_are_refused(tmp_path):
    folder = write_parts(some_log(100), tmp_path / "p", [50])
    other = replace(some_log(10), identities={"primary": {"kind": "other"}, "guardian": {"kind": "label"}})
    other.write(folder / "z.parquet")
    with pytest.raises(ScoreLogError, match="made by other models"):
        ScoreParts.read(folder)
    some_log(10, kind="single").write(folder / "z.parquet")
    with pytest.raises(ScoreLogError, match="another precision"):
        ScoreParts.read(folder)
    replace(some_log(10), group=None).write(folder / "z.parquet")
    with pytest.raises(ScoreLogError, match="'group'"):
        ScoreParts.read(folder)
    with pytest.raises(ScoreLogError, match="no column 'qwen'"):
        ScoreParts.read(folder, primary="qwen")
    with pytest.raises(ScoreLogError, match="no Parquet files"):
        ScoreParts.read(tmp_path / "nothing*.parquet")
    (tmp_path / "log.jsonl").write_text("{}")
    with pytest.raises(ScoreLogError, match="not a Parquet file"):
        ScoreParts.read(str(tmp_path / "*.jsonl"))


def test_what_needs_all_rows_is_refused_beyond_its_size(tmp_path, monkeypatch):
    found = ScoreParts.read(write_parts(some_log(100), tmp_path / "p", [50]))
    monkeypatch.setattr("conformal_arbitrage.scorelog.parts.GATHERED", 99)
    with pytest.raises(
        OptionError, match=r"first passage, needs all rows in memory at once, at most 99; there are 100"
    ):
        calibrate(found, 0.2, loss="net", boundary="random", key=KEY)
    assert calibrate(found, 0.2).n == 100


@pytest.mark.proof
def test_a_sample_is_uniform_declared_and_repeatable(tmp_path):
    log = some_log(1000)
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [10, 500]))
    sample = found.sample(200, seed=3)
    assert "a sample of 200 of 1,000 rows" in sample.source
    rows = [int(id[1:]) for id in sample.id.tolist()]
    assert rows == sorted(set(rows))
    assert sample.sha256() == found.sample(200, seed=3).sha256() == log.select(rows).sha256()
    assert (
        350 < np.mean([np.mean([int(id[1:]) for id in found.sample(20, seed=k).id.tolist()]) for k in range(20)]) < 650
    )
    assert found.sample(5000).sha256() == log.sha256()
    with pytest.raises(OptionError, match="10,000,000"):
        found.sample(0)


def test_logs_with_different_lists_are_not_joined():
    one, other = some_log(3), replace(some_log(3), lists={"severity": np.zeros(3)})
    with pytest.raises(ScoreLogError, match="severity"):
        join_logs([one, other], "both")


def test_decisions_of_parts_equal_those_of_the_whole_log(tmp_path):
    log = some_log(500, kind="coarse")
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [100, 300]))
    certificate = calibrate(log, 0.1, boundary="random", key=KEY)
    counts = decide_parts(certificate, found, as_engine(None), tmp_path / "out")
    decisions = certificate.apply(log)
    assert (counts.rows, counts.deferred) == (500, int(decisions.deferred.sum()))
    import duckdb

    with duckdb.connect() as connection:
        rows = connection.execute(
            f"select id, action, decided_by, candidates from '{tmp_path}/out/*.parquet' order by substr(id, 2)::int"
        ).fetchall()
    assert [(id, action, by, tuple(places)) for id, action, by, places in rows] == [
        (d.id, d.action, d.decided_by, d.candidates) for d in decisions
    ]


def test_a_log_in_memory_takes_no_engine():
    with pytest.raises(OptionError, match="log in parts"):
        calibrate(some_log(50), 0.2, engine="threads")


def test_more_draws_than_are_collected_are_searched(tmp_path, monkeypatch):
    log = some_log(500, kind="coarse")
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [100]))
    expected = calibrate(log, "0.1", boundary="random", key=KEY)
    assert expected.relaxation > 0
    monkeypatch.setattr(parts_module, "_DRAWN_AT_ONCE", 1)
    assert not same(expected, calibrate(found, "0.1", boundary="random", key=KEY))


def test_progress_tells_of_every_pass(tmp_path):
    found = ScoreParts.read(write_parts(some_log(300), tmp_path / "p", [100]))
    lines = []
    calibrate(found, 0.2, progress=lines.append)
    assert lines[0] == "pass 1: 300 rows (parts: 2, files: 2)"
    assert 1 <= len(lines) <= 3


def test_a_log_selected_by_its_scores_or_without_a_guardian_is_refused(tmp_path):
    log = some_log(50)
    marked = replace(log, extra={"unfit_for_calibration": np.array(["no"] * 50)})
    with pytest.raises(ScoreLogError, match="selected by their scores"):
        calibrate(ScoreParts.read(write_parts(marked, tmp_path / "p", [])), 0.2)
    with pytest.raises(OptionError, match="needs the Guardian's scores"):
        calibrate(ScoreParts.read(write_parts(log, tmp_path / "q", []), guardian=None), 0.2)


def test_a_log_without_ids_and_one_that_always_defers(tmp_path):
    log = replace(some_log(40), id=None)
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [20]))
    for keywords in ({}, {"grid": "0.3", "guardian_sees": "candidates"}):
        assert not same(calibrate(log, "0.001", **keywords), calibrate(found, "0.001", **keywords))
    counts = decide_parts(calibrate(found, 0.2), found, as_engine(None), tmp_path / "out")
    assert counts.rows == 40
    drawn = calibrate(found, 0.2, boundary="random", key=KEY)
    assert not same(calibrate(log, 0.2, boundary="random", key=KEY), drawn)
    assert decide_parts(drawn, found, as_engine(None)).deferred == drawn.apply(log).deferred.sum()


def test_a_grid_that_ends_below_the_answer_always_defers(tmp_path):
    rng = np.random.default_rng(5)
    log = ScoreLog.from_arrays(rng.random((200, 2)) * 30, rng.random((200, 2)))
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [50]))
    expected, certificate = (calibrate(one, "0.02", grid="0.5") for one in (log, found))
    assert expected.status == "always_defer"
    assert not same(expected, certificate)


def test_all_guardians_missing_in_a_part(tmp_path):
    log = some_log(60)
    guardian = log.guardian.copy()
    guardian[: log.offsets[20]] = np.nan
    log = replace(log, guardian=guardian, missing=np.arange(60) < 20)
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [20]))
    keywords = {"missing_guardian": "worst_case"}
    assert not same(calibrate(log, "0.5", **keywords), calibrate(found, "0.5", **keywords))


def test_certificates_by_groups_are_applied_to_parts(tmp_path):
    log = some_log(400)
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [150]))
    certificate = calibrate(log, 0.2, by="group")
    assert decide_parts(certificate, found, as_engine(None)).deferred == int(certificate.apply(log).deferred.sum())


def test_a_budget_that_relaxation_0_keeps_needs_no_draws(tmp_path):
    log = some_log(200)
    found = ScoreParts.read(write_parts(log, tmp_path / "p", [50]))
    keywords = {"boundary": "random", "key": KEY}
    certificate = calibrate(found, "0.9", **keywords)
    assert (certificate.relaxation, certificate.boundary_u) == (0.0, 0.0)
    assert not same(calibrate(log, "0.9", **keywords), certificate)


def test_a_row_without_an_id_is_named_by_its_file_and_number(tmp_path):
    import duckdb

    folder = write_parts(replace(some_log(60), identities=None), tmp_path / "p", [30])
    path = folder / "scores-01.parquet"
    with duckdb.connect() as connection:
        rows = f"select * replace (case when id = 'q34' then null else id end as id) from '{path}'"
        connection.execute(f"copy ({rows}) to '{folder}/scores-02.parquet' (format parquet)")
    path.unlink()
    with pytest.raises(ScoreLogError, match=r"scores-02\.parquet: row 5, column 'id': the id is empty"):
        calibrate(ScoreParts.read(folder), 0.2)


MEMORY = """
import re, sys
from pathlib import Path
from conformal_arbitrage import ScoreParts, calibrate
calibrate(ScoreParts.read(sys.argv[1], rows_per_part=1 << 16), "0.05", guardian_sees="candidates", engine="threads")
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.proof
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_memory_does_not_grow_with_the_number_of_parts(tmp_path):
    rng = np.random.default_rng(0)
    rows = 1 << 16
    one = tmp_path / "one.parquet"
    ScoreLog.from_arrays(rng.random((rows, 2)), rng.random((rows, 2))).write(one)
    peaks = {}
    for parts in (4, 40):
        folder = tmp_path / str(parts)
        folder.mkdir()
        for number in range(parts):
            (folder / f"{number}.parquet").hardlink_to(one)
        command = [sys.executable, "-c", MEMORY, str(folder)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        peaks[parts] = int(ran.stdout) / 1024
    assert peaks[40] < peaks[4] + 50, peaks  # the sums of a part's buckets alone take 2.6 MB
