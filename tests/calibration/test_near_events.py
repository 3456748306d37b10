"""Events kept in the first pass: whatever was guessed, rightly or wrongly, the certificate is that of all rows in memory."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import OptionError, ScoreLog, ScoreLogError, ScoreParts, calibrate
from conformal_arbitrage.calibration import calibrate as parts_module
from conformal_arbitrage.core.risk import Bracket, Collect, Fold
from tests.calibration.test_parts import KEY, OPTIONS, same, some_log, write_parts

pytestmark = pytest.mark.proof
GUESSES = {
    "sampled": None,
    "nothing": (),
    "too low": (Bracket(0.0, 1e-9, 2),),
    "too high": (Bracket(5.0, inf, 2),),
    "two halves": (Bracket(0.0, 0.2, 2), Bracket(0.2, 1.0, 2)),
    "one float": (Bracket(0.25, 0.25, 2),),
}


def large(monkeypatch):
    """Let a log count as a large one: a guess is made, and few buckets hold a single gap."""
    monkeypatch.setattr(parts_module, "FEW_ROWS", 0)
    monkeypatch.setattr(parts_module, "_FIRST", 16)


@pytest.fixture(params=GUESSES.items(), ids=GUESSES)
def guessed(request, monkeypatch):
    """Make every log a large one, with a guess of its own."""
    large(monkeypatch)
    monkeypatch.setattr(parts_module, "_LEAST", 16)
    name, ranges = request.param
    if ranges is not None:
        monkeypatch.setattr(parts_module, "likely_ranges", lambda *_: ranges)
    return name


def test_no_guess_changes_a_certificate(tmp_path, guessed):
    log = some_log(300, kind="coarse" if guessed == "nothing" else "unit")
    parts = ScoreParts.read(write_parts(log, tmp_path / "p", [100, 101]))
    for keywords in OPTIONS:
        assert not same(calibrate(log, 0.2, **keywords), calibrate(parts, 0.2, **keywords)), keywords
    dial = {"confidence": "0.9", "dial": True}
    assert not same(calibrate(log.binarized(), 0.2, **dial), calibrate(parts.binarized(), 0.2, **dial))


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None)
def test_hostile_logs_with_hostile_guesses(tmp_path_factory, data, seed):
    rng = np.random.default_rng(seed)
    log = some_log(int(rng.integers(2, 120)), seed, kind=str(rng.choice(["unit", "coarse", "single"])), missing=0.1)
    parts = ScoreParts.read(write_parts(log, tmp_path_factory.mktemp("p"), rng.integers(0, len(log) + 1, 2).tolist()))
    keywords = {**data.draw(st.sampled_from(OPTIONS)), "missing_guardian": "worst_case"}
    alpha = data.draw(st.sampled_from(["0.9", "0.5", "0.2", "0.05", "0.01"]))
    expected = calibrate(log, alpha, **keywords)
    near = expected.relaxation or 0.0
    ends = [0.0, np.nextafter(near, 0), near, np.nextafter(near, 1), 0.3, 1.0]
    low, high = sorted(data.draw(st.tuples(st.sampled_from(ends), st.sampled_from(ends))))
    with pytest.MonkeyPatch.context() as patched:
        large(patched)
        patched.setattr(parts_module, "likely_ranges", lambda *_: (Bracket(low, high, 2),))
        assert not same(expected, calibrate(parts, alpha, **keywords))


def plain_log(rows, seed=0):
    rng = np.random.default_rng(seed)
    return ScoreLog.from_arrays(rng.random((rows, 3)), rng.random((rows, 3)), id=[f"q{k}" for k in range(rows)])


def passes(parts, alpha, *, boundary="include", **keywords):
    """Return a certificate and how many passes it took: for draws it takes one more."""
    lines = []
    certificate = calibrate(parts, alpha, boundary=boundary, progress=lines.append, **keywords)
    return certificate, len(lines)


@pytest.mark.parametrize("sees", ["all", "candidates"])
def test_one_pass_is_enough_where_a_sample_tells_where_the_threshold_is(tmp_path, monkeypatch, sees):
    monkeypatch.setattr(parts_module, "_FIRST", 64)  # so that no bucket holds a single gap
    log = plain_log(100_000)
    parts = ScoreParts.read(write_parts(log, tmp_path / "p", [30_000, 31_000]), rows_per_part=20_000)
    certificate, seen = passes(parts, "0.05", guardian_sees=sees)
    assert seen == 1
    assert not same(calibrate(log, "0.05", guardian_sees=sees, boundary="include"), certificate)
    drawn, seen = passes(parts, "0.05", guardian_sees=sees, boundary="random")
    assert seen == 2
    assert not same(calibrate(log, "0.05", guardian_sees=sees), drawn)


def test_rows_that_are_sorted_mislead_the_sample_and_a_second_pass_puts_it_right(tmp_path, monkeypatch):
    large(monkeypatch)
    log = plain_log(20_000)
    worth = log.guardian.reshape(-1, 3)
    regret = worth.max(axis=1) - worth[np.arange(len(log)), log.primary.reshape(-1, 3).argmax(axis=1)]
    log = log.select(np.argsort(regret))
    parts = ScoreParts.read(write_parts(log, tmp_path / "p", []))
    certificate, seen = passes(parts, "0.05")
    assert seen == 2
    assert not same(calibrate(log, "0.05", boundary="include"), certificate)


def test_scores_of_unusual_size_are_surveyed_twice_with_one_guess(tmp_path, monkeypatch):
    large(monkeypatch)
    rng = np.random.default_rng(3)
    log = ScoreLog.from_arrays(rng.random((5000, 3)) * 50, rng.random((5000, 3)) * 2e5)
    parts = ScoreParts.read(write_parts(log, tmp_path / "p", [1500]))
    for sees in ("all", "candidates"):
        keywords = {"loss_bound": 200_000, "guardian_sees": sees}
        assert not same(calibrate(log, 20_000, **keywords), calibrate(parts, 20_000, **keywords))


def test_a_guess_that_would_keep_too_much_keeps_nothing(tmp_path, monkeypatch):
    large(monkeypatch)
    monkeypatch.setattr(parts_module, "_KEPT", 10)
    log = plain_log(5000)
    certificate, seen = passes(ScoreParts.read(write_parts(log, tmp_path / "p", [1500])), "0.05")
    assert seen == 2
    assert not same(calibrate(log, "0.05", boundary="include"), certificate)


def test_samples_are_spread_over_parts_and_never_leave_them(tmp_path):
    log = plain_log(3000)
    parts = ScoreParts.read(write_parts(log, tmp_path / "p", [1, 2, 2500])).parts()
    sampled = parts_module.sampled_parts(parts)
    assert len(sampled) == 8
    assert {one.file.path for one in sampled} == {one.file.path for one in parts}
    assert all(0 <= one.start < one.stop <= one.file.rows for one in sampled)


def test_only_what_was_kept_is_answered():
    near = parts_module.NearEvents((Bracket(0.1, 0.5, 2),))
    near.add(np.array([0.2, 0.4]), np.array([3, 4]))
    near.add(np.array([0.2, 0.3]), np.array([1, 1]))
    gap, drop = near.answer(Collect((Bracket(0.2, 0.3, 2),)))
    assert (gap.tolist(), drop.tolist()) == ([0.2, 0.3], [4, 1])
    assert near.answer(Collect((Bracket(0.2, 0.3, 2), Bracket(0.4, 0.6, 2)))) is None
    assert near.answer(Fold((Bracket(0.2, 0.3, 2),))) is None


def test_a_wrong_budget_is_refused_before_any_row_is_read(tmp_path):
    lines = []
    parts = ScoreParts.read(write_parts(plain_log(50), tmp_path / "p", []))
    with pytest.raises(OptionError, match="alpha must lie above 0 and below the loss bound 1"):
        calibrate(parts, 2, progress=lines.append)
    assert not lines


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("ids", [["q0", "q0"], ["x" * 300, "y" * 300, "x" * 300]], ids=["short", "long"])
def test_a_repeated_id_is_refused_wherever_it_is(tmp_path, engine, ids):
    log = plain_log(60)
    again = replace(plain_log(len(ids), seed=1), id=np.array(ids, np.dtypes.StringDType()))
    folder = write_parts(log, tmp_path / "p", [30])
    for number in range(len(ids)):
        again.select([number]).write(folder / f"x-{number}.parquet")
    with pytest.raises(ScoreLogError, match=f"'{ids[0]}' is the id of more than one row"):
        calibrate(ScoreParts.read(folder), 0.2, engine=engine)


def test_ids_without_keys_are_compared_by_duckdb(tmp_path, monkeypatch):
    log = replace(plain_log(40), id=np.array([f"{k}" * 150 for k in range(10, 50)], np.dtypes.StringDType()))
    parts = ScoreParts.read(write_parts(log, tmp_path / "p", [20]))
    expected = calibrate(log, 0.2, boundary="random", key=KEY)
    assert not same(expected, calibrate(parts, 0.2, boundary="random", key=KEY))
    monkeypatch.setattr(parts_module, "_KEYS_AT_ONCE", 10)
    assert not same(expected, calibrate(parts, 0.2, boundary="random", key=KEY))
