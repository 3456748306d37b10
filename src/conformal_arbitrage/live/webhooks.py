"""The webhooks of a configuration: endpoints with the keys that sign for them, and a message to try one with."""

import os
import time
from pathlib import Path

import msgspec

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import Config, WebhookConfig
from conformal_arbitrage.models.webhook import WebhookAttempt, WebhookEndpoint, signing_keys
from conformal_arbitrage.store.record import new_id


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


async def send_test(webhook: WebhookEndpoint) -> WebhookAttempt:
    """Send a signed message of type webhook.test once; it is neither queued nor sent again."""
    id = f"evt_{new_id()}"
    message: dict[str, object] = {"id": id, "object": "event", "type": "webhook.test"}
    message |= {"created_at": int(time.time()), "data": dict[str, object]()}
    return await webhook.send(id, msgspec.json.encode(message))
