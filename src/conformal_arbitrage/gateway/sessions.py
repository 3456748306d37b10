"""Sessions: a conversation keeps the model that its first turn chose, so that its certificate can speak of sessions.

Switching models in the middle of a conversation throws away the provider's prompt cache, and turns that share a history
are not exchangeable one by one; whole sessions are.

Knows nothing of HTTP, or of how the first turn is decided.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from hashlib import sha256

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.decider import Outcome
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.store.base import Conversation, Store
from conformal_arbitrage.types import Chunk


class Sessions:
    """The sessions of sticky policies, in the store, so that every gateway on it keeps them alike.

    Args:
        store: where they are kept; names only as digests.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def current(self, policy: LivePolicy, caller_id: str, name: str | None) -> Conversation | None:
        """Return the caller's session of that name, unless it has not begun or is over."""
        return None if name is None else await self._store.conversation(caller_id, policy.name, _digest(name))

    async def settled(
        self, steps: AsyncGenerator[Outcome | Chunk], policy: LivePolicy, caller_id: str, name: str, version: int
    ) -> AsyncGenerator[Outcome | Chunk]:
        """Pass on the steps of a turn; with the first outcome its session begins or goes on, before anything is sent.

        Args:
            steps: of the turn.
            policy: a sticky policy.
            caller_id: whose session it is.
            name: the session's name.
            version: of the policy when the session began.

        Raises:
            RequestError: 409 if another request has begun the session meanwhile.
        """
        begun = False
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, Outcome) and not begun:
                    await self._settle(step, policy, caller_id, name, version)
                    begun = True
                yield step

    async def _settle(self, outcome: Outcome, policy: LivePolicy, caller_id: str, name: str, version: int) -> None:
        session = outcome.session or str(outcome.decision.id)
        chosen = outcome.held or ("primary" if outcome.decision.decided_by == "primary" else "guardian")
        mine = Conversation(caller_id, policy.name, _digest(name), session, chosen, version)
        in_force = await self._store.settle_conversation(mine, idle=policy.settings.session_idle)
        if in_force.id != session:
            raise RequestError(
                "another request has begun this session meanwhile; send this turn again", status=409, code="session_begun",
                param="arbitrage.session", headers={"x-should-retry": "true"},
            )  # fmt: skip


def other_session() -> RequestError:
    """Return the error for a key whose decision is not part of the session in force: a key has one decision."""
    return RequestError(
        "the session began otherwise, or ended, since this Idempotency-Key was first used; send the turn with a new key",
        status=409, code="session_begun", param="arbitrage.session", headers={"x-should-retry": "false"},
    )  # fmt: skip


def _digest(name: str) -> str:
    return sha256(name.encode(errors="surrogatepass")).hexdigest()
