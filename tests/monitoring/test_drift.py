import numpy as np

from conformal_arbitrage.monitoring.drift import DriftBag, DriftNotice


def test_p_values_are_ranks_in_a_bag_that_grows():
    bag = DriftBag(np.array([1.0, 2.0, 3.0]))
    assert bag.p_value(2.5, 0.5) == (1 + 0.5 * 1) / 4
    assert bag.p_value(2.0, 0.0) == (2 + 0) / 5
    assert bag.p_value(9.0, 0.5) == 0.5 / 6
    assert bag.p_value(0.0, 1.0) == 1
    assert bag.size == 7


def test_p_values_of_exchangeable_margins_are_uniform():
    rng = np.random.default_rng(0)
    for n in (30, 3000):
        bag = DriftBag(rng.random(n))
        p = np.array([bag.p_value(m, v) for m, v in rng.random((8000, 2)).tolist()])
        shares = np.histogram(p, bins=10, range=(0, 1))[0] / len(p)
        assert abs(shares - 0.1).max() < 0.015


def test_smaller_margins_are_noticed_after_a_while():
    rng = np.random.default_rng(1)
    notice = DriftNotice(rng.random(1000))
    assert not notice.noticed()
    notice.observe([(0.5, 0.5)])
    notice.observe(rng.random((504, 2)).tolist())
    assert not notice.noticed()
    notice.observe(zip((0.6 * rng.random(2000)).tolist(), rng.random(2000).tolist(), strict=True))
    assert notice.noticed()
    assert len(notice.log_evidence()) == 250
