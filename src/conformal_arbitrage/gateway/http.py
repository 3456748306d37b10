"""Bodies in and JSON out; what all routes share.

Knows nothing of decisions.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from conformal_arbitrage.errors import RequestError


async def read_body(request: Request, limit: int) -> bytes:
    """The body, up to a size."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the caller went away", status=499, code="caller_gone")
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > limit:
            raise RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
    return b"".join(parts)


def json_response(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON document as a response."""
    return Response(encoded(document), status_code=status, headers=headers, media_type="application/json")


def encoded(document: Any) -> bytes:
    """A JSON document as bytes."""
    return msgspec.json.encode(document)
