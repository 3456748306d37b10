"""Draws by question, where there are no ids: the promise holds with copies, and fails for whoever re-words."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.secret import draws
from tests.calibration.test_net import router_log

KEY = b"a key of thirty-two bytes or so."
ALPHA = 0.2


def asked(confidence, primary, guardian, questions):
    """Return a log of questions without ids."""
    log = router_log(np.array(confidence), np.array(primary, float), np.array(guardian, float))
    return replace(log, id=None, context=np.array(questions, np.dtypes.StringDType()))


ROWS = st.lists(
    st.tuples(
        st.sampled_from([0.2, 0.5, 0.9]), st.sampled_from([(0, 1), (1, 0), (0, 0), (0, 0.5)]), st.sampled_from("abc")
    ),
    min_size=6,
    max_size=16,
)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, loss=st.sampled_from([None, "net"]))
def test_given_the_secret_the_left_out_losses_of_rows_with_copies_sum_to_at_most_the_budget(rows, loss):
    grades = np.array([grade for _, grade, _ in rows], float)
    log, total = asked([c for c, _, _ in rows], grades[:, 0], grades[:, 1], [text for *_, text in rows]), 0.0
    lost = grades[:, 1] - grades[:, 0] if loss else np.maximum(grades[:, 1] - grades[:, 0], 0)
    for j in range(len(rows)):
        others = log.select(np.flatnonzero(np.arange(len(rows)) != j))
        decided = calibrate(others, ALPHA, boundary="random", key=KEY, loss=loss).apply(log.select(np.array([j])))
        total += 0.0 if decided.deferred[0] else lost[j]
    assert total <= ALPHA * len(rows) + 1e-9


def mean_loss(ask, times=400, n=40):
    """Return the mean loss where rows have ids and queries have none, over secrets; every loss is at one margin."""
    rng, losses = np.random.default_rng(3), []
    for k in range(times):
        lost = (rng.random(n) < 0.5).astype(float)
        log = router_log(np.full(n, 0.5), 1 - lost, np.ones(n), prefix=f"{k}-")
        certificate = calibrate(log, ALPHA, boundary="random", key=bytes([k % 256, k // 256]) + KEY)
        losses.append(0.5 if ask(certificate, k) == "primary" else 0.0)  # a new answer is wrong half the time
    return np.mean(losses)


def test_queries_without_ids_keep_the_budget_of_rows_with_ids_on_average_over_secrets():
    assert mean_loss(lambda rule, k: rule.decide([0.0, 0.5], text=f"question {k}").decided_by) <= ALPHA + 0.03


def test_rewording_until_the_draw_pleases_breaks_the_budget():
    def reworded(rule, k):
        answers = {rule.decide([0.0, 0.5], text=f"question {k}, {m}").decided_by for m in range(20)}
        return "primary" if "primary" in answers else "guardian"

    assert mean_loss(reworded) > 2 * ALPHA


def copies_loss(times=60, n=60):
    """Return the mean loss of a learned score on copies of one row that loses a half."""
    rng, losses = np.random.default_rng(9), []
    for k in range(times):
        scores, worth = np.tile([0.2, 0.8], (n + 1, 1)), np.tile([1.0, 0.5], (n + 1, 1))
        log = ScoreLog.from_arrays(scores, worth, id=[f"{k}-{row}" for row in range(n + 1)], context=["one"] * (n + 1))
        chosen = calibrate(log.select(np.arange(n)), ALPHA, score="learned", boundary="random", key=rng.bytes(16))
        losses.append(0.0 if chosen.apply(log.select(np.array([n]))).deferred[0] else 0.5)
    return np.mean(losses)


def test_copies_of_a_row_keep_the_budget_since_each_is_rounded_by_its_id():
    assert copies_loss() <= ALPHA + 0.05


def test_a_rounding_draw_that_copies_share_breaks_any_budget(monkeypatch):
    def shared(self, log):
        return draws(b"rounding" + self.drawing_key(), replace(log, id=None))

    monkeypatch.setattr(CalibrationOptions, "rounding_draws", shared)
    monkeypatch.setitem(globals(), "ALPHA", 0.1)
    assert 0.18 < copies_loss() < 0.32  # 1/4
