import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.errors import CertificateError, OptionError
from conformal_arbitrage.live.service import CertificateGuard, KnownLosses
from conformal_arbitrage.store.ledger import AuditRow, LedgerRows

KEY = b"k" * 16


def certificate(boundary="random", n=400, **options):
    rng = np.random.default_rng(2)
    primary = rng.dirichlet(np.ones(2), n).round(3)
    right = np.where(rng.random(n) < 0.5 + 0.5 * abs(primary[:, 0] - primary[:, 1]), 1.0, 0.0)
    guardian = np.where(primary.argmax(axis=1)[:, None] == np.arange(2), right[:, None], 1 - right[:, None])
    log = ScoreLog.from_arrays(primary.tolist(), guardian.tolist(), id=[f"q{k}" for k in range(n)])
    return calibrate(log, 0.05, boundary=boundary, key=KEY if boundary == "random" else None, margins=True, **options)


def rank(one):
    return (
        (np.inf, 1.0) if one.relaxation is None else (one.relaxation, 1.0 if one.boundary_u is None else one.boundary_u)
    )


@pytest.mark.parametrize("boundary", ["include", "random"])
def test_the_threshold_rises_with_losses_and_never_falls_below_the_certificate(boundary):
    certified = certificate(boundary)
    guard = CertificateGuard(certified)
    assert guard.in_force() == certified
    ranks = []
    for loss in [0.0] * 30 + [1.0] * 60 + [0.0] * 3000:
        guard.take([loss])
        ranks.append(rank(guard.in_force()))
    assert min(ranks) == ranks[29] == ranks[-1] == rank(certified)
    assert ranks[30] > rank(certified)
    assert ranks[30:90] == sorted(ranks[30:90])
    assert ranks[89] == (np.inf, 1.0)
    assert guard.standing().known == 3090


def test_whatever_the_losses_their_excess_keeps_the_bound():
    """An adversary loses whenever it may: not if everything is in sight, and outcomes come up to five decisions late."""
    rng = np.random.default_rng(3)
    guard, pending, largest = CertificateGuard(certificate()), [], 0
    for _ in range(5000):
        pending.append(0.0 if guard.in_force().relaxation is None else 1.0)
        while len(pending) > rng.integers(0, 6):
            guard.take([pending.pop(0)])
        largest = max(largest, len(pending))
        assert guard.standing().excess <= guard.standing().bound + largest
    assert guard.standing().excess > 0.8 * guard.standing().bound  # the bound is needed


def test_what_has_no_proof_or_no_quantiles_is_refused():
    with pytest.raises(CertificateError, match="--margins"):
        CertificateGuard(calibrate(ScoreLog.from_arrays([[0.9, 0.1]] * 99, [[1.0, 0.0]] * 99), 0.1))
    labelled = ScoreLog.from_arrays(
        [[0.9, 0.1]] * 99, [[1.0, 0.0]] * 99, label=[0] * 99, id=[f"q{k}" for k in range(99)]
    )
    with pytest.raises(OptionError, match="guard and net do not go together"):
        CertificateGuard(calibrate(labelled, 0.1, loss="net", boundary="random", key=KEY))


def row(order, loss=0.5, at=None):
    return AuditRow(
        seq=order, id=str(order), drawn=1.0, due=2.0, loss=loss, served=None, known_order=order,
        known_at=100.0 + order if at is None else at, change=order,
    )  # fmt: skip


def test_losses_come_in_the_order_in_which_they_became_known_and_none_twice():
    known = KnownLosses()
    open_row = row(9, loss=None)
    assert known.take_all(
        LedgerRows.of([(1.0, 2.0, 0.25, None, 0, 1, 101.0), (1.0, 2.0, None, None, 0, None, None)], 2)
    ) == [0.25]
    assert known.take([row(3), row(1), row(4, 1.0)]) == []
    assert known.take([row(2, 0.75), row(1)]) == [0.75, 0.5, 1.0]
    assert known.take([row(4, 1.0), row(2)]) == []
    assert known.take([]) == []
    assert known.count == 4
    assert (known.since(102.0), known.since(105.0), known.last) == (3, 0, 104.0)
    assert open_row.loss is None
    assert KnownLosses().last is None
