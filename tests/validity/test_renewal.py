"""Certificates that follow a schedule keep the budget at every decision; installing the cheaper one is caught.

The population is a real log: queries are drawn from it at random, so that the long-run loss of every threshold is known.
Rows are counted by margin and loss, for all runs at once; `thresholds` is checked against `calibrate`.
"""

from importlib.resources import files

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration.certificate import document_sha256
from conformal_arbitrage.calibration.schedule import RenewalChain, chain_of, preferred_to, rows_after_alarm

pytestmark = pytest.mark.proof
ALPHA, RUNS, LOOKS, WINDOW = 0.05, 400, 20, 400
SCIENCE = files("conformal_arbitrage") / "data" / "science.parquet"


class Population:
    """A log as a distribution over (margin, loss of the Primary's choice)."""

    def __init__(self, margin, loss):
        order = np.argsort(-margin, kind="stable")
        self.margin, self.loss = margin[order], loss[order]
        last = np.r_[self.margin[1:] != self.margin[:-1], True]  # of each margin, the lowest row
        self.steps = np.r_[0, np.flatnonzero(last) + 1]  # the first k rows act, for every k at which margins differ
        self.risk = np.r_[0.0, np.cumsum(self.loss)][self.steps] / len(margin)

    def draw(self, rng, rows, runs=RUNS):
        """Return how often each row of the log is drawn, runs x rows of the log."""
        return rng.multinomial(rows, np.full(len(self.margin), 1 / len(self.margin)), size=runs)

    def thresholds(self, counts, others=0, losses=0):
        """Return, for each run, how many steps of `risk` act: the smallest relaxation with total + 1 <= alpha (n + 1).

        `others` are further rows of the same margins, and `losses` their losses.
        """
        totals = np.cumsum(counts * self.loss + others * losses, axis=1)
        totals = np.concatenate([np.zeros((len(totals), 1)), totals], axis=1)[:, self.steps]
        kept = totals + 1 <= ALPHA * ((counts + others).sum(axis=1, keepdims=True) + 1) + 1e-9
        return np.where(kept.any(axis=1), kept.sum(axis=1) - 1, 0)  # totals only grow


@pytest.fixture(scope="module")
def science():
    return ScoreLog.read(str(SCIENCE), primary="qwen15b", guardian="expert")


@pytest.fixture(scope="module")
def traffic(science):
    return population(science)


def population(log):
    rows = [log.row(k) for k in range(len(log))]
    loss = np.array([max(row.guardian) - row.guardian[int(np.argmax(row.primary))] for row in rows])
    return Population(calibrate(log, ALPHA).apply(log).margin, loss)


def within(risks, level=ALPHA):
    """Tell whether the mean of independent runs is within a level, by four standard errors."""
    return risks.mean() <= level + 4 * risks.std() / len(risks) ** 0.5


def test_the_counting_finds_the_thresholds_of_calibrate(science, traffic):
    rng = np.random.default_rng(1)
    for rows in (30, 400, 1500):
        counts = traffic.draw(rng, rows, runs=1)
        picked = np.repeat(np.arange(len(science)), counts[0])
        order = np.argsort(-calibrate(science, ALPHA).apply(science).margin, kind="stable")
        certificate = calibrate(science.select(order[picked]), ALPHA)
        steps = traffic.thresholds(counts)[0]
        acting = int((traffic.margin > (np.inf if certificate.relaxation is None else certificate.relaxation)).sum())
        assert traffic.risk[steps] == pytest.approx(np.r_[0, np.cumsum(traffic.loss)][acting] / len(science))


def scheduled(traffic, rng, chain, collected):
    """Yield, for each of 20 renewals of a chain, its rows and the long-run loss of its certificates, run by run."""
    arrived, rows = traffic.draw(rng, chain.rows(1)), chain.rows(1)
    for renewal in range(1, LOOKS + 1):
        arrived, rows = arrived + traffic.draw(rng, chain.rows(renewal) - rows), chain.rows(renewal)
        assert chain.due(rows) == renewal
        assert chain.due(rows - 1) != renewal
        union = arrived + collected if renewal == 1 else arrived
        yield rows, traffic.risk[traffic.thresholds(union)]


def test_over_20_scheduled_renewals_the_loss_of_all_decisions_is_within_alpha(traffic):
    rng = np.random.default_rng(2)
    chain = RenewalChain(root_sha256="", since=0.0, first=200)
    collected = traffic.draw(rng, chain.first)
    risks = [traffic.risk[traffic.thresholds(collected)]]
    counts = [0]
    for rows, risk in scheduled(traffic, rng, chain, collected):
        counts.append(rows)
        risks.append(risk)
    assert len(risks) == LOOKS + 1
    assert all(within(risk) for risk in risks)
    lasted = np.diff([*counts, 2 * counts[-1]])  # rows, and so decisions, that arrive under each certificate
    assert within(np.average(risks, axis=0, weights=lasted))
    assert within(np.mean(risks[:6], axis=0))
    assert np.mean(risks) > 0.95 * ALPHA  # nor does the schedule waste the budget


def sliding(traffic, rng):
    """Yield the thresholds of 20 calibrations, each on the last 400 rows."""
    for _ in range(LOOKS):
        yield traffic.thresholds(traffic.draw(rng, WINDOW))


def test_installing_whatever_comes_out_keeps_the_budget_and_installing_the_cheaper_is_caught(traffic):
    looks = np.array(list(sliding(traffic, np.random.default_rng(3))))
    assert within(traffic.risk[looks].mean(axis=0))
    cheaper = traffic.risk[np.maximum.accumulate(looks)].mean(axis=0)
    assert not within(cheaper)
    assert cheaper.mean() > 1.25 * ALPHA


def test_on_the_schedule_itself_keeping_the_cheaper_is_caught(traffic):
    rng = np.random.default_rng(4)
    chain = RenewalChain(root_sha256="", since=0.0, first=200)
    arrived = traffic.draw(rng, chain.first)
    looks = [traffic.thresholds(arrived)]
    for renewal in range(2, 7):
        arrived = arrived + traffic.draw(rng, chain.rows(renewal) - chain.rows(renewal - 1))
        looks.append(traffic.thresholds(arrived))
    assert within(traffic.risk[np.array(looks)].mean(axis=0))
    assert not within(traffic.risk[np.maximum.accumulate(looks)].mean(axis=0))


def test_rolling_back_dearer_renewals_breaks_the_budget_and_its_decisions_say_so(traffic):
    """The margin at which a threshold acts stands for its relaxation, as both rise together."""
    rng = np.random.default_rng(8)
    relaxation = np.r_[np.inf, np.sort(np.unique(traffic.margin))[::-1]]
    arrived, kept = traffic.draw(rng, WINDOW), None
    risks, promised = [], []
    documents = [{} for _ in range(RUNS)]
    for renewal in range(6):
        arrived = arrived if renewal == 0 else arrived + traffic.draw(rng, WINDOW * 2 ** (renewal - 1))
        fresh = traffic.thresholds(arrived)
        kept = fresh if kept is None else np.maximum(kept, fresh)  # a dearer one is rolled back
        marked = np.zeros(RUNS, dtype=bool)
        for run, versions in enumerate(documents):
            add_version(versions, relaxation[fresh[run]], scheduled=renewal > 0)
            if kept[run] > fresh[run]:
                add_version(versions, relaxation[kept[run]], scheduled=False)
            marked[run] = preferred_to(versions, len(versions)) is not None
        risks.append(traffic.risk[kept])
        promised.append(np.where(marked, 0.0, traffic.risk[kept]))  # a decision without a guarantee promises nothing
    assert not within(np.mean(risks[1:], axis=0))
    assert all(within(risk) for risk in promised)


def add_version(versions, relaxation, *, scheduled):
    """Add a certificate to the versions of a policy."""
    last = versions.get(len(versions))
    ancestry = {"step": "scheduled", "predecessor_sha256": document_sha256(last)} if scheduled else None
    rule = {"relaxation": None if np.isinf(relaxation) else float(relaxation), "boundary_u": None}
    versions[len(versions) + 1] = {"rule": rule, "ancestry": ancestry}


def test_deciding_on_one_half_does_not_repair_installing_the_cheaper(traffic):
    rng = np.random.default_rng(5)
    kept = traffic.thresholds(traffic.draw(rng, WINDOW))
    risks = []
    for _ in range(LOOKS):
        saving, certified = (traffic.thresholds(traffic.draw(rng, WINDOW // 2)) for _ in range(2))
        kept = np.where(saving > kept, certified, kept)
        risks.append(traffic.risk[kept])
    assert not within(np.mean(risks, axis=0))


def test_tightening_by_any_rows_at_any_time_keeps_the_budget(traffic):
    rng = np.random.default_rng(6)
    for window in (50, WINDOW):
        kept = traffic.thresholds(traffic.draw(rng, WINDOW))
        for _ in range(LOOKS):
            kept = np.minimum(kept, traffic.thresholds(traffic.draw(rng, window)))
            assert within(traffic.risk[kept])
        assert traffic.risk[kept].mean() < 0.9 * ALPHA  # and is paid for


def test_after_an_alarm_new_rows_keep_the_budget_and_old_rows_kept_are_caught(science, traffic):
    rng = np.random.default_rng(7)
    wrong = np.where(rng.random(len(traffic.loss)) < 0.3, 1.0, traffic.loss)
    degraded = Population(traffic.margin, wrong)
    certificate = calibrate(science, ALPHA)
    chain = chain_of(certificate, installed=1.0, alarm=2.0)
    assert chain.alarmed
    assert chain.since == 2.0
    assert chain.rows(1) == rows_after_alarm(certificate) == 199
    fresh = degraded.draw(rng, chain.rows(1))
    assert within(degraded.risk[degraded.thresholds(fresh)])
    mixed = degraded.risk[degraded.thresholds(fresh, traffic.draw(rng, 2000), traffic.loss)]
    assert not within(mixed)
    assert mixed.mean() > 1.5 * ALPHA
