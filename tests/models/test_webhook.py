import asyncio
import base64
import json
import socket

import openai
import pytest
from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.models.webhook import WebhookEndpoint, signature, signing_keys, url_mistake
from tests.receiver import SECRET, Endless, Receiver, silent

KEYS = signing_keys(SECRET, source="test")
BODY = b'{"type":"webhook.test","data":{"text":"\xc3\xa4"}}'
OTHER = "whsec_" + base64.b64encode(b"o" * 24).decode()


def send(receiver, *, keys=KEYS, timeout=20.0, count=1):
    async def story():
        endpoint = WebhookEndpoint(
            "alerts", receiver if isinstance(receiver, str) else receiver.url, keys, timeout=timeout
        )
        try:
            return [await endpoint.send("evt_1", BODY) for _ in range(count)]
        finally:
            await endpoint.close()

    return asyncio.run(story())[-1]


def test_the_published_example_of_the_convention():
    """The signature in the specification of Standard Webhooks, section on verifying signatures."""
    keys = signing_keys("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", source="test")
    body = b'{"test": 2432232314}'
    assert (
        signature(keys, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
        == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


def test_a_message_is_accepted_by_other_verifiers():
    with Receiver() as receiver:
        attempt = send(receiver)
        assert (attempt.problem, attempt.status) == (None, 200)
        assert receiver.verified() == [json.loads(BODY)]
        headers, body, path = receiver.messages[0]
        assert path == "/hooks"
        assert headers["Content-Type"] == "application/json"
        official = openai.OpenAI(api_key="none").webhooks
        official.verify_signature(body, headers, secret=SECRET)
        for change in ({"webhook-id": "evt_2"}, {"webhook-timestamp": "1"}):
            with pytest.raises(WebhookVerificationError):
                receiver.verifier.verify(body, {**headers, **change})
        for changed in (body + b" ", body.replace(b"test", b"tess")):
            with pytest.raises(WebhookVerificationError):
                receiver.verifier.verify(changed, headers)
            with pytest.raises(openai.InvalidWebhookSignatureError):
                official.verify_signature(changed, headers, secret=SECRET)


def test_during_a_rotation_receivers_with_either_secret_accept():
    keys = signing_keys(f"{OTHER}, {SECRET}\n", source="test")
    with Receiver() as receiver:
        send(receiver, keys=keys)
        headers, body, _ = receiver.messages[0]
        for secret in (SECRET, OTHER):
            assert Webhook(secret).verify(body, headers) == json.loads(body)
            openai.OpenAI(api_key="none").webhooks.verify_signature(body, headers, secret=secret)


@pytest.mark.parametrize("status", [300, 301, 302, 307, 308, 400, 404, 410, 429, 500, 503])
def test_only_a_status_of_2xx_counts(status):
    answers = {1: status}
    with Receiver(
        lambda number, _: web.Response(status=answers[number], headers={"Location": "/elsewhere"})
    ) as receiver:
        attempt = send(receiver)
        assert attempt.status == status
        assert f"status {status}" in attempt.problem
        assert len(receiver.messages) == 1  # no redirect was followed


def test_retry_after_is_reported():
    with Receiver(lambda *_: web.Response(status=503, headers={"Retry-After": "17"})) as receiver:
        assert send(receiver).retry_after == 17


def test_a_receiver_that_hangs_is_left():
    with Receiver(silent) as receiver:
        attempt = send(receiver, timeout=0.3)
        assert attempt.problem == "no answer within 0.3 s"
        assert attempt.status is None


def test_a_port_that_refuses_is_a_problem_without_the_url():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        attempt = send(f"http://127.0.0.1:{taken.getsockname()[1]}/hooks?token=secret")
    assert attempt.problem.startswith("the connection failed (")
    assert "token" not in attempt.problem
    assert attempt.status is None


@pytest.mark.parametrize(("status", "accepted"), [(200, True), (500, False)])
def test_a_giant_reply_is_not_read(status, accepted):
    giant = Endless(status)
    with Receiver(giant) as receiver:
        attempt = send(receiver)
        assert (attempt.problem is None) == accepted
        assert attempt.status == status
    assert giant.sent < 50_000_000  # what the sockets hold, and no more


def test_a_reply_that_never_ends_counts_by_its_status():
    async def drip(number, request):
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await asyncio.sleep(3600)

    with Receiver(drip) as receiver:
        assert send(receiver, timeout=0.5).problem is None


@pytest.mark.parametrize(
    "text", ["", " , ", "secret", "whsec_", "whsec_!!!", "whsec_" + base64.b64encode(b"x" * 23).decode(),
             "whsec_" + base64.b64encode(b"x" * 65).decode(), base64.b64encode(b"x" * 32).decode(), f"{SECRET} short"],
)  # fmt: skip
def test_a_bad_secret_is_refused_and_not_repeated(text):
    with pytest.raises(ConfigError, match="arbitrage webhooks secret") as caught:
        signing_keys(text, source="HOOK_SECRET")
    assert str(caught.value).startswith("HOOK_SECRET: ")
    assert all(part not in str(caught.value).partition("; one is")[0] for part in text.split() if len(part) > 6)


@pytest.mark.parametrize(
    "url", ["", "example.com", "ftp://example.com", "http://", "http://[::1", "http://u:p@example.com", "http://h/#part", "http://h:0/"]
)  # fmt: skip
def test_bad_urls(url):
    assert url_mistake(url) is not None


def test_good_urls():
    assert url_mistake("https://example.com/hooks?key=1") is None
    assert url_mistake("http://127.0.0.1:8000") is None
