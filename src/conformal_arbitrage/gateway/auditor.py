"""Audits: asking the Guardian in the background about decisions the coin drew, durable across a crash.

Knows nothing of how they were drawn.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from conformal_arbitrage.errors import RequestError, StoreError
from conformal_arbitrage.gateway.policy_table import PolicyTable
from conformal_arbitrage.live.policy import answered, scored
from conformal_arbitrage.scorers.answers import answer_text
from conformal_arbitrage.store.base import Audit, Event, Store
from conformal_arbitrage.types import ChatRequest, Leg, Query

_log = logging.getLogger("conformal_arbitrage.gateway")
LEASE = 10.0
PAUSE = 0.5
AT_ONCE = 8


class Auditor:
    """Does what audits wait in the store."""

    def __init__(self, store: Store, policies: PolicyTable) -> None:
        self._store = store
        self._policies = policies

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            try:
                done = await self.once()
            except StoreError:
                done = 0  # the database is away; requests say so, audits wait
            if not done:
                await asyncio.sleep(PAUSE)

    async def once(self) -> int:
        """Do the audits that are there; how many."""
        audits = await self._store.take_audits(limit=AT_ONCE, lease=LEASE)
        if not audits:
            return 0
        keeping = asyncio.create_task(self._keep([audit.id for audit in audits]))
        try:
            outcomes = await asyncio.gather(*(self._do(audit) for audit in audits), return_exceptions=True)
        finally:
            keeping.cancel()
        for outcome in outcomes:
            if isinstance(outcome, StoreError):
                raise outcome
            if outcome is not None:
                _log.error("an audit failed and will be tried again", exc_info=outcome)
        return len(audits)

    async def _keep(self, ids: Sequence[str]) -> None:
        """Keep audits while the Guardian takes its time; if this process ends, another soon takes them over."""
        while True:
            await asyncio.sleep(LEASE / 3)
            with suppress(StoreError):  # the database is away for now
                await self._store.renew_audits(ids, lease=LEASE)

    async def _do(self, audit: Audit) -> None:
        try:
            body = await self._asked(audit)
        except RequestError:  # the Guardian's limits are reached, or the policy is gone: after the lease
            return
        await self._store.commit([Event(id=audit.id, kind="audit", body=body)])

    async def _asked(self, audit: Audit) -> dict[str, Any]:
        policy = self._policies.named(audit.policy)
        pair = policy.pair
        if ("actions" in audit.payload) != (pair.form == "menu"):
            raise RequestError(f"policy {audit.policy} has another form now", code="wrong_form")
        if pair.form == "menu":
            query = Query(audit.payload["context"], tuple(audit.payload["actions"]), id=audit.id)
            return _body(await scored("guardian", pair.guardian, query))
        request = ChatRequest(audit.payload["request"], id=audit.id)
        leg, answer = await answered("guardian", pair.guardian, request)
        if answer is None or policy.settings.content != "full":
            return {**_body(leg), "answer": None}
        return {**_body(leg), "answer": answer_text(answer.message)}


def _body(leg: Leg) -> dict[str, Any]:
    return {"scores": leg.scores, "error": leg.error, "cost": leg.spent.cost, "served": leg.served}
