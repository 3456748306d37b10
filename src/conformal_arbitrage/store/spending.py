"""Operations on spending: what all gateways of one database have used of a limit within a sliding window.

The window is kept in sixty parts. A part counts until all of it has left the window, so no window ever exceeds the limit.
Amounts are whole numbers, which sum exactly. What is reserved and never settled, as after a crash, counts in full.

Knows nothing of what is limited.
"""

from math import floor

from conformal_arbitrage.store.base import Reservation, Shortage
from conformal_arbitrage.store.dialect import Session

_PARTS = 60
_LOCK = -1  # the part whose row every reservation under a name locks first


def reserve(
    session: Session, name: str, amount: int, *, limit: int, seconds: float, settled: bool
) -> Reservation | Shortage:
    """Reserve or spend an amount under a name, unless the window's sum would exceed the limit."""
    now, width = _lock(session, name), seconds / _PARTS
    oldest, current = floor((now - seconds) / width), floor(now / width)
    session.run("delete from spending where name = ? and part <> ? and part < ?", name, _LOCK, oldest)
    rows = session.rows(
        "select part, reserved, spent from spending where name = ? and part >= ? order by part", name, oldest
    )
    used = sum(reserved + spent for _, reserved, spent in rows)
    if used + amount > limit:
        in_flight = sum(spent for _, _, spent in rows) + amount <= limit
        wait = _wait([(part, reserved + spent) for part, reserved, spent in rows], used + amount - limit)
        return Shortage(wait=None if wait is None else (wait + 1) * width + seconds - now, in_flight=in_flight)
    session.run(
        "insert into spending (name, part, reserved, spent) values (?, ?, ?, ?) on conflict (name, part) do update "
        "set reserved = spending.reserved + excluded.reserved, spent = spending.spent + excluded.spent",
        *(name, current, 0 if settled else amount, amount if settled else 0),
    )
    return Reservation(name=name, part=current, amount=amount)


def settle(session: Session, reservation: Reservation, spent: int) -> None:
    """Replace a reservation by what was spent."""
    session.run(
        "update spending set reserved = reserved - ?, spent = spent + ? where name = ? and part = ?",
        *(reservation.amount, spent, reservation.name, reservation.part),
    )


def _lock(session: Session, name: str) -> float:
    """Wait for other reservations under the same name to commit; return the time after that."""
    session.run(
        "insert into spending (name, part, reserved, spent) values (?, ?, 0, 0) "
        "on conflict (name, part) do update set reserved = 0",
        *(name, _LOCK),
    )
    [(now,)] = session.rows(f"select {session.dialect.now}")  # not when the transaction began: it may have waited
    return float(now)


def _wait(parts: list[tuple[int, int]], excess: int) -> int | None:
    """Return the part that has to leave the window for the excess to be gone; None if no part suffices."""
    for part, used in parts:
        excess -= used
        if excess <= 0:
            return part
    return None
