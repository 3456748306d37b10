import pytest

from conformal_arbitrage.errors import RefusalError, ReplyError
from conformal_arbitrage.models import DecisionsScorer, Endpoint
from conformal_arbitrage.models.choices import INSTRUCTIONS
from conformal_arbitrage.types import Query, Spent
from tests.models.asking import QUERY, refused, scored

USAGE = {
    "input_tokens": 80,
    "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 0},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 1},
    "total_tokens": 84,
}


def scorer(**options):
    return lambda port: DecisionsScorer(port=port, **{"model": "gpt-6-luna", **options})


def decision(probabilities, *, model="gpt-6-luna", **rest):
    listed = [{"value": value, "probability": p} for value, p in probabilities.items()]
    best = max(probabilities, key=lambda value: str(probabilities[value]), default="")
    answer = {"type": "choice", "name": None, "choice": best, "confidence": 0.5, "probabilities": listed, **rest}
    return {"model": model, "answers": [answer], "usage": USAGE}


ROSE = {"grass": 0.1, "a rose": 0.7, "the sea": 0.2}


def test_every_option_has_its_own_probability_whatever_the_order_of_the_reply():
    result, _ = scored(scorer(), lambda *_: decision(ROSE, model="gpt-6-luna-1"))
    assert result.values == (0.7, 0.2, 0.1)
    assert result.served == "gpt-6-luna-1"
    assert "a rose" in result.raw
    tokens = {"input_tokens": 80, "output_tokens": 4, "reasoning_tokens": 1, "cached_tokens": 64}
    assert result.spent == Spent(calls=1, cost=None, **tokens)


def test_the_request_is_one_question_about_the_input():
    paths = []

    def reply(path, body, number):
        paths.append(path)
        return decision(ROSE)

    _, upstream = scored(scorer(), reply)
    choices = [{"value": "a rose"}, {"value": "the sea"}, {"value": "grass"}]
    question = {"type": "choice", "instructions": INSTRUCTIONS, "choices": choices}
    assert paths == ["/decisions"]
    assert upstream.bodies == [{"model": "gpt-6-luna", "input": "Which of these is red?", "questions": [question]}]


def test_messages_stay_messages_and_instructions_can_be_set():
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which is red?"}]
    _, upstream = scored(
        scorer(instructions="Choose the reddest."), lambda *_: decision(ROSE), Query(talk, QUERY.actions)
    )
    assert upstream.bodies[0]["input"] == talk
    assert upstream.bodies[0]["questions"][0]["instructions"] == "Choose the reddest."


@pytest.mark.parametrize("actions", [(), ("one",), ("a", "b", "a"), tuple(f"option {k}" for k in range(256))])
def test_menus_that_the_api_cannot_take_are_refused_before_any_call(actions):
    error, upstream = refused(scorer(), lambda *_: decision(ROSE), Query("q", actions), error=ReplyError)
    assert "2 to 255 different choices" in str(error)
    assert upstream.bodies == []
    assert error.spent is None


def test_the_largest_menu_is_accepted():
    actions = tuple(f"option {k}" for k in range(255))
    result, _ = scored(scorer(), lambda *_: decision(dict.fromkeys(actions, 1 / 255)), Query("q", actions))
    assert result.values == (1 / 255,) * 255


def test_a_refusal_is_reported_as_one():
    document = {"model": "gpt-6-luna", "answers": [{"type": "refusal", "name": None}], "usage": USAGE}
    error, _ = refused(scorer(), lambda *_: document, error=RefusalError)
    assert "declined" in str(error)
    assert error.spent.input_tokens == 80


@pytest.mark.parametrize("bad", [{}, {"a rose": 0.7, "the sea": 0.3}, {**ROSE, "grass": 1.1}, {**ROSE, "grass": -0.1}])
def test_an_option_without_a_probability_is_an_error(bad):
    error, _ = refused(scorer(), lambda *_: decision(bad), error=ReplyError)
    assert "is not a number from 0 to 1" in str(error)
    assert error.spent.calls == 1


@pytest.mark.parametrize("value", [None, "0.1", True, [0.1]])
def test_a_probability_that_is_not_a_number_is_an_error(value):
    refused(scorer(), lambda *_: decision({**ROSE, "grass": value}), error=ReplyError)


@pytest.mark.parametrize(
    "answers",
    [
        None,
        [],
        {},
        "red",
        [None],
        [{}],
        [{"type": "choice", "probabilities": None}],
        [{"type": "choice", "probabilities": [1]}],
    ],
)
def test_a_reply_of_another_shape_is_an_error(answers):
    error, _ = refused(scorer(), lambda *_: {"model": "m", "answers": answers, "usage": USAGE}, error=ReplyError)
    assert not isinstance(error, RefusalError)


def test_a_true_choice_is_not_the_text_true():
    document = decision({"False": 0.5})
    document["answers"][0]["probabilities"].append({"value": True, "probability": 0.5})
    error, _ = refused(scorer(), lambda *_: document, Query("q", ("True", "False")), error=ReplyError)
    assert "None is not a number" in str(error)


def test_the_served_model_is_pinned():
    error, _ = refused(scorer(served="gpt-6-luna-1"), lambda *_: decision(ROSE, model="gpt-6-luna-2"), error=ReplyError)
    assert "'gpt-6-luna-2'" in str(error)
    assert "'gpt-6-luna-1'" in str(error)
    assert error.spent.calls == 1
    scored(scorer(served="gpt-6-luna-1"), lambda *_: decision(ROSE, model="gpt-6-luna-1"))


def test_whatever_the_probabilities_depend_on_changes_the_identity():
    port, other = Endpoint("http://127.0.0.1:1/v1"), Endpoint("http://127.0.0.1:2/v1")
    ways = [{}, {"model": "other"}, {"served": "gpt-6-luna-1"}, {"instructions": "Choose the reddest."}]
    identities = [scorer(**way)(port).identity for way in ways] + [scorer()(other).identity]
    assert len({repr(identity) for identity in identities}) == len(identities)
    assert identities[0] == scorer()(port).identity
