"""From a configuration to a running gateway on a port.

Knows nothing of routes.
"""

import asyncio
import gc
import hashlib
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway.app import Parts, create_app
from conformal_arbitrage.gateway.chat_replies import error_body
from conformal_arbitrage.gateway.guards import (
    GuardianLimits,
    LimitedAnswerer,
    LimitedScorer,
    check_binding,
)
from conformal_arbitrage.gateway.http import encoded
from conformal_arbitrage.gateway.policy_table import Pair, PolicyTable, check_policies
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import Config, Form
from conformal_arbitrage.scorelog.files import write_bytes
from conformal_arbitrage.store import open_store

_STOPPING = (signal.SIGTERM, signal.SIGINT)
Started = Callable[[str], None]
Log = Callable[[str], None]


def _unlogged(_: str) -> None: ...


def database_of(config: Config) -> str:
    """Where the record is: a URL, or a file beside the configuration; {NAME} comes from the environment."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(f"[gateway] database: the environment variable {found[1]} is not set")
        return os.environ[found[1]]

    named = re.sub(r"\{(\w+)\}", value, config.gateway.database)
    return named if "://" in named else str(Path(config.folder) / named)


def secret_of(config: Config) -> bytes:
    """The server's secret, which keys digests and coins: from ARBITRAGE_SECRET, or a file made beside the record."""
    given = os.environ.get("ARBITRAGE_SECRET")
    if given:
        return hashlib.sha256(given.encode()).digest()
    database = database_of(config)
    if "://" in database:
        raise ConfigError("several gateways on one database share a secret; set ARBITRAGE_SECRET for each")
    path = Path(database + ".secret")
    if not path.exists():
        write_bytes(path, secrets.token_bytes(32), private=True)
    return path.read_bytes()


def pairs_of(models: Models) -> dict[Form, Pair]:
    """Both models in the forms of the policies, the Guardian under the gateway's limits."""
    config = models.config
    limits = GuardianLimits(config.gateway)
    found: dict[Form, Pair] = {}
    forms: set[Form] = {config.form_of(name) for name in config.policies}
    for form in forms:
        if form == "menu":
            guardian = LimitedScorer(models.scorer("guardian"), limits)
            found[form] = Pair(form=form, primary=models.scorer("primary"), guardian=guardian)
        else:
            careful = LimitedAnswerer(models.answerer("guardian"), limits)
            found[form] = Pair(form=form, primary=models.answerer("primary"), guardian=careful)
    return found


def identities_of(config: Config, policy: str) -> dict[str, Any]:
    """Who makes the scores of a policy under this configuration."""
    return pairs_of(Models(config))[config.form_of(policy)].identities


class Lines:
    """Lines for a stream, written together within a twentieth of a second: a write a request costs as much as deciding."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: list[str] = []

    def add(self, line: str) -> None:
        """Write a line soon."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(0.05, self.flush)
        self._waiting.append(line)

    def flush(self) -> None:
        """Write what waits; what the stream does not take is lost, and requests go on."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            with suppress(OSError, ValueError):
                self._stream.write("\n".join([*waiting, ""]))
                self._stream.flush()


@asynccontextmanager
async def application(config: Config, log: Log = _unlogged) -> AsyncGenerator[ASGIApp]:
    """The application of a configuration, with its models and its record open.

    Args:
        config: the whole configuration.
        log: takes a line of JSON for every request.
    """
    check_policies(config)
    store = await open_store(database_of(config))
    try:
        async with Models(config, Extras(breaker=True)) as models:
            policies = PolicyTable(config, store, pairs_of(models))
            await policies.load()
            has_keys = bool(await store.keys())
            check_binding(config.gateway.host, has_keys=has_keys)
            secret = secret_of(config)
            yield create_app(
                Parts(
                    config=config,
                    store=store,
                    policies=policies,
                    secret=secret,
                    breakers=models.breakers,
                    log=log,
                )
            )
    finally:
        await store.close()


class _Protocol(HttpToolsProtocol):
    """HTTP whose refusals look like all others."""

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and hang up."""
        body = encoded(error_body(msg, code="invalid_http", status=400))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def server_settings(app: ASGIApp) -> uvicorn.Config:
    """How the server runs an application."""
    return uvicorn.Config(
        app, access_log=False, log_level="warning", http=_Protocol, lifespan="on",
        timeout_graceful_shutdown=30, server_header=False, date_header=False,
        proxy_headers=False,  # no rule depends on where a caller says it is
    )  # fmt: skip


@asynccontextmanager
async def running(config: Config, log: Log = _unlogged) -> AsyncGenerator["tuple[str, asyncio.Task[None]]"]:
    """A gateway that listens: its address, and the task that ends when it is told to stop."""
    async with application(config, log) as app:
        listening = _listen(config.gateway.host, config.gateway.port)
        server = _Server(server_settings(app))
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        host, port = listening.getsockname()[:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}", task
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """A server that ends well on a signal: what is open is closed, and the process exits as it would otherwise."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take SIGTERM and SIGINT as the wish to stop, without raising them again afterwards."""
        loop = asyncio.get_running_loop()
        taken = _STOPPING if threading.current_thread() is threading.main_thread() else ()
        for number in taken:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port} ({error.strerror}); give another --port") from error


def run(config: Config, *, started: Started) -> None:
    """Serve on an event loop of uvloop's, which uvicorn only makes where it starts the loop itself."""

    def quiet(url: str) -> None:
        gc.collect()
        gc.freeze()  # what is there now stays; collections look at what requests leave behind
        gc.set_threshold(10_000, 20, 50)
        started(url)

    uvloop.run(serve(config, started=quiet))


async def serve(config: Config, *, started: Started) -> None:
    """Serve until told to stop, with a log on stderr; on SIGTERM requests under way are finished first."""
    lines = Lines(sys.stderr)
    try:
        async with running(config, lines.add) as (url, task):
            started(url)
            await task
    finally:
        lines.flush()
