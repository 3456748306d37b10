import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, ScoreLogError


def test_confidences_and_grades_become_a_menu_of_two():
    log = ScoreLog.from_router(
        confidence=[0.3, None, 0.9, 2.0], primary_grade=[0.25, 1, 1, np.nan], guardian_grade=[1, 1, 0.5, 1], id="abcd"
    )
    assert log.is_router
    assert log.primary.reshape(-1, 2).tolist() == [[0, 0.3], [0, 0], [0, 0.9], [0, 2.0]]
    assert log.guardian[:6].reshape(-1, 2).tolist() == [[1, 0.25], [1, 1], [1, 1]]
    assert log.missing.tolist() == [False, False, False, True]
    assert log.no_opinion.tolist() == [False, True, False, False]
    assert log.outcome("correct")[:6].tolist() == [1, 0.25, 1, 1, 0.5, 1]
    assert log.actions.tolist()[:2] == ["guardian answer", "primary answer"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"confidence": [-0.1], "primary_grade": [1], "guardian_grade": [1]}, "confidence"),
        ({"confidence": [float("inf")], "primary_grade": [1], "guardian_grade": [1]}, "confidence"),
        ({"confidence": [1], "primary_grade": [1.1], "guardian_grade": [1]}, "primary_grade"),
        ({"confidence": [1], "primary_grade": [1], "guardian_grade": ["a"]}, "guardian_grade"),
        ({"confidence": [1, 2], "primary_grade": [1], "guardian_grade": [1]}, "2, 1 and 1"),
    ],
)
def test_router_columns_outside_their_range_are_refused(options, problem):
    with pytest.raises(ScoreLogError, match=f"^arrays given to from_router: .*{problem}"):
        ScoreLog.from_router(**options)


def test_an_error_in_arrays_names_the_function_the_row_and_the_argument():
    with pytest.raises(ScoreLogError, match=r"^arrays given to from_router: row 3, column 'primary_grade': 2 must be"):
        ScoreLog.from_router(confidence=[1, 1, 1], primary_grade=[0, 1, 2], guardian_grade=[1, 1, 1])


def router_csv(path, rows):
    path.write_text("sure,small,big,id,group,context,primary_cost\n" + "".join(row + "\n" for row in rows))
    return path


def read_router(path, **columns):
    return ScoreLog.read_router(
        path, **{"confidence": "sure", "primary_grade": "small", "guardian_grade": "big"} | columns
    )


def test_any_table_of_confidences_and_grades_is_read(tmp_path):
    path = router_csv(tmp_path / "runs.csv", ["0.3,true,false,a,x,why?,0.5", ",0.25,1,b,y,,0.25"])
    log = read_router(path)
    assert log.is_router
    assert log.primary.tolist() == [0, 0.3, 0, 0]
    assert log.guardian.tolist() == [1, 1, 1, 0.25]
    assert log.no_opinion.tolist() == [False, True]
    assert log.id.tolist() == ["a", "b"]
    assert log.group.tolist() == ["x", "y"]
    assert log.context.tolist() == ["why?", ""]
    assert log.primary_usage.cost.tolist() == [0.5, 0.25]
    assert log.guardian_usage.cost is None


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ("0.3,1,1,a,x,,1", {"confidence": "score"}, "there is no column 'score'; it has"),
        ("0.3,1.5,1,a,x,,1", {}, r"row 1, column 'small': 1\.5 must be in \[0, 1\]"),
        ("-1,1,1,a,x,,1\n0.3,1,1,b,x,,1", {}, "row 1, column 'sure': -1 must be 0 or more and finite"),
        ("0.3,1,good,a,x,,1", {}, "row 1, column 'big': 'good' is not a number"),
    ],
)
def test_a_router_table_that_breaks_a_rule_is_refused_with_its_file(tmp_path, row, columns, message):
    path = router_csv(tmp_path / "runs.csv", [row])
    with pytest.raises(ScoreLogError, match=message) as error:
        read_router(path, **columns)
    assert str(error.value).count(str(path)) == 1


def test_a_menu_is_not_router_form():
    assert not ScoreLog.from_arrays([[0.9, 0.1]], [[1, 0]]).is_router
    assert not ScoreLog.from_arrays([[0.0, 0.1, 0.2]], [[1, 0, 0]]).is_router


def test_an_error_in_a_table_names_its_file_and_row(tmp_path):
    rows = ["id,s,p,g", "a,0.5,1,1", "b,0.5,1,1", "a,0.5,1,1"]
    (tmp_path / "runs.csv").write_text("\n".join(rows))
    with pytest.raises(ScoreLogError, match=r"runs\.csv: row 3"):
        ScoreLog.read_router(tmp_path / "runs.csv", confidence="s", primary_grade="p", guardian_grade="g")
