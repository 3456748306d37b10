"""Terminal: read single keys from a person, or lines where standard input is not a terminal.

Knows nothing of questions or grades.
"""

import asyncio
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

SKIP = "-"


def has_terminal() -> bool:
    """Tell whether a person can be asked: standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


class Terminal:
    """Prompts for keys, one prompt at a time: a key press at a terminal, the first letter of a line elsewhere."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def key(self, text: str, allowed: str) -> str:
        """Show a text and wait for one of the allowed keys; end of input counts as skipping."""
        async with self._one_at_a_time:
            sys.stderr.write(text)
            sys.stderr.flush()
            while True:
                key = (await self._read()).strip().lower()[:1]
                if key and key in allowed:
                    sys.stderr.write(f"{key}\n")
                    return key

    async def _read(self) -> str:
        """Return the next key or line without blocking the event loop."""
        loop = asyncio.get_running_loop()
        stream = sys.stdin.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        with _key_mode(stream):
            try:
                loop.add_reader(stream, lambda: ready.done() or ready.set_result(None))
            except PermissionError:  # a file or /dev/null, which is always ready
                ready.set_result(None)
            try:
                await ready
            finally:
                loop.remove_reader(stream)
            return _read_next(stream).decode(errors="replace") or SKIP


def _read_next(stream: int) -> bytes:
    """Return one key at a terminal, else one line; empty at the end of input."""
    data = os.read(stream, 1)
    while data and not data.endswith(b"\n") and not os.isatty(stream) and (more := os.read(stream, 1)):
        data += more
    return data


@contextmanager
def _key_mode(stream: int) -> Generator[None]:
    """Deliver keys as they are pressed, if the stream is a terminal; restore its mode afterwards."""
    if not os.isatty(stream):
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(stream)
    tty.setcbreak(stream)
    try:
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
