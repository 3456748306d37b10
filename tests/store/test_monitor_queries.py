"""What a monitor, /metrics and the command line read never scans the decision record: each statement's plan says so."""

import pytest

from conformal_arbitrage.gateway.auth import Caller
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.live.service import LedgerWatch, read_history, read_standings
from conformal_arbitrage.store import events, ledger, outbox
from tests.live.ledgers import fill
from tests.store.test_record_queries import Noted

CONFIG = Config(policies={"support": PolicyConfig(audit_rate=0.05)})


@pytest.mark.parametrize("where", ["sqlite", "postgres"], indirect=True)
async def test_monitors_and_metrics_never_scan_the_record(store, sql, monkeypatch):
    key = await fill(store)
    sql("analyze")
    plans = watched_plans(store, monkeypatch)
    [standing] = await read_standings(store, CONFIG, now=2e9)
    await read_history(store, CONFIG, "support")
    watch = LedgerWatch(key, standing.ledger.lines, audit_rate=0.05)
    await watch.follow(store)
    await watch.follow(store)
    await watch.refresh_served(store, 2e9)
    await store.run(ledger.news, ["support"])
    await store.change_count()
    await store.run(events.decisions_under, "support", 1)
    metrics = Metrics()
    metrics.standings({"support": {"": (watch.standing(2e9), watch)}})
    metrics.backlog(["support"], await store.run(outbox.audit_backlog))
    assert b"arbitrage_loss_mean" in metrics.text(Caller("op", "operate"))
    assert len(plans) > 10, "nothing was watched"
    for statement, plan in plans:
        assert not scans_the_record(plan), (statement, plan)


async def test_a_statement_that_scans_the_record_is_caught(store, sql, monkeypatch):
    await fill(store)
    sql("analyze")
    plans = watched_plans(store, monkeypatch)
    await store.execute(
        "scan", lambda session: session.rows("select count(*) from events where body like '%\"loss\"%'")
    )
    assert any(scans_the_record(plan) for _, plan in plans)


class Explained(Noted):
    """A session that notes plans, and passes everything else on."""

    def __getattr__(self, name):
        return getattr(self._session, name)


def scans_the_record(plan):
    return "SCAN events" in plan.replace("SCAN events USING INDEX notices", "") or "Seq Scan on events" in plan


def watched_plans(store, monkeypatch):
    """Note the plan of every statement that a store runs from now on."""
    plans = []
    execute = store.execute

    async def noting(mode, work):
        def noted(session):
            watched = Explained(session)
            try:
                return work(watched)
            finally:
                plans.extend(watched.plans)

        return await execute(mode, noted if mode in ("read", "scan") else work)

    monkeypatch.setattr(store, "execute", noting)
    return plans
