"""Questions to put to models: multiple choice and chat requests, from JSON Lines, Parquet or CSV.

Knows nothing of models or scores.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal, cast

from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.files import Table
from conformal_arbitrage.types import ChatRequest, Query
from conformal_arbitrage.upstream.base import fingerprint

AnswerIs = Literal["letter", "index", "text"]
_BODY = ("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format")
_TOOL_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Menus:
    """Multiple-choice questions.

    Attributes:
        queries: with ids, in the file's order.
        labels: index of each right action, if the file has answers.
        groups: subject, tenant, language, if the file has them.
    """

    queries: list[Query]
    labels: list[int] | None = None
    groups: list[str] | None = None

    def first(self, limit: int | None) -> "Menus":
        """The first rows."""
        cut = slice(limit)
        labels = None if self.labels is None else self.labels[cut]
        return Menus(queries=self.queries[cut], labels=labels, groups=None if self.groups is None else self.groups[cut])


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Chat requests, and what is expected of the answers where the file says so."""

    requests: list[ChatRequest]
    expected: list[str] | None = None
    groups: list[str] | None = None

    def first(self, limit: int | None) -> "Requests":
        """The first rows."""
        cut = slice(limit)
        expected = None if self.expected is None else self.expected[cut]
        groups = None if self.groups is None else self.groups[cut]
        return Requests(requests=self.requests[cut], expected=expected, groups=groups)


def read_menus(
    path: str | Path,
    *,
    question_column: str = "question",
    choice_columns: Sequence[str] = (),
    choices_column: str = "choices",
    answer_column: str | None = None,
    answer_is: AnswerIs | None = None,
    id_column: str | None = None,
    group_column: str | None = None,
) -> Menus:
    """Read multiple-choice questions.

    Args:
        path: .jsonl, .jsonl.gz, .parquet or .csv.
        question_column: the question's text.
        choice_columns: one column per option; or else
        choices_column: one column with the list of options.
        answer_column: the right option, by letter, index from 0 or text; `answer` unless given, if there is one.
        answer_is: which of the three; found out from the whole column unless given.
        id_column: unique names; `id` unless given, if there is one; else made from the content.
        group_column: subject, tenant, language; `group` unless given, if there is one.
    """
    with Table(path) as table:
        texts = _column(table, question_column, "--question-column")
        menus = _menus(table, choice_columns, choices_column)
        answer = _optional(table, answer_column, "answer", "--answer-column")
        contents = [[text, menu] for text, menu in zip(texts, menus, strict=True)]
        ids = _ids(table, id_column, contents)
        groups = _optional(table, group_column, "group", "--group-column")
    for row, menu in enumerate(menus, start=1):
        if not menu or not all(menu):
            raise ScoreLogError(f"{path}: row {row} has no options, or an empty one; correct that row")
    queries = [Query(text, tuple(menu), id=name) for text, menu, name in zip(texts, menus, ids, strict=True)]
    labels = None if answer is None else _labels(str(path), answer, menus, answer_is)
    return Menus(queries=queries, labels=labels, groups=groups)


def read_requests(
    path: str | Path,
    *,
    question_column: str | None = None,
    answer_column: str | None = None,
    id_column: str | None = None,
    group_column: str | None = None,
) -> Requests:
    """Read chat requests: rows of `messages`, with `tools`, `tool_choice` and `response_format` where given.

    Args:
        path: .jsonl, .jsonl.gz, .parquet or .csv; what is not text is JSON.
        question_column: a plain question per row instead of `messages`.
        answer_column: what the grader compares with; `expected` unless given, if there is one.
        id_column: as for menus.
        group_column: as for menus.
    """
    with Table(path) as table:
        if question_column is not None:
            asked = _column(table, question_column, "--question-column")
            bodies: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": text}]} for text in asked]
        else:
            _column(table, "messages", "--question-column")
            given = {name: table.texts(name).tolist() for name in _BODY if name in table.types}
            bodies = [_body(path, row, {k: v[row] for k, v in given.items()}) for row in range(table.rows)]
        ids = _ids(table, id_column, bodies)
        expected = _optional(table, answer_column, "expected", "--answer-column")
        groups = _optional(table, group_column, "group", "--group-column")
    requests = [ChatRequest(body, id=name) for body, name in zip(bodies, ids, strict=True)]
    return Requests(requests=requests, expected=expected, groups=groups)


def _body(path: str | Path, row: int, fields: dict[str, str]) -> dict[str, Any]:
    """One request from its columns; what is empty is left out."""
    try:
        body = {name: _field(name, text) for name, text in fields.items() if text and text != "null"}
    except ValueError as error:
        raise ScoreLogError(f"{path}: row {row + 1}: messages and tools must be JSON ({error})") from error
    messages: object = body.get("messages")
    listed = cast("list[object]", messages) if isinstance(messages, list) else []
    if not listed or not all(isinstance(m, dict) and "role" in m for m in listed):
        raise ScoreLogError(
            f'{path}: row {row + 1}: messages must be a list such as [{{"role": "user", "content": "Hello"}}]'
        )
    return body


def _field(name: str, text: str) -> Any:
    """A column's JSON; a tool choice may be a word."""
    return text if name == "tool_choice" and text in _TOOL_CHOICES else json.loads(text)


def _column(table: Table, name: str, option: str) -> list[str]:
    if name not in table.types:
        raise ScoreLogError(
            f"{table.path}: there is no column '{name}'; it has {', '.join(sorted(table.types))}; name another with {option}"
        )
    return table.texts(name).tolist()


def _optional(table: Table, name: str | None, usual: str, option: str) -> list[str] | None:
    if name is None and usual not in table.types:
        return None
    return _column(table, name or usual, option)


def _menus(table: Table, choice_columns: Sequence[str], choices_column: str) -> list[list[str]]:
    if choice_columns:
        columns = [_column(table, name, "--choice-columns") for name in choice_columns]
        menus = [[text for text in row if text] for row in zip(*columns, strict=True)]
        for row, (menu, *texts) in enumerate(zip(menus, *columns, strict=True), start=1):
            if "" in texts[: len(menu)]:
                raise ScoreLogError(
                    f"{table.path}: row {row} has an empty option before a filled one, which would shift letters and "
                    "indices; correct that row"
                )
        return menus
    _column(table, choices_column, "--choices-column or --choice-columns")
    flat, sizes = table.text_lists(choices_column)
    texts, menus, start = cast("list[str]", flat.tolist()), cast("list[list[str]]", []), 0
    for size in sizes.tolist():
        menus.append(texts[start : start + max(size, 0)])
        start += max(size, 0)
    return menus


def _ids(table: Table, name: str | None, contents: Sequence[object]) -> list[str]:
    """The file's ids, or names made from the content; equal contents are numbered."""
    given = _optional(table, name, "id", "--id-column")
    if given is not None:
        twice = [text for text, count in Counter(given).items() if count > 1 or not text]
        if twice:
            raise ScoreLogError(f"{table.path}: the id {twice[0]!r:.80} is empty or stands twice; make ids unique")
        return given
    return content_ids(contents)


def content_ids(contents: Sequence[object]) -> list[str]:
    """Names made from what the rows hold; equal rows are numbered."""
    seen: Counter[str] = Counter()
    made: list[str] = []
    for content in contents:
        digest = fingerprint(content)[:16]
        seen[digest] += 1
        made.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return made


def _labels(source: str, answers: list[str], menus: list[list[str]], answer_is: AnswerIs | None) -> list[int]:
    """The place of each right option, by the one reading of the column that fits every row."""
    ways: dict[str, list[int | None]] = {
        "letter": [_place(ascii_uppercase.find(a.strip().upper()) if len(a.strip()) == 1 else -1, m)
                   for a, m in zip(answers, menus, strict=True)],
        "index": [_place(int(a) if a.strip().isdecimal() else -1, m) for a, m in zip(answers, menus, strict=True)],
        "text": [m.index(a) if a in m else None for a, m in zip(answers, menus, strict=True)],
    }  # fmt: skip
    tried = {answer_is: ways[answer_is]} if answer_is is not None else ways
    fitting = {name: [p for p in places if p is not None] for name, places in tried.items() if None not in places}
    if not fitting:
        fails = {name: places.index(None) for name, places in tried.items()}
        row = max(fails.values())
        raise ScoreLogError(
            f"{source}: row {row + 1}: the answer {answers[row]!r:.60} is not a letter, an index from 0 or the text of one "
            "of its options; correct it, or name another column with --answer-column"
        )
    if len({tuple(places) for places in fitting.values()}) > 1:
        raise OptionError(f"{source}: the answers read as {' and as '.join(fitting)}; say which with --answer-is")
    return next(iter(fitting.values()))


def _place(place: int, menu: list[str]) -> int | None:
    return place if 0 <= place < len(menu) else None
