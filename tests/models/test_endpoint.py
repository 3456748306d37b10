import asyncio
import gzip
import json
import socket
import time
import traceback
import zlib
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

from conformal_arbitrage.errors import ConfigError, DeadlineError, ScorerError, UpstreamError
from conformal_arbitrage.models.endpoint import LARGEST_REPLY, Endpoint, key_from
from conformal_arbitrage.models.port import Call, Reply
from conformal_arbitrage.types import Spent
from tests.scripted import Upstream, completion
from tests.sockets import Sockets

CALL = Call(path="/chat/completions", body={"model": "m", "messages": []})
UNKNOWN = Spent(calls=1, input_tokens=None, output_tokens=None, cost=None)
REFUSED = Spent(calls=1)
PLAIN = "AbC123/def+GHI456=="  # does not look like a key
SECRET = f"sk-proj-{PLAIN}"


def outcome(server, **options):
    """Return the Reply of one call to a server, or the error it raised."""

    async def run():
        async with server, Endpoint(server.url, **options) as endpoint:
            try:
                return await endpoint.call(CALL)
            except ScorerError as error:
                return error

    return asyncio.run(run())


def answered(reply, **options):
    return outcome(Upstream(reply if callable(reply) else lambda *_: reply), **options)


def sent(body, **rest):
    """Return the outcome of a call whose reply is exactly these bytes."""

    async def reply(peer, *_):
        await peer.send(body, **rest)

    return outcome(Sockets(reply))


def error_of(result, kind=UpstreamError, *, status=None, retryable, spent, retry_after=None):
    assert type(result) is kind, repr(result)
    assert (result.status, result.retryable, result.spent) == (status, retryable, spent)
    if retry_after is None:
        assert result.retry_after is None
    assert "\n" not in str(result)
    assert len(str(result)) < 500
    return result


def test_a_good_reply_comes_with_its_tokens_and_no_made_up_cost():
    result = answered(completion("hello", usage=(11, 7), reasoning=3))
    assert isinstance(result, Reply)
    assert result.document["choices"][0]["message"]["content"] == "hello"
    assert result.spent == Spent(calls=1, input_tokens=11, output_tokens=7, reasoning_tokens=3, cost=None)


def test_the_tokens_of_the_other_api_are_read_too():
    usage = {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
    result = answered({"usage": usage})
    assert result.spent == Spent(calls=1, input_tokens=5, output_tokens=2, cached_tokens=4, cost=None)


@pytest.mark.parametrize("tokens", [-1, "7", 1.5, True, None, 10**12, 10**40, [1], {}])
def test_impossible_token_counts_are_unknown(tokens):
    result = answered({"usage": {"prompt_tokens": tokens, "completion_tokens": 3}})
    assert result.spent == Spent(calls=1, input_tokens=None, output_tokens=3, cost=None)


@pytest.mark.parametrize("usage", [None, [], "much", 3, {"completion_tokens_details": [1]}])
def test_malformed_usage_is_unknown(usage):
    assert answered({"usage": usage}).spent == UNKNOWN


async def test_the_body_is_sent_unchanged_to_the_path_below_the_base():
    async with Upstream(lambda path, *_: {"path": path}) as upstream, Endpoint(upstream.url + "/") as endpoint:
        reply = await endpoint.call(Call(path="/x/y", body={"é": [1, "日本"]}))
        assert endpoint.origin == upstream.url
        assert reply.document == {"path": "/x/y"}
        assert upstream.bodies == [{"é": [1, "日本"]}]
        assert upstream.headers[0]["Content-Type"] == "application/json"
        assert upstream.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("status", "retryable"),
    [
        *((status, True) for status in (408, 409, 425, 429, 500, 502, 503, 504, 529)),
        *((status, False) for status in (201, 204, 400, 401, 403, 404, 405, 413, 422, 501)),
    ],
)
def test_the_status_decides_whether_an_error_is_retryable(status, retryable):
    result = answered((status, {"error": {"message": "because"}}))
    error_of(result, status=status, retryable=retryable, spent=REFUSED)
    assert str(status) in str(result)
    assert status == 204 or "because" in str(result)


@pytest.mark.parametrize("text", ["7", "0", "1.5", " 7 "])
def test_retry_after_in_seconds_is_read(text):
    result = answered(web_reply(429, {"error": "slow down"}, {"Retry-After": text}))
    error_of(result, status=429, retryable=True, spent=REFUSED, retry_after=True)
    assert result.retry_after == float(text)
    assert "slow down" in str(result)


def web_reply(status, document, headers):
    return lambda *_: web.json_response(document, status=status, headers=headers)


def test_retry_after_as_a_date_is_read():
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    result = answered(web_reply(503, {}, {"Retry-After": when}))
    assert 80 < result.retry_after <= 100


def test_retry_after_in_the_past_means_no_wait():
    past = format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)
    assert answered(web_reply(503, {}, {"Retry-After": past})).retry_after == 0


@pytest.mark.parametrize(
    "text",
    [
        "soon",
        "-5",
        "1e9",
        "9" * 30,
        "nan",
        "inf",
        "",
        "Wed, 32 Jan 2030 00:00:00 GMT",
        "Wed, 99999999999999999999 Jan 2030 00:00:00 GMT",
        "Wed, 01 Jan 2030 00:00:00 +99999999999999999999",
    ],
)
def test_a_malformed_retry_after_is_ignored(text):
    error_of(answered(web_reply(429, {}, {"Retry-After": text})), status=429, retryable=True, spent=REFUSED)


def test_an_exhausted_quota_is_not_worth_retrying():
    body = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
    error_of(answered((429, body)), status=429, retryable=False, spent=REFUSED)


def test_an_endpoint_that_says_not_to_retry_is_believed():
    result = answered(web_reply(500, {}, {"x-should-retry": "false"}))
    error_of(result, status=500, retryable=False, spent=REFUSED)


def test_an_error_keeps_what_came_back_up_to_a_length():
    result = answered((400, {"error": {"message": "x" * 10_000}}))
    assert result.raw.startswith('{"error"')
    assert len(result.raw) <= 2000
    assert len(str(result)) < 500


@pytest.mark.parametrize(
    "error",
    [None, [], 7, "text", {"message": None}, {"message": {"deep": []}}, {"message": ["a"], "code": {}}],
)
def test_an_error_body_of_any_shape_is_a_refusal(error):
    error_of(answered((400, {"error": error})), status=400, retryable=False, spent=REFUSED)


def test_a_refused_connection_is_worth_retrying():
    async def run():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        async with Endpoint(f"http://127.0.0.1:{port}/v1") as endpoint:
            with pytest.raises(UpstreamError) as caught:
                await endpoint.call(CALL)
            return caught.value

    result = error_of(asyncio.run(run()), retryable=True, spent=UNKNOWN)
    assert "the connection failed" in str(result)


def test_a_connection_reset_in_the_middle_of_the_body_is_worth_retrying():
    async def reply(peer, *_):
        await peer.send(b'{"choices": [', length=500)
        await asyncio.sleep(0.05)
        peer.reset()

    error_of(outcome(Sockets(reply)), retryable=True, spent=UNKNOWN)


def test_a_connection_closed_before_the_end_is_worth_retrying():
    async def reply(peer, *_):
        await peer.send(b'{"choices": []}', length=500)
        peer.close()

    error_of(outcome(Sockets(reply)), retryable=True, spent=UNKNOWN)


def test_a_connection_closed_without_a_reply_is_worth_retrying():
    async def reply(peer, *_):
        peer.close()

    error_of(outcome(Sockets(reply)), retryable=True, spent=UNKNOWN)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 two hundred OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n{}",
        bytes(range(256)),
    ],
    ids=["not HTTP", "no status", "no length", "bad chunk", "long header", "noise"],
)
def test_malformed_http_is_a_failed_connection(data):
    async def reply(peer, *_):
        await peer.write(data)
        peer.close()

    error_of(outcome(Sockets(reply)), retryable=True, spent=UNKNOWN)


def timed_out(reply):
    start = time.perf_counter()
    result = outcome(Sockets(reply), timeout=0.3)
    assert 0.25 < time.perf_counter() - start < 30
    error_of(result, DeadlineError, retryable=True, spent=UNKNOWN)
    assert "0.3 s" in str(result)


def test_a_hang_ends_at_the_timeout():
    async def reply(peer, *_):
        await peer.gone()

    timed_out(reply)


def test_a_hang_after_the_headers_ends_at_the_timeout():
    async def reply(peer, *_):
        await peer.send(b"", length=10)
        await peer.gone()

    timed_out(reply)


def test_a_slow_drip_ends_at_the_timeout_though_it_never_pauses_for_long():
    async def reply(peer, *_):
        await peer.drip(b" " * 10_000, every=0.01)

    timed_out(reply)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [{"mess',
        b"",
        b"<html><body>Bad gateway</body></html>",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"17",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": 1} {"b": 2}',
        b"data: {}\n\ndata: [DONE]\n\n",
        b'{"a": "\xff\xfe"}',
        b"\xff\xfe{}",
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=lambda body: body[:20].decode(errors="replace"),
)
def test_a_reply_that_is_not_a_json_object_is_worth_retrying(body):
    result = error_of(sent(body), retryable=True, spent=UNKNOWN)
    assert "not a JSON object" in str(result)


def test_a_reply_just_below_the_largest_size_is_read():
    body = b'{"a": "' + b"x" * (LARGEST_REPLY - 9) + b'"}'
    assert len(body) == LARGEST_REPLY
    assert len(sent(body).document["a"]) == LARGEST_REPLY - 9


def test_a_reply_of_10_mb_is_refused_for_good():
    result = sent(b'{"a": "' + b"x" * 10 * 2**20 + b'"}')
    error_of(result, retryable=False, spent=UNKNOWN)
    assert "larger than 8 MB" in str(result)


def test_a_reply_that_never_ends_is_cut_at_the_largest_size():
    written = 0

    async def reply(peer, *_):
        nonlocal written
        await peer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(1000):
            await peer.write(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
            written += 2**20

    error_of(outcome(Sockets(reply)), retryable=False, spent=UNKNOWN)
    assert written < 100 * 2**20


def compressed(data, encoding="gzip"):
    return sent(data, headers=[f"Content-Encoding: {encoding}"])


def test_a_compressed_reply_is_read():
    plain = json.dumps(completion("hello")).encode()
    for data, encoding in ((gzip.compress(plain), "gzip"), (zlib.compress(plain), "deflate")):
        assert compressed(data, encoding).document == completion("hello")
    assert compressed(gzip.compress(plain), "GZIP").document == completion("hello")


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_compression_bomb_is_refused_for_good(pack):
    bomb = pack(b'{"a": "' + b" " * 64 * 2**20 + b'"}')
    assert len(bomb) < 2**17
    error_of(result := compressed(bomb), retryable=False, spent=UNKNOWN)
    assert "larger than 8 MB" in str(result)


def test_a_compression_bomb_in_an_error_body_is_not_unpacked_either():
    bomb = gzip.compress(b" " * 64 * 2**20)
    result = sent(bomb, status="500 Oh no", headers=["Content-Encoding: gzip"])
    assert "larger than 8 MB" in str(result)


def test_garbage_marked_as_gzip_is_refused():
    error_of(result := compressed(b"no gzip at all"), retryable=False, spent=UNKNOWN)
    assert "not gzip data" in str(result)


def test_truncated_gzip_is_not_a_reply():
    error_of(compressed(gzip.compress(b'{"a": 1, "b": "' + bytes(1000))[:-20]), retryable=True, spent=UNKNOWN)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x" * 1000])
def test_an_encoding_that_was_not_requested_is_refused(encoding):
    result = error_of(compressed(b"{}", encoding), retryable=False, spent=UNKNOWN)
    assert "not requested" in str(result)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status):
    async def run():
        async with Upstream(lambda *_: completion("there")) as other:
            headers = {"Location": f"{other.url}/chat/completions"}
            async with (
                Upstream(lambda *_: web.Response(status=status, headers=headers)) as upstream,
                Endpoint(upstream.url, key=SECRET) as endpoint,
            ):
                with pytest.raises(UpstreamError) as caught:
                    await endpoint.call(CALL)
                assert other.bodies == []
                return caught.value

    error_of(asyncio.run(run()), status=status, retryable=False, spent=REFUSED)


async def test_text_that_is_not_unicode_is_a_typed_error_and_nothing_is_sent():
    async with Upstream(lambda *_: {}) as upstream, Endpoint(upstream.url) as endpoint:
        with pytest.raises(UpstreamError) as caught:
            await endpoint.call(Call(path="/x", body={"a": "\ud800"}))
        assert upstream.bodies == []
        assert not caught.value.retryable
        assert caught.value.spent is None


def everything_of(result):
    """Return everything a user could print, log or store of an outcome."""
    if isinstance(result, ScorerError):
        chain = "".join(traceback.format_exception(result))
        return "\n".join([str(result), repr(result), str(result.args), result.raw or "", chain])
    return repr(result) + json.dumps(result.document)


async def echo_401(peer, key):
    body = json.dumps({"error": {"message": f"Incorrect API key provided: {key}"}}).encode()
    await peer.send(body, status="401 No")


async def echo_401_with_escaped_slashes(peer, key):
    body = json.dumps({"error": {"message": f"Incorrect API key provided: {key}"}}).replace("/", "\\/").encode()
    await peer.send(body, status="401 No")


async def echo_plain_400(peer, key):
    await peer.send(f"bad header: Authorization: Bearer {key}".encode() * 20, status="400 No")


async def echo_cut_at_the_excerpt(peer, key):
    await peer.send(b"x" * 190 + key.encode() + b"y" * 1795 + key.encode(), status="400 No")


async def echo_200(peer, key):
    await peer.send(json.dumps({**completion(f"your key is {key}"), key: key}).encode())


async def echo_200_with_escaped_slashes(peer, key):  # as PHP writes JSON
    await peer.send(json.dumps({"headers": f"Bearer {key}"}).replace("/", "\\/").encode())


async def echo_200_with_unicode_escapes(peer, key):  # as Go writes <, > and &
    await peer.send(('{"a": "' + "".join(f"\\u{ord(c):04x}" for c in key) + '"}').encode())


async def echo_gzip(peer, key):
    body = gzip.compress(json.dumps({"said": key}).encode())
    await peer.send(body, headers=["Content-Encoding: gzip"])


async def echo_html(peer, key):
    await peer.send(f"<html>{key}</html>".encode())


async def echo_redirect(peer, key):
    where = f"Location: http://127.0.0.1:9/?{key}"
    await peer.send(f"moved to {key}".encode(), status="302 Found", headers=[where, f"X-Key: {key}"])


async def echo_reason(peer, key):
    await peer.send(b"", status=f"401 {key}")


async def echo_broken_header(peer, key):
    await peer.write(f"HTTP/1.1 200 OK\r\nbad header Authorization {key}\r\n\r\n".encode())
    peer.close()


async def echo_broken_status(peer, key):
    await peer.write(f"HTTP/1.1 {key}\r\n\r\n".encode())
    peer.close()


async def echo_encoding(peer, key):
    await peer.send(b"{}", headers=[f"Content-Encoding: {key}"])


async def echo_retry_after(peer, key):
    await peer.send(b"", status="429 Slow", headers=[f"Retry-After: {key}"])


ECHOES = [
    echo_401,
    echo_401_with_escaped_slashes,
    echo_plain_400,
    echo_cut_at_the_excerpt,
    echo_200,
    echo_200_with_escaped_slashes,
    echo_200_with_unicode_escapes,
    echo_gzip,
    echo_html,
    echo_redirect,
    echo_reason,
    echo_broken_header,
    echo_broken_status,
    echo_encoding,
    echo_retry_after,
]


@pytest.mark.parametrize(("header", "key"), [("Authorization", SECRET), ("api-key", PLAIN)], ids=["bearer", "bare"])
@pytest.mark.parametrize("echo", ECHOES, ids=lambda echo: echo.__name__.removeprefix("echo_"))
def test_a_key_echoed_by_the_server_shows_up_nowhere(echo, header, key):
    async def reply(peer, *_):
        await echo(peer, key)

    server = Sockets(reply)
    result = outcome(server, key=key, key_header=header)
    assert f"{header}: {'Bearer ' if header == 'Authorization' else ''}{key}\r\n" in server.heads[0]
    shown = everything_of(result).replace("\\/", "/").lower()
    assert PLAIN.lower() not in shown


def test_text_that_looks_like_a_key_is_not_shown_either():
    result = answered((401, {"error": {"message": "sk-live_0123456789abcdef is not known here"}}), key=SECRET)
    assert "0123456789abcdef" not in everything_of(result)
    assert "*** is not known here" in str(result)


def test_the_endpoint_itself_does_not_show_its_key():
    endpoint = Endpoint("http://127.0.0.1/v1", key=SECRET)
    assert SECRET not in repr(endpoint) + str(endpoint) + endpoint.origin


def test_the_key_is_sent_as_a_bearer_token_or_bare_in_another_header():
    bearer = f"Bearer {SECRET}"
    for name, value in (("Authorization", bearer), ("authorization", bearer), ("api-key", SECRET)):
        upstream = Upstream(lambda *_: {})
        outcome(upstream, key=f" {SECRET}\n", key_header=name)
        sent_headers = {key.lower(): text for key, text in upstream.headers[0].items()}
        assert sent_headers[name.lower()] == value
        assert sum(SECRET in text for text in sent_headers.values()) == 1


@pytest.mark.parametrize("key", [None, "", "  \n"])
def test_without_a_key_no_header_is_sent(key):
    for header in ("Authorization", "api-key"):
        upstream = Upstream(lambda *_: {})
        outcome(upstream, key=key, key_header=header)
        assert not {"authorization", "api-key"} & {name.lower() for name in upstream.headers[0]}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "api.openai.com/v1",
        "ftp://127.0.0.1/v1",
        "file:///etc/passwd",
        "http://",
        "http:///v1",
        "https:v1",
        "http://user@127.0.0.1/v1",
        "http://user:hunter2@127.0.0.1/v1",
        "http://127.0.0.1/v1?key=hunter2",
        "http://127.0.0.1/v1#hunter2",
        "htps://user:hunter2@127.0.0.1/v1",
        "http://[::1/v1",
        "http://127.0.0.1:99999/v1",
        "http://127.0.0.1:port/v1",
    ],
)
def test_a_malformed_url_is_refused(url):
    with pytest.raises(ConfigError) as caught:
        Endpoint(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-\x00abc", "sk-abc\r\nX-Evil: 1", "clé", "two words", "sk-abc\x7f", "密"])
def test_a_key_that_is_not_a_valid_header_is_refused_without_being_shown(key):
    with pytest.raises(ConfigError) as caught:
        Endpoint("http://127.0.0.1/v1", key=key)
    assert key not in str(caught.value)
    assert "Evil" not in str(caught.value)


def test_a_key_comes_from_the_environment_and_must_be_there(monkeypatch):
    monkeypatch.setenv("SOME_KEY", SECRET)
    assert key_from("SOME_KEY") == SECRET
    assert key_from(None) is None
    for value in ("", "  "):
        monkeypatch.setenv("SOME_KEY", value)
        with pytest.raises(ConfigError, match="SOME_KEY is not set"):
            key_from("SOME_KEY")


async def test_connections_are_reused_and_closed():
    peers = set()

    async def reply(peer, *_):
        peers.add(peer._writer)
        await peer.send(b"{}")

    async with Sockets(reply) as server:
        endpoint = Endpoint(server.url)
        for _ in range(5):
            await endpoint.call(CALL)
        assert len(peers) == 1
        await endpoint.close()
        await endpoint.close()
        assert (await endpoint.call(CALL)).document == {}
        assert len(peers) == 2
        await endpoint.close()


async def test_an_endpoint_is_usable_again_after_a_fault():
    async def reply(peer, body, number):
        if number == 0:
            peer.reset()
        elif number == 1:
            await peer.gone()
        else:
            await peer.send(b'{"fine": true}')

    async with Sockets(reply) as server, Endpoint(server.url, timeout=0.2) as endpoint:
        for _ in range(2):
            with pytest.raises(UpstreamError):
                await endpoint.call(CALL)
        assert (await endpoint.call(CALL)).document == {"fine": True}
