"""Nobody reads stderr: the gateway goes on, counts the lines it loses, and ends when it is told to."""

import asyncio
import fcntl
import json
import os
import re

import aiohttp
import pytest

from conformal_arbitrage.gateway.server import MOST_WAITING
from tests.gateway.durability import Gateway, chat_request, decision_request, write_config

REQUESTS = MOST_WAITING + 2000  # more than the pipe and the queue hold


async def _asked(gateway, count):
    """Statuses of so many requests, each of which writes a line, and of decisions among them."""
    left, statuses = iter(range(count)), set()

    async def caller(session):
        for number in left:
            if number % 100:
                reply = await session.get(gateway.url + "/v1/models")
            else:
                path, body = (chat_request, decision_request)[number % 200 == 0](f"n{number}")
                reply = await session.post(gateway.url + path, json=body)
            async with reply:
                await reply.read()
                statuses.add(reply.status)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(caller(session) for _ in range(8)))
        async with session.get(gateway.url + "/metrics") as reply:
            return statuses, await reply.text()


@pytest.mark.proof
def test_thousands_of_requests_are_answered_while_nobody_reads_stderr(tmp_path):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)

    async def story():
        config = write_config(tmp_path, tmp_path / "arbitrage.db")
        async with Gateway(config, errors_to=writing) as gateway:
            os.close(writing)
            async with asyncio.timeout(120):
                statuses, metrics = await _asked(gateway, REQUESTS)
            gateway.process.terminate()
            async with asyncio.timeout(30):
                return statuses, metrics, await gateway.process.wait()

    try:
        statuses, metrics, code = asyncio.run(story())
    finally:
        os.close(reading)
    assert statuses == {200}
    assert code == 0
    assert int(float(re.search(r"^arbitrage_log_lines_dropped_total (\S+)$", metrics, re.MULTILINE)[1])) > 0


def test_every_line_on_stderr_is_json_with_time_level_policy_and_id(tmp_path):
    async def story():
        config = write_config(tmp_path, tmp_path / "arbitrage.db")
        async with Gateway(config) as gateway:
            host, port = gateway.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"this is no HTTP\r\n\r\n")
            await reader.read()
            writer.close()
            await _asked(gateway, 101)
            gateway.process.terminate()
            await gateway.process.wait()
        return config.with_suffix(".log").read_text()

    lines = [json.loads(line) for line in asyncio.run(story()).splitlines()]
    assert len(lines) >= 102
    assert all({"time", "level", "policy", "id"} <= set(line) for line in lines), lines
    decided = [line for line in lines if line.get("route") == "POST /v1/decisions"]
    assert decided[0]["policy"] == "support"
    assert decided[0]["id"]
