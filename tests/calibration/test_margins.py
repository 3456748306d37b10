import numpy as np
import pytest

from conformal_arbitrage.calibration.margins import base_share, margin_quantiles, read_quantiles, write_quantiles
from conformal_arbitrage.errors import CertificateError


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
