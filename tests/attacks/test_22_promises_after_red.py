"""22. After red: whatever races with the alarm or comes after it, nothing promises what its rows cannot show."""

import time

import pytest

from conformal_arbitrage.collecting.renewal import install_successor, outlook, renewable, successor
from conformal_arbitrage.gateway.server import identities_of, secret_of
from conformal_arbitrage.store.record import AlarmBody
from tests.gateway.durability import SECRET
from tests.gateway.test_renewer import DAY, N, ask, gathered, history, house


def raise_alarm(served, version=1):
    body = AlarmBody(
        version=version, lifts=0, identities_sha256="other", cause="losses", audits=90, known=90, missing=0, line=0.3,
        log_evidence=4.0,
    )  # fmt: skip
    assert served.with_store(lambda store: store.raise_alarm("support", body))


@pytest.fixture
def served(where, tmp_path, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    with house(tmp_path, gateway={"database": where}) as started:
        ask(started, N)
        gathered(started, N)
        yield started


def test_a_renewal_that_races_with_the_alarm_neither_ends_safe_mode_nor_promises_anything(served):
    target = renewable(served.config, "support", identities_of(served.config, "support"), secret_of(served.config))

    async def begin(store):
        ahead = await outlook(store, target, now=time.time() + 1.1 * DAY)
        assert (ahead.due, ahead.step) == (True, "scheduled")
        return ahead

    ahead = served.with_store(begin)
    raise_alarm(served)
    time.sleep(1.1)  # a certificate's time of creation is in whole seconds: this one is made after the alarm
    next = served.with_store(lambda store: successor(store, target, ahead))
    assert served.with_store(lambda store: install_successor(store, ahead, next, by="schedule")) is None
    assert [version.version for version in history(served)] == [1]
    ask(served, 1)
    record = served.with_store(lambda store: store.records(policy="support", limit=1))[0]
    assert (record.decision.mode, record.decided_by) == ("safe", "guardian")

    path = "/v1/arbitrage/policies/support"  # by hand it can be installed, and says that it promises nothing
    assert served.put(path, {"certificate": next.certificate.to_dict()}).status_code == 200
    [newest, _] = history(served)
    assert newest.alarmed is not None
    ask(served, 1)
    record = served.with_store(lambda store: store.records(policy="support", limit=1))[0]
    assert "older than the alarm of version 1" in record.decision.no_guarantee
