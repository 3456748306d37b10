import numpy as np
import pytest

from conformal_arbitrage import ScoreLogError
from conformal_arbitrage.core.chains import normal_answer
from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns
from tests.cascades import world


def columns(**changed):
    fields = {"confidence": [0.9, None], "grade": [1, None], "cost": [0.2, 0.2], "answer": ["Yes ", None]}
    return ModelColumns(**{**fields, **changed})


def log(**changed):
    fields = {
        "id": ["a", "b"],
        "models": {"dear": columns(cost=[0.5, 0.5]), "cheap": columns(answer=["yes", "no"])},
        "guardian_grade": [True, False],
        "guardian_cost": [1, 1],
    }
    return CascadeLog.from_columns(**{**fields, **changed})


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_a_log_that_is_written_reads_back_to_the_bit(tmp_path, ending):
    written = world(np.random.default_rng(0), 40, graded=True)
    written.write(tmp_path / f"log.{ending}")
    again = CascadeLog.read(tmp_path / f"log.{ending}")
    assert again.sha256() == written.sha256()
    assert again.models == ("small", "middle", "large")
    fewer = CascadeLog.read(tmp_path / f"log.{ending}", models=["large", "small"])
    assert fewer.models == ("small", "large")
    assert fewer.sha256() != written.sha256()


def test_identities_travel_with_the_log(tmp_path):
    written = world(np.random.default_rng(0), 3)
    known = {"small": {"kind": "chat"}}
    log = CascadeLog.from_columns(
        id=written.id.tolist(), models={"small": columns(confidence=[0.1] * 3, grade=[1] * 3, cost=[1] * 3, answer="abc")},
        guardian_grade=[1] * 3, guardian_cost=[2] * 3, identities=known,
    )  # fmt: skip
    log.write(tmp_path / "log.jsonl")
    assert CascadeLog.read(tmp_path / "log.jsonl").identities == known


def test_models_are_asked_from_the_cheapest_on_and_answers_compared_without_case_or_space():
    cascade = log()
    assert cascade.models == ("cheap", "dear")
    assert normal_answer(" The  End\n") == "the end"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": ["a", "a"]}, "'a' is also the id of row 1; make ids unique"),
        ({"id": ["a", ""]}, "row 2, column 'id': the id is empty"),
        ({"models": {}}, "at least one cheaper model beside it; got none"),
        ({"models": {"guardian": columns()}}, "got guardian and the Guardian guardian"),
        ({"models": {"m": columns(confidence=[1.2, 0])}}, "row 1, column 'm_confidence': 1.2 must be in"),
        ({"models": {"m": columns(grade=[1, 3])}}, "row 2, column 'm_grade': 3 must be in"),
        ({"models": {"m": columns(cost=[None, 1])}}, "row 1, column 'm_cost': no cost; give dollars"),
        ({"models": {"m": columns(cost=[1, -1])}}, "row 2, column 'm_cost': -1 must be 0 or more"),
        ({"models": {"m": columns(answer=["a"])}}, "column 'm_answer' has 1 row, the ids 2"),
        ({"models": {"m": columns(grade=[1])}}, "column 'm_grade' has 1 row, the ids 2"),
        ({"guardian_cost": [1, float("inf")]}, "column 'guardian_cost': no cost"),
    ],
)
def test_a_bad_log_is_refused_with_its_row_and_column(changed, message):
    with pytest.raises(ScoreLogError) as error:
        log(**changed)
    assert message in str(error.value)


def test_a_file_without_the_columns_of_a_cascade_says_which_are_missing(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("id,m_confidence,m_grade,m_cost,m_answer,big_grade,big_cost\na,0.5,1,0.1,yes,1,1\n")
    with pytest.raises(ScoreLogError, match=r"no column 'guardian_grade'.* one of big, with --guardian-column"):
        CascadeLog.read(path)
    assert CascadeLog.read(path, guardian="big").models == ("m",)
    with pytest.raises(ScoreLogError, match="no column 'other_confidence', which model 'other' needs"):
        CascadeLog.read(path, guardian="big", models=["other"])
    with pytest.raises(ScoreLogError, match="there is no model 'x'; there are m"):
        CascadeLog.read(path, guardian="big").columns_of(["x"])
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ScoreLogError, match=r"there is no column 'id', which a cascade needs$"):
        CascadeLog.read(path)


def test_rows_selected_by_their_scores_are_refused(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        "id,m_confidence,m_grade,m_cost,m_answer,guardian_grade,guardian_cost,unfit_for_calibration\na,1,1,1,y,1,1,no\n"
    )
    with pytest.raises(ScoreLogError, match="selected by their scores"):
        CascadeLog.read(path)
