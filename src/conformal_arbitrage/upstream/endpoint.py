"""Endpoint: an OpenAI-compatible HTTP server as a port; the one place where providers' errors are translated.

Replies are read up to a size, decompressed up to that size, and scrubbed of the key should a server echo it.

Knows nothing of prompts, prices or retries.
"""

import asyncio
import os
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import msgspec

from conformal_arbitrage.errors import ConfigError, DeadlineError, UpstreamError
from conformal_arbitrage.types import Sink, Spent
from conformal_arbitrage.upstream.base import Call, Reply
from conformal_arbitrage.upstream.sse import Assembly, Events

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

LARGEST_REPLY = 8 * 2**20
LARGEST_STREAM = 4 * LARGEST_REPLY  # a chunk says little in many bytes: this is some 130,000 tokens
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LOOKS_SECRET = re.compile(r"\b(?:sk|pk|key|Bearer)[-_ ][A-Za-z0-9_\-.]{8,}")
_MOST_TOKENS = 10**9
_SHORTEST_SECRET = 8  # a shorter key, as for a local server, is a word that replies may hold
_UNKNOWN = Spent(calls=1, input_tokens=None, output_tokens=None, cost=None)
_LONGEST_GOODBYE = 0.5
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Endpoint:
    """An OpenAI-compatible server.

    Args:
        url: its base, such as https://api.openai.com/v1.
        key: the API key, if it wants one.
        key_header: the header the key goes into; Authorization carries it as a bearer token.
        timeout: seconds for one request, from connecting to the last byte.
    """

    def __init__(
        self, url: str, *, key: str | None = None, key_header: str = "Authorization", timeout: float = 60.0
    ) -> None:
        self._base = _checked_url(url)
        self._timeout = timeout
        self._secret = _checked_key(key)
        bearer = "Bearer " if key_header.lower() == "authorization" else ""
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._secret:
            self._headers[key_header] = bearer + self._secret
        self._session: ClientSession | None = None

    @property
    def origin(self) -> str:
        """Scheme, host, port and path."""
        return self._base

    async def close(self) -> None:
        """Let go of the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> "Endpoint":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def call(self, call: Call) -> Reply:
        """POST the body and decode the reply; with a sink, ask for a stream and put it together.

        Raises:
            UpstreamError: anything but a JSON object, or a whole stream, with status 200.
        """
        import aiohttp  # 100 ms that offline use should not pay

        passing = None if call.sink is None else _Passing(call.sink)
        try:
            body = msgspec.json.encode(call.body if passing is None else {**call.body, **_STREAMED})
        except UnicodeEncodeError as error:
            raise UpstreamError("the request holds text that is not valid Unicode, so it cannot be sent") from error
        try:
            async with asyncio.timeout(self._timeout):
                return await self._post(self._base + call.path, body, passing)
        except TimeoutError as error:
            again = passing is None or not passing.begun
            raise DeadlineError(
                f"{self.origin}: no complete reply within {self._timeout:g} s", spent=_UNKNOWN, retryable=again
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = self._scrubbed(str(error) or type(error).__name__)
            raise UpstreamError(
                f"{self.origin}: the connection failed ({reason[:300]})",
                spent=_UNKNOWN,
                retryable=passing is None or not passing.begun,
            ) from None  # its text may hold the key

    async def _post(self, url: str, body: bytes, passing: "_Passing | None") -> Reply:
        session = self._session or self._connect()
        async with session.post(url, data=body, allow_redirects=False) as response:
            if passing is not None and response.status == 200 and response.content_type == "text/event-stream":
                return await self._streamed(response, passing)
            data = await self._read(response)
            if response.status != 200:
                raise self._refused(response.status, response.headers, data)
            return self._reply(data)

    async def _streamed(self, response: "ClientResponse", passing: "_Passing") -> Reply:
        events, whole, size, done = Events(), Assembly(), 0, False
        while not done and (portion := await response.content.readany()):
            size += len(portion)
            if size > LARGEST_STREAM:
                raise self._too_large(LARGEST_STREAM)
            for data in events.feed(portion):
                done = data == b"[DONE]"
                if done:
                    await _let_go(response)
                    break
                chunk = self._chunk(data, passing)
                whole.add(chunk)
                await passing.on(chunk)
        if whole.finish is None:
            raise UpstreamError(f"{self.origin}: the stream broke off", spent=_UNKNOWN, retryable=not passing.begun)
        document = whole.document()
        return Reply(document=document, spent=usage_of(document))

    def _chunk(self, data: bytes, passing: "_Passing") -> dict[str, Any]:
        bare = self._without_key(data) if len(self._secret) >= _SHORTEST_SECRET else data
        chunk = _object(_decoded(bare))
        if chunk.get("error") or not isinstance(chunk.get("choices"), list):
            said = self._scrubbed(str(_error_object(chunk).get("message") or bare[:200].decode(errors="replace")))
            raise UpstreamError(
                f"{self.origin}: the stream holds an error ({said[:300]})", spent=_UNKNOWN, retryable=not passing.begun
            )
        return chunk

    def _connect(self) -> "ClientSession":
        import aiohttp

        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self._session

    async def _read(self, response: "ClientResponse") -> bytes:
        data = bytearray()
        while chunk := await response.content.readany():
            data += chunk
            if len(data) > LARGEST_REPLY:
                raise self._too_large(LARGEST_REPLY)
        encoding = self._scrubbed(response.headers.get("Content-Encoding", "identity")).lower()
        plain = bytes(data) if encoding == "identity" else self._decompressed(bytes(data), encoding)
        return self._without_key(plain) if len(self._secret) >= _SHORTEST_SECRET else plain

    def _without_key(self, plain: bytes) -> bytes:
        if b"\\" in plain and (document := _decoded(plain)) is not None:
            bare = msgspec.json.encode(document)  # without the escapes that can hide a key
            quoted = msgspec.json.encode(self._secret)[1:-1]
            plain = bare.replace(quoted, b"***") if quoted in bare else plain
        return plain.replace(self._secret.encode(), b"***")

    def _decompressed(self, data: bytes, encoding: str) -> bytes:
        if encoding not in ("gzip", "deflate"):
            raise UpstreamError(f"{self.origin}: the reply is encoded as {encoding!r:.40}, unasked", spent=_UNKNOWN)
        inflate = zlib.decompressobj(wbits=47)
        try:
            plain = inflate.decompress(data, LARGEST_REPLY + 1)
        except zlib.error as error:
            raise UpstreamError(f"{self.origin}: the reply is not {encoding} data", spent=_UNKNOWN) from error
        if len(plain) > LARGEST_REPLY:
            raise self._too_large(LARGEST_REPLY)
        return plain

    def _too_large(self, limit: int) -> UpstreamError:
        return UpstreamError(f"{self.origin}: the reply is larger than {limit >> 20} MB", spent=_UNKNOWN)

    def _reply(self, data: bytes) -> Reply:
        document = _decoded(data)
        if not isinstance(document, dict):
            start = self._scrubbed(data[:80].decode(errors="replace"))
            raise UpstreamError(
                f"{self.origin}: the reply is not a JSON object but {start!r}", spent=_UNKNOWN, retryable=True
            )
        return Reply(document=document, spent=usage_of(cast("dict[str, Any]", document)))

    def _refused(self, status: int, headers: Mapping[str, str], data: bytes) -> UpstreamError:
        document = _decoded(data)
        found = _error_object(document)
        said = str(found.get("message") or data[:200].decode(errors="replace"))
        hopeless = found.get("code") == "insufficient_quota" or headers.get("x-should-retry") == "false"
        return UpstreamError(
            f"{self.origin}: status {status} ({self._scrubbed(said)[:300]})",
            spent=Spent(calls=1),
            raw=self._scrubbed(data[:2000].decode(errors="replace")),
            status=status,
            retryable=status in _TRANSIENT and not hopeless,
            retry_after=_retry_after(headers),
        )

    def _scrubbed(self, text: str) -> str:
        plain = text.replace(self._secret, "***") if len(self._secret) >= _SHORTEST_SECRET else text
        return _LOOKS_SECRET.sub("***", plain)


async def _let_go(response: "ClientResponse") -> None:
    """Wait a moment for the end of a stream that said it is done: only then can its connection be used again."""
    import aiohttp

    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_LONGEST_GOODBYE):
            while await response.content.readany():
                pass


class _Passing:
    """Passes chunks on, and knows whether any was: from then on nothing is asked again."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.begun = False

    async def on(self, chunk: Mapping[str, Any]) -> None:
        self.begun = True
        await self._sink(chunk)


def usage_of(document: Mapping[str, Any]) -> Spent:
    """The tokens a reply reports, in the names of either API; unknown where it reports none."""
    usage = _object(document.get("usage"))
    details = _object(usage.get("completion_tokens_details") or usage.get("output_tokens_details"))
    inputs = _object(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
    return Spent(
        calls=1,
        input_tokens=_count(usage.get("prompt_tokens", usage.get("input_tokens"))),
        output_tokens=_count(usage.get("completion_tokens", usage.get("output_tokens"))),
        reasoning_tokens=_count(details.get("reasoning_tokens")) or 0,
        cached_tokens=_count(inputs.get("cached_tokens")) or 0,
        cost=None,
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS else None


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _error_object(document: object) -> dict[str, Any]:
    found = _object(document).get("error")
    return {"message": found} if isinstance(found, str) else _object(found)


def _decoded(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from either form of the header."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, IndexError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigError(
            "url must be a base such as https://api.openai.com/v1; its host or port is malformed"
        ) from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "url must hold no user, password, query or fragment; keys come from the environment (key_env)"
        )
    if not valid:
        raise ConfigError(f"url must be a base such as https://api.openai.com/v1; got {url!r:.100}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _checked_key(key: str | None) -> str:
    secret = (key or "").strip()
    if not re.fullmatch(r"[!-~]*", secret):
        raise ConfigError("the API key holds characters that no header can carry; set it again")
    return secret


def key_from(variable: str | None) -> str | None:
    """An API key from the environment.

    Raises:
        ConfigError: the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key.strip():
        raise ConfigError(
            f"the environment variable {variable} is not set; export it, or drop key_env if none is needed"
        )
    return key
