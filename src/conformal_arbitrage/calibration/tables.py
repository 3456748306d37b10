"""Calibrating a table in a database where no Python runs: PostgreSQL or DuckDB, by SQL; see `calibration/sql.py`.

All queries of a calibration see one state of the table. Only sums, and near the answer single gaps, leave the database; with
a random boundary also the ids of the rows at the threshold gap.

Knows nothing of certificates.
"""

import hashlib
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, TypeVar

import numpy as np

from conformal_arbitrage.calibration.draws import draw
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.parts import FallSearch, refuse_unfit_columns
from conformal_arbitrage.calibration.sql import (
    DUCKDB,
    LARGEST_GUARDIAN,
    MOST_ACTIONS,
    POSTGRES,
    FallQueries,
    SqlDialect,
)
from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.core.gaps import SINGLE_DIGITS
from conformal_arbitrage.core.losses import as_fraction, finest_tick, in_unit
from conformal_arbitrage.core.risk import check_bound
from conformal_arbitrage.core.search import Buckets, Collect, Fold
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.engines import PassProgress
from conformal_arbitrage.scorelog.fitness import SESSION_TURNS
from conformal_arbitrage.scorelog.tables import interruptible, quoted, refuse_absent_column

_Result = TypeVar("_Result")
_NAME: Final = re.compile(r'"((?:[^"]|"")+)"|([^."]+)')
_SINGLE: Final = re.compile(r"(real|FLOAT)\[\d*\]")
_NUMBERS: Final = re.compile(
    r"(real|double precision|numeric|smallint|integer|bigint|FLOAT|DOUBLE|DECIMAL\(.*\)|"
    r"U?(TINY|SMALL|BIG|HUGE)INT|U?INTEGER)\[\d*\]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTable:
    """A score log that is a table of a database.

    Attributes:
        address: postgresql://... or the file of a DuckDB database; never shown, since it may hold a password.
        table: the table's name, with its schema if need be (lake.scores); a name with a dot in it stands in double quotes.
        primary: the column of the Primary's scores, an array of numbers; one of single precision counts as such.
        guardian: the column of the Guardian's scores.
        id: the column of unique ids, if there is one; needed for boundary="random".
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
    def sql_name(self) -> str:
        """The table's name, as SQL."""
        if not re.fullmatch(rf"({_NAME.pattern})(\.({_NAME.pattern}))*", self.table):
            raise OptionError(f'{self.source}: is no name of a table; write schema.table, or schema."name.with.dots"')
        return ".".join(quoted(name.replace('""', '"') or plain) for name, plain in _NAME.findall(self.table))

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
                f"{self.source}: a query failed on {self.dialect.name} ({reason}); check its name and its columns"
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
            raise ScoreLogError(
                f"the DuckDB database cannot be opened ({reason}); check its path, and close "
                "connections that write to it"
            ) from failure
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
            f"PostgreSQL cannot be reached ({str(failure).splitlines()[0]}); check the address, and the password"
        ) from failure


class SurveyedTable(FallSearch):
    """A table whose figures are known, and the search for thresholds in it."""

    def __init__(
        self,
        log: ScoreTable,
        options: CalibrationOptions,
        query: Callable[[str], list[tuple[Any, ...]]],
        progress: PassProgress,
    ) -> None:
        """Ask for the figures of all rows."""
        self.log, self._query, self._progress, self._passes = log, query, progress, 0
        plain = FallQueries(
            dialect=log.dialect, table=log.sql_name, primary=log.primary, guardian=log.guardian, actions=1
        )
        self._types = dict(self._pass(plain.columns()))
        self._check_columns()
        self.score_digits = SINGLE_DIGITS if _SINGLE.fullmatch(self._types[log.primary]) else 12
        self._longest = self._pass(plain.longest())
        ((rows, most, fewest),) = self._longest
        if not rows:
            raise ScoreLogError(f"{log.source}: there are no rows; give it at least one")
        self.most_actions, self.fewest_actions = int(most), int(fewest)
        if not 1 <= self.most_actions <= MOST_ACTIONS:
            raise OptionError(
                f"{log.source}: rows have up to {most} actions; SQL takes 1 to {MOST_ACTIONS}: export the table as Parquet "
                "files, and calibrate them in parts"
            )
        queries = replace(
            plain,
            actions=self.most_actions,
            alone_only=options.guardian_sees == "all",
            score_digits=self.score_digits,
        )
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

    def _check_columns(self) -> None:
        """Refuse columns that are not there or hold no lists of numbers, and rows that are not single decisions."""
        refuse_unfit_columns(self._types, self.log.source)
        if SESSION_TURNS in self._types:
            raise OptionError(
                f"{self.log.source}: a log of sessions is not computed by SQL; export the table as Parquet files"
            )
        for name in (self.log.primary, self.log.guardian):
            refuse_absent_column(name, self._types, self.log.source)
            if not _NUMBERS.fullmatch(self._types[name]):
                raise ScoreLogError(
                    f"{self.log.source}: column '{name}' is {self._types[name]}; it must be an array of double precision"
                )

    def recheck(self) -> None:
        """Refuse a table whose sums are no longer what they were: the rows of a view may change within a transaction.

        Raises:
            ScoreLogError: they are not.
        """
        again = (self._queries.longest(), self._queries.facts(), self._queries.totals())
        self._refuse_changed([self._pass(sql) for sql in again] != [self._longest, self._facts, self._totals])

    def _refuse_changed(self, changed: bool) -> None:
        if changed:
            raise ScoreLogError(
                f"{self.log.source}: its rows changed between two queries; calibrate a table, or a view of tables that "
                "computes the same rows each time"
            )

    def _pass(self, sql: str) -> list[tuple[Any, ...]]:
        self._passes += 1
        rows = self._query(sql)
        self._progress(f"query {self._passes} of {self.log.source}: rows returned: {len(rows):,}")
        return rows

    def _read_facts(self, queries: FallQueries, options: CalibrationOptions) -> None:
        self._facts = self._pass(queries.facts())
        ((n, bad, missing, silent, low, high, big, span, router, ticks),) = self._facts
        self.n, self.unknown, self.no_opinion = int(n), int(missing), int(silent)
        self.scores = (0.0, 0.0) if low is None else (float(low), float(high))
        self.span, self.router, self._ticks = float(span), bool(router), int(ticks)
        if bad:
            raise ScoreLogError(
                f"{self.log.source}: {bad} rows have no scores, empty lists, lists of different lengths, an infinity, or "
                "arrays that are no plain lists; correct or remove the scores"
            )
        if missing and options.missing_guardian is None:
            raise ScoreLogError(
                f"{self.log.source}: {missing} of {n} rows have no Guardian score; ask the Guardian again, or pass "
                'missing_guardian="worst_case" (--missing-guardian worst_case): dropping such rows breaks the guarantee'
            )
        if big > 10.0**self.score_digits or max(-self.scores[0], self.scores[1]) >= LARGEST_GUARDIAN:
            raise OptionError(
                f"{self.log.source}: SQL takes Primary scores up to {10.0**self.score_digits:g} and Guardian scores below "
                f"{LARGEST_GUARDIAN:g} in size; got up to {big:g} and {self.scores}; export the table as Parquet files"
            )
        if options.boundary == "random":
            refuse_absent_column(self.log.id, self._types, self.log.source)
        if self.log.id in self._types:
            self._refuse_repeated(queries.table)

    def _refuse_repeated(self, table: str) -> None:
        id = f"nullif({quoted(self.log.id)}::text, '')"
        ((rows, distinct),) = self._pass(f"select count(*), count(distinct {id}) from {table}")
        self._refuse_changed(rows != self.n)
        if distinct != self.n:
            raise ScoreLogError(
                f"{self.log.source}: {self.n} rows have {distinct} different ids in column '{self.log.id}'; give every row "
                "one of its own"
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
