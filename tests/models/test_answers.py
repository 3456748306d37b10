import asyncio
import json
import math

import pytest

from conformal_arbitrage.errors import CutOffError, RefusalError, ReplyError, ScorerError, UpstreamError
from conformal_arbitrage.models import Call, ChatAnswerer, Endpoint, Settings
from conformal_arbitrage.models.chat import answer_text, mean_probability, rating
from conformal_arbitrage.types import ChatRequest, Spent
from tests.models.asking import silent
from tests.scripted import Upstream, completion

HELLO = ChatRequest({"messages": [{"role": "user", "content": "Name a {red} flower."}]}, id="r1")


def answerer(*, confidence=None, mode="plain", **settings):
    options = Settings(**{"model": "m", **settings})
    return lambda port: ChatAnswerer(port=port, settings=options, confidence=confidence, mode=mode)


def answered(make, reply, request=HELLO):
    async def ask():
        async with Upstream(reply) as upstream, Endpoint(upstream.url) as endpoint:
            return await make(endpoint).answer(request), upstream

    return asyncio.run(ask())


def unanswered(make, reply, error, request=HELLO):
    async def ask():
        async with Upstream(reply) as upstream, Endpoint(upstream.url) as endpoint:
            with pytest.raises(error) as caught:
                await make(endpoint).answer(request)
            return caught.value, upstream

    return asyncio.run(ask())


def with_logprobs(*values, **rest):
    return completion("a rose", logprobs={"content": [{"token": "t", "logprob": v} for v in values]}, **rest)


def in_turn(*documents):
    return lambda path, body, number: documents[number]


def call(name, arguments, id="call_1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


APPLICATION = {
    "messages": [
        {"role": "system", "content": "Use tools."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Book it"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call("look", '{"a": 1}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "free"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "book", "parameters": {"type": "object", "properties": {}}},
            "strict": True,
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "book"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "temperature": 0.9,
    "max_tokens": 77,
    "stop": ["\n"],
    "user": "u",
    "x_unknown_field": [1, {"b": None}],
}


@pytest.mark.parametrize("confidence", [None, "ask", "logprob"])
def test_the_request_is_sent_as_the_application_wrote_it(confidence):
    before = json.dumps(APPLICATION)
    settings = {"temperature": 0.1, "max_tokens": 500}
    _, upstream = answered(
        answerer(confidence=confidence, **settings), lambda *_: completion("a rose"), ChatRequest(APPLICATION)
    )
    sent = upstream.bodies[0]
    assert sent.pop("logprobs", None) == (True if confidence == "logprob" else None)
    assert sent == {**APPLICATION, "model": "m"}
    assert json.dumps(APPLICATION) == before


def test_the_configured_model_always_applies():
    _, upstream = answered(
        answerer(), lambda *_: completion("a rose"), ChatRequest({**HELLO.body, "model": "the application's"})
    )
    assert upstream.bodies[0]["model"] == "m"


def test_settings_fill_only_fields_that_the_request_omits():
    settings = {"temperature": 0.3, "max_tokens": 500, "seed": 4, "reasoning_effort": "low"}
    _, upstream = answered(
        answerer(**settings), lambda *_: completion("a rose"), ChatRequest({**HELLO.body, "seed": 9})
    )
    assert upstream.bodies[0] == {**HELLO.body, "model": "m", **settings, "seed": 9}


@pytest.mark.parametrize(("fields", "expected"), [({}, 500), ({"max_tokens": 20}, 20), ({"max_tokens": "many"}, None)])
async def test_the_call_names_the_most_tokens_its_reply_can_have(fields, expected):
    calls = []

    class Watched(Endpoint):
        async def call(self, call: Call):
            calls.append(call)
            return await super().call(call)

    async with Upstream(lambda *_: completion("a rose")) as upstream, Watched(upstream.url) as endpoint:
        await answerer(max_tokens=500)(endpoint).answer(ChatRequest({**HELLO.body, **fields}, id="r1"))
    assert [(c.output_limit, c.id) for c in calls] == [(expected, "r1")]


def test_the_answer_is_the_whole_message_and_document_of_the_endpoint():
    document = completion("a rose", model="m-1", usage=(12, 3), reasoning=1)
    document["choices"][0]["message"]["annotations"] = []
    answer, upstream = answered(answerer(), lambda *_: document)
    assert answer.message == document["choices"][0]["message"]
    assert answer.document == document
    assert answer.served == "m-1"
    assert answer.confidence is None
    assert answer.spent == Spent(calls=1, input_tokens=12, output_tokens=3, reasoning_tokens=1, cost=None)
    assert len(upstream.bodies) == 1


def test_tool_calls_are_an_answer():
    calls = [call("book", '{"day": 1}')]
    answer, _ = answered(answerer(), lambda *_: completion(None, tool_calls=calls, finish="tool_calls"))
    assert answer.message["tool_calls"] == calls


def test_the_token_probability_is_exp_of_the_mean_log_probability():
    values = (-0.1, -0.5, -0.9)
    answer, upstream = answered(answerer(confidence="logprob"), lambda *_: with_logprobs(*values))
    assert answer.confidence == pytest.approx(math.exp(-0.5))
    assert len(upstream.bodies) == 1
    assert upstream.bodies[0]["logprobs"] is True


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {"content": None},
        {"content": []},
        {"content": [{"token": "t"}]},
        {"content": [{"logprob": -0.1}, {"logprob": None}]},
        {"content": [{"logprob": -0.1}, {"logprob": 0.5}]},
        {"content": [{"logprob": "-0.1"}]},
        {"content": [None]},
        {"content": "text"},
        [],
    ],
)
def test_an_answer_without_all_token_probabilities_has_no_confidence(logprobs):
    answer, _ = answered(answerer(confidence="logprob"), lambda *_: completion("a rose", logprobs=logprobs))
    assert answer.confidence is None
    assert answer.message["content"] == "a rose"


def test_a_token_probability_is_at_most_one():
    assert mean_probability({"logprobs": {"content": [{"logprob": 1e-7}]}}) == 1.0
    assert mean_probability({"logprobs": {"content": [{"logprob": 0}]}}) == 1.0
    assert mean_probability({"logprobs": {"content": [{"logprob": -9999.0}]}}) == 0.0


def test_a_second_short_call_rates_the_finished_answer_and_both_calls_count():
    replies = in_turn(
        completion("a rose", usage=(12, 3), reasoning=1), completion('{"confidence": 0.8}', usage=(60, 7), reasoning=2)
    )
    answer, upstream = answered(answerer(confidence="ask"), replies)
    assert answer.confidence == 0.8
    assert answer.message["content"] == "a rose"
    assert answer.document["usage"]["prompt_tokens"] == 12
    assert answer.spent == Spent(calls=2, input_tokens=72, output_tokens=10, reasoning_tokens=3, cost=None)
    first, second = upstream.bodies
    assert first["messages"] == HELLO.body["messages"]
    (message,) = second.pop("messages")
    assert second == {"model": "m", "temperature": 0.1, "max_tokens": 50}
    assert "user: Name a {red} flower." in message["content"]
    assert "# Answer\na rose" in message["content"]


def test_the_rating_leaves_room_for_a_model_that_reasons():
    replies = in_turn(completion("a rose"), completion('{"confidence": 1}'))
    _, upstream = answered(answerer(confidence="ask", max_tokens=900, token_field="max_completion_tokens"), replies)
    assert upstream.bodies[1]["max_completion_tokens"] == 900
    assert "max_tokens" not in upstream.bodies[1]


def test_the_rating_sees_tool_calls_and_is_not_offered_tools():
    replies = in_turn(completion(None, tool_calls=[call("book", '{"day":1}')]), completion('{"confidence": 0.5}'))
    _, upstream = answered(answerer(confidence="ask"), replies, ChatRequest(APPLICATION))
    assert '"name": "book"' in upstream.bodies[1]["messages"][0]["content"]
    assert "tools" not in upstream.bodies[1]
    assert "response_format" not in upstream.bodies[1]


@pytest.mark.parametrize(
    ("mode", "kind"), [("plain", None), ("json_object", "json_object"), ("json_schema", "json_schema")]
)
def test_the_mode_is_for_the_second_call_only(mode, kind):
    replies = in_turn(completion("a rose"), completion('{"confidence": 0.5}'))
    _, upstream = answered(answerer(confidence="ask", mode=mode), replies)
    assert "response_format" not in upstream.bodies[0]
    assert upstream.bodies[1].get("response_format", {}).get("type") == kind
    if mode == "json_schema":
        named = upstream.bodies[1]["response_format"]["json_schema"]
        assert (named["strict"], named["schema"]["required"]) == (True, ["confidence"])


@pytest.mark.parametrize(
    "second",
    [
        completion("quite sure"),
        completion('{"confidence": 1.2}'),
        completion('{"confidence": -0.1}'),
        completion('{"confidence": "0.9"}'),
        completion('{"confidence": true}'),
        completion('{"confidence": NaN}'),
        completion('{"sure": 0.9}'),
        completion("", finish="length"),
        {**completion("x"), "choices": []},
    ],
)
def test_a_malformed_rating_gives_no_confidence_and_both_calls_count(second):
    answer, upstream = answered(answerer(confidence="ask"), in_turn(completion("a rose"), second))
    assert answer.confidence is None
    assert answer.message["content"] == "a rose"
    assert answer.spent == Spent(calls=2, input_tokens=20, output_tokens=10, cost=None)
    assert len(upstream.bodies) == 2


def test_a_failed_rating_gives_no_confidence_and_the_answer_is_kept():
    answer, _ = answered(answerer(confidence="ask"), in_turn(completion("a rose"), (500, {"error": "down"})))
    assert answer.confidence is None
    assert answer.message["content"] == "a rose"
    assert answer.spent.calls == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"c": 0}', 0.0), ('{"c": 1}', 1.0), ('Well: {"c": 0.25}.', 0.25), ("{}", None), ("0.5", None), ("{", None)],
)
def test_a_rating_is_the_number_under_its_name(text, value):
    assert rating(text, "c") == value


def test_without_an_answer_there_is_an_error_and_no_rating():
    error, upstream = unanswered(
        answerer(confidence="ask"), lambda *_: completion(None, finish="length", reasoning=5), CutOffError
    )
    assert "5 of them for reasoning" in str(error)
    assert len(upstream.bodies) == 1
    unanswered(answerer(), lambda *_: completion(""), ReplyError)
    refusal = completion(None)
    refusal["choices"][0]["message"]["refusal"] = "no"
    unanswered(answerer(), lambda *_: refusal, RefusalError)
    error, _ = unanswered(answerer(), lambda *_: (401, {"error": {"message": "who?"}}), UpstreamError)
    assert error.status == 401
    assert issubclass(UpstreamError, ScorerError)


def test_the_served_model_is_pinned():
    error, _ = unanswered(answerer(served="m-1"), lambda *_: completion("a rose", model="m-2"), ReplyError)
    assert "'m-2'" in str(error)


def test_equal_tool_calls_have_equal_texts_whatever_their_ids_key_order_and_whitespace():
    one = {"content": None, "tool_calls": [call("book", '{"day": 1, "at": {"x": 1, "y": [2, 3]}}', id="call_1")]}
    other = {"content": "", "tool_calls": [call("book", '{"at":{"y":[2,3],"x":1},\n"day":1}', id="call_2")]}
    assert answer_text(one) == answer_text(other)


@pytest.mark.parametrize("arguments", ['{"day": 2}', '{"day": "1"}', '{"day": 1, "hour": 3}', "{}", "not json"])
def test_tool_calls_with_different_arguments_have_different_texts(arguments):
    one = {"tool_calls": [call("book", '{"day": 1}')]}
    assert answer_text(one) != answer_text({"tool_calls": [call("book", arguments)]})
    assert answer_text(one) != answer_text({"tool_calls": [call("cancel", '{"day": 1}')]})


def test_all_tool_calls_count_in_their_order():
    first, second = call("book", '{"day": 1}'), call("pay", '{"sum": 2}')
    texts = [answer_text({"tool_calls": calls}) for calls in ([first], [second], [first, second], [second, first])]
    assert len(set(texts)) == 4
    assert [c["name"] for c in json.loads(texts[2])] == ["book", "pay"]


def test_custom_tools_and_malformed_arguments_are_kept_as_text():
    custom = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls  -l"}}
    assert json.loads(answer_text({"tool_calls": [custom]})) == [{"name": "shell", "arguments": "ls  -l"}]
    assert json.loads(answer_text({"tool_calls": [call("f", "{broken")]})) == [{"name": "f", "arguments": "{broken"}]


def test_the_text_of_an_answer_without_tool_calls_is_its_content():
    assert answer_text({"content": "a rose"}) == "a rose"
    assert answer_text({"content": "a rose", "tool_calls": []}) == "a rose"
    assert answer_text({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "rose"}]}) == "a\nrose"
    assert answer_text({"content": None}) == ""


def test_a_malformed_tool_call_is_an_error():
    with pytest.raises(ReplyError, match="not a tool call"):
        answer_text({"tool_calls": ["book"]})


def test_an_answer_with_a_malformed_tool_call_is_refused_and_its_tokens_count():
    error, _ = unanswered(answerer(), lambda *_: completion(None, tool_calls=["book"], usage=(12, 3)), ReplyError)
    assert "not a tool call" in str(error)
    assert error.spent == Spent(calls=1, input_tokens=12, output_tokens=3, cost=None)


@pytest.mark.parametrize("confidence", [None, "logprob", "ask"])
def test_a_cancelled_caller_cancels_the_upstream_call(confidence):
    async def ask():
        async with silent(-1) as server, Endpoint(server.url) as endpoint:
            asking = asyncio.create_task(answerer(confidence=confidence)(endpoint).answer(HELLO))
            await asyncio.wait_for(server.all_came.wait(), 10)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            return server.came, await server.everyone_left()

    assert asyncio.run(ask()) == (1, True)


def test_everything_that_answers_depend_on_changes_the_identity():
    port, other = Endpoint("http://127.0.0.1:1/v1"), Endpoint("http://127.0.0.1:2/v1")
    ways = [{}, {"confidence": "ask"}, {"confidence": "logprob"}, {"confidence": "ask", "mode": "json_object"}]
    ways += [{"model": "x"}, {"temperature": 0.5}, {"max_tokens": 9}, {"seed": 1}, {"served": "x"}]
    ways.append({"reasoning_effort": "low"})
    identities = [answerer(**way)(port).identity for way in ways] + [answerer()(other).identity]
    assert len({json.dumps(identity, sort_keys=True) for identity in identities}) == len(identities)
