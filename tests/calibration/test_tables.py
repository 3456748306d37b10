"""Tables of databases: SQL gives the certificate of the same rows in memory, to the bit."""

from dataclasses import fields

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import OptionError, ScoreLog, ScoreLogError, ScoreTable, calibrate, verify
from conformal_arbitrage.calibration import sql as sql_module
from conformal_arbitrage.core.search import Bracket

KEY = b"0123456789abcdef"
NOT_COMPARED = {"created", "log_sha256", "key", "fit", "identities"}
OPTIONS = [
    {},
    {"guardian_sees": "candidates"},
    {"guardian_sees": "all-restricted-loss", "grid": "0.05"},
    {"boundary": "random", "key": KEY},
    {"boundary": "random", "key": KEY, "guardian_sees": "candidates"},
]
KINDS = ("unit", "coarse", "decades", "tiny", "signed")


def rows_of(seed, n=60, kind="unit", *, holes=True):
    """Rows of up to 8 actions with nulls, NaN and missing lists, as lists that a database takes."""
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([1, 2, 4, 8]))
    rows = []
    for k in range(n):
        size = int(rng.integers(1, longest + 1))
        scale = 10.0 ** int(rng.integers(-12, 11)) if kind == "decades" else 1e-21 if kind == "tiny" else 1.0
        whole = rng.integers(0, 5, size) / 4
        primary = (
            whole if kind in ("coarse", "tiny") else rng.normal(size=size) if kind == "signed" else rng.random(size)
        )
        guardian = whole if kind == "coarse" and rng.random() < 0.3 else rng.random(size)
        p, g = (primary * scale).tolist(), (guardian * 3 - 1 if kind == "signed" else guardian).tolist()
        if holes and rng.random() < 0.1:
            p = None if rng.random() < 0.3 else [*p[:-1], None if rng.random() < 0.5 else float("nan")]
        if holes and p is not None and rng.random() < 0.1:
            g = None if rng.random() < 0.3 else [*g[:-1], None if rng.random() < 0.5 else float("nan")]
        rows.append((f"q{k}", p, g))
    return rows


def in_memory(rows, *, single=False):
    primary = [p if p is None or not single else np.array(p, np.float32) for _, p, _ in rows]
    return ScoreLog.from_arrays(primary, [g for *_, g in rows], id=[id for id, *_ in rows])


def duckdb_table(path, rows, kind="double[]"):
    with duckdb.connect(str(path)) as connection:
        connection.execute(f'create or replace table scores (id text, "primary" {kind}, guardian double[])')
        if rows:
            connection.executemany("insert into scores values (?, ?, ?)", rows)
    return ScoreTable(address=str(path), table="scores")


def differing(one, other):
    names = [f.name for f in fields(one) if f.name not in NOT_COMPARED]
    return {n: (getattr(one, n), getattr(other, n)) for n in names if getattr(one, n) != getattr(other, n)}


def check(table, rows, alpha, *, single=False, **keywords):
    log = in_memory(rows, single=single)
    bound = 1 if np.nanmin(log.guardian, initial=0.0) >= 0 else 3
    expected = calibrate(log, alpha, missing_guardian="worst_case", loss_bound=bound, **keywords)
    certificate = calibrate(table, alpha, missing_guardian="worst_case", loss_bound=bound, **keywords)
    assert not differing(expected, certificate)
    assert certificate.log_sha256.startswith("totals:")
    return certificate


@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS), keywords=st.sampled_from(OPTIONS))
@settings(max_examples=25, deadline=None)
def test_duckdb_gives_the_certificate_of_the_rows_in_memory(tmp_path_factory, seed, kind, keywords):
    rows = rows_of(seed, kind=kind)
    path = tmp_path_factory.mktemp("tables") / "scores.duckdb"
    check(duckdb_table(path, rows), rows, ["0.05", "0.2", "0.5"][seed % 3], **keywords)
    path.unlink()


@pytest.mark.parametrize("kind", ["unit", "coarse", "signed", "tiny"])
def test_single_precision_counts_as_such(tmp_path, kind):
    rows = rows_of(7, kind=kind)
    table = duckdb_table(tmp_path / "scores.duckdb", rows, "float[]")
    for keywords in OPTIONS:
        assert check(table, rows, "0.2", single=True, **keywords).score_digits == 6


def test_a_table_is_verified_and_a_change_is_seen(tmp_path):
    rows = rows_of(1, holes=False)
    table = duckdb_table(tmp_path / "scores.duckdb", rows)
    lines = []
    certificate = calibrate(table, "0.2", progress=lines.append)
    assert verify(certificate, table).ok
    assert lines[0].startswith("query 1 of table scores")
    changed = duckdb_table(tmp_path / "scores.duckdb", rows[:-1])
    assert {"n", "log_sha256"} <= set(verify(certificate, changed).differences)


def test_coarse_ticks_and_many_passes_in_a_table(tmp_path):
    rng = np.random.default_rng(2)
    rows = [(f"q{k}", rng.random(3).tolist(), (rng.random(3) * 1900).tolist()) for k in range(9000)]
    table = duckdb_table(tmp_path / "scores.duckdb", rows)
    for sees in ("all", "candidates"):
        expected = calibrate(in_memory(rows), 100, loss_bound=1900, guardian_sees=sees)
        assert not differing(expected, calibrate(table, 100, loss_bound=1900, guardian_sees=sees))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("x", None, None), "1 rows have no scores"),
        (("x", [0.1], []), "1 rows have no scores"),
        (("x", [0.1], [0.1, 0.2]), "lists of different lengths"),
        (("x", [float("inf"), 0.0], [0.1, 0.2]), "infinity"),
        (("x", [0.1, 0.2], None), r"1 of 61 rows have no Guardian score"),
        (("x", [1e13, 0.2], [0.1, 0.2]), "Primary scores up to 1e\\+12"),
        (("x", [0.1, 0.2], [0.1, 2500.0]), "below 2000"),
        (("x", [0.1] * 9, [0.1] * 9), "up to 9 actions"),
    ],
)
def test_what_sql_cannot_take_is_refused(tmp_path, row, message):
    table = duckdb_table(tmp_path / "scores.duckdb", [*rows_of(3, holes=False), row])
    with pytest.raises((ScoreLogError, OptionError), match=message):
        calibrate(table, 0.2, loss_bound=3000)


def test_options_ids_and_addresses_that_sql_cannot_take(tmp_path):
    rows = rows_of(4, holes=False)
    table = duckdb_table(tmp_path / "scores.duckdb", [*rows, rows[0]])
    with pytest.raises(ScoreLogError, match="61 rows have 60 different ids"):
        calibrate(table, 0.2, boundary="random", key=KEY)
    with pytest.raises(ScoreLogError, match="61 rows have 60 different ids"):
        calibrate(table, 0.2)  # a row that is there twice counts twice, whatever the boundary
    with pytest.raises(OptionError, match="by= is not computed by SQL"):
        calibrate(table, 0.2, by="group")
    with pytest.raises(ScoreLogError, match="a query failed on DuckDB"):
        calibrate(ScoreTable(address=table.address, table="nothing"), 0.2)
    with pytest.raises(ScoreLogError, match="cannot be opened"):
        calibrate(ScoreTable(address=str(tmp_path / "none.duckdb"), table="scores"), 0.2)
    assert "postgresql" not in repr(ScoreTable(address="postgresql://u:secret@h/db", table="scores"))


def test_a_planted_fault_in_the_query_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(sql_module, "_HALF_UP", "'0'::float8")  # gaps are no longer rounded
    hits = 0
    for seed in range(12):
        rows = rows_of(seed, kind="unit")
        try:
            check(duckdb_table(tmp_path / "scores.duckdb", rows), rows, "0.1", guardian_sees="candidates")
        except AssertionError:
            hits += 1
    assert hits


def test_a_postgres_that_cannot_be_reached_or_lacks_its_driver(monkeypatch):
    import sys

    pytest.importorskip("psycopg")
    table = ScoreTable(address="postgresql://nobody:secret@127.0.0.1:9/db?connect_timeout=2", table="scores")
    with pytest.raises(ScoreLogError, match="PostgreSQL cannot be reached") as caught:
        calibrate(table, 0.2)
    assert "secret" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(OptionError, match="pip install"):
        calibrate(table, 0.2)


def test_a_table_without_rows_is_refused(tmp_path):
    with pytest.raises(ScoreLogError, match="there are no rows; give it at least one"):
        calibrate(duckdb_table(tmp_path / "scores.duckdb", []), 0.2)


def test_a_table_without_losses_has_no_falls(tmp_path):
    rows = [(f"q{k}", [0.9, 0.1], [1.0, 0.0]) for k in range(50)]
    table = duckdb_table(tmp_path / "scores.duckdb", rows)
    assert calibrate(table, 0.2).relaxation == 0.0
    rows = [(f"q{k}", [0.9, 0.1], [0.0, 1.0]) for k in range(3)]
    assert calibrate(duckdb_table(tmp_path / "scores.duckdb", rows), 0.2).status == "always_defer"


def test_a_range_of_a_single_gap_is_one_bucket():
    assert sql_module._bucket(Bracket(0.5, 0.5, 2)) == "0::bigint"  # pyright: ignore[reportPrivateUsage]


def test_gaps_that_share_a_bucket_are_collected(tmp_path):
    rows = [(f"q{k}", [round(0.5 + k * 1e-7, 7), 0.0], [0.0, 1.0]) for k in range(40)]
    certificate = check(duckdb_table(tmp_path / "scores.duckdb", rows), rows, "0.5")
    assert certificate.relaxation == 0.500002


def test_an_address_that_cannot_be_parsed_is_not_repeated():
    with pytest.raises(ScoreLogError, match="cannot be parsed") as caught:
        calibrate(ScoreTable(address="postgresql://u:sec%ret@h/db", table="scores"), 0.2)
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ('id, "primary" as p, guardian', "no column 'primary'; it has guardian, id, p"),
        ('id, to_json("primary") as "primary", guardian', "column 'primary' is JSON; it must be an array"),
        ('id, "primary", [guardian] as guardian', r"column 'guardian' is DOUBLE\[\]\[\]; it must be an array"),
        ("*, true as unfit_for_calibration", "selected by their scores"),
        ("*, 3 as session_turns", "a log of sessions is not computed by SQL"),
        ("nullif(id, 'q7') as id, \"primary\", guardian", "60 rows have 59 different ids"),
    ],
)
def test_columns_that_are_no_scores_are_refused(tmp_path, columns, message):
    table = duckdb_table(tmp_path / "scores.duckdb", rows_of(6, holes=False))
    with duckdb.connect(table.address) as connection:
        connection.execute(f'create view "a.b ""c""" as select {columns} from scores')
    with pytest.raises((ScoreLogError, OptionError), match=message):
        calibrate(ScoreTable(address=table.address, table='main."a.b ""c"""'), 0.2)


def test_a_table_without_ids_has_no_random_boundary_and_a_name_is_a_name(tmp_path):
    table = duckdb_table(tmp_path / "scores.duckdb", rows_of(6, holes=False))
    nameless = ScoreTable(address=table.address, table="scores", id="name")
    assert calibrate(nameless, 0.2).relaxation == calibrate(table, 0.2).relaxation
    with pytest.raises(ScoreLogError, match="there is no column 'name'"):
        calibrate(nameless, 0.2, boundary="random", key=KEY)
    with pytest.raises(OptionError, match="is no name of a table"):
        calibrate(ScoreTable(address=table.address, table='scores"'), 0.2)
