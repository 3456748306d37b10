import re
from fractions import Fraction
from math import floor

import numpy as np
import pytest

from conformal_arbitrage import OptionError, ScoreLog, Usage, calibrate, evaluate
from conformal_arbitrage.core.trials import draw_splits
from conformal_arbitrage.scorelog.log import CostOptions, costs_of


def random_log(n=240, seed=0, *, ragged=True, decimals=2):
    """Return a log with ragged, tied scores, tokens, groups and two outcomes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, n) if ragged else np.full(n, 4)
    primary = [np.round(rng.random(k), decimals) for k in sizes]
    guardian = [np.round(rng.random(k), 2) for k in sizes]
    return ScoreLog.from_arrays(
        primary,
        guardian,
        id=[f"q{k}" for k in range(n)],
        label=[int(rng.integers(k)) for k in sizes],
        group=rng.choice(["x", "y", "z"], n),
        outcomes={"harm": [rng.random(k) for k in sizes]},
        primary_usage=Usage(input_tokens=rng.integers(50, 200, n), output_tokens=rng.integers(1, 9, n)),
        guardian_usage=Usage(input_tokens=rng.integers(50, 200, n), output_tokens=rng.integers(1, 9, n)),
    )


def slow(log, alphas, sizes, trials, seed, *, prices, sees, **options):
    """Run the same trials one row at a time, with a certificate each."""
    rng = np.random.default_rng(seed)
    figures = ("loss", "deferred", "candidates", "cost", "correct", "harm")
    results = {alpha: {name: [] for name in (*figures, "relaxation")} for alpha in alphas}
    splits = draw_splits(len(log), calibration_size=sizes[0], test_size=sizes[1], trials=trials, rng=rng)
    for calibration, test in splits:
        for alpha in alphas:
            certificate = calibrate(log.select(calibration), alpha, guardian_sees=sees, **options)
            per_row = [slow_row(log.row(int(k)), log, int(k), certificate, prices) for k in test]
            for name, values in zip(figures, zip(*per_row, strict=True), strict=True):
                results[alpha][name].append(np.mean(values))
            results[alpha]["relaxation"].append(np.nan if certificate.relaxation is None else certificate.relaxation)
    return results


def slow_row(row, log, k, certificate, prices):
    kept = certificate.candidates(row.primary, id=row.id)
    deferred = len(kept) > 1
    everything = np.arange(len(row.primary))
    shown = everything if certificate.guardian_sees != "candidates" and deferred else kept
    measured = kept if certificate.guardian_sees == "all-restricted-loss" else shown
    loss = row.guardian.max() - row.guardian[measured].max()
    action = shown[np.argmax(row.guardian[shown])] if deferred else kept[0]
    cost = prices[0] @ [log.primary_usage.input_tokens[k], log.primary_usage.output_tokens[k]]
    if deferred:
        tokens = floor(
            Fraction(int(log.guardian_usage.input_tokens[k]))
            * Fraction(len(shown) + len(everything), 2 * len(everything))
        )
        cost += prices[1] @ [tokens, log.guardian_usage.output_tokens[k]]
    return loss, deferred, len(kept), cost, action == row.label, row.lists["harm"][action]


PRICES = np.array([[0.1, 0.4], [2.0, 8.0]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"guardian_sees": "candidates"},
        {"guardian_sees": "all-restricted-loss"},
        {"boundary": "include"},
        {"boundary": "include", "guardian_sees": "candidates"},
        {"guardian_sees": "candidates", "grid": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("ragged", [True, False])
def test_vectorized_trials_equal_trials_one_row_at_a_time(options, ragged):
    log, alphas = random_log(ragged=ragged), [0.005, 0.05, 0.12, 0.3]
    options = options if "boundary" in options else {"key": b"a key", **options}
    fast = evaluate(
        log, alphas, calibration_size=150, test_size=60, trials=4, seed=3,
        primary_price=tuple(PRICES[0]), guardian_price=tuple(PRICES[1]), **options,
    )  # fmt: skip
    sees = options.get("guardian_sees", "all")
    rest = {k: v for k, v in options.items() if k != "guardian_sees"}
    expected = slow(log, alphas, (150, 60), 4, 3, prices=PRICES / 1e6, sees=sees, **rest)
    for point in fast.of("conformal"):
        wanted = expected[point.alpha]
        for name in ("loss", "deferred", "candidates", "correct", "harm"):
            assert np.allclose(point.values(name), wanted[name], atol=1e-12), (point.alpha, name)
        assert np.array_equal(point.values("relaxation"), wanted["relaxation"], equal_nan=True)
        assert np.allclose(point.values("cost_per_1000"), 1000 * np.array(wanted["cost"]))
    assert fast.of("conformal")[0].always_defer == 1.0


def test_baselines_are_the_single_models_and_their_mixtures():
    log = random_log()
    frontier = evaluate(
        log, [0.1], calibration_size=100, trials=3, probabilities=[0.25], primary_cost=1, guardian_cost=20, key=b"a key"
    )
    (primary,), (guardian,), (routing,) = frontier.of("primary"), frontier.of("guardian"), frontier.of("random")
    splits = list(draw_splits(240, calibration_size=100, test_size=None, trials=3, rng=np.random.default_rng(0)))
    for t, (_, test) in enumerate(splits):
        rows = [log.row(int(k)) for k in test]
        tops = [int(np.argmax(r.primary)) for r in rows]
        best = [int(np.argmax(r.guardian)) for r in rows]
        assert primary.values("correct")[t] == pytest.approx(
            np.mean([a == r.label for a, r in zip(tops, rows, strict=True)])
        )
        assert guardian.values("correct")[t] == pytest.approx(
            np.mean([a == r.label for a, r in zip(best, rows, strict=True)])
        )
        regret = [r.guardian.max() - r.guardian[a] for a, r in zip(tops, rows, strict=True)]
        assert primary.values("loss")[t] == pytest.approx(np.mean(regret))
        assert routing.values("loss")[t] == pytest.approx(0.75 * np.mean(regret))
    assert guardian.mean("loss") == pytest.approx(0)
    assert (primary.mean("deferred"), guardian.mean("deferred"), routing.mean("deferred")) == (0, 1, 0.25)
    assert (primary.mean("cost_per_1000"), guardian.mean("cost_per_1000")) == (1000, 20000)
    assert routing.mean("cost_per_1000") == pytest.approx(0.75 * 1000 + 0.25 * 20000)


def test_delta_is_measured_on_the_chord_trial_by_trial():
    frontier = evaluate(random_log(), [0.1], calibration_size=100, trials=5, primary_cost=1, guardian_cost=20)
    (point,), (routing,) = frontier.of("conformal"), frontier.of("cost_matched")
    (primary,), (guardian,) = frontier.of("primary"), frontier.of("guardian")
    q = np.clip((point.values("cost_per_1000") - 1000) / 19000, 0, 1)
    chord = (1 - q) * primary.values("correct") + q * guardian.values("correct")
    assert np.allclose(point.values("delta"), point.values("correct") - chord)
    assert np.allclose(routing.values("correct"), chord)
    assert routing.probability == pytest.approx(q.mean())
    assert np.allclose(routing.values("cost_per_1000")[q < 1], point.values("cost_per_1000")[q < 1])


def test_delta_may_be_measured_at_the_same_loss_and_in_another_outcome():
    frontier = evaluate(random_log(), [0.1], calibration_size=100, trials=5, delta_x="loss", delta_of="harm")
    (point,), (primary,), (guardian,) = (frontier.of(p) for p in ("conformal", "primary", "guardian"))
    q = 1 - point.values("loss") / primary.values("loss")
    chord = (1 - q) * primary.values("harm") + q * guardian.values("harm")
    assert np.allclose(point.values("delta"), point.values("harm") - chord)


def test_undefined_figures_are_null():
    document = evaluate(random_log(), [0.1, 0.001], calibration_size=100, trials=2).to_dict()
    primary, guardian, conformal, deferring = document["points"]
    assert [p["policy"] for p in document["points"]] == ["primary", "guardian", "conformal", "conformal"]
    for point in document["points"]:
        assert point["cost_per_1000"] is None
        assert point["delta"] is None
    assert primary["relaxation"] is None
    assert guardian["candidates"] is None
    assert set(conformal["relaxation"]) == {"mean", "std"}
    assert deferring["relaxation"] is None
    assert deferring["always_defer"] == 1
    assert deferring["loss"]["mean"] == pytest.approx(0, abs=1e-15)
    dearer_primary = evaluate(random_log(), [0.1], calibration_size=100, trials=2, primary_cost=3, guardian_cost=2)
    assert dearer_primary.of("conformal")[0].values("delta") is None
    assert dearer_primary.of("cost_matched") == ()


def test_the_document_has_the_documented_keys_and_trials_on_request():
    frontier = evaluate(random_log(), [0.1], calibration_size=100, trials=2, primary_cost=1, guardian_cost=2)
    assert {"n", "trials", "points"} <= set(frontier.to_dict())
    keys = {
        "policy", "alpha", "probability", "guardian_sees", "boundary", "loss", "relaxation", "deferred", "candidates",
        "cost_per_1000", "outcomes", "delta",
    }  # fmt: skip
    for point in frontier.to_dict()["points"]:
        assert keys <= set(point)
        assert set(point["outcomes"]) == {"correct", "harm"}
    conformal = frontier.to_dict(per_trial=True)["points"][2]
    assert conformal["loss"]["trials"] == frontier.of("conformal")[0].values("loss").tolist()
    assert conformal["loss"]["mean"] == pytest.approx(np.mean(conformal["loss"]["trials"]))
    assert conformal["loss"]["std"] == pytest.approx(np.std(conformal["loss"]["trials"], ddof=1))
    assert "trials" not in frontier.to_dict()["points"][2]["loss"]


def test_the_seed_determines_the_trials():
    a, b, c = (
        evaluate(random_log(), [0.1], calibration_size=100, trials=3, seed=s, boundary="random") for s in (1, 1, 2)
    )
    assert a.to_dict(per_trial=True) == b.to_dict(per_trial=True)
    assert a.to_dict(per_trial=True) != c.to_dict(per_trial=True)


def test_missing_guardian_rows_count_as_the_bound_in_loss_and_not_in_outcomes():
    log = random_log(ragged=False)
    guardian = np.where(np.arange(240)[:, None] % 10 == 0, np.nan, log.guardian.reshape(240, 4))
    holes = ScoreLog.from_arrays(log.primary.reshape(240, 4), guardian, id=log.id, label=log.label)
    frontier = evaluate(holes, [0.2], calibration_size=100, trials=3, missing_guardian="worst_case", loss_bound=1)
    primary, known = frontier.of("primary")[0], ~holes.missing
    assert primary.mean("loss") > evaluate(log, [0.2], calibration_size=100, trials=3).of("primary")[0].mean("loss")
    whole = evaluate(holes.select(known), [0.2], calibration_size=215, trials=1, test_size=1)
    assert whole.n == 216
    guardian_only = frontier.of("guardian")[0]
    best = holes.guardian.reshape(240, 4)[known].argmax(axis=1) == holes.label[known]
    assert guardian_only.mean("correct") == pytest.approx(best.mean(), abs=0.05)
    assert guardian_only.mean("loss") == pytest.approx(0, abs=1e-12)


def test_a_balanced_sample_is_drawn_before_the_split():
    log = random_log()
    options = {"calibration_size": 30, "trials": 3, "balance_by": "group", "sample_size": 60}
    frontier = evaluate(log, [0.2], **options)
    assert frontier.test_size == 30
    with pytest.raises(OptionError, match="no column 'subject'"):
        evaluate(log, [0.2], **(options | {"balance_by": "subject"}))
    with pytest.raises(OptionError, match="belong together"):
        evaluate(log, [0.2], calibration_size=30, sample_size=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration_size": 240}, "calibration size of 240"),
        ({"calibration_size": 100, "trials": 0}, "trials"),
        ({"calibration_size": 100, "probabilities": [1.5]}, "probability"),
        ({"calibration_size": 100, "primary_cost": 1}, "the cost of one model is missing"),
        ({"calibration_size": 100, "primary_cost": -1, "guardian_cost": 1}, "0 or more"),
        ({"calibration_size": 100, "primary_cost": 1, "primary_price": (1, 1)}, "not both"),
        ({"calibration_size": 100, "delta_x": "time"}, "delta_x"),
        ({"calibration_size": 100, "guardian_sees": "nothing"}, "guardian_sees"),
    ],
)
def test_an_invalid_sweep_is_rejected(options, message):
    with pytest.raises(OptionError, match=message):
        evaluate(random_log(), [0.1], **options)


def test_a_price_needs_tokens():
    log = ScoreLog.from_arrays([[0.1, 0.2]], [[0.1, 0.2]])
    with pytest.raises(OptionError, match="primary_input_tokens"):
        costs_of(log, CostOptions(primary_price=(1, 1), guardian_price=(1, 1)))


def test_cost_columns_are_used_unchanged():
    log = ScoreLog.from_arrays(
        [[0.1, 0.2]] * 3, [[0.1, 0.2]] * 3, primary_usage=Usage(cost=[1, 2, 3]), guardian_usage=Usage(cost=[10, 20, 30])
    )
    costs = costs_of(log)
    assert costs.primary.tolist() == [1, 2, 3]
    assert costs.guardian.of(np.array([1]), 1, 2).tolist() == [20]


def test_cost_matched_random_routing_agrees_with_simulated_routing():
    log = random_log(ragged=False)
    frontier = evaluate(log, [0.1], calibration_size=100, trials=1, primary_cost=1, guardian_cost=20)
    (routing,) = frontier.of("cost_matched")
    ((_, test),) = draw_splits(240, calibration_size=100, test_size=None, trials=1, rng=np.random.default_rng(0))
    rng = np.random.default_rng(1)
    top = log.primary.reshape(240, 4)[test].argmax(axis=1) == log.label[test]
    best = log.guardian.reshape(240, 4)[test].argmax(axis=1) == log.label[test]
    simulated = [np.where(rng.random(140) < routing.probability, best, top).mean() for _ in range(4000)]
    assert routing.mean("correct") == pytest.approx(np.mean(simulated), abs=5 * np.std(simulated) / 4000**0.5)


def test_on_the_real_logs_own_loss_beats_random_routing_where_the_paper_does_not(shared):
    log = ScoreLog.read(shared / "mmlu-llama13b-gpt4.parquet").binarized()
    options = {"calibration_size": 1000, "primary_cost": 1, "guardian_cost": 20}
    paper, ours = (
        evaluate(log, [0.15], guardian_sees=sees, **options).of("conformal")[0] for sees in ("candidates", "all")
    )
    assert paper.mean("delta") == pytest.approx(-0.032, abs=0.005)
    assert ours.mean("delta") == pytest.approx(0.023, abs=0.005)
    assert ours.mean("loss") < 0.155


@pytest.mark.parametrize("name", ["loss", "deferred", "candidates", "delta"])
def test_an_outcome_cannot_have_the_name_of_a_figure(name):
    log = ScoreLog.from_arrays([[0.1, 0.2]] * 9, [[0, 1]] * 9, outcomes={name: [[1, 2]] * 9})
    with pytest.raises(OptionError, match=f"cannot be named '{name}'"):
        evaluate(log, [0.2], calibration_size=5)


@pytest.mark.parametrize("name", ["known", "worth", "leg"])
def test_an_outcome_may_have_any_other_name(name):
    log = ScoreLog.from_arrays([[0.1, 0.2]] * 9, [[0, 1]] * 9, outcomes={name: [[1, 2]] * 9})
    assert evaluate(log, [0.5], calibration_size=5, trials=1).of("guardian")[0].mean(name) == 2


def test_unknown_outcomes_are_left_out_of_the_mean_row_by_row():
    worth = [[1.0, 0.0]] * 9 + [[np.nan, 0.0]]
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 10, [[1, 0]] * 10, outcomes={"correct": worth})
    frontier = evaluate(log, [0.4], calibration_size=4, trials=5)
    assert [point.mean("correct") for point in frontier.points] == [1.0, 1.0, 1.0]
    grades = {"primary_grade": [1.0] * 39 + [np.nan], "guardian_grade": [1.0] * 40}
    router = ScoreLog.from_router(confidence=np.linspace(0, 1, 40), **grades)
    frontier = evaluate(router, [0.3], calibration_size=25, missing_guardian="worst_case")
    assert [point.mean("correct") for point in frontier.points] == [1.0, 1.0, 1.0]


def test_a_guardian_alone_has_exactly_no_loss():
    frontier = evaluate(random_log(), [0.1], calibration_size=100, trials=5)
    assert frontier.of("guardian")[0].values("loss").tolist() == [0.0] * 5


def test_a_log_without_any_guardian_score_can_only_defer():
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 30, [None] * 30, label=[0] * 30)
    frontier = evaluate(log, [0.1], calibration_size=20, trials=2, missing_guardian="worst_case")
    (conformal,) = frontier.of("conformal")
    assert (conformal.mean("deferred"), conformal.mean("correct")) == (1.0, None)


def test_delta_is_undefined_if_outcomes_are_unknown():
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 40, [[1, 0]] * 39 + [None], label=[0] * 40)
    options = {"missing_guardian": "worst_case", "primary_cost": 1, "guardian_cost": 20}
    assert evaluate(log, [0.3], calibration_size=20, trials=2, **options).of("conformal")[0].values("delta") is None


def test_alphas_must_be_a_list():
    with pytest.raises(OptionError, match="list of budgets"):
        evaluate(random_log(), 0.1, calibration_size=100)


def test_built_in_and_user_defined_regret_agree_on_the_primary_alone():
    log = ScoreLog.from_arrays([[0.5, 0.5]] * 40, [[0, 1]] * 40)

    def regret(row, sight):
        return max(row.guardian) - max(row.guardian[sight])

    built_in, own = (
        evaluate(log, [0.3], calibration_size=20, trials=1, loss=loss, loss_bound=1) for loss in (None, regret)
    )
    assert built_in.of("primary")[0].mean("loss") == own.of("primary")[0].mean("loss") == 1.0


def test_two_dials_on_one_page_have_buttons_of_their_own(science):
    frontier = evaluate(science, [0.05, 0.1], calibration_size=500, trials=2)
    first, second = (frontier.dial()._repr_html_() for _ in range(2))
    names = [set(re.findall(r' name="(\w+)"', page)) for page in (first, second)]
    assert [len(name) for name in names] == [1, 1]
    assert names[0].isdisjoint(names[1])
    assert "alpha 0.05" in first
    assert "<script" not in first
