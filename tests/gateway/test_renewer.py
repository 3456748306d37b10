"""Renewal through the real gateway: rows come from requests, one of several gateways installs, every gateway follows."""

import asyncio
import json
import time
from contextlib import AsyncExitStack

import pytest
from click.testing import CliRunner

from conformal_arbitrage import Certificate, ScoreLog, calibrate
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli
from conformal_arbitrage.collecting.renewal import install_successor, outlook, renewable, successor
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway import renewer
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.gateway.policies import PolicyTable, pairs_of
from conformal_arbitrage.gateway.renewer import Renewer
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.live.build import Extras, Models, open_record
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import events
from conformal_arbitrage.store import policies as stored_policies
from conformal_arbitrage.store.record import AlarmBody
from tests.certificates import said
from tests.gateway.house import MENU, House, votes

N, DAY = 20, 86400.0
SCHEDULED = {"audit_rate": 1.0, "renew": "scheduled"}


def alternating(*replies):
    """An upstream that gives one reply after another."""
    return lambda path, body, number: replies[number % len(replies)](path, body, number)


class SmallHouse(House):
    """A house whose certificate comes from few rows, so that a renewal takes few."""

    def certificate(self, alpha=0.2, identities=None, policy="support"):
        config = read_config(self.path)
        made_by = identities or identities_of(config, policy)
        rows = [[0.9, 0.1, 0.0]] * (N // 2) + [[0.6, 0.3, 0.1]] * (N // 2)
        right = [[1.0, 0.0, 0.0]] * (N // 2) + [[0.0, 1.0, 0.0]] * (N // 2)
        log = ScoreLog.from_arrays(rows, right, id=[f"r{k}" for k in range(N)], identities=made_by)
        log.write(self.folder / "log.parquet")
        return calibrate(log, alpha).sign(ProjectSecret.find())


def house(folder, gateway=None, **policy):
    """A Primary that is sure and right half of the time, less sure and wrong otherwise."""
    primary = alternating(votes(0.9, 0.1, 0.0), votes(0.7, 0.1, 0.2))
    guardian = alternating(votes(1.0, 0.0, 0.0), votes(0.0, 1.0, 0.0))
    return SmallHouse(
        folder,
        primary=primary,
        guardian=guardian,
        gateway=gateway or {},
        policy={"certificate": "rule.json", **SCHEDULED, **policy},
    )


def ask(served, count):
    for _ in range(count):
        assert served.post("/v1/chat/completions", MENU).status_code == 200


def gathered(served, count):
    """Wait until the audits of all rows are in."""

    async def known(store):
        await events.gather_rows(store)
        rows = await store.run(events.calibration_rows, "support", identities_sha256=sha256, since=0.0)
        return sum(row.guardian is not None for row in rows)

    sha256 = served.records(policy="support", limit=1)[0].decision.identities_sha256
    ends = time.monotonic() + 60
    while served.with_store(known) < count:
        assert time.monotonic() < ends
        time.sleep(0.05)


async def renew_with(config, gateways, *, days):
    """Let so many gateways look at the schedule at once, some days from now."""
    async with AsyncExitStack() as stack:
        renewers = []
        for _ in range(gateways):
            store = await open_record(config)
            stack.push_async_callback(store.close)
            models = await stack.enter_async_context(Models(config, Extras()))
            policies = PolicyTable(config, store, pairs_of(models), ProjectSecret.find())
            await policies.load()
            clock = lambda: time.time() + days * DAY  # noqa: E731
            watcher = Watcher(store, policies, clock)
            await watcher.turn()
            renewers.append((Renewer(config, store, policies, ProjectSecret.find(), clock), watcher))
        await asyncio.gather(*(renewer.run_once(watcher) for renewer, watcher in renewers))


def history(served):
    return served.with_store(lambda store: store.run(stored_policies.history, "support"))


def test_one_of_several_gateways_renews_and_all_follow(tmp_path):
    with house(tmp_path) as served:
        ask(served, N)
        gathered(served, N)
        asyncio.run(renew_with(served.config, 3, days=0.5))
        assert len(history(served)) == 1  # all outcomes are known, and none is due
        asyncio.run(renew_with(served.config, 3, days=1.1))
        newest, first = history(served)
        assert (newest.version, newest.installed_by) == (2, "schedule")
        certificate = Certificate.from_dict(dict(newest.certificate))
        assert (certificate.n, certificate.ancestry.step, certificate.ancestry.renewal) == (N, "scheduled", 1)
        assert certificate.identities == Certificate.from_dict(dict(first.certificate)).identities
        ask(served, 1)
        record = served.records(policy="support", limit=1)[0]
        assert record.decision.version == 2
        assert record.decision.no_guarantee is None
        asyncio.run(renew_with(served.config, 2, days=1.1))
        assert len(history(served)) == 2


def test_a_renewal_that_was_rolled_back_is_not_made_again(tmp_path):
    with house(tmp_path) as served:
        ask(served, N)
        gathered(served, N)
        asyncio.run(renew_with(served.config, 1, days=1.1))
        dearer, first = history(served)
        assert said(dearer.certificate, "relaxation") > said(first.certificate, "relaxation")
        served.with_store(lambda store: store.run(stored_policies.rollback, "support", by="a person"))
        asyncio.run(renew_with(served.config, 1, days=1.1))
        assert [version.version for version in history(served)] == [3, 2, 1]
        assert "defers less than version 2" in newest_decision(served).no_guarantee
        ask(served, N)
        gathered(served, 2 * N)
        asyncio.run(renew_with(served.config, 1, days=1.1))
        newest = history(served)[0]
        assert (newest.version, said(newest.certificate, "n"), newest.certificate["ancestry"]["renewal"]) == (
            4,
            2 * N,
            2,
        )
        assert newest_decision(served).no_guarantee is None


def newest_decision(served):
    """Ask once more; return what was decided."""
    ask(served, 1)
    [record] = served.records(policy="support", limit=1)
    return record.decision


def test_after_red_rows_of_safe_mode_renew_by_hand_only_and_end_it(tmp_path):
    needed = 49  # suggested at alpha 0.2
    with house(tmp_path) as served:
        ask(served, N)
        gathered(served, N)
        record = served.records(policy="support", limit=1)[0]
        sha256 = record.decision.identities_sha256
        alarm = AlarmBody(
            version=1, lifts=0, identities_sha256=sha256, cause="losses", audits=N, known=N, missing=0, line=0.3,
            log_evidence=4.0,
        )  # fmt: skip
        assert served.with_store(lambda store: store.run(stored_policies.raise_alarm, "support", alarm))
        time.sleep(0.01)
        ask(served, needed)
        record = served.records(policy="support", limit=1)[0]
        assert (record.decision.mode, record.decided_by) == ("safe", "guardian")
        asyncio.run(renew_with(served.config, 2, days=1.1))
        assert len(history(served)) == 1  # never by itself
        target = renewable(served.config, "support", identities_of(served.config, "support"), ProjectSecret.find())

        async def by_hand(store):
            ahead = await outlook(store, target, now=time.time() + 1.1 * DAY)
            assert (ahead.step, ahead.arrived, ahead.rows) == ("after red", needed, needed)
            return await install_successor(store, ahead, await successor(store, target, ahead), by="a person")

        served.with_store(by_hand)
        newest = history(served)[0]
        assert (said(newest.certificate, "n"), newest.certificate["ancestry"]["step"]) == (needed, "after red")
        assert not {"no_opinion_rows", "missing_guardian_rows"} & set(newest.certificate["evidence"])  # 0 is left out
        assert newest.alarm is None
        ask(served, 1)
        record = served.records(policy="support", limit=1)[0]
        assert (record.decision.mode, record.decision.version, record.decision.no_guarantee) == ("enforce", 2, None)


def test_the_gateway_tightens_by_itself_while_losses_make_it_amber(tmp_path):
    with house(tmp_path, renew="by hand", tighten=True) as served:
        right, wrong = votes(1.0, 0.0, 0.0), votes(0.0, 0.0, 1.0)
        served.guardian.reply = alternating(right, wrong, right, wrong, right)  # twice alpha, below the red line
        ask(served, 100)
        gathered(served, 100)
        asyncio.run(renew_with(served.config, 2, days=0.0))
        newest, first = history(served)
        assert newest.installed_by == "tightening"
        assert said(newest.certificate, "relaxation") > said(first.certificate, "relaxation")
        assert said(newest.certificate, "log_sha256") == said(first.certificate, "log_sha256")


def test_the_running_gateway_looks_at_its_schedule(tmp_path, monkeypatch):
    monkeypatch.setattr(renewer, "RENEW_EVERY", 0.05)
    looks = []

    async def look(self, watcher):
        looks.append(watcher)

    monkeypatch.setattr(Renewer, "run_once", look)
    with house(tmp_path):
        ends = time.monotonic() + 60
        while len(looks) < 3:
            assert time.monotonic() < ends
            time.sleep(0.02)


def renew(served, *options):
    arguments = ["renew", "support", *options, "--config", str(served.path)]
    return CliRunner().invoke(cli, arguments)


def test_the_command_says_when_and_never_what(tmp_path):
    with house(tmp_path, log="log.parquet", renew="by hand") as served:
        ask(served, N)
        gathered(served, N)
        shown = renew(served, "--dry-run")
        assert f"renewal 1 takes the first {N} rows" in shown.output
        assert f"and the {N} rows of its log; {N} have arrived, and the outcomes of 0 are due: it is not due yet" in (
            " ".join(shown.output.split())
        )
        document = json.loads(renew(served, "--dry-run", "--json").output)
        assert (document["rows"], document["collected"], document["arrived"], document["due"]) == (N, N, N, False)
        assert not {"relaxation", "certificate"} & set(document)
        refused = renew(served)
        assert refused.exit_code == 0
        assert "nothing was installed" in refused.output
        assert "no guarantee (--after-looking)" in refused.output
        assert json.loads(renew(served, "--json").output)["installed"] is None
        assert len(history(served)) == 1


def test_after_looking_every_decision_says_guarantee_none(tmp_path):
    with house(tmp_path) as served:
        ask(served, N)
        gathered(served, N)
        done = renew(served, "--after-looking", "--rows", str(tmp_path / "rows.parquet"))
        assert done.exit_code == 0
        assert "There is no guarantee" in done.output
        assert "Installed: version 2" in done.output
        ask(served, 1)
        record = served.records(policy="support", limit=1)[0]
        assert record.decision.version == 2
        assert "after looking" in record.decision.no_guarantee
        Certificate.from_dict(dict(history(served)[0].certificate)).save(tmp_path / "installed.json")
        shown = CliRunner().invoke(cli, ["certificate", "show", str(tmp_path / "installed.json")])
        assert "installed after looking: no guarantee" in shown.output
        verified = CliRunner().invoke(cli, ["verify", str(tmp_path / "installed.json"), str(tmp_path / "rows.parquet")])
        assert verified.exit_code == 0, verified.output


def test_the_command_tightens_at_any_time(tmp_path):
    with house(tmp_path) as served:
        ask(served, N)
        gathered(served, N)
        both = CliRunner().invoke(
            cli, ["renew", "support", "--tighten", "--after-looking", "--config", str(served.path)]
        )
        assert both.exit_code == 2
        done = renew(served, "--tighten", "--json")
        document = json.loads(done.output)
        assert document["step"] == "tightened"
        before, after = history(served)[1].certificate, history(served)[0].certificate
        assert said(after, "relaxation") > said(before, "relaxation")
        assert "no rows since version 2" in renew(served, "--tighten").output


def test_a_log_that_is_not_the_certificates_is_refused_at_the_start(tmp_path):
    with house(tmp_path) as served:
        ScoreLog.from_arrays([[0.9, 0.1, 0.0]] * 5, [[1.0, 0.0, 0.0]] * 5).write(tmp_path / "other.parquet")
        served.stop()
        served.sections["policies.support"]["log"] = "other.parquet"
        served.configure()
        with pytest.raises(ConfigError, match="is not the log that a certificate of this policy was made from"):
            served.start()
        served._serving = None  # it has ended


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"renew": "scheduled"}, "set audit_rate above 0"),
        ({"log": "log.parquet"}, "name that one too"),
        ({"tighten": True}, "set audit_rate above 0"),
        ({"renew": "scheduled", "mode": "shadow", "sticky": "session"}, "single queries"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, policy, words):
    lines = [f"{key} = {json.dumps(value)}" for key, value in policy.items()]
    model = 'kind = "decisions"\nurl = "http://127.0.0.1:1"\nmodel = "m"\n'
    path = tmp_path / "arbitrage.toml"
    path.write_text(f"[primary]\n{model}[guardian]\n{model}[policies.support]\n" + "\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=words):
        read_config(path)
