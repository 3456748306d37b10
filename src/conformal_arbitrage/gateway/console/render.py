"""Pages of the console: who may open them, their templates, and the parts they share."""

import hashlib
import hmac
import mimetypes
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.audience import AUDIENCES, Caller
from conformal_arbitrage.gateway.auth import ANONYMOUS, Authenticator, check_own_host, check_own_machine, digest
from conformal_arbitrage.gateway.http import read_body
from conformal_arbitrage.gateway.policies import LivePolicy, PolicyTable
from conformal_arbitrage.store import keys, reviews
from conformal_arbitrage.store import ledger as stored_ledger
from conformal_arbitrage.store.keys import Scope
from conformal_arbitrage.store.session import Store

if TYPE_CHECKING:
    from jinja2 import Environment

# --- Visits ---

SIGNED_IN, IDLE = 12 * 3600.0, 3600.0
"""Seconds after which a sign-in is over, and after which it is if no page was asked for."""

_NOTE_EVERY = 60.0
POLL = "x-poll"
"""The header of requests that a page makes by itself: they are no sign that someone is there."""
_LARGEST_FORM, _MOST_FIELDS = 100_000, 50
_FORM = "application/x-www-form-urlencoded"
SIGNED_IN_SCOPES = ("review", "operate")
"""A key opens the console if it opens routes of one of these scopes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Someone who is signed in.

    Attributes:
        caller: whom their key makes them.
        csrf: what forms of their pages carry.
        keyless: no key exists yet, so that whoever sits at this machine may do everything.
    """

    caller: Caller
    csrf: str
    keyless: bool = False

    @property
    def key_id(self) -> str:
        """The id of their key."""
        return self.caller.id

    @property
    def name(self) -> str:
        """The key's label, else its id."""
        return self.caller.name

    @property
    def is_admin(self) -> bool:
        """Whether they may change policies and keys."""
        return self.caller.opens("admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request to the console, by someone who may make it.

    Attributes:
        visitor: who; None on the page where one signs in.
        csrf: what a form of the page must carry.
    """

    request: Request
    visitor: Visitor | None
    csrf: str
    form: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def path(self) -> str:
        """The path that was asked for."""
        return self.request.url.path

    @property
    def query(self) -> Mapping[str, str]:
        """The filters and places in the address; no text is longer than 200 characters."""
        return {name: value[:200].replace("\0", "") for name, value in self.request.query_params.items()}

    def named(self, name: str) -> str:
        """Return a variable part of the path."""
        return str(self.request.path_params[name])[:200].replace("\0", "")

    @property
    def who(self) -> Visitor:
        """The visitor, on pages that need one."""
        if self.visitor is None:
            raise AssertionError("this page is for visitors who are signed in")
        return self.visitor


class SignInNeededError(RequestError):
    """No one is signed in, or no longer."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401, code="sign_in")


class SignIns:
    """The sign-ins of the console: who is signed in, and the forms that their pages send.

    Args:
        secret: behind the tokens of forms.
        public_url: where people reach the console; None for this machine only.
    """

    def __init__(self, store: Store, authenticator: Authenticator, secret: bytes, public_url: str | None) -> None:
        self._store = store
        self._authenticator = authenticator
        self._secret = secret
        self._public = None if public_url is None else urlsplit(public_url)

    def check_host(self, request: Request) -> None:
        """Refuse a request to another name than the console's: a web page may have led a browser here."""
        host = request.headers.get("host", "")
        if self._public is not None and host == self._public.netloc:
            return
        try:
            check_own_host(host)
        except RequestError as error:
            raise RequestError(
                f"{error}; to open the console from elsewhere, set public_url in [gateway]",
                status=403,
                code="wrong_host",
            ) from error

    async def visitor(self, request: Request, scope: Scope | None) -> Visitor:
        """Return who asks for a page; with scope None, whoever is signed in may.

        Raises:
            SignInNeededError: nobody who is signed in.
            RequestError: someone whose key is not enough.
        """
        visitor = await self._known(request)
        if scope is not None and not visitor.caller.opens(scope):
            raise RequestError(f"this needs a key of scope {scope}, and yours has {visitor.caller.scope}", status=403)
        return visitor

    async def _known(self, request: Request) -> Visitor:
        if self._authenticator.needs_no_key:
            peer = None if request.client is None else request.client.host
            check_own_machine(dict(reversed(request.headers.raw)), peer)
            return Visitor(caller=Caller(ANONYMOUS, "admin"), csrf=self._token("no keys yet"), keyless=True)
        token = request.cookies.get(self.cookie_name(request), "")
        signed = await self._store.run(keys.find_sign_in, digest(token)) if token else None
        if signed is None:
            raise SignInNeededError("Sign in with an API key of scope review, operate or admin.")
        if not signed.valid or signed.idle > IDLE:
            await self._store.run(keys.sign_out, digest(token))
            reason = "an hour has passed without a page" if signed.valid else "the key is no longer valid"
            raise SignInNeededError(f"You were signed out: {reason}.")
        if signed.idle > _NOTE_EVERY and POLL not in request.headers:
            await self._store.run(keys.note_sign_in, digest(token))
        caller = Caller(signed.key_id, signed.scope, signed.policies, signed.label)
        return Visitor(caller=caller, csrf=self._token(token))

    async def sign_in(self, request: Request, secret: str, response: Response) -> None:
        """Sign someone in with their key: the response gets a new cookie.

        Raises:
            SignInNeededError: the key is not valid, or has another scope.
        """
        key = await self._authenticator.valid_key(secret.strip())
        if key is None or AUDIENCES[key.scope].opens.isdisjoint(SIGNED_IN_SCOPES):
            raise SignInNeededError("That is not a valid API key of scope review, operate or admin.")
        await self.sign_out(request)
        token = secrets.token_urlsafe(32)
        await self._store.run(keys.sign_in, digest(token), key.id, seconds=SIGNED_IN)
        response.set_cookie(
            self.cookie_name(request), token, httponly=True, samesite="strict", path="/", secure=self._is_secure
        )

    async def sign_out(self, request: Request, response: Response | None = None) -> None:
        """Forget the sign-in of a request, and let the response remove its cookie."""
        name = self.cookie_name(request)
        if token := request.cookies.get(name):
            await self._store.run(keys.sign_out, digest(token))
        if response is not None:
            response.delete_cookie(name, path="/", httponly=True, samesite="strict", secure=self._is_secure)

    async def form(self, request: Request, token: str) -> dict[str, str]:
        """Return the fields of a form that a page of the console sent.

        Args:
            token: what the form must carry, in the field csrf or the header X-CSRF-Token.

        Raises:
            RequestError: it comes from elsewhere, or is not a form.
        """
        self._check_origin(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
            raise RequestError(f"a form is sent as {_FORM}", status=415, code="content_type")
        fields = await _fields(request)
        sent_token = request.headers.get("x-csrf-token") or fields.pop("csrf", "")
        if not hmac.compare_digest(sent_token.encode(), token.encode()):
            raise RequestError(
                "this form is from an earlier sign-in, or from elsewhere; go back and load the page again", status=403
            )
        return fields

    def sign_in_token(self) -> str:
        """Return what the form for signing in carries."""
        return self._token("sign in")

    def cookie_name(self, request: Request) -> str:
        """Return the cookie's name, with the port."""
        server = request.scope.get("server") or ("", 0)
        port = server[1] if self._public is None else self._public.port or (443 if self._is_secure else 80)
        return f"__Host-arbitrage-{port}" if self._is_secure else f"arbitrage-{port}"

    @property
    def _is_secure(self) -> bool:
        return self._public is not None and self._public.scheme == "https"

    def _token(self, text: str) -> str:
        return hmac.new(self._secret, f"console form {text}".encode(), hashlib.sha256).hexdigest()

    def _check_origin(self, request: Request) -> None:
        """Refuse a form of another site, or of another port of this one."""
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if site is not None:
            same = site == "same-origin"
        else:
            host = request.headers.get("host", "")
            public = self._public is not None and host == self._public.netloc
            scheme = self._public.scheme if self._public is not None and public else "http"
            same = origin == f"{scheme}://{host}"
        if not same:
            raise RequestError("this form was sent from another page than the console's", status=403, code="other_site")


async def _fields(request: Request) -> dict[str, str]:
    """Read the fields of a form; of several with one name the first counts."""
    too_large = partial(RequestError, f"a form may have {_LARGEST_FORM:,} bytes", status=413)
    body = await read_body(request.receive, _LARGEST_FORM, too_large)
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise RequestError(f"the form cannot be read, or has more than {_MOST_FIELDS} fields", status=400) from error
    return {name: value.replace("\0", "") for name, value in reversed(pairs)}


# --- Pages and static files of the console, with the headers that all of them carry ---


_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
NAVIGATION: Sequence[tuple[str, str, Scope]] = (
    ("/console", "Overview", "operate"),
    ("/console/decisions", "Decisions", "review"),
    ("/console/review", "Review", "review"),
    ("/console/team", "Team", "review"),
    ("/console/keys", "Keys", "admin"),
    ("/console/health", "Health", "operate"),
)
GATEWAY_WIDE = ("/console/review", "/console/team", "/console/health")
"""Pages about all policies, which a key that is bound to some does not open."""


@cache
def environment() -> "Environment":
    """Return the templates, with what they can call."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, auto_reload=False,
    )  # fmt: skip
    filters: dict[str, Any] = {
        "day": day, "moment": moment, "money": money, "percent": percent, "number": number, "loss": loss_text,
        "seconds": seconds, "age": age, "counted": count_text, "sentence": sentence,
    }  # fmt: skip
    templates.filters.update(filters)
    return templates


class Pages:
    """Makes pages from templates, and serves the files they use."""

    @cached_property
    def _files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((_HERE / "static").iterdir()) if path.is_file()}

    @cached_property
    def digest(self) -> str:
        """The part of the path that changes whenever a static file does."""
        digest = hashlib.sha256()
        for name, content in self._files.items():
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()[:16]

    def page(self, template: str, visit: Visit, *, status: int = 200, since: str = "", **values: object) -> Response:
        """Return a page.

        Args:
            since: how far things had come when the page was made; empty for one that is never fetched again.
        """
        text = (
            environment()
            .get_template(template)
            .render(
                visitor=visit.visitor,
                csrf=visit.csrf,
                path=visit.path,
                navigation=_navigation(visit),
                static=f"/console/static/{self.digest}",
                since=since,
                **values,
            )
        )
        return Response(
            text.encode("utf-8", "replace"), status_code=status, media_type="text/html; charset=utf-8"
        )  # a lone surrogate has no bytes

    def file(self, digest: str, name: str) -> Response:
        """Return a static file.

        Raises:
            RequestError: there is none of that name, or it has changed.
        """
        content = self._files.get(name) if digest == self.digest else None
        if content is None:
            raise RequestError("there is no such file", status=404)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        headers = {"cache-control": "public, max-age=31536000, immutable"}
        return Response(content, media_type=kind, headers=headers)


def _navigation(visit: Visit) -> list[tuple[str, str, bool]]:
    """Return the links of the bar for a visitor, each with whether it leads to where they are."""
    if visit.visitor is None:
        return []
    caller = visit.visitor.caller
    shown = [(path, name) for path, name, scope in NAVIGATION if caller.opens(scope)]
    return [
        (path, name, _is_here(visit.path, path))
        for path, name in shown
        if caller.policies is None or path not in GATEWAY_WIDE
    ]


def _is_here(path: str, link: str) -> bool:
    if link == "/console":
        return path == link or path.startswith("/console/policies/")
    return path.startswith((link, "/console/webhooks/") if link == "/console/health" else link)


def redirect(path: str) -> Response:
    """Return a redirect to a page of the console, after a form."""
    return Response(status_code=303, headers={"location": path})


def sentence(text: str) -> str:
    """Return a message as a sentence: those of the API begin small, and without a full stop at the end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def number(value: float) -> str:
    """Return a count as people write it."""
    return f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Return a share in per cent, or that it is unknown; only none is 0 %, and only all is 100 %."""
    if share is None:
        return "unknown"
    exact = abs(100 * share - round(100 * share)) < 1e-9
    text = f"{100 * share:.0f}" if exact else f"{100 * share:.1f}"
    return f"{_ROUNDED.get(text, text)}\u00a0%"


_ROUNDED = {"0.0": "<0.1", "100.0": ">99.9"}


def count_text(value: float, noun: str) -> str:
    """Return a count with what is counted."""
    return f"{number(value)} {noun}{'' if number(value) == '1' else 's'}"


def money(dollars: float | None) -> str:
    """Return dollars with as many digits as matter; what is unknown is never 0."""
    if dollars is None:
        return "unknown"
    size = abs(dollars)
    text = f"{size:,.0f}" if size >= 1000 else f"{size:,.2f}" if size >= 0.1 or size == 0 else f"{size:.2g}"
    if "e" in text:
        text = f"{size:.8f}".rstrip("0")
    return f"{'−' if dollars < 0 else ''}${text}"


def loss_text(value: float | None) -> str:
    """Return a loss with three digits."""
    return "unknown" if value is None else f"{value:.3f}".replace("-", "−")


def seconds(value: float | None) -> str:
    """Return a length of time."""
    if value is None:
        return "unknown"
    if 0 < value < 0.01:
        return "<0.01 s"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 120 else age(value)


def age(value: float | None) -> str:
    """Return a long time in the unit that fits."""
    if value is None:
        return "unknown"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{value:.0f} s"


def day(time: float) -> str:
    """Return the day of a time, in UTC."""
    then = datetime.fromtimestamp(time, UTC)
    return f"{then.day} {then:%b %Y}"


def moment(time: float | None) -> str:
    """Return a time to the second, in UTC."""
    if time is None:
        return "never"
    then = datetime.fromtimestamp(time, UTC)
    return f"{then.day} {then:%b %Y, %H:%M:%S}"


# --- What several pages need ---


async def changes(store: Store, visit: Visit) -> str:
    """Return how far policies, figures and queue have come; pages are fetched again when it differs from theirs.

    Only operators are told of figures, which change when an audit is drawn.
    """
    caller = visit.who.caller
    policies, queue, figures = await store.change_count(), 0, 0
    if caller.opens("review") and caller.policies is None:
        queue = await store.run(reviews.open_places)
    if caller.opens("operate"):
        ledgers = await store.run(stored_ledger.ledgers)
        figures = sum(ledger.change for ledger in ledgers if caller.sees(ledger.key.policy))
    return f"{policies}-{figures}-{queue}"


def visited_policy(policies: PolicyTable, visit: Visit) -> LivePolicy:
    """Return the policy that a path names.

    Raises:
        RequestError: there is none, it is out of service, or the visitor's key is not good for it.
    """
    name = visit.named("name")
    visit.who.caller.check_policy(name)
    for live in policies.all():
        if live.name == name:
            return live
    if (error := policies.out_of_service().get(name)) is not None:
        raise RequestError(f"Policy {name} is out of service: {error}", status=503)
    raise RequestError(f"There is no policy {name:.80}.", status=404)
