"""Candidates: several sampled answers, the largest group speaks, and how many agree is the confidence."""

import asyncio
import json
import re

import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.collecting.collect import Collection, collect
from conformal_arbitrage.errors import ConfigError, OtherModelError, RefusalError, StaleCalibrationError, UpstreamError
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.candidates import NORMALISERS
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.types import ChatRequest
from tests.gateway.house import House
from tests.scripted import Upstream, completion

CONFIG = """
[task]
form = "text"

[primary]
kind = "chat"
url = "{url}"
model = "small"
price = [1.0, 1.0]
attempts = 1
candidates = 4
temperature = 0.9
{primary}
[primary.pinned]
{pinned}
[guardian]
kind = "chat"
url = "{url}"
model = "large"
price = [10.0, 10.0]
[guardian.pinned]

[judge]
kind = "chat"
url = "{url}"
model = "judge"
[judge.pinned]
"""
HELLO = ChatRequest({"messages": [{"role": "user", "content": "Which city?"}]}, id="r1")


def configure(folder, url, primary="", pinned=""):
    (folder / "arbitrage.toml").write_text(CONFIG.format(url=url, primary=primary, pinned=pinned))
    return read_config(folder / "arbitrage.toml")


def asked(folder, replies, request=HELLO, *, primary="", pinned=""):
    """Let the Primary answer one request; replies are those of its samples, in turn, and then of the judge."""

    async def ask():
        upstream = Upstream(lambda path, body, number: replies[number])
        async with upstream, Models(configure(folder, upstream.url, primary, pinned)) as models:
            return await models.answerer("primary").answer(request), upstream

    return asyncio.run(ask())


def texts(*contents):
    return [completion(content) for content in contents]


def test_the_largest_group_speaks_and_its_share_is_the_confidence(tmp_path):
    answer, upstream = asked(tmp_path, texts("Lyon", "Paris.", "The  PARIS", "Nice"))
    assert answer.confidence == 0.5
    assert answer.message["content"] in ("Paris.", "The  PARIS")
    assert answer.spent.calls == 4
    assert answer.spent.cost == pytest.approx(4 * 15 / 1e6)
    assert all(body["temperature"] == 0.9 for body in upstream.bodies)


def test_a_sample_without_an_answer_agrees_with_none(tmp_path):
    answer, _ = asked(tmp_path, texts("Paris", "", "Paris", ""))
    assert answer.confidence == 0.5
    declined = completion("")
    declined["choices"][0]["message"]["refusal"] = "no"
    with pytest.raises(RefusalError) as caught:
        asked(tmp_path, [declined] * 4)
    assert caught.value.spent.calls == 4


def test_a_failed_call_and_another_model_leave_no_answer(tmp_path):
    with pytest.raises(UpstreamError):
        asked(tmp_path, [*texts("Paris", "Paris", "Paris"), (500, {"error": {"message": "it broke"}})])
    with pytest.raises(OtherModelError):
        asked(tmp_path, texts("Paris", "Paris", "Paris", "Paris"), pinned='served = "small-1"')


def test_every_sample_has_a_seed_of_its_own(tmp_path):
    _, upstream = asked(tmp_path, texts("a", "b", "c", "d"), primary="seed = 7")
    assert sorted(body["seed"] for body in upstream.bodies) == [7, 8, 9, 10]


def test_tool_calls_are_grouped_by_what_they_do(tmp_path):
    def call(arguments, id):
        function = {"name": "book", "arguments": arguments}
        return completion(None, tool_calls=[{"id": id, "type": "function", "function": function}])

    same = [call('{"a": 1, "b": 2}', "1"), call('{"b":2,"a":1}', "2"), call('{"a": 1}', "3")]
    answer, _ = asked(tmp_path, [*same, *texts("no")], primary='same_meaning = "json"')
    assert answer.confidence == 0.5
    assert answer.message["tool_calls"]


@pytest.mark.parametrize(
    ("name", "one", "other", "different"),
    [
        ("words", "The sun, of course!", "sun of course", "the moon"),
        ("number", "It is 1,200 in all.", "12 x 100 = 1200.0", "1201"),
        ("number", "none", "None!", "0"),
        ("json", '{"a": 1, "b": [2]}', '{"b":[2],"a":1}', '{"a": 1}'),
        ("json", "not JSON", "Not json.", "[]"),
    ],
)
def test_what_counts_as_the_same(name, one, other, different):
    same = NORMALISERS[name]
    assert same(one) == same(other) != same(different)


def test_a_function_of_ones_own_groups_answers_and_is_part_of_the_identity(tmp_path):
    (tmp_path / "mine.py").write_text("def initial(text):\n    return text[0]\n\ndef broken(text):\n    return 1 / 0\n")
    answer, _ = asked(tmp_path, texts("Paris", "Pisa", "Rome", "Oslo"), primary='same_meaning = "python:mine:initial"')
    assert answer.confidence == 0.5
    models = Models(configure(tmp_path, "http://127.0.0.1:9", 'same_meaning = "python:mine:initial"'))
    identity = models.answerer("primary").identity
    assert identity["same_meaning"] == "mine:initial"
    assert re.fullmatch("[0-9a-f]{64}", identity["source_sha256"])
    with pytest.raises(Exception, match="mine:broken failed on 'Paris'"):
        asked(tmp_path, texts("Paris", "Pisa", "Rome", "Oslo"), primary='same_meaning = "python:mine:broken"')


def test_a_judge_tells_which_answers_mean_the_same(tmp_path):
    """Samples: A, B, A again, C. The judge is asked whether B means A (yes), and C means A (no reply, so no)."""
    replies = texts("the capital", "Paris", "The capital!", "Rome", '{"grade": 1}', "I cannot say")
    answer, upstream = asked(tmp_path, replies, primary='same_meaning = "judge"\nconcurrency = 1')
    assert answer.confidence == 0.75
    assert answer.message["content"] == "the capital"
    assert [body["model"] for body in upstream.bodies] == ["small"] * 4 + ["judge"] * 2
    assert "# Reference answer\nthe capital" in upstream.bodies[4]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("candidates = 1", r"needs candidates from 2 to 64; got 1"),
        ('candidates = 4\nconfidence = "ask"', "has both confidence and candidates"),
        ("candidates = 4\ntemperature = 0.0", "has temperature 0, at which all candidates are the same"),
    ],
)
def test_candidates_that_make_no_sense_are_refused(section, problem, tmp_path):
    models = f'[primary]\nkind = "chat"\nurl = "http://127.0.0.1:9"\nmodel = "m"\n{section}\n'
    text = f'[task]\nform = "text"\n{models}' + models.partition(section)[0].replace("primary", "guardian")
    (tmp_path / "arbitrage.toml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_config(tmp_path / "arbitrage.toml")


def test_candidates_are_for_a_primary_in_free_text(tmp_path):
    configure(tmp_path, "http://127.0.0.1:9")
    path = tmp_path / "arbitrage.toml"
    path.write_text(path.read_text().replace('form = "text"', 'form = "menu"'))
    with pytest.raises(ConfigError, match='over menus, use kind = "sampling"'):
        read_config(path)
    models = Models(configure(tmp_path, "http://127.0.0.1:9", 'same_meaning = "sense"'))
    with pytest.raises(ConfigError, match="same_meaning cannot be 'sense'; use one of words, number, json, judge"):
        models.answerer("primary")


def test_a_certificate_is_bound_to_the_number_of_candidates_their_grouping_and_their_temperature(tmp_path):
    base = Models(configure(tmp_path, "http://127.0.0.1:9"))
    made_by = {role: dict(base.answerer(role).identity) for role in ("primary", "guardian")}
    log = ScoreLog.from_router(
        confidence=[1.0] * 50, primary_grade=[1.0] * 50, guardian_grade=[1.0] * 50,
        identities={**made_by, "grader": {"kind": "exact"}},
    )  # fmt: skip
    certificate = calibrate(log, 0.1)
    base.router(certificate)
    path = tmp_path / "arbitrage.toml"
    text = path.read_text()
    for then, now, name in (
        ("candidates = 4", "candidates = 5", "candidates"),
        ("candidates = 4", 'candidates = 4\nsame_meaning = "number"', "same_meaning"),
        ("temperature = 0.9", "temperature = 0.5", "temperature"),
        ("candidates = 4", 'confidence = "logprob"', "confidence"),
    ):
        path.write_text(text.replace(then, now))
        with pytest.raises(StaleCalibrationError, match=rf"primary\.{name}"):
            Models(read_config(path)).router(certificate)


def town(path, body, number):
    """A small model that is sure of even questions, and a large one that is always right."""
    question = int(re.search(r"Request (\d+)", json.dumps(body["messages"]))[1])
    if body["model"] == "large":
        return completion("Paris")
    town.count[question] = town.count.get(question, 0) + 1
    return completion("Paris" if question % 2 == 0 else f"town {town.count[question]}")


async def test_collecting_deciding_and_the_gateway_sample_alike(tmp_path):
    """What is calibrated is what is served: one log, one certificate, the same confidences on every road."""
    town.count = {}
    rows = [
        {"id": f"q{k}", "messages": [{"role": "user", "content": f"Request {k}?"}], "expected": "Paris"}
        for k in range(40)
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with Upstream(town) as upstream:
        config = configure(tmp_path, upstream.url)
        asking = {"output": tmp_path / "log.parquet", "grade": "exact"}
        planned = await Collection.of(config, tmp_path / "requests.jsonl", **asking).estimate()
        log = await collect(config, tmp_path / "requests.jsonl", **asking)
        certificate = calibrate(log, 0.1, boundary="include")
        town.count.clear()
        async with Models(config) as models:
            router = models.router(certificate)
            requests = [ChatRequest({"messages": row["messages"]}, id=row["id"]) for row in rows[:6]]
            decisions = [await router.decide(request) for request in requests]
    assert [one.spent.calls for one in planned] == [4 * 40, 40]
    shares = log.primary.reshape(-1, 2)[:, 1]
    assert shares[::2].tolist() == [1.0] * 20
    assert shares[1::2].tolist() == [0.25] * 20
    assert log.identities["primary"]["candidates"] == 4
    assert [decision.margin for decision in decisions] == shares[:6].tolist()
    assert [decision.decided_by for decision in decisions] == ["primary", "guardian"] * 3
    assert all(decision.no_guarantee is None for decision in decisions)


def test_the_gateway_samples_the_primary_and_streams_the_guardian(tmp_path):
    def primary(path, body, number):
        return completion("mine" if "sure" in body["messages"][0]["content"] else f"guess {number}")

    models = {"primary": {"candidates": 3, "temperature": 0.8}}
    with SampledHouse(tmp_path, form="text", primary=primary, models=models, policy={"expose": "full"}) as house:
        sure = house.chat({"model": "support", "messages": [{"role": "user", "content": "sure"}]}).json()
        unsure = house.chat({"model": "support", "messages": [{"role": "user", "content": "?"}]}).json()
        assert sure["choices"][0]["message"]["content"] == "mine"
        assert unsure["choices"][0]["message"]["content"] == "theirs"
        assert [one["arbitrage"]["decided_by"] for one in (sure, unsure)] == ["primary", "guardian"]
        assert sure["arbitrage"]["guarantee"] == unsure["arbitrage"]["guarantee"] == "crc"
        assert len(house.primary.bodies) == 6
        assert sorted(record.decision.legs[0].scores for record in house.records()) == [(1 / 3,), (1.0,)]


class SampledHouse(House):
    """A gateway whose Primary has candidates in place of token probabilities."""

    def _write(self, first):
        super()._write(first)
        self.path.write_text(self.path.read_text().replace('confidence = "logprob"\n', ""))


def several(folder, url, models='"b"', count=4, sections=("b",)):
    """Configure a Primary that samples from further models too."""
    path = folder / "arbitrage.toml"
    further = "".join(
        f'[models.{name}]\nkind = "chat"\nurl = "{url}"\nmodel = "{name}"\nprice = [2.0, 2.0]\ntemperature = 0.0\n'
        f"[models.{name}.pinned]\n"
        for name in sections
    )
    own = f"candidates_of = [{models}]"
    text = CONFIG.format(url=url, primary=own, pinned="").replace("candidates = 4", f"candidates = {count}")
    path.write_text(text + further)
    return read_config(path)


async def test_several_cheap_models_answer_in_turn_and_agree(tmp_path):
    def reply(path, body, number):
        return completion("Paris" if body["model"] == "small" else "Lyon" if body["model"] == "c" else "PARIS")

    async with Upstream(reply) as upstream:
        config = several(tmp_path, upstream.url, '"b", "c"', 3, ("b", "c"))
        async with Models(config) as models:
            primary = models.answerer("primary")
            answer, bodies, identity = await primary.answer(HELLO), upstream.bodies, primary.identity
    assert sorted(body["model"] for body in bodies) == ["b", "c", "small"], "one sample each"
    assert answer.confidence == pytest.approx(2 / 3)
    assert answer.spent.cost == pytest.approx(15 * (1 + 2 + 2) / 1e6)
    assert identity["candidates"] == 3
    url = "http://127.0.0.1:9"
    alone = Models(configure(tmp_path, url)).answerer("primary").identity
    assert "candidates_of" not in alone
    one, two = (Models(several(tmp_path, url, names, 3, ("b", "c"))).answerer("primary").identity for names in
                ('"b"', '"b", "c"'))  # fmt: skip
    assert one["candidates_of"] != two["candidates_of"]


@pytest.mark.parametrize(
    ("models", "count", "problem"),
    [
        ('"x"', 4, r"candidates_of names other sections \[models\.NAME\] of kind 'chat', of b; got 'x'"),
        ('"b"', 1, "needs candidates = N, at least one for each of its 2 models"),
        ('"b", "b"', 4, "each named once"),
    ],
)
def test_models_that_cannot_be_sampled_are_refused(tmp_path, models, count, problem):
    with pytest.raises(ConfigError, match=problem):
        several(tmp_path, "http://127.0.0.1:9", models, count)
