"""Live decisions under a certificate by groups: what `apply` decides for the same rows, to the bit."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import (
    CertificateError,
    ChatRequest,
    ConformalArbitrage,
    ConformalRouter,
    ScoreLog,
    StaleCalibrationError,
    calibrate,
)
from conformal_arbitrage.calibration.promises import PerSession
from conformal_arbitrage.live.binding import check_router_form
from conformal_arbitrage.live.service import deferring, false_red_of_policy, watchable
from conformal_arbitrage.monitoring.lines import watch_lines
from tests.calibration.test_learned import KEY
from tests.live.test_learned import live, pair
from tests.live.test_policy import Answerer

GROUPS = ("easy", "hard", "few", "fewer", "many")
SHARES = (0.3, 0.3, 0.02, 0.01, 0.37)


def world(n=600, seed=0, groups=GROUPS, shares=SHARES):
    """Scores with many ties, so that rows lie exactly at the thresholds."""
    rng = np.random.default_rng(seed)
    scores = np.round(rng.dirichlet([1.0, 1.0, 1.0], n), 1)
    group = rng.choice(groups, n, p=shares)
    lost = rng.random(n) < np.where(group == "hard", 0.5, 0.03)
    guardian = np.ones((n, 3))
    guardian[np.arange(n), scores.argmax(axis=1)] = ~lost
    models = {"primary": {"kind": "recorded", "role": "primary"}, "guardian": {"kind": "recorded", "role": "guardian"}}
    return ScoreLog.from_arrays(
        scores, guardian, id=[f"r{seed}-{k}" for k in range(n)], group=group, identities=models
    )  # fmt: skip


@pytest.mark.parametrize("small_groups", ["defer", "merge"])
@pytest.mark.parametrize("guardian_sees", ["candidates", "all"])
@pytest.mark.parametrize("boundary", ["random", "include"])
def test_live_decisions_are_those_of_apply(boundary, guardian_sees, small_groups):
    key = KEY if boundary == "random" else None
    certificate = calibrate(
        world(), 0.05, by="group", boundary=boundary, key=key, guardian_sees=guardian_sees, small_groups=small_groups
    )
    fresh = world(400, seed=1, groups=(*GROUPS, "unknown", ""), shares=(0.2, 0.2, 0.1, 0.1, 0.2, 0.1, 0.1))
    primary, guardian = pair(fresh)
    rule = ConformalArbitrage(primary=primary, guardian=guardian, certificate=certificate)
    decided_by = {name: set() for name in (*GROUPS, "unknown", "")}
    for group, decision, offline in zip(fresh.group, live(rule, fresh), certificate.apply(fresh), strict=True):
        assert decision.candidates == offline.candidates
        assert (decision.margin, decision.relaxation) == (offline.margin, offline.relaxation)
        assert decision.decided_by == offline.decided_by
        assert decision.no_guarantee is None
        decided_by[str(group)].add(decision.decided_by)
    assert decided_by["easy"] == decided_by["many"] == {"primary", "guardian"}
    assert decided_by["unknown"] == decided_by[""] == {"guardian"}, "an unknown or absent group is deferred"
    if small_groups == "defer":
        assert decided_by["few"] == decided_by["fewer"] == {"guardian"}
    relaxations = {one.relaxation for one in certificate.groups.values() if one.relaxation is not None}
    assert len(relaxations) > 1, "one threshold for all would pass this test"


def test_the_router_takes_the_threshold_of_the_requests_group():
    primary, guardian = Answerer("p", "mine", confidence=0.6), Answerer("g", "theirs")
    n, group = 400, np.array(["easy", "hard"] * 200)
    right = np.where(group == "easy", 1.0, 0.0)
    log = ScoreLog.from_router(
        confidence=np.linspace(0.3, 0.9, n), primary_grade=right, guardian_grade=np.ones(n), group=group,
        identities={"primary": dict(primary.identity), "guardian": dict(guardian.identity), "grader": {"kind": "exact"}},
    )  # fmt: skip
    certificate = calibrate(log, 0.05, by="group", guardian_sees="all")
    rule = ConformalRouter(primary=primary, guardian=guardian, certificate=certificate)
    for name in ("easy", "hard", "unknown", None):
        decision = asyncio.run(rule.decide(ChatRequest({"messages": []}, id="x", group=name)))
        offline = certificate.decide([0.0, 0.6], id="x", group=name)
        assert (decision.decided_by, decision.relaxation) == (offline.decided_by, offline.relaxation)
        assert decision.decided_by == ("primary" if name == "easy" else "guardian")


def test_sessions_and_groups_are_refused_together():
    certificate = replace(calibrate(world(), 0.05, by="group"), promise=PerSession(alpha=0.05))
    with pytest.raises(CertificateError, match="session and groups do not go together"):
        check_router_form(certificate, by_session=True)


def test_each_group_with_a_threshold_is_watched_by_itself():
    certificate = calibrate(world(), 0.05, by="group")
    lines, reason = watchable(certificate)
    assert reason is None
    assert set(lines) == {"easy", "hard", "many"}
    for name, one in lines.items():
        assert one == watch_lines(0.05, n=certificate.groups[name].n)
    assert false_red_of_policy(certificate, lines) == pytest.approx(0.15)
    sure = calibrate(world(), 0.05, by="group", confidence=0.9, key=KEY)
    lines, _ = watchable(sure)
    assert false_red_of_policy(sure, lines) == pytest.approx(0.1 + len(lines) / 40)
    assert false_red_of_policy(certificate, watchable(certificate, "alpha")[0]) is None


def test_a_certificate_that_defers_every_group_has_nothing_to_watch():
    lines, reason = watchable(calibrate(world(40, groups=("a", "b", "c"), shares=(0.4, 0.3, 0.3)), 0.05, by="group"))
    assert lines is None
    assert reason.startswith("every query of every group is deferred")


def test_groups_of_another_source_are_refused_and_those_of_an_unknown_one_say_so():
    primary, guardian = pair(world())

    def served(source, now):
        certificate = calibrate(world(), 0.05, by="group", group_source=source)
        return ConformalArbitrage(primary=primary, guardian=guardian, certificate=certificate, group_source=now)

    assert all(
        one.no_guarantee is None
        for one in live(served("metadata.subject", "metadata.subject"), world().select(range(20)))
    )
    with pytest.raises(StaleCalibrationError, match=r"group\.source: 'metadata.subject' then, 'metadata.tenant' now"):
        served("metadata.subject", "metadata.tenant")
    with pytest.raises(StaleCalibrationError, match=r"calibrate with --group-source metadata\.tenant"):
        served(None, "metadata.tenant")


def test_safe_mode_defers_every_group():
    certificate = calibrate(world(), 0.05, by="group")
    assert certificate.decide([1.0, 0.0, 0.0], group="easy").decided_by == "primary"
    assert deferring(certificate).decide([1.0, 0.0, 0.0], group="easy").decided_by == "guardian"
