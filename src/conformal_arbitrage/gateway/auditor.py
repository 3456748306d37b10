"""Audits: ask the Guardian, in the background, about decisions that the audit coin drew; they survive a crash.

Knows nothing of how decisions are drawn.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from conformal_arbitrage.errors import QuotaError, RequestError, StoreError
from conformal_arbitrage.gateway.policy_table import MenuPair, PolicyTable
from conformal_arbitrage.live.policy import answered, scored
from conformal_arbitrage.scorers.answers import answer_text
from conformal_arbitrage.store.base import Audit, Store
from conformal_arbitrage.store.record import AuditBody, Event, MenuQuestion
from conformal_arbitrage.types import ChatRequest, Leg, Query

_log = logging.getLogger("conformal_arbitrage.gateway")
LEASE = 10.0
PAUSE = 0.5
AT_ONCE = 8


class Auditor:
    """Runs audits queued in the store."""

    def __init__(self, store: Store, policies: PolicyTable) -> None:
        self._store = store
        self._policies = policies

    async def run(self) -> None:
        """Run queued audits until cancelled."""
        while True:
            try:
                count = await self.run_once()
            except StoreError:
                count = 0  # the database is unreachable; requests report that, audits wait
            if not count:
                await asyncio.sleep(PAUSE)

    async def run_once(self) -> int:
        """Run a batch of queued audits; return how many there were."""
        audits = await self._store.take_audits(limit=AT_ONCE, lease=LEASE)
        if not audits:
            return 0
        renewing = asyncio.create_task(self._renew([audit.id for audit in audits]))
        try:
            outcomes = await asyncio.gather(*(self._audit(audit) for audit in audits), return_exceptions=True)
        finally:
            renewing.cancel()
        for audit, outcome in zip(audits, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                raise outcome
            if outcome is not None:
                named = {"policy": audit.policy, "id": audit.id}
                _log.error("an audit failed and will be retried", exc_info=outcome, extra=named)
        return len(audits)

    async def _renew(self, ids: Sequence[str]) -> None:
        """Renew the leases while the Guardian is busy; if this process dies, another soon takes over."""
        while True:
            await asyncio.sleep(LEASE / 3)
            with suppress(StoreError):  # unreachable for now
                await self._store.renew_audits(ids, lease=LEASE)

    async def _audit(self, audit: Audit) -> None:
        try:
            body = await self._ask(audit)
        except (QuotaError, RequestError):  # the quota is used up, or the policy is gone: retry after the lease
            return
        await self._store.commit([Event(id=audit.id, body=body)])

    async def _ask(self, audit: Audit) -> AuditBody:
        policy, question = self._policies.named(audit.policy), audit.question
        pair = policy.pair
        if isinstance(pair, MenuPair) and isinstance(question, MenuQuestion):
            query = Query(question.context, question.actions, id=audit.id)
            return _body(await scored("guardian", pair.guardian, query))
        if isinstance(pair, MenuPair) or isinstance(question, MenuQuestion):
            raise RequestError(f"policy {audit.policy} has another form now", code="wrong_form")
        leg, answer = await answered("guardian", pair.guardian, ChatRequest(question.request, id=audit.id))
        if answer is None or policy.settings.content != "full":
            return _body(leg)
        return _body(leg, answer_text(answer.message))


def _body(leg: Leg, answer: str | None = None) -> AuditBody:
    return AuditBody(scores=leg.scores, error=leg.error, cost=leg.spent.cost, served=leg.served, answer=answer)
