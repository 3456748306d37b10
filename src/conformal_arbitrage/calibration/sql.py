"""SQL: the falls of the Guardian regret as a query, for tables in a database where no Python runs.

Rows are unrolled, at most 8 actions, in nested selects: elements, tops, powers, ticks, falls. Every step is one that IEEE
arithmetic fixes, and rounding to whole numbers adds and subtracts a power of two, so the results equal those of
`core/falls.py` to the bit. Only comparisons order a row's actions: the fall at action j is the level of the best action
with a smaller gap minus that of the best with a gap as large or smaller, counted at the first action of each gap.

The dialects are PostgreSQL and DuckDB, on which this was run. Knows nothing of budgets and certificates.
"""

from dataclasses import dataclass
from typing import Final

from conformal_arbitrage.core.search import Bracket, Collect, Fold
from conformal_arbitrage.scorelog.tables import literal, quoted

MOST_ACTIONS: Final = 8
LARGEST_GUARDIAN: Final = 2000.0
_LAST_EXACT_POWER: Final = 22  # of ten, as a float64
_HALF_UP: Final = "'4503599627370496'::float8"  # 2^52
_HALF_UP_SIGNED: Final = "'6755399441055744'::float8"  # 2^52 + 2^51
_NEVER: Final = "(-9000000000000000000)::bigint"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlDialect:
    """What differs between databases.

    Attributes:
        name: of the database.
        size: the length of an array.
        nan: whether a number is NaN.
        divide: division of whole numbers.
        fence: keeps the planner from merging nested selects, which would repeat their expressions over and over.
        begin: begins a transaction that sees one state of the table.
        columns: the query for the names and types of a table's columns.
        odd: whether an array is not a plain list: of more dimensions, or not counted from 1.
    """

    name: str
    size: str
    nan: str
    divide: str
    fence: str
    begin: str
    columns: str
    odd: str


POSTGRES: Final = SqlDialect(
    name="PostgreSQL",
    size="cardinality({})",
    nan="{} = 'NaN'::float8",
    divide="/",
    fence=" offset 0",
    begin="begin isolation level repeatable read, read only",
    columns="select attname, format_type(atttypid, null) from pg_attribute "
    "where attrelid = {literal}::regclass and attnum > 0 and not attisdropped",
    odd="array_ndims({0}) <> 1 or array_lower({0}, 1) <> 1",
)
DUCKDB: Final = SqlDialect(
    name="DuckDB",
    size="len({})",
    nan="isnan({})",
    divide="//",
    fence="",
    begin="begin transaction",
    columns="select column_name, column_type from (describe select * from {table})",
    odd="false",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FallQueries:
    """The queries about one table.

    Attributes:
        dialect: of the database.
        table: its name, as SQL.
        primary: the column of the Primary's scores.
        guardian: the column of the Guardian's scores.
        actions: the most actions of a row.
        alone_only: whether only the top action alone can lose.
        score_digits: significant decimals of a Primary score, 12 or 6 (single precision).
        tick_digits: one tick is 10^-tick_digits.
        worst: the loss of a row without a Guardian score, in ticks.
    """

    dialect: SqlDialect
    table: str
    primary: str
    guardian: str
    actions: int
    alone_only: bool = True
    score_digits: int = 12
    tick_digits: int = 12
    worst: int = 0

    def columns(self) -> str:
        """Return the query for the names and types of all columns."""
        return self.dialect.columns.format(table=self.table, literal=literal(self.table))

    def longest(self) -> str:
        """Return the query for the number of rows, the most actions of one, and the fewest."""
        both = ", ".join(f"coalesce({self._size(one)}, 0)" for one in (self.primary, self.guardian))
        return (
            f"select count(*), coalesce(max(greatest({both})), 0), coalesce(min(greatest({both})), 0) from {self.table}"
        )

    def facts(self) -> str:
        """Return the query for what must be known before losses can be counted."""
        p, g = quoted(self.primary), quoted(self.guardian)
        empty = f"({p} is null and {g} is null) or {self._size(self.primary)} = 0 or {self._size(self.guardian)} = 0"
        differ = f"{self._size(self.primary)} <> {self._size(self.guardian)}"
        odd = f"{self.dialect.odd.format(p)} or {self.dialect.odd.format(g)}"
        infinite = " or ".join(
            f"coalesce(abs({quoted(one)}[{k}]) = 'infinity'::float8, false)"
            for one in (self.primary, self.guardian)
            for k in self._places
        )
        low, high = self._over("least", "v"), self._over("greatest", "v")
        router = "size = 2 and p1 = 0 and p2 >= 0 and (missing or v1 = 1)" if self.actions > 1 else "false"
        return (
            f"select count(*), count(*) filter (where bad), count(*) filter (where missing), "
            f"count(*) filter (where silent), min({low}) filter (where not missing), "
            f"max({high}) filter (where not missing), "
            f"max(big), max(top - low), bool_and({router}), {' + '.join(f'sum(g{k})' for k in self._places)} "
            f"from (select *, {self._over('greatest', 'p')} as top, {self._over('least', 'p')} as low, "
            f"greatest({self._over('greatest', 'p')}, -{self._over('least', 'p')}) as big "
            f"from {self._elements(f'coalesce({empty} or {differ} or {odd} or {infinite}, false)')}{self.dialect.fence}) s"
        )

    def totals(self) -> str:
        """Return the query for the sum of all losses at relaxation 0, the largest of them, and the number of rows."""
        return f"select coalesce(sum(zero), 0), coalesce(max(zero), 0), count(*) from {self._losses()}"

    def scan(self, work: Fold | Collect, number: int = 0) -> str:
        """Return the query that does the work on all falls; of a Fold that on one of its brackets."""
        falls = f"(select gap, fall from ({self._falls()}) f where fall > 0 and gap > 0) f"
        if isinstance(work, Collect):
            ranges = " or ".join(f"gap between {_float(one.low)} and {_float(one.high)}" for one in work.brackets)
            return f"select gap, sum(fall) from {falls} where {ranges} group by gap"
        bracket = work.brackets[number]
        inside = "" if bracket.even else f" where gap between {_float(bracket.low)} and {_float(bracket.high)}"
        return (
            f"select bucket, sum(fall), min(gap), max(gap), count(*) from "
            f"(select {_bucket(bracket)} as bucket, gap, fall from {falls}{inside}) b group by bucket order by bucket"
        )

    def at_gap(self, gap: float, id: str) -> str:
        """Return the query for the ids of the rows whose loss falls at a gap, and by how much."""
        return f"select id, fall from ({self._falls(id)}) f where fall > 0 and gap = {_float(gap)}"

    @property
    def _places(self) -> range:
        return range(1, self.actions + 1)

    def _size(self, column: str) -> str:
        return self.dialect.size.format(quoted(column))

    def _over(self, function: str, name: str) -> str:
        """Return the least or greatest of a quantity over all actions; one alone is itself."""
        names = [f"{name}{k}" for k in self._places]
        return f"{function}({', '.join(names)})" if len(names) > 1 else names[0]

    def _unknown(self, column: str) -> str:
        """Return whether a row lacks a model's scores: no list, or a null or NaN in it."""
        element = "{0}[{1}]".format
        nans = " or ".join(
            f"({self._size(column)} >= {k} and ({element(quoted(column), k)} is null or "
            f"{self.dialect.nan.format(element(quoted(column), k))}))"
            for k in self._places
        )
        return f"({quoted(column)} is null or coalesce({nans}, false))"

    def _elements(self, bad: str = "false", id: str | None = None) -> str:
        """Return the scores of every row, absent actions as copies of the first, which have its gap and its worth."""
        p, g = quoted(self.primary), quoted(self.guardian)
        silent, missing = self._unknown(self.primary), self._unknown(self.guardian)
        flags = (
            f"select {p} as p, {g} as g, {silent} as silent, {missing} as missing, {bad} as bad, "
            f"coalesce({self._size(self.primary)}, {self._size(self.guardian)}) as size"
            f"{'' if id is None else f', {quoted(id)}::text as id'} from {self.table}"
        )
        scores = [f"case when silent then '0'::float8 else coalesce(p[{k}], p[1]) end as p{k}" for k in self._places]
        values = [f"case when missing then '0'::float8 else coalesce(g[{k}], g[1]) end as v{k}" for k in self._places]
        ticks = [
            f"((v{k} * '1e12'::float8 + {_HALF_UP_SIGNED}) - {_HALF_UP_SIGNED})::bigint as g{k}" for k in self._places
        ]
        columns = ["silent", "missing", "bad", "size", *([] if id is None else ["id"])]
        fence = self.dialect.fence
        return (
            f"(select *, {', '.join(ticks)} from (select {', '.join([*columns, *scores, *values])} "
            f"from ({flags}{fence}) e{fence}) r{fence}) q"
        )

    def _ticks(self, id: str | None) -> str:
        """Return the gaps of every row in whole multiples of 1 / power."""
        fence = self.dialect.fence
        top, low = self._over("greatest", "p"), self._over("least", "p")
        tops = (
            f"select *, {top} as top, greatest({top}, -{low}) as big, {self._over('greatest', 'g')} as best "
            f"from {self._elements(id=id)}{fence}"
        )
        powers = f"select *, {self._power()} as power from ({tops}) s1{fence}"
        ticks = ", ".join(f"((top - p{k}) * power + {_HALF_UP}) - {_HALF_UP} as t{k}" for k in self._places)
        return f"(select *, {ticks} from ({powers}) s2{fence}) s3"

    def _power(self) -> str:
        """Return the power of ten by which a row's gaps become whole numbers; see `core/gaps.py`."""
        exponents = range(self.score_digits - _LAST_EXACT_POWER, self.score_digits + 1)
        cases = (f"when big <= '1e{e}'::float8 then '1e{self.score_digits - e}'::float8" for e in exponents)
        return f"case {' '.join(cases)} end"

    def _level(self, value: str) -> str:
        unit = 10 ** (12 - self.tick_digits)
        return (
            f"(best - {value})"
            if unit == 1
            else f"((best - {value} + {unit - 1}) {self.dialect.divide} {unit}::bigint)"
        )

    def _most(self, condition: str) -> str:
        """Return the largest worth among the actions that fulfil a condition on their tick."""
        cases = [f"case when {condition.format(f't{k}')} then g{k} else {_NEVER} end" for k in self._places]
        return f"greatest({', '.join(cases)})" if len(cases) > 1 else cases[0]

    def _losses(self, id: str | None = None) -> str:
        """Return the loss of every row at relaxation 0, with its falls in columns."""
        return f"({(self._alone if self.alone_only else self._candidates)(id)}) s4"

    def _alone(self, id: str | None) -> str:
        """Return one fall per row, at its margin; a tie of real actions at the top has no loss."""
        ties = " + ".join(f"case when {k} <= size and t{k} = 0 then 1 else 0 end" for k in self._places)
        margins = [f"case when t{k} > 0 then t{k} else 'infinity'::float8 end" for k in self._places]
        margin = f"least({', '.join(margins)})" if len(margins) > 1 else margins[0]
        loss = f"case when missing then {self.worst}::bigint else {self._level(self._most('{} = 0'))} end"
        zero = f"case when size < 2 or ({ties}) > 1 then 0::bigint else {loss} end"
        fence, kept = self.dialect.fence, "" if id is None else "id, "
        inner = f"select {kept}{zero} as zero, {margin} / power as gap1 from {self._ticks(id)}{fence}"
        return f"select *, zero as fall1 from ({inner}) l{fence}"

    def _candidates(self, id: str | None) -> str:
        """Return a fall for each action, 0 where an earlier one has the same gap."""
        columns = ["id"] if id is not None else []
        largest = self._over("greatest", "t")
        missing = f"case when {largest} > 0 then {self.worst}::bigint else 0::bigint end"
        columns.append(f"case when missing then {missing} else {self._level(self._most('{} = 0'))} end as zero")
        for j in self._places:
            same = " or ".join(f"t{i} = t{j}" for i in range(1, j)) or "false"
            lower, upper = (self._level(self._most(f"{{}} {sign} t{j}")) for sign in ("<", "<="))
            worst = f"case when t{j} = {largest} then {self.worst}::bigint else 0::bigint end"
            fall = f"case when missing then {worst} else {lower} - {upper} end"
            columns.append(f"t{j} / power as gap{j}")
            columns.append(f"case when t{j} <= 0 or {same} then 0::bigint else {fall} end as fall{j}")
        return f"select {', '.join(columns)} from {self._ticks(id)}{self.dialect.fence}"

    def _falls(self, id: str | None = None) -> str:
        """Return all falls, one below the other."""
        places = range(1, 2) if self.alone_only else self._places
        gaps, falls = (", ".join(f"{name}{j}" for j in places) for name in ("gap", "fall"))
        id_column = "" if id is None else "id, "
        return f"select {id_column}unnest(array[{gaps}]) as gap, unnest(array[{falls}]) as fall from {self._losses(id)}"


def _float(value: float) -> str:
    return f"'{value!r}'::float8"


def _bucket(bracket: Bracket) -> str:
    """Return the bucket of a gap: even ones, never decreasing with the gap."""
    last, width = bracket.buckets - 1, bracket.high - bracket.low
    if not width > 0:
        return "0::bigint"
    return f"floor(least((gap - {_float(bracket.low)}) / {_float(width)} * {last}, {last}))::bigint"
