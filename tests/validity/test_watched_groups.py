"""Each group of a certificate has a ledger and a red line of its own; one for all groups hides the group that breaks it."""

from math import log

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.live.service import false_red_of_policy, lines_of
from conformal_arbitrage.monitoring.evidence import log_evidence
from conformal_arbitrage.monitoring.lines import watch_lines
from tests.validity.test_monitoring import ALPHA, blocks, most

RUNS, ROWS, AUDITS = 300, 200, 2000
CHANCES = {"easy": 0.2, "hard": 0.6, "plain": 0.3}


def certified(rng):
    """Return a certificate by groups and the true loss of each: P(loss | margin s) = chance (1 - s), s uniform."""
    parts = []
    for chance in CHANCES.values():
        margin = rng.random(ROWS)
        parts.append((margin, rng.random(ROWS) < chance * (1 - margin)))
    margin, lost = (np.concatenate(column) for column in zip(*parts, strict=True))
    log_ = ScoreLog.from_arrays(
        np.stack([margin, np.zeros(len(margin))], axis=1),
        np.where(lost[:, None], [0.0, 1.0], [1.0, 0.0]),
        group=[name for name in CHANCES for _ in range(ROWS)],
    )
    certificate = calibrate(log_, ALPHA, by="group", zero_one=True)
    risks = {name: chance * (1 - certificate.groups[name].relaxation) ** 2 / 2 for name, chance in CHANCES.items()}
    return certificate, risks


@pytest.fixture(scope="module")
def policies():
    rng = np.random.default_rng(7)
    return [certified(rng) for _ in range(RUNS)]


def reds(policies, rng, factors=None):
    """Return by group in how many runs its evidence ever calls for red, and in how many runs that of any does."""
    crossed = {}
    for name in CHANCES:
        risks = np.array([risks[name] * (factors or {}).get(name, 1.0) for _, risks in policies])
        losses = (rng.random((RUNS, AUDITS)) < risks[:, None]).astype(float)
        line = lines_of(policies[0][0])[name].red  # the same in every run: it depends on the number of rows alone
        crossed[name] = log_evidence(blocks(losses), line).max(axis=0) >= log(40)
    return {name: int(runs.sum()) for name, runs in crossed.items()}, int(
        np.logical_or.reduce([*crossed.values()]).sum()
    )


def test_each_group_of_a_valid_certificate_rarely_turns_red_nor_does_the_policy(policies):
    """At the group's own line; the whole policy goes into safe mode with any of them, which is what `false_red` bounds."""
    groups, whole = reds(policies, np.random.default_rng(8))
    lines = lines_of(policies[0][0])
    for name, count in groups.items():
        assert count <= most(lines[name].false_red, RUNS)
    assert false_red_of_policy(policies[0][0], lines) == pytest.approx(0.15)
    assert whole <= most(0.15, RUNS)


def test_lines_of_the_whole_log_for_a_group_are_caught(policies):
    """Three times the rows would promise less luck than a group's calibration has: red where nothing is wrong."""
    rng, wrong = np.random.default_rng(8), 0
    line = watch_lines(ALPHA, n=100 * ROWS, binary=True).red
    for _, risks in policies:
        losses = (rng.random((1, 20_000)) < risks["hard"]).astype(float)
        wrong += bool(log_evidence(blocks(losses), line).max() >= log(40))
    assert wrong > most(0.05, RUNS)


def test_a_group_that_breaks_its_budget_is_seen_and_one_ledger_for_all_is_caught(policies):
    """One group in twenty loses five times its budget: over all audits that is a fifth more, which luck explains."""
    rng = np.random.default_rng(9)
    groups, _ = reds(policies, rng, {"hard": 5.0})
    assert groups["hard"] > 0.95 * RUNS
    pooled_line = watch_lines(ALPHA, n=3 * ROWS, binary=True).red
    hard = rng.random((RUNS, AUDITS)) < 0.05
    risks = np.array([risks["hard"] for _, risks in policies])[:, None]
    plain = np.array([risks["plain"] for _, risks in policies])[:, None]
    losses = (rng.random((RUNS, AUDITS)) < np.where(hard, 5 * risks, plain)).astype(float)
    assert (log_evidence(blocks(losses), pooled_line).max(axis=0) >= log(40)).mean() < 0.5
