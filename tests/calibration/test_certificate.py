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
    RiskCurve,
    ScoreLog,
    ScoreLogError,
    calibrate,
    rows_needed,
    verify,
)
from conformal_arbitrage.calibration.secret import draw
from conformal_arbitrage.core.risk import guardian_ticks
from tests import paper
from tests.certificates import altered, edited
from tests.conftest import BUNDLED, SHARED, shared_json

CASES = shared_json("cases.json")
EXPECTED = shared_json("expected.json")
ABSENT = "the real score logs are not beside this checkout (../shared/data)"
LOGS = {
    name: {} if ":" not in name else dict(zip(("primary", "guardian"), name.split(":")[1:], strict=True))
    for name in sorted({key.split("/")[0] for key in EXPECTED or {}})
}


def shared_log(name):
    return ScoreLog.read(SHARED / f"{name.split(':')[0]}.parquet", **LOGS[name])


def close(value, expected):
    return value is None if expected is None else value is not None and abs(value - expected) <= 1e-9


@pytest.mark.skipif(CASES is None, reason=ABSENT)
def test_calibrate_solves_every_small_decimal_case():
    wrong = []
    for number, case in enumerate(CASES or []):
        log = ScoreLog.from_arrays(case["primary"], case["guardian"])
        for sees, answers in case["relaxation"].items():
            for alpha, expected in answers.items():
                certificate = calibrate(log, alpha, guardian_sees=sees, loss_bound=case["loss_bound"])
                if not close(certificate.relaxation, expected):
                    wrong.append((number, sees, alpha, certificate.relaxation, expected))
    assert len(CASES) == 389
    assert wrong == []


@pytest.mark.skipif(EXPECTED is None, reason=ABSENT)
@pytest.mark.parametrize("name", sorted(EXPECTED or {}))
def test_calibrate_finds_every_expected_relaxation_of_the_real_logs(name):
    log = shared_log(name.split("/")[0])
    log = log.binarized() if name.endswith("/binarized") else log
    answers = EXPECTED[name]
    assert len(log) == answers["n"]
    for rule, options in (
        ("candidates", {"guardian_sees": "candidates"}),
        ("all", {"guardian_sees": "all"}),
        ("candidates_grid_0.01", {"guardian_sees": "candidates", "grid": 0.01}),
    ):
        for alpha, expected in answers[rule].items():
            certificate = calibrate(log, alpha, loss_bound=answers["loss_bound"], **options)
            assert close(certificate.relaxation, expected), (rule, alpha, certificate.relaxation, expected)
            assert certificate.status == ("always_defer" if expected is None else "ok")


def assert_rule_and_curve_agree(log, alpha, **options):
    """Check that the candidates of every row imply the loss that the curve counted, to the bit."""
    certificate = calibrate(log, alpha, **options)
    decisions = certificate.apply(log)
    total = 0
    for k in range(len(log)):
        span = slice(log.offsets[k], log.offsets[k + 1])
        id = None if log.id is None else str(log.id[k])
        alone = certificate.candidates(log.primary[span], id=id)
        assert alone.tolist() == np.flatnonzero(decisions.candidate[span]).tolist()
        ticks = guardian_ticks(log.loss_scores[span])
        sight = alone if certificate.guardian_sees != "all" or len(alone) == 1 else np.arange(len(ticks))
        total += int(ticks.max() - ticks[sight].max())
    assert certificate.evidence.empirical_risk == float(Fraction(total, 10**12) / len(log))


OPTIONS = [
    {},
    {"guardian_sees": "candidates"},
    {"guardian_sees": "candidates", "boundary": "random", "key": b"key"},
    {"boundary": "random", "key": b"key"},
    {"guardian_sees": "candidates", "grid": 0.01},
]


@pytest.mark.proof
@pytest.mark.skipif(EXPECTED is None, reason=ABSENT)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", sorted(LOGS))
def test_deployment_uses_the_calibrated_candidate_sets_on_every_real_row(name, options):
    assert_rule_and_curve_agree(shared_log(name), 0.05, loss_bound=1, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_deployment_uses_the_calibrated_candidate_sets_on_the_bundled_log(science, options):
    assert_rule_and_curve_agree(science, 0.05, **options)


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_deployment_uses_the_calibrated_candidate_sets_on_coarse_and_single_precision_scores(digits):
    rng = np.random.default_rng(digits)
    primary = np.round(rng.random((300, 4)), digits)
    guardian = np.round(rng.random((300, 4)), 2)
    for scores in (primary, primary.astype(np.float32), primary + 1000):
        assert_rule_and_curve_agree(
            ScoreLog.from_arrays(scores, guardian, id=range(300)), 0.1, boundary="random", key=b"key"
        )
        assert_rule_and_curve_agree(ScoreLog.from_arrays(scores, guardian), 0.1)


def test_candidates_do_not_depend_on_the_number_type():
    log = ScoreLog.from_arrays(np.array([[0.9, 0.4]] * 30, dtype=np.float32), [[0.5, 0.6]] * 30)
    certificate = calibrate(log, 0.05)
    assert certificate.evidence.score_digits == 6
    assert certificate.relaxation == 0.5
    assert certificate.candidates([0.9, 0.4]).tolist() == [0, 1]
    assert certificate.candidates(np.array([0.9, 0.4], dtype=np.float32)).tolist() == [0, 1]


def test_no_opinion_means_every_action_is_a_candidate(science):
    certificate = calibrate(science, 0.2)
    assert certificate.candidates([None, 0.2, 0.9]).tolist() == [0, 1, 2]


def test_too_few_rows_give_an_always_defer_certificate():
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 8, [[1.0, 0.0]] * 8)
    certificate = calibrate(log, 0.1)
    assert (certificate.status, certificate.relaxation, certificate.evidence.empirical_risk) == (
        "always_defer",
        None,
        0.0,
    )
    assert certificate.candidates([0.9, 0.1]).tolist() == [0, 1]
    assert certificate.apply(log).deferred.all()
    assert "goes to the Guardian" in certificate.guarantee
    assert calibrate(ScoreLog.from_arrays([[0.9, 0.1]] * 9, [[1.0, 0.0]] * 9), 0.1).status == "ok"


@pytest.mark.parametrize(("alpha", "bound", "rows"), [(0.1, 1, 9), ("0.3", 1, 3), (0.02, 3, 149), (0.07, 1, 14)])
def test_rows_needed_is_the_first_size_that_does_not_always_defer(alpha, bound, rows):
    assert rows_needed(alpha, bound) == rows

    def status(n):
        log = ScoreLog.from_arrays([[0.9, 0.1]] * n, [[1.0, 0.0]] * n)
        return calibrate(log, alpha, loss_bound=bound).status

    assert status(rows) == "ok"
    assert status(rows - 1) == "always_defer"


def test_slack_and_risk_are_exact(science):
    certificate = calibrate(science, 0.05, guardian_sees="candidates")
    curve = RiskCurve.from_log(science, guardian_sees="candidates")
    total = Fraction(int(curve.totals[np.searchsorted(curve.breakpoints, certificate.relaxation)]), 10**12)
    assert certificate.evidence.empirical_risk == float(total / 2369)
    assert certificate.evidence.slack == float(Fraction("0.05") - (total + 1) / 2370)
    assert certificate.evidence.slack >= 0


def test_a_saved_certificate_loads_unchanged(tmp_path, science):
    certificate = calibrate(science, 0.05, guardian_sees="all")
    certificate.save(tmp_path / "certificate.json")
    assert Certificate.load(tmp_path / "certificate.json") == certificate.sign(ProjectSecret.find())
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert list(document) == [
        "schema", "rule", "promise", "loss", "evidence", "provenance", "guarantee", "secret_id", "signature",
    ]  # fmt: skip
    assert document["provenance"]["identities"] == "unbound"
    assert document["rule"]["relaxation"] == certificate.relaxation
    assert {p.name for p in tmp_path.iterdir()} == {"certificate.json"}


def test_decisions_of_a_certificate_that_nobody_vouches_for_have_no_guarantee(tmp_path, science, monkeypatch):
    path = tmp_path / "certificate.json"
    calibrate(science, 0.05, boundary="include").save(path)
    sound, document = Certificate.load(path), json.loads(path.read_text())
    assert sound.decide([0.9, 0.1, 0.0]).no_guarantee is None
    assert "has 9 actions; those of the certificate's log have" in sound.decide([0.9] + 8 * [0.1]).no_guarantee
    for changes, reason in (
        ({"signature": None, "secret_id": None}, "is not signed"),
        ({"relaxation": 0.0}, "was changed since it was signed"),
    ):
        path.write_text(json.dumps(edited(document, changes)))
        assert reason in Certificate.load(path).decide([0.9, 0.1, 0.0]).no_guarantee
    path.write_text(json.dumps(document))
    monkeypatch.setenv("ARBITRAGE_SECRET", "another-secret-of-some-length")
    assert "which is not at hand" in Certificate.load(path).decide([0.9, 0.1, 0.0]).no_guarantee


def test_the_key_is_never_part_of_the_saved_certificate(tmp_path, science):
    secret = ProjectSecret((b"the secret of this test",))
    certificate = calibrate(science, 0.05, boundary="random", key=secret.boundary_key).sign(secret)
    certificate.save(tmp_path / "certificate.json")
    assert [path.name for path in tmp_path.iterdir()] == ["certificate.json"]
    assert certificate.key.hex() not in (tmp_path / "certificate.json").read_text()
    assert certificate.key.hex() not in repr(certificate)
    assert repr(certificate.key) not in repr(certificate)
    loaded = Certificate.load(tmp_path / "certificate.json", secret=secret)
    assert np.array_equal(loaded.apply(science).candidate, certificate.apply(science).candidate)
    assert verify(loaded, science)


def test_a_random_boundary_cannot_be_used_without_its_key(tmp_path, science):
    calibrate(science, 0.05, boundary="random", key=b"key").save(tmp_path / "c.json")
    loaded = Certificate.load(tmp_path / "c.json")
    for use in (
        lambda: loaded.candidates([0.1, 0.2], id="a"),
        lambda: loaded.apply(science),
        lambda: verify(loaded, science),
    ):
        with pytest.raises(CertificateError, match="set ARBITRAGE_SECRET"):
            use()
    with pytest.raises(CertificateError, match="not the one"):
        Certificate.load(tmp_path / "c.json", key=b"another")


def test_a_random_boundary_without_ids_draws_by_question():
    rng = np.random.default_rng(2)
    scores, worth = rng.integers(0, 4, (300, 3)) / 4, rng.random((300, 3))
    log = ScoreLog.from_arrays(
        scores, worth, context=[f"question {k % 250}" for k in range(300)], actions=[["a", "b", "c"]] * 300
    )
    for rows in (log, replace(log, context=None)):
        certificate = calibrate(rows, 0.1, boundary="random", key=b"key")
        assert verify(certificate, rows)
        decided = certificate.apply(rows)
        assert 0 < (~decided.deferred).sum() < 300
        texts = [None] * 300 if rows.context is None else rows.context.tolist()
        for row in range(300):
            alone = certificate.decide(scores[row], text=texts[row], actions=("a", "b", "c"))
            assert (alone.decided_by == "guardian") == decided.deferred[row]
    with pytest.raises(OptionError, match="id is a text; got 17"):
        certificate.candidates([0.1, 0.2], id=17)
    assert certificate.candidates([0.1, 0.2], id="").size


def test_a_random_boundary_spends_the_budget_that_coarse_scores_leave_unused():
    rng = np.random.default_rng(0)
    n = 4000
    primary = np.round(rng.random((n, 2)) * 4) / 4
    guardian = np.eye(2)[rng.integers(0, 2, n)]
    log = ScoreLog.from_arrays(primary, guardian, id=range(n))
    plain, spent = calibrate(log, 0.1, boundary="include"), calibrate(log, 0.1, key=b"fixed")
    assert plain.evidence.slack > 0.02
    assert 0 <= spent.evidence.slack < 0.001
    assert spent.apply(log).deferred.mean() < plain.apply(log).deferred.mean() - 0.04


def test_draws_are_uniform_and_depend_on_key_and_id():
    values = np.array([draw(b"key", f"q{k}") for k in range(20_000)])
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(np.quantile(values, [0.1, 0.9]) - [0.1, 0.9]).max() < 0.01
    assert draw(b"key", "q1") != draw(b"other", "q1")
    assert draw(b"key", "q1") == values[1]


@pytest.mark.parametrize(
    "change",
    [
        {"relaxation": 0.1}, {"alpha": 0.06}, {"n": 7}, {"slack": 0.1}, {"guarantee": "trust me"}, {"guardian_sees": "all"},
        {"bound": 2.0}, {"log_sha256": "0" * 64}, {"no_opinion_rows": 3}, {"score_digits": 6},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_verify_names_the_changed_field(science, change):
    certificate = calibrate(science, 0.05, guardian_sees="candidates")
    assert verify(certificate, science).ok
    verification = verify(altered(certificate, **change), science)
    assert not verification
    assert {*change, "relaxation"} & set(verification.differences)


def test_verify_detects_a_changed_log(science):
    certificate = calibrate(science, 0.05)
    assert verify(certificate, science.select(np.arange(len(science))[::-1])).ok  # rows have no order
    assert {"n", "log_sha256"} <= set(verify(certificate, science.select(range(2368))).differences)


def test_verify_supports_binarized_grid_worst_case_and_own_loss_certificates(tmp_path):
    log = ScoreLog.read(BUNDLED, primary="smollm2", guardian="qwen15b")
    assert verify(calibrate(log.binarized(), 0.1, grid=0.01), log)
    holes = ScoreLog.from_arrays([[0.9, 0.1]] * 40, [[1.0, 0.0]] * 39 + [None])
    with pytest.raises(ScoreLogError, match="row 40: no Guardian score"):
        calibrate(holes, 0.1)
    certificate = calibrate(holes, 0.1, missing_guardian="worst_case")
    assert certificate.evidence.missing_guardian_rows == 1
    assert verify(certificate, holes)

    def harm(row, sight):
        return 0.0 if len(sight) > 1 else 0.5

    own = calibrate(holes.select(range(39)), 0.1, loss=harm, loss_bound=1)
    assert verify(own, holes.select(range(39)), loss=harm)
    with pytest.raises(OptionError, match="'harm'"):
        verify(own, holes)


def test_identities_bind_a_certificate():
    names = {"primary": {"model": "a"}, "guardian": {"model": "b"}}
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 40, [[1.0, 0.0]] * 40, identities=names)
    certificate = calibrate(log, 0.1)
    assert certificate.identities == names
    assert (
        "identities" in verify(certificate, replace(log, identities={**names, "guardian": {"model": "c"}})).differences
    )
    assert "identities" in verify(altered(certificate, identities="unbound"), log).differences
    assert calibrate(replace(log, identities={"primary": {}}), 0.1).identities == "unbound"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 3}, "schema version 3"),
        ({"schema": None}, "schema version None"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"key": "ff"}, "unknown field 'key'"),
        ({"relaxation": "0.1"}, "relaxation"),
        ({"relaxation": -0.1}, "relaxation"),
        ({"relaxation": None}, "empirical_risk"),
        ({"boundary": "maybe"}, "boundary"),
        ({"alpha": 2.0}, "alpha"),
        ({"boundary_u": 0.5}, "boundary_u"),
        ({"n": 1.5}, "`int`"),
    ],
)
def test_an_inconsistent_certificate_is_rejected(tmp_path, science, change, message):
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(edited(calibrate(science, 0.05, boundary="include").to_dict(), change)))
    with pytest.raises(CertificateError, match=message):
        Certificate.load(path)


def test_a_malformed_or_missing_certificate_is_rejected(tmp_path):
    (tmp_path / "c.json").write_text("{")
    for name, message in (("c.json", "not JSON"), ("none.json", "cannot be read")):
        with pytest.raises(CertificateError, match=message):
            Certificate.load(tmp_path / name)
    (tmp_path / "c.json").write_text("[1]")
    with pytest.raises(CertificateError, match="schema"):
        Certificate.load(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guardian_sees": "some"}, "guardian_sees"),
        ({"boundary": "exclude"}, "boundary"),
        ({"missing_guardian": "drop"}, "missing_guardian"),
        ({"boundary": "include", "key": b"k"}, 'boundary="random" or a confidence only'),
        ({"boundary": "random", "grid": 0.01}, "grid"),
        ({"boundary": "random", "key": b""}, "key must be bytes"),
        ({"loss_bound": 0}, "loss_bound"),
        ({"loss_bound": "many"}, "loss_bound"),
    ],
)
def test_unknown_and_conflicting_options_are_rejected(science, options, message):
    with pytest.raises(OptionError, match=message):
        calibrate(science, 0.05, **options)


def test_an_alpha_that_cannot_be_stored_exactly_is_rejected(science):
    with pytest.raises(OptionError, match="at most 15 digits"):
        calibrate(science, Fraction(1, 3))


def test_decisions_apply_the_rule_row_by_row():
    log = ScoreLog.from_arrays(
        [[0.9, 0.1, 0.0], [0.5, 0.4, 0.1], [0.2, 0.2, 0.2], [0.7], [0.3, 0.3]],
        [[0, 1, 0], [0.1, 0.3, 0.9], [0.5, 0.6, 0.6], [1], [None, 1]],
        actions=[["a", "b", "c"], ["a", "b", "c"], ["a", "b", "c"], ["a"], ["a", "b"]],
    )
    certificate = altered(calibrate(log.select(range(4)), 0.3, guardian_sees="candidates"), relaxation=0.1)
    shown = list(certificate.apply(log).to_dicts())
    assert [d["decided_by"] for d in shown] == ["primary", "guardian", "guardian", "primary", "guardian"]
    assert [d["action"] for d in shown] == [0, 1, 1, 0, None]
    assert [d["answer"] for d in shown] == ["a", "b", "b", "a", None]
    assert [d["candidates"] for d in shown] == [[0], [0, 1], [0, 1, 2], [0], [0, 1]]
    assert [d["margin"] for d in shown] == [0.8, 0.1, 0.0, None, 0.0]
    everything = altered(certificate, guardian_sees="all").apply(log)
    assert everything.action.tolist() == [0, 2, 1, 0, -1]
    assert everything[1].candidates == (0, 1)
    assert [d.deferred for d in everything] == [False, True, True, False, True]


def test_the_literal_reading_of_the_paper_solves_a_small_example():
    primary = [[Fraction(9, 10), Fraction(1, 10)], [Fraction(6, 10), Fraction(5, 10)]]
    guardian = [[Fraction(0), Fraction(1)], [Fraction(0), Fraction(1)]]
    assert paper.relaxation(primary, guardian, Fraction(2, 3), Fraction(1), "candidates") == Fraction(1, 10)
    assert paper.relaxation(primary, guardian, Fraction(1, 3), Fraction(1), "candidates") == Fraction(8, 10)
    assert paper.relaxation(primary, guardian, Fraction(1, 4), Fraction(1), "candidates") is None
