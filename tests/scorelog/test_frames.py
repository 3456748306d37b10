import gc
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import OptionError, OutputError, ScoreLog, ScoreLogError, Usage, calibrate
from conformal_arbitrage.scorelog.log import as_score_log
from tests.scorelog.logs import BAD_ROWS, GOOD, assert_same, sample

COLUMNS = {
    "id": ["a", "b", "c"],
    "primary": [[0.1 + 0.2, 0.1], [0.2, None], None],
    "guardian": [[1.0, 0.0], None, [0.0, 0.25]],
    "label": [0, 1, 1],
    "tag": ["x", None, "z"],
    "severity": [[0.0, 3.0], [1.0, 2.0], [0.5, 0.0]],
    "primary_cost": [0.1, 0.2, 0.3],
}
LIBRARIES = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "arrow": pa.table}


class Capsule:
    """Nothing but the PyCapsule interface, as an unknown library would offer it."""

    def __init__(self, frame):
        self._frame = frame

    def __arrow_c_stream__(self, requested_schema=None):
        return self._frame.__arrow_c_stream__(requested_schema)


def everything():
    """A log with every column, single precision among them."""
    log = ScoreLog.from_arrays(
        [np.array([0.1, -0.0], dtype=np.float32), np.array([np.nan, 0.5, 1], dtype=np.float32)],
        [[1 / 3, 5e-324], None],
        id=["a", "b"],
        label=[0, 2],
        group=["x", "y"],
        context=["", "é\nü"],
        actions=[["yes", "no"], ["1", "2", "it's"]],
        outcomes={"severity": [[0, 3], None]},
        primary_usage=Usage(cost=[0.1, 0.2], input_tokens=[1, 2], output_tokens=[4, 5]),
        guardian_usage=Usage(cost=[0.3, 0.4]),
        identities={"primary": {"kind": "function", "name": "p", "seed": 1}, "guardian": {"kind": "label"}},
    )
    extra = {"count": np.array([1, 2**53 + 1]), "x": np.array([0.1, np.nan]), "flag": np.array([True, False])}
    return log.__class__(**{name: getattr(log, name) for name in log.__slots__} | {"extra": extra})


def assert_equal_logs(log, other, *, identities=True):
    for name in log.__slots__:
        left, right = getattr(log, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert_equal_arrays(left, right)
        elif isinstance(left, Usage):
            for part in Usage.__slots__:
                assert_equal_arrays(getattr(left, part), getattr(right, part))
        elif name in ("lists", "extra"):
            assert set(left) == set(right)
            for key in left:
                assert_equal_arrays(left[key], right[key])
        elif name != "source" and (identities or name != "identities"):
            assert left == right, name


def assert_equal_arrays(left, right):
    if left is None or left.dtype.kind not in "fiub":
        assert (left is None) == (right is None)
        assert left is None or left.tolist() == right.tolist()
    else:
        assert left.dtype == right.dtype
        known = ~np.isnan(left) if left.dtype.kind == "f" else np.ones(len(left), dtype=bool)
        assert np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
        assert left[known].tobytes() == right[known].tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_frame_reads_like_a_file(library, tmp_path):
    frame = LIBRARIES[library](COLUMNS)
    log = ScoreLog.from_frame(frame, outcomes=["severity"])
    assert log.source == "frame"
    assert log.primary.tolist() == [0.1 + 0.2, 0.1, 0, 0, 0, 0]
    assert log.no_opinion.tolist() == [False, True, True]
    assert log.missing.tolist() == [False, True, False]
    assert log.id.tolist() == ["a", "b", "c"]
    assert log.label.tolist() == [0, 1, 1]
    assert log.extra["tag"].tolist() == ["x", "", "z"]
    assert log.outcome("severity").tolist() == [0, 3, 1, 2, 0.5, 0]
    assert log.primary_usage.cost.tolist() == [0.1, 0.2, 0.3]
    log.write(tmp_path / "log.parquet")
    assert_equal_logs(ScoreLog.read(tmp_path / "log.parquet", outcomes=["severity"]), log)


@pytest.mark.parametrize("library", LIBRARIES)
def test_wide_columns_are_scores_and_name_their_actions(library):
    frame = LIBRARIES[library](
        {
            "p_yes": [0.9, None],
            "p_no": [0.1, 0.5],
            "g_yes": [1, 0],
            "g_no": [0, 1],
            "id": [1, 2],
            "primary_cost": [1, 2],
        }
    )
    log = ScoreLog.from_frame(frame, primary=["p_yes", "p_no"], guardian=["g_yes", "g_no"])
    assert log.primary.tolist() == [0.9, 0.1, 0, 0]
    assert log.guardian.tolist() == [1, 0, 0, 1]
    assert log.no_opinion.tolist() == [False, True]
    assert log.actions.tolist() == ["yes", "no"] * 2
    assert log.columns == ("primary", "guardian")
    assert log.primary_usage.cost.tolist() == [1, 2]
    assert log.extra == {}


@pytest.mark.parametrize(
    ("primary", "guardian", "actions"),
    [
        (["p_apple", "p_apricot"], ["g_apple", "g_apricot"], ["apple", "apricot"]),
        (["p10", "p11"], ["g10", "g11"], ["10", "11"]),
        (["p_a", "p_b"], ["big_a", "big_c"], None),
        (["p", "p_b"], ["g", "g_b"], None),
        (["p_a"], ["g_a"], ["a"]),
        (["p_a", "p_b"], None, ["a", "b"]),
        (["p_a", "p_b"], "g", ["a", "b"]),
    ],
)
def test_actions_are_what_follows_the_prefixes_if_both_models_agree(primary, guardian, actions):
    guardians = [] if guardian is None else [guardian] if isinstance(guardian, str) else guardian
    frame = pl.DataFrame({name: [0.5] for name in primary} | {name: [0.5] for name in guardians})
    if guardian == "g":
        frame = frame.with_columns(g=pl.Series([[0.5, 1.0]]))
    log = ScoreLog.from_frame(frame, primary=primary, guardian=guardian)
    assert (None if log.actions is None else log.actions.tolist()) == actions


def test_an_actions_column_wins_over_the_names_of_wide_columns():
    frame = pl.DataFrame({"p_a": [0.9], "p_b": [0.1], "g_a": [1], "g_b": [0], "actions": [["yes", "no"]]})
    log = ScoreLog.from_frame(frame, primary=["p_a", "p_b"], guardian=["g_a", "g_b"])
    assert log.actions.tolist() == ["yes", "no"]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {"guardian": ["g_b", "g_a"]}, "same actions in different orders"),
        ({}, {"guardian": ["g_a"]}, "row 1, column 'guardian': 1 scores for 2 actions"),
        ({}, {"guardian": ["g_a", "g_c"]}, "no column 'g_c'; it has g_a, g_b, p_a, p_b"),
        ({}, {"guardian": []}, "no wide column is named"),
        ({"guardian": [1]}, {}, "column 'guardian' stands in the way"),
        ({"g_b": ["x"]}, {}, "row 1, column 'g_b': 'x' is not a number"),
        ({"p_b": [True]}, {}, "column 'p_b' is BOOLEAN; it must hold one number in each row"),
        ({"p_b": [float("inf")]}, {}, "row 1, column 'primary': inf is infinite"),
    ],
)
def test_wide_columns_that_do_not_fit_are_refused(columns, options, message):
    frame = pl.DataFrame({"p_a": [0.9], "p_b": [0.1], "g_a": [1], "g_b": [0]} | columns)
    with pytest.raises(ScoreLogError, match=f"frame: .*{message}"):
        ScoreLog.from_frame(frame, **{"primary": ["p_a", "p_b"], "guardian": ["g_a", "g_b"]} | options)


@pytest.mark.parametrize(("wide", "digits"), [(np.float32, 6), (np.float64, 12)])
def test_wide_columns_of_single_precision_are_known_as_such(wide, digits):
    columns = {name: np.array([0.5], dtype=wide) for name in ("p_a", "p_b", "g_a", "g_b")}
    options = {"primary": ["p_a", "p_b"], "guardian": ["g_a", "g_b"]}
    for make in LIBRARIES.values():
        assert ScoreLog.from_frame(make(columns), **options).score_digits == digits


ROUND_TRIPS = {
    "arrow": lambda log: log.to_arrow(),
    "pandas": lambda log: log.to_pandas(),
    "arrow reader": lambda log: log.to_arrow().to_reader(),
}


@pytest.mark.parametrize("way", ROUND_TRIPS)
@pytest.mark.parametrize("make", [sample, everything])
def test_a_log_survives_a_frame_to_the_bit(way, make):
    log = make()
    again = ScoreLog.from_frame(ROUND_TRIPS[way](log), outcomes=["severity"])
    assert_same(log, again)
    assert_equal_logs(log, again)


@pytest.mark.parametrize("make", [sample, everything])
@pytest.mark.parametrize(
    "hand_over", [pl.DataFrame, Capsule, lambda log: log, lambda log: pa.table(log).to_batches()[0]]
)
def test_all_but_identities_survives_the_capsule_interface(make, hand_over):
    log = make()
    assert_equal_logs(log, ScoreLog.from_frame(hand_over(log), outcomes=["severity"]), identities=False)


@pytest.mark.proof
@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=4), min_size=1, max_size=8
    ),
    st.sampled_from([ScoreLog.to_arrow, ScoreLog.to_pandas, pl.DataFrame]),
)
def test_any_float_survives_any_frame(rows, way):
    log = ScoreLog.from_arrays([[p for p, _ in r] for r in rows], [[g for _, g in r] for r in rows])
    assert_equal_logs(log, ScoreLog.from_frame(way(log)))


def test_single_precision_by_note_alone_loses_no_bits():
    log = ScoreLog.from_arrays([[0.1, 0.2]], [[1, 0]])
    noted = log.__class__(
        **{name: getattr(log, name) for name in log.__slots__} | {"single": {"primary"}, "score_digits": 6}
    )
    for frame in (noted.to_arrow(), noted.to_pandas()):
        assert_equal_logs(noted, ScoreLog.from_frame(frame))


def test_a_capsule_outlives_its_log():
    capsule = sample().__arrow_c_stream__()
    gc.collect()
    assert pa.RecordBatchReader._import_from_c_capsule(capsule).read_all().num_rows == 3


def test_columns_keep_their_names_in_a_frame():
    columns = {"small": [[0.1, 0.9]], "big": [[1, 0]], "small_cost": [0.5]}
    log = ScoreLog.from_frame(pl.DataFrame(columns), primary="small", guardian="big")
    assert log.to_pandas().columns.tolist() == ["small_cost", "small", "big"]
    assert ScoreLog.from_frame(log.to_pandas(), primary="small", guardian="big").columns == ("small", "big")


def test_a_named_index_of_pandas_is_a_column():
    frame = pd.DataFrame({"id": ["a", "b"], "primary": [[1, 0]] * 2, "guardian": [[1, 0]] * 2}).set_index("id")
    assert ScoreLog.from_frame(frame).id.tolist() == ["a", "b"]
    assert ScoreLog.from_frame(frame.reset_index(drop=True)).id is None


def test_pandas_columns_of_any_kind_are_read():
    frame = pd.DataFrame(
        {
            "id": pd.array([1, 2], dtype="Int64"),
            "primary": pd.Series([[0.5, None], [1, 0]], dtype=pd.ArrowDtype(pa.list_(pa.float32()))),
            "guardian": [np.array([1, 0]), (0, 1)],
            "group": pd.Categorical(["x", "y"]),
            "when": pd.to_datetime(["2024-01-02", "2024-01-03"]),
            "mixed": [1, "a"],
            7: [{"a": [np.float32(0.5), "é"]}, pd.NA],
            "gone": [float("nan"), pd.NaT],
        }
    )
    log = ScoreLog.from_frame(frame)
    assert log.score_digits == 6
    assert log.no_opinion.tolist() == [True, False]
    assert log.group.tolist() == ["x", "y"]
    assert log.extra["when"].tolist() == ["2024-01-02 00:00:00", "2024-01-03 00:00:00"]
    assert log.extra["mixed"].tolist() == ["1", "a"]
    assert log.extra["7"].tolist() == ['{"a":[0.5,"é"]}', ""]
    assert log.extra["gone"].tolist() == ["", ""]
    with pytest.raises(ScoreLogError, match="row 1, column 'label': nan is not the index"):
        ScoreLog.from_frame(frame.assign(label=None))


def test_a_late_cell_of_another_type_is_seen():
    scores = [[0.5, 0.5]] * 5000 + [[0.5, "x"]]
    with pytest.raises(ScoreLogError, match="row 5001, column 'primary'"):
        ScoreLog.from_frame(pd.DataFrame({"primary": scores, "guardian": [[0, 1]] * 5001}))


def test_arrow_columns_of_any_kind_are_read():
    frame = pa.table(
        {
            "primary": pa.array([[0.5, 0.25], [1, 0]], pa.list_(pa.float64(), 2)),
            "guardian": pa.array([[1, 0], [0, 1]], pa.large_list(pa.int8())),
            "actions": pa.array([["a", "b"]] * 2, pa.list_(pa.string_view())),
            "group": pa.array(["x", "y"]).dictionary_encode(),
            "empty": pa.nulls(2),
        }
    )
    log = ScoreLog.from_frame(frame)
    assert log.primary.tolist() == [0.5, 0.25, 1, 0]
    assert log.actions.tolist() == ["a", "b"] * 2
    assert log.group.tolist() == ["x", "y"]
    assert log.extra["empty"].tolist() == ["", ""]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_guardian_of_nulls_only_is_missing(library):
    columns = {"primary": [[0.1, 0.9]] * 2, "guardian": [None, None]}
    assert ScoreLog.from_frame(LIBRARIES[library](columns)).missing.all()
    inside = {"primary": [[0.1, 0.9]] * 2, "guardian": [[None, None]] * 2}
    assert ScoreLog.from_frame(LIBRARIES[library](inside)).missing.all()
    assert ScoreLog.from_frame(LIBRARIES[library](columns), guardian=None).missing.all()


@pytest.mark.parametrize(("change", "message"), BAD_ROWS)
def test_a_frame_that_breaks_the_format_is_refused_as_a_file_is(change, message):
    frame = pd.DataFrame([GOOD, GOOD | {"id": "b"} | change])
    with pytest.raises(ScoreLogError, match=f"frame: .*{message}") as error:
        ScoreLog.from_frame(frame)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pl.DataFrame({"primary": [], "guardian": []}), "no rows"),
        (pl.DataFrame({"primary": [[1.0]]}), "no column 'guardian'; it has primary"),
        (pl.DataFrame({"primary": [[1.0]], "Primary": [1]}), "two columns are called 'Primary'"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "two columns are called 'a'"),
        (pa.table({"h": pa.array(np.array([1], dtype=np.float16))}), "cannot be read .*drop it"),
        (pl.DataFrame({"primary": [["a"]], "guardian": [[1.0]]}), "row 1, column 'primary'.* is not a list of numbers"),
        (pl.DataFrame({"primary": [[True]], "guardian": [[1.0]]}), r"column 'primary' is BOOLEAN\[\]"),
        (pl.LazyFrame({"primary": [[1.0]]}), "a LazyFrame is not .* table.*collect"),
        ("log.parquet", "a str is not .*ScoreLog.read"),
        ([[0.1]], "a list is not"),
        (None, "a NoneType is not"),
    ],
)
def test_a_frame_that_cannot_be_read_is_one_clear_error(frame, message):
    with pytest.raises(ScoreLogError, match=f"frame: .*{message}") as error:
        ScoreLog.from_frame(frame)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("metadata", ["[1]", "{", '{"identities": 1}'])
def test_malformed_metadata_of_a_frame_is_refused(metadata):
    frame = pd.DataFrame({"primary": [[1.0]], "guardian": [[1.0]]})
    frame.attrs["conformal_arbitrage"] = metadata
    with pytest.raises(ScoreLogError, match=r"frame: .*metadata"):
        ScoreLog.from_frame(frame)
    arrow = pa.table({"primary": [[1.0]], "guardian": [[1.0]]}, metadata={"conformal_arbitrage": metadata})
    with pytest.raises(ScoreLogError, match=r"frame: .*metadata"):
        ScoreLog.from_frame(arrow)


@pytest.mark.parametrize("way", [ScoreLog.to_arrow, ScoreLog.to_pandas, pl.DataFrame])
def test_a_log_that_cannot_be_a_table_is_not_handed_over(way):
    with pytest.raises(OutputError, match="binarise it after reading"):
        way(ScoreLog.from_arrays([[0.9, 0.1]], [[0.5, 0.5]], label=[0]).binarized())
    with pytest.raises(OutputError, match="frame: two columns are called 'guardian'"):
        way(ScoreLog.from_arrays([[0.1, 0.2]], [[1, 0]], outcomes={"guardian": [[1, 2]]}))


@pytest.mark.parametrize(("library", "way"), [("pandas", ScoreLog.to_pandas), ("pyarrow", ScoreLog.to_arrow)])
def test_a_library_that_is_not_installed_is_named_with_the_command(monkeypatch, library, way):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(OptionError, match=rf"to_\w+\(\) needs {library}: pip install {library}"):
        way(sample())


WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
import pandas, polars
from conformal_arbitrage import ScoreLog
log = ScoreLog.from_arrays([[0.1 + 0.2, 0.1], [1 / 3, None]], [[1, 0], [0, 1]], id=["a", "b"], context=["x", ""])
for frame in (polars.DataFrame(log), log.to_pandas(), log):
    assert ScoreLog.from_frame(frame).sha256() == log.sha256()
"""


def test_polars_and_pandas_need_no_pyarrow():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYARROW], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_score_log_passes_through_and_a_frame_is_read():
    log = sample()
    assert as_score_log(log) is log
    assert as_score_log(log.to_arrow()).sha256() == log.sha256()
    named = as_score_log(pl.DataFrame({"a": [[0.9, 0.1]], "b": [[1, 0]]}), primary="a", guardian="b")
    assert named.columns == ("a", "b")
    with pytest.raises(OptionError, match="primary: columns are named for a frame only"):
        as_score_log(log, primary="a")


def test_the_certificate_of_a_frame_is_that_of_its_file(science):
    frame = science.to_pandas()
    again = ScoreLog.from_frame(frame, primary="qwen15b", guardian="expert")
    assert calibrate(again, 0.1).evidence.log_sha256 == calibrate(science, 0.1).evidence.log_sha256
    assert again.identities == science.identities


def test_a_log_prints_as_one_short_line():
    assert repr(ScoreLog.from_arrays([[0.9, 0.1]] * 2000, [[0.5, 0.5]] * 2000)) == (
        "<ScoreLog arrays given to from_arrays: 2,000 rows, 2 actions, primary='primary', guardian='guardian'>"
    )
    assert repr(sample()) == (
        "<ScoreLog arrays given to from_arrays: 3 rows, 1 to 3 actions, primary='primary', guardian='guardian', "
        "1 without opinion, 1 without Guardian>"
    )
