import numpy as np
import pytest

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.evidence import BETS, START_EVERY, EvidenceProcess, log_evidence

SPARSE = np.where(np.arange(400) % 13 == 0, 1.0, 0.0)


def by_definition(means, line):
    """Return log E by the recursion itself, with plain floats."""
    wealth, starts, logs = np.zeros(len(BETS)), 0, []
    for block, mean in enumerate(means):
        if block % START_EVERY == 0:
            starts += 1
            wealth += 1 / (len(BETS) * starts * (starts + 1))
        wealth *= (1 + BETS * mean) / (1 + BETS * line)
        logs.append(np.log(wealth.sum() + 1 / (starts + 1)))
    return np.array(logs)


def test_the_evidence_has_the_values_of_the_specification():
    logs = log_evidence(SPARSE.reshape(-1, 10).mean(axis=1), 0.05)
    assert logs[[0, 9, 10, 39]] == pytest.approx([0.162968514, 0.652307116, 0.970020837, 4.012677123], abs=5e-10)
    assert log_evidence(np.ones(5), 0.05)[-1] == pytest.approx(12.277375813, abs=5e-10)


@pytest.mark.parametrize("line", [0.01, 0.05, 0.4])
def test_the_evidence_is_that_of_the_recursion(line):
    means = np.random.default_rng(1).random(300) * 3 * line
    assert log_evidence(means, line) == pytest.approx(by_definition(means, line), abs=1e-8)


def test_long_quiet_does_not_underflow_and_late_losses_still_count():
    quiet = np.zeros(50_000)
    logs = log_evidence(np.concatenate([quiet, np.full(60, 0.5)]), 0.05)
    assert np.isfinite(logs).all()
    assert logs[len(quiet) - 1] < 0 < np.log(40) < logs[-1]


def test_an_update_from_any_block_gives_the_same_bits_as_a_computation_at_once():
    rng = np.random.default_rng(2)
    means = (rng.random(30_000) < 0.05).astype(float)
    whole = EvidenceProcess([0.05, 0.07])
    whole.update(0, means)
    process, known = EvidenceProcess([0.05, 0.07]), 0
    while known < len(means):
        known = min(known + int(rng.integers(1, 900)), len(means))
        first = process.resume(process.blocks)
        process.update(first, means[first:known])
        first = process.resume(int(rng.integers(max(known - 12_000, 0), known)))
        process.update(first, means[first:known])
    assert np.array_equal(process.log_evidence(), whole.log_evidence())
    assert np.array_equal(process.peak(), whole.peak())
    assert np.array_equal(process.last(), whole.last())


def test_evidence_rises_with_every_loss():
    rng = np.random.default_rng(3)
    means = rng.random((200, 30)) * 0.1
    more = means.copy()
    more[rng.integers(200), :] += 0.3
    assert (log_evidence(more, 0.05) >= log_evidence(means, 0.05)).all()


def test_no_block_means_no_evidence():
    process = EvidenceProcess([0.05])
    assert process.last() == process.peak() == 0
    assert len(process.log_evidence()) == 0


@pytest.mark.parametrize("line", [0.0, 1.0, -0.1, 1.5])
def test_a_line_lies_within_the_bound(line):
    with pytest.raises(OptionError, match="above 0 and below"):
        EvidenceProcess([line])
