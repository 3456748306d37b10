"""open_store: open the store that a URL or a file name leads to."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformal_arbitrage.store.outbox import Subscriptions
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.store.sqlite import SQLiteStore


async def open_store(
    location: str | Path,
    *,
    keys: Sequence[bytes] = (),
    webhooks: Subscriptions | None = None,
    connections: int = 4,
    migrating: bool = True,
) -> Store:
    """Open a store, creating it if it does not exist.

    Args:
        location: a postgresql:// or postgres:// URL, or a file.
        keys: sign what is stored; the first signs, all verify.
        webhooks: whom to tell of what; messages to them are queued with the events.
        connections: to PostgreSQL, for operations that take little time.
        migrating: whether to bring the tables to this release; if not, they must be there.

    Raises:
        StoreError: it cannot be used.
    """
    options: dict[str, Any] = {"keys": keys, "webhooks": webhooks, "migrating": migrating}
    if isinstance(location, str) and location.startswith(("postgres://", "postgresql://")):
        return await asyncio.to_thread(PostgresStore, location, connections, **options)
    return await asyncio.to_thread(SQLiteStore, location, **options)
