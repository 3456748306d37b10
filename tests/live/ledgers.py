"""A store with a policy that was kept, turned red, was lifted, and got a new certificate."""

import time
from datetime import UTC, datetime, timedelta

import numpy as np
from msgspec.structs import replace

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import ledger, policies
from conformal_arbitrage.store.ledger import LedgerKey, NewRow, Settlement
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import AlarmBody, DecisionBody, Event, MenuQuestion, new_id
from conformal_arbitrage.types import Leg, Spent
from tests.certificates import edited

DAY = 86400.0
QUESTION = MenuQuestion(context="Which?", actions=("a", "b"))
MODELS = "0123456789abcdef" * 4
PRIMARY_COST, GUARDIAN_COST = 0.0002, 0.5


def certificate(alpha=0.05, seed=0, n=1200, **options):
    rng = np.random.default_rng(seed)
    margin = rng.random(n)
    lost = rng.random(n) < 0.3 * (1 - margin)
    guardian = np.where(lost[:, None], [0.0, 1.0], [1.0, 0.0])
    log = ScoreLog.from_arrays(np.stack([margin, np.zeros(n)], axis=1), guardian)
    return calibrate(log, alpha, zero_one=True, **options)


def leg(role, cost):
    return Leg(role=role, scores=(0.9, 0.1), spent=Spent(calls=1, cost=cost), seconds=0.1)


def decided(id, *, deferred, version, cost=True):
    """Return the event of a decision, with what its legs cost."""
    legs = (leg("primary", PRIMARY_COST if cost else None),)
    legs += (leg("guardian", GUARDIAN_COST if cost else None),) if deferred else ()
    total = sum(one.spent.cost for one in legs) if cost else None
    body = DecisionBody(
        action=0, candidates=(0, 1) if deferred else (0,), margin=0.5, relaxation=0.3, legs=legs, cost=total,
        alpha=0.05, version=version, mode="enforce", form="menu", identities_sha256=MODELS, size=2, audited=True,
    )  # fmt: skip
    decided_by = "guardian" if deferred else "primary"
    return Event(id=id, body=body, policy="support", key_id="caller", decided_by=decided_by)


async def draw_rows(store, losses, *, key, start, stop, cost=True):
    """Write audited decisions with these losses, evenly over a time; None is pending, every second other was deferred."""
    times = np.linspace(start, stop, len(losses), endpoint=False)
    events, audits = [], []
    for place, (loss, at) in enumerate(zip(losses, times.tolist(), strict=True)):
        id = new_id()
        events.append(decided(id, deferred=loss == 0.0 and place % 2 == 0, version=key.version, cost=cost))
        row = NewRow(key=key, drawn=at, due=at + DAY, loss=loss)
        audits.append(Audit(id=id, policy=key.policy, question=QUESTION, ask=False, identities_sha256=MODELS, row=row))
    for low in range(0, len(events), 200):
        await store.run(stored_events.commit, events[low : low + 200], audits=audits[low : low + 200])


def losses(n, rate, seed):
    return np.where(np.random.default_rng(seed).random(n) < rate, 1.0, 0.0).tolist()


async def fill(store, *, now=None, cost=True):
    """Write the story: kept, then red, lifted, and a new certificate that is kept."""
    now = time.time() if now is None else now
    first = certificate(confidence=0.95)
    one = await store.run(policies.install, "support", first.to_dict(), by="configuration")
    key = LedgerKey(policy="support", version=one.version, identities_sha256=MODELS)
    await draw_rows(store, losses(900, 0.03, 1), key=key, start=now - 20 * DAY, stop=now - 10 * DAY, cost=cost)
    await draw_rows(store, losses(200, 0.3, 2), key=key, start=now - 10 * DAY, stop=now - 9 * DAY, cost=cost)
    alarm = AlarmBody(
        version=one.version, lifts=0, identities_sha256=MODELS, cause="losses", audits=1100, known=1100, missing=0,
        mean=0.08, line=0.05, log_evidence=8.0,
    )  # fmt: skip
    assert await store.run(policies.raise_alarm, "support", alarm)
    assert await store.run(
        policies.lift, "support", reason='the prompt was <b>"taken back"</b> & tested', by="command line"
    )
    lifted = replace(key, lifts=1)
    await draw_rows(store, losses(60, 0.05, 3), key=lifted, start=now - 9 * DAY, stop=now - 8 * DAY, cost=cost)
    created = (datetime.now(UTC) + timedelta(seconds=2)).isoformat(timespec="seconds")  # surely after the alarm
    later = edited(certificate(seed=5, confidence=0.95).to_dict(), {"created": created})
    two = await store.run(policies.install, "support", later, by="admin <key>")
    new = LedgerKey(policy="support", version=two.version, identities_sha256=MODELS)
    await draw_rows(
        store, [*losses(700, 0.02, 4), None, None], key=new, start=now - 8 * DAY, stop=now - 0.1 * DAY, cost=cost
    )
    return new


async def settle_served(store, policy="support"):
    """Mark two decisions as fallbacks."""
    rows = await store.run(ledger.changes, (await store.run(ledger.ledgers, policy))[-1].key, 0, limit=2)
    await store.run(ledger.settle, [Settlement(id=row.id, news=0, at=time.time(), served=1.0) for row in rows])
