"""create_app: the gateway as an ASGI application, built from arguments.

Knows nothing of files or command lines; `server` puts it on a port.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.gateway.auditor import Auditor
from conformal_arbitrage.gateway.auth import Authenticator
from conformal_arbitrage.gateway.background import Background
from conformal_arbitrage.gateway.console.app import Console
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.rendering import Pages
from conformal_arbitrage.gateway.console.visits import Doorkeeper
from conformal_arbitrage.gateway.decider import Decider
from conformal_arbitrage.gateway.decision_routes import DecisionRoutes
from conformal_arbitrage.gateway.draining import Drain
from conformal_arbitrage.gateway.grading import GradingFeed
from conformal_arbitrage.gateway.housekeeping import Housekeeper
from conformal_arbitrage.gateway.limits import RequestLimits
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.middleware import (
    AccessLog,
    Authenticated,
    ErrorReplies,
    Handler,
    Incoming,
    Refresher,
    RunHandler,
    Shortcut,
    error_document,
    json_response,
)
from conformal_arbitrage.gateway.monitor_routes import MonitorRoutes
from conformal_arbitrage.gateway.openapi import schema
from conformal_arbitrage.gateway.policy_table import LivePolicy, PolicyTable
from conformal_arbitrage.gateway.record_routes import RecordRoutes
from conformal_arbitrage.gateway.renewer import Renewer
from conformal_arbitrage.gateway.review_routes import ReviewRoutes
from conformal_arbitrage.gateway.reviewing import Concluder, Desk
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.gateway.webhook_routes import WebhookTests
from conformal_arbitrage.gateway.webhooks import WebhookSender
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.store.base import Scope, Store
from conformal_arbitrage.upstream.breaker import Breaker
from conformal_arbitrage.upstream.webhook import WebhookEndpoint

_DECIDING = ("/v1/chat/completions", "/v1/decisions", "/v1/responses")
_READY_SECONDS = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an application is made of.

    Attributes:
        log: takes a line of JSON for every request.
        clock: the time by which outcomes are due, in seconds since 1970.
        traced: records the requests of a route.
        drain: whether the gateway is about to stop.
    """

    config: Config
    store: Store
    policies: PolicyTable
    secret: bytes
    renewer: Renewer
    breakers: Sequence[Breaker]
    guardian_breakers: Mapping[str, Sequence[Breaker]]
    log: Callable[[bytes], None]
    metrics: Metrics
    clock: Callable[[], float] = time.time
    traced: Callable[[ASGIApp, str], ASGIApp] | None = None
    webhooks: Sequence[WebhookEndpoint] = ()
    desk: Desk
    drain: Drain = field(default_factory=lambda: Drain(0.0))


def create_app(parts: Parts) -> ASGIApp:
    """Return the gateway over a store, policies and limits."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        if any(policy.guarded is not None or _may_expire(policy) for policy in parts.policies.all()):
            await routes.watcher.turn()  # the guard's threshold and expiry count from the first request on
        routes.background.start(
            {
                "audits": routes.auditor().run,
                "monitor": routes.watcher.run,
                "housekeeping": Housekeeper(parts.store, parts.config.gateway.retain_days).run,
                "webhooks": WebhookSender(parts.store, parts.webhooks, parts.metrics).run,
                "renewal": partial(parts.renewer.run, routes.watcher),
                "reviews": Concluder(parts.store, parts.desk, routes.deciding.complete).run,
                "grading": GradingFeed(parts.store, parts.config, parts.secret).run,
            }
        )
        yield
        await routes.background.stop()

    routes = _Routes(parts)
    parts.drain.at_end(parts.desk.close)
    served = routes.served()
    app = Starlette(
        routes=[
            *(Route(path, app, methods=[method]) for method, path, app in served),
            *routes.open(),
            *routes.console(),
        ],
        lifespan=lifespan,
        exception_handlers={404: _no_route, 405: _no_route, 500: _internal_error},
    )
    app.router.redirect_slashes = False
    busiest = {path: app for method, path, app in served if method == "POST" and path in _DECIDING}
    return ServerErrorMiddleware(Shortcut(busiest, app), handler=_internal_error)


class _Routes:
    """All routes, with the middleware around them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._metrics = parts.metrics
        self.background = Background(parts.metrics.background_failures)
        self._limits = RequestLimits(parts.config.gateway)
        self._reviewing = RequestLimits(parts.config.gateway)  # callers who wait do not keep those out they wait for
        self.watcher = Watcher(parts.store, parts.policies, parts.clock)
        self._authenticator = Authenticator(parts.store)
        subscribers = (self._authenticator.refresh, parts.policies.refresh)
        self._refresher = Refresher(parts.store.change_count, *subscribers)
        self._recording = Refresher(parts.store.writable, *subscribers)  # before a model is paid
        decider = Decider(parts.secret)
        self.deciding = DecisionRoutes(
            parts.config.gateway, parts.store, parts.policies, decider, self._metrics, parts.desk
        )

    def auditor(self) -> Auditor:
        """Return what runs audits, counted in the same metrics."""
        parts = self._parts
        return Auditor(parts.store, parts.policies, self._metrics, parts.config.gateway.audit_deadline, parts.desk)

    def served(self) -> list[tuple[str, str, ASGIApp]]:
        """Return the routes that need a key: method, path, application."""
        parts, gateway = self._parts, self._parts.config.gateway
        deciding, reviews = self.deciding, ReviewRoutes(parts.store, parts.desk, gateway)
        records = RecordRoutes(parts.store, parts.policies, gateway)
        monitors = MonitorRoutes(parts.store, parts.policies, self.watcher, gateway)
        routes: list[tuple[str, str, Scope, Handler]] = [
            ("POST", "/v1/decisions", "call", deciding.decisions),
            ("POST", "/v1/chat/completions", "call", deciding.completions),
            ("POST", "/v1/responses", "call", deciding.responses),
            ("GET", "/v1/models", "call", self._models),
            ("GET", "/v1/models/{id}", "call", self._model),
            ("GET", "/v1/arbitrage/records", "call", records.many),
            ("GET", "/v1/arbitrage/records/{id}", "call", records.one),
            ("POST", "/v1/arbitrage/records/{id}/feedback", "call", records.feedback),
            ("GET", "/v1/arbitrage/policies/{name}", "review", records.policy),
            ("GET", "/v1/arbitrage/policies/{name}/monitor", "review", monitors.monitor),
            ("POST", "/v1/arbitrage/policies/{name}/lift", "admin", monitors.lift),
            ("PUT", "/v1/arbitrage/policies/{name}", "admin", records.install),
            ("POST", "/v1/arbitrage/policies/{name}/rollback", "admin", records.rollback),
            *reviews.routes(),
            ("POST", "/v1/arbitrage/webhooks/{name}/test", "admin", WebhookTests(parts.webhooks).test),
            ("GET", "/metrics", "metrics", self._figures),
        ]
        return [(method, path, self._guarded(path, scope, handler)) for method, path, scope, handler in routes]

    def _guarded(self, path: str, scope: Scope, handler: Handler) -> ASGIApp:
        limits = self._reviewing if scope == "review" else self._limits
        app: ASGIApp = RunHandler(handler, limits, self._parts.config.gateway.max_body)
        refresher = self._recording if path in _DECIDING else self._refresher
        app = Authenticated(app, scope, self._authenticator, refresher)
        app = AccessLog(ErrorReplies(app), path, self._metrics, self._parts.log)
        return app if self._parts.traced is None else self._parts.traced(app, path)

    def open(self) -> list[Route]:
        """Return the routes that need no key."""
        return [
            Route("/", ErrorReplies(_Home(self._parts)), methods=["GET"]),
            Route("/health/live", _alive),
            Route("/health/ready", ErrorReplies(_Ready(self._parts, self.background)), methods=["GET"]),
            Route("/openapi.json", _schema),
        ]

    def console(self) -> list[Route]:
        """Return the routes of the web console, which has sign-ins of its own."""
        parts = self._parts
        doorkeeper = Doorkeeper(parts.store, self._authenticator, parts.secret, parts.config.gateway.public_url)
        pages = Console(
            ConsoleParts(
                config=parts.config, store=parts.store, policies=parts.policies, watcher=self.watcher,
                renewer=parts.renewer, background=self.background, breakers=parts.breakers, refresher=self._refresher,
                doorkeeper=doorkeeper, pages=Pages(), clock=parts.clock, desk=parts.desk,
                webhooks=WebhookTests(parts.webhooks), secret=parts.secret,
            )
        )  # fmt: skip
        return pages.routes(lambda app, path: AccessLog(app, path, self._metrics, parts.log))

    async def _models(self, request: Incoming) -> Response:
        """Answer GET /v1/models."""
        bound = request.caller.policies
        policies = [p for p in self._parts.policies.all() if bound is None or p.name in bound]
        return json_response({"object": "list", "data": [_model_object(policy) for policy in policies]})

    async def _model(self, request: Incoming) -> Response:
        """Answer GET /v1/models/{id}, for a policy or an alias."""
        policy = self._parts.policies.named(str(request.path_params["id"]))
        request.caller.check_policy(policy.name)
        return json_response(_model_object(policy))

    async def _figures(self, request: Incoming) -> Response:
        """Answer GET /metrics."""
        self._metrics.in_flight.set(self._limits.in_flight + self._reviewing.in_flight)
        breakers = self._parts.breakers
        resting = {breaker.origin for breaker in breakers if breaker.resting}
        for breaker in breakers:  # several models may share one address
            self._metrics.resting.labels(breaker.origin).set(breaker.origin in resting)
        for policy in self._parts.policies.all():
            self._metrics.guardian_resting.labels(policy.name).set(_guardian_rests(self._parts, policy.name))
            self._metrics.safe_mode.labels(policy.name).set(policy.mode == "safe")
        self._metrics.versions(self._parts.policies.all(), self._parts.policies.behind())
        self._metrics.standings(self.watcher.standings())
        self._metrics.ages(self.watcher.ages())
        with suppress(StoreError):  # the other figures matter all the more
            names = [policy.name for policy in self._parts.policies.all()]
            self._metrics.backlog(names, await self._parts.store.audit_backlog())
            if self._parts.desk.teams:
                self._metrics.review_backlogs(await self._parts.store.team_backlogs(self._parts.desk.people()))
            if webhooks := [webhook.name for webhook in self._parts.webhooks]:
                self._metrics.webhook_backlog(webhooks, await self._parts.store.delivery_backlog())
        text = self._metrics.text(blind=request.caller.scope == "review")
        return Response(text, media_type="text/plain; version=0.0.4")


def _may_expire(policy: LivePolicy) -> bool:
    return policy.settings.max_age is not None or policy.settings.max_decisions is not None


def _model_object(policy: LivePolicy) -> dict[str, object]:
    """Return a policy as the models API shows a model."""
    facts = {"alpha": policy.alpha, "version": policy.version, "mode": policy.mode, "form": policy.pair.form}
    return {
        "id": policy.name, "object": "model", "created": 0, "owned_by": "conformal-arbitrage", "arbitrage": facts,
    }  # fmt: skip


class _Home:
    """GET /: what this is, and where to go from here; the policies are named as long as no API key exists."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        about: dict[str, object] = {
            "name": "conformal-arbitrage",
            "version": version("conformal-arbitrage"),
            "description": "An OpenAI-compatible gateway: a cheap model answers where that keeps a risk budget.",
            "links": {
                "schema": "/openapi.json",
                "models": "/v1/models",
                "ready": "/health/ready",
                "console": "/console",
            },
        }
        if not await self._parts.store.keys():
            about["policies"] = [policy.name for policy in self._parts.policies.all()]
        await json_response(about)(scope, receive, send)


class _Ready:
    """GET /health/ready: a decision could be recorded now, and there are policies; no model is called.

    The answer comes within a second, whatever the store does; a gateway that is about to stop is not ready.

    A Guardian that is not called after repeated failures, a model that is not the pinned one, a newer version of a policy
    that was made for other gateways, or a background job that failed is named under `problems`; the gateway stays ready,
    since whatever needs none of them is served.
    """

    def __init__(self, parts: Parts, background: Background) -> None:
        self._parts = parts
        self._background = background
        self._checking: asyncio.Future[int] | None = None

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        self._parts.drain.check()
        await self._check_store()
        names = [policy.name for policy in self._parts.policies.all()]
        document: dict[str, object] = {"status": "ready", "policies": names}
        problems = self._problems(names)
        await json_response({**document, "problems": problems} if problems else document)(scope, receive, send)

    async def _check_store(self) -> None:
        """Check that a decision could be recorded; all who ask at the same time share one check.

        Raises:
            StoreError: it could not, or that is not known yet.
        """
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self._parts.store.writable())
            self._checking.add_done_callback(_seen)
        await asyncio.wait({self._checking}, timeout=_READY_SECONDS)
        if not self._checking.done():
            raise StoreError(f"the store has not answered for {_READY_SECONDS} s; check that it runs and is not locked")
        self._checking.result()

    def _problems(self, names: Sequence[str]) -> list[dict[str, str]]:
        resting = "it is not called for now, after repeated failures"
        silent = [name for name in names if _guardian_rests(self._parts, name)]
        others = self._parts.metrics.other_models.items()
        newer = "version {} was made for other models or by a later release; what is in force here stays in force"
        return [
            *({"policy": name, "role": "guardian", "problem": resting} for name in silent),
            *({"policy": name, "role": role, "problem": text} for (name, role), text in others),
            *({"policy": name, "problem": newer.format(one)} for name, one in self._parts.policies.behind().items()),
            *({"work": name, "problem": text} for name, text in self._background.failed.items()),
        ]


def _guardian_rests(parts: Parts, policy: str) -> bool:
    return any(breaker.resting for breaker in parts.guardian_breakers[policy])


def _seen(checking: asyncio.Future[int]) -> None:
    """Note the outcome of a check that no one waits for any more."""
    if not checking.cancelled():
        checking.exception()


async def _alive(request: Request) -> Response:
    return json_response({"status": "alive"})


async def _schema(request: Request) -> Response:
    return json_response(schema())


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"{request.method} {request.url.path:.200} is not served; /openapi.json lists the routes"
    document = error_document(message, code="not_found", status=status)
    return json_response(document, status=status, headers=getattr(error, "headers", None))


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer after a bug; the server's log has the traceback."""
    return json_response(error_document("internal error", code="internal_error", status=500), status=500)
