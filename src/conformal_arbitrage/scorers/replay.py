"""Kind `replay`: recorded scores, or the answer key, looked up by the query's id or by an id on the question's last line.

Knows nothing of who made the scores.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conformal_arbitrage.core.gaps import Floats, Integers
from conformal_arbitrage.errors import NotRecordedError, OptionError, ScoreLogError
from conformal_arbitrage.scorelog.files import Table
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorers.base import Identity, Scores
from conformal_arbitrage.scorers.kinds import BuildContext, ModelConfig
from conformal_arbitrage.types import Query, Role, Spent


class ReplayConfig(ModelConfig, frozen=True, kw_only=True, tag="replay"):
    """Recorded scores, or the answer key with column = "label"."""

    log: str
    column: str

    shufflable: ClassVar[bool] = False  # the recorded scores were made in the recorded order
    shows_questions: ClassVar[bool] = False  # rows are found by their ids
    untested: ClassVar[str | None] = "Recorded scores: loaded, nothing to test."

    def build(self, context: BuildContext) -> "ReplayScorer":
        """Build the scorer."""
        return ReplayScorer.read(context.folder / self.log, self.column, cost=self.price_per_call)

    def recorded_menus(self, folder: Path) -> Mapping[str, int] | None:
        """Return the recorded questions."""
        return ReplayScorer.read(folder / self.log, self.column).menus


class ReplayScorer:
    """Returns recorded scores; build one with `of_log`, `read` or `of_values`.

    Args:
        ids: the rows' ids.
        values: all scores, flat; or, without offsets, the index of each row's right action.
        offsets: where each row's scores begin.
        column: their name in the identity.
        sha256: digest of the content they come from.
        costs: dollars per row.
    """

    def __init__(
        self,
        ids: list[str],
        values: Floats,
        offsets: Integers | None,
        *,
        column: str,
        sha256: str,
        costs: Floats | None,
    ) -> None:
        self._rows = {name: row for row, name in enumerate(ids)}
        self._values = values
        self._offsets = offsets
        self._costs = costs
        self._identity = {"kind": "replay", "log_sha256": sha256, "column": column}

    @classmethod
    def of_log(cls, log: ScoreLog, role: Role) -> "ReplayScorer":
        """Replay what a log recorded for one of its two models."""
        if log.id is None:
            raise OptionError(f"{log.source}: replaying needs an `id` column")
        primary = role == "primary"
        values = log.primary_as_recorded() if primary else log.guardian
        costs = (log.primary_usage if primary else log.guardian_usage).cost
        column = log.columns[0 if primary else 1]
        return cls(log.id.tolist(), values, log.offsets, column=column, sha256=log.sha256(), costs=costs)

    @classmethod
    def read(cls, path: str | Path, column: str, *, cost: float | None = None) -> "ReplayScorer":
        """Replay a column of a file by `id`: a list of scores per row, or the index of the right action.

        Args:
            path: the file.
            column: the column's name.
            cost: dollars to report per query.
        """
        with Table(path) as table:
            for name in ("id", column):
                if name not in table.types:
                    raise ScoreLogError(f"{path}: no column '{name}'; it has {', '.join(sorted(table.types))}")
            ids: list[str] = table.texts("id").tolist()
            lists = table.numbers_if_any(column)
            values = table.scalars(column) if lists is None else lists[0]
            sizes = None if lists is None else np.maximum(lists[1], 0)
        offsets = None if sizes is None else np.concatenate([[0], np.cumsum(sizes)])
        return cls.of_values(ids, values, offsets, column=column, cost=cost)

    @classmethod
    def of_values(
        cls, ids: list[str], values: Floats, offsets: Integers | None, *, column: str, cost: float | None = None
    ) -> "ReplayScorer":
        """Replay scores, or indices of the right actions, held in memory."""
        parts: list[Any] = ["\0".join(ids).encode(), values.tobytes(), b"" if offsets is None else offsets.tobytes()]
        digest = hashlib.sha256(b"\0\0".join(parts)).hexdigest()
        costs = None if cost is None else np.full(len(ids), cost)
        return cls(ids, values, offsets, column=column, sha256=digest, costs=costs)

    @property
    def identity(self) -> Identity:
        """The content's digest and the column."""
        return self._identity

    @property
    def menus(self) -> dict[str, int]:
        """The ids of the rows with all scores, and the number of actions each needs at least."""
        recorded = {name: self._recorded(row, 2) for name, row in self._rows.items()}
        return {
            name: len(scores) for name, scores in recorded.items() if len(scores) > 1 and not np.isnan(scores).any()
        }

    async def score(self, query: Query) -> Scores:
        """Return the scores recorded for this id."""
        row = self._rows.get(query.id or "")
        if row is None:  # a gateway assigns its own ids
            row = self._rows.get(query.text.rsplit("\n", 1)[-1].removeprefix("user: "))
        if row is None:
            raise NotRecordedError(f"no row with id {query.id!r:.80} was recorded")
        places = range(len(query.actions)) if query.places is None else query.places
        whole = self._recorded(row, max(places) + 1)
        known = len(whole) == len(query.actions) if query.places is None else len(whole) > max(places)
        if not known or np.isnan(whole).any():
            raise NotRecordedError(
                f"nothing was recorded for id {query.id!r:.80} and these {len(query.actions)} actions"
            )
        cost = None if self._costs is None else float(self._costs[row])
        return Scores(values=tuple(float(whole[k]) for k in places), spent=Spent(calls=1, cost=cost))

    def _recorded(self, row: int, actions: int) -> Floats:
        if self._offsets is not None:
            return self._values[int(self._offsets[row]) : int(self._offsets[row + 1])]
        if np.isnan(self._values[row]):
            return self._values[:0]
        return (np.arange(max(actions, int(self._values[row]) + 1)) == self._values[row]).astype(float)
