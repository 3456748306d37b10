"""All columns of the schema, as SQLite has them."""

import sqlite3

from conformal_arbitrage.store.schema import create_tables
from conformal_arbitrage.store.session import SQLITE, Seals, Session


def columns():
    """All columns of the schema, with their types."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    create_tables(Session(connection, SQLITE, Seals()))
    names = connection.execute(
        "select name from sqlite_master where type = 'table' and name not like 'sqlite%'"
    ).fetchall()
    return {
        f"{table}.{row[1]}": row[2].lower()
        for (table,) in names
        for row in connection.execute(f"pragma table_info({table})").fetchall()
    }


COLUMNS = columns()
