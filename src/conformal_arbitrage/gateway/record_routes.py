"""The routes for reading records, sending feedback and managing policies.

Knows nothing of how decisions are made.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict
from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.auth import Caller
from conformal_arbitrage.gateway.chat_requests import converted, decoded
from conformal_arbitrage.gateway.grading import yet_to_judge
from conformal_arbitrage.gateway.middleware import Incoming, json_response
from conformal_arbitrage.gateway.policy_table import PolicyTable
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.store.base import PolicyVersion, Store
from conformal_arbitrage.store.record import (
    AuditBody,
    Content,
    DecisionBody,
    DecisionRecord,
    Event,
    FeedbackBody,
    Grades,
    JSONObject,
    document,
)
from conformal_arbitrage.types import Leg

MOST = 1000
_AT_ONCE = 8
_TEXT_FILTERS = ("policy", "decided_by", "before")
_TIME_FILTERS = ("since", "until")
HIDDEN: Mapping[type[Struct], frozenset[str]] = {
    DecisionBody: frozenset({"margin", "relaxation"}),
    Leg: frozenset({"scores", "error"}),
    AuditBody: frozenset({"scores", "error"}),
}
"""The fields of a record that would help an attacker; a calling key sees them only where replies show them."""
WITHHELD: Mapping[type[Struct], frozenset[str]] = {
    DecisionRecord: frozenset({"decided_by", "completion", "feedback", "audit"}),
    DecisionBody: frozenset(
        {
            *("action", "candidates", "margin", "relaxation", "learned", "no_guarantee"),
            *("legs", "cost", "audited", "pending", "cancelled", "guarded", "held"),
        }
    ),
    Content: frozenset({"answer", "primary_answer", "chain_answers"}),
}
"""The fields of a record that would tell a reviewer, who has yet to judge, what others think or why people are asked."""


class Feedback(Struct, forbid_unknown_fields=True):
    """Feedback on a decision, as a caller sends it."""

    grade: float | None = None
    grades: Grades | None = None
    label: int | str | None = None
    comment: str | None = None
    reason: str | None = None


class Install(Struct, forbid_unknown_fields=True):
    """A certificate to install."""

    certificate: JSONObject
    dry_run: bool = False


class RecordRoutes:
    """Records and policies over HTTP."""

    def __init__(self, store: Store, policies: PolicyTable, config: GatewayConfig) -> None:
        self._store = store
        self._policies = policies
        self._config = config

    async def many(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/records: newest first; a key of scope call sees its own."""
        records = await self._store.records(
            **_own_policy(_filters(request), request.caller), key_id=request.caller.sees_only
        )
        under = frozenset[str]() if request.caller.scope == "call" else await self._under_review(records)
        if "decided_by" in request.query_params:  # which would tell who decided
            records = [record for record in records if record.id not in under]
        rendered: list[bytes] = []
        for record in records:
            shown = withheld(record) if record.id in under else self._shown(record, request.caller)
            rendered.append(msgspec.json.encode(shown))
            if len(rendered) % _AT_ONCE == 0:
                await asyncio.sleep(0)  # decisions first
        last = msgspec.json.encode(records[-1].id if records else None)
        body = b'{"object":"list","data":[' + b",".join(rendered) + b'],"next":' + last + b"}"
        return Response(body, media_type="application/json")

    async def one(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/records/{id}; an admin who reads it while it is under review is not asked about it any more."""
        record, caller = await self._own(request), request.caller
        if caller.scope != "call" and await self._under_review([record]):
            if caller.scope != "admin":
                return json_response(withheld(record))
            await self._store.note_reader(record.id, caller.label or caller.id)
        return json_response(self._shown(record, caller))

    async def _under_review(self, records: Sequence[DecisionRecord]) -> frozenset[str]:
        """Return the ids of the records that people have yet to judge."""
        by_people = {one.name for one in self._policies.all() if one.pair.review or one.settings.grading == "review"}
        settings = {policy.name: policy.settings for policy in self._policies.all()}
        return await yet_to_judge(self._store, settings, [record for record in records if record.policy in by_people])

    def _shown(self, record: DecisionRecord, caller: Caller) -> dict[str, object]:
        """Return a record as a document; a key of scope call sees no more of it than replies show."""
        everything = caller.scope != "call" or self._policies.exposes_all(record.policy)
        return document(record, without=None if everything else HIDDEN)

    async def feedback(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/records/{id}/feedback."""
        record = await self._own(request)
        feedback: Feedback = converted(decoded(request.content, self._config), Feedback)
        _check_feedback(feedback)
        if feedback.grades is not None:
            self._check_grades(feedback, record, request.caller)
        body = FeedbackBody(**asdict(feedback), by=request.caller.id)
        await self._store.commit([Event(id=record.id, body=body)])
        return json_response({"id": record.id, "status": "recorded"})

    def _check_grades(self, feedback: Feedback, record: DecisionRecord, caller: Caller) -> None:
        """Check who grades both answers, and that a second grading says why.

        Raises:
            RequestError: a calling key grades its own decisions and the policy does not allow that, or the decision has
                grades already and there is no reason.
        """
        if caller.scope == "call" and not self._policies.lets_callers_grade(record.policy):
            raise RequestError(
                f"grades feed the next calibration, so they need a key of scope review, or callers_grade = true in "
                f"[policies.{record.policy}]; a grade, a label or a comment does not",
                status=403, code="insufficient_scope", param="grades",
            )  # fmt: skip
        if any(earlier.grades is not None for earlier in record.feedback) and not feedback.reason:
            raise RequestError(
                "this decision has grades already, and the first count; give a reason to keep others beside them",
                status=409, code="already_graded", param="reason",
            )  # fmt: skip

    async def _own(self, request: Incoming) -> DecisionRecord:
        record = await self._store.record(str(request.path_params["id"])[:64])
        own = request.caller.sees_only
        bound = request.caller.policies
        elsewhere = record is not None and bound is not None and record.policy not in bound
        if record is None or elsewhere or (own is not None and record.key_id != own):
            raise RequestError("there is no such record", status=404, code="record_not_found")
        return record

    async def policy(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/policies/{name}: what is in force, and what was."""
        policy = self._policies.named(str(request.path_params["name"]))
        request.caller.check_policy(policy.name)
        history = await self._store.policy_history(policy.name)
        return json_response(
            {"name": policy.name, "version": policy.version, "history": [_version(version) for version in history]}
        )

    async def install(self, request: Incoming) -> Response:
        """PUT /v1/arbitrage/policies/{name}: a certificate, and nothing else."""
        body: Install = converted(decoded(request.content, self._config), Install)
        name = str(request.path_params["name"])
        request.caller.check_policy(name)
        version = await self._policies.install(name, body.certificate, by=request.caller.id, dry_run=body.dry_run)
        if version is None:
            reason = await self._policies.forfeits(name, body.certificate)
            return json_response(
                {"status": "would be installed"} | ({} if reason is None else {"no_guarantee": reason})
            )
        return json_response(_version(version))

    async def rollback(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/policies/{name}/rollback."""
        name = str(request.path_params["name"])
        request.caller.check_policy(name)
        return json_response(_version(await self._policies.rollback(name, by=request.caller.id)))


def withheld(record: DecisionRecord) -> dict[str, object]:
    """Return a record as whoever may be asked to review it sees it."""
    return {**document(record, without=WITHHELD), "withheld": "under review"}


def _version(version: PolicyVersion) -> dict[str, Any]:
    return asdict(version)


def _filters(request: Incoming) -> dict[str, Any]:
    """Return the filters of a query.

    Raises:
        RequestError: one is unknown, or not a number where it should be.
    """
    parameters = dict(request.query_params)
    unknown = sorted(set(parameters) - {*_TEXT_FILTERS, *_TIME_FILTERS, "limit"})
    if unknown:
        raise RequestError(f"there is no filter {unknown[0]!r:.60}", param=unknown[0][:60])
    texts = {name: parameters[name][:200].replace("\0", "") for name in _TEXT_FILTERS if name in parameters}
    times = {name: _number(name, parameters[name]) for name in _TIME_FILTERS if name in parameters}
    limit = _number("limit", parameters.get("limit", "100"))
    if not 1 <= limit <= MOST or limit != int(limit):
        raise RequestError(f"limit must be a whole number from 1 to {MOST}", param="limit")
    return {**texts, **times, "limit": int(limit)}


def _own_policy(filters: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """Return the filters of a key that is bound to policies: they name one of these.

    Raises:
        RequestError: they name none of several, or another.
    """
    if caller.policies is None:
        return dict(filters)
    name = filters.get("policy", caller.policies[0] if len(caller.policies) == 1 else None)
    if name is None:
        raise RequestError(f"this key is bound to {', '.join(caller.policies)}; name one with ?policy=", param="policy")
    caller.check_policy(name)
    return {**filters, "policy": name}


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise RequestError(f"{name} must be a number", param=name) from error
    if not abs(value) < 1e15:
        raise RequestError(f"{name} must be a number in range", param=name)
    return value


def _check_feedback(feedback: Feedback) -> None:
    grades = () if feedback.grades is None else feedback.grades.values
    if any(grade is not None and not 0 <= grade <= 1 for grade in (feedback.grade, *grades)):
        raise RequestError("a grade is a number from 0 to 1", status=422, code="bad_grade")
    if feedback == Feedback():
        raise RequestError("feedback needs a grade, grades, a label or a comment", status=422, code="empty_feedback")
