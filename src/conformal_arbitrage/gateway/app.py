"""create_app: the gateway as an ASGI application, built from arguments.

Knows nothing of files or command lines; `serving` puts it on a port.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from conformal_arbitrage.errors import ArbitrageError, GuardianError, RequestError, StoreError
from conformal_arbitrage.gateway import chat_replies as replies
from conformal_arbitrage.gateway.auditor import Auditor
from conformal_arbitrage.gateway.chat_requests import CompletionRequest, Menu, query_of, read_completion, read_decisions
from conformal_arbitrage.gateway.decider import Decider, Made
from conformal_arbitrage.gateway.guards import Caller, Doorkeeper, Limits, host_of, is_loopback
from conformal_arbitrage.gateway.http import encoded, json_response, read_body
from conformal_arbitrage.gateway.idempotency import Answering, Asked, Replayed, Turn, Work
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.openapi import schema
from conformal_arbitrage.gateway.policy_table import LivePolicy, PolicyTable
from conformal_arbitrage.gateway.record_routes import RecordRoutes
from conformal_arbitrage.gateway.streaming import HEADERS, Deciding, LiveAnswer, Outlet, live_pieces
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.store import new_id
from conformal_arbitrage.store.base import Replay, Scope, Store
from conformal_arbitrage.types import ChatRequest, Query, Spent
from conformal_arbitrage.upstream.base import together
from conformal_arbitrage.upstream.wrappers import Breaker

_ID = b"x-arbitrage-decision-id"
_BUSIEST = ("/v1/chat/completions", "/v1/decisions")
_log = logging.getLogger("conformal_arbitrage.gateway")
Endpoint = Callable[[Request, Caller], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an application is made of; `log` takes a line of JSON for every request."""

    config: Config
    store: Store
    policies: PolicyTable
    secret: bytes
    breakers: Sequence[Breaker]
    log: Callable[[str], None]


def create_app(parts: Parts) -> ASGIApp:
    """The gateway's routes over a store, policies and limits."""
    gateway = Gateway(parts)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        auditing = asyncio.create_task(Auditor(parts.store, parts.policies).run())
        yield
        auditing.cancel()
        with suppress(asyncio.CancelledError):
            await auditing

    records = RecordRoutes(parts.store, parts.policies, parts.config.gateway)
    keyed: list[tuple[str, str, Scope, Endpoint]] = [
        ("POST", "/v1/decisions", "call", gateway.decisions),
        ("POST", "/v1/chat/completions", "call", gateway.completions),
        ("POST", "/v1/responses", "call", gateway.not_served),
        ("GET", "/v1/models", "call", gateway.models),
        ("GET", "/v1/arbitrage/records", "call", records.many),
        ("GET", "/v1/arbitrage/records/{id}", "call", records.one),
        ("POST", "/v1/arbitrage/records/{id}/feedback", "call", records.feedback),
        ("GET", "/v1/arbitrage/policies/{name}", "review", records.policy),
        ("PUT", "/v1/arbitrage/policies/{name}", "admin", records.install),
        ("POST", "/v1/arbitrage/policies/{name}/rollback", "admin", records.rollback),
        ("GET", "/metrics", "review", gateway.figures),
    ]
    guarded = [(method, path, gateway.guarded(path, scope, run)) for method, path, scope, run in keyed]
    routes = [Route(path, route, methods=[method]) for method, path, route in guarded]
    routes += [
        Route("/health/live", _alive),
        Route("/health/ready", gateway.ready),
        Route("/openapi.json", _schema),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=_HANDLERS)
    app.router.redirect_slashes = False
    busiest = {path: route for method, path, route in guarded if method == "POST" and path in _BUSIEST}
    return ServerErrorMiddleware(_Straight(busiest, app), handler=_failed)


class _Straight:
    """Sends what most requests are straight to its route; anything else goes through the application's routing."""

    def __init__(self, routes: Mapping[str, Callable[[Request], Awaitable[Response]]], rest: ASGIApp) -> None:
        self._routes = routes
        self._rest = rest

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._rest(scope, receive, send)
        else:
            response = await route(Request(scope, receive, send))
            await response(scope, receive, send)


class Gateway:
    """The routes that decide."""

    def __init__(self, parts: Parts) -> None:
        self._config = parts.config.gateway
        self._store = parts.store
        self._policies = parts.policies
        self._breakers = parts.breakers
        self._decider = Decider(parts.secret)
        self._metrics = Metrics()
        self._limits = Limits(self._config)
        self._door = Doorkeeper(parts.store)
        self._log = parts.log
        self._answering = Answering(parts.store, self._metrics)

    def guarded(self, path: str, scope: Scope, run: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """A route behind the door: key, host, limits; every error in one shape; one log line."""

        async def route(request: Request) -> Response:
            start = time.perf_counter()
            try:
                count = await self._store.change_count()  # which also shows that the store answers
                await self._door.refresh(count)
                headers = dict(reversed(request.headers.raw))  # of two of a name the first counts
                self._check_source(request.method, headers)
                caller = await self._door.caller(headers.get(b"authorization", b"").decode("latin-1"), scope)
                await self._policies.refresh(count)
                with self._limits.admitted(caller):
                    response = await run(request, caller)
            except ArbitrageError as error:
                response = _refused(error)
            status, id = str(response.status_code), dict(response.raw_headers).get(_ID, b"").decode()
            self._metrics.child(self._metrics.requests, path, status).inc()
            took = time.perf_counter() - start
            self._log(
                f'{{"route": "{request.method} {path}", "status": {status}, "seconds": {took:.4f}, "id": "{id}"}}'
            )
            return response

        return route

    def _check_source(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Without keys a web page could call from this machine's browser: host and content type stop that."""
        if self._door.open_house:
            host = host_of(headers.get(b"host", b"").decode("latin-1"))
            if not is_loopback(host):
                raise RequestError(f"the host {host!r:.80} is not this machine", status=403, code="wrong_host")
        if method in ("POST", "PUT"):
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                raise RequestError("Content-Type must be application/json", status=415, code="content_type")

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._config.max_body)

    async def decisions(self, request: Request, caller: Caller) -> Response:
        """POST /v1/decisions."""
        data = await self._body(request)
        asked = read_decisions(data, self._config)
        policy = self._policies.named(asked.model)

        async def work(turn: Turn) -> Replay:
            start = time.perf_counter()
            queries = [query_of(asked, question, new_id()) for question in asked.questions]
            made = await together([self._decider.menu(policy, query, caller.id) for query in queries])
            await self._refuse_unanswered(made)
            full = policy.settings.expose == "full"
            alpha = policy.alpha
            seen = [replies.arbitrage_object(one.decision, alpha=alpha, full=full) for one in made]
            answers = [
                replies.answer(question, one.decision, extra)
                for question, one, extra in zip(asked.questions, made, seen, strict=True)
            ]
            spent = sum((one.decision.spent for one in made), start=Spent())
            body = {"model": policy.name, "answers": answers, "usage": _decision_usage(spent)}
            headers = replies.headers(made[0].decision, alpha) if len(made) == 1 else {}
            return await self._commit(policy, made, turn, _json_reply(body, headers), start)

        return await self._answer(request, caller, data, policy, work)

    async def completions(self, request: Request, caller: Caller) -> Response:
        """POST /v1/chat/completions."""
        data = await self._body(request)
        asked = read_completion(data, self._config)
        policy = self._policies.named(asked.model)
        text = policy.pair.form == "text" and asked.menu is not None and asked.menu.field is not None
        menu = None if text else asked.menu  # in free text, a schema with one enum is a schema like any other
        outlet = Outlet()

        async def work(turn: Turn) -> Replay:
            start = time.perf_counter()
            live = None
            if asked.stream:
                live = LiveAnswer(policy, turn, outlet, self._metrics, include_usage=asked.include_usage)
            try:
                made = await self._decided(policy, asked, menu, caller, live)
            except GuardianError:
                if live is not None:
                    await live.broken()
                raise
            if live is not None and live.started:
                return await live.finish(made, self._decider.completion(policy, made.decision))
            await self._refuse_unanswered([made])
            full = policy.settings.expose == "full"
            alpha = policy.alpha
            seen = replies.arbitrage_object(made.decision, alpha=alpha, full=full)
            whole = replies.completion(policy.name, made.decision, menu, seen)
            headers = replies.headers(made.decision, alpha)
            reply = _stream_reply(made, whole, headers, asked) if asked.stream else _json_reply(whole, headers)
            return await self._commit(policy, [made], turn, reply, start)

        if asked.stream:
            deciding = asyncio.ensure_future(self._found(request, caller, data, policy, work))
            return await self._streamed(deciding, outlet)
        return await self._answer(request, caller, data, policy, work)

    async def _decided(
        self,
        policy: LivePolicy,
        asked: CompletionRequest,
        menu: Menu | None,
        caller: Caller,
        live: LiveAnswer | None,
    ) -> Made:
        id = new_id()
        if menu is not None:
            query = Query(asked.body["messages"], menu.actions, id=id)
            return await self._decider.menu(policy, query, caller.id, asked.body)
        begin = None if live is None else live.begin
        return await self._decider.text(policy, ChatRequest(asked.body, id=id), caller.id, begin)

    async def _refuse_unanswered(self, made: Sequence[Made]) -> None:
        """In shadow mode a Guardian that failed leaves a record without a choice, and no answer.

        Raises:
            GuardianError: there is such a one.
        """
        failed = [one for one in made if one.decision.action is None]
        if failed:
            await self._store.commit([one.event for one in made])
            raise GuardianError(f"the Guardian could not decide: {failed[0].decision.legs[-1].error}")

    async def _commit(self, policy: LivePolicy, made: list[Made], turn: Turn, reply: Replay, start: float) -> Replay:
        for one in made:
            self._metrics.decided(policy.name, one.decision, audited=one.audit is not None)
        audits = [one.audit for one in made if one.audit is not None]
        await turn.commit([one.event for one in made], audits=audits, reply=reply)
        legs = max(sum(leg.seconds for leg in one.decision.legs) for one in made)
        self._metrics.overhead.observe(max(0.0, time.perf_counter() - start - legs))
        return reply

    async def _answer(self, request: Request, caller: Caller, data: bytes, policy: LivePolicy, work: Work) -> Response:
        found = await self._found(request, caller, data, policy, work)
        return Response(status_code=499) if found is None else _response(found.reply, again=found.again)

    async def _found(
        self, request: Request, caller: Caller, data: bytes, policy: LivePolicy, work: Work
    ) -> Replayed | None:
        """The reply; None if the caller went away before, which is recorded."""
        name = request.headers.get("idempotency-key")
        asked = Asked(caller=caller.id, policy=policy.name, body=data, name=name)
        return await self._answering.answer(asked, work, _gone(request))

    async def _streamed(self, deciding: Deciding, outlet: Outlet) -> Response:
        """Headers wait for the decision, or ten seconds."""
        in_time = await outlet.news(deciding, 0)
        if in_time and not outlet.pieces:
            found = deciding.result()
            if found is None:
                return Response(status_code=499)
            headers = {**found.reply.headers, **({"x-arbitrage-replayed": "true"} if found.again else {})}
            return StreamingResponse(self._pieces(found), status_code=found.reply.status, headers=headers)
        return StreamingResponse(self._live(deciding, outlet, waited=not in_time), headers=outlet.headers)

    async def _pieces(self, found: Replayed) -> AsyncGenerator[bytes]:
        id = None if found.again else found.reply.headers.get("x-arbitrage-decision-id")
        whole = False
        try:
            for piece in found.reply.body.split(b"\n\n"):
                if piece:
                    yield piece + b"\n\n"
                    await asyncio.sleep(0)  # sending alone never waits, and a caller who left would go unnoticed
            whole = True
        finally:
            if not whole and id is not None:
                await asyncio.shield(self._answering.broken_off(id))

    async def _live(self, deciding: Deciding, outlet: Outlet, *, waited: bool) -> AsyncGenerator[bytes]:
        """What comes, then the rest of the reply; if the caller goes away meanwhile, `deciding` notices and records it."""
        with self._limits.held():
            async for piece in live_pieces(outlet, deciding, waited=waited):
                yield piece
            try:
                found = deciding.result()
            except ArbitrageError as error:
                yield replies.event(_error_document(error)[1])
                return
            if found is not None and not outlet.pieces:
                async for piece in self._pieces(found):
                    yield piece

    async def not_served(self, request: Request, caller: Caller) -> Response:
        """POST /v1/responses."""
        raise RequestError(
            "the Responses API is not served; use /v1/chat/completions or /v1/decisions", status=404, code="not_served"
        )

    async def models(self, request: Request, caller: Caller) -> Response:
        """GET /v1/models."""
        listed = [
            {"id": p.name, "object": "model", "created": 0, "owned_by": "conformal-arbitrage",
             "arbitrage": {"alpha": p.alpha, "version": p.version, "mode": p.settings.mode,
                           "form": p.pair.form}}
            for p in self._policies.all()
        ]  # fmt: skip
        return json_response({"object": "list", "data": listed})

    async def figures(self, request: Request, caller: Caller) -> Response:
        """GET /metrics."""
        self._metrics.in_flight.set(self._limits.in_flight)
        resting = {breaker.origin for breaker in self._breakers if breaker.resting}
        for breaker in self._breakers:  # several models may be behind one address
            self._metrics.resting.labels(breaker.origin).set(breaker.origin in resting)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def ready(self, request: Request) -> Response:
        """GET /health/ready: the store answers and there are policies; no model is called."""
        try:
            await self._store.change_count()
        except StoreError as error:
            return _refused(error)
        return json_response({"status": "ready", "policies": [policy.name for policy in self._policies.all()]})


def _json_reply(document: Any, headers: Mapping[str, str]) -> Replay:
    return Replay(status=200, headers={**headers, "content-type": "application/json"}, body=encoded(document))


def _stream_reply(made: Made, whole: Mapping[str, Any], headers: Mapping[str, str], asked: CompletionRequest) -> Replay:
    chunks = replies.Chunks(str(made.decision.id), whole["model"], include_usage=asked.include_usage)
    return Replay(status=200, headers={**headers, **HEADERS}, body=b"".join(replies.streamed(whole, chunks)))


def _response(reply: Replay, *, again: bool) -> Response:
    headers = {**reply.headers, **({"x-arbitrage-replayed": "true"} if again else {})}
    return Response(reply.body, status_code=reply.status, headers=headers)


def _decision_usage(spent: Spent) -> dict[str, Any]:
    into, out = spent.input_tokens or 0, spent.output_tokens or 0
    return {
        "input_tokens": into,
        "input_tokens_details": {"cached_tokens": spent.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": out,
        "output_tokens_details": {"reasoning_tokens": spent.reasoning_tokens},
        "total_tokens": into + out,
    }


def _refused(error: ArbitrageError) -> Response:
    status, document, headers = _error_document(error)
    return json_response(document, status=status, headers=headers)


def _error_document(error: ArbitrageError) -> tuple[int, dict[str, Any], dict[str, str]]:
    if isinstance(error, RequestError):
        return error.status, replies.refusal_body(error), error.headers
    _log.error("%s: %s", type(error).__name__, error)  # callers are not told: it may quote an endpoint or a path
    status, code, text = 500, "internal_error", "the request could not be served"
    if isinstance(error, StoreError):
        status, code, text = 503, "record_unavailable", "decisions cannot be recorded, so none is made; try again later"
    elif isinstance(error, GuardianError):
        status, code, text = 502, "guardian_failed", "the Guardian was to decide and could not; try again later"
    return status, replies.error_body(text, code=code, status=status), {}


async def _gone(request: Request) -> None:
    """Wait until the caller goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _alive(request: Request) -> Response:
    return json_response({"status": "alive"})


async def _schema(request: Request) -> Response:
    return json_response(schema())


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    text = f"{request.method} {request.url.path:.200} is not served; /openapi.json lists what is"
    document = replies.error_body(text, code="not_found", status=status)
    return json_response(document, status=status, headers=getattr(error, "headers", None))


async def _failed(request: Request, error: Exception) -> Response:
    """A mistake of ours; the server's log has the traceback."""
    return json_response(replies.error_body("something broke", code="internal_error", status=500), status=500)


_HANDLERS = {404: _no_route, 405: _no_route, 500: _failed}
