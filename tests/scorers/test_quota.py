import asyncio
from contextlib import aclosing

import pytest

from conformal_arbitrage.errors import QuotaError, ReplyError
from conformal_arbitrage.scorers import Answer, Scores
from conformal_arbitrage.scorers.quota import GuardianQuota, QuotaAnswerer, QuotaScorer, Window
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
    "score": lambda guardian, quota: QuotaScorer(guardian, quota).score(QUERY),
    "answer": lambda guardian, quota: QuotaAnswerer(guardian, quota).answer(REQUEST),
    "stream": lambda guardian, quota: collect(QuotaAnswerer(guardian, quota)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_calls_are_limited_per_minute(way):
    async def run():
        guardian, quota = Streaming(), GuardianQuota(calls_per_minute=2)
        for _ in range(2):
            await way(guardian, quota)
        with pytest.raises(QuotaError, match="limit on calls") as failure:
            await way(guardian, quota)
        assert 50 < failure.value.retry_after <= 60
        assert guardian.calls == 2

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_cost_is_limited_per_hour(way):
    async def run():
        guardian, quota = Streaming(), GuardianQuota(cost_per_hour=3.0)
        for _ in range(2):  # the first leaves room, so the second may go over
            await way(guardian, quota)
        with pytest.raises(QuotaError, match="limit on cost") as failure:
            await way(guardian, quota)
        assert 3500 < failure.value.retry_after <= 3600

    asyncio.run(run())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_without_limits_nothing_is_refused(way):
    async def run():
        for _ in range(50):
            await way(Streaming(), GuardianQuota())

    asyncio.run(run())


def test_identities_are_those_of_the_wrapped_models():
    quota = GuardianQuota()
    assert QuotaScorer(Guardian(), quota).identity == QuotaAnswerer(Guardian(), quota).identity == Guardian.identity


def test_an_answerer_that_cannot_stream_yields_its_answer_alone():
    [answer] = asyncio.run(collect(QuotaAnswerer(Guardian(), GuardianQuota())))
    assert answer.message == MESSAGE


def test_a_stream_closed_early_is_closed_inside_and_costs_nothing_known():
    async def run():
        guardian, quota = Streaming(), GuardianQuota(cost_per_hour=1.0)
        items = QuotaAnswerer(guardian, quota).stream(REQUEST)
        await anext(items)
        await items.aclose()
        assert guardian.closed == 1
        quota.start()

    asyncio.run(run())


def test_a_call_that_fails_counts_as_a_call():
    class Failing(Guardian):
        async def answer(self, request):
            raise ReplyError("empty")

    async def run():
        quota = GuardianQuota(calls_per_minute=1)
        with pytest.raises(ReplyError):
            await QuotaAnswerer(Failing(), quota).answer(REQUEST)
        with pytest.raises(QuotaError):
            quota.start()

    asyncio.run(run())


def test_a_window_slides():
    window = Window(2, 10.0)
    assert window.wait(0.0) == 0
    window.take(0.0, 1)
    assert window.wait(1.0) == 0
    window.take(4.0, 1)
    assert window.wait(5.0) == 5.0
    assert window.wait(10.0) == 0
    window.take(10.0, 1)
    assert window.wait(11.0) == 3.0
