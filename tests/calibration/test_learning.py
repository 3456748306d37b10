import sys
from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import Features, OptionError, ScoreLog, calibrate, learn, verify
from tests.calibration.test_learned import KEY, world


class Groups:
    """A learner of one's own: the last columns of the features are those of the groups."""

    def fit(self, features, loss):
        self.seen = len(loss)
        self.mean = [loss[features[:, k] > 0].mean() for k in (-2, -1)]

    def predict(self, features):
        return features[:, -2:] @ self.mean


@pytest.mark.parametrize("learner", ["ridge", "hist-gradient-boosting", Groups()])
def test_the_other_rows_are_scored_in_router_form(learner):
    log = world(n=600, tokens=False)
    learned = learn(log, share=0.4, learner=learner, features=Features(tokens=False))
    scored = learned.scored
    assert scored.is_router
    assert (learned.learned_rows, len(scored)) == (240, 360)
    assert set(scored.id) < set(log.id)
    confidence = scored.primary[1::2]
    place = {name: k for k, name in enumerate(log.id.tolist())}
    rows = log.select([place[name] for name in scored.id.tolist()])
    leads = np.sort(rows.primary.reshape(-1, 3), axis=1)
    assert (confidence[leads[:, -1] == leads[:, -2]] == 0).all(), "no action leads: always deferred"
    regret = 1 - rows.guardian.reshape(-1, 3)[np.arange(360), rows.primary.reshape(-1, 3).argmax(axis=1)]
    assert 1 - scored.guardian[1::2] == pytest.approx(regret)
    assert learned.confidence(rows) == pytest.approx(confidence)
    law = np.array(rows.group) == "law"
    led = confidence > 0
    assert confidence[law & led].mean() < confidence[~law & led].mean(), "it learned which group loses"
    assert verify(calibrate(scored, 0.1), scored)


def test_a_binarized_log_keeps_both_grades_so_that_gains_count():
    rng = np.random.default_rng(0)
    n = 400
    scores, label = rng.random((n, 3)), rng.integers(0, 3, n)
    log = ScoreLog.from_arrays(scores, rng.random((n, 3)), id=[f"q{k}" for k in range(n)], label=label).binarized()
    scored = learn(log, features=Features(menu_size=3)).scored
    assert {"correct"} <= set(scored.outcome_names)
    certificate = calibrate(scored, 0.3, loss="net", boundary="random", key=KEY)
    assert certificate.evidence.empirical_risk <= certificate.loss.regret
    again = learn(scored, share=0.5, learner="hist-gradient-boosting").scored
    assert again.is_router


def test_where_the_primary_is_better_is_learned_for_the_net_loss_from_what_it_answered():
    rng = np.random.default_rng(4)
    answers = rng.choice(["cat", "dog", "owl"], 1500, p=[0.5, 0.4, 0.1])
    better = rng.random(1500) < np.where(answers == "owl", 0.7, 0.1)
    worse = ~better & (rng.random(1500) < np.where(answers == "dog", 0.6, 0.1))
    log = ScoreLog.from_router(
        confidence=rng.random(1500),
        primary_grade=np.where(better, 1.0, 1.0 - worse),
        guardian_grade=np.where(better, 0.0, 1.0),
        id=[f"q{k}" for k in range(1500)],
        answer=answers,
    )
    router = learn(log, features=Features(answers=True), loss="net")
    confidence = router.confidence(log)
    assert confidence[answers == "owl"].min() > 1 > confidence[answers == "dog"].max()
    shares = [
        calibrate(scored, 0.02, loss="net", boundary="random", key=KEY).apply(scored).deferred.mean()
        for scored in (router.scored, learn(log, features=Features(answers=False), loss="net").scored)
    ]
    assert shares[0] < shares[1] - 0.1
    menus = replace(world(), outcomes=("correct",), lists={"correct": 1 - world().guardian})
    scored = learn(menus, loss="net").scored
    net = scored.outcome("correct").reshape(-1, 2) @ [1, -1]
    assert net.min() < 0, "gains are kept"


def test_graded_losses_and_missing_rows_are_learned_from_too():
    log = world(n=300, graded=True)
    holes = replace(log, guardian=np.where(np.repeat(np.arange(300) % 7 == 0, 3), np.nan, log.guardian),
                    missing=np.arange(300) % 7 == 0)  # fmt: skip
    scored = learn(holes, learner="hist-gradient-boosting").scored
    assert scored.missing.any()
    assert calibrate(scored, 0.3, missing_guardian="worst_case").n == 180


def test_bad_learners_are_refused(monkeypatch):
    log = world(n=100)

    class Bad(Groups):
        def predict(self, features):
            return np.full(len(features), np.nan)

    with pytest.raises(OptionError, match="must return one finite number per row"):
        learn(log, learner=Bad())
    for learner in ("forest", object()):
        with pytest.raises(OptionError, match="learner must be 'ridge', 'hist-gradient-boosting' or have fit"):
            learn(log, learner=learner)
    with pytest.raises(OptionError, match=r"needs losses in \[0, 1\]"):
        learn(replace(log, guardian=log.guardian * 3))
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(OptionError, match=r"needs scikit-learn; run `pip install 'conformal-arbitrage\[learn\]'`"):
        learn(log, learner="hist-gradient-boosting")
