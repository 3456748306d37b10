"""arbitrage swap --policy: the verdict on recorded traffic, while a gateway serves and after it has stopped."""

import asyncio
import json

import numpy as np
import pytest
from msgspec.structs import replace

from conformal_arbitrage import model_grades
from conformal_arbitrage.collecting.records import pair_log_of
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.models.port import fingerprint
from conformal_arbitrage.store import events, pages
from conformal_arbitrage.store.events import all_guardian_scores
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.record import AuditBody, DecisionBody, Event, FeedbackBody, new_id
from tests.gateway.test_cascades import CascadeHouse
from tests.gateway.test_export import MODELS, leg
from tests.gateway.test_modes import command, letters, shadowing
from tests.gateway.test_sessions import sticky, turn  # noqa: F401


def judged(gateway, *how, code):
    arguments = ("swap", "--policy", "support", "--config", gateway.path, "--json", *how)
    return json.loads(command(*arguments, code=code).output)


def test_shadow_traffic_is_judged_while_it_arrives_and_after_the_gateway_has_stopped(house):
    gateway = shadowing(house)
    letters(gateway, 30)  # the Primary is wrong on every third
    early = judged(gateway, "--alpha", "0.6", code=3)
    assert (early["rows"], early["mean"], early["loss"]) == (30, pytest.approx(1 / 3), "regret")
    letters(gateway, 30)
    late = judged(gateway, "--alpha", "0.6", code=0)
    assert (late["rows"], late["verdict"]) == (60, "switch")
    assert late["interval"][1] < early["interval"][1]
    gateway.stop()
    assert judged(gateway, "--alpha", "0.05", code=1)["interval"] == late["interval"]


def test_labels_count_gains_and_rows_without_one_are_the_worst_case(house):
    gateway = shadowing(house)
    letters(gateway, 60)
    rows = gateway.records(limit=100)[10:]  # the Primary always says the first, the Guardian now and then the second

    async def label(store):
        for k, record in enumerate(rows):
            await store.run(events.commit, [Event(id=record.id, body=FeedbackBody(label=k // 3 % 2))])

    gateway.with_store(label)
    answer = judged(gateway, "--alpha", "0.2", code=3)
    assert (answer["loss"], answer["rows"], answer["ungraded"]) == ("net", 60, 10)
    assert answer["worse"] > 0
    assert answer["better"] > 0


SURE, LOSS_IF_UNSURE, RATE = 0.6, 0.5, 0.3


def enforced(store, rng, count=800):
    """Record decisions of a Primary that is wrong on half of the questions it is unsure of, which the Guardian decides."""
    models = {"identities_sha256": fingerprint(MODELS), "form": "menu", "mode": "enforce", "size": 2}
    written = []
    for _ in range(count):
        id, sure, drawn = new_id(), rng.random() < SURE, rng.random() < RATE
        wrong = not sure and rng.random() < LOSS_IF_UNSURE
        truth = (0.0, 1.0) if wrong else (1.0, 0.0)
        legs = [leg((0.9, 0.1) if sure else (0.6, 0.4)), *([] if sure else [replace(leg(truth), role="guardian")])]
        body = DecisionBody(legs=tuple(legs), audited=drawn, **models)
        decided_by = "primary" if sure else "guardian"
        written.append(Event(id=id, body=body, policy="support", key_id="k", decided_by=decided_by))
        written += [Event(id=id, body=AuditBody(scores=truth))] if drawn and sure else []
    return store.run(events.commit, written)


async def test_of_enforced_traffic_what_the_coin_drew_counts_and_not_what_a_deferral_showed(tmp_path):
    true = (1 - SURE) * LOSS_IF_UNSURE
    async with await open_store(str(tmp_path / "decisions.db")) as store:
        await enforced(store, np.random.default_rng(2))
        old, new = model_grades(await pair_log_of(store, "support"), "regret")
        records = await store.run(pages.records, pages.RecordFilter(policy="support"), limit=1000)
    known = [(record, all_guardian_scores(record)) for record in records]
    planted = [1 - scores[0] for _, scores in known if scores is not None]
    counted = old - new
    assert 200 < len(counted) < 280
    assert abs(counted.mean() - true) < 4 * (true * (1 - true) / len(counted)) ** 0.5
    assert np.mean(planted) - true > 4 * (true * (1 - true) / len(planted)) ** 0.5


def test_of_a_session_that_requests_name_the_first_question_counts_and_stays(tmp_path):
    async def counted():
        async with await open_store(str(tmp_path / "decisions.db")) as store:
            ids, seen = [], []
            for named in ("talk", None, "talk", "talk", "other", None, "talk"):
                ids.append(new_id())
                legs = (leg((0.9, 0.1)), replace(leg((1.0, 0.0)), role="guardian"))
                facts = {"identities_sha256": fingerprint(MODELS), "form": "menu", "mode": "shadow", "size": 2}
                body = DecisionBody(legs=legs, named=named, **facts)
                event = Event(id=ids[-1], body=body, policy="support", key_id="k", decided_by="guardian")
                await store.run(events.commit, [event])
                seen.append((await pair_log_of(store, "support")).id.tolist())
            return ids, seen

    ids, seen = asyncio.run(counted())
    assert seen[-1] == [ids[k] for k in (0, 1, 4, 5)]
    assert all(seen[-1][: len(earlier)] == earlier for earlier in seen)


def test_sessions_and_policies_without_rows_of_both_models_are_refused(sticky):  # noqa: F811
    gateway = sticky(policy={"audit_rate": 1.0, "content": "full"})
    turn(gateway, "sure")
    with pytest.raises(StoreError, match="decides by session"):
        gateway.with_store(lambda store: pair_log_of(store, "support"))
    with pytest.raises(StoreError, match="has no rows of both models; serve it in shadow mode, or set audit_rate"):
        gateway.with_store(lambda store: pair_log_of(store, "other"))


def test_a_cascade_is_refused(house):
    gateway = house(CascadeHouse, policy={"mode": "shadow", "content": "full"})
    gateway.question(3)
    with pytest.raises(StoreError, match="is a cascade"):
        gateway.with_store(lambda store: pair_log_of(store, "support"))
