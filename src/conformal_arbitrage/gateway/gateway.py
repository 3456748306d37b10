"""The gateway: its composition, its jobs in the background, and what it prints at start."""

import asyncio
import json
import shlex
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.errors import RequestError, StoreError
from conformal_arbitrage.gateway.api import MonitorRoutes, RecordRoutes, ReviewRoutes, WebhookTests, schema
from conformal_arbitrage.gateway.audits import Auditor, GradingFeed
from conformal_arbitrage.gateway.auth import Authenticator, is_loopback
from conformal_arbitrage.gateway.background import Background, Housekeeper
from conformal_arbitrage.gateway.console.app import Console
from conformal_arbitrage.gateway.console.render import ConsoleParts, Doorkeeper, Pages
from conformal_arbitrage.gateway.decider import Decider
from conformal_arbitrage.gateway.http import (
    AccessLog,
    Authenticated,
    ErrorReplies,
    Handler,
    Incoming,
    Refresher,
    RequestLimits,
    RunHandler,
    Shortcut,
    error_document,
    json_response,
)
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.people import ReviewQueue, VoteCounter
from conformal_arbitrage.gateway.policies import LivePolicy, PolicyTable, certificate_file
from conformal_arbitrage.gateway.renewer import Renewer
from conformal_arbitrage.gateway.requests import DecisionRoutes
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.gateway.webhooks import WebhookSender
from conformal_arbitrage.live.config import ROLES, Config, GatewayConfig
from conformal_arbitrage.live.people import review_terms
from conformal_arbitrage.models.webhook import WebhookEndpoint
from conformal_arbitrage.models.wrappers import Breaker
from conformal_arbitrage.store import keys, outbox
from conformal_arbitrage.store import reviews as stored_reviews
from conformal_arbitrage.store.keys import Scope
from conformal_arbitrage.store.session import Store

# --- Advice for whoever starts a gateway ---


KEY_VARIABLE = "ARBITRAGE_KEY"
"""The shell variable that the printed call takes an API key from."""


def example_call(config: Config, url: str, *, keyed: bool) -> str:
    """Return a shell command that asks the first policy whose Guardian is a model, or else the first, what it can answer.

    One that people may have to answer carries a key, so that the same call again waits for the same review.

    Args:
        config: the whole configuration.
        url: where the gateway listens.
        keyed: whether calls need an API key.
    """
    policy = _example_policy(config)
    path, body = _example_request(config, policy)
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    again = " -H 'Idempotency-Key: first'" if review_terms(config, policy) is not None else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url}{path} -H 'Content-Type: application/json'{key}{again} -d {data}"


def example_note(config: Config, url: str) -> str | None:
    """Return what to know of the printed call: that people answer it, and where; None if a model does."""
    terms = review_terms(config, _example_policy(config))
    if terms is None:
        return None
    return (
        f"The Guardian is the team {terms.name!r}: what goes to it waits at {url}/console/review for somebody to answer. "
        f"The call is held for {terms.settings.wait:g} s; sent again as it is, it waits for the same answer."
    )


def _example_policy(config: Config) -> str:
    models = (name for name in config.policies if review_terms(config, name) is None)
    return next(models, next(iter(config.policies)))


def _example_request(config: Config, policy: str) -> tuple[str, Mapping[str, Any]]:
    if config.form_of(policy) == "text":
        return "/v1/chat/completions", {"model": policy, "messages": [{"role": "user", "content": "Name a colour."}]}
    question, size = _recorded_question(config, policy) or ("Which of these is a colour?", _menu_size(config, policy))
    names = ["red", "seven", *(f"option {place}" for place in range(3, size + 1))][:size]
    choices = [{"value": name} for name in names]
    choice = {"type": "choice", "instructions": "Which?", "choices": choices}
    return "/v1/decisions", {"model": policy, "input": question, "questions": [choice]}


def _recorded_question(config: Config, policy: str) -> tuple[str, int] | None:
    """Return the id of a question that every model which replays a record has, and its size; None if none replays."""
    folder = Path(config.folder)
    pair = (config.section(config.section_of(policy, role)) for role in ROLES)
    records = [menus for one in pair if (menus := one.recorded_menus(folder)) is not None]
    if not records:
        return None
    shared = (name for name in records[0] if all(name in menus for menus in records))
    name = next(shared, None)
    return None if name is None else (name, max(menus[name] for menus in records))


def _menu_size(config: Config, policy: str) -> int:
    """Return the size of a menu that the policy's certificate covers."""
    name = config.policies[policy].certificate
    fewest = None if name is None else _fewest_actions(Path(config.folder) / name)
    return max(2, fewest or 2)


def _fewest_actions(path: Path) -> int | None:
    certificate = certificate_file(path)
    return certificate.fewest_actions if isinstance(certificate, Certificate) else None


def start_notes(config: Config) -> list[str]:
    """Return what the configuration can never do, in words."""
    return [
        f'policy {name}: free text with content = "{policy.content}" keeps no answers, so its rows can never be graded or '
        f'calibrated on; set content = "full" in [policies.{name}]'
        for name, policy in config.policies.items()
        if config.form_of(name) == "text"
        and policy.content != "full"
        and (policy.mode == "shadow" or policy.audit_rate > 0)
    ]


# --- Drain ---


_BEYOND_LOOPBACK = 5.0


class Drain:
    """Whether a gateway is about to stop.

    Attributes:
        seconds: how long it goes on serving then.
        begun: whether it was told to stop.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begun = False
        self._at_end: list[Callable[[], None]] = []

    @classmethod
    def of(cls, config: GatewayConfig) -> "Drain":
        """Return the drain of a configuration."""
        usual = 0.0 if is_loopback(config.host) else _BEYOND_LOOPBACK
        return cls(usual if config.drain is None else config.drain)

    def at_end(self, act: Callable[[], None]) -> None:
        """Have something done once nothing more is accepted."""
        self._at_end.append(act)

    def end(self) -> None:
        """Do what was asked for at the end."""
        for act in self._at_end:
            act()

    def check(self) -> None:
        """Refuse to be called ready once it has begun.

        Raises:
            RequestError: it has.
        """
        if self.begun:
            raise RequestError("the gateway is about to stop; send requests elsewhere", status=503, code="draining")


# --- create_app ---


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
    queue: ReviewQueue
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
                "reviews": VoteCounter(parts.store, parts.queue, routes.deciding.finish).run,
                "grading": GradingFeed(parts.store, parts.config, parts.secret).run,
            }
        )
        yield
        await routes.background.stop()

    routes = _Routes(parts)
    parts.drain.at_end(parts.queue.close)
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
            parts.config.gateway, parts.store, parts.policies, decider, self._metrics, parts.queue
        )

    def auditor(self) -> Auditor:
        """Return what runs audits, counted in the same metrics."""
        parts = self._parts
        return Auditor(parts.store, parts.policies, self._metrics, parts.config.gateway.audit_deadline, parts.queue)

    def served(self) -> list[tuple[str, str, ASGIApp]]:
        """Return the routes that need a key: method, path, application."""
        parts, gateway = self._parts, self._parts.config.gateway
        deciding, reviews = self.deciding, ReviewRoutes(parts.store, parts.queue, gateway)
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
                doorkeeper=doorkeeper, pages=Pages(), clock=parts.clock, queue=parts.queue,
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
            self._metrics.backlog(names, await self._parts.store.run(outbox.audit_backlog))
            if self._parts.queue.teams:
                self._metrics.review_backlogs(
                    await self._parts.store.run(stored_reviews.backlogs, self._parts.queue.people())
                )
            if webhooks := [webhook.name for webhook in self._parts.webhooks]:
                self._metrics.webhook_backlog(webhooks, await self._parts.store.run(outbox.delivery_backlog))
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
        if not await self._parts.store.run(keys.list_all):
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
