"""Several gateways on one database: what each has in force while one replaces the other, and how a fleet begins and ends."""

import asyncio
import hashlib
import json
import logging
import signal

import aiohttp
import psycopg
import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import cli
from conformal_arbitrage.errors import ConfigError, StaleCalibrationError, StoreError
from conformal_arbitrage.gateway import application
from conformal_arbitrage.gateway.auth import FIRST_KEY, admit_first_key, new_key
from conformal_arbitrage.gateway.gateway import prepare
from conformal_arbitrage.gateway.policies import install_files
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import keys as stored_keys
from conformal_arbitrage.store import policies
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.record import AlarmBody
from tests.certificates import edited
from tests.gateway.durability import OURS, Gateway, certificate, decision_request, write_config
from tests.gateway.house import error_of
from tests.gateway.test_monitor import red

URL = "/v1/arbitrage/policies/support"


def for_others(gateway, alpha=0.3):
    """A certificate of other models."""
    models = {"primary": {"kind": "decisions", "model": "other"}, "guardian": {"kind": "decisions", "model": "other"}}
    return gateway.certificate(alpha, identities=models).to_dict()


def install(gateway, document, by="another gateway"):
    return gateway.with_store(lambda store: store.run(policies.install, "support", document, by=by))


def in_force(gateway):
    reply = gateway.decide()
    return reply.status_code, reply.headers["x-arbitrage-alpha"]


def alarm(version, lifts=0):
    return AlarmBody(
        version=version, lifts=lifts, identities_sha256="any", cause="losses", audits=90, known=90, missing=0, line=0.07,
        log_evidence=4.0,
    )  # fmt: skip


def test_a_gateway_keeps_its_newest_version_beside_those_for_other_models_also_after_a_restart(house, caplog):
    caplog.set_level(logging.INFO)
    gateway = house()
    install(gateway, for_others(gateway))
    assert in_force(gateway) == (200, "0.05")
    assert "version 2 was made for other models or by a later release; version 1 stays in force here" in caplog.text
    gateway.restart()
    assert in_force(gateway) == (200, "0.05")
    install(gateway, gateway.certificate(0.1).to_dict())  # by another gateway with the same models
    install(gateway, for_others(gateway, 0.2))
    assert in_force(gateway) == (200, "0.1")
    assert gateway.get(URL).json()["version"] == 3
    text = gateway.get("/metrics").text
    assert 'arbitrage_policy_version{policy="support"} 3.0' in text
    assert 'arbitrage_policy_newest_version{policy="support"} 4.0' in text
    gateway.restart()
    assert in_force(gateway) == (200, "0.1")
    assert {record.decision.version for record in gateway.records()} == {1, 3}


@pytest.mark.parametrize("change", [{"schema": 9}, {"a_later_field": {"x": 1}}])
def test_a_certificate_that_only_a_later_release_reads_leaves_the_earlier_release_in_service(house, change):
    gateway = house()
    install(gateway, edited(gateway.certificate(0.1).to_dict(), change))
    assert in_force(gateway) == (200, "0.05")
    gateway.restart()
    assert in_force(gateway) == (200, "0.05")
    [problem] = gateway.get("/health/ready").json()["problems"]
    assert problem["policy"] == "support"


def test_a_gateway_without_a_version_of_its_own_does_not_start(house):
    gateway = house()
    gateway.stop()
    gateway.models["guardian"] = {"model": "another"}
    gateway._write({"certificate": "rule.json"})
    gateway.config = read_config(gateway.path)
    with pytest.raises(StaleCalibrationError, match=r"guardian\.model"):
        gateway.start()
    gateway._serving = None


def test_a_shadow_policy_without_a_certificate_goes_on_beside_a_version_for_other_models(house):
    gateway = house(certificate=False, policy={"mode": "shadow"})
    for alpha in (0.3, 0.2):
        install(gateway, for_others(gateway, alpha))
        reply = gateway.decide()
        assert reply.status_code == 200
    gateway.restart()
    assert gateway.decide().status_code == 200
    [problem] = gateway.get("/health/ready").json()["problems"]
    assert "version 2 " in problem["problem"]


def test_alarms_reach_the_version_that_serves_beside_a_newer_one_and_are_lifted_there(house):
    gateway = house()
    install(gateway, for_others(gateway))
    assert gateway.with_store(lambda store: store.run(policies.raise_alarm, "support", alarm(1)))
    assert gateway.decide().json()["answers"][0]["arbitrage"]["decided_by"] == "guardian"
    [model] = gateway.get("/v1/models").json()["data"]
    assert model["arbitrage"]["mode"] == "safe"
    lifted = gateway.post(f"{URL}/lift", {"reason": "a bad deployment"})
    assert lifted.json()["version"] == 1
    assert gateway.decide().json()["answers"][0]["arbitrage"]["decided_by"] == "primary"
    assert gateway.with_store(
        lambda store: store.run(policies.raise_alarm, "support", alarm(2))
    )  # that of the other gateways
    assert gateway.get("/v1/models").json()["data"][0]["arbitrage"]["mode"] == "enforce"
    install(gateway, gateway.certificate(0.1).to_dict())
    assert not gateway.with_store(
        lambda store: store.run(policies.raise_alarm, "support", alarm(1, lifts=1))
    )  # replaced by version 3


def test_audits_of_models_that_are_being_replaced_still_raise_their_alarm(house):
    gateway = house(policy={"audit_rate": 1.0})  # the Guardian likes another action than the sure Primary
    install(gateway, for_others(gateway))
    shown = red(gateway)
    assert (shown["version"], shown["mode"], shown["alarm"]["cause"]) == (1, "safe", "losses")
    [notice] = gateway.with_store(lambda store: store.run(policies.notices, "support"))
    assert notice.body.version == 1
    gateway.restart()
    assert gateway.decide().json()["answers"][0]["arbitrage"]["decided_by"] == "guardian"


def test_the_command_line_lifts_the_alarm_of_the_version_it_names(house):
    gateway = house()
    install(gateway, for_others(gateway))
    assert gateway.with_store(lambda store: store.run(policies.raise_alarm, "support", alarm(1)))
    arguments = ["policies", "lift", "support", "--reason", "undone", "--config", str(gateway.path), "--json"]
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code == 2
    assert "no alarm that stands on its newest version" in refused.stderr
    lifted = CliRunner().invoke(cli, [*arguments, "--version", "1"])
    assert json.loads(lifted.stdout)["version"] == 1


def test_models_that_are_being_replaced_do_not_renew_the_certificate_of_their_successors(house):
    gateway = house(policy={"audit_rate": 1.0})
    install(gateway, for_others(gateway))
    shown = CliRunner().invoke(cli, ["renew", "support", "--dry-run", "--config", str(gateway.path)])
    assert shown.exit_code == 2
    assert "version 2 was made for other models, and these had version 1" in shown.stderr


@pytest.fixture
def folder(tmp_path, where):
    write_config(tmp_path, where)
    return tmp_path


def migrated(folder):
    return asyncio.run(prepare(read_config(folder / "arbitrage.toml")))


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "the-secret-of-these-tests")


async def versions_of(folder, **options):
    config = read_config(folder / "arbitrage.toml")
    async with (
        application(config, **options),
        await open_store(config.gateway.database, keys=OURS.record_keys) as store,
    ):
        return [version.version for version in await store.run(policies.active)]


def test_a_job_brings_the_database_to_a_configuration_and_gateways_change_nothing(folder, secret):
    with pytest.raises(StoreError, match="arbitrage records migrate"):
        asyncio.run(versions_of(folder, migrating=False))
    first = migrated(folder)
    assert (first.schema.before, [one.version for one in first.installed]) == (0, [1])
    again = migrated(folder)
    assert (again.schema.before, again.installed) == (again.schema.version, ())
    certificate(0.2).save(folder / "certificate.json")
    assert asyncio.run(versions_of(folder, migrating=False)) == [1]  # a gateway does not install what changed
    assert [one.version for one in migrated(folder).installed] == [2]
    assert asyncio.run(versions_of(folder)) == [2]


def test_a_gateway_that_installs_nothing_needs_a_version_of_every_policy(folder, secret):
    path = folder / "arbitrage.toml"
    migrated(folder)
    path.write_text(path.read_text() + '\n[policies.second]\ncertificate = "certificate.json"\n')
    with pytest.raises(StoreError, match="policy second has no version in the store"):
        asyncio.run(versions_of(folder, migrating=False))


def test_the_command_says_what_it_did(folder, secret, monkeypatch):
    key, sha256 = new_key()
    monkeypatch.setenv(FIRST_KEY, sha256)
    arguments = ["records", "migrate", "--config", str(folder / "arbitrage.toml")]
    shown = CliRunner().invoke(cli, arguments).stdout
    assert "from 0" in shown
    assert "scope admin" in shown
    assert "Installed: version 1 of policy support" in shown
    document = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert document["schema"]["before"] == document["schema"]["version"]
    assert (document["key"], document["installed"]) == (None, {})
    assert key not in shown


def test_a_generated_key_fits_its_digest_and_is_not_stored():
    document = json.loads(CliRunner().invoke(cli, ["keys", "generate", "--json"]).stdout)
    assert hashlib.sha256(document["key"].encode()).hexdigest() == document["sha256"]
    assert f"{FIRST_KEY}=" in CliRunner().invoke(cli, ["keys", "generate"]).stdout


def test_the_first_key_comes_from_the_environment_once_and_stays_revoked(house, monkeypatch):
    key, sha256 = new_key()
    monkeypatch.setenv(FIRST_KEY, sha256.upper())
    gateway = house()
    headers = {"Authorization": f"Bearer {key}"}
    error_of(gateway.decide(), 401, "invalid_api_key")
    assert gateway.decide(headers=headers).status_code == 200
    assert gateway.get("/metrics", headers=headers).status_code == 200
    gateway.restart()
    [info] = gateway.with_store(lambda store: store.run(stored_keys.list_all))
    assert (info.scope, info.label) == ("admin", f"from {FIRST_KEY}")
    gateway.with_store(lambda store: store.run(stored_keys.revoke, info.id))
    gateway.restart()
    error_of(gateway.decide(headers=headers), 401, "invalid_api_key")


def test_with_the_first_key_a_gateway_listens_beyond_loopback(folder, secret, monkeypatch):
    path = folder / "arbitrage.toml"
    path.write_text(path.read_text().replace("[gateway]\n", '[gateway]\nhost = "0.0.0.0"\n'))

    async def start():
        async with application(read_config(path)):
            return True

    with pytest.raises(ConfigError, match=f"or set {FIRST_KEY}"):
        asyncio.run(start())
    monkeypatch.setenv(FIRST_KEY, "not a digest")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        asyncio.run(start())
    monkeypatch.setenv(FIRST_KEY, new_key()[1])
    assert asyncio.run(start())


async def test_gateways_that_start_at_once_create_the_first_key_once(where, monkeypatch):
    monkeypatch.setenv(FIRST_KEY, new_key()[1])
    stores = [await open_store(where) for _ in range(4)]
    created = await asyncio.gather(*(admit_first_key(store) for store in stores * 3))
    keys = await stores[0].run(stored_keys.list_all)
    for store in stores:
        await store.close()
    created = [id for id in created if id is not None]
    assert [key.id for key in keys] == created


async def test_gateways_that_start_at_once_install_a_certificate_file_once(folder, secret):
    config = read_config(folder / "arbitrage.toml")
    stores = [await open_store(config.gateway.database) for _ in range(4)]
    installed = await asyncio.gather(*(install_files(config, store, lambda *_: None) for store in stores))
    certificate(0.2).save(folder / "certificate.json")
    installed += await asyncio.gather(*(install_files(config, store, lambda *_: None) for store in stores))
    for store in stores:
        await store.close()
    assert [version.version for versions in installed for version in versions] == [1, 2]


def test_so_many_connections_to_postgresql_as_are_configured(server):
    url = server.new_database()

    async def most(connections):
        store = PostgresStore(url, connections)
        await asyncio.gather(*(store.change_count() for _ in range(64)))
        with psycopg.connect(url, autocommit=True) as other:
            query = (
                "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
            )
            [count] = other.execute(query).fetchone()
        await store.close()
        return count

    assert asyncio.run(most(1)) == 1
    assert asyncio.run(most(7)) == 7


async def ready(session):
    async with session.get("/health/ready") as reply:
        return reply.status, await reply.json()


def draining(folder, seconds):
    path = write_config(folder, str(folder / "record.sqlite"), audit_rate=0)
    path.write_text(path.read_text().replace("[gateway]\n", f"[gateway]\ndrain = {seconds}\n"))
    return path


async def test_on_sigterm_it_is_not_ready_but_serves_until_the_drain_is_over(tmp_path):
    path = draining(tmp_path, 3)
    async with Gateway(path) as gateway, aiohttp.ClientSession(gateway.url) as session:
        assert (await ready(session))[0] == 200
        gateway.process.send_signal(signal.SIGTERM)
        while (state := await ready(session))[0] == 200:
            await asyncio.sleep(0.01)
        assert state[1]["error"]["code"] == "draining"
        route, body = decision_request("one")
        async with session.post(route, json=body) as reply:
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
        with pytest.raises(aiohttp.ClientConnectionError):
            await ready(session)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["interrupt", "twice"])
async def test_an_interrupt_or_a_second_signal_ends_it_without_the_drain(tmp_path, signals):
    path = draining(tmp_path, 3600)
    async with Gateway(path) as gateway, aiohttp.ClientSession(gateway.url) as session:
        for number in signals:
            gateway.process.send_signal(number)
            await asyncio.sleep(0.5)
        assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
        with pytest.raises(aiohttp.ClientConnectionError):
            await ready(session)
