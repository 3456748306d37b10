"""Events: what one commit writes, and what is counted and kept of all events."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from conformal_arbitrage.errors import DamagedError, OptionError, StoreError
from conformal_arbitrage.store import pages
from conformal_arbitrage.store.claims import Claim, SavedResponse, keep_undelivered, note_begun, settle_claim
from conformal_arbitrage.store.ledger import note_news
from conformal_arbitrage.store.outbox import Audit, queue_audits
from conformal_arbitrage.store.pages import LAST_ID, event_writers
from conformal_arbitrage.store.record import (
    AuditBody,
    CompletionBody,
    DecisionBody,
    DecisionRecord,
    Event,
    FeedbackBody,
    Grades,
    JSONObject,
    completion_of_record,
    decode_decision,
    decode_later,
    encode,
    id_at,
    with_outcome,
)
from conformal_arbitrage.store.reviews import ReviewWork, do_review_work, put_items
from conformal_arbitrage.store.session import (
    CHUNK,
    Session,
    Store,
    operation,
    placeholders,
    prepared,
    viewed,
)
from conformal_arbitrage.types import Role

_log = logging.getLogger("conformal_arbitrage.store")


@prepared("write")
def commit(
    events: Sequence[Event],
    *,
    claim: Claim | None = None,
    response: SavedResponse | None = None,
    audits: Sequence[Audit] = (),
    begun: Mapping[int, str] | None = None,
    undelivered: Mapping[str, str] | None = None,
    news: Sequence[str] = (),
    reviews: ReviewWork | None = None,
) -> "Commit":
    """Append events in one transaction, which also settles an idempotency claim, queues audits and writes the ledger.

    Bodies are encoded here, before the transaction begins, so that others do not wait for it.

    Args:
        events: the facts to append.
        claim: the idempotency claim of the request. Without a response it stays under way, as for a stream whose
            decision is made.
        response: finishes the claim.
        audits: decisions drawn for an audit: their questions to queue, and their rows of the ledger to write.
        begun: ids of decisions begun under the claim, by the place of their question, for another attempt.
        undelivered: digest of the question by the id of a decision of which nothing was delivered, for a retry
            without a key.
        news: ids of decisions whose rows of the ledger the events concern; those of audits and feedback always do.
        reviews: what to put into the review queue, or that the claim's request needs it no more.

    Raises:
        LostClaimError: someone else took over the claim; nothing was written.
    """
    if (response is not None or begun) and claim is None:
        raise OptionError("response= and begun= belong to a claim; pass claim= too")
    texts = [(event, encode(event.body, event.id)) for event in events]
    questions = [
        (audit, encode(audit.question, audit.id) if audit.ask and not audit.items else None) for audit in audits
    ]
    return Commit(texts, claim, response, questions, begun or {}, undelivered or {}, news, reviews)


class Commit(Struct, frozen=True):
    """Append events, each with the text of its body; settle a claim; queue audits, each with the text of its question.

    Attributes:
        news: ids of decisions whose rows of the ledger the events concern.
    """

    events: Sequence[tuple[Event, str]]
    claim: Claim | None
    response: SavedResponse | None
    audits: Sequence[tuple[Audit, str | None]]
    begun: Mapping[int, str] = {}
    undelivered: Mapping[str, str] = {}
    news: Sequence[str] = ()
    reviews: ReviewWork | None = None

    @property
    def only_appends(self) -> bool:
        """Whether a single statement suffices, which several commits can share."""
        alone = self.claim is self.reviews is None and not self.audits and not self.undelivered and not self.news
        return alone and not any(isinstance(event.body, AuditBody | FeedbackBody) for event, _ in self.events)

    def __call__(self, session: Session) -> None:
        """Run within the transaction of a session."""
        if self.claim is not None:
            settle_claim(session, self.claim, self.response, session.now())
            note_begun(session, self.claim, self.begun)
        session.append(self.events)
        for event, _ in self.events:
            if isinstance(event.body, AuditBody):
                session.run("delete from audits where id = ?", event.id)
        queue_audits(session, self.audits)
        settled = [event.id for event, _ in self.events if isinstance(event.body, AuditBody | FeedbackBody)]
        note_news(session, [*self.news, *settled])
        keep_undelivered(session, self.undelivered)
        if self.reviews is not None:
            do_review_work(session, self.reviews, self.claim)
        for audit, _ in self.audits:
            if audit.ask:
                put_items(session, audit.items)


MOST_FEEDBACK = 50
"""How often one key may say something about one decision."""
FEEDBACK_BYTES = 2**16
"""How much stored text that may come to, so that every record can be shown whole."""


@viewed("write")
def add_feedback(session: Session, event: Event) -> tuple[int, int] | None:
    """Append feedback that a key sent, unless this decision would have too much of it.

    What others said leaves the room of a key as it is: a caller could keep grades away otherwise.

    Returns:
        How often the key said something before and with how many bytes, if there is no room; None once it is appended.

    Raises:
        StoreError: the view does not reach the decision.
    """
    if pages.subject(session, event.id) is None:
        raise StoreError(f"decision {event.id} is out of reach, or was pruned; nothing was recorded")
    text = encode(event.body, event.id)
    rows = session.rows(
        "select body, at from events where id = ? and kind = 'feedback' and kind <> 'decision' and body is not null",
        event.id,
    )
    earlier = [(body, decode_later("feedback", body, event.id, at)) for body, at in rows]
    sender = event.body.by if isinstance(event.body, FeedbackBody) else None
    sizes = [len(body) for body, feedback in earlier if isinstance(feedback, FeedbackBody) and feedback.by == sender]
    if len(sizes) >= MOST_FEEDBACK or sum(sizes) + len(text) > FEEDBACK_BYTES:
        return len(sizes), sum(sizes)
    session.append([(event, text)])
    note_news(session, [event.id])
    return None


# --- What is new in the chains since it was last read ---


def _marks(session: Session, table: str) -> dict[str, int]:
    """Return how far each writer's events were read."""
    return {writer: int(seq) for writer, seq in session.rows(f"select writer, seq from {table}")}


def _unread(session: Session, table: str, columns: str) -> Iterator[tuple[dict[str, int], str, Sequence[Any]]]:
    """Yield each writer's events after the marks in a table, `CHUNK` in all, and set the marks to their end.

    With them come the marks as they were before, and the writer. One gateway at a time reads on.
    """
    session.run(f"update {table} set seq = seq where writer = ''")
    marks, left = _marks(session, table), CHUNK
    for writer in event_writers(session):
        events = session.rows(
            f"select seq, {columns} from events where writer = ? and seq > ? order by seq limit ?",
            *(writer, marks.get(writer, 0), left),
        )
        if events:
            yield marks, writer, events
            session.run(
                f"insert into {table} (writer, seq) values (?, ?) on conflict (writer) do update set seq = excluded.seq",
                *(writer, events[-1][0]),
            )
        left -= len(events)
        if left <= 0:
            break


# --- Tallies: the record counted by policy, version and hour, each event once ---
#
# Every chain of events is read in order, and how far it was read is noted in the transaction that counts. What an event adds
# is the difference it makes to its decision, as far as that was counted: so it matters neither how often this is interrupted
# nor which of several chains is read first.


class PolicyTally(Struct, frozen=True, kw_only=True):
    """What the decisions of a policy's version came to.

    Attributes:
        decisions: all of them; callers who left before there was a decision are not counted.
        by_primary, by_guardian, by_fallback: who chose.
        no_guarantee: those without a guarantee.
        cost: dollars of the decisions whose cost is known.
        unknown_cost: how many decisions have an unknown cost.
        guardian_calls, guardian_cost: answers of the Guardian to deferrals whose cost is known, and their dollars.
        audit_calls, audit_cost: the same over audits, for which the Guardian was asked in addition.
    """

    policy: str
    version: int
    decisions: int = 0
    by_primary: int = 0
    by_guardian: int = 0
    by_fallback: int = 0
    no_guarantee: int = 0
    cost: float = 0.0
    unknown_cost: int = 0
    guardian_calls: int = 0
    guardian_cost: float = 0.0
    audit_calls: int = 0
    audit_cost: float = 0.0


_HOUR = 3600
_COUNTS = PolicyTally.__struct_fields__[2:]
_MONEY = ("cost", "guardian_cost", "audit_cost")
_ADDED = ", ".join(f"{name} = tallies.{name} + excluded.{name}" for name in _COUNTS)
COMPLETED = "select id from events where kind = 'completion' and kind <> 'decision' and id in"
COMPLETIONS = (
    "select writer, seq, at, body from events where id = ? and kind = 'completion' and kind <> 'decision' "
    "and body is not null"
)
"""That the kind is not a decision is said for the index, which holds all other events by their id."""
_Place = tuple[str, int, int]
"""Policy, version and hour."""


async def fold_tallies(store: Store) -> int:
    """Count the events that are new since the last time, each once; return how many there were.

    Runs many short transactions, so that other writers are not delayed.
    """
    return await store.run_all(_fold_some)


@operation("maintain")
def _fold_some(session: Session) -> int:
    """Count some of the events that are new; return how many were read."""
    marks = _marks(session, "tally_marks")
    if not any(
        session.rows("select 1 from events where writer = ? and seq > ? limit 1", writer, marks.get(writer, 0))
        for writer in event_writers(session)
    ):
        return 0  # without writing anything
    sums: defaultdict[_Place, list[float]] = defaultdict(lambda: [0.0] * len(_COUNTS))
    count = 0
    for marks, writer, events in _unread(session, "tally_marks", "kind, id, at, body, policy, decided_by"):
        ended = _with_completions(session, [event[2] for event in events if event[1] == "decision"])
        for seq, *event in events:
            _count_event(session, sums, marks, event, ended)
            marks[writer] = int(seq)
        count += len(events)
    _add_tallies(session, sums)
    return count


def _with_completions(session: Session, ids: Sequence[str]) -> frozenset[str]:
    """Return which of some decisions have a completion, in one query."""
    if not ids:
        return frozenset()
    rows = session.rows(f"{COMPLETED} ({placeholders(ids)})", *ids)
    return frozenset(id for (id,) in rows)


def _count_event(
    session: Session,
    sums: dict[_Place, list[float]],
    marks: dict[str, int],
    event: Sequence[Any],
    ended: frozenset[str],
) -> None:
    """Count one event; one that is damaged must not stop the others."""
    kind, id, at, body, policy, decided_by = event
    try:
        if kind == "decision" and body is not None:
            decision = decode_decision(body, id)
            if not decision.cancelled:
                place = (policy, decision.version or 0, int(at // _HOUR))
                completions = _counted_completions(session, marks, id) if id in ended else []
                _add_counts(session, sums, id, place, [(1, counts_of(decision, decided_by, completions))])
        elif kind in ("completion", "audit") and body is not None:
            _count_later(session, sums, marks, id, decode_later(kind, body, id, at))
    except StoreError as error:
        _log.error("a decision is not counted: %s", error, extra={"id": id})


def _count_later(
    session: Session, sums: dict[_Place, list[float]], marks: dict[str, int], id: str, later: object
) -> None:
    """Count how a decision ended, or its audit; what comes before its decision is counted with that."""
    rows = session.rows(
        "select writer, seq, at, body, policy, decided_by from events where kind = 'decision' and id = ?", id
    )
    for writer, seq, at, body, policy, decided_by in rows:
        decision = decode_decision(body, id)
        place = (policy, decision.version or 0, int(at // _HOUR))
        if isinstance(later, AuditBody) and later.error is None and later.cost is not None:
            audit = PolicyTally(policy="", version=0, audit_calls=1, audit_cost=later.cost)
            _add_counts(session, sums, id, place, [(1, audit)])
        if isinstance(later, CompletionBody) and int(seq) <= marks.get(writer, 0):
            before = _counted_completions(session, marks, id)
            changed = [(-1, counts_of(decision, decided_by, before))]
            changed.append((1, counts_of(decision, decided_by, _in_order([*before, later]))))
            _add_counts(session, sums, id, place, changed)


def _counted_completions(session: Session, marks: dict[str, int], id: str) -> list[CompletionBody]:
    """Return the completions of a decision that were counted already."""
    rows = session.rows(COMPLETIONS, id)
    counted = sorted((at, body) for writer, seq, at, body in rows if int(seq) <= marks.get(writer, 0))
    bodies = (decode_later("completion", body, id, at) for at, body in counted)
    return [body for body in bodies if isinstance(body, CompletionBody)]


def _in_order(completions: Iterable[CompletionBody]) -> list[CompletionBody]:
    return sorted(completions, key=lambda completion: completion.at or 0.0)


def counts_of(decision: DecisionBody, decided_by: str, completions: Sequence[CompletionBody]) -> PolicyTally:
    """Return what a decision with these completions adds to the counts of its policy's version."""
    completion = completion_of_record(completions)
    whole = with_outcome(decision, completion)
    chose = decided_by if completion is None else completion.decided_by or decided_by
    costs = [leg.spent.cost for leg in whole.legs if leg.role == "guardian" and leg.error is None]
    known = [cost for cost in costs if cost is not None]
    return PolicyTally(
        policy="",
        version=0,
        decisions=1,
        by_primary=int(chose == "primary"),
        by_guardian=int(chose == "guardian"),
        by_fallback=int(chose == "fallback"),
        no_guarantee=int(whole.no_guarantee is not None),
        cost=whole.cost or 0.0,
        unknown_cost=int(whole.cost is None),
        guardian_calls=len(known),
        guardian_cost=sum(known),
    )


def _add_counts(
    session: Session,
    sums: dict[_Place, list[float]],
    id: str,
    place: _Place,
    changes: Sequence[tuple[int, PolicyTally]],
) -> None:
    """Add counts, or take them back, and list a decision that turned out to have no guarantee."""
    for sign, tally in changes:
        values = astuple(tally)[2:]
        sums[place] = [old + sign * value for old, value in zip(sums[place], values, strict=True)]
    if changes[-1][1].no_guarantee:
        session.run(
            "insert into unguaranteed (policy, id, fallback) values (?, ?, ?) on conflict (policy, id) do update "
            "set fallback = excluded.fallback",
            *(place[0], id, changes[-1][1].by_fallback),
        )


def _add_tallies(session: Session, sums: dict[_Place, list[float]]) -> None:
    columns = ", ".join(("policy", "version", "hour", *_COUNTS))
    marks = ", ".join("?" * (3 + len(_COUNTS)))
    for place, values in sums.items():
        session.run(
            f"insert into tallies ({columns}) values ({marks}) on conflict (policy, version, hour) do update set {_ADDED}",
            *(*place, *values),
        )


@viewed("scan")
def tallies(session: Session, *, since: float) -> list[PolicyTally]:
    """Return the counts of every version of every policy that the view reaches, from the hour of a time on."""
    sums = ", ".join(f"sum({name})" for name in _COUNTS)
    rows = session.rows(
        f"select policy, version, {sums} from tallies where hour >= ? group by policy, version order by policy, version",
        int(since // _HOUR),
    )
    return [_tally(row) for row in rows if session.view.reaches([row[0]])]


@operation("read")
def decisions_under(session: Session, policy: str, version: int) -> int:
    """Return how many decisions of a policy's version `fold_tallies` has counted."""
    condition = "policy = ? and version = ?"
    [(count,)] = session.rows(f"select sum(decisions) from tallies where {condition}", policy, version)
    return int(count or 0)


def _tally(row: Sequence[Any]) -> PolicyTally:
    policy, version, *values = row
    named = dict(zip(_COUNTS, values, strict=True))
    counts: dict[str, Any] = {name: float(value) if name in _MONEY else round(value) for name, value in named.items()}
    return PolicyTally(policy=policy, version=int(version), **counts)


@operation("maintain")
def forget_pruned(session: Session, *, before: float) -> None:
    """Drop decisions from the list of those without a guarantee that are no longer in the record; counts stay."""
    session.run(
        "delete from unguaranteed where id < ? and not exists "
        "(select 1 from events where events.kind = 'decision' and events.id = unguaranteed.id)",
        id_at(before),
    )


# --- Calibration rows: what a later calibration needs of a decision that is fit for it, and no content ---
#
# A decision is fit if it was chosen independently of all scores. What is not known of a row stays unknown; a row is never
# dropped because of what is known of it. A row is rebuilt from the whole record of its decision whenever an event about it
# is new, so that neither the order of events nor a crash matters. Pruning writes the row in the transaction that removes the
# record.


class CalibrationRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row.

    Attributes:
        id: the decision's; of a row that was imported from a log, its id there.
        primary: the Primary's scores; in free text its confidence alone. None if it had none.
        guardian: the Guardian's scores over the whole menu; None while, or if, they are unknown.
        grades: of both answers in free text, the first that were given.
        grader: who gave them, if a grader of this package did.
        label: index of the right action, the first that was given.
        session: id of the session's first decision, under a policy that decides by session.
        named: keyed digest of the session that the request named, under any other.
        group: as the request named it, or as the log has it; None if it has none.
    """

    id: str
    form: Literal["menu", "text"] = "menu"
    size: int
    primary: tuple[float | None, ...] | None = None
    guardian: tuple[float | None, ...] | None = None
    grades: Grades | None = None
    grader: JSONObject | None = None
    label: int | None = None
    session: str | None = None
    named: str | None = None
    group: str | None = None


def is_fit(decision: DecisionBody) -> bool:
    """Return whether a decision was chosen independently of its scores, and made with the pinned settings."""
    return not decision.overridden and (decision.mode in ("shadow", "safe") or decision.audited)


def calibration_row(record: DecisionRecord) -> CalibrationRow:
    """Return what a calibration needs of a decision."""
    decision, graded = record.decision, first_graded(record)
    return CalibrationRow(
        id=record.id,
        form="text" if decision.form == "text" else "menu",
        size=decision.size,
        primary=scores_of(record, "primary"),
        guardian=all_guardian_scores(record),
        grades=None if graded is None else graded.grades,
        grader=None if graded is None else graded.grader,
        label=first_index(record),
        session=decision.session,
        named=decision.named,
        group=decision.group,
    )


def scores_of(record: DecisionRecord, role: Role) -> tuple[float, ...] | None:
    """Return the scores of the first leg in a role."""
    return next((leg.scores for leg in record.decision.legs if leg.role == role), None)


def all_guardian_scores(record: DecisionRecord) -> tuple[float, ...] | None:
    """Return the Guardian's scores over the whole menu: from its audit, or from its own leg if that saw everything.

    An audit by other models than the decision's says nothing of this row.
    """
    audit, models = record.audit, record.decision.identities_sha256
    if audit is not None and audit.scores is not None and audit.identities_sha256 in (None, models):
        return audit.scores
    scores = scores_of(record, "guardian")
    return scores if scores is not None and len(scores) == record.decision.size else None


def first_index(record: DecisionRecord) -> int | None:
    """Return the first label that is an index, of those that were not sent by a caller."""
    return next((label for label in record.labels(callers=False) if isinstance(label, int)), None)


def first_graded(record: DecisionRecord) -> FeedbackBody | None:
    """Return the first grades of both answers, since later ones could be chosen by their effect."""
    return next((feedback for feedback in record.feedback if feedback.grades is not None), None)


_LIVE = ""
"""The log of rows that come from decisions."""
_LATER = ("completion", "feedback", "audit")


async def gather_rows(store: Store) -> int:
    """Bring the calibration rows up to what has been recorded; return how many events were new.

    Runs many short transactions, so that other writers are not delayed.
    """
    return await store.run_all(_gather_some)


@operation("maintain")
def _gather_some(session: Session) -> int:
    """Read some of the events that are new since the last time, and write the rows they concern; return how many."""
    count = 0
    for _, _, events in _unread(session, "gathered", "kind, id, body"):
        for id in dict.fromkeys(_concerned(session, events)):
            keep(session, id)
        count += len(events)
    return count


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
        record = pages.intact_record(session, id)
    except StoreError as error:
        _log.error("a decision leaves no calibration row: %s", error, extra={"id": id})
        return
    if record is not None and is_fit(record.decision):
        _write_row(session, record)


def _write_row(session: Session, record: DecisionRecord) -> None:
    body = _text_of(record)
    identities = record.decision.identities_sha256 or ""
    row = (record.policy, _LIVE, 0, record.id, identities, body)
    session.run(
        "insert into calibration_rows (policy, log, place, id, identities, body, seal) values (?, ?, ?, ?, ?, ?, ?) "
        "on conflict (policy, log, place, id) do update set body = excluded.body, seal = excluded.seal",
        *(*row, _row_seal(session, row)),
    )


def _text_of(record: DecisionRecord) -> str:
    return msgspec.json.encode(calibration_row(record)).decode()


def _row_seal(session: Session, row: Sequence[object]) -> str | None:
    return session.seals.sign("calibration row", *row)


@operation("scan")
def count_rows(
    session: Session, policy: str, *, identities_sha256: str, since: float, until: float | None = None
) -> int:
    """Return how many rows a policy has that these models made, by the time their query arrived.

    Args:
        identities_sha256: fingerprint of the identities of the models.
        since: queries that arrived after this time count.
        until: and not after this one; None for all.
    """
    end = LAST_ID if until is None else id_at(until)
    [(number,)] = session.rows(
        "select count(*) from calibration_rows where policy = ? and log = ? and place = 0 and id > ? and id <= ? "
        "and identities = ?",
        *(policy, _LIVE, id_at(since), end, identities_sha256),
    )
    return int(number)


ROW = "policy, log, place, id, identities, body"
_SEALED = f"{ROW}, seal"


@operation("scan")
def calibration_rows(
    session: Session, policy: str, *, identities_sha256: str, since: float, limit: int | None = None
) -> list[CalibrationRow]:
    """Return the rows of a policy that these models made, in the order in which their queries arrived.

    Raises:
        StoreError: a row is not what was written.
    """
    rows = session.rows(
        f"select {_SEALED} from calibration_rows where policy = ? and log = ? and place = 0 and id > ? and "
        f"identities = ? order by id{'' if limit is None else ' limit ?'}",
        *(policy, _LIVE, id_at(since), identities_sha256),
        *([] if limit is None else [limit]),
    )
    return [_row_of(session, row) for row in rows]


@operation("scan")
def latest_rows(
    session: Session, policy: str, *, identities_sha256: str, limit: int, wanted: Callable[[str], bool]
) -> list[CalibrationRow]:
    """Return those of the latest calibration rows of a policy, made by these models, that are wanted by their id.

    Raises:
        StoreError: a row is not what was written.
    """
    kept, end = list[CalibrationRow](), LAST_ID
    while limit > 0 and (
        rows := session.rows(
            f"select {_SEALED} from calibration_rows where policy = ? and log = ? and place = 0 and id < ? and "
            "identities = ? order by id desc limit ?",
            *(policy, _LIVE, end, identities_sha256, min(limit, CHUNK)),
        )
    ):
        kept += [_row_of(session, row) for row in rows if wanted(row[3])]
        limit, end = limit - len(rows), rows[-1][3]
    return kept


def _row_of(session: Session, row: Sequence[Any]) -> CalibrationRow:
    *values, body, seal = row
    if not session.seals.accept(seal, "calibration row", *values, body):
        raise DamagedError(
            f"policy {values[0]}: the calibration row {values[3]} is not what was written; run `arbitrage records verify`, "
            "and restore a backup"
        )
    return msgspec.json.decode(body, type=CalibrationRow)


@operation("maintain")
def import_rows(session: Session, policy: str, log_sha256: str, collected: Sequence[CalibrationRow]) -> None:
    """Write the rows of a log, in its order, unless they are there."""
    for place, imported in enumerate(collected, start=1):
        row = (policy, log_sha256, place, imported.id, "", msgspec.json.encode(imported).decode())
        session.run(
            f"insert into calibration_rows ({_SEALED}) values (?, ?, ?, ?, ?, ?, ?) "
            "on conflict (policy, log, place, id) do nothing",
            *(*row, _row_seal(session, row)),
        )


@operation("scan")
def count_imported(session: Session, policy: str, log_sha256: str) -> int:
    """Return how many rows were imported from a log."""
    condition = "policy = ? and log = ? and place > 0"
    [(number,)] = session.rows(f"select count(*) from calibration_rows where {condition}", policy, log_sha256)
    return int(number)


@operation("scan")
def imported_rows(session: Session, policy: str, log_sha256: str) -> list[CalibrationRow]:
    """Return the rows that were imported from a log, in its order; none if it was not.

    Raises:
        StoreError: a row is not what was written.
    """
    rows = session.rows(
        f"select {_SEALED} from calibration_rows where policy = ? and log = ? order by place", policy, log_sha256
    )
    return [_row_of(session, row) for row in rows]


def row_faults(session: Session) -> list[str]:
    """Return which decisions are fit and have no row, or not that of all that was read about them."""
    return list(_wrong_rows(session)) if session.seals else []


def _wrong_rows(session: Session) -> Iterator[str]:
    gathered = _marks(session, "gathered")
    decisions = "events where writer = ? and seq <= ? and kind = 'decision'"
    for writer, end in sorted(gathered.items()):
        for events in session.chunks("seq, id, body", decisions, "seq", writer, end):
            ids = [id for _, id, body in events if _reads_as_fit(body, id)]
            places = session.rows(
                f"select id, writer, seq from events where id in ({placeholders(ids)}) and kind <> 'decision'", *ids
            )
            unread = {id for id, other, place in places if int(place) > gathered.get(other, 0)}
            rows = session.rows(
                f"select id, body from calibration_rows where log = ? and id in ({placeholders(ids)})", _LIVE, *ids
            )
            kept: dict[str, str] = dict(rows)
            for record, _ in pages.load(session, ids, settled=False):
                if record.id not in unread and kept.get(record.id) != _text_of(record):
                    state = "not what its record says" if record.id in kept else "missing"
                    yield f"policy {record.policy}: the calibration row of decision {record.id} is {state}"
