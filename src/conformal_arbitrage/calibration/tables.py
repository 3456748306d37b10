"""Calibrating a table in a database where no Python runs: PostgreSQL or DuckDB, by SQL; see `calibration/sql.py`.

All queries of a calibration see one state of the table. Only sums, and near the answer single gaps, leave the database; with
a random boundary also the ids of the rows at the threshold gap.

Knows nothing of certificates.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, TypeVar

import numpy as np

from conformal_arbitrage.calibration.draws import draw
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.parts import FallSearch
from conformal_arbitrage.calibration.sql import (
    DUCKDB,
    LARGEST_GUARDIAN,
    LARGEST_PRIMARY,
    MOST_ACTIONS,
    POSTGRES,
    FallQueries,
    SqlDialect,
)
from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.core.losses import as_fraction, finest_tick, in_unit
from conformal_arbitrage.core.risk import check_bound
from conformal_arbitrage.core.search import Buckets, Collect, Fold
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.engines import PassProgress
from conformal_arbitrage.scorelog.tables import interruptible, quoted

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTable:
    """A score log that is a table of a database.

    Attributes:
        address: postgresql://... or the file of a DuckDB database; never shown, since it may hold a password.
        table: the table's name, with its schema if need be ("lake.scores").
        primary: the column of the Primary's scores, an array of double precision.
        guardian: the column of the Guardian's scores.
        id: the column of unique ids; needed for boundary="random".
    """

    address: str = field(repr=False)
    table: str
    primary: str = "primary"
    guardian: str = "guardian"
    id: str = "id"

    @property
    def source(self) -> str:
        """The table, for messages."""
        return f"table {self.table}"

    @property
    def dialect(self) -> SqlDialect:
        """How the database writes SQL."""
        return POSTGRES if self.address.startswith(("postgresql://", "postgres://")) else DUCKDB

    @contextmanager
    def queries(self) -> Generator[Callable[[str], list[tuple[Any, ...]]]]:
        """Yield what runs queries, all on one state of the table.

        Raises:
            ScoreLogError: the database cannot be reached, or a query fails.
        """
        connection, error = _connect(self.address, postgres=self.dialect is POSTGRES)
        try:
            connection.execute(self.dialect.begin)
            with interruptible():
                yield lambda sql: connection.execute(sql).fetchall()
            connection.execute("commit")
        except error as failure:
            reason = str(failure).splitlines()[0]
            raise ScoreLogError(
                f"{self.source}: a query failed on {self.dialect.name} ({reason}); are the columns arrays of float8?"
            ) from failure
        finally:
            connection.close()


def _connect(address: str, *, postgres: bool) -> tuple[Any, type[Exception]]:
    """Return a connection without a transaction of its own, and the errors it raises."""
    if not postgres:
        import duckdb

        try:
            return duckdb.connect(address, read_only=True), duckdb.Error
        except duckdb.Error as failure:
            reason = str(failure).splitlines()[0]
            raise ScoreLogError(f"the DuckDB database cannot be opened ({reason}); check its path") from failure
    try:
        import psycopg
    except ImportError as failure:
        raise OptionError("tables of PostgreSQL need psycopg: pip install 'conformal-arbitrage[postgres]'") from failure
    try:
        return psycopg.connect(address, autocommit=True), psycopg.Error
    except psycopg.ProgrammingError:  # its message quotes a part of the address, which may be the password
        raise ScoreLogError(
            "the address of PostgreSQL cannot be parsed; it is postgresql://user:password@host/database, with special "
            "characters of the password as %XX"
        ) from None
    except psycopg.Error as failure:
        raise ScoreLogError(
            f"PostgreSQL cannot be reached ({str(failure).splitlines()[0]}); check the address"
        ) from failure


class SurveyedTable(FallSearch):
    """A table whose figures are known, and the search for thresholds in it."""

    score_digits: Final = 12

    def __init__(
        self,
        log: ScoreTable,
        options: CalibrationOptions,
        query: Callable[[str], list[tuple[Any, ...]]],
        progress: PassProgress,
    ) -> None:
        """Ask for the figures of all rows."""
        self.log, self._query, self._progress, self._passes = log, query, progress, 0
        name = ".".join(quoted(part) for part in log.table.split("."))
        plain = FallQueries(dialect=log.dialect, table=name, primary=log.primary, guardian=log.guardian, actions=1)
        ((most, fewest),) = self._pass(plain.longest())
        self.most_actions, self.fewest_actions = int(most), int(fewest)
        if not 1 <= self.most_actions <= MOST_ACTIONS:
            raise OptionError(
                f"{log.source}: rows have up to {most} actions; SQL takes 1 to {MOST_ACTIONS}: export the table as Parquet "
                "files, and calibrate them in parts"
            )
        queries = replace(plain, actions=self.most_actions, alone_only=options.guardian_sees == "all")
        self._read_facts(queries, options)
        worst = as_fraction(options.loss_bound or 1, name="loss_bound") if self.unknown else Fraction(0)
        self.tick_digits = finest_tick(self.n, max(Fraction(self.scores[1]) - Fraction(self.scores[0]), worst))
        ticks = -int(-worst * 10**self.tick_digits // 1)
        self._queries = replace(queries, tick_digits=self.tick_digits, worst=ticks)
        self._totals = self._pass(self._queries.totals())
        ((total, largest, rows),) = self._totals
        self._refuse_changed(rows != self.n)
        super().__init__(options, total=int(total), span=self.span)
        unit = 10**self.tick_digits
        self.bound = check_bound(
            options.loss_bound,
            (Fraction(int(largest), unit), -1),
            tick=Fraction(1, unit),
            unit_scores=in_unit(self.scores),
            source=log.source,
        )

    def recheck(self) -> None:
        """Refuse a table whose sums are no longer what they were: the rows of a view may change within a transaction.

        Raises:
            ScoreLogError: they are not.
        """
        now = self._pass(self._queries.facts()), self._pass(self._queries.totals())
        self._refuse_changed(now != (self._facts, self._totals))

    def _refuse_changed(self, changed: bool) -> None:
        if changed:
            raise ScoreLogError(
                f"{self.log.source}: its rows changed between two queries; calibrate a table, or a view of tables that "
                "computes the same rows each time"
            )

    def _pass(self, sql: str) -> list[tuple[Any, ...]]:
        self._passes += 1
        rows = self._query(sql)
        self._progress(f"query {self._passes} of {self.log.source}: {len(rows):,} rows back")
        return rows

    def _read_facts(self, queries: FallQueries, options: CalibrationOptions) -> None:
        self._facts = self._pass(queries.facts())
        ((n, bad, missing, silent, low, high, big, span, router, ticks),) = self._facts
        self.n, self.unknown, self.no_opinion = int(n), int(missing), int(silent)
        self.scores = (0.0, 0.0) if low is None else (float(low), float(high))
        self.span, self.router, self._ticks = float(span), bool(router), int(ticks)
        if bad:
            raise ScoreLogError(
                f"{self.log.source}: {bad} rows have no scores, empty lists, lists of different lengths or an infinity; "
                "correct or remove the scores"
            )
        if missing and options.missing_guardian is None:
            raise ScoreLogError(
                f"{self.log.source}: {missing} of {n} rows have no Guardian score; ask the Guardian again, or pass "
                'missing_guardian="worst_case" (--missing-guardian worst_case): dropping such rows breaks the guarantee'
            )
        if big > LARGEST_PRIMARY or max(-self.scores[0], self.scores[1]) >= LARGEST_GUARDIAN:
            raise OptionError(
                f"{self.log.source}: SQL takes Primary scores up to {LARGEST_PRIMARY:g} and Guardian scores below "
                f"{LARGEST_GUARDIAN:g} in size; got up to {big:g} and {self.scores}; export the table as Parquet files"
            )
        if options.boundary == "random":
            self._refuse_repeated(queries.table)

    def _refuse_repeated(self, table: str) -> None:
        id = quoted(self.log.id)
        ((distinct,),) = self._pass(f"select count(distinct {id}::text) from {table}")
        if distinct != self.n:
            raise ScoreLogError(
                f"{self.log.source}: {self.n} rows have {distinct} different ids in column '{self.log.id}'; make them unique"
            )

    def sha256(self) -> str:
        """Return a digest of the table's sums: it shows a change, not a forgery."""
        facts = (self.n, self.total, self.tick_digits, self._ticks, self.unknown, self.no_opinion, self.scores)
        return "totals:" + hashlib.sha256(repr(facts).encode()).hexdigest()

    def scan_falls(self, work: Callable[[Floats, Integers], _Result], /) -> Iterable[_Result]:
        """Let the database do the work on all falls."""
        if isinstance(work, Fold):
            return [tuple(self._fold(work, number) for number in range(len(work.brackets)))]  # pyright: ignore[reportReturnType]
        if isinstance(work, Collect):
            rows = self._pass(self._queries.scan(work))
            gap, fall = np.array([float(g) for g, _ in rows]), np.array([int(f) for _, f in rows], dtype=np.int64)
            return [work(gap, fall)]  # pyright: ignore[reportReturnType]
        raise AssertionError(work)

    def _fold(self, work: Fold, number: int) -> Buckets:
        rows = self._pass(self._queries.scan(work, number))
        bucket, fall, low, high, count = zip(*rows, strict=True) if rows else ((), (), (), (), ())
        whole: list[Integers] = [np.array([int(v) for v in column], dtype=np.int64) for column in (bucket, fall, count)]
        return Buckets(whole[0], whole[1], np.array(low, np.float64), np.array(high, np.float64), whole[2])

    def scan_draws(
        self, key: bytes, gap: float
    ) -> Callable[[Callable[[Floats, Integers], _Result]], Iterable[_Result]]:
        """Fetch the ids of the rows whose loss falls at a gap, and draw for them here."""

        def scanned(work: Callable[[Floats, Integers], _Result]) -> Iterable[_Result]:
            rows = self._pass(self._queries.at_gap(gap, self.log.id))
            u = np.array([draw(key, str(id)) for id, _ in rows])
            return [work(u, np.array([int(fall) for _, fall in rows], dtype=np.int64))]

        return scanned


def refuse_options(options: CalibrationOptions) -> None:
    """Refuse what SQL does not compute."""
    needs = {
        "loss=": options.loss is not None,
        "score=": options.learned,
        "by=": options.by is not None,
        "cluster=": options.cluster is not None,
        "margins=": options.margins,
        "confidence=": options.confidence is not None,
    }
    for name, is_set in needs.items():
        if is_set:
            raise OptionError(
                f"{name} is not computed by SQL; export the table as Parquet files, and calibrate them in parts"
            )
