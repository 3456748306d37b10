"""Endpoint: an OpenAI-compatible HTTP server as a port; the one place where providers' errors are translated.

Replies are read and decompressed up to a maximum size, and the key is removed should a server echo it.

Knows nothing of prompts, prices or retries.
"""

import asyncio
import os
import re
import zlib
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from conformal_arbitrage.errors import ConfigError, DeadlineError, UpstreamError
from conformal_arbitrage.types import JSON, Chunk, Spent
from conformal_arbitrage.upstream.base import Call, Reply
from conformal_arbitrage.upstream.scrubbing import SplitSecret
from conformal_arbitrage.upstream.sse import Assembly, assembled, events

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession
    from aiohttp.client import _RequestContextManager  # pyright: ignore[reportPrivateUsage]

LARGEST_REPLY = 8 * 2**20
LARGEST_STREAM = 4 * LARGEST_REPLY  # chunks are verbose: this is some 130,000 tokens
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LOOKS_SECRET = re.compile(r"\b(?:sk|pk|key|Bearer)[-_ ][A-Za-z0-9_\-.]{8,}")
_MOST_TOKENS = 10**9
_SHORTEST_SECRET = 8  # a shorter key, as for a local server, may be an ordinary word in replies
_UNKNOWN = Spent(calls=1, input_tokens=None, output_tokens=None, cost=None)
_LONGEST_DRAIN = 0.5
_Result = TypeVar("_Result")
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Endpoint:
    """An OpenAI-compatible server.

    Args:
        url: the base URL, such as https://api.openai.com/v1.
        key: the API key, if it needs one.
        key_header: the header for the key; Authorization carries it as a bearer token.
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
        self._failures: tuple[type[Exception], ...] = (OSError, ValueError)

    @property
    def origin(self) -> str:
        """The base URL: scheme, host, port and path."""
        return self._base

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> "Endpoint":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def call(self, call: Call) -> Reply:
        """POST the body and decode the reply.

        Raises:
            UpstreamError: anything but a JSON object with status 200.
        """
        posting = self._post(call, _encoded(call.body))
        try:
            async with asyncio.timeout(self._timeout), posting as response:
                return await self._whole(response)
        except self._failures as error:
            raise self._translated(error) from _cause(error)

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """POST the body with a request for a stream, and yield its chunks, then the reply assembled from them.

        A server that does not stream is read as in `call`.

        Raises:
            UpstreamError: anything but a complete stream, or a JSON object, with status 200.
        """
        ends = asyncio.get_running_loop().time() + self._timeout
        body = _encoded({**call.body, **_STREAMED})
        begun = False
        posting = self._post(call, body)
        try:
            async with await _until(ends, posting) as response:
                if response.status != 200 or response.content_type != "text/event-stream":
                    yield await _until(ends, self._whole(response))
                    return
                async with aclosing(assembled(self._chunks(response, ends))) as items:
                    async for item in items:
                        yield self._complete(item) if isinstance(item, Assembly) else item
                        begun = True
        except UpstreamError as error:
            error.retryable = error.retryable and not begun  # the caller has seen a part of this reply
            raise
        except self._failures as error:
            raise self._translated(error, retryable=not begun) from _cause(error)

    def _translated(self, error: Exception, *, retryable: bool = True) -> UpstreamError:
        """Return a transport error as an UpstreamError."""
        if isinstance(error, TimeoutError):
            return DeadlineError(
                f"{self.origin}: no complete reply within {self._timeout:g} s", spent=_UNKNOWN, retryable=retryable
            )
        reason = self._scrubbed(str(error) or type(error).__name__)
        return UpstreamError(
            f"{self.origin}: the connection failed ({reason[:300]})", spent=_UNKNOWN, retryable=retryable
        )

    async def _whole(self, response: "ClientResponse") -> Reply:
        data = await self._read(response)
        if response.status != 200:
            raise self._refused(response.status, response.headers, data)
        return self._reply(data)

    def _post(self, call: Call, body: bytes) -> "_RequestContextManager":
        session = self._session or self._connect()
        return session.post(self._base + call.path, data=body, headers=call.headers, allow_redirects=False)

    async def _chunks(self, response: "ClientResponse", ends: float) -> AsyncGenerator[Chunk]:
        split = SplitSecret(self._secret) if len(self._secret) >= _SHORTEST_SECRET else None
        async with aclosing(events(self._portions(response, ends))) as payloads:
            async for payload in payloads:
                if payload == b"[DONE]":
                    await _drain(response)
                    break
                chunk = self._chunk(payload)
                yield chunk if split is None else split.scrub(chunk)
        if split is not None and (rest := split.rest()) is not None:
            yield rest

    async def _portions(self, response: "ClientResponse", ends: float) -> AsyncGenerator[bytes]:
        size = 0
        while portion := await _until(ends, response.content.readany()):
            size += len(portion)
            if size > LARGEST_STREAM:
                raise self._too_large(LARGEST_STREAM)
            yield portion

    def _chunk(self, data: bytes) -> dict[str, Any]:
        bare = self._without_key(data) if len(self._secret) >= _SHORTEST_SECRET else data
        chunk = _decoded(bare, _object)
        if chunk is None or chunk.get("error") or not isinstance(chunk.get("choices"), list):
            reason = self._scrubbed(str(_error_object(chunk).get("message") or bare[:200].decode(errors="replace")))
            raise UpstreamError(
                f"{self.origin}: the stream contains an error ({reason[:300]})", spent=_UNKNOWN, retryable=True
            )
        return chunk

    def _complete(self, completion: Assembly) -> Reply:
        if completion.finish is None:
            raise UpstreamError(f"{self.origin}: the stream broke off", spent=_UNKNOWN, retryable=True)
        document = completion.document()
        return Reply(document=document, spent=usage_of(document))

    def _connect(self) -> "ClientSession":
        import aiohttp  # 100 ms that offline use should not pay

        self._failures = (OSError, ValueError, aiohttp.ClientError)  # a TimeoutError is an OSError
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
        encoding = response.headers.get("Content-Encoding", "identity")
        plain = bytes(data)
        if encoding.lower() != "identity":
            plain = self._decompressed(plain, self._scrubbed(encoding).lower())
        return self._without_key(plain) if len(self._secret) >= _SHORTEST_SECRET else plain

    def _without_key(self, plain: bytes) -> bytes:
        if b"\\" in plain and (document := _decoded(plain, _any)) is not None:
            bare = msgspec.json.encode(document)  # without the escapes that can hide a key
            quoted = msgspec.json.encode(self._secret)[1:-1]
            plain = bare.replace(quoted, b"***") if quoted in bare else plain
        return plain.replace(self._secret.encode(), b"***")

    def _decompressed(self, data: bytes, encoding: str) -> bytes:
        if encoding not in ("gzip", "deflate"):
            raise UpstreamError(
                f"{self.origin}: the reply uses the encoding {encoding!r:.40}, which was not requested", spent=_UNKNOWN
            )
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
        document = _decoded(data, _object)
        if document is None:
            start = self._scrubbed(data[:80].decode(errors="replace"))
            raise UpstreamError(
                f"{self.origin}: the reply is not a JSON object but {start!r}", spent=_UNKNOWN, retryable=True
            )
        spent = usage_of(document)
        if document.get("error"):  # whatever else it holds, the server says that it failed
            reason = self._scrubbed(str(_error_object(document).get("message") or document["error"]))
            raise UpstreamError(
                f"{self.origin}: the reply contains an error ({reason[:300]})", spent=spent, retryable=True
            )
        return Reply(document=document, spent=spent)

    def _refused(self, status: int, headers: Mapping[str, str], data: bytes) -> UpstreamError:
        fault = _error_object(_decoded(data, _object))
        reason = str(fault.get("message") or data[:200].decode(errors="replace"))
        hopeless = fault.get("code") == "insufficient_quota" or headers.get("x-should-retry") == "false"
        return UpstreamError(
            f"{self.origin}: status {status} ({self._scrubbed(reason)[:300]})",
            spent=Spent(calls=1),
            raw=self._scrubbed(data[:2000].decode(errors="replace")),
            status=status,
            retryable=status in _TRANSIENT and not hopeless,
            retry_after=retry_after_of(headers),
        )

    def _scrubbed(self, text: str) -> str:
        plain = text.replace(self._secret, "***") if len(self._secret) >= _SHORTEST_SECRET else text
        return _LOOKS_SECRET.sub("***", plain)


def _cause(error: Exception) -> Exception | None:
    """Return an error as the cause of another, unless its text may contain the key."""
    return error if isinstance(error, TimeoutError) else None


async def _drain(response: "ClientResponse") -> None:
    """Read a finished stream to its end, for a moment at most: only then can its connection be reused."""
    import aiohttp

    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_LONGEST_DRAIN):
            while await response.content.readany():
                pass


async def _until(ends: float, step: Awaitable[_Result]) -> _Result:
    """Wait for one step of a stream; a timeout must not span a yield, or it would cancel the consumer instead."""
    async with asyncio.timeout_at(ends):
        return await step


def usage_of(document: Mapping[str, Any]) -> Spent:
    """Return the tokens a reply reports, in the names of either API; unknown if it reports none."""
    usage = _part(document, "usage")
    inputs = _part(usage, "prompt_tokens_details", "input_tokens_details")
    outputs = _part(usage, "completion_tokens_details", "output_tokens_details")
    return Spent(
        calls=1,
        input_tokens=_count(usage.get("prompt_tokens", usage.get("input_tokens"))),
        output_tokens=_count(usage.get("completion_tokens", usage.get("output_tokens"))),
        reasoning_tokens=_count(outputs.get("reasoning_tokens")) or 0,
        cached_tokens=_count(inputs.get("cached_tokens")) or 0,
        cost=None,
    )


def _part(document: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the first of these fields that is an object, else an empty one."""
    for name in names:
        part: JSON = document.get(name)
        if isinstance(part, dict):
            return part
    return {}


def _count(value: JSON) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS else None


def _error_object(document: Mapping[str, Any] | None) -> dict[str, Any]:
    error: JSON = (document or {}).get("error")
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise UpstreamError("the request contains text that is not valid Unicode, so it cannot be sent") from error


_any = msgspec.json.Decoder(object)
_object = msgspec.json.Decoder(dict[str, Any])


def _decoded(data: bytes, decoder: msgspec.json.Decoder[_Result]) -> _Result | None:
    """Return a JSON document of the decoder's type; None if the data is anything else."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait, from either form of the Retry-After header."""
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
            "url must not contain a user, password, query or fragment; keys come from the environment (key_env)"
        )
    if not valid:
        raise ConfigError(f"url must be a base such as https://api.openai.com/v1; got {url!r:.100}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _checked_key(key: str | None) -> str:
    secret = (key or "").strip()
    if not re.fullmatch(r"[!-~]*", secret):
        raise ConfigError("the API key contains characters that are not allowed in a header; set it again")
    return secret


def key_from(variable: str | None) -> str | None:
    """Return an API key from the environment.

    Raises:
        ConfigError: the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key.strip():
        raise ConfigError(
            f"the environment variable {variable} is not set; export it, or remove key_env if no key is needed"
        )
    return key
