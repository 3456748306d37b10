"""The filled console of `make demo-serve`: real requests, real audits, and an alarm."""

import asyncio
import json

from click.testing import CliRunner

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli, demo
from conformal_arbitrage.cli.serve import example_call
from conformal_arbitrage.gateway.audits import GradingFeed
from conformal_arbitrage.live.build import open_record
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import events, policies, reviews
from tests.conftest import BUNDLED


def test_the_console_is_filled_once_with_traffic_audits_and_an_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_QUESTIONS", 60)
    (tmp_path / "science.parquet").write_bytes(BUNDLED.read_bytes())
    path = demo.fill_console(tmp_path)
    certificates = [tmp_path / f"{name}.json" for name in ("science", "exams")]
    written = [one.stat().st_mtime_ns for one in certificates]
    assert demo.fill_console(tmp_path) == path
    assert [one.stat().st_mtime_ns for one in certificates] == written  # another would be a version without the alarm

    places = []

    async def read():
        async with await open_record(read_config(path)) as store:
            await events.fold_tallies(store)
            versions = {one.name: one for one in await store.run(policies.active)}
            feed = GradingFeed(store, read_config(path), ProjectSecret.find().keys[0])
            await feed.run_once()  # as a gateway does that is started later
            places.append(await store.run(reviews.open_places))
            return versions, {one.policy: one for one in await store.run(events.tallies, since=0.0)}

    call = example_call(read_config(path), "http://here", keyed=False)
    assert '"model": "science"' in call  # which has a guarantee
    ahead = CliRunner().invoke(cli, ["renew", "exams", "--config", str(path), "--dry-run", "--json"])
    outlook = json.loads(ahead.stdout)
    assert outlook["arrived"] >= outlook["rows"]  # enough for a renewal after the alarm, once outcomes are due
    versions, tallies = asyncio.run(read())
    assert places == [len(demo.LETTERS) + len(demo.CONSOLE_QUESTIONS)]
    assert tallies["science"].decisions == 60
    assert tallies["exams"].decisions == 260 + 240
    assert tallies["exams"].audit_calls > 0
    assert versions["exams"].alarm is not None
    assert versions["science"].alarm is None
