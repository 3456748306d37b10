"""Several endpoints for one model: spread by weight, failing ones left out, and one name in the identity for all."""

import asyncio
import json
import re
import time
from contextlib import AsyncExitStack
from functools import partial

import pytest

from conformal_arbitrage import Certificate
from conformal_arbitrage.errors import ConfigError, StaleCalibrationError, UpstreamError
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models import Breaker, Call, Endpoint, Pool, Retry
from tests.gateway.house import CHAT, DECISION, UNSURE, House, chunks, error_of, failing, says, section, votes
from tests.gateway.test_modes import command
from tests.scripted import Upstream, completion

CALL = Call(path="/x", body={})
REST = 0.4


class Pooled(House):
    """A house whose Guardian has more endpoints: `others`, beside the usual one."""

    def __init__(self, folder, *, others, pool=None, **rest):
        super().__init__(folder, **rest)
        self.others = [Upstream(reply) for reply in others]
        self.pool = {"pool": "large", "attempts": 3, **(pool or {})}
        self._more = AsyncExitStack()

    def __enter__(self):
        self._thread.start()
        for upstream in self.others:
            self.run(self._more.enter_async_context(upstream))
        self._thread.start = lambda: None
        return super().__enter__()

    def __exit__(self, *exc):
        self.stop()
        self.run(self._more.aclose())
        super().__exit__()

    def _write(self, first):
        urls = [upstream.url for upstream in (self.guardian, *self.others)]
        self.models = {**self.models, "guardian": {"url": "", "urls": urls, **self.pool}}
        super()._write(first)

    @property
    def counts(self):
        return [len(upstream.bodies) for upstream in (self.guardian, *self.others)]


@pytest.fixture
def pooled(house, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.models.kinds.Breaker", partial(Breaker, rest=REST))
    return lambda *others, **options: house(Pooled, others=others, **options)


def decide(gateway, count, start=0):
    return [gateway.decide({**DECISION, "input": f"Letter {k}."}).status_code for k in range(start, start + count)]


def deferring(pooled, *others, **options):
    return pooled(*others, primary=votes(*UNSURE), **options)


def test_calls_are_spread_by_weight(pooled):
    gateway = deferring(pooled, votes(0, 1), votes(0, 1), pool={"weights": [2, 1, 1]})
    assert decide(gateway, 40) == [200] * 40
    assert gateway.counts == [20, 10, 10]


def test_the_pool_s_name_replaces_the_endpoint_so_endpoints_may_come_and_go(pooled):
    gateway = deferring(pooled, votes(0, 1))
    identity = Certificate.load(gateway.folder / "rule.json").identities["guardian"]
    assert identity["endpoint"] == "pool:large"
    gateway.stop()
    text = re.sub(r"urls = .*", f"urls = {json.dumps([gateway.others[0].url])}", gateway.path.read_text())
    gateway.path.write_text(text)
    gateway.config = read_config(gateway.path)
    gateway.start()
    [answer] = gateway.decide().json()["answers"]
    assert (answer["arbitrage"]["guarantee"], gateway.counts) == ("crc", [0, 1])
    gateway.stop()
    gateway.path.write_text(text.replace('pool = "large"', 'pool = "other"'))
    gateway.config = read_config(gateway.path)
    with pytest.raises(StaleCalibrationError, match=r"guardian.endpoint: 'pool:large' then, 'pool:other'"):
        gateway.start()
    gateway._serving = None


@pytest.mark.parametrize(
    "fault", [failing(503), failing(429), lambda *_: (200, "no object")], ids=["503", "429", "junk"]
)
def test_a_failing_endpoint_is_left_out_and_no_caller_notices(pooled, fault):
    gateway = deferring(pooled, fault)
    assert decide(gateway, 30) == [200] * 30
    assert gateway.counts[0] == 30
    assert 1 <= gateway.counts[1] <= 8  # the first failures, and a trial now and again
    assert f'arbitrage_upstream_resting{{upstream="{gateway.others[0].url}"}}' in gateway.get("/metrics").text
    gateway.others[0].reply = votes(0, 1)
    time.sleep(REST + 1.1)
    before = gateway.counts[1]
    assert decide(gateway, 20, start=100) == [200] * 20
    assert gateway.counts[1] - before >= 9  # it is back, with its share


def test_an_endpoint_that_is_gone_costs_no_answer(pooled):
    gateway = deferring(pooled, votes(0, 1))
    gateway.run(gateway.others[0]._runner.cleanup())
    assert decide(gateway, 20) == [200] * 20


def test_an_endpoint_that_serves_another_model_is_left_out_at_once(pooled):
    pinned = {"guardian.pinned": {"served": "m"}}
    gateway = deferring(pooled, votes(1, 0, model="m-cheap"), models=pinned)
    statuses = decide(gateway, 20)
    assert statuses.count(502) <= 3  # never an answer of the other model
    assert statuses.count(200) >= 17
    assert gateway.counts[1] == statuses.count(502)
    answers = {record.decision.legs[-1].served for record in gateway.records() if record.decision.action is not None}
    assert answers == {"m"}


def test_if_all_fail_the_guardian_has_failed(pooled):
    gateway = deferring(pooled, failing(), guardian=failing())
    error_of(gateway.decide(), 502, "guardian_failed")
    assert sum(gateway.counts) == 3  # as many attempts as configured


def test_if_all_rest_the_guardian_rests(pooled):
    gateway = deferring(pooled, failing(), guardian=failing(), pool={"attempts": 1})
    assert decide(gateway, 12) == [502] * 12
    assert gateway.get("/health/ready").json()["problems"][0]["role"] == "guardian"


def test_a_stream_that_does_not_begin_is_begun_elsewhere(pooled):
    gateway = pooled(says("theirs"), form="text", primary=says("mine", 0.1), guardian=failing(503))
    for k in range(6):
        reply = gateway.chat({**CHAT, "user": str(k), "stream": True})
        assert "theirs" in "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks(reply) if c["choices"])


def test_every_endpoint_may_have_a_key_of_its_own(pooled, monkeypatch):
    monkeypatch.setenv("KEY_ONE", "sk-first-key")
    monkeypatch.setenv("KEY_TWO", "sk-second-key")
    gateway = deferring(pooled, votes(0, 1), pool={"key_env": ["KEY_ONE", "KEY_TWO"]})
    assert decide(gateway, 4) == [200] * 4
    for upstream, key in ((gateway.guardian, "first"), (gateway.others[0], "second")):
        assert {headers["Authorization"] for headers in upstream.headers} == {f"Bearer sk-{key}-key"}


def test_check_asks_every_endpoint_and_refuses_a_pool_of_two_models(pooled):
    gateway = deferring(pooled, votes(0, 1))
    counts = gateway.counts
    gateway.path.write_text(re.sub(r"\[guardian\.pinned\]\n", "", gateway.path.read_text()))
    command("check", "--config", gateway.path, "--yes")
    assert [now - before for now, before in zip(gateway.counts, counts, strict=True)] in ([2, 1], [1, 2])
    assert read_config(gateway.path).guardian.pinned.served == "m"
    gateway.others[0].reply = votes(0, 1, model="m-2")
    refused = command("check", "--config", gateway.path, "--yes", code=2)
    assert "all must serve the same model string" in refused.stderr
    gateway.others[0].reply = failing(503)
    refused = command("check", "--config", gateway.path, "--yes", code=2)
    assert f"{gateway.others[0].url}, one of 2 endpoints of the pool, fails: " in refused.stderr
    assert "remove it from urls" in refused.stderr


async def test_another_endpoint_is_tried_without_a_pause_and_then_with_one():
    async with (
        Upstream(failing(503)) as down,
        Upstream(lambda *_: completion("fine")) as up,
        Endpoint(down.url) as one,
        Endpoint(up.url) as other,
    ):

        def pool():
            return Pool("p", [Breaker(one), Breaker(other)])

        patient = Retry(pool(), pause=60.0)
        async with asyncio.timeout(20):
            replies = [await patient.call(CALL) for _ in range(6)]
        assert [reply.spent.calls for reply in replies] == [2, 1, 1, 1, 1, 1]  # passed over for a moment
        up.reply = failing(503)
        with pytest.raises(UpstreamError) as failure:
            await Retry(pool(), attempts=2, pause=60.0).call(CALL)
        assert failure.value.spent.calls == 2
        with pytest.raises(UpstreamError) as failure:  # a third would come after 15 s or more
            await Retry(pool(), deadline=10, pause=60.0).call(CALL)
        assert failure.value.spent.calls == 2


TWO = ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "[guardian] lacks the key 'url', or urls = [...] and pool"),
        ({"url": TWO[0], "urls": TWO, "pool": "p"}, "[guardian] has both url and urls; give one"),
        ({"urls": TWO}, '[guardian] needs pool = "NAME", which stands for the urls in the identity'),
        ({"url": TWO[0], "pool": "p"}, "[guardian] has pool, for several endpoints only"),
        ({"url": TWO[0], "weights": [1]}, "[guardian] has weights, for several endpoints only"),
        ({"url": TWO[0], "key_env": ["A"]}, "[guardian] takes one name as key_env"),
        ({"urls": TWO[:1] * 2, "pool": "p"}, "[guardian] has an endpoint twice in its urls"),
        ({"urls": TWO, "pool": "p", "weights": [1]}, "[guardian] needs 2 weights above 0"),
        ({"urls": TWO, "pool": "p", "weights": [1, 0]}, "[guardian] needs 2 weights above 0"),
        ({"urls": TWO, "pool": "p", "key_env": ["A"]}, "[guardian] takes one name as key_env, or 2"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, values, message):
    path = tmp_path / "arbitrage.toml"
    primary = section("primary", {"kind": "chat", "model": "m", "url": TWO[0]})
    path.write_text(primary + section("guardian", {"kind": "chat", "model": "m", **values}))
    with pytest.raises(ConfigError) as failure:
        read_config(path)
    assert re.search(r"line ([5-9]|10): ", str(failure.value))
    assert message in str(failure.value)


def test_a_pool_of_endpoints_with_different_prices_has_no_list_price(tmp_path):
    path = tmp_path / "arbitrage.toml"

    def priced(*urls):
        values = {"kind": "chat", "model": "gpt-4o", "urls": urls, "pool": "p"}
        path.write_text(section("primary", values) + section("guardian", {"kind": "human", "name": "me"}))
        return read_config(path).primary.pricing()

    assert priced("https://api.openai.com/v1") is not None
    assert priced("https://api.openai.com/v1", "http://127.0.0.1:1/v1") is None
