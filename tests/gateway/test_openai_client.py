import asyncio
import json
from enum import Enum

import openai
import pytest
from pydantic import BaseModel

from tests.gateway.house import CHAT, MESSAGES, SURE, UNSURE, failing, says, votes

CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b", "description": "bee"}]}
PREDICATE = {"type": "predicate", "instructions": "Is it so?", "name": "so"}
SCORE = {
    "type": "score",
    "instructions": "How much?",
    "levels": [{"label": "low"}, {"label": "mid"}, {"label": "high"}],
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLS = [
    {"id": f"call-{k}", "type": "function", "function": {"name": "look", "arguments": f'{{"k":{k}}}'}} for k in (1, 2)
]


@pytest.fixture
def menu(house):
    gateway = house()
    with gateway.client() as client:
        gateway.openai = client
        yield gateway


@pytest.fixture
def text(house):
    gateway = house(form="text")
    with gateway.client() as client:
        gateway.openai = client
        yield gateway


def decided(gateway, *questions, **rest):
    return gateway.openai.decisions.create(model="support", input="A letter.", questions=list(questions), **rest)


def test_a_choice(menu):
    reply = decided(menu, CHOICE)
    [answer] = reply.answers
    assert isinstance(reply, openai.types.Decision)
    assert (answer.type, answer.choice, answer.confidence) == ("choice", "a", 0.9)
    assert [(p.value, p.probability) for p in answer.probabilities] == [("a", 0.9), ("b", pytest.approx(0.1))]
    assert answer.arbitrage["decided_by"] == "primary"
    assert reply.model == "support"
    assert reply.usage.total_tokens == 15


def test_a_predicate_is_a_choice_of_two(menu):
    [answer] = decided(menu, PREDICATE).answers
    assert (answer.type, answer.name, answer.probability) == ("predicate", "so", 0.9)
    assert [c["value"] for c in menu.primary.bodies[0]["questions"][0]["choices"]] == ["true", "false"]


def test_a_score_s_levels_are_ordered_actions(menu):
    menu.primary.reply = votes(0.0, 0.1, 0.9)
    [answer] = decided(menu, SCORE).answers
    assert (answer.type, answer.confidence) == ("score", 0.9)
    assert answer.score == pytest.approx(1.9)
    assert [(p.label, p.value) for p in answer.probabilities] == [("low", 0), ("mid", 1), ("high", 2)]


def test_several_questions_are_answered_in_order(menu):
    reply = decided(menu, CHOICE, PREDICATE, SCORE)
    assert [answer.type for answer in reply.answers] == ["choice", "predicate", "score"]
    assert len({answer.arbitrage["id"] for answer in reply.answers}) == 3
    assert reply.usage.input_tokens == 30


def test_booleans_stay_booleans_as_choices(menu):
    [answer] = decided(menu, {**CHOICE, "choices": [{"value": True}, {"value": False}]}).answers
    assert answer.choice is True
    assert [p.value for p in answer.probabilities] == [True, False]


def test_the_guardian_s_choice_comes_back_in_the_same_shape(menu):
    menu.primary.reply = votes(*UNSURE)
    [answer] = decided(menu, CHOICE).answers
    assert (answer.choice, answer.confidence, answer.arbitrage["decided_by"]) == ("b", 1.0, "guardian")
    assert [leg["role"] for leg in answer.arbitrage["legs"]] == ["primary", "guardian"]


def test_messages_and_parts_are_taken_as_input(menu):
    parts = [{"type": "input_text", "text": "Look at this."}]
    lines = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "I see."},
        {"type": "function_call", "arguments": '{"city": "Rome"}', "call_id": "1", "name": "weather"},
        {"type": "function_call_output", "call_id": "1", "output": "It rains."},
    ]
    menu.openai.decisions.create(model="support", input=lines, questions=[{**CHOICE, "instructions": parts}])
    shown = str(menu.primary.bodies[0]["input"])
    for word in ("Look at this.", "I see.", "Rome", "It rains."):
        assert word in shown


async def test_the_async_client_decides_too(menu):
    async with menu.async_client() as client:
        calls = [client.decisions.create(model="support", input="x", questions=[CHOICE, PREDICATE]) for _ in range(10)]
        replies = await asyncio.gather(*calls)
    assert {answer.arbitrage["decided_by"] for one in replies for answer in one.answers} == {"primary"}
    assert len({answer.arbitrage["id"] for one in replies for answer in one.answers}) == 20


def test_a_chat(text):
    reply = text.openai.chat.completions.create(**CHAT)
    assert isinstance(reply, openai.types.chat.ChatCompletion)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("mine", "stop")
    assert (reply.model, reply.usage.total_tokens) == ("support", 15)
    assert reply.arbitrage["decided_by"] == "primary"


def test_headers_are_there_for_whoever_wants_them(text):
    raw = text.openai.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["x-arbitrage-decision-id"] == raw.parse().arbitrage["id"]


async def test_an_async_chat_and_stream(text):
    async with text.async_client() as client:
        whole = await client.chat.completions.create(**CHAT)
        stream = await client.chat.completions.create(**CHAT, stream=True)
        pieces = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "mine"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "mine"
    assert pieces[0].arbitrage["id"] == pieces[-1].arbitrage["id"]


def test_a_stream_with_usage(text):
    pieces = list(text.openai.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == "mine"
    assert [p.usage.total_tokens for p in pieces if p.usage is not None] == [15]


def test_the_client_s_own_stream_helper_puts_the_answer_together(text):
    with text.openai.chat.completions.stream(**CHAT) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "mine"


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Verdict(BaseModel):
    colour: Colour


def test_structured_output_with_an_enum(menu):
    reply = menu.openai.chat.completions.parse(model="support", messages=MESSAGES, response_format=Verdict)
    assert reply.choices[0].message.parsed == Verdict(colour=Colour.RED)
    assert [c["value"] for c in menu.primary.bodies[0]["questions"][0]["choices"]] == ["red", "blue"]


def test_structured_output_of_another_kind_goes_through_as_it_is(text):
    class Person(BaseModel):
        name: str
        age: int

    text.primary.reply = says('{"name": "Kim", "age": 3}', 0.9)
    reply = text.openai.chat.completions.parse(model="support", messages=MESSAGES, response_format=Person)
    assert reply.choices[0].message.parsed == Person(name="Kim", age=3)
    assert text.primary.bodies[0]["response_format"]["json_schema"]["name"] == "Person"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_tools(text, choice, parallel):
    calls = CALLS if parallel else CALLS[:1]
    text.primary.reply = says(None, 0.9, tool_calls=calls, finish="tool_calls")
    body = {**CHAT, "tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": parallel}
    reply = text.openai.chat.completions.create(**body)
    assert reply.choices[0].finish_reason == "tool_calls"
    assert [call.model_dump(exclude_none=True) for call in reply.choices[0].message.tool_calls] == calls
    sent = text.primary.bodies[0]
    assert (sent["tool_choice"], sent["parallel_tool_calls"], sent["tools"]) == (choice, parallel, [LOOK])
    with text.openai.chat.completions.stream(**body) as stream:
        result = stream.get_final_completion().choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in result] == [{"k": k + 1} for k in range(len(calls))]


def test_a_menu_through_extra_body(menu):
    reply = menu.openai.chat.completions.create(**CHAT, extra_body={"arbitrage": {"actions": ["x", "y"]}})
    assert reply.choices[0].message.content == "x"


def test_models_are_policies(menu):
    assert [model.id for model in menu.openai.models.list()] == ["support"]


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"model": "none"}, openai.NotFoundError),
        ({"questions": []}, openai.UnprocessableEntityError),
        ({"input": 5}, openai.BadRequestError),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, openai.UnprocessableEntityError),
    ],
)
def test_errors_are_the_client_s_own_exceptions(menu, changed, kind):
    body = {"model": "support", "input": "x", "questions": [CHOICE], **changed}
    with pytest.raises(kind) as caught:
        menu.openai.decisions.create(**body)
    assert caught.value.body["message"]
    assert caught.value.code == caught.value.body["code"]


def test_errors_of_keys_limits_and_models_are_the_client_s_own_exceptions(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing(400), gateway={"requests_per_minute": 2})
    secret, _ = gateway.key("call")
    body = {"model": "support", "input": "x", "questions": [CHOICE]}
    with gateway.client("arb-wrong") as client, pytest.raises(openai.AuthenticationError):
        client.decisions.create(**body)
    with gateway.client(secret) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.decisions.create(**body)
        assert caught.value.status_code == 502
        gateway.primary.reply = votes(*SURE)
        client.decisions.create(**{**body, "input": "y"})
        with pytest.raises(openai.RateLimitError) as caught:
            client.decisions.create(**body)
        assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_client_that_retries_under_its_idempotency_key_pays_once(menu):
    key = {"Idempotency-Key": "once"}
    replies = [decided(menu, CHOICE, extra_headers=key) for _ in range(3)]
    assert len({one.answers[0].arbitrage["id"] for one in replies}) == 1
    assert len(menu.primary.bodies) == 1
