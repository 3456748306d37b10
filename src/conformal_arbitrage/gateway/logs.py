"""What the gateway process logs: lines of JSON on a file descriptor, written by a thread, so that no request ever waits.

A reader that is slow, or gone, costs lines: they queue up to a limit, and what comes after is dropped and counted.

Knows nothing of requests.
"""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import msgspec
from msgspec import Struct

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
