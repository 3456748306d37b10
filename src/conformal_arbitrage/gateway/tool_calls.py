"""Tool calls that wait for a person: which of an answer's calls do, how they are shown, and how changes to them are checked.

What is shown is what is given out: white space between tokens aside, no character of the arguments is left out, replaced or
put in another order, and those that a page would hide are shown by their numbers.

Knows nothing of queues, requests or who decides.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote_plus

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.argument_schemas import ArgumentSchema
from conformal_arbitrage.store.record import CallVerdict
from conformal_arbitrage.store.review_base import HeldAnswer, ProposedCall, ReviewQuestion
from conformal_arbitrage.types import JSON, Messages, as_list, as_object, is_object, transcript

OPTIONS = ("Approve", "Edit", "Reject")
APPROVE, EDIT, REJECT = range(3)
_VERDICTS: Mapping[int, CallVerdict] = {APPROVE: "approved", EDIT: "edited", REJECT: "rejected"}
_LONGEST_NAME = 64
LONGEST_ARGUMENTS = 100_000
"""Characters that edited arguments may have."""
_LARGEST_FORM, _MOST_EDITABLE = 60_000, 20
_DEEPEST = 64
_LONGEST_KEYWORD, _MOST_KEYWORDS = 40, 12
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+', re.DOTALL)
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
ARGUMENTS = "arguments"


def call_question(
    messages: Messages, answer: Mapping[str, Any], tools: object, patterns: Sequence[str]
) -> ReviewQuestion | None:
    """Return what a person is asked about an answer; None if none of its tool calls has to wait.

    Args:
        messages: the conversation so far.
        answer: the assistant's message.
        tools: those of the request.
        patterns: names of tools whose calls wait, with * and ?.
    """
    calls = _calls(answer, _schemas(tools), patterns)
    if not any(call.held for call in calls):
        return None
    content = answer.get("content")
    said = [{"role": "assistant", "content": content}] if isinstance(content, str) and content.strip() else []
    return ReviewQuestion(
        context=transcript([*messages, *said]),
        options=OPTIONS,
        places=tuple(range(len(OPTIONS))),
        size=len(OPTIONS),
        calls=tuple(calls),
        answer=dict(answer),
    )


def _calls(
    answer: Mapping[str, Any], schemas: Mapping[str, Mapping[str, Any]], patterns: Sequence[str]
) -> list[ProposedCall]:
    listed: JSON = answer.get("tool_calls")
    calls = [
        _call(as_object(call), place, schemas, patterns)
        for place, call in enumerate(listed if isinstance(listed, list) else ())
    ]
    legacy = answer.get("function_call")
    if legacy:
        calls.append(_malformed(as_object(legacy).get("name"), legacy, patterns))
    if listed and not isinstance(listed, list):
        calls.append(_malformed(None, listed, patterns))
    return calls


def _call(
    call: Mapping[str, Any], place: int, schemas: Mapping[str, Mapping[str, Any]], patterns: Sequence[str]
) -> ProposedCall:
    free = not as_object(call.get("function"))
    function = as_object(call.get("custom") if free else call.get("function"))
    name, given = function.get("name"), function.get("input" if free else ARGUMENTS)
    if not isinstance(name, str) or not isinstance(given, str):
        return _malformed(name, call, patterns)
    schema = None if free else schemas.get(name)
    return ProposedCall(
        name=name, arguments=given, held=_waits(name, patterns), place=place, free=free, schema=schema
    )  # fmt: skip


def _malformed(name: object, call: object, patterns: Sequence[str]) -> ProposedCall:
    """Return a call of no known shape: as text, to be approved or rejected as it is."""
    known = name if isinstance(name, str) else "unnamed"
    return ProposedCall(name=known, arguments=json.dumps(call), held=_waits(name, patterns), free=True)


def _waits(name: object, patterns: Sequence[str]) -> bool:
    """Tell whether a call waits; in doubt it does: without a name, or if a lenient client would read it as one that does."""
    if not isinstance(name, str):
        return True
    plain = unicodedata.normalize("NFKC", "".join(c for c in name if not _is_hidden(c))).strip().casefold()
    names = (plain, plain.rpartition(".")[2])
    return any(fnmatchcase(one, pattern.casefold()) for one in names for pattern in patterns)


def _schemas(tools: object) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments by tool."""
    functions = [as_object(as_object(tool).get("function")) for tool in as_list(tools)]
    return {str(one.get("name")): as_object(one.get("parameters")) for one in functions if one.get("parameters")}


def shown_arguments(call: ProposedCall) -> str:
    """Return the arguments of a call to read: JSON with a line for every value, anything else as it is."""
    if call.free or not _is_json(call.arguments):
        return visible(call.arguments)
    lines: list[str] = []
    depth, before = 0, ""
    for token in _TOKEN.findall(call.arguments):
        depth -= token in ("}", "]")
        if _breaks(before, token):
            lines.append("\n" + "  " * depth)
        lines.append(": " if token == ":" else _escaped(token))
        depth += token in ("{", "[")
        before = token
    return "".join(lines)


def visible(text: str) -> str:
    """Return a text in which characters that a page would hide are shown by their numbers."""
    return "".join(f"\u27e8U+{ord(c):04X}\u27e9" if _is_hidden(c) and c not in "\n\t" else c for c in text)


def _breaks(before: str, token: str) -> bool:
    """Return whether a new line begins between two tokens of JSON."""
    return before == "," or (before in ("{", "[")) != (token in ("}", "]"))


def _escaped(token: str) -> str:
    """Return a token of JSON in which no character is hidden; the escapes of JSON mean the same."""
    if not token.startswith('"'):
        return token
    return "".join(json.dumps(c)[1:-1] if _is_hidden(c) else c for c in token)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def editable(calls: Sequence[ProposedCall]) -> tuple[ProposedCall, ...]:
    """Return the calls whose arguments can be changed on a page, in order; none if they are too large for a form."""
    waiting = tuple(call for call in calls if call.held and call.place is not None)
    size = sum(len(quote_plus(shown_arguments(call), errors="replace")) for call in waiting)
    hidden = any(call.free and shown_arguments(call) != call.arguments for call in waiting)
    return () if size > _LARGEST_FORM or len(waiting) > _MOST_EDITABLE or hidden else waiting


def unchecked_text(call: ProposedCall) -> str:
    """Return what is not checked if the arguments of a call are changed, in a sentence; empty if everything is."""
    if call.free:
        return "The input is free text, and a change of it is not checked."
    if call.schema is None:
        return "The tool has no schema: changed arguments have to be a JSON object, and nothing else is checked."
    names = [visible(name[:_LONGEST_KEYWORD]) for name in ArgumentSchema(call.schema).unchecked()]
    more = f" and {len(names) - _MOST_KEYWORDS:,} more" if len(names) > _MOST_KEYWORDS else ""
    return f"Not checked of the tool's schema: {', '.join(names[:_MOST_KEYWORDS])}{more}." if names else ""


def checked_edit(question: ReviewQuestion, choice: int, arguments: Sequence[str] | None) -> str | None:
    """Return changed arguments as they are kept with a vote; None if nothing is changed.

    Args:
        question: with the calls.
        choice: the place of what was chosen.
        arguments: texts for the calls that wait and are well-formed, in order; None to leave all as they are.

    Raises:
        RequestError: they do not go with the choice, or are not what the tool takes; the message says what to do.
    """
    calls = [call for call in question.calls if call.held and call.place is not None]
    if arguments is None:
        if choice == EDIT and question.calls:
            raise _refusal("to edit, give the arguments of the calls that wait, as a list of texts")
        return None
    if len(arguments) != len(calls):
        raise _refusal(f"there are {len(calls)} calls to change; got {len(arguments)} texts")
    texts = [text.replace("\r\n", "\n").strip() for text in arguments]
    changed = {
        str(call.place): text
        for call, text in zip(calls, texts, strict=True)
        if text not in (call.arguments.strip(), shown_arguments(call).strip())
    }
    if choice != EDIT:
        if changed and choice == APPROVE:
            raise _refusal(
                "the arguments were changed; choose Edit to give the call out with these, or change them back"
            )
        return None
    if not changed:
        raise _refusal("nothing was changed; choose Approve to give the call out as it is")
    for call in calls:
        if str(call.place) in changed:
            _check_arguments(call, changed[str(call.place)])
    return json.dumps(changed)


def _check_arguments(call: ProposedCall, text: str) -> None:
    name = f"{call.name:.{_LONGEST_NAME}}"
    if len(text) > LONGEST_ARGUMENTS:
        raise _refusal(f"{name}: arguments may have {LONGEST_ARGUMENTS:,} characters; these have {len(text):,}")
    if call.free:
        return
    try:
        value: object = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"{name}: the arguments are not JSON ({error}); correct them, or reject the call") from error
    if not is_object(value):
        raise _refusal(f"{name}: the arguments must be a JSON object, such as {{}}")
    if _depth(text) > _DEEPEST:
        raise _refusal(f"{name}: the arguments are nested deeper than {_DEEPEST}")
    problem = None if call.schema is None else ArgumentSchema(call.schema).problem(value)
    if problem is not None:
        raise _refusal(f"{name}: {problem}")


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in _TOKEN.findall(text):
        depth += (token in ("{", "[")) - (token in ("}", "]"))
        deepest = max(deepest, depth)
    return deepest


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.60} is there twice")
    return members


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _refusal(message: str) -> RequestError:
    return RequestError(message, status=422, code="bad_arguments", param=ARGUMENTS)


def verdict_of(held: HeldAnswer) -> CallVerdict:
    """Return what people decided about an answer's tool calls; without a verdict, none of them is given out."""
    if held.outcome.action is not None:
        return _VERDICTS[held.outcome.action]
    return "failed" if held.outcome.state == "failed" else "expired"


def names_of(calls: Sequence[ProposedCall]) -> tuple[str, ...]:
    """Return the names of the tools whose calls waited, each once, and no longer than names are."""
    return tuple(dict.fromkeys(visible(call.name[:_LONGEST_NAME]) for call in calls if call.held))


_ENDS: Mapping[CallVerdict, tuple[str, str]] = {
    "rejected": ("a person rejected the call of {}", "A person rejected the call of {}: it has not been made."),
    "expired": (
        "nobody approved the call of {} in time",
        "Nobody approved the call of {} in time: it has not been made.",
    ),
    "failed": (
        "nobody could tell whether {} may be called",
        "Nobody could tell whether {} may be called: the call has not been made.",
    ),
}


def given_answer(held: HeldAnswer) -> tuple[Mapping[str, Any], str | None]:
    """Return the message to give out, and why it has no guarantee; None if it is what was decided."""
    verdict, names = verdict_of(held), ", ".join(names_of(held.question.calls))
    answer = held.question.answer or {}
    if verdict == "approved":
        return answer, None
    if verdict == "edited":
        return _edited(answer, json.loads(held.edit or "{}")), f"a person edited the call of {names}"
    reason, text = _ENDS[verdict]
    return {"role": "assistant", "content": text.format(names)}, reason.format(names)


def _edited(answer: Mapping[str, Any], changed: Mapping[str, str]) -> dict[str, Any]:
    calls = [
        _with_arguments(as_object(call), changed[str(place)]) if str(place) in changed else call
        for place, call in enumerate(as_list(answer.get("tool_calls")))
    ]
    return {**answer, "tool_calls": calls}


def _with_arguments(call: Mapping[str, Any], text: str) -> dict[str, Any]:
    kind, field = ("function", ARGUMENTS) if as_object(call.get("function")) else ("custom", "input")
    return {**call, kind: {**as_object(call.get(kind)), field: text}}
