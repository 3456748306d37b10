"""2. Slow and giant clients, and giant replies: what one peer does costs the others nothing."""

import asyncio
import time

import pytest

from conformal_arbitrage.upstream.sse import Assembly, events
from tests.scripted import chunk

PART = "x" * 100


def assemble_text(parts):
    assembly = Assembly()
    for _ in range(parts):
        assembly.add(chunk({"content": PART}))
    assert len(assembly.document()["choices"][0]["message"]["content"]) == parts * len(PART)


def assemble_arguments(parts):
    assembly = Assembly()
    for _ in range(parts):
        assembly.add(chunk({"tool_calls": [{"index": 0, "function": {"arguments": PART}}]}))
    [call] = assembly.document()["choices"][0]["message"]["tool_calls"]
    assert len(call["function"]["arguments"]) == parts * len(PART)


def read_one_event(parts):
    async def portions():
        yield b"data: "
        for _ in range(parts):
            yield PART.encode()
        yield b"\n\n"

    async def story():
        return [len(event) async for event in events(portions())]

    assert asyncio.run(story()) == [parts * len(PART)]


def cpu_of(work, size):
    start = time.process_time()
    work(size)
    return time.process_time() - start


@pytest.mark.parametrize("work", [assemble_text, assemble_arguments, read_one_event])
def test_joining_four_times_as_many_chunks_takes_about_four_times_as_long(work):
    work(1000)
    small = min(cpu_of(work, 15_000) for _ in range(3))
    assert min(cpu_of(work, 60_000) for _ in range(3)) < 8 * small  # 16 if every chunk copied what came before
