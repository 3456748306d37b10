"""Certificates in the store: none that was changed is served, and a certificate file that changed is installed."""

import json
import logging

import aiohttp
import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import main
from conformal_arbitrage.errors import CertificateError, StoreError
from conformal_arbitrage.store import integrity, policies
from conformal_arbitrage.store.record import AlarmBody
from tests.certificates import edited, said
from tests.gateway.durability import SECRET, Gateway, certificate, run_sql, write_config
from tests.gateway.house import House, error_of

CHANGES = {
    "another certificate of the project": "update policies set certificate = (select certificate from policies where "
    "version = 1) where version = 2",
    "another installer": "update policies set installed_by = 'nobody'",
    "the newest version removed": "delete from policies where version = 2",
    "a later version forged": "insert into policies (name, version, origin, certificate, installed, installed_by, seal) "
    "select name, 3, 1, certificate, installed, installed_by, seal from policies where version = 1",
}


@pytest.fixture
def gateway(where, tmp_path, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    with House(tmp_path, gateway={"database": where}) as house:
        other = house.certificate(alpha=0.1).to_dict()
        assert house.put("/v1/arbitrage/policies/support", {"certificate": other}).status_code == 200
        yield house


def restarted(gateway):
    gateway.stop()
    gateway.start()


def refused_at_start(gateway, error, match):
    with pytest.raises(error, match=match):
        gateway.start()
    gateway._serving = None  # there is nothing to stop


@pytest.mark.parametrize("name", CHANGES)
def test_a_version_that_was_changed_in_the_store_is_refused_at_the_next_start_and_found(gateway, where, name):
    restarted(gateway)
    gateway.stop()
    run_sql(where, CHANGES[name])
    refused_at_start(gateway, CertificateError, "it is not what was installed last")
    result = CliRunner().invoke(main, ["records", "verify", "--config", str(gateway.path)])
    assert result.exit_code == 1
    assert "policy support" in result.output


def test_a_policy_without_any_version_left_is_not_begun_anew(gateway, where):
    gateway.stop()
    run_sql(where, "delete from policies")
    refused_at_start(gateway, StoreError, "version 2 was installed, and the store has none")


def test_a_change_under_a_running_gateway_takes_the_policy_out_of_service_with_the_next_refresh(gateway, where):
    run_sql(where, CHANGES["a later version forged"])
    run_sql(where, "update changes set count = count + 1")
    error_of(gateway.decide(), 503, "policy_unusable")


def test_a_changed_file_is_the_way_out_and_an_edited_history_is_not_rolled_back_to(gateway, where):
    run_sql(where, "update policies set installed_by = 'nobody' where version = 1")
    error_of(gateway.post("/v1/arbitrage/policies/support/rollback", {}), 422, "certificate_refused")
    gateway.stop()
    run_sql(where, "update policies set installed_by = 'nobody' where version = 2")
    gateway.certificate(alpha=0.2).save(gateway.folder / "rule.json")
    gateway.start()
    assert gateway.get("/v1/arbitrage/policies/support").json()["version"] == 3
    assert gateway.decide().status_code == 200


def test_an_edited_history_takes_no_alarm_back(gateway, where):
    alarm = AlarmBody(
        version=2, lifts=0, identities_sha256="i", cause="losses", audits=9, known=9, missing=0, line=0.1, log_evidence=9.0
    )  # fmt: skip
    assert gateway.with_store(lambda store: store.run(policies.raise_alarm, "support", alarm))
    gateway.post("/v1/arbitrage/policies/support/rollback", {})
    run_sql(where, "update policies set certificate = '{}' where version = 2")
    run_sql(where, "update changes set count = count + 1")
    restarted(gateway)
    assert gateway.decide().json()["answers"][0]["arbitrage"]["guarantee"] == "none"


def alpha(gateway):
    [policy] = gateway.get("/v1/models").json()["data"]
    return policy["arbitrage"]["alpha"]


def test_a_file_is_installed_whenever_it_changed_and_never_displaces_a_later_version_unchanged(gateway, caplog):
    caplog.set_level(logging.INFO)
    assert alpha(gateway) == 0.1
    restarted(gateway)
    assert alpha(gateway) == 0.1, "the file is unchanged since the last start"
    assert "version 2 is in force, installed by loopback; the certificate file rule.json is not" in caplog.text
    for value, version in ((0.2, 3), (0.05, 4), (0.05, 4), (0.2, 5)):  # the third is a start without a change
        if alpha(gateway) != value:
            gateway.certificate(alpha=value).save(gateway.folder / "rule.json")
        restarted(gateway)
        assert alpha(gateway) == value
        assert gateway.get("/v1/arbitrage/policies/support").json()["version"] == version
        assert f"version {version} is in force, the certificate file rule.json" in caplog.text
    assert gateway.with_store(lambda store: integrity.verify(store)) == []


@pytest.mark.proof
async def test_a_real_gateway_says_on_stderr_which_version_is_in_force(where, tmp_path):
    path = write_config(tmp_path, where)
    for level, version in ((0.1, 1), (0.2, 2), (0.1, 3)):  # an earlier file put back is a change
        certificate(level).save(tmp_path / "certificate.json")
        async with Gateway(path) as gateway, aiohttp.ClientSession(gateway.url) as session:
            async with session.get("/v1/models") as reply:
                [policy] = (await reply.json())["data"]
            assert (policy["arbitrage"]["alpha"], policy["arbitrage"]["version"]) == (level, version)
    document = json.loads((tmp_path / "certificate.json").read_text())
    changed = json.dumps(edited(document, {"relaxation": said(document, "relaxation") * 2})).replace("'", "''")
    run_sql(where, f"update policies set certificate = '{changed}' where version = 3")
    refused = Gateway(path)
    with pytest.raises(AssertionError, match="is not what was installed last"):
        await refused.start()
    assert await refused.process.wait() == 2
    lines = [json.loads(line) for line in path.with_suffix(".log").read_text().splitlines() if line.startswith("{")]
    messages = [line["message"] for line in lines if "in force" in line.get("message", "")]
    assert messages == [f"version {k} is in force, the certificate file certificate.json" for k in (1, 2, 3)]
