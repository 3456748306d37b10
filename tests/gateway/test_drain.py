import asyncio
import os
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.durability import Gateway, decision_request, guardian, primary, write_config


async def slow(query):
    await asyncio.sleep(1.0)
    return await guardian(query)


async def unsure(query):
    return [1.0] * len(await primary(query))


async def test_on_sigterm_requests_under_way_are_finished_and_no_new_ones_are_taken(tmp_path):
    path = write_config(tmp_path, str(tmp_path / "record.sqlite"))
    text = (
        path.read_text()
        .replace("durability:guardian", "test_drain:slow")
        .replace("durability:primary", "test_drain:unsure")
    )
    allowed = 'allow = ["primary.source_sha256", "guardian.source_sha256"]'  # other functions than the certificate's
    path.write_text(f"{text}{allowed}\n")
    async with Gateway(path) as gateway, aiohttp.ClientSession(gateway.url) as session:
        route, body = decision_request("one")

        async def ask():
            async with session.post(route, json=body) as reply:
                return reply.status, (await reply.json())["answers"][0]["arbitrage"]["decided_by"]

        tasks = [asyncio.create_task(ask()) for _ in range(8)]
        await asyncio.sleep(0.5)
        gateway.process.terminate()
        assert await asyncio.gather(*tasks) == [(200, "guardian")] * 8
        assert await asyncio.wait_for(gateway.process.wait(), 20) == 0


async def endless(query):
    Path(os.environ["CALLS"]).with_name("stuck").touch()
    await asyncio.sleep(600.0)
    return await guardian(query)


@pytest.mark.proof
async def test_what_takes_longer_than_the_grace_is_cut_off_and_continued_under_its_key_elsewhere(tmp_path):
    path = write_config(tmp_path, str(tmp_path / "record.sqlite"), audit_rate=0)
    allowed = 'allow = ["primary.source_sha256", "guardian.source_sha256"]'
    text = (
        path.read_text().replace("durability:primary", "test_drain:unsure").replace("[gateway]", "[gateway]\ngrace = 1")
    )
    path.write_text(f"{text}{allowed}\n")
    stuck = tmp_path / "stuck.toml"
    stuck.write_text(path.read_text().replace("durability:guardian", "test_drain:endless"))
    route, body = decision_request("one")

    async def ask(url):
        headers = {"Idempotency-Key": "one"}
        async with aiohttp.ClientSession(url) as session, session.post(route, json=body, headers=headers) as reply:
            return reply.status, (await reply.json()).get("error", {}).get("code")

    calls = tmp_path / "calls"
    async with Gateway(stuck, CALLS=str(calls)) as gateway:
        asking = asyncio.create_task(ask(gateway.url))
        while not (tmp_path / "stuck").exists() and not asking.done():
            await asyncio.sleep(0.05)
        gateway.process.terminate()
        assert await asking == (503, "stopped")
        assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
    async with Gateway(path, CALLS=str(calls)) as gateway:
        assert await ask(gateway.url) == (200, None)
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["primary", "guardian"]


def with_people(folder):
    """The configuration of a gateway whose callers are held for people."""
    path = folder / "arbitrage.toml"
    path.write_text("""\
[primary]
kind = "function"
function = "tests.gateway.test_drain:unsure"
name = "unsure"

[guardian]
kind = "human"
name = "support team"

[teams."support team"]
members = ["ann"]

[gateway]
database = "record.sqlite"

[policies.support]
mode = "shadow"

[policies.support.review]
wait = 55
undo = 0
""")
    return path


@pytest.mark.proof
async def test_on_sigterm_callers_who_wait_for_people_are_told_to_come_back(tmp_path):
    path, (route, body) = with_people(tmp_path), decision_request("one")

    async def ask(session):
        async with session.post(route, json=body, headers={"Idempotency-Key": "one"}) as reply:
            return reply.status, await reply.json()

    async def vote(session):
        async with session.post("/v1/arbitrage/reviews/claim", json={}) as reply:
            token = (await reply.json())["token"]
        async with session.post(f"/v1/arbitrage/reviews/{token}/vote", json={"choice": 1}) as reply:
            assert reply.status == 200

    async with Gateway(path) as gateway, aiohttp.ClientSession(gateway.url) as session:
        held = asyncio.create_task(ask(session))
        while not (await backlog(session))["open"]:
            await asyncio.sleep(0.05)
        gateway.process.terminate()
        status, refusal = await held  # 55 s are longer than the 30 that a gateway takes to end
        assert (status, refusal["error"]["code"]) == (409, "review_pending")
        assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
    async with Gateway(path) as gateway, aiohttp.ClientSession(gateway.url) as session:
        again = asyncio.create_task(ask(session))
        await vote(session)
        status, decided = await again
        assert (status, decided["answers"][0]["arbitrage"]["decided_by"]) == (200, "guardian")


async def backlog(session):
    async with session.get("/v1/arbitrage/reviews") as reply:
        [team] = (await reply.json())["data"]
        return team["backlog"]
