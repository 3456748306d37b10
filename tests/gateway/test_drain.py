import asyncio

import aiohttp

from tests.gateway.durability import Gateway, decision_request, guardian, primary, write_config


async def slow(query):
    await asyncio.sleep(1.0)
    return await guardian(query)


async def unsure(query):
    return [1.0] * len(await primary(query))


def test_on_sigterm_requests_under_way_are_finished_and_no_new_ones_are_taken(tmp_path):
    path = write_config(tmp_path, str(tmp_path / "record.sqlite"))
    text = (
        path.read_text()
        .replace("durability:guardian", "test_drain:slow")
        .replace("durability:primary", "test_drain:unsure")
    )
    allowed = 'allow = ["primary.source_sha256", "guardian.source_sha256"]'  # other functions than the certificate's
    path.write_text(f"{text}{allowed}\n")

    async def story():
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

    asyncio.run(story())
