"""`check --repeats`: how much a Primary's lead differs between answers to one question, and what is advised."""

import asyncio
import json
import math

import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import cli
from conformal_arbitrage.live.check import check_models
from conformal_arbitrage.live.config import read_config
from tests.scripted import Upstream, completion


def decides(*tops):
    """A decision model whose probabilities have two decimals, and change from call to call."""

    def reply(path, body, number):
        values = [choice["value"] for choice in body["questions"][0]["choices"]]
        top = tops[number % len(tops)]
        shares = [top, round(1 - top, 2), *[0.0] * (len(values) - 2)]
        listed = [{"value": v, "probability": p} for v, p in zip(values, shares, strict=True)]
        usage = {"input_tokens": 10, "output_tokens": 5}
        return {"model": "m", "answers": [{"type": "choice", "probabilities": listed}], "usage": usage}

    return reply


def says(*confidences):
    def reply(path, body, number):
        sure = confidences[number % len(confidences)]
        return completion("red", logprobs={"content": [{"token": "red", "logprob": math.log(sure)}]} if sure else None)

    return reply


def checked(tmp_path, reply, *, kind="decisions", form="menu", repeats=5, more=""):
    """Check a configuration whose two models are one endpoint on loopback."""

    async def work():
        async with Upstream(reply) as upstream:
            section = f'kind = "{kind}"\nurl = "{upstream.url}"\nmodel = "m"\nprice_per_call = 0.01\nattempts = 1\n'
            text = f'[task]\nform = "{form}"\n[primary]\n{section}{more}[guardian]\n{section}'
            (tmp_path / "arbitrage.toml").write_text(text)
            results = await check_models(read_config(tmp_path / "arbitrage.toml"), repeats=repeats)
            return results, len(upstream.bodies)

    return asyncio.run(work())


def test_two_decimals_that_differ_by_a_few_points_are_measured(tmp_path):
    (primary, guardian), calls = checked(tmp_path, decides(0.8, 0.82, 0.79))
    assert primary.noise == pytest.approx(0.06)
    assert primary.decimals == 2
    assert any("--boundary random" in note for note in primary.notes)
    assert "never ask again until one is sure" in primary.notes[0]
    assert primary.spent.cost == pytest.approx(0.06)
    assert guardian.noise is None
    assert calls == 7


def test_without_repeats_nothing_more_is_asked(tmp_path):
    (primary, _), calls = checked(tmp_path, decides(0.8), repeats=0)
    assert (primary.noise, primary.decimals, primary.notes, calls) == (None, None, [], 2)


def test_a_steady_model_with_fine_scores_gets_no_advice(tmp_path):
    (primary, _), _ = checked(tmp_path, decides(0.81234567), repeats=3)
    assert primary.noise == 0
    assert primary.notes == ["asked 3 times, its lead differs by 0"]


def test_confidences_of_free_text_are_measured_too(tmp_path):
    more = 'confidence = "logprob"\n'
    (primary, _), _ = checked(tmp_path, says(0.9, 0.83, 0.91), kind="chat", form="text", more=more)
    assert primary.noise == pytest.approx(0.08, abs=1e-6)
    assert primary.problem is None


def test_an_answer_without_a_confidence_is_a_problem(tmp_path):
    more = 'confidence = "logprob"\n'
    (primary, _), _ = checked(tmp_path, says(0.9, 0.9, 0.9, None), kind="chat", form="text", more=more)
    assert "no confidence came with a repeated answer" in primary.problem


async def test_the_command_prints_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    async with Upstream(decides(0.8, 0.9)) as upstream:
        section = f'kind = "decisions"\nurl = "{upstream.url}"\nmodel = "m"\nprice_per_call = 0.01\n'
        (tmp_path / "arbitrage.toml").write_text(f"[primary]\n{section}[guardian]\n{section}")
        command = ["check", "--repeats", "4", "--json"]
        seen.append(await asyncio.to_thread(CliRunner().invoke, cli, command))
    assert seen[0].exit_code == 0, seen[0].output
    models = {one["role"]: one for one in json.loads(seen[0].output)["models"]}
    assert models["primary"]["noise"] == pytest.approx(0.2)
    assert models["guardian"]["noise"] is None
