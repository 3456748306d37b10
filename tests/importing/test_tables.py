"""Tables of win rates and of wide columns, and the command line of all formats."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage import BatchColumns, OptionError, ScoreLog, ScoreLogError, calibrate
from conformal_arbitrage.calibration.batch import open_items, read_items
from conformal_arbitrage.cli import cli
from conformal_arbitrage.importing import read_routellm, read_wide
from conformal_arbitrage.importing.quickstart import label_columns
from tests.importing.files import batch_line, completion, inspect_sample, sample, write_eval, write_lines


@pytest.fixture
def routed(tmp_path):
    path = tmp_path / "mmlu.csv"
    path.write_text(
        "prompt,mixtral,gpt4,strong_win_rates,domain\nQ1,True,True,0.2\nQ2,False,True,0.9,x\n".replace(
            "0.2\n", "0.2,y\n"
        )
    )
    return path


def test_win_rates_become_confidences_in_the_weak_model(routed):
    imported = read_routellm(routed, weak="mixtral", strong="gpt4")
    assert imported.log.primary[1::2].tolist() == pytest.approx([0.8, 0.1])
    assert imported.log.outcome("correct").tolist() == [1, 1, 1, 0]
    assert imported.log.context.tolist() == ["Q1", "Q2"]
    assert imported.unused.to_list() == [{"reason": "columns", "count": 1, "examples": ["domain"]}]


def test_the_threshold_for_routellm_routes_as_the_certificate_does(tmp_path):
    rng = np.random.default_rng(5)
    rates = np.round(rng.random(400), 4)
    weak = rng.random(400) > 0.8 * rates
    path = tmp_path / "runs.csv"
    path.write_text("mf,weak,strong\n" + "".join(f"{r},{int(w)},1\n" for r, w in zip(rates, weak, strict=True)))
    log = read_routellm(path, weak="weak", strong="strong").log
    certificate = calibrate(log, 0.1)
    threshold = (
        np.floor((1 - certificate.relaxation) * 1e9) / 1e9
    )  # rounded down: the strong model is asked more, not less
    asks_strong = rates >= threshold  # RouteLLM's rule
    assert 0.1 < asks_strong.mean() < 0.95
    assert asks_strong.tolist() == certificate.apply(log).deferred.tolist()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"weak": "nobody"}, "there is no column 'nobody'"),
        ({"win_rate": "domain"}, "is not a number"),
        ({"win_rate": "bad"}, "a win rate is from 0 to 1, not 3"),
    ],
)
def test_tables_without_win_rates_are_refused(tmp_path, options, problem):
    path = tmp_path / "runs.csv"
    path.write_text("mixtral,gpt4,strong_win_rates,domain,bad\n1,1,0.2,y,3\n")
    with pytest.raises(ScoreLogError, match=problem):
        read_routellm(path, **{"weak": "mixtral", "strong": "gpt4"} | options)
    path.write_text("mixtral,gpt4\n1,1\n")
    with pytest.raises(ScoreLogError, match="--win-rate"):
        read_routellm(path, weak="mixtral", strong="gpt4")


def test_wide_columns_become_menus(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text("id,p_yes,p_no,g_yes,g_no,label,note\na,0.7,0.3,1,0,0,x\nb,,0.5,0,1,1,y\n")
    with pytest.raises(ScoreLogError, match=r"no column 'p_maybe'.*with --primary and --guardian"):
        read_wide(path, primary=["p_yes", "p_maybe"], guardian=["g_yes", "g_no"])
    imported = read_wide(path, primary=["p_yes", "p_no"], guardian=["g_yes", "g_no"])
    assert imported.log.actions.tolist() == ["yes", "no"] * 2
    assert imported.log.no_opinion.tolist() == [False, True]
    assert imported.unused.counts == {"columns (kept as they are)": 1}
    assert imported.notes[0].startswith("1 row has no scores of the Primary")


def invoke(*arguments):
    return CliRunner().invoke(cli, [str(one) for one in arguments], standalone_mode=False)


def commands(folder, routed):
    """One command for each format that needs nothing else."""
    (folder / "wide.csv").write_text("p_yes,p_no,g_yes,g_no\n0.7,0.3,1,0\n")
    (folder / "expected.csv").write_text("id,expected\na,4\n")
    (folder / "graders.py").write_text("def length(request, answer, expected):\n    return len(answer) == 1\n")
    lm = [
        write_lines(folder / name / "samples_colors.jsonl", [sample(0, [-1, -2, -3], 0)]) for name in ("small", "large")
    ]
    logs = [write_eval(folder / f"{name}.eval", [inspect_sample(1, "4", "C", 0.9)]) for name in ("s", "l")]
    batches = [write_lines(folder / f"{name}.jsonl", [batch_line("a", "4", 0.9, model=name)]) for name in ("s", "l")]
    reply, asked = completion("4", 0.9), [{"role": "user", "content": "Q"}]
    traffic = [
        {"call_type": "completion", "type": "GENERATION", "model": name, "messages": asked, "input": asked,
         "response": reply, "output": reply} for name in ("small", "large")
    ]  # fmt: skip
    calls = write_lines(folder / "calls.jsonl", traffic)
    pair = ["--primary", "small", "--guardian", "large", "--grade", "python:graders:length"]
    return {
        "lm-eval": lm,
        "inspect": logs,
        "openai-batch": [*batches, "--grade", "exact", "--expected", folder / "expected.csv"],
        "litellm": [calls, *pair],
        "langfuse": [calls, *pair],
        "routellm": [routed, "--weak", "mixtral", "--strong", "gpt4"],
        "table": [folder / "wide.csv", "--primary", "p_yes, p_no", "--guardian", "g_yes,g_no"],
    }


@pytest.mark.parametrize("name", ["lm-eval", "inspect", "openai-batch", "litellm", "langfuse", "routellm", "table"])
def test_every_format_has_a_command_that_writes_a_log(tmp_path, monkeypatch, routed, name):
    monkeypatch.chdir(tmp_path)
    arguments = ["import", name, *commands(tmp_path, routed)[name], "-o", tmp_path / "log.parquet"]
    shown = invoke(*arguments, "--json")
    assert shown.exception is None, shown.output
    document = json.loads(shown.output)
    assert document["format"] == name
    assert document["rows"] == len(ScoreLog.read(tmp_path / "log.parquet"))
    assert set(document) >= {"primary", "guardian", "unused", "notes", "missing_guardian_rows", "no_opinion_rows"}
    text = invoke(*arguments).output
    assert text.startswith("Written: ")
    assert text.endswith("log.parquet\n")


def items_in(log):
    """The answers, risks and columns of an imported log as a table of items, and the column with the truth."""
    with open_items(log) as table:
        truth = label_columns(table)["truth"]
        items = read_items(table, BatchColumns(id="id" if "id" in table.types else None))
        assert not {"primary", "guardian", "guardian_answer"} & table.types.keys()
        return table.texts("answer").tolist(), items, None if truth is None else table.texts(truth).tolist()


@pytest.mark.parametrize(
    ("name", "answer", "truth"),
    [
        ("lm-eval", "red", ["red"]),
        ("inspect", "4", None),
        ("openai-batch", "4", None),
        ("litellm", "4", None),
        ("langfuse", "4", None),
        ("table", "yes", None),
    ],
)
def test_the_primary_of_an_imported_log_is_the_machine_of_a_batch(tmp_path, monkeypatch, routed, name, answer, truth):
    monkeypatch.chdir(tmp_path)
    shown = invoke("import", name, *commands(tmp_path, routed)[name], "-o", "log.parquet")
    assert shown.exception is None, shown.output
    answers, items, known = items_in("log.parquet")
    assert (answers, known) == ([answer], truth)
    assert items.labelled.all()
    assert 0 < items.risk[0] < 0.4


@pytest.mark.parametrize(
    ("name", "left_out", "answer", "truth"),
    [
        ("lm-eval", [1], "red", ["red"]),
        ("inspect", [1], "4", ["4"]),
        ("openai-batch", [1, 2, 3], "4", ["4"]),
        ("litellm", [3, 4, 5, 6], "4", None),
        ("langfuse", [3, 4, 5, 6], "4", None),
    ],
)
def test_the_answers_of_one_model_are_the_items_of_a_batch(
    tmp_path, monkeypatch, routed, name, left_out, answer, truth
):
    monkeypatch.chdir(tmp_path)
    arguments = [each for k, each in enumerate(commands(tmp_path, routed)[name]) if k not in left_out]
    shown = invoke("import", name, *arguments, "-o", "log.parquet")
    assert shown.exception is None, shown.output
    assert "Next: arbitrage batch plan log.parquet" in shown.output
    answers, items, known = items_in("log.parquet")
    assert (answers, known) == ([answer], truth)
    assert 0 < items.risk[0] < 0.4
    with pytest.raises(ScoreLogError, match="Guardian"):
        calibrate(ScoreLog.read("log.parquet"), 0.1)


def test_two_models_without_grades_are_refused(tmp_path, monkeypatch, routed):
    monkeypatch.chdir(tmp_path)
    small, large, *_ = commands(tmp_path, routed)["openai-batch"]
    with pytest.raises(OptionError, match=r"\(--grade\)"):
        raise invoke("import", "openai-batch", small, large, "-o", "log.parquet").exception


def test_what_was_not_used_is_printed(tmp_path, routed):
    text = invoke(
        "import", "routellm", routed, "--weak", "mixtral", "--strong", "gpt4", "-o", tmp_path / "l.csv"
    ).output
    assert "not used: 1 columns, such as domain" in text
    assert "note: RouteLLM's threshold is 1 - relaxation" in text


def test_an_error_writes_nothing(tmp_path):
    done = CliRunner().invoke(cli, ["import", "lm-eval", "none", "none", "-o", str(tmp_path / "log.parquet")])
    assert done.exit_code == 2
    assert done.output.startswith("arbitrage: none: there is no such file or folder")
    assert not (tmp_path / "log.parquet").exists()
