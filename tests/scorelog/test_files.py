import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformal_arbitrage import OutputError, ScoreLog, ScoreLogError
from conformal_arbitrage.scorelog.tables import writable, write_bytes, write_text
from tests.scorelog.logs import BAD_ROWS, GOOD, ROWS, assert_same, sample, write_lines

ENDINGS = [".parquet", ".jsonl", ".jsonl.gz", ".csv"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_log_survives_writing_and_reading_to_the_bit(tmp_path, ending):
    log = sample()
    log.write(tmp_path / f"log{ending}")
    assert_same(log, ScoreLog.read(tmp_path / f"log{ending}", outcomes=["severity"]))
    assert {p.name for p in tmp_path.iterdir()} <= {f"log{ending}", f"log{ending}.meta.json"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_single_precision_survives_writing_and_reading(tmp_path, ending):
    log = ScoreLog.from_arrays(np.array([[0.1, 0.2]], dtype=np.float32), [[1.0, 0.0]])
    log.write(tmp_path / f"log{ending}")
    assert ScoreLog.read(tmp_path / f"log{ending}").score_digits == 6


@pytest.mark.proof
@given(
    st.lists(
        st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=4), min_size=1, max_size=8
    ),
    st.sampled_from([".jsonl", ".csv", ".parquet"]),
)
def test_any_float_survives_any_format(tmp_path_factory, rows, ending):
    log = ScoreLog.from_arrays([[p for p, _ in r] for r in rows], [[g for _, g in r] for r in rows])
    path = tmp_path_factory.mktemp("logs") / f"log{ending}"
    log.write(path)
    assert ScoreLog.read(path).sha256() == log.sha256()


def test_json_lines_csv_and_parquet_read_the_same(tmp_path):
    lines = write_lines(tmp_path / "log.jsonl", ROWS)
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    header = "id,primary,guardian,label,context,tag\n"
    body = ['a,"[0.9, 0.1]","[1,0]",0,"q, ""1""",t1', 'b,"[0.2,0.3,0.5]","[0,0.25,1]",2,"é\nü",t2']
    (tmp_path / "log.csv").write_text(header + "\n".join(body) + "\n")
    logs = [ScoreLog.read(tmp_path / f"log{ending}") for ending in (".jsonl", ".jsonl.gz", ".csv")]
    logs[0].write(tmp_path / "log.parquet")
    logs.append(ScoreLog.read(tmp_path / "log.parquet"))
    for log in logs:
        assert log.sha256() == logs[0].sha256()
        assert log.label.tolist() == [0, 2]
        assert log.context.tolist() == ['q, "1"', "é\nü"]
        assert log.extra["tag"].tolist() == ["t1", "t2"]
        assert log.outcome("correct").tolist() == [1, 0, 0, 0, 1]


def test_columns_may_have_any_name_and_their_costs_follow(tmp_path):
    rows = [{"small": [0.1, 0.9], "big": [1, 0], "small_cost": 0.5, "big_input_tokens": 7, "other": [3, 4], "x": 1.5}]
    log = ScoreLog.read(write_lines(tmp_path / "log.jsonl", rows), primary="small", guardian="big")
    assert log.columns == ("small", "big")
    assert log.primary_usage.cost.tolist() == [0.5]
    assert log.guardian_usage.input_tokens.tolist() == [7]
    assert log.lists["other"].tolist() == [3, 4]
    assert log.extra["x"].tolist() == [1.5]
    assert log.outcome_names == ()
    log.write(tmp_path / "again.parquet")
    again = ScoreLog.read(tmp_path / "again.parquet", primary="small", guardian="big", outcomes=["other"])
    assert again.outcome("other").tolist() == [3, 4]
    assert again.extra["x"].tolist() == [1.5]


def test_other_columns_are_kept_whatever_they_hold(tmp_path):
    rows = [row | {"odd": [1, 2, 3, 4], "deep": {"a": [1]}, "flag": True} for row in ROWS]
    log = ScoreLog.read(write_lines(tmp_path / "log.jsonl", rows))
    assert log.extra["odd"].tolist() == ["[1,2,3,4]"] * 2
    assert json.loads(log.extra["deep"][0]) == {"a": [1]}
    log.write(tmp_path / "again.parquet")
    assert ScoreLog.read(tmp_path / "again.parquet").extra["flag"].tolist() == [True, True]


def test_the_order_of_rows_survives_a_large_file(tmp_path):
    n = 150_000  # more than DuckDB keeps in one group of rows
    primary = np.column_stack([np.arange(n) / n, np.zeros(n)])
    ScoreLog.from_arrays(primary, 1 - primary, id=range(n)).write(tmp_path / "log.parquet")
    log = ScoreLog.read(tmp_path / "log.parquet")
    assert np.array_equal(log.primary, primary.ravel())
    assert log.id[123_456] == "123456"


def test_a_binarised_log_is_not_written(tmp_path):
    log = ScoreLog.from_arrays([[0.9, 0.1]], [[0.5, 0.5]], label=[0]).binarized()
    with pytest.raises(OutputError, match="binarise it after reading"):
        log.write(tmp_path / "log.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("change", "message"), BAD_ROWS)
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_rows_that_break_the_format_are_refused_with_file_row_and_column(tmp_path, change, message, ending):
    rows = [GOOD, GOOD | {"id": "b"} | change]
    path = write_lines(tmp_path / "log.jsonl", rows)
    if ending == ".parquet":
        path = to_parquet(path)
    with pytest.raises(ScoreLogError, match=message) as error:
        ScoreLog.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def to_parquet(path):
    """The same rows as text columns of a Parquet file."""
    import duckdb

    target = path.with_suffix(".parquet")
    kinds = {"id": "varchar", "primary": "varchar", "guardian": "varchar", "label": "double"}
    kinds |= {"primary_cost": "double", "correct": "varchar"}
    columns = ", ".join(f"'{name}': '{kind}'" for name, kind in kinds.items())
    picked = ", ".join(f'"{name}"' for name in kinds if f'"{name}"' in path.read_text())
    with duckdb.connect() as connection:
        source = f"read_json('{path}', format='newline_delimited', columns={{{columns}}})"
        connection.execute(f"copy (select {picked} from {source}) to '{target}' (format parquet)")
    return target


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.txt", b"", "unknown kind of file"),
        ("log.jsonl", b"", "no rows"),
        ("log.csv", b"primary,guardian\n", "no rows"),
        ("log.parquet", b"PAR1 this is not it", "cannot be read"),
        ("log.jsonl", b'{"primary": [0.1}\n', "cannot be read"),
        ("log.jsonl", b"[1, 2]\n", "row 1 is not a JSON object"),
        ("log.jsonl", b'{"primary": [0.1]}\n', "no column 'guardian'; it has primary"),
        ("log.jsonl.gz", b"not gzip", "cannot be read"),
        ("log.csv", b'primary,guardian\n0.5;0.5,"[1]"\n', "not a list of numbers"),
    ],
)
def test_a_damaged_file_is_one_clear_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ScoreLogError, match=message) as error:
        ScoreLog.read(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_truncated_parquet_file_is_refused(tmp_path):
    sample().write(tmp_path / "log.parquet")
    whole = (tmp_path / "log.parquet").read_bytes()
    (tmp_path / "log.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ScoreLogError, match="is the file complete"):
        ScoreLog.read(tmp_path / "log.parquet")


def test_a_parquet_file_with_damaged_pages_is_refused(tmp_path):
    path = tmp_path / "log.parquet"
    sample().write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])
    with pytest.raises(ScoreLogError, match=r"cannot be read .*is the file complete"):
        ScoreLog.read(path)


def test_unreadable_metadata_is_refused(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "log.jsonl", [GOOD])
    (tmp_path / "log.jsonl.meta.json").write_text("{}")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ScoreLogError, match=r"cannot be read .*Permission denied"):
        ScoreLog.read(path)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(ScoreLogError, match="no such file"):
        ScoreLog.read(tmp_path / "log.parquet")


def test_a_name_with_wildcards_means_just_that_file(tmp_path):
    for name in ("log[1].parquet", "it's*.parquet"):
        sample().write(tmp_path / name)
        assert len(ScoreLog.read(tmp_path / name)) == 3


def test_a_column_that_is_not_a_list_is_refused(tmp_path):
    import duckdb

    path = tmp_path / "log.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"copy (select 1.5 as primary, [true] as guardian) to '{path}' (format parquet)")
    with pytest.raises(ScoreLogError, match="column 'primary' is DECIMAL"):
        ScoreLog.read(path)


def test_a_failed_write_leaves_no_file_behind(tmp_path):
    with pytest.raises(OutputError, match="cannot be written"):
        sample().write(tmp_path / "nowhere" / "log.parquet")
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        sample().write(tmp_path / "log.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def csv_file(path, rows, header=("id", "primary", "guardian", "context")):
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


@pytest.mark.parametrize("context", ["'", "'quoted'", 'say "x", y', "two\nlines", ";", "\t|"])
@pytest.mark.parametrize("lists", [("[0.5]", "[1]"), ("[0.13, 0.5]", "[1, 0]")])
def test_no_text_in_a_csv_file_changes_how_it_is_read(tmp_path, context, lists):
    rows = [(f"q{k}", *lists, context if k % 3 == 0 else "plain") for k in range(200)]
    log = ScoreLog.read(csv_file(tmp_path / "log.csv", rows))
    assert len(log) == 200
    assert log.context.tolist() == [row[3] for row in rows]


def test_a_late_quoted_line_break_in_a_csv_file_is_read(tmp_path):
    rows = [(f"q{k}", "[0.5]", "[1]", "a\nb" if k > 25_000 else "a") for k in range(30_000)]
    assert len(ScoreLog.read(csv_file(tmp_path / "log.csv", rows))) == 30_000


def test_a_csv_row_of_another_width_and_a_repeated_column_are_refused(tmp_path):
    short = csv_file(tmp_path / "short.csv", [("a", "[0.5]", "[1]", "x"), ("b", "[0.5]", "[1]")])
    with pytest.raises(ScoreLogError, match="Line: 3"):
        ScoreLog.read(short)
    twice = csv_file(tmp_path / "twice.csv", [("a", "[0.5]", "[1]", "x")], ("id", "primary", "guardian", "Primary"))
    with pytest.raises(ScoreLogError, match="two columns are called 'Primary'"):
        ScoreLog.read(twice)
    write_lines(tmp_path / "twice.jsonl", [GOOD | {"Primary": 1}])
    with pytest.raises(ScoreLogError, match="two columns are called 'primary'"):
        ScoreLog.read(tmp_path / "twice.jsonl")


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
def test_folders_named_like_columns_change_nothing(tmp_path, ending):
    folder = tmp_path / "label=1" / "group=math" / "primary=x"
    folder.mkdir(parents=True)
    log = sample()
    log.write(folder / f"log{ending}")
    assert_same(log, ScoreLog.read(folder / f"log{ending}", outcomes=["severity"]))


def test_extra_columns_keep_their_values_and_types(tmp_path):
    import duckdb

    source = tmp_path / "log.parquet"
    columns = "9007199254740993::bigint as big, date '2024-01-02' as day, true as flag, null::varchar as note, 1.5 as x"
    with duckdb.connect() as connection:
        query = f"select [0.1, 0.2] as primary, [0.0, 1.0] as guardian, {columns}, null::double[] as other"
        both = f"{query} union all {query.replace('null::double[]', '[1.0, 2.0]')}"
        connection.execute(f"copy ({both}) to '{source}' (format parquet)")
    log = ScoreLog.read(source)
    assert log.extra["big"].tolist() == [9007199254740993] * 2
    assert log.extra["day"].tolist() == ["2024-01-02"] * 2
    assert np.isnan(log.lists["other"]).tolist() == [True, True, False, False]
    log.write(tmp_path / "again.parquet")
    again = ScoreLog.read(tmp_path / "again.parquet")
    assert {name: values.tolist() for name, values in again.extra.items()} == {
        name: values.tolist() for name, values in log.extra.items()
    }
    with duckdb.connect() as connection:
        assert connection.execute(f"select note from '{tmp_path / 'again.parquet'}'").fetchall() == [(None,), (None,)]


def test_ids_are_text_however_they_are_written(tmp_path):
    for ids in ([1, 2], [1, 2.5], [2**63, 10**20], [10**20, 10**20 + 1], ["1", 1.0]):
        lines = write_lines(tmp_path / "log.jsonl", [GOOD | {"id": id} for id in ids])
        assert ScoreLog.read(lines).id.tolist() == [str(id) for id in ids]


def test_single_precision_of_every_column_survives(tmp_path):
    log = ScoreLog.from_arrays(np.array([[0.1, 0.2]], dtype=np.float32), [[1.0, 0.0]])
    log.write(tmp_path / "log.parquet")
    assert ScoreLog.read(tmp_path / "log.parquet", primary="guardian", guardian="primary").single == {"primary"}


def test_metadata_of_an_overwritten_log_is_removed(tmp_path):
    path = tmp_path / "log.jsonl"
    ScoreLog.from_arrays(np.array([[0.1, 0.2]], dtype=np.float32), [[1, 0]], identities={"primary": {}}).write(path)
    plain = ScoreLog.from_arrays([[0.1, 0.2]], [[1, 0]])
    plain.write(path)
    assert ScoreLog.read(path).sha256() == plain.sha256()
    assert ScoreLog.read(path).identities is None


@pytest.mark.parametrize(
    "metadata", ["[1]", "{", '{"score_digits": [1]}', '{"score_digits": {"primary": 7}}', '{"identities": 1}']
)
def test_malformed_metadata_is_refused(tmp_path, metadata):
    path = write_lines(tmp_path / "log.jsonl", [GOOD])
    (tmp_path / "log.jsonl.meta.json").write_text(metadata)
    with pytest.raises(ScoreLogError, match="metadata"):
        ScoreLog.read(path)


def test_columns_that_would_overwrite_each_other_are_not_written(tmp_path):
    log = ScoreLog.from_arrays([[0.1, 0.2]], [[1, 0]], outcomes={"guardian": [[1, 2]]})
    with pytest.raises(OutputError, match="two columns are called 'guardian'"):
        log.write(tmp_path / "log.parquet")


@pytest.mark.parametrize("label", ["True", "F", "A"])
def test_a_label_that_is_not_an_index_is_refused(tmp_path, label):
    log = csv_file(tmp_path / "log.csv", [("a", "[0.5, 0.5]", "[1, 0]", label)], ("id", "primary", "guardian", "label"))
    with pytest.raises(ScoreLogError, match="row 1, column 'label'"):
        ScoreLog.read(log)
    write_lines(tmp_path / "log.jsonl", [GOOD | {"label": True}])
    with pytest.raises(ScoreLogError, match="column 'label' is BOOLEAN"):
        ScoreLog.read(tmp_path / "log.jsonl")


def test_a_column_without_a_name_is_read(tmp_path):
    log = csv_file(tmp_path / "log.csv", [("0", "[0.5, 0.5]", "[1, 0]")], ("", "primary", "guardian"))
    assert ScoreLog.read(log).extra["column0"].tolist() == ["0"]
    write_lines(tmp_path / "log.jsonl", [GOOD | {"": 1, "huge": 2**64 - 1}])
    assert ScoreLog.read(tmp_path / "log.jsonl").extra["huge"].tolist() == [2**64 - 1]


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "there are no rows"), (b"a" * 200_000 + b"\n", "cannot be read")]
)
def test_a_csv_file_without_a_usable_header_is_refused(tmp_path, content, message):
    (tmp_path / "log.csv").write_bytes(content)
    with pytest.raises(ScoreLogError, match=message):
        ScoreLog.read(tmp_path / "log.csv")


def test_names_that_cannot_be_files_are_refused(tmp_path):
    for name in ("", "x" * 300, "\0.parquet"):
        with pytest.raises(OutputError, match="cannot be written"):
            writable(tmp_path / name if name else "")
    (tmp_path / "bad\udcff.jsonl").touch()
    with pytest.raises(ScoreLogError, match="the name is not valid text"):
        ScoreLog.read(tmp_path / "bad\udcff.jsonl")
    with pytest.raises(ScoreLogError, match="no such file"):
        ScoreLog.read(tmp_path / ("x" * 300 + ".jsonl"))


def test_a_private_file_is_readable_by_its_owner_only(tmp_path):
    write_bytes(tmp_path / "key", b"secret", private=True)
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    write_text(tmp_path / "note", "é")
    assert (tmp_path / "note").read_bytes() == "é".encode()


def test_a_column_that_duckdb_cannot_hold_is_not_written(tmp_path):
    log = replace(sample(), extra={"odd": np.array([1j, 2j, 3j])})
    with pytest.raises(OutputError, match="cannot be written"):
        log.write(tmp_path / "log.parquet")
    assert list(tmp_path.iterdir()) == []


def test_text_columns_and_actions_of_other_types_are_refused(tmp_path):
    path = write_lines(tmp_path / "log.jsonl", [GOOD | {"actions": 1}])
    with pytest.raises(ScoreLogError, match="column 'actions' is UBIGINT; it must hold a list of texts"):
        ScoreLog.read(path)
    write_lines(path, [GOOD | {"actions": None}])
    with pytest.raises(ScoreLogError, match="row 1, column 'actions': no list"):
        ScoreLog.read(path)


def test_integers_with_a_null_are_kept_as_text_and_floats_with_nan(tmp_path):
    rows = [GOOD | {"count": 2**60 + 1, "x": 0.5}, GOOD | {"id": "b", "count": None, "x": None}]
    log = ScoreLog.read(write_lines(tmp_path / "log.jsonl", rows))
    assert log.extra["count"].tolist() == [str(2**60 + 1), ""]
    assert np.array_equal(log.extra["x"], [0.5, np.nan], equal_nan=True)


def test_a_file_in_an_absent_folder_is_not_written(tmp_path):
    with pytest.raises(OutputError, match="No such file or directory"):
        write_text(tmp_path / "nowhere" / "note", "x")
