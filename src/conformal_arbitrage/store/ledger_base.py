"""The ledger: one row for every decision that the audit coin drew, with its loss once that is known; no content.

A ledger belongs to one version of a policy with one set of models, and begins anew when an alarm is lifted. Rows are
numbered in the order of the draw, by the transaction that records the Primary's leg, and stay when records are pruned.

Knows nothing of SQL, or of what a loss means.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec import Struct

from conformal_arbitrage.core.exact import Bools, Floats, Integers
from conformal_arbitrage.store.record import AlarmBody, LiftBody, NoticeBody


class LedgerKey(Struct, frozen=True, kw_only=True):
    """Which ledger a row belongs to.

    Attributes:
        policy: the policy's name.
        version: its version: installing a certificate begins a new ledger.
        lifts: how often alarms of this version were lifted: so does lifting one.
        identities_sha256: fingerprint of the identities of the models: so does another model.
        group: of a certificate by groups; empty without groups.
    """

    policy: str
    version: int
    lifts: int = 0
    identities_sha256: str
    group: str = ""


class NewRow(Struct, frozen=True, kw_only=True):
    """A row to write.

    Attributes:
        key: which ledger.
        drawn: when the decision was made, in seconds since 1970.
        due: the time after which an unknown outcome is missing.
        loss: as a share of the loss bound; None if it is not known yet.
        slot: the session and hour of the decision: a second row with the same one is not written. None without a session.
    """

    key: LedgerKey
    drawn: float
    due: float
    loss: float | None = None
    slot: str | None = None


class AuditRow(Struct, frozen=True, kw_only=True):
    """A row as it is stored.

    Attributes:
        seq: its number in the ledger, from 1.
        id: the decision's.
        drawn, due, loss: as in `NewRow`; an outcome that can no longer be known is due at the time that became clear.
        served: the loss of the answer that the caller got where that is another: 1 after a fallback of which nothing more
            is known; None where it is the loss, or where nothing was delivered.
        delivered: whether the caller got an answer; losses reach from -1 if gains count, so no loss can say it.
        known_order: the number of losses known by then, this one included; None while it is unknown.
        known_at: when it became known.
        change: grows with every change of any row of the ledger: the cursor of `ledger_changes`.
    """

    seq: int
    id: str
    drawn: float
    due: float
    loss: float | None
    served: float | None
    known_order: int | None
    known_at: float | None
    change: int
    delivered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRows:
    """A whole ledger as arrays, in the order of seq.

    Attributes:
        drawn, due: of every row.
        loss: NaN while it is unknown.
        served: NaN where it is the loss; see `AuditRow`.
        delivered: whether the caller got an answer.
        known_order: 0 while the loss is unknown.
        known_at: NaN while it is unknown.
        change: the cursor from which `ledger_changes` goes on.
    """

    drawn: Floats
    due: Floats
    loss: Floats
    served: Floats
    delivered: Bools
    known_order: Integers
    known_at: Floats
    change: int

    @classmethod
    def of(cls, rows: Sequence[Sequence[float | int | None]], change: int) -> "LedgerRows":
        """Build the arrays from (drawn, due, loss, served, undelivered, known_order, known_at) of every row."""
        return cls.of_columns(np.ascontiguousarray(np.array(rows, dtype=np.float64).reshape(-1, 7).T), change)

    @classmethod
    def of_columns(cls, columns: Floats, change: int) -> "LedgerRows":
        """Build the arrays from the same seven values, each of all rows, with NaN for what is unknown."""
        drawn, due, loss, served, undelivered, order, known_at = columns
        return cls(
            drawn=drawn, due=due, loss=loss, served=served, delivered=undelivered == 0, known_at=known_at, change=change,
            known_order=np.nan_to_num(order).astype(np.int64),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def served_otherwise(self) -> Bools:
        """Which decisions delivered another answer than the rule's own, or none."""
        return ~np.isnan(self.served) | ~self.delivered

    def in_known_order(self) -> Floats:
        """Return the known losses in the order in which they became known."""
        known = self.known_order > 0
        return self.loss[known][np.argsort(self.known_order[known], kind="stable")]


class Ledger(Struct, frozen=True, kw_only=True):
    """A ledger that exists: its key, how many rows it has, how many losses are known, and its newest change."""

    key: LedgerKey
    rows: int
    known: int
    change: int


class LedgerNews(Struct, frozen=True, kw_only=True):
    """A row about whose decision something was recorded since the row was last settled.

    Attributes:
        id: the decision's.
        key: the row's ledger.
        news: how many things; passed back in `Settlement`, so that nothing recorded meanwhile is overlooked.
    """

    id: str
    key: LedgerKey
    news: int


class Settlement(Struct, frozen=True, kw_only=True):
    """What is known of a row now.

    Attributes:
        id: the decision's.
        news: from `LedgerNews`.
        at: the time, in seconds since 1970.
        loss: as a share of the loss bound; None while unknown. The first that is recorded stays.
        served, delivered: as in `AuditRow`.
        failed: the outcome can no longer become known: it is missing from now on, not only when it is due.
    """

    id: str
    news: int
    at: float
    loss: float | None = None
    served: float | None = None
    delivered: bool = True
    failed: bool = False


class Notice(Struct, frozen=True, kw_only=True):
    """An alarm of a policy, or its lift; `id` is its name in the record."""

    id: str
    policy: str
    body: NoticeBody


class LedgerStore(Protocol):
    """The part of a store that keeps ledgers and alarms."""

    async def ledgers(self, policy: str | None = None) -> list[Ledger]:
        """Return all ledgers, or those of a policy; oldest version first."""
        ...

    async def ledger(self, key: LedgerKey, *, after: int = 0, limit: int | None = None) -> LedgerRows:
        """Return a ledger, or so many of its rows after one of that number; empty if there is none yet."""
        ...

    async def ledger_changes(self, key: LedgerKey, after: int, *, limit: int = 5000) -> list[AuditRow]:
        """Return the rows that are new or have changed since a cursor, those of the oldest changes first."""
        ...

    async def ledger_news(self, policies: Collection[str], *, limit: int = 500) -> list[LedgerNews]:
        """Return rows of policies whose decisions have news: an audit, feedback, or how their attempt ended."""
        ...

    async def settle_rows(self, settlements: Sequence[Settlement]) -> None:
        """Write outcomes into the ledger."""
        ...

    async def raise_alarm(self, policy: str, alarm: AlarmBody) -> bool:
        """Record an alarm, as an event of the chain; return False if one stands already, or the version is not in force.

        Every gateway serves the policy in safe mode from its next request on: the change count grows.
        """
        ...

    async def lift(self, policy: str, *, reason: str, by: str, version: int | None = None) -> LiftBody | None:
        """Lift the alarm that stands on a version, the newest unless given, as an event of the chain; None if none does."""
        ...

    async def notices(self, policy: str | None = None) -> list[Notice]:
        """Return all alarms and lifts, or those of a policy, oldest first."""
        ...
