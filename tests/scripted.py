"""A real HTTP server on loopback whose replies a test writes: `async with Upstream(reply) as upstream`."""

import json

from aiohttp import web


class Upstream:
    """Answers every POST with what `reply(path, body, number)` returns: a JSON document, (status, document), a
    web.Response, or a Stream; it may be async. Keeps the bodies (as bytes in `sent`) and headers it got."""

    def __init__(self, reply):
        self.reply = reply
        self.bodies = []
        self.sent = []
        self.headers = []
        self.under_way = 0
        self.most_at_once = 0

    async def __aenter__(self):
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    async def __aexit__(self, *exc):
        await self._runner.cleanup()

    async def _handle(self, request):
        self.sent.append(await request.read())
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            reply = self.reply(request.path.removeprefix("/v1"), body, len(self.bodies) - 1)
            reply = await reply if hasattr(reply, "__await__") else reply
            reply = await reply.sent(request) if isinstance(reply, Stream) else reply
        finally:
            self.under_way -= 1
        if isinstance(reply, web.StreamResponse):
            return reply
        status, document = reply if isinstance(reply, tuple) else (200, reply)
        return web.Response(status=status, text=json.dumps(document), content_type="application/json")


class Stream:
    """A reply of server-sent events, its bytes sent as an async iterator gives them; `cut` breaks it off in the end."""

    def __init__(self, portions, *, cut=False):
        self._portions = portions
        self._cut = cut

    async def sent(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        async for portion in self._portions:
            await response.write(portion)
        if self._cut:
            request.transport.abort()
        return response


def chunk(delta, *, model="m", finish=None):
    """A chunk of a chat completion as endpoints send it; one with the tokens has None for a delta."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": choices}


def ending(*, model="m", finish="stop", usage=(10, 5)):
    """How a stream ends well: the reason, the tokens and [DONE], as bytes."""
    tokens = completion("", usage=usage)["usage"]
    return sse(chunk({}, model=model, finish=finish), {**chunk(None, model=model), "usage": tokens}, "[DONE]")


def sse(*events):
    """Server-sent events as bytes; a text is sent as it is."""
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def completion(content, *, model="m", finish="stop", logprobs=None, tool_calls=None, usage=(10, 5), reasoning=0):
    """A chat completion as endpoints send it."""
    message = {"role": "assistant", "content": content}
    if tool_calls is not None:
        message["tool_calls"] = tool_calls
    tokens = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}],
        "usage": {**tokens, "completion_tokens_details": {"reasoning_tokens": reasoning}},
    }


def scores(*values, **rest):
    """A completion that holds elicited confidences."""
    return completion(json.dumps({"scores": list(values)}), **rest)
