"""The composition of a gateway: what it opens, its routes, and its jobs in the background."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from conformal_arbitrage.calibration.certificate import package_version
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.errors import ArbitrageError, ConfigError, RequestError, StoreError
from conformal_arbitrage.gateway.api import MonitorRoutes, RecordRoutes, ReviewRoutes, WebhookTests, schema
from conformal_arbitrage.gateway.audience import Caller, Views
from conformal_arbitrage.gateway.audits import Auditor, GradingFeed, awaits_grades, would_tell
from conformal_arbitrage.gateway.auth import Authenticator, admit_first_key, check_binding, is_loopback
from conformal_arbitrage.gateway.decider import Decider, calls_limit, spending_limit
from conformal_arbitrage.gateway.http import (
    AccessLog,
    Handler,
    Incoming,
    Refresher,
    RequestLimits,
    RouteEndpoint,
    Shortcut,
    error_document,
    error_response,
    json_response,
)
from conformal_arbitrage.gateway.jobs import Background, Housekeeper, WebhookSender
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.policies import (
    LivePolicy,
    PolicyTable,
    check_policies,
    check_spending,
    identities_of_pair,
    install_files,
    pairs_of,
)
from conformal_arbitrage.gateway.requests import DECIDING, DecisionRoutes
from conformal_arbitrage.gateway.review_queue import ReviewQueue, VoteCounter, WaitingPlaces
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.live.build import Extras, Models, open_record
from conformal_arbitrage.live.config import ROLES, Config, GatewayConfig, webhooks_of
from conformal_arbitrage.live.reviewers import review_terms
from conformal_arbitrage.models.kinds import has_terminal
from conformal_arbitrage.models.webhook import WebhookEndpoint
from conformal_arbitrage.store import integrity, keys, outbox
from conformal_arbitrage.store import reviews as stored_reviews
from conformal_arbitrage.store.keys import Scope
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.store.session import Store, StoreSchema

if TYPE_CHECKING:
    from conformal_arbitrage.gateway.renewer import Renewer
    from conformal_arbitrage.gateway.telemetry import Telemetry

Log = Callable[[bytes], None]
_READY_SECONDS = 0.8
_BEYOND_LOOPBACK = 5.0


def unlogged(_: bytes) -> None:
    """Drop a line of the log."""


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
        """Refuse to be called ready once it has begun."""
        if self.begun:
            raise RequestError("the gateway is about to stop; send requests elsewhere", status=503, code="draining")


@asynccontextmanager
async def application(
    config: Config,
    log: Log = unlogged,
    metrics: Metrics | None = None,
    clock: Callable[[], float] = time.time,
    *,
    migrating: bool = True,
) -> AsyncGenerator["Gateway"]:
    """Open a configuration's store and models, each once, and yield the gateway over them.

    Args:
        log: takes a line of JSON for every request.
        metrics: where things are counted; without it, only requests and decisions are.
        clock: the time by which the outcomes of audits are due, in seconds since 1970.
        migrating: whether to bring the database to this release and configuration; if not, `prepare` has done it.
    """
    check_policies(config)
    _check_people(config)
    webhooks = webhooks_of(config)
    async with AsyncExitStack() as stack:
        telemetry = _telemetry() if config.gateway.otel else None
        if telemetry is not None:
            stack.push_async_callback(telemetry.close)
        store = await open_record(config, migrating=migrating)
        stack.push_async_callback(store.close)
        secret = ProjectSecret.find()
        spending = spending_limit(store, config.gateway)
        if spending is not None:
            stack.push_async_callback(spending.close)
        await integrity.seal(store, everything=True)
        extras = Extras(
            breaker=True,
            primary_timeout=config.gateway.primary_timeout,
            guardian_spending=spending,
            live_share=config.gateway.live_share,
            traced=None if telemetry is None else telemetry.port,
        )
        models = await stack.enter_async_context(Models(config, extras))
        await admit_first_key(store)
        gateway = Gateway(
            config, store, models, secret, webhooks=webhooks, metrics=metrics or Metrics(), log=log, clock=clock,
            telemetry=telemetry, drain=Drain.of(config.gateway),
        )  # fmt: skip
        await gateway.load(installing=migrating)
        yield gateway


class Gateway:
    """A gateway over a store and models that are open.

    Args:
        log: takes a line of JSON for every request.
        clock: the time by which outcomes are due, in seconds since 1970.
        drain: whether the gateway is about to stop.

    Attributes:
        app: the ASGI application.
        keyed: whether calls need an API key, as far as known when the policies were loaded.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        models: Models,
        secret: ProjectSecret,
        *,
        webhooks: Sequence[WebhookEndpoint],
        metrics: Metrics,
        log: Log,
        clock: Callable[[], float],
        telemetry: "Telemetry | None",
        drain: Drain,
    ) -> None:
        self.config = config
        self.store = store
        self.secret = secret.keys[0]
        self._secrets = secret
        self.webhooks = webhooks
        self.metrics = metrics
        self.clock = clock
        self.drain = drain
        self.keyed = False
        self.breakers = models.breakers
        self._models = models
        self._telemetry = telemetry
        self.queue = ReviewQueue(store, config.teams, self.secret, WaitingPlaces(config.gateway.waiting_places))
        pairs = pairs_of(models, calls_limit(store, config.gateway), self.queue)
        check_spending(config, models)
        self.policies = PolicyTable(config, store, pairs, secret)
        self.watcher = Watcher(store, self.policies, clock)
        self.views = Views(
            store,
            lambda record: awaits_grades(record, config.policies.get(record.policy)),
            lambda record: would_tell(record, config.policies.get(record.policy)),
        )
        self.webhook_tests = WebhookTests(webhooks)
        self.background = Background(metrics.background_failures)
        self.authenticator = Authenticator(store)
        subscribers = (self.authenticator.refresh, self.policies.refresh)
        self.refresher = Refresher(store.change_count, *subscribers)
        self._recording = Refresher(store.writable, *subscribers)  # before a model is paid
        self.access = AccessLog(metrics, log)
        # a lane for each scope: callers who wait keep out neither those they wait for nor operators
        self._limits = {scope: RequestLimits(config.gateway) for scope in get_args(Scope)}
        self._deciding = DecisionRoutes(
            config.gateway, store, self.policies, Decider(self.secret, self.queue), metrics, self.queue
        )
        self._checking: asyncio.Future[int] | None = None
        drain.at_end(self.queue.close)
        self.app = self._application()

    async def load(self, *, installing: bool) -> None:
        """Load the policies, and the logs that the configuration names.

        Args:
            installing: whether certificate files that changed are installed.

        Raises:
            ConfigError: without a key the gateway may not listen where it is configured to, or a log is not the policy's.
        """
        await self.policies.load(installing=installing)
        if any(settings.log is not None for settings in self.config.policies.values()):
            await self.renewer.import_logs()
        self.keyed = await self.store.run(keys.exist)
        check_binding(self.config.gateway.host, self.config.gateway.public_url, has_keys=self.keyed)

    @cached_property
    def renewer(self) -> "Renewer":
        """Renews certificates; loaded when that is asked for, since it needs all of calibration."""
        from conformal_arbitrage.gateway.renewer import Renewer

        return Renewer(self.config, self.store, self.policies, self._secrets, self.clock)

    def guardian_rests(self, policy: str) -> bool:
        """Return whether the Guardian of a policy is not called for now, after repeated failures."""
        section = self.config.section_of(policy, "guardian")
        return any(breaker.resting for breaker in self._models.guardian_breakers.get(section, ()))

    def _application(self) -> ASGIApp:
        served = [
            (method, path, self._endpoint(path, scope, handler)) for method, path, scope, handler in self._routes()
        ]
        console = _Console(self)
        app = Starlette(
            routes=[
                *(Route(path, endpoint, methods=[method]) for method, path, endpoint in served),
                Route("/", self._home),
                Route("/health/live", _alive),
                Route("/health/ready", self._ready),
                Route("/openapi.json", _schema),
                Route("/console", console),
                Route("/console/{rest:path}", console),
            ],
            lifespan=self._lifespan,
            exception_handlers={404: _no_route, 405: _no_route, 500: _internal_error, ArbitrageError: _failed},
        )
        app.router.redirect_slashes = False
        busiest = {path: endpoint for method, path, endpoint in served if method == "POST" and path in DECIDING}
        return ServerErrorMiddleware(Shortcut(busiest, app), handler=_internal_error)

    def _routes(self) -> list[tuple[str, str, Scope, Handler]]:
        """Return the routes that need a key: method, path, scope and handler."""
        gateway = self.config.gateway
        reviews = ReviewRoutes(self.store, self.views, self.queue, gateway)
        records = RecordRoutes(self.views, self.policies, gateway)
        monitors = MonitorRoutes(self.store, self.views, self.policies, self.watcher, gateway)
        return [
            *(("POST", route, "call", partial(self._deciding.answer, route)) for route in DECIDING),
            ("GET", "/v1/models", "call", self._list_models),
            ("GET", "/v1/models/{id}", "call", self._show_model),
            ("GET", "/v1/arbitrage/records", "call", records.many),
            ("GET", "/v1/arbitrage/records/{id}", "call", records.one),
            ("POST", "/v1/arbitrage/records/{id}/feedback", "call", records.feedback),
            ("GET", "/v1/arbitrage/policies/{name}", "operate", records.policy),
            ("GET", "/v1/arbitrage/policies/{name}/monitor", "operate", monitors.monitor),
            ("POST", "/v1/arbitrage/policies/{name}/lift", "admin", monitors.lift),
            ("PUT", "/v1/arbitrage/policies/{name}", "admin", records.install),
            ("POST", "/v1/arbitrage/policies/{name}/rollback", "admin", records.rollback),
            *reviews.routes(),
            ("POST", "/v1/arbitrage/webhooks/{name}/test", "admin", self.webhook_tests.test),
            ("GET", "/metrics", "operate", self._figures),
        ]

    def _endpoint(self, path: str, scope: Scope, handler: Handler) -> RouteEndpoint:
        return RouteEndpoint(
            handler,
            path,
            scope,
            authenticator=self.authenticator,
            refresher=self._recording if path in DECIDING else self.refresher,
            limits=self._limits[scope],
            largest_body=self.config.gateway.max_body,
            access=self.access,
            trace=None if self._telemetry is None else self._telemetry.request,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        if any(policy.guarded is not None or _may_expire(policy) for policy in self.policies.all()):
            await self.watcher.turn()  # the guard's threshold and expiry count from the first request on
        config, store = self.config, self.store
        self.background.start(
            {
                "audits": Auditor(store, self.policies, self.metrics, config.gateway.audit_deadline).run,
                "monitor": self.watcher.run,
                "housekeeping": Housekeeper(store, config.gateway.retain_days).run,
                "webhooks": WebhookSender(store, self.webhooks, self.metrics).run,
                "renewal": self._renew,
                "reviews": VoteCounter(store, self.queue, self._deciding.finish).run,
                "grading": GradingFeed(store, config, self.secret).run,
            }
        )
        yield
        await self.background.stop()

    async def _renew(self) -> None:
        """Renew certificates until cancelled; return if no policy asks for it."""
        if any(policy.renew == "scheduled" or policy.tighten for policy in self.config.policies.values()):
            await self.renewer.run(self.watcher)

    async def _list_models(self, request: Incoming) -> Response:
        """Answer GET /v1/models."""
        policies = self.policies.all(request.caller)
        names = [(policy, name) for policy in policies for name in (policy.name, *policy.settings.aliases)]
        return json_response({"object": "list", "data": [_model_object(policy, name) for policy, name in names]})

    async def _show_model(self, request: Incoming) -> Response:
        """Answer GET /v1/models/{id}, for a policy or an alias."""
        name = str(request.path_params["id"])
        policy = self.policies.named(name, request.caller)
        return json_response(_model_object(policy, name))

    async def _figures(self, request: Incoming) -> Response:
        """Answer GET /metrics."""
        self.metrics.in_flight.set(sum(limits.in_flight for limits in self._limits.values()))
        resting = {breaker.origin for breaker in self.breakers if breaker.resting}
        for breaker in self.breakers:  # several models may share one address
            self.metrics.resting.labels(breaker.origin).set(breaker.origin in resting)
        for policy in self.policies.all():
            self.metrics.guardian_resting.labels(policy.name).set(self.guardian_rests(policy.name))
            self.metrics.safe_mode.labels(policy.name).set(policy.mode == "safe")
        self.metrics.versions(self.policies.all(), self.policies.behind())
        self.metrics.standings(self.watcher.standings())
        self.metrics.ages(self.watcher.ages())
        with suppress(StoreError):  # the other figures matter all the more
            names = [policy.name for policy in self.policies.all()]
            self.metrics.backlog(names, await self.store.run(outbox.audit_backlog))
            if self.queue.teams:
                self.metrics.review_backlogs(await self.store.run(stored_reviews.backlogs, self.queue.people()))
            if webhooks := [webhook.name for webhook in self.webhooks]:
                self.metrics.webhook_backlog(webhooks, await self.store.run(outbox.delivery_backlog))
        text = self.metrics.text(request.caller)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _home(self, request: Request) -> Response:
        """Answer GET /: what this is, and where to go from here; the policies are named where no API key is needed."""
        about: dict[str, object] = {
            "name": "conformal-arbitrage",
            "version": package_version(),
            "description": "An OpenAI-compatible gateway: a cheap model answers where that keeps a risk budget.",
            "links": {
                "schema": "/openapi.json",
                "models": "/v1/models",
                "ready": "/health/ready",
                "console": "/console",
            },
        }
        if await self._operator(request) is not None and self.authenticator.needs_no_key:
            about["policies"] = [policy.name for policy in self.policies.all()]
        return json_response(about)

    async def _ready(self, request: Request) -> Response:
        """Answer GET /health/ready: a decision could be recorded now, and there are policies; no model is called.

        The answer comes within a second, whatever the store does; a gateway that is about to stop is not ready.

        With a key of scope operate, the policies are named, and under `problems` a Guardian that is not called after
        repeated failures, a model that is not the pinned one, a newer version of a policy that was made for other gateways,
        or a background job that failed; the gateway stays ready, since whatever needs none of them is served.
        """
        self.drain.check()
        await self._check_store()
        document: dict[str, object] = {"status": "ready"}
        caller = await self._operator(request)
        if caller is not None:
            document["policies"] = [policy.name for policy in self.policies.all(caller)]
            if problems := self._problems(caller):
                document["problems"] = problems
        return json_response(document)

    async def _operator(self, request: Request) -> Caller | None:
        """Return who asks with a key of scope operate; None for anybody else, who learns only whether it is ready."""
        with suppress(RequestError):
            await self.refresher.refresh()
            peer = None if request.client is None else request.client.host
            return await self.authenticator.caller(dict(reversed(request.headers.raw)), "operate", peer)
        return None

    async def _check_store(self) -> None:
        """Check that a decision could be recorded; all who ask at the same time share one check."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self.store.writable())
            self._checking.add_done_callback(_retrieve)
        await asyncio.wait({self._checking}, timeout=_READY_SECONDS)
        if not self._checking.done():
            raise StoreError(f"the store has not answered for {_READY_SECONDS} s; check that it runs and is not locked")
        self._checking.result()

    def _problems(self, caller: Caller) -> list[dict[str, str]]:
        names = [policy.name for policy in self.policies.all(caller)]
        resting = "it is not called for now, after repeated failures"
        newer = "version {} was made for other models or by a later release; what is in force here stays in force"
        return [
            *({"policy": name, "role": "guardian", "problem": resting} for name in names if self.guardian_rests(name)),
            *(
                {"policy": name, "role": role, "problem": text}
                for (name, role), text in self.metrics.other_models.items()
                if name in names
            ),
            *(
                {"policy": name, "problem": newer.format(number)}
                for name, number in self.policies.behind().items()
                if name in names
            ),
            *({"work": name, "problem": text} for name, text in self.background.failed.items() if not caller.policies),
        ]


class _Console:
    """The web console, which is loaded with its first request: most gateways show no page for days."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._router: Router | None = None

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if self._router is None:
            routes = await asyncio.to_thread(_console_routes, self._gateway)  # meanwhile, decisions are served
            self._router = Router(routes, redirect_slashes=False)
        await self._router(scope, receive, send)


def _console_routes(gateway: Gateway) -> list[Route]:
    from conformal_arbitrage.gateway.console.app import console_routes

    return console_routes(gateway)


def _may_expire(policy: LivePolicy) -> bool:
    return policy.settings.max_age is not None or policy.settings.max_decisions is not None


def _model_object(policy: LivePolicy, name: str) -> dict[str, object]:
    """Return a policy, under its name or an alias, as the models API shows a model."""
    facts: dict[str, object] = {
        "alpha": policy.alpha, "version": policy.version, "mode": policy.mode, "form": policy.pair.form,
    }  # fmt: skip
    if name != policy.name:
        facts["alias_of"] = policy.name
    return {
        "id": name, "object": "model", "created": 0, "owned_by": "conformal-arbitrage", "arbitrage": facts,
    }  # fmt: skip


def _retrieve(checking: asyncio.Future[int]) -> None:
    """Retrieve the error of a check that no one waits for any more, or asyncio logs it."""
    if not checking.cancelled():
        checking.exception()


async def _alive(request: Request) -> Response:
    return json_response({"status": "alive"})


async def _schema(request: Request) -> Response:
    return Response(_encoded_schema(), media_type="application/json")


@cache
def _encoded_schema() -> bytes:
    """Return the document of OpenAPI, made once: anyone may ask for it, and it takes milliseconds."""
    return msgspec.json.encode(schema())


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, ArbitrageError)
    return error_response(error)


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"{request.method} {request.url.path:.200} is not served; /openapi.json lists the routes"
    document = error_document(message, code="not_found", status=status)
    return json_response(document, status=status, headers=getattr(error, "headers", None))


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer after a bug; the server's log has the traceback."""
    return json_response(error_document("internal error", code="internal_error", status=500), status=500)


def identities_of(config: Config, policy: str) -> dict[str, Any]:
    """Return the identities of a policy's models, and of its groups, under this configuration."""
    pair = pairs_of(Models(config.for_policy(policy), Extras(keyless=True)))[policy]
    return identities_of_pair(pair, config.policies[policy].group)


def _telemetry() -> "Telemetry":
    """Set up OpenTelemetry."""
    try:
        from conformal_arbitrage.gateway.telemetry import Telemetry
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"[gateway] otel = true needs {error.name}: run `pip install '.[otel]'` in a clone, or remove the setting"
        ) from error
    return Telemetry()


def _check_people(config: Config) -> None:
    """Refuse a person as a model where there is neither a team nor a terminal to ask at."""
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
    async with await open_record(config) as store:
        await integrity.seal(store, everything=True)
        key = await admit_first_key(store)
        policies = PolicyTable(config, store, pairs_of(Models(config, Extras(keyless=True))), ProjectSecret.find())
        installed = await install_files(config, store, policies.bind)
        return Preparation(schema=store.schema, key=key, installed=tuple(installed))
