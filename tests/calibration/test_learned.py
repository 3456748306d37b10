import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage import (
    Certificate,
    CertificateError,
    Features,
    OptionError,
    ScoreLog,
    Usage,
    assess,
    calibrate,
    evaluate,
    verify,
)
from conformal_arbitrage.calibration.learned import MOST_ROWS, answer_place, refuse_row_count, sidecar_path
from conformal_arbitrage.calibration.learning import learn_score
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.schedule import refuse_renewal, refuse_tightening
from conformal_arbitrage.calibration.secret import ProjectSecret, draw
from conformal_arbitrage.core.features import ANSWERS, left_out_kept
from conformal_arbitrage.monitoring.lines import certificate_lines
from tests.certificates import altered, edited

KEY, SECRET = b"k" * 32, ProjectSecret((b"the secret of this project",))
GROUPS = ("art", "law", "")


def world(n=150, *, seed=0, graded=False, coarse=True, groups=GROUPS, tokens=True, single=False, size=3):
    """Return a log in which the group and the position of the top action tell more than the margin does."""
    rng = np.random.default_rng(seed)
    scores = rng.random((n, size))
    scores = np.round(scores, 1) if coarse else scores
    group = rng.choice(groups, n).tolist()
    top = scores.argmax(axis=1)
    wrong = rng.random(n) < np.where(np.array(group) == "law", 0.6, 0.1) + 0.2 * (top == 2)
    loss = np.where(wrong, rng.random(n) if graded else 1.0, 0.0)
    guardian = np.ones((n, size))
    guardian[np.arange(n), top] = 1 - loss
    return ScoreLog.from_arrays(
        scores.astype(np.float32) if single else scores,
        guardian,
        id=[f"q{seed}-{k}" for k in range(n)],
        group=group,
        primary_usage=Usage(output_tokens=rng.integers(1, 400, n).astype(float)) if tokens else None,
    )


def learned(log, alpha=0.1, score="auto", features=None, **options):
    return calibrate(log, alpha, boundary="random", key=KEY, score=score, features=features, **options)


def test_a_certificate_with_a_learned_score_says_what_it_is():
    log = world()
    certificate = learned(log, features=Features(menu_size=3))
    terms = certificate.learned
    assert (certificate.status, certificate.rule.score, certificate.relaxation) == ("learned", "auto", None)
    assert terms.features == ("margin", "position", "menu", "group", "tokens")
    assert (terms.version, terms.penalties, terms.menu_size) == (1, (1.0, 5.0, 30.0, 300.0), 3)
    assert terms.columns == 28 + 12 + 18 + 2 + 2
    assert 0 < terms.rows < len(log), "rows tied at the top are left out"
    assert terms.missing == {"group": log.group.tolist().count(""), "tokens": 0}
    assert 0 < terms.deferred < 1
    assert certificate.evidence.empirical_risk <= certificate.alpha
    assert (
        "exact for losses of 0 or 1; a loss in between counts as one of the two by a keyed draw"
        in certificate.guarantee
    )
    assert "before the losses of these rows and its own exceed 15" in certificate.guarantee
    assert "nothing is proved about how far" in certificate.guarantee
    assert "A query with other than 3 actions is deferred." in certificate.guarantee
    assert dict(certificate.facts())["relaxation"] == "none: a learned score decides"
    assert "62 features" in dict(certificate.facts())["score"]
    assert certificate.summary.startswith("A score learned from these rows")


def test_the_margin_alone_is_no_candidate_of_a_learned_score():
    certificate = learned(world(), score="learned", features=Features(groups=False, tokens=False))
    assert certificate.learned.features == ("margin", "position")
    assert "Of the penalties 1, 5, 30, 300, the one" in certificate.guarantee
    assert {use.candidate for use in certificate.apply(world(seed=1)).learned if use} <= {
        "penalty 1", "penalty 5", "penalty 30", "penalty 300",
    }  # fmt: skip


@pytest.mark.parametrize("single", [False, True])
def test_saved_and_loaded_it_decides_every_row_as_before(tmp_path, single):
    log, rest = world(single=single), world(seed=1, single=single)
    certificate = learned(log, features=Features(menu_size=3)).sign(SECRET)
    path = tmp_path / "certificate.json"
    certificate.save(path)
    loaded = Certificate.load(path, key=KEY)
    loaded.check_signature(SECRET)
    assert loaded == certificate
    assert verify(loaded, log)
    ours, theirs = certificate.apply(rest), loaded.apply(rest)
    assert list(ours) == list(theirs)
    assert {use.candidate for use in ours.learned if use} - {"margin"}, "the learned score decides some rows"
    assert "learned" in next(d for d in ours.to_dicts() if d["margin"])


def net_world(n=200, *, seed=0, graded=False):
    """Return a router log in which the group tells where the two models differ, either way."""
    rng = np.random.default_rng(seed)
    group = rng.choice(["art", "law", "sport"], n)
    differ = rng.random(n) < np.where(group == "law", 0.6, 0.15)
    net = np.where(differ, np.where(rng.random(n) < 0.3, -1.0, 1.0), 0.0) * (rng.random(n) if graded else 1.0)
    return ScoreLog.from_router(
        confidence=np.round(rng.random(n), 1),
        primary_grade=np.maximum(-net, 0.0),
        guardian_grade=np.maximum(net, 0.0),
        id=[f"n{seed}-{k}" for k in range(n)],
        group=group,
    ), net


@pytest.mark.parametrize("score", ["auto", "learned"])
@pytest.mark.parametrize("graded", [False, True])
def test_with_gains_it_is_saved_verified_and_decides_live_as_in_a_replay(tmp_path, score, graded):
    log, rest = (net_world(seed=seed, graded=graded)[0] for seed in (0, 1))
    certificate = learned(log, score=score, loss="net").sign(SECRET)
    certificate.save(tmp_path / "certificate.json")
    loaded = Certificate.load(tmp_path / "certificate.json", key=KEY)
    assert verify(loaded, log)
    decisions = list(loaded.apply(rest))
    assert decisions == list(certificate.apply(rest))
    assert 0 < sum(decision.deferred for decision in decisions) < len(decisions)
    assert "a ridge regression of the size of the loss on the margin" in certificate.guarantee
    assert "at most 0.1 below that of the Guardian's choice, gains counted" in certificate.guarantee
    assert "minus their gains, first exceed 19" in certificate.guarantee
    assert (certificate.fit.rows.loss < 0).any()
    kept = left_out_kept(certificate.fit.rows.fits(), budget=20, with_margin=score == "auto")
    assert certificate.evidence.empirical_risk == pytest.approx(certificate.fit.rows.loss[kept].sum() / len(log))
    assert certificate.loss.regret >= certificate.evidence.empirical_risk


def answered_world(n=200, *, seed=0):
    """Return a router log in which the answer "no" is mostly wrong, and says so in no other column."""
    rng = np.random.default_rng(seed)
    answers = rng.choice(["Yes.", "no", "perhaps", ""], n, p=[0.5, 0.3, 0.1, 0.1]).tolist()
    right = rng.random(n) > np.where(np.array(answers) == "no", 0.6, 0.05)
    return ScoreLog.from_router(
        confidence=np.round(rng.random(n), 2),
        primary_grade=right.astype(float),
        guardian_grade=np.ones(n),
        id=[f"a{seed}-{k}" for k in range(n)],
        answer=answers,
    )


def test_what_the_primary_answered_is_learned_from_and_scores_without_it_stay_candidates(tmp_path):
    log, rest = answered_world(), answered_world(seed=1)
    certificate = learned(log, features=Features(answers=True)).sign(SECRET)
    certificate.save(tmp_path / "certificate.json")
    loaded = Certificate.load(tmp_path / "certificate.json", key=KEY)
    assert verify(loaded, log)
    assert certificate.learned.missing["answer"] == log.extra["answer"].tolist().count("")
    assert "the Primary's answer" in certificate.guarantee
    assert "each without the answer and with it" in certificate.guarantee
    decisions = list(loaded.apply(rest))
    for row, decision in enumerate(decisions):
        scores, answer = rest.row(row).primary.tolist(), rest.extra["answer"][row]
        live = certificate.decide(scores, guardian=rest.row(row).guardian, id=str(rest.id[row]), answer=answer)
        assert live == decision
    assert any("with the answer" in decision.learned.candidate for decision in decisions if decision.learned)
    assert learned(log).learned.features[-1] == "answer", "a column that says it is used unless it is left out"
    without = list(learned(log, features=Features(answers=False)).apply(rest))
    assert sum(one.deferred for one in decisions) < sum(one.deferred for one in without)
    options = {"calibration_size": 150, "trials": 3, "boundary": "random", "score": "auto", "key": KEY}
    points = evaluate(log, [0.1], features=Features(answers=True), **options).of("conformal")
    assert points[0].mean("deferred") < 1


def test_answers_are_hashed_without_a_log_and_alike_however_they_are_written():
    assert answer_place("Yes.") == answer_place(" yes. ")
    assert {answer_place(text) for text in ("", "  ", None)} == {-1}
    assert len({answer_place(str(number)) for number in range(1000)}) == ANSWERS


def test_of_menus_the_answer_is_the_text_of_the_top_action():
    log = replace(world(), actions=np.array(["a", "b", "c"] * 150, dtype=object))
    certificate = learned(log, features=Features(answers=True))
    for row, decision in enumerate(certificate.apply(log)):
        query = log.row(row)
        live = certificate.decide(
            query.primary.tolist(), guardian=query.guardian, id=str(log.id[row]), group=query.group,
            tokens=float(log.primary_usage.output_tokens[row]), actions=["a", "b", "c"],
        )  # fmt: skip
        assert live == decision
    with pytest.raises(OptionError, match="there is no `answer` column, nor texts of the actions"):
        learned(world(), features=Features(answers=True))


def test_a_new_row_is_decided_alike_one_by_one_and_together_where_gains_count():
    (log, _), (rest, _) = net_world(), net_world(seed=5)
    certificate = learned(log, loss="net")
    points = evaluate(log, [0.1], calibration_size=150, trials=5, loss="net", boundary="random", score="auto", key=KEY)
    assert points.of("conformal")[0].mean("loss") < 0.2
    for row, decision in enumerate(certificate.apply(rest)):
        query = rest.row(row)
        live = certificate.decide(
            query.primary.tolist(), guardian=query.guardian, id=str(rest.id[row]), group=query.group
        )
        assert live == decision


def test_one_document_can_hold_the_arrays_too():
    certificate = learned(world()).sign(SECRET)
    document = json.loads(json.dumps(certificate.to_dict(with_arrays=True)))
    loaded = Certificate.from_dict(document, key=KEY)
    loaded.check_signature(SECRET)
    assert loaded.fit.packed == certificate.fit.packed
    assert list(loaded.apply(world(seed=2))) == list(certificate.apply(world(seed=2)))
    with pytest.raises(CertificateError, match="are not base64"):
        Certificate.from_dict({**document, "arrays": "*"})
    with pytest.raises(CertificateError, match="the certificate has none; leave them out"):
        Certificate.from_dict({**calibrate(world(), 0.1).to_dict(), "arrays": document["arrays"]})


def test_a_live_query_is_decided_as_in_a_replay():
    certificate, rest = learned(world(), features=Features(menu_size=3)), world(seed=3)
    lengths = rest.primary_usage.output_tokens
    for row, decision in enumerate(certificate.apply(rest)):
        one = certificate.decide(
            rest.row(row).primary.tolist(), guardian=rest.row(row).guardian, id=str(rest.id[row]),
            group=rest.row(row).group, tokens=float(lengths[row]),
        )  # fmt: skip
        assert one == decision


def test_features_that_a_query_lacks_are_named_and_a_new_group_is_no_missing_one():
    certificate = learned(world(), features=Features(menu_size=3))
    bare = certificate.decide([0.9, 0.1, 0.0], id="x")
    assert bare.learned.missing == ("group", "tokens")
    new = certificate.decide(np.array([0.9, 0.1, 0.0]), id="x", group="geology", tokens=10)
    assert new.learned.missing == ()
    with pytest.raises(OptionError, match="several groups and learned do not go together"):
        certificate.decide([0.9, 0.1, 0.0], id="x", group=["art", "law"])


def test_nothing_is_decided_about_ties_other_sizes_and_single_actions():
    certificate = learned(world(), features=Features(menu_size=3))
    for scores, deferred in (([0.5, 0.5, 0.1], True), ([0.9, 0.1], True), ([None, 0.2, 0.3], True), ([0.9], False)):
        decision = certificate.decide(scores, id="x", group="art", tokens=5)
        assert (decision.deferred, decision.learned) == (deferred, None), scores
        assert certificate.candidates(scores, id="x").size == (len(scores) if deferred else 1)


def test_rows_of_another_size_stay_in_the_log_and_are_deferred():
    plain = world(n=120)
    mixed = ScoreLog.from_arrays(
        [*plain.primary.reshape(-1, 3).tolist(), *[[0.7, 0.1]] * 30],
        [*plain.guardian.reshape(-1, 3).tolist(), *[[1.0, 1.0]] * 30],
        id=[f"m{k}" for k in range(150)],
    )
    certificate = learned(mixed, features=Features(menu_size=3))
    assert certificate.n == 150
    assert certificate.learned.rows <= 120
    assert certificate.apply(mixed).deferred[120:].all()
    with pytest.raises(OptionError, match="no row of the declared 5 actions has a top action that leads"):
        learned(mixed, features=Features(menu_size=5))


def test_graded_losses_are_rounded_by_a_draw_that_keeps_their_mean():
    log = world(n=1500, graded=True, coarse=False)
    options = CalibrationOptions(boundary="random", key=KEY, score="auto")
    fit = learn_score(log, Fraction(1, 10), Fraction(1), options)
    graded = 1 - log.guardian.reshape(-1, 3).min(axis=1)
    assert fit.terms.rounded_rows == int(((graded > 0) & (graded < 1)).sum())
    error = float(np.sqrt((graded * (1 - graded)).sum())) / len(log)
    assert abs(fit.score.rows.loss.mean() - graded.mean()) < 4 * error
    assert verify(learned(log), log)


@pytest.mark.parametrize(("graded", "score", "seed"), [(False, "auto", 0), (True, "auto", 1), (False, "learned", 2)])
def test_on_a_whole_set_the_losses_of_rows_decided_by_the_others_keep_the_budget(graded, score, seed):
    """The inequality behind the guarantee, through the path that a user takes: coarse scores, ties, groups, draws."""
    n, alpha = 60, Fraction(1, 5)
    log = world(n=n, seed=seed, graded=graded, tokens=False)
    options = CalibrationOptions(boundary="random", key=KEY, score=score)
    whole = learn_score(log, alpha, Fraction(1), options).score.rows
    rounded = dict(zip(whole.u.tolist(), whole.loss.tolist(), strict=True))
    lost = 0
    for row in range(n):
        certificate = learned(log.select(np.arange(n) != row), alpha, score)
        decided = certificate.apply(log.select([row]))
        u = draw(certificate.secret(), str(log.id[row]))
        lost += 0 if decided.deferred[0] else rounded[u]
    assert lost <= alpha * n


def test_without_room_for_one_loss_every_query_is_deferred():
    certificate = learned(world(n=60), 0.01)
    assert (certificate.status, certificate.rule.score, certificate.learned) == ("always_defer", "auto", None)
    assert certificate.apply(world()).deferred.all()
    assert verify(certificate, world(n=60))


def test_without_a_loss_everything_but_ties_is_kept():
    log = world(n=60)
    easy = replace(log, guardian=np.ones(len(log.guardian)))
    certificate = learned(easy)
    kept = certificate.apply(easy)
    tied = np.sort(easy.primary.reshape(-1, 3), axis=1)
    assert (kept.deferred == (tied[:, -1] == tied[:, -2])).all()
    assert certificate.evidence.empirical_risk == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"guardian_sees": "candidates"}, 'needs guardian_sees="all"'),
        ({"boundary": "include", "key": None}, 'needs boundary="random"'),
        ({"loss": lambda _row, _seen: 0.0, "loss_bound": 1}, "learned and own loss do not go together"),
        ({"cluster": "group", "max_cluster_size": 3}, "learned and cluster do not go together"),
        ({"confidence": 0.9}, "confidence and learned do not go together"),
        ({"by": "group"}, "groups and learned do not go together"),
        ({"score": "margin", "features": Features()}, 'features= are what a score is learned from; give score="auto"'),
        ({"score": "best"}, "score must be one of 'margin', 'auto', 'learned'"),
    ],
)
def test_what_has_no_proof_is_refused(options, why):
    with pytest.raises(OptionError, match=why):
        calibrate(world(), 0.1, **({"boundary": "random", "key": KEY, "score": "auto"} | options))


def test_too_few_and_too_many_rows_are_refused():
    with pytest.raises(OptionError, match="needs 50 rows or more, and there are 49; use the margin"):
        learned(world(n=49))
    with pytest.raises(OptionError, match="at most 50000, and there are 50001; take a random part"):
        refuse_row_count(MOST_ROWS + 1, "log")
    with pytest.raises(OptionError, match="menu_size must lie in 2 to 8; got 9"):
        Features(menu_size=9)


def test_an_absent_or_altered_file_of_arrays_is_refused_with_a_remedy(tmp_path):
    path = tmp_path / "certificate.json"
    certificate = learned(world())
    certificate.save(path)
    arrays = sidecar_path(path)
    assert arrays == tmp_path / "certificate.npz"
    assert sidecar_path("policy") == sidecar_path("policy.npz").with_name("policy.npz")
    whole = arrays.read_bytes()
    arrays.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CertificateError, match=r"certificate\.npz: is not the file that the certificate was made with"):
        Certificate.load(path)
    arrays.unlink()
    with pytest.raises(
        CertificateError, match=r"certificate\.npz: cannot be read .*copy it along with the certificate"
    ):
        Certificate.load(path)
    bare = Certificate.from_dict(certificate.to_dict(), key=KEY)
    with pytest.raises(CertificateError, match="arrays of the learned score are missing"):
        bare.decide([0.9, 0.1, 0.0], id="x")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda arrays: arrays | {"extra": arrays["u"]}, "array 'extra' has type"),
        (lambda arrays: {name: values for name, values in arrays.items() if name != "u"}, "is damaged"),
        (lambda arrays: arrays | {"u": arrays["u"][1:]}, "array 'u' has type float64 and"),
        (lambda arrays: arrays | {"margin": np.where(arrays["u"] > 0, np.nan, 0)}, "holds a number that is not finite"),
        (lambda arrays: arrays | {"loss": arrays["loss"] + np.int8(3)}, "a loss none of -1, 0 and 1"),
        (lambda arrays: arrays | {"names": np.array(["art", {}], dtype=object)}, "is damaged"),
    ],
)
def test_arrays_that_cannot_be_those_of_a_score_are_refused(change, why):
    certificate = learned(world())
    rows = certificate.fit.rows
    packed = _packed(change(rows.arrays()))
    forged = altered(certificate, terms=replace(certificate.learned, sha256=_sha256(packed)))
    with pytest.raises(CertificateError, match=why):
        forged.with_arrays(packed)


def _packed(arrays):
    import io

    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def _sha256(packed):
    import hashlib

    return hashlib.sha256(packed).hexdigest()


def test_a_small_file_that_would_fill_the_memory_is_refused():
    import io

    certificate, content = learned(world()), io.BytesIO()
    np.savez_compressed(content, u=np.zeros(2**26))
    packed = content.getvalue()
    assert len(packed) < 2**20
    forged = altered(certificate, terms=replace(certificate.learned, sha256=_sha256(packed)))
    with pytest.raises(CertificateError, match="its arrays would take 536871040 bytes, more than 268435456"):
        forged.with_arrays(packed)


def test_arrays_of_other_features_are_refused():
    certificate = learned(world())
    later = altered(certificate, terms=replace(certificate.learned, version=2))
    with pytest.raises(CertificateError, match="version 2 of the features, and this release computes version 1"):
        later.with_arrays(certificate.fit.packed)


def test_verify_names_what_differs_in_a_learned_score():
    log = world()
    certificate = learned(log)
    moved = replace(log, group=np.where(log.group == "law", "art", log.group))
    assert {"learned", "arrays"} <= set(verify(certificate, moved).differences)
    assert verify(certificate, moved).differences["arrays"][0] == "group, names"
    rows = certificate.fit.rows
    near = replace(rows, u=rows.u * (1 + 1e-12))
    assert not certificate.fit.differs_from(replace(certificate.fit, rows=near))
    lucky = replace(certificate, fit=replace(certificate.fit, budget=certificate.fit.budget + 9))
    assert set(verify(lucky, log).differences) == {"decisions"}
    few = verify(learned(log, 0.012), log.select(range(60)))
    assert few.differences["guarantee"][1].startswith("No relaxation keeps the budget 0.012 on this log")


@pytest.mark.parametrize(
    "change",
    [
        {"deferred": 1.5}, {"rows": 10**6}, {"features": ("margin",)}, {"menu_size": 3}, {"missing": {}},
        {"features": ("margin", "position", "margin")}, {"rows": 0, "rounded_rows": 0},
    ],
)  # fmt: skip
def test_contradictory_terms_are_refused(change):
    certificate = learned(world())
    document = certificate.to_dict()
    document["rule"]["terms"] |= change
    with pytest.raises(CertificateError, match="contradicts the rest"):
        Certificate.from_dict(document)


@pytest.mark.parametrize("change", [{"score": None}, {"terms": None}, {"guardian_sees": "candidates"}])
def test_a_score_without_what_it_needs_is_refused(change):
    with pytest.raises(CertificateError, match=r"contradicts the rest|unknown field|Invalid enum value|Expected"):
        Certificate.from_dict(edited(learned(world()).to_dict(), change))


def test_sessions_have_no_learned_score():
    n = 60
    log = ScoreLog.from_router(
        confidence=np.linspace(0.1, 1, n), primary_grade=np.ones(n), guardian_grade=np.ones(n), id=map(str, range(n))
    )
    sessions = replace(log, extra={"session_turns": np.ones(n)})
    with pytest.raises(OptionError, match="by= and score= out"):
        learned(sessions)


def test_router_form_learns_from_the_confidence():
    rng = np.random.default_rng(0)
    n, confidence = 200, rng.random(200)
    group = rng.choice(["easy", "hard"], n)
    right = rng.random(n) < np.where(group == "easy", 0.95, 0.3)
    log = ScoreLog.from_router(
        confidence=confidence,
        primary_grade=right,
        guardian_grade=np.ones(n),
        id=[f"r{k}" for k in range(n)],
        group=group,
    )
    certificate = learned(log)
    assert "the Primary's answer is given if the query comes" in certificate.guarantee
    assert certificate.summary.startswith("A score learned from these rows says where the Primary's answer is given")
    hard, easy = (certificate.decide([0.0, 0.6], id="x", group=name) for name in ("hard", "easy"))
    assert (hard.deferred, easy.deferred) == (True, False)
    assert verify(certificate, log)


def test_assess_and_evaluate_know_learned_scores():
    log = world(n=600)
    assessment = assess(learned(log.select(range(300))), log.select(range(300, 600)))
    assert 0 < assessment.deferred < 1
    frontier = evaluate(
        log, [0.02, 0.1, 0.2], calibration_size=300, trials=4, boundary="random", score="auto",
        features=Features(menu_size=3),
    )  # fmt: skip
    points = frontier.of("conformal")
    assert points[0].mean("deferred") > points[1].mean("deferred") > points[2].mean("deferred")
    assert all(point.mean("loss") < point.alpha + 0.06 and point.mean("relaxation") is None for point in points)
    assert [point.always_defer for point in points] == [0, 0, 0]
    with pytest.raises(OptionError, match="needs 50 rows or more, and there are 40"):
        evaluate(log, [0.1], calibration_size=40, trials=1, boundary="random", score="auto")


def test_a_trial_decides_as_a_certificate_does():
    """The batch of `evaluate` and the single decisions of a certificate are one rule."""
    log = world(n=400)
    frontier = evaluate(log, [0.1], calibration_size=200, trials=3, seed=5, boundary="random", score="auto", key=KEY)
    from conformal_arbitrage.core.trials import draw_splits

    rng = np.random.default_rng(5)
    splits = draw_splits(400, calibration_size=200, test_size=None, trials=3, rng=rng)
    shares = [learned(log.select(a), 0.1).apply(log.select(b)).deferred.mean() for a, b in splits]
    assert frontier.of("conformal")[0].values("deferred").tolist() == pytest.approx(shares, abs=1e-12)


def test_what_rests_on_a_threshold_is_refused_after_calibration_too():
    certificate = learned(world())
    lines = certificate_lines(certificate)
    assert lines.red is None
    assert "nothing is proved about the luck of such a calibration" in lines.note
    with pytest.raises(OptionError, match="renewal and learned do not go together"):
        refuse_renewal(certificate)
    with pytest.raises(OptionError, match="tighten and learned do not go together"):
        refuse_tightening(certificate)


def test_a_learned_score_that_always_defers_has_no_budget_left():
    rng = np.random.default_rng(0)
    log = ScoreLog.from_arrays(rng.random((60, 2)), rng.random((60, 2)).round(), id=[str(k) for k in range(60)])
    certificate = calibrate(log, 0.01, score="learned", boundary="random", key=b"0123456789abcdef")
    assert certificate.status == "always_defer"
    document = altered(certificate, alpha=0.5, slack=0.5 - 1 / 61).to_dict()
    with pytest.raises(CertificateError, match="slack"):
        Certificate.from_dict(document)
