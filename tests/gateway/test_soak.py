"""A short soak; `make soak` is the long one."""

import asyncio
import os

import pytest
from benchmarks.soak import run

pytestmark = pytest.mark.proof
REQUESTS = int(os.environ.get("SOAK_REQUESTS", "3000"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    return asyncio.run(run(folder, requests=REQUESTS, shadowed=1000, concurrency=64))


def test_the_export_of_shadow_mode_calibrates_to_a_rule_that_keeps_its_quota_on_the_rest(ran):
    found, _ = ran
    assert found.rule.status == "ok"
    assert found.rule.identities != "unbound"
    assert 0.1 < found.deferred < 0.9
    assert found.holds, found


def test_under_load_no_record_is_lost_or_added_and_every_decision_follows_the_certificate(ran):
    _, soaked = ran
    assert soaked.faults == []
    assert (soaked.lost, soaked.extra, soaked.records) == (0, 0, REQUESTS)
    assert soaked.broken_chains == []
    assert soaked.audits > 0
    assert soaked.audits_open == 0


def test_memory_is_flat_after_a_while(ran):
    _, soaked = ran
    assert abs(soaked.drift - 1) <= 0.1, soaked.memory_mb
