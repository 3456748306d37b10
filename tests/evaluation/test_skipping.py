"""Routing before asking: offered where it pays, refused with a reason where it does not, and exact behind calibrate."""

from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ConfigError, OptionError, ScoreLog, calibrate, evaluate
from conformal_arbitrage.calibration.skip_rule import SkipRule, read_skip_rule, skipped_rows, with_skips
from conformal_arbitrage.evaluation.skipping import learn_skips

KEY = b"k" * 32
COSTS = {"primary_cost": 0.4, "guardian_cost": 1.0}


def world(n=1000, seed=0, *, hopeless=0.8, group=True, **columns):
    """Return a log with a group in which the Primary is nearly always wrong, whatever its confidence."""
    rng = np.random.default_rng(seed)
    law = rng.random(n) < 0.4
    confidence = np.round(rng.random(n), 2) + 0.01
    wrong = rng.random(n) < np.where(law, hopeless, 0.3 * (1 - confidence))
    return ScoreLog.from_router(
        confidence=confidence, primary_grade=1.0 - wrong, guardian_grade=np.ones(n), id=[f"{seed}-{k}" for k in range(n)],
        group=np.where(law, "law", "art") if group else None, **columns,
    )  # fmt: skip


def test_a_hopeless_group_goes_straight_to_the_guardian_and_costs_fall():
    log = world()
    choice = learn_skips(log, 0.05, group_source="metadata.subject", **COSTS)
    assert choice.rule.groups["law"] > choice.rule.groups["art"]
    assert (choice.rule.skips("law", None), choice.rule.skips("art", None)) == (True, False)
    assert choice.rule.skips(None, None), "one that lacks what the rule reads is deferred too"
    assert choice.cost < 0.98 * choice.cost_without
    assert choice.cost_ratio == pytest.approx(0.4)
    assert len(choice.tuning) + len(choice.rest) == len(log)
    skipped = choice.rest.group == "law"
    assert (choice.rest.no_opinion == skipped).all()
    assert choice.skipped == pytest.approx(skipped.mean())
    assert (choice.rest.primary_usage.cost == np.where(skipped, 0.0, 0.4)).all()
    certificate = calibrate(choice.rest, 0.05, boundary="random", key=KEY)
    assert certificate.apply(choice.rest).deferred[skipped].all()
    asked_first = log.select(np.isin(log.id, choice.rest.id))

    def cost(one, **prices):
        point = evaluate(one, [0.05], calibration_size=300, trials=20, boundary="random", key=KEY, **prices)
        return point.of("conformal")[0].mean("cost_per_1000")

    assert cost(choice.rest) < 0.95 * cost(asked_first, **COSTS)


def test_on_every_set_of_rows_a_skipped_log_keeps_the_budget():
    rule = SkipRule(threshold=0.5, level=0.1, groups={"law": 0.8, "art": 0.0})
    for seed in range(25):
        log = with_skips(world(16, seed), rule)
        kept = [
            not calibrate(log.select(np.arange(16) != j), 0.2, boundary="random", key=KEY)
            .apply(log.select([j]))
            .deferred[0]
            for j in range(16)
        ]
        assert (1 - log.guardian[1::2])[kept].sum() <= 0.2 * 16 + 1e-9


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"primary_cost": 0.05}, "costs 0.05: always ask it"),
        ({"primary_cost": 2.0}, "costs 2: always ask the Guardian"),
        ({"primary_cost": None, "guardian_cost": None}, "depends on what both models cost"),
        ({"share": 0.03}, "30 rows to learn on are too few"),
        ({"groups": False}, "nothing is known of a query before the Primary is asked"),
        ({"text": True}, "there is no `context` column"),
    ],
)
def test_where_it_cannot_pay_it_is_refused_with_the_reason(change, why):
    with pytest.raises(OptionError, match=why):
        learn_skips(world(), 0.05, **{**COSTS, **change})


def test_where_groups_tell_nothing_it_is_refused_with_figures():
    with pytest.raises(OptionError, match=r"would not pay: a query costs \d\.\d+ Guardian calls if it is asked first"):
        learn_skips(world(hopeless=0.1), 0.1, primary_cost=0.2, guardian_cost=1.0)
    graded = replace(world(), guardian=5 * world().guardian)
    with pytest.raises(OptionError, match=r"skipping needs losses in \[0, 1\]"):
        learn_skips(graded, 0.05, **COSTS)


def test_texts_tell_queries_apart_where_no_group_does():
    rng, n = np.random.default_rng(3), 800
    law = rng.random(n) < 0.5
    text = np.where(law, "Which court hears an appeal in contract law?", "How long does one boil an egg?")
    wrong = rng.random(n) < np.where(law, 0.9, 0.05)
    log = ScoreLog.from_router(
        confidence=rng.random(n) + 0.01, primary_grade=1.0 - wrong, guardian_grade=np.ones(n),
        id=[f"t{k}" for k in range(n)], context=text,
    )  # fmt: skip
    rule = learn_skips(log, 0.05, text=True, **COSTS).rule
    assert (rule.groups, rule.group_source) == ({}, None)
    assert rule.skips(None, "Does the court hear this appeal about a contract?")
    assert not rule.skips(None, "How long does one boil a potato?")
    assert rule.skips(None, "")
    assert (skipped_rows(log, rule) == law).all()
    with pytest.raises(ConfigError, match="there is no column 'context', which the rule reads"):
        skipped_rows(world(), rule)


def test_a_rule_is_written_read_and_bound_by_its_digest(tmp_path):
    rule = learn_skips(world(), 0.05, group_source="metadata.subject", **COSTS).rule
    rule.write(tmp_path / "skip.json")
    again = read_skip_rule(tmp_path / "skip.json")
    assert again == rule
    assert again.identity == {"skip_sha256": rule.sha256, "skip_group_source": "metadata.subject"}
    bound = world(identities={"primary": {"model": "m"}, "guardian": {"model": "g"}})
    assert with_skips(bound, rule).identities["primary"] == {"model": "m", **rule.identity}
    assert with_skips(bound, rule).identities["guardian"] == {"model": "g"}
    with pytest.raises(ConfigError, match="there is no column 'group', which the rule reads"):
        skipped_rows(world(group=False), rule)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "not a rule of `arbitrage skip`"),
        ("{}", "not a rule of `arbitrage skip`"),
        ('{"threshold": 0.5, "level": 0.1, "version": 2}', "not a rule that this release reads"),
        ('{"threshold": 0.5, "level": 0.1, "text": [1.0]}', "not a rule that this release reads"),
        ('{"threshold": 0.5, "level": 0.1, "text": [' + ", ".join(["0.5"] * 48) + "]}", "in another way here"),
    ],
)
def test_a_file_that_is_no_rule_of_this_release_is_refused(tmp_path, content, why):
    if content is not None:
        (tmp_path / "skip.json").write_text(content)
    with pytest.raises(ConfigError, match=why):
        read_skip_rule(tmp_path / "skip.json")
