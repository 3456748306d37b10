"""What is calibrated is what is served: a rule from collected rows keeps its quota on every route of the gateway.

Collecting, prompts and the readers of requests are the product's own; only the model is simulated. Its scores depend on the
prompt alone, as a model's do: where the question does not begin right after its heading, it is surer than it should be.
"""

import asyncio
import hashlib
import json

import numpy as np
import pytest

from conformal_arbitrage import ConformalArbitrage, Query, calibrate
from conformal_arbitrage.collecting.collect import collect_menus
from conformal_arbitrage.collecting.questions import Menus
from conformal_arbitrage.gateway.chat import query_of, read_completion, read_decisions
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.models import ChatScorer, FunctionScorer, Settings
from conformal_arbitrage.models.port import Reply, WholePort
from tests.scripted import scores
from tests.validity.simulation import keeps

pytestmark = pytest.mark.proof
N, ALPHA, TIMES, QUERIES = 30, 0.15, 40, 40
ACTIONS = ("yes", "no")
LIMITS = GatewayConfig()


def draws(name):
    """Return two uniform numbers that belong to a question."""
    digest = hashlib.sha256(name.encode()).digest()
    return [int.from_bytes(digest[k : k + 8], "big") / 2**64 for k in (0, 8)]


class Model(WholePort):
    """A model that leans to "yes", and is right more often the more it leans."""

    origin = "simulated"

    async def call(self, call):
        shown = call.body["messages"][-1]["content"].removeprefix("Question:\n")
        name = shown[shown.index("<") : shown.index(">") + 1]
        lead = draws(name)[0]
        lead = lead if shown.startswith("<") else lead**0.25
        return Reply(document=scores((1 + lead) / 2, (1 - lead) / 2))


def truth(query):
    """Return 1 for the right answer; "yes" is right with the probability that the Primary's lead suggests."""
    name = query.text[query.text.index("<") : query.text.index(">") + 1]
    lead, coin = draws(name)
    return [1.0, 0.0] if coin < (1 + lead) / 2 else [0.0, 1.0]


def by_chat(text):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "arbitrage": {"actions": ACTIONS}}
    chat = read_completion(json.dumps(body).encode(), LIMITS)
    return Query(chat.messages, chat.menu.actions, id=text)


def by_decisions(text):
    question = {"type": "choice", "choices": [{"value": action} for action in ACTIONS], "instructions": ""}
    request = read_decisions(json.dumps({"model": "m", "input": text, "questions": [question]}).encode(), LIMITS)
    return query_of(request, request.questions[0], text)


async def losses(route):
    primary = ChatScorer(port=Model(), settings=Settings(model="m"))
    guardian = FunctionScorer(truth, name="truth")
    means = []
    for k in range(TIMES):
        rows = Menus(queries=[Query(f"<row {k} {j}>", ACTIONS, id=f"{j}") for j in range(N)])
        log = await collect_menus(rows, primary, guardian, concurrency=8)
        policy = ConformalArbitrage(
            primary=primary, guardian=guardian, certificate=calibrate(log, ALPHA, guardian_sees="all")
        )
        queries = [route(f"<live {k} {j}>") for j in range(QUERIES)]
        decisions = [await policy.decide(query) for query in queries]
        assert all(decision.no_guarantee is None for decision in decisions)
        means.append(np.mean([1 - truth(q)[d.action] for q, d in zip(queries, decisions, strict=True)]))
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


@pytest.mark.parametrize("route", [by_chat, by_decisions])
def test_a_rule_from_collected_rows_keeps_its_quota_on_every_route(route):
    measured = asyncio.run(losses(route))
    assert keeps(ALPHA, measured), measured


def test_a_question_shown_another_way_breaks_the_quota(monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.types._one_form", lambda messages: messages)
    measured = asyncio.run(losses(by_chat))
    assert not keeps(ALPHA, measured), measured
