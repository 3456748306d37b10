"""The console's routes: who may open which page, and what happens when something fails."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from conformal_arbitrage.errors import ArbitrageError, RequestError, StoreError
from conformal_arbitrage.gateway.console.admin import HealthPage, KeysPage
from conformal_arbitrage.gateway.console.decisions import DecisionPage, DecisionsPage
from conformal_arbitrage.gateway.console.policy import OverviewPage, PolicyPage
from conformal_arbitrage.gateway.console.render import (
    HEADERS,
    Pages,
    SignInNeededError,
    SignIns,
    Visit,
    changes,
    redirect,
    sentence,
)
from conformal_arbitrage.gateway.console.review import ReviewPage
from conformal_arbitrage.gateway.http import POLLED, Exchange, error_reply
from conformal_arbitrage.store.keys import Scope
from conformal_arbitrage.store.session import Store

if TYPE_CHECKING:
    from conformal_arbitrage.gateway.gateway import Gateway

_log = logging.getLogger("conformal_arbitrage.gateway")
Opened = Scope | Literal["any"] | None
"""Whose key opens a page: of a scope, of anybody who is signed in, or no key at all."""
ConsoleHandler = Callable[[Visit], Awaitable[Response]]


def console_routes(gateway: "Gateway") -> list[Route]:
    """Return the routes of the console of a gateway."""
    config, store, views = gateway.config, gateway.store, gateway.views
    pages = Pages()
    sign_ins = SignIns(store, gateway.authenticator, gateway.secret, config.gateway.public_url)
    signing, overview, health = SignInPages(pages, sign_ins), OverviewPage(gateway, pages), HealthPage(gateway, pages)
    policy = PolicyPage(gateway, pages, overview)
    review, keys = ReviewPage(pages, store, gateway.queue, gateway.policies), KeysPage(pages, views, config)
    decisions, decision = DecisionsPage(pages, views, config.policies), DecisionPage(pages, views)
    served: list[tuple[str, str, Opened, ConsoleHandler]] = [
        ("GET", "/console", "any", overview.overview),
        ("GET", "/console/decisions", "review", decisions.decisions),
        ("GET", "/console/decisions/{id}", "review", decision.decision),
        ("GET", "/console/policies/{name}", "operate", policy.policy),
        ("POST", "/console/policies/{name}/check", "admin", policy.check),
        ("POST", "/console/policies/{name}/install", "admin", policy.install),
        ("POST", "/console/policies/{name}/rollback", "admin", policy.roll_back),
        ("POST", "/console/policies/{name}/lift", "admin", policy.lift),
        ("POST", "/console/policies/{name}/renew", "admin", policy.renew),
        ("POST", "/console/policies/{name}/choose", "admin", policy.choose),
        ("GET", "/console/review", "review", review.review),
        ("POST", "/console/review", "review", review.act),
        ("POST", "/console/review/renew", "review", review.renew),
        ("POST", "/console/review/return", "review", review.give_back),
        ("GET", "/console/team", "review", review.team),
        ("GET", "/console/keys", "admin", keys.keys),
        ("POST", "/console/keys", "admin", keys.create),
        ("POST", "/console/keys/revoke", "admin", keys.revoke),
        ("POST", "/console/keys/exclude", "admin", keys.exclude),
        ("GET", "/console/health", "operate", health.health),
        ("POST", "/console/webhooks/{name}/test", "admin", health.test_webhook),
        ("GET", POLLED, "any", _changes_of(store)),
        ("GET", "/console/sign-in", None, signing.form),
        ("POST", "/console/sign-in", None, signing.sign_in),
        ("POST", "/console/sign-out", "any", signing.sign_out),
        ("GET", "/console/static/{digest}/{file}", None, _files_of(pages)),
        ("GET", "/console/{rest:path}", "any", _nothing_there),
    ]
    by_path: dict[str, dict[str, tuple[Opened, ConsoleHandler]]] = {}
    for method, path, scope, handler in served:
        by_path.setdefault(path, {})[method] = scope, handler
    return [
        Route(path, ConsoleEndpoint(gateway, path, handlers, pages, sign_ins, health))
        for path, handlers in by_path.items()
    ]


class ConsoleEndpoint:
    """One path of the console, for those who may open it.

    Args:
        path: as metrics name it.
        handlers: by method, whose key opens the page, and what makes it.
        health: what is shown at /console/health if the store is away.
    """

    def __init__(
        self,
        gateway: "Gateway",
        path: str,
        handlers: Mapping[str, tuple[Opened, ConsoleHandler]],
        pages: Pages,
        sign_ins: SignIns,
        health: HealthPage,
    ) -> None:
        self._path = path
        self._handlers = handlers
        self._pages = pages
        self._sign_ins = sign_ins
        self._refresher = gateway.refresher
        self._access = gateway.access
        self._health = health

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        start = time.perf_counter()
        response = await self._response(Request(scope, receive))
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)
        self._access.note(scope["method"], self._path, Exchange(reply=response), time.perf_counter() - start)

    async def _response(self, request: Request) -> Response:
        served = self._handlers.get("GET" if request.method == "HEAD" else request.method)
        if served is None:
            return Response("not allowed", status_code=405, headers={"allow": ", ".join(self._handlers)})
        scope, handler = served
        visit = Visit(request=request, visitor=None, csrf="")
        try:
            self._sign_ins.check_host(request)
            await self._refresher.refresh()
            visit = await self._admitted(request, scope)
            return await handler(visit)
        except SignInNeededError as error:
            if request.method == "GET":
                return redirect("/console/sign-in" + ("?why=over" if "signed out" in str(error) else ""))
            return self._failure(visit, error)
        except ArbitrageError as error:
            if isinstance(error, StoreError) and request.url.path == "/console/health":
                return self._health.without_store(visit, error)
            return self._failure(visit, error)

    async def _admitted(self, request: Request, scope: Opened) -> Visit:
        if scope is None:
            visitor, csrf = None, self._sign_ins.sign_in_token()
        else:
            visitor = await self._sign_ins.visitor(request, None if scope == "any" else scope)
            csrf = visitor.csrf
        form = await self._sign_ins.form(request, csrf) if request.method == "POST" else {}
        return Visit(request=request, visitor=visitor, csrf=csrf, form=form)

    def _failure(self, visit: Visit, error: ArbitrageError) -> Response:
        """Say what went wrong in words."""
        if isinstance(error, StoreError):
            _log.error("%s: %s", type(error).__name__, error)
            words = "The gateway cannot reach its database, so there is nothing to show. The health page says more."
            return self._pages.page("error.html", visit, status=503, title="The database is unreachable", message=words)
        status = error_reply(error).status
        unknown = "The page could not be made; the log has the reason."
        message = sentence(str(error) if isinstance(error, RequestError) else unknown)
        title = _TITLES.get(status, "That did not work")
        return self._pages.page("error.html", visit, status=status, title=title, message=message)


_TITLES = {403: "Not allowed", 404: "Not found", 401: "Sign in first", 503: "Out of service"}


class SignInPages:
    """The pages for signing in and out."""

    def __init__(self, pages: Pages, sign_ins: SignIns) -> None:
        self._pages = pages
        self._sign_ins = sign_ins

    async def form(self, visit: Visit) -> Response:
        """GET /console/sign-in."""
        return self._pages.page("sign-in.html", visit, message=_REASONS.get(visit.query.get("why", ""), ""))

    async def sign_in(self, visit: Visit) -> Response:
        """POST /console/sign-in."""
        response = redirect("/console")
        try:
            await self._sign_ins.sign_in(visit.request, visit.form.get("key", ""), response)
        except SignInNeededError as error:
            return self._pages.page("sign-in.html", visit, status=401, message=str(error))
        return response

    async def sign_out(self, visit: Visit) -> Response:
        """POST /console/sign-out."""
        response = redirect("/console/sign-in?why=left")
        await self._sign_ins.sign_out(visit.request, response)
        return response


_REASONS = {
    "left": "You are signed out.",
    "over": "You were signed out: the key is no longer valid, or an hour has passed without a page.",
}


def _changes_of(store: Store) -> ConsoleHandler:
    """Answer GET /console/changes: how far things have come since a page was shown."""

    async def answer(visit: Visit) -> Response:
        return Response(await changes(store, visit), media_type="text/plain")

    return answer


def _files_of(pages: Pages) -> ConsoleHandler:
    """Answer GET /console/static/{digest}/{file}."""

    async def answer(visit: Visit) -> Response:
        return pages.file(visit.named("digest"), visit.named("file"))

    return answer


async def _nothing_there(visit: Visit) -> Response:
    if not visit.named("rest"):
        return redirect("/console")
    raise RequestError("There is no such page.", status=404)
