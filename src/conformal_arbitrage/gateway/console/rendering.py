"""Pages and static files of the console, with the headers that all of them carry.

Templates escape everything; the only markup that is made in code is that of `charts`. No script ever turns text into
markup: the policy in the headers forbids it, so what a model wrote cannot become code.

Knows nothing of policies, records or who may see what.
"""

import hashlib
import mimetypes
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.console.visits import Visit

if TYPE_CHECKING:
    from jinja2 import Environment

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
NAVIGATION = (
    ("/console", "Overview"),
    ("/console/decisions", "Decisions"),
    ("/console/review", "Review"),
    ("/console/team", "Team"),
    ("/console/keys", "Keys"),
    ("/console/health", "Health"),
)


class Pages:
    """Makes pages from templates, and serves the files they use."""

    @cached_property
    def _templates(self) -> "Environment":
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True, auto_reload=False,
        )  # fmt: skip
        filters: dict[str, Any] = {
            "day": day, "moment": moment, "money": money, "percent": percent, "number": number, "loss": loss_text,
            "seconds": seconds, "age": age, "counted": count_text,
        }  # fmt: skip
        templates.filters.update(filters)
        return templates

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
            template: its file.
            visit: whom it is for.
            status: of the response.
            since: how far things had come when the page was made; empty for one that is never fetched again.
            values: what the template shows.
        """
        text = self._templates.get_template(template).render(
            visitor=visit.visitor,
            csrf=visit.csrf,
            path=visit.path,
            navigation=_navigation(visit),
            static=f"/console/static/{self.digest}",
            since=since,
            **values,
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
    shown = [(path, name) for path, name in NAVIGATION if visit.visitor.is_admin or name != "Keys"]
    return [(path, name, _is_here(visit.path, path)) for path, name in shown]


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
