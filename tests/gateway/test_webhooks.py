"""Webhooks of a running gateway: signed, sent again until they arrive, and in nobody's way."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from conformal_arbitrage.cli import cli
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway import jobs as sending
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models.webhook import WebhookEndpoint, signing_keys
from conformal_arbitrage.store import outbox, policies
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.sqlite import SQLiteStore
from tests.console.filled import Visit
from tests.console.test_pages import words
from tests.gateway.durability import OURS, Gateway, decision_request, encoded, run_sql, write_config
from tests.gateway.house import DECISION, error_of, until
from tests.gateway.test_monitor import AUDITED, red
from tests.receiver import SECRET, Endless, Receiver, silent

ROOT = Path(__file__).resolve().parents[2]
EVENTS = ["certificate.installed", "certificate.rolled_back"]


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("HOOK_SECRET", SECRET)


@pytest.fixture
def at_once(monkeypatch):
    """Retries without a pause."""
    monkeypatch.setattr(sending, "DELAYS", (0.01,) * len(sending.DELAYS))
    monkeypatch.setattr(sending, "WEBHOOKS_EVERY", 0.05)


@pytest.fixture
def by_hand(monkeypatch):
    """No retry before the test makes it due."""
    monkeypatch.setattr(sending, "DELAYS", (86400.0,) * len(sending.DELAYS))
    monkeypatch.setattr(sending, "WEBHOOKS_EVERY", 0.05)


def shown_in(gateway, *figures):
    """Wait until /metrics has these lines: counters follow the commit."""
    until(lambda: all(figure in gateway.get("/metrics").text for figure in figures), seconds=60)


def told(receiver, **rest):
    url = receiver if isinstance(receiver, str) else receiver.url
    return {"gateway.webhooks.alerts": {"url": url, "secret_env": "HOOK_SECRET", **rest}}


def deliveries(house):
    return house.with_store(lambda store: store.run(outbox.deliveries))


def done(house):
    """All deliveries, once none waits; the newest first."""
    return until(lambda: (listed := deliveries(house)) and all(one.done for one in listed) and listed, seconds=60)


def test_installing_and_rolling_back_are_announced(house, at_once):
    with Receiver() as receiver:
        gateway = house(**told(receiver))
        reply = gateway.put("/v1/arbitrage/policies/support", {"certificate": gateway.certificate(alpha=0.1).to_dict()})
        assert reply.status_code == 200
        assert gateway.post("/v1/arbitrage/policies/support/rollback", {}).status_code == 200
        until(lambda: len(receiver.messages) == 3, seconds=60)
        messages = sorted(receiver.verified(), key=lambda message: message["data"]["version"])
        assert [(m["type"], m["data"]["installed_by"], m["data"]["alpha"]) for m in messages] == [
            (EVENTS[0], "configuration", 0.05), (EVENTS[0], "loopback", 0.1), (EVENTS[1], "loopback", 0.05),
        ]  # fmt: skip
        assert all(one.error is None for one in done(gateway))
        dry = {"certificate": gateway.certificate(alpha=0.2).to_dict(), "dry_run": True}
        assert gateway.put("/v1/arbitrage/policies/support", dry).status_code == 200
        assert len(deliveries(gateway)) == 3


def test_an_alarm_and_its_lift_are_announced(house, at_once):
    with Receiver() as receiver:
        gateway = house(policy=AUDITED, **told(receiver, events=["alarm.raised", "alarm.lifted"]))
        assert red(gateway)["alarm"]["cause"] == "losses"
        until(lambda: receiver.messages, seconds=60)
        reply = gateway.post("/v1/arbitrage/policies/support/lift", {"reason": "the Primary was repaired"})
        assert reply.status_code == 200
        until(lambda: len(receiver.messages) == 2, seconds=60)
        raised, lifted = receiver.verified()
        assert (raised["type"], raised["data"]["policy"], raised["data"]["cause"]) == (
            "alarm.raised",
            "support",
            "losses",
        )
        assert raised["data"]["mean"] == 1.0
        assert (lifted["type"], lifted["data"]["reason"]) == ("alarm.lifted", "the Primary was repaired")


def test_a_webhook_hears_only_of_what_it_subscribes_to(house, at_once):
    with Receiver() as receiver:
        gateway = house(**told(receiver, events=EVENTS[1:]))
        gateway.put("/v1/arbitrage/policies/support", {"certificate": gateway.certificate(alpha=0.1).to_dict()})
        gateway.post("/v1/arbitrage/policies/support/rollback", {})
        until(lambda: receiver.messages, seconds=60)
        assert [message["type"] for message in receiver.verified()] == EVENTS[1:]


def test_a_message_that_fails_is_sent_again_under_its_id(house, at_once, caplog):
    with Receiver(lambda number, _: 500 if number < 4 else 200) as receiver:
        gateway = house(**told(receiver))
        [one] = done(gateway)
        assert (one.attempts, one.error) == (4, None)
        assert {headers["webhook-id"] for headers, _, _ in receiver.messages} == {one.id}
        assert len({body for _, body, _ in receiver.messages}) == 1
        assert len(receiver.verified()) == 4
        shown_in(
            gateway,
            'arbitrage_webhook_attempts_total{outcome="postponed",webhook="alerts"} 3.0',
            'arbitrage_webhook_attempts_total{outcome="delivered",webhook="alerts"} 1.0',
            'arbitrage_webhooks_waiting{webhook="alerts"} 0.0',
        )
    assert "a message to webhook alerts is sent again" in caplog.text
    assert "status 500" in caplog.text


def test_a_message_is_given_up_in_the_end(house, at_once, caplog):
    with Receiver(lambda *_: 302) as receiver:
        gateway = house(**told(receiver))
        [one] = done(gateway)
        assert len(receiver.messages) == one.attempts == len(sending.DELAYS) + 1
        assert one.error == "status 302; redirects are not followed"
        shown_in(gateway, 'outcome="given_up",webhook="alerts"} 1.0')
        until(lambda: "a message to webhook alerts is given up" in caplog.text, seconds=60)


def test_a_receiver_that_is_gone_gets_no_more_of_what_waits(house, by_hand, monkeypatch, caplog):
    monkeypatch.setattr(sending, "WEBHOOKS_AT_ONCE", 1)
    status = [503]
    with Receiver(lambda *_: status[0]) as receiver:
        gateway = house(**told(receiver))
        until(lambda: [one for one in deliveries(gateway) if one.error], seconds=60)
        status[0] = 410
        gateway.put("/v1/arbitrage/policies/support", {"certificate": gateway.certificate(alpha=0.1).to_dict()})
        assert [one.error for one in done(gateway)] == ["status 410"] * 2
        assert len(receiver.messages) == 2
        until(lambda: "webhook alerts wants no more messages" in caplog.text, seconds=60)


def test_how_long_a_retry_waits(tmp_path):
    """The real store, sender and receiver; only the clock of the retries is turned."""
    path = tmp_path / "store.db"
    answers = [web.Response(status=500) for _ in range(20)]
    answers[3] = web.Response(status=503, headers={"Retry-After": "10000"})
    answers[6] = web.Response(status=429, headers={"Retry-After": "99999999"})
    waits = []

    async def story(receiver):
        store = SQLiteStore(path, webhooks={"alerts": EVENTS})
        endpoint = WebhookEndpoint("alerts", receiver.url, signing_keys(SECRET, source="test"))
        run = store.run

        async def noted(operation, *arguments, **options):
            if operation is outbox.postpone_delivery:
                waits.append(options["seconds"])
            return await run(operation, *arguments, **options)

        store.run = noted
        await store.run(policies.install, "support", {}, by="ann")
        sender = sending.WebhookSender(store, [endpoint], Metrics())
        while await sender.send_due(endpoint):
            assert waits[-1:] < [100] or await sender.send_due(endpoint) == 0  # not before its time
            run_sql(str(path), "update deliveries set due = 0")
        [one] = await store.run(outbox.deliveries)
        await endpoint.close()
        await store.close()
        return one

    with Receiver(lambda number, _: answers[number - 1]) as receiver:
        one = asyncio.run(story(receiver))
    assert (one.attempts, one.error) == (len(sending.DELAYS) + 1, "status 500")
    assert one.done is not None
    expected = [*sending.DELAYS]
    assert waits[3] == 10000.0  # above 7,200 and its fifth
    assert waits[6] == sending.LONGEST_DELAY
    for place, (wait, delay) in enumerate(zip(waits, expected, strict=True)):
        assert place in (3, 6) or 0.8 * delay <= wait <= min(1.2 * delay, sending.LONGEST_DELAY)
    assert sum(expected) > 3 * 86400


def test_a_receiver_that_hangs_holds_up_neither_requests_nor_the_end(house, monkeypatch):
    monkeypatch.setattr(WebhookEndpoint.__init__, "__kwdefaults__", {"timeout": 3600.0})
    with Receiver(silent) as receiver, Receiver() as other:
        second = {"gateway.webhooks.other": told(other)["gateway.webhooks.alerts"]}
        gateway = house(**told(receiver), **second)
        until(lambda: receiver.messages, seconds=60)
        until(lambda: other.messages, seconds=60)  # one webhook does not wait for another
        assert gateway.decide().status_code == 200
        gateway.stop()
    [waiting] = [one for one in deliveries(gateway) if one.endpoint == "alerts"]
    assert (waiting.done, waiting.attempts) == (None, 1)


def test_a_giant_reply_costs_nothing(house, at_once):
    giant = Endless()
    with Receiver(giant) as receiver:
        gateway = house(**told(receiver))
        assert [one.error for one in done(gateway)] == [None]
        assert len(receiver.messages) == 1
    assert giant.sent < 50_000_000


def test_a_receiver_that_is_down_gets_its_messages_later(house, at_once):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        gateway = house(**told(f"http://127.0.0.1:{free.getsockname()[1]}/"))
        until(lambda: [one for one in deliveries(gateway) if one.error], seconds=60)
        assert gateway.decide().status_code == 200
        gateway.stop()
    with Receiver() as receiver:
        gateway.path.write_text(
            gateway.path.read_text().replace(f"http://127.0.0.1:{gateway_port(gateway)}/", receiver.url)
        )
        gateway.config = read_config(gateway.path)
        run_sql(str(gateway.folder / "arbitrage.sqlite"), "update deliveries set due = 0, done = null, attempts = 1")
        gateway.start()
        until(lambda: receiver.messages, seconds=60)
        assert [message["type"] for message in receiver.verified()] == EVENTS[:1]


def gateway_port(gateway):
    return gateway.config.gateway.webhooks["alerts"].url.removeprefix("http://127.0.0.1:").strip("/")


def test_what_was_changed_in_the_database_is_not_signed(house, by_hand, caplog):
    with Receiver(lambda number, _: 500 if number == 1 else 200) as receiver:
        gateway = house(**told(receiver))
        until(lambda: [one for one in deliveries(gateway) if one.error], seconds=60)
        forged = json.dumps({"type": "certificate.installed", "data": {"policy": "forged"}})
        run_sql(str(gateway.folder / "arbitrage.sqlite"), f"update deliveries set body = '{forged}', due = 0")
        [one] = done(gateway)
        assert one.error == "it was changed in the store"
        assert len(receiver.messages) == 1
        until(lambda: "given up: it was changed in the store" in caplog.text, seconds=60)


def test_neither_the_secret_nor_the_url_is_logged(house, at_once, caplog):
    caplog.set_level(logging.DEBUG)
    with Receiver(lambda number, _: (500, 302, 410)[number - 1]) as receiver:
        gateway = house(**told(receiver))
        done(gateway)
        told_over_http = gateway.get("/metrics").text + gateway.get("/").text
    for text in (caplog.text, told_over_http, b"".join(gateway.lines).decode()):
        assert SECRET not in text
        assert "in-the-url" not in text


@pytest.mark.proof
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_kill_9_while_a_message_is_sent_loses_none(database, request, tmp_path):
    where = str(tmp_path / "store.db")
    if database == "postgres":
        where = request.getfixturevalue("server").new_database()
    answers = [silent]
    with Receiver(lambda number, asked: answers[-1](number, asked)) as receiver:
        path = write_config(tmp_path, where)
        section = f'[gateway.webhooks.alerts]\nurl = "{receiver.url}"\nsecret_env = "HOOK_SECRET"\n'
        path.write_text(f"{path.read_text()}\n{section}")

        async def story():
            async with Gateway(path) as gateway:
                while not receiver.messages:
                    await asyncio.sleep(0.02)
                await gateway.kill()
                answers.append(lambda *_: 200)
                run_sql(where, "update deliveries set due = 0")  # the dead gateway's lease has ended
                await gateway.start()
                while len(receiver.messages) < 2:
                    await asyncio.sleep(0.02)
                async with await open_store(where, keys=OURS.record_keys) as store:
                    while not (listed := await store.run(outbox.deliveries))[0].done:
                        await asyncio.sleep(0.05)
            return listed

        [one] = asyncio.run(asyncio.wait_for(story(), 300))
        assert (one.attempts, one.error) == (2, None)
        first, second = receiver.verified()
        assert first == second
        assert {headers["webhook-id"] for headers, _, _ in receiver.messages} == {one.id}
    log = path.with_suffix(".log").read_text()
    assert SECRET not in log
    assert "in-the-url" not in log


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": "nowhere"}, r"line \d+: \[gateway.webhooks.alerts\] url must be a URL"),
        ({"secret_env": None}, r"needs secret_env.*or secret_file"),
        ({"secret_file": "alerts.secret"}, r"needs secret_env.*and not both"),
        ({"events": []}, "events is empty"),
        ({"events": ["everything"]}, r"line \d+: events: Invalid enum value 'everything'"),
        ({"secrets_env": "X"}, "did you mean 'secret_env'"),
        ({"url": None}, r"\[gateway.webhooks.alerts\] lacks the key 'url'"),
    ],
)
def test_a_bad_section_is_refused_with_its_line(house, values, message):
    section = {**told("http://127.0.0.1:9/")["gateway.webhooks.alerts"], **values}
    with pytest.raises(ConfigError, match=message):
        house(**{"gateway.webhooks.alerts": {key: value for key, value in section.items() if value is not None}})


def test_a_missing_secret_stops_the_start(house, monkeypatch):
    monkeypatch.delenv("HOOK_SECRET")
    with pytest.raises(ConfigError, match="HOOK_SECRET is not set; `arbitrage webhooks secret` prints"):
        house(**told("http://127.0.0.1:9/"))


def test_a_missing_file_with_the_secret_stops_the_start(house):
    section = {"url": "http://127.0.0.1:9/", "secret_file": "alerts.secret"}
    with pytest.raises(ConfigError, match=r"alerts.secret: the secret cannot be read \(No such file"):
        house(**{"gateway.webhooks.alerts": section})


def test_the_secret_may_come_from_a_file(tmp_path):
    (tmp_path / "alerts.secret").write_text(f"{SECRET}\n")
    path = write_config(tmp_path, "store.db")
    with Receiver() as receiver:
        section = f'[gateway.webhooks.alerts]\nurl = "{receiver.url}"\nsecret_file = "alerts.secret"\n'
        path.write_text(f"{path.read_text()}\n{section}")
        run("webhooks", "test", "--config", path)
        assert receiver.verified()[0]["type"] == "webhook.test"
    (tmp_path / "alerts.secret").write_bytes(b"\xff")
    assert "not UTF-8" in run("webhooks", "test", "--config", path, code=2).stderr


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.stderr)
    return result


def test_the_commands(house, at_once, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with Receiver(lambda number, _: 500 if number == 3 else 200) as receiver:
        gateway = house(**told(receiver))
        done(gateway)
        shown = json.loads(run("webhooks", "test", "--config", gateway.path, "--json").stdout)
        assert (shown["ok"], shown["webhooks"][0]["webhook"], shown["webhooks"][0]["status"]) == (True, "alerts", 200)
        assert receiver.verified()[-1]["type"] == "webhook.test"
        assert "status 500" in run("webhooks", "test", "alerts", "--config", gateway.path, code=1).stdout
        assert "there is no webhook 'x'" in run("webhooks", "test", "x", "--config", gateway.path, code=2).stderr
        [listed] = json.loads(run("webhooks", "list", "--config", gateway.path, "--json").stdout)
        assert (listed["endpoint"], listed["event"], listed["attempts"]) == ("alerts", EVENTS[0], 1)
        assert "certificate.installed" in run("webhooks", "list", "--config", gateway.path).stdout
    plain = house()
    assert "add a section [gateway.webhooks.NAME]" in run("webhooks", "test", "--config", plain.path, code=2).stderr


def test_a_test_message_is_sent_by_a_route_and_by_a_button(house, at_once):
    with Receiver() as receiver:
        gateway = house(**told(receiver, events=["alarm.raised"]))
        path = "/v1/arbitrage/webhooks/alerts/test"
        document = gateway.post(path, {}).json()
        assert (document["webhook"], document["status"], document["problem"]) == ("alerts", 200, None)
        [message] = receiver.verified()
        assert (message["type"], message["data"]) == ("webhook.test", {})
        error_of(gateway.post("/v1/arbitrage/webhooks/other/test", {}), 404, "webhook_not_found")
        visit = Visit(gateway)
        page = visit.send_form("/console/webhooks/alerts/test", visit.open("/console/health"))
        assert "accepted the test message with status 200" in words(page)
        assert len(receiver.verified()) == 2
        assert receiver.url not in page.text
        assert deliveries(gateway) == []  # it is neither queued nor sent again
        for scope in ("call", "review"):
            error_of(gateway.post(path, {}, headers=gateway.keyed(scope)), 403)


def test_no_request_and_no_receiver_says_where_messages_go(house, at_once):
    """Only the configuration does: a gateway that fetched what callers name would reach what only it can reach."""
    with Receiver() as elsewhere:
        away = web.Response(status=307, headers={"Location": elsewhere.url})
        with Receiver(lambda number, _: away if number == 1 else 200) as receiver:
            gateway = house(**told(receiver))
            until(lambda: receiver.messages, seconds=60)
            names = ("url", "webhook", "webhook_url", "callback_url", "location")
            wishes = dict.fromkeys(names, elsewhere.url)
            headers = {name.replace("_", "-"): elsewhere.url for name in names}
            for body in (wishes, {"webhooks": {"alerts": wishes}}, {"endpoint": wishes}):
                assert gateway.post("/v1/arbitrage/webhooks/alerts/test", body, headers=headers).json()["status"] == 200
            for body in (DECISION, {**DECISION, **wishes}, {**DECISION, "metadata": wishes}):
                gateway.decide(body, headers=headers)
            gateway.put("/v1/arbitrage/policies/support", {"certificate": gateway.certificate().to_dict(), **wishes})
            gateway.put("/v1/arbitrage/webhooks/alerts", wishes)
            assert {one.error for one in done(gateway)} == {None}
            assert len(receiver.messages) >= 5
        assert elsewhere.messages == []


def test_a_test_message_that_fails_says_why(house, at_once):
    with Receiver(lambda number, request: 500) as receiver:
        gateway = house(**told(receiver, events=["alarm.raised"]))
        document = gateway.post("/v1/arbitrage/webhooks/alerts/test", {}).json()
        assert (document["status"], document["problem"]) == (500, "status 500")
        visit = Visit(gateway)
        page = visit.send_form("/console/webhooks/alerts/test", visit.open("/console/health"))
        assert "did not accept the test message: status 500" in words(page)
    assert "the connection failed" in gateway.post("/v1/arbitrage/webhooks/alerts/test", {}).json()["problem"]


def test_the_example_receiver_takes_signed_messages_and_no_others(house, at_once, tmp_path, monkeypatch):
    secret = run("webhooks", "secret").stdout.strip()
    assert secret != run("webhooks", "secret").stdout.strip()
    monkeypatch.setenv("HOOK_SECRET", secret)
    command = [sys.executable, ROOT / "examples" / "webhook_receiver.py", "0"]
    with subprocess.Popen(
        command, env={**os.environ, "WEBHOOK_SECRET": secret}, stdout=subprocess.PIPE, text=True
    ) as receiver:
        try:
            port = receiver.stdout.readline().split()[-1]
            gateway = house(**told(f"http://127.0.0.1:{port}/"))
            assert receiver.stdout.readline().startswith("certificate.installed {'alpha': 0.05")
            assert done(gateway)[0].error is None
            monkeypatch.setenv("HOOK_SECRET", SECRET)
            shown = run("webhooks", "test", "--config", gateway.path, "--json", code=1).stdout
            assert json.loads(shown)["webhooks"][0]["status"] == 401
        finally:
            receiver.kill()


def test_decisions_announce_nothing(house, at_once):
    with Receiver() as receiver:
        gateway = house(**told(receiver))
        done(gateway)
        path, body = decision_request("x")
        assert (
            gateway.ask("POST", path, data=encoded(body), headers={"Content-Type": "application/json"}).status_code
            == 200
        )
        assert len(deliveries(gateway)) == 1
