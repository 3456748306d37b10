"""The files in which earlier releases kept the key behind a certificate's draws.

Knows nothing of certificates or draws.
"""

from pathlib import Path

from conformal_arbitrage.errors import CertificateError

_LARGEST_KEY = 1024


def key_path(certificate: str | Path) -> Path:
    """Return where earlier releases saved the key of a certificate."""
    path = Path(certificate)
    return path.with_suffix(".key") if path.suffix == ".json" else path.with_name(path.name + ".key")


def read_key(path: str | Path) -> bytes:
    """Read a key from a file, such as those that earlier releases saved beside certificates."""
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: the key cannot be read ({error.strerror})") from error
    if not 0 < len(key) <= _LARGEST_KEY:
        raise CertificateError(
            f"{path}: is not a key file ({len(key)} bytes); use the one that the certificate was made with"
        )
    return key
