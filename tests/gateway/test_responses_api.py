"""The Responses API through the official client, and menus from schemas and tools that applications really send."""

import asyncio
import inspect
import json
from contextlib import ExitStack
from enum import Enum
from typing import Literal

import openai
import pytest
from openai.resources.responses import Responses
from pydantic import BaseModel

from conformal_arbitrage.gateway import responses_api
from tests.gateway.house import CHAT, MESSAGES, chunks, error_of, failing, says
from tests.scripted import Stream, chunk, ending, sse

LOOK = {"type": "function", "name": "look", "description": "Look.", "strict": True,
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}}  # fmt: skip
CALLS = [
    {"id": f"call-{k}", "type": "function", "function": {"name": "look", "arguments": f'{{"at":{k}}}'}} for k in (1, 2)
]
SHAPES = ["whole", "live"]


def streams(*deltas, finish="stop"):
    """An upstream that streams these deltas where it is asked to."""

    def reply(path, body, number):
        async def portions():
            for delta in deltas:
                yield sse(chunk(delta))
                await asyncio.sleep(0.01)
            yield ending(finish=finish)

        return Stream(portions())

    return reply


def speaking(shape):
    """Models of which the Primary answers ("whole"), or the Guardian as it writes ("live")."""
    if shape == "whole":
        return {"primary": says("Hello there.", 0.9)}
    words = [{"role": "assistant", "content": ""}, {"content": "Hello"}, {"content": " there."}]
    return {"primary": says("mine", 0.1), "guardian": streams(*words)}


def calling(shape):
    if shape == "whole":
        return {"primary": says("Let me look.", 0.9, tool_calls=CALLS, finish="tool_calls")}
    deltas = [{"content": "Let me look."}]
    for place, call in enumerate(CALLS):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        function = {"name": name, "arguments": ""}
        deltas.append({"tool_calls": [{"index": place, "id": call["id"], "type": "function", "function": function}]})
        deltas += [
            {"tool_calls": [{"index": place, "function": {"arguments": part}}]}
            for part in (arguments[:3], arguments[3:])
        ]
    return {"primary": says("mine", 0.1), "guardian": streams(*deltas, finish="tool_calls")}


@pytest.fixture
def text(house):
    """Start gateways in free text, each with a client that is closed in the end."""
    with ExitStack() as clients:

        def start(**models):
            gateway = house(form="text", task={"settings": "as requested"}, **models)
            gateway.openai = clients.enter_context(gateway.client())
            return gateway

        yield start


def test_every_field_of_the_official_client_is_known():
    client = {name for name in inspect.signature(Responses.create).parameters if not name.startswith("extra_")}
    assert client - {"self", "timeout"} <= responses_api._KNOWN


@pytest.mark.parametrize("asking", [{"input": "Say it."}, {"input": MESSAGES}])
def test_a_text(text, asking):
    gateway = text()
    reply = gateway.openai.responses.create(model="support", **asking)
    assert (reply.output_text, reply.status, reply.model) == ("mine", "completed", "support")
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (10, 5, 15)
    assert reply.arbitrage["guarantee"] == "crc"
    assert gateway.chat(CHAT).json()["choices"][0]["message"]["content"] == "mine"
    assert len(set(gateway.primary.sent)) == 1  # the same question as a chat request


def test_a_request_is_the_chat_request_that_asks_the_same(text):
    gateway = text()
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    gateway.openai.responses.create(
        model="support", input="Say it.", instructions="Be brief.", temperature=0, top_p=0.5, max_output_tokens=40,
        reasoning={"effort": "low"}, tools=[LOOK], tool_choice={"type": "function", "name": "look"}, user="me",
        parallel_tool_calls=False, metadata={"a": "b"}, store=False, truncation="disabled", include=[],
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
    )  # fmt: skip
    function = {name: value for name, value in LOOK.items() if name != "type"}
    gateway.chat({
        "model": "support", "messages": [{"role": "system", "content": "Be brief."}, *MESSAGES], "temperature": 0,
        "top_p": 0.5, "max_completion_tokens": 40, "reasoning_effort": "low", "user": "me", "store": False,
        "tools": [{"type": "function", "function": function}], "parallel_tool_calls": False, "metadata": {"a": "b"},
        "tool_choice": {"type": "function", "function": {"name": "look"}}, "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    })  # fmt: skip
    assert len(gateway.primary.sent) == 2
    assert json.loads(gateway.primary.sent[0]) == json.loads(gateway.primary.sent[1])


async def test_the_asynchronous_client(text):
    gateway = text()
    async with gateway.async_client() as client:
        reply = await client.responses.create(model="support", input="Say it.")
        stream = await client.responses.create(model="support", input="Say it.", stream=True)
        events = [event async for event in stream]
    assert reply.output_text == "mine"
    assert events[-1].response.output_text == "mine"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stream_of_text(text, shape):
    gateway = text(**speaking(shape))
    events = list(gateway.openai.responses.create(model="support", input="Say it.", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello there."
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.arbitrage["id"] == events[-1].response.arbitrage["id"]
    assert events[-1].response.output_text == "Hello there."
    assert events[-1].response.usage.output_tokens > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_the_client_s_own_stream_of_text(text, shape):
    gateway = text(**speaking(shape))
    with gateway.openai.responses.stream(model="support", input="Say it.") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == snapshots[-1] == "Hello there."


def test_tools(text):
    gateway = text(**calling("whole"))
    reply = gateway.openai.responses.create(model="support", input="Where is it?", tools=[LOOK])
    [said, *calls] = reply.output
    assert said.content[0].text == "Let me look."
    assert [(call.type, call.name, call.call_id, call.arguments) for call in calls] == [
        ("function_call", "look", "call-1", '{"at":1}'),
        ("function_call", "look", "call-2", '{"at":2}'),
    ]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "there"} for call in calls]
    history = [{"role": "user", "content": "Where is it?"}, *reply.output, *outputs]
    gateway.primary.reply = says("It is there.", 0.9)
    assert gateway.openai.responses.create(model="support", input=history, tools=[LOOK]).output_text == "It is there."
    assert gateway.primary.bodies[-1]["messages"] == [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}], "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call-1", "content": "there"},
        {"role": "tool", "tool_call_id": "call-2", "content": "there"},
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stream_of_tool_calls(text, shape):
    gateway = text(**calling(shape))
    with gateway.openai.responses.stream(model="support", input="Where is it?", tools=[LOOK]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert [item.arguments for item in final.output[1:]] == ['{"at":1}', '{"at":2}']
    assert [item.call_id for item in final.output[1:]] == ["call-1", "call-2"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == ['{"at":1}', '{"at":2}']


def test_custom_tools(text):
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": "ls"}}
    gateway = text(primary=says(None, 0.9, tool_calls=[call], finish="tool_calls"))
    body = {"model": "support", "input": "x", "tools": [{"type": "custom", "name": "run", "description": "Run."}]}
    [item] = gateway.openai.responses.create(**body).output
    assert (item.type, item.name, item.input, item.call_id) == ("custom_tool_call", "run", "ls", "c1")
    assert gateway.primary.bodies[0]["tools"] == [{"type": "custom", "custom": {"name": "run", "description": "Run."}}]
    events = list(gateway.openai.responses.create(**body, stream=True))
    assert events[-1].response.output[0].input == "ls"
    assert "response.custom_tool_call_input.done" in [event.type for event in events]


def test_an_answer_cut_short_is_incomplete(text):
    gateway = text(primary=says("mine", 0.9, finish="length"))
    reply = gateway.openai.responses.create(model="support", input="Say it.", max_output_tokens=5)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert gateway.primary.bodies[0]["max_tokens"] == 5
    *_, last = gateway.openai.responses.create(model="support", input="Say it.", max_output_tokens=5, stream=True)
    assert last.type == "response.incomplete"


def test_a_guardian_that_fails_is_the_client_s_own_exception(text):
    gateway = text(primary=says("mine", 0.1), guardian=failing(403))
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError):
            gateway.openai.responses.create(model="support", input="Say it.", stream=stream)


def test_a_guardian_that_breaks_off_ends_the_stream_with_an_error(text):
    def broken(*_):
        async def portions():
            yield sse(chunk({"content": "Hel"}))
            await asyncio.sleep(0.05)

        return Stream(portions(), cut=True)

    gateway = text(primary=says("mine", 0.1), guardian=broken)
    with pytest.raises(openai.APIError, match="Guardian"):
        list(gateway.openai.responses.create(model="support", input="Say it.", stream=True))


UNSUPPORTED = {
    "previous_response_id": "r", "conversation": "c", "background": True, "prompt": {"id": "p"}, "top_logprobs": 3,
    "max_tool_calls": 1, "truncation": "auto", "moderation": {"model": "m"}, "image": {}, "access_programs": {},
    "context_management": [], "tools": [{"type": "web_search"}], "tool_choice": {"type": "allowed_tools", "tools": []},
    "text": {"format": {"type": "grammar"}},
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_passed_on_is_refused_by_name(text, name):
    gateway = text()
    body = {"model": "support", "input": "x", "tools": [LOOK], name: UNSUPPORTED[name]}
    error = error_of(gateway.post("/v1/responses", body), 422, "unsupported_field")
    assert error["param"].startswith(name)
    assert gateway.post("/v1/responses", {**body, name: None}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        [], {"model": "support"}, {"model": "support", "input": []}, {"model": "support", "input": [1]},
        {"model": "support", "input": 5}, {"input": "x"}, {"model": "support", "input": "x", "mood": 1},
        {"model": "support", "input": "x", "temperature": "hot"}, {"model": "support", "input": "x", "text": "json"},
        {"model": "support", "input": "x", "tools": {}}, {"model": "support", "input": "x", "instructions": ["x"]},
        {"model": "support", "input": [{"role": 5, "content": "x"}]}, {"model": "support", "input": "x", "reasoning": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_request_is_the_callers_mistake(text, body):
    error_of(text().post("/v1/responses", body), 400)


def test_one_idempotency_key_is_one_decision(text):
    gateway = text()
    body = {"model": "support", "input": "x", "extra_headers": {"Idempotency-Key": "once"}}
    assert len({gateway.openai.responses.create(**body).id for _ in range(3)}) == 1
    assert len(gateway.primary.bodies) == 1


class Team(Enum):
    BILLING = "billing"
    BUG = "a bug"
    OTHER = "other"


class Routed(BaseModel):
    team: Team


class Reasoned(BaseModel):
    reasoning: str
    team: Literal["billing", "a bug", "other"]


class Verdict(BaseModel):
    spam: bool


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Routed, {"team": "billing"}),
        (Reasoned, {"reasoning": "", "team": "billing"}),
        (Verdict, {"spam": True}),
    ],
)
def test_menus_from_schemas_through_both_apis(house, shape, said):
    gateway = house()
    empty = {"response": ["text.format.reasoning"], "chat.completion": ["response_format.reasoning"]}
    with gateway.client() as client:
        response = client.responses.parse(model="support", input="A letter.", text_format=shape)
        completion = client.chat.completions.parse(
            model="support", messages=[{"role": "user", "content": "A letter."}], response_format=shape
        )
        with client.responses.stream(model="support", input="A letter.", text_format=shape) as stream:
            streamed = stream.get_final_response()
    for parsed in (response.output_parsed, completion.choices[0].message.parsed, streamed.output_parsed):
        assert parsed.model_dump(mode="json") == said
    for reply in (response, completion):
        assert reply.arbitrage["guarantee"] == (
            "crc" if "team" in said else "none"
        )  # its certificate has seen menus of 3
        assert reply.arbitrage.get("ignored") == (empty[reply.object] if "reasoning" in said else None)
    assert len(set(gateway.primary.sent)) == 1


def test_settings_without_effect_on_a_menu_have_their_own_names(house):
    gateway = house()
    body = {"model": "support", "input": "x", "arbitrage": {"actions": ["a", "b", "c"]}, "temperature": 0}
    settings = {"max_output_tokens": 5, "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
    reply = gateway.post("/v1/responses", {**body, **settings}).json()
    assert reply["arbitrage"]["ignored"] == ["max_output_tokens", "reasoning.effort", "temperature", "text.verbosity"]
    assert reply["output"][0]["content"][0]["text"] == "a"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "route"}}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_menu_from_the_enum_of_a_single_tool(house, choice, stream):
    gateway = house()
    tool = {"type": "function", "function": {"name": "route", "parameters": Reasoned.model_json_schema()}}
    reply = gateway.chat({**CHAT, "tools": [tool], "tool_choice": choice, "stream": stream})
    if stream:
        deltas = [document["choices"][0]["delta"] for document in chunks(reply) if document["choices"]]
        [[call]] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        seen = chunks(reply)[-1]["arbitrage"]
    else:
        [answer] = reply.json()["choices"]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        [call] = answer["message"]["tool_calls"]
        seen = reply.json()["arbitrage"]
    assert (call["type"], call["function"]["name"]) == ("function", "route")
    assert json.loads(call["function"]["arguments"]) == {"reasoning": "", "team": "billing"}
    assert (seen["guarantee"], seen["ignored"]) == ("crc", ["tools.reasoning"])


def test_a_menu_from_a_tool_in_the_responses_api(house):
    gateway = house()
    tool = {"type": "function", "name": "route", "parameters": Routed.model_json_schema(), "strict": True}
    with gateway.client() as client:
        reply = client.responses.create(model="support", input="x", tools=[tool], tool_choice="required")
    [item] = reply.output
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "route", {"team": "billing"})


TOOL = {"type": "function", "function": {"name": "route", "parameters": Routed.model_json_schema()}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": Routed.model_json_schema()}}
NO_MENUS = {
    "a tool that need not be called": {"tools": [TOOL]},
    "a tool by choice": {"tools": [TOOL], "tool_choice": "auto"},
    "two tools": {"tools": [TOOL, OTHER], "tool_choice": "required"},
    "another tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    "a tool and a format": {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
}


@pytest.mark.parametrize("name", NO_MENUS)
def test_what_leaves_the_model_another_choice_is_no_menu(house, name):
    error_of(house().chat({**CHAT, **NO_MENUS[name]}), 422, "wrong_form")


class Scored(BaseModel):
    team: Team
    score: float


class Two(BaseModel):
    team: Team
    urgent: bool


@pytest.mark.parametrize("shape", [Scored, Two])
def test_a_schema_with_more_to_decide_is_no_menu(house, shape):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": shape.model_json_schema()}}
    error_of(house().chat({**CHAT, "response_format": form}), 422, "wrong_form")


def test_models_can_be_retrieved_by_name_and_alias(house):
    gateway = house(policy={"aliases": ["gpt-4o"]})
    with gateway.client() as client:
        assert client.models.retrieve("support").id == "support"
        assert client.models.retrieve("gpt-4o").id == "gpt-4o"
        assert client.models.retrieve("gpt-4o").arbitrage["alias_of"] == "support"
        assert client.models.retrieve("support").arbitrage["form"] == "menu"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nothing")
