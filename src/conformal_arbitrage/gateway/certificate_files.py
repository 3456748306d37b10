"""The certificate files that a configuration names: which of them a start installs, and what it says about them.

Knows nothing of how a certificate is put in force.
"""

from collections.abc import Callable
from pathlib import Path

from conformal_arbitrage.errors import CertificateError, StoreError
from conformal_arbitrage.gateway.cascades import certificate_document
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.store.base import PolicyVersion, Store
from conformal_arbitrage.store.record import JSONObject
from conformal_arbitrage.upstream.base import fingerprint


async def install_files(
    config: Config, store: Store, check: Callable[[str, JSONObject], object]
) -> list[PolicyVersion]:
    """Install each certificate file that changed since the last start; return what was installed.

    Args:
        config: names the files.
        store: where versions are kept.
        check: raises for a certificate that a policy of this configuration cannot be served with.
    """
    named = [(name, settings.certificate) for name, settings in config.policies.items() if settings.certificate]
    versions = [await _install_file(store, name, Path(config.folder) / file, check) for name, file in named]
    return [version for version in versions if version is not None]


async def _install_file(
    store: Store, name: str, path: Path, check: Callable[[str, JSONObject], object]
) -> PolicyVersion | None:
    """Install a certificate file that differs from the one that the last start found.

    One that is the same has been installed, and what was installed after it stays in force. A store without a note of
    the last start takes a file that it has never had.
    """
    document = certificate_document(path)
    sha256 = fingerprint(document)
    last = await store.configured(name)
    history = await store.policy_history(name)
    known = any(version.certificate == document for version in history)
    changed = sha256 != last and (last is not None or not known)
    active = bool(history) and history[0].intact and history[0].certificate == document
    version = None
    if not history or (changed and not active):
        check(name, document)
        newest = history[0].version if history else 0
        version = await store.install(name, document, by="configuration", after=newest)
        if version is None:  # another gateway was first, most likely with the same file
            return await _install_file(store, name, path, check)
    if sha256 != last:
        await store.note_configured(name, sha256)
    return version


async def require_installed(config: Config, store: Store) -> None:
    """Check that every policy with a certificate file has a version, where a start installs none.

    Raises:
        StoreError: one has none.
    """
    installed = {version.name for version in await store.policies()}
    for name, settings in config.policies.items():
        if settings.certificate and name not in installed:
            raise StoreError(
                f"policy {name} has no version in the store, and with --no-migrate none is installed; run `arbitrage "
                "records migrate` with this configuration first"
            )


def note_of_start(config: Config, version: PolicyVersion) -> str:
    """Return which version a start puts in force, and why not the certificate file if it is another."""
    file = config.policies[version.name].certificate
    named = f"version {version.version} is in force"
    if file is None:
        return f"{named}, installed by {version.installed_by}"
    if certificate_document(Path(config.folder) / file) == version.certificate:
        return f"{named}, the certificate file {file}"
    return (
        f"{named}, installed by {version.installed_by}; the certificate file {file} is not, since it is unchanged since "
        "the last start"
    )


def check_intact(version: PolicyVersion) -> None:
    """Refuse a version that is not what was installed.

    Raises:
        CertificateError: it was changed in the store, or a later version was removed.
    """
    if not version.intact:
        raise CertificateError(
            f"policy {version.name}, version {version.version}: it is not what was installed last; run `arbitrage records "
            "verify`, then restore a backup, or put another certificate file in place and start again"
        )
