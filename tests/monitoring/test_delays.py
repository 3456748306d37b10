import pytest

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.lines import plan_audits


def test_a_plan_says_when_a_loss_is_seen_and_what_audits_cost():
    plan = plan_audits(0.05, audit_rate=0.05, decisions_per_day=10_000, primary_share=0.6, guardian_cost=0.002)
    assert plan.audits_per_day == 500
    assert plan.guardian_calls_per_day == 300
    assert plan.cost_per_day == pytest.approx(0.6)
    assert plan.fresh_after_days == pytest.approx(1.08)
    double = plan.delays[2]
    assert (double.ratio, double.audits, double.decisions) == (2, 260, 5200)
    assert double.days == pytest.approx(0.52)
    assert double.excess == pytest.approx(260)
    assert plan_audits(0.05, audit_rate=1, decisions_per_day=1).cost_per_day is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"audit_rate": 0}, "audit_rate"),
        ({"audit_rate": 1.5}, "audit_rate"),
        ({"decisions_per_day": 0}, "decisions_per_day"),
        ({"primary_share": 2}, "primary_share"),
    ],
)
def test_impossible_plans_are_refused(changed, message):
    with pytest.raises(OptionError, match=message):
        plan_audits(0.05, **{"audit_rate": 0.05, "decisions_per_day": 100} | changed)
