"""What the pages of the console are made from.

Knows nothing of pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.background import Background
from conformal_arbitrage.gateway.console.rendering import Pages
from conformal_arbitrage.gateway.console.visits import Doorkeeper, Visit
from conformal_arbitrage.gateway.middleware import Refresher
from conformal_arbitrage.gateway.policy_table import LivePolicy, PolicyTable
from conformal_arbitrage.gateway.renewer import Renewer
from conformal_arbitrage.gateway.reviewing import Desk
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.gateway.webhook_routes import WebhookTests
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.upstream.breaker import Breaker


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleParts:
    """What the pages of the console are made from."""

    config: Config
    store: Store
    policies: PolicyTable
    watcher: Watcher
    renewer: Renewer
    background: Background
    breakers: Sequence[Breaker]
    refresher: Refresher
    doorkeeper: Doorkeeper
    pages: Pages
    desk: Desk
    webhooks: WebhookTests
    secret: bytes
    clock: Callable[[], float]

    async def changes(self, visit: Visit) -> str:
        """Return how far policies, figures and queue have come; pages are fetched again when it differs from theirs.

        Reviewers are told nothing of figures, which change when an audit is drawn.
        """
        policies, queue = await self.store.change_count(), await self.store.open_places()
        figures = sum(ledger.change for ledger in await self.store.ledgers()) if visit.who.is_admin else 0
        return f"{policies}-{figures}-{queue}"

    def policy(self, visit: Visit) -> LivePolicy:
        """Return the policy that a path names.

        Raises:
            RequestError: there is none, it is out of service, or the visitor's key is not good for it.
        """
        name = visit.named("name")
        visit.who.check_policy(name)
        for live in self.policies.all():
            if live.name == name:
                return live
        if (error := self.policies.out_of_service().get(name)) is not None:
            raise RequestError(f"Policy {name} is out of service: {error}", status=503)
        raise RequestError(f"There is no policy {name:.80}.", status=404)
