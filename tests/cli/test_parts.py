"""Commands on logs in parts: a pattern, a folder, a URL."""

import json
import shlex

import duckdb
import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage import Certificate, ScoreLog, ScoreLogError, ScoreParts, calibrate
from conformal_arbitrage.cli import cli, options
from conformal_arbitrage.scorelog import parts
from conformal_arbitrage.scorelog.parts import ExecutorPool, as_engine
from tests.calibration.test_parts import some_log, write_parts
from tests.certificates import said


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(cli, [str(one) for one in arguments])
        assert result.exit_code == code, (result.output, result.stderr, result.exception)
        return result

    return invoke


@pytest.fixture
def folder(tmp_path):
    return write_parts(some_log(600), tmp_path / "scores", [200, 350])


def test_calibrate_verify_and_apply_take_a_folder_or_a_pattern(run, folder):
    shown = run("calibrate", folder, "--alpha", "0.2", "-o", "c.json", "--json")
    document = json.loads(shown.stdout)
    assert "pass 1: 600 rows (parts: 3, files: 3)" in shown.stderr
    log = some_log(600)
    expected = calibrate(log, "0.2")
    assert said(document, "relaxation") == expected.relaxation
    assert document["on_this_log"]["deferred"] == expected.apply(log).deferred.mean()
    assert "nothing differs" in run("verify", "c.json", f"{folder}/*.parquet", "--jobs", "2").stdout
    applied = run("apply", "c.json", folder, "-o", "decisions", "--json")
    assert json.loads(applied.stdout)["deferred"] == int(expected.apply(log).deferred.sum())
    with duckdb.connect() as connection:
        (rows,) = connection.execute("select count(*) from 'decisions/*.parquet'").fetchone()
    assert rows == 600


def test_rewritten_files_are_verified_by_their_rows(run, folder, tmp_path):
    run("calibrate", folder, "--alpha", "0.2", "-o", "c.json")
    some_log(600).write(tmp_path / "one.parquet")
    assert "nothing differs" in run("verify", "c.json", "one.parquet").stdout


def test_other_commands_look_at_a_declared_sample(run, folder, monkeypatch):
    monkeypatch.setattr(options, "SAMPLE", 400)
    shown = run("inspect", folder, "--json")
    assert "from a uniform sample of 400 of 600 rows" in shown.stderr
    document = json.loads(shown.stdout)
    assert (document["rows"], document["sampled_rows"]) == (600, 400)
    shown = run("calibrate", folder, "--alpha", "0.2", "--json")
    assert "was looked at once before (inspect)" in shown.stderr


def test_looks_at_a_folder_are_known_by_its_pattern_and_by_its_url(run, folder):
    run("inspect", folder)
    assert "looked at once before (inspect)" in run("calibrate", "scores/*.parquet", "--alpha", "0.2").stderr
    assert "looked at once before (inspect)" in run("calibrate", f"file://{folder}/*.parquet", "--alpha", "0.2").stderr


def test_a_table_is_for_calibrate_and_verify(run):
    assert "only calibrate and verify take a table" in run("inspect", "table:scores", code=2).stderr


def test_a_sample_has_as_many_rows_as_asked_for(run, folder, tmp_path):
    shown = run("inspect", folder, "--sample", 250, "--json")
    assert "from a uniform sample of 250 of 600 rows" in shown.stderr
    assert json.loads(shown.stdout)["sampled_rows"] == 250
    split = ["split", folder, "a.parquet", "b.parquet", "--share", 0.5, "--json"]
    assert json.loads(run(*split, "--sample", 100).stdout) == {"explore": 50, "certify": 50}
    assert json.loads(run(*split, "--sample", 10_000).stdout) == {"explore": 300, "certify": 300}
    how = ["--alpha", 0.2, "--calibration-size", 50, "--trials", 2, "--json"]
    assert "sample of 150 of 600" in run("evaluate", folder, *how, "--sample", 150).stderr
    assert "sample of 150 of 600" in run("compare", folder, *how[:4], "--splits", 2, "--json", "--sample", 150).stderr
    run("calibrate", folder, "--alpha", "0.2", "-o", "c.json")
    assert "sample of 150 of 600" in run("assess", "c.json", folder, "--sample", 150).stderr
    assert "is for a log in parts" in run("inspect", "a.parquet", "--sample", 150, code=2).stderr
    assert "0 is not in the range" in run("inspect", folder, "--sample", 0, code=2).stderr


def test_one_file_with_many_rows_is_read_in_parts(run, tmp_path, monkeypatch):
    some_log(600).write(tmp_path / "large.parquet")
    some_log(500).write(tmp_path / "small.parquet")
    some_log(600).write(tmp_path / "large.jsonl")
    run("calibrate", "large.parquet", "--alpha", "0.2", "-o", "before.json")
    monkeypatch.setattr(parts, "GATHERED", 500)
    monkeypatch.setattr(options, "GATHERED", 500)
    shown = run("calibrate", "large.parquet", "--alpha", "0.2", "-o", "c.json", "--json", "--jobs", 2)
    assert "pass 1: 600 rows (parts: 1, files: 1)" in shown.stderr
    document = json.loads(shown.stdout)
    assert said(document, "log_sha256") == some_log(600).sha256()
    assert said(document, "relaxation") == calibrate(some_log(600), "0.2").relaxation
    for certificate in ("c.json", "before.json"):
        assert "nothing differs" in run("verify", certificate, "large.parquet").stdout
    assert "sample of 400 of 600" in run("inspect", "large.parquet", "--sample", 400).stderr
    for name in ("small.parquet", "large.jsonl"):
        shown = run("calibrate", name, "--alpha", "0.2", "--json")
        assert "pass 1" not in shown.stderr
    assert (
        "all rows in memory at once" in run("calibrate", "large.parquet", "--alpha", "0.2", "--margins", code=2).stderr
    )


def test_decisions_of_one_large_file_go_into_a_folder_or_a_named_file(run, tmp_path, monkeypatch):
    some_log(600).write(tmp_path / "large.parquet")
    run("calibrate", "large.parquet", "--alpha", "0.2", "-o", "c.json")
    monkeypatch.setattr(parts, "GATHERED", 500)
    monkeypatch.setattr(options, "GATHERED", 500)
    for output in ("folder", "d.jsonl", "d.parquet"):
        assert json.loads(run("apply", "c.json", "large.parquet", "-o", output, "--json").stdout)["rows"] == 600
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["part-00000.parquet"]
    assert len((tmp_path / "d.jsonl").read_text().splitlines()) == 600
    assert (tmp_path / "d.parquet").is_file()


def test_a_damaged_file_is_named_by_its_reader(run, tmp_path):
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    assert "damaged.parquet" in run("calibrate", "damaged.parquet", "--alpha", "0.2", code=2).stderr


def test_assess_gives_no_verdict_on_the_files_that_the_certificate_was_made_from(run, folder, tmp_path, monkeypatch):
    run("calibrate", folder, "--alpha", "0.2", "-o", "c.json")
    monkeypatch.setattr(options, "SAMPLE", 400)
    shown = json.loads(run("assess", "c.json", folder, "--json").stdout)
    assert shown["verdict"].startswith("No verdict")
    assert "made from" in shown["problems"][0]
    other = write_parts(some_log(600, seed=9), tmp_path / "new", [300])
    shown = json.loads(run("assess", "c.json", other, "--json").stdout)
    assert shown["rows"] == 400
    assert not shown["verdict"].startswith("No verdict")


def test_decisions_of_one_file_as_parquet(run, tmp_path):
    log = ScoreLog.from_arrays(
        [[0.9, 0.1], [0.5, 0.5], [0.3]], [[1, 0], None, [1]], actions=[["a", "b"], ["c", "d"], ["e"]]
    )
    log.write(tmp_path / "log.parquet")
    calibrate(some_log(300), 0.2).save(tmp_path / "c.json")
    run("apply", "c.json", "log.parquet", "-o", "d.parquet")
    with duckdb.connect() as connection:
        columns = '"row", action, answer, decided_by, margin, candidates'
        rows = connection.execute(f"select {columns} from 'd.parquet'").fetchall()
    assert rows == [
        (1, 0, "a", "primary", 0.8, [0]),
        (2, -1, None, "guardian", 0.0, [0, 1]),
        (3, 0, "e", "primary", None, [0]),
    ]


def test_engines_are_for_logs_in_parts_and_must_be_known(run, folder, tmp_path):
    some_log(50).write(tmp_path / "one.parquet")
    assert "for a log in parts" in run("calibrate", "one.parquet", "--alpha", "0.2", "--jobs", "2", code=2).stderr
    assert "engine must be threads" in run("calibrate", folder, "--alpha", "0.2", "--engine", "x", code=2).stderr
    (tmp_path / "file").touch()
    run("calibrate", folder, "--alpha", "0.2", "-o", "c.json")
    assert "is a file" in run("apply", "c.json", folder, "-o", "file", code=2).stderr
    assert "would overwrite" in run("calibrate", folder, "--alpha", "0.2", "-o", "scores", code=2).stderr


def test_a_table_is_named_with_the_spark_that_holds_it(run, folder):
    for more in ([], ["--engine", "threads"]):
        shown = run("calibrate", "table:scores", "--alpha", "0.2", *more, code=2)
        assert "table:NAME is for calibrate and verify, with the Spark that holds it" in shown.stderr
    run("calibrate", folder, "--alpha", "0.2", "-o", "c.json")
    assert "table:NAME is for calibrate and verify" in run("apply", "c.json", "table:scores", code=2).stderr


def test_urls_are_read_through_fsspec(folder):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe(f"/lake/{path.name}", path.read_bytes())
    expected = calibrate(ScoreParts.read(folder), 0.2)
    for address in ("memory://lake/*.parquet", "memory://lake"):
        scores = ScoreParts.read(address)
        assert len(scores.files) == 3
        assert calibrate(scores, 0.2).evidence.log_sha256 == expected.evidence.log_sha256
    memory.rm("/lake", recursive=True)
    with pytest.raises(ScoreLogError, match="no Parquet files"):
        ScoreParts.read("memory://lake/*.parquet")
    with pytest.raises(ScoreLogError, match="needs fsspec and a file system for nosuch"):
        ScoreParts.read("nosuch://lake/*.parquet")


def test_a_storage_that_does_not_say_when_a_file_was_modified_is_read_and_its_error_is_one_line(folder, monkeypatch):
    """HTTP does not say, and a server without ranges raises in the file system."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "modified", fsspec.AbstractFileSystem.modified)
    for path in folder.iterdir():
        memory.pipe(f"/lake/{path.name}", path.read_bytes())
    try:
        found = ScoreParts.read("memory://lake")
        assert calibrate(found, 0.2).n == 600

        def no_ranges(self, *arguments, **keywords):
            raise ValueError("the server takes no ranges")

        monkeypatch.setattr(type(memory), "_open", no_ranges)
        with pytest.raises(ScoreLogError, match=r"cannot be read \(ValueError: the server takes no ranges\); is"):
            calibrate(found, 0.2)
    finally:
        memory.rm("/lake", recursive=True)
        vars(memory).pop("modified", None)


def test_an_executor_of_the_callers_is_an_engine():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert isinstance(as_engine(pool), ExecutorPool)
        assert sorted(as_engine(pool).run(len, ["a", "bc"])) == [1, 2]


@pytest.mark.proof
def test_real_logs_give_the_same_certificate_in_parts(shared, tmp_path):
    names = {"science.parquet": ("qwen15b", "expert")}
    for path in sorted(shared.glob("*.parquet")):
        if path.name.startswith(("cascade", "frugalml", "pac-")):  # no columns of a pair
            continue
        primary, guardian = names.get(path.name, ("primary", "guardian"))
        log = ScoreLog.read(path, primary=primary, guardian=guardian)
        cuts = np.linspace(0, len(log), 5).astype(int).tolist()
        scores = ScoreParts.read(write_parts(log, tmp_path / path.stem, cuts), primary=primary, guardian=guardian)
        for alpha in ("0.02", "0.05", "0.1", "0.2"):
            for sees in ("all", "candidates"):
                one, other = (calibrate(each, alpha, guardian_sees=sees) for each in (log, scores))
                assert (one.rule, one.evidence.empirical_risk, one.n) == (
                    other.rule,
                    other.evidence.empirical_risk,
                    other.n,
                )
    assert isinstance(one, Certificate)


def test_recommend_chooses_and_certifies_on_a_declared_sample(run, folder, tmp_path):
    shown = run("recommend", folder, "--alpha", 0.2, "--sample", 400, "--trials", 2, "-o", "plan.toml", "--json")
    assert "a sample of 400 of 600 rows" in shown.stderr
    assert "sample = 400" in (tmp_path / "plan.toml").read_text()
    document = json.loads(shown.stdout)
    split, by_hand = (shlex.split(command)[1:] for command in document["commands"])
    run(*split, "--json")
    run(*by_hand[:-1], "by-hand.json", "--json")
    certificate, by_hand = (json.loads((tmp_path / name).read_text()) for name in ("certificate.json", "by-hand.json"))
    for name in ("relaxation", "n", "log_sha256", "empirical_risk"):
        assert said(certificate, name) == said(by_hand, name)
    repeated = run("recommend", "--from", "plan.toml", "--json")
    assert said(json.loads(repeated.stdout)["certificate"], "log_sha256") == said(certificate, "log_sha256")
    assert (
        "--sample is for a log in parts"
        in run("recommend", "tuning.parquet", "--alpha", 0.2, "--sample", 9, code=2).stderr
    )


def test_recommend_refuses_an_id_that_stands_in_two_files(run, tmp_path):
    for name in ("one", "two"):
        write_parts(some_log(80), tmp_path / "twice", []).joinpath("scores-00.parquet").rename(
            tmp_path / "twice" / f"{name}.parquet"
        )
    shown = run("recommend", tmp_path / "twice", "--alpha", 0.2, code=2)
    assert "'q0' is the id of more than one row" in shown.stderr


def test_inspect_counts_in_all_rows_what_it_does_not_estimate(run, tmp_path):
    log = some_log(600, missing=0.1)
    folder = write_parts(log, tmp_path / "scores", [200])
    document = json.loads(run("inspect", folder, "--sample", 150, "--json").stdout)
    assert document["rows"] == 600
    assert document["missing_guardian_rows"] == int(log.missing.sum())
    assert (document["fewest_actions"], document["most_actions"]) == (int(log.sizes.min()), int(log.sizes.max()))
    assert "150 of them, drawn uniformly" in run("inspect", folder, "--sample", 150).stdout
    assert json.loads(run("inspect", folder, "--json").stdout)["sampled_rows"] is None
