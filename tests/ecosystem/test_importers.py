"""Files that the packages of today write, made here by the packages themselves, become logs and certificates.

The packages have environments of their own, which `make test-ecosystem` installs.
"""

import asyncio
import json
import math
import subprocess
from pathlib import Path

import pytest

from conformal_arbitrage import calibrate
from conformal_arbitrage.importing import (
    read_inspect,
    read_langfuse,
    read_litellm,
    read_lm_eval,
    read_routellm,
    router_setting,
)

pytestmark = pytest.mark.proof
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COUNT = 60


def make(script, folder, environment, count=COUNT, *more):
    """Run a script that makes files in the environment of its package."""
    python = ROOT / environment / "bin" / "python"
    if not python.with_name("python").exists():
        pytest.skip(f"there is no {environment}; make test-ecosystem or make test-routellm installs it")
    command = [python, HERE / script, folder, str(count), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm-eval")
    make("make_lm_eval.py", folder, ".venv-evaluations")
    return folder


def test_options_of_lm_eval_reproduce_its_own_accuracy(lm_eval):
    imported = asyncio.run(read_lm_eval(lm_eval / "small", lm_eval / "large", tasks=["colors"]))
    log = imported.log
    assert len(log) == COUNT
    assert not any("verdicts" in note for note in imported.notes)
    for name, scores in (("small", log.primary), ("large", log.guardian)):
        right = log.outcome("correct").reshape(COUNT, 4)[range(COUNT), scores.reshape(COUNT, 4).argmax(axis=1)]
        results = json.loads((lm_eval / f"{name}.json").read_text())["colors"]
        assert right.mean() == pytest.approx(results["acc,none"])
    assert calibrate(log.binarized(), 0.1).n == COUNT


def test_normalized_options_of_lm_eval_reproduce_its_acc_norm(lm_eval):
    imported = asyncio.run(read_lm_eval(lm_eval / "small", lm_eval / "large", tasks=["colors"], length_normalized=True))
    scores = imported.log.primary.reshape(COUNT, 4)
    right = imported.log.outcome("correct").reshape(COUNT, 4)[range(COUNT), scores.argmax(axis=1)]
    assert right.mean() == pytest.approx(json.loads((lm_eval / "small.json").read_text())["colors"]["acc_norm,none"])
    assert not any("verdicts" in note for note in imported.notes)


def test_generations_of_lm_eval_have_grades_and_agreement(lm_eval):
    log = asyncio.run(read_lm_eval(lm_eval / "small", lm_eval / "large", tasks=["sums"])).log
    results = json.loads((lm_eval / "small.json").read_text())["sums"]["exact_match,none"]
    assert log.outcome("correct")[1::2].mean() == pytest.approx(results)
    assert set(log.primary[1::2].tolist()) <= {0.25, 0.5, 0.75, 1.0}
    assert len(set(log.primary[1::2].tolist())) > 1
    graded = asyncio.run(read_lm_eval(lm_eval / "small", lm_eval / "large", tasks=["sums"], grade="exact")).log
    assert graded.outcome("correct").tolist() == log.outcome("correct").tolist()


def test_logs_of_inspect_are_read_with_their_logprobs(tmp_path):
    make("make_inspect.py", tmp_path, ".venv-evaluations")
    [small], [large] = ([*(tmp_path / name).glob("*.eval")] for name in ("small", "large"))
    imported = asyncio.run(read_inspect(small, large, group="metadata.parity"))
    log = imported.log
    assert imported.models == ("mockllm/small", "mockllm/large")
    assert len(log) == COUNT
    unsure = log.primary[1::2] < 0.6
    assert (log.outcome("correct")[1::2] == 0).tolist() == unsure.tolist()
    assert 0 < unsure.mean() < 0.5
    assert set(log.group.tolist()) == {"0", "1"}
    assert log.context[0].endswith("What is twice 1")
    assert list(imported.unused.counts.values()) == [COUNT]
    decisions = calibrate(log, 0.05).apply(log)
    assert decisions.deferred.mean() == unsure.mean()
    agreeing = asyncio.run(read_inspect(small, large, confidence="agreement")).log
    assert set(agreeing.primary[1::2].tolist()) == {1.0}


def test_pages_of_langfuse_are_graded_by_its_scores(tmp_path):
    make("make_langfuse.py", tmp_path, ".venv-evaluations", count=30)
    files = [tmp_path / "observations.json", tmp_path / "scores.json"]
    pair = {"primary": "small", "guardian": "large", "confidence": "metadata.confidence"}
    log = asyncio.run(read_langfuse(files, score="correctness", **pair)).log
    assert log.primary[1::2].tolist() == [0.9 if k % 3 else 0.4 for k in range(30)]
    assert log.outcome("correct")[1::2].tolist() == [float(k % 3 > 0) for k in range(30)]
    assert log.guardian_usage.cost.tolist() == [0.01] * 30


def test_payloads_of_litellm_are_joined_and_graded(tmp_path, monkeypatch):
    make("make_litellm.py", tmp_path, ".venv-frameworks", count=12)
    (tmp_path / "doubles.py").write_text(
        "def grade(request, answer, expected):\n"
        "    return int(answer) == 2 * int(request.messages[-1]['content'].split()[-1])\n"
    )
    monkeypatch.chdir(tmp_path)
    imported = asyncio.run(
        read_litellm([tmp_path / "calls.jsonl"], primary="small", guardian="large", grade="python:doubles:grade")
    )
    log = imported.log
    numbers = [int(text.split()[-1]) for text in log.context.tolist()]
    assert sorted(numbers) == list(range(12))
    assert log.no_opinion.tolist() == [number == 5 for number in numbers]
    right = {n: value for n, value in zip(numbers, log.outcome("correct")[1::2].tolist(), strict=True) if n != 5}
    assert right == {n: float(n % 3 > 0) for n in range(12) if n != 5}
    assert {n: round(s, 2) for n, s in zip(numbers, log.primary[1::2].tolist(), strict=True) if n != 5} == {
        n: 0.95 if n % 3 else 0.5 for n in range(12) if n != 5
    }


def test_litellm_s_router_routes_200_of_200_prompts_as_the_certificate_says(tmp_path, monkeypatch):
    make("make_litellm_forecasts.py", tmp_path, ".venv-frameworks", 200)
    (tmp_path / "doubles.py").write_text("def grade(request, answer, expected):\n    return answer == 'right'\n")
    monkeypatch.chdir(tmp_path)
    models = {"primary": "small", "guardian": "large", "grade": "python:doubles:grade"}
    log = asyncio.run(read_litellm([tmp_path / "calls.jsonl"], confidence="forecast", **models)).log
    assert len(log) == 200
    certificate = calibrate(log, 0.02, boundary="include")
    document = router_setting(certificate).document["complexity_router_config"]
    make("make_litellm_forecasts.py", tmp_path, ".venv-frameworks", 200, json.dumps(document))
    numbers = [int(text.removeprefix("This is question ").rstrip("?")) for text in log.context.tolist()]
    routed = json.loads((tmp_path / "routed.json").read_text())
    deferred = certificate.apply(log).deferred.tolist()
    assert [routed[number] == "large" for number in numbers] == deferred
    assert 20 < sum(deferred) < 180


def test_win_rates_of_routellm_are_certified_and_it_routes_as_the_certificate_does(tmp_path):
    make("make_routellm.py", tmp_path, ".venv-routellm")
    table, pair = tmp_path / "mmlu.csv", {"weak": "mixtral-8x7b-instruct-v0.1", "strong": "gpt-4-1106-preview"}
    log = read_routellm(table, **pair).log
    assert len(log) == COUNT
    certificate = calibrate(log, 0.1)
    threshold = math.floor((1 - certificate.relaxation) * 1e9) / 1e9  # rounded down, as docs/importing.md says
    make("make_routellm.py", tmp_path, ".venv-routellm", COUNT, repr(threshold))
    deferred = certificate.apply(log).deferred
    assert json.loads((tmp_path / "strong.json").read_text()) == deferred.tolist()
    assert 0 < deferred.mean() < 1
