"""A month of a policy, read from a store: what was promised, what audits say, who decided, what it cost, what happened.

Losses are recomputed from the ledger as it is known now, for decisions drawn until the end of the month.
Knows nothing of pages or files.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
from msgspec.structs import replace as replaced

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.live.monitored import PolicyHistory, PolicyStanding, WatchedLedger, read_history, stand
from conformal_arbitrage.monitoring.states import SEVERITY
from conformal_arbitrage.store.base import PolicyVersion, Store
from conformal_arbitrage.store.heads import Head
from conformal_arbitrage.store.ledger_base import LedgerKey, LedgerRows, Notice
from conformal_arbitrage.store.record import DecisionRecord

_PAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """A calendar month in UTC: its name, such as 2026-11, and its first and last moment in seconds since 1970."""

    name: str
    start: float
    end: float

    @classmethod
    def of(cls, name: str) -> "Month":
        """Return the month of a name such as 2026-11.

        Raises:
            OptionError: the name is malformed.
        """
        try:
            first = datetime.strptime(name, "%Y-%m").replace(tzinfo=UTC)
        except ValueError as error:
            raise OptionError(f"a month is written as 2026-11; got {name!r}") from error
        years, month = divmod(first.month, 12)
        after = first.replace(year=first.year + years, month=month + 1)
        return cls(name=name, start=first.timestamp(), end=after.timestamp())

    @property
    def title(self) -> str:
        """The month as people write it."""
        return datetime.fromtimestamp(self.start, UTC).strftime("%B %Y")

    def has(self, time: float | None) -> bool:
        """Tell whether a time lies in it."""
        return time is not None and self.start <= time < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Who decided in a month, and what it cost, as far as it is recorded.

    Attributes:
        decisions: recorded decisions.
        by: how many each of Primary, Guardian and fallback decided.
        safe: decisions in safe mode.
        undelivered: decisions without an answer.
        unpromised: how many decisions have no guarantee, by the reason.
        unpriced: decisions whose cost is unknown.
        spent: dollars of the others, without audits.
        audits: audits that were answered.
        audit_cost: dollars of those whose cost is known.
        guardian_cost: mean dollars of a call of the Guardian; None if none is known.
        guardian_calls: how many calls that mean is over.
    """

    decisions: int = 0
    by: dict[str, int]
    safe: int = 0
    undelivered: int = 0
    unpromised: dict[str, int] = field(default_factory=dict[str, int])
    unpriced: int = 0
    spent: float = 0.0
    audits: int = 0
    audit_cost: float = 0.0
    guardian_cost: float | None = None
    guardian_calls: int = 0

    @property
    def guardian_share(self) -> float | None:
        """The share of decisions that the Guardian made."""
        return self.by.get("guardian", 0) / self.decisions if self.decisions else None

    @property
    def always(self) -> float | None:
        """Dollars of always asking the Guardian, at the mean cost of its recorded calls, for decisions with a known cost."""
        return None if self.guardian_cost is None else self.guardian_cost * (self.decisions - self.unpriced)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthReport:
    """A month of a policy.

    Attributes:
        history: everything that is known about the policy.
        month: which month.
        now: when it was read.
        standings: where each ledger of the month stands, or would stand without later decisions; the last one last.
        in_force: versions that were in force in the month, in order.
        notices: alarms and lifts in the month.
        use: who decided, and what it cost.
        head: how far the record has come.
        problems: what is not as it was written; empty if the record verifies.
        signed: whether signatures could be checked.
    """

    history: PolicyHistory
    month: Month
    now: float
    standings: tuple[PolicyStanding, ...]
    in_force: tuple[PolicyVersion, ...]
    notices: tuple[Notice, ...]
    use: Use
    head: Head
    problems: tuple[str, ...]
    signed: bool

    @property
    def standing(self) -> PolicyStanding | None:
        """Where the last ledger of the month stands, of groups the worst; None if there is none."""
        if not self.standings:
            return None
        last = key_of_groups(self.standings[-1])
        own = [one for one in self.standings if key_of_groups(one) == last]
        return min(own, key=lambda one: [*SEVERITY, "not watched"].index(one.state))

    @property
    def until(self) -> float:
        """The end of the month, or now if that is earlier."""
        return min(self.month.end, self.now)


def key_of_groups(standing: PolicyStanding) -> LedgerKey:
    """Return the key of a ledger without its group: the same for all groups of a version with the same models."""
    return replaced(standing.ledger.key, group="")


async def read_month(
    store: Store, config: Config, policy: str, month: Month, *, now: float, signed: bool
) -> MonthReport:
    """Read a month of a policy.

    Raises:
        OptionError: there is no policy of that name, or the month has not begun.
    """
    if month.start > now:
        raise OptionError(f"{month.name} has not begun yet; choose an earlier month")
    history, until = await read_history(store, config, policy), min(month.end, now)
    settings = config.policies.get(policy, PolicyConfig())
    ledgers = [one for one in (_until(ledger, until) for ledger in history.ledgers) if len(one.rows)]
    ledgers.sort(key=lambda one: (one.key.version, one.key.lifts, float(one.rows.drawn[-1])))
    lately = [one for one in ledgers if one.rows.drawn[-1] >= month.start] or ledgers[-1:]
    return MonthReport(
        history=replace(history, ledgers=tuple(ledgers)),
        month=month,
        now=now,
        standings=tuple(stand(one, settings, until) for one in lately),
        in_force=_in_force(history.versions, month),
        notices=tuple(notice for notice in history.notices if month.has(notice.body.at)),
        use=await _use(store, policy, month),
        head=await store.head(),
        problems=tuple(await store.verify()),
        signed=signed,
    )


def _until(ledger: WatchedLedger, until: float) -> WatchedLedger:
    """Return a ledger without decisions drawn later."""
    rows, kept = ledger.rows, int((ledger.rows.drawn < until).sum())
    return replace(
        ledger,
        rows=LedgerRows(
            drawn=rows.drawn[:kept],
            due=rows.due[:kept],
            loss=rows.loss[:kept],
            served=rows.served[:kept],
            delivered=rows.delivered[:kept],
            known_order=rows.known_order[:kept],
            known_at=rows.known_at[:kept],
            change=rows.change,
        ),
    )


def _in_force(versions: tuple[PolicyVersion, ...], month: Month) -> tuple[PolicyVersion, ...]:
    ends = [*(version.installed for version in versions[1:]), np.inf]
    return tuple(
        version
        for version, end in zip(versions, ends, strict=True)
        if version.installed < month.end and end > month.start
    )


async def _use(store: Store, policy: str, month: Month) -> Use:
    """Count the recorded decisions of a month, page by page."""
    tally, before = _Tally(), None
    while True:
        page = await store.records(policy=policy, since=month.start, until=month.end, before=before, limit=_PAGE)
        if not page:
            return tally.use()
        for record in page:
            tally.add(record)
        before = page[-1].id


class _Tally:
    """Adds up records."""

    def __init__(self) -> None:
        self._use = Use(by={})
        self._calls, self._cost = 0, 0.0
        self._unpromised: dict[str, int] = {}

    def add(self, record: DecisionRecord) -> None:
        use, decision = self._use, record.decision
        audit = None if record.audit is None or record.audit.error is not None else record.audit
        for cost in (*(leg.spent.cost for leg in decision.legs if leg.role == "guardian"), audit and audit.cost):
            if cost is not None:
                self._calls, self._cost = self._calls + 1, self._cost + cost
        if decision.no_guarantee is not None:
            self._unpromised[decision.no_guarantee] = self._unpromised.get(decision.no_guarantee, 0) + 1
        by = {**use.by, record.decided_by: use.by.get(record.decided_by, 0) + 1}
        self._use = replace(
            use,
            decisions=use.decisions + 1,
            by=by,
            safe=use.safe + (str(decision.mode) == "safe"),
            undelivered=use.undelivered + (decision.cancelled or decision.pending),
            unpriced=use.unpriced + (decision.cost is None),
            spent=use.spent + (decision.cost or 0.0),
            audits=use.audits + (audit is not None),
            audit_cost=use.audit_cost + ((audit.cost if audit is not None else None) or 0.0),
        )

    def use(self) -> Use:
        """Return the sums."""
        mean = self._cost / self._calls if self._calls else None
        return replace(self._use, guardian_cost=mean, guardian_calls=self._calls, unpromised=self._unpromised)
