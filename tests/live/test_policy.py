import asyncio
import random
from contextlib import aclosing

import numpy as np
import pytest

from conformal_arbitrage import (
    ChatRequest,
    ConformalArbitrage,
    ConformalRouter,
    Decision,
    GuardianError,
    OptionError,
    Query,
    RandomRouter,
    ReplyError,
    ScoreLog,
    SingleModel,
    Spent,
    StaleCalibrationError,
    calibrate,
)
from conformal_arbitrage.cli.models import decision_json
from conformal_arbitrage.models import (
    Answer,
    ChatScorer,
    Endpoint,
    FunctionScorer,
    ReplayScorer,
    Retry,
    Scores,
    Settings,
)
from conformal_arbitrage.models.port import WrappedModel
from tests.scripted import Upstream, chunk, completion, scores

QUERY = Query("Which?", ("a", "b", "c"), id="q")
SURE, UNSURE = [0.9, 0.05, 0.05], [0.5, 0.4, 0.1]


def scorer(values, name="rule", seen=None):
    """A function that returns these scores, or raises them; by name, so that it can be shown a part of the menu."""

    def score(query):
        if seen is not None:
            seen.append(query.actions)
        if isinstance(values, Exception):
            raise values
        return [values["abc".index(action)] for action in query.actions]

    return FunctionScorer(score, name=name)


def certify(primary, guardian, **options):
    """Calibrate these two models on 200 rows; the relaxation is 0.3."""
    rows = [[0.9, 0.1, 0.0]] * 100 + [[0.6, 0.3, 0.1]] * 100
    right = [[1.0, 0.0, 0.0]] * 100 + [[0.0, 1.0, 0.0]] * 100
    identities = {"primary": dict(primary.identity), "guardian": dict(guardian.identity)}
    log = ScoreLog.from_arrays(rows, right, id=[f"r{k}" for k in range(200)], identities=identities)
    certificate = calibrate(log, 0.05, **options)
    assert certificate.relaxation == 0.3
    return certificate


def policy(primary, guardian, **options):
    calibration = certify(primary, guardian, guardian_sees=options.pop("sees", "candidates"))
    return ConformalArbitrage(primary=primary, guardian=guardian, certificate=calibration, **options)


def decide(live, query=QUERY):
    return asyncio.run(live.decide(query))


def test_a_primary_that_leads_far_enough_decides_alone():
    seen = []
    decision = decide(policy(scorer(SURE), scorer([0, 1, 0], seen=seen)))
    assert (decision.decided_by, decision.answer, decision.action, decision.candidates) == ("primary", "a", 0, (0,))
    assert decision.margin == pytest.approx(0.85)
    assert decision.relaxation == 0.3
    assert decision.no_guarantee is None
    assert not seen


def test_a_primary_that_does_not_lead_far_enough_leaves_the_choice_to_the_guardian():
    decision = decide(policy(scorer(UNSURE), scorer([0, 1, 0])))
    assert (decision.decided_by, decision.answer, decision.deferred) == ("guardian", "b", True)
    assert decision.candidates == (0, 1)
    assert [leg.role for leg in decision.legs] == ["primary", "guardian"]


def test_the_guardian_is_shown_only_the_candidates_if_the_certificate_says_so():
    seen = []
    decision = decide(policy(scorer(UNSURE), scorer([0, 0.1, 1], seen=seen)))
    assert seen == [("a", "b")]
    assert decision.answer == "b"


def test_the_guardian_is_shown_everything_if_the_certificate_says_so():
    seen = []
    decision = decide(policy(scorer(UNSURE), scorer([0, 0.1, 1], seen=seen), sees="all"))
    assert seen == [("a", "b", "c")]
    assert decision.answer == "c"


def test_each_model_is_called_at_most_once():
    first, second = [], []
    decide(policy(scorer(UNSURE, seen=first), scorer([0, 1, 0], seen=second)))
    assert (len(first), len(second)) == (1, 1)


def test_a_menu_of_one_calls_no_model():
    seen = []
    decision = decide(policy(scorer(SURE, seen=seen), scorer(SURE, seen=seen)), Query("Which?", ("a",)))
    assert (decision.answer, decision.decided_by, decision.legs, seen) == ("a", "primary", (), [])


def test_an_empty_menu_is_refused():
    with pytest.raises(OptionError, match="at least one action"):
        decide(policy(scorer(SURE), scorer(SURE)), Query("Which?", ()))


def test_ids_are_kept_and_generated_if_missing():
    live = policy(scorer(SURE), scorer(SURE))
    assert decide(live).id == "q"
    assert len({decide(live, Query("Which?", ("a", "b"))).id for _ in range(5)}) == 5


def test_the_live_rule_is_the_certificate_s_rule_on_every_row_of_a_log(science):
    log = science.select(np.arange(300))
    for boundary in ({"boundary": "include"}, {"boundary": "random", "key": b"key"}):
        for sees in ("candidates", "all"):
            certificate = calibrate(science, 0.05, guardian_sees=sees, **boundary)
            live = ConformalArbitrage(
                primary=ReplayScorer.of_log(log, "primary"),
                guardian=ReplayScorer.of_log(log, "guardian"),
                certificate=certificate,
                allow=["unbound"],
            )
            for row, offline in enumerate(certificate.apply(log)):
                actions = tuple(str(k) for k in range(int(log.sizes[row])))
                decision = asyncio.run(live.decide(Query("", actions, id=str(log.id[row]))))
                assert (decision.action, decision.candidates, decision.decided_by, decision.margin) == (
                    offline.action, offline.candidates, offline.decided_by, offline.margin,
                )  # fmt: skip


# Failures: the table in docs/live.md, one test for each line.


def test_if_the_primary_fails_the_guardian_decides_over_everything():
    seen = []
    decision = decide(policy(scorer(OSError("down")), scorer([0, 0.1, 1], seen=seen)))
    assert seen == [("a", "b", "c")]
    assert (decision.decided_by, decision.answer) == ("guardian", "c")
    assert "down" in decision.legs[0].error.message


def test_if_the_primary_times_out_the_guardian_decides_over_everything():
    async def slow(query):
        await asyncio.sleep(30)

    primary = FunctionScorer(slow, name="slow", through=lambda port: Retry(port, deadline=0.05))
    decision = decide(policy(primary, scorer([0, 0.1, 1])))
    assert (decision.decided_by, decision.answer, decision.candidates) == ("guardian", "c", (0, 1, 2))
    assert decision.legs[0].error.kind == "DeadlineError"


def over_http(reply, check):
    """A decision with a chat Primary behind a real server."""

    async def run():
        async with Upstream(reply) as upstream, Endpoint(upstream.url) as endpoint:
            primary = ChatScorer(port=endpoint, settings=Settings(model="m", served="m"))
            decision = await policy(primary, scorer([0, 0.1, 1])).decide(QUERY)
        check(decision)

    asyncio.run(run())


def guardian_decided_over_everything(decision):
    assert (decision.decided_by, decision.answer, decision.candidates) == ("guardian", "c", (0, 1, 2))


def test_if_the_primary_cannot_be_parsed_the_guardian_decides_over_everything():
    over_http(lambda *_: completion("I would say a."), guardian_decided_over_everything)


def test_if_another_model_answers_than_the_pinned_one_the_guardian_decides_over_everything():
    over_http(lambda *_: scores(0.9, 0.05, 0.05, model="other"), guardian_decided_over_everything)


def primary_decided(decision):
    assert decision.decided_by == "primary"


def test_if_the_pinned_model_answers_its_choice_may_stand():
    over_http(lambda *_: scores(0.9, 0.05, 0.05), primary_decided)


@pytest.mark.parametrize("failure", [OSError("down"), ReplyError("no scores in it")])
def test_if_the_guardian_fails_or_cannot_be_parsed_an_error_is_raised(failure):
    with pytest.raises(GuardianError, match=r"the Guardian .*; set safe_action"):
        decide(policy(scorer(UNSURE), scorer(failure)))


def test_if_the_guardian_fails_the_configured_safe_action_is_taken_without_a_guarantee():
    decision = decide(policy(scorer(UNSURE), scorer(OSError("down")), safe_action="c"))
    assert (decision.decided_by, decision.answer, decision.deferred) == ("fallback", "c", True)
    assert "Guardian failed" in decision.no_guarantee


def test_a_safe_action_that_is_not_on_the_menu_is_an_error():
    with pytest.raises(GuardianError, match="'refuse' is not one of"):
        decide(policy(scorer(UNSURE), scorer(OSError("down")), safe_action="refuse"))


def test_if_both_fail_it_is_never_the_primary_s_choice():
    with pytest.raises(GuardianError):
        decide(policy(scorer(OSError()), scorer(OSError())))


async def test_if_the_caller_is_cancelled_so_are_the_calls_upstream():
    gone = asyncio.Event()

    async def hang(*_):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            gone.set()
            raise

    async with Upstream(hang) as upstream, Endpoint(upstream.url) as endpoint:
        primary = ChatScorer(port=endpoint, settings=Settings(model="m"))
        task = asyncio.create_task(policy(primary, scorer(SURE)).decide(QUERY))
        while not upstream.bodies:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gone.wait(), 5)


class Own:
    """A scorer of the user's own that returns anything."""

    identity = {"kind": "own"}  # noqa: RUF012

    def __init__(self, values):
        self._values = values

    async def score(self, query):
        return Scores(values=self._values, spent=Spent(calls=1))


@pytest.mark.parametrize("values", [[0.9, 0.05, 0.05], (0.9, 0, 0), tuple(np.array(SURE)), (1, 0, 0)], ids=str)
def test_a_scorer_of_the_user_s_own_may_return_a_list_integers_or_numpy_floats(values):
    decision = decide(policy(Own(values), scorer([0, 0, 1])))
    assert (decision.decided_by, decision.answer) == ("primary", "a")
    assert {type(score) for score in decision.legs[0].scores} == {float}


@pytest.mark.parametrize(
    "values",
    [None, "abc", (0.9, 0.1), (0.9, 0.1, 0, 0), (np.nan, 0, 0), (np.inf, 0, 0), (True, 0, 0), ("1", 0, 0)],
    ids=str,
)
def test_a_scorer_of_the_user_s_own_that_returns_anything_else_has_failed(values):
    decision = decide(policy(Own(values), scorer([0, 0, 1])))
    assert (decision.decided_by, decision.answer) == ("guardian", "c")
    assert decision.legs[0].error.kind == "ReplyError"
    assert decision.legs[0].spent.calls == 1


# Identities.


def test_a_certificate_made_with_other_models_is_refused_and_the_differences_are_named():
    certificate = certify(scorer(SURE, name="rule-1"), scorer(SURE, name="guard"))
    with pytest.raises(StaleCalibrationError, match=r"primary\.name: 'rule-1' then, 'rule-2' now"):
        ConformalArbitrage(
            primary=scorer(SURE, name="rule-2"), guardian=scorer(SURE, name="guard"), certificate=certificate
        )


def test_a_difference_allowed_by_name_runs_without_a_guarantee_and_says_so():
    certificate = certify(scorer(SURE, name="rule-1"), scorer(SURE, name="guard"))
    live = ConformalArbitrage(
        primary=scorer(SURE, name="rule-2"), guardian=scorer(SURE, name="guard"), certificate=certificate,
        allow=["primary.name"],
    )  # fmt: skip
    assert decide(live).no_guarantee == "allowed by name: primary.name"


def test_an_unbound_certificate_must_be_allowed_by_name(science):
    certificate = calibrate(science, 0.05)
    models = {"primary": scorer(SURE), "guardian": scorer(SURE)}
    with pytest.raises(StaleCalibrationError, match="'unbound'"):
        ConformalArbitrage(**models, certificate=certificate)
    with pytest.raises(StaleCalibrationError):
        ConformalArbitrage(**models, certificate=certificate, allow=["primary.name"])
    assert "unbound" in decide(ConformalArbitrage(**models, certificate=certificate, allow=["unbound"])).no_guarantee


# Free text.


class Answerer:
    """Answers with a text and a confidence, or fails."""

    def __init__(self, name, text, confidence=None):
        self.identity = {"kind": "test", "name": name}
        self._text, self._confidence = text, confidence

    async def answer(self, request):
        if isinstance(self._text, Exception):
            raise self._text
        message = {"role": "assistant", "content": self._text}
        return Answer(message=message, confidence=self._confidence, spent=Spent(calls=1, cost=0.5))


def router(primary, guardian, **options):
    identities = {"primary": primary.identity, "guardian": guardian.identity, "grader": {"kind": "exact"}}
    log = ScoreLog.from_router(
        confidence=[0.9] * 100 + [0.5] * 100,
        primary_grade=[1.0] * 100 + [0.0] * 100,
        guardian_grade=[1.0] * 200,
        identities=identities,
    )
    calibration = calibrate(log, 0.05, guardian_sees="all")
    assert calibration.relaxation == 0.5
    assert calibration.identities["grader"] == {"kind": "exact"}
    return ConformalRouter(primary=primary, guardian=guardian, certificate=calibration, **options)


REQUEST = ChatRequest({"messages": [{"role": "user", "content": "Say it."}]}, id="q")


@pytest.mark.parametrize(
    ("primary", "decided_by", "text"),
    [
        (Answerer("p", "mine", 0.8), "primary", "mine"),
        (Answerer("p", "mine", 0.5), "guardian", "theirs"),  # exactly at the relaxation: not above it
        (Answerer("p", "mine", 0.2), "guardian", "theirs"),
        (Answerer("p", "mine", None), "guardian", "theirs"),
        (Answerer("p", ReplyError("empty")), "guardian", "theirs"),
    ],
)
def test_the_primary_s_answer_stands_exactly_if_its_confidence_is_above_the_relaxation(primary, decided_by, text):
    decision = decide(router(primary, Answerer("g", "theirs")), REQUEST)
    assert (decision.decided_by, decision.answer["content"]) == (decided_by, text)
    assert decision.action == (1 if decided_by == "primary" else 0)
    assert decision.no_guarantee is None


def test_a_numpy_confidence_is_encoded_as_a_number():
    decision = decide(router(Answerer("p", "mine", np.float64(0.8)), Answerer("g", "theirs")), REQUEST)
    assert decision_json(decision)["legs"][0]["scores"] == (0.8,)


def test_a_guardian_that_cannot_answer_leads_to_an_error_or_the_safe_answer():
    primary, guardian = Answerer("p", "mine", 0.2), Answerer("g", ReplyError("empty"))
    with pytest.raises(GuardianError, match=r"the Guardian .*; set safe_answer"):
        decide(router(primary, guardian), REQUEST)
    decision = decide(router(primary, guardian, safe_answer="Please call us."), REQUEST)
    assert (decision.decided_by, decision.answer["content"]) == ("fallback", "Please call us.")
    assert decision.no_guarantee is not None


def test_a_decision_costs_what_both_legs_cost():
    decision = decide(router(Answerer("p", "mine", 0.2), Answerer("g", "theirs")), REQUEST)
    assert decision.spent == Spent(calls=2, cost=1.0)
    assert decide(policy(scorer(UNSURE), scorer(SURE))).spent.cost is None  # a function's price is not known


# Streams.


class Streamer(Answerer):
    """Streams a text word by word; the exceptions in it are raised."""

    def __init__(self, name, *words):
        super().__init__(name, " ".join(word for word in words if isinstance(word, str)))
        self.words, self.closed = words, 0

    async def stream(self, request):
        try:
            for word in self.words:
                if isinstance(word, Exception):
                    raise word
                yield chunk({"content": word})
            yield await self.answer(request)
        finally:
            self.closed += 1


def streamed(live, request=REQUEST):
    async def run():
        async with aclosing(live.stream(request)) as items:
            return [item async for item in items]

    return asyncio.run(run())


def words(items):
    return [item["choices"][0]["delta"]["content"] for item in items]


def test_a_stream_of_the_primary_s_answer_is_the_final_decision_alone():
    [decision] = streamed(router(Answerer("p", "mine", 0.8), Streamer("g", "one", "two")))
    assert (decision.decided_by, decision.answer["content"]) == ("primary", "mine")


def test_a_deferred_stream_is_a_pending_decision_the_guardian_s_chunks_and_the_final_decision():
    pending, *chunks, final = streamed(router(Answerer("p", "mine", 0.2), Streamer("g", "one", "two")))
    assert (pending.decided_by, pending.action, pending.answer) == ("guardian", 0, None)
    assert [leg.role for leg in pending.legs] == ["primary"]
    assert pending.spent == Spent(calls=1, cost=0.5)
    assert words(chunks) == ["one", "two"]
    assert (final.decided_by, final.answer["content"], final.id) == ("guardian", "one two", pending.id)
    assert [leg.role for leg in final.legs] == ["primary", "guardian"]
    assert (final.candidates, final.margin) == (pending.candidates, pending.margin)
    assert final.spent == Spent(calls=2, cost=1.0)


def test_a_stream_and_a_decision_agree():
    for primary in (Answerer("p", "mine", 0.8), Answerer("p", "mine", 0.2), Answerer("p", ReplyError("empty"))):
        live = router(primary, Streamer("g", "one"))
        final, decision = streamed(live)[-1], decide(live, REQUEST)
        for name in ("id", "action", "candidates", "decided_by", "margin", "relaxation", "answer", "spent"):
            assert getattr(final, name) == getattr(decision, name)


def test_a_guardian_that_cannot_stream_answers_as_a_whole():
    pending, final = streamed(router(Answerer("p", "mine", 0.2), Answerer("g", "theirs")))
    assert (pending.answer, final.answer["content"]) == (None, "theirs")


def test_a_stream_generates_one_id_where_none_is_given():
    live = router(Answerer("p", "mine", 0.2), Streamer("g", "one"))
    pending, _, final = streamed(live, ChatRequest(REQUEST.body))
    assert pending.id == final.id
    assert len(final.id) == 32


def test_a_guardian_that_fails_before_its_first_chunk_leads_to_the_safe_answer_alone():
    live = router(Answerer("p", "mine", 0.2), Streamer("g", ReplyError("empty")), safe_answer="Please call us.")
    [decision] = streamed(live)
    assert (decision.decided_by, decision.answer["content"]) == ("fallback", "Please call us.")
    assert "empty" in decision.legs[1].error.message


def test_a_guardian_that_fails_after_some_chunks_is_an_error_or_a_fallback_that_names_it():
    guardian = Streamer("g", "one", ReplyError("it broke off"))
    live = router(Answerer("p", "mine", 0.2), guardian, safe_answer="Please call us.")
    pending, one, final = streamed(live)
    assert (pending.decided_by, words([one]), final.decided_by) == ("guardian", ["one"], "fallback")
    assert "it broke off" in final.legs[1].error.message
    with pytest.raises(GuardianError, match="it broke off"):
        streamed(router(Answerer("p", "mine", 0.2), guardian))


class Allowing:
    async def start(self):
        pass


@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_a_stream_closed_early_closes_the_guardian_s(steps):
    guardian = Streamer("g", "one", "two", "three")
    items = router(Answerer("p", "mine", 0.2), WrappedModel(guardian, quota=Allowing())).stream(REQUEST)
    for _ in range(steps):
        await anext(items)
    await items.aclose()
    assert guardian.closed == 1


# Baselines.


def test_single_models_decide_everything():
    for role, values, answer in (("primary", SURE, "a"), ("guardian", [0, 0, 1], "c")):
        decision = decide(SingleModel(scorer=scorer(values), role=role))
        assert isinstance(decision, Decision)
        assert (decision.decided_by, decision.answer) == (role, answer)
        assert decision.no_guarantee is not None
    with pytest.raises(GuardianError):
        decide(SingleModel(scorer=scorer(OSError()), role="primary"))


async def test_random_routing_calls_the_guardian_with_the_given_probability():
    live = RandomRouter(primary=scorer(SURE), guardian=scorer([0, 0, 1]), probability=0.25, rng=random.Random(0))
    assert [(await live.decide(QUERY)).decided_by for _ in range(1000)].count("guardian") == pytest.approx(250, abs=50)
