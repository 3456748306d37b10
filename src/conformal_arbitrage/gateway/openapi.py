"""The gateway's schema, as /openapi.json gives it.

Knows nothing of how routes are implemented; a test holds the two together.
"""

from typing import Any

from conformal_arbitrage.scorers.request_fields import PASSED_ON

_JSON = "application/json"
_EVENTS = "text/event-stream"
_ERROR = {"$ref": "#/components/schemas/Error"}
_MAP: dict[str, Any] = {"type": "object"}
_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_BOOLEAN = {"type": "boolean"}


def _object(required: list[str], more: bool = True, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def _array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _nullable(kind: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [kind, {"type": "null"}]}


_PARTS = _array({"type": "object"})
_MESSAGE = _object(["role"], role=_TEXT)
_SCHEMAS: dict[str, Any] = {
    "Error": _object(
        ["error"],
        error=_object(["message", "type", "code"], message=_TEXT, type=_TEXT, code=_nullable(_TEXT), param=_nullable(_TEXT)),
    ),
    "DecisionsRequest": _object(
        ["model", "input", "questions"],
        more=False,
        model=_TEXT,
        input={"anyOf": [_TEXT, _array(_MESSAGE)]},
        questions=_array({"$ref": "#/components/schemas/Question"}, minItems=1),
        prompt_cache_key=_nullable(_TEXT),
        prompt_cache_options=_nullable({"type": "object"}),
        safety_identifier=_nullable(_TEXT),
        metadata=_nullable({"type": "object"}),
    ),
    "Question": {
        "oneOf": [
            _object(
                ["type"], more=False, type={"const": "predicate"},
                instructions={"anyOf": [_TEXT, _PARTS]}, name=_nullable(_TEXT),
            ),
            _object(
                ["type", "choices"], more=False, type={"const": "choice"},
                instructions={"anyOf": [_TEXT, _PARTS]}, name=_nullable(_TEXT),
                choices=_array(
                    _object(
                        ["value"], more=False, value={"anyOf": [{"type": "string", "minLength": 1}, {"type": "boolean"}]},
                        description=_nullable(_TEXT),
                    ), minItems=2, maxItems=255,
                ),
            ),
            _object(
                ["type", "levels"], more=False, type={"const": "score"},
                instructions={"anyOf": [_TEXT, _PARTS]}, name=_nullable(_TEXT),
                levels=_array(
                    _object(["label"], more=False, label={"type": "string", "minLength": 1}, description=_nullable(_TEXT)),
                    minItems=2, maxItems=255,
                ),
            ),
        ]
    },
    "Arbitrage": _object(
        ["id", "decided_by", "alpha", "guarantee", "candidates", "legs"], id=_TEXT,
        decided_by={"enum": ["primary", "guardian", "fallback"]}, alpha=_nullable(_NUMBER),
        guarantee={"enum": ["crc", "high_probability", "none"]}, reason=_TEXT, candidates=_array({"type": "integer"}),
        ignored=_array(_TEXT),
        legs=_array(_object(
            ["role", "model", "usage", "cost", "latency", "failed"], role={"enum": ["primary", "guardian"]},
            model=_nullable(_TEXT), usage=_MAP, cost=_nullable(_NUMBER), latency=_NUMBER, failed=_BOOLEAN,
        )),
    ),
    "Answer": _object(
        ["type", "name", "arbitrage"], type={"enum": ["predicate", "choice", "score"]}, name=_nullable(_TEXT),
        arbitrage={"$ref": "#/components/schemas/Arbitrage"},
    ),
    "Decision": _object(
        ["model", "answers", "usage"], model=_TEXT, answers=_array({"$ref": "#/components/schemas/Answer"}), usage=_MAP
    ),
    "ChatRequest": _object(
        ["model", "messages"], more=False, **{name: {} for name in sorted(PASSED_ON - {"messages", "response_format"})},
        model=_TEXT, messages=_array(_MESSAGE, minItems=1), response_format=_nullable(_MAP), stream=_nullable(_BOOLEAN),
        stream_options=_nullable(_object([], include_usage=_BOOLEAN)), n=_nullable({"const": 1}),
        logprobs=_nullable({"const": False}), top_logprobs=_nullable({"const": 0}),
        arbitrage=_nullable(
            _object(
                [], actions=_array({**_TEXT, "minLength": 1}, minItems=2, uniqueItems=True),
                session=_nullable({**_TEXT, "minLength": 1, "maxLength": 255}),
            )
        ),
    ),
    "ChatCompletion": _object(
        ["id", "object", "created", "model", "choices", "usage", "arbitrage"], id=_TEXT, object=_TEXT,
        created={"type": "integer"}, model=_TEXT, choices=_array(_MAP, minItems=1, maxItems=1), usage=_MAP,
        arbitrage={"$ref": "#/components/schemas/Arbitrage"},
    ),
    "ResponseRequest": _object(
        ["model", "input"], more=False,
        **{name: {} for name in ("metadata", "prompt_cache_key", "prompt_cache_options", "safety_identifier")},
        model=_TEXT, input={"anyOf": [_TEXT, _array(_MAP, minItems=1)]}, instructions=_nullable(_TEXT),
        stream=_nullable(_BOOLEAN), temperature=_nullable(_NUMBER), top_p=_nullable(_NUMBER),
        max_output_tokens=_nullable({"type": "integer", "minimum": 1}), text=_nullable(_MAP), reasoning=_nullable(_MAP),
        tools=_nullable(_array(_MAP)), tool_choice={}, parallel_tool_calls=_nullable(_BOOLEAN), store={}, user={},
        arbitrage=_nullable(_object(["actions"], actions=_array({**_TEXT, "minLength": 1}, minItems=2, uniqueItems=True))),
    ),
    "Response": _object(
        ["id", "object", "created_at", "status", "model", "output", "usage", "arbitrage"], id=_TEXT, object=_TEXT,
        created_at={"type": "integer"}, status={"enum": ["completed", "incomplete"]}, model=_TEXT, output=_array(_MAP),
        usage=_MAP, arbitrage={"$ref": "#/components/schemas/Arbitrage"},
    ),
    "Models": _object(["object", "data"], object=_TEXT, data=_array({"$ref": "#/components/schemas/Model"})),
    "Model": _object(["id", "object"], id=_TEXT, object=_TEXT),
    "Records": _object(
        ["object", "data", "next"], object=_TEXT, data=_array({"$ref": "#/components/schemas/Record"}), next=_nullable(_TEXT)
    ),
    "Record": _object(
        ["id", "created", "policy", "key_id", "decided_by", "decision", "completion", "feedback", "audit"], id=_TEXT,
        created=_NUMBER, policy=_TEXT, key_id=_nullable(_TEXT), decided_by=_TEXT, decision=_MAP,
        completion=_nullable(_MAP), feedback=_array(_MAP), audit=_nullable(_MAP),
    ),
    "Version": _object(
        [], name=_TEXT, version={"type": "integer"}, certificate=_MAP, installed=_NUMBER, installed_by=_TEXT,
        active=_BOOLEAN, status=_TEXT,
    ),
    "Policy": _object(
        ["name", "version", "history"], name=_TEXT, version={"type": "integer"},
        history=_array({"$ref": "#/components/schemas/Version"}),
    ),
    "Feedback": _object(
        [], more=False, grade=_nullable({"type": "number", "minimum": 0, "maximum": 1}),
        grades=_nullable(
            _object(["primary", "guardian"], more=False, primary=_NUMBER, guardian=_NUMBER, chain=_array(_NUMBER))
        ),
        label={"anyOf": [{"type": "integer"}, _TEXT, {"type": "null"}]}, comment=_nullable(_TEXT), reason=_nullable(_TEXT),
    ),
    "Lift": _object(["reason"], more=False, reason={**_TEXT, "minLength": 1}),
    "Lifted": _object(["policy", "version", "lifts", "reason", "by"], policy=_TEXT, version={"type": "integer"}),
    "Monitor": _object(
        ["policy", "version", "mode", "guarantee", "watched", "alarm"], policy=_TEXT, version={"type": "integer"},
        mode={"enum": ["enforce", "shadow", "safe"]}, guarantee=_TEXT, reason=_nullable(_TEXT), watched=_BOOLEAN,
        unwatched=_nullable(_TEXT), alarm=_nullable(_MAP), state=_TEXT, reasons=_array(_TEXT), audits=_MAP,
        limits=_array(_NUMBER), lines=_MAP, evidence=_MAP, as_served=_nullable(_MAP), groups=_array(_MAP),
        deferred_groups=_array(_TEXT), false_red=_nullable(_NUMBER),
    ),
    "Nothing": {"type": "object"},
    "Assignment": _object(
        ["token", "kind", "policy", "instructions", "context", "lease"], token=_TEXT, kind=_TEXT,
        policy=_TEXT, instructions=_TEXT, context=_TEXT, options=_array(_TEXT), answers=_array(_TEXT), lease=_NUMBER,
        primary_choice=_nullable({"type": "integer"}),
    ),
    "Ballot": _object(
        [], more=False, choice=_nullable({"type": "integer", "minimum": 0}), active=_nullable(_NUMBER),
        grades=_nullable({"type": "array", "items": {"enum": [0, 0.5, 1]}, "minItems": 1, "maxItems": 2}),
    ),
    "Voted": _object(["counts_in"], counts_in=_NUMBER),
    "ReviewProgress": _object(
        ["id", "status", "reply"], id=_TEXT, status={"enum": ["waiting", "decided", "expired", "failed"]}, reply={}
    ),
    "TeamFigures": _object(["object", "data"], object=_TEXT, data=_array(_MAP)),
    "WebhookTest": _object(
        ["webhook", "status", "seconds", "problem"], webhook=_TEXT, status=_nullable({"type": "integer"}),
        seconds=_NUMBER, problem=_nullable(_TEXT),
    ),
    "Install": _object(["certificate"], more=False, certificate={"type": "object"}, dry_run=_BOOLEAN),
}  # fmt: skip
_ERRORS = (400, 401, 403, 404, 405, 409, 413, 415, 422, 429, 499, 502, 503, 504)


def _operation(
    name: str,
    summary: str,
    *,
    body: str | None = None,
    reply: str | None = None,
    params: Any = (),
    empty: bool = False,
    media: tuple[str, ...] = (_JSON,),
) -> Any:
    content: dict[str, Any] = {kind: {} if kind == _EVENTS else {"schema": _TEXT} for kind in media}
    if _JSON in content:
        content[_JSON] = {"schema": {"$ref": f"#/components/schemas/{reply}"} if reply else {}}
    responses: dict[str, Any] = {"200": {"description": "done", "content": content}}
    responses |= {"204": {"description": "done, and nothing to show"}} if empty else {}
    responses |= {str(status): {"description": "refused", "content": {_JSON: {"schema": _ERROR}}} for status in _ERRORS}
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "responses": responses}
    if params:
        operation["parameters"] = list(params)
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return operation


def _param(name: str, where: str, kind: Any = None) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": kind or _TEXT}


def _review_paths() -> dict[str, Any]:
    """Return the routes of the review queue."""
    root, token = "/v1/arbitrage/reviews", [_param("token", "path")]
    progress = [_param("decision", "path"), _param("wait", "query", _NUMBER)]
    acts = {"renew": "Hold a question longer", "return": "Give a question back", "skip": "Leave it to someone else"}
    return {
        root: {"get": _operation("reviews", "Figures of teams of reviewers", reply="TeamFigures")},
        f"{root}/{{decision}}": {
            "get": _operation("review", "How far people have come", reply="ReviewProgress", params=progress)
        },
        f"{root}/claim": {
            "post": _operation("claim", "Take a question", body="Nothing", reply="Assignment", empty=True)
        },
        f"{root}/{{token}}/vote": {
            "post": _operation("vote", "Vote", body="Ballot", reply="Voted", params=token)
        },
        f"{root}/{{token}}/undo": {
            "post": _operation("undo", "Take a vote back", body="Nothing", reply="Assignment", params=token)
        },
        **{
            f"{root}/{{token}}/{act}": {
                "post": _operation(f"{act}Question", summary, body="Nothing", params=token, empty=True)
            }
            for act, summary in acts.items()
        },
    }  # fmt: skip


def schema() -> dict[str, Any]:
    """Return the whole document."""
    from importlib.metadata import version

    id, name = [_param("id", "path")], [_param("name", "path")]
    filters = [_param(n, "query") for n in ("policy", "decided_by", "before")]
    filters += [_param(n, "query", _NUMBER) for n in ("since", "until")]
    filters += [_param("limit", "query", {"type": "integer", "minimum": 1, "maximum": 1000})]
    paths: dict[str, Any] = {
        "/v1/decisions": {
            "post": _operation("decide", "Choose, with a guarantee", body="DecisionsRequest", reply="Decision")
        },
        "/v1/chat/completions": {
            "post": _operation(
                "complete", "Chat, with a guarantee", body="ChatRequest", reply="ChatCompletion",
                media=(_JSON, _EVENTS),
            )
        },
        "/v1/models": {"get": _operation("models", "The policies", reply="Models")},
        "/v1/models/{id}": {"get": _operation("model", "One policy", reply="Model", params=id)},
        "/v1/arbitrage/records": {"get": _operation("records", "Stored decisions", reply="Records", params=filters)},
        "/v1/arbitrage/records/{id}": {"get": _operation("record", "One decision", reply="Record", params=id)},
        "/v1/arbitrage/records/{id}/feedback": {
            "post": _operation("feedback", "A grade that arrives later", body="Feedback", params=id)
        },
        "/v1/arbitrage/policies/{name}": {
            "get": _operation("policy", "What is in force, and what was", reply="Policy", params=name),
            "put": _operation("install", "Install a certificate", body="Install", reply="Version", params=name),
        },
        "/v1/arbitrage/policies/{name}/rollback": {
            "post": _operation("rollback", "Go back one version", body="Nothing", reply="Version", params=name)
        },
        "/v1/arbitrage/policies/{name}/monitor": {
            "get": _operation("monitor", "What audits say of the loss", reply="Monitor", params=name)
        },
        "/v1/arbitrage/policies/{name}/lift": {
            "post": _operation("lift", "Lift the alarm that stands", body="Lift", reply="Lifted", params=name)
        },
        "/v1/responses": {
            "post": _operation(
                "respond", "The same in the Responses API", body="ResponseRequest", reply="Response",
                media=(_JSON, _EVENTS),
            )
        },
        **_review_paths(),
        "/v1/arbitrage/webhooks/{name}/test": {
            "post": _operation("testWebhook", "Send a test message", body="Nothing", reply="WebhookTest", params=name)
        },
        "/metrics": {"get": _operation("metrics", "Figures for Prometheus", media=("text/plain",))},
        "/": {"get": _operation("home", "What this is, and where to go from here")},
        "/health/live": {"get": _operation("live", "The process runs")},
        "/health/ready": {"get": _operation("ready", "It can serve")},
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "Conformal Arbitrage gateway", "version": version("conformal-arbitrage")},
        "paths": paths,
        "components": {"schemas": _SCHEMAS, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }
