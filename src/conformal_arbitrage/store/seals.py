"""Seals: signatures over what is stored, so that whoever can write to the database alone cannot change it unnoticed.

A seal names its key by a fingerprint, so that records from before a rotation of the secret can still be checked.

Knows nothing of databases, or of where the keys come from.
"""

import hmac
import weakref
from collections.abc import Sequence

import msgspec

from conformal_arbitrage.store.hash_chain import Chain

_lenient = msgspec.json.Encoder(enc_hook=str)  # a damaged row may hold anything


class Seals:
    """Signs rows and checks them; starts the chains of one process and knows how far each is signed.

    Args:
        keys: the first signs, all verify. Without keys nothing is signed, and nothing that was can be checked.

    Attributes:
        signed: number of the last event under a signed head, by writer, for the chains of this process.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {_fingerprint(key): key for key in keys}
        self._chains: dict[str, weakref.ref[Chain]] = {}
        self.signed: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Return whether there are keys."""
        return bool(self._keys)

    def chain(self) -> Chain:
        """Start a chain, keyed if there are keys."""
        name, key = next(iter(self._keys.items()), ("", None))
        chain = Chain(name, key)
        if key is not None:
            self._chains[chain.writer] = weakref.ref(chain)
            self.signed[chain.writer] = 0
        return chain

    def note_signed(self, writer: str, seq: int, *, complete: bool) -> None:
        """Note how far a chain of this process is signed; forget one that has ended and is signed to its end."""
        self.signed[writer] = seq
        if complete and self._chains[writer]() is None:
            del self._chains[writer], self.signed[writer]

    def key_of(self, writer: str) -> bytes | None:
        """Return the key behind a writer's hashes.

        Raises:
            KeyError: it is keyed with a secret that is not among these.
        """
        name, dash, _ = writer.partition("-")
        return self._keys[name] if dash else None

    def sign(self, kind: str, *values: object) -> str | None:
        """Return a seal over values; None without keys."""
        for name, key in self._keys.items():
            return f"{name}:{_signature(key, kind, values)}"
        return None

    def fits(self, seal: object, kind: str, *values: object) -> bool:
        """Return whether a seal was made with one of the keys over exactly these values."""
        name, _, signature = str(seal).partition(":")
        key = self._keys.get(name)
        return key is not None and hmac.compare_digest(_signature(key, kind, values).encode(), signature.encode())


def _fingerprint(key: bytes) -> str:
    return hmac.digest(key, b"fingerprint v1", "sha256").hex()[:8]


def _signature(key: bytes, kind: str, values: Sequence[object]) -> str:
    return hmac.digest(key, _lenient.encode([kind, *values]), "sha256").hex()
