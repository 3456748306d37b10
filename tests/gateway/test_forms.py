"""Policies over menus and over free text, side by side in one gateway."""

import json

import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import cli
from conformal_arbitrage.collecting.records import score_log_of
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live.config import read_config
from tests.gateway.house import CHAT, DECISION, MENU, error_of, failing, says
from tests.scripted import scores

BOTH = {"primary": {"kind": "chat", "confidence": "logprob"}, "guardian": {"kind": "chat"}}
FREE = {**CHAT, "model": "free"}
ENUM = {"type": "json_schema", "json_schema": {"name": "v", "schema": {
    "type": "object", "properties": {"verdict": {"enum": ["yes", "no"]}}, "required": ["verdict"],
}}}  # fmt: skip


def talks(shares, text, sure=None):
    """An upstream that rates options where it is asked to, and answers in free text otherwise."""

    def reply(path, body, number):
        request_body = json.dumps(body["messages"])
        return scores(*shares) if "confidence" in request_body else says(text, sure)()

    return reply


@pytest.fixture
def both(house):
    gateway = house(
        models=BOTH,
        primary=talks((0.9, 0.1, 0.0), "mine", 0.9),
        guardian=talks((0.0, 1.0, 0.0), "theirs"),
        **{"policies.free": {"form": "text", "mode": "shadow", "certificate": None}},
    )
    gateway.certificate(policy="free").save(gateway.folder / "free.json")
    gateway.sections["policies.free"] = {"form": "text", "certificate": "free.json"}
    gateway.configure()
    gateway.restart()
    return gateway


def test_one_gateway_serves_menus_and_free_text(both):
    listed = {model["id"]: model["arbitrage"]["form"] for model in both.get("/v1/models").json()["data"]}
    assert listed == {"support": "menu", "free": "text"}
    assert both.chat(MENU).json()["choices"][0]["message"]["content"] == "a"
    assert both.decide().json()["answers"][0]["choice"] == "a"
    reply = both.chat(FREE).json()
    assert reply["choices"][0]["message"]["content"] == "mine"
    assert reply["arbitrage"]["guarantee"] == "crc"


@pytest.mark.parametrize("asked", [MENU, FREE])
def test_an_open_breaker_in_one_form_shows_in_the_metrics(both, asked):
    both.primary.reply = failing(500)
    for _ in range(10):
        both.chat(asked)
    assert f'arbitrage_upstream_resting{{upstream="{both.primary.url}"}} 1.0' in both.get("/metrics").text


def test_each_policy_refuses_the_other_form(both):
    error_of(both.chat({**MENU, "model": "free"}), 422, "wrong_form")
    error_of(both.decide({**DECISION, "model": "free"}), 422, "wrong_form")
    error_of(both.chat(CHAT), 422, "wrong_form")


def test_in_free_text_a_schema_with_one_enum_is_a_schema_like_any_other(both):
    body = {**FREE, "response_format": ENUM}
    assert both.chat(body).json()["choices"][0]["message"]["content"] == "mine"
    assert both.primary.bodies[-1]["response_format"] == ENUM
    error_of(both.chat({**body, "arbitrage": {"actions": ["yes", "no"]}}), 422, "wrong_form")


def test_a_certificate_of_the_other_form_is_refused(both):
    other = both.certificate(policy="support").to_dict()
    reply = both.put("/v1/arbitrage/policies/free", {"certificate": other})
    error_of(reply, 422, "certificate_refused")


def test_each_policy_is_exported_with_the_identities_of_its_form(both):
    config = read_config(both.path)
    kinds = {name: identities_of(config, name)["guardian"]["kind"] for name in config.policies}
    assert kinds == {"support": "chat", "free": "answer"}
    both.chat(MENU)
    both.chat(FREE)
    for name, size in (("support", 3), ("free", 2)):
        who = identities_of(config, name)
        log = both.with_store(lambda store, n=name, w=who: score_log_of(store, n, identities=w, everything=True))
        assert (len(log), log.identities, log.primary.size) == (1, who, size)


def test_a_text_policy_needs_a_primary_with_a_confidence(both):
    text = both.path.read_text().replace('confidence = "logprob"', "")
    both.path.write_text(text)
    with pytest.raises(ConfigError, match="confidence"):
        read_config(both.path)


@pytest.mark.parametrize("setting", ["temperature", "mood=good", "temperature=hot", "temperature=5"])
def test_ask_refuses_a_setting_that_is_none(both, setting):
    arguments = ["ask", both.folder / "free.json", "Say it.", "--setting", setting, "--config", both.path]
    refused = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert (refused.exit_code, "--setting" in refused.stderr) == (2, True)
    menu = ["ask", both.folder / "rule.json", "Say it.", "--action", "a", "--setting", "seed=1", "--config", both.path]
    refused = CliRunner().invoke(cli, [str(one) for one in menu])
    assert (refused.exit_code, "drop --setting" in refused.stderr) == (2, True)


def test_ask_takes_its_form_from_the_certificate(both):
    def ask(*arguments):
        return CliRunner().invoke(cli, ["ask", *map(str, arguments), "--config", str(both.path)])

    assert ask(both.folder / "free.json", "Say it.").exit_code == 0
    menu = [part for action in "abc" for part in ("--action", action)]
    assert ask(both.folder / "rule.json", "Say it.", *menu).exit_code == 0
    refused = ask(both.folder / "free.json", "Say it.", "--action", "a")
    assert (refused.exit_code, "free.json is in text form: drop --action" in refused.stderr) == (2, True)
