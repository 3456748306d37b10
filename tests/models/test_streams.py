"""Streams through every wrapper: the same accounting as for calls, and nothing held once a stream is closed."""

import asyncio
from contextlib import aclosing

import pytest

from conformal_arbitrage.errors import CostLimitError, DeadlineError, UpstreamError
from conformal_arbitrage.models.endpoint import Endpoint
from conformal_arbitrage.models.port import Call, Reply, WholePort, Wrapper
from conformal_arbitrage.models.resilience import (
    Breaker,
    Cache,
    Capped,
    Estimate,
    Limit,
    Price,
    Priced,
    RateLimit,
    Retry,
    SpendingLimit,
)
from conformal_arbitrage.types import Spent
from tests.scripted import chunk, sse
from tests.sockets import Sockets

CALL = Call(path="/chat/completions", body={"model": "m"}, id="q", output_limit=5)
ONE, TWO = chunk({"content": "one "}), chunk({"content": "two"})
SPENT = Spent(calls=1, input_tokens=10, output_tokens=5, cost=None)
REPLY = Reply(document={"choices": []}, spent=SPENT)
PRICE = Price(input=1.0, output=1.0)
WORST = PRICE.cost(Spent(calls=1, input_tokens=len('{"model":"m"}'), output_tokens=5))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Script:
    """A port that streams scripted items, one list per call and the last one from then on; it raises errors."""

    origin = "script"

    def __init__(self, *scripts):
        self.scripts = scripts or ([ONE, TWO, REPLY],)
        self.started = self.closed = 0

    async def call(self, call):
        raise AssertionError("a stream must not become a call")

    async def stream(self, call):
        items = self.scripts[min(self.started, len(self.scripts) - 1)]
        self.started += 1
        try:
            for item in items:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1


async def collect(port, call=CALL):
    async with aclosing(port.stream(call)) as items:
        return [item async for item in items]


def wrappers(folder):
    """Every wrapper, by name."""
    return {
        "base": Wrapper,
        "retry": lambda port: Retry(port, pause=0.001),
        "breaker": lambda port: Breaker(port, failures=1),
        "limit": lambda port: Limit(port, RateLimit(concurrency=1, requests_per_minute=100, tokens_per_minute=1000)),
        "capped": lambda port: Capped(port, PRICE, SpendingLimit(1.0)),
        "priced": lambda port: Priced(port, PRICE),
        "cache": lambda port: Cache(port, folder / "replies.sqlite"),
    }


NAMES = ["base", "retry", "breaker", "limit", "capped", "priced", "cache"]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrapper_passes_chunks_on_and_ends_with_the_reply(tmp_path, name):
    port = Script()
    *chunks, reply = asyncio.run(collect(wrappers(tmp_path)[name](port)))
    assert chunks == [ONE, TWO]
    assert (reply.document, reply.spent.input_tokens) == (REPLY.document, 10)
    assert (port.started, port.closed) == (1, 1)


@pytest.mark.parametrize("name", NAMES)
async def test_a_stream_closed_early_closes_the_stream_inside_before_aclose_returns(tmp_path, name):
    port = Script()
    wrapper = wrappers(tmp_path)[name](port)
    items = wrapper.stream(CALL)
    assert await anext(items) == ONE
    assert port.closed == 0
    await items.aclose()
    assert port.closed == 1
    async with asyncio.timeout(60):  # whatever it held is free again
        assert (await collect(wrapper))[:2] == [ONE, TWO]
    assert port.started == 2


@pytest.mark.parametrize("name", NAMES)
async def test_a_stream_whose_consumer_is_cancelled_is_closed_too(tmp_path, name):
    port = Script([ONE, TWO, REPLY])
    wrapper, reached = wrappers(tmp_path)[name](port), asyncio.Event()

    async def consume():
        async with aclosing(wrapper.stream(CALL)) as items:
            async for _ in items:
                reached.set()
                await asyncio.sleep(60)

    task = asyncio.create_task(consume())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert port.closed == 1
    async with asyncio.timeout(60):
        assert (await collect(wrapper))[:2] == [ONE, TWO]


@pytest.mark.parametrize("name", NAMES)
async def test_a_consumer_that_stops_at_the_reply_leaves_nothing_open(tmp_path, name):
    port = Script()
    wrapper = wrappers(tmp_path)[name](port)
    async with aclosing(wrapper.stream(CALL)) as items:
        async for item in items:
            if isinstance(item, Reply):
                break
    assert port.closed == 1


@pytest.mark.parametrize("name", NAMES)
async def test_a_stream_that_breaks_off_raises_its_error_and_is_closed(tmp_path, name):
    port = Script([ONE, UpstreamError("it broke off", spent=SPENT)])
    async with aclosing(wrappers(tmp_path)[name](port).stream(CALL)) as items:
        assert await anext(items) == ONE
        with pytest.raises(UpstreamError, match="it broke off"):
            await anext(items)
    assert (port.started, port.closed) == (1, 1)


async def test_an_abandoned_stream_gives_its_slot_back():
    rate_limit = RateLimit(concurrency=2)
    port = Limit(Script(), rate_limit)
    streams = [port.stream(CALL) for _ in range(2)]
    for items in streams:
        await anext(items)
    assert rate_limit.slots.locked()
    await streams[0].aclose()
    assert not rate_limit.slots.locked()
    await streams[1].aclose()
    assert rate_limit.slots._value == 2


async def test_an_abandoned_stream_counts_in_full_and_reserves_nothing():
    limit = SpendingLimit(10 * WORST)
    items = Capped(Priced(Script(), PRICE), PRICE, limit).stream(CALL)
    await anext(items)
    assert (limit.spent, limit.reserved) == (0, WORST)
    await items.aclose()
    assert (limit.spent, limit.reserved) == (WORST, 0)


async def test_a_finished_stream_is_paid_at_its_cost_and_a_failed_one_at_its_known_cost():
    limit = SpendingLimit(10 * WORST)
    await collect(Capped(Priced(Script(), PRICE), PRICE, limit))
    assert limit.spent == pytest.approx(15e-6)
    failing = Script([UpstreamError("refused", spent=Spent(calls=1))])
    with pytest.raises(UpstreamError):
        await collect(Capped(Priced(failing, PRICE), PRICE, limit))
    assert (limit.spent, limit.reserved) == (pytest.approx(15e-6), 0)


def test_a_stream_that_could_pass_the_limit_is_refused_before_it_starts():
    port = Script()
    with pytest.raises(CostLimitError, match="--max-cost"):
        asyncio.run(collect(Capped(port, PRICE, SpendingLimit(WORST / 2))))
    assert port.started == 0


def transient():
    return UpstreamError("try again", retryable=True, spent=Spent(calls=1))


def test_a_stream_is_retried_only_before_its_first_chunk():
    port = Script([transient()], [transient()], [ONE, REPLY])
    *_, reply = asyncio.run(collect(Retry(port, attempts=3, pause=0.001)))
    assert (port.started, reply.spent.calls) == (3, 3)
    port = Script([ONE, transient()], [ONE, REPLY])
    with pytest.raises(UpstreamError, match="try again"):
        asyncio.run(collect(Retry(port, attempts=3, pause=0.001)))
    assert port.started == 1


def test_attempts_at_a_stream_are_counted():
    port = Script(*([transient()] for _ in range(4)))
    with pytest.raises(UpstreamError) as failure:
        asyncio.run(collect(Retry(port, attempts=3, pause=0.001)))
    assert (port.started, failure.value.spent.calls) == (3, 3)


class Slow(Script):
    async def stream(self, call):
        self.started += 1
        try:
            yield ONE
            await asyncio.sleep(60)
        finally:
            self.closed += 1


def test_one_deadline_ends_a_stream_that_halts():
    port = Slow()
    with pytest.raises(DeadlineError) as failure:
        asyncio.run(collect(Retry(port, deadline=0.1)))
    assert not failure.value.retryable
    assert failure.value.spent == Spent(calls=1, input_tokens=None, output_tokens=None, cost=None)
    assert port.closed == 1


async def test_a_deadline_that_passes_while_the_consumer_is_busy_never_cancels_the_consumer():
    port = Slow()
    async with aclosing(Retry(port, deadline=0.05).stream(CALL)) as items:
        assert await anext(items) == ONE
        await asyncio.sleep(0.2)
        with pytest.raises(DeadlineError):
            await anext(items)
    assert port.closed == 1
    assert asyncio.current_task().cancelling() == 0


async def test_failed_streams_open_the_breaker_and_a_whole_one_closes_it():
    port = Script([UpstreamError("down", retryable=True)], [UpstreamError("down", retryable=True)], [ONE, REPLY])
    breaker = Breaker(port, failures=2, rest=0.05)
    for _ in range(2):
        with pytest.raises(UpstreamError, match="down"):
            await collect(breaker)
    assert breaker.resting
    with pytest.raises(UpstreamError, match="not called for now"):
        await collect(breaker)
    await asyncio.sleep(0.1)
    await collect(breaker)
    assert not breaker.resting
    assert port.started == 3


async def test_an_abandoned_stream_says_nothing_about_the_endpoint():
    breaker = Breaker(Script(), failures=1)
    items = breaker.stream(CALL)
    await anext(items)
    await items.aclose()
    assert not breaker.resting


def test_the_cost_of_a_stream_is_on_its_reply_and_on_its_error():
    *_, reply = asyncio.run(collect(Priced(Script(), PRICE)))
    assert reply.spent.cost == pytest.approx(15e-6)
    with pytest.raises(UpstreamError) as failure:
        asyncio.run(collect(Priced(Script([ONE, UpstreamError("no", spent=SPENT)]), PRICE)))
    assert failure.value.spent.cost == pytest.approx(15e-6)


async def test_the_tokens_of_a_stream_count_towards_the_rate():
    rate_limit = RateLimit(tokens_per_minute=15)
    await collect(Limit(Script(), rate_limit))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await rate_limit.start()


async def test_only_a_whole_stream_is_stored_and_a_stored_reply_is_not_streamed(tmp_path):
    port = Script()
    cache = Cache(port, tmp_path / "replies.sqlite")
    items = cache.stream(CALL)
    await anext(items)
    await items.aclose()
    assert cache.find(CALL) is None
    assert len(await collect(cache)) == 3
    assert [item.document for item in await collect(cache)] == [REPLY.document]
    assert port.started == 2
    cache.close()


def test_a_port_that_cannot_stream_yields_its_reply_alone():
    class Plain(WholePort):
        origin = "plain"

        async def call(self, call):
            return REPLY

    assert asyncio.run(collect(Plain())) == [REPLY]
    [reply] = asyncio.run(collect(Estimate(Plain(), PRICE)))
    assert reply.document["choices"][0]["message"]["content"].startswith("word")


async def test_closing_a_stream_through_the_whole_stack_releases_connection_slot_and_money(tmp_path):
    left = asyncio.Event()

    async def reply(peer, *_):
        await peer.write(HEAD + sse(ONE))
        try:
            await peer.gone()
        finally:
            left.set()

    rate_limit, limit = RateLimit(concurrency=1), SpendingLimit(10 * WORST)
    async with Sockets(reply) as server, Endpoint(server.url) as endpoint:
        port = Retry(Capped(Priced(endpoint, PRICE), PRICE, limit))
        cache = Cache(Limit(Breaker(port), rate_limit), tmp_path / "replies.sqlite")
        items = cache.stream(CALL)
        assert await anext(items) == ONE
        assert (rate_limit.slots.locked(), limit.reserved) == (True, WORST)
        await items.aclose()
        assert (rate_limit.slots.locked(), limit.reserved, limit.spent) == (False, 0, WORST)
        await asyncio.wait_for(left.wait(), 10)
        cache.close()
