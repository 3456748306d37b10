import numpy as np
import pytest

from conformal_arbitrage import OptionError
from conformal_arbitrage.evaluation.frontier import evaluate_cascade
from tests.cascades import nine_models, world


def test_trials_measure_cost_and_loss_on_rows_that_were_not_used():
    log = world(np.random.default_rng(0), 400)
    evaluation = evaluate_cascade(log, ["0.05", "0.2"], calibration_size=240, trials=8, chain=("small", "middle"))
    tight, loose = evaluation.points
    assert tight.cost > loose.cost
    assert tight.guardian_share > loose.guardian_share
    assert tight.loss < loose.loss < 0.3
    assert 0 <= tight.over <= 1
    assert tight.chains == {"small > middle": 8}
    assert evaluation.to_dict()["test_size"] == 160
    again = evaluate_cascade(log, ["0.05", "0.2"], calibration_size=240, trials=8, chain=("small", "middle"))
    assert again == evaluation


@pytest.mark.parametrize(
    "sizes", [{"calibration_size": 400}, {"calibration_size": 0}, {"calibration_size": 300, "test_size": 200}]
)
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(OptionError, match="do not fit into 400 rows"):
        evaluate_cascade(world(np.random.default_rng(0), 400), ["0.1"], **sizes)


@pytest.mark.parametrize(
    ("dataset", "guardian", "loss", "target"),
    [
        ("medmcqa", "llama3.1-405b", None, 0.44),
        ("medmcqa", "llama3.1-405b", "net", 0.25),
        ("triviaqa", "gpt-4o", None, 0.09),
    ],
)
def test_costs_on_the_shared_log_reach_their_targets(shared, dataset, guardian, loss, target):
    log = nine_models(shared, dataset, guardian, ("llama3.1-8b", "gpt-4o-mini", "llama3.1-70b"))
    point = evaluate_cascade(log, ["0.05"], calibration_size=780, trials=8, loss=loss).points[0]
    assert point.cost <= target + 2 * point.cost_error
    assert point.loss <= 0.05 + 4 * point.loss_error
