"""Operations on calibration rows: copy what the events say of decisions fit for calibration, count and read them.

A row is rebuilt from the whole record of its decision whenever an event about it is new, so that neither the order of
events nor a crash matters. Pruning writes the row in the transaction that removes the record.

Knows nothing of threads, or of how a transaction begins and ends.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.store import pages
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_decision
from conformal_arbitrage.store.heads import CHUNK
from conformal_arbitrage.store.ids import id_at
from conformal_arbitrage.store.record import DecisionRecord
from conformal_arbitrage.store.row_base import CalibrationRow, calibration_row, is_fit

_log = logging.getLogger("conformal_arbitrage.store")
_LIVE = ""
"""The log of rows that come from decisions."""
_LATER = ("completion", "feedback", "audit")
_END = "~"
"""Sorts after every id."""


def gather(session: Session) -> int:
    """Read some of the events that are new since the last time, and write the rows they concern; return how many."""
    session.run("update gathered set seq = seq where writer = ''")  # one gateway at a time
    count = 0
    for writer, seq in _writers(session):
        events = session.rows(
            "select seq, kind, id, body from events where writer = ? and seq > ? order by seq limit ?",
            *(writer, seq, CHUNK - count),
        )
        for id in dict.fromkeys(_concerned(session, events)):
            keep(session, id)
        if events:
            session.run(
                "insert into gathered (writer, seq) values (?, ?) on conflict (writer) do update set seq = excluded.seq",
                *(writer, events[-1][0]),
            )
        count += len(events)
        if count >= CHUNK:
            break
    return count


def _writers(session: Session) -> Iterator[tuple[str, int]]:
    """Yield the writers of events, each with the number of its last event that was read."""
    known = {writer: int(seq) for writer, seq in session.rows("select writer, seq from gathered")}
    writer: str | None = ""
    while writer is not None:
        [(writer,)] = session.rows("select min(writer) from events where writer > ?", writer)
        if writer is not None:
            yield writer, known.get(writer, 0)


def _concerned(session: Session, events: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield the ids of decisions that may have become fit, or of which more is known."""
    for _, kind, id, body in events:
        if kind == "decision":
            if _reads_as_fit(body, id):
                yield id
        elif kind in _LATER and session.rows("select 1 from calibration_rows where log = ? and id = ?", _LIVE, id):
            yield id


def _reads_as_fit(body: str, id: str) -> bool:
    """Tell whether a decision is fit for calibration; one that is damaged must not stop the others."""
    try:
        return is_fit(decode_decision(body, id))
    except StoreError as error:
        _log.error("a decision leaves no calibration row: %s", error, extra={"id": id})
        return False


def keep(session: Session, id: str) -> None:
    """Write the row of a decision, if it is fit for calibration; one that is damaged must not stop the others."""
    try:
        record = pages.record(session, id)
    except StoreError as error:
        _log.error("a decision leaves no calibration row: %s", error, extra={"id": id})
        return
    if record is not None and is_fit(record.decision):
        _write(session, record)


def _write(session: Session, record: DecisionRecord) -> None:
    body = msgspec.json.encode(calibration_row(record, _callers(session, record))).decode()
    identities = record.decision.identities_sha256 or ""
    row = (record.policy, _LIVE, 0, record.id, identities, body)
    session.run(
        "insert into calibration_rows (policy, log, place, id, identities, body, seal) values (?, ?, ?, ?, ?, ?, ?) "
        "on conflict (policy, log, place, id) do update set body = excluded.body, seal = excluded.seal",
        *(*row, _seal(session, row)),
    )


def _callers(session: Session, record: DecisionRecord) -> set[str]:
    """Return which of the keys that sent feedback are callers' own."""
    names = {feedback.by for feedback in record.feedback if feedback.by is not None and feedback.label is not None}
    scopes = [(name, session.rows("select scope from keys where id = ?", name)) for name in names]
    return {name for name, rows in scopes if rows and rows[0][0] == "call"}


def _seal(session: Session, row: Sequence[object]) -> str | None:
    return session.seals.sign("calibration row", *row)


def count(session: Session, policy: str, *, identities_sha256: str, since: float, until: float | None) -> int:
    """Count the rows of a policy that these models made, by the time their query arrived."""
    end = _END if until is None else id_at(until)
    [(number,)] = session.rows(
        "select count(*) from calibration_rows where policy = ? and log = ? and place = 0 and id > ? and id <= ? "
        "and identities = ?",
        *(policy, _LIVE, id_at(since), end, identities_sha256),
    )
    return int(number)


_COLUMNS = "policy, log, place, id, identities, body, seal"


def live_rows(
    session: Session, policy: str, *, identities_sha256: str, since: float, limit: int | None
) -> list[CalibrationRow]:
    """Return rows in the order in which their queries arrived."""
    rows = session.rows(
        f"select {_COLUMNS} from calibration_rows where policy = ? and log = ? and place = 0 and id > ? and "
        f"identities = ? order by id{'' if limit is None else ' limit ?'}",
        *(policy, _LIVE, id_at(since), identities_sha256),
        *([] if limit is None else [limit]),
    )
    return [_decoded(session, row) for row in rows]


def latest_rows(
    session: Session, policy: str, *, identities_sha256: str, limit: int, wanted: Callable[[str], bool]
) -> list[CalibrationRow]:
    """Return those that are wanted by their id of the latest rows, the last one first."""
    kept, end = list[CalibrationRow](), _END
    while limit > 0 and (
        rows := session.rows(
            f"select {_COLUMNS} from calibration_rows where policy = ? and log = ? and place = 0 and id < ? and "
            "identities = ? order by id desc limit ?",
            *(policy, _LIVE, end, identities_sha256, min(limit, CHUNK)),
        )
    ):
        kept += [_decoded(session, row) for row in rows if wanted(row[3])]
        limit, end = limit - len(rows), rows[-1][3]
    return kept


def _decoded(session: Session, row: Sequence[Any]) -> CalibrationRow:
    *values, body, seal = row
    if session.seals and not session.seals.fits(seal, "calibration row", *values, body):
        raise DamagedError(
            f"policy {values[0]}: the calibration row {values[3]} is not what was written; run `arbitrage records verify`, "
            "and restore a backup"
        )
    return msgspec.json.decode(body, type=CalibrationRow)


def import_rows(session: Session, policy: str, log_sha256: str, rows: Sequence[CalibrationRow]) -> None:
    """Write the rows of a log, in its order, unless they are there."""
    for place, one in enumerate(rows, start=1):
        row = (policy, log_sha256, place, one.id, "", msgspec.json.encode(one).decode())
        session.run(
            f"insert into calibration_rows ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?) "
            "on conflict (policy, log, place, id) do nothing",
            *(*row, _seal(session, row)),
        )


def count_imported(session: Session, policy: str, log_sha256: str) -> int:
    """Count the rows of a log."""
    condition = "policy = ? and log = ? and place > 0"
    [(number,)] = session.rows(f"select count(*) from calibration_rows where {condition}", policy, log_sha256)
    return int(number)


def imported_rows(session: Session, policy: str, log_sha256: str) -> list[CalibrationRow]:
    """Return the rows of a log, in its order."""
    rows = session.rows(
        f"select {_COLUMNS} from calibration_rows where policy = ? and log = ? order by place", policy, log_sha256
    )
    return [_decoded(session, row) for row in rows]


def row_faults(session: Session) -> list[str]:
    """Return which rows were changed."""
    if not session.seals:
        return []
    faults: list[str] = []
    last: tuple[Any, ...] = ("", "", -1, "")
    while rows := session.rows(
        f"select {_COLUMNS} from calibration_rows where (policy, log, place, id) > (?, ?, ?, ?) "
        "order by policy, log, place, id limit ?",
        *(*last, CHUNK),
    ):
        changed = [row for row in rows if not session.seals.fits(row[-1], "calibration row", *row[:-1])]
        faults += [f"policy {row[0]}: the calibration row {row[3]!r:.80} was changed" for row in changed]
        last = tuple(rows[-1][:4])
    return faults
