import asyncio
import inspect
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from conformal_arbitrage import ProjectSecret, ScoreLog
from conformal_arbitrage.calibration.secret import user_folder
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

_user = tempfile.TemporaryDirectory(prefix="arbitrage-user-", ignore_cleanup_errors=True)
os.environ["XDG_CONFIG_HOME"] = _user.name  # the secret of whoever runs the tests stays out of them
ProjectSecret.create(user_folder())

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


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine, each on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def forget_looks():
    """Let no test know which logs another one looked at."""
    (user_folder() / "arbitrage-looks.json").unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def forget_modules(tmp_path_factory):
    """Forget the modules that a test wrote and imported: another one may write some of the same name."""
    before = set(sys.modules)
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


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
