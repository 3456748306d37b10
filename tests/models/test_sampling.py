import asyncio
import json

import pytest

from conformal_arbitrage.errors import ReplyError, UpstreamError
from conformal_arbitrage.models import Cache, Endpoint, SamplingScorer, Settings
from conformal_arbitrage.models.choices import lettered, named_option
from conformal_arbitrage.types import Query, Spent
from tests.models.asking import QUERY, refused, scored, silent
from tests.scripted import Upstream, completion


def scorer(*, samples=5, normaliser=named_option, **settings):
    sent = Settings(**{"model": "m", "temperature": 1.0, **settings})
    return lambda port: SamplingScorer(port=port, settings=sent, samples=samples, normaliser=normaliser)


def saying(*texts):
    return lambda path, body, number: completion(texts[number])


def test_scores_are_the_shares_of_the_samples():
    result, upstream = scored(scorer(), saying("A", "A", "C", "A", "B"))
    assert result.values == (0.6, 0.2, 0.2)
    assert len(upstream.bodies) == 5
    assert result.spent == Spent(calls=5, input_tokens=50, output_tokens=25, cost=None)
    assert sorted(result.raw) == sorted(repr(["A", "A", "C", "A", "B"]))
    assert result.served == "m"


def test_samples_are_requested_concurrently():
    came = []

    async def reply(path, body, number):
        came.append(number)
        while len(came) < 5:
            await asyncio.sleep(0.001)
        return completion("A")

    _, upstream = scored(scorer(), reply)
    assert upstream.most_at_once == 5


@pytest.mark.parametrize("samples", [1, 3, 8])
def test_k_samples_are_k_calls(samples):
    result, upstream = scored(scorer(samples=samples), lambda *_: completion("B"))
    assert len(upstream.bodies) == result.spent.calls == samples
    assert result.values == (0.0, 1.0, 0.0)


def test_a_sample_that_names_no_option_counts_for_none():
    result, _ = scored(scorer(samples=4), saying("A", "who knows", "Z", "A"))
    assert result.values == (0.5, 0.0, 0.0)


@pytest.mark.parametrize("finish", ["stop", "length", "content_filter"])
def test_an_empty_sample_counts_for_none_and_is_paid_for(finish):
    replies = [completion("A"), completion("", finish=finish)]
    result, _ = scored(scorer(samples=2), lambda path, body, number: replies[number])
    assert result.values == (0.5, 0.0, 0.0)
    assert result.spent.calls == 2


def test_if_no_sample_names_an_option_there_are_no_scores():
    error, _ = refused(scorer(samples=2), saying("who", "knows"), error=ReplyError)
    assert "none of 2 samples" in str(error)
    assert error.spent == Spent(calls=2, input_tokens=20, output_tokens=10, cost=None)
    assert "knows" in error.raw


def test_the_request_names_the_options_by_letters():
    _, upstream = scored(scorer(samples=1), lambda *_: completion("A"))
    message = {"role": "user", "content": lettered(QUERY)}
    assert upstream.bodies == [{"model": "m", "temperature": 1.0, "max_tokens": 8, "messages": [message]}]


def test_every_sample_has_its_own_seed():
    _, upstream = scored(scorer(seed=100), lambda *_: completion("A"))
    assert sorted(body["seed"] for body in upstream.bodies) == [100, 101, 102, 103, 104]


async def test_a_cache_keeps_equal_requests_apart(tmp_path):
    async with Upstream(saying("A", "B", "C", "A")) as upstream, Endpoint(upstream.url) as endpoint:
        cache = Cache(endpoint, tmp_path / "replies.sqlite")
        first = await scorer(samples=4)(cache).score(QUERY)
        again = await scorer(samples=4)(cache).score(QUERY)
        cache.close()
        calls = len(upstream.bodies)
    assert first.values == again.values == (0.5, 0.25, 0.25)
    assert calls == 4


async def test_when_one_sample_fails_the_rest_are_cancelled_and_the_server_sees_it():
    async with silent(5) as server, Endpoint(server.url) as endpoint:
        with pytest.raises(UpstreamError) as caught:
            await asyncio.wait_for(scorer()(endpoint).score(QUERY), 10)
        error, came, left = caught.value, server.came, await server.everyone_left()
    assert (error.status, came, left) == (400, 5, True)


def test_a_cancelled_caller_cancels_every_sample():
    async def ask():
        async with silent(-5) as server, Endpoint(server.url) as endpoint:
            asking = asyncio.create_task(scorer()(endpoint).score(QUERY))
            await asyncio.wait_for(server.all_came.wait(), 10)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            return server.came, await server.everyone_left()

    assert asyncio.run(ask()) == (5, True)


def test_a_sample_from_a_model_other_than_the_pinned_one_is_an_error():
    replies = [completion("A", model="m-1"), completion("A", model="m-2")]
    error, _ = refused(scorer(samples=2, served="m-1"), lambda path, body, number: replies[number], error=ReplyError)
    assert "'m-2'" in str(error)


def test_a_sample_that_is_not_a_completion_is_an_error():
    error, _ = refused(scorer(samples=2), lambda *_: {"model": "m"}, error=ReplyError)
    assert "no choices" in str(error)


def last_word(text, actions):
    places = [k for k, action in enumerate(actions) if text.endswith(action)]
    return places[0] if places else None


def test_the_normaliser_can_be_replaced_and_is_named_in_the_identity():
    result, _ = scored(scorer(samples=2, normaliser=last_word), saying("it is the sea", "A"))
    assert result.values == (0.0, 0.5, 0.0)
    port = Endpoint("http://127.0.0.1:1/v1")
    assert "last_word" in scorer(normaliser=last_word)(port).identity["parser"]
    assert "named_option" in scorer()(port).identity["parser"]


def test_a_normaliser_without_a_name_is_identified_by_its_class():
    class Reader:
        def __call__(self, text, actions):
            return 2

    result, _ = scored(scorer(samples=1, normaliser=Reader()), lambda *_: completion("?"))
    assert result.values == (0.0, 0.0, 1.0)
    assert "Reader" in scorer(normaliser=Reader())(Endpoint("http://127.0.0.1:1/v1")).identity["parser"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("B", 1),
        (" b\n", 1),
        ("B.", 1),
        ("(B)", 1),
        ("**B**", 1),
        ("B) the sea", 1),
        ("Answer: B", 1),
        ("option C", 2),
        ("the sea", 1),
        ("  The SEA ", 1),
        ("a rose", 0),
        ("D", None),
        ("", None),
        ("Because", None),
        ("A1", None),
        ("A's", None),
        ("the ocean", None),
        ("7", None),
    ],
)
def test_a_reply_names_an_option_by_its_text_or_by_its_letter(text, place):
    assert named_option(text, QUERY.actions) == place


def test_the_text_of_an_option_takes_precedence_over_a_letter():
    assert named_option("B", ("C", "A", "B")) == 2


def test_more_options_than_letters_are_refused_before_any_call():
    query = Query("q", tuple(f"option {k}" for k in range(27)))
    error, upstream = refused(scorer(), lambda *_: completion("A"), query, error=ReplyError)
    assert "27 options" in str(error)
    assert upstream.bodies == []


def test_whatever_the_shares_depend_on_changes_the_identity():
    port, other = Endpoint("http://127.0.0.1:1/v1"), Endpoint("http://127.0.0.1:2/v1")
    ways = [{}, {"samples": 6}, {"normaliser": last_word}, {"model": "x"}, {"temperature": 0.5}, {"max_tokens": 9}]
    ways += [{"seed": 1}, {"served": "x"}, {"reasoning_effort": "low"}]
    identities = [scorer(**way)(port).identity for way in ways] + [scorer()(other).identity]
    assert len({json.dumps(identity, sort_keys=True) for identity in identities}) == len(identities)
