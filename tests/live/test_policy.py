import asyncio
import random

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
from conformal_arbitrage.cli.live import decision_json
from conformal_arbitrage.scorers import Answer, ChatScorer, Endpoint, FunctionScorer, ReplayScorer, Retry, Settings
from tests.scripted import Upstream, completion, scores

QUERY = Query("Which?", ("a", "b", "c"), id="q")
SURE, UNSURE = [0.9, 0.05, 0.05], [0.5, 0.4, 0.1]


def scorer(values, name="rule", seen=None):
    """A function that gives these scores, or raises them; by place, so that it can be shown a part of the menu."""

    def score(query):
        if seen is not None:
            seen.append(query.actions)
        if isinstance(values, Exception):
            raise values
        return [values["abc".index(action)] for action in query.actions]

    return FunctionScorer(score, name=name)


def certificate(primary, guardian, **options):
    """A rule made with these two models on 200 rows; the relaxation is 0.3."""
    rows = [[0.9, 0.1, 0.0]] * 100 + [[0.6, 0.3, 0.1]] * 100
    right = [[1.0, 0.0, 0.0]] * 100 + [[0.0, 1.0, 0.0]] * 100
    identities = {"primary": dict(primary.identity), "guardian": dict(guardian.identity)}
    log = ScoreLog.from_arrays(rows, right, id=[f"r{k}" for k in range(200)], identities=identities)
    made = calibrate(log, 0.05, **options)
    assert made.relaxation == 0.3
    return made


def policy(primary, guardian, **options):
    calibration = certificate(primary, guardian, guardian_sees=options.pop("sees", "candidates"))
    return ConformalArbitrage(primary=primary, guardian=guardian, certificate=calibration, **options)


def decide(made, query=QUERY):
    return asyncio.run(made.decide(query))


def test_a_primary_that_leads_far_enough_decides_alone():
    asked = []
    made = decide(policy(scorer(SURE), scorer([0, 1, 0], seen=asked)))
    assert (made.decided_by, made.answer, made.action, made.candidates) == ("primary", "a", 0, (0,))
    assert made.margin == pytest.approx(0.85)
    assert made.relaxation == 0.3
    assert made.no_guarantee is None
    assert not asked


def test_a_primary_that_does_not_lead_far_enough_leaves_the_choice_to_the_guardian():
    made = decide(policy(scorer(UNSURE), scorer([0, 1, 0])))
    assert (made.decided_by, made.answer, made.deferred) == ("guardian", "b", True)
    assert made.candidates == (0, 1)
    assert [leg.role for leg in made.legs] == ["primary", "guardian"]


def test_the_guardian_is_shown_only_the_candidates_where_the_certificate_says_so():
    asked = []
    made = decide(policy(scorer(UNSURE), scorer([0, 0.1, 1], seen=asked)))
    assert asked == [("a", "b")]
    assert made.answer == "b"


def test_the_guardian_is_shown_everything_where_the_certificate_says_so():
    asked = []
    made = decide(policy(scorer(UNSURE), scorer([0, 0.1, 1], seen=asked), sees="all"))
    assert asked == [("a", "b", "c")]
    assert made.answer == "c"


def test_each_model_is_asked_at_most_once():
    first, second = [], []
    decide(policy(scorer(UNSURE, seen=first), scorer([0, 1, 0], seen=second)))
    assert (len(first), len(second)) == (1, 1)


def test_a_menu_of_one_asks_nobody():
    asked = []
    made = decide(policy(scorer(SURE, seen=asked), scorer(SURE, seen=asked)), Query("Which?", ("a",)))
    assert (made.answer, made.decided_by, made.legs, asked) == ("a", "primary", (), [])


def test_an_empty_menu_is_refused():
    with pytest.raises(OptionError, match="at least one action"):
        decide(policy(scorer(SURE), scorer(SURE)), Query("Which?", ()))


def test_ids_are_made_where_none_is_given_and_kept_where_one_is():
    made = policy(scorer(SURE), scorer(SURE))
    assert decide(made).id == "q"
    assert len({decide(made, Query("Which?", ("a", "b"))).id for _ in range(5)}) == 5


def test_the_live_rule_is_the_certificate_s_rule_on_every_row_of_a_log(science):
    log = science.select(np.arange(300))
    for boundary in ("include", "random"):
        for sees in ("candidates", "all"):
            made = calibrate(science, 0.05, guardian_sees=sees, boundary=boundary)
            live = ConformalArbitrage(
                primary=ReplayScorer.of_log(log, "primary"),
                guardian=ReplayScorer.of_log(log, "guardian"),
                certificate=made,
                allow=["unbound"],
            )
            for row, offline in enumerate(made.apply(log)):
                actions = tuple(str(k) for k in range(int(log.sizes[row])))
                found = asyncio.run(live.decide(Query("", actions, id=str(log.id[row]))))
                assert (found.action, found.candidates, found.decided_by, found.margin) == (
                    offline.action, offline.candidates, offline.decided_by, offline.margin,
                )  # fmt: skip


# What happens when something breaks: the table in docs/live.md, one test for each line.


def test_if_the_primary_fails_the_guardian_decides_over_everything():
    asked = []
    made = decide(policy(scorer(OSError("down")), scorer([0, 0.1, 1], seen=asked)))
    assert asked == [("a", "b", "c")]
    assert (made.decided_by, made.answer) == ("guardian", "c")
    assert "down" in made.legs[0].error


def test_if_the_primary_times_out_the_guardian_decides_over_everything():
    async def slow(query):
        await asyncio.sleep(30)

    primary = FunctionScorer(slow, name="slow", through=lambda port: Retry(port, deadline=0.05))
    made = decide(policy(primary, scorer([0, 0.1, 1])))
    assert (made.decided_by, made.answer, made.candidates) == ("guardian", "c", (0, 1, 2))
    assert "DeadlineError" in made.legs[0].error


def over_http(reply, check):
    """A decision with a chat Primary behind a real server."""

    async def run():
        async with Upstream(reply) as upstream, Endpoint(upstream.url) as endpoint:
            primary = ChatScorer(port=endpoint, settings=Settings(model="m", served="m"))
            made = await policy(primary, scorer([0, 0.1, 1])).decide(QUERY)
        check(made)

    asyncio.run(run())


def guardian_decided_over_everything(made):
    assert (made.decided_by, made.answer, made.candidates) == ("guardian", "c", (0, 1, 2))


def test_if_the_primary_cannot_be_parsed_the_guardian_decides_over_everything():
    over_http(lambda *_: completion("I would say a."), guardian_decided_over_everything)


def test_if_another_model_answers_than_the_pinned_one_the_guardian_decides_over_everything():
    over_http(lambda *_: scores(0.9, 0.05, 0.05, model="other"), guardian_decided_over_everything)


def test_if_the_pinned_model_answers_its_choice_may_stand():
    over_http(lambda *_: scores(0.9, 0.05, 0.05), lambda made: made.decided_by == "primary" or pytest.fail("deferred"))


@pytest.mark.parametrize("failure", [OSError("down"), ReplyError("no scores in it")])
def test_if_the_guardian_fails_or_cannot_be_parsed_that_is_an_error(failure):
    with pytest.raises(GuardianError, match="could not decide"):
        decide(policy(scorer(UNSURE), scorer(failure)))


def test_if_the_guardian_fails_the_configured_safe_action_is_taken_without_a_guarantee():
    made = decide(policy(scorer(UNSURE), scorer(OSError("down")), safe_action="c"))
    assert (made.decided_by, made.answer, made.deferred) == ("fallback", "c", True)
    assert "Guardian failed" in made.no_guarantee


def test_a_safe_action_that_is_not_on_the_menu_is_an_error():
    with pytest.raises(GuardianError, match="'refuse' is not one of"):
        decide(policy(scorer(UNSURE), scorer(OSError("down")), safe_action="refuse"))


def test_if_both_fail_it_is_never_the_primary_s_choice():
    with pytest.raises(GuardianError):
        decide(policy(scorer(OSError()), scorer(OSError())))


def test_if_the_caller_is_cancelled_so_are_the_calls_upstream():
    async def run():
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

    asyncio.run(run())


# Identities.


def test_a_certificate_made_with_other_models_is_refused_with_what_differs():
    made = certificate(scorer(SURE, name="rule-1"), scorer(SURE, name="guard"))
    with pytest.raises(StaleCalibrationError, match=r"primary\.name: 'rule-1' then, 'rule-2' now"):
        ConformalArbitrage(primary=scorer(SURE, name="rule-2"), guardian=scorer(SURE, name="guard"), certificate=made)


def test_what_is_allowed_by_name_runs_without_a_guarantee_and_says_so():
    made = certificate(scorer(SURE, name="rule-1"), scorer(SURE, name="guard"))
    live = ConformalArbitrage(
        primary=scorer(SURE, name="rule-2"), guardian=scorer(SURE, name="guard"), certificate=made,
        allow=["primary.name"],
    )  # fmt: skip
    assert decide(live).no_guarantee == "allowed by name: primary.name"


def test_an_unbound_certificate_must_be_asked_for_by_name(science):
    made = calibrate(science, 0.05)
    models = {"primary": scorer(SURE), "guardian": scorer(SURE)}
    with pytest.raises(StaleCalibrationError, match="'unbound'"):
        ConformalArbitrage(**models, certificate=made)
    with pytest.raises(StaleCalibrationError):
        ConformalArbitrage(**models, certificate=made, allow=["primary.name"])
    assert "unbound" in decide(ConformalArbitrage(**models, certificate=made, allow=["unbound"])).no_guarantee


# Free text.


class Answerer:
    """Says a text with a confidence, or fails."""

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
    made = decide(router(primary, Answerer("g", "theirs")), REQUEST)
    assert (made.decided_by, made.answer["content"]) == (decided_by, text)
    assert made.action == (1 if decided_by == "primary" else 0)
    assert made.no_guarantee is None


def test_a_confidence_of_numpy_is_a_number_like_any_other():
    made = decide(router(Answerer("p", "mine", np.float64(0.8)), Answerer("g", "theirs")), REQUEST)
    assert decision_json(made)["legs"][0]["scores"] == (0.8,)


def test_if_the_guardian_cannot_answer_that_is_an_error_or_the_safe_answer():
    primary, guardian = Answerer("p", "mine", 0.2), Answerer("g", ReplyError("empty"))
    with pytest.raises(GuardianError, match="could not answer"):
        decide(router(primary, guardian), REQUEST)
    made = decide(router(primary, guardian, safe_answer="Please call us."), REQUEST)
    assert (made.decided_by, made.answer["content"]) == ("fallback", "Please call us.")
    assert made.no_guarantee is not None


def test_a_decision_costs_what_both_legs_cost():
    made = decide(router(Answerer("p", "mine", 0.2), Answerer("g", "theirs")), REQUEST)
    assert made.spent == Spent(calls=2, cost=1.0)
    assert decide(policy(scorer(UNSURE), scorer(SURE))).spent.cost is None  # a function's price is not known


# Baselines.


def test_single_models_decide_everything():
    for role, values, answer in (("primary", SURE, "a"), ("guardian", [0, 0, 1], "c")):
        made = decide(SingleModel(scorer=scorer(values), role=role))
        assert isinstance(made, Decision)
        assert (made.decided_by, made.answer) == (role, answer)
        assert made.no_guarantee is not None
    with pytest.raises(GuardianError):
        decide(SingleModel(scorer=scorer(OSError()), role="primary"))


def test_a_coin_asks_the_guardian_as_often_as_told():
    made = RandomRouter(primary=scorer(SURE), guardian=scorer([0, 0, 1]), probability=0.25, coin=random.Random(0))

    async def run():
        return [(await made.decide(QUERY)).decided_by for _ in range(1000)]

    assert asyncio.run(run()).count("guardian") == pytest.approx(250, abs=50)
