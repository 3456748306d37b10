"""Score logs in PostgreSQL: the same certificate as from the rows in memory, to the bit."""

import json
import re

import psycopg
import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreTable, calibrate, verify
from conformal_arbitrage.cli import cli
from tests.calibration.test_tables import KINDS, OPTIONS, check, in_memory, rows_of
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


def test_the_command_line_takes_a_table_and_the_password_from_the_environment(address, tmp_path, monkeypatch):
    rows = rows_of(5, holes=False)
    with psycopg.connect(address) as connection:
        connection.execute('create table named (id text, "primary" float8[], guardian float8[])')
        connection.cursor().executemany("insert into named values (%s, %s, %s)", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCORES_PASSWORD", "not/needed@here")
    where = ["table:public.named", "--engine", re.sub(":[^/:@]*@", ":{SCORES_PASSWORD}@", address, count=1)]
    assert "{SCORES_PASSWORD}" in where[-1]
    calibrated = CliRunner().invoke(cli, ["calibrate", *where, "--alpha", "0.2", "-o", "c.json", "--json"])
    assert calibrated.exit_code == 0, calibrated.stderr
    assert json.loads(calibrated.stdout)["relaxation"] == calibrate(in_memory(rows), "0.2").relaxation
    verified = CliRunner().invoke(cli, ["verify", "c.json", *where])
    assert verified.exit_code == 0, verified.stderr
