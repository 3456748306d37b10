"""Every column of every table, changed once by SQL alone: it is found, or SECURITY.md says what the change can do."""

import asyncio
import contextlib
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store import integrity, keys, outbox, policies
from conformal_arbitrage.store.location import open_store
from tests.gateway.durability import OURS, run_sql
from tests.store.columns import COLUMNS
from tests.store.everything import KEYS, fill

SECURITY = Path(__file__).parents[2] / "SECURITY.md"


def section():
    """What SECURITY.md says of what is not sealed."""
    [text] = re.findall(r"## What is not sealed\n(.*?)(?=\n## |\Z)", SECURITY.read_text(), re.DOTALL)
    return text


def exceptions():
    """The columns that SECURITY.md lists as unprotected, with `*` for the rest of a table."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section(), re.MULTILINE)
    named = set()
    for table, listed in rows:
        names = re.findall(r"`(\w+)`", listed)
        named |= {f"{table}.{name}" for name in names} or {name for name in COLUMNS if name.startswith(f"{table}.")}
    return named


def changed(value, kind):
    """Another value of the same type."""
    if kind == "blob":
        return bytes(value or b"") + b"x"
    return f"{value or ''}x" if kind == "text" else (value or 0) + 1000


class Database:
    """Where a single value of a row can be changed and put back."""

    def __init__(self, where):
        if where.startswith("postgres"):
            import psycopg

            self._connection, self._mark, self._row = psycopg.connect(where, autocommit=True), "%s", "ctid"
        else:
            self._connection = sqlite3.connect(where, isolation_level=None, timeout=30)
            self._mark, self._row = "?", "rowid"

    def change(self, name, kind):
        """Change a value, where there is one; return what puts it back."""
        table, column = name.split(".")
        empty = "payload is null" if name == "reviews.question_seal" else f"{column} is null"
        select = f"select {column}, {self._row} from {table} order by {empty}, {self._row} limit 1"
        [(before, row)] = self._connection.execute(select).fetchall()
        after = changed(before, kind)
        update = f"update {table} set {column} = {self._mark} where {self._row} = {self._mark}"
        self._connection.execute(update, (after, row))
        back = f"update {table} set {column} = {self._mark} where {column} = {self._mark}"  # the row may have moved
        return lambda: self._connection.execute(back, (before, after))

    def close(self):
        self._connection.close()


async def finds(where):
    """What `verify`, or loading, says."""
    try:
        store = await open_store(where, keys=KEYS, migrating=False)
    except StoreError as error:
        return [str(error)]
    try:
        with contextlib.suppress(StoreError):
            history = await store.run(policies.history, "support")
            return [
                *await integrity.verify(store),
                *(f"key {key.id}" for key in await store.run(keys.list_all) if not key.intact),
                *(f"policy {version.name}" for version in history if not version.intact),
                *(f"delivery {sent.id}" for sent in await store.run(outbox.deliveries) if not sent.intact),
                *(["secret"] if await store.run(integrity.secret_fingerprint) not in OURS.fingerprints else []),
            ]
        return ["refused"]
    finally:
        await store.close()


def test_every_column_that_is_changed_is_found_or_listed_in_security_md(tmp_path):
    check_every_column(str(tmp_path / "store.db"))


@pytest.mark.proof
def test_so_is_every_column_in_postgresql(postgres):
    check_every_column(postgres)


def check_every_column(where):
    asyncio.run(fill(where))
    assert asyncio.run(finds(where)) == []
    database, unfound = Database(where), set()
    for name, kind in COLUMNS.items():
        restore = database.change(name, kind)
        if not asyncio.run(finds(where)):
            unfound.add(name)
        restore()
    database.close()
    assert asyncio.run(finds(where)) == []
    assert unfound == exceptions()


def test_every_row_that_is_deleted_is_found_or_its_table_listed_in_security_md(tmp_path):
    where = str(tmp_path / "store.db")
    asyncio.run(fill(where))
    unfound = set()
    with closing(sqlite3.connect(where, isolation_level=None, timeout=30)) as connection:
        for table in sorted({name.split(".")[0] for name in COLUMNS}):
            for row in connection.execute(f"select rowid, * from {table}").fetchall():
                connection.execute(f"delete from {table} where rowid = ?", row[:1])
                if table not in unfound and not asyncio.run(finds(where)):
                    unfound.add(table)
                connection.execute(f"insert or replace into {table} values ({', '.join('?' * len(row[1:]))})", row[1:])
    assert asyncio.run(finds(where)) == []
    [bullet] = re.findall(r"^- delete what waits(.*?);$", section(), re.MULTILINE | re.DOTALL)
    listed = exceptions()
    whole = {name.split(".")[0] for name in COLUMNS} - {name.split(".")[0] for name in COLUMNS if name not in listed}
    assert unfound == {*re.findall(r"`(\w+)`", bullet), *whole}


def test_rows_of_another_database_with_the_same_secret_are_found(tmp_path):
    ours, theirs = str(tmp_path / "ours.db"), str(tmp_path / "theirs.db")
    asyncio.run(fill(ours))
    asyncio.run(fill(theirs))
    for table in ("events", "heads", "roster", "ledger", "votes", "keys", "policies"):
        shutil.copy(ours, tmp_path / "mixed.db")
        with closing(sqlite3.connect(tmp_path / "mixed.db", isolation_level=None)) as connection:
            connection.execute("attach ? as theirs", (theirs,))
            connection.execute(f"delete from {table}")
            connection.execute(f"insert into {table} select * from theirs.{table}")
        assert asyncio.run(finds(str(tmp_path / "mixed.db"))), f"the rows of {table} are from another database"


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ("update ledger set loss = 0.0", "row 1 of its ledger is not what was written"),
        ("delete from ledger where seq = 3", "2 rows, 2 losses"),
        ("delete from ledger where seq = 1", "rows 1 to 1 of its ledger were removed"),
        ("update ledger set seq = seq + 10", "rows 1 to 10 of its ledger were removed"),
        ("delete from ledger where seq = 1; delete from ledger where seq = 2", "its row of the ledger was removed"),
        (
            "delete from ledger; delete from ledgers",
            "its ledger was removed, and 3 decisions of the record",
        ),
        ("delete from events where kind = 'alarm'", "policy support: 1 of its alarms, lifts and exclusions"),
        (
            "update events set kind = 'lift' where kind = 'alarm'",
            "policy support: 1 of its alarms, lifts and exclusions",
        ),
        ("update votes set choice = 0", "is not what was cast"),
        ("delete from keys where id = 'boss'", "key boss: it was removed"),
        (
            "update policies set certificate = (select certificate from policies where version = 1) where version = 3",
            "policy",
        ),
        ("update reviews set outcome = null where outcome is not null", "the verdict"),
    ],
)
def test_what_decides_cannot_be_edited_behind_the_gateway_s_back(where, change, finding):
    asyncio.run(fill(where))
    for statement in change.split("; "):
        run_sql(where, statement)
    faults = asyncio.run(finds(where))
    assert any(finding in fault for fault in faults), faults
