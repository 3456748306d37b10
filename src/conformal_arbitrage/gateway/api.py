"""Routes beside those that decide: records, monitor, reviews, webhooks, OpenAPI."""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from conformal_arbitrage.calibration.certificate import package_version
from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.audience import Caller, Views, shown_record, unjudged_record
from conformal_arbitrage.gateway.chat import DecisionsRequest, converted, decoded
from conformal_arbitrage.gateway.http import Handler, Incoming, json_response
from conformal_arbitrage.gateway.policies import PolicyTable
from conformal_arbitrage.gateway.review_queue import TICK, Assignment, Reviewer, ReviewQueue, TeamFigures, team_figures
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.models.completions import PASSED_ON
from conformal_arbitrage.models.webhook import WebhookAttempt, WebhookEndpoint
from conformal_arbitrage.store import claims, events, pages, reviews
from conformal_arbitrage.store import policies as stored_policies
from conformal_arbitrage.store.claims import SavedResponse
from conformal_arbitrage.store.keys import Scope
from conformal_arbitrage.store.pages import RecordFilter
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.store.record import DecisionRecord, Event, FeedbackBody, Grades, JSONObject
from conformal_arbitrage.store.reviews import ReviewOutcome, ReviewRequest
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DecidedBy, Role

MOST = 1000
_AT_ONCE = 8
LONGEST_REASON = 2000
_LONGEST_WAIT = 55.0
_ROOT = "/v1/arbitrage/reviews"
_TEXT_FILTERS = ("policy", "decided_by", "before")
_TIME_FILTERS = ("since", "until")
_Grade = Annotated[float, Meta(extra_json_schema={"enum": [0, 0.5, 1]})]


class Feedback(Struct, forbid_unknown_fields=True):
    """Feedback on a decision, as a caller sends it."""

    grade: Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})] | None = None
    grades: Grades | None = None
    label: int | str | None = None
    comment: str | None = None
    reason: str | None = None


class Install(Struct, forbid_unknown_fields=True):
    """A certificate to install."""

    certificate: JSONObject
    dry_run: bool = False


class Lift(Struct, forbid_unknown_fields=True):
    """Why an alarm is lifted, as a caller sends it."""

    reason: Annotated[str, Meta(extra_json_schema={"minLength": 1})]


class Ballot(Struct, forbid_unknown_fields=True):
    """A vote: the place of the chosen option as shown, or a grade for each answer in the order shown.

    Attributes:
        active: how many seconds the reviewer was.
    """

    choice: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    grades: Annotated[tuple[_Grade, ...], Meta(extra_json_schema={"minItems": 1, "maxItems": 2})] | None = None
    active: float | None = None


# --- Records, feedback and versions of policies ---


class RecordRoutes:
    """Records and policies over HTTP."""

    def __init__(self, views: Views, policies: PolicyTable, config: GatewayConfig) -> None:
        self._views = views
        self._policies = policies
        self._config = config

    async def many(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/records: newest first, those that the caller's view reaches."""
        (wanted, limit), caller = _filters(request), request.caller
        if wanted.policy is not None:
            caller.check_policy(wanted.policy)
        store = self._views.of(caller)
        records = await store.run(pages.records, wanted, limit=limit)
        unjudged = await store.run(pages.yet_to_judge, records)
        rendered: list[bytes] = []
        for record in records:
            shown = unjudged_record(record) if record.id in unjudged else self._shown(record, caller)
            rendered.append(msgspec.json.encode(shown))
            if len(rendered) % _AT_ONCE == 0:
                await asyncio.sleep(0)  # decisions first
        last = msgspec.json.encode(records[-1].id if records else None)
        body = b'{"object":"list","data":[' + b",".join(rendered) + b'],"next":' + last + b"}"
        return Response(body, media_type="application/json")

    async def one(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/records/{id}; an admin who reads it while it is under review is not asked about it any more."""
        caller, store = request.caller, self._views.of(request.caller)
        record = await store.run(pages.record, _record_id(request))
        if record is None:
            raise _no_record()
        if await store.run(pages.yet_to_judge, [record]):
            await store.run(reviews.note_reader, record.id, caller.name)
        return json_response(self._shown(record, caller))

    def _shown(self, record: DecisionRecord, caller: Caller) -> dict[str, object]:
        return shown_record(record, caller, exposed=self._policies.exposes_all(record.policy))

    async def feedback(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/records/{id}/feedback, whether or not people have judged the decision."""
        store = self._views.of(request.caller)
        record = await store.run(pages.subject, _record_id(request))
        if record is None:
            raise _no_record()
        feedback: Feedback = converted(decoded(request.content, self._config), Feedback)
        _check_feedback(feedback)
        if feedback.grades is not None:
            self._check_grades(feedback, record, request.caller)
        from_caller = request.caller.scope == "call"
        body = FeedbackBody(**msgspec.structs.asdict(feedback), by=request.caller.id, from_caller=from_caller)
        full = await store.run(events.add_feedback, Event(id=record.id, body=body))
        if full is not None:
            raise RequestError(
                f"this key has sent feedback on this decision {full[0]} times, {full[1]} bytes in all; at most "
                f"{events.MOST_FEEDBACK} times and {events.FEEDBACK_BYTES} bytes are kept: send less, or keep it elsewhere",
                status=409, code="feedback_full",
            )  # fmt: skip
        return json_response({"id": record.id, "status": "recorded"})

    def _check_grades(self, feedback: Feedback, record: DecisionRecord, caller: Caller) -> None:
        """Check who grades both answers, and that a second grading says why."""
        if caller.scope == "call" and not self._policies.lets_callers_grade(record.policy):
            raise RequestError(
                f"grades feed the next calibration, so they need a key of scope review, or callers_grade = true in "
                f"[policies.{record.policy}]; a grade, a label or a comment does not",
                status=403, code="insufficient_scope", param="grades",
            )  # fmt: skip
        seen = [earlier for earlier in record.feedback if caller.scope != "call" or earlier.by == caller.id]
        if any(earlier.grades is not None for earlier in seen) and not feedback.reason:
            raise RequestError(
                "this decision has grades already, and the first count; give a reason to keep others beside them",
                status=409, code="already_graded", param="reason",
            )  # fmt: skip

    async def policy(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/policies/{name}: what is in force, and what was."""
        policy = self._policies.named(str(request.path_params["name"]), request.caller)
        history = await self._views.of(request.caller).run(stored_policies.history, policy.name)
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


def _record_id(request: Incoming) -> str:
    return str(request.path_params["id"])[:64]


def _no_record() -> RequestError:
    return RequestError("there is no such record", status=404, code="record_not_found")


def _version(version: PolicyVersion) -> dict[str, Any]:
    return msgspec.structs.asdict(version)


def _filters(request: Incoming) -> tuple[RecordFilter, int]:
    """Return the filters of a query, and how many records it wants.

    Raises:
        RequestError: one is unknown, or not a number where it should be.
    """
    parameters = dict(request.query_params)
    unknown = sorted(set(parameters) - {*_TEXT_FILTERS, *_TIME_FILTERS, "limit"})
    if unknown:
        raise RequestError(f"there is no filter {unknown[0]!r:.60}", param=unknown[0][:60])
    fields: dict[str, Any] = {
        name: parameters[name][:200].replace("\0", "") for name in _TEXT_FILTERS if name in parameters
    }
    fields |= {name: _number(name, parameters[name]) for name in _TIME_FILTERS if name in parameters}
    limit = _number("limit", parameters.get("limit", "100"))
    if not 1 <= limit <= MOST or limit != int(limit):
        raise RequestError(f"limit must be a whole number from 1 to {MOST}", param="limit")
    return RecordFilter(**fields), int(limit)


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


# --- Where a policy stands, and lifting an alarm ---


class MonitorRoutes:
    """Monitors and alarms over HTTP."""

    def __init__(
        self, store: Store, views: Views, policies: PolicyTable, watcher: Watcher, config: GatewayConfig
    ) -> None:
        self._change_count = store.change_count
        self._views = views
        self._policies = policies
        self._watcher = watcher
        self._config = config

    async def monitor(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/policies/{name}/monitor: state, reasons, limits, evidence."""
        policy = self._policies.named(str(request.path_params["name"]), request.caller)
        return json_response(self._watcher.document(policy))

    async def lift(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/policies/{name}/lift: end safe mode without a new certificate, which voids the old one."""
        body: Lift = converted(decoded(request.content, self._config), Lift)
        policy = self._policies.named(str(request.path_params["name"]), request.caller)
        if not 0 < len(body.reason.strip()) <= LONGEST_REASON:
            raise RequestError(
                f"say why, in 1 to {LONGEST_REASON} characters: the record keeps it", status=422, param="reason"
            )
        lifted = await self._views.of(request.caller).run(
            stored_policies.lift, policy.name, reason=body.reason, by=request.caller.id, version=policy.version
        )
        if lifted is None:
            raise RequestError(f"policy {policy.name} has no alarm that stands", status=409, code="no_alarm")
        await self._policies.refresh(await self._change_count())
        return json_response({"policy": policy.name, **msgspec.structs.asdict(lifted)})


# --- Reviews ---


class ReviewRoutes:
    """The review queue over HTTP."""

    def __init__(self, store: Store, views: Views, queue: ReviewQueue, config: GatewayConfig) -> None:
        self._store = store
        self._views = views
        self._queue = queue
        self._config = config

    def routes(self) -> list[tuple[str, str, Scope, Handler]]:
        """Return the routes: method, path, scope and handler."""
        return [
            ("GET", _ROOT, "review", self.figures),
            ("GET", f"{_ROOT}/{{decision}}", "call", self.progress),
            ("POST", f"{_ROOT}/claim", "review", self.claim),
            ("POST", f"{_ROOT}/{{token}}/renew", "review", self.renew),
            ("POST", f"{_ROOT}/{{token}}/return", "review", self.give_back),
            ("POST", f"{_ROOT}/{{token}}/skip", "review", self.skip),
            ("POST", f"{_ROOT}/{{token}}/vote", "review", self.vote),
            ("POST", f"{_ROOT}/{{token}}/undo", "review", self.undo),
        ]

    async def claim(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/claim: the question that the reviewer holds, or the next."""
        assignment = await self._queue.take(self._queue.reviewer(request.caller))
        return Response(status_code=204) if assignment is None else _shown(assignment)

    async def renew(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/renew."""
        reviewer, token = self._held(request)
        if not await self._queue.renew(reviewer, token):
            raise _lost()
        return Response(status_code=204)

    async def give_back(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/return."""
        await self._queue.give_back(*self._held(request))
        return Response(status_code=204)

    async def skip(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/skip."""
        reviewer, token = self._held(request)
        if not await self._queue.skip(reviewer, token):
            raise _lost()
        return Response(status_code=204)

    async def vote(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/vote."""
        reviewer, token = self._held(request)
        ballot: Ballot = converted(decoded(request.content, self._config), Ballot)
        if ballot.active is not None and not (isfinite(ballot.active) and 0 <= ballot.active < 86400):
            raise RequestError("active must be a number of seconds, from 0 to a day", status=422, param="active")
        vote = ballot.choice if ballot.grades is None else ballot.grades
        if vote is None or (ballot.choice is not None and ballot.grades is not None):
            raise RequestError("a vote has a choice or, where answers are graded, grades", status=422, param="choice")
        counts = await self._queue.vote(reviewer, token, vote, ballot.active)
        if counts is None:
            raise RequestError(
                "this question was given to someone else; claim another one", status=409, code="item_gone"
            )
        return json_response({"counts_in": round(counts, 3)})

    async def undo(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/undo."""
        assignment = await self._queue.undo(*self._held(request))
        if assignment is None:
            raise RequestError("this vote counts already, or there is none", status=409, code="vote_counts")
        return _shown(assignment)

    def _held(self, request: Incoming) -> tuple[Reviewer, str]:
        return self._queue.reviewer(request.caller), str(request.path_params["token"])[:64].replace("\0", "")

    async def figures(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/reviews: times and agreement of the caller's teams; of all for admins."""
        teams = await team_figures(self._store, self._queue, request.caller)
        return json_response({"object": "list", "data": [asdict(team) for team in teams]})

    async def progress(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/reviews/{decision}: how far people have come, and the reply once there is one."""
        decision = str(request.path_params["decision"])[:64].replace("\0", "")
        ends, document = time.monotonic() + _wait(request), await self._progress(request, decision)
        with self._queue.places.held(request.caller.id) as has_place:
            while has_place and document["status"] == "waiting" and time.monotonic() < ends:
                await asyncio.sleep(TICK)
                document = await self._progress(request, decision)
        return json_response(document)

    async def _progress(self, request: Incoming, decision: str) -> dict[str, object]:
        store = self._views.own(request.caller)  # a reviewer may be asked about what others wait for
        review = await store.run(reviews.request_of, decision)
        if review is None:
            raise RequestError("there is no such review", status=404, code="review_not_found")
        waiting, outcome = review
        reply = None if waiting.body else await self._store.run(claims.saved_response, waiting.key_id, waiting.name)
        return {"id": decision, "status": _status(waiting, outcome, reply), "reply": _reply(reply)}


def _wait(request: Incoming) -> float:
    try:
        wait = float(request.query_params.get("wait", "0"))
    except ValueError as error:
        raise RequestError("wait must be a number of seconds", param="wait") from error
    if not 0 <= wait <= _LONGEST_WAIT:
        raise RequestError(f"wait must be from 0 to {_LONGEST_WAIT:g} seconds", param="wait")
    return wait


def _status(waiting: ReviewRequest, outcome: ReviewOutcome, reply: SavedResponse | None) -> str:
    """Return how far a request has come: it is decided once its reply is there, not with the last vote."""
    if waiting.body:
        return "waiting"
    if outcome.state in ("expired", "failed") and (reply is None or reply.status != 200):
        return outcome.state
    return "decided" if outcome.state != "withdrawn" else "expired"


def _reply(reply: SavedResponse | None) -> object:
    """Return a stored reply: its document, or the text of a stream."""
    if reply is None:
        return None
    if reply.headers.get("content-type") == "application/json":
        return msgspec.json.decode(reply.body)
    return reply.body.decode(errors="replace")


def _shown(assignment: Assignment) -> Response:
    document = asdict(assignment)
    if assignment.kind == "grade":
        document["answers"] = document.pop("options")
        del document["primary_choice"]  # whose answer is whose is never told
    return json_response(document)


def _lost() -> RequestError:
    return RequestError("this question is no longer yours; claim another one", status=409, code="lease_lost")


# --- Tests of webhooks ---


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
        return await webhook.send_test()

    async def test(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/webhooks/{name}/test: what the receiver made of a test message."""
        request.caller.check_unbound("a test of a webhook")
        name = str(request.path_params["name"])
        attempt = await self.attempt(name)
        return json_response(
            {"webhook": name, "status": attempt.status, "seconds": attempt.seconds, "problem": attempt.problem}
        )


# --- OpenAPI ---


_JSON = "application/json"
_EVENTS = "text/event-stream"
_REFERENCE = "#/components/schemas/{name}"
_ABSENT = msgspec.UNSET
"""The default of what a reply may lack."""
_Menu = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=2, extra_json_schema={"uniqueItems": True})]


def _kind(name: str, *fields: tuple[str, Any] | tuple[str, Any, Any], closed: bool = False) -> type[Struct]:
    """Return the kind of a document that is put together elsewhere; a field with a default may be absent."""
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=closed)


_ARBITRAGE = _kind(
    "Arbitrage", ("id", str), ("decided_by", DecidedBy), ("alpha", float | None),
    ("guarantee", Literal["crc", "high_probability", "none"]), ("reason", str, _ABSENT), ("candidates", list[int]),
    ("ignored", list[str], _ABSENT),
    ("legs", list[_kind(
        "Leg", ("role", Role), ("model", str | None), ("usage", JSONObject), ("cost", float | None), ("latency", float),
        ("failed", bool),
    )]),
)  # fmt: skip
_ANSWER = _kind(
    "Answer", ("type", Literal["predicate", "choice", "score"]), ("name", str | None), ("arbitrage", _ARBITRAGE)
)
_RECORD = _kind(
    "Record", ("id", str), ("created", float), ("policy", str), ("key_id", str | None), ("decided_by", str, _ABSENT),
    ("decision", JSONObject), ("completion", JSONObject | None, _ABSENT), ("feedback", list[JSONObject], _ABSENT),
    ("audit", JSONObject | None, _ABSENT),
)  # fmt: skip
_MODEL = _kind("Model", ("id", str), ("object", str))
_KINDS = (
    DecisionsRequest, Feedback, Install, Lift, Ballot,
    _kind(
        "Error",
        ("error", _kind("Refusal", ("message", str), ("type", str), ("code", str | None), ("param", str | None, None))),
    ),
    _kind("Decision", ("model", str), ("answers", list[_ANSWER]), ("usage", JSONObject)),
    _kind(
        "ChatRequest", ("model", str),
        ("messages", Annotated[list[_kind("Message", ("role", str))], Meta(min_length=1)]),
        *((name, Any, None) for name in sorted(PASSED_ON - {"messages", "response_format"})),
        ("response_format", JSONObject | None, None), ("stream", bool | None, None),
        ("stream_options", _kind("StreamOptions", ("include_usage", bool, _ABSENT)) | None, None),
        ("n", Literal[1] | None, None), ("logprobs", bool | None, None),
        ("top_logprobs", Literal[0] | None, None),
        ("arbitrage", _kind(
            "Menu", ("actions", _Menu, _ABSENT),
            ("session", Annotated[str | None, Meta(extra_json_schema={"minLength": 1, "maxLength": 255})], None),
        ) | None, None),
        closed=True,
    ),
    _kind(
        "ChatCompletion", ("id", str), ("object", str), ("created", int), ("model", str),
        ("choices", Annotated[list[JSONObject], Meta(min_length=1, max_length=1)]), ("usage", JSONObject),
        ("arbitrage", _ARBITRAGE),
    ),
    _kind(
        "ResponseRequest", ("model", str), ("input", str | Annotated[list[JSONObject], Meta(min_length=1)]),
        *((name, Any, None) for name in ("metadata", "prompt_cache_key", "prompt_cache_options", "safety_identifier")),
        *((name, Any, None) for name in ("tool_choice", "store", "user")),
        ("instructions", str | None, None), ("stream", bool | None, None), ("temperature", float | None, None),
        ("top_p", float | None, None),
        ("max_output_tokens", Annotated[int | None, Meta(extra_json_schema={"minimum": 1})], None),
        ("text", JSONObject | None, None), ("reasoning", JSONObject | None, None), ("tools", list[JSONObject] | None, None),
        ("parallel_tool_calls", bool | None, None), ("arbitrage", _kind("Options", ("actions", _Menu)) | None, None),
        closed=True,
    ),
    _kind(
        "Response", ("id", str), ("object", str), ("created_at", int), ("status", Literal["completed", "incomplete"]),
        ("model", str), ("output", list[JSONObject]), ("usage", JSONObject), ("arbitrage", _ARBITRAGE),
    ),
    _kind("Models", ("object", str), ("data", list[_MODEL])),
    _kind("Records", ("object", str), ("data", list[_RECORD]), ("next", str | None)),
    _kind(
        "Version", *((name, kind, _ABSENT) for name, kind in (
            ("name", str), ("version", int), ("certificate", JSONObject), ("installed", float), ("installed_by", str),
            ("active", bool), ("status", str),
        ))
    ),
    _kind("Policy", ("name", str), ("version", int), ("history", list[PolicyVersion])),
    _kind("Lifted", ("policy", str), ("version", int), ("lifts", int), ("reason", str), ("by", str)),
    _kind(
        "Monitor", ("policy", str), ("version", int), ("mode", str), ("guarantee", str), ("reason", str | None, None),
        ("watched", bool), ("unwatched", str | None, None), ("alarm", JSONObject | None), ("state", str, _ABSENT),
        ("reasons", list[str], _ABSENT), ("audits", JSONObject, _ABSENT), ("limits", list[float], _ABSENT),
        ("lines", JSONObject, _ABSENT), ("evidence", JSONObject, _ABSENT), ("as_served", JSONObject | None, None),
        ("groups", list[JSONObject], _ABSENT), ("deferred_groups", list[str], _ABSENT), ("false_red", float | None, None),
    ),
    _kind("Nothing"),
    _kind(
        "Assignment", ("token", str), ("kind", str), ("policy", str), ("instructions", str), ("context", str),
        ("options", list[str], _ABSENT), ("answers", list[str], _ABSENT), ("lease", float),
        ("primary_choice", int | None, None),
    ),
    _kind("Voted", ("counts_in", float)),
    _kind("ReviewProgress", ("id", str), ("status", Literal["waiting", "decided", "expired", "failed"]), ("reply", Any)),
    _kind("Figures", ("object", str), ("data", list[TeamFigures])),
    _kind("WebhookTest", ("webhook", str), ("status", int | None), ("seconds", float), ("problem", str | None)),
)  # fmt: skip
_ERRORS = (400, 401, 403, 404, 405, 409, 413, 415, 422, 429, 499, 502, 503, 504)


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=name)}


def _param(name: str, where: str, kind: Any = None) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": kind or {"type": "string"}}


_FILTERS = [
    *(_param(name, "query") for name in _TEXT_FILTERS),
    *(_param(name, "query", {"type": "number"}) for name in _TIME_FILTERS),
    _param("limit", "query", {"type": "integer", "minimum": 1, "maximum": MOST}),
]
_WAIT = [_param("wait", "query", {"type": "number"})]
_TOKEN = f"{_ROOT}/{{token}}"
_POLICY = "/v1/arbitrage/policies/{name}"
_OPERATIONS: tuple[tuple[str, str, str, str, str | None, str | None], ...] = (
    ("post", "/v1/decisions", "decide", "Choose, with a guarantee", "DecisionsRequest", "Decision"),
    ("post", "/v1/chat/completions", "complete", "Chat, with a guarantee", "ChatRequest", "ChatCompletion"),
    ("get", "/v1/models", "models", "The policies", None, "Models"),
    ("get", "/v1/models/{id}", "model", "One policy", None, "Model"),
    ("get", "/v1/arbitrage/records", "records", "Stored decisions", None, "Records"),
    ("get", "/v1/arbitrage/records/{id}", "record", "One decision", None, "Record"),
    ("post", "/v1/arbitrage/records/{id}/feedback", "feedback", "A grade that arrives later", "Feedback", None),
    ("get", _POLICY, "policy", "What is in force, and what was", None, "Policy"),
    ("put", _POLICY, "install", "Install a certificate", "Install", "Version"),
    ("post", f"{_POLICY}/rollback", "rollback", "Go back one version", "Nothing", "Version"),
    ("get", f"{_POLICY}/monitor", "monitor", "What audits say of the loss", None, "Monitor"),
    ("post", f"{_POLICY}/lift", "lift", "Lift the alarm that stands", "Lift", "Lifted"),
    ("post", "/v1/responses", "respond", "The same in the Responses API", "ResponseRequest", "Response"),
    ("post", "/v1/arbitrage/webhooks/{name}/test", "testWebhook", "Send a test message", "Nothing", "WebhookTest"),
    ("get", "/metrics", "metrics", "Figures for Prometheus", None, None),
    ("get", "/", "home", "What this is, and where to go from here", None, None),
    ("get", "/health/live", "live", "The process runs", None, None),
    ("get", "/health/ready", "ready", "It can serve", None, None),
    ("get", _ROOT, "reviews", "Figures of teams of reviewers", None, "Figures"),
    ("get", f"{_ROOT}/{{decision}}", "review", "How far people have come", None, "ReviewProgress"),
    ("post", f"{_ROOT}/claim", "claim", "Take a question", "Nothing", "Assignment"),
    ("post", f"{_TOKEN}/vote", "vote", "Vote", "Ballot", "Voted"),
    ("post", f"{_TOKEN}/undo", "undo", "Take a vote back", "Nothing", "Assignment"),
    ("post", f"{_TOKEN}/renew", "renewQuestion", "Hold a question longer", "Nothing", None),
    ("post", f"{_TOKEN}/return", "returnQuestion", "Give a question back", "Nothing", None),
    ("post", f"{_TOKEN}/skip", "skipQuestion", "Leave it to someone else", "Nothing", None),
)
"""Method, path, name, summary, and the kinds of request and reply."""
_QUERIES: Mapping[str, list[Any]] = {"records": _FILTERS, "review": _WAIT}
_MAY_BE_EMPTY = ("claim", "renewQuestion", "returnQuestion", "skipQuestion")
_MEDIA = {"complete": (_JSON, _EVENTS), "respond": (_JSON, _EVENTS), "metrics": ("text/plain",)}


def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for method, path, name, summary, body, reply in _OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, name, summary, body, reply)
    return paths


def _operation(path: str, name: str, summary: str, body: str | None, reply: str | None) -> dict[str, Any]:
    kinds = {_JSON: {"schema": _reference(reply) if reply else {}}, _EVENTS: {}}
    content = {media: kinds.get(media, {"schema": {"type": "string"}}) for media in _MEDIA.get(name, (_JSON,))}
    responses: dict[str, Any] = {"200": {"description": "done", "content": content}}
    responses |= {"204": {"description": "done, and nothing to show"}} if name in _MAY_BE_EMPTY else {}
    responses |= {
        str(status): {"description": "refused", "content": {_JSON: {"schema": _reference("Error")}}}
        for status in _ERRORS
    }
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "responses": responses}
    parameters = [_param(part, "path") for part in re.findall(r"{(\w+)}", path)] + _QUERIES.get(name, [])
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _reference(body)}}}
    return operation


def schema() -> dict[str, Any]:
    """Return the whole document."""
    _, kinds = msgspec.json.schema_components(
        _KINDS, schema_hook=lambda _: {"description": "any JSON"}, ref_template=_REFERENCE
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Conformal Arbitrage gateway", "version": package_version()},
        "paths": _paths(),
        "components": {
            "schemas": kinds,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }
