"""The certificate as a JSON document: which schemas are read, how one is read and written, and what a signature covers.

Knows nothing of what the fields mean; `consistency.py` says which contradict each other.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from conformal_arbitrage.calibration.project_secret import ProjectSecret
from conformal_arbitrage.errors import CertificateError, LaterCertificateError
from conformal_arbitrage.scorelog.files import write_text
from conformal_arbitrage.types import as_object

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = 2
_READABLE = (1, SCHEMA)
_NOT_WRITTEN = frozenset({"key", "fit"})
_ADDED = (
    "regret", "spread", "confidence", "zero_one", "dial", "by", "groups", "small_groups", "unit", "ancestry",
    "margin_quantiles", "score", "learned", "text_sha256",
)  # fmt: skip
"""Fields that the first certificates of schema 2 lack; a signature covers them where they are set."""
ON_THIS_LOG = "on_this_log"
"""What `calibrate --json` prints beside the fields: figures about the log, which no reader of a certificate takes."""
_ARRAYS = "arrays"
_Certificate = TypeVar("_Certificate", bound="DataclassInstance")


@cache
def package_version() -> str:
    """Return the version of this package; each lookup takes longer than the calibration of a small log."""
    from importlib.metadata import version  # takes 20 ms to import

    return version("conformal-arbitrage")


def read_document(source: Path) -> Any:
    """Return the JSON document in a file.

    Raises:
        CertificateError: it is missing, or not JSON.
    """
    try:
        return json.loads(source.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise CertificateError(f"{source}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{source}: is not JSON ({error}); calibrate again") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def write_document(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write a document as JSON that people can read."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def convert_document(document: object, kind: type[_Certificate], source: str) -> _Certificate:
    """Return a document as the dataclass `kind`, checked field by field.

    Raises:
        CertificateError: it is of another schema version, or a field is unknown or of another type.
    """
    content = {name: value for name, value in as_object(document).items() if name != ON_THIS_LOG}
    if content.get("kind") == "path":
        raise CertificateError(
            f"{source}: is the certificate of a cascade, which verify, apply, ask, serve and `certificate show` take"
        )
    schema = content.get("schema")
    if schema not in _READABLE:
        raise LaterCertificateError(
            f"{source}: schema version {schema!r} is none of those that this release reads, 1 and {SCHEMA}; calibrate again"
        )
    unknown = set(content) - ({f.name for f in fields(kind)} - _NOT_WRITTEN)
    if unknown:
        raise LaterCertificateError(f"{source}: unknown field {min(unknown)!r}; calibrate again")
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise CertificateError(f"{source}: {error}; calibrate again") from error


def joined_arrays(document: Mapping[str, Any], packed: bytes) -> dict[str, Any]:
    """Return a document that holds the arrays of a learned score too; its signature covers them by their digest."""
    return {**document, _ARRAYS: b64encode(packed).decode()}


def split_arrays(document: object, source: str) -> tuple[dict[str, Any], bytes | None]:
    """Return a document without the arrays in it, and these; None if it has none.

    Raises:
        CertificateError: they are not base64.
    """
    content = dict(as_object(document))
    packed: object = content.pop(_ARRAYS, None)
    if packed is None:
        return content, None
    try:
        return content, b64decode(str(packed), validate=True)
    except ValueError as error:
        raise CertificateError(f"{source}: its arrays are not base64 ({error}); calibrate again") from error


def signed_bytes(document: Mapping[str, Any]) -> bytes:
    """Return what a signature covers: every field, those that came later only where they are set."""
    covered = {name: value for name, value in document.items() if name not in _ADDED or value is not None}
    if covered.get("learned") is not None:
        terms = as_object(covered["learned"])
        covered["learned"] = {name: value for name, value in terms.items() if name not in _ADDED or value is not None}
    return json.dumps(covered, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def check_signature(
    content: bytes, signature: str | None, secret: ProjectSecret, *, signed_with: str | None, source: str
) -> None:
    """Check that a certificate is as it was signed.

    Args:
        content: what the signature covers.
        signature: the signature; None if there is none.
        secret: the project's secret.
        signed_with: the fingerprint of the secret that signed it, as the certificate states it.
        source: where the certificate came from.

    Raises:
        CertificateError: it is unsigned, was changed, or was signed with another secret.
    """
    if signature is None:
        raise CertificateError(f"{source}: is unsigned; calibrate again with the project's secret at hand")
    if not secret.verifies(content, signature):
        raise CertificateError(
            f"{source}: the signature is not that of this project's secret {secret.id}: the certificate was changed, "
            f"or signed with another secret ({signed_with}); calibrate again, or add that secret after a comma"
        )
