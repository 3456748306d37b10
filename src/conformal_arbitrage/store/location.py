"""open_store: open the store that a URL or a file name leads to."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformal_arbitrage.errors import StoreError
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
    scheme, separator, _ = str(location).partition("://")
    if not separator and re.search(":.*@", str(location)):
        raise StoreError(
            "a database is a file or a postgresql:// URL, and a file's name with ':' and '@' looks like a mistyped URL; "
            "give postgresql://USER:PASSWORD@HOST/NAME, or another file's name"
        )
    if separator and scheme not in ("postgres", "postgresql"):  # a file name would be shown, with the password in it
        raise StoreError(
            f"a database is a file or a postgresql:// URL, and {scheme!r:.40} is another scheme; give "
            "postgresql://USER:PASSWORD@HOST/NAME, without a driver, or a file's name"
        )
    options: dict[str, Any] = {"keys": keys, "webhooks": webhooks, "migrating": migrating}
    if separator and isinstance(location, str):
        return await asyncio.to_thread(PostgresStore, location, connections, **options)
    return await asyncio.to_thread(SQLiteStore, location, **options)
