"""A background job that fails is started again, counted, logged and named; none ends unseen."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry, Counter

from conformal_arbitrage.gateway.jobs import Background


@pytest.fixture
def background(monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.jobs.RESTART_AFTER", 0.02)
    return Background(Counter("failures", "Failures", ["work"], registry=CollectorRegistry()))


def test_a_job_that_fails_runs_again_and_is_named_until_it_does(background, caplog):
    runs = []

    async def job():
        runs.append(dict(background.failed))
        if len(runs) < 3:
            raise ZeroDivisionError("a bug")
        await asyncio.Event().wait()

    async def story():
        background.start({"watch": job})
        while len(runs) < 3 or background.failed:
            await asyncio.sleep(0.005)
        await background.stop()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert runs[0] == {}
    assert "ZeroDivisionError" in runs[1]["watch"]
    assert [r.exc_info[0] for r in caplog.records] == [ZeroDivisionError] * 2


def test_a_job_with_nothing_to_do_may_end(background, caplog):
    runs = []

    async def job():
        runs.append(True)

    async def story():
        background.start({"watch": job})
        await asyncio.sleep(0.1)
        await background.stop()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert (len(runs), background.failed, caplog.records) == (1, {}, [])


def test_a_stop_ends_jobs_in_the_middle_of_their_work(background):
    ended = []

    async def job():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def story():
        background.start({"watch": job, "send": job})
        await asyncio.sleep(0.05)
        await background.stop()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert ended == [True, True]


def test_a_monitor_that_fails_is_named_by_ready_and_the_gateway_serves_on(house, monkeypatch):
    def broken(self):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("conformal_arbitrage.gateway.watcher.Watcher.turn", broken)
    gateway = house()
    deadline = time.monotonic() + 60
    while "problems" not in (ready := gateway.get("/health/ready").json()):
        assert time.monotonic() < deadline, "the failure is not named"
        time.sleep(0.02)
    [problem] = ready["problems"]
    assert problem["work"] == "monitor"
    assert "ZeroDivisionError" in problem["problem"]
    assert gateway.decide().status_code == 200
    assert 'arbitrage_background_failures_total{work="monitor"}' in gateway.get("/metrics").text
