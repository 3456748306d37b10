"""Conversations with many rows each: clusters keep the quota per query; the rule for single rows breaks it."""

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, ScoreLogError, calibrate, verify
from tests.validity.simulation import keeps

ALPHA, CLUSTERS, LARGEST, TIMES, FRESH = 0.1, 15, 10, 1500, 40
SIZES, SHARES = np.array([8, LARGEST]), np.array([0.5, 0.5])
MEAN = float(SIZES @ SHARES)


def draw(rng, clusters):
    """Return margin and loss of every row, and its cluster: a conversation is hard or easy as a whole."""
    sizes = rng.choice(SIZES, clusters, p=SHARES)
    name = np.repeat(np.arange(clusters), sizes)
    margin = rng.random(clusters)[name]
    loss = (rng.random(clusters) < 0.9 * (1 - margin[np.cumsum(sizes) - 1]))[name]
    return margin, loss.astype(float), name


def log_of(margin, loss, name):
    """Return menus of two: the Primary prefers the first by the margin, the Guardian the other where there is a loss."""
    primary = np.column_stack([margin, np.zeros(len(margin))])
    guardian = np.column_stack([1 - loss, loss])
    return ScoreLog.from_arrays(primary, guardian, group=[f"c{k}" for k in name])


def per_query(**options):
    """Return the loss per query over many next clusters, one for each calibration log, and its standard error."""
    rng, excess = np.random.default_rng(4), []
    for _ in range(TIMES):
        certificate = calibrate(log_of(*draw(rng, CLUSTERS)), ALPHA, **options)
        margin, loss, _ = draw(rng, FRESH)
        alone = ~certificate.apply(ScoreLog.from_arrays(np.column_stack([margin, np.zeros(len(margin))]))).deferred
        excess.append((alone * loss - ALPHA).sum() / (FRESH * MEAN))
    return ALPHA + float(np.mean(excess)), float(np.std(excess, ddof=1) / len(excess) ** 0.5)


def test_clusters_keep_the_quota_per_query():
    measured = per_query(cluster="group", max_cluster_size=LARGEST)
    assert keeps(ALPHA, measured), measured


def test_clusters_of_one_row_are_rows():
    rows = ScoreLog.from_arrays(np.random.default_rng(2).random((60, 2)), np.eye(2)[[0, 1] * 30], group=range(60))
    clustered = calibrate(rows, 0.2, cluster="group", max_cluster_size=1)
    assert (clustered.relaxation, clustered.evidence.slack) == (
        calibrate(rows, 0.2).relaxation,
        calibrate(rows, 0.2).evidence.slack,
    )


def test_the_rule_for_single_rows_is_caught_on_clusters():
    measured = per_query()
    assert not keeps(ALPHA, measured), measured
    assert measured[0] > 0.11


def test_a_larger_cluster_than_declared_is_refused_and_the_certificate_says_its_unit():
    log = log_of(*draw(np.random.default_rng(1), 200))
    with pytest.raises(ScoreLogError, match=r"a cluster of column 'group' has 10 rows, more than the declared 5"):
        calibrate(log, ALPHA, cluster="group", max_cluster_size=5)
    certificate = calibrate(log, ALPHA, cluster="group", max_cluster_size=LARGEST)
    assert certificate.promise.clusters == 200
    assert "200 clusters" in certificate.guarantee
    assert "no cluster ever has more than 10 queries" in certificate.guarantee
    assert verify(certificate, log)
