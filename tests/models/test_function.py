import asyncio
import functools
import hashlib
import inspect
import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ConformalArbitrage, ScoreLog, calibrate
from conformal_arbitrage.errors import DeadlineError, OptionError, ReplyError, StaleCalibrationError, UpstreamError
from conformal_arbitrage.live.graders import FunctionGrader
from conformal_arbitrage.models import (
    Answer,
    BuildContext,
    Cache,
    Endpoint,
    FunctionConfig,
    FunctionScorer,
    Retry,
    SamplingScorer,
    Settings,
)
from conformal_arbitrage.models.choices import named_option
from conformal_arbitrage.models.kinds import Terminal, load_object, source_identity
from conformal_arbitrage.models.others import FunctionAnswerer, call_for, query_from
from conformal_arbitrage.models.rendering import RENDERING
from conformal_arbitrage.types import ChatRequest, Query, Spent
from tests.models.asking import QUERY


def lengths(query):
    return [float(len(action)) for action in query.actions]


async def lengths_later(query):
    await asyncio.sleep(0)
    return lengths(query)


class Rule:
    async def __call__(self, query):
        return lengths(query)


def score(function, query=QUERY, **options):
    return asyncio.run(FunctionScorer(function, name="rule 1", **options).score(query))


@pytest.mark.parametrize(
    "function",
    [
        lengths,
        lengths_later,
        Rule(),
        functools.partial(lengths_later),
        lambda query: tuple(lengths(query)),
        lambda query: lengths_later(query),
        lambda query: np.array(lengths(query)),
        lambda query: np.array([6, 7, 5]),
        lambda query: [6, 7, 5],
        lambda query: [np.float64(6), 7, 5.0],
    ],
    ids=["sync", "async", "object", "partial", "tuple", "lambda", "array", "integers", "ints", "mixed"],
)
def test_any_callable_scores(function):
    result = score(function)
    assert result.values == (6.0, 7.0, 5.0)
    assert all(type(value) is float for value in result.values)
    assert result.spent == Spent(calls=1, cost=None)


def test_scores_in_single_precision_are_refused():
    with pytest.raises(OptionError, match=r"single precision.*return float64"):
        score(lambda query: np.array(lengths(query), dtype=np.float32))


def test_the_function_receives_the_original_query():
    seen = []
    talk = ({"role": "system", "content": "Be quick."}, {"role": "user", "content": "Which is red?"})
    query = Query(talk, ("a", "b"), id="q7", places=(3, 1))

    def function(given):
        seen.append(given)
        return [1, 0]

    score(function, query)
    assert (seen[0].actions, seen[0].id, seen[0].places) == (("a", "b"), "q7", (3, 1))
    assert list(seen[0].context) == list(talk)
    assert query_from(call_for(QUERY)) == QUERY


def test_a_query_is_passed_as_json():
    body = call_for(Query([{"role": "assistant", "content": "x"}], ("a", "b"), places=(3, 1))).body
    assert json.loads(json.dumps(body)) == {
        "context": [{"role": "assistant", "content": "x"}],
        "actions": ["a", "b"],
        "places": [3, 1],
    }


async def test_a_sync_function_runs_in_a_thread_and_does_not_block_the_loop():
    release = threading.Event()
    threads = []

    def slow(query):
        threads.append(threading.current_thread())
        assert release.wait(60)
        return [1, 0, 0]

    asking = asyncio.create_task(FunctionScorer(slow, name="slow").score(QUERY))
    while not threads:
        await asyncio.sleep(0.001)
    release.set()  # only possible if the loop still turns
    assert (await asking).values == (1, 0, 0)
    assert threads[0] is not threading.main_thread()


def test_an_async_function_runs_in_the_event_loop():
    async def where(query):
        assert threading.current_thread() is threading.main_thread()
        return [1, 0, 0]

    assert score(where).values == (1, 0, 0)


@pytest.mark.parametrize("values", [[1, 0], [1, 0, 0, 0], [], np.zeros((3, 1)), np.zeros(4)])
def test_a_wrong_number_of_scores_is_an_error(values):
    with pytest.raises(ReplyError) as caught:
        score(lambda query: values)
    assert caught.value.spent.calls == 1


@pytest.mark.parametrize("values", [None, 0.5, "0.5", {"a": 1}, {1.0, 2.0, 3.0}, np.float64(1)])
def test_anything_but_a_list_is_an_error(values):
    with pytest.raises(ReplyError, match="not a list"):
        score(lambda query: values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), "1", None, True, 1j, 1e301])
def test_anything_but_a_number_is_an_error(bad):
    with pytest.raises(ReplyError, match="is not a number"):
        score(lambda query: [0.5, bad, 0.5])


def test_scores_may_be_any_numbers_not_only_shares():
    assert score(lambda query: [-1e6, 0, 3e9]).values == (-1e6, 0.0, 3e9)


async def broken_later(query):
    raise KeyError("lost")


def broken(query):
    raise KeyError("lost")


@pytest.mark.parametrize("function", [broken, broken_later])
def test_a_function_that_raises_is_an_upstream_error(function):
    with pytest.raises(UpstreamError, match=r"rule 1 failed .KeyError: 'lost'") as caught:
        score(function)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.spent == Spent(calls=1, cost=None)
    assert not caught.value.retryable


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interrupt_or_a_cancellation_is_not_a_failure_of_the_function(error):
    async def interrupted(query):
        raise error

    with pytest.raises(error):
        score(interrupted)


def test_a_scorer_error_passes_unchanged():
    def function(query):
        raise ReplyError("not today", raw="?")

    with pytest.raises(ReplyError, match="not today") as caught:
        score(function)
    assert caught.value.raw == "?"


def test_the_call_can_be_wrapped():
    async def never(query):
        await asyncio.sleep(60)

    with pytest.raises(DeadlineError):
        score(never, through=lambda port: Retry(port, deadline=0.05))


def test_a_cache_keeps_the_functions_scores(tmp_path):
    queries = []

    def function(query):
        queries.append(query)
        return np.array([0.25, 0.5, 0.25])

    def opened(port):
        return caches.append(Cache(port, tmp_path / "replies.sqlite")) or caches[-1]

    caches = []
    values = [score(function, through=opened).values for _ in range(2)]
    for cache in caches:
        cache.close()
    assert values == [(0.25, 0.5, 0.25)] * 2
    assert len(queries) == 1


def test_the_identity_is_the_name_and_the_source():
    one, other = FunctionScorer(lengths, name="rule 1"), FunctionScorer(lengths, name="rule 2")
    assert one.identity["source_sha256"] == hashlib.sha256(inspect.getsource(lengths).encode()).hexdigest()
    assert one.identity["rendering"] == RENDERING
    assert one.identity != other.identity
    assert one.identity != FunctionScorer(lengths_later, name="rule 1").identity


@pytest.mark.parametrize("function", [len, functools.partial(lengths), eval("lambda query: [1, 0]")])
def test_a_name_remains_for_what_has_no_source(function):
    assert FunctionScorer(function, name="rule").identity == {
        "kind": "function", "name": "rule", "rendering": RENDERING,
    }  # fmt: skip


def test_an_object_is_pinned_by_the_source_of_its_class():
    assert FunctionScorer(Rule(), name="rule").identity["source_sha256"] == source_identity(Rule)["source_sha256"]


BODY = "def rule(query):\n    return [{first}, 0.5]\n"


def bound(folder, first):
    """Return the certificate of one version of a function, and the scorer of that version."""
    (folder / f"version_{first}.py").write_text(BODY.format(first=f"0.{first}"))
    scorer = FunctionScorer(load_object(f"version_{first}:rule", folder), name="rule")
    identities = {"primary": dict(scorer.identity), "guardian": dict(scorer.identity)}
    log = ScoreLog.from_arrays([[0.9, 0.5]] * 30, [[1.0, 0.0]] * 30, identities=identities)
    return calibrate(log, 0.1), scorer


def test_a_certificate_is_stale_once_the_body_of_the_function_changes(tmp_path):
    certificate, scorer = bound(tmp_path, 8)
    _, changed = bound(tmp_path, 9)
    ConformalArbitrage(primary=scorer, guardian=scorer, certificate=certificate)
    with pytest.raises(StaleCalibrationError, match=r"primary\.source_sha256"):
        ConformalArbitrage(primary=changed, guardian=scorer, certificate=certificate)


def test_replies_stored_for_another_body_are_not_reused():
    one, other = (FunctionScorer(f, name="rule")._port.origin for f in (lengths, lengths_later))
    assert one != other


class Echo:
    identity = {"kind": "own", "name": "echo"}  # noqa: RUF012

    async def answer(self, request):
        return Answer(message={"role": "assistant", "content": "so"}, confidence=1.0)


async def test_an_answerer_of_one_s_own_is_pinned_by_the_source_of_its_class(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.models.test_function.ECHO", Echo(), raising=False)
    section = FunctionConfig(function="tests.models.test_function:ECHO", name="echo")
    context = BuildContext(
        role="guardian", folder=tmp_path, terminal=Terminal(), wrap=lambda port: port, on_close=lambda close: None
    )
    answerer = section.build_answerer(context)
    assert answerer.identity == {**Echo.identity, **source_identity(Echo)}
    request = ChatRequest({"messages": []})
    one, other = [await answerer.answer(request)], [item async for item in answerer.stream(request)]
    assert one == other == [Answer(message={"role": "assistant", "content": "so"}, confidence=1.0)]


def raising(error):
    async def answer(request):
        if error is None:
            return "so"
        raise error

    return answer


async def answers_of(model):
    return [await model.answer(ChatRequest({"messages": []}))]


async def items_of(model):
    return [item async for item in model.stream(ChatRequest({"messages": []}))]


@pytest.mark.parametrize("ask", [answers_of, items_of])
@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (KeyError("a"), UpstreamError, "echo failed \\(KeyError: 'a'\\)"),
        (ReplyError("no use"), ReplyError, "no use"),
        (None, ReplyError, "echo returned str; return an Answer"),
        (asyncio.CancelledError(), asyncio.CancelledError, None),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_an_answerer_that_raises_has_failed_on_that_request(ask, raised, expected, message):
    echo = Echo()
    echo.answer = raising(raised)
    with pytest.raises(expected, match=message) as caught:
        asyncio.run(ask(FunctionAnswerer(echo, "echo")))
    assert not getattr(caught.value, "retryable", False)


def test_normalisers_and_graders_are_pinned_by_their_source_too():
    def first(text, actions):
        return 0

    grader = FunctionGrader(function=first, name="g")
    sampling = SamplingScorer(port=Endpoint("http://127.0.0.1:1"), settings=Settings(model="m"), normaliser=first)
    assert source_identity(first).items() <= grader.identity.items()
    assert source_identity(first).items() <= sampling.identity.items()
    assert "source_sha256" not in replace(sampling, normaliser=named_option).identity
