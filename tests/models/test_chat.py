import json

import pytest

from conformal_arbitrage.errors import CutOffError, RefusalError, ReplyError, UpstreamError
from conformal_arbitrage.models import ChatScorer, Confidences, Endpoint, PairPrompt, Settings
from conformal_arbitrage.types import Query, Spent
from tests.models.asking import QUERY, refused, scored
from tests.scripted import completion, scores

PAIR = Query("How do I boil an egg?", ("In water.", "In a nest."), id="p1")


def scorer(*, prompt=None, mode="plain", reask=False, **settings):
    sent = Settings(**{"model": "m", **settings})
    return lambda port: ChatScorer(port=port, settings=sent, prompt=prompt or Confidences(), mode=mode, reask=reask)


def good(path, body, number):
    return scores(0.5, 0.25, 0.25)


def always(document):
    return lambda path, body, number: document


def in_turn(*documents):
    return lambda path, body, number: documents[number]


def test_scores_come_with_the_raw_reply_the_served_model_and_the_usage():
    result, upstream = scored(scorer(), always(scores(0.5, 0.25, 0.25, model="m-2024", usage=(40, 9), reasoning=3)))
    assert result.values == (0.5, 0.25, 0.25)
    assert json.loads(result.raw) == {"scores": [0.5, 0.25, 0.25]}
    assert result.served == "m-2024"
    assert result.spent == Spent(calls=1, input_tokens=40, output_tokens=9, reasoning_tokens=3, cost=None)
    assert len(upstream.bodies) == 1


def test_the_request_goes_to_chat_completions():
    paths = []

    def reply(path, body, number):
        paths.append(path)
        return scores(1, 0, 0)

    scored(scorer(), reply)
    assert paths == ["/chat/completions"]


def test_the_request_is_the_settings_and_the_prompt_and_nothing_else():
    _, upstream = scored(scorer(), good)
    assert upstream.bodies == [
        {"model": "m", "temperature": 0.1, "max_tokens": 50, "messages": Confidences().messages(QUERY)}
    ]


def test_every_setting_is_sent_under_its_name():
    settings = {"temperature": 0.7, "max_tokens": 900, "reasoning_effort": "low", "seed": 7}
    _, upstream = scored(scorer(**settings), good)
    assert {name: upstream.bodies[0][name] for name in settings} == settings


def test_zero_is_a_setting():
    _, upstream = scored(scorer(temperature=0.0, seed=0), good)
    assert (upstream.bodies[0]["temperature"], upstream.bodies[0]["seed"]) == (0.0, 0)


@pytest.mark.parametrize("name", ["temperature", "reasoning_effort", "seed", "response_format"])
def test_settings_that_are_none_are_left_out_of_the_request(name):
    _, upstream = scored(scorer(temperature=None), good)
    assert name not in upstream.bodies[0]


def test_the_token_limit_is_sent_under_the_name_the_endpoint_wants():
    _, upstream = scored(scorer(max_tokens=900, token_field="max_completion_tokens"), good)
    assert upstream.bodies[0]["max_completion_tokens"] == 900
    assert "max_tokens" not in upstream.bodies[0]


@pytest.mark.parametrize(("options", "limit"), [(2, 50), (4, 50), (5, 62), (20, 242)])
def test_the_token_limit_grows_with_the_options_unless_it_is_set(options, limit):
    query = Query("Which?", tuple(f"option {k}" for k in range(options)))
    reply = always(scores(*[0.5] * options))
    assert scored(scorer(), reply, query)[1].bodies[0]["max_tokens"] == limit
    assert scored(scorer(max_tokens=7), reply, query)[1].bodies[0]["max_tokens"] == 7


def test_in_schema_mode_the_reply_must_hold_one_number_per_option():
    _, upstream = scored(scorer(mode="json_schema"), good)
    wanted = upstream.bodies[0]["response_format"]
    assert wanted["type"] == "json_schema"
    assert wanted["json_schema"] == {"name": "scores", "strict": True, "schema": Confidences().schema(3)}
    numbers = wanted["json_schema"]["schema"]["properties"]["scores"]
    assert (numbers["minItems"], numbers["maxItems"]) == (3, 3)


def test_json_mode_asks_for_an_object():
    _, upstream = scored(scorer(mode="json_object"), good)
    assert upstream.bodies[0]["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize("mode", ["json_schema", "json_object", "plain"])
def test_a_prompt_for_plain_text_asks_for_no_format_in_any_mode(mode):
    result, upstream = scored(scorer(prompt=PairPrompt(), mode=mode), always(completion("0.37, 0.54")), PAIR)
    assert result.values == (0.37, 0.54)
    assert "response_format" not in upstream.bodies[0]


@pytest.mark.parametrize("mode", ["json_schema", "json_object", "plain"])
def test_the_mode_is_not_switched_after_an_unreadable_reply(mode):
    _, upstream = refused(scorer(mode=mode, reask=True), always(completion("red")), error=ReplyError)
    assert len(upstream.bodies) == 2
    assert upstream.bodies[0].get("response_format") == upstream.bodies[1].get("response_format")


def test_a_reply_cut_off_before_any_content_names_the_limit_and_the_reasoning():
    error, _ = refused(
        scorer(), always(completion("", finish="length", usage=(10, 50), reasoning=48)), error=CutOffError
    )
    assert "50 tokens, 48 of them for reasoning" in str(error)
    assert "raise max_tokens" in str(error)
    assert error.spent.output_tokens == 50


def test_a_reply_cut_off_without_reasoning_does_not_mention_any():
    error, _ = refused(scorer(), always(completion(None, finish="length", usage=(10, 50))), error=CutOffError)
    assert "50 tokens)" in str(error)
    assert "reasoning" not in str(error)


def test_a_refusal_is_reported_as_one():
    document = completion(None)
    document["choices"][0]["message"]["refusal"] = "I cannot help with roses."
    error, _ = refused(scorer(), always(document), error=RefusalError)
    assert "I cannot help with roses." in str(error)
    assert error.spent.calls == 1


@pytest.mark.parametrize("content", ["", " \n", None, 5, ["text"]])
def test_an_empty_reply_is_an_error_with_its_finish_reason(content):
    error, _ = refused(scorer(), always(completion(content, finish="content_filter")), error=ReplyError)
    assert type(error) is ReplyError
    assert "content_filter" in str(error)
    assert error.spent.calls == 1


def test_tool_calls_are_not_scores():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    error, _ = refused(scorer(), always(completion(None, tool_calls=[call])), error=ReplyError)
    assert "empty" in str(error)


@pytest.mark.parametrize("choices", [None, [], "none", [None], ["text"]])
def test_a_reply_without_choices_is_an_error(choices):
    error, _ = refused(scorer(), always({**completion("x"), "choices": choices}), error=ReplyError)
    assert "no choices" in str(error)


@pytest.mark.parametrize("message", [None, "text", {}])
def test_a_choice_without_a_message_is_an_error(message):
    error, _ = refused(scorer(), always({**completion("x"), "choices": [{"message": message}]}), error=ReplyError)
    assert "empty" in str(error)


def test_a_model_other_than_the_pinned_one_is_refused():
    error, _ = refused(scorer(served="m-2024"), always(scores(1, 0, 0, model="m-2025")), error=ReplyError)
    assert "'m-2025'" in str(error)
    assert "'m-2024'" in str(error)
    assert "arbitrage check" in str(error)
    assert error.spent.input_tokens == 10


def test_an_endpoint_that_does_not_name_its_model_is_refused_when_pinned():
    document = scores(1, 0, 0)
    del document["model"]
    refused(scorer(served="m-2024"), always(document), error=ReplyError)
    result, _ = scored(scorer(), always(document))
    assert result.served is None


def test_the_pinned_model_is_accepted():
    result, _ = scored(scorer(served="m-2024"), always(scores(1, 0, 0, model="m-2024")))
    assert result.served == "m-2024"


@pytest.mark.parametrize(
    "text", ["red", '{"scores": [0.5]}', '{"scores": [1, 2, 3]}', '{"scores": "high"}', "[1, 0, 0]"]
)
def test_an_unreadable_reply_is_an_error_that_quotes_it(text):
    error, upstream = refused(scorer(), always(completion(text)), error=ReplyError)
    assert error.raw == text
    assert repr(text)[:200] in str(error)
    assert error.spent.calls == 1
    assert len(upstream.bodies) == 1


def test_an_unreadable_reply_is_requested_once_more_and_both_calls_count():
    first = completion("the rose", usage=(10, 5), reasoning=2)
    result, upstream = scored(scorer(reask=True), in_turn(first, scores(1, 0, 0, usage=(30, 7), reasoning=1)))
    assert result.values == (1, 0, 0)
    assert result.spent == Spent(calls=2, input_tokens=40, output_tokens=12, reasoning_tokens=3, cost=None)
    before, after = upstream.bodies
    assert after["messages"][: len(before["messages"])] == before["messages"]
    assistant, user = after["messages"][len(before["messages"]) :]
    assert assistant == {"role": "assistant", "content": "the rose"}
    assert user["role"] == "user"
    assert {**after, "messages": None} == {**before, "messages": None}


def test_a_reply_is_requested_again_exactly_once():
    error, upstream = refused(scorer(reask=True), always(completion("the rose", usage=(10, 5))), error=ReplyError)
    assert len(upstream.bodies) == 2
    assert error.spent == Spent(calls=2, input_tokens=20, output_tokens=10, cost=None)


def test_a_readable_reply_is_not_requested_again():
    _, upstream = scored(scorer(reask=True), good)
    assert len(upstream.bodies) == 1


def test_an_endpoint_that_refuses_is_not_called_again():
    error, upstream = refused(scorer(reask=True), always((400, {"error": {"message": "no"}})), error=UpstreamError)
    assert error.status == 400
    assert len(upstream.bodies) == 1


def test_whatever_the_scores_depend_on_changes_the_identity():
    port = Endpoint("http://127.0.0.1:1/v1")
    ways = [
        {},
        {"model": "other"},
        {"served": "m-2024"},
        {"temperature": 0.2},
        {"temperature": None},
        {"max_tokens": 900},
        {"reasoning_effort": "low"},
        {"seed": 1},
        {"mode": "json_object"},
        {"mode": "json_schema"},
        {"reask": True},
        {"prompt": PairPrompt()},
    ]
    identities = [json.dumps(scorer(**way)(port).identity, sort_keys=True) for way in ways]
    identities.append(json.dumps(scorer()(Endpoint("http://127.0.0.1:2/v1")).identity, sort_keys=True))
    assert len(set(identities)) == len(identities)
    assert identities[0] == json.dumps(scorer()(Endpoint("http://127.0.0.1:1/v1")).identity, sort_keys=True)


def test_the_identity_names_the_endpoint_and_the_prompt():
    identity = scorer()(Endpoint("http://127.0.0.1:1/v1")).identity
    assert (identity["kind"], identity["endpoint"]) == ("chat", "http://127.0.0.1:1/v1")
    assert Confidences().identity.items() <= identity.items()
    assert identity["option_order"] == "as given"
