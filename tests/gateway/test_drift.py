"""A running gateway notices that its Primary's margins have changed, and does nothing but say so."""

import random

from tests.gateway.house import DECISION, QUESTION, until, votes
from tests.gateway.test_monitor import ledger, monitor

BATCH = 30


def spread(low, high, seed):
    """A Primary whose margin lies anywhere in a range."""
    rng = random.Random(seed)
    return lambda path, body, number: votes((1 + (m := round(rng.uniform(low, high), 3))) / 2, (1 - m) / 2)(
        path, body, number
    )


def watched(made, count):
    """The monitor's document, once so many margins were compared."""
    return until(lambda: (shown := monitor(made)).get("drift") and shown["drift"]["decisions"] >= count and shown, 60)


def decide_many(made, batches):
    for _ in range(batches):
        assert made.decide({**DECISION, "questions": [QUESTION] * BATCH}).status_code == 200


def test_other_margins_are_noticed_and_change_nothing_else(house):
    gateway = house(primary=spread(0.5, 1.0, 1), guardian=votes(1), policy={"audit_rate": 1.0})
    decide_many(gateway, 15)
    assert not watched(gateway, 15 * BATCH)["drift"]["with_calibration"]
    gateway.primary.reply = spread(0.35, 0.6, 2)
    decide_many(gateway, 15)
    shown = watched(gateway, 30 * BATCH)
    assert shown["drift"]["noticed"]
    assert (shown["mode"], shown["alarm"], shown["guarantee"]) == ("enforce", None, "crc")
    assert shown["state"] not in ("amber", "red")
    assert 'arbitrage_drift_evidence{policy="support"}' in gateway.get("/metrics").text
    gateway.restart()
    assert watched(gateway, 30 * BATCH)["drift"] == shown["drift"]  # a function of the ledger
    gateway.with_store(lambda store: store.prune(before=2e10))
    gateway.restart()
    assert watched(gateway, 30 * BATCH)["drift"] == shown["drift"]
    assert len(ledger(gateway)) == 30 * BATCH


def test_with_quantiles_traffic_is_compared_with_calibration(house):
    gateway = house(
        primary=votes(0.7, 0.3), guardian=votes(1), policy={"audit_rate": 1.0}, calibration={"margins": True}
    )
    decide_many(gateway, 10)  # margins of 0.4, and calibration had 0.3 and 0.8
    shown = watched(gateway, 10 * BATCH)["drift"]
    assert shown["with_calibration"]
    assert shown["noticed"]
