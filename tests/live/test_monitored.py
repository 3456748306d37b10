"""Where policies stand is recomputed from the ledger alone, on both databases."""

import time

import numpy as np
import pytest

from conformal_arbitrage import OptionError, ScoreLog, calibrate
from conformal_arbitrage.cli.monitor import drawn_ledgers, drawn_moments
from conformal_arbitrage.evaluation.show import save_history
from conformal_arbitrage.gateway.console.report import Month, read_month, report_page
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.live.service import LedgerWatch, read_history, read_standings
from conformal_arbitrage.store import ledger, policies
from conformal_arbitrage.store.ledger import LedgerKey, Settlement
from conformal_arbitrage.store.record import AlarmBody
from tests.live.ledgers import DAY, MODELS, certificate, draw_rows, fill, losses, settle_served


@pytest.fixture
def here(opened, tmp_path):
    """A store in a file."""
    return opened(str(tmp_path / "store.db"))


CONFIG = Config(policies={"support": PolicyConfig(audit_rate=0.05)})


async def test_a_standing_is_the_one_that_a_gateway_shows(store):
    key, now = await fill(store), time.time()
    await settle_served(store)
    [standing] = await read_standings(store, CONFIG, now=now)
    watch = LedgerWatch(key, standing.ledger.lines, audit_rate=0.05)
    await watch.follow(store)
    await watch.refresh_served(store, now)
    assert standing.standing == watch.standing(now)
    assert standing.served == watch.served
    assert standing.state == "kept"
    assert standing.blind_decisions == 10_800


async def test_an_alarm_stands_and_a_policy_without_audits_is_blind(here):
    await fill(here)
    version = await here.run(policies.install, "quiet", certificate().to_dict(), by="configuration")
    [quiet, _] = await read_standings(here, CONFIG, now=time.time())
    assert (quiet.ledger.key.policy, quiet.state, quiet.blind_decisions) == ("quiet", "blind", None)
    assert version.version == 1
    with pytest.raises(OptionError, match="there are quiet, support"):
        await read_standings(here, CONFIG, policy="loud", now=time.time())


async def test_old_audits_are_stale_and_new_certificates_are_not(here):
    key, now = await fill(here), time.time()
    [fresh] = await read_standings(here, CONFIG, now=now)
    [stale] = await read_standings(here, CONFIG, now=now + 60 * DAY)
    assert fresh.state == "kept"
    assert stale.state == "amber"
    assert any("stale" in reason for reason in stale.standing.reasons)
    await draw_rows(here, losses(600, 0.02, 9), key=key, start=now + 40 * DAY, stop=now + 50 * DAY)
    [again] = await read_standings(here, CONFIG, now=now + 60 * DAY)
    assert not any("stale" in reason for reason in again.standing.reasons)


async def test_a_history_has_every_ledger_and_every_event(here):
    await fill(here)
    history = await read_history(here, CONFIG, "support")
    assert [(one.key.version, one.key.lifts, len(one.rows)) for one in history.ledgers] == [
        (1, 0, 1100), (1, 1, 60), (2, 0, 702),
    ]  # fmt: skip
    assert [one.kind for one in drawn_moments(history)] == ["installed", "red", "lifted", "installed"]
    drawn = drawn_ledgers(history, time.time())
    assert [one.history.audits[-1] for one in drawn] == [1100, 60, 702]
    assert {one.key.identities_sha256 for one in history.ledgers} == {MODELS}
    with pytest.raises(OptionError, match="there is no policy 'loud'"):
        await read_history(here, CONFIG, "loud")


async def test_an_alarm_counts_from_its_time_on(here):
    now = time.time()
    version = await here.run(policies.install, "support", certificate(confidence=0.95).to_dict(), by="configuration")
    key = LedgerKey(policy="support", version=version.version, identities_sha256=MODELS)
    await draw_rows(here, losses(300, 0.03, 1), key=key, start=now - 20 * DAY, stop=now - DAY)
    alarm = AlarmBody(
        version=1, lifts=0, identities_sha256=MODELS, cause="failing audits", audits=300, known=300, missing=0,
        line=0.05, log_evidence=4.0,
    )  # fmt: skip
    assert await here.run(policies.raise_alarm, "support", alarm)
    [before] = await read_standings(here, CONFIG, now=now - 60)
    [after] = await read_standings(here, CONFIG, now=time.time() + 1)
    assert (before.state, before.mode, before.alarm) == ("no evidence", "enforce", None)
    assert (after.state, after.mode, after.alarm.cause) == ("red", "safe", "failing audits")
    assert after.to_dict()["alarm"]["cause"] == "failing audits"


def net_certificate(n=1200):
    """Return a certificate whose unsure rows are losses and gains."""
    rng = np.random.default_rng(3)
    margin, label = rng.random(n), rng.integers(0, 2, n)
    top = np.where(rng.random(n) < 0.5 * margin, 0, label)
    guardian = np.stack([top == 0, top == 1], axis=1).astype(float)
    log = ScoreLog.from_arrays(
        np.stack([margin, np.zeros(n)], axis=1), guardian, label=label, id=[str(k) for k in range(n)]
    )
    return calibrate(log, 0.05, loss="net", boundary="random", key=b"k" * 16)


async def test_gains_are_shown_in_standings_and_figures(store, tmp_path):
    now = time.time()
    version = await store.run(policies.install, "support", net_certificate().to_dict(), by="configuration")
    key = LedgerKey(policy="support", version=version.version, identities_sha256=MODELS)
    drawn = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], 900, p=[0.3, 0.6, 0.1]).tolist()
    await draw_rows(store, drawn, key=key, start=now - 9 * DAY, stop=now - DAY)
    [first, second] = await store.run(ledger.changes, key, 0, limit=2)
    gone = Settlement(id=first.id, news=0, at=now, delivered=False)
    await store.run(ledger.settle, [gone, Settlement(id=second.id, news=0, at=now, served=-1.0)])
    [standing] = await read_standings(store, CONFIG, now=now)
    assert standing.standing.mean == pytest.approx(np.mean(drawn))
    assert standing.standing.limits[0] < np.mean(drawn) < standing.standing.limits[1] < 0
    assert (standing.state, standing.blind_decisions) == ("kept", None)
    assert standing.served.answers == 899
    assert standing.served.mean == pytest.approx((sum(drawn[2:]) - 1) / 899)
    watch = LedgerWatch(key, standing.ledger.lines, audit_rate=0.05)
    await watch.follow(store)
    await watch.refresh_served(store, now)
    assert (watch.standing(now), watch.served) == (standing.standing, standing.served)
    [stale] = await read_standings(store, CONFIG, now=now + 60 * DAY)
    assert "takes at least 540 to show" in " ".join(stale.standing.reasons)
    month = Month.of(time.strftime("%Y-%m", time.gmtime(now)))
    page = report_page(await read_month(store, CONFIG, "support", month, now=now))
    assert ">−0.2</text>" in page
    assert ">0.0</text>" in page
    history = await read_history(store, CONFIG, "support")
    ledgers, moments = drawn_ledgers(history, now), drawn_moments(history)
    save_history(ledgers, moments, str(tmp_path / "net.svg"), title="support")
    assert (tmp_path / "net.svg").stat().st_size > 0
