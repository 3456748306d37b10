"""Where the decision record of a configuration is, and how it is opened."""

import os
import re
from pathlib import Path
from urllib.parse import quote

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.store import Store, open_store

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


def existing_secret(config: Config) -> ProjectSecret | None:
    """Return the project's secret, or None.

    Raises:
        ConfigError: it is short enough to be guessed.
    """
    return ProjectSecret.search(config.folder)


async def open_record(config: Config, *, migrating: bool = True) -> Store:
    """Open the store of a configuration, with the keys that sign it if there is a secret, and whom it tells of events.

    Args:
        config: the configuration.
        migrating: whether to bring its tables to this release; if not, they must be there.
    """
    secret = existing_secret(config)
    webhooks = {name: webhook.events for name, webhook in config.gateway.webhooks.items()}
    return await open_store(
        database_of(config),
        keys=() if secret is None else secret.record_keys,
        webhooks=webhooks,
        connections=config.gateway.database_connections,
        migrating=migrating,
    )
