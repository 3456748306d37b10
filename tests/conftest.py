import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from conformal_arbitrage import ScoreLog
from tests.databases import opened, postgres, server, shared_server, short_path, sql, start_server, store, where

__all__ = ["opened", "postgres", "server", "shared_server", "short_path", "sql", "start_server", "store", "where"]
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
BUNDLED = Path(__file__).resolve().parents[1] / "src" / "conformal_arbitrage" / "data" / "science.parquet"

STORE = Path(__file__).with_name("store")
OFFLINE = str(Path(__file__).with_name("offline"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [OFFLINE, os.environ.get("PYTHONPATH")]))  # child processes
sys.path.insert(0, OFFLINE)
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401 - this process

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=150)
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items):
    """Count as proofs what runs in a browser, and what runs on PostgreSQL outside tests/store."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        named = any(isinstance(value, str) and value.endswith("postgres") for value in values)
        on_postgres = named or "start_server" in item.fixturenames
        if "open_page" in item.fixturenames or (on_postgres and not item.path.is_relative_to(STORE)):
            item.add_marker(pytest.mark.proof)


def shared_json(name):
    path = SHARED / name
    return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def shared():
    if not SHARED.exists():
        pytest.skip("the real score logs are not beside this checkout (../shared/data)")
    return SHARED


@pytest.fixture(scope="session")
def science():
    return ScoreLog.read(BUNDLED, primary="qwen15b", guardian="expert")
