"""The route that tries a webhook: one signed message, sent at once.

Knows nothing of what is queued, or of when a message is sent again.
"""

from collections.abc import Sequence

from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.middleware import Incoming, json_response
from conformal_arbitrage.live.webhooks import send_test
from conformal_arbitrage.upstream.webhook import WebhookAttempt, WebhookEndpoint


class WebhookTests:
    """Tries the webhooks of the configuration; where they are cannot be said in a request."""

    def __init__(self, webhooks: Sequence[WebhookEndpoint]) -> None:
        self._webhooks = {webhook.name: webhook for webhook in webhooks}

    async def attempt(self, name: str) -> WebhookAttempt:
        """Send a test message to a webhook.

        Raises:
            RequestError: there is none of that name.
        """
        if (webhook := self._webhooks.get(name)) is None:
            raise RequestError(
                f"there is no webhook {name:.80}; the configuration has {', '.join(self._webhooks) or 'none'}",
                status=404, code="webhook_not_found",
            )  # fmt: skip
        return await send_test(webhook)

    async def test(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/webhooks/{name}/test: what the receiver made of a test message."""
        name = str(request.path_params["name"])
        attempt = await self.attempt(name)
        return json_response(
            {"webhook": name, "status": attempt.status, "seconds": attempt.seconds, "problem": attempt.problem}
        )
