"""The console's routes: who may open which page, and what happens when something fails."""

import logging
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from conformal_arbitrage.errors import ArbitrageError, RequestError, StoreError
from conformal_arbitrage.gateway.console.admin import HealthPage, KeysPage
from conformal_arbitrage.gateway.console.decisions import DecisionPage, DecisionsPage
from conformal_arbitrage.gateway.console.policy import OverviewPage, PolicyPage
from conformal_arbitrage.gateway.console.render import (
    HEADERS,
    ConsoleParts,
    SignInNeededError,
    Visit,
    redirect,
    sentence,
)
from conformal_arbitrage.gateway.console.review import ReviewPage
from conformal_arbitrage.gateway.http import SENT, failure_of
from conformal_arbitrage.store.keys import Scope

_log = logging.getLogger("conformal_arbitrage.gateway")
ConsoleHandler = Callable[[Visit], Awaitable[Response]]
Wrap = Callable[[ASGIApp, str], ASGIApp]


class Console:
    """All pages of the console.

    Args:
        parts: what they are made from.
    """

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts
        self.health = HealthPage(parts)

    def routes(self, wrap: Wrap) -> list[Route]:
        """Return the routes; `wrap` surrounds each, which it is given with its path."""
        parts = self._parts
        overview = OverviewPage(parts)
        policy, keys, review = PolicyPage(parts, overview), KeysPage(parts), ReviewPage(parts)
        pages: list[tuple[str, str, Scope | None, ConsoleHandler]] = [
            ("GET", "/console", "review", overview.overview),
            ("GET", "/console/decisions", "review", DecisionsPage(parts).decisions),
            ("GET", "/console/decisions/{id}", "review", DecisionPage(parts).decision),
            ("GET", "/console/policies/{name}", "review", policy.policy),
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
            ("GET", "/console/health", "review", self.health.health),
            ("POST", "/console/webhooks/{name}/test", "admin", self.health.test_webhook),
            ("GET", "/console/changes", "review", self._changes),
            ("GET", "/console/sign-in", None, self._sign_in_form),
            ("POST", "/console/sign-in", None, self._sign_in),
            ("POST", "/console/sign-out", "review", self._sign_out),
            ("GET", "/console/static/{digest}/{file}", None, self._static),
            ("GET", "/console/{rest:path}", "review", _nothing_there),
        ]
        rooms: dict[str, dict[str, ASGIApp]] = {}
        for method, path, scope, handler in pages:
            rooms.setdefault(path, {})[method] = _Room(self._parts, handler, scope, self.health)
        return [Route(path, wrap(_ByMethod(methods), path)) for path, methods in rooms.items()]

    async def _changes(self, visit: Visit) -> Response:
        """GET /console/changes: how far things have come, which open pages ask for every two seconds."""
        return Response(await self._parts.changes(visit), media_type="text/plain")

    async def _sign_in_form(self, visit: Visit) -> Response:
        return self._parts.pages.page("sign-in.html", visit, message=_REASONS.get(visit.query.get("why", ""), ""))

    async def _sign_in(self, visit: Visit) -> Response:
        response = redirect("/console")
        try:
            await self._parts.doorkeeper.sign_in(visit.request, visit.form.get("key", ""), response)
        except SignInNeededError as error:
            return self._parts.pages.page("sign-in.html", visit, status=401, message=str(error))
        return response

    async def _sign_out(self, visit: Visit) -> Response:
        response = redirect("/console/sign-in?why=left")
        await self._parts.doorkeeper.sign_out(visit.request, response)
        return response

    async def _static(self, visit: Visit) -> Response:
        return self._parts.pages.file(visit.named("digest"), visit.named("file"))


_REASONS = {
    "left": "You are signed out.",
    "over": "You were signed out: the key is no longer valid, or an hour has passed without a page.",
}


async def _nothing_there(visit: Visit) -> Response:
    if not visit.named("rest"):
        return redirect("/console")
    raise RequestError("There is no such page.", status=404)


class _ByMethod:
    """Sends a request to the room for its method."""

    def __init__(self, rooms: dict[str, ASGIApp]) -> None:
        self._rooms = rooms

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        room = self._rooms.get(method)
        if room is None:
            response = Response("not allowed", status_code=405, headers={"allow": ", ".join(self._rooms), **HEADERS})
            scope[SENT] = response
            await response(scope, receive, send)
            return
        await room(scope, receive, send)


class _Room:
    """One page, for those who may see it.

    Args:
        parts: lets visitors in.
        handler: makes the page.
        scope: what the visitor's key needs; None for a page that needs no key.
        health: what is shown if the store is away, and the page is that of the gateway's health.
    """

    def __init__(self, parts: ConsoleParts, handler: ConsoleHandler, scope: Scope | None, health: HealthPage) -> None:
        self._parts = parts
        self._handler = handler
        self._scope: Scope | None = scope
        self._health = health

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        response = await self._response(Request(scope, receive))
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        scope[SENT] = response
        await response(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        visit = Visit(request=request, visitor=None, csrf="")
        try:
            self._parts.doorkeeper.check_host(request)
            await self._parts.refresher.refresh()
            visit = await self._admitted(request)
            return await self._handler(visit)
        except SignInNeededError as error:
            if request.method == "GET":
                return redirect("/console/sign-in" + ("?why=over" if "signed out" in str(error) else ""))
            return self._failure(visit, error)
        except ArbitrageError as error:
            if isinstance(error, StoreError) and request.url.path == "/console/health":
                return self._health.without_store(visit, error)
            return self._failure(visit, error)

    async def _admitted(self, request: Request) -> Visit:
        doorkeeper = self._parts.doorkeeper
        if self._scope is None:
            visitor, csrf = None, doorkeeper.sign_in_token()
        else:
            visitor = await doorkeeper.visitor(request, self._scope)
            csrf = visitor.csrf
        form = await doorkeeper.form(request, csrf) if request.method == "POST" else {}
        return Visit(request=request, visitor=visitor, csrf=csrf, form=form)

    def _failure(self, visit: Visit, error: ArbitrageError) -> Response:
        """Say what went wrong in words."""
        if isinstance(error, StoreError):
            _log.error("%s: %s", type(error).__name__, error)
            words = "The gateway cannot reach its database, so there is nothing to show. The health page says more."
            return self._parts.pages.page(
                "error.html", visit, status=503, title="The database is unreachable", message=words
            )
        failure = failure_of(error)
        message = (
            str(error) if isinstance(error, RequestError) else "The page could not be made; the log has the reason."
        )
        title = _TITLES.get(failure.status, "That did not work")
        return self._parts.pages.page(
            "error.html", visit, status=failure.status, title=title, message=sentence(message)
        )


_TITLES = {403: "Not allowed", 404: "Not found", 401: "Sign in first", 503: "Out of service"}
