"""Write recorded decisions as a score log in many files, of which only one is in memory at a time.

Decisions are read twice, a page at a time: first for what every file says about all rows, then for the rows. The files, in
the order of their names, have the rows of the log that would have been written as one file, in the same order.

Knows nothing of HTTP.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformal_arbitrage.collecting.from_records import (
    RowFacts,
    TimeWindow,
    decision_pages,
    record_rows,
    refuse_unlike_rows,
)
from conformal_arbitrage.errors import OutputError, StoreError
from conformal_arbitrage.scorelog.joining import join_logs
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.store.record import DecisionRecord
from conformal_arbitrage.store.row_base import fit


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenParts:
    """What was written: the files in order, their rows, those without a Guardian score, and the models behind them."""

    files: tuple[Path, ...]
    rows: int
    missing: int
    identities: Mapping[str, Any] | None


async def write_record_parts(
    store: Store,
    policy: str,
    folder: str | Path,
    *,
    rows_per_file: int,
    window: TimeWindow,
    identities: Mapping[str, Any] | None = None,
    everything: bool = False,
) -> WrittenParts:
    """Write the decisions of a policy into a folder, as part-00000.parquet and so on, oldest first.

    Args:
        store: the decision record.
        policy: the policy's name.
        folder: where to write; it must be empty, or not there yet.
        rows_per_file: how many rows a file has; the last may have fewer.
        window: which decisions count; without an end, those recorded before now.
        identities: of the models at hand; the log carries them if these models made every row.
        everything: include rows that were chosen by their scores; the log is then marked as unfit for calibration.

    Raises:
        StoreError: there are no such rows, or they do not make a log, or what is said of all of them changed meanwhile.
        OutputError: the folder is not empty, or cannot be written.
    """
    window = replace(window, until=time.time() if window.until is None else window.until)
    facts = RowFacts()
    async for page in decision_pages(store, policy, window):
        facts.add(_chosen(page, everything=everything))
    refuse_unlike_rows(facts, policy, everything=everything)
    writer = _PartWriter(Path(folder), facts, rows_per_file, facts.identities(identities), everything=everything)
    again, complete = RowFacts(), False
    try:
        async for page in decision_pages(store, policy, window):
            records = _chosen(page, everything=everything)
            again.add(records)
            writer.take(records)
        complete = again == facts
    finally:
        if not complete:
            writer.remove()
    if not complete:
        raise StoreError(
            f"policy {policy!r}: decisions or grades were recorded while they were exported; export again, or only "
            "decisions that are settled (--until)"
        )
    return writer.written()


def _chosen(page: Sequence[DecisionRecord], *, everything: bool) -> list[DecisionRecord]:
    if any(record.decision.session is not None for record in page):
        raise StoreError("this policy decides by session, whose turns may be far apart; export it into one file")
    return [record for record in page if everything or fit(record)]


class _PartWriter:
    """Rows on their way into files: they come newest first, so the last file is filled first."""

    def __init__(
        self,
        folder: Path,
        facts: RowFacts,
        rows_per_file: int,
        identities: Mapping[str, Any] | None,
        *,
        everything: bool,
    ) -> None:
        self._folder, self._facts, self._identities, self._everything = folder, facts, identities, everything
        self._rows_per_file, self._left = rows_per_file, facts.rows
        self._held: list[ScoreLog] = []
        self._files: list[Path] = []
        self._missing = 0
        self._create_folder()

    def _create_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            occupied = next(self._folder.iterdir(), None)
        except OSError as error:
            raise OutputError(
                f"{self._folder}: cannot be a folder of files ({error.strerror}); name another"
            ) from error
        if occupied is not None:
            raise OutputError(f"{self._folder}: has {occupied.name} in it already; name a folder that is empty or new")

    def take(self, records: Sequence[DecisionRecord]) -> None:
        """Keep the rows of records, newest first, and write each file that is full; rows beyond those counted are left."""
        while records and self._left:
            number = (self._left - 1) // self._rows_per_file
            room = self._left - number * self._rows_per_file
            now, records = records[:room], records[room:]
            self._held.append(record_rows(now[::-1], self._facts, everything=self._everything))
            self._left -= len(now)
            if len(now) == room:
                self._write(self._folder / f"part-{number:05d}.parquet")

    def _write(self, path: Path) -> None:
        log = replace(join_logs(self._held[::-1], str(path)), identities=self._identities)
        self._held = []
        self._missing += int(log.missing.sum())
        self._files.append(path)
        log.write(path)

    def remove(self) -> None:
        """Remove the files that were written."""
        for path in self._files:
            path.unlink(missing_ok=True)

    def written(self) -> WrittenParts:
        """Return what was written."""
        return WrittenParts(
            files=tuple(self._files[::-1]), rows=self._facts.rows, missing=self._missing, identities=self._identities
        )
