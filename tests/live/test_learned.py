"""Live decisions by a learned score: what a replay of the log decides, to the bit."""

import asyncio

import numpy as np
import pytest

from conformal_arbitrage import (
    ChatRequest,
    ConformalArbitrage,
    ConformalRouter,
    Features,
    Query,
    ScoreLog,
    Spent,
    StaleCalibrationError,
    calibrate,
)
from conformal_arbitrage.models import Scores
from tests.calibration.test_learned import KEY, world
from tests.live.test_policy import Answerer

LOGS = {
    "mmlu-claude3sonnet-deepseek": {"menu_size": 4},
    "mmlu-llama13b-gpt4": {"menu_size": 4},
    "judge-pairs-mistral7b-gpt4": {},
    "science": {},
    "sciq-llama8b-gpt4o": {},
    "truthfulqa-gpt35-gpt4turbo": {},
}
MOST_ROWS = 120
ACTIONS = ("a", "b", "c")


class _Recorded:
    """Both models of a log: each query's id is the number of its row."""

    def __init__(self, log, role):
        self.identity = {"kind": "recorded", "role": role}
        self._log, self._scores = log, log.primary if role == "primary" else log.guardian

    async def score(self, query):
        row = self._log.id.tolist().index(query.id)
        a, b = self._log.offsets[row : row + 2]
        tokens = self._log.primary_usage.output_tokens
        spent = Spent(calls=1, output_tokens=None if tokens is None else int(tokens[row]))
        return Scores(values=tuple(self._scores[a:b].tolist()), spent=spent)


def pair(log):
    return _Recorded(log, "primary"), _Recorded(log, "guardian")


def policy(log, features=None, models=None, **options):
    primary, guardian = models or pair(log)
    identities = {"primary": dict(primary.identity), "guardian": dict(guardian.identity)}
    named = ScoreLog.from_arrays(
        log.primary.reshape(-1, 3), log.guardian.reshape(-1, 3), id=log.id, group=log.group,
        primary_usage=log.primary_usage, identities=identities,
    )  # fmt: skip
    certificate = calibrate(named, 0.1, boundary="random", key=KEY, score="auto", features=features)
    return ConformalArbitrage(primary=primary, guardian=guardian, certificate=certificate, **options)


async def first_step(rule, query):
    """Return the decision once the Primary has chosen."""
    return await anext(rule.steps(query))


def live(rule, log):
    """Decide every row of a log as a query of its own."""

    groups = [""] * len(log) if log.group is None else log.group

    async def decided():
        queries = [
            Query("?", tuple(map(str, range(size))), id=str(id), group=str(group) or None)
            for size, id, group in zip(log.sizes, log.id, groups, strict=True)
        ]
        return [await first_step(rule, query) for query in queries]

    return asyncio.run(decided())


def same(decision, replayed):
    return (decision.candidates, decision.decided_by, decision.margin, decision.learned) == (
        replayed.candidates, replayed.decided_by, replayed.margin, replayed.learned,
    )  # fmt: skip


def test_a_live_policy_decides_as_a_replay_of_the_log():
    log = world(n=200)
    fresh = world(n=150, seed=7)
    rule = policy(log, Features(menu_size=3), models=pair(fresh))
    fresh = ScoreLog.from_arrays(
        fresh.primary.reshape(-1, 3), fresh.guardian.reshape(-1, 3), id=fresh.id, group=fresh.group,
        primary_usage=fresh.primary_usage,
    )  # fmt: skip
    decisions = live(rule, fresh)
    assert all(same(*both) for both in zip(decisions, rule.certificate.apply(fresh), strict=True))
    assert {decision.decided_by for decision in decisions} == {"primary", "guardian"}
    assert all(decision.no_guarantee is None for decision in decisions), "the log has rows without a group too"


def test_a_query_without_a_feature_of_every_row_has_no_guarantee():
    log = world(groups=("art", "law"))
    rule = policy(log)

    async def decided(group):
        return await rule.decide(Query("?", ACTIONS, id=str(log.id[0]), group=group))

    assert asyncio.run(decided("law")).no_guarantee is None
    assert asyncio.run(decided(None)).no_guarantee == "the learned score lacks the query's group"
    whole = world()
    cached = _Recorded(whole, "primary")
    spent = Spent()

    async def from_cache(query):
        scores = await _Recorded.score(cached, query)
        return Scores(values=scores.values, spent=spent)

    cached.score = from_cache
    rule = policy(whole, models=(cached, _Recorded(whole, "guardian")))
    decision = asyncio.run(first_step(rule, Query("?", ACTIONS, id=str(whole.id[1]), group="law")))
    assert decision.no_guarantee == "the learned score lacks the query's tokens", "a cached reply took none"


def test_the_source_of_groups_is_bound():
    log = world()
    with pytest.raises(StaleCalibrationError, match=r"features\.group: 'metadata\.subject' then, None now"):
        policy(log, Features(group_source="metadata.subject"))
    policy(log, Features(group_source="metadata.subject"), group_source="metadata.subject")
    allowed = policy(log, Features(group_source="metadata.subject"), allow=["features.group"])
    [decision] = live(allowed, log.select([0]))
    assert decision.no_guarantee == "allowed by name: features.group"
    policy(log, Features(groups=False, group_source="metadata.subject"))


def test_free_text_is_routed_by_a_learned_score():
    rng = np.random.default_rng(0)
    n, group = 200, rng.choice(["easy", "hard"], 200)
    right = rng.random(n) < np.where(group == "easy", 0.95, 0.3)

    primary, guardian = Answerer("p", "mine", 0.6), Answerer("g", "theirs")
    log = ScoreLog.from_router(
        confidence=rng.random(n), primary_grade=right, guardian_grade=np.ones(n), id=[f"r{k}" for k in range(n)],
        group=group, identities={"primary": dict(primary.identity), "guardian": dict(guardian.identity)},
    )  # fmt: skip
    certificate = calibrate(log, 0.1, boundary="random", key=KEY, score="auto")
    router = ConformalRouter(primary=primary, guardian=guardian, certificate=certificate)

    async def answered(name):
        return await router.decide(ChatRequest({"messages": []}, id="x", group=name))

    easy, hard = (asyncio.run(answered(name)) for name in ("easy", "hard"))
    assert (easy.answer["content"], hard.answer["content"]) == ("mine", "theirs")
    assert easy.learned.count > 0


def shared_log(folder, name):
    columns = {"primary": "qwen15b", "guardian": "expert"} if name == "science" else {}
    log = ScoreLog.read(folder / f"{name}.parquet", **columns)
    return log if log.is_router else log.binarized()


@pytest.mark.parametrize(("name", "features"), LOGS.items())
def test_auto_replayed_from_the_certificate_equals_live_on_recorded_logs(shared, name, features):
    """`make bench-learned` does the same on every row."""
    log = shared_log(shared, name)
    rows = np.random.default_rng(0).permutation(len(log))
    part, rest = log.select(rows[:400]), log.select(rows[400 : 400 + MOST_ROWS])
    certificate = calibrate(part, 0.05, boundary="random", key=KEY, score="auto", features=Features(**features))
    rule = ConformalArbitrage(
        primary=_Recorded(rest, "primary"), guardian=_Recorded(rest, "guardian"), certificate=certificate,
        allow=["unbound"],
    )  # fmt: skip
    assert all(same(*both) for both in zip(live(rule, rest), certificate.apply(rest), strict=True))
