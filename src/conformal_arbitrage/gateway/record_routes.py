"""The routes about what was decided and by which rule: records, feedback, policies.

Knows nothing of deciding.
"""

from dataclasses import asdict
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.chat_requests import converted, decoded
from conformal_arbitrage.gateway.guards import Caller
from conformal_arbitrage.gateway.http import json_response, read_body
from conformal_arbitrage.gateway.policy_table import PolicyTable
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.store.base import DecisionRecord, Event, PolicyVersion, Store

MOST = 1000
_TEXT_FILTERS = ("policy", "decided_by", "before")
_TIME_FILTERS = ("since", "until")


class Grades(Struct, forbid_unknown_fields=True):
    """Grades of both answers, in [0, 1]."""

    primary: float
    guardian: float


class Feedback(Struct, forbid_unknown_fields=True):
    """What was found out later about a decision."""

    grade: float | None = None
    grades: Grades | None = None
    label: int | str | None = None
    comment: str | None = None


class Install(Struct, forbid_unknown_fields=True):
    """A certificate to put in force."""

    certificate: dict[str, Any]
    dry_run: bool = False


class RecordRoutes:
    """Records and policies over HTTP."""

    def __init__(self, store: Store, policies: PolicyTable, config: GatewayConfig) -> None:
        self._store = store
        self._policies = policies
        self._config = config

    async def many(self, request: Request, caller: Caller) -> Response:
        """GET /v1/arbitrage/records: newest first; a key of scope call sees its own."""
        found = await self._store.records(**_filters(request), key_id=_only_own(caller))
        last = found[-1].id if found else None
        return json_response({"object": "list", "data": [self._shown(r, caller) for r in found], "next": last})

    async def one(self, request: Request, caller: Caller) -> Response:
        """GET /v1/arbitrage/records/{id}."""
        return json_response(self._shown(await self._own(request, caller), caller))

    def _shown(self, record: DecisionRecord, caller: Caller) -> dict[str, Any]:
        """A record; a key of scope call sees no more of it than replies show."""
        shown = asdict(record)
        if caller.scope != "call" or self._policies.exposes_all(record.policy):
            return shown
        shown["decision"] = _without(shown["decision"], "margin", "relaxation")
        shown["decision"]["legs"] = [_without(leg, "scores", "error") for leg in shown["decision"].get("legs", ())]
        shown["audit"] = None if record.audit is None else _without(shown["audit"], "scores", "error")
        return shown

    async def feedback(self, request: Request, caller: Caller) -> Response:
        """POST /v1/arbitrage/records/{id}/feedback."""
        record = await self._own(request, caller)
        data = await read_body(request, self._config.max_body)
        told: Feedback = converted(decoded(data, self._config), Feedback)
        _check_feedback(told)
        grades = None if told.grades is None else {"primary": told.grades.primary, "guardian": told.grades.guardian}
        body = {"grade": told.grade, "grades": grades, "label": told.label, "comment": told.comment, "by": caller.id}
        await self._store.commit([Event(id=record.id, kind="feedback", body=body)])
        return json_response({"id": record.id, "status": "recorded"})

    async def _own(self, request: Request, caller: Caller) -> DecisionRecord:
        record = await self._store.record(str(request.path_params["id"])[:64])
        own = _only_own(caller)
        if record is None or (own is not None and record.key_id != own):
            raise RequestError("there is no such record", status=404, code="record_not_found")
        return record

    async def policy(self, request: Request, caller: Caller) -> Response:
        """GET /v1/arbitrage/policies/{name}: what is in force, and what was."""
        policy = self._policies.named(str(request.path_params["name"]))
        history = await self._store.policy_history(policy.name)
        return json_response(
            {"name": policy.name, "version": policy.version, "history": [_version(version) for version in history]}
        )

    async def install(self, request: Request, caller: Caller) -> Response:
        """PUT /v1/arbitrage/policies/{name}: a certificate, and nothing else."""
        data = await read_body(request, self._config.max_body)
        asked: Install = converted(decoded(data, self._config), Install)
        name = str(request.path_params["name"])
        made = await self._policies.install(name, asked.certificate, by=caller.id, dry_run=asked.dry_run)
        return json_response({"status": "would be installed"} if made is None else _version(made))

    async def rollback(self, request: Request, caller: Caller) -> Response:
        """POST /v1/arbitrage/policies/{name}/rollback."""
        return json_response(_version(await self._policies.rollback(str(request.path_params["name"]), by=caller.id)))


def _version(version: PolicyVersion) -> dict[str, Any]:
    return asdict(version)


def _without(document: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}


def _only_own(caller: Caller) -> str | None:
    return caller.id if caller.scope == "call" else None


def _filters(request: Request) -> dict[str, Any]:
    """The query's filters.

    Raises:
        RequestError: one is unknown or no number.
    """
    given = dict(request.query_params)
    unknown = sorted(set(given) - {*_TEXT_FILTERS, *_TIME_FILTERS, "limit"})
    if unknown:
        raise RequestError(f"there is no filter {unknown[0]!r:.60}", param=unknown[0][:60])
    found: dict[str, Any] = {name: given[name][:200].replace("\0", "") for name in _TEXT_FILTERS if name in given}
    for name in _TIME_FILTERS:
        if name in given:
            found[name] = _number(name, given[name])
    limit = _number("limit", given.get("limit", "100"))
    if not 1 <= limit <= MOST or limit != int(limit):
        raise RequestError(f"limit must be a whole number from 1 to {MOST}", param="limit")
    return {**found, "limit": int(limit)}


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise RequestError(f"{name} must be a number", param=name) from error
    if not abs(value) < 1e15:
        raise RequestError(f"{name} must be a number in range", param=name)
    return value


def _check_feedback(told: Feedback) -> None:
    given = [told.grade, *(() if told.grades is None else (told.grades.primary, told.grades.guardian))]
    if any(grade is not None and not 0 <= grade <= 1 for grade in given):
        raise RequestError("a grade is a number from 0 to 1", status=422, code="bad_grade")
    if told.grade is None and told.grades is None and told.label is None and told.comment is None:
        raise RequestError("feedback needs a grade, grades, a label or a comment", status=422, code="empty_feedback")
