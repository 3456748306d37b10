"""The project's secret, the keys derived from it, and the draws they make."""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

import numpy as np

from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.core.walk import Draw
from conformal_arbitrage.errors import ConfigError, OptionError
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import write_bytes

# --- The draws behind boundary="random" ---


def draw(key: bytes, id: str) -> float:
    """Return the draw of one query: the first 53 bits of HMAC-SHA256(key, id), scaled to [0, 1)."""
    keyed = _keyed(key).copy()
    keyed.update(id.encode())
    digest = keyed.digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


@lru_cache(maxsize=64)
def _keyed(key: bytes) -> hmac.HMAC:
    """Return the keyed hash before any text: setting it up takes longer than hashing an id."""
    return hmac.new(key, digestmod="sha256")


def draws(key: bytes, log: ScoreLog) -> Floats:
    """Return one draw per row of a log, which must have ids."""
    return drawing(key, log)(np.arange(len(log)))


def drawing(key: bytes, log: ScoreLog) -> Draw:
    """Return what gives the draws of some rows of a log, which must have ids; a draw is dear."""
    ids = log.id
    if ids is None:
        raise OptionError(
            f'{log.source}: boundary="random" needs an `id` column, unique and fixed before the scores are known; '
            "row numbers will not do"
        )
    return lambda rows: np.array([draw(key, id) for id in ids[rows].tolist()], dtype=np.float64)


# --- ProjectSecret ---


VARIABLE: Final = "ARBITRAGE_SECRET"
FILE: Final = "arbitrage.secret"
Purpose = Literal[
    "boundary v1",
    "signing v1",
    "audit v1",
    "digest v1",
    "record v1",
    "review v1",
    "looking v1",
]
SHORTEST_SECRET: Final = 16
_REMEDY: Final = f"run `arbitrage init`, or set {VARIABLE} to a long random text"


def subkey(secret: bytes, purpose: Purpose) -> bytes:
    """Return the key for one purpose: HMAC-SHA256(secret, purpose)."""
    return hmac.digest(secret, purpose.encode(), "sha256")


@dataclass(frozen=True, slots=True)
class ProjectSecret:
    """The secret of a project.

    Attributes:
        keys: the secret, and after a rotation its predecessors: the first signs and draws, all verify.
    """

    keys: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def from_text(cls, text: str, *, source: str) -> "ProjectSecret":
        """Return the secrets in a text, separated by commas or white space.

        Raises:
            ConfigError: there is none, or one is short enough to be guessed.
        """
        texts = re.split(r"[,\s]+", text.strip(", \t\r\n"))
        if min(map(len, texts)) < SHORTEST_SECRET:
            raise ConfigError(f"{source}: a secret has {SHORTEST_SECRET} characters or more; {_REMEDY}")
        return cls(tuple(one.encode() for one in texts))

    @classmethod
    def search(cls, *folders: str | Path, environment: Mapping[str, str] | None = None) -> "ProjectSecret | None":
        """Return the secret of the environment, otherwise that of the first folder with a file arbitrage.secret."""
        text = (os.environ if environment is None else environment).get(VARIABLE)
        if text:
            return cls.from_text(text, source=VARIABLE)
        path = next((Path(folder) / FILE for folder in folders if (Path(folder) / FILE).exists()), None)
        return None if path is None else cls.from_text(_read(path), source=str(path))

    @classmethod
    def find(cls, *folders: str | Path) -> "ProjectSecret":
        """Return the project's secret, from the environment or from a folder; by default the current one.

        Raises:
            ConfigError: there is none.
        """
        secret = cls.search(*(folders or (".",)))
        if secret is None:
            places = ", ".join(str(Path(folder) / FILE) for folder in folders or (".",))
            raise ConfigError(f"there is no project secret ({VARIABLE}, {places}); {_REMEDY}")
        return secret

    @classmethod
    def create(cls, folder: str | Path) -> "ProjectSecret":
        """Return the secret of a folder; write a new one, readable by its owner only, if it has none."""
        path = Path(folder) / FILE
        draft = path.with_name(f".{FILE}.{secrets.token_hex(8)}")
        if not path.exists():
            write_bytes(draft, f"{secrets.token_hex(32)}\n".encode(), private=True)
            try:
                os.link(draft, path)  # unlike a rename, keeps what another process has written meanwhile
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        return cls.from_text(_read(path), source=str(path))

    @property
    def id(self) -> str:
        """The fingerprint of the secret that signs and draws; the secret does not follow from it."""
        return hmac.digest(self.keys[0], b"fingerprint v1", "sha256").hex()[:32]

    @property
    def boundary_key(self) -> bytes:
        """The key behind the draws of boundary="random"."""
        return subkey(self.keys[0], "boundary v1")

    @property
    def record_keys(self) -> tuple[bytes, ...]:
        """The keys that sign the decision record: the first signs, all verify."""
        return tuple(subkey(key, "record v1") for key in self.keys)

    def find_boundary_key(self, sha256: str) -> bytes | None:
        """Return the key behind draws that has this digest, of any secret of a rotation; None if no secret has it."""
        keys = (subkey(key, "boundary v1") for key in self.keys)
        return next((key for key in keys if hashlib.sha256(key).hexdigest() == sha256), None)

    def sign(self, content: bytes) -> str:
        """Return the signature of a document."""
        return _signature(self.keys[0], content)

    def verifies(self, content: bytes, signature: str) -> bool:
        """Tell whether a document was signed with one of these secrets."""
        return any(hmac.compare_digest(_signature(key, content), signature) for key in self.keys)


def _signature(key: bytes, content: bytes) -> str:
    return hmac.digest(subkey(key, "signing v1"), content, "sha256").hex()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the secret cannot be read ({error}); {_REMEDY}") from error
