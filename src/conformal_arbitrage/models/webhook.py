"""WebhookEndpoint: send signed messages to one receiver, by the Standard Webhooks convention.

A message keeps its id over all attempts; the timestamp is that of the attempt. The signature covers both and the body. No
redirect is followed, and what the receiver answers beyond its status is read up to a limit and thrown away.
"""

import asyncio
import base64
import binascii
import hmac
import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.models.endpoint import json_session, retry_after_of

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession


TIMEOUT = 15.0
"""Seconds for one attempt, from connecting to the status of the reply."""
LARGEST_RECEIPT = 4096
"""So much of a reply's body is read, so that the receiver can finish sending a short one."""
GONE = 410
"""The status by which a receiver says that it wants no more."""
_PREFIX = "whsec_"
_SHORTEST, _LONGEST = 24, 64
_REMEDY = f"one is {_PREFIX} and the base64 of {_SHORTEST} to {_LONGEST} bytes: `arbitrage webhooks secret` prints one"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookAttempt:
    """How an attempt ended.

    Attributes:
        problem: why the message counts as not delivered, without the URL or anything that the receiver wrote; None if it
            was.
        status: of the reply; None if there was none.
        retry_after: seconds that the receiver asks to wait.
        seconds: how long it took.
    """

    problem: str | None
    status: int | None = None
    retry_after: float | None = None
    seconds: float = 0.0


def signing_keys(text: str, *, source: str) -> tuple[bytes, ...]:
    """Return the keys in a text of one or, during a rotation, several secrets, separated by commas or white space.

    Raises:
        ConfigError: there is none, or one is malformed; the message does not hold it.
    """
    given = [secret for secret in re.split(r"[,\s]+", text) if secret]
    if not given:
        raise ConfigError(f"{source}: there is no secret in it; {_REMEDY}")
    return tuple(_signing_key(secret, source) for secret in given)


def _signing_key(secret: str, source: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"{source}: the secret is malformed; {_REMEDY}") from None
    if not secret.startswith(_PREFIX) or not _SHORTEST <= len(key) <= _LONGEST:
        raise ConfigError(f"{source}: the secret is malformed; {_REMEDY}")
    return key


def signature(keys: Sequence[bytes], id: str, timestamp: int, body: bytes) -> str:
    """Return the signatures of a message, one for each key: v1 and the base64 of HMAC-SHA256 of ID.TIMESTAMP.BODY."""
    content = f"{id}.{timestamp}.".encode() + body
    return " ".join(f"v1,{base64.b64encode(hmac.digest(key, content, 'sha256')).decode()}" for key in keys)


class WebhookEndpoint:
    """A receiver of messages.

    Args:
        name: what logs and metrics call it; its URL is in neither.
        url: where messages are posted.
        keys: sign the messages.
        timeout: seconds for one attempt.
    """

    def __init__(self, name: str, url: str, keys: Sequence[bytes], *, timeout: float = TIMEOUT) -> None:
        self.name = name
        self._url = url
        self._keys = tuple(keys)
        self._timeout = timeout
        self._session: ClientSession | None = None
        self._failures: tuple[type[Exception], ...] = (OSError, ValueError)

    async def send(self, id: str, body: bytes) -> WebhookAttempt:
        """Send a message once.

        Args:
            id: of the message, the same for every attempt.
            body: JSON.
        """
        timestamp, start = int(time.time()), time.perf_counter()
        headers = {
            "webhook-id": id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(self._keys, id, timestamp, body),
        }
        session = self._session or self._connect()
        problem, status, wait = None, None, None
        try:
            async with (
                asyncio.timeout(self._timeout),
                session.post(self._url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                status, wait = response.status, retry_after_of(response.headers)
                await _discard(response)
        except TimeoutError:
            problem = f"no answer within {self._timeout:g} s"
        except self._failures as error:
            problem = _words(error)
        if status is not None:  # it counts, whatever became of the body
            problem = _refusal(status)
        return WebhookAttempt(problem=problem, status=status, retry_after=wait, seconds=time.perf_counter() - start)

    async def send_test(self) -> WebhookAttempt:
        """Send a signed message of type webhook.test once; it is neither queued nor sent again."""
        id = f"evt_test_{secrets.token_hex(12)}"
        message: dict[str, object] = {"id": id, "object": "event", "type": "webhook.test"}
        message |= {"created_at": int(time.time()), "data": dict[str, object]()}
        return await self.send(id, json.dumps(message, separators=(",", ":")).encode())

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _connect(self) -> "ClientSession":
        self._session, self._failures = json_session({"User-Agent": "conformal-arbitrage"}, force_close=True)
        return self._session


async def _discard(response: "ClientResponse") -> None:
    """Read a short reply to its end; the status has decided already."""
    left = LARGEST_RECEIPT
    while left > 0 and (portion := await response.content.read(left)):
        left -= len(portion)


def _refusal(status: int) -> str | None:
    if 200 <= status < 300:
        return None
    return f"status {status}" + ("; redirects are not followed" if 300 <= status < 400 else "")


def _words(error: Exception) -> str:
    """Return why there was no answer, without the URL, which may hold a token."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return f"the connection failed ({reason})"


def url_mistake(url: str) -> str | None:
    """Return why a URL cannot be posted to; None if it can."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
        parts = urlsplit("")
    if parts.username or parts.password or parts.fragment:
        return "must not contain a user, a password or a fragment; receivers check the signature"
    return None if valid else "must be a URL such as https://example.com/hooks"
