"""Commit until killed; print each id once its commit has returned. Runs as a child process."""

import asyncio
import sys

from conformal_arbitrage.store import events
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.record import CompletionBody, new_id
from tests.store.facts import decision, later


async def commit_for_ever(store):
    while True:
        id = new_id()
        await store.run(events.commit, [decision(id), later(id, CompletionBody(finish="stop"))])
        print(id, flush=True)


async def main(where):
    store = await open_store(where)
    await asyncio.gather(*(commit_for_ever(store) for _ in range(4)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
