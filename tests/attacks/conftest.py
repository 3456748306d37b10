"""The fixtures of the gateway's and the store's tests."""

from tests.gateway.conftest import house
from tests.store.conftest import opened, postgres, server, short_path, sql, start_server, store, where

__all__ = ["house", "opened", "postgres", "server", "short_path", "sql", "start_server", "store", "where"]
