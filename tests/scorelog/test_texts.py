"""Text and numbers that come from DuckDB as Arrow buffers, against Python's own strings and lists."""

from dataclasses import replace

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import ScoreLog, ScoreLogError
from conformal_arbitrage.scorelog import tables as module
from conformal_arbitrage.scorelog.tables import ArrowError, TextBytes, number_lists, text_bytes, text_lists

STRINGS = np.dtypes.StringDType()
HARD = ["", "a", "a\0", "a\0\0b", "\0", "é", "日本", "😀", "x" * 7, "x" * 8, "x" * 9, "x" * 256, "x" * 257, "y" * 5000]
some_texts = st.lists(
    st.one_of(st.sampled_from(HARD), st.text("ab\0é0123456789", max_size=20)), min_size=1, max_size=40
)


def packed(texts):
    encoded = [one.encode() for one in texts]
    bounds = np.cumsum([0, *(len(one) for one in encoded)])
    return TextBytes(np.frombuffer(b"".join(encoded), np.uint8), bounds)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 7)


@given(some_texts)
@settings(max_examples=150, deadline=None)
def test_texts_come_out_as_they_went_in(texts):
    array, distinct = packed(texts).ids()
    assert array.tolist() == packed(texts).strings().tolist() == texts
    assert not distinct or (len(set(texts)) == len(texts) and "" not in texts)


@given(st.sets(st.text("abc0123456789-", min_size=1, max_size=30), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_short_distinct_ids_are_known_to_be_distinct(ids):
    assert packed(sorted(ids)).ids()[1]


def test_an_id_that_occurs_twice_anywhere_is_never_taken_for_distinct():
    rng = np.random.default_rng(0)
    names = [f"query-{k}" for k in range(2000)]
    for _ in range(50):
        one, other = rng.choice(2000, 2, replace=False)
        same = [*names]
        same[one] = same[other]
        assert not packed(same).ids()[1]
    assert packed(names).ids()[1]


def test_keys_that_do_not_see_the_end_of_a_text_are_caught(monkeypatch):
    # planted: all texts of one first word share a key, so that distinctness is denied, and never wrongly granted
    monkeypatch.setattr(module, "_keys", lambda words: words[:, 0].copy())
    names = [f"query-{k}" for k in range(5000)]
    assert not packed(names).ids()[1]
    assert ScoreLog.from_arrays([[0.1]] * 5000, [[1.0]] * 5000, id=names).id.tolist() == names


@given(some_texts)
@settings(max_examples=150, deadline=None)
def test_texts_in_memory_have_the_bytes_of_those_that_were_read(texts):
    ours, theirs = TextBytes.of(np.array(texts, dtype=STRINGS)), packed(texts)
    assert ours.each() == theirs.each() == [text.encode() for text in texts]


def test_the_digest_of_a_log_depends_on_ids_and_scores_and_not_on_the_order_of_rows():
    names = ["a", "query-2", "é"]
    log = ScoreLog.from_arrays([[0.5, -0.0], [0.1, 0.2], [1, 0]], [[1, 0]] * 3, id=names)
    assert (
        log.sha256()
        == log.select([2, 0, 1]).sha256()
        == "05d8d1bafe506f7fe1a3bd0c54cce8b6ad9c9448593bf4dd6f159cf51ae7187f"
    )
    for other in (
        replace(log, id=np.array([*names[:2], "e"], dtype=STRINGS)),
        log.select([0, 1]),
        log.select([0, 0, 1, 2]),
    ):
        assert other.sha256() != log.sha256()


def lists_of(column):
    """A stream of one column, in chunks that begin in the middle of their buffers."""
    table = pa.table({"v": column})
    return pa.Table.from_batches([*table.slice(1, 2).to_batches(), *table.slice(3).to_batches()], table.schema)


@pytest.mark.parametrize("rows", [0, 1, 4, 100])
def test_nulls_and_chunks_within_larger_buffers_are_read_as_they_are(rows):
    numbers = pa.array([[9.0], [1.0, None], None, [], [2.0, 3.0, 4.0]], pa.large_list(pa.float64()))
    values, sizes = number_lists(lists_of(numbers), rows)
    assert sizes.tolist() == [2, -1, 0, 3]
    np.testing.assert_array_equal(values, [1.0, np.nan, 2.0, 3.0, 4.0])
    words = text_bytes(lists_of(pa.array(["?", "b", None, "cé", ""], pa.large_string())), rows)
    assert words.strings().tolist() == ["b", "", "cé", ""]
    flat, sizes = text_lists(
        lists_of(pa.array([["?"], ["b", None], None, [], ["c"]], pa.large_list(pa.large_string()))), rows
    )
    assert (flat.strings().tolist(), sizes.tolist()) == (["b", "", "c"], [2, -1, 0, 1])


def test_a_stream_without_rows_is_empty():
    empty = pa.table({"v": pa.array([], pa.large_list(pa.float64()))})
    assert [one.tolist() for one in number_lists(empty, 0)] == [[], []]


@pytest.mark.parametrize("column", [pa.array([1, 2]), pa.array([[1.0]]), pa.array([["a"]], pa.large_list(pa.string()))])
def test_another_type_than_was_asked_for_is_refused_not_misread(column):
    with pytest.raises(ArrowError, match="Arrow type"):
        number_lists(pa.table({"v": column}), 1)


def test_an_error_in_the_middle_of_a_stream_is_told():
    with duckdb.connect(config={"arrow_large_buffer_size": "true"}) as connection:
        rows = "from range(300000) t(i)"
        relation = connection.sql(f"select case when i < 250000 then '1' else error('row ' || i) end as v {rows}")
        with pytest.raises((ArrowError, duckdb.Error), match="row 2"):
            text_bytes(relation, 300_000)


def test_a_damaged_file_is_named(tmp_path):
    log = ScoreLog.from_arrays(np.random.default_rng(0).random((30000, 3)), np.ones((30000, 3)))
    path = tmp_path / "log.parquet"
    log.write(path)
    data = bytearray(path.read_bytes())
    data[2000:60000] = bytes(58000)
    path.write_bytes(data)
    with pytest.raises(ScoreLogError, match=r"log\.parquet"):
        ScoreLog.read(path)
