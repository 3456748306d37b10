"""The boundary that nobody named, on the way a user takes: calibrate, save, load, decide; coarse scores throughout."""

from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import Certificate, ScoreLog, calibrate
from conformal_arbitrage.calibration.secret import draw

ALPHA, ROWS = 0.1, 100
SURE, RISK = (0.2, 0.5, 0.8), np.array([0.4, 0.2, 0.05])
"""Three confidences, equally frequent, and how often the Primary loses at each."""
TIMES = [200, pytest.param(2500, marks=pytest.mark.proof)]


def logged(rng, *, ids=True):
    """Return a log of coarse confidences."""
    place = rng.integers(0, len(SURE), ROWS)
    right = 1.0 - (rng.random(ROWS) < RISK[place])
    named = [f"row {k}" for k in range(ROWS)] if ids else None
    return ScoreLog.from_router(
        confidence=np.array(SURE)[place], primary_grade=right, guardian_grade=np.ones(ROWS), id=named
    )


def expected_loss(certificate, queries=20):
    """Return the expected loss of a query, each with an id of its own, as a server gives it."""
    kept = [
        np.mean([certificate.decide([0.0, s], id=f"query {s} {k}").decided_by == "primary" for k in range(queries)])
        for s in SURE
    ]
    return float(np.mean(RISK * kept))


def losses(times, monkeypatch, tmp_path, *, secrets=1, ids=True, **options):
    """Return the expected losses of certificates that were saved and loaded, of several secrets the cheapest."""
    rng, path, means = np.random.default_rng(4), tmp_path / "certificate.json", []
    for k in range(times):
        log, kept = logged(rng, ids=ids), []
        for secret in range(secrets):
            monkeypatch.setenv("ARBITRAGE_SECRET", f"the-secret-of-calibration-{k}-{secret}")
            calibrate(log, ALPHA, **options).save(path)
            certificate = Certificate.load(path)
            kept.append((-expected_loss(certificate), certificate))
        means.append(-min(kept, key=lambda pair: pair[0])[0])
    return np.mean(means), np.std(means) / times**0.5


@pytest.mark.parametrize("times", TIMES)
def test_the_default_spends_the_budget_and_keeps_it(times, monkeypatch, tmp_path):
    mean, error = losses(times, monkeypatch, tmp_path)
    assert ALPHA - 2 / ROWS - 3 * error < mean <= ALPHA + 3 * error


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("options", [{}, {"loss": "net"}, {"boundary": "random"}], ids=str)
def test_rows_without_ids_keep_it_for_queries_with_ids(times, options, monkeypatch, tmp_path):
    mean, error = losses(times, monkeypatch, tmp_path, ids=False, **options)
    assert mean <= ALPHA + 3 * error


def test_the_cheapest_of_ten_secrets_breaks_it(monkeypatch, tmp_path):
    mean, error = losses(30, monkeypatch, tmp_path, secrets=10)
    assert mean > ALPHA + 3 * error


def test_drawing_again_until_the_primary_answers_breaks_it(monkeypatch, tmp_path):
    """A draw per attempt instead of one per query: three attempts at each."""

    def lucky(self, id, text, actions, scores):
        return max(draw(self.secret(), f"{id}, attempt {k}") for k in range(3))

    monkeypatch.setattr(Certificate, "_draw", lucky)
    mean, error = losses(200, monkeypatch, tmp_path)
    assert mean > ALPHA + 3 * error


@pytest.mark.parametrize("options", [{"loss": "net"}, {"boundary": "random"}], ids=str)
def test_queries_drawn_by_id_break_the_budget_of_rows_drawn_by_question(options, monkeypatch, tmp_path):
    by_id = Certificate._draw

    def draw_by_id(self, *query):
        return by_id(replace(self, evidence=self.evidence.__class__(n=ROWS, log_sha256="", empirical_risk=0)), *query)

    monkeypatch.setattr(Certificate, "_draw", draw_by_id)
    mean, error = losses(200, monkeypatch, tmp_path, ids=False, **options)
    assert mean > ALPHA + 3 * error
