"""HumanScorer: a person at the terminal, who sees exactly the options that are shown and presses a key.

Knows nothing of what the question is about.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from string import ascii_lowercase

from conformal_arbitrage.errors import UpstreamError
from conformal_arbitrage.scorers.base import Identity, Scores
from conformal_arbitrage.scorers.function import call_for, query_from
from conformal_arbitrage.types import Query, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply

SKIP = "-"


class Terminal:
    """Keys from a person: one key at a time at a terminal, one line each where input is not a terminal."""

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
        """The next key or line, without holding up other work."""
        loop = asyncio.get_running_loop()
        stream = sys.stdin.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        with _keys(stream):
            try:
                loop.add_reader(stream, lambda: ready.done() or ready.set_result(None))
            except PermissionError:  # a file or /dev/null, which is always ready
                ready.set_result(None)
            try:
                await ready
            finally:
                loop.remove_reader(stream)
            return _next(stream).decode(errors="replace") or SKIP


def _next(stream: int) -> bytes:
    """One key at a terminal, else one line; empty at the end of input."""
    data = os.read(stream, 1)
    while data and not data.endswith(b"\n") and not os.isatty(stream) and (more := os.read(stream, 1)):
        data += more
    return data


@contextmanager
def _keys(stream: int) -> Generator[None]:
    """Deliver keys as they are pressed, if this is a terminal."""
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


class HumanPort:
    """A person as a port."""

    def __init__(self, terminal: Terminal, name: str) -> None:
        self._terminal = terminal
        self.origin = f"human:{name}"  # replies are stored under it: nobody is taken for another person

    async def call(self, call: Call) -> Reply:
        """Show the options and take the key."""
        query = query_from(call)
        keys = ascii_lowercase[: len(query.actions)]
        if len(query.actions) > len(ascii_lowercase):
            raise UpstreamError(f"{len(query.actions)} options are too many for the keys a to z")
        options = "\n".join(f"  {key}  {action}" for key, action in zip(keys, query.actions, strict=True))
        chosen = await self._terminal.key(f"\n{query.text}\n\n{options}\n\nKey, {SKIP} to skip: ", keys + SKIP)
        if chosen == SKIP:
            raise UpstreamError("the person skipped this question", spent=Spent(calls=1, cost=None))
        return Reply(document={"choice": keys.index(chosen)}, spent=Spent(calls=1, cost=None))


class HumanScorer:
    """A person's choice: 1 for it, 0 for the rest.

    Args:
        name: who answers, such as "support team"; part of the identity.
        terminal: where keys come from.
        through: wraps the call, such as a cache that lets a person go on another day.
    """

    def __init__(
        self, *, name: str, terminal: Terminal | None = None, through: Callable[[Port], Port] = lambda port: port
    ) -> None:
        self._name = name
        self._port = through(HumanPort(terminal or Terminal(), name))

    @property
    def identity(self) -> Identity:
        """Who answers."""
        return {"kind": "human", "name": self._name, "option_order": "as given"}

    async def score(self, query: Query) -> Scores:
        """What the person chose."""
        reply = await self._port.call(call_for(query))
        chosen = int(reply.document["choice"])
        values = tuple(float(k == chosen) for k in range(len(query.actions)))
        return Scores(values=values, spent=reply.spent, raw=query.actions[chosen])
