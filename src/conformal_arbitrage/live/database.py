"""Where the decision record of a configuration is, and how it is opened."""

import os
import re
from pathlib import Path
from urllib.parse import quote

from conformal_arbitrage.calibration.secret import VARIABLE, ProjectSecret
from conformal_arbitrage.errors import ArbitrageError, ConfigError, StoreError
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.store import Store, integrity, open_store

_QUOTED = r"[\w.~%!$&'()*+,;=-]*"
"""What needs no quoting in a URL, or is quoted."""


def database_of(config: Config) -> str:
    """Return the database: a URL, or a file beside the configuration; {NAME} comes from the environment."""
    location = filled_address(config.gateway.database, "[gateway] database")
    return location if "://" in location else str(Path(config.folder) / location)


def filled_address(address: str, setting: str) -> str:
    """Return an address with values from the environment in the place of each {NAME}.

    In the password of a URL, a value with special characters is quoted.

    Args:
        address: a URL, or a file.
        setting: where it was given, for the message.

    Raises:
        ConfigError: a variable is not set.
    """

    def value(name: re.Match[str]) -> str:
        if name[1] not in os.environ:
            raise ConfigError(f"{setting}: the environment variable {name[1]} is not set")
        text = os.environ[name[1]]
        is_password = name.string[: name.start()].endswith(":") and name.string[name.end() :].startswith("@")
        return quote(text, safe="") if is_password and not re.fullmatch(_QUOTED, text) else text

    return re.sub(r"\{(\w+)\}", value, address)


def database_exists(config: Config) -> bool:
    """Return whether there may be a record already: a file, or whatever a URL leads to."""
    location = database_of(config)
    return "://" in location or Path(location).exists()


async def open_record(config: Config, *, migrating: bool = True) -> Store:
    """Open the store of a configuration, with the keys that sign it, and whom it tells of events.

    A secret is made only for a database that is not there yet; afterwards `ProjectSecret.find` gives the right one.

    Args:
        config: the configuration.
        migrating: whether to bring its tables to this release; if not, they must be there.

    Raises:
        ConfigError: the database was made with a secret that is not among those given.
    """
    location, secret = database_of(config), ProjectSecret.search()
    shared = "://" in location
    if secret is None and not shared and not Path(location).exists():
        secret = ProjectSecret.find()
    try:
        store = await open_store(
            location,
            keys=() if secret is None else secret.record_keys,
            webhooks={name: webhook.events for name, webhook in config.gateway.webhooks.items()},
            connections=config.gateway.database_connections,
            migrating=migrating and secret is not None,
        )
    except StoreError as error:
        if secret is None and shared:  # perhaps without tables
            raise ConfigError(
                f"gateways that share a database share a secret, and there is none here; set {VARIABLE} for each"
            ) from error
        raise
    try:
        await _check_secret(store, secret, "the database" if shared else location)
    except ArbitrageError:
        await store.close()
        raise
    return store


async def _check_secret(store: Store, secret: ProjectSecret | None, location: str) -> None:
    """Refuse a secret that the database was not made with; a new database remembers the one that is given."""
    needed = await store.run(integrity.secret_fingerprint)
    if needed is None and secret is not None:
        needed = await store.run(integrity.note_secret, secret.id)
    given = () if secret is None else secret.fingerprints
    if needed not in given:
        have = f"the one given has {given[0]}" if given else "there is none here"
        raise ConfigError(
            f"{location} was made with the secret of fingerprint {needed}, and {have}; set {VARIABLE} to that secret, or "
            "after a rotation to the new one, a comma and that one"
        )
