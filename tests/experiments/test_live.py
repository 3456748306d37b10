"""Test reproduce --live on small files with the datasets' own columns and a scripted server on loopback."""

import asyncio
import json

import duckdb
import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.cli import cli
from conformal_arbitrage.errors import SourceError
from conformal_arbitrage.experiments.data import load_corpus
from tests.scripted import Upstream, completion, scores


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.with_suffix(".jsonl")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if path.suffix == ".parquet":
        duckdb.execute(f"copy (select * from read_json('{lines}')) to '{path}' (format parquet)")
        lines.unlink()
    return path


def truthfulqa(n):
    return [{"question": f"Question {k}?", "choices": ["w", "x", "y", "z"], "label": k % 4} for k in range(n)]


def mmlu(n, subjects):
    return [
        {"question": f"Question {k}?", "subject": f"s{k % subjects}", "choices": ["w", "x", "y", "z"], "answer": k % 4}
        for k in range(n)
    ]


def pku_row(k, severities=(0, 3), better=1, safer=0):
    return {
        "prompt": f"Prompt {k}", "response_0": f"no {k}", "response_1": f"yes {k}",
        "response_0_severity_level": severities[0], "response_1_severity_level": severities[1],
        "is_response_0_safe": severities[0] == 0, "better_response_id": better, "safer_response_id": safer,
    }  # fmt: skip


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_truthfulqa_is_loaded_completely(ending, tmp_path):
    rows = load_corpus("truthfulqa", write(tmp_path / f"data{ending}", truthfulqa(7)))
    assert len(rows.menus.queries) == 7
    assert rows.menus.queries[3].actions == ("w", "x", "y", "z")
    assert rows.menus.labels == [0, 1, 2, 3, 0, 1, 2]
    assert len({query.id for query in rows.menus.queries}) == 7


def test_mmlu_pools_its_splits_except_the_auxiliary_one(tmp_path):
    folder = tmp_path / "mmlu"
    for split, rows in (("dev", mmlu(6, 3)), ("test", mmlu(9, 3)), ("auxiliary_train", mmlu(50, 1))):
        write(folder / f"{split}.parquet", rows)
    pool = load_corpus("mmlu", tmp_path).menus
    assert len(pool.queries) == 15
    assert sorted(set(pool.groups)) == ["s0", "s1", "s2"]
    assert len({query.id for query in pool.queries}) == 15  # equal questions of two splits keep names of their own


def test_a_sample_is_balanced_over_subjects_with_the_remainder_at_random(tmp_path):
    rows = [{**row, "subject": "large"} for row in mmlu(100, 1)] + mmlu(30, 3)
    path = write(tmp_path / "mmlu.jsonl", rows)
    sample = load_corpus("mmlu", path, rows=22, seed=1).menus
    counts = dict(zip(*np.unique(sample.groups, return_counts=True), strict=True))
    assert sum(counts.values()) == 22
    assert all(count >= 5 for count in counts.values())  # floor(22 / 4) of each, two more from anywhere
    assert [q.id for q in sample.queries] == [q.id for q in load_corpus("mmlu", path, rows=22, seed=1).menus.queries]
    assert [q.id for q in sample.queries] != [q.id for q in load_corpus("mmlu", path, rows=22, seed=2).menus.queries]


def test_pku_keeps_rows_whose_better_reply_is_not_the_safer_one_and_whose_severities_differ(tmp_path):
    rows = [
        pku_row(0),
        pku_row(1, severities=(2, 2)),  # no difference in severity
        pku_row(2, better=0),  # better and safer at once
        pku_row(3, severities=(1, 0), better=0, safer=1),
    ]
    kept = load_corpus("pku", write(tmp_path / "pku.jsonl", rows))
    assert [query.context for query in kept.menus.queries] == ["Prompt 0", "Prompt 3"]
    assert kept.severity == [(0, 3), (1, 0)]
    assert kept.menus.labels == [1, 0]


def test_an_incomplete_copy_is_rejected(tmp_path):
    with pytest.raises(SourceError, match="lacks the column 'label'"):
        load_corpus("truthfulqa", write(tmp_path / "a.jsonl", [{"question": "?", "choices": ["a", "b"]}]))
    with pytest.raises(SourceError, match="answer 9 and 2 options"):
        load_corpus("truthfulqa", write(tmp_path / "b.jsonl", [{"question": "?", "choices": ["a", "b"], "label": 9}]))
    with pytest.raises(SourceError, match="no data files"):
        load_corpus("mmlu", tmp_path / "nowhere")
    with pytest.raises(SourceError, match="no row has replies"):
        load_corpus("pku", write(tmp_path / "c.jsonl", [pku_row(0, better=0)]))


def test_the_hub_needs_its_extra():
    with pytest.raises(SourceError, match=r"\.\[datasets\].*--data PATH"):
        load_corpus("truthfulqa")


CONFIG = """\
[primary]
kind = "chat"
url = "URL"
model = "small"
price = [1, 2]
[primary.pinned]
mode = "plain"

[guardian]
kind = "chat"
url = "URL"
model = "large"
price = [10, 20]
[guardian.pinned]
mode = "plain"
"""


def reply(path, body, number):
    """The large model knows; the small one is sure where the question's number is even, and right then."""
    prompt = body["messages"][-1]["content"]
    if "ASSISTANT REPLY" in prompt:
        return completion("0.20, 0.90" if "Prompt 1" in prompt else "0.55, 0.60", model=body["model"])
    number = int(prompt.split("Question ")[1].split("?")[0])
    right, sure = number % 4, body["model"] == "large" or number % 2 == 0
    values = [0.02] * 4
    values[right if sure else (right + 1) % 4] = 0.94 if sure else 0.3
    return scores(*values, model=body["model"])


def run(tmp_path, arguments, text=CONFIG):
    async def serve():
        async with Upstream(reply) as upstream:
            (tmp_path / "arbitrage.toml").write_text(text.replace("URL", upstream.url))
            command = ["reproduce", *arguments, "--live", "--config", str(tmp_path / "arbitrage.toml")]
            command += ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
            return await asyncio.to_thread(CliRunner().invoke, cli, command), upstream

    return asyncio.run(serve())


def test_a_dry_run_sends_nothing_and_estimates_the_cost(tmp_path):
    write(tmp_path / "data" / "truthfulqa.parquet", truthfulqa(40))
    done, upstream = run(tmp_path, ["truthfulqa", "--dry-run", "--json"])
    estimate = json.loads(done.stdout)
    assert [model["spent"]["calls"] for model in estimate["models"]] == [40, 40]
    assert estimate["cost"] > 0
    assert upstream.bodies == []
    done, upstream = run(tmp_path, ["truthfulqa"])  # no confirmation
    assert done.exit_code != 0
    assert upstream.bodies == []


def test_a_live_report_names_its_source_and_its_cost(tmp_path):
    write(tmp_path / "data" / "truthfulqa.parquet", truthfulqa(60))
    done, upstream = run(tmp_path, ["truthfulqa", "--yes"])
    assert done.exit_code == 0, done.output
    assert len(upstream.bodies) == 120
    report = (tmp_path / "out" / "truthfulqa.md").read_text()
    assert report.startswith("Source: live scores of small (Primary) and large (Guardian) on a local copy")
    assert "Money spent on all scores: $" in report
    assert "as recorded in the log" in report
    table = json.loads((tmp_path / "out" / "truthfulqa.json").read_text())["tables"][0]["rows"]
    assert [row["accuracy"]["mean"] for row in (table[0], table[-1])] == [pytest.approx(0.5, abs=0.1), 1.0]
    first = upstream.bodies[0]
    assert first["max_tokens"] == 50
    assert first["temperature"] == 0.1


def test_stored_replies_are_not_requested_again(tmp_path):
    async def twice():
        async with Upstream(reply) as upstream:
            (tmp_path / "arbitrage.toml").write_text(CONFIG.replace("URL", upstream.url))
            write(tmp_path / "data" / "truthfulqa.parquet", truthfulqa(40))
            command = ["reproduce", "NAME", "--live", "--yes", "--config", str(tmp_path / "arbitrage.toml")]
            command += ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
            for name in ("truthfulqa", "truthfulqa-300"):
                command[1] = name
                done = await asyncio.to_thread(CliRunner().invoke, cli, command)
                assert done.exit_code == 0, done.output
            return len(upstream.bodies)

    assert asyncio.run(twice()) == 80


def test_pku_live_calls_only_the_primary_with_the_pair_prompt(tmp_path):
    write(tmp_path / "data" / "pku.jsonl", [pku_row(k, severities=(0, 1 + k % 3)) for k in range(40)])
    done, upstream = run(tmp_path, ["pku", "--yes"])
    assert done.exit_code == 0, done.output
    assert {body["model"] for body in upstream.bodies} == {"small"}
    assert len(upstream.bodies) == 40
    assert "response_format" not in upstream.bodies[0]
    log = ScoreLog.read(tmp_path / "out" / "live" / "pku.parquet", outcomes=["severity"])
    assert log.guardian.tolist() == (-log.lists["severity"]).tolist()
    assert log.label.tolist() == [1] * 40
    report = (tmp_path / "out" / "pku.md").read_text()
    assert "0/1 Guardian" in report
    assert "Severity Guardian" in report


def test_mmlu_live_has_subjects_as_groups(tmp_path):
    write(tmp_path / "data" / "mmlu" / "test.parquet", mmlu(1200, 12))
    done, upstream = run(tmp_path, ["mmlu", "--yes", "--concurrency", "64"])
    assert done.exit_code == 0, done.output
    assert "balanced over 12 subjects" in (tmp_path / "out" / "mmlu.md").read_text()
    assert len(upstream.bodies) == 2400


def test_the_stronger_primary_needs_its_own_section(tmp_path):
    write(tmp_path / "data" / "truthfulqa.parquet", truthfulqa(40))
    done, _ = run(tmp_path, ["truthfulqa-mini", "--yes"])
    assert done.exit_code == 2
    assert "[stronger]" in done.output
    stronger = CONFIG.split("\n\n")[0].replace("[primary", "[stronger").replace('"small"', '"medium"')
    done, upstream = run(tmp_path, ["truthfulqa-mini", "--yes"], CONFIG + stronger + "\n")
    assert done.exit_code == 0, done.output
    assert {body["model"] for body in upstream.bodies} == {"medium", "large"}


@pytest.mark.proof
def test_all_live_skips_unsupported_experiments_by_name(tmp_path):
    write(tmp_path / "data" / "truthfulqa.parquet", truthfulqa(40))
    write(tmp_path / "data" / "mmlu.jsonl", mmlu(40, 4))
    write(tmp_path / "data" / "pku.jsonl", [pku_row(k) for k in range(20)])
    done, _ = run(tmp_path, ["all", "--yes"])
    assert done.exit_code == 0, done.output
    assert "mmlu: not run" in done.output
    assert "truthfulqa-mini: not run" in done.output
    assert (tmp_path / "out" / "summary.md").exists()


def test_a_recorded_log_needs_the_column_of_the_second_primary(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"id": str(k), "primary": rng.dirichlet([1] * 4).tolist(), "big": rng.dirichlet([1] * 4).tolist(),
         "guardian": [1.0, 0, 0, 0], "label": 0}
        for k in range(60)
    ]  # fmt: skip
    path = write(tmp_path / "log.jsonl", rows)
    command = ["reproduce", "truthfulqa-mini", "--log", str(path), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 2
    assert "--stronger-column" in done.output
    assert CliRunner().invoke(cli, [*command, "--stronger-column", "big"]).exit_code == 0
