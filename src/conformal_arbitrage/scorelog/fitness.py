"""Whether the rows of a log can stand for new queries: selected by their scores, repeated, or in clusters."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.exact import Floats, Indices, Integers, n_rows, sorted_blocks
from conformal_arbitrage.errors import ScoreLogError

if TYPE_CHECKING:
    from conformal_arbitrage.scorelog.log import ScoreLog

UNFIT = "unfit_for_calibration"
"""A column that marks a log whose rows were selected by their scores."""


SESSION_TURNS = "session_turns"
"""A column that marks a log whose rows are whole sessions: how many turns each had."""


def has_sessions(log: "ScoreLog") -> bool:
    """Return whether each row is a session: the score of its first turn, and the mean loss of all its turns."""
    return SESSION_TURNS in log.extra


def refuse_unfit(source: str, columns: Collection[str]) -> None:
    """Refuse a log that says in its columns that its rows were selected by their scores."""
    if UNFIT in columns:
        raise ScoreLogError(
            f"{source}: contains rows selected by their scores, which breaks exchangeability; export shadow and "
            "audited rows only (arbitrage records export --score-log)"
        )


def refuse_floor(log: "ScoreLog") -> None:
    """Refuse a log with a floor where the loss of the Primary alone has to be known in every row."""
    if log.floor is not None:
        raise ScoreLogError(
            f"{log.source}: the Guardian was not asked below the floor {log.floor:g}, in "
            f"{n_rows(int(log.below_floor.sum()))}, so what the Primary alone or another rule would lose there is unknown; "
            "compare and choose on the pilot that the floor came from, and calibrate on this log"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often a log repeats itself.

    Attributes:
        contexts: rows whose context stood in an earlier row.
        rows: rows that equal an earlier one in everything but the id.
    """

    contexts: int
    rows: int

    def problems(self) -> list[str]:
        """Return what to do about repeats, in words."""
        repeated = [
            (self.contexts, ("repeats", "repeat"), "the context of an earlier row"),
            (self.rows, ("equals", "equal"), "an earlier row in all but the id"),
        ]
        return [
            f"{n_rows(count, *verbs)} {what}: rows entered several times, or many of one conversation, are not "
            "exchangeable with new ones; keep one of each, or declare them: --cluster COLUMN --max-cluster-size M"
            for count, verbs, what in repeated
            if count
        ]


def repeats(log: "ScoreLog") -> Repeats:
    """Count repeated contexts and rows.

    Without contexts, rows of coarse scores coincide by themselves, and so do some of finer ones: equal rows then count only
    where scores have more than three decimals, most rows differ, and there are more equal ones than chance explains.
    """
    n = len(log.missing)
    contexts = 0 if log.context is None else n - len(np.unique(log.context))
    digests = content_digests(log)
    rows = n - len(np.unique(digests))
    trivial = log.context is None and (
        2 * rows >= n or (rows > 0 and (_coarse(log.primary) or _by_chance(log, digests)))
    )
    return Repeats(contexts=contexts, rows=0 if trivial else rows)


_NEIGHBOURS = 10
_MOST_DECIMALS = 9


def _by_chance(log: "ScoreLog", digests: NDArray[np.uint64]) -> bool:
    """Return whether so many equal rows are to be expected of independent ones: birthdays coincide.

    Independent rows whose margins have a smooth density are twice as often one tick apart as the same, if they are alike
    in all else. So pairs at 1 to 10 ticks tell how many equal pairs chance gives, and copies add nothing to those. Margins
    of 0 and the largest one are left aside, where scores pile up.
    """
    top, margin = np.zeros(len(log), np.int64), np.full(len(log), np.inf)
    for block, gap, order in sorted_blocks(log):
        top[block.rows] = order[0]
        if len(gap) > 1:
            margin[block.rows] = gap[1]
    inner = np.isfinite(margin) & (margin > 0) & (margin < margin[np.isfinite(margin)].max(initial=0.0))
    pairs, ticks = _equal_pairs(digests[inner]), _as_ticks(margin[inner])
    if ticks is None or not pairs:
        return not pairs
    place = np.arange(len(log.guardian), dtype=np.uint64) - np.repeat(log.offsets[:-1], log.sizes).astype(np.uint64)
    alike = _mixed(np.add.reduceat(_mixed(_bits(log.guardian) ^ _mixed(place)), log.offsets[:-1]))
    alike = _mixed(alike ^ top.astype(np.uint64))
    alike = (alike if log.label is None else _mixed(alike ^ _mixed(log.label.astype(np.uint64))))[inner]
    distinct, counts = np.unique(_mixed(alike ^ _mixed(ticks)), return_counts=True)
    near = 0
    for apart in range(1, _NEIGHBOURS + 1):
        neighbour = _mixed(alike ^ _mixed(ticks + np.uint64(apart)))
        at = np.minimum(np.searchsorted(distinct, neighbour), len(distinct) - 1)
        near += int(counts[at][distinct[at] == neighbour].sum())
    expected = near / _NEIGHBOURS / 2
    return pairs <= expected + 4 * np.sqrt(expected)


def _as_ticks(margins: Floats) -> NDArray[np.uint64] | None:
    """Return margins that were written with few decimals, or their logarithms, as whole numbers; None if neither was."""
    for values in (margins, -np.log(margins)):
        for power in (10.0**decimals for decimals in range(_MOST_DECIMALS + 1)):
            if _are_whole(values * power):
                ticks = np.rint(values * power)
                return (ticks - ticks.min(initial=0.0)).astype(np.uint64)
    return None


def _are_whole(values: Floats) -> bool:
    return bool(np.all(np.abs(values - np.rint(values)) < 1e-4))


def _equal_pairs(digests: NDArray[np.uint64]) -> int:
    counts = np.unique(digests, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _coarse(values: Floats) -> bool:
    """Return whether no value has more than three decimals."""
    thousandths = values[np.isfinite(values)] * 1000
    return bool(np.all(np.abs(thousandths - np.rint(thousandths)) < 1e-6))


def content_digests(log: "ScoreLog") -> NDArray[np.uint64]:
    """Return 64 bits per row that stand for its scores, context and label; equal rows have equal ones."""
    place = np.arange(len(log.primary), dtype=np.uint64) - np.repeat(log.offsets[:-1], log.sizes).astype(np.uint64)
    actions = _mixed(_bits(log.primary) ^ _mixed(_bits(log.guardian) ^ _mixed(place)))
    digests = _mixed(np.add.reduceat(actions, log.offsets[:-1]))
    if log.context is not None:
        digests = _mixed(digests ^ text_digests(log.context.tolist()))
    return digests if log.label is None else _mixed(digests ^ _mixed(log.label.astype(np.uint64)))


def text_digests(texts: Iterable[str]) -> NDArray[np.uint64]:
    """Return 64 bits per text."""
    return np.frombuffer(b"".join(blake2b(text.encode(), digest_size=8).digest() for text in texts), dtype="<u8")


def _bits(values: Floats) -> NDArray[np.uint64]:
    return np.ascontiguousarray(values + 0.0).view(np.uint64)  # -0.0 becomes 0.0


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all others: the finaliser of splitmix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def cluster_sizes(log: "ScoreLog", column: str) -> Integers:
    """Return the number of rows of each cluster, one per distinct value of a column."""
    texts = column_texts(log, column)
    if texts is None:
        raise ScoreLogError(f"{log.source}: there is no column '{column}' to cluster by; name one with --cluster")
    if "" in texts:
        raise ScoreLogError(
            f"{log.source}: row {texts.index('') + 1}, column '{column}': no cluster; give every row one"
        )
    return np.unique(np.array(texts, dtype=np.object_), return_counts=True)[1]


def group_rows(log: "ScoreLog", column: str) -> dict[str, Indices]:
    """Return the rows of each group, one per distinct value of a column, in the order of their names."""
    texts = column_texts(log, column)
    if texts is None:
        raise ScoreLogError(f"{log.source}: there is no column '{column}' to group by; name one with --by")
    if "" in texts:
        raise ScoreLogError(f"{log.source}: row {texts.index('') + 1}, column '{column}': no group; give every row one")
    names, member = np.unique(np.array(texts, dtype=np.object_), return_inverse=True)
    return {str(name): np.flatnonzero(member == k) for k, name in enumerate(names.tolist())}


def column_texts(log: "ScoreLog", column: str) -> list[str] | None:
    """Return a column with one value per row as texts, empty where there is none; None if the log lacks it."""
    named = {"group": log.group, "context": log.context}
    values = named[column] if named.get(column) is not None else log.extra.get(column)
    if values is None:
        return None
    return ["" if value is None or value != value else str(value) for value in values.tolist()]
