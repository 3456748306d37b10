"""What is erased and pruned leaves the database and its files; what each field and each table is for is declared."""

import asyncio
import time
from pathlib import Path

import pytest
from msgspec import Struct

from conformal_arbitrage import types
from conformal_arbitrage.store import integrity, pages, record, reviews
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.record import Content, DecisionBody, erased
from conformal_arbitrage.store.schema import RETENTION
from conformal_arbitrage.types import field_marks
from tests.gateway.durability import run_sql
from tests.store.columns import COLUMNS
from tests.store.everything import KEYS, LABEL, NAME, WORD, fill
from tests.store.facts import decide

STRUCTS = {
    *(value for value in vars(record).values() if isinstance(value, type) and issubclass(value, Struct)),
    *(types.Spent, types.Failure, types.LearnedUse),
} - {Struct, record._Version}


@pytest.mark.parametrize(
    "struct", sorted(STRUCTS, key=lambda struct: struct.__name__), ids=lambda struct: struct.__name__
)
def test_every_field_of_a_record_is_marked_as_content_personal_or_kept(struct):
    unmarked = [name for name, marks in field_marks(struct).items() if not {"content", "personal", "kept"} & {*marks}]
    assert unmarked == []


def test_a_field_without_a_mark_is_seen():
    class Unmarked(Struct):
        text: str

    assert field_marks(Unmarked) == {"text": ()}


def test_erasing_keeps_numbers_in_the_place_of_words_and_follows_the_marks_of_parts():
    body = DecisionBody(action=1, content=Content(answer=WORD), legs=(types.Leg(
        role="primary", scores=(1.0,), spent=types.Spent(), seconds=1.0, error=types.Failure("Timeout", WORD), reply=WORD,
    ),))  # fmt: skip
    new = erased(body)
    assert (new.action, new.content, new.legs[0].scores) == (1, None, (1.0,))
    assert (new.legs[0].error, new.legs[0].reply) == (types.Failure("Timeout"), None)
    assert erased(record.FeedbackBody(label=2, comment=WORD)) == record.FeedbackBody(label=2)


def files(where):
    """The bytes of a database's files."""
    return b"".join(path.read_bytes() for path in Path(where).parent.glob("store.db*"))


def leaves(where):
    """All values in the tables."""
    tables = {name.split(".")[0] for name in COLUMNS}
    return repr([bytes(value) if isinstance(value, memoryview) else value
                 for table in tables for row in run_sql(where, f"select * from {table}") for value in row])  # fmt: skip


async def erase(where, id):
    async with await open_store(where, keys=KEYS) as store:
        assert await integrity.erase(store, id)
        erased = await store.run(pages.record, id)
        faults = await integrity.verify(store)
        left = files(where) if "://" not in where else b""  # while it is open
    return erased, faults, left


def test_erasing_a_decision_leaves_no_word_and_no_name_of_it(where):
    id = asyncio.run(fill(where))
    assert {word for word in (WORD, NAME, LABEL) if word in leaves(where)} == {WORD, NAME, LABEL}
    run_sql(where, "delete from audits where identities <> 'i'")  # those of other decisions
    run_sql(where, "delete from review_claims")
    run_sql(where, "delete from review_seen where why <> 'voted'")
    run_sql(where, "delete from reviews where team = 'others'")
    run_sql(where, "delete from presence")
    erased, faults, left = asyncio.run(erase(where, id))
    assert faults == []
    assert {word for word in (WORD, NAME, LABEL) if word in leaves(where)} == set()
    assert [word for word in (WORD, NAME, LABEL) if word.encode() in left] == []
    assert (erased.decision.content, erased.completion.content, erased.audit.answer) == (None, None, None)
    assert (erased.feedback[0].label, erased.feedback[0].comment, erased.feedback[0].grade) == (None, None, 1.0)
    assert (erased.audit.error, erased.feedback[0].reason) == ("erased", "erased")
    [vote] = erased.audit.review.votes
    assert (vote.reviewer, vote.choice) == ("erased", 1)


async def prune(where):
    async with await open_store(where, keys=KEYS) as store:
        [verdict] = await store.run(reviews.due) or [None]
        assert verdict is None
        await integrity.prune(store, before=time.time() + 10)
        left = files(where) if "://" not in where else b""
    return left


def end_everything(where):
    """What waits is done, and what expires has expired."""
    for statement in (
        "delete from audits",
        "update ledger set due = 0",
        "update reviews set state = 'closed', closed = 1, payload = null, held = 0",
        "delete from review_claims",
        "update review_requests set body = null",
        "update deliveries set created = 1",
        *(f"update {name} set expires = 0" for name in ("claims", "replays", "begun", "undelivered", "sign_ins")),
        "update conversations set expires = 0",
    ):
        run_sql(where, statement)


def test_pruning_empties_every_table_that_does_not_say_why_it_is_kept(where):
    assert RETENTION.keys() == {name.split(".")[0] for name in COLUMNS}
    asyncio.run(fill(where))
    filled = {table for table in RETENTION if run_sql(where, f"select count(*) from {table}") != [(0,)]}
    assert filled == RETENTION.keys()
    end_everything(where)
    left = asyncio.run(prune(where))
    rows = {table: run_sql(where, f"select count(*) from {table}")[0][0] for table in RETENTION}
    kept = "body is null or kind in ('alarm', 'exclusion')"
    tombstones = run_sql(where, f"select count(*) from events where {kept}")[0][0]
    assert rows["events"] == tombstones, "which only keep the chain whole"
    assert {table for table, rule in RETENTION.items() if rule != "kept" and rows[table]} <= {"events"}
    assert [word for word in (WORD, NAME, LABEL) if word in leaves(where) or word.encode() in left] == []


async def test_no_byte_of_many_pruned_decisions_is_left_in_the_files_while_others_are_written(tmp_path):
    where = str(tmp_path / "store.db")
    async with await open_store(where, keys=KEYS) as store:
        for k in range(60):
            texts = f"{WORD} {k} " * (1 + 37 * k % 400)
            body = DecisionBody(
                action=1, mode="enforce", form="menu", size=2, content=Content(context=texts, answer=texts)
            )
            await decide(store, 1 + k % 3, body=body)
        await integrity.prune(store, before=time.time() + 10)
        kept = DecisionBody(action=1, mode="enforce", form="menu", size=2, content=Content(context="kept"))
        await decide(store, 30, body=kept)
        await integrity.prune(store, before=time.time() - 100)
        left = files(where)
    assert b"kept" in left
    assert left.count(WORD.encode()) == 0
