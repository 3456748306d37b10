import asyncio
from contextlib import aclosing

import pytest

from conformal_arbitrage.errors import QuotaError, ReplyError
from conformal_arbitrage.models import Answer, Scores
from conformal_arbitrage.models.port import WrappedModel
from conformal_arbitrage.types import ChatRequest, Query, Spent
from tests.scripted import chunk

QUERY = Query("Which?", ("a", "b"), id="q")
REQUEST = ChatRequest({"messages": [{"role": "user", "content": "Say it."}]}, id="q")
COST = Spent(calls=1, cost=2.0)
MESSAGE = {"role": "assistant", "content": "one"}


class Guardian:
    """Scores and answers at two dollars a call."""

    identity = {"kind": "test"}  # noqa: RUF012
    calls = 0

    async def score(self, query):
        self.calls += 1
        return Scores(values=(1.0, 0.0), spent=COST)

    async def answer(self, request):
        self.calls += 1
        return Answer(message=MESSAGE, spent=COST)


class AtMost:
    """A quota of some questions; of any number without one."""

    def __init__(self, most=None):
        self.left = most

    async def start(self):
        if self.left == 0:
            raise QuotaError("no more", retry_after=60.0)
        self.left = None if self.left is None else self.left - 1


class Streaming(Guardian):
    closed = 0

    async def stream(self, request):
        self.calls += 1
        try:
            yield chunk({"content": "one"})
            yield Answer(message=MESSAGE, spent=COST)
        finally:
            self.closed += 1


async def collect(answerer):
    async with aclosing(answerer.stream(REQUEST)) as items:
        return [item async for item in items]


WAYS = {
    "score": lambda guardian, quota: WrappedModel(guardian, quota=quota).score(QUERY),
    "answer": lambda guardian, quota: WrappedModel(guardian, quota=quota).answer(REQUEST),
    "stream": lambda guardian, quota: collect(WrappedModel(guardian, quota=quota)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_every_question_is_counted(way):
    guardian, quota = Streaming(), AtMost(2)
    for _ in range(2):
        await way(guardian, quota)
    with pytest.raises(QuotaError, match="no more"):
        await way(guardian, quota)
    assert guardian.calls == 2


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_without_limits_nothing_is_refused(way):
    for _ in range(50):
        await way(Streaming(), AtMost())


def test_identities_are_those_of_the_wrapped_models():
    quota = AtMost()
    assert WrappedModel(Guardian(), quota=quota).identity == Guardian.identity


def test_an_answerer_that_cannot_stream_yields_its_answer_alone():
    [answer] = asyncio.run(collect(WrappedModel(Guardian(), quota=AtMost())))
    assert answer.message == MESSAGE


async def test_a_stream_closed_early_is_closed_inside():
    guardian, quota = Streaming(), AtMost(2)
    items = WrappedModel(guardian, quota=quota).stream(REQUEST)
    await anext(items)
    await items.aclose()
    assert guardian.closed == 1
    await quota.start()


async def test_a_question_that_fails_counts():
    class Failing(Guardian):
        async def answer(self, request):
            raise ReplyError("empty")

    quota = AtMost(1)
    with pytest.raises(ReplyError):
        await WrappedModel(Failing(), quota=quota).answer(REQUEST)
    with pytest.raises(QuotaError):
        await quota.start()
