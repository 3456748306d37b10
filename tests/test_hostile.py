"""Decisions against an upstream that misbehaves in every way: each ends in time, with a typed result."""

import asyncio
import gzip
import json
import random
import re
import time
from collections import Counter, defaultdict

import numpy as np
import pytest

from conformal_arbitrage import (
    ArbitrageError,
    ChatRequest,
    ConformalArbitrage,
    ConformalRouter,
    GuardianError,
    Query,
    ScoreLog,
    calibrate,
)
from conformal_arbitrage.models import ChatAnswerer, ChatScorer, Endpoint, Limit, RateLimit, Retry, Settings
from tests.scripted import completion, scores
from tests.sockets import Sockets

pytestmark = pytest.mark.proof
AT_ONCE = 250
PRIMARY_DEADLINE, GUARDIAN_DEADLINE = 3.0, 2.4
SLACK = 8.0  # a busy machine; a deadline that does not hold takes 30 s
ACTIONS = ("north", "east", "south", "west")

WEIGHTS = {
    "good": 600,
    "429": 60,
    "429 for long": 6,
    "500": 60,
    "reset": 30,
    "reset in the body": 30,
    "hang": 12,
    "drip": 12,
    "truncated": 30,
    "too few": 20,
    "too many": 20,
    "negative": 30,
    "huge": 30,
    "strings": 30,
    "NaN in the scores": 20,
    "NaN in the reply": 20,
    "zeros": 10,
    "no choices": 30,
    "odd shapes": 30,
    "10 MB": 2,
    "bomb": 2,
    "HTML": 30,
    "cut off": 30,
    "refusal": 30,
    "prose": 20,
}
KINDS, SHARES = list(WEIGHTS), list(WEIGHTS.values())
BIG = b'{"choices": "' + b"x" * 10 * 2**20 + b'"}'
BOMB = gzip.compress(b'{"choices": "' + b"x" * 20 * 2**20 + b'"}')
SHAPES = [
    {"choices": {}},
    {"choices": [None]},
    {"choices": [{"message": None}]},
    {"choices": [{"message": {"content": None}}]},
    {"choices": [{"message": {"content": ["text"]}}]},
    {"choices": [{"message": {"content": " "}}]},
    {"choices": [{"message": {"content": "}{"}}], "usage": "lots", "model": 7},
    {"choices": [{"message": {"content": '{"scores": {"0": 1}}'}}], "usage": {"prompt_tokens": -1}},
    {"choices": [{"message": {"content": '{"scores": ' + "[" * 5000}}]},
    {"error": {"message": "in a reply with status 200"}},
]


class Hostile:
    """Draws a behaviour for each request by its number, and records which reply went to which model."""

    def __init__(self, good):
        self.good = good
        self.drawn = Counter()
        self.sent = defaultdict(list)

    async def reply(self, peer, body, number):
        rng = random.Random(number)
        kind = rng.choices(KINDS, SHARES)[0]
        self.drawn[kind] += 1
        text = json.dumps(body["messages"])
        count = len(re.findall("|".join(ACTIONS), text))
        document, truth = self.good(rng, body, count) if kind == "good" else (None, None)
        self.sent[body["model"], re.search(r"question (\d+)", text)[1]].append((kind, truth))
        await self._send(peer, kind, rng, count, document)

    async def _send(self, peer, kind, rng, count, document):
        if kind == "429":
            await peer.send(b'{"error": {"message": "slow down"}}', status="429 No", headers=["Retry-After: 0"])
        elif kind == "429 for long":
            await peer.send(b"{}", status="429 No", headers=["Retry-After: 30"])
        elif kind == "500":
            await peer.send(b"oh no", status="500 No")
        elif kind == "reset":
            peer.reset()
        elif kind == "reset in the body":
            await peer.send(b'{"choices": [', length=1000)
            peer.reset()
        elif kind == "hang":
            await peer.gone()
        elif kind == "drip":
            await peer.drip(json.dumps(scores(*[0.5] * count)).encode(), every=0.2)
        elif kind == "truncated":
            await peer.send(json.dumps(scores(*[0.5] * count)).encode()[: rng.randrange(100)])
        elif kind == "10 MB":
            await peer.send(BIG)
        elif kind == "bomb":
            await peer.send(BOMB, headers=["Content-Encoding: gzip"])
        elif kind == "HTML":
            await peer.send(b"<html>please log in</html>", headers=["Content-Type: text/html"])
        else:
            text = json.dumps(document if kind == "good" else self._document(kind, rng, count))
            await peer.send(text.encode())

    def _document(self, kind, rng, count):
        lead = [1.0] + [0.0] * (count - 1)  # if accepted, the first action would lead by far
        if kind == "NaN in the reply":
            return {**scores(*lead), "created": float("nan")}
        if kind == "no choices":
            return {**completion("x"), "choices": []}
        if kind == "odd shapes":
            return rng.choice(SHAPES)
        if kind == "cut off":
            return completion("", finish="length", reasoning=50)
        if kind == "refusal":
            message = {"role": "assistant", "content": None, "refusal": "I would rather not"}
            return {**completion(""), "choices": [{"message": message, "finish_reason": "stop"}]}
        if kind == "prose":
            return completion("I think it is the first one, with a score of 1.")
        wrong = {
            "too few": lead[:-1],
            "too many": [*lead, 0.0],
            "negative": [*lead[:-1], -0.5],
            "huge": [rng.choice([1e308, 10**400, 1.0000001, 99]), *lead[1:]],
            "strings": ["1.0", *lead[1:]],
            "NaN in the scores": [float("nan"), *lead[1:]],
            "zeros": [0.0] * count,
        }
        return scores(*wrong[kind])


def scored(rng, body, count):
    values = [round(rng.random() ** 3, 2) + 0.01 for _ in range(count)]
    values = [min(1.0, value) for value in values]
    return scores(*values), tuple(value / sum(values) for value in values)


async def decided(policies, queries):
    """Return the outcome of every query and the seconds it took; many run concurrently."""
    waiting = iter(list(enumerate(queries)))
    outcomes = [None] * len(queries)

    async def work():
        for number, query in waiting:
            start = time.perf_counter()
            try:
                decision = await policies[number % len(policies)].decide(query)
            except ArbitrageError as error:
                decision = error
            outcomes[number] = (decision, time.perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    return outcomes


def run(hostile, policies, queries):
    """Decide all queries with the policies that `policies(primary port, guardian port)` returns, in turn."""

    async def main():
        async with (
            Sockets(hostile.reply) as server,
            Endpoint(server.url, timeout=1.8) as brief,
            Endpoint(server.url, timeout=30) as patient,
        ):
            rate_limit = RateLimit(concurrency=AT_ONCE)
            primary = Limit(Retry(brief, attempts=3, deadline=PRIMARY_DEADLINE, pause=0.01), rate_limit)
            guardian = Limit(Retry(patient, attempts=3, deadline=GUARDIAN_DEADLINE, pause=0.01), rate_limit)
            outcomes = await decided(policies(primary, guardian), queries)
            assert rate_limit.slots._value == AT_ONCE  # every slot was given back
            return outcomes

    return asyncio.run(main())


def assert_in_time(outcomes, *, primary_calls=1):
    most = primary_calls * PRIMARY_DEADLINE + GUARDIAN_DEADLINE + SLACK
    late = [(number, seconds) for number, (_, seconds) in enumerate(outcomes) if seconds > most]
    assert late == []


def menu_calibration(sees):
    rng = np.random.default_rng(1)
    primary = rng.dirichlet(np.full(4, 0.7), 500).round(2)
    guardian = (0.2 * primary + 0.8 * rng.random((500, 4))).round(2)
    certificate = calibrate(ScoreLog.from_arrays(primary, guardian), 0.05, guardian_sees=sees)
    assert 0 < certificate.relaxation < 0.8
    return certificate


def assert_faithful(leg, sent):
    """A leg has scores only if the server sent exactly those, and fails only if the server did, or took too long."""
    assert leg.spent.calls >= 1
    if leg.scores is not None:
        assert leg.error is None
        assert any(kind == "good" and leg.scores == pytest.approx(truth) for kind, truth in sent), (leg, sent)
    else:
        assert_excused(leg.error, sent)


def assert_excused(error, sent):
    assert "DeadlineError" in str(error) or any(kind != "good" for kind, _ in sent), (error, sent)


def test_ten_thousand_decisions_on_a_hostile_upstream_end_with_a_typed_result_in_time():
    hostile = Hostile(scored)
    calibrations = [menu_calibration("candidates"), menu_calibration("all")]

    def policies(primary, guardian):
        return [
            ConformalArbitrage(
                primary=ChatScorer(port=primary, settings=Settings(model="primary")),
                guardian=ChatScorer(port=guardian, settings=Settings(model="guardian")),
                certificate=calibration,
                safe_action=safe,
                allow=["unbound"],
            )
            for calibration, safe in ((calibrations[0], None), (calibrations[1], "west"))
        ]

    queries = [Query(f"question {number}", ACTIONS, id=f"q{number}") for number in range(10_000)]
    outcomes = run(hostile, policies, queries)
    assert set(hostile.drawn) == set(KINDS)
    assert_in_time(outcomes)
    ends = Counter()
    for number, (decision, _) in enumerate(outcomes):
        to_primary, to_guardian = (hostile.sent[role, str(number)] for role in ("primary", "guardian"))
        if isinstance(decision, GuardianError):
            assert number % 2 == 0
            assert_excused(str(decision), to_guardian)
            ends["error"] += 1
            continue
        assert not isinstance(decision, Exception), decision
        ends[decision.decided_by] += 1
        ends["without the primary"] += decision.legs[0].scores is None
        check_decision(decision, calibrations[number % 2], to_primary, to_guardian)
    assert all(ends[end] >= 300 for end in ("primary", "guardian", "fallback", "error", "without the primary")), ends


def check_decision(decision, calibration, to_primary, to_guardian):
    first, *rest = decision.legs
    assert first.role == "primary"
    assert_faithful(first, to_primary)
    opinion = (None,) * len(ACTIONS) if first.scores is None else first.scores
    candidates = calibration.candidates(opinion, id=decision.id).tolist()
    assert list(decision.candidates) == candidates
    assert decision.answer == ACTIONS[decision.action]
    assert decision.no_guarantee
    if decision.decided_by == "primary":
        assert first.scores is not None
        assert candidates == [decision.action]
        assert rest == []
        assert to_guardian == []
        return
    assert len(candidates) > 1
    assert first.scores is not None or candidates == [0, 1, 2, 3]
    (second,) = rest
    assert_faithful(second, to_guardian)
    if decision.decided_by == "fallback":
        assert second.scores is None
        assert decision.answer == "west"
        return
    assert decision.decided_by == "guardian"
    assert second.scores is not None
    shown = candidates if calibration.guardian_sees == "candidates" else range(4)
    assert len(second.scores) == len(shown)
    assert decision.action == shown[int(np.argmax(second.scores))]


def answered(rng, body, count):
    """Return an answer with token probabilities, or a rating if the prompt asks for one."""
    sure = round(rng.random(), 3)
    if "How sure are you" in json.dumps(body["messages"]):
        return completion(json.dumps({"confidence": sure})), sure
    text = f"answer {rng.random()}"
    logprobs = {"content": [{"token": "x", "logprob": float(np.log(sure))}] * 3} if sure else None
    tools = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}] if sure > 0.7 else None
    document = completion(text, logprobs=logprobs, tool_calls=tools)
    return document, (document["choices"][0]["message"], sure)


def router_calibration():
    rng = np.random.default_rng(2)
    sure = rng.random(400).round(3)
    right = rng.random(400) < sure
    log = ScoreLog.from_router(confidence=sure, primary_grade=right, guardian_grade=np.ones(400))
    certificate = calibrate(log, 0.15)
    assert 0 < certificate.relaxation < 0.9
    return certificate


@pytest.mark.parametrize("confidence", ["logprob", "ask"])
def test_a_router_on_a_hostile_upstream_never_takes_the_primarys_answer_without_its_confidence(confidence):
    hostile = Hostile(answered)
    calibration = router_calibration()

    def policies(primary, guardian):
        return [
            ConformalRouter(
                primary=ChatAnswerer(port=primary, settings=Settings(model="primary"), confidence=confidence),
                guardian=ChatAnswerer(port=guardian, settings=Settings(model="guardian")),
                certificate=calibration,
                safe_answer=safe,
                allow=["unbound"],
            )
            for safe in (None, "I cannot say")
        ]

    bodies = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(1500)]
    outcomes = run(hostile, policies, [ChatRequest(body, id=f"r{n}") for n, body in enumerate(bodies)])
    assert_in_time(outcomes, primary_calls=2)
    ends = Counter()
    for number, (decision, _) in enumerate(outcomes):
        to_primary, to_guardian = (hostile.sent[role, str(number)] for role in ("primary", "guardian"))
        if isinstance(decision, GuardianError):
            assert number % 2 == 0
            assert_excused(str(decision), to_guardian)
            ends["error"] += 1
            continue
        assert not isinstance(decision, Exception), decision
        ends[decision.decided_by] += 1
        first, *rest = decision.legs
        sure = 0.0 if first.scores is None else first.scores[0]
        assert list(decision.candidates) == calibration.candidates((0.0, sure), id=decision.id).tolist()
        if decision.decided_by == "primary":
            check_own_answer(decision, to_primary, confidence)
            assert calibration.candidates((0.0, sure)).tolist() == [1]
            assert (first.error, rest, to_guardian) == (None, [], [])
        elif decision.decided_by == "guardian":
            assert rest[0].error is None
            assert decision.action == 0
            assert decision.answer["content"]
        else:
            assert decision.decided_by == "fallback"
            assert rest[0].error
            assert decision.answer == {"role": "assistant", "content": "I cannot say"}
    assert all(ends[end] >= 50 for end in ("primary", "guardian", "fallback", "error")), ends


def check_own_answer(decision, sent, confidence):
    """Check that the Primary sent this answer, with this confidence."""
    assert decision.action == 1
    (sure,) = decision.legs[0].scores
    good = [truth for kind, truth in sent if kind == "good"]
    if confidence == "logprob":
        assert any(said == decision.answer and stated == pytest.approx(sure) for said, stated in good)
    else:
        assert sure in [stated for stated in good if isinstance(stated, float)]


@pytest.mark.parametrize(
    "logprob",
    ["0", None, True, False, "x", [], {}, 5, 10**400, -(10**400), -1e308, float("nan")],
    ids=lambda value: str(value)[:10],
)
async def test_impossible_token_probabilities_never_make_the_primary_sure(logprob):
    document = completion("fine", logprobs={"content": [{"logprob": logprob}] * 3})

    async def reply(peer, body, number):
        text = document if body["model"] == "primary" else completion("from the guardian")
        await peer.send(json.dumps(text).encode())

    async with Sockets(reply) as server, Endpoint(server.url) as endpoint:
        router = ConformalRouter(
            primary=ChatAnswerer(port=endpoint, settings=Settings(model="primary"), confidence="logprob"),
            guardian=ChatAnswerer(port=endpoint, settings=Settings(model="guardian")),
            certificate=router_calibration(),
            allow=["unbound"],
        )
        decision = await router.decide(ChatRequest({"messages": [{"role": "user", "content": "question"}]}))
    assert decision.decided_by == "guardian"
    assert decision.answer["content"] == "from the guardian"
