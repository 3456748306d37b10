"""Logs in which the Guardian was not asked below a floor: what a calibration makes of them, and what it refuses."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage import (
    ArbitrageError,
    Certificate,
    OptionError,
    ScoreLog,
    ScoreLogError,
    assess,
    calibrate,
    compare,
    evaluate,
    inspect,
    learn,
    recommend,
    verify,
)
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli
from conformal_arbitrage.errors import CertificateError
from conformal_arbitrage.evaluation.simulation import simulate
from conformal_arbitrage.scorelog.parts import ScoreParts
from tests.certificates import altered

KEY = b"floor tests' key"


def menus(n, *, seed=0, gains=0.1):
    """Return a log of menus with margins of two decimals, where small leads often lose and some rows gain."""
    rng = np.random.default_rng(seed)
    lead = np.round(rng.random(n), 2)
    net = np.where(rng.random(n) < 0.5 * (1 - lead), 1, np.where(rng.random(n) < gains, -1, 0))
    primary = np.column_stack([np.zeros(n), lead, np.full(n, -1.0)])
    guardian = np.eye(3)[np.where(net == 0, 1, 0)]
    return ScoreLog.from_arrays(
        primary, guardian, id=[f"{seed}-{k}" for k in range(n)], label=np.where(net > 0, 0, 1),
        group=np.where(np.arange(n) % 2, "odd", "even"),
    )  # fmt: skip


def not_asked(log, floor):
    """Return the log as a collection with a floor would have left it."""
    cut = replace(log, floor=floor)
    below = np.repeat(cut.below_floor, cut.sizes)
    return replace(cut, guardian=np.where(below, np.nan, cut.guardian), missing=cut.below_floor)


INCLUDED = {"boundary": "include"}
OPTIONS = [
    INCLUDED,
    {"boundary": "random", "key": KEY},
    {"boundary": "random", "key": KEY, "loss": "net"},
    INCLUDED | {"confidence": 0.9, "zero_one": True},
    INCLUDED | {"confidence": 0.9, "key": KEY},
    INCLUDED | {"confidence": 0.9, "zero_one": True, "dial": True},
    INCLUDED | {"by": "group"},
    INCLUDED | {"cluster": "group", "max_cluster_size": 2},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_floor_below_the_threshold_changes_nothing_of_the_rule(options):
    log = menus(400)
    if "cluster" in options:
        log = replace(log, group=np.array([f"pair {k // 2}" for k in range(400)], dtype=object))
    full, cut = calibrate(log, 0.1, **options), calibrate(not_asked(log, 0.05), 0.1, **options)
    if "dial" in options:
        assert all(stop.relaxation is None or stop.relaxation >= 0.05 for stop in cut.dial)
        assert (cut.relaxation, cut.boundary_u) == (full.relaxation, full.boundary_u)
    else:
        assert cut.rule == full.rule
    assert (cut.evidence.slack, cut.evidence.empirical_risk) == (full.evidence.slack, full.evidence.empirical_risk)
    assert (cut.n, cut.evidence.floor, cut.evidence.missing_guardian_rows) == (400, 0.05, 0)
    assert cut.evidence.not_asked_rows == int((log.primary.reshape(-1, 3)[:, 1] < 0.05).sum()) > 0
    assert "The Guardian was not asked about rows whose margin lies below 0.05" in cut.guarantee


@pytest.mark.parametrize("options", OPTIONS[:-1])
def test_a_threshold_stops_at_the_floor_and_says_so(options):
    cut = calibrate(not_asked(menus(400), 0.9), 0.1, **options)
    thresholds = [cut.relaxation, *(part.relaxation for part in (cut.groups or {}).values())]
    assert min(value for value in thresholds if value is not None) == 0.9
    assert dict(cut.facts())["not asked"].endswith("; it binds: a log without it might ask the Guardian less")
    assert verify(cut, not_asked(menus(400), 0.9))


def test_the_loss_at_the_floor_is_counted_with_the_rows_right_there():
    log = menus(400)
    lead = log.primary.reshape(-1, 3)[:, 1]
    lost = log.guardian.reshape(-1, 3)[:, 0] == 1
    include = calibrate(not_asked(log, 0.9), 0.1, **INCLUDED)
    drawn = calibrate(not_asked(log, 0.9), 0.1, boundary="random", key=KEY)
    assert include.evidence.empirical_risk == lost[lead > 0.9].sum() / 400
    assert drawn.evidence.empirical_risk == lost[lead >= 0.9].sum() / 400
    assert (include.apply(log).deferred == (lead <= 0.9)).all()
    assert (drawn.apply(log).deferred == (lead < 0.9)).all()


def test_what_the_guardian_said_below_the_floor_is_not_looked_at():
    log = menus(300)
    asked = replace(log, floor=0.3)
    for options in OPTIONS[:3]:
        first, second = calibrate(asked, 0.1, **options), calibrate(not_asked(log, 0.3), 0.1, **options)
        assert (first.rule, first.loss, first.guarantee) == (second.rule, second.loss, second.guarantee)


def test_a_missing_score_above_the_floor_is_still_an_error_or_the_worst_case():
    log = not_asked(menus(300), 0.3)
    row = int(np.flatnonzero(~log.below_floor)[0])
    guardian, missing = log.guardian.copy(), log.missing.copy()
    guardian[3 * row : 3 * row + 3], missing[row] = np.nan, True
    log = replace(log, guardian=guardian, missing=missing)
    with pytest.raises(ScoreLogError, match=rf"row {row + 1}: no Guardian score \(1 of 300 rows\)"):
        calibrate(log, 0.1, **INCLUDED)
    assert calibrate(log, 0.1, missing_guardian="worst_case", **INCLUDED).evidence.missing_guardian_rows == 1


def test_options_under_which_a_deferral_may_lose_are_refused():
    log = not_asked(menus(300), 0.3)
    for options, reason in (
        ({"guardian_sees": "candidates"}, "a deferral may lose when the Guardian sees the candidates alone"),
        ({"guardian_sees": "all-restricted-loss"}, "a deferral may lose"),
        ({"loss": lambda row, sight: 0.0, "loss_bound": 1}, "a row that was not asked about does not say how much"),
        ({"grid": 0.1}, "which is not on a grid"),
    ):
        with pytest.raises(OptionError, match=reason):
            calibrate(log, 0.1, **INCLUDED | options)


def test_what_needs_the_loss_of_the_primary_alone_is_refused_with_the_pilot_as_the_remedy():
    log = not_asked(menus(300), 0.3)
    for work in (
        lambda: evaluate(log, [0.1], calibration_size=100),
        lambda: recommend(log, 0.1),
        lambda: compare(log, [0.1], calibration_size=100),
        lambda: simulate(log, 0.1),
        lambda: learn(log),
    ):
        with pytest.raises(ArbitrageError, match="choose on the pilot that the floor came from"):
            work()


def test_a_certificate_whose_threshold_lies_below_its_floor_does_not_load():
    certificate = calibrate(not_asked(menus(300), 0.9), 0.1, **INCLUDED)
    document = altered(certificate, relaxation=0.5).worded().to_dict()
    with pytest.raises(CertificateError, match=r"floor 0\.9 contradicts the rest"):
        Certificate.from_dict(document)
    document = altered(calibrate(menus(300), 0.1, **INCLUDED), not_asked_rows=3).to_dict()
    with pytest.raises(CertificateError, match="not_asked_rows 3 contradicts the rest"):
        Certificate.from_dict(document)


def test_verify_finds_another_floor():
    log = not_asked(menus(300), 0.3)
    certificate = calibrate(log, 0.1, **INCLUDED)
    assert verify(certificate, log)
    assert set(verify(certificate, replace(log, floor=0.31)).differences) >= {"floor", "guarantee"}
    with pytest.raises(ScoreLogError, match="no Guardian score"):
        verify(certificate, replace(log, floor=None))


@pytest.mark.parametrize("name", ["log.parquet", "log.jsonl", "log.csv", "log.jsonl.gz"])
def test_a_file_keeps_the_floor(tmp_path, name):
    log = not_asked(menus(200), 0.3)
    log.write(tmp_path / name)
    read = ScoreLog.read(tmp_path / name)
    assert read.floor == 0.3
    assert calibrate(read, 0.1, **INCLUDED).guarantee == calibrate(log, 0.1, **INCLUDED).guarantee


def test_a_floor_is_about_the_margin_of_one_primary(tmp_path):
    log = not_asked(menus(200), 0.3)
    log.write(tmp_path / "log.parquet")
    another = replace(log, columns=("other", "guardian"), floor=None)
    assert ScoreLog.read(tmp_path / "log.parquet", primary="primary").floor == 0.3
    table = another.to_arrow().append_column("primary", log.to_arrow()["primary"])
    table = table.replace_schema_metadata(log.to_arrow().schema.metadata)
    assert ScoreLog.from_frame(table).floor == 0.3
    other = ScoreLog.from_frame(table, primary="other")
    assert other.floor is None
    with pytest.raises(ScoreLogError, match="no Guardian score"):
        calibrate(other, 0.1, **INCLUDED)


def test_frames_and_arrays_keep_the_floor():
    log = ScoreLog.from_arrays([[0.0, 0.4], [0.0, 0.1]], [[0.0, 1.0], None], floor=0.2)
    assert ScoreLog.from_frame(log.to_pandas()).floor == ScoreLog.from_frame(log.to_arrow()).floor == 0.2
    assert log.select([1]).below_floor.tolist() == [True]
    router = ScoreLog.from_router(confidence=[0.5, None], primary_grade=[1, None], guardian_grade=[1, None], floor=0.2)
    assert (router.below_floor.tolist(), router.above_floor().is_router) == ([False, True], True)
    for floor in (0, -1, float("nan"), float("inf"), "0.2"):
        with pytest.raises(OptionError, match="a floor is a margin above 0"):
            ScoreLog.from_arrays([[0.0, 0.4]], [[0.0, 1.0]], floor=floor)


def test_parts_give_the_certificate_of_the_whole_and_must_share_a_floor(tmp_path):
    log = not_asked(menus(300), 0.3)
    log.select(np.arange(150)).write(tmp_path / "a.parquet")
    log.select(np.arange(150, 300)).write(tmp_path / "b.parquet")
    parts = ScoreParts.read(tmp_path)
    certificate = calibrate(log, 0.1, **INCLUDED)
    assert certificate.differences(calibrate(parts, 0.1, **INCLUDED)) == {}
    assert verify(certificate, parts)
    replace(log, floor=0.2).select(np.arange(150, 300)).write(tmp_path / "b.parquet")
    with pytest.raises(ScoreLogError, match="collected with another floor"):
        ScoreParts.read(tmp_path)


def test_a_learned_score_defers_below_the_floor_and_does_not_learn_from_there(tmp_path):
    log = not_asked(menus(300), 0.3)
    secret = ProjectSecret((b"s" * 32,))
    for loss in (None, "net"):
        options = {"score": "auto", "boundary": "random", "key": secret.boundary_key, "loss": loss}
        certificate = calibrate(log, 0.1, **options)
        assert certificate.learned.rows == 300 - int(log.below_floor.sum())
        certificate.sign(secret).save(tmp_path / "certificate.json")
        loaded = Certificate.load(tmp_path / "certificate.json", secret=secret)
        fresh = menus(200, seed=1)
        lead = fresh.primary.reshape(-1, 3)[:, 1]
        deferred = loaded.apply(fresh).deferred
        assert deferred[lead < 0.3].all()
        assert not deferred[lead >= 0.3].all()
        assert loaded.decide([0.0, 0.29, -1.0], id="x", group="odd").deferred
        assert verify(loaded, log)


def test_an_assessment_counts_no_loss_below_the_floor_of_the_new_rows():
    certificate = calibrate(not_asked(menus(400), 0.3), 0.1, **INCLUDED)
    fresh = menus(400, seed=2)
    full, cut = assess(certificate, fresh), assess(certificate, not_asked(fresh, 0.3))
    assert (cut.loss, cut.missing_guardian_rows, cut.deferred) == (full.loss, 0, full.deferred)
    beyond = assess(certificate, not_asked(fresh, 0.9))  # kept, and not known
    assert beyond.missing_guardian_rows > 0
    assert beyond.loss > full.loss


def test_inspect_says_what_was_not_asked_and_suggests_a_floor_for_a_pilot(tmp_path):
    pilot = inspect(menus(600))
    floors = [use.floor for use in pilot.budgets]
    assert floors == sorted(floors, key=lambda floor: -(floor or 0)), "a larger budget has a lower floor"
    use = next(use for use in pilot.budgets if use.alpha == 0.1)
    assert 0 < use.floor < calibrate(menus(600), 0.1, **INCLUDED).relaxation
    assert pilot.budget_table()[0][-1] == "floor for more rows"
    cut = inspect(not_asked(menus(600), 0.3))
    assert dict(cut.facts())["not asked"].startswith(f"the Guardian in {cut.not_asked_rows} rows below the floor 0.3")
    assert (cut.missing_guardian_rows, cut.worth_routing, cut.problems) == (0, False, pilot.problems)
    assert "for the pilot to say" in cut.verdict
    assert all(use.floor is None for use in cut.budgets)
    assert cut.budgets[-1].deferred >= 0.25, "three in ten rows lie below the floor, and all of these are deferred"
    not_asked(menus(600), 0.3).write(tmp_path / "log.parquet")
    shown = CliRunner().invoke(cli, ["inspect", f"{tmp_path}/*.parquet", "--json"])
    assert json.loads(shown.stdout)["missing_guardian_rows"] == 0


# --- On every small set of rows ---


def left_out_total(certify, margins, losses):
    """Return the total loss of the rows of a set if each is decided by the certificate made from the others."""
    total = 0
    for row in range(len(margins)):
        others = [k for k in range(len(margins)) if k != row]
        relaxation, boundary_u = certify(tuple(margins[k] for k in others), tuple(losses[k] for k in others))
        kept = relaxation is not None and (
            margins[row] > relaxation or (margins[row] == relaxation and boundary_u == 0.0)
        )
        total += losses[row] if kept else 0
    return total


def certifier(*, net, floor):
    """Return what certifies rows of these margins and losses; the floor is fixed, or found by looking at the rows."""
    known = {}

    def certify(margins, losses):
        if (margins, losses) not in known:
            n = len(margins)
            primary = np.column_stack([np.zeros(n), margins])
            guardian = np.eye(2)[[int(loss == 0) for loss in losses]]
            log = ScoreLog.from_arrays(
                primary, guardian, label=[int(loss <= 0) for loss in losses], id=[str(k) for k in range(n)]
            )
            log = not_asked(log, floor(margins, losses) if callable(floor) else floor)
            options = {"loss": "net"} if net else {}
            certificate = calibrate(log, 0.3, boundary="random", key=KEY, **options)
            known[margins, losses] = certificate.relaxation, certificate.boundary_u
        return known[margins, losses]

    return certify


MARGINS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


@pytest.mark.parametrize("floor", [0.25, pytest.param(0.4, marks=pytest.mark.proof)])
def test_on_every_small_set_the_left_out_regret_is_at_most_the_budget(floor):
    certify = certifier(net=False, floor=floor)
    totals = [left_out_total(certify, MARGINS, losses) for losses in product((0, 1), repeat=7)]
    assert max(totals) == 2, "alpha 0.3 allows 2.1 of 7 rows"


@pytest.mark.proof
@pytest.mark.parametrize("floor", [0.25, 0.4])
def test_on_every_small_set_the_left_out_net_loss_is_at_most_the_budget(floor):
    certify = certifier(net=True, floor=floor)
    totals = [left_out_total(certify, MARGINS, losses) for losses in product((-1, 0, 1), repeat=7)]
    assert max(totals) == 2, "alpha 0.3 allows 2.1 of 7 rows"


def luckiest(margins, losses):
    """Plant a floor set after looking: right where the gains of the rows above it outweigh their losses most."""
    order = np.argsort(margins)[::-1]
    running = np.cumsum(np.array(losses)[order])
    kept = order[: int(running.argmin()) + 1]
    return float(np.array(margins)[kept].min())


def test_a_floor_set_after_looking_is_caught_on_a_small_set():
    losses = (1, -1, 1, -1, 1, -1, 1)[::-1]
    assert left_out_total(certifier(net=True, floor=0.25), MARGINS, losses) <= 2
    assert left_out_total(certifier(net=True, floor=luckiest), MARGINS, losses) > 2
