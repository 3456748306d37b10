"""Settings of chat requests: what reaches the models, what is refused, and what is said about it."""

import json

import pytest

from conformal_arbitrage.gateway.gateway import identities_of
from tests.certificates import said
from tests.gateway.house import CHAT, MENU, chunks, error_of, says

AS_REQUESTED = {"settings": "as requested"}
SETTINGS = {
    "temperature": 0, "top_p": 0.5, "max_tokens": 7, "seed": 1, "stop": ["x"], "verbosity": "low",
    "reasoning_effort": "high", "frequency_penalty": 1, "presence_penalty": -1, "logit_bias": {"5": 1},
    "service_tier": "flex",
}  # fmt: skip


@pytest.mark.parametrize("sure", [0.9, 0.4])
def test_requests_keep_their_own_settings_with_the_guarantee(house, sure):
    gateway = house(form="text", primary=says("mine", sure), task=AS_REQUESTED, policy={"content": "full"})
    seen = gateway.chat({**CHAT, **SETTINGS}).json()["arbitrage"]
    assert (seen["guarantee"], "ignored" in seen) == ("crc", False)
    for upstream in (gateway.primary, gateway.guardian)[: 1 if sure > 0.5 else 2]:
        [body] = upstream.bodies
        assert {name: body[name] for name in SETTINGS} == SETTINGS
    [record] = gateway.records()
    assert {name: record.decision.content.request[name] for name in SETTINGS} == SETTINGS
    assert not record.decision.overridden


def test_a_setting_that_no_logged_request_had_is_served_without_a_guarantee(house):
    gateway = house(form="text", task=AS_REQUESTED, policy={"content": "full", "audit_rate": 1.0})
    install_logged(gateway, {"temperature": [0, 0.5]})
    assert gateway.chat({**CHAT, "temperature": 0}).json()["arbitrage"]["guarantee"] == "crc"
    seen = gateway.chat({**CHAT, "temperature": 0, "stop": ["x"]}).json()["arbitrage"]
    assert seen["guarantee"] == "none"
    record = gateway.records()[0]
    assert record.decision.no_guarantee == "no request of the calibration log had stop ['x']"
    assert not record.decision.overridden  # the next calibration takes it in


def install_logged(gateway, fields, settings="as requested"):
    """Install a certificate whose log had requests with these fields."""
    requests = {"settings": settings, "fields": fields}
    made_by = {**identities_of(gateway.config, "support"), "requests": requests}
    certificate = gateway.certificate(identities=made_by)
    assert gateway.put("/v1/arbitrage/policies/support", {"certificate": certificate.to_dict()}).status_code == 200


LOGGED = {"temperature": [0, 0.5], "max_tokens": [None, 100], "tools": [None], "top_p": "any"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"temperature": 0.5}, None),
        ({"temperature": 0, "max_completion_tokens": 100, "top_p": 0.123}, None),
        ({"temperature": 1.7}, "temperature 1.7"),
        ({}, "no temperature"),
        ({"temperature": 0, "max_tokens": 7}, "max_tokens 7"),
        ({"temperature": 0, "tools": TOOLS}, "tools"),
        ({"temperature": 0, "response_format": SCHEMA}, "response_format 'json_schema'"),
        ({"temperature": 0, "seed": 3}, "seed 3"),
    ],
)
def test_the_label_compares_the_values_of_every_field_with_those_of_the_log(house, given, reason):
    gateway = house(form="text", task=AS_REQUESTED)
    install_logged(gateway, LOGGED)
    seen = gateway.chat({**CHAT, **given}).json()["arbitrage"]
    if reason is None:
        assert seen["guarantee"] == "crc"
    else:
        assert (seen["guarantee"], seen["reason"]) == ("none", f"no request of the calibration log had {reason}")


def test_pinned_settings_say_nothing_of_tools_that_were_never_logged(house):
    gateway = house(form="text")
    install_logged(gateway, {}, settings="pinned")
    assert gateway.chat({**CHAT, "temperature": 0.1}).json()["arbitrage"]["guarantee"] == "crc"
    assert gateway.chat({**CHAT, "tools": TOOLS}).json()["arbitrage"]["guarantee"] == "none"


@pytest.mark.parametrize("given", [{"temperature": 1.7}, {"tools": TOOLS, "temperature": 0}, {}])
def test_a_strict_policy_refuses_what_was_never_logged(house, given):
    gateway = house(form="text", task=AS_REQUESTED, policy={"strict": True})
    install_logged(gateway, {"temperature": [0]})
    error = error_of(gateway.chat({**CHAT, **given}), 422, "unlogged_setting")
    assert error["param"] == next(iter(given), "temperature")
    assert not gateway.primary.bodies
    assert gateway.chat({**CHAT, "temperature": 0}).status_code == 200


@pytest.mark.parametrize("name", SETTINGS)
def test_a_strict_policy_refuses_other_settings_one_by_one_with_both_remedies(house, name):
    gateway = house(form="text", policy={"strict": True})
    error = error_of(gateway.chat({**CHAT, name: SETTINGS[name]}), 422, "pinned_setting")
    assert error["param"] == name
    assert "the pinned value is" in error["message"]
    assert "leave it out" in error["message"]
    assert 'settings = "as requested"' in error["message"]
    assert not gateway.primary.bodies


def test_a_value_equal_to_the_pinned_one_is_the_same_question(house):
    pinned = {"temperature": 0, "max_tokens": 50, "seed": 7}
    gateway = house(
        form="text",
        models={
            "primary": pinned, "guardian": pinned, "primary.pinned": {"token_field": "max_completion_tokens"},
        },
    )  # fmt: skip
    for settings in ({}, pinned, {"temperature": 0.0}, {"max_completion_tokens": 50}, {"temperature": None}):
        assert gateway.chat({**CHAT, **settings}).json()["arbitrage"]["guarantee"] == "crc"
    assert len(set(gateway.primary.sent)) == 1


@pytest.mark.parametrize("given", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("taken", ["max_tokens", "max_completion_tokens"])
def test_a_limit_reaches_an_endpoint_under_the_name_it_takes(house, given, taken):
    gateway = house(
        form="text", task=AS_REQUESTED, models={"primary.pinned": {"token_field": taken}, "primary": {"max_tokens": 9}}
    )
    assert gateway.chat({**CHAT, given: 5}).status_code == 200
    [body] = gateway.primary.bodies
    assert {name: body[name] for name in body if name.startswith("max_")} == {taken: 5}


UNSUPPORTED = {
    "audio": {"voice": "x", "format": "wav"}, "modalities": ["text", "audio"], "web_search_options": {},
    "prediction": {"type": "content", "content": "x"}, "functions": [{"name": "look"}], "function_call": "auto",
    "moderation": {"model": "omni"},
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("form", ["menu", "text"])
def test_what_no_certificate_covers_is_refused_by_name(house, form, name):
    gateway = house(form=form, **({"task": AS_REQUESTED} if form == "text" else {}))
    body = MENU if form == "menu" else CHAT
    error = error_of(gateway.chat({**body, name: UNSUPPORTED[name]}), 422, "unsupported_field")
    assert (error["param"], error["message"].startswith(f"{name} is not passed on: ")) == (name, True)
    assert not gateway.primary.bodies
    assert gateway.chat({**body, name: None, "modalities": ["text"]}).status_code == 200


def test_a_field_that_nobody_knows_is_refused_by_name(house):
    gateway = house(form="text", task=AS_REQUESTED)
    assert error_of(gateway.chat({**CHAT, "top_k": 5}), 400, "unknown_field")["param"] == "top_k"


def test_a_value_that_no_endpoint_takes_is_the_callers_mistake(house):
    gateway = house(form="text", task=AS_REQUESTED)
    for settings in ({"temperature": "hot"}, {"max_tokens": 5, "max_completion_tokens": 6}):
        error = error_of(gateway.chat({**CHAT, **settings}), 400, "invalid_setting")
        assert error["param"] == next(iter(settings))
    assert not gateway.primary.bodies


@pytest.mark.parametrize("stream", [False, True])
def test_a_menu_takes_settings_and_says_that_they_have_no_effect(house, stream):
    gateway = house()
    gateway.chat(MENU)
    body = {**MENU, "temperature": 0, "max_tokens": 5, "seed": 1, "stop": "x", "user": "me", "stream": stream}
    reply = gateway.chat(body)
    for seen in (
        [chunk["arbitrage"] for chunk in chunks(reply) if "arbitrage" in chunk] if stream else [reply.json()["arbitrage"]]
    ):  # fmt: skip
        assert seen["ignored"] == ["max_tokens", "seed", "stop", "temperature", "user"]
        assert seen["guarantee"] == "crc"
    assert len(set(gateway.primary.sent)) == 1
    assert "ignored" not in gateway.chat(MENU).json()["arbitrage"]


@pytest.mark.parametrize("task", [{}, AS_REQUESTED])
@pytest.mark.parametrize("mode", ["shadow", "enforce"])
def test_whatever_settings_a_client_sends_are_passed_on(house, task, mode):
    gateway = house(form="text", primary=says("mine", 0.4), policy={"mode": mode}, task=task)
    reply = gateway.chat({**CHAT, **SETTINGS})
    assert reply.status_code == 200
    expected = "crc" if task else "none"
    assert reply.json()["arbitrage"]["guarantee"] == expected
    for upstream in (gateway.primary, gateway.guardian):
        assert {name: upstream.bodies[0][name] for name in SETTINGS} == SETTINGS


def test_a_certificate_for_one_rule_of_settings_does_not_serve_under_the_other(house):
    gateway = house(form="text")
    assert "settings" not in said(json.loads((gateway.folder / "rule.json").read_text()), "identities")["primary"]
    gateway.stop()
    text = gateway.path.read_text().replace('form = "text"', 'form = "text"\nsettings = "as requested"')
    gateway.path.write_text(text)
    from conformal_arbitrage.errors import StaleCalibrationError
    from conformal_arbitrage.live.config import read_config

    gateway.config = read_config(gateway.path)
    with pytest.raises(StaleCalibrationError, match=r"primary\.settings: None then, 'as requested' now"):
        gateway.start()
    gateway._serving = None
