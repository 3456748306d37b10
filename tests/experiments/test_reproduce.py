import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLog, evaluate
from conformal_arbitrage.cli import cli
from conformal_arbitrage.experiments import EXPERIMENTS, bundled_source, log_source, reproduce
from conformal_arbitrage.experiments.protocol import TABLES
from conformal_arbitrage.experiments.summary import CLAIMS


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all")
    return folder, *reproduce("all", bundled_source(), out=folder)


@pytest.mark.proof
def test_all_writes_every_report_in_every_format_and_a_summary(everything):
    folder, reports, skipped = everything
    assert set(reports) | set(skipped) == set(EXPERIMENTS)
    assert set(skipped) == {"mmlu", "pku"}
    for name in reports:
        endings = ["md", "html", "csv", "json"] + (["png", "svg"] if name != "theory" else [])
        assert all((folder / f"{name}.{ending}").stat().st_size > 100 for ending in endings)
    for name, words in (("mmlu", "`group` column"), ("pku", "severity")):
        text = (folder / f"{name}.md").read_text()
        assert "Not run" in text
        assert words in text
        assert "--log FILE" in text
    assert not list(folder.glob("*certificate*"))


@pytest.mark.proof
def test_every_report_names_its_source_first(everything):
    folder, reports, _ = everything
    for name in reports:
        first = (folder / f"{name}.md").read_text().splitlines()[0]
        assert first.startswith("Source: ")
        assert "not the paper's data" in first or name == "theory"


@pytest.mark.proof
def test_the_seed_determines_the_bytes(everything, tmp_path):
    folder, reports, _ = everything
    for seed, same in ((0, True), (1, False)):
        reproduce("truthfulqa", bundled_source(), out=tmp_path, seed=seed)
        for ending in ("csv", "json"):
            again = (tmp_path / f"truthfulqa.{ending}").read_bytes()
            assert (again == (folder / f"truthfulqa.{ending}").read_bytes()) is same
    assert "Time:" in (folder / "truthfulqa.md").read_text()
    assert "Time:" not in (folder / "truthfulqa.json").read_text() + (folder / "truthfulqa.csv").read_text()
    assert len(reports) == 7


@pytest.mark.proof
def test_html_is_one_self_contained_page(everything):
    folder, *_ = everything
    page = (folder / "truthfulqa.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert page.count("<table>") == 3


@pytest.mark.proof
def test_the_summary_covers_every_claim(everything):
    folder, *_ = everything
    text = (folder / "summary.md").read_text()
    for claim in CLAIMS:
        assert claim.text in text
    assert "61 % of the cost" in text
    assert "1.37 times it" in text
    assert "| 2.77 times the cost | no |" in text
    assert text.count("not run") >= 4


def test_the_papers_tables_are_complete():
    assert {label: len(rows) for label, rows in TABLES.items()} == {
        "tab:truqa_main": 7, "tab:truqa_appendix_300": 7, "tab:truqa_appendix_500": 7, "tab:truqa_guardian_scores": 7,
        "tab:truqa_appendix_d": 7, "tab:truqa_model_ablation": 4, "tab:mmlu_restricted": 7, "tab:pku_main": 8,
    }  # fmt: skip


def test_the_command_runs_one_experiment_and_rejects_unsupported_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    good = run(cli, ["reproduce", "truthfulqa-mini", "--json"])
    assert good.exit_code == 0
    assert list(json.loads(good.stdout)["reports"]) == ["truthfulqa-mini"]
    assert Path("reproduction/truthfulqa-mini.svg").exists()
    bad = run(cli, ["reproduce", "pku"])
    assert (bad.exit_code, bad.stderr.count("--log FILE")) == (2, 1)
    assert "there is no experiment 'nope'" in run(cli, ["reproduce", "nope"]).stderr
    assert "or neither" in run(cli, ["reproduce", "theory", "--primary-cost", "1"]).stderr


def test_the_truthfulqa_protocol_on_the_real_router_log(shared, tmp_path):
    source = log_source(shared / "truthfulqa-gpt35-gpt4turbo.parquet", costs=(1.0, 20.0))
    reports, _ = reproduce("truthfulqa", source, out=tmp_path)
    report = reports["truthfulqa"]
    assert "not binarised" in report.configuration["loss"]
    frontier = report.figure.frontier
    assert frontier.of("primary")[0].mean("correct") == pytest.approx(0.56, abs=0.01)
    assert frontier.of("guardian")[0].mean("correct") == pytest.approx(0.85, abs=0.01)
    rows = next(t for t in report.to_dict()["tables"] if t["name"] == "rules")["rows"]
    exact = [row for row in rows if row["rule"] == "exact"]
    assert [row["alpha"] for row in exact] == [0.25, 0.2, 0.15, 0.1, 0.05]
    for row in exact:
        assert row["delta"]["mean"] > 0.02
        assert row["loss"]["mean"] <= row["alpha"] + 3 * row["loss"]["std"] / 30**0.5
    grid = [row for row in rows if row["rule"] == "the paper's rule"]
    assert grid[-1]["Guardian share"]["mean"] > 0.95  # at .05 the grid has no point between 0.99 and 1


def test_own_loss_beats_random_routing_where_the_papers_rule_does_not(shared, tmp_path):
    source = log_source(shared / "mmlu-llama13b-gpt4.parquet", costs=(1.0, 20.0))
    reports, _ = reproduce("mmlu", source, out=tmp_path)
    rows = next(t for t in reports["mmlu"].to_dict()["tables"] if t["name"] == "rules")["rows"]
    delta = {row["rule"]: row["delta"]["mean"] for row in rows if row["alpha"] == 0.15}
    assert delta["the paper's rule"] < 0
    assert delta["own loss"] > 0


def test_pku_supports_a_real_valued_safety_guardian(shared, tmp_path):
    reports, _ = reproduce("pku", log_source(shared / "korean-helpful-safe.parquet"), out=tmp_path)
    for point in reports["pku"].figure.frontier.of("conformal"):
        assert point.mean("loss") <= point.alpha + 0.02


def test_an_experiment_uses_the_public_api_only(science):
    """Check that the main table is one call of evaluate."""
    log = ScoreLog.read(bundled_source().read(None).source, primary="smollm2", guardian="expert").binarized()
    frontier = evaluate(
        log,
        [0.25, 0.2, 0.15, 0.1, 0.05],
        calibration_size=400,
        guardian_sees="candidates",
        grid=0.01,
        primary_cost=0.0002,
        guardian_cost=0.5,
    )
    report = EXPERIMENTS["truthfulqa"].run(bundled_source(), 0)
    assert report.figure.frontier.to_dict() == frontier.to_dict()


@pytest.mark.proof
def test_all_skips_experiments_that_a_log_does_not_support(shared, tmp_path):
    reports, skipped = reproduce("all", log_source(shared / "korean-helpful-safe.parquet"), out=tmp_path)
    assert set(reports) == {"pku", "theory"}
    assert "right answers" in skipped["truthfulqa-raw"]
    assert (tmp_path / "summary.md").exists()
