"""The server process: uvicorn, the limits on its connections, its log, and what it says when it starts."""

import asyncio
import gc
import ipaddress
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Literal

import httptools
import msgspec
import uvicorn
import uvloop
from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway.gateway import Drain, Gateway, application
from conformal_arbitrage.gateway.http import error_document
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.live.config import Config, GatewayConfig
from conformal_arbitrage.store.record import JSONObject

_log = logging.getLogger("conformal_arbitrage.gateway")
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_CLOSE = (b"connection", b"close")
_RECORDING = 5.0
Started = Callable[[str, bool], None]
"""Takes the address of a gateway that has started, and whether calls need an API key."""


def run(config: Config, *, started: Started, migrating: bool = True) -> None:
    """Serve on uvloop, which uvicorn sets up only where it starts the event loop itself."""

    def quiet(url: str, keyed: bool) -> None:
        gc.collect()
        gc.freeze()  # what exists now stays; later collections only visit what requests leave behind
        gc.set_threshold(10_000, 20, 50)
        started(url, keyed)

    try:
        uvloop.run(serve(config, started=quiet, migrating=migrating))
    finally:
        gc.unfreeze()  # or extension modules report what is frozen as leaked at exit


async def serve(config: Config, *, started: Started, migrating: bool = True) -> None:
    """Serve until told to stop, logging to stderr; on SIGTERM it drains, and requests in flight finish first."""
    metrics = Metrics()
    descriptor = os.open(os.devnull, os.O_WRONLY) if sys.__stderr__ is None else 2
    lines = LogLines(descriptor, dropped=metrics.lines_dropped.inc)
    with logging_to(lines):
        async with (
            application(config, lines.add, metrics, migrating=migrating) as gateway,
            _listening(gateway) as (url, task),
        ):
            started(url, gateway.keyed)
            for note in start_notes(config):
                _log.warning(note)
            await task


def start_notes(config: Config) -> list[str]:
    """Return what the configuration can never do, in words."""
    return [
        f'policy {name}: free text with content = "{policy.content}" keeps no answers, so its rows can never be graded or '
        f'calibrated on; set content = "full" in [policies.{name}]'
        for name, policy in config.policies.items()
        if config.form_of(name) == "text" and policy.content != "full" and policy.mode == "shadow"
    ]


@asynccontextmanager
async def running(config: Config) -> AsyncGenerator["tuple[str, asyncio.Task[None]]"]:
    """Run a gateway; yield its address, and the task that ends when it is told to stop."""
    async with application(config) as gateway, _listening(gateway) as (url, task):
        yield url, task


@asynccontextmanager
async def _listening(gateway: Gateway) -> AsyncGenerator["tuple[str, asyncio.Task[None]]"]:
    config = gateway.config.gateway
    listening = _listen(config.host, config.port)
    host, port = listening.getsockname()[:2]  # a signal may have closed it as soon as the server has started
    server = _Server(ServerSettings(gateway.app, Connections(config, gateway.metrics), config.grace), gateway.drain)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not task.done():
        await asyncio.sleep(0.005)
    yield reachable_url(host, port), task
    server.should_exit = True
    await task


def reachable_url(host: str, port: int) -> str:
    """Return an address under which this machine reaches a gateway, also one that listens on all of its addresses."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Server(uvicorn.Server):
    """A server that shuts down on a signal without raising it again, so that everything is closed properly."""

    def __init__(self, config: "ServerSettings", drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain
        self._stopping: asyncio.TimerHandle | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Drain and stop on SIGTERM; stop on SIGINT, or on a second signal."""
        loop = asyncio.get_running_loop()
        signals = _STOPPING if threading.current_thread() is threading.main_thread() else ()
        for number in signals:
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            if self._stopping is not None:
                self._stopping.cancel()
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self, number: int) -> None:
        """Stop after the drain, if there is one and it has not begun; else at once."""
        if number != signal.SIGTERM or self._drain.begun or not self._drain.seconds:
            self.handle_exit(number, None)
            return
        self._drain.begun = True
        self.config.encoded_headers.append(_CLOSE)  # which uvicorn takes its default headers from, once a second
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        self._stopping = asyncio.get_running_loop().call_later(self._drain.seconds, self.handle_exit, number, None)
        _log.info("told to stop: not ready any more, and no more requests are accepted in %g s", self._drain.seconds)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Accept nothing more, and hold nobody who waits for people."""
        super().handle_exit(sig, frame)
        self._drain.end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; after a second signal without waiting for connections, but the application still ends in order.

        Requests that are cut off at the end of the grace record what their Primary said, before the store is closed.
        """
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()
        elif cut := set(self.server_state.tasks):
            await asyncio.wait(cut, timeout=_RECORDING)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port} ({error.strerror}); give another --port") from error


# --- Connections, and the limits on them ---


Phase = Literal["idle", "head", "body", "serving", "draining", "refused"]
_REASONS = {
    400: "Bad Request", 408: "Request Timeout", 413: "Content Too Large", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 503: "Service Unavailable",
}  # fmt: skip
_OTHER_FILES = 256
_MOST_PIPELINED = 100
_LINGER = 2.0
_MOST_DISCARDED = 2**24
_SEND_BUFFER = 2**17  # of the kernel: what a peer does not read should hold back the model, not fill memory
_UNFINISHED = 64  # of the largest bodies may wait in memory, and as many bytes that nobody reads
_PORT = re.compile(r"(\d+(?:\.\d+){3}|\[.*\]):\d+")


class Connections:
    """All connections of one server, and the limits on them."""

    def __init__(self, config: GatewayConfig, metrics: Metrics) -> None:
        self.config = config
        self._most = descriptors_for(config)
        self.largest_message = config.max_body + config.max_body // 8 + 2**16  # with what chunks add
        self._metrics = metrics
        self._open: set[GuardedProtocol] = set()
        self._addresses: Counter[str] = Counter()
        self._proxies = [ipaddress.ip_network(proxy) for proxy in config.trusted_proxies]
        self._unfinished = 0
        self._receiving: dict[GuardedProtocol, None] = {}  # in the order in which their bodies began
        self._sweep: asyncio.TimerHandle | None = None
        times = (config.header_timeout, config.body_timeout, config.idle_timeout, config.write_timeout, 4.0)
        self._every = min(times) / 4
        metrics.connections.set_function(lambda: len(self._open))

    def admit(self, connection: "GuardedProtocol", host: str) -> tuple[int, str, str] | None:
        """Count a new connection; return why it is refused, if it is: status, reason and message."""
        if len(self._open) >= self._most and not self._make_room():
            return 503, "full", f"{len(self._open)} connections are open, the most this gateway keeps; try again later"
        if self.is_proxy(host):
            connection.proxied = True
        elif not self.take(connection, host):
            return 429, "per_address", f"this address has {self.config.connections_per_address} connections; reuse them"
        self._open.add(connection)
        if self._sweep is None:
            self._sweep = connection.loop.call_later(self._every, self.sweep)
        return None

    def is_proxy(self, host: str) -> bool:
        """Return whether an address may speak for others."""
        address = address_of(host) if self._proxies else None
        return address is not None and any(address in network for network in self._proxies)

    def take(self, connection: "GuardedProtocol", host: str) -> bool:
        """Count a connection, or a proxy's request, for an address; return whether that is within the limit."""
        name = group_of(host) if ":" in host else host
        if self._addresses[name] >= self.config.connections_per_address:
            return False
        self._addresses[name] += 1
        connection.addresses.append(name)
        return True

    def give(self, name: str) -> None:
        """Take back one count for an address."""
        self._addresses[name] -= 1
        if self._addresses[name] <= 0:
            del self._addresses[name]

    def leave(self, connection: "GuardedProtocol") -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self.finished(connection)
        while connection.addresses:
            self.give(connection.addresses.popleft())

    def received(self, connection: "GuardedProtocol", size: int) -> None:
        """Count bytes of a body that is not whole; if too many wait, those that began first go."""
        connection.held += size
        self._receiving[connection] = None
        self._unfinished += size
        while self._unfinished > _UNFINISHED * self.config.max_body:
            oldest = next(iter(self._receiving))
            self.closed("unfinished")
            oldest.refuse(408, "too many bodies are unfinished; send yours faster")
            self.finished(oldest)

    def finished(self, connection: "GuardedProtocol") -> None:
        """Stop counting the bytes of a body."""
        self._unfinished -= connection.held
        connection.held = 0
        self._receiving.pop(connection, None)

    def closed(self, reason: str) -> None:
        """Count a connection that was refused or closed."""
        self._metrics.connections_closed.labels(reason).inc()

    def sweep(self) -> None:
        """Close connections whose peer took too long, and those that leave too much unread."""
        self._sweep = None
        unread: list[GuardedProtocol] = []
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._open):
            connection.check(now)
            if connection.flow.write_paused:
                unread.append(connection)
        self._limit_unread(unread)
        if self._open:
            self._sweep = loop.call_later(self._every, self.sweep)

    def _limit_unread(self, unread: Iterable["GuardedProtocol"]) -> None:
        sizes = {connection: connection.transport.get_write_buffer_size() for connection in unread}
        total = sum(sizes.values())
        for connection in sorted(sizes, key=_seniority):
            if total <= _UNFINISHED * self.config.max_body:
                return
            total -= sizes[connection]
            connection.cut("unread")

    def _make_room(self) -> bool:
        """Close the connections that have waited longest without a request; return whether there were any."""
        waiting = sorted((connection for connection in self._open if connection.is_waiting()), key=_seniority)
        for connection in waiting[: 1 + len(waiting) // 100]:
            connection.cut("full")
            self.leave(connection)
        return bool(waiting)


def _seniority(connection: "GuardedProtocol") -> float:
    return float("inf") if connection.since is None else connection.since


def descriptors_for(config: GatewayConfig) -> int:
    """Raise the limit on open files to what the connections need; return how many of them it allows.

    A request in flight may have two connections to models, and the process has files of its own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = 2 * config.max_in_flight + _OTHER_FILES
    needed = config.max_connections + others
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return config.max_connections
    allowed = max(soft - others, soft // 2)
    _log.warning(
        "max_connections is %d, and only %d fit into the limit of %d open files: raise it (ulimit -n) to %d",
        config.max_connections, allowed, soft, needed,
    )  # fmt: skip
    return allowed


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, without port or zone; None if the text is not one."""
    with_port = _PORT.fullmatch(host)
    bare = (with_port[1] if with_port else host).strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def group_of(host: str) -> str:
    """Return what counts as one address: a network of 64 bits for IPv6, since a peer usually has a whole one."""
    address = address_of(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host if address is None else str(address)


class ServerSettings(uvicorn.Config):
    """How the server runs an application, and the connections it keeps."""

    def __init__(self, app: ASGIApp, connections: Connections, grace: int = 30) -> None:
        super().__init__(
            app, access_log=False, log_config=None, log_level="warning", http=GuardedProtocol, ws="none",
            lifespan="on", timeout_graceful_shutdown=grace, server_header=False, date_header=False,
            proxy_headers=False,  # nothing but the limits above depends on the caller's address
        )  # fmt: skip
        self.guard = connections
        self.served = app


class _JoinedWrites(asyncio.Transport):
    """A transport as a response sees it: the head leaves together with what follows it, in one system call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self.head: bytes | None = None  # empty while the head of a response is expected

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hold a head; write anything else after the head that is held."""
        if self.head == b"" and data[:12] != b"HTTP/1.1 100":
            self.head = bytes(data)
        elif self.head:
            self._transport.write(self.head + data)
            self.head = None
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write a head that nothing follows."""
        if self.head:
            self.write(b"")

    def close(self) -> None:
        """Close once everything is written."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether it is closed or closing."""
        return self._transport.is_closing()


class GuardedProtocol(HttpToolsProtocol):
    """HTTP within limits, whose own errors have the shape of all others.

    Attributes:
        phase: what is going on.
        since: when the sweep first saw it; None until then.
        held: bytes of an unfinished body that are in memory.
        proxied: whether the peer is a trusted proxy, whose requests are counted for the addresses it names.
        addresses: for which this connection is counted, once for each request if it is a proxy's.
    """

    def __init__(
        self,
        config: ServerSettings,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.guard = config.guard
        self.phase: Phase = "idle"
        self.since: float | None = None
        self.held = 0
        self.proxied = False
        self.addresses: deque[str] = deque()
        self._unread_since: float | None = None
        self._answering: RequestResponseCycle | None = None
        self._served_app = config.served
        self._largest_head = config.guard.config.max_header
        self._room = self._largest_head  # bytes until what is being received is too large
        self._parse = self.parser.feed_data  # pyright: ignore[reportOptionalMemberAccess]

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Admit a connection, or refuse it at once."""
        super().connection_made(transport)
        self._joined = _JoinedWrites(transport)
        plain: socket.socket | None = transport.get_extra_info("socket")
        if plain is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        refusal = self.guard.admit(self, self.client[0] if self.client else "")
        if refusal is not None:
            self.guard.closed(refusal[1])
            self.refuse(refusal[0], refusal[2])
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.guard.leave(self)
        self._hang_up()
        del self._parse
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what arrives, up to the limit on its size."""
        if self.phase == "refused":
            self._discard(data)
            return
        room = self._room - len(data)
        if room < 0:
            self._feed_in_parts(data)
            return
        self._room = room
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.guard.closed("malformed")
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade:  # to another protocol: answered in this one, as HTTP asks
            self.cycle.keep_alive = False
        if self.phase == "body":
            self.guard.received(self, len(data))

    def _feed_in_parts(self, data: bytes) -> None:
        """Parse up to the limit; go on only if something was complete by then."""
        fits, self._room = self._room, 0
        self._feed(data[:fits])
        if self._room:
            self.data_received(data[fits:])
        elif self.phase == "draining":
            self._abort()
        elif self.phase == "body":
            self.guard.closed("body_too_large")
            self.refuse(413, f"the body is larger than {self.guard.config.max_body} bytes")
        elif self.phase != "refused":
            self.guard.closed("header_too_large")
            self.refuse(431, f"the headers are larger than {self._largest_head} bytes (max_header)")

    def _discard(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0:
            self._abort()

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        super().on_message_begin()
        self.phase, self.since = "head", None

    def on_headers_complete(self) -> None:
        """Note that the body begins, and whose request a proxy passes on."""
        self.phase, self.since = "body", None
        self._room = self.guard.largest_message
        if self.proxied:
            self.app = self._served_app if self._counted() else _too_many_requests  # pyright: ignore[reportUnknownMemberType]
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise ValueError("too many requests at once on one connection")  # the parser stops, and so do we
        super().on_headers_complete()
        self.headers = []  # trailers are no headers

    def _counted(self) -> bool:
        """Count a proxy's request for the last address it names that is not a proxy itself."""
        named = b",".join(value for name, value in self.headers if name == b"x-forwarded-for").decode("latin-1")
        hosts = [host.strip() for host in named.split(",") if host.strip()]
        callers = [host for host in hosts if not self.guard.is_proxy(host)]
        if callers and self.guard.take(self, callers[-1]):
            return True
        self.addresses.append("")  # not counted
        if callers:
            self.guard.closed("per_address")
        return not callers

    def on_message_complete(self) -> None:
        """Note that the request is whole."""
        super().on_message_complete()
        self.phase, self.since = "idle" if self.cycle.response_complete else "serving", None
        self._room = self._largest_head
        if self.held:
            self.guard.finished(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._joined.head = b""
        self._answering = cycle
        cycle.transport = self._joined
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        self._joined.flush()
        self.server_state.total_requests += 1
        if self.proxied:
            self.guard.give(self.addresses.popleft())
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.phase == "serving":
            self.phase, self.since = "idle", None
        elif self.phase == "body":
            self._forget("draining")

    def _forget(self, phase: Phase) -> None:
        """Read and forget the rest of a request, for a moment."""
        self.phase, self.since = phase, None
        self._room = _MOST_DISCARDED
        self.guard.finished(self)
        self.flow.resume_reading()  # or the peer's leaving is never noticed

    def resume_writing(self) -> None:
        """Note that the peer reads."""
        super().resume_writing()
        self._unread_since = None

    def shutdown(self) -> None:
        """Close once the request in flight has been answered; one that is incomplete is dropped."""
        for cycle in (self._answering, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:
                cycle.send_500_response = partial(_send_cut_off, cycle.send)
        if self.phase in ("body", "draining", "refused"):
            self.transport.close()
        else:
            super().shutdown()

    def is_waiting(self) -> bool:
        """Return whether there is no request to answer: none is whole, or it was refused."""
        return self.phase == "refused" or (self.phase in ("idle", "head", "draining") and not self._is_answering())

    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def check(self, now: float) -> None:
        """Close the connection if its peer has taken too long."""
        self._check_reading(now)
        if self.transport.is_closing():
            return
        if self.phase == "serving" or self._holds_back():
            self.since = None  # it is our turn
        elif self.since is None:
            self.since = now
        elif now - self.since > self._allowed():
            self._expire()

    def _holds_back(self) -> bool:
        """Return whether we do not read because a request is being answered; after a refusal nothing excuses waiting."""
        return self.flow.read_paused and self.phase != "refused" and self._is_answering()

    def _check_reading(self, now: float) -> None:
        if not (self.flow.write_paused or self.transport.is_closing()):
            return
        if self._unread_since is None:
            self._unread_since = now
        elif now - self._unread_since > self.guard.config.write_timeout:
            self.cut("unread")

    def _allowed(self) -> float:
        limits = self.guard.config
        if self.phase == "body":
            return limits.body_timeout + (self.guard.largest_message - self._room) / limits.body_rate
        return {"idle": limits.idle_timeout, "head": limits.header_timeout}.get(self.phase, _LINGER)

    def _expire(self) -> None:
        late = {"head": "the headers did not arrive in time (header_timeout)",
                "body": "the body did not arrive in time (body_timeout, body_rate)"}.get(self.phase)  # fmt: skip
        self.guard.closed(f"{self.phase}_timeout")
        if late is None:
            self.transport.close()
        else:
            self.refuse(408, late)

    def cut(self, reason: str) -> None:
        """Drop the connection, and what was to be sent."""
        self.guard.closed(reason)
        self._abort()

    def _abort(self) -> None:
        self.phase = "refused"  # whatever else has arrived
        self._hang_up()
        self.transport.abort()

    def _hang_up(self) -> None:
        """Tell the request that is being answered, which may not be the last that arrived, that its caller is gone."""
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
            self.flow.resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Reply 400 to malformed HTTP and close."""
        self.refuse(400, msg)

    def refuse(self, status: int, message: str) -> None:
        """Reply to a request that is not whole, and end the connection; if another is being answered, only end it."""
        ours = self._answering is self.cycle and self.phase == "body" and not self.cycle.response_started
        if self.transport.is_closing() or (self._is_answering() and not ours):
            self._abort()
            return
        code = {400: "invalid_http", 429: "rate_limit_exceeded"}.get(status, _REASONS[status].lower().replace(" ", "_"))
        body = msgspec.json.encode(error_document(message, code=code, status=status))
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
        again = "retry-after: 1\r\n" if status in (429, 503) else ""
        ending = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(f"{head}{again}{ending}".encode() + body)
        self.transport.write_eof()
        self._hang_up()
        self._forget("refused")


async def _send_cut_off(send: Callable[[Any], Awaitable[None]]) -> None:
    """Answer a request that is cancelled because the grace is over, as uvicorn would in plain text."""
    message = (
        "the gateway stopped before this request was answered; send it again, with the same Idempotency-Key if any"
    )
    await _send_error(send, 503, error_document(message, code="stopped", status=503))


async def _too_many_requests(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request that a proxy passes on for an address with too many."""
    document = error_document("this address has too many requests in flight", code="rate_limit_exceeded", status=429)
    await _send_error(send, 429, document)


async def _send_error(send: Callable[[Any], Awaitable[None]], status: int, document: JSONObject) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(document)})


# --- The log of the process ---


MOST_WAITING = 10_000
_TOGETHER = 0.05  # seconds in which lines gather: one write per request would cost as much as deciding
_AT_THE_END = 2.0  # seconds for what still waits when the process ends


class LogLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the log, other than a request's."""

    time: datetime
    level: str
    logger: str
    message: str
    policy: str
    id: str
    exception: str = ""


class LogLines:
    """Writes lines to a file descriptor; adding one never blocks, from any thread.

    Args:
        descriptor: where to.
        dropped: called for each line that is lost because too many wait or the descriptor refuses it.
        most_waiting: how many lines may wait.
    """

    def __init__(
        self, descriptor: int, *, dropped: Callable[[], object] = lambda: None, most_waiting: int = MOST_WAITING
    ) -> None:
        self._descriptor = descriptor
        self._dropped = dropped
        self._most_waiting = most_waiting
        self._waiting: deque[bytes] = deque()
        self._some = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)  # it may be blocked in the end
        self._thread.start()

    def add(self, line: bytes) -> None:
        """Queue a line of JSON."""
        if len(self._waiting) >= self._most_waiting:
            self._dropped()
            return
        self._waiting.append(line)
        if not self._some.is_set():
            self._some.set()

    def close(self) -> None:
        """Write what waits, within a moment; a reader that does not read does not hold up the end."""
        self._closing.set()
        self._some.set()
        self._thread.join(_AT_THE_END)

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._closing.wait(_TOGETHER)
            self._some.clear()
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if lines and not self._write(b"\n".join([*lines, b""])):
                for _ in lines:
                    self._dropped()
            if self._closing.is_set() and not self._waiting:
                return

    def _write(self, data: bytes) -> bool:
        """Write to the descriptor itself: a lock of sys.stderr that is held here would block whoever prints."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # full, closed, or not blocking and without a reader
            return False
        return True


class JSONHandler(logging.Handler):
    """Turns the records of Python's logging into lines; `extra={"policy": ..., "id": ...}` fills those fields."""

    def __init__(self, lines: LogLines) -> None:
        super().__init__()
        self._lines = lines
        self._plain = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record."""
        fault = record.exc_info
        line = LogLine(
            time=datetime.fromtimestamp(record.created, UTC),
            level=record.levelname.lower(),
            logger=record.name,
            message=record.getMessage(),
            policy=str(getattr(record, "policy", "")),
            id=str(getattr(record, "id", "")),
            exception=self._plain.formatException(fault) if fault and fault[0] is not None else "",
        )
        self._lines.add(msgspec.json.encode(line))


@contextmanager
def logging_to(lines: LogLines) -> Generator[None]:
    """Send everything that this process logs, warns of or leaves uncaught through these lines."""
    root, handler = logging.getLogger(), JSONHandler(lines)
    before = (root.handlers[:], root.level, sys.excepthook, threading.excepthook, sys.unraisablehook)
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook, threading.excepthook, sys.unraisablehook = _uncaught, _uncaught_in_thread, _unraisable
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:], level, sys.excepthook, threading.excepthook, sys.unraisablehook = before
        root.setLevel(level)
        lines.close()


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log.critical("the process ends", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    name = "" if args.thread is None else args.thread.name
    _log.error("the thread %s ended", name, exc_info=args.exc_value)


def _unraisable(args: Any) -> None:
    _log.error("%s: %r", args.err_msg or "an error was ignored", args.object, exc_info=args.exc_value)
