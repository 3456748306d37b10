"""A certificate's sentence, followed by hand: whoever does what it says about two answers keeps the budget."""

import re

import numpy as np

from conformal_arbitrage import ProjectSecret, ScoreLog, calibrate
from conformal_arbitrage.collecting.records import SessionTurn, session_log
from tests.validity.simulation import keeps

N, ALPHA, TIMES, FRESH = 60, 0.05, 400, 200
RULE = re.compile(
    r"the Primary's is given where its confidence is above (\S+), compared after it is rounded to (\d+) significant digits"
)


def answers(rng, n):
    """Return confidences and grades; two confidences that differ in the fifth digit are very different answers."""
    confidence = rng.choice([0.90004, 0.90008, 0.95], size=n, p=[0.3, 0.4, 0.3])
    grade = np.where(confidence == 0.90004, 0.0, 1.0)
    return confidence, np.where(rng.random(n) < 0.02, 0.0, grade)


def mean_loss(read):
    """Return the mean loss, over logs and queries, of the threshold and digits that `read` takes from a sentence."""
    rng, means = np.random.default_rng(1), []
    for _ in range(TIMES):
        confidence, grade = answers(rng, N)
        log = ScoreLog.from_router(confidence=confidence, primary_grade=grade, guardian_grade=np.ones(N))
        threshold, digits = read(RULE.search(calibrate(log, ALPHA).guarantee))
        confidence, grade = answers(rng, FRESH)
        rounded = np.array([float(f"{value:.{digits}g}") for value in confidence])
        means.append(np.where(rounded > threshold, 1 - grade, 0.0).mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


def test_the_threshold_as_it_is_written_keeps_the_budget():
    measured = mean_loss(lambda rule: (float(rule[1]), int(rule[2])))
    assert keeps(ALPHA, measured), measured


def test_three_digits_of_it_would_not():
    measured = mean_loss(lambda rule: (float(f"{float(rule[1]):.3g}"), int(rule[2])))
    assert not keeps(ALPHA, measured), measured


def test_the_share_that_stands_at_exactly_the_threshold_is_the_share_that_is_written():
    """Three quarters of the rows lead by exactly 0.5; the first budget splits them, and the sentence says where."""
    rng, rows = np.random.default_rng(4), 2000
    confidence = rng.choice([0.5, 0.9], size=rows, p=[0.75, 0.25])
    grade = np.where(confidence == 0.5, (rng.random(rows) < 0.9).astype(float), 1.0)
    ids = [f"q{row}" for row in range(rows)]
    log = ScoreLog.from_router(confidence=confidence, primary_grade=grade, guardian_grade=np.ones(rows), id=ids)
    key = ProjectSecret((b"a secret of some length",)).boundary_key
    certificate = calibrate(log, 0.02, boundary="random", key=key)
    for text in (certificate.guarantee, certificate.summary):
        [written] = re.findall(r"At exactly 0\.5 a draw decides: the Primary's stands in (\S+) % of cases", text)
        fresh = [certificate.decide([0.0, 0.5], id=f"new {k}").decided_by == "primary" for k in range(5000)]
        assert abs(np.mean(fresh) - float(written) / 100) < 4 * 0.5 / 5000**0.5
        assert 0.1 < float(written) / 100 < 0.5


def test_a_session_certificate_says_what_stands_at_exactly_its_threshold():
    """A session is decided by its first answer, and a draw decides where that confidence is the threshold."""
    rng = np.random.default_rng(4)
    turns = [
        SessionTurn(
            session=f"s{k}", at=float(k), confidence=sure, guardian_grade=1.0,
            primary_grade=float(sure > 0.5 or rng.random() < 0.9),
        )
        for k, sure in enumerate(rng.choice([0.5, 0.9], size=2000, p=[0.75, 0.25]).tolist())
    ]  # fmt: skip
    key = ProjectSecret((b"a secret of some length",)).boundary_key
    certificate = calibrate(session_log(turns, idle=1.0, now=1e9), 0.02, key=key)
    for text in (certificate.guarantee, certificate.summary):
        [written] = re.findall(r"At exactly 0\.5 a draw decides: the Primary's stands in (\S+) % of cases", text)
        fresh = [certificate.decide([0.0, 0.5], id=f"new {k}").decided_by == "primary" for k in range(5000)]
        assert abs(np.mean(fresh) - float(written) / 100) < 4 * 0.5 / 5000**0.5
        assert 0.1 < float(written) / 100 < 0.5


def test_a_group_of_too_few_rows_has_the_threshold_of_all_of_them_as_its_certificate_says():
    rng, sizes = np.random.default_rng(1), {"a": 300, "b": 12, "c": 15}
    group = np.repeat(list(sizes), list(sizes.values()))
    sure = rng.random(len(group))
    log = ScoreLog.from_router(
        confidence=sure, primary_grade=(rng.random(len(group)) < sure).astype(float), guardian_grade=np.ones(len(group)),
        id=[f"q{k}" for k in range(len(group))], group=group,
    )  # fmt: skip
    key = ProjectSecret((b"a secret of some length",)).boundary_key
    certificate = calibrate(log, ALPHA, by="group", small_groups="merge", key=key)
    assert "has a threshold of its own if it has enough rows, and shares one with the others that do not" in (
        certificate.summary
    )
    alone = [calibrate(log.select(group == "a"), ALPHA, key=key), calibrate(log.select(group != "a"), ALPHA, key=key)]
    expected = [alone[0].relaxation, alone[1].relaxation, alone[1].relaxation]
    assert [certificate.groups[name].relaxation for name in sizes] == expected
