import asyncio
import json
import sqlite3
import time
from itertools import pairwise

import pytest
from aiohttp import web

from conformal_arbitrage.errors import (
    ArbitrageError,
    CostLimitError,
    DeadlineError,
    OutputError,
    ReplyError,
    ScorerError,
    UpstreamError,
)
from conformal_arbitrage.models.endpoint import Endpoint
from conformal_arbitrage.models.port import IN_BACKGROUND, Call, Reply
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
    list_price,
    stored_cost,
)
from conformal_arbitrage.types import Spent
from tests.scripted import Upstream, completion
from tests.sockets import Sockets

CALL = Call(path="/chat/completions", body={"model": "m"}, id="q", output_limit=5)
GOOD = completion("fine", usage=(10, 5))
ONE = Spent(calls=1, input_tokens=10, output_tokens=5, cost=None)


def with_endpoint(server, use, **options):
    """Run `use(endpoint)` against a server."""

    async def run():
        async with server, Endpoint(server.url, **options) as endpoint:
            return await use(endpoint)

    return asyncio.run(run())


def in_turn(*replies):
    """A server that gives these replies, and the last one from then on."""
    return Upstream(lambda path, body, number: replies[min(number, len(replies) - 1)])


def refusal(status=429, document=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response(document or {}, status=status, headers=named)


def retried(server, *, timeout=60.0, **options):
    """Return the outcome of one call with retries, and the seconds it took."""
    options = {"pause": 0.001, **options}

    async def use(endpoint):
        start = time.perf_counter()
        try:
            result = await Retry(endpoint, **options).call(CALL)
        except ScorerError as error:
            result = error
        return result, time.perf_counter() - start

    return with_endpoint(server, use, timeout=timeout)


@pytest.mark.parametrize("fault", [(429, {}), (500, {}), (503, {}), (529, {}), [1], "text"], ids=str)
def test_a_transient_error_is_retried(fault):
    server = in_turn(fault, fault, GOOD)
    reply, _ = retried(server)
    assert reply.document == GOOD
    assert len(server.bodies) == 3
    assert reply.spent.calls == 3


def test_a_reset_connection_is_retried():
    async def reply(peer, body, number):
        if number < 2:
            peer.reset()
        else:
            await peer.send(json.dumps(GOOD).encode())

    result, _ = retried(Sockets(reply))
    assert result.document == GOOD
    assert result.spent == Spent(calls=3, input_tokens=None, output_tokens=None, cost=None)


@pytest.mark.parametrize(
    "fault",
    [
        (400, {}),
        (401, {}),
        (403, {}),
        (404, {}),
        (422, {}),
        (429, {"error": {"code": "insufficient_quota"}}),
        lambda: refusal(500, x_should_retry="false"),
        lambda: web.Response(body=b" " * 9 * 2**20),
        lambda: web.Response(status=302, headers={"Location": "/"}),
    ],
)
def test_a_permanent_error_is_raised_at_once(fault):
    server = Upstream(lambda *_: fault() if callable(fault) else fault)
    error, _ = retried(server)
    assert type(error) is UpstreamError
    assert len(server.bodies) == 1
    assert error.spent.calls == 1


def test_attempts_are_counted_and_the_last_error_is_raised():
    server = in_turn((500, {}), (502, {}), (503, {}), GOOD)
    error, _ = retried(server, attempts=3)
    assert error.status == 503
    assert len(server.bodies) == 3
    assert error.spent == Spent(calls=3)


def test_calls_and_tokens_include_failed_attempts():
    reply, _ = retried(in_turn((500, {}), (429, {}), GOOD))
    assert reply.spent == Spent(calls=3, input_tokens=10, output_tokens=5, cost=None)
    reply, _ = retried(in_turn((500, {}), [], GOOD))
    assert reply.spent == Spent(calls=3, input_tokens=None, output_tokens=None, cost=None)


def test_the_cost_includes_failed_attempts():
    server = in_turn((500, {}), (500, {}), GOOD)

    async def use(endpoint):
        return await Retry(Priced(endpoint, Price(input=1e6, per_call=0.5)), pause=0.001).call(CALL)

    assert with_endpoint(server, use).spent.cost == pytest.approx(10 + 3 * 0.5)


def test_retry_after_is_honoured():
    server = Upstream(lambda path, body, number: refusal(Retry_After="0.5") if number == 0 else GOOD)
    reply, took = retried(server)
    assert reply.document == GOOD
    assert 0.5 <= took < 30


def test_a_retry_after_beyond_the_deadline_is_not_waited_for():
    server = Upstream(lambda *_: refusal(Retry_After="3600"))
    error, took = retried(server, deadline=20)
    assert (error.status, error.retry_after) == (429, 3600)
    assert took < 15
    assert len(server.bodies) == 1


async def hang(peer, body, number):
    await peer.gone()


def test_one_deadline_ends_a_single_long_attempt():
    error, took = retried(Sockets(hang), timeout=60, deadline=0.4)
    assert type(error) is DeadlineError
    assert 0.35 < took < 30
    assert error.spent == Spent(calls=1, input_tokens=None, output_tokens=None, cost=None)


def test_one_deadline_holds_for_all_attempts_that_hang():
    server = Sockets(hang)
    error, took = retried(server, timeout=0.3, deadline=1.0, attempts=100)
    assert type(error) is DeadlineError
    assert 0.8 < took < 30
    assert 2 <= server.requests <= 4
    assert server.requests <= error.spent.calls <= server.requests + 1
    assert error.spent.cost is None
    assert error.spent.input_tokens is None


def test_one_deadline_holds_for_the_pauses_too():
    server = in_turn((500, {}))
    error, took = retried(server, deadline=2.0, pause=0.8, attempts=100)
    assert error.status in (500, None)  # the last attempt may be the one that runs out of time
    assert took < 30
    assert 2 <= len(server.bodies) <= 4


def test_a_deadline_error_includes_the_attempts_before_it():
    async def reply(peer, body, number):
        await (peer.send(b"{}", status="500 No") if number < 2 else peer.gone())

    error, _ = retried(Sockets(reply), deadline=0.6)
    assert type(error) is DeadlineError
    assert error.spent == Spent(calls=3, input_tokens=None, output_tokens=None, cost=None)


def test_a_missed_deadline_is_not_retryable():
    error, _ = retried(Sockets(hang), deadline=0.2)
    assert not error.retryable


def test_pauses_double_up_to_a_maximum_and_lie_in_the_upper_half():
    retry = Retry(None, pause=0.5)
    error = UpstreamError("no", retryable=True)
    for attempt, longest in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (7, 30.0), (20, 30.0)):
        drawn = [retry._pause(attempt, error) for _ in range(500)]
        assert longest / 2 <= min(drawn) < 0.6 * longest
        assert 0.9 * longest < max(drawn) <= longest


def test_a_pause_is_never_shorter_than_retry_after():
    error = UpstreamError("no", retryable=True, retry_after=7.0)
    assert Retry(None, pause=0.5)._pause(1, error) == 7.0
    assert Retry(None, pause=100.0)._pause(1, error) >= 15


def test_pauses_take_their_time():
    times = []

    def reply(path, body, number):
        times.append(time.perf_counter())
        return GOOD if number == 3 else (500, {})

    retried(Upstream(reply), pause=0.1)
    first, second, third = (later - sooner for sooner, later in pairwise(times))
    assert first >= 0.05
    assert second >= 0.1
    assert third >= 0.2


def test_a_cancelled_call_raises_cancelled_and_not_deadline():
    async def use(endpoint):
        task = asyncio.create_task(Retry(endpoint).call(CALL))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_endpoint(Sockets(hang), use)


async def all_of(port, calls):
    return await asyncio.gather(*(port.call(call) for call in calls), return_exceptions=True)


def calls(count, **rest):
    return [Call(path="/x", body={"n": n}, id=str(n), output_limit=5, **rest) for n in range(count)]


async def slowly(path, body, number):
    await asyncio.sleep(0.01)
    return GOOD


@pytest.mark.parametrize("most", [1, 4])
def test_the_server_never_sees_more_concurrent_calls_than_allowed(most):
    server = Upstream(slowly)

    async def use(endpoint):
        return await all_of(Limit(endpoint, RateLimit(concurrency=most)), calls(10 * most))

    replies = with_endpoint(server, use)
    assert [reply.spent for reply in replies] == [ONE] * 10 * most
    assert server.most_at_once == most


def test_without_a_limit_all_calls_run_concurrently():
    server = Upstream(slowly)
    with_endpoint(server, lambda endpoint: all_of(Limit(endpoint, RateLimit()), calls(30)))
    assert server.most_at_once > 10


def test_ports_that_share_a_rate_limit_share_its_slots():
    server = Upstream(slowly)

    async def use(endpoint):
        rate_limit = RateLimit(concurrency=3)
        one, two = Limit(endpoint, rate_limit), Limit(Retry(endpoint), rate_limit)
        await asyncio.gather(all_of(one, calls(10)), all_of(two, calls(10)))

    with_endpoint(server, use)
    assert server.most_at_once == 3


def test_failed_and_cancelled_calls_give_their_slots_back():
    async def reply(peer, body, number):
        if number < 2:
            await peer.send(b"{}", status="500 No")
        elif number < 4:
            await peer.gone()
        else:
            await peer.send(json.dumps(GOOD).encode())

    async def use(endpoint):
        limit = Limit(endpoint, RateLimit(concurrency=2))
        assert [type(result) for result in await all_of(limit, calls(2))] == [UpstreamError, UpstreamError]
        hanging = [asyncio.create_task(limit.call(CALL)) for _ in range(2)]
        await asyncio.sleep(0.1)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        async with asyncio.timeout(60):
            assert [result.spent for result in await all_of(limit, calls(4))] == [ONE] * 4

    with_endpoint(Sockets(reply), use)


class Ahead(asyncio.SelectorEventLoop):
    """An event loop whose clock can be advanced."""

    ahead = 0.0

    def time(self):
        return super().time() + self.ahead


def on_a_clock_of_its_own(server, use):
    """Run `use(endpoint, pass_time)`; pass_time(seconds) advances the clock and lets everything settle."""

    async def run():
        async def pass_time(seconds):
            asyncio.get_running_loop().ahead += seconds
            await asyncio.sleep(0.2)

        async with server, Endpoint(server.url, timeout=1e6) as endpoint:
            await use(endpoint, pass_time)

    with asyncio.Runner(loop_factory=Ahead) as runner:
        runner.run(run())


def test_requests_in_any_minute_are_limited_and_start_in_order_of_arrival():
    server = in_turn(GOOD)

    async def use(endpoint, pass_time):
        limit = Limit(endpoint, RateLimit(requests_per_minute=3))
        waiting = asyncio.gather(*(limit.call(call) for call in calls(7)))
        seen = []
        for seconds in (0, 30, 25, 10, 50, 10):
            await pass_time(seconds)
            seen.append(len(server.bodies))
        assert seen == [3, 3, 3, 6, 6, 7]
        assert len(await waiting) == 7
        assert sorted(body["n"] for body in server.bodies[:3]) == [0, 1, 2]
        assert sorted(body["n"] for body in server.bodies[3:6]) == [3, 4, 5]

    on_a_clock_of_its_own(server, use)


def test_the_minute_slides_with_each_request():
    server = in_turn(GOOD)

    async def use(endpoint, pass_time):
        limit = Limit(endpoint, RateLimit(requests_per_minute=2))
        await limit.call(CALL)
        await pass_time(40)
        await limit.call(CALL)
        third, fourth = asyncio.create_task(limit.call(CALL)), asyncio.create_task(limit.call(CALL))
        await pass_time(15)
        assert (third.done(), fourth.done()) == (False, False)
        await pass_time(10)
        assert (third.done(), fourth.done()) == (True, False)
        await pass_time(25)
        assert (third.done(), fourth.done()) == (True, False)
        await pass_time(15)
        assert fourth.done()

    on_a_clock_of_its_own(server, use)


def test_tokens_in_any_minute_are_limited():
    server = in_turn(completion("fine", usage=(70, 30)))

    async def use(endpoint, pass_time):
        limit = Limit(endpoint, RateLimit(tokens_per_minute=250))
        for _ in range(3):  # 0, 100 and 200 tokens before
            await limit.call(CALL)
        fourth = asyncio.create_task(limit.call(CALL))
        await pass_time(50)
        assert not fourth.done()
        await pass_time(11)
        assert fourth.done()
        assert len(server.bodies) == 4

    on_a_clock_of_its_own(server, use)


def test_replies_without_token_counts_count_as_no_tokens():
    server = in_turn({"choices": []})

    async def use(endpoint, pass_time):
        limit = Limit(endpoint, RateLimit(tokens_per_minute=1))
        async with asyncio.timeout(30):
            for _ in range(5):
                await limit.call(CALL)

    on_a_clock_of_its_own(server, use)


def test_a_wrapper_has_the_origin_of_its_port(tmp_path):
    endpoint = Endpoint("http://127.0.0.1:9/v1")
    price = Price()
    cache = Cache(endpoint, tmp_path / "replies.sqlite")
    wrapped = [
        Retry(endpoint),
        Limit(endpoint, RateLimit()),
        Priced(endpoint, price),
        Capped(endpoint, price, SpendingLimit(1.0)),
        cache,
        Estimate(endpoint, price),
    ]
    assert {port.origin for port in wrapped} == {endpoint.origin}
    cache.close()


def with_cache(server, path, use, **options):
    async def cached(endpoint):
        cache = Cache(endpoint, path, **options)
        try:
            return await use(cache)
        finally:
            cache.close()

    return with_endpoint(server, cached)


def test_a_stored_reply_is_not_requested_again_and_costs_nothing(tmp_path):
    server = in_turn(completion("first"), completion("second"))

    async def use(cache):
        first = await cache.call(Call(path="/x", body={"a": 1, "b": 2}, id="q1"))
        again = await cache.call(Call(path="/x", body={"b": 2, "a": 1}, id="q2"))
        assert again.document == first.document == completion("first")
        assert (first.spent, again.spent) == (ONE, Spent())

    with_cache(server, tmp_path / "replies.sqlite", use)
    assert len(server.bodies) == 1


def test_a_collection_keeps_each_querys_own_reply_at_its_cost(tmp_path):
    server = in_turn(completion("first", usage=(1, 2)), completion("second", usage=(3, 4)))

    async def use(cache):
        one, two = Call(path="/x", body={}, id="q1"), Call(path="/x", body={}, id="q2")
        for _ in range(2):
            replies = [await cache.call(call) for call in (one, two)]
            assert [reply.document for reply in replies] == [
                completion("first", usage=(1, 2)),
                completion("second", usage=(3, 4)),
            ]
            assert [reply.spent.input_tokens for reply in replies] == [1, 3]
            assert [reply.spent.calls for reply in replies] == [1, 1]
            assert [reply.spent.cost for reply in replies] == [None, None]

    with_cache(server, tmp_path / "replies.sqlite", use, per_query=True)
    assert len(server.bodies) == 2


@pytest.mark.parametrize("per_query", [False, True])
def test_samples_paths_and_bodies_do_not_share_replies(tmp_path, per_query):
    server = Upstream(lambda path, body, number: {"number": number})
    requests = [
        Call(path="/x", body={"a": 1}, id="q"),
        Call(path="/x", body={"a": 1}, id="q", sample=1),
        Call(path="/x", body={"a": 1}, id="q", sample=2),
        Call(path="/y", body={"a": 1}, id="q"),
        Call(path="/x", body={"a": "1"}, id="q"),
        Call(path="/x", body={"a": [1]}, id="q"),
    ]

    async def use(cache):
        for _ in range(2):
            assert [(await cache.call(call)).document["number"] for call in requests] == [0, 1, 2, 3, 4, 5]

    with_cache(server, tmp_path / "replies.sqlite", use, per_query=per_query)


def test_endpoints_do_not_share_replies(tmp_path):
    for text in ("one", "two"):
        server = in_turn(completion(text))
        reply = with_cache(server, tmp_path / "replies.sqlite", lambda cache: cache.call(CALL))
        assert reply.document == completion(text)
        assert len(server.bodies) == 1


def test_replies_survive_reopening_even_if_the_file_was_never_closed(tmp_path):
    server = in_turn(completion("é 日本", usage=(1, 2)), completion("second"))

    async def use(endpoint):
        left_open = Cache(Priced(endpoint, Price(input=1e6)), tmp_path / "replies.sqlite", per_query=True)
        first = await left_open.call(CALL)
        reopened = Cache(endpoint, tmp_path / "replies.sqlite", per_query=True)
        again = await reopened.call(CALL)
        assert again == first
        assert again.spent == Spent(calls=1, input_tokens=1, output_tokens=2, cost=1.0)
        left_open.close()
        reopened.close()

    with_endpoint(server, use)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("fault", [(500, {}), (400, {}), []], ids=str)
def test_errors_are_not_stored(tmp_path, fault):
    server = in_turn(fault, GOOD)

    async def use(cache):
        with pytest.raises(UpstreamError):
            await cache.call(CALL)
        assert cache.find(CALL) is None
        assert (await cache.call(CALL)).document == GOOD
        assert cache.find(CALL).document == GOOD

    with_cache(server, tmp_path / "replies.sqlite", use)
    assert len(server.bodies) == 2


def test_any_document_is_stored_unchanged(tmp_path):
    odd = {"big": 10**40, "small": 1e-300, "deep": [[[{"": None}]]], "text": "\x00\u2028'\"", "yes": True}
    server = in_turn(odd, {})

    async def use(cache):
        assert [(await cache.call(CALL)).document for _ in range(2)] == [odd, odd]

    with_cache(server, tmp_path / "replies.sqlite", use)


def test_text_that_is_not_unicode_is_a_typed_error_behind_a_cache(tmp_path):
    async def use(cache):
        with pytest.raises(ArbitrageError):
            await cache.call(Call(path="/x", body={"a": "\ud800"}))

    with_cache(in_turn(GOOD), tmp_path / "replies.sqlite", use)


def test_the_cost_of_stored_replies_is_the_sum_of_known_costs(tmp_path):
    path = tmp_path / "replies.sqlite"
    assert stored_cost(path) == (0, 0)
    assert not path.exists()
    server = in_turn(GOOD, {"choices": []}, GOOD)

    async def use(endpoint):
        cache = Cache(Priced(endpoint, Price(input=1e6)), path)
        for call in calls(3):
            await cache.call(call)
        cache.close()

    with_endpoint(server, use)
    assert stored_cost(path) == (20, 1)


def test_a_file_that_cannot_store_replies_is_refused(tmp_path):
    with pytest.raises(OutputError):
        Cache(Endpoint("http://127.0.0.1:9"), tmp_path)
    (tmp_path / "text").write_text("not a database, but long enough to be one" * 100)
    with pytest.raises(OutputError):
        Cache(Endpoint("http://127.0.0.1:9"), tmp_path / "text")
    with pytest.raises(OutputError):
        Cache(Endpoint("http://127.0.0.1:9"), tmp_path / "absent" / "replies.sqlite")


def test_a_reply_is_in_the_file_before_it_is_returned(tmp_path):
    path = tmp_path / "replies.sqlite"

    async def use(cache):
        await cache.call(CALL)
        other = sqlite3.connect(path)
        try:
            assert other.execute("select count(*) from replies").fetchone() == (1,)
        finally:
            other.close()

    with_cache(in_turn(GOOD), path, use)


def priced(server, pricing):
    async def use(endpoint):
        try:
            return (await Priced(endpoint, pricing).call(CALL)).spent
        except UpstreamError as error:
            return error.spent

    return with_endpoint(server, use)


def test_tokens_and_calls_are_priced():
    price = Price(input=2, output=4, per_call=0.01)
    assert priced(in_turn(GOOD), price).cost == pytest.approx((10 * 2 + 5 * 4) / 1e6 + 0.01)


def test_without_a_price_the_cost_is_unknown_and_never_zero():
    assert priced(in_turn(GOOD), None).cost is None
    assert priced(in_turn((500, {})), None).cost is None


def test_a_reply_without_usage_has_an_unknown_cost():
    for usage in ({}, {"prompt_tokens": 3}, {"completion_tokens": 3}, {"prompt_tokens": -1, "completion_tokens": 3}):
        assert priced(in_turn({"usage": usage}), Price(input=2, output=4)).cost is None


def test_a_price_for_calls_alone_needs_no_tokens():
    assert priced(in_turn({}), Price(per_call=0.25)).cost == 0.25
    assert priced(in_turn({"usage": {"prompt_tokens": 3}}), Price(input=2e6)).cost == 6


def test_a_failure_whose_tokens_are_unknown_has_an_unknown_cost():
    assert priced(in_turn([]), Price(input=2)).cost is None


def test_a_refusal_takes_no_tokens_but_is_a_call():
    assert priced(in_turn((429, {})), Price(input=2, output=2)).cost == 0
    assert priced(in_turn((429, {})), Price(input=2, per_call=0.5)).cost == 0.5


def test_an_unlisted_model_has_no_price():
    assert list_price("no-such-model-anywhere", "http://127.0.0.1:9/v1") is None


PRICE = Price(input=1.0, output=1e6)  # 5 dollars for the output limit of 5


def worst_of(call, price=PRICE):
    size = len(json.dumps(call.body, separators=(",", ":")))
    return price.cost(Spent(calls=1, input_tokens=size, output_tokens=call.output_limit))


@pytest.mark.parametrize(
    "reply",
    [{"choices": []}, [], (200, "text"), completion("x", usage=(1, 5)), completion("x", usage=(-1, 5))],
    ids=["no usage", "a failure", "another failure", "known", "impossible"],
)
def test_the_bill_never_exceeds_the_limit_whatever_replies_report(reply):
    server = Upstream(lambda *_: reply)
    limit = SpendingLimit(10.5 * worst_of(calls(1)[0]))
    capped = []

    async def use(endpoint):
        port = Retry(Capped(Priced(endpoint, PRICE), PRICE, limit), attempts=3, pause=0.001)
        for _ in range(3):
            capped.extend(await all_of(port, calls(40)))

    with_endpoint(server, use)
    assert len(server.bodies) == 10
    assert limit.spent <= limit.limit
    assert limit.reserved == pytest.approx(0)
    refused = [result for result in capped if isinstance(result, CostLimitError)]
    assert len(refused) >= 110
    assert "--max-cost" in str(refused[0])


def test_a_call_that_fits_only_without_reservations_waits_for_them():
    limit = SpendingLimit(1.5 * worst_of(CALL))
    arrived, go = [], []

    async def reply(path, body, number):
        arrived.append(number)
        await go[0].wait()
        return completion("x", usage=(0, 0))

    async def use(endpoint):
        go.append(asyncio.Event())
        port = Capped(Priced(endpoint, PRICE), PRICE, limit)
        first = asyncio.create_task(port.call(CALL))
        while not arrived:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(port.call(CALL))
        await asyncio.sleep(0.05)
        assert len(arrived) == 1
        go[0].set()
        await asyncio.gather(first, second)
        assert len(arrived) == 2

    with_endpoint(Upstream(reply), use)


def test_known_costs_replace_their_reservations_so_that_more_calls_fit():
    server = in_turn(completion("x", usage=(0, 1)))
    limit = SpendingLimit(10.5 * worst_of(CALL))

    async def use(endpoint):
        port = Capped(Priced(endpoint, PRICE), PRICE, limit)
        while worst_of(CALL) + limit.spent <= limit.limit:
            await port.call(CALL)
        with pytest.raises(CostLimitError):
            await port.call(CALL)

    with_endpoint(server, use)
    assert len(server.bodies) == limit.spent == 48  # the largest n with n - 1 + 5 below 52.5


def test_refusals_that_take_no_tokens_cost_nothing():
    limit = SpendingLimit(2 * worst_of(CALL))

    async def use(endpoint):
        port = Capped(Priced(endpoint, PRICE), PRICE, limit)
        for _ in range(20):
            with pytest.raises(UpstreamError):
                await port.call(CALL)

    with_endpoint(in_turn((500, {})), use)
    assert (limit.spent, limit.reserved) == (0, 0)


def test_a_cancelled_call_counts_in_full():
    limit = SpendingLimit(10 * worst_of(CALL))

    async def use(endpoint):
        task = asyncio.create_task(Capped(Priced(endpoint, PRICE), PRICE, limit).call(CALL))
        await asyncio.sleep(0.1)
        assert limit.reserved == worst_of(CALL)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with_endpoint(Sockets(hang), use)
    assert (limit.spent, limit.reserved) == (worst_of(CALL), 0)


def test_earlier_spending_counts():
    async def use(endpoint):
        limit = SpendingLimit(10.0, spent=10.0 - worst_of(CALL) / 2)
        with pytest.raises(CostLimitError):
            await Capped(Priced(endpoint, PRICE), PRICE, limit).call(CALL)

    server = in_turn(GOOD)
    with_endpoint(server, use)
    assert server.bodies == []


def test_a_spending_limit_needs_a_limit_on_the_length_of_replies():
    async def use(endpoint):
        with pytest.raises(CostLimitError, match="max_tokens"):
            await Capped(Priced(endpoint, PRICE), PRICE, SpendingLimit(1e9)).call(Call(path="/x", body={}))

    server = in_turn(GOOD)
    with_endpoint(server, use)
    assert server.bodies == []


@pytest.mark.parametrize("kind", ["capped", "estimate"])
def test_text_that_is_not_unicode_is_a_typed_error_where_its_size_is_counted(kind):
    async def use(endpoint):
        port = Capped(endpoint, PRICE, SpendingLimit(1e9)) if kind == "capped" else Estimate(endpoint, PRICE)
        with pytest.raises(ArbitrageError):
            await port.call(Call(path="/x", body={"a": "\ud800"}, output_limit=1))

    with_endpoint(in_turn(GOOD), use)


def test_an_estimate_counts_and_sends_nothing():
    server = in_turn(GOOD)

    async def use(endpoint):
        estimate = Estimate(endpoint, Price(input=1e6, output=2e6, per_call=0.5))
        body = {"text": "x" * 389}  # 400 bytes as JSON
        for limit in (7, None):
            reply = await estimate.call(Call(path="/chat/completions", body=body, output_limit=limit))
            assert reply.document["choices"][0]["message"]["content"].strip()
        assert estimate.spent == Spent(calls=2, input_tokens=200, output_tokens=507, cost=200 + 2 * 507 + 1.0)

    with_endpoint(server, use)
    assert server.bodies == []


def test_an_estimate_without_a_price_is_unknown_from_the_first_call_on():
    estimate = Estimate(Endpoint("http://127.0.0.1:9/v1"), None)
    assert estimate.spent.cost == 0
    asyncio.run(estimate.call(CALL))
    assert estimate.spent.cost is None
    assert estimate.spent.calls == 1


def test_an_estimate_leaves_out_stored_replies(tmp_path):
    server = in_turn(GOOD)

    async def use(cache):
        await cache.call(CALL)
        estimate = Estimate(cache, PRICE, cache)
        assert (await estimate.call(CALL)).document == GOOD
        assert estimate.spent == Spent(cost=0.0)
        with pytest.raises(ReplyError):
            await estimate.call(Call(path="/other", body={}, output_limit=1))
        assert estimate.spent.calls == 1
        assert estimate.spent.cost == pytest.approx(1.0)

    with_cache(server, tmp_path / "replies.sqlite", use, per_query=True)
    assert len(server.bodies) == 1


def test_an_endpoint_that_keeps_failing_is_not_called_for_a_while_and_then_tried_by_one_call():
    server = Upstream(lambda *_: (400, {}))

    async def use(endpoint):
        port = Breaker(endpoint, failures=3, rest=0.2)
        server.reply = lambda *_: (400, {})
        await all_of(port, [CALL] * 5)
        assert not port.resting  # a request that is refused says nothing of others
        server.reply = lambda *_: (500, {})
        for _ in range(3):
            with pytest.raises(UpstreamError, match="status 500"):
                await port.call(CALL)
        assert port.resting
        assert port.origin == endpoint.origin
        for result in await all_of(port, [CALL] * 20):
            assert "not called for now" in str(result)
        assert len(server.bodies) == 8
        await asyncio.sleep(0.25)
        await all_of(port, [CALL] * 20)
        assert len(server.bodies) == 9
        server.reply = lambda *_: GOOD
        await asyncio.sleep(0.25)
        await port.call(CALL)
        assert not port.resting
        assert len([result for result in await all_of(port, [CALL] * 20) if isinstance(result, Reply)]) == 20

    with_endpoint(server, use)


async def test_calls_in_the_background_wait_behind_none_that_cannot():
    """With a rate of four a minute, two may be audits: a third waits, and delays no live call behind it."""
    limit = RateLimit(requests_per_minute=4, live_share=0.5)

    async def audit():
        IN_BACKGROUND.set(True)
        await limit.start()

    audits = [asyncio.create_task(audit()) for _ in range(3)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(30):
        await limit.start()
        await limit.start()
    assert [task.done() for task in audits] == [True, True, False]
    audits[2].cancel()
