"""What keeps a certificate from people valid, where the truth is known; each broken twin fails the same check."""

import numpy as np
import pytest

from conformal_arbitrage.monitoring.limits import limits_of, loss_logs
from conformal_arbitrage.monitoring.outcomes import AuditedDecision, Verdict, decision_loss
from conformal_arbitrage.monitoring.votes import count_votes
from tests.validity.simulation import expected_loss, keeps, product
from tests.validity.test_monitoring import RUNS, bernoulli, most

pytestmark = pytest.mark.proof
ALPHA, ACTIONS, PEOPLE = 0.10, 3, 3


def panel_of(votes):
    """What a panel comes to: the verdict as scores, and the shares of the votes that were cast until it was certain."""
    for cast in range(1, PEOPLE + 1):
        tally = count_votes(votes[:cast], panel=PEOPLE, rule="majority")
        if tally.verdict is not None or tally.split:
            break
    verdict = votes[-1] if tally.verdict is None else tally.verdict  # a lead decides
    shares = np.bincount(votes[:cast], minlength=ACTIONS) / cast
    return np.eye(ACTIONS)[verdict], shares, tally.split


class Panel:
    """Three people who vote on every question; the Primary is right more often where it leads further."""

    def draw(self, rng, n):
        primary, scores, *_ = self.with_shares(rng, n)
        return primary, scores, np.zeros(n, dtype=bool)

    def with_shares(self, rng, n):
        primary = rng.random((n, ACTIONS))
        liking = 1.5 * primary + rng.normal(size=primary.shape)
        best = liking.argmax(axis=1)
        own = rng.integers(0, ACTIONS, (n, PEOPLE))
        votes = np.where(rng.random((n, PEOPLE)) < self.agreement(primary, best)[:, None], best[:, None], own)
        verdicts, shares, splits = zip(*(panel_of(row) for row in votes.tolist()), strict=True)
        return primary, np.array(verdicts), np.array(shares), np.array(splits)

    def agreement(self, primary, best):
        """Return how often each of them votes for what is best, and not at random."""
        return np.full(len(best), 0.7)


class PanelWithoutLeads(Panel):
    """Nobody decides where three people differ, as they do most where the Primary is wrong: such rows have no score."""

    def draw(self, rng, n):
        primary, scores, _, splits = self.with_shares(rng, n)
        return primary, scores, splits

    def agreement(self, primary, best):
        return np.where(primary.argmax(axis=1) == best, 0.95, 0.0)


class SharesInTheLog(Panel):
    """The broken twin: the log holds shares of votes, which depend on when voting stopped."""

    def __init__(self):
        self.logs = 0

    def draw(self, rng, n):
        self.logs += 1
        primary, scores, shares, _ = self.with_shares(rng, n)
        return primary, shares if self.logs % 2 else scores, np.zeros(n, dtype=bool)


def measured(world, **options):
    return expected_loss(world, product(ALPHA, guardian_sees="all", **options), 150, 120, sees_all=True, seed=5)


def test_the_risk_of_a_panel_stays_within_the_budget():
    assert keeps(ALPHA, measured(Panel()))


def test_shares_of_votes_with_early_stopping_are_caught():
    assert not keeps(ALPHA, measured(SharesInTheLog()))


def without_splits(rng, primary, guardian, fails, fresh):
    """The broken twin: what people could not agree on is left out of the log."""
    kept = primary[~fails], guardian[~fails], fails[~fails]
    return product(ALPHA, guardian_sees="all")(rng, *kept, fresh)


def test_questions_without_a_verdict_stay_as_the_worst_case_and_dropping_them_is_caught():
    world = PanelWithoutLeads()
    assert keeps(ALPHA, measured(world, missing_guardian="worst_case"))
    assert not keeps(ALPHA, expected_loss(world, without_splits, 150, 120, sees_all=True, seed=5))


def audited(choices, primary):
    """The losses that audits show: the verdict of people against the Primary's choice, as the ledger counts them."""
    decisions = [AuditedDecision(decided_by="primary", size=ACTIONS, candidates=(p,), action=p) for p in primary]
    verdicts = [Verdict(scores=tuple(np.eye(ACTIONS)[choice])) for choice in choices]
    return np.array([decision_loss(d, v) for d, v in zip(decisions, verdicts, strict=True)])


def unbiased(losses, truth):
    return abs(losses.mean() - truth) < 3 * losses.std(ddof=1) / len(losses) ** 0.5


@pytest.mark.parametrize(("leaning", "honest"), [(0.0, True), (0.3, False)])
def test_reviewers_who_lean_on_audits_break_the_audited_loss(leaning, honest):
    """Blind reviewers cannot lean, since an audit is the same bytes as a deferral."""
    rng = np.random.default_rng(6)
    primary = rng.integers(0, ACTIONS, 20_000)
    lost = rng.random(20_000) < 0.05
    choices = np.where(lost & (rng.random(20_000) >= leaning), (primary + 1) % ACTIONS, primary)
    losses = audited(choices.tolist(), primary.tolist())
    assert unbiased(losses, 0.05) == honest
    if not honest:
        assert losses.mean() == pytest.approx(0.035, abs=0.004)


def test_late_verdicts_count_and_dropping_them_is_caught():
    """What takes people long is what is hard: without it the rest look easy."""
    rng = np.random.default_rng(7)
    hard = rng.random(20_000)
    lost = rng.random(20_000) < 0.12 * hard
    late = rng.random(20_000) < 0.5 * hard
    primary = rng.integers(0, ACTIONS, 20_000)
    losses = audited(np.where(lost, (primary + 1) % ACTIONS, primary).tolist(), primary.tolist())
    assert unbiased(losses, 0.06)
    assert not unbiased(losses[~late], 0.06)


def wilson(lost, count):
    """Return the usual interval of a share, which covers it 95 times in 100 if it is looked at once."""
    z, mean = 1.959964, lost / count
    centre, half = mean + z**2 / (2 * count), z * np.sqrt(mean * (1 - mean) / count + z**2 / (4 * count**2))
    return (centre - half) / (1 + z**2 / count), (centre + half) / (1 + z**2 / count)


def test_the_band_covers_the_loss_at_every_look_and_the_interval_for_one_look_is_caught():
    """A console is looked at again and again; the same interval would do for one look at the end."""
    rng, rate, looks = np.random.default_rng(21), 0.05, range(25, 2001, 25)
    logs, lost = np.zeros((RUNS, 28), dtype=np.int64), np.zeros(RUNS)
    missed = dict.fromkeys(("band", "interval"), np.zeros(RUNS, dtype=bool))
    for count in looks:
        losses = bernoulli(rng, rate, (RUNS, 25))
        logs, lost = logs + loss_logs(losses).sum(axis=1), lost + losses.sum(axis=1)
        limits = {"band": limits_of(logs, np.full(RUNS, count)), "interval": wilson(lost, count)}
        misses = {name: (lower > rate) | (upper < rate) for name, (lower, upper) in limits.items()}
        missed = {name: missed[name] | misses[name] for name in missed}
    assert misses["interval"].sum() <= most(0.05)
    assert missed["band"].sum() <= most(0.05)
    assert missed["interval"].sum() > 2 * most(0.05)
