"""quickstart, and the path in README.md from a clone to a certificate on a table of its own."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage import Certificate, OptionError, ProjectSecret, ScoreLog, ScoreLogError
from conformal_arbitrage.cli import cli
from conformal_arbitrage.importing.quickstart import quick_start
from conformal_arbitrage.live.config import read_config
from tests.cascades import world
from tests.importing.files import batch_line, inspect_sample, sample, write_eval, write_lines

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, **more):
    done = CliRunner().invoke(cli, list(map(str, arguments)), **more)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def router_table(path, rows=300, seed=1):
    rng = np.random.default_rng(seed)
    sure = np.round(rng.random(rows), 3)
    small = rng.random(rows) < 0.4 + 0.6 * sure
    lines = zip(sure, small, strict=True)
    path.write_text(
        "id,confidence,small_ok,big_ok\n" + "".join(f"q{k},{s},{int(w)},1\n" for k, (s, w) in enumerate(lines))
    )


def wide_table(path, rows=300):
    rng = np.random.default_rng(2)
    p = np.round(rng.random(rows), 3)
    right = rng.random(rows) < p
    lines = zip(p, right, strict=True)
    path.write_text(
        "id,p_yes,p_no,g_yes,g_no\n"
        + "".join(f"q{k},{s},{1 - s:.3f},{int(w)},{int(not w)}\n" for k, (s, w) in enumerate(lines))
    )


def list_table(path, rows=300):
    rng = np.random.default_rng(3)
    with path.open("w") as stream:
        for k in range(rows):
            p = round(float(rng.random()), 3)
            right = int(rng.random() < p)
            stream.write(json.dumps({"id": f"q{k}", "primary": [p, 1 - p], "guardian": [right, 1 - right]}) + "\n")


@pytest.mark.parametrize(("name", "write"), [("a.csv", router_table), ("b.csv", wide_table), ("c.jsonl", list_table)])
def test_the_three_commands_for_a_table_lead_to_a_certificate(name, write):
    write(Path(name))
    start = json.loads(run("quickstart", "--yes", name, "--json"))
    assert len(start["commands"]) == 3
    for command in start["commands"]:
        run(*command.split()[1:])
    certificate = Certificate.load("certificate.json")
    assert certificate.alpha == 0.05
    assert certificate.signed
    assert not Path("arbitrage.toml").exists(), "a table has no models to ask"
    assert json.loads(run("quickstart", "--yes", name, "--json")) == start, "it works a second time"


def test_three_questions_are_asked_and_the_answers_are_used():
    router_table(Path("runs.csv"))
    shown = run("quickstart", input="csv\nruns.csv\n10%\n")
    assert "What do you have?" in shown
    assert "Found: a confidence (confidence), and grades of the Primary (small_ok) and the Guardian" in shown
    assert (
        "arbitrage router-log runs.csv --confidence confidence --primary-grade small_ok --guardian-grade big_ok"
        in shown
    )
    assert "arbitrage recommend log.parquet --alpha 0.1 -o route.toml" in shown


def test_the_end_of_the_input_is_told_from_an_interruption():
    done = CliRunner().invoke(cli, ["quickstart"], input="csv\n")
    assert (done.exit_code, done.stderr) == (
        2, "arbitrage: the input ended before the answer; where nobody can answer, say it with options (--yes)\n"
    )  # fmt: skip


def test_endpoints_start_from_their_questions():
    Path("q.jsonl").write_text('{"question": "2+2?", "choices": ["3", "4"], "answer": "B"}\n')
    start = json.loads(run("quickstart", "--yes", "--have", "endpoints", "q.jsonl", "--json"))
    assert start["commands"] == [
        "arbitrage check",
        "arbitrage collect q.jsonl -o log.parquet",
        "arbitrage recommend log.parquet -o route.toml",
    ]
    assert read_config().task.form == "menu"
    Path("t.csv").write_text("question,answer\n2+2?,4\n")
    start = json.loads(
        run("quickstart", "--yes", "--force", "--have", "endpoints", "t.csv", "--alpha", "0.1", "--json")
    )
    assert start["commands"][1] == "arbitrage collect t.csv -o log.parquet --grade exact --question-column question"
    assert (read_config().task.form, read_config().alpha) == ("text", 0.1)
    shown = run("quickstart", "--force", input="endpoints\n-\n\n")
    assert "arbitrage collect questions.csv" in shown
    assert "Name your models there (url, model), and export each key_env (OPENAI_API_KEY)." in shown


@pytest.mark.parametrize(
    ("header", "row", "options", "held"),
    [
        ("question,A,B,C,answer", "Most?,7,950,30,B", " --choice-columns A,B,C", "with options (A, B, C)"),
        ("prompt,option_b,option_a,answer", "Most?,9,7,B",
         " --choice-columns option_a,option_b --question-column prompt", "with options (option_a, option_b)"),
        ("question,choice1,choice2,label", "Most?,9,7,1", " --choice-columns choice1,choice2", "with options"),
        ("question,A,B,answer", "Most?,yes,no,yes", " --grade exact --question-column question", "in free text"),
        ("prompt,expected", "2+2?,4", " --grade exact --question-column prompt", "in free text"),
        ("query,options,answer", 'Most?,"[""7"",""9""]",B', " --choices-column options --question-column query", "options"),
    ],
)  # fmt: skip
def test_columns_of_questions_and_options_are_found(header, row, options, held):
    Path("q.csv").write_text(f"{header}\n{row}\n")
    start = quick_start("endpoints", ["q.csv"])
    assert start.commands[1] == f"arbitrage collect q.csv -o log.parquet{options}"
    assert held in start.summary
    assert "1 row is too few for alpha 0.05: collect 19 or more first" in start.summary
    assert ('form = "menu"' in start.configuration) == ("--grade" not in options)


@pytest.mark.parametrize("choices", ["Paris|Rome", '"0, 1, 2"'])
def test_choices_that_are_no_json_list_are_refused_before_anything_is_asked(choices):
    Path("q.csv").write_text(f"question,choices,answer\nWhere?,{choices},A\n")
    for command in (["quickstart", "--yes", "--have", "endpoints", "q.csv"], ["collect", "q.csv", "-o", "log.parquet"]):
        done = CliRunner().invoke(cli, command)
        if command[0] == "collect":
            run("init", "--form", "menu")
            done = CliRunner().invoke(cli, command)
        assert done.exit_code == 2
        assert 'write choices as a JSON list: ["Paris", "Rome"]' in done.stderr
        assert not Path("log.parquet").exists()


def test_questions_without_a_column_of_them_are_refused():
    Path("q.csv").write_text("what,answer\n2+2?,4\n")
    with pytest.raises(OptionError, match="no column of questions among what, answer"):
        quick_start("endpoints", ["q.csv"])


def test_a_column_of_codes_is_offered_as_the_id():
    rows = "".join(f"T-{7 * k},{k},Why {k}?,0.{k},1,1\n" for k in range(9))
    Path("t.csv").write_text(f"ticket,row,question,confidence,small_ok,big_ok\n{rows}")
    assert "--guardian-grade big_ok --id ticket -o" in quick_start("csv", ["t.csv"]).commands[0]


def test_tables_that_the_commands_would_refuse_are_told_so():
    Path("t.csv").write_text("id,confidence,small_grade,big_grade\na,0.5,1,5\nb,0.6,3,4\n")
    with pytest.raises(
        OptionError, match=r"column 'small_grade' goes from 1 to 3, and grades lie in \[0, 1\]; rescale"
    ):
        quick_start("csv", ["t.csv"])
    Path("t.csv").write_text("id,haiku,gpt4\na,0,1\nb,1,1\n")
    with pytest.raises(
        OptionError, match=r"no confidence .* arbitrage swap t\.csv --old gpt4 --new haiku --alpha 0\.05"
    ):
        quick_start("csv", ["t.csv"])
    router_table(Path("few.csv"), rows=12)
    assert "; 12 rows are too few for alpha 0.05: collect 19 or more first" in quick_start("csv", ["few.csv"]).summary


@pytest.mark.parametrize("kind", ["lm-eval", "inspect", "openai-batch"])
def test_runs_of_evaluation_tools_are_told_apart(tmp_path, kind):
    runs = {
        "lm-eval": lambda name: write_lines(tmp_path / name / "samples_colors.jsonl", [sample(0, [-1, -2], 0)]).parent,
        "inspect": lambda name: write_eval(tmp_path / f"{name}.eval", [inspect_sample(1, "4", "C", 0.9)]),
        "openai-batch": lambda name: write_lines(tmp_path / f"{name}.jsonl", [batch_line("a", "4", 0.9)]),
    }
    files = [str(runs[kind](name)) for name in ("small", "large")]
    start = quick_start("eval", files)
    assert start.commands[0].startswith(f"arbitrage import {kind} {files[0]} {files[1]} ")
    shown = run("quickstart", "--have", "eval", input=" ".join(files) + "\n\n")
    assert f"Found: two runs of {kind}." in shown


def test_what_cannot_be_started_from_is_named(tmp_path):
    Path("x.csv").write_text("name,age\na,1\n")
    Path("items.csv").write_text("id,answer,confidence\na,cat,0.5\n")
    world(np.random.default_rng(0), 30).write("chain.csv")
    write_eval(tmp_path / "s.eval", [])
    write_lines(tmp_path / "s.jsonl", [batch_line("a", "4")])
    for have, files, problem in (
        ("csv", ["x.csv"], r"no scores of two models among its columns \(name, age\)"),
        ("csv", ["chain.csv"], "as for a cascade: arbitrage calibrate chain.csv --path --alpha 0.05"),
        ("csv", ["items.csv"], "arbitrage batch plan items.csv --error 5%"),
        ("csv", [], "name one table"),
        ("eval", ["x.csv"], "name two runs"),
        ("eval", ["x.csv", "x.csv"], "not a run of lm-eval"),
        ("eval", [str(tmp_path / "s.eval"), str(tmp_path / "s.jsonl")], "different tools"),
    ):
        with pytest.raises(OptionError, match=problem):
            quick_start(have, files)


def test_the_guardian_is_told_by_its_name():
    Path("w.csv").write_text("expert_yes,expert_no,model_yes,model_no\n1,0,0.7,0.3\n")
    assert "--primary model_yes,model_no --guardian expert_yes,expert_no" in quick_start("csv", ["w.csv"]).commands[0]
    Path("r.csv").write_text("confidence,strong_ok,weak_ok\n0.5,1,1\n")
    assert "--primary-grade weak_ok --guardian-grade strong_ok" in quick_start("csv", ["r.csv"]).commands[0]


@pytest.mark.parametrize(
    ("header", "row", "columns"),
    [
        ("question,mini_prob,mini_correct,gpt4_correct", "Why?,0.5,0,1", ("mini_prob", "mini_correct", "gpt4_correct")),
        ("gpt4_correct,mini_correct,mini_prob", "1,0,0.5", ("mini_prob", "mini_correct", "gpt4_correct")),
        ("confidence,small,large", "0.5,False,True", ("confidence", "small", "large")),
        ("confidence,weak_score,strong_score,cost", "50,0.3,1,0.01", ("confidence", "weak_score", "strong_score")),
        ("How sure,Large OK,Small OK", "0.5,1,1", ("How sure", "Small OK", "Large OK")),
        ("rating,a_right,b_right,text", "7,1,1,hello", ("rating", "a_right", "b_right")),
    ],
)
def test_a_confidence_and_grades_are_found_under_other_names(header, row, columns):
    Path("t.csv").write_text(f"{header}\n{row}\n")
    sure, ours, theirs = map(shlex.quote, columns)
    expected = f"--confidence {sure} --primary-grade {ours} --guardian-grade {theirs} -o"
    assert expected in quick_start("csv", ["t.csv"]).commands[0]


def test_columns_that_leave_a_doubt_are_not_guessed():
    for header, row in (("a,b,c", "0.1,0.2,0.3"), ("confidence,x,y,z", "0.5,1,1,1"), ("confidence,x,y", "0.5,3,4")):
        Path("t.csv").write_text(f"{header}\n{row}\n")
        with pytest.raises(OptionError, match="no scores of two models"):
            quick_start("csv", ["t.csv"])


def test_a_table_with_other_separators_is_named():
    Path("t.csv").write_text("id;confidence;small_ok;big_ok\na;0,5;1;1\n")
    with pytest.raises(ScoreLogError, match="separated by ';'; save it with commas between columns, and points"):
        quick_start("csv", ["t.csv"])


def test_a_configuration_of_another_name_is_named_in_the_commands():
    assert " --config own.toml" in quick_start("endpoints", [], config="own.toml").commands[0]


def test_a_configuration_that_is_there_stays():
    Path("arbitrage.toml").write_text("alpha = 0.2\n")
    done = CliRunner().invoke(cli, ["quickstart", "--yes", "--have", "endpoints"])
    assert done.exit_code == 2
    assert "--force" in done.output
    assert Path("arbitrage.toml").read_text() == "alpha = 0.2\n"


def some_answers(rows, seed=5):
    """Confidences from 0 to 1, and whether each model was right."""
    rng = np.random.default_rng(seed)
    sure = rng.random(rows).round(3)
    return sure, rng.random(rows) < 0.4 + 0.6 * sure, rng.random(rows) < 0.95


LEVEL = ("low", "medium", "high")
OWN_TABLES = {
    "plain": ("id,confidence,small_ok,expert_ok", lambda k, s, p, g: f"q{k},{s},{p},{g}"),
    "messy names": (
        "Question ID, Model A conf. (0-1),small model right?,Expert OK",
        lambda k, s, p, g: f"q{k},{s},{'yes' if p else 'no'},{'Yes' if g else 'No'}",
    ),
    "percentages": ("id,confidence,small_ok,expert_ok", lambda k, s, p, g: f"q{k},{100 * s:.1f} %,{p},{g}"),
    "words": ("id,confidence,small_ok,expert_ok", lambda k, s, p, g: f"q{k},{LEVEL[int(2.99 * s)]},{p},{g}"),
    "log-probabilities": (
        "id,logprob,small_ok,expert_ok", lambda k, s, p, g: f"q{k},{np.log(s + 1e-3) - 1e-3:.4f},{p},{g}",
    ),
    "missing confidences": (
        "id,confidence,small_ok,expert_ok", lambda k, s, p, g: f"q{k},{'' if k % 17 == 0 else s},{p},{g}",
    ),
    "missing grades": (
        "id,confidence,small_ok,expert_ok",
        lambda k, s, p, g: f"q{k},{s},{'' if k % 80 == 3 else p},{'' if k % 50 == 0 else g}",
    ),
    "no ids": ("confidence,small_ok,expert_ok", lambda k, s, p, g: f"{s},{p},{g}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OWN_TABLES)
def test_the_printed_commands_lead_from_a_table_of_ones_own_to_a_certificate_that_verifies(kind):
    header, line = OWN_TABLES[kind]
    rows = enumerate(zip(*some_answers(400), strict=True))
    Path("own.csv").write_text("\n".join([header, *(line(k, s, int(p), int(g)) for k, (s, p, g) in rows)]))
    shown = run("quickstart", "--yes", "own.csv")
    commands = [shlex.split(text) for text in shown.splitlines() if text.startswith("  arbitrage ")]
    assert [words[1] for words in commands] == ["router-log", "recommend", "certificate"]
    outputs = [run(*words[1:]) for words in commands]
    assert ("without a grade, which count as the largest loss: 13 of 400" in shown) == (kind == "missing grades")
    if kind in ("percentages", "words", "log-probabilities"):
        assert kind in shown
        assert f"holds {kind}; the log has" in outputs[0]
    log = ScoreLog.read("log.parquet")
    assert (log.id is None) == (kind == "no ids")
    assert len(log) == 400
    assert 0 < Certificate.load("certificate.json", secret=ProjectSecret.find()).apply(log).deferred.mean() < 1
    assert "holds" in run("verify", "certificate.json", "log.parquet")


@pytest.mark.parametrize("text", ["87 %", "very high", "-0.25"])
def test_one_confidence_that_is_something_else_is_named_with_its_row(text):
    Path("t.csv").write_text(f"id,confidence,small_ok,big_ok\na,0.5,1,1\nb,{text},1,1\n")
    columns = ("--confidence", "confidence", "--primary-grade", "small_ok", "--guardian-grade", "big_ok")
    done = CliRunner().invoke(cli, ["router-log", "t.csv", *columns, "-o", "log.parquet"])
    assert done.exit_code == 2
    assert "t.csv: row 2, column 'confidence'" in done.stderr
    assert not Path("log.parquet").exists()


def test_a_table_with_the_same_id_twice_is_refused_by_name():
    router_table(Path("runs.csv"))
    text = Path("runs.csv").read_text().splitlines()
    words = shlex.split(quick_start("csv", ["runs.csv"]).commands[0])[1:]
    Path("runs.csv").write_text("\n".join([*text, text[1]]))
    with pytest.raises(OptionError, match=r"runs\.csv: in column 'id', 1 row has the id of an earlier row"):
        quick_start("csv", ["runs.csv"])
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "row 301, column 'id': 'q0' is also the id of row 1; make ids unique" in done.stderr


@pytest.mark.proof
def test_the_path_in_the_readme_leads_from_a_clone_to_a_certificate(tmp_path):
    """The commands of the first screen, run from a copy of the sources, on a table of this test's own."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Five minutes") :]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1]
    commands = [line for line in block.splitlines() if line.startswith("arbitrage ")]
    assert commands[0].startswith("arbitrage quickstart --yes ")
    shutil.copytree(ROOT / "src", tmp_path / "clone" / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "work" / "demo").mkdir(parents=True)
    router_table(tmp_path / "work" / "demo" / "scores.csv", rows=500, seed=9)
    table = tmp_path / "work" / "demo" / "scores.csv"
    table.write_text(table.read_text().replace("big_ok", "expert_ok"))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'clone' / 'src'}{os.pathsep}{os.environ['PYTHONPATH']}"}
    shown = []
    for command in commands:
        words = [sys.executable, "-m", "conformal_arbitrage", *command.split()[1:]]
        done = subprocess.run(
            words, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, (command, done.stderr)
        shown.append(done.stdout)
    assert all(command in shown[0] for command in commands[1:]), "quickstart names other commands than the README"
    secret = ProjectSecret.find()
    certificate = Certificate.load(tmp_path / "work" / "certificate.json", secret=secret)
    log = ScoreLog.read(tmp_path / "work" / "log.parquet")
    assert certificate.n == len(log) == 500
    assert 0 < certificate.apply(log).deferred.mean() < 1


@pytest.mark.parametrize("header", ["id,small_confidence,small_correct,big_correct",
                                    "big_confidence,big_correct,small_confidence,small_correct"])  # fmt: skip
def test_the_confidence_may_carry_the_primarys_name(header):
    Path("c.csv").write_text(f"{header}\n{','.join('1' for _ in header.split(','))}\n")
    columns = "--confidence small_confidence --primary-grade small_correct --guardian-grade big_correct"
    assert columns in quick_start("csv", ["c.csv"]).commands[0]


def test_columns_of_other_names_can_be_named_by_hand():
    Path("c.csv").write_text("one,two,three\n0.4,1,1\n")
    with pytest.raises(OptionError, match=r"arbitrage router-log c\.csv --confidence COL --primary-grade COL"):
        quick_start("csv", ["c.csv"])
