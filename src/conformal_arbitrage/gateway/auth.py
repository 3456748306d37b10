"""API keys: who is calling, and what their key allows."""

import hashlib
import ipaddress
import os
import re
import secrets
import time
from collections.abc import Mapping

from conformal_arbitrage.errors import ConfigError, RequestError, StoreError
from conformal_arbitrage.gateway.audience import Caller
from conformal_arbitrage.store import keys
from conformal_arbitrage.store.keys import KeyInfo, Scope
from conformal_arbitrage.store.record import new_id
from conformal_arbitrage.store.session import Store

ANONYMOUS = "loopback"
FIRST_KEY = "ARBITRAGE_ADMIN_KEY_SHA256"
"""The environment variable with the digest of a key of scope admin, for a gateway whose database has none."""


_NO_KEYS_YET = Caller(ANONYMOUS, "admin")


def new_key() -> tuple[str, str]:
    """Return a new API key and the digest that is stored."""
    key = "arb-" + secrets.token_urlsafe(32)
    return key, digest(key)


def digest(key: str) -> str:
    """Return the SHA-256 of a key.

    Keys are random, so a slow hash adds nothing, and the database compares digests rather than keys.
    """
    return hashlib.sha256(key.encode()).hexdigest()


async def admit_first_key(store: Store) -> str | None:
    """Create the key whose digest is in the environment, with scope admin, unless there is one; return its id if created.

    A gateway that listens beyond loopback needs a key before it has a database. Several may start at once, and a key that
    was revoked stays revoked.

    Raises:
        ConfigError: the variable does not hold a SHA-256.
    """
    sha256 = os.environ.get(FIRST_KEY, "").strip().lower()
    if not sha256:
        return None
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ConfigError(
            f"{FIRST_KEY} must be the SHA-256 of a key, 64 hexadecimal digits; `arbitrage keys generate` prints both"
        )
    if await store.run(keys.find, sha256) is not None:
        return None
    try:
        await store.run(keys.create, id=(id := new_id()), sha256=sha256, scope="admin", label=f"from {FIRST_KEY}")
    except StoreError:
        if await store.run(keys.find, sha256) is None:  # otherwise another gateway was faster
            raise
        return None
    return id


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_binding(host: str, public_url: str | None, *, has_keys: bool) -> None:
    """Refuse to be reached from elsewhere while no API key is required.

    Raises:
        ConfigError: anyone who reaches the gateway could do everything.
    """
    if has_keys or (is_loopback(host) and public_url is None):
        return
    reached = f"listens on {host}" if public_url is None else f"is reached at public_url = {public_url!r}"
    raise ConfigError(
        f"the gateway {reached}, and there is no API key, so that anybody there could do everything; make the first key: "
        f"arbitrage keys create --scope admin, or set {FIRST_KEY} (arbitrage keys generate)"
    )


class Authenticator:
    """Identifies callers by their API key.

    Until the first key is created, callers on loopback need none; from then on everyone does.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._change_count = -1
        self._known: dict[str, KeyInfo] = {}
        self._needs_no_key = True

    @property
    def needs_no_key(self) -> bool:
        """Whether callers on loopback need no key: none was ever created."""
        return self._needs_no_key

    async def valid_key(self, secret: str) -> KeyInfo | None:
        """Return the key with a secret; None if there is none, or it was revoked, or it has expired."""
        info = await self._find(digest(secret))
        expired = info is not None and info.expires is not None and info.expires <= time.time()
        return None if info is None or info.revoked is not None or expired else info

    async def refresh(self, change_count: int) -> None:
        """Drop cached keys if the store has changed since they were read."""
        if change_count <= self._change_count:
            return
        if self._needs_no_key:
            no_keys = not await self._store.run(keys.exist)
            self._needs_no_key = self._needs_no_key and no_keys  # a concurrent refresh may have seen a key
        if change_count > self._change_count:
            self._change_count, self._known = change_count, {}

    async def caller(self, headers: Mapping[bytes, bytes], scope: Scope, peer: str | None) -> Caller:
        """Identify the caller and check that their key allows what they ask for.

        Args:
            headers: Host, among others, is checked while no key exists, so that a web page cannot call through the browser
                of this machine.
            scope: what the route needs.
            peer: the address of who connected; checked while no key exists. None for a caller in this process.

        Raises:
            RequestError: 401 without a valid key, 403 if its scope is too narrow or the host is wrong.
        """
        if self._needs_no_key:
            check_own_machine(headers, peer)
            return _NO_KEYS_YET
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        info = await self._find(digest(key.strip())) if kind.lower() == "bearer" and key else None
        if info is not None and info.expires is not None and info.expires <= time.time():
            raise RequestError("this API key has expired; ask for a new one", status=401, code="expired_api_key")
        if info is None or info.revoked is not None:
            raise RequestError(
                "a valid API key is required: Authorization: Bearer arb-...", status=401, code="invalid_api_key"
            )
        caller = Caller(info.id, info.scope, info.policies, info.label)
        if not caller.opens(scope):
            raise RequestError(
                f"this key has scope {info.scope}; scope {scope} is required", status=403, code="insufficient_scope"
            )
        return caller

    async def _find(self, sha256: str) -> KeyInfo | None:
        known = self._known  # a refresh while the store is queried replaces the cache, and this entry may be stale
        info = known.get(sha256) or await self._store.run(keys.find, sha256)
        if info is not None:
            known[sha256] = info
        return info


_PASSED_ON = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
"""Headers of requests that a proxy passes on, for whoever reaches it."""


def check_own_machine(headers: Mapping[bytes, bytes], peer: str | None) -> None:
    """Refuse whoever has no key and is not on this machine, by their address, their Host header and a proxy's headers."""
    if peer is not None and not is_loopback(peer):
        raise RequestError(
            f"without API keys only callers on this machine are served, not {peer:.80}", status=403, code="wrong_host"
        )
    if not _PASSED_ON.isdisjoint(headers):
        raise RequestError(
            "without API keys nobody is served through a proxy; make the first key: arbitrage keys create --scope admin",
            status=403, code="wrong_host",
        )  # fmt: skip
    check_own_host(headers.get(b"host", b"").decode("latin-1"))


def check_own_host(header: str) -> None:
    """Refuse a Host header that does not name this machine's loopback."""
    name = header.rsplit(":", 1)[0] if re.search(r":\d*$", header) and not header.endswith("]") else header
    host = name.strip("[]")
    if not is_loopback(host):
        raise RequestError(f"the host {host!r:.80} is not this machine", status=403, code="wrong_host")
