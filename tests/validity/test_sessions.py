"""Sessions: one row each keeps the quota per session; turns as if they were independent, or a coin per turn, do not."""

import numpy as np
import pytest

from conformal_arbitrage import OptionError, ScoreLog, assess, calibrate, verify
from conformal_arbitrage.collecting import records
from conformal_arbitrage.collecting.records import SessionTurn, rows_log, session_log
from conformal_arbitrage.store.events import CalibrationRow
from tests.validity.simulation import keeps

ALPHA, SESSIONS, TIMES, FRESH = 0.1, 40, 800, 200
IDLE, LONG = 3600.0, 10**9


def draw(rng, count):
    """Return confidence in the first answer, and the losses of each session's turns: the first is harmless.

    Later turns lose more, and the Primary is less sure of them, so a rule for single turns would defer just those; a
    session cannot.
    """
    first = np.round(rng.random(count), 6)
    length = rng.integers(2, 8, count)
    share = 0.9 * (1 - first)
    losses = [np.concatenate([[0.0], rng.random(k - 1) < p]) for k, p in zip(length, share, strict=True)]
    return first, losses


def turns_of(first, losses, rng):
    """Yield the turns as a gateway records them."""
    for k, (sure, own) in enumerate(zip(first, losses, strict=True)):
        for place, lost in enumerate(own):
            confidence = sure if place == 0 else rng.uniform(0.0, 0.3)
            yield SessionTurn(
                session=f"s{k}", at=float(k), confidence=confidence, primary_grade=1 - lost, guardian_grade=1.0
            )


def by_session(turns, rng):
    return session_log(turns, idle=IDLE, now=LONG)


def by_turn(turns, rng):
    """Plant rows of single turns, as if each were a query of its own."""
    return ScoreLog.from_router(
        confidence=[t.confidence for t in turns],
        primary_grade=[t.primary_grade for t in turns],
        guardian_grade=[t.guardian_grade for t in turns],
    )


def coin_per_turn(turns, rng):
    """Plant an audit coin per turn: a session enters with the turns that were drawn, the first of them as its first."""
    drawn = [turn for turn in turns if rng.random() < 0.2]
    return session_log(drawn or turns, idle=IDLE, now=LONG)


def per_session(rows):
    """Return the mean loss of a session over calibrations and new sessions, and its standard error."""
    rng, means = np.random.default_rng(7), []
    for _ in range(TIMES):
        log = rows(list(turns_of(*draw(rng, SESSIONS), rng)), rng)
        threshold = calibrate(log, ALPHA).relaxation
        first, losses = draw(rng, FRESH)
        kept = np.zeros(FRESH, dtype=bool) if threshold is None else first > threshold
        means.append(np.mean([own.mean() * stands for own, stands in zip(losses, kept, strict=True)]))
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


def test_sessions_keep_the_quota_per_session():
    measured = per_session(by_session)
    assert keeps(ALPHA, measured), measured
    assert measured[0] > ALPHA - 0.04  # and do not waste it


@pytest.mark.parametrize("planted", [by_turn, coin_per_turn])
def test_turns_as_rows_and_a_coin_per_turn_are_caught(planted):
    measured = per_session(planted)
    assert not keeps(ALPHA, measured), measured


def some(count=60, **more):
    return [
        SessionTurn(session=f"s{k // 2}", at=float(k), confidence=0.5, primary_grade=0.5, guardian_grade=1.0, **more)
        for k in range(count)
    ]


def test_a_row_has_the_first_confidence_and_the_mean_loss():
    turns = [
        SessionTurn(session="a", at=1.0, confidence=0.7, primary_grade=0.0, guardian_grade=1.0),
        SessionTurn(session="b", at=2.0, confidence=0.2, primary_grade=1.0, guardian_grade=0.0),
        SessionTurn(session="a", at=3.0, confidence=0.9, primary_grade=1.0, guardian_grade=0.5),
        SessionTurn(session="a", at=4.0, confidence=0.9, primary_grade=0.0, guardian_grade=1.0, primary_failed=True),
    ]
    log = session_log(turns, idle=IDLE, now=LONG)
    assert log.id.tolist() == ["a", "b"]
    assert log.primary.tolist() == [0.0, 0.7, 0.0, 0.2]
    assert log.guardian.tolist() == [1.0, pytest.approx(2 / 3), 1.0, 1.0]
    assert log.extra["session_turns"].tolist() == ["3", "1"]


def test_an_ungraded_turn_makes_its_session_missing():
    turns = some(3)
    turns[0] = SessionTurn(session="s0", at=0.0, confidence=0.5, primary_grade=float("nan"), guardian_grade=1.0)
    assert session_log(turns, idle=IDLE, now=LONG).missing.tolist() == [True, False]


def test_sessions_that_began_after_one_that_may_go_on_are_left_out():
    from conformal_arbitrage.errors import StoreError

    long = [SessionTurn(session="long", at=at, confidence=0.5, primary_grade=1, guardian_grade=1) for at in (5.5, 9.0)]
    turns = sorted([*some(20), *long], key=lambda turn: turn.at)
    assert session_log(turns, idle=IDLE, now=LONG).id.tolist()[:4] == ["s0", "s1", "s2", "long"]
    assert session_log(turns, idle=10.0, now=18.9).id.tolist() == ["s0", "s1", "s2"]
    with pytest.raises(StoreError, match="no session is over yet"):
        session_log(turns, idle=30.0, now=19.0)


def test_the_certificate_says_its_unit_and_other_losses_are_refused():
    log = session_log(some(), idle=IDLE, now=LONG, identities={"primary": {"kind": "a"}, "guardian": {"kind": "b"}})
    certificate = calibrate(log, 0.2)
    assert "session" in certificate.kinds
    assert "30 logged sessions" in certificate.guarantee
    assert "The unit is a session, not a turn" in certificate.guarantee
    assert certificate.identities["session"] == {"idle": IDLE}
    assert verify(certificate, log).ok
    assert assess(certificate, session_log(some(40), idle=IDLE, now=LONG)).rows == 20
    with pytest.raises(OptionError, match="assessed on rows of sessions"):
        assess(certificate, by_turn(some(), None))
    with pytest.raises(OptionError, match="rows that are sessions"):
        calibrate(log, 0.2, cluster="session_turns", max_cluster_size=100)
    with pytest.raises(OptionError, match="rows that are sessions"):
        calibrate(log, 0.2, loss=lambda row, sight: 0.0, loss_bound=1)


def test_a_session_log_survives_a_file(tmp_path):
    log = session_log(some(), idle=IDLE, now=LONG)
    for name in ("log.parquet", "log.jsonl"):
        log.write(tmp_path / name)
        assert "session" in calibrate(ScoreLog.read(tmp_path / name), 0.2).kinds


# --- Turns that are decided one by one, in shadow or safe mode or under audit, and that resemble each other ---


def conversations(rng, count):
    """Return confidence, loss and session of every turn: a conversation is hard or easy as a whole."""
    name = np.repeat(np.arange(count), rng.integers(5, 11, count))
    confidence = np.round(rng.random(count), 6)
    loss = (rng.random(count) < 0.9 * (1 - confidence)).astype(float)
    return confidence[name], loss[name], name


def renewed_loss(times=1000, count=20):
    """Return the loss per turn of new conversations under certificates from stored rows, and its standard error."""
    rng, means = np.random.default_rng(29), []
    like = calibrate(ScoreLog.from_arrays([[0.9, 0.1]] * 40, [[1.0, 0.0]] * 40), ALPHA)
    for run in range(times):
        rows = [
            CalibrationRow(
                id=f"{run}-{k}", size=2, primary=(sure, 0.0), guardian=(1 - lost, lost), named=f"{run}-{name}"
            )
            for k, (sure, lost, name) in enumerate(zip(*conversations(rng, count), strict=True))
        ]
        threshold = calibrate(rows_log(rows, like, None, source="the stored rows"), ALPHA).relaxation
        confidence, loss, _ = conversations(rng, 200)
        alone = np.zeros(len(loss)) if threshold is None else confidence > threshold
        means.append(float((alone * loss).mean()))
    return float(np.mean(means)), float(np.std(means, ddof=1) / times**0.5)


def test_one_turn_of_each_named_session_keeps_the_quota():
    measured = renewed_loss()
    assert keeps(ALPHA, measured), measured
    assert measured[0] > ALPHA - 0.04  # and does not waste it


def test_all_turns_of_named_sessions_are_caught(monkeypatch):
    monkeypatch.setattr(records, "one_of_each_session", list)
    measured = renewed_loss()
    assert not keeps(ALPHA, measured), measured


def test_the_turn_that_stays_is_drawn_by_its_id_and_not_by_its_place():
    rows = [CalibrationRow(id=f"{s}-{k}", size=2, named=f"s{s}") for s in range(900) for k in range(3)]
    rows.append(CalibrationRow(id="alone", size=2))
    kept = records.one_of_each_session(rows)
    assert {row.id for row in kept} == {row.id for row in records.one_of_each_session(rows[::-1])}
    assert [row.named for row in kept] == [*(f"s{s}" for s in range(900)), None]
    places = np.bincount([int(row.id.rpartition("-")[2]) for row in kept[:-1]])
    assert places.min() > 240
