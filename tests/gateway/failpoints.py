"""A gateway in a process of its own that ends itself with SIGKILL at one exact place: `Process(config, folder)`.

Nothing of this is in the product: the child process wraps some of its functions before it serves. A file says at which
place it is to die, so that it can be armed while it runs, and the process that follows it is not. Children are forked
from a server that has imported everything, which makes a start cheap.
"""

import asyncio
import multiprocessing
import os
import re
import signal
import sys
from contextlib import closing
from pathlib import Path

import aiohttp

from conformal_arbitrage.cli import main
from conformal_arbitrage.gateway import jobs, server  # noqa: F401 - imported once, for all children
from conformal_arbitrage.gateway.jobs import WebhookSender
from conformal_arbitrage.gateway.requests import Attempt
from conformal_arbitrage.gateway.review_queue import VoteCounter
from conformal_arbitrage.store import reviews
from conformal_arbitrage.store.session import Store
from tests.gateway.durability import SECRET

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.gateway.failpoints"])
POINTS = (
    "the vote is kept",
    "the vote is acknowledged",
    "the verdict is kept",
    "the reply is ready",
    "the reply is kept",
    "half of a message is sent",
)


class Fuse:
    """Where a process dies, and until when another one waits: files, so that both sides see them."""

    def __init__(self, folder):
        self._point, self._acknowledged, self._paused = (folder / name for name in ("die-at", "acknowledged", "paused"))

    def arm(self, point):
        self._acknowledged.unlink(missing_ok=True)
        self._point.write_text(point)

    def armed(self, point):
        return self._point.exists() and self._point.read_text() == point

    def reach(self, point):
        """Die here, if this is the place."""
        if self.armed(point):
            self._point.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def acknowledge(self):
        self._acknowledged.touch()

    async def acknowledged(self):
        """Wait until the reviewer has the confirmation of the vote."""
        while not self._acknowledged.exists():
            await asyncio.sleep(0.01)

    def pause(self, paused):
        self._paused.touch() if paused else self._paused.unlink()

    async def resumed(self):
        while self._paused.exists():
            await asyncio.sleep(0.01)


def _wrap(owner, name, wrapper):
    setattr(owner, name, wrapper(getattr(owner, name)))


def _plant(fuse):
    """Let this process die at the place for which it is armed."""

    def running(run):
        async def wrapped(store, operation, *arguments, **options):
            decides = operation is reviews.end and options.get("outcome") is not None
            if decides and fuse.armed("the vote is acknowledged"):
                await fuse.acknowledged()
                fuse.reach("the vote is acknowledged")
            result = await run(store, operation, *arguments, **options)
            if operation is reviews.vote:
                fuse.reach("the vote is kept")
            if decides:
                fuse.reach("the verdict is kept")
            return result

        return wrapped

    def replying(commit):
        async def wrapped(*arguments, reply=None, **options):
            if reply is not None:
                fuse.reach("the reply is ready")
            await commit(*arguments, reply=reply, **options)
            if reply is not None:
                fuse.reach("the reply is kept")

        return wrapped

    def posting(post):
        def wrapped(session, url, *, data, headers, **options):
            async def half():
                yield data[: len(data) // 2]
                fuse.reach("half of a message is sent")

            if fuse.armed("half of a message is sent"):
                return post(session, url, data=half(), headers={**headers, "Content-Length": str(len(data))}, **options)
            return post(session, url, data=data, headers=headers, **options)

        return wrapped

    _wrap(Store, "run", running)
    _wrap(Attempt, "commit", replying)
    _wrap(aiohttp.ClientSession, "post", posting)


def _let_wait(fuse):
    """Let this process neither count votes nor send messages while it is paused: another one is to come first."""

    def waiting(work):
        async def wrapped(*arguments):
            await fuse.resumed()
            return await work(*arguments)

        return wrapped

    _wrap(VoteCounter, "turn", waiting)
    _wrap(WebhookSender, "send_due", waiting)


def _serve(config, folder, environment, doomed, writer):
    os.environ.update(environment)
    os.dup2(writer.fileno(), 1)
    with Path(config).with_suffix(".log").open("ab") as errors:
        os.dup2(errors.fileno(), 2)
    jobs.WEBHOOKS_EVERY = 0.05
    (_plant if doomed else _let_wait)(Fuse(folder))
    sys.stdout = os.fdopen(1, "w")
    sys.argv = ["arbitrage", "serve", "--config", str(config), "--port", "0"]
    main()


class Process:
    """A gateway that dies where its fuse says, or one beside it that survives."""

    def __init__(self, config, folder, *, doomed=True, **environment):
        self._arguments = (config, folder, {"ARBITRAGE_SECRET": SECRET, **environment}, doomed)
        self._process = None

    async def start(self):
        self._announced, writer = CONTEXT.Pipe(duplex=False)
        with closing(writer):
            self._process = CONTEXT.Process(target=_serve, args=(*self._arguments, writer), daemon=True)
            await asyncio.to_thread(self._process.start)
        line = await asyncio.to_thread(_first_line, self._announced.fileno())
        match = re.match(r"Listening on (http://\S+)\. ", line)
        assert match is not None, (line, Path(self._arguments[0]).with_suffix(".log").read_text()[-2000:])
        self.url = match[1]
        return self

    async def died(self):
        """Wait until it has ended itself."""
        await asyncio.to_thread(self._process.join, 120)
        assert self._process.exitcode == -signal.SIGKILL, self._process.exitcode
        self._close()

    async def stop(self):
        """Stop it, if it runs."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.join, 60)
            self._process.kill()
            await asyncio.to_thread(self._process.join)
            self._close()

    def _close(self):
        self._announced.close()
        self._process.close()
        self._process = None


def _first_line(descriptor):
    """The first line that the process announces; the rest fits into the pipe."""
    text = b""
    while b"\n" not in text and (part := os.read(descriptor, 4096)):
        text += part
    return text.decode()
