"""One question down every road: what reaches a model is the same, byte for byte, as what a log was collected with."""

import csv
import json

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import main
from conformal_arbitrage.errors import StaleCalibrationError
from conformal_arbitrage.models import rendering
from conformal_arbitrage.store.record import MenuQuestion, decode_question, encode
from conformal_arbitrage.types import Query
from tests.certificates import said
from tests.gateway.house import House, until, votes
from tests.scripted import completion, scores

ACTIONS = ("billing", "a bug", "other")
TEXT = 'Why was I charged twice?\n\nMy "order" is №7.'
TALK = [{"role": "system", "content": "Which team?"}, {"role": "user", "content": TEXT}]
PINNED = {f"{role}.pinned": {"served": "m"} for role in ("primary", "guardian")}


def letters(*shares):
    listed = [{"token": t, "logprob": p} for t, p in zip("ABC", shares, strict=True)]
    return lambda *_: completion("A", logprobs={"content": [{"top_logprobs": listed}]})


KINDS = {
    "chat": (lambda *_: scores(0.9, 0.05, 0.05), {}),
    "decisions": (votes(0.9, 0.05, 0.05), {}),
    "logprob": (letters(-0.05, -4.0, -5.0), {}),
    "sampling": (lambda *_: completion("A"), {"samples": 1}),
}


def house_of(folder, kind):
    reply, settings = KINDS[kind]
    models = {role: {"kind": kind, **settings} for role in ("primary", "guardian")}
    policy = {"audit_rate": 1.0, "content": "full"}
    return House(folder, primary=reply, guardian=reply, models={**models, **PINNED}, policy=policy)


def invoke(*arguments):
    result = CliRunner().invoke(main, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def sent(upstream, act, calls=1):
    """Return the bodies that an upstream gets from an act, as bytes."""
    before = len(upstream.sent)
    act()
    assert len(upstream.sent) == before + calls
    return upstream.sent[before:]


def enum_schema(actions):
    schema = {"type": "object", "properties": {"team": {"type": "string", "enum": list(actions)}}}
    return {"type": "json_schema", "json_schema": {"name": "team", "schema": schema}}


def decision(question, instructions=None):
    choice = {"type": "choice", "choices": [{"value": action} for action in ACTIONS]}
    asked = choice if instructions is None else {**choice, "instructions": instructions}
    return {"model": "support", "input": question, "questions": [asked]}


@pytest.mark.parametrize("kind", KINDS)
def test_one_question_reaches_a_menu_model_in_the_same_bytes_down_every_road(tmp_path, kind):
    with house_of(tmp_path, kind) as house:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"question": TEXT, "choices": ACTIONS, "id": "q"}))
        log, config = tmp_path / "log.parquet", ["--config", house.path]
        menu = {"model": "support", "messages": [{"role": "user", "content": TEXT}]}
        parts = [{"type": "text", "text": TEXT}]
        options = [part for action in ACTIONS for part in ("--action", action)]
        roads = {
            "collect": lambda: invoke("collect", rows, "-o", log, *config),
            "ask": lambda: invoke("ask", tmp_path / "rule.json", TEXT, *options, *config),
            "actions": lambda: house.chat({**menu, "arbitrage": {"actions": ACTIONS}}),
            "enum": lambda: house.chat({**menu, "response_format": enum_schema(ACTIONS)}),
            "parts": lambda: house.chat(
                {**menu, "messages": [{"content": parts, "role": "user"}], "arbitrage": {"actions": ACTIONS}}
            ),
            "decisions": lambda: house.decide(decision(TEXT, "")),
            "decisions without the field": lambda: house.decide(decision(TEXT)),
            "decisions with messages": lambda: house.decide(decision([{"role": "user", "content": TEXT}])),
        }
        primary = {name: sent(house.primary, act) for name, act in roads.items()}
        assert len({body for [body] in primary.values()}) == 1, primary
        guardian_calls = 7  # one from collect, one audit for each request to the gateway
        guardian = until(lambda: house.guardian.sent if len(house.guardian.sent) >= guardian_calls else None)
        assert set(guardian) == set(primary["collect"])


@pytest.mark.parametrize("kind", KINDS)
def test_instructions_are_a_system_message_down_every_road(tmp_path, kind):
    with house_of(tmp_path, kind) as house:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"messages": TALK, "choices": ACTIONS, "id": "q"}))
        collect = ["collect", rows, "-o", tmp_path / "log.parquet", "--config", house.path]
        roads = {
            "collect": lambda: invoke(*collect),
            "chat": lambda: house.chat({"model": "support", "messages": TALK, "arbitrage": {"actions": ACTIONS}}),
            "decisions": lambda: house.decide(decision(TEXT, "Which team?")),
            "parts": lambda: house.decide(decision([{"role": "user", "content": TEXT}], [{"text": "Which team?"}])),
        }
        primary = {name: sent(house.primary, act) for name, act in roads.items()}
        assert len({body for [body] in primary.values()}) == 1, primary
        guardian = until(lambda: house.guardian.sent if len(house.guardian.sent) >= 4 else None)
        assert set(guardian) == set(primary["collect"])
        kept = house.records()[0].decision.content
        assert kept.context == TALK
        assert ScoreLog.read(tmp_path / "log.parquet").context.tolist() == [f"system: Which team?\n\nuser: {TEXT}"]


def test_one_request_reaches_a_text_model_in_the_same_bytes_down_every_road(tmp_path):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    policy = {"audit_rate": 1.0, "content": "full"}
    with House(tmp_path, form="text", models=PINNED, policy=policy) as house:
        plain, whole = tmp_path / "plain.jsonl", tmp_path / "whole.jsonl"
        plain.write_text(json.dumps({"question": TEXT, "expected": "mine", "id": "p"}))
        whole.write_text(json.dumps({"tools": tools, "messages": TALK, "expected": "mine", "id": "w"}))
        config = ["--config", house.path]
        graded = ["--grade", "exact", *config]
        roads = {
            "collect": lambda: invoke(
                "collect", plain, "-o", tmp_path / "p.parquet", "--question-column", "question", *graded
            ),
            "ask": lambda: invoke("ask", tmp_path / "rule.json", TEXT, *config),
            "chat": lambda: house.chat({"messages": [{"role": "user", "content": TEXT}], "model": "support"}),
        }
        bodies = {name: sent(house.primary, act) for name, act in roads.items()}
        assert len({body for [body] in bodies.values()}) == 1, bodies
        roads = {
            "collect": lambda: invoke("collect", whole, "-o", tmp_path / "w.parquet", *graded),
            "chat": lambda: house.chat({"tools": tools, "model": "support", "messages": TALK}),
            "other order": lambda: house.chat({"model": "support", "messages": TALK, "tools": tools}),
        }
        bodies = {name: sent(house.primary, act) for name, act in roads.items()}
        assert len({body for [body] in bodies.values()}) == 1, bodies
        guardian = until(lambda: house.guardian.sent if len(house.guardian.sent) >= 5 else None)
        assert len(set(guardian)) == 2


SETTINGS = {
    "temperature": 0, "top_p": 1, "max_tokens": 40, "seed": 3, "stop": ["END", "\n\n"], "presence_penalty": 0.5,
    "logit_bias": {"50256": -100}, "verbosity": "low", "reasoning_effort": "low",
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_settings_reach_a_text_model_in_the_same_bytes_down_every_road(tmp_path, suffix):
    policy = {"audit_rate": 1.0, "content": "full"}
    task = {"settings": "as requested"}
    shadow = {"mode": "shadow", "certificate": None}
    with House(tmp_path, form="text", models=PINNED, policy=policy, task=task, **{"policies.shadow": shadow}) as house:
        rows = tmp_path / f"rows.{suffix}"
        row = {"question": TEXT, "expected": "mine", "id": "p", **SETTINGS}
        if suffix == "jsonl":
            rows.write_text(json.dumps(row))
        else:
            with rows.open("w", newline="") as stream:
                table = csv.DictWriter(stream, row)
                table.writeheader()
                table.writerow({name: v if isinstance(v, str) else json.dumps(v) for name, v in row.items()})
        config, log = ["--config", house.path], tmp_path / "log.parquet"
        settings = [part for name, v in SETTINGS.items() for part in ("--setting", f"{name}={json.dumps(v)}")]
        request = {"messages": [{"role": "user", "content": TEXT}], "model": "support", **SETTINGS}
        columns = ["--question-column", "question", "--grade", "exact"]
        roads = {
            "collect": lambda: invoke("collect", rows, "-o", log, *columns, *config),
            "ask": lambda: invoke("ask", tmp_path / "rule.json", TEXT, *settings, *config),
            "chat": lambda: house.chat(request),
            "floats": lambda: house.chat({**request, "temperature": 0.0, "top_p": 1.0}),
            "another order": lambda: house.chat(dict(reversed(request.items()))),
            "the other name of the limit": lambda: house.chat(
                {("max_completion_tokens" if name == "max_tokens" else name): value for name, value in request.items()}
            ),
            "shadow": lambda: house.chat({**request, "model": "shadow"}),
        }
        bodies = {name: sent(house.primary, act) for name, act in roads.items()}
        assert len({body for [body] in bodies.values()}) == 1, bodies
        body = json.loads(bodies["collect"][0])
        assert {name: body[name] for name in SETTINGS} == SETTINGS
        guardian = until(lambda: house.guardian.sent if len(house.guardian.sent) >= 6 else None)
        assert len(set(guardian)) == 1
        assert {name: json.loads(guardian[0])[name] for name in SETTINGS} == SETTINGS
        [kept] = ScoreLog.read(log).extra["settings"]
        assert json.loads(kept) == SETTINGS


def test_strict_settings_are_refused_alike_on_every_road(tmp_path):
    with House(tmp_path, form="text", models=PINNED, policy={"strict": True}) as house:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"question": TEXT, "expected": "mine", "id": "p", "stop": "END"}))
        columns = ["--question-column", "question", "--grade", "exact", "--config", house.path]
        collect = ["collect", rows, "-o", tmp_path / "log.parquet", *columns]
        refused = CliRunner().invoke(main, [str(one) for one in collect])
        assert refused.exit_code == 2
        assert "row p: stop is 'END', and the pinned value is not set" in refused.output
        message = house.chat({"messages": TALK, "model": "support", "stop": "END"}).json()["error"]["message"]
        assert message in " ".join(refused.output.split())
        assert not house.primary.sent
        ask = ["ask", tmp_path / "rule.json", TEXT, "--setting", "stop=END", "--config", house.path]
        assert "none: the request overrides stop" in " ".join(invoke(*ask).output.split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_made_by_collect_serves_with_its_guarantee(tmp_path, kind):
    with house_of(tmp_path, kind) as house:
        rows = [{"question": f"{TEXT} {k}", "choices": ACTIONS, "id": f"q{k}"} for k in range(30)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        log = tmp_path / "log.parquet"
        invoke("collect", tmp_path / "rows.jsonl", "-o", log, "--config", house.path)
        certificate = calibrate(ScoreLog.read(log), 0.05, guardian_sees="all")
        certificate.sign(ProjectSecret.find()).save(tmp_path / "rule.json")
        house.restart()
        reply = house.decide(decision(TEXT, "")).json()
        assert reply["answers"][0]["arbitrage"]["guarantee"] == "crc"


@pytest.mark.parametrize("form", ["menu", "text"])
def test_a_certificate_from_another_rendering_does_not_start(tmp_path, form):
    with House(tmp_path, form=form) as house:
        made_by = said(json.loads((tmp_path / "rule.json").read_text()), "identities")
        for before in ({"rendering": "messages 0; 0123456789abcdef"}, {}):
            other = {k: v for k, v in made_by["primary"].items() if k != "rendering"} | before
            identities = {**made_by, "primary": other}
            house.certificate(identities=identities).save(tmp_path / "rule.json")
            house.stop()
            with pytest.raises(StaleCalibrationError, match=r"primary\.rendering"):
                house.start()
            house._serving = None


def test_a_change_of_the_rendering_is_a_change_of_every_identity(monkeypatch):
    assert rendering.rendering() == rendering.RENDERING
    monkeypatch.setattr("conformal_arbitrage.types._one_form", lambda messages: messages)
    assert rendering.rendering() != rendering.RENDERING


def test_a_question_from_the_queue_is_the_question_that_was_put_in():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "\ud800"}, {"type": "image_url", "b": 1, "a": 2}]}
    ]
    for context in (TEXT, TALK, messages):
        question = MenuQuestion(context=Query(context, ACTIONS).context, actions=ACTIONS)
        again = decode_question(encode(question, "i"), "i")
        assert again == question
        assert json.dumps(again.context) == json.dumps(question.context)


def test_the_queue_of_earlier_releases_can_be_read():
    assert decode_question('{"actions":["a","b"],"context":"user: X"}', "i").context == "user: X"
