"""The webhooks of a configuration: endpoints with the keys that sign for them.

Knows nothing of what they are told.
"""

import os
from pathlib import Path

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import Config, WebhookConfig
from conformal_arbitrage.upstream.webhook import WebhookEndpoint, signing_keys


def webhooks_of(config: Config) -> list[WebhookEndpoint]:
    """Return the webhooks of a configuration.

    Raises:
        ConfigError: a secret is missing or malformed.
    """
    return [
        WebhookEndpoint(name, webhook.url, _keys_of(config, name, webhook))
        for name, webhook in config.gateway.webhooks.items()
    ]


def _keys_of(config: Config, name: str, webhook: WebhookConfig) -> tuple[bytes, ...]:
    section = f"[gateway.webhooks.{name}]"
    if webhook.secret_env is not None:
        text = os.environ.get(webhook.secret_env, "")
        if not text.strip():
            raise ConfigError(
                f"{section} the environment variable {webhook.secret_env} is not set; `arbitrage webhooks secret` prints a "
                "value for it"
            )
        return signing_keys(text, source=f"{section} {webhook.secret_env}")
    path = Path(config.folder) / str(webhook.secret_file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"{section} {path}: the secret cannot be read ({reason}); `arbitrage webhooks secret > {path.name}` writes one"
        ) from error
    return signing_keys(text, source=f"{section} {path}")
