"""Certificates with a confidence, a dial, or groups: what they say, refuse, verify and decide."""

import json

import numpy as np
import pytest

from conformal_arbitrage import (
    Certificate,
    CertificateError,
    OptionError,
    ProjectSecret,
    ScoreLog,
    ScoreLogError,
    assess,
    calibrate,
    evaluate,
    verify,
)
from conformal_arbitrage.calibration.options import STOPS, refusal, shared_size, threshold_rows
from conformal_arbitrage.calibration.planning import sure_rows_needed
from conformal_arbitrage.calibration.sentences import as_written
from conformal_arbitrage.core.trials import draw_splits
from tests.certificates import PLACES, altered, edited

KEY = b"the key of these tests"
SECRET = ProjectSecret((b"the secret of this project",))


def world(n, seed=0, *, graded=False, groups=None):
    rng = np.random.default_rng(seed)
    margin = rng.random(n)
    lost = rng.random(n) < 0.3 * (1 - margin)
    size = rng.integers(1, 5, n) / 4 if graded else np.ones(n)
    guardian = np.stack([1 - lost * size, np.ones(n)], axis=1)
    names = None if groups is None else rng.choice(groups, n, p=[0.6, 0.38, 0.02])
    return ScoreLog.from_arrays(
        np.stack([margin, np.zeros(n)], axis=1), guardian, id=[f"{seed}-{k}" for k in range(n)], group=names
    )


BINARY, GRADED = world(800), world(800, graded=True)
GROUPED = world(800, groups=["a", "b", "rare"])
KINDS = {
    "binomial": (BINARY, {"confidence": 0.95, "zero_one": True}),
    "binomial, random": (BINARY, {"confidence": 0.9, "zero_one": True, "boundary": "random", "key": KEY}),
    "betting": (GRADED, {"confidence": 0.95, "key": KEY}),
    "betting, random": (GRADED, {"confidence": 0.95, "boundary": "random", "key": KEY}),
    "betting on a grid": (GRADED, {"confidence": 0.9, "grid": "0.05", "key": KEY}),
    "dial": (BINARY, {"confidence": 0.9, "zero_one": True, "dial": True}),
    "betting dial": (GRADED, {"confidence": 0.9, "dial": True, "key": KEY}),
    "groups": (GROUPED, {"by": "group"}),
    "groups, random": (GROUPED, {"by": "group", "boundary": "random", "key": KEY}),
    "sure groups": (GROUPED, {"by": "group", "confidence": 0.9, "zero_one": True}),
    "declared": (BINARY, {"zero_one": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_verifies_and_is_signed_as_a_whole(kind):
    log, options = KINDS[kind]
    certificate = calibrate(log, 0.05, **options)
    assert certificate.status in ("ok", "by_group")
    signed = certificate.sign(SECRET)
    loaded = Certificate.from_dict(json.loads(json.dumps(signed.to_dict())), key=certificate.key)
    assert loaded == signed
    loaded.check_signature(SECRET)
    assert verify(loaded, log)
    for name in ("confidence", "zero_one", "stops", "by", "groups"):
        if hasattr(getattr(loaded, PLACES[name]), name):
            with pytest.raises(CertificateError, match="was changed"):
                altered(loaded, **{name: "another"}).check_signature(SECRET)


def test_a_confidence_costs_something_and_is_worded():
    average = calibrate(BINARY, 0.05)
    exact = calibrate(BINARY, 0.05, confidence=0.95, zero_one=True, boundary="include")
    betting = calibrate(BINARY, 0.05, confidence=0.95, key=KEY)
    assert average.relaxation < min(exact.relaxation, betting.relaxation)
    assert (average.confidence, exact.confidence) == (None, 0.95)
    assert exact.provenance.key_sha256 is None
    assert betting.provenance.key_sha256 is not None
    assert "with probability at least 0.95 over calibration logs" in exact.guarantee
    assert "Every loss is declared to be 0 or 1." in exact.guarantee
    assert "may lie above" not in exact.guarantee
    assert "with probability 0.95" in exact.summary
    assert "half of all calibrations" not in exact.summary


def test_a_binarized_log_declares_its_losses():
    rng = np.random.default_rng(1)
    primary, guardian = rng.random((400, 3)), rng.random((400, 3))
    log = ScoreLog.from_arrays(primary, guardian, label=rng.integers(0, 3, 400)).binarized()
    certificate = calibrate(log, 0.1, confidence=0.9)
    assert certificate.provenance.key_sha256 is None
    assert Certificate.from_dict(certificate.to_dict()) == certificate
    assert verify(certificate, log)


def test_the_order_of_the_betting_test_is_the_keys_not_the_files():
    shuffled = GRADED.select(np.random.default_rng(2).permutation(len(GRADED)))
    one, other = (calibrate(log, 0.05, confidence=0.95, key=KEY) for log in (GRADED, shuffled))
    assert one.relaxation == other.relaxation
    anonymous = ScoreLog.from_arrays(GRADED.primary.reshape(-1, 2), GRADED.guardian.reshape(-1, 2))
    with pytest.raises(OptionError, match="needs ids, which fix the order of its test"):
        calibrate(anonymous, 0.05, confidence=0.95, key=KEY)


def test_too_few_rows_always_defer():
    few = BINARY.select(range(44))
    deferring = calibrate(few, 0.05, confidence=0.9, zero_one=True)
    assert deferring.status == "always_defer"
    assert Certificate.from_dict(deferring.to_dict()) == deferring
    none_lost = ScoreLog.from_arrays([[0.9, 0.1]] * 45, [[1, 1]] * 45, id=[str(row) for row in range(45)])
    assert calibrate(none_lost, 0.05, confidence=0.9, zero_one=True).relaxation == 0
    assert calibrate(none_lost, 0.05, confidence=0.99, key=KEY).status == "always_defer"
    assert sure_rows_needed(0.05, confidence=0.9) == 45
    assert sure_rows_needed(0.05, confidence=0.9, dial=True) > 45


def test_a_graded_loss_is_refused_where_none_was_declared():
    with pytest.raises(ScoreLogError, match=r"row \d+: a loss of 0\.\d+ is neither 0 nor the bound 1"):
        calibrate(GRADED, 0.05, zero_one=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"confidence": 1}, "above 0 and below 1"),
        ({"confidence": 0}, "above 0 and below 1"),
        ({"dial": True}, "give confidence="),
        ({"confidence": 0.9, "cluster": "group", "max_cluster_size": 3}, "confidence and cluster do not go together"),
        ({"by": "group", "cluster": "group", "max_cluster_size": 3}, "groups and cluster do not go together"),
        ({"confidence": 0.9, "dial": True, "by": "group"}, "dial and groups do not go together"),
        ({"confidence": 0.9, "loss": "net", "boundary": "random", "key": KEY}, "confidence and net do not go together"),
        ({"boundary": "include", "key": KEY}, "a key is used with"),
    ],
)
def test_what_has_no_proof_is_refused_by_name(options, message):
    with pytest.raises(OptionError, match=message):
        calibrate(GROUPED, 0.05, **options)


def test_a_dial_may_be_set_after_looking():
    dial = calibrate(BINARY, 0.06, confidence=0.9, zero_one=True, dial=True)
    assert dial.alpha == 0.05
    assert [stop.alpha for stop in dial.dial] == [float(stop) for stop in STOPS]
    lower = dial.sign(SECRET).choose(0.139)
    assert (lower.alpha, lower.signed) == (0.1, False)
    assert lower.relaxation < dial.relaxation
    assert "it is set to 0.1" in lower.guarantee
    assert "chosen after looking" not in lower.guarantee
    assert verify(lower, BINARY)
    assert Certificate.from_dict(lower.to_dict()) == lower
    assert ("dial", "stops 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2; set to 0.1") in lower.facts()
    deferring = calibrate(BINARY.select(range(300)), 0.1, confidence=0.9, zero_one=True, dial=True).choose(0.01)
    assert deferring.status == "always_defer"
    assert Certificate.from_dict(deferring.to_dict()) == deferring
    with pytest.raises(OptionError, match=r"lowest stop of the dial is 0\.01"):
        dial.choose(0.009)
    with pytest.raises(CertificateError, match="has no dial"):
        calibrate(BINARY, 0.05).choose(0.05)


def test_the_stops_of_a_dial_scale_with_the_bound():
    scaled = ScoreLog.from_arrays(BINARY.primary.reshape(-1, 2), 3 * BINARY.guardian.reshape(-1, 2))
    dial = calibrate(scaled, 0.15, loss_bound=3, confidence=0.9, zero_one=True, dial=True)
    plain = calibrate(BINARY, 0.05, confidence=0.9, zero_one=True, dial=True)
    assert dial.alpha == 0.15
    assert [stop.relaxation for stop in dial.dial] == [stop.relaxation for stop in plain.dial]


def test_each_group_has_its_own_threshold_and_unknown_ones_defer():
    certificate = calibrate(GROUPED, 0.05, by="group")
    alone = {
        name: calibrate(GROUPED.select(np.flatnonzero(GROUPED.group == name)), 0.05) for name in ("a", "b", "rare")
    }
    for name, one in alone.items():
        assert certificate.groups[name].relaxation == one.relaxation
    assert alone["rare"].status == "always_defer"
    assert certificate.groups["a"].relaxation != certificate.groups["b"].relaxation
    assert "rare (" in certificate.guarantee.partition("Always deferred")[2]
    assert "expected loss of the next decision of that group" in certificate.guarantee
    assert any(name == "group a" for name, _ in certificate.facts())
    assert certificate.summary.startswith("Each group by 'group' has a threshold of its own")
    scores = [0.99, 0.0]
    decided = {group: certificate.decide(scores, group=group).decided_by for group in ("a", "b", "rare", "c", None)}
    assert decided == {"a": "primary", "b": "primary", "rare": "guardian", "c": "guardian", None: "guardian"}
    assert certificate.candidates(scores).tolist() == [0, 1]
    larger = max(certificate.groups["a"].relaxation, certificate.groups["b"].relaxation)
    assert certificate.decide(scores, group=["a", "b"]).relaxation == larger
    assert certificate.decide(scores, group=["a", "c"]).relaxation is None


def test_a_log_is_decided_group_by_group():
    for options in ({}, {"boundary": "random", "key": KEY}):
        certificate = calibrate(GROUPED, 0.05, by="group", **options)
        decisions = certificate.apply(GROUPED)
        for row in range(0, 800, 7):
            scores, group = GROUPED.row(row).primary.tolist(), str(GROUPED.group[row])
            one = certificate.decide(scores, id=str(GROUPED.id[row]), group=group)
            assert (decisions[row].decided_by, decisions[row].relaxation) == (one.decided_by, one.relaxation)
    with pytest.raises(ScoreLogError, match="no column 'group'"):
        calibrate(GROUPED, 0.05, by="group").apply(BINARY)
    with pytest.raises(ScoreLogError, match="no column 'tenant' to group by"):
        calibrate(GROUPED, 0.05, by="tenant")
    holes = ScoreLog.from_arrays([[0.9, 0.1]] * 2, [[1, 0]] * 2, group=["a", ""])
    with pytest.raises(ScoreLogError, match="row 2, column 'group': no group"):
        calibrate(holes, 0.5, by="group")


def test_groups_are_assessed_one_by_one(capsys):
    certificate = calibrate(GROUPED, 0.05, by="group")
    assessment = assess(certificate, world(500, 3, groups=["a", "b", "new"]))
    assert set(assessment.groups) == {"a", "b", "new"}
    assert (assessment.groups["new"].loss, assessment.groups["new"].deferred) == (0, 1)
    assert any(name == "group new" for name, _ in assessment.facts())


def test_a_router_by_groups_speaks_of_the_groups_threshold():
    rng = np.random.default_rng(4)
    log = ScoreLog.from_router(
        confidence=rng.random(300), primary_grade=rng.random(300), guardian_grade=np.ones(300), group=["x"] * 300
    )
    certificate = calibrate(log, 0.3, by="group")
    assert "where its confidence is above the threshold of its group" in certificate.guarantee
    assert Certificate.from_dict(certificate.to_dict()) == certificate
    small = calibrate(log.select(range(2)), 0.3, by="group")
    assert "Those with a threshold" not in small.guarantee


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("binomial", {"confidence": 1.5}, "confidence"),
        ("dial", {"relaxation": 0.123}, "dial"),
        ("dial", {"alpha": 0.07}, "dial|slack"),
        ("groups", {"n": 900}, "groups"),
        ("betting", {"key_sha256": None}, "key_sha256"),
        ("binomial", {"slack": 0.5}, "slack"),
        ("binomial", {"zero_one": False}, "key_sha256"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(kind, change, named):
    log, options = KINDS[kind]
    document = edited(calibrate(log, 0.05, boundary="include", **options).to_dict(), change)
    with pytest.raises(CertificateError, match=f"({named}) .*contradicts the rest"):
        Certificate.from_dict(document)


def test_stops_and_groups_out_of_place_are_refused():
    dial = calibrate(*KINDS["dial"][:1], 0.05, **KINDS["dial"][1]).to_dict()
    stops = dial["promise"]["stops"]
    dial["promise"]["stops"] = [*stops[:-1], stops[-1] | {"relaxation": 0.999}]
    with pytest.raises(CertificateError, match=r"dial .*contradicts"):
        Certificate.from_dict(dial)
    groups = calibrate(GROUPED, 0.05, by="group").to_dict()
    groups["rule"]["groups"]["a"] |= {"boundary_u": None}
    with pytest.raises(CertificateError, match=r"groups .*contradicts"):
        Certificate.from_dict(groups)


def test_evaluate_knows_confidence_and_dial_for_declared_losses():
    average = evaluate(BINARY, [0.05, 0.1], calibration_size=400, trials=5)
    sure = evaluate(BINARY, [0.05, 0.1], calibration_size=400, trials=5, confidence=0.95, zero_one=True)
    dial = evaluate(BINARY, [0.05, 0.1], calibration_size=400, trials=5, confidence=0.95, zero_one=True, dial=True)
    for k in range(2):
        share = [one.of("conformal")[k].figures["deferred"].mean() for one in (average, sure, dial)]
        assert share[0] < share[1] < share[2]
    with pytest.raises(ScoreLogError, match="neither 0 nor the bound"):
        evaluate(GRADED, [0.05], calibration_size=400, confidence=0.95, zero_one=True)


@pytest.mark.parametrize("boundary", ["include", "random"])
def test_evaluate_calibrates_as_calibrate_does_for_graded_losses_and_groups(boundary):
    """Check the figures of a trial against a calibration on its rows, applied to its test rows."""
    key = {"key": KEY} if boundary == "random" else {}
    for log, options in ((GRADED, {"confidence": 0.9, "key": KEY}), (GROUPED, {"by": "group", **key})):
        frontier = evaluate(log, [0.05, 0.002], calibration_size=400, trials=2, seed=3, boundary=boundary, **options)
        rng = np.random.default_rng(3)
        splits = draw_splits(len(log), calibration_size=400, test_size=None, trials=2, rng=rng)
        for k, alpha in enumerate((0.05, 0.002)):
            point = frontier.of("conformal")[k]
            for t, (rows, test) in enumerate(splits):
                certificate = calibrate(log.select(rows), alpha, boundary=boundary, **options)
                deferred = certificate.apply(log.select(test)).deferred
                assert point.figures["deferred"][t] == pytest.approx(deferred.mean(), abs=1e-12)


def test_evaluate_defers_a_group_that_a_trial_did_not_see():
    rare = ScoreLog.from_arrays([[0.9, 0.1]] * 60, [[1, 0]] * 60, group=["a"] * 59 + ["b"])
    deferred = evaluate(rare, [0.1], calibration_size=55, trials=60, by="group").of("conformal")[0].figures["deferred"]
    assert set(np.round(5 * deferred).tolist()) == {0, 1}  # the one row of b is in the test part of some trials


def test_no_bound_is_printed_stronger_than_it_is():
    assert [as_written(value) for value in (0.05, 1.0, 0.9999999, 0.20000004)] == [
        "0.05",
        "1",
        "0.9999999",
        "0.20000004",
    ]


def test_the_summary_of_clusters_speaks_of_clusters():
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 60, [[1.0, 0.0]] * 60, group=[str(i // 2) for i in range(60)])
    summary = calibrate(log, 0.2, cluster="group", max_cluster_size=2).summary
    assert "the expected total loss of the next cluster is at most 0.2 times its expected number of queries" in summary
    assert "next decision" not in summary


@pytest.mark.parametrize("feature", ["red line", "monitor"])
def test_a_path_has_no_monitor_yet(feature):
    assert "several thresholds" in refusal(feature, "path")


@pytest.mark.parametrize("feature", ["red line", "monitor"])
def test_a_net_loss_is_watched(feature):
    assert refusal(feature, "net") is None


MERGED = world(400, seed=5, groups=["a", "b", "rare"])


def test_small_groups_may_share_a_threshold():
    certificate = calibrate(MERGED, 0.05, by="group", small_groups="merge")
    alone = calibrate(MERGED, 0.05, by="group")
    few = certificate.groups["rare"].n
    assert few < 19
    assert alone.groups["rare"].relaxation is None
    assert certificate.groups["a"] == alone.groups["a"]
    own = MERGED.select(np.flatnonzero(MERGED.group == "rare"))
    assert certificate.groups["rare"].relaxation is None, "a pool of its own rows alone is too small as well"
    many = ScoreLog.from_arrays(
        MERGED.primary.reshape(-1, 2),
        MERGED.guardian.reshape(-1, 2),
        id=MERGED.id.tolist(),
        group=[f"g{k % 30}" if k < 360 else "large" for k in range(400)],
    )
    for options in ({}, {"boundary": "random", "key": KEY}):
        merged = calibrate(many, 0.05, by="group", small_groups="merge", **options)
        pool = calibrate(many.select(range(360)), 0.05, **options)
        shared = {(g.relaxation, g.boundary_u) for name, g in merged.groups.items() if name != "large"}
        assert shared == {(pool.relaxation, pool.boundary_u)}
        losses = sum(g.n * g.empirical_risk for name, g in merged.groups.items() if name != "large")
        assert losses == pytest.approx(360 * pool.evidence.empirical_risk)
        assert merged.decide([0.99, 0.0], id="q", group="new").decided_by == "guardian"
        signed = merged.sign(SECRET)
        loaded = Certificate.from_dict(json.loads(json.dumps(signed.to_dict())), key=merged.key)
        loaded.check_signature(SECRET)
        assert verify(loaded, many)
        with pytest.raises(CertificateError, match="was changed"):
            altered(loaded, small_groups="defer").check_signature(SECRET)
    assert "share one threshold" in merged.guarantee
    assert "Those that share one are g0 (12 rows)" in merged.guarantee
    assert len(own) == few


def test_a_group_of_exactly_enough_rows_is_alone_and_part_of_the_pool_of_others():
    sizes = {"exact": 9, "less": 8, "more": 10}
    rows = threshold_rows([np.arange(n) + 100 * k for k, n in enumerate(sizes.values())], 9)
    assert [len(source) for source in rows] == [9, 17, 10]
    assert shared_size(sizes, 9) == 17
    assert [len(source) for source in threshold_rows([np.arange(12)], 9)] == [12]
    assert threshold_rows([], 9) == []


def test_merged_groups_whose_thresholds_differ_are_refused():
    many = ScoreLog.from_arrays(
        BINARY.primary.reshape(-1, 2), BINARY.guardian.reshape(-1, 2), group=[f"g{k % 80}" for k in range(800)]
    )
    document = calibrate(many, 0.05, by="group", small_groups="merge").to_dict()
    document["rule"]["groups"]["g1"]["relaxation"] += 0.01
    with pytest.raises(CertificateError, match="groups"):
        Certificate.from_dict(document)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"small_groups": "merge"}, "needs groups"),
        ({"small_groups": "pool", "by": "group"}, "small_groups must be one of"),
        (
            {"small_groups": "merge", "by": "group", "confidence": 0.9},
            "confidence and merged groups do not go together",
        ),
    ],
)
def test_merging_has_its_conditions(options, message):
    with pytest.raises(OptionError, match=message):
        calibrate(GROUPED, 0.05, **options)


def test_evaluate_merges_small_groups_as_calibrate_does():
    many = ScoreLog.from_arrays(
        BINARY.primary.reshape(-1, 2), BINARY.guardian.reshape(-1, 2), group=[f"g{k % 80}" for k in range(800)]
    )
    sweep = {"calibration_size": 400, "trials": 4, "by": "group"}
    apart, merged = (
        evaluate(many, [0.05], small_groups=kind, **sweep).of("conformal")[0] for kind in ("defer", "merge")
    )
    assert apart.figures["deferred"].min() > 0.999
    assert merged.figures["deferred"].mean() < 0.7
