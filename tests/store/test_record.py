import json
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.gateway.audience import CALLER, EXPOSED, UNJUDGED
from conformal_arbitrage.store import events, outbox, pages, policies
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import (
    AuditBody,
    CompletionBody,
    Content,
    DecisionBody,
    FeedbackBody,
    Grades,
    MenuQuestion,
    TextQuestion,
    decode_decision,
    decode_question,
    document,
    encode,
    encode_json,
    new_id,
)
from conformal_arbitrage.types import Failure, Leg, Spent
from tests.store.facts import LEG, decide, decision, later

FULL = DecisionBody(
    action=1,
    candidates=(0, 1),
    margin=0.25,
    relaxation=0.3,
    no_guarantee="the request overrides seed",
    legs=(
        LEG,
        Leg(role="guardian", scores=None, spent=Spent(cost=None), seconds=1.5, error=Failure("ReplyError", "it")),
    ),
    cost=0.002,
    alpha=0.1,
    version=7,
    mode="enforce",
    form="menu",
    content=Content(context="Is it?", actions=("yes", "no"), answer="no"),
    identities_sha256="0" * 64,
    size=2,
    overridden=True,
    audited=True,
)
BODIES = [
    FULL,
    DecisionBody(cancelled=True),
    DecisionBody(
        content=Content(request={"messages": [{"n": 10**30}], "x": None}, primary_answer="a", answer={"é": 0.5})
    ),
    DecisionBody(content=Content(context="blake2b-256:0", actions="blake2b-256:1", answer="blake2b-256:2")),
]
LATER = [
    CompletionBody(finish="cancelled"),
    CompletionBody(finish="stop", leg=LEG, cost=0.1, content=Content(answer={"role": "assistant", "content": "x"})),
    FeedbackBody(grade=0.5, by="k1"),
    FeedbackBody(grades=Grades(primary=0.0, guardian=1.0), label="b", comment="\ud800\0", by="k1"),
    AuditBody(scores=(0.0, 1.0), cost=0.01, served="m"),
    AuditBody(error="it failed", answer="text"),
]
WRITTEN_BEFORE = """{
  "action": 0, "candidates": [0], "margin": null, "relaxation": 0.3, "no_guarantee": null, "cost": 0, "alpha": 0.1,
  "legs": [{"role": "primary", "scores": [0.9, 0.1, 0], "seconds": 0.01, "served": "m", "error": null, "reply": null,
            "spent": {"calls": 1, "input_tokens": 10, "output_tokens": null, "reasoning_tokens": 0,
                      "cached_tokens": 0, "cost": 0.0}}],
  "version": 1, "mode": "shadow", "form": "menu", "identities_sha256": "ab", "size": 3, "audited": true,
  "content": {"context": "?", "actions": ["a", "b", "c"], "answer": "a"}
}"""


@pytest.mark.parametrize("body", BODIES)
async def test_a_decision_is_read_as_it_was_written(store, body):
    [id] = await decide(store, body=body)
    assert (await store.run(pages.record, id)).decision == body


async def test_later_events_are_read_as_they_were_written_with_their_time(store):
    for body in LATER:
        [id] = await decide(store)
        await store.run(events.commit, [later(id, body)])
        record = await store.run(pages.record, id)
        [read] = [one for one in (record.completion, *record.feedback, record.audit) if one is not None]
        assert read == msgspec.structs.replace(body, at=read.at)
        assert read.at >= record.created


@pytest.mark.parametrize(
    "question", [MenuQuestion(context="?", actions=("a", "b")), TextQuestion(request={"messages": [{"content": "é"}]})]
)
def test_a_question_is_read_as_it_was_written(question):
    assert decode_question(encode(question, "1"), "1") == question


def test_defaults_are_not_written():
    assert encode(DecisionBody(cancelled=True), "1") == '{"cancelled":true}'
    assert encode(CompletionBody(finish="failed"), "1") == '{"finish":"failed"}'


def test_a_decision_from_before_the_bodies_had_types_is_read():
    body = decode_decision(WRITTEN_BEFORE, "1")
    assert (body.schema, body.action, body.size, body.audited, body.overridden) == (1, 0, 3, True, False)
    assert (body.legs[0].scores, body.legs[0].spent.output_tokens) == ((0.9, 0.1, 0.0), None)
    assert body.content == Content(context="?", actions=("a", "b", "c"), answer="a")
    assert decode_decision('{"cancelled": true}', "1") == DecisionBody(cancelled=True)


@pytest.mark.parametrize("rest", ["", ', "legs": {"primary": 1}', ', "new": [1]'])
async def test_a_decision_of_a_later_schema_asks_for_an_upgrade(store, sql, rest):
    [id] = await decide(store)
    sql(f"""update events set body = '{{"schema": 2{rest}}}'""")
    for read in (store.run(pages.record, id), store.run(pages.records)):
        with pytest.raises(StoreError, match=f"decision {id} has schema 2, this release reads up to 1; upgrade"):
            await read


@pytest.mark.parametrize("text", ["{", "[]", '{"size": "two"}', '{"legs": [{}]}', "[" * 100_000])
def test_a_damaged_decision_is_named(text):
    with pytest.raises(
        StoreError, match=r"^decision 17 is damaged in the store \(.*\); run `arbitrage records verify`$"
    ):
        decode_decision(text, "17")


async def test_a_damaged_audit_does_not_stop_the_others(store, sql, caplog):
    ids = [new_id(), new_id()]
    question = TextQuestion(request={})
    for id in ids:
        await store.run(events.commit, [decision(id)], audits=[Audit(id=id, policy="support", question=question)])
    sql(f"update audits set payload = '{{}}' where id = '{ids[0]}'")
    assert [audit.id for audit in await store.run(outbox.take_audits, limit=9, lease=60)] == [ids[1]]
    assert f"the audit of {ids[0]} is damaged" in caplog.text


@dataclass
class Opaque:
    """A value without JSON."""


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "body",
    [
        DecisionBody(margin=INFINITY),
        DecisionBody(relaxation=NAN),
        DecisionBody(cost=NAN),
        DecisionBody(alpha=-INFINITY),
        DecisionBody(legs=(Leg(role="primary", scores=(0.0, NAN), spent=Spent(), seconds=0.1),)),
        DecisionBody(legs=(Leg(role="primary", scores=None, spent=Spent(cost=NAN), seconds=0.1),)),
        DecisionBody(legs=(Leg(role="primary", scores=None, spent=Spent(), seconds=INFINITY),)),
        DecisionBody(content=Content(request={"x": [{"y": NAN}]})),
        DecisionBody(content=Content(request={"x": {1, 2}})),
        DecisionBody(content=Content(request={"x": b""})),
        DecisionBody(content=Content(answer={"x": Opaque()})),
        CompletionBody(finish="stop", cost=NAN),
        CompletionBody(finish="stop", leg=Leg(role="primary", scores=(NAN,), spent=Spent(), seconds=0.1)),
        CompletionBody(finish="stop", content=Content(answer={"x": NAN})),
        FeedbackBody(grade=NAN),
        FeedbackBody(grades=Grades(primary=0.0, guardian=NAN)),
        AuditBody(scores=(0.5, INFINITY)),
        AuditBody(cost=NAN),
        TextQuestion(request={"x": NAN}),
    ],
)
def test_a_body_that_is_not_json_is_refused(body):
    with pytest.raises(StoreError, match=f"the {type(body).__name__} of 17 is not JSON"):
        encode(body, "17")


async def test_a_commit_that_is_not_json_writes_nothing(store):
    with pytest.raises(StoreError, match="is not JSON"):
        await store.run(events.commit, [decision(), decision(body=DecisionBody(margin=NAN))])
    with pytest.raises(StoreError, match="the certificate of support is not JSON"):
        await store.run(policies.install, "support", {"alpha": NAN}, by="ann")
    assert await store.run(pages.records) == []


def test_numpy_floats_and_lone_surrogates_are_written():
    body = DecisionBody(margin=np.float64(0.5), content=Content(answer="\ud800"))
    assert json.loads(encode(body, "1"))["margin"] == 0.5
    assert decode_decision(encode(body, "1"), "1") == body
    assert json.loads(encode_json({"x": "\ud800"}, "x")) == {"x": "\ud800"}


async def test_a_document_has_every_field_and_the_time_of_later_events(store):
    [id] = await decide(store, body=FULL)
    await store.run(events.commit, [later(id, FeedbackBody(grades=Grades(primary=0.0, guardian=1.0), by="k1"))])
    record = await store.run(pages.record, id)
    shown = document(record)
    assert json.loads(json.dumps(shown)) == shown
    assert set(shown) == set(record.__struct_fields__)
    assert set(shown["decision"]) == set(FULL.__struct_fields__)
    assert shown["decision"]["schema"] == 1
    assert shown["decision"]["legs"][1]["spent"]["cost"] is None
    assert shown["decision"]["legs"][0]["reply"] is None
    assert (shown["completion"], shown["audit"]) == (None, None)
    [feedback] = record.feedback
    assert shown["feedback"] == [
        {"grade": None, "grades": {"primary": 0.0, "guardian": 1.0, "chain": []}, "reason": None, "label": None,
         "comment": None, "by": "k1", "from_caller": False, "grader": None, "review": None, "at": feedback.at},
    ]  # fmt: skip


def test_a_document_shows_the_fields_that_are_listed_and_nothing_of_other_structs():
    shown = document(FULL, shown={DecisionBody: {"cost", "legs", "content"}, Leg: {"role"}})
    assert set(shown) == {"cost", "legs", "content"}
    assert [set(leg) for leg in shown["legs"]] == [{"role"}] * len(FULL.legs)
    assert shown["content"] == {}


@pytest.mark.parametrize("fields", [CALLER, EXPOSED, UNJUDGED])
def test_every_field_that_an_audience_sees_exists(fields):
    for struct, names in fields.items():
        assert set(names) <= set(struct.__struct_fields__)
