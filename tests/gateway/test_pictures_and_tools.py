"""Pictures and tool calls in questions about menus: the models are shown them, or the request is refused; none is lost."""

import asyncio
import json

import pytest

from conformal_arbitrage import Query, ScoreLog
from conformal_arbitrage.errors import ReplyError, StaleCalibrationError
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models import FunctionScorer
from conformal_arbitrage.models.others import HumanScorer
from conformal_arbitrage.models.rendering import messages_or_text
from tests.gateway.house import CHAT, DECISION, MENU, SURE, House, error_of, until, votes
from tests.gateway.test_roads import KINDS, PINNED, invoke

URL = "data:image/png;base64,iVBORw0KGgo="
TEXT = {"type": "text", "text": "What is this?"}
PICTURE = {"type": "image_url", "image_url": {"url": URL}}
INPUT_PICTURE = {"type": "input_image", "image_url": URL}
PICTURED = [{"role": "user", "content": [TEXT, PICTURE]}]
ACTIONS = ("billing", "a bug", "other")
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def seeing(folder, kind, **more):
    reply, settings = KINDS[kind]
    models = {role: {"kind": kind, "pictures": True, **settings} for role in ("primary", "guardian")}
    return House(folder, primary=reply, guardian=reply, models={**models, **PINNED}, policy={"audit_rate": 1.0, **more})


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_reaches_a_model_that_takes_it_in_the_same_bytes_down_every_road(tmp_path, kind):
    with seeing(tmp_path, kind) as house:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"messages": PICTURED, "choices": ACTIONS, "id": "q"}))
        invoke("collect", rows, "-o", tmp_path / "log.parquet", "--config", house.path)
        choice = {"type": "choice", "choices": [{"value": action} for action in ACTIONS]}
        inputs = [{"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, INPUT_PICTURE]}]
        replies = [
            house.chat({"model": "support", "messages": PICTURED, "arbitrage": {"actions": ACTIONS}}).json(),
            house.decide({"model": "support", "input": inputs, "questions": [choice]}).json()["answers"][0],
        ]
        assert [reply["arbitrage"]["guarantee"] for reply in replies] == ["crc", "crc"]
        assert len(house.primary.sent) == 3
        assert len(set(house.primary.sent)) == 1
        assert URL in house.primary.sent[0].decode()
        audited = until(lambda: house.guardian.sent if len(house.guardian.sent) >= 3 else None)
        assert set(audited) == set(house.primary.sent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blind", ["primary", "guardian"])
def test_a_picture_that_one_model_would_not_see_is_refused_before_any_call(tmp_path, kind, blind):
    with seeing(tmp_path, kind) as house:
        house.stop()
        house.models[blind] = {**house.models[blind], "pictures": False}
        house.configure()
        house.start()
        reply = house.chat({**MENU, "messages": PICTURED})
        error = error_of(reply, 422, "unsupported_content")
        assert f"the {blind.capitalize()} would not be shown 'image_url'" in error["message"]
        assert f"pictures = true in [{blind}]" in error["message"]
        inputs = [{"role": "user", "content": [INPUT_PICTURE]}]
        error_of(house.decide({**DECISION, "input": inputs}), 422, "unsupported_content")
        assert not house.primary.sent
        assert not house.guardian.sent


def test_instructions_with_a_picture_are_treated_alike(house):
    gateway = house()
    body = {**DECISION["questions"][0], "instructions": [{"type": "input_text", "text": "Which?"}, INPUT_PICTURE]}
    error_of(gateway.decide({**DECISION, "questions": [body]}), 422, "unsupported_content")
    gateway = house(models={role: {"pictures": True} for role in ("primary", "guardian")})
    assert gateway.decide({**DECISION, "questions": [body]}).status_code == 200
    [system, user] = gateway.primary.bodies[0]["input"]
    assert system == {"role": "system", "content": [{"type": "input_text", "text": "Which?"}, INPUT_PICTURE]}
    assert user == {"role": "user", "content": "A letter."}


ODD = {
    "audio": [AUDIO], "a file": [{"type": "file", "file": {"file_id": "f"}}], "nothing": [{}], "a number": [1],
    "a picture without an address": [{"type": "image_url"}], "a text that is none": [{"type": "text", "text": 5}],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ODD)
def test_other_parts_are_refused_by_name_even_where_pictures_are_taken(tmp_path, kind, name):
    with seeing(tmp_path, kind) as house:
        error_of(house.chat({**MENU, "messages": [{"role": "user", "content": ODD[name]}]}), 422, "unsupported_content")
        error_of(
            house.decide({**DECISION, "input": [{"role": "user", "content": ODD[name]}]}), 422, "unsupported_content"
        )
        assert not house.primary.sent


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "assistant", "content": None, "audio": {"id": "a"}},
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "user", "content": 5},
    ],
    ids=str,
)
def test_a_message_that_would_be_an_empty_turn_is_refused(house, message):
    gateway = house()
    error_of(gateway.chat({**MENU, "messages": [*CHAT["messages"], message]}), 422, "unsupported_content")
    assert not gateway.primary.sent


@pytest.mark.parametrize("kind", KINDS)
def test_tool_calls_and_their_results_are_shown_on_both_routes_alike(tmp_path, kind):
    reply, settings = KINDS[kind]
    models = {role: {"kind": kind, **settings} for role in ("primary", "guardian")}
    with House(tmp_path, primary=reply, guardian=reply, models={**models, **PINNED}) as house:
        messages = [
            {"role": "user", "content": "Where is my order?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "lost in Oslo"},
        ]
        items = [
            {"role": "user", "content": "Where is my order?"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "lost in Oslo"},
        ]
        choice = {"type": "choice", "choices": [{"value": action} for action in ACTIONS]}
        assert house.chat({"model": "support", "messages": messages, "arbitrage": {"actions": ACTIONS}}).ok
        assert house.decide({"model": "support", "input": items, "questions": [choice]}).ok
        assert len(set(house.primary.sent)) == 1
        shown = json.dumps(json.loads(house.primary.sent[0]))
        assert "look(" in shown
        assert "lost in Oslo" in shown


@pytest.mark.parametrize("item", [{"type": "reasoning", "summary": []}, {"type": "item_reference", "id": "x"}], ids=str)
def test_an_item_that_no_chat_model_takes_is_refused_by_name(house, item):
    error = error_of(house().decide({**DECISION, "input": [item]}), 422, "unsupported_content")
    assert item["type"] in error["message"]


def test_json_parts_are_shown_as_text(house):
    gateway = house()
    parts = [{"type": "input_json", "data": {"order": "№7"}}, {"type": "input_text", "text": "What?"}]
    body = {**DECISION["questions"][0], "instructions": ""}
    assert gateway.decide({**DECISION, "input": [{"role": "user", "content": parts}], "questions": [body]}).ok
    assert gateway.primary.bodies[0]["input"] == '{"order": "№7"}\nWhat?'


def test_a_free_text_policy_passes_pictures_on_as_they_are(house):
    gateway = house(form="text")
    schema = {"type": "object", "properties": {"team": {"enum": ["a", "b"]}}}
    body = {
        **CHAT,
        "messages": PICTURED,
        "response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}},
    }
    assert gateway.chat(body).json()["arbitrage"]["guarantee"] == "crc"
    assert gateway.primary.bodies[0]["messages"] == PICTURED


def test_a_certificate_of_a_model_that_saw_no_pictures_does_not_serve_one_that_does(house):
    gateway = house()
    gateway.stop()
    gateway.path.write_text(
        gateway.path.read_text().replace('kind = "decisions"', 'kind = "decisions"\npictures = true')
    )
    gateway.config = read_config(gateway.path)
    with pytest.raises(StaleCalibrationError, match=r"primary\.pictures: None then, True now"):
        gateway.start()
    gateway._serving = None


def test_a_function_gets_the_question_itself(house):
    seen = []

    def look(query):
        seen.append(query.context)
        return [1.0, 0.0]

    asyncio.run(FunctionScorer(look, name="looks").score(Query(PICTURED, ("a", "b"))))
    assert seen == [PICTURED]


def test_a_person_at_a_terminal_is_not_asked_about_what_cannot_be_shown():
    with pytest.raises(ReplyError, match="not shown 'image_url'"):
        asyncio.run(HumanScorer(name="me").score(Query(PICTURED, ("a", "b"))))


def test_a_row_with_a_picture_that_nobody_sees_is_no_opinion_and_missing(tmp_path):
    with House(tmp_path, primary=votes(*SURE), models=PINNED) as house:
        rows = tmp_path / "rows.jsonl"
        plain = {"question": "And this?", "choices": ACTIONS, "id": "p"}
        pictured = {"messages": PICTURED, "choices": ACTIONS, "id": "q"}
        whole = [{**pictured, "messages": [{"role": "user", "content": plain["question"]}], "id": "p"}, pictured]
        rows.write_text("\n".join(map(json.dumps, whole)))
        invoke("collect", rows, "-o", tmp_path / "log.parquet", "--config", house.path)
        log = ScoreLog.read(tmp_path / "log.parquet")
        assert log.missing.tolist() == [False, True]
        assert "not shown" in log.extra["guardian_error"][1]


def test_the_decisions_api_is_not_shown_pictures_beside_a_tool_s_messages(house):
    gateway = house(models={role: {"pictures": True} for role in ("primary", "guardian")})
    messages = [*PICTURED, {"role": "tool", "tool_call_id": "c1", "content": "x"}]
    error_of(gateway.chat({**MENU, "messages": messages}), 422, "unsupported_content")
    assert not gateway.primary.sent
    with pytest.raises(ReplyError, match="cannot be shown a picture beside"):
        messages_or_text(Query(messages, ("a", "b")))
