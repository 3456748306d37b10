from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import (
    CalibrationOptions,
    Certificate,
    CertificateError,
    CostOptions,
    OptionError,
    ProjectSecret,
    ScoreLog,
    ScoreLogError,
    calibrate,
    evaluate,
    inspect,
    verify,
)
from tests.certificates import edited


def test_calibrate_takes_options_as_keywords_or_as_one_object(science):
    one = calibrate(science, 0.05, options=CalibrationOptions(guardian_sees="all", grid=0.01))
    other = calibrate(science, 0.05, guardian_sees="all", grid=0.01)
    assert edited(one.to_dict(), {"created": ""}) == edited(other.to_dict(), {"created": ""})


@pytest.mark.parametrize(
    "keywords", [{"guardian_sees": "candidates"}, {"boundary": "include"}, {"loss_bound": 1}, {"grid": 0.01}]
)
def test_options_and_keywords_exclude_each_other(science, keywords):
    (name,) = keywords
    with pytest.raises(OptionError, match=f"{name}= and options= exclude each other"):
        calibrate(science, 0.05, options=CalibrationOptions(), **keywords)
    with pytest.raises(OptionError, match=rf"write options=CalibrationOptions\({name}=...\)"):
        evaluate(science, [0.05], calibration_size=100, options=CalibrationOptions(), **keywords)


def test_costs_and_their_keywords_exclude_each_other(science):
    for call in (
        lambda: evaluate(science, [0.05], calibration_size=100, costs=CostOptions(), primary_cost=1),
        lambda: inspect(science, costs=CostOptions(), primary_cost=1),
    ):
        with pytest.raises(OptionError, match="primary_cost= and costs= exclude each other"):
            call()


def test_evaluate_takes_options_and_costs_as_objects(science):
    sweep = {"calibration_size": 500, "trials": 2}
    flat = evaluate(science, [0.05], guardian_sees="all", boundary="random", primary_cost=1, guardian_cost=9, **sweep)
    options = CalibrationOptions(guardian_sees="all", boundary="random")
    grouped = evaluate(science, [0.05], options=options, costs=CostOptions(primary_cost=1, guardian_cost=9), **sweep)
    assert flat.to_dict(per_trial=True) == grouped.to_dict(per_trial=True)


def test_evaluate_uses_the_key_it_is_given():
    scores = np.random.default_rng(0).integers(0, 3, (2, 200, 2)) / 2  # coarse, so that the draws matter
    log = ScoreLog.from_arrays(*scores, id=range(200))
    sweep = {"calibration_size": 100, "trials": 2, "boundary": "random"}
    one, same, other = (evaluate(log, [0.1], key=key, **sweep).to_dict() for key in (b"a", b"a", b"b"))
    assert one == same
    assert one != other


def test_unknown_keywords_are_rejected_as_in_any_python_function(science):
    with pytest.raises(TypeError, match=r"evaluate\(\) got an unexpected keyword argument 'colour'"):
        evaluate(science, [0.05], calibration_size=100, colour="red")
    with pytest.raises(TypeError, match="colour"):
        inspect(science, colour="red")


def test_ids_settle_the_boundary_and_a_key_is_found_where_draws_are_made(science):
    def settled(log=science, **options):
        chosen = CalibrationOptions(**options).settled(log, lambda: b"found")
        return chosen.boundary, chosen.key

    without = replace(science, id=None)
    assert settled() == ("random", b"found")
    assert settled(key=b"own") == ("random", b"own")
    assert settled(without) == settled(boundary="include") == settled(grid=0.01) == ("include", None)
    assert settled(without, boundary="random") == settled(without, loss="net") == ("random", b"found")
    assert settled(without, confidence=0.9) == ("include", b"found")
    assert settled(without, confidence=0.9, zero_one=True) == ("include", None)
    assert settled(without.binarized(), confidence=0.9) == ("include", None)


def test_calibrate_finds_the_projects_secret_where_it_draws_and_makes_none_elsewhere(science, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("ARBITRAGE_SECRET", raising=False)
    calibrate(science, 0.05, boundary="include")
    inspect(science)
    evaluate(science, [0.05], calibration_size=200, trials=1)
    assert ProjectSecret.search() is None
    certificate = calibrate(science, 0.05)
    assert certificate.key == ProjectSecret.find().boundary_key
    assert calibrate(science, 0.05).boundary_u == certificate.boundary_u


def test_a_random_boundary_that_is_not_settled_has_no_draws(science):
    with pytest.raises(OptionError, match="needs a key"):
        CalibrationOptions(boundary="random").curve(science)


def test_a_users_loss_cannot_have_the_name_of_the_built_in_one():
    def guardian_regret(row, sight):
        return 0.0

    with pytest.raises(OptionError, match="rename the function"):
        CalibrationOptions(loss=guardian_regret, loss_bound=1)


def test_a_key_must_be_bytes():
    with pytest.raises(OptionError, match="must be bytes"):
        CalibrationOptions(boundary="random", key="text")


def test_calibrate_reads_scores_from_a_frame():
    pandas = pytest.importorskip("pandas")
    primary, guardian = [[0.9, 0.1], [0.6, 0.4]] * 20, [[1.0, 0.0], [0.0, 1.0]] * 20
    log = ScoreLog.from_arrays(primary, guardian)
    frame = pandas.DataFrame({"p": primary, "g": guardian})
    wide = pandas.DataFrame(np.hstack([primary, guardian]), columns=["p_a", "p_b", "g_a", "g_b"])
    expected = calibrate(log, 0.2).relaxation
    assert expected == 0.2
    assert calibrate(frame, 0.2, primary="p", guardian="g").relaxation == expected
    assert calibrate(wide, 0.2, primary=["p_a", "p_b"], guardian=["g_a", "g_b"]).relaxation == expected
    assert calibrate(frame.rename(columns={"p": "primary", "g": "guardian"}), 0.2).relaxation == expected


def test_column_names_are_for_frames_only(science):
    with pytest.raises(OptionError, match="named for a frame only"):
        calibrate(science, 0.05, primary="p")


def test_a_loss_without_a_name_is_called_by_its_class(science):
    class Constant:
        def __call__(self, row, sight):
            return 0.0

    assert calibrate(science.select(range(100)), 0.1, loss=Constant(), loss_bound=1).loss.name == "Constant"


def test_a_loss_of_your_own_states_its_bound():
    with pytest.raises(OptionError, match="needs loss_bound="):
        CalibrationOptions(loss=lambda row, sight: 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full_sight_loss": 0.1}, "for a loss of your own"),
        ({"full_sight_loss": -0.1, "loss": max, "loss_bound": 1}, "0 or more"),
        ({"full_sight_loss": "some", "loss": max, "loss_bound": 1}, "full_sight_loss must be a finite decimal"),
    ],
)
def test_a_loss_in_full_sight_is_declared_for_a_loss_of_your_own_only(options, message):
    with pytest.raises(OptionError, match=message):
        CalibrationOptions(**options)


@pytest.mark.parametrize("bound", [0, -1, "1e-12", 9.9e-7])
def test_a_bound_too_small_for_rounded_losses_is_refused(science, bound):
    with pytest.raises(OptionError, match=r"loss_bound must be 1e-06 or more.*power of ten"):
        calibrate(science, 0.05, loss_bound=bound)


def test_cluster_and_its_largest_size_belong_together(science):
    with pytest.raises(OptionError, match="cluster and max_cluster_size belong together"):
        calibrate(science, 0.05, cluster="group")
    with pytest.raises(OptionError, match="max_cluster_size must lie in 1 to 1000000; got 0"):
        calibrate(science, 0.05, cluster="group", max_cluster_size=0)
    with pytest.raises(ScoreLogError, match="more than the declared 9"):
        calibrate(science, 0.05, cluster="group", max_cluster_size=9)
    with pytest.raises(OptionError, match="evaluate splits rows, not clusters"):
        evaluate(science, [0.05], calibration_size=100, cluster="group", max_cluster_size=9)


def test_a_clustered_certificate_is_saved_shown_and_checked(science, tmp_path):
    certificate = calibrate(science, 0.3, cluster="group", max_cluster_size=1000)
    assert ("clusters", "4 by 'group', at most 1000 rows each") in certificate.facts()
    certificate.save(tmp_path / "c.json")
    loaded = Certificate.load(tmp_path / "c.json")
    assert loaded.to_dict()["promise"] == certificate.to_dict()["promise"]
    assert verify(loaded, science)
    with pytest.raises(CertificateError, match="max_cluster_size"):
        Certificate.from_dict(edited(certificate.to_dict(), {"max_cluster_size": None}))
    with pytest.raises(CertificateError, match="max_cluster_size 0 contradicts the rest"):
        Certificate.from_dict(edited(certificate.to_dict(), {"max_cluster_size": 0}))


def test_a_certificate_records_earlier_looks_and_verifies_all_the_same(science):
    certificate = calibrate(science, 0.3).with_looks("all of these rows")
    assert ("looked at before", "all of these rows") in certificate.facts()
    assert Certificate.from_dict(certificate.to_dict()) == certificate
    assert verify(certificate, science)
