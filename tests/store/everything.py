"""A store that holds something in every table, with words and names that can be looked for."""

import time

from msgspec.structs import replace

from conformal_arbitrage.store import claims, events, integrity, keys, ledger, outbox, policies, reviews
from conformal_arbitrage.store.claims import Conversation, SavedResponse
from conformal_arbitrage.store.ledger import LedgerKey, NewRow, Settlement
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import (
    AlarmBody,
    AuditBody,
    CompletionBody,
    Content,
    DecisionBody,
    FeedbackBody,
    MenuQuestion,
    ReviewFacts,
    ReviewVote,
    new_id,
)
from conformal_arbitrage.store.reviews import NewReview, ReviewOutcome, ReviewQuestion, ReviewRequest, ReviewWork
from conformal_arbitrage.store.session import operation
from conformal_arbitrage.types import Failure, Leg, Spent
from tests.gateway.durability import OURS
from tests.store.facts import BODY, decide, decision, later

KEYS = OURS.record_keys
WORD, NAME, LABEL = "SECRET-WORD", "reviewer-name", "LABELLED-WORD"
LEDGER = LedgerKey(policy="support", version=2, identities_sha256="i")
QUESTION = ReviewQuestion(context=f"{WORD}?", options=(WORD, "b"), places=(0, 1), size=2)


def failed_leg(role):
    return Leg(role=role, scores=None, spent=Spent(calls=1), seconds=0.1, error=Failure("RuntimeError", WORD))


def facts():
    return ReviewFacts(item="r", protocol="p", rule="majority", votes=(ReviewVote(reviewer=NAME, choice=1, held=2.0),))


async def record(store, id):
    """Everything that can be recorded about a decision."""
    content = Content(context=WORD, actions=(WORD, LABEL), primary_answer=WORD, answer=WORD)
    body = DecisionBody(
        action=1, candidates=(1,), margin=0.8, legs=(*BODY.legs, failed_leg("guardian")), mode="enforce", form="menu",
        size=2, content=content, audited=True, version=2, identities_sha256="i", ledger=(0, ""), no_guarantee="since",
    )  # fmt: skip
    row = NewRow(key=LEDGER, drawn=time.time(), due=time.time() + 60)
    question = MenuQuestion(context=WORD, actions=(WORD, "b"))
    audit = Audit(id=id, policy="support", question=question, identities_sha256="i", row=row)
    await store.run(events.commit, [decision(id, body)], audits=[audit], undelivered={id: "digest"})
    await store.run(events.commit, [
        later(id, CompletionBody(finish="stop", leg=failed_leg("guardian"), content=Content(answer=WORD), review=facts())),
        later(id, FeedbackBody(grade=1.0, label=LABEL, comment=WORD, reason=WORD, by="caller", review=facts())),
        later(id, AuditBody(scores=(1.0, 0.0), answer=WORD, error=WORD, review=facts())),
    ])  # fmt: skip


async def reply(store, id):
    """A finished response, and a request that waits for people, under idempotency keys."""
    claim = await store.run(claims.take, "caller", "one", "0" * 64, lease=9)
    saved = SavedResponse(status=200, headers={"a": "b"}, body=f"{WORD} {id}".encode())
    await store.run(events.commit, [decision()], claim=claim, begun={0: id}, response=saved)
    waiting = await store.run(claims.take, "caller", "two", "0" * 64, lease=9)
    request = ReviewRequest(key_id="caller", name="two", policy="support", route="/v1", body=WORD.encode())
    item = NewReview(
        decision=id, purpose="decide", policy="support", team="team", question=QUESTION, protocol="p",
        identities_sha256="i", undo=0.0,
    )  # fmt: skip
    others = [replace(item, decision=new_id(), purpose="audit", team="others")]
    await store.run(operation("write")(reviews.put_items), others)
    await store.run(reviews.take, f"{NAME} 2", teams=["others"], leads=[])
    work = ReviewWork(items=[item], request=request, deadline=60.0)
    await store.run(events.commit, [decision()], claim=waiting, begun={0: id}, reviews=work)
    token = (await store.run(reviews.take, NAME, teams=["team"], leads=[])).token
    await store.run(reviews.vote, token, NAME, 1)
    [due] = await store.run(reviews.due)
    verdict = ReviewOutcome(state="decided", action=1, size=2, team="team", facts=facts())
    assert await store.run(reviews.end, due, "decided", outcome=verdict)
    await store.run(reviews.call, "team")


async def fill(where):
    """Fill a database; return the decision that everything is about."""
    async with await open_store(where, keys=KEYS, webhooks={"hook": ["certificate.installed"]}) as store:
        await store.run(integrity.note_secret, OURS.id)
        await integrity.seal(store, everything=True)
        for id, scope in (("caller", "call"), ("boss", "admin")):
            await store.run(keys.create, id=id, sha256=id[0] * 64, scope=scope, label="", policies=["support"])
        await store.run(keys.sign_in, "5" * 64, "boss", seconds=600)
        await store.execute("write", lambda session: session.run("insert into probes (id, body) values ('p', ?)", b"x"))
        await store.run(policies.note_configured, "support", "0" * 64)
        for alpha in (0.05, 0.1, 0.2):
            await store.run(policies.install, "support", {"alpha": alpha}, by="boss")
        await decide(store, 3)
        await integrity.seal(store)
        await integrity.prune(store, before=time.time() + 1)  # which leaves a checkpoint
        await store.run(policies.exclude, "support", "caller", reason="hostile", by="boss")
        alarm = AlarmBody(
            version=3, lifts=0, identities_sha256="i", cause="losses", audits=9, known=9, missing=0, line=0.1,
            log_evidence=9.0,
        )  # fmt: skip
        assert await store.run(policies.raise_alarm, "support", alarm)
        id = new_id()
        await record(store, id)
        await decide(store, 2)
        for name in (new_id(), new_id()):  # so that the outcome of one is known
            row = NewRow(key=LEDGER, drawn=time.time(), due=time.time() + 60, loss=0.25)
            audit = Audit(id=name, policy="support", question=MenuQuestion(context=WORD, actions=("a",)), row=row)
            body = replace(BODY, audited=True, version=2, identities_sha256="i", ledger=(0, ""))
            await store.run(events.commit, [decision(name, body)], audits=[audit])
        await store.run(ledger.settle, [Settlement(id=id, news=1, at=time.time(), loss=0.5, served=1.0)])
        await reply(store, id)
        await store.run(claims.settle_conversation, Conversation("caller", "support", "s", id, "primary", 1), idle=60)
        await store.run(claims.reserve, "money", 5, limit=10, seconds=60)
        await events.fold_tallies(store)
        await events.gather_rows(store)
        news = await store.run(reviews.grading_news, "support")
        assert await store.run(reviews.put_grading, "support", news, items=[], events=[], graded=[])
        assert (await store.run(outbox.deliveries))[0].intact
        assert await integrity.verify(store) == []
    return id
