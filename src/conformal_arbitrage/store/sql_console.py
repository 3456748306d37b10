"""SQLConsole: the part of a store over SQL that the console uses.

Knows nothing of SQLite, PostgreSQL or threads.
"""

from collections.abc import Callable, Collection
from typing import Any

from conformal_arbitrage.store import marks, rows, sign_ins, tallies
from conformal_arbitrage.store.console_base import Mark, MarkedDecisions, PolicyTally, SignIn
from conformal_arbitrage.store.pages import RecordFilter
from conformal_arbitrage.store.row_base import CalibrationRow
from conformal_arbitrage.store.sql_jobs import SingleQuery, SQLJobs
from conformal_arbitrage.types import DAY

_PLACES = SingleQuery("select coalesce(sum(needed - held - votes), 0) from reviews where state = 'open'")
_IN_TIME = (
    "select coalesce(sum(case when outcome is not null and closed - created <= ? then 1 else 0 end), 0), count(*) "
    "from reviews where closed > ? and policy = ? and purpose = 'decide'"
)


class SQLConsole(SQLJobs):
    """See `ConsoleStore`."""

    async def sign_in(self, sha256: str, key_id: str, *, seconds: float) -> None:
        """See `ConsoleStore.sign_in`."""
        await self._write(lambda session: sign_ins.sign_in(session, sha256, key_id, seconds=seconds))

    async def find_sign_in(self, sha256: str) -> SignIn | None:
        """See `ConsoleStore.find_sign_in`."""
        return await self._read(lambda session: sign_ins.find_sign_in(session, sha256))

    async def note_sign_in(self, sha256: str) -> None:
        """See `ConsoleStore.note_sign_in`."""
        await self._write(lambda session: sign_ins.note_sign_in(session, sha256))

    async def sign_out(self, sha256: str) -> None:
        """See `ConsoleStore.sign_out`."""
        await self._write(lambda session: sign_ins.sign_out(session, sha256))

    async def fold_tallies(self) -> int:
        """See `ConsoleStore.fold_tallies`. Runs many short transactions, so that other writers are not delayed."""
        total = 0
        while count := await self._maintain(tallies.fold):
            total += count
        return total

    async def decisions_under(self, policy: str, version: int) -> int:
        """See `ConsoleStore.decisions_under`."""
        return await self._read(lambda session: tallies.decisions_under(session, policy, version))

    async def tallies(self, *, since: float) -> list[PolicyTally]:
        """See `ConsoleStore.tallies`."""
        return await self._scan(lambda session: tallies.tallies(session, since=since))

    async def answered_in_time(self, policy: str, wait: float, *, days: float = 1.0) -> tuple[int, int]:
        """See `ConsoleStore.answered_in_time`."""
        [(answered, ended)] = await self._scan(
            lambda session: session.rows(_IN_TIME, wait, session.now() - days * DAY, policy)
        )
        return int(answered), int(ended)

    async def latest_rows(
        self, policy: str, *, identities_sha256: str, limit: int, wanted: Callable[[str], bool]
    ) -> list[CalibrationRow]:
        """See `ConsoleStore.latest_rows`."""
        options: dict[str, Any] = {"identities_sha256": identities_sha256, "limit": limit, "wanted": wanted}
        return await self._scan(lambda session: rows.latest_rows(session, policy, **options))

    async def open_places(self) -> int:
        """See `ConsoleStore.open_places`."""
        [(places,)] = await self._read(_PLACES)
        return int(places)

    async def open_reviews(self, teams: Collection[str]) -> int:
        """See `ConsoleStore.open_reviews`."""
        marks = ", ".join("?" * len(teams))
        query = SingleQuery(f"select count(*) from reviews where state = 'open' and team in ({marks})", tuple(teams))
        return int((await self._scan(query))[0][0]) if teams else 0

    async def own_votes(self, reviewer: str, *, since: float) -> list[float]:
        """See `ConsoleStore.own_votes`."""
        sql = "select held from votes where at >= ? and reviewer = ? and withdrawn is null"
        return [held for (held,) in await self._scan(SingleQuery(sql, (since, reviewer)))]

    async def marked_decisions(
        self,
        mark: Mark,
        *,
        policy: str | None = None,
        decided_by: str | None = None,
        since: float | None = None,
        until: float | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> MarkedDecisions:
        """See `ConsoleStore.marked_decisions`."""
        wanted = RecordFilter(policy=policy, decided_by=decided_by, since=since, until=until, before=before)
        return await self._scan(lambda session: marks.marked(session, mark, wanted, limit))
