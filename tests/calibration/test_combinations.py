from typing import get_args

import pytest

from conformal_arbitrage.calibration.options import NO_PROOF, Feature, Kind, refusal, refuse_combination
from conformal_arbitrage.errors import OptionError


@pytest.mark.parametrize(("feature", "kind"), NO_PROOF)
def test_a_combination_without_proof_is_refused_by_name(feature, kind):
    assert feature in get_args(Feature)
    assert kind in get_args(Kind)
    with pytest.raises(OptionError, match=f"^{feature} and {kind} do not go together: .*"):
        refuse_combination(feature, kind)
    assert "{" not in refusal(feature, kind)


def test_everything_else_passes():
    assert refusal("confidence", "own loss") is None
    refuse_combination("guard")
    refuse_combination("guard", "own loss")
    with pytest.raises(OptionError, match="unknown feature"):
        refusal("gard", "net")
