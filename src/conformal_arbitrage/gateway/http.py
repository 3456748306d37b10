"""One route of the API: who calls, what they sent, the limits, the reply, and what is logged of it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from conformal_arbitrage.errors import (
    ArbitrageError,
    CostLimitError,
    GuardianError,
    QuotaError,
    RequestError,
    StoreError,
)
from conformal_arbitrage.gateway.audience import Caller
from conformal_arbitrage.gateway.auth import Authenticator
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.models.resilience import Window
from conformal_arbitrage.store.keys import Scope
from conformal_arbitrage.store.record import JSONObject

_log = logging.getLogger("conformal_arbitrage.gateway")
DECISION_ID = "x-arbitrage-decision-id"


class Sent(Protocol):
    """What the access log reads of a response."""

    @property
    def status_code(self) -> int:
        """Return the HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers."""
        ...


NOTHING_SENT: Sent = Response(status_code=499)


@dataclass(slots=True)
class Exchange:
    """What the log and traces say of a request.

    Attributes:
        policy: the policy it is for, once that is known.
    """

    policy: str = ""
    reply: Sent = NOTHING_SENT


class Incoming(Request):
    """An admitted request, with its caller and its whole body.

    Attributes:
        send: where a handler that streams sends its response.
        exchange: where a handler notes the policy that a request is for.
    """

    def __init__(
        self,
        scope: ASGIScope,
        receive: Receive,
        send: Send,
        *,
        caller: Caller,
        content: bytes,
        idempotency_key: str | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(scope, receive, send)
        self.caller = caller
        self.content = content
        self.idempotency_key = idempotency_key
        self.send = send
        self.exchange = exchange or Exchange()


Handler = Callable[[Incoming], Awaitable[Sent]]
"""Answers a request: returns the response to send, or a stream that has been sent already."""
Trace = Callable[[ASGIScope, str, Exchange], AbstractContextManager[object]]
"""Records a request of a route while it is served."""


class RouteEndpoint:
    """One route that needs a key: identifies the caller, reads the body and runs the handler within the limits.

    Args:
        path: the route's path, as metrics name it.
        scope: what a caller's key must allow.
        refresher: brings keys and policies up to date first.
        limits: on requests, which count once they are whole.
        largest_body: in bytes.
    """

    def __init__(
        self,
        handler: Handler,
        path: str,
        scope: Scope,
        *,
        authenticator: Authenticator,
        refresher: "Refresher",
        limits: "RequestLimits",
        largest_body: int,
        access: "AccessLog",
        trace: Trace | None = None,
    ) -> None:
        self._handler = handler
        self._path = path
        self._scope: Scope = scope
        self._authenticator = authenticator
        self._refresher = refresher
        self._limits = limits
        self._largest_body = largest_body
        self._access = access
        self._trace = trace

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        start = time.perf_counter()
        exchange = Exchange()
        if self._trace is None:
            await self._answer(exchange, scope, receive, send)
        else:
            with self._trace(scope, self._path, exchange):
                await self._answer(exchange, scope, receive, send)
        self._access.note(scope["method"], self._path, exchange, time.perf_counter() - start)

    async def _answer(self, exchange: Exchange, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Send the reply, or an error that was raised before a reply began."""
        try:
            await self._refresher.refresh()
            headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first duplicate wins
            caller = await self._authenticator.caller(headers, self._scope, (scope.get("client") or (None,))[0])
            has_body = scope["method"] in ("POST", "PUT")
            content = await self._body(headers, receive) if has_body else b""
            key = headers.get(b"idempotency-key")
            request = Incoming(
                scope, receive, send, caller=caller, content=content, exchange=exchange,
                idempotency_key=None if key is None else key.decode("latin-1"),
            )  # fmt: skip
            with self._limits.admitted(caller.id):
                exchange.reply = await self._handler(request)
                if isinstance(exchange.reply, Response):
                    await exchange.reply(scope, receive, send)
        except ArbitrageError as error:
            exchange.reply = response = error_response(error, exchange.policy)
            await response(scope, receive, send)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Read the whole body.

        Raises:
            RequestError: 415 if it is not declared as JSON, which a web page cannot do, 413 if it is too large.
        """
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            raise RequestError("Content-Type must be application/json", status=415, code="content_type")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._largest_body:
            raise self._too_large()
        return await read_body(receive, self._largest_body, self._too_large)

    def _too_large(self) -> RequestError:
        return RequestError(f"the body is larger than {self._largest_body} bytes", status=413, code="body_too_large")


async def read_body(receive: Receive, largest: int, too_large: Callable[[], RequestError]) -> bytes:
    """Return the whole body of a request."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise caller_left()
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > largest:
            raise too_large()
    return b"".join(parts)


POLLED = "/console/changes"
"""The route that open pages of the console ask every two seconds."""


class RequestLine(Struct, frozen=True, kw_only=True):
    """The line of the log about one request."""

    time: datetime
    level: str
    route: str
    status: int
    seconds: float
    policy: str
    id: str


class AccessLog:
    """Counts and logs requests once they have been answered.

    Args:
        metrics: where they are counted.
        write: takes one line of JSON per request.
    """

    def __init__(self, metrics: Metrics, write: Callable[[bytes], None]) -> None:
        self._metrics = metrics
        self._write = write

    def note(self, method: str, path: str, exchange: Exchange, seconds: float) -> None:
        """Count and log a request of a route; of an open tab's polls, only those that fail are logged."""
        reply = exchange.reply
        self._metrics.request(path, reply.status_code)
        if path == POLLED and reply.status_code < 400:
            return  # one line every two seconds and tab would bury the others
        line = RequestLine(
            time=datetime.now(UTC),
            level="info" if reply.status_code < 500 else "error",
            route=f"{method} {path}",
            status=reply.status_code,
            seconds=round(seconds, 4),
            policy=exchange.policy,
            id=reply.headers.get(DECISION_ID, ""),
        )
        self._write(msgspec.json.encode(line))


class Refresher:
    """Picks up keys and policies that any gateway on the same store has changed, from the next request on.

    Args:
        change_count: reads the store's; `Store.writable` does so if a decision could be recorded now, and fails otherwise.
        subscribers: called with the new count.
    """

    def __init__(
        self, change_count: Callable[[], Awaitable[int]], *subscribers: Callable[[int], Awaitable[None]]
    ) -> None:
        self._change_count = change_count
        self._subscribers = subscribers
        self._seen = -1
        self._rounds = 0
        self._current = -1

    async def refresh(self) -> None:
        """Bring everything up to date; requests that reached the event loop together share one reading."""
        this_round = self._rounds
        if self._current == this_round:
            return
        asyncio.get_running_loop().call_soon(self._end_round)  # before any request that has not arrived yet
        count = await self._change_count()
        if count > self._seen:
            for subscriber in self._subscribers:
                await subscriber(count)
            self._seen = max(self._seen, count)  # a concurrent refresh may have seen more
        self._current = this_round

    def _end_round(self) -> None:
        self._rounds += 1


class RequestLimits:
    """The limits on requests of one gateway.

    Attributes:
        in_flight: requests being served now.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._most_in_flight = config.max_in_flight
        self._per_minute = config.requests_per_minute
        self._windows: dict[str, Window] = {}
        self.in_flight = 0

    @contextmanager
    def admitted(self, caller_id: str) -> Generator[None]:
        """Count one request while it is served.

        Raises:
            RequestError: 429 with Retry-After.
        """
        if self.in_flight >= self._most_in_flight:
            raise too_many(f"{self.in_flight} requests are in flight, the most this gateway serves at once", 1.0)
        if self._per_minute is not None:
            self._take(caller_id, self._per_minute)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def _take(self, caller_id: str, per_minute: int) -> None:
        window = self._windows.setdefault(caller_id, Window(60.0))
        now = time.monotonic()
        if (wait := window.wait(now, per_minute)) > 0:
            raise too_many(f"this key may make {per_minute} requests a minute", wait)
        window.take(now, 1)


def too_many(message: str, wait: float) -> RequestError:
    """Return a 429 that says when to retry."""
    seconds = str(max(1, round(wait)))
    return RequestError(message, status=429, code="rate_limit_exceeded", headers={"Retry-After": seconds})


class Shortcut:
    """Sends the busiest routes' requests straight to them, past the application's routing."""

    def __init__(self, routes: Mapping[str, ASGIApp], rest: ASGIApp) -> None:
        self._routes = routes
        self._rest = rest

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (self._rest if route is None else route)(scope, receive, send)


class ErrorReply(Struct, frozen=True, kw_only=True):
    """An error as callers see it, in OpenAI's shape."""

    status: int
    document: JSONObject
    headers: Mapping[str, str] = {}


def error_document(message: str, *, code: str, status: int, param: str | None = None) -> JSONObject:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_reply(error: ArbitrageError, policy: str = "") -> ErrorReply:
    """Return what a caller of a policy is told of an error.

    Only a `RequestError` is about the request. Other messages may quote an endpoint or a path, so they go to the log.
    """
    if isinstance(error, QuotaError):
        error = too_many(str(error), error.retry_after)
    if isinstance(error, CostLimitError):
        message = "the largest cost of this request is unknown; give it a whole number of max_tokens"
        error = RequestError(message, status=422, code="unlimited_reply", param="max_tokens")
    if isinstance(error, RequestError):
        document = error_document(str(error), code=error.code, status=error.status, param=error.param)
        hopeless = {"x-should-retry": "false"} if error.status in (409, 410) else {}
        return ErrorReply(status=error.status, document=document, headers={**hopeless, **error.headers})
    text = error.logged if isinstance(error, GuardianError) else error
    _log.error("%s: %s", type(error).__name__, text, extra={"policy": policy})
    status, code, message = 500, "internal_error", "the request could not be served"
    if isinstance(error, StoreError):
        status, code = 503, "record_unavailable"
        message = "decisions cannot be recorded, so none is made; try again later"
    elif (
        isinstance(error, GuardianError) and error.status is not None
    ):  # its sender can mend it, and knows this message
        document = error_document(error.said, code=error.code or "invalid_request", status=error.status)
        return ErrorReply(status=error.status, document=document, headers={"x-should-retry": "false"})
    elif isinstance(error, GuardianError):
        help_of_retry = "a retry may help" if error.retryable else "a retry will not help"
        document = error_document(f"the Guardian {error.reason}; {help_of_retry}", code="guardian_failed", status=502)
        return ErrorReply(status=502, document=document, headers={"x-should-retry": str(error.retryable).lower()})
    return ErrorReply(status=status, document=error_document(message, code=code, status=status))


def error_response(error: ArbitrageError, policy: str = "") -> Response:
    """Return the reply to a request that failed."""
    failure = error_reply(error, policy)
    return json_response(failure.document, status=failure.status, headers=failure.headers)


def json_response(document: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON document as a response."""
    return Response(msgspec.json.encode(document), status_code=status, headers=headers, media_type="application/json")


def caller_left() -> RequestError:
    """Return what stands for a reply when there is no one to send it to."""
    return RequestError("the caller disconnected", status=499, code="caller_left")
