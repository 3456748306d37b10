"""Promises that the scorers do not keep yet; each test moves beside its module once it passes."""

import asyncio
import contextlib
import os
import sys
import time

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.errors import ReplyError, UpstreamError
from conformal_arbitrage.models import (
    Cache,
    ChatAnswerer,
    ChatScorer,
    Endpoint,
    FunctionScorer,
    HumanScorer,
    PairPrompt,
    ReplayScorer,
    SamplingScorer,
    Settings,
)
from conformal_arbitrage.models.choices import named_option
from conformal_arbitrage.types import ChatRequest, Query
from tests.models.asking import QUERY, refused
from tests.scripted import Upstream, completion


def test_if_the_second_request_fails_the_first_call_still_counts():
    replies = [completion("the rose", usage=(10, 5)), (400, {"error": {"message": "no"}})]
    error, _ = refused(
        lambda port: ChatScorer(port=port, settings=Settings(model="m"), reask=True),
        lambda path, body, number: replies[number],
        error=UpstreamError,
    )
    assert (error.spent.calls, error.spent.input_tokens) == (2, 10)


def test_if_a_sample_fails_the_finished_ones_still_count():
    async def reply(path, body, number):
        if number == 2:
            await asyncio.sleep(0.2)
            return 400, {"error": {"message": "no"}}
        return completion("A")

    error, _ = refused(
        lambda port: SamplingScorer(port=port, settings=Settings(model="m"), samples=3), reply, error=UpstreamError
    )
    assert (error.spent.calls, error.spent.input_tokens) == (3, 20)


async def test_the_applications_token_limit_replaces_the_configured_one():
    settings = Settings(model="m", max_tokens=500, token_field="max_completion_tokens")
    async with Upstream(lambda *_: completion("a rose")) as upstream, Endpoint(upstream.url) as endpoint:
        request = ChatRequest({"messages": [{"role": "user", "content": "x"}], "max_tokens": 20})
        await ChatAnswerer(port=endpoint, settings=settings).answer(request)
        sent = upstream.bodies[0]
    assert [sent[name] for name in ("max_tokens", "max_completion_tokens") if name in sent] == [20]


def test_a_function_that_raises_stop_iteration_fails_and_does_not_hang():
    async def ask():
        async with asyncio.timeout(60):
            await FunctionScorer(lambda query: [next(iter(()))], name="rule").score(QUERY)

    with pytest.raises(UpstreamError, match="StopIteration"):
        asyncio.run(ask())


def test_a_list_of_numpy_numbers_scores_with_and_without_a_cache(tmp_path):
    def function(query):
        return [np.float64(0.5), np.int64(0), 0.25]

    async def ask(through):
        return (await FunctionScorer(function, name="rule", through=through).score(QUERY)).values

    assert asyncio.run(ask(lambda port: port)) == (0.5, 0.0, 0.25)
    caches = []
    try:
        values = asyncio.run(ask(lambda port: caches.append(Cache(port, tmp_path / "r.sqlite")) or caches[0]))
    finally:
        caches[0].close()
    assert values == (0.5, 0.0, 0.25)


def answers_from(monkeypatch, stdin, count, query):
    async def ask():
        scorer = HumanScorer(name="team")
        async with asyncio.timeout(60):
            return [(await scorer.score(query)).raw for _ in range(count)]

    with stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        try:
            return asyncio.run(ask())
        finally:
            monkeypatch.undo()


def test_through_a_pipe_a_whole_line_is_one_answer(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.write(writing, b"apple\nb\n")
    os.close(writing)
    query = Query("Which?", ("apple", "banana", "cherry", "damson", "elder"))
    assert answers_from(monkeypatch, os.fdopen(reading), 2, query) == ["apple", "banana"]


def test_answers_can_come_from_a_file(monkeypatch, capsys, tmp_path):
    (tmp_path / "keys").write_text("b\na\n")
    assert answers_from(monkeypatch, (tmp_path / "keys").open(), 2, QUERY) == ["the sea", "a rose"]


def test_no_input_at_all_counts_as_skipping(monkeypatch, capsys):
    with pytest.raises(UpstreamError, match="skipped"):
        answers_from(monkeypatch, open(os.devnull), 1, QUERY)  # noqa: PTH123, SIM115


def replayed(scorer, id, actions):
    return asyncio.run(scorer.score(Query("Which?", actions, id=id))).values


def test_a_row_without_a_label_is_a_reply_error(tmp_path):
    (tmp_path / "key.csv").write_text("id,label\na,\nb,1\n")
    scorer = ReplayScorer.read(tmp_path / "key.csv", "label")
    assert replayed(scorer, "b", ("x", "y")) == (0.0, 1.0)
    with pytest.raises(ReplyError):
        replayed(scorer, "a", ("x", "y"))


def test_a_label_outside_the_whole_menu_is_an_error(tmp_path):
    (tmp_path / "key.csv").write_text("id,label\na,7\n")
    with pytest.raises(ReplyError):
        replayed(ReplayScorer.read(tmp_path / "key.csv", "label"), "a", ("x", "y"))


def test_a_shorter_menu_than_the_recorded_one_is_an_error():
    log = ScoreLog.from_arrays([[0.1, 0.2, 0.7]], [[0.1, 0.2, 0.7]], id=["a"])
    with pytest.raises(ReplyError):
        replayed(ReplayScorer.of_log(log, "primary"), "a", ("x", "y"))


@pytest.mark.parametrize("text", ["A good question", "I would say so"])
def test_a_word_of_one_letter_at_the_start_of_a_sentence_names_no_option(text):
    assert named_option(text, tuple(f"option {k}" for k in range(9))) is None


@pytest.mark.parametrize(
    "read",
    [lambda: named_option("!" * 20_000, ("x", "y")), lambda: PairPrompt().read("1" * 20_000, Query("q", ("x", "y")))],
)
def test_a_long_meaningless_reply_is_parsed_quickly(read):
    start = time.process_time()
    with contextlib.suppress(ValueError):
        read()
    assert time.process_time() - start < 0.5
