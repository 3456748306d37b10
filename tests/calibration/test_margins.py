import numpy as np
import pytest

from conformal_arbitrage import Certificate, ProjectSecret, ScoreLog, calibrate, verify
from conformal_arbitrage.calibration.certificate import (
    are_quantiles,
    base_share,
    margin_quantiles,
    read_quantiles,
    write_quantiles,
)
from conformal_arbitrage.errors import CertificateError, OptionError
from tests.certificates import edited

SECRET = ProjectSecret((b"s" * 32,))


@pytest.mark.parametrize("random", [False, True])
def test_quantiles_survive_being_written(random):
    rng = np.random.default_rng(5)
    margins = rng.integers(0, 12, 700) / 12
    margins[:5] = np.inf
    quantiles = margin_quantiles(margins, rng.random(700) if random else None)
    assert quantiles[-1] is None
    assert read_quantiles(write_quantiles(quantiles)) == quantiles


def test_the_base_is_the_share_that_the_certificate_defers():
    margins = np.arange(1, 1001) / 1000
    quantiles = margin_quantiles(margins)
    assert base_share((0.4, None), quantiles) == 0.4
    assert base_share((0.4005, None), quantiles) == 0.4
    assert base_share((0.0, None), quantiles) == 0.0
    assert base_share((5.0, None), quantiles) == 1.0
    drawn = margin_quantiles(np.full(1000, 0.5), np.linspace(0, 0.999, 1000))
    assert base_share((0.5, 0.25), drawn) == pytest.approx(0.25, abs=0.002)


@pytest.mark.parametrize(
    "text",
    ["", "0.1", " ".join(["0.1"] * 1000), " ".join(["0.2", *["0.1"] * 1000]), " ".join(["-", *["0.1"] * 1000]),
     " ".join(["x"] * 1001), " ".join(["nan"] * 1001), " ".join(["-1.0"] * 1001), " ".join(["inf"] * 1001),
     " ".join(["0.1/2.0"] * 1001), " ".join(["0.1/"] * 1001)],
)  # fmt: skip
def test_malformed_quantiles_are_refused(text):
    with pytest.raises(CertificateError, match="margin_quantiles"):
        read_quantiles(text)


def score_log(n=400):
    rng = np.random.default_rng(9)
    primary = rng.dirichlet(np.ones(3), n).round(2)
    guardian = np.eye(3)[np.where(rng.random(n) < 0.8, primary.argmax(axis=1), rng.integers(0, 3, n))]
    return ScoreLog.from_arrays(
        primary.tolist(), guardian.tolist(), id=[f"q{k}" for k in range(n)], group=["a", "b"] * (n // 2)
    )


@pytest.mark.parametrize("boundary", ["include", "random"])
def test_a_certificate_keeps_the_quantiles_of_its_own_margins(boundary, tmp_path):
    log, key = score_log(), SECRET.boundary_key if boundary == "random" else None
    plain = calibrate(log, 0.1, boundary=boundary, key=key)
    kept = calibrate(log, 0.1, boundary=boundary, key=key, margins=True).sign(SECRET)
    assert plain.evidence.margin_quantiles is None
    assert (kept.relaxation, kept.boundary_u, kept.guarantee) == (plain.relaxation, plain.boundary_u, plain.guarantee)
    kept.save(tmp_path / "rule.json")
    loaded = Certificate.load(tmp_path / "rule.json", secret=SECRET)
    assert loaded == kept
    assert verify(loaded, log).ok
    quantiles = read_quantiles(loaded.evidence.margin_quantiles)
    base = base_share((loaded.relaxation, loaded.boundary_u), quantiles)
    assert base == pytest.approx(loaded.apply(log).deferred.mean(), abs=0.0026 if boundary == "random" else 0.04)
    for share in (base, 0.9):
        relaxation, u = quantiles[round(share * 1000)]
        decided = calibrate_at(loaded, relaxation, u).apply(log).deferred.mean()
        assert decided >= share - 1e-9


def calibrate_at(certificate, relaxation, u):

    return certificate.with_threshold(relaxation, u)


def test_changed_quantiles_are_noticed(tmp_path):
    kept = calibrate(score_log(), 0.1, margins=True, boundary="include").sign(SECRET)
    document = kept.to_dict()
    with pytest.raises(CertificateError, match=r"margin_quantiles .* contradicts the rest"):
        Certificate.from_dict(edited(document, {"margin_quantiles": "0.1 0.2"}))
    other = " ".join(["0.0"] * 1001)
    with pytest.raises(CertificateError, match="the signature is not that"):
        Certificate.from_dict(edited(document, {"margin_quantiles": other})).check_signature(SECRET)
    assert not verify(Certificate.from_dict(edited(document, {"margin_quantiles": other})), score_log()).ok
    assert not are_quantiles(other, drawn=True)
    assert are_quantiles(other, drawn=False)


def test_there_is_no_guard_without_a_proof():
    with pytest.raises(OptionError, match="guard and groups do not go together"):
        calibrate(score_log(), 0.1, by="group", margins=True)
    labelled = ScoreLog.from_arrays(
        [[0.9, 0.1]] * 99, [[1.0, 0.0]] * 99, label=[0] * 99, id=[f"q{k}" for k in range(99)]
    )
    with pytest.raises(OptionError, match="guard and net do not go together"):
        calibrate(labelled, 0.1, loss="net", boundary="random", key=b"k" * 16, margins=True)
