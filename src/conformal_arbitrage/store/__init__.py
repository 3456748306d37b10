"""The decision record: one protocol, kept by SQLite or PostgreSQL."""

import asyncio
from pathlib import Path

from conformal_arbitrage.store.base import (
    Audit,
    Claim,
    Claimed,
    DecisionRecord,
    Event,
    EventKind,
    KeyInfo,
    PolicyVersion,
    Replay,
    Scope,
    Store,
)
from conformal_arbitrage.store.ids import new_id
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.sqlite import SQLiteStore

__all__ = [
    "Audit",
    "Claim",
    "Claimed",
    "DecisionRecord",
    "Event",
    "EventKind",
    "KeyInfo",
    "PolicyVersion",
    "PostgresStore",
    "Replay",
    "SQLiteStore",
    "Scope",
    "Store",
    "new_id",
    "open_store",
]


async def open_store(where: str | Path) -> Store:
    """Open a store, made if absent.

    Args:
        where: a postgresql:// or postgres:// URL, or a file.

    Raises:
        StoreError: it cannot be used.
    """
    if isinstance(where, str) and where.startswith(("postgres://", "postgresql://")):
        return await asyncio.to_thread(PostgresStore, where)
    return await asyncio.to_thread(SQLiteStore, where)
