"""Limits on the Guardian's money under attack: many calls at once, unreadable replies, unknown prices, several gateways."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import aiohttp
import pytest

from conformal_arbitrage.errors import ConfigError, QuotaError
from conformal_arbitrage.gateway.decider import GuardianCalls, GuardianSpending
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models import Capped, Endpoint, Price, Priced, SamplingScorer, Settings
from conformal_arbitrage.store import claims
from conformal_arbitrage.types import Query
from tests.gateway.durability import Gateway, decision_request, encoded, write_config
from tests.gateway.house import CHAT, DECISION, UNSURE, House, error_of, failing, says, votes
from tests.scripted import Upstream, completion

LIMITS = "conformal_arbitrage.gateway.decider"
LIMIT = "guardian_cost_per_hour = 1.0"
PRICED = {"guardian": {"price": [0.0, 0.0], "price_per_call": 0.05}}


def at_once(gateway, count, send=None):
    with ThreadPoolExecutor(count) as pool:
        replies = pool.map(lambda k: (send or gateway.decide)({**DECISION, "input": f"Letter {k}."}), range(count))
        return [reply.status_code for reply in replies]


def refused(folder, message, **options):
    """A gateway that must not start."""
    gateway = House(folder, **options)
    with pytest.raises(ConfigError, match=message):
        gateway.__enter__()
    with pytest.raises(ConfigError) if gateway._serving else nullcontext():
        gateway.stop()
    gateway._serving = None
    gateway.__exit__()


def slow(reply, seconds=0.5):
    async def later(*asked):
        await asyncio.sleep(seconds)
        return reply(*asked)

    return later


def test_sixty_at_once_cannot_exceed_the_limit(house, monkeypatch):
    monkeypatch.setattr(f"{LIMITS}.SETTLEMENT_WAIT", 1.0)
    limit = {"guardian_cost_per_hour": 0.10}
    gateway = house(primary=votes(*UNSURE), guardian=slow(votes(0, 1)), models=PRICED, gateway=limit)
    statuses = at_once(gateway, 60)
    assert len(gateway.guardian.bodies) == 2  # two at $0.05
    assert (statuses.count(200), statuses.count(429)) == (2, 58)
    reply = gateway.decide()
    error_of(reply, 429, "rate_limit_exceeded")
    assert int(reply.headers["retry-after"]) > 60


def test_a_burst_waits_for_calls_that_turn_out_cheaper_than_they_could_have_been(house):
    """Each call reserves some $0.0004 and costs $0.000015: not all fit at once, all fit one after another."""
    limit = {"guardian_cost_per_hour": 0.002}
    gateway = house(primary=votes(*UNSURE), guardian=slow(votes(0, 1), 0.05), gateway=limit)
    assert at_once(gateway, 30) == [200] * 30
    assert gateway.guardian.most_at_once < 8


@pytest.mark.parametrize("form", ["menu", "text"])
def test_paid_replies_that_cannot_be_read_count(house, form):
    unread = {"menu": votes(0, 1, model="other"), "text": lambda *_: completion("", usage=(10, 5))}[form]
    models = {"guardian": {**PRICED["guardian"], **({"max_tokens": 9} if form == "text" else {})}}
    models["guardian.pinned"] = {"served": "m"} if form == "menu" else {}
    gateway = house(
        form=form, primary=votes(*UNSURE) if form == "menu" else says("mine", 0.1), guardian=unread, models=models,
        gateway={"guardian_cost_per_hour": 0.10},
    )  # fmt: skip
    ask = gateway.decide if form == "menu" else gateway.chat
    vary, body = ("input", DECISION) if form == "menu" else ("user", CHAT)
    bodies = [{**body, vary: f"Letter {k}."} for k in range(3)]
    assert [ask(body).status_code for body in bodies] == [502, 502, 429]
    assert len(gateway.guardian.bodies) == 2


def test_a_call_that_breaks_off_counts_in_full_and_a_refused_one_only_what_it_cost(house):
    tokens = {"guardian": {"price": [0.0, 1000.0]}}  # nothing but output, at most 19 tokens for three choices
    gateway = house(
        primary=votes(*UNSURE), guardian=failing(400), models=tokens, gateway={"guardian_cost_per_hour": 0.038}
    )
    letters = ({**DECISION, "input": f"Letter {k}."} for k in range(99))
    assert [gateway.decide(next(letters)).status_code for _ in range(4)] == [502] * 4  # refused, so free
    gateway.guardian.reply = lambda *_: (200, "no object")
    assert [gateway.decide(next(letters)).status_code for _ in range(3)] == [502, 502, 429]


@pytest.mark.parametrize(
    ("gateway", "models", "message"),
    [
        ({"guardian_cost_per_hour": 0}, {}, "guardian_cost_per_hour must be above 0"),
        ({"guardian_cost_per_hour": -1.0}, {}, "guardian_cost_per_hour must be above 0"),
        ({"guardian_calls_per_minute": 0}, {}, "guardian_calls_per_minute must be above 0"),
        ({"guardian_calls_per_minute": -5}, {}, "guardian_calls_per_minute must be above 0"),
        ({"requests_per_minute": 0}, {}, "requests_per_minute must be above 0"),
        ({"max_in_flight": 0}, {}, "max_in_flight must be above 0"),
        ({"audit_deadline": 0}, {}, "audit_deadline must be above 0"),
        ({"live_share": 1.0}, {}, "live_share must be at least 0 and below 1"),
        ({"live_share": -0.1}, {}, "live_share must be at least 0 and below 1"),
    ],
)
def test_limits_that_admit_nothing_or_anything_are_refused_with_their_line(tmp_path, gateway, models, message):
    refused(tmp_path, rf"arbitrage.toml: line \d+: {message}", gateway=gateway, models=models)


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_limit_that_is_no_number_is_refused(tmp_path, value):
    gateway = House(tmp_path)
    with gateway:
        text = gateway.path.read_text().replace("[gateway]", f"[gateway]\nguardian_cost_per_hour = {value}")
        gateway.path.write_text(text)
        with pytest.raises(ConfigError, match="guardian_cost_per_hour must be above 0 and finite"):
            read_config(gateway.path)


def test_one_call_a_minute_leaves_none_to_audits_and_is_refused(tmp_path):
    limits = {"guardian_calls_per_minute": 1}
    refused(tmp_path, "at least 2, or live_share lower", gateway=limits, policy={"audit_rate": 0.1})


def test_an_unknown_price_with_a_limit_on_money_is_refused_at_the_start_with_the_remedy(tmp_path):
    gateway = House(tmp_path)
    with gateway:
        text = gateway.path.read_text().replace("price = [1.0, 1.0]", "").replace("[gateway]", f"[gateway]\n{LIMIT}")
        gateway.path.write_text(text)
        gateway.stop()
        gateway.config = read_config(gateway.path)
        with pytest.raises(ConfigError, match=r"guardian_cost_per_hour needs the price .* set price = \[IN, OUT\]"):
            gateway.start()
        gateway._serving = None


def test_replies_of_any_length_with_a_limit_on_money_are_refused_at_the_start(tmp_path):
    refused(tmp_path, r"set max_tokens in \[guardian\]", form="text", gateway={"guardian_cost_per_hour": 1.0})
    with House(tmp_path, form="text", gateway={"guardian_cost_per_hour": 1.0}, models=PRICED) as priced_by_call:
        assert priced_by_call.chat().status_code == 200


def test_a_request_whose_length_is_no_whole_number_is_refused_before_the_guardian_is_asked(house):
    gateway = house(
        form="text", primary=says("mine", 0.1), models={"guardian": {"max_tokens": 9}},
        gateway={"guardian_cost_per_hour": 1.0},
    )  # fmt: skip
    assert gateway.chat({**CHAT, "max_tokens": 2.5}).status_code in (400, 422)
    assert not gateway.guardian.bodies
    assert gateway.chat({**CHAT, "max_tokens": 5}).status_code == 200


async def test_samples_that_no_longer_fit_cancel_none_that_are_paid_for(opened, tmp_path, monkeypatch):
    """Five samples at once, money for three: those three are answered and settled at what they cost."""
    monkeypatch.setattr(f"{LIMITS}.SETTLEMENT_WAIT", 0.1)
    store = opened(str(tmp_path / "money.db"))
    money, pricing = GuardianSpending(store, 0.35, live_share=0.5), Price(per_call=0.1)
    async with Upstream(slow(lambda *_: completion("a"), 0.3)) as upstream, Endpoint(upstream.url) as endpoint:
        port = Capped(Priced(endpoint, pricing), pricing, money)
        scorer = SamplingScorer(port=port, settings=Settings(model="m"), samples=5)
        with pytest.raises(QuotaError, match="limit on cost"):
            await scorer.score(Query("Which?", ("a", "b"), id="q"))
        await money.close()
        assert len(upstream.bodies) == 3
    shortage = await store.run(claims.reserve, "guardian_cost", 10**11, limit=round(0.35 * 10**12), seconds=3600)
    assert not shortage.in_flight  # nothing is left reserved


def test_a_call_that_could_never_fit_says_so(house):
    gateway = house(primary=votes(*UNSURE), gateway={"guardian_cost_per_hour": 1e-6})
    error = error_of(gateway.decide(), 429, "rate_limit_exceeded")
    assert "raise that, or lower max_tokens" in error["message"]
    assert not gateway.guardian.bodies


async def test_both_limits_are_shared_and_a_restart_forgets_nothing(where, opened):
    one, other = (GuardianCalls(opened(where), 3, live_share=0.5) for _ in range(2))
    for calls in (one, other, one):
        await calls.start()
    with pytest.raises(QuotaError, match="limit on calls") as failure:
        await other.start()
    assert 0 < failure.value.retry_after <= 61
    money = GuardianSpending(opened(where), 1.0, live_share=0.5)
    money.settle(await money.reserve(0.8), None)  # unknown, so in full
    await money.close()
    with pytest.raises(QuotaError, match="limit on cost") as failure:
        await GuardianSpending(opened(where), 1.0, live_share=0.5).reserve(0.3)
    assert failure.value.retry_after > 3000


def costly(folder, database, limit):
    """A configuration of models in child processes that defers nearly everything, at $0.05 a Guardian call."""
    path = write_config(folder, database, audit_rate=0, alpha=0.01)
    text = path.read_text().replace('name = "guardian"', 'name = "guardian"\nprice_per_call = 0.05')
    path.write_text(text.replace("[gateway]", f"[gateway]\nguardian_cost_per_hour = {limit}"))
    return path


async def statuses_of(session, urls, count, name):
    async def ask(k):
        path, body = decision_request(f"{name}{k}")
        headers = {"Content-Type": "application/json"}
        async with session.post(urls[k % len(urls)] + path, data=encoded(body), headers=headers) as reply:
            return reply.status

    return await asyncio.gather(*(ask(k) for k in range(count)))


@pytest.mark.proof
async def test_two_gateways_under_load_spend_what_one_may_and_a_kill_forgets_nothing(where, tmp_path):
    calls = tmp_path / "calls"
    config = costly(tmp_path, where, 0.50)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with Gateway(config, CALLS=str(calls)) as one, Gateway(config, CALLS=str(calls)) as other:
            statuses = await statuses_of(session, [one.url, other.url], 60, "a")
            await one.kill()
            assert 429 in await statuses_of(session, [other.url], 20, "b")
        async with Gateway(config, CALLS=str(calls)) as third:
            assert 429 in await statuses_of(session, [third.url], 20, "c")
    assert set(statuses) == {200, 429}
    guardian_calls = [line for line in calls.read_text().splitlines() if line.startswith("guardian")]
    assert len(guardian_calls) == 10  # ten at $0.05, over three processes
