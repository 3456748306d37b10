"""Events to write."""

from conformal_arbitrage.store import events
from conformal_arbitrage.store.record import DecisionBody, Event, new_id
from conformal_arbitrage.types import Leg, Spent

LEG = Leg(role="primary", scores=(0.1, 0.9), spent=Spent(calls=1), seconds=0.2, served="m")
BODY = DecisionBody(action=1, candidates=(1,), margin=0.8, legs=(LEG,), mode="enforce", form="menu", size=2)


def decision(id=None, body=BODY, policy="support", key_id="k1", decided_by="primary"):
    return Event(id=id or new_id(), body=body, policy=policy, key_id=key_id, decided_by=decided_by)


def later(id, body):
    return Event(id=id, body=body)


async def decide(store, count=1, **options):
    ids = [new_id() for _ in range(count)]
    for id in ids:
        await store.run(events.commit, [decision(id, **options)])
    return ids
