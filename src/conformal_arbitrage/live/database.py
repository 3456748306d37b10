"""Where the decision record of a configuration is.

Knows nothing of what is in it.
"""

import os
import re
from pathlib import Path

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import Config


def database_of(config: Config) -> str:
    """Return the database: a URL, or a file beside the configuration; {NAME} comes from the environment."""

    def value(name: re.Match[str]) -> str:
        if name[1] not in os.environ:
            raise ConfigError(f"[gateway] database: the environment variable {name[1]} is not set")
        return os.environ[name[1]]

    location = re.sub(r"\{(\w+)\}", value, config.gateway.database)
    return location if "://" in location else str(Path(config.folder) / location)


def database_exists(config: Config) -> bool:
    """Return whether there may be a record already: a file, or whatever a URL leads to."""
    location = database_of(config)
    return "://" in location or Path(location).exists()
