"""The project's secret, the keys derived from it, and the draws they make."""

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from conformal_arbitrage.core.exact import Draw, Floats, row_gaps
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.scorelog.tables import write_bytes

if TYPE_CHECKING:  # a gateway reads no logs
    from conformal_arbitrage.scorelog.log import ScoreLog

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


def question_draw(key: bytes, context: str | None, actions: Sequence[str] | None, gaps: Sequence[float]) -> float:
    """Return the draw of a question without an id: that of its text and actions, or of its gaps if it has no text.

    The same question has the same draw. Ids and questions are hashed with keys of their own, so that no id can be made to
    share the draw of a question.
    """
    content = ["scores", list(gaps)] if context is None else ["text", context, list(actions or ())]
    return draw(hmac.digest(key, b"question v1", "sha256"), json.dumps(content))


def draws(key: bytes, log: "ScoreLog") -> Floats:
    """Return one draw per row of a log."""
    return drawing(key, log)(np.arange(len(log)))


def drawing(key: bytes, log: "ScoreLog") -> Draw:
    """Return the source of the draws of some rows of a log: by their ids or, without any, by their questions."""
    ids = log.id
    if ids is not None:
        return lambda rows: np.array([draw(key, id) for id in ids[rows].tolist()], dtype=np.float64)

    def by_question(row: int) -> float:
        menu = slice(int(log.offsets[row]), int(log.offsets[row + 1]))
        context = None if log.context is None else str(log.context[row])
        actions = None if log.actions is None else log.actions[menu].tolist()
        return question_draw(key, context, actions, row_gaps(log.primary[menu].tolist(), digits=log.score_digits))

    return lambda rows: np.array([by_question(row) for row in rows.tolist()], dtype=np.float64)


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
    "batch order v1",
    "batch sample v1",
]
SHORTEST_SECRET: Final = 16
_REMEDY: Final = f"set {VARIABLE} to a long random text"
_log = logging.getLogger("conformal_arbitrage")


def user_folder() -> Path:
    """Return the user's configuration directory of this package."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.environ.get("APPDATA") or "~/.config"
    return Path(base).expanduser() / "conformal-arbitrage"


def _folders() -> tuple[Path, ...]:
    """Return the folders whose secret counts, the nearest first."""
    here = Path.cwd()
    return here, *here.parents, user_folder()


def subkey(secret: bytes, purpose: Purpose) -> bytes:
    """Return the key for one purpose: HMAC-SHA256(secret, purpose)."""
    return hmac.digest(secret, purpose.encode(), "sha256")


@dataclass(frozen=True, slots=True)
class ProjectSecret:
    """The secret that signs certificates and records, and makes the draws.

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
        return cls(tuple(secret.encode() for secret in texts))

    @classmethod
    def search(cls) -> "ProjectSecret | None":
        """Return the secret by the rule of `find`, without making one.

        Raises:
            ConfigError: it cannot be read, or is short enough to be guessed.
        """
        if text := os.environ.get(VARIABLE):
            return cls.from_text(text, source=VARIABLE)
        path = next((folder / FILE for folder in _folders() if (folder / FILE).exists()), None)
        return None if path is None else cls.from_text(_read(path), source=str(path))

    @classmethod
    def find(cls) -> "ProjectSecret":
        """Return the secret that signs and draws, by the one rule for all commands, the API and the gateway.

        It is the variable ARBITRAGE_SECRET; else the nearest file arbitrage.secret from the working directory upwards;
        else the user's, in the user's configuration directory, which is made at the first need.

        Raises:
            ConfigError: it cannot be read or written, or is short enough to be guessed.
        """
        secret = cls.search()
        if secret is None:
            folder = user_folder()
            secret = cls.create(folder)
            _log.warning(
                "a secret for you was written to %s (fingerprint %s): it signs your certificates; keep a copy",
                folder / FILE, secret.id,
            )  # fmt: skip
        return secret

    @classmethod
    def create(cls, folder: str | Path) -> "ProjectSecret":
        """Return the secret of a folder; write a new one, readable by its owner only, if it has none."""
        path = Path(folder) / FILE
        draft = path.with_name(f".{FILE}.{secrets.token_hex(8)}")
        if not path.exists():
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise ConfigError(f"{path.parent}: cannot be created ({error.strerror}); {_REMEDY}") from error
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
        return self.fingerprints[0]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints of all secrets of a rotation, the newest first."""
        return tuple(hmac.digest(key, b"fingerprint v1", "sha256").hex()[:32] for key in self.keys)

    def as_of(self, fingerprint: str) -> "ProjectSecret":
        """Return the secret of a rotation that drew with this fingerprint, as one that draws; it has to be among them."""
        place = self.fingerprints.index(fingerprint)
        return ProjectSecret((self.keys[place], *self.keys[:place], *self.keys[place + 1 :]))

    @property
    def boundary_key(self) -> bytes:
        """The key behind the draws of boundary="random"."""
        return subkey(self.keys[0], "boundary v1")

    @property
    def order_key(self) -> bytes:
        """The key behind the draws that order items of equal risk in a batch."""
        return subkey(self.keys[0], "batch order v1")

    @property
    def sample_key(self) -> bytes:
        """The key behind the samples drawn from batches; it has nothing to do with the order of items."""
        return subkey(self.keys[0], "batch sample v1")

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


def project_key() -> bytes:
    """Return the key behind the draws that follows from the project's secret."""
    return ProjectSecret.find().boundary_key


def _signature(key: bytes, content: bytes) -> str:
    return hmac.digest(subkey(key, "signing v1"), content, "sha256").hex()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the secret cannot be read ({error}); {_REMEDY}") from error
