"""Logs in parts: a file that has several names counts once, and one that changes while it is read gives no number."""

import json
import os
from pathlib import Path

import duckdb
import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage import (
    OptionError,
    ProjectSecret,
    ScoreLog,
    ScoreLogError,
    ScoreParts,
    calibrate,
    verify,
)
from conformal_arbitrage.calibration.calibrate import PartsSurvey
from conformal_arbitrage.calibration.verify import decide_parts
from conformal_arbitrage.cli import cli
from conformal_arbitrage.scorelog.parts import ScorePart, as_engine
from conformal_arbitrage.scorelog.tables import interruptible
from tests.certificates import edited

KEY = b"0123456789abcdef"


def a_log(n, seed=0, *, ids=True):
    """Many rows with gaps so close that one pass cannot tell them apart, and a fifth of them lost."""
    rng = np.random.default_rng(seed)
    primary = np.stack([np.full(n, 0.5), (0.3 + 1e-9 * rng.random(n)).round(12), np.full(n, 0.1)], axis=1)
    guardian = np.eye(3)[np.where(rng.random(n) < 0.2, 1, 0)]
    names = [f"q{seed}-{k}" for k in range(n)] if ids else None
    return ScoreLog.from_arrays(primary, guardian, id=names, label=guardian.argmax(axis=1).tolist())


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "scores")


def written(folder, *, ids=True):
    folder.mkdir()
    for k in range(3):
        a_log(1000, k, ids=ids).write(folder / f"s{k}.parquet")
    return folder


def replace_one(folder, rows=1000, seed=7):
    a_log(rows, seed).write(folder / "s1.parquet")


def rename_ids(folder):
    log = ScoreLog.read(folder / "s1.parquet")
    ScoreLog.from_arrays(
        log.primary.reshape(-1, 3),
        log.guardian.reshape(-1, 3),
        id=[f"x{k}" for k in range(1000)],
        label=log.label.tolist(),
    ).write(folder / "s1.parquet")


@pytest.mark.parametrize(
    ("change", "after", "keywords"),
    [
        (replace_one, 1, {}),
        (replace_one, 1, {"guardian_sees": "candidates"}),
        (replace_one, 2, {"boundary": "random", "key": KEY}),
        (rename_ids, 2, {"boundary": "random", "key": KEY}),
        (lambda folder: replace_one(folder, rows=400), 1, {}),
        (lambda folder: replace_one(folder, rows=1001), 1, {}),
        (lambda folder: (folder / "s1.parquet").unlink(), 1, {}),
    ],
    ids=["scores", "candidates", "scores at the draws", "ids at the draws", "fewer rows", "more rows", "gone"],
)
def test_a_file_that_changes_between_two_passes_gives_no_certificate(monkeypatch, folder, change, after, keywords):
    monkeypatch.setattr(PartsSurvey, "_guessed", lambda self, losses: ())  # with a good guess there is one pass only
    passes = []

    def tell(line):
        passes.append(line)
        if len(passes) == after:
            change(folder)

    with pytest.raises(ScoreLogError, match="changed"):
        calibrate(ScoreParts.read(folder), "0.05", progress=tell, **keywords)
    assert len(passes) >= after


@pytest.mark.parametrize("storage", ["disk", "memory"])
def test_a_file_that_changes_while_it_is_read_gives_no_certificate(monkeypatch, folder, storage):
    """Of its parts, some would be those of before, and some new ones: rows that nobody ever had together."""
    new = folder.parent / "new.parquet"
    a_log(1000, 7).write(new)
    place, change = str(folder), lambda: replace_one(folder)
    if storage == "memory":
        memory = pytest.importorskip("fsspec").filesystem("memory")
        place = "memory://changing/scores"
        for file in folder.iterdir():
            memory.pipe(f"/changing/scores/{file.name}", file.read_bytes())
        change = lambda: memory.pipe("/changing/scores/s1.parquet", new.read_bytes())  # noqa: E731
    load, read = ScorePart.load_apart, []

    def loaded(part):
        rows = load(part)
        read.append(part)
        if len(read) == 1:
            change()
        return rows

    monkeypatch.setattr(ScorePart, "load_apart", loaded)
    with pytest.raises(ScoreLogError, match="changed"):
        calibrate(ScoreParts.read(place), "0.05", engine=as_engine("threads", jobs=1))
    assert len(read) == 3


@pytest.mark.parametrize("rows", [200, 1001])
def test_a_file_with_other_rows_than_when_it_was_found_gives_no_number(folder, rows):
    parts = ScoreParts.read(folder)
    certificate = calibrate(parts, "0.05")
    replace_one(folder, rows)
    for use in (
        lambda: calibrate(parts, "0.05"),
        lambda: verify(certificate, parts),
        lambda: parts.sample(2500),
        lambda: calibrate(parts, "0.05", margins=True),
    ):
        with pytest.raises(ScoreLogError, match=rf"s1.parquet, .* there are {rows:,} rows: the file has changed"):
            use()


def test_rows_that_were_appended_to_a_file_of_several_parts_are_seen(tmp_path):
    log = a_log(70_000)
    log.write(tmp_path / "one.parquet")
    parts = ScoreParts.read(tmp_path / "one.parquet", rows_per_part=65_536)
    assert len(parts.parts()) == 2
    a_log(70_001).write(tmp_path / "one.parquet")
    with pytest.raises(ScoreLogError, match="there are 4,465 rows: the file has changed"):
        calibrate(parts, "0.05")


def test_what_is_gathered_is_what_is_digested(folder, monkeypatch):
    """A file that is replaced after it was read into memory does not lend its digest to the certificate."""
    parts = ScoreParts.read(folder)
    expected = calibrate(parts, "0.05", margins=True)
    gather = ScoreParts.gather

    def gather_and_replace(self, reason):
        log = gather(self, reason)
        replace_one(folder)
        return log

    monkeypatch.setattr(ScoreParts, "gather", gather_and_replace)
    certificate = calibrate(parts, "0.05", margins=True)
    assert certificate.evidence.log_sha256 == expected.evidence.log_sha256
    monkeypatch.undo()
    assert not verify(certificate, ScoreParts.read(folder))


def links(folder):
    (folder / "t0.parquet").symlink_to(folder / "s0.parquet")
    os.link(folder / "s1.parquet", folder / "t1.parquet")
    (folder / "again").symlink_to(folder)
    (folder / "gone.parquet").symlink_to(folder / "nowhere")
    return [folder]


NAMES = {
    "links in a folder": links,
    "a pattern through a folder that links to itself": lambda folder: [f"{links(folder)[0]}/**/*.parquet"],
    "patterns that overlap": lambda folder: [f"{folder}/*.parquet", f"{folder}/s0*"],
    "other ways to write a path": lambda folder: [
        folder,
        f"{folder}/./s0.parquet",
        f"{folder}/../{folder.name}/s1.parquet",
    ],
    "relative and absolute": lambda folder: [folder, os.path.relpath(folder / "s0.parquet")],
    "a URL of a local file": lambda folder: [folder, f"file://{folder}/s2.parquet"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_counts_once_whatever_it_is_called(tmp_path, name):
    """Without ids nothing else would tell, and each copy of a row would count as evidence."""
    folder = written(tmp_path / "scores", ids=False)
    expected = calibrate(ScoreParts.read(folder), "0.05")
    parts = ScoreParts.read(NAMES[name](folder))
    assert (len(parts), len(parts.files)) == (3000, 3)
    certificate = calibrate(parts, "0.05")
    assert (certificate.n, certificate.relaxation, certificate.evidence.log_sha256) == (
        3000,
        expected.relaxation,
        expected.evidence.log_sha256,
    )


def test_unfinished_work_of_an_engine_is_not_read_and_an_upper_case_ending_is(folder):
    (folder / "_temporary" / "0").mkdir(parents=True)
    a_log(10, 8).write(folder / "_temporary" / "0" / "part.parquet")
    a_log(10, 8).write(folder / ".s0.parquet")
    a_log(10, 9).write(folder / "more.parquet")
    (folder / "more.parquet").rename(folder / "MORE.PARQUET")
    assert len(ScoreParts.read(folder)) == 3010


@pytest.mark.parametrize(
    ("mark", "format"),
    [("_delta_log/0.json", "Delta"), (".hoodie/hoodie.properties", "Hudi"), ("metadata/v1.metadata.json", "Iceberg")],
)
def test_the_folder_of_a_table_format_is_refused_since_it_keeps_rows_that_were_deleted(folder, mark, format):
    path = folder / mark
    path.parent.mkdir()
    path.write_text("{}")
    (folder / "day=1").mkdir()
    a_log(10).write(folder / "day=1" / "s.parquet")
    for source in (folder, folder / "*.parquet", folder / "day=1", f"{folder}/**/*.parquet"):
        with pytest.raises(ScoreLogError, match=f"table of {format}"):
            ScoreParts.read(source)


def test_a_pattern_leaves_unfinished_work_out_unless_it_names_it(folder):
    for name in ("_temporary/0/s9.parquet", "_SUCCESS", "_s9.parquet"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        a_log(10, 9).write(folder / name) if name.endswith(".parquet") else (folder / name).write_text("")
    assert [len(ScoreParts.read(folder / pattern)) for pattern in ("*", "**/*.parquet", "_s*")] == [3000, 3000, 10]


def test_ids_that_are_numbers_in_one_file_and_texts_in_another_are_compared_as_texts(folder):
    with duckdb.connect() as database:
        source = f"'{folder}/s0.parquet'"
        query = f"select * replace (1000 + row_number() over () as id) from {source}"
        database.execute(f"copy ({query}) to '{folder}/t.parquet'")
        assert calibrate(ScoreParts.read(folder), "0.05", margins=True).n == 4000
        query = f"select * replace ((1000 + row_number() over ())::varchar as id) from {source} limit 7"
        database.execute(f"copy ({query}) to '{folder}/u.parquet'")
    for keywords in ({}, {"margins": True}):
        with pytest.raises(ScoreLogError, match=r"'1001' is the id of more than one row \(\S+/t.parquet, row 1 and "):
            calibrate(ScoreParts.read(folder), "0.05", **keywords)


@pytest.mark.parametrize("change", ["ids", "guardians"])
def test_a_file_that_changes_before_the_tick_is_known_gives_no_certificate(tmp_path, change):
    """Scores of unusual size are surveyed twice, and only the first time are ids and missing scores looked at."""
    scores = np.random.default_rng(3).random((200, 3))
    log = ScoreLog.from_arrays(5 * scores, 5 * scores[::-1], id=[f"q{k}" for k in range(200)])
    log.write(tmp_path / "s.parquet")
    lost = [None, *(5 * scores[:0:-1]).tolist()] if change == "guardians" else 5 * scores[::-1]
    changed = ScoreLog.from_arrays(5 * scores, lost, id=[f"r{k}" for k in range(200)])
    with pytest.raises(ScoreLogError, match="changed between two passes"):
        calibrate(
            ScoreParts.read(tmp_path), "0.5", loss_bound=5, progress=lambda _: changed.write(tmp_path / "s.parquet")
        )


@pytest.mark.parametrize("arguments", [["--jobs", "9" * 20], ["--engine", "tcp://"]])
def test_nonsense_for_an_engine_is_one_line(folder, arguments):
    result = CliRunner().invoke(cli, ["calibrate", str(folder), "--alpha", "0.05", "-o", "c.json", *arguments])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output


def test_nonsense_for_alpha_is_said_before_the_first_pass(folder):
    result = CliRunner().invoke(cli, ["calibrate", str(folder), "--alpha", "0.05x", "-o", "c.json"])
    assert (result.exit_code, "pass 1" in result.stderr) == (2, False)


def test_ctrl_c_in_a_query_is_an_interruption():
    with pytest.raises(KeyboardInterrupt), interruptible():
        raise RuntimeError("Query interrupted")  # what DuckDB raises
    with pytest.raises(RuntimeError, match="something else"), interruptible():
        raise RuntimeError("something else")


def test_decisions_are_never_written_among_the_files_of_the_log(folder, tmp_path):
    """A log whose own files are called part-00000.parquet would be lost."""
    for k in range(3):
        (folder / f"s{k}.parquet").rename(folder / f"part-0000{k}.parquet")
    parts = ScoreParts.read(folder)
    certificate = calibrate(parts, "0.05")
    (tmp_path / "link").symlink_to(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for place in (folder, tmp_path / "link", folder / ".." / folder.name):
        with pytest.raises(OptionError, match="the files of the log are there"):
            decide_parts(certificate, parts, as_engine("threads"), place)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_decisions_of_a_longer_log_are_not_left_beside_those_of_a_shorter_one(folder, tmp_path):
    certificate = calibrate(ScoreParts.read(folder), "0.05")
    decide_parts(certificate, ScoreParts.read(folder), as_engine("threads"), tmp_path / "out")
    decide_parts(certificate, ScoreParts.read(folder), as_engine("threads"), tmp_path / "out")  # again is no harm
    with pytest.raises(OptionError, match=r"holds part-00001\.parquet of another log"):
        decide_parts(certificate, ScoreParts.read(folder / "s0.parquet"), as_engine("threads"), tmp_path / "out")


def test_a_certificate_whose_signature_was_taken_off_is_named_where_a_project_signs(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARBITRAGE_SECRET", raising=False)
    calibrate(ScoreParts.read(folder), "0.05", boundary="include").sign(ProjectSecret.create(".")).save("c.json")

    def show():
        return CliRunner().invoke(cli, ["certificate", "show", "c.json"])

    assert (show().exit_code, show().stderr) == (0, "")
    document = json.loads(Path("c.json").read_text())
    Path("c.json").write_text(json.dumps(edited(document, {"relaxation": 0.0})))
    assert show().exit_code == 2
    Path("c.json").write_text(json.dumps(edited(document, {"relaxation": 0.0, "signature": None, "secret_id": None})))
    assert "c.json is not signed, so nothing shows that it is as it was calibrated" in show().stderr


@pytest.mark.parametrize("keywords", [{}, {"margins": True}], ids=["parts", "gathered"])
def test_a_copy_of_a_file_is_refused_where_no_ids_tell_its_rows_apart(tmp_path, keywords):
    folder = written(tmp_path / "scores", ids=False)
    certificate = calibrate(ScoreParts.read(f"{folder}/*.parquet"), 0.1, **keywords)
    (folder / "s9.parquet").write_bytes((folder / "s1.parquet").read_bytes())
    copied = ScoreParts.read(f"{folder}/*.parquet")
    with pytest.raises(ScoreLogError, match=r"s9.parquet has the same 1,000 rows as .*s1.parquet"):
        calibrate(copied, 0.1, **keywords)
    with pytest.raises(ScoreLogError, match="would count twice"):
        verify(certificate, copied)


def test_a_few_rows_may_look_like_those_of_another_file(tmp_path):
    for name in "ab":
        a_log(1, ids=False).write(tmp_path / f"{name}.parquet")
    assert calibrate(ScoreParts.read(f"{tmp_path}/*.parquet"), 0.5).n == 2
