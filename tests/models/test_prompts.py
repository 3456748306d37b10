import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformal_arbitrage.errors import OptionError, ReplyError
from conformal_arbitrage.models import ChatScorer, Confidences, PairPrompt, Settings
from conformal_arbitrage.models.rendering import PROMPTS, json_object
from conformal_arbitrage.types import Query
from tests.models.asking import QUERY, refused, scored
from tests.scripted import completion

PAIR = Query("How do I boil an egg?", ("In water.", "In a nest."), id="p1")


def heard(text, query=QUERY, prompt=None):
    """The scores of a reply with this text, by way of a real request."""

    def make(port):
        return ChatScorer(port=port, settings=Settings(model="m"), prompt=prompt or Confidences())

    return scored(make, lambda path, body, number: completion(text), query)[0].values


def unheard(text, query=QUERY, prompt=None):
    def make(port):
        return ChatScorer(port=port, settings=Settings(model="m"), prompt=prompt or Confidences())

    return str(refused(make, lambda path, body, number: completion(text), query, error=ReplyError)[0])


def test_confidences_are_divided_by_their_sum():
    assert heard('{"scores": [0.2, 0.4, 0.2]}') == (0.25, 0.5, 0.25)
    assert heard('{"scores": [1, 1, 0]}') == (0.5, 0.5, 0.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(any))
def test_confidences_sum_to_one_and_keep_their_order(numbers):
    shares = Confidences().read(json.dumps({"scores": numbers}), QUERY)
    assert abs(sum(shares) - 1) < 1e-9
    assert all(0 <= share <= 1 for share in shares)
    assert all(
        shares[i] <= shares[j] for i in range(len(shares)) for j in range(len(shares)) if numbers[i] <= numbers[j]
    )


def test_text_around_the_json_object_is_ignored():
    text = 'Sure! ```json\n{"scores": [0.5, 0.5, 1.0], "why": "roses {are} red"}\n```'
    assert heard(text) == (0.25, 0.25, 0.5)


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ("[0.5, 0.5]", "2 scores for 3 options"),
        ("[0.1, 0.2, 0.3, 0.4]", "4 scores for 3 options"),
        ("[-0.1, 0.5, 0.5]", "-0.1 is not a number from 0 to 1"),
        ("[1.5, 0, 0]", "1.5 is not a number from 0 to 1"),
        ("[90, 5, 5]", "90 is not a number from 0 to 1"),
        ('["0.5", 0.2, 0.3]', "'0.5' is not a number"),
        ("[true, 0, 0]", "True is not a number"),
        ("[false, 0.5, 0.5]", "False is not a number"),
        ("[null, 0.5, 0.5]", "None is not a number"),
        ("[NaN, 0.5, 0.5]", "nan is not a number"),
        ("[Infinity, 0, 0]", "inf is not a number"),
        ("[[0.5], 0.5, 0]", "[0.5] is not a number"),
        ("[0, 0, 0]", "no option has any confidence"),
        ("[]", "no option has any confidence"),
        ("0.5", "no list"),
        ('{"a": 0.5, "b": 0.5, "c": 0}', "no list"),
        ("null", "no list"),
    ],
)
def test_invalid_confidences_are_refused_and_the_message_says_why(numbers, problem):
    assert problem in unheard(f'{{"scores": {numbers}}}')


@pytest.mark.parametrize(
    "text", ["0.1, 0.8, 0.1", "[0.1, 0.8, 0.1]", "{}", "}{", "{", '{"scores": [0.1, 0.8', "{'a': 1}"]
)
def test_a_reply_without_the_json_object_is_refused(text):
    assert text in unheard(text)


def test_json_nested_too_deeply_is_refused_like_any_other_bad_reply():
    with pytest.raises(ValueError, match="nested too deeply"):
        json_object('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


def test_the_question_and_the_options_reach_the_model_unchanged():
    query = Query('Is {this} "red"?', ('a "rose"', "{sea}", "gräs"))
    system, user = Confidences().messages(query)
    assert (system["role"], user["role"]) == ("system", "user")
    assert 'Is {this} "red"?' in user["content"]
    assert json.dumps(list(query.actions), ensure_ascii=False) in user["content"]
    assert "3 confidences" in user["content"]
    assert "ONE valid JSON object" in system["content"]


def test_a_conversation_is_sent_as_its_transcript():
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]}]
    _, user = Confidences().messages(Query(talk, ("a", "b")))
    assert "user: Hello\n\nassistant: Yes?" in user["content"]


def test_the_schema_requires_exactly_one_number_per_option():
    schema = Confidences().schema(4)
    assert schema["required"] == list(schema["properties"]) == ["scores"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["scores"] == {
        "type": "array",
        "items": {"type": "number"},
        "minItems": 4,
        "maxItems": 4,
    }
    assert PairPrompt().schema(2) is None


def test_a_pair_is_two_numbers_on_a_line():
    assert heard("0.37, 0.54", PAIR, PairPrompt()) == (0.37, 0.54)
    assert heard(" 1.00 ,.5\n", PAIR, PairPrompt()) == (1.0, 0.5)
    assert heard("0,1", PAIR, PairPrompt()) == (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    ["0.5", "0.5 0.6", "0.5, 0.6, 0.7", "0.5; 0.6", "Scores: 0.5, 0.6", "-0.5, 0.6", "a, b", "0.5, NaN", "1., 0"],
)
def test_anything_but_two_numbers_is_not_a_pair(text):
    assert "not two numbers" in unheard(text, PAIR, PairPrompt())


@pytest.mark.parametrize("text", ["1.01, 0.5", "50, 60", "7, 7"])
def test_a_pair_beyond_one_is_refused(text):
    assert "is not a number from 0 to 1" in unheard(text, PAIR, PairPrompt())


def test_a_pair_of_more_or_fewer_than_two_replies_is_refused_before_any_call():
    for actions in (("a",), ("a", "b", "c")):
        with pytest.raises(OptionError, match=f"not {len(actions)}"):
            PairPrompt().messages(Query("q", actions))


def test_both_replies_of_a_pair_reach_the_model_in_order():
    _, user = PairPrompt().messages(PAIR)
    first, second = user["content"].split("</ASSISTANT REPLY 0>")
    assert "How do I boil an egg?" in first
    assert "In water." in first
    assert "In a nest." in second


@pytest.mark.parametrize("tie", ["0.00", "0.50", "0.99", "0.995", "1.00"])
def test_a_tie_is_broken_by_a_hundredth_within_bounds(tie):
    for k in range(20):
        pair = PairPrompt().read(f"{tie}, {tie}", Query(f"question {k}", ("x", "y")))
        assert round(abs(pair[0] - pair[1]), 12) == 0.01
        assert float(tie) in pair
        assert all(0 <= score <= 1 for score in pair)


def test_a_tie_is_broken_the_same_way_every_time():
    again = Query("How do I boil an egg?", ("In water.", "In a nest."), id="another id")
    pair = PairPrompt().read("0.50, 0.50", PAIR)
    assert all(PairPrompt().read("0.50, 0.50", query) == pair for query in (PAIR, again))


@pytest.mark.parametrize("tie", ["0.40", "1.00"])
def test_over_many_queries_ties_go_about_half_each_way(tie):
    first = 0
    for k in range(2000):
        pair = PairPrompt().read(f"{tie}, {tie}", Query(f"question {k}", ("x", "y")))
        first += pair[0] > pair[1]
    assert 900 < first < 1100


def test_a_tie_favours_the_same_reply_whatever_its_height():
    for k in range(50):
        query = Query(f"question {k}", ("x", "y"))
        low, high = PairPrompt().read("0.10, 0.10", query), PairPrompt().read("1.00, 1.00", query)
        assert (low[0] > low[1]) == (high[0] > high[1])


def test_tie_breaking_depends_on_the_question_and_the_replies():
    def favoured(query):
        pair = PairPrompt().read("0.5, 0.5", query)
        return pair[0] > pair[1]

    assert len({favoured(Query(f"question {k}", ("x", "y"))) for k in range(30)}) == 2
    assert len({favoured(Query("question", (f"x{k}", "y"))) for k in range(30)}) == 2
    assert len({favoured(Query("question", ("x", f"y{k}"))) for k in range(30)}) == 2


def test_different_numbers_are_left_alone_however_close():
    assert PairPrompt().read("0.500, 0.501", PAIR) == [0.5, 0.501]


def test_every_prompt_has_its_own_identity():
    identities = [prompt.identity for prompt in PROMPTS.values()]
    assert [identity["prompt"] for identity in identities] == list(PROMPTS)
    assert len({identity["prompt_sha256"] for identity in identities}) == len(identities)
    assert all(len(identity["prompt_sha256"]) == 64 for identity in identities)
    assert all(identity["parser"] for identity in identities)
