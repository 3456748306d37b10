"""The server process: uvicorn, logs, and the preparation of a database."""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
import uvloop
from msgspec import Struct
from starlette.types import ASGIApp

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway.auth import admit_first_key, check_binding
from conformal_arbitrage.gateway.connections import Connections, ServerSettings
from conformal_arbitrage.gateway.decider import calls_limit, spending_limit
from conformal_arbitrage.gateway.gateway import Drain, Parts, create_app, start_notes
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.people import ReviewQueue
from conformal_arbitrage.gateway.policies import (
    PolicyTable,
    check_policies,
    check_spending,
    identities_of_pair,
    pairs_of,
)
from conformal_arbitrage.gateway.renewer import Renewer
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import ROLES, Config
from conformal_arbitrage.live.database import database_of, existing_secret, open_record
from conformal_arbitrage.live.people import review_terms
from conformal_arbitrage.live.webhooks import webhooks_of
from conformal_arbitrage.models.kinds import has_terminal
from conformal_arbitrage.models.wrappers import Breaker
from conformal_arbitrage.store import integrity, keys
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.store.session import Store, StoreSchema

if TYPE_CHECKING:
    from conformal_arbitrage.gateway.telemetry import Telemetry


# --- What the gateway process logs ---


MOST_WAITING = 10_000
_TOGETHER = 0.05  # seconds in which lines gather: one write per request would cost as much as deciding
_AT_THE_END = 2.0  # seconds for what still waits when the process ends
_log = logging.getLogger("conformal_arbitrage.gateway")


class LogLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the log, other than a request's."""

    time: datetime
    level: str
    logger: str
    message: str
    policy: str
    id: str
    exception: str = ""


def _ignored() -> None: ...


class LogLines:
    """Writes lines to a file descriptor; adding one never blocks, from any thread.

    Args:
        descriptor: where to.
        dropped: called for each line that is lost because too many wait or the descriptor refuses it.
        most_waiting: how many lines may wait.
    """

    def __init__(
        self, descriptor: int, *, dropped: Callable[[], object] = _ignored, most_waiting: int = MOST_WAITING
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


# --- From a configuration to a running gateway on a port ---


_STOPPING = (signal.SIGTERM, signal.SIGINT)
_CLOSE = (b"connection", b"close")
_RECORDING = 5.0
Started = Callable[[str], None]
Log = Callable[[bytes], None]


def _unlogged(_: bytes) -> None: ...


def secret_of(config: Config) -> ProjectSecret:
    """Return the project's secret: ARBITRAGE_SECRET, or the file arbitrage.secret, created beside the configuration."""
    secret = existing_secret(config)
    if secret is not None:
        return secret
    if "://" in database_of(config):
        raise ConfigError("gateways that share a database share a secret; set ARBITRAGE_SECRET for each")
    return ProjectSecret.create(config.folder)


def identities_of(config: Config, policy: str) -> dict[str, Any]:
    """Return the identities of a policy's models, and of its groups, under this configuration."""
    pair = pairs_of(Models(config.for_policy(policy), Extras(keyless=True)))[policy]
    return identities_of_pair(pair, config.policies[policy].group)


@asynccontextmanager
async def application(
    config: Config,
    log: Log = _unlogged,
    metrics: Metrics | None = None,
    clock: Callable[[], float] = time.time,
    *,
    drain: Drain | None = None,
    migrating: bool = True,
) -> AsyncGenerator[ASGIApp]:
    """Open a configuration's models and store, and yield the application over them.

    Args:
        config: the whole configuration.
        log: takes a line of JSON for every request.
        metrics: where things are counted; without it, only requests and decisions are.
        clock: the time by which the outcomes of audits are due, in seconds since 1970.
        drain: whether the gateway is about to stop.
        migrating: whether to bring the database to this release and configuration; if not, `prepare` has done it.
    """
    check_policies(config)
    _check_people(config)
    secret, webhooks = secret_of(config), webhooks_of(config)
    store = await open_record(config, migrating=migrating)
    spending = spending_limit(store, config.gateway)
    telemetry = _telemetry() if config.gateway.otel else None
    try:
        await integrity.seal(store, everything=True)
        traced, share = None if telemetry is None else telemetry.port, config.gateway.live_share
        extras = Extras(breaker=True, guardian_spending=spending, live_share=share, traced=traced)
        async with Models(config, extras) as models:
            await admit_first_key(store)
            queue = ReviewQueue(store, config.teams, secret.keys[0])
            policies = await _policies(config, store, models, secret, queue, installing=migrating)
            renewer = Renewer(config, store, policies, secret, clock)
            await renewer.import_logs()
            check_binding(config.gateway.host, has_keys=bool(await store.run(keys.list_all)))
            yield create_app(
                Parts(
                    config=config,
                    store=store,
                    policies=policies,
                    secret=secret.keys[0],
                    renewer=renewer,
                    breakers=models.breakers,
                    guardian_breakers=_breakers_of_guardians(config, models),
                    log=log,
                    metrics=metrics or Metrics(),
                    clock=clock,
                    traced=None if telemetry is None else telemetry.route,
                    webhooks=webhooks,
                    drain=drain or Drain.of(config.gateway),
                    queue=queue,
                )
            )
    finally:
        if spending is not None:
            await spending.close()
        await store.close()
        if telemetry is not None:
            await telemetry.close()


async def _policies(
    config: Config, store: Store, models: Models, secret: ProjectSecret, queue: ReviewQueue, *, installing: bool
) -> PolicyTable:
    """Load a configuration's policies, once it is clear that their Guardians' limits can be kept."""
    pairs = pairs_of(models, calls_limit(store, config.gateway), queue)
    check_spending(config, models)
    policies = PolicyTable(config, store, pairs, secret)
    await policies.load(installing=installing)
    return policies


def _telemetry() -> "Telemetry":
    """Set up OpenTelemetry.

    Raises:
        ConfigError: its packages are not installed.
    """
    try:
        from conformal_arbitrage.gateway.telemetry import Telemetry
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"[gateway] otel = true needs {error.name}: run `pip install '.[otel]'` in a clone, or remove the setting"
        ) from error
    return Telemetry()


def _breakers_of_guardians(config: Config, models: Models) -> dict[str, list[Breaker]]:
    """Return the breakers of every policy's Guardian."""
    breakers = models.guardian_breakers
    return {policy: breakers.get(config.section_of(policy, "guardian"), []) for policy in config.policies}


def _check_people(config: Config) -> None:
    """Refuse a person as a model where there is neither a team nor a terminal to ask at.

    Raises:
        ConfigError: a person without a team is configured, and standard input is not a terminal.
    """
    used = [
        config.section_of(policy, role)
        for policy in config.policies
        for role in ROLES
        if role == "primary" or review_terms(config, policy) is None
    ]
    people = [section for section in used if config.section(section).is_person]
    if people and not has_terminal():
        name = config.section(people[0]).label
        raise ConfigError(
            f"[{people[0]}] is a person, and there is no terminal to ask at: let a team answer as the Guardian, with a "
            f"section [teams.{json.dumps(name)}] and members = [...], or start the gateway at a terminal"
        )


@asynccontextmanager
async def running(
    config: Config, log: Log = _unlogged, metrics: Metrics | None = None, *, migrating: bool = True
) -> AsyncGenerator["tuple[str, asyncio.Task[None]]"]:
    """Run a gateway; yield its address, and the task that ends when it is told to stop."""
    counted, drain = metrics or Metrics(), Drain.of(config.gateway)
    async with application(config, log, counted, drain=drain, migrating=migrating) as app:
        listening = _listen(config.gateway.host, config.gateway.port)
        host, port = listening.getsockname()[:2]  # a signal may have closed it as soon as the server has started
        settings = ServerSettings(app, Connections(config.gateway, counted), config.gateway.grace)
        server = _Server(settings, drain)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}", task
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """A server that shuts down on a signal without raising it again, so that everything is closed properly."""

    def __init__(self, config: ServerSettings, drain: Drain) -> None:
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


def run(config: Config, *, started: Started, migrating: bool = True) -> None:
    """Serve on uvloop, which uvicorn sets up only where it starts the event loop itself."""

    def quiet(url: str) -> None:
        gc.collect()
        gc.freeze()  # what exists now stays; later collections only visit what requests leave behind
        gc.set_threshold(10_000, 20, 50)
        started(url)

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
        async with running(config, lines.add, metrics, migrating=migrating) as (url, task):
            started(url)
            for note in start_notes(config):
                _log.warning(note)
            await task


# --- prepare ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What was done to a database.

    Attributes:
        schema: its tables, now and before.
        key: the id of the first key, if it was created.
        installed: the versions that certificate files became.
    """

    schema: StoreSchema
    key: str | None
    installed: tuple[PolicyVersion, ...]


async def prepare(config: Config) -> Preparation:
    """Migrate the tables, create the first key, and install the certificate files that changed; call no model.

    Raises:
        ArbitrageError: a certificate cannot be used with these models, or the database cannot be used.
    """
    check_policies(config)
    secret = secret_of(config)
    store = await open_record(config)
    try:
        await integrity.seal(store, everything=True)
        key = await admit_first_key(store)
        policies = PolicyTable(config, store, pairs_of(Models(config, Extras(keyless=True))), secret)
        installed = await policies.install_files()
        return Preparation(schema=store.schema, key=key, installed=tuple(installed))
    finally:
        await store.close()
