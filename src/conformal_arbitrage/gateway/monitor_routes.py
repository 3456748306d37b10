"""The routes for where a policy stands, and for lifting an alarm.

Knows nothing of evidence, or of how decisions are made.
"""

from typing import Any

from msgspec import Struct
from msgspec.structs import asdict
from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.chat_requests import converted, decoded
from conformal_arbitrage.gateway.middleware import Incoming, json_response
from conformal_arbitrage.gateway.policy_table import PolicyTable
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.store.base import Store

_LONGEST_REASON = 2000


class LiftRequest(Struct, forbid_unknown_fields=True):
    """Why an alarm is lifted, as a caller sends it."""

    reason: str


def without_pending(document: dict[str, Any]) -> dict[str, Any]:
    """Return a monitor without how many audits are pending, which would tell people what they are asked for."""
    hidden = {**document}
    if "audits" in document:
        hidden["audits"] = {**document["audits"], "pending": None}
    if "groups" in document:
        hidden["groups"] = [without_pending(group) for group in document["groups"]]
    return hidden


class MonitorRoutes:
    """Monitors and alarms over HTTP."""

    def __init__(self, store: Store, policies: PolicyTable, watcher: Watcher, config: GatewayConfig) -> None:
        self._store = store
        self._policies = policies
        self._watcher = watcher
        self._config = config

    async def monitor(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/policies/{name}/monitor: state, reasons, limits, evidence."""
        policy = self._policies.named(str(request.path_params["name"]))
        request.caller.check_policy(policy.name)
        document = self._watcher.document(policy)
        blind = policy.pair.review is not None and request.caller.scope == "review"
        return json_response(without_pending(document) if blind else document)

    async def lift(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/policies/{name}/lift: end safe mode without a new certificate, which voids the old one."""
        body: LiftRequest = converted(decoded(request.content, self._config), LiftRequest)
        policy = self._policies.named(str(request.path_params["name"]))
        request.caller.check_policy(policy.name)
        if not 0 < len(body.reason.strip()) <= _LONGEST_REASON:
            raise RequestError(
                f"say why, in 1 to {_LONGEST_REASON} characters: the record keeps it", status=422, param="reason"
            )
        lifted = await self._store.lift(policy.name, reason=body.reason, by=request.caller.id, version=policy.version)
        if lifted is None:
            raise RequestError(f"policy {policy.name} has no alarm that stands", status=409, code="no_alarm")
        await self._policies.refresh(await self._store.change_count())
        return json_response({"policy": policy.name, **asdict(lifted)})
