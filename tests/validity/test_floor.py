"""A floor below which no Guardian is asked: the budget is kept from collecting to serving, and calls are saved."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import Query, ScoreLog, calibrate, inspect
from conformal_arbitrage.collecting.collect import collect
from conformal_arbitrage.collecting.questions import Menus
from tests.calibration.test_floor import not_asked
from tests.validity.simulation import keeps

KEY = b"floor simulation"
TIMES, ROWS = 2500, 40
CONFIG = """
[primary]
kind = "function"
function = "world:primary"
name = "primary"
[guardian]
kind = "function"
function = "world:guardian"
name = "guardian"
"""
WORLD = """
asked = []
def primary(query):
    lead = float(query.text.split()[0])
    return [(1 - lead) / 2, (1 + lead) / 2]
def guardian(query):
    asked.append(query.text)
    return [0.0, 1.0] if query.text.split()[1] == "0" else [1.0, 0.0]
"""


def regret_risk(lead):
    """Rows with a small lead lose four times as often as others."""
    return np.where(lead < 0.5, 0.4, 0.1)


def net_risk(lead):
    """Rows with a large lead gain, and nearly all of the others lose."""
    return np.where(lead > 0.56, -0.68, 0.97)


def draw(risk, n, rng):
    """Return leads with four decimals, and losses of -1, 0 or 1."""
    lead = np.round(rng.random(n), 4)
    expected = risk(lead)
    return lead, np.where(rng.random(n) < np.abs(expected), np.sign(expected), 0).astype(int)


def collected(risk, floor, folder, monkeypatch, rows):
    """Collect rows with a floor, and read the log that was written."""
    monkeypatch.chdir(folder)
    (folder / "arbitrage.toml").write_text(CONFIG)
    (folder / "world.py").write_text(WORLD)
    lead, net = draw(risk, rows, np.random.default_rng(1))
    queries = [
        Query(f"{at:.4f} {loss} {k}", ("a", "b"), id=str(k))
        for k, (at, loss) in enumerate(zip(lead.tolist(), net.tolist(), strict=True))
    ]
    menus = Menus(queries=queries, labels=[0 if loss > 0 else 1 for loss in net.tolist()])
    asyncio.run(collect("arbitrage.toml", menus, output="log.parquet", floor=floor))
    log = ScoreLog.read("log.parquet")
    assert log.missing.tolist() == (lead < floor).tolist()
    return log


LEADS = (np.arange(10_000) + 0.5) / 10_000


def expected_loss(certificate, risk):
    """Return the expected loss of the next decision: leads beyond the threshold are answered by the Primary."""
    relaxation = certificate.relaxation
    return 0.0 if relaxation is None else float(np.where(relaxation < LEADS, risk(LEADS), 0.0).mean())


def measure(log, certify, risk):
    losses = [
        expected_loss(certify(log.select(np.arange(k * ROWS, (k + 1) * ROWS))), risk) for k in range(len(log) // ROWS)
    ]
    return float(np.mean(losses)), float(np.std(losses, ddof=1) / len(losses) ** 0.5)


def regret_certificate(log):
    return calibrate(log, 0.1, boundary="random", key=KEY)


def net_certificate(log):
    return calibrate(log, 0.025, boundary="random", key=KEY, loss="net")


def served_below_the_floor(log):
    """Plant a rule that stops at the last known loss: where none is left above the floor, the Primary answers everything."""
    certificate = regret_certificate(log)
    return certificate.with_threshold(0.0, 0.0) if certificate.relaxation == log.floor else certificate


def floor_after_looking(log):
    """Plant a floor set by the threshold: one that spares few calls is given up for a floor beyond every lead."""
    certificate = net_certificate(log)
    few = certificate.relaxation is None or certificate.relaxation > 0.12
    return net_certificate(not_asked(log, 2.0)) if few else certificate


@pytest.mark.proof
def test_the_regret_keeps_its_budget_from_collecting_to_serving(tmp_path, monkeypatch):
    log = collected(regret_risk, 0.35, tmp_path, monkeypatch, TIMES * ROWS)
    measured = measure(log, regret_certificate, regret_risk)
    assert keeps(0.1, measured), measured
    assert measured[0] > 0.06, "the budget must be used for this test to mean anything"
    planted = measure(log, served_below_the_floor, regret_risk)
    assert not keeps(0.1, planted), planted
    fresh_lead, _ = draw(regret_risk, 2000, np.random.default_rng(2))
    fresh = ScoreLog.from_arrays(
        np.column_stack([(1 - fresh_lead) / 2, (1 + fresh_lead) / 2]), id=map(str, range(2000))
    )
    certificate = regret_certificate(log.select(np.arange(ROWS)))
    assert (certificate.apply(fresh).deferred >= (fresh_lead < 0.35)).all()


@pytest.mark.proof
def test_the_net_loss_keeps_its_budget_with_a_floor_from_other_rows_and_not_with_one_set_after_looking(
    tmp_path, monkeypatch
):
    log = collected(net_risk, 0.05, tmp_path, monkeypatch, TIMES * ROWS)
    measured = measure(log, net_certificate, net_risk)
    assert keeps(0.025, measured), measured
    for floor in (0.3, 0.5, 0.8):
        assert keeps(0.025, measure(not_asked(log, floor), net_certificate, net_risk))
    planted = measure(log, floor_after_looking, net_risk)
    assert not keeps(0.025, planted), planted


# --- What is saved, on recorded scores ---


def saving(path, primary, guardian, alpha):
    """Return how often a floor from a pilot of 300 rows leaves the certificate as it is, and the calls that it saves."""
    log, rng = ScoreLog.read(path, primary=primary, guardian=guardian), np.random.default_rng(0)
    order = rng.permutation(len(log))
    use = next(use for use in inspect(log.select(order[:300])).budgets if use.alpha == alpha)
    same, saved = 0, []
    for _ in range(60):
        rows = log.select(rng.choice(order[300:], 1000, replace=False))
        full = calibrate(rows, alpha, boundary="random", key=KEY)
        cut = calibrate(not_asked(rows, use.floor), alpha, boundary="random", key=KEY)
        same += set(full.differences(cut)) == {"guarantee", "log_sha256", "floor", "not_asked_rows"}
        saved.append(float(replace(rows, floor=use.floor).below_floor.mean()))
    return same, float(np.mean(saved))


@pytest.mark.parametrize(("alpha", "least"), [(0.05, 0.3), pytest.param(0.1, 0.2, marks=pytest.mark.proof)])
def test_the_certificate_is_the_same_in_sixty_of_sixty_draws_with_many_calls_saved(shared, alpha, least):
    same, saved = saving(shared / "science.parquet", "qwen15b", "expert", alpha)
    assert same == 60
    assert saved > least
