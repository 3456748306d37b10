"""Settings of requests: a rule keeps its quota where a setting makes the Primary surer than it should be.

Reading rows, collecting, calibrating, reading requests and deciding are the product's own; only the models are simulated.
Half of the requests have `stop`, which cuts the Primary's answer short: the mean token probability of what is left is
higher, and it is right no more often. The planted bug is the former behaviour: `stop` is passed on when serving, and not
when collecting, under one identity.
"""

import asyncio
import hashlib
import json
import math

import numpy as np
import pytest

from conformal_arbitrage import ConformalRouter, calibrate
from conformal_arbitrage.collecting import questions
from conformal_arbitrage.collecting.collect import collect_requests
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.gateway.chat import read_completion
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.live.graders import Comparison
from conformal_arbitrage.models.chat import ChatAnswerer
from conformal_arbitrage.models.completions import Settings
from conformal_arbitrage.models.port import Reply, WholePort
from conformal_arbitrage.types import ChatRequest
from tests.scripted import completion
from tests.validity.simulation import keeps

pytestmark = pytest.mark.proof
N, ALPHA, TIMES, QUERIES = 60, 0.15, 40, 60
LIMITS = GatewayConfig()


def draws(name):
    """Return three uniform numbers that belong to a question."""
    digest = hashlib.sha256(name.encode()).digest()
    return [int.from_bytes(digest[k : k + 8], "big") / 2**64 for k in (0, 8, 16)]


class Model(WholePort):
    """A model that is right as often as it is sure, and surer than that where `stop` cuts its answer short."""

    origin = "simulated"

    async def call(self, call):
        sure, coin, _ = draws(call.body["messages"][0]["content"])
        confidence = sure**0.1 if "stop" in call.body else sure
        text = "right" if coin < sure else "wrong"
        return Reply(document=completion(text, logprobs={"content": [{"token": "t", "logprob": math.log(confidence)}]}))


class Guardian(WholePort):
    """A model that is always right."""

    origin = "simulated too"

    async def call(self, call):
        return Reply(document=completion("right"))


def request(name):
    """Return a question of the application, half of which have `stop`."""
    stop = {"stop": ["END"]} if draws(name)[2] < 0.5 else {}
    return {"messages": [{"role": "user", "content": name}], **stop}


def rows(path, k, *, stops):
    """Return the rows of a file with the application's requests, as collect reads it."""
    requests = [request(f"row {k} {j}") for j in range(N)]
    listed = [
        {**one, "id": f"{j}", "expected": "right"} for j, one in enumerate(requests) if stops or "stop" not in one
    ]
    path.write_text("\n".join(map(json.dumps, listed)))
    return questions.read_requests(path)


async def losses(path, rule, *, stops=True):
    """Return the mean loss of the decisions that claim a guarantee, its standard error, and the share that claims it."""
    settings = Settings(model="m")
    primary = ChatAnswerer(port=Model(), settings=settings, confidence="logprob", request_settings=rule)
    guardian = ChatAnswerer(port=Guardian(), settings=settings, request_settings=rule)
    means, claims = [], []
    for k in range(TIMES):
        log = await collect_requests(rows(path, k, stops=stops), primary, guardian, Comparison("exact"), concurrency=8)
        policy = ConformalRouter(primary=primary, guardian=guardian, certificate=calibrate(log, ALPHA))
        decisions = []
        for j in range(QUERIES):
            body = json.dumps({"model": "m", **request(f"live {k} {j}")}).encode()
            decisions.append(await policy.decide(ChatRequest(read_completion(body, LIMITS).body)))
        claimed = [one for one in decisions if one.no_guarantee is None]
        claims.append(len(claimed) / QUERIES)
        means.append(np.mean([one.answer["content"] == "wrong" for one in claimed]))
    return (float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)), float(np.mean(claims))


def test_settings_as_requested_are_a_part_of_the_question_and_the_quota_is_kept(tmp_path):
    measured, claimed = asyncio.run(losses(tmp_path / "rows.jsonl", "as requested"))
    assert claimed == 1.0
    assert keeps(ALPHA, measured), measured


def test_pinned_settings_keep_the_quota_of_what_they_cover_and_claim_nothing_else(tmp_path):
    measured, claimed = asyncio.run(losses(tmp_path / "rows.jsonl", "pinned", stops=False))
    assert 0.4 < claimed < 0.6
    assert keeps(ALPHA, measured), measured
    with pytest.raises(OptionError, match="stop is"):
        asyncio.run(losses(tmp_path / "rows.jsonl", "pinned"))


def test_a_setting_that_was_not_collected_is_served_without_a_guarantee(tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "_BODY", questions.QUESTION)
    measured, claimed = asyncio.run(losses(tmp_path / "rows.jsonl", "as requested"))
    assert 0.4 < claimed < 0.6
    assert keeps(ALPHA, measured), measured


def test_claiming_a_guarantee_for_a_setting_that_was_not_collected_breaks_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "_BODY", questions.QUESTION)
    monkeypatch.setattr("conformal_arbitrage.models.completions.unlogged_fields", lambda body, certified: [])
    measured, claimed = asyncio.run(losses(tmp_path / "rows.jsonl", "as requested"))
    assert claimed == 1.0
    assert not keeps(ALPHA, measured), measured


def test_a_pinned_rule_that_lets_settings_pass_breaks_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.models.completions.overridden", lambda body, identities: {})
    measured, claimed = asyncio.run(losses(tmp_path / "rows.jsonl", "pinned", stops=False))
    assert claimed == 1.0
    assert not keeps(ALPHA, measured), measured
