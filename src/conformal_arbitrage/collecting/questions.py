"""Questions for models: multiple choice and chat requests, from JSON Lines, Parquet or CSV."""

import json
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, compress
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal, Self

from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.models.completions import QUESTION, SETTINGS, checked_settings
from conformal_arbitrage.models.kinds import Form
from conformal_arbitrage.models.port import fingerprint
from conformal_arbitrage.scorelog.tables import Table
from conformal_arbitrage.types import JSON, ChatRequest, Messages, Query, as_list, is_object

AnswerIs = Literal["letter", "index", "text"]
_MESSAGES = "messages"
_MENU_ANSWERS, _TEXT_ANSWERS = ("answer", "label"), ("expected", "answer", "label")
_BODY = (*QUESTION, *SETTINGS)
_OF_REQUESTS = ("question_column", "answer_column", "id_column", "group_column")
_WORDS = ("reasoning_effort", "service_tier", "stop", "verbosity")
_TOOL_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Questions:
    """What questions in either form share.

    Attributes:
        groups: the subject, tenant or language of each row, if the file has them.
        answer_column: the column of the answers, if the file has one.
    """

    groups: list[str] | None = None
    answer_column: str | None = None

    def first(self, limit: int | None) -> Self:
        """Return the first rows; all of them if the limit is None."""
        return replace(self, **{name: values[:limit] for name, values in self._columns().items()})

    def without(self, ids: Container[str | None]) -> Self:
        """Return the rows with other ids."""
        kept = [id not in ids for id in self.ids]
        return replace(self, **{name: list(compress(values, kept)) for name, values in self._columns().items()})

    @property
    def ids(self) -> list[str | None]:
        """The id of each row."""
        raise NotImplementedError

    def _columns(self) -> dict[str, list[Any]]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, list)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Menus(_Questions):
    """Multiple-choice questions.

    Attributes:
        queries: the questions, with ids, in the file's order.
        labels: the index of each right action, if the file has answers.
    """

    queries: list[Query]
    labels: list[int] | None = None

    @property
    def ids(self) -> list[str | None]:
        """The id of each row."""
        return [query.id for query in self.queries]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests(_Questions):
    """Chat requests, with the expected answers if the file has them."""

    requests: list[ChatRequest]
    expected: list[str] | None = None

    @property
    def ids(self) -> list[str | None]:
        """The id of each row."""
        return [request.id for request in self.requests]


def read_questions(path: str | Path, form: Form, **columns: Any) -> Menus | Requests:
    """Read questions in either form; columns are named as for `read_menus`, and requests have none of choices."""
    if form == "menu":
        return read_menus(path, **columns)
    return read_requests(path, **{name: value for name, value in columns.items() if name in _OF_REQUESTS})


def read_menus(
    path: str | Path,
    *,
    question_column: str | None = None,
    choice_columns: Sequence[str] = (),
    choices_column: str | None = None,
    choices: Sequence[str] = (),
    answer_column: str | None = None,
    answer_is: AnswerIs | None = None,
    id_column: str | None = None,
    group_column: str | None = None,
) -> Menus:
    """Read multiple-choice questions.

    Args:
        path: .jsonl, .jsonl.gz, .parquet or .csv.
        question_column: the question's text, or `messages`, a list of chat messages; defaults to `question` if there is
            one, else `messages`.
        choice_columns: one column per option; or else
        choices_column: one column with the list of options, `choices` by default; or else
        choices: the options of every row.
        answer_column: the right option, by letter, index from 0 or text; defaults to `answer` or `label` if there is one.
            An empty name means that there are no answers.
        answer_is: which of the three; inferred from the whole column by default.
        id_column: unique ids; defaults to `id` if there is one, else ids are made from the content.
        group_column: subject, tenant, language; defaults to `group` if there is one.
    """
    with Table(path) as table:
        contexts = _contexts(table, question_column)
        menus = _menus(table, choice_columns, choices_column, choices)
        answer_name = _answer_column(table, answer_column, _MENU_ANSWERS)
        answer = None if answer_name is None else _column(table, answer_name, "--answer-column")
        contents = [[Query(context, ()).context, menu] for context, menu in zip(contexts, menus, strict=True)]
        ids = _ids(table, id_column, contents)
        groups = _optional(table, group_column, "group", "--group-column")
    for row, menu in enumerate(menus, start=1):
        if not menu or not all(menu):
            raise ScoreLogError(f"{path}: row {row} has no options or an empty one; correct that row")
    rows = zip(contexts, menus, ids, groups or [""] * len(menus), strict=True)
    queries = [Query(context, tuple(menu), id=name, group=group or None) for context, menu, name, group in rows]
    labels = None if answer is None else _labels(str(path), answer, menus, answer_is)
    return Menus(queries=queries, labels=labels, groups=groups, answer_column=answer_name)


def read_requests(
    path: str | Path,
    *,
    question_column: str | None = None,
    answer_column: str | None = None,
    id_column: str | None = None,
    group_column: str | None = None,
) -> Requests:
    """Read chat requests: rows of `messages`, with `tools`, `response_format` and settings such as `temperature`.

    Args:
        path: .jsonl, .jsonl.gz, .parquet or .csv; values other than text are JSON.
        question_column: a plain question per row instead of `messages`.
        answer_column: the expected answer for the grader; defaults to `expected`, `answer` or `label` if there is one.
        id_column: as for menus.
        group_column: as for menus.
    """
    with Table(path) as table:
        if question_column not in (None, _MESSAGES):
            texts = _column(table, question_column, "--question-column")
            settings = _rows_of(table, tuple(SETTINGS))
            bodies = [
                {_MESSAGES: [{"role": "user", "content": text}], **fields}
                for text, fields in zip(texts, settings, strict=True)
            ]
        else:
            bodies = _bodies(table, _BODY)
        bodies = [_with_settings(table.path, row, body) for row, body in enumerate(bodies, start=1)]
        ids = _ids(table, id_column, bodies)
        answer_name = _answer_column(table, answer_column, _TEXT_ANSWERS)
        expected = None if answer_name is None else _column(table, answer_name, "--answer-column")
        groups = _optional(table, group_column, "group", "--group-column")
    rows = zip(bodies, ids, groups or [""] * len(bodies), strict=True)
    requests = [ChatRequest(body, id=name, group=group or None) for body, name, group in rows]
    return Requests(requests=requests, expected=expected, groups=groups, answer_column=answer_name)


def _contexts(table: Table, name: str | None) -> list[str] | list[Messages]:
    """Return the questions of menus: texts, or conversations from a column called `messages`."""
    wanted = name or (_MESSAGES if _MESSAGES in table.types and "question" not in table.types else "question")
    if wanted != _MESSAGES:
        return _column(table, wanted, "--question-column")
    return [body[_MESSAGES] for body in _bodies(table, (_MESSAGES,))]


def _bodies(table: Table, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return one request per row, from these columns where the file has them."""
    _column(table, _MESSAGES, "--question-column")
    bodies = _rows_of(table, fields)
    for row, body in enumerate(bodies, start=1):
        messages = as_list(body.get(_MESSAGES))
        if not messages or not all(is_object(message) and "role" in message for message in messages):
            raise ScoreLogError(
                f'{table.path}: row {row}: messages must be a list such as [{{"role": "user", "content": "Hello"}}]'
            )
    return bodies


def _rows_of(table: Table, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return the values of these columns, where the file has them, row by row."""
    columns = {name: table.texts(name).tolist() for name in fields if name in table.types}
    rows = [_values(table.path, row, {k: v[row] for k, v in columns.items()}) for row in range(table.rows)]
    nested = [name for name in columns if "STRUCT" in str(table.types[name])]
    return [row | {k: _without_nulls(row[k]) for k in nested if k in row} for row in rows] if nested else rows


def _with_settings(path: str | Path, row: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request with its settings in their one form."""
    try:
        return body | checked_settings(body)
    except ValueError as error:
        raise ScoreLogError(
            f"{path}: row {row}: {error}; correct it, or rename the column if it is not a setting of the request"
        ) from error


def _without_nulls(value: JSON) -> JSON:
    """Return a value from a nested Parquet column without its nulls: fields that only other rows have."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _answer_column(table: Table, name: str | None, usual: Sequence[str]) -> str | None:
    """Return the column of the answers: the one named, or the first usual one that the file has; "" means none."""
    return name or None if name is not None else next((column for column in usual if column in table.types), None)


def _values(path: str | Path, row: int, fields: dict[str, str]) -> dict[str, Any]:
    """Return the values of one row, without the empty ones."""
    values: dict[str, Any] = {}
    for name, text in fields.items():
        if text and text != "null":
            try:
                values[name] = _field(name, text)
            except ValueError as error:
                raise ScoreLogError(f"{path}: row {row + 1}: {name} must be JSON ({error})") from error
    return values


def _field(name: str, text: str) -> Any:
    """Return the JSON value of a column; a tool choice and settings that are texts may be bare words."""
    bare = name in _WORDS and not text.startswith(('"', "["))
    return text if bare or (name == "tool_choice" and text in _TOOL_CHOICES) else json.loads(text)


def _column(table: Table, name: str, option: str) -> list[str]:
    if name not in table.types:
        raise ScoreLogError(
            f"{table.path}: no column '{name}'; it has {', '.join(sorted(table.types))}; name another with {option}"
        )
    return table.texts(name).tolist()


def _optional(table: Table, name: str | None, usual: str, option: str) -> list[str] | None:
    if name is None and usual not in table.types:
        return None
    return _column(table, name or usual, option)


def _menus(
    table: Table, choice_columns: Sequence[str], choices_column: str | None, choices: Sequence[str]
) -> list[list[str]]:
    if choices and (choice_columns or choices_column):
        raise OptionError("--choices gives every row the same options; drop --choice-columns and --choices-column")
    if choices:
        return [list(choices) for _ in range(table.rows)]
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
    name = choices_column or "choices"
    _column(table, name, "--choices-column or --choice-columns")
    return choice_lists(table, name)


def choice_lists(table: Table, name: str) -> list[list[str]]:
    """Return a column of lists of options."""
    try:
        flat, sizes = table.text_lists(name)
    except ScoreLogError as error:
        remedy = 'write choices as a JSON list: ["Paris", "Rome"]'
        raise ScoreLogError(f"{table.path}: column '{name}' holds no lists; {remedy}") from error
    texts: list[str] = flat.tolist()
    lengths: list[int] = [max(size, 0) for size in sizes.tolist()]
    ends = list(accumulate(lengths))
    return [texts[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _ids(table: Table, name: str | None, contents: Sequence[object]) -> list[str]:
    """Return the file's ids, or ids made from the content."""
    ids = _optional(table, name, "id", "--id-column")
    if ids is None:
        return content_ids(contents)
    bad = [text for text, count in Counter(ids).items() if count > 1 or not text]
    if bad:
        raise ScoreLogError(f"{table.path}: the id {bad[0]!r:.80} is empty or not unique; make ids unique")
    return ids


def content_ids(contents: Sequence[object]) -> list[str]:
    """Return ids made from the rows' content; equal rows are numbered."""
    seen: Counter[str] = Counter()
    ids: list[str] = []
    for content in contents:
        digest = fingerprint(content)[:16]
        seen[digest] += 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids


def _labels(source: str, answers: list[str], menus: list[list[str]], answer_is: AnswerIs | None) -> list[int]:
    """Return the index of each right option, by the one reading of the column that fits every row."""
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
            "of its options; correct it, or name another column with --answer-column ('' if there are no answers)"
        )
    if len({tuple(places) for places in fitting.values()}) > 1:
        raise OptionError(f"{source}: the answers can be read as {' and as '.join(fitting)}; choose with --answer-is")
    return next(iter(fitting.values()))


def _place(place: int, menu: list[str]) -> int | None:
    return place if 0 <= place < len(menu) else None
