"""Score logs in PostgreSQL: the same certificate as from the rows in memory, to the bit."""

import psycopg
import pytest

from conformal_arbitrage import ScoreTable, verify
from tests.calibration.test_tables import KINDS, OPTIONS, check, rows_of
from tests.store.conftest import fresh_database


@pytest.fixture(scope="module")
def address(server):
    return fresh_database(server)


@pytest.mark.parametrize("kind", KINDS)
def test_postgres_gives_the_certificate_of_the_rows_in_memory(address, kind):
    for seed in range(2):
        rows = rows_of(seed, kind=kind)
        with psycopg.connect(address) as connection:
            connection.execute("drop table if exists scores")
            connection.execute('create table scores (id text, "primary" float8[], guardian float8[])')
            connection.cursor().executemany("insert into scores values (%s, %s, %s)", rows)
        table = ScoreTable(address=address, table="public.scores")
        for keywords in OPTIONS:
            certificate = check(table, rows, "0.2", **keywords)
        assert verify(certificate, table).ok
