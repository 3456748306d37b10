"""calibrate_cascade, its certificates, and their verification."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage import (
    Certificate,
    CertificateError,
    OptionError,
    ProjectSecret,
    ScoreLog,
    ScoreLogError,
    calibrate,
    verify,
)
from conformal_arbitrage.calibration.cascade import apply_cascade, calibrate_cascade
from conformal_arbitrage.calibration.certificate import is_cascade
from conformal_arbitrage.calibration.promises import ChainEstimate, ChainRows
from conformal_arbitrage.calibration.tuning import estimate_chains, fit_chain, tuning_rows
from conformal_arbitrage.core.chains import GUARDIAN, PRICES, answer_numbers
from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns
from tests.cascades import KEY, nine_models, world
from tests.certificates import altered, edited

SECRET = ProjectSecret.from_text("a-long-random-text-for-these-tests", source="test")


@pytest.fixture(scope="module")
def log():
    return world(np.random.default_rng(0), 600)


@pytest.fixture(scope="module")
def chained(log):
    return calibrate_cascade(log, "0.04", key=SECRET.boundary_key, chain=("small", "middle"))


@pytest.mark.parametrize("loss", [None, "net"])
@pytest.mark.parametrize("chain", [None, ("middle",), ("small", "large"), ("small", "middle", "large")])
def test_a_certificate_is_written_read_signed_and_verified(log, tmp_path, loss, chain):
    certificate = calibrate_cascade(log, "0.1", key=SECRET.boundary_key, loss=loss, chain=chain, seed=3).sign(SECRET)
    certificate.save(tmp_path / "c.json")
    read = Certificate.load(tmp_path / "c.json", secret=SECRET)
    assert read == certificate
    assert is_cascade(json.loads((tmp_path / "c.json").read_text()))
    assert read.key == SECRET.boundary_key
    assert verify(read, log)
    assert certificate.loss.name == (loss or "guardian_regret")
    assert certificate.path.cost < certificate.path.guardian_cost
    assert chain is None or certificate.path.chain.models == chain
    assert (certificate.path.tuning.rows, certificate.n) == (240, 360)
    assert certificate.summary.split("\n")[1].startswith("Promise: the expected loss")


def test_one_query_at_a_time_is_decided_as_the_whole_log_is(log, chained):
    chosen = apply_cascade(chained, log).answered_by
    places = log.columns_of(chained.path.chain.models)
    assert {GUARDIAN, 0, 1} == set(chosen.tolist())
    for row, id in enumerate(log.id.tolist()):
        confidences, answers = log.confidence[row, places].tolist(), log.texts[row, places].tolist()
        asked, following = chained.next_model([], [], id=id)
        while following in log.models and following not in asked:
            known = [chained.path.chain.models.index(name) for name in (*asked, following)]
            asked, following = chained.next_model([confidences[j] for j in known], [answers[j] for j in known], id=id)
        assert [*chained.path.chain.models, "guardian"].index(following) == chosen[row] % 3


def test_decisions_on_the_calibration_rows_are_those_the_certificate_reports(log, chained):
    _, rest = tuning_rows(log, share=0.4, seed=0)
    decisions = apply_cascade(chained, log.select(rest))
    assert decisions.loss.mean() == pytest.approx(chained.evidence.empirical_risk)
    assert decisions.cost.mean() == pytest.approx(chained.path.cost)
    assert decisions.guardian_share == pytest.approx(chained.path.guardian_share)
    assert decisions.loss.sum() + 1 <= Fraction("0.04") * (len(rest) + 1)


def test_the_tuning_part_depends_on_ids_alone(log):
    order = np.random.default_rng(1).permutation(len(log))
    tuning, rest = tuning_rows(log, share=0.4, seed=7)
    shuffled, _ = tuning_rows(log.select(order), share=0.4, seed=7)
    assert set(log.id[tuning].tolist()) == set(log.select(order).id[shuffled].tolist())
    assert set(tuning.tolist()).isdisjoint(rest.tolist())
    assert set(tuning_rows(log, share=0.4, seed=8)[0].tolist()) != set(tuning.tolist())


@pytest.mark.parametrize(("share", "seed"), [(0.01, 0), (1.0, 0), (0.0, 0), (0.4, -1)])
def test_a_split_without_enough_rows_is_refused(log, share, seed):
    with pytest.raises(OptionError, match=r"tuning a chain takes at least 20|seed must be 0 or more"):
        tuning_rows(log, share=share, seed=seed)


def test_rows_of_another_order_give_the_same_certificate(log, chained):
    order = np.random.default_rng(2).permutation(len(log))
    again = calibrate_cascade(log.select(order), "0.04", key=SECRET.boundary_key, chain=("small", "middle"))
    assert not chained.differences(again)
    assert verify(chained, log.select(order))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position", 4), ("u", 0.123), ("alpha", 0.11), ("n", 361), ("empirical_risk", 0.0), ("cost", 0.1),
        ("chain", "steps"), ("tuning", "seed"), ("guardian_share", 0.9),
    ],
)  # fmt: skip
def test_verify_finds_what_was_changed(log, chained, name, value):
    if name == "chain":
        first, *others = chained.path.chain.steps
        raised = tuple(tuple(tuple(1.2 * one for one in row) for row in rows) for rows in first.ahead)
        value = replace(chained.path.chain, steps=(replace(first, ahead=raised), *others))
    if name == "tuning":
        value = replace(chained.path.tuning, seed=1)
    verification = verify(altered(chained, **{name: value}), log)
    assert verification.differences
    if name not in ("alpha", "tuning"):
        assert name in verification.differences


def test_a_fit_that_differs_in_its_last_digits_still_verifies(log, chained):
    moved = [
        replace(step, losses=tuple(tuple(one + 1e-9 for one in row) for row in step.losses))
        for step in chained.path.chain.steps
    ]
    other = altered(chained, chain=replace(chained.path.chain, steps=tuple(moved)))
    assert set(verify(other, log).differences) <= {"position", "u"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema": 9}, "schema version 9"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"n": "many"}, "Expected `int`"),
        ({"position": 0}, "position"),
        ({"position": 99}, "position"),
        ({"u": None}, "u None contradicts"),
        ({"u": 1.5}, "u 1.5 contradicts"),
        ({"alpha": 1.0}, "alpha 1.0 contradicts"),
        ({"bound": 2.0}, "grades"),
        ({"n": 0}, "n 0 contradicts"),
        ({"models": ["small"]}, "models"),
        ({"guardian": "small"}, "chain"),
        ({"regret": 0.1}, "unknown field `regret`"),
        ({"empirical_risk": 2.0}, "empirical_risk"),
        ({"guarantee": "all is well"}, "guarantee 'all is well' contradicts"),
        ({"n": 361}, "guarantee"),
    ],
)
def test_contradictory_certificates_are_refused(chained, changed, message):
    with pytest.raises(CertificateError, match=message):
        Certificate.from_dict(edited(chained.to_dict(), changed))


@pytest.mark.parametrize(
    "part", ["models", "no steps", "other steps", "no loss", "a price less", "a column less", "a number", "tuning"]
)
def test_a_chain_that_cannot_be_is_refused(chained, part):
    document = chained.to_dict()
    chain = document["rule"]["chain"]
    first, second, *others = chain["steps"]
    short = {"ahead": [rows[:-1] for rows in first["ahead"]]}
    changed = {
        "models": {"models": ("small", "small")},
        "no steps": {"steps": []},
        "other steps": {"steps": [first, second | {"asked": [1]}, *others]},
        "no loss": {"steps": [first, second | {"losses": []}, *others]},
        "a price less": {"steps": [first | short, second, *others]},
        "a column less": {"steps": [first, second | {"losses": [row[:-1] for row in second["losses"]]}, *others]},
        "a number": {"steps": [first, second | {"losses": [[1e999] * len(row) for row in second["losses"]]}, *others]},
        "tuning": {},
    }[part]
    document["rule"]["chain"] = chain | changed
    if part == "tuning":
        document["rule"]["tuning"] |= {"rows": 0}
    with pytest.raises(CertificateError, match=r"chain|tuning"):
        Certificate.from_dict(document)


def test_a_certificate_of_a_cascade_is_not_taken_for_one_of_two_models(chained):
    with pytest.raises(CertificateError, match="is the certificate of a cascade, which verify"):
        chained.decide([0.1, 0.9])
    with pytest.raises(CertificateError, match="of a pair, not of a cascade"):
        calibrate(ScoreLog.from_arrays([[0.7, 0.3]] * 20, [[1.0, 0.0]] * 20), 0.1).next_model([0.5], ["a"], id="q")


def test_a_file_that_is_no_certificate_is_refused(tmp_path):
    with pytest.raises(CertificateError, match="cannot be read"):
        Certificate.load(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CertificateError, match="is not JSON"):
        Certificate.load(tmp_path / "bad.json")


def test_signatures_and_keys_are_checked(chained, tmp_path):
    other = ProjectSecret.from_text("another-long-random-text", source="test")
    with pytest.raises(CertificateError, match="is unsigned"):
        chained.check_signature(SECRET)
    signed = chained.sign(SECRET)
    assert signed.signed
    with pytest.raises(CertificateError, match="was changed"):
        altered(signed, cost=0.0).check_signature(SECRET)
    with pytest.raises(CertificateError, match="signed with another secret"):
        signed.check_signature(other)
    signed.save(tmp_path / "c.json")
    keyless = Certificate.load(tmp_path / "c.json")
    assert keyless.with_key_of(other).key is None
    with pytest.raises(CertificateError, match="needs the key behind the draws"):
        keyless.next_model([0.5], ["a"], id="q")
    with pytest.raises(CertificateError, match="not the one this certificate was made with"):
        Certificate.load(tmp_path / "c.json", key=b"another")
    assert Certificate.load(tmp_path / "c.json", key=SECRET.boundary_key).with_key_of(other).key is not None


def test_too_few_rows_ask_the_guardian_always_and_say_so(log):
    few = calibrate_cascade(log.select(np.arange(60)), "0.02", key=KEY)
    assert (few.status, few.path.position, few.path.stop) == ("always_defer", None, None)
    assert few.path.guardian_share == 1
    assert few.next_model([], [], id="q1") == ([], "guardian"), "no other model is asked"
    assert "every query is answered by the Guardian" in few.guarantee
    assert few.summary.startswith("Every query goes to guardian")
    assert "stop" not in dict(few.facts())
    assert Certificate.from_dict(few.to_dict()).path.chain == few.path.chain
    assert verify(few, log.select(np.arange(60)))


def test_without_losses_the_whole_path_is_taken():
    rng = np.random.default_rng(0)
    sure = ModelColumns(confidence=rng.random(200), grade=np.ones(200), cost=np.ones(200), answer=["a"] * 200)
    log = CascadeLog.from_columns(
        id=range(200), models={"m": sure}, guardian_grade=np.ones(200), guardian_cost=np.full(200, 9.0)
    )
    certificate = calibrate_cascade(log, "0.1", key=KEY)
    assert certificate.path.position == len(PRICES)
    assert certificate.path.u == 1
    assert certificate.path.guardian_share == 0
    assert Certificate.from_dict(certificate.to_dict()).path.position == certificate.path.position
    assert certificate.path.tuning.advice is None


def test_missing_grades_are_an_error_or_the_largest_loss(log):
    grades = log.guardian_grade.copy()
    grades[5] = np.nan
    holed = replace(log, guardian_grade=grades)
    with pytest.raises(ScoreLogError, match=r"row 6, column 'guardian_grade': no grade.*worst_case"):
        calibrate_cascade(holed, "0.1", key=KEY, chain=["small"], tuning_share=0.99)
    with pytest.raises(ScoreLogError, match=r"'guardian_grade'|'middle_grade'"):
        calibrate_cascade(replace(log, grade=np.where(log.grade == 1, np.nan, 0.0)), "0.1", key=KEY, chain=["middle"])
    for loss in (None, "net"):
        counted = calibrate_cascade(holed, "0.1", key=KEY, chain=["small"], missing_guardian="worst_case", loss=loss)
        assert counted.evidence.missing_guardian_rows in (0, 1)
        assert "counted as a loss of 1" in counted.guarantee
        assert verify(counted, holed)
    everywhere = replace(log, guardian_grade=np.full(len(log), np.nan))
    unknown = calibrate_cascade(everywhere, "0.1", key=KEY, chain=["small"], missing_guardian="worst_case")
    assert unknown.evidence.missing_guardian_rows == 360
    assert ("missing grades", "in 360 rows, counted as the largest loss") in unknown.facts()
    assert unknown.evidence.empirical_risk <= 0.1


def test_a_model_that_failed_is_passed_over(log):
    confidence = log.confidence.copy()
    confidence[:300] = np.nan
    failing = replace(log, confidence=confidence, grade=np.where(np.isnan(confidence), np.nan, log.grade))
    certificate = calibrate_cascade(failing, "0.1", key=KEY, chain=("small", "middle"))
    assert (apply_cascade(certificate, failing).answered_by[:300] == GUARDIAN).all()
    assert (apply_cascade(certificate, failing).answered_by[300:] >= 0).any()
    asked, following = certificate.next_model([None], [None], id="q1")
    assert following not in asked
    assert certificate.evidence.missing_guardian_rows == 0
    failed = np.isin(log.id[:300], log.id[tuning_rows(failing, share=0.4, seed=0)[1]]).sum()
    assert ("failed models", f"in {failed} rows, passed over; live ones have to fail alike") in certificate.facts()
    assert Certificate.from_dict(certificate.to_dict()) == certificate


def test_a_model_that_nobody_asked_is_no_model_that_failed(log, tmp_path):
    stopped = log.confidence[:, 0] > 0.5
    later = stopped[:, None] & np.array([False, True, False])
    columns = {name: np.where(later, np.nan, getattr(log, name)) for name in ("confidence", "grade", "cost")}
    partial = replace(log, **columns, texts=np.where(later, "", log.texts))
    partial.write(tmp_path / "partial.parquet")
    read = CascadeLog.read(tmp_path / "partial.parquet", models=["small", "middle"])
    assert read.unasked[:, 1].tolist() == stopped.tolist()
    chain = ("small", "middle")
    with pytest.raises(ScoreLogError, match=r"row \d+: middle was not asked .*collect --path.*worst_case"):
        calibrate_cascade(read, "0.1", key=KEY, chain=chain)
    counted = calibrate_cascade(read, "0.1", key=KEY, chain=chain, missing_guardian="worst_case")
    assert counted.evidence.missing_guardian_rows > 0
    assert verify(counted, read)
    assert counted.path.cost > 0
    decisions = apply_cascade(counted, read)
    assert np.isfinite(decisions.cost).all()
    assert (decisions.loss[stopped & (decisions.answered_by == 1)] == 1).all()
    failed = replace(read, cost=np.where(np.isnan(read.cost), 0.0, read.cost))
    assert calibrate_cascade(failed, "0.1", key=KEY, chain=chain).evidence.missing_guardian_rows == 0
    hardly = replace(
        partial,
        **{name: np.where(np.arange(600)[:, None] * [0, 1, 0] > 0, np.nan, getattr(partial, name)) for name in columns},
    )
    chosen = calibrate_cascade(hardly, "0.1", key=KEY, missing_guardian="worst_case")
    assert chosen.path.chain.models == ("small", "large"), "a model that looks free, as hardly anybody asked it"


def test_a_cost_is_needed_of_every_answer(log):
    unpriced = ModelColumns(confidence=[0.5, None], grade=[1, None], cost=[None, None], answer=["a", None])
    with pytest.raises(ScoreLogError, match=r"row 1, column 'm_cost': no cost"):
        CascadeLog.from_columns(id=[1, 2], models={"m": unpriced}, guardian_grade=[1, 1], guardian_cost=[1, 1])


def test_graded_losses_are_rounded_by_a_draw_and_the_certificate_says_so():
    log = world(np.random.default_rng(3), 600, graded=True)
    for loss in (None, "net"):
        certificate = calibrate_cascade(log, "0.1", key=KEY, chain=("small", "middle"), loss=loss)
        assert certificate.path.rounded
        assert "rounded up or down by a second keyed draw" in certificate.guarantee
        assert verify(certificate, log)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chain": ()}, "a chain names at least one model"),
        ({"chain": ("small", "small")}, "each once"),
        ({"chain": ("small", "middle", "large", "small2")}, "at most 3 models|no model 'small2'"),
        ({"alpha": "0.12345678901234567"}, "at most 15 digits"),
        ({"alpha": "1.5"}, "alpha"),
    ],
)
def test_bad_options_are_refused(log, options, message):
    with pytest.raises((OptionError, ScoreLogError), match=message):
        calibrate_cascade(log, options.pop("alpha", "0.1"), key=KEY, **options)


def test_a_chain_of_four_is_refused():
    skills = {"a": 0.6, "b": 0.7, "c": 0.8, "d": 0.9}
    with pytest.raises(OptionError, match="at most 3 models before the Guardian"):
        calibrate_cascade(world(np.random.default_rng(0), 80, skills=skills), "0.1", key=KEY, chain=tuple(skills))


def test_only_models_cheaper_than_the_guardian_are_considered(log):
    dear = replace(log, cost=log.cost + np.array([0.0, 5.0, 5.0]))
    estimates = estimate_chains(dear, alpha=Fraction(1, 10), loss="guardian_regret", missing=None, n=600, seed=0)
    assert [one.models for one in estimates] == [("small",)]
    with pytest.raises(ScoreLogError, match="no model is cheaper than the Guardian"):
        calibrate_cascade(replace(log, cost=log.cost + 9), "0.1", key=KEY)


def test_the_output_says_whether_the_pair_or_the_chain_matters(log):
    certificate = calibrate_cascade(log, "0.1", key=KEY)
    estimates = (ChainEstimate(models=("a", "b"), cost=0.3), ChainEstimate(models=("a",), cost=0.35))

    def advice(*others):
        return replace(certificate.path.tuning, estimates=(*estimates, *others)).advice

    assert advice() is None
    assert advice(ChainEstimate(models=("b",), cost=0.8)).startswith("the right pair matters more than a longer chain")
    assert advice(ChainEstimate(models=("b",), cost=0.36)).startswith("a longer chain pays")
    assert certificate.path.tuning.advice is not None
    assert ("on the tuning rows", certificate.path.tuning.advice) in certificate.facts()
    assert ("looked at before", "by me") in certificate.with_looks("by me").facts()


def test_identities_of_the_chain_and_the_guardian_are_bound_and_others_left_out(log):
    known = {name: {"kind": "chat", "model": name} for name in (*log.models, "guardian")} | {
        "grader": {"kind": "exact"}
    }
    certificate = calibrate_cascade(replace(log, identities=known), "0.1", key=KEY, chain=["small"])
    assert set(certificate.identities) == {"small", "guardian", "grader"}
    without = calibrate_cascade(replace(log, identities={"small": {}}), "0.1", key=KEY, chain=["small"])
    assert without.identities == "unbound"


def test_replies_of_another_chain_go_to_the_guardian(chained):
    assert chained.next_model([0.5] * 3, ["a"] * 3, id="q1")[1] == "guardian"


def test_an_answer_of_its_own_features_counts_and_a_rare_one_does_not(log):
    chain = fit_chain(log, ("small",), "guardian_regret", None)
    assert set(chain.answers) == {"yes", "no", "maybe"}
    policies = np.full((1, 3), 30)
    numbers = answer_numbers(["Yes ", "no", "nay"], chain.answers)[:, None]
    chosen, asked = chain.follow(ChainRows(np.full((3, 1), 0.6), numbers, np.zeros((3, 1), dtype=bool)), policies)
    assert asked.all()
    assert chosen[0, :2].tolist() == [0, GUARDIAN], "yes is always right in this world, no never"
    few = fit_chain(log.select(np.arange(20)), ("small",), "guardian_regret", None)
    assert "maybe" not in few.answers


def test_answers_that_foretell_nothing_are_left_out(log):
    shuffled = replace(log, texts=np.random.default_rng(3).permutation(log.texts))
    for loss, gains in (("guardian_regret", False), ("net", True)):
        assert fit_chain(log, ("small", "middle"), loss, None, gains=gains).answers
        assert fit_chain(shuffled, ("small", "middle"), loss, None, gains=gains).answers == ()


def test_a_model_that_does_not_pay_is_left_out(log):
    dear = replace(log, cost=log.cost + np.array([0.0, 0.0, 0.5]))
    certificate = calibrate_cascade(dear, "0.1", key=KEY)
    assert certificate.path.chain.models == ("small", "middle", "large")
    decisions = apply_cascade(certificate, dear)
    assert (decisions.answered_by == 2).mean() < 0.02


def test_on_a_real_log_the_choice_is_within_the_targets_and_everything_is_rebuilt(shared):
    log = nine_models(shared, "medmcqa", "llama3.1-405b", ("llama3.1-8b", "gpt-4o-mini", "llama3.1-70b"))
    certificate = calibrate_cascade(log, "0.05", key=KEY)
    assert certificate.path.cost / certificate.path.guardian_cost <= 0.44
    assert verify(certificate, log)
    offline = apply_cascade(certificate, log).answered_by
    for row in range(0, len(log), 13):
        known, (asked, following) = [], certificate.next_model([], [], id=str(log.id[row]))
        while following in log.models and following not in asked:
            known.append(log.models.index(following))
            asked, following = certificate.next_model(
                log.confidence[row, known].tolist(), log.texts[row, known].tolist(), id=str(log.id[row])
            )
        assert [*certificate.path.chain.models, log.guardian][offline[row]] == following
