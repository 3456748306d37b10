"""A receiver of webhooks on loopback, in a thread of its own: `with Receiver(answer) as receiver`."""

import asyncio
import base64
import json
import threading

from aiohttp import web
from standardwebhooks import Webhook

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


class Receiver:
    """Answers every message with `answer(number, request)`: a status, or a response; it may be async.

    Keeps headers and bodies, and checks signatures with the convention's own package."""

    def __init__(self, answer=lambda number, request: 200, secret=SECRET):
        self.answer = answer
        self.verifier = Webhook(secret)
        self.messages = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._run(self._start())
        self.url = f"http://127.0.0.1:{self.port}/hooks?token=in-the-url"
        return self

    def __exit__(self, *exc):
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _handle(self, request):
        self.messages.append((dict(request.headers), await request.read(), request.path))
        answer = self.answer(len(self.messages), request)
        answer = await answer if hasattr(answer, "__await__") else answer
        return answer if isinstance(answer, web.StreamResponse) else web.Response(status=answer)

    def verified(self):
        """The documents of all messages; an error if a signature is wrong."""
        return [self.verifier.verify(body, headers) for headers, body, _ in self.messages]

    def documents(self):
        return [json.loads(body) for _, body, _ in self.messages]


async def silent(number, request):
    """Never answer."""
    await asyncio.sleep(3600)


class Endless:
    """Answers with a body of 100 MB; `sent` is how much of it found a reader."""

    def __init__(self, status=200):
        self.status = status
        self.sent = 0

    async def __call__(self, number, request):
        response = web.StreamResponse(status=self.status, headers={"Content-Length": "100000000"})
        await response.prepare(request)
        for _ in range(1000):
            await response.write(bytes(100_000))
            self.sent += 100_000
        return response
