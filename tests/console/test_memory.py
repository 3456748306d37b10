"""What a page holds in memory does not grow with what is stored, counted in bytes that were asked for."""

import asyncio
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import closing

import pytest

from conformal_arbitrage.gateway.console.policy import Courses
from conformal_arbitrage.gateway.console.render import environment
from conformal_arbitrage.monitoring.lines import watch_lines
from conformal_arbitrage.store import events
from conformal_arbitrage.store import ledger as stored_ledger
from conformal_arbitrage.store.ledger import LedgerKey
from conformal_arbitrage.store.sqlite import SQLiteStore

LINES = watch_lines(0.05, n=2000, binary=True)
FEW, MANY = 5_000, 20_000
SLACK = 250_000
LARGEST_TEMPLATE = 5_000
"""Bytes: Jinja takes some 150 times as much while it compiles a template."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A database with a ledger of each length, and as many calibration rows."""
    path = tmp_path_factory.mktemp("memory") / "store.db"
    asyncio.run(SQLiteStore(path).close())
    numbers = "with recursive n (k) as (values (1) union all select k + 1 from n where k < {count}) "
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma synchronous = off")
        connection.execute("begin")
        for version, count in enumerate((FEW, MANY), start=1):
            connection.execute(
                "insert into ledgers (number, policy, version, lifts, identities, segment, length, known, changes) "
                f"values ({version}, 'support', {version}, 0, 'models', '', {count}, {count}, {count})"
            )
            connection.execute(
                "insert into ledger (ledger, seq, id, drawn, due, loss, undelivered, known_order, known_at, change) "
                f"{numbers.format(count=count)} select {version}, k, '{version}' || printf('%025d', k), k + 0.5, k + 9.5, "
                "k % 31 = 0, 0, k, k + 0.5, k from n"
            )
        body = '\'{"id":"\' || printf(\'%026d\', k) || \'","size":2,"primary":[0.5,0.5],"guardian":[1.0,0.0]}\''
        connection.execute(
            "insert into calibration_rows (policy, log, place, id, identities, body) "
            f"{numbers.format(count=MANY)} select 'support', '', 0, printf('%026d', k), 'models', {body} from n"
        )
        connection.execute("commit")
    return path


def peak(path, work):
    """The bytes that were in use at once, at most, while something was read from the store."""

    async def measured():
        store = SQLiteStore(path)
        try:
            tracemalloc.start()
            await work(store)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            await store.close()

    return asyncio.run(measured())


async def course(store, version):
    ledger = next(one for one in await store.run(stored_ledger.ledgers, "support") if one.key.version == version)
    course = await Courses(store)._computed(ledger, LINES, 1.0, [])
    assert course.points[-1].audits == ledger.rows


async def whole(store, version):
    rows = await store.run(stored_ledger.read, LedgerKey(policy="support", version=version, identities_sha256="models"))
    assert len(rows) == (FEW, MANY)[version - 1]


def test_the_course_of_a_ledger_takes_no_more_for_a_long_one(path):
    asyncio.run(_warm(path))
    few, many = (peak(path, lambda store, version=version: course(store, version)) for version in (1, 2))
    assert many < few + SLACK
    few, many = (peak(path, lambda store, version=version: whole(store, version)) for version in (1, 2))
    assert many > few + 2 * SLACK, "reading all rows at once would not be noticed"


async def _warm(path):
    store = SQLiteStore(path)
    await course(store, 1)
    await store.close()


def test_rows_to_look_at_take_what_the_wanted_ones_take(path):
    async def latest(store, wanted):
        rows = await store.run(
            events.latest_rows, "support", identities_sha256="models", limit=MANY // 4, wanted=wanted
        )
        assert len(rows) == sum(wanted(f"{k:026d}") for k in range(MANY - MANY // 4 + 1, MANY + 1))
        assert rows == sorted(rows, key=lambda row: row.id, reverse=True)

    few = peak(path, lambda store: latest(store, lambda id: id.endswith("00")))
    many = peak(path, lambda store: latest(store, lambda _: True))
    assert few < many / 4


def test_no_template_takes_long_to_compile():
    """The largest one decides how much a gateway grows by its first pages, and never gives back."""
    templates = environment()
    sizes = {name: len(templates.loader.get_source(None, name)[0]) for name in templates.list_templates()}
    assert len(sizes) >= 8
    assert not {name: size for name, size in sizes.items() if size > LARGEST_TEMPLATE}


FIGURES = """
import sys
import numpy as np
from conformal_arbitrage.monitoring.monitor import LedgerCourse
from conformal_arbitrage.monitoring.lines import watch_lines
from conformal_arbitrage.monitoring.votes import median_grades
from conformal_arbitrage.monitoring.votes import quantiles
course = LedgerCourse(watch_lines(0.05, n=2000), 50)
course.take(np.zeros(50))
course.figures()
median_grades([(0.0, 1.0), (0.5, 0.5)])
quantiles([1.0, 2.0, 4.0], 0.5, 0.9)
assert "numpy.ma" not in sys.modules, "np.unique, np.median or np.quantile was used"
"""


def test_figures_do_not_load_masked_arrays():
    """Which take more than a megabyte, for nothing."""
    subprocess.run([sys.executable, "-c", FIGURES], check=True, timeout=120)
