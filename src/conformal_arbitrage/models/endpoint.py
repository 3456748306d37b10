"""Endpoint: an OpenAI-compatible HTTP server as a port; the one place where providers' errors are translated."""

import asyncio
import os
import re
import zlib
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from conformal_arbitrage.errors import ConfigError, DeadlineError, UpstreamError
from conformal_arbitrage.models.port import UNKNOWN, Call, Reply, until
from conformal_arbitrage.models.resilience import Breaker
from conformal_arbitrage.types import JSON, Chunk, Spent, as_object

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession
    from aiohttp.client import _RequestContextManager  # pyright: ignore[reportPrivateUsage]


# --- events, assembled ---


_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")


async def events(portions: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the data of server-sent events, from bytes in arbitrary portions."""
    parts: list[bytes] = []
    data: list[bytes] = []
    async with aclosing(portions):
        async for portion in portions:
            parts.append(portion)
            if b"\n" not in portion:
                continue
            portion = b"".join(parts)  # one copy: it stays in memory while a caller does not read
            parts.clear()
            start = 0
            while (end := portion.find(b"\n", start)) >= 0:
                bare = portion[start:end].rstrip(b"\r")
                start = end + 1
                if bare.startswith(b"data:"):
                    data.append(bare[5:].removeprefix(b" "))
                elif not bare and data:
                    event = b"\n".join(data)
                    data.clear()
                    yield event
            parts.append(portion[start:])


async def assembled(chunks: AsyncGenerator[Chunk]) -> AsyncGenerator["Chunk | Assembly"]:
    """Yield chunks unchanged, then the completion assembled from them."""
    completion = Assembly()
    async with aclosing(chunks):
        async for chunk in chunks:
            completion.add(chunk)
            yield chunk
    yield completion


class Assembly:
    """A completion assembled from its chunks; malformed parts add nothing.

    Attributes:
        finish: why the completion ended; None until the endpoint has said so.
    """

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._message = _Parts({"role": "assistant", "content": None})
        self._calls: dict[int, dict[str, Any]] = {}
        self.finish: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Add a chunk: texts are appended, tool calls grow in place, and any other field is overwritten."""
        self._fields |= {name: value for name, value in chunk.items() if name != "choices" and value not in (None, "")}
        reason: JSON = _choice_of(chunk).get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish = reason
        for name, value in delta_of(chunk).items():
            if name == "tool_calls":
                self._add_calls(value)
            elif name in _TEXTS:
                self._message.append(name, value)
            else:
                self._message.put(name, value)

    def _add_calls(self, parts: JSON) -> None:
        for part in parts if isinstance(parts, list) else []:
            self._add_call(part)

    def _add_call(self, part: JSON) -> None:
        fields = part if isinstance(part, dict) else {}
        place: JSON = fields.get("index")
        call = self._calls.setdefault(place if isinstance(place, int) else len(self._calls), {})
        value: JSON
        for name, value in fields.items():
            if isinstance(value, dict):
                call[name] = _merged(call.get(name), value)
            elif name != "index" and value is not None:
                call[name] = value

    def document(self) -> dict[str, Any]:
        """Return the whole completion, as if it had not been streamed."""
        message = self._message.joined()
        if self._calls:
            message["tool_calls"] = [_joined(self._calls[place]) for place in sorted(self._calls)]
        choice = {"index": 0, "message": message, "finish_reason": self.finish, "logprobs": None}
        return {**self._fields, "object": "chat.completion", "choices": [choice]}


def delta_of(chunk: Chunk) -> dict[str, Any]:
    """Return what a chunk adds to the message."""
    delta: JSON = _choice_of(chunk).get("delta")
    return delta if isinstance(delta, dict) else {}


def _choice_of(chunk: Chunk) -> dict[str, Any]:
    """Return the one choice of a chunk; a chunk with usage only has none."""
    choices: JSON = chunk.get("choices")
    choice: JSON = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, dict) else {}


class _Parts:
    """An object whose texts arrive in parts, which are joined once, at the end: joining at every part is quadratic."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._texts: dict[str, list[str]] = {}

    def append(self, name: str, value: JSON) -> None:
        """Append a part to a text; any other value replaces the field, and null adds nothing, as some servers send it."""
        if isinstance(value, str):
            self._texts.setdefault(name, []).append(value)
        else:
            self.put(name, value)

    def put(self, name: str, value: JSON) -> None:
        """Set a field, unless to null."""
        if value is not None:
            self._values[name] = value
            self._texts.pop(name, None)

    def joined(self) -> dict[str, Any]:
        """Return the whole object."""
        return {**self._values, **{name: "".join(parts) for name, parts in self._texts.items()}}


def _merged(before: object, more: Mapping[str, Any]) -> _Parts:
    """Return an object with the texts of another appended to its own."""
    merged = before if isinstance(before, _Parts) else _Parts({})
    for name, value in more.items():
        merged.append(name, value)
    return merged


def _joined(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with the texts of its objects joined."""
    return {name: value.joined() if isinstance(value, _Parts) else value for name, value in call.items()}


# --- SplitSecret ---


_HIDDEN = "***"


class SplitSecret:
    """Replaces a secret in the texts of chunks, holding back what could be its beginning until the next chunk.

    Args:
        secret: what must not pass.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._held: dict[str | int, str] = {}  # by the name of a text, or the index of a tool call

    def scrub(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Return a chunk without the secret, in place; nothing is held back from the chunk with the finish reason."""
        choices: JSON = chunk.get("choices")
        choice: JSON = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return chunk
        delta: JSON = choice.setdefault("delta", {})
        if isinstance(delta, dict):
            self._scrub_delta(delta, last=bool(choice.get("finish_reason")))
        return chunk

    def rest(self) -> dict[str, Any] | None:
        """Return a chunk with what is still held back at the end of a stream; None if nothing is."""
        if not self._held:
            return None
        delta: dict[str, Any] = {}
        self._release(delta)
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def _scrub_delta(self, delta: dict[str, Any], *, last: bool) -> None:
        for name in _TEXTS:
            if isinstance(text := delta.get(name), str):
                delta[name] = self._passed(name, text)
        for call in _objects(delta.get("tool_calls")):
            function = as_object(call.get("function"))
            if isinstance(text := function.get("arguments"), str):
                call["function"] = {**function, "arguments": self._passed(_index_of(call), text)}
        if last:
            self._release(delta)

    def _release(self, delta: dict[str, Any]) -> None:
        """Let everything pass that is held back: it turned out not to be the secret."""
        for place, text in self._held.items():
            if isinstance(place, str):
                delta[place] = (delta.get(place) or "") + text
                continue
            calls = _objects(delta.get("tool_calls"))
            same = [call for call in calls if _index_of(call) == place]
            if same:
                function = as_object(same[0].get("function"))
                same[0]["function"] = {**function, "arguments": f"{function.get('arguments') or ''}{text}"}
            else:
                delta["tool_calls"] = [*calls, {"index": place, "function": {"arguments": text}}]
        self._held.clear()

    def _passed(self, place: str | int, text: str) -> str:
        """Return what may pass of a text, and hold back the rest."""
        whole = (self._held.pop(place, "") + text).replace(self._secret, _HIDDEN)
        longest = min(len(whole), len(self._secret) - 1)
        size = next((n for n in range(longest, 0, -1) if self._secret.startswith(whole[-n:])), 0)
        if size:
            self._held[place] = whole[-size:]
        return whole[: len(whole) - size]


def _objects(value: JSON) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _index_of(call: dict[str, Any]) -> int:
    index: JSON = call.get("index")
    return index if isinstance(index, int) else 0


# --- Endpoint ---


LARGEST_REPLY = 8 * 2**20
LARGEST_STREAM = 4 * LARGEST_REPLY  # chunks are verbose: this is some 130,000 tokens
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LOOKS_SECRET = re.compile(r"\b(?:sk|pk|key|Bearer)[-_ ][A-Za-z0-9_\-.]{8,}")
_MOST_TOKENS = 10**9
_SHORTEST_SECRET = 8  # a shorter key, as for a local server, may be an ordinary word in replies
_LONGEST_DRAIN = 0.5
_Result = TypeVar("_Result")
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def json_session(headers: Mapping[str, str], **connections: Any) -> tuple["ClientSession", tuple[type[Exception], ...]]:
    """Open a session that sends JSON and nothing of its own; return it with the errors of its connections."""
    import aiohttp  # 100 ms that offline use should not pay

    session = aiohttp.ClientSession(
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **headers},
        connector=aiohttp.TCPConnector(limit=0, **connections),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )
    return session, (OSError, ValueError, aiohttp.ClientError)  # a TimeoutError is an OSError


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
        self._headers = {key_header: bearer + self._secret} if self._secret else {}
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
            async with await until(ends, posting) as response:
                if response.status != 200 or response.content_type != "text/event-stream":
                    yield await until(ends, self._whole(response))
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
                f"{self.origin}: no complete reply within {self._timeout:g} s", spent=UNKNOWN, retryable=retryable
            )
        reason = self._scrubbed(str(error) or type(error).__name__)
        return UpstreamError(
            f"{self.origin}: the connection failed ({reason[:300]})", spent=UNKNOWN, retryable=retryable
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
        while portion := await until(ends, response.content.readany()):
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
                f"{self.origin}: the stream contains an error ({reason[:300]})", spent=UNKNOWN, retryable=True
            )
        return chunk

    def _complete(self, completion: Assembly) -> Reply:
        if completion.finish is None:
            raise UpstreamError(f"{self.origin}: the stream broke off", spent=UNKNOWN, retryable=True)
        document = completion.document()
        return Reply(document=document, spent=usage_of(document))

    def _connect(self) -> "ClientSession":
        self._session, self._failures = json_session(self._headers, keepalive_timeout=30)
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
                f"{self.origin}: the reply uses the encoding {encoding!r:.40}, which was not requested", spent=UNKNOWN
            )
        inflate = zlib.decompressobj(wbits=47)
        try:
            plain = inflate.decompress(data, LARGEST_REPLY + 1)
        except zlib.error as error:
            raise UpstreamError(f"{self.origin}: the reply is not {encoding} data", spent=UNKNOWN) from error
        if len(plain) > LARGEST_REPLY:
            raise self._too_large(LARGEST_REPLY)
        return plain

    def _too_large(self, limit: int) -> UpstreamError:
        return UpstreamError(f"{self.origin}: the reply is larger than {limit >> 20} MB", spent=UNKNOWN)

    def _reply(self, data: bytes) -> Reply:
        document = _decoded(data, _object)
        if document is None:
            start = self._scrubbed(data[:80].decode(errors="replace"))
            raise UpstreamError(
                f"{self.origin}: the reply is not a JSON object but {start!r}", spent=UNKNOWN, retryable=True
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
            said=self._scrubbed(reason)[:1000],
            code=self._scrubbed(str(fault.get("code") or ""))[:100],
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


# --- Pool ---


FAILURES = 3
"""Failures in a row after which an endpoint of a pool is left out for a while."""
_MOMENT = 1.0


class Pool:
    """Several endpoints that serve one model.

    Args:
        name: stands for all of them in identities, so that endpoints can come and go.
        members: the endpoints, each behind a breaker of its own.
        weights: how often each is called, relative to the others; equally often if None.
        served: the model name that replies must carry, if pinned.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Breaker],
        *,
        weights: Sequence[float] | None = None,
        served: str | None = None,
    ) -> None:
        self.origin = f"pool:{name}"
        shares = weights or [1.0] * len(members)
        self._members = [_Member(breaker, weight) for breaker, weight in zip(members, shares, strict=True)]
        self._served = served

    async def call(self, call: Call) -> Reply:
        """Return the reply of one endpoint."""
        with self._chosen() as member:
            reply = await member.breaker.call(call)
        self._check_model(member, reply.document.get("model"))
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the stream of one endpoint."""
        with self._chosen() as member:
            async with aclosing(member.breaker.stream(call)) as items:
                async for item in items:
                    document = item.document if isinstance(item, Reply) else item
                    self._check_model(member, document.get("model") or self._served)  # not every chunk names it
                    yield item

    @contextmanager
    def _chosen(self) -> Generator["_Member"]:
        """Choose an endpoint; if it fails, pass over it for a moment and say how many others there are."""
        clock = asyncio.get_running_loop().time
        usable = [member for member in self._members if not member.breaker.resting]
        if not usable:
            message = f"{self.origin}: none of its {len(self._members)} endpoints is called for now"
            raise UpstreamError(message, retryable=True)
        member = _next([candidate for candidate in usable if candidate.failed <= clock() - _MOMENT] or usable)
        try:
            yield member
        except UpstreamError as error:
            if error.retryable:
                member.failed = clock()
                error.elsewhere = sum(other is not member and not other.breaker.resting for other in self._members)
            raise

    def _check_model(self, member: "_Member", served: object) -> None:
        """Leave an endpoint out that serves another model; whoever reads the reply refuses it."""
        if self._served is not None and served != self._served:
            member.breaker.open()


class _Member:
    """An endpoint of a pool, how far it is behind its share of calls, and when it last failed."""

    def __init__(self, breaker: Breaker, weight: float) -> None:
        self.breaker = breaker
        self.weight = weight
        self.due = 0.0
        self.failed = float("-inf")


def _next(members: Sequence[_Member]) -> _Member:
    """Return the endpoint that is furthest behind its share (smooth weighted round robin)."""
    for member in members:
        member.due += member.weight
    chosen = max(members, key=lambda member: member.due)
    chosen.due -= sum(member.weight for member in members)
    return chosen
