import asyncio

from conformal_arbitrage.store import claims
from conformal_arbitrage.store.claims import Reservation, Shortage


async def test_the_limit_holds_over_gateways_of_one_database(where, opened):
    """Two stores on one database, 100 reservations each at once: together they stay within the limit, to the unit."""
    stores = [opened(where), opened(where)]
    calls = [stores[k % 2].run(claims.reserve, "money", 3, limit=100, seconds=3600) for k in range(200)]
    outcomes = await asyncio.gather(*calls)
    held = [one for one in outcomes if isinstance(one, Reservation)]
    short = [one for one in outcomes if isinstance(one, Shortage)]
    assert (len(held), len(short)) == (33, 167)
    assert all(one.in_flight for one in short)  # nothing is spent yet
    await asyncio.gather(*(stores[k % 2].run(claims.settle, one, 1) for k, one in enumerate(held)))
    outcomes = await asyncio.gather(
        *(stores[k % 2].run(claims.reserve, "money", 3, limit=100, seconds=3600, settled=True) for k in range(60))
    )
    held = [one for one in outcomes if isinstance(one, Reservation)]
    assert len(held) == (100 - 33) // 3
    refused = next(one for one in outcomes if isinstance(one, Shortage))
    assert not refused.in_flight
    assert 3500 < refused.wait <= 3660
    assert isinstance(await stores[0].run(claims.reserve, "money", 101, limit=100, seconds=3600), Shortage)
    assert (await stores[0].run(claims.reserve, "money", 101, limit=100, seconds=3600)).wait is None
    assert isinstance(await stores[1].run(claims.reserve, "other", 100, limit=100, seconds=3600), Reservation)


async def test_what_has_left_the_window_no_longer_counts(store):
    assert isinstance(await store.run(claims.reserve, "calls", 5, limit=5, seconds=0.6, settled=True), Reservation)
    shortage = await store.run(claims.reserve, "calls", 1, limit=5, seconds=0.6, settled=True)
    assert 0.4 < shortage.wait <= 0.62
    await asyncio.sleep(shortage.wait)
    assert isinstance(await store.run(claims.reserve, "calls", 5, limit=5, seconds=0.6, settled=True), Reservation)
