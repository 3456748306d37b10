"""Score logs in PostgreSQL: the same certificate as from the rows in memory, to the bit."""

import json
import re

import psycopg
import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLogError, ScoreTable, calibrate, verify
from conformal_arbitrage.cli import cli
from tests.calibration.test_tables import KINDS, OPTIONS, check, in_memory, rows_of


@pytest.fixture(scope="module")
def address(server):
    return server.new_database()


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


def test_single_precision_counts_as_such(address):
    rows = rows_of(7)
    with psycopg.connect(address) as connection:
        connection.execute('create table narrow (id text, "primary" real[], guardian float8[])')
        connection.cursor().executemany("insert into narrow values (%s, %s, %s)", rows)
    for keywords in OPTIONS:
        assert (
            check(ScoreTable(address=address, table="narrow"), rows, "0.2", single=True, **keywords).score_digits == 6
        )


@pytest.mark.parametrize("scores", ["[0:1]={0.9,0.1}", "{{0.9,0.1}}"])
def test_arrays_that_are_no_plain_lists_are_refused(address, scores):
    """Their first element is not number 1, so every row would look as if the Primary had no opinion."""
    with psycopg.connect(address) as connection:
        connection.execute("drop view if exists odd")
        connection.execute(
            f"create view odd as select k as id, '{scores}'::float8[] as \"primary\", '{{0,1}}'::float8[] as guardian "
            "from generate_series(1, 50) k"
        )
    with pytest.raises(ScoreLogError, match=r"50 rows have .* arrays that are no plain lists"):
        calibrate(ScoreTable(address=address, table="odd"), 0.2)


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
