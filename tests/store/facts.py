"""Events to write."""

from conformal_arbitrage.store import Event, new_id


def decision(id=None, body=None, policy="support", key_id="k1", decided_by="primary"):
    told = {"chosen": "refund", "scores": [0.1, 0.9]} if body is None else body
    return Event(id=id or new_id(), kind="decision", body=told, policy=policy, key_id=key_id, decided_by=decided_by)


def later(kind, id, **body):
    return Event(id=id, kind=kind, body=body)


async def decide(store, count=1, **options):
    ids = [new_id() for _ in range(count)]
    for id in ids:
        await store.commit([decision(id, **options)])
    return ids
