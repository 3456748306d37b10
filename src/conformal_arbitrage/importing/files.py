"""Files of other tools: how they are opened, and how replies and tables in them are read."""

import csv
import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.errors import ReplyError, ScoreLogError
from conformal_arbitrage.importing.pairing import Imported, Tally, counted
from conformal_arbitrage.models.chat import answer_text, mean_probability
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import Table, refuse_absent_column
from conformal_arbitrage.types import JSON, Messages, as_list, as_object, is_object

# --- JSON documents in files and folders, and the fields in them ---


ENDINGS = (".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
Document = dict[str, Any]


def read_documents(paths: Sequence[str | Path]) -> Iterator[tuple[str, Document]]:
    """Yield every JSON object of these files, and of all files in these folders, with the place it stands at.

    A file holds one object per line, a list of objects, one object, or the answer of an API with its objects under `data`;
    the rows of a CSV file are objects whose cells may hold JSON.

    Raises:
        ScoreLogError: a file is absent, of another kind, or not JSON.
    """
    files = [file for path in paths for file in files_of(path, ENDINGS)]
    if not files:
        raise ScoreLogError(f"{', '.join(map(str, paths))}: there are no files named {', '.join(ENDINGS)} here")
    for file in files:
        yield from _documents(file)


def files_of(path: str | Path, endings: Sequence[str], *, name: str = "") -> list[Path]:
    """Return a file, or the files with these endings anywhere in a folder, sorted by name."""
    place = Path(path)
    if place.is_dir():
        files = (path for path in place.rglob(f"{name}*") if path.is_file() and path.name.endswith(tuple(endings)))
        return sorted(files)
    if not place.is_file():
        raise ScoreLogError(f"{place}: there is no such file or folder, or it may not be read")
    if not place.name.endswith(tuple(endings)):
        raise ScoreLogError(f"{place}: unknown kind of file; name it {', '.join(endings)}")
    return [place]


def _documents(file: Path) -> Iterator[tuple[str, Document]]:
    text = _text(file)
    if file.name.endswith((".csv", ".csv.gz")):
        try:
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
        except csv.Error as error:
            raise ScoreLogError(f"{file}: cannot be read ({error}); export it as JSON Lines instead") from error
        for number, row in enumerate(rows, start=1):
            yield f"{file}: row {number}", {name: unfolded(cell) for name, cell in row.items() if name is not None}
        return
    whole = _single(text)
    lines = as_list(whole) or as_list(as_object(whole).get("data")) if whole is not None else _lines(file, text)
    for number, document in enumerate(lines or [whole], start=1):
        place = f"{file}: {'line' if whole is None else 'entry'} {number}"
        if not is_object(document):
            raise ScoreLogError(f"{place}: {document!r:.60} is not a JSON object; is this the export of another tool?")
        yield place, document


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.name.endswith(".gz") else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ScoreLogError(f"{file}: cannot be read ({error}); is the file complete, and UTF-8?") from error


def _single(text: str) -> JSON:
    """Return the text as one JSON value; None if it is not one, such as several lines of objects."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _lines(file: Path, text: str) -> list[object]:
    values: list[object] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ScoreLogError(f"{file}: line {number} is not JSON ({error}); is the file complete?") from error
    if not values:
        raise ScoreLogError(f"{file}: the file is empty; export it again")
    return values


def unfolded(value: Any) -> Any:
    """Return the JSON value that a text holds if it looks like an object or a list; else the value as it is."""
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def field_of(document: Mapping[str, Any], *names: str) -> Any:
    """Return the first of these fields that is there and not null; a dot leads into an object."""
    for name in names:
        value: Any = document
        for part in name.split("."):
            value = as_object(unfolded(value)).get(part)
        if value not in (None, ""):
            return unfolded(value)
    return None


def text_of(document: Mapping[str, Any], name: str | None) -> str | None:
    """Return a field as text, empty if it is not there; None without a name."""
    value = None if name is None else field_of(document, name)
    return None if name is None else "" if value is None else str(value)


def number_of(document: Mapping[str, Any], *names: str) -> float | None:
    """Return the first of these fields that is there, as a number; texts of numbers and truth values count."""
    return as_number(field_of(document, *names))


def as_number(value: object) -> float | None:
    """Return a value as a finite number, None if it is not one; true is 1 and false is 0."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return float(value.strip().lower() == "true")
    try:
        number = float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < float("inf") else None


# --- JSON documents in ZIP archives, also in those compressed with Zstandard ---


_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ZSTANDARD = 93
_LARGEST_MEMBER = 1 << 30


def read_members(path: Path, *, start: str) -> Iterator[tuple[str, Document]]:
    """Yield the JSON objects of an archive whose names begin like this; of equal names, the last.

    Raises:
        ScoreLogError: it is no archive, or a member cannot be read.
    """
    try:
        with ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist() if _is_named(member, start)}
            _refuse_giants(path, members.values())
            packed = [member for member in members.values() if member.compress_type == _ZSTANDARD]
            texts = _inflated(path, packed) if packed else {}
            for name, member in members.items():
                text = texts[name] if name in texts else archive.read(member).decode()
                yield name, as_object(json.loads(text))
    except (OSError, BadZipFile, NotImplementedError, RuntimeError, ValueError, struct.error, zlib.error) as error:
        raise ScoreLogError(f"{path}: cannot be read ({error}); is the file complete?") from error


def _is_named(member: ZipInfo, start: str) -> bool:
    return member.filename.startswith(start) and member.filename.endswith(".json")


def _refuse_giants(path: Path, members: Iterable[ZipInfo]) -> None:
    largest = max((member.file_size for member in members), default=0)
    if largest > _LARGEST_MEMBER:
        raise ScoreLogError(f"{path}: a member of {largest} bytes; more than {_LARGEST_MEMBER} are not read")


def _inflated(path: Path, members: list[ZipInfo]) -> dict[str, str]:
    """Return the texts of Zstandard members by name."""
    import duckdb  # 100 ms that `--help` should not pay

    largest = max(member.file_size for member in members)
    with TemporaryDirectory() as folder, path.open("rb") as archive, duckdb.connect() as connection:
        for number, member in enumerate(members):
            Path(folder, f"{number}.zst").write_bytes(_raw(archive.read, archive.seek, member))
        try:
            rows = connection.execute(
                "select parse_filename(filename, true) as number, json::varchar as text from read_json_objects(?, "
                "format='unstructured', compression='zstd', filename=true, maximum_object_size=?)",
                [f"{folder}/*.zst", max(largest + 1024, 1 << 24)],
            ).fetchall()
        except duckdb.Error as error:
            raise ScoreLogError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
    return {members[int(number)].filename: text for number, text in rows}


def _raw(read: Callable[[int], bytes], seek: Callable[[int], int], member: ZipInfo) -> bytes:
    """Return the compressed bytes of a member."""
    seek(member.header_offset)
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(read(_LOCAL_HEADER.size))
    seek(member.header_offset + _LOCAL_HEADER.size + name_length + extra_length)
    return read(member.compress_size)


# --- What a recorded reply of an OpenAI-style endpoint says ---


def reply_text(body: object) -> str | None:
    """Return the answer of a chat completion, a response, an assistant's message or a plain text; None if it has none."""
    value = unfolded(body)
    if isinstance(value, str):
        return value
    document = as_object(value)
    choice = as_object(next(iter(as_list(document.get("choices"))), None))
    message = as_object(choice.get("message")) or (document if "content" in document else {})
    try:
        text = answer_text(message) if message else _output_text(document)
    except ReplyError:
        return None
    return text or None


def _output_text(document: Mapping[str, Any]) -> str:
    """Return the text of a reply of the Responses API, or its function calls as tool calls."""
    items = [item for item in as_list(document.get("output")) if is_object(item)]
    calls = [{"function": item} for item in items if item.get("type") == "function_call"]
    if calls:
        return answer_text({"tool_calls": calls})
    return "".join(str(part.get("text", "")) for part in _parts(items))


def _parts(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for item in items for part in as_list(item.get("content")) if is_object(part)]


def reply_confidence(body: object) -> float | None:
    """Return the mean token probability of a reply, as `confidence = "logprob"` has it live; None without logprobs."""
    document = as_object(unfolded(body))
    if "output" in document:
        items = [item for item in as_list(document["output"]) if is_object(item)]
        tokens = [token for part in _parts(items) for token in as_list(part.get("logprobs"))]
        return mean_probability({"logprobs": {"content": tokens}})
    choice = as_object(next(iter(as_list(document.get("choices"))), None))
    return mean_probability(choice)


def tokens_of(body: object) -> tuple[float | None, float | None]:
    """Return the input and output tokens that a reply reports."""
    document = as_object(unfolded(body))
    names = (("usage.prompt_tokens", "usage.input_tokens"), ("usage.completion_tokens", "usage.output_tokens"))
    return number_of(document, *names[0]), number_of(document, *names[1])


def conversation(value: object) -> Messages:
    """Return a question as messages: a list of them, a request that holds one, a single message, or a plain text."""
    content = unfolded(value)
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    document = as_object(content)
    if "role" in document:
        return [document]
    inner = document.get("messages") or document.get("input") or document.get("prompt")
    if inner is not None and inner is not content:
        return conversation(inner)
    return [message for message in as_list(content) if is_object(message) and "role" in message]


# --- Tables ---


_WIN_RATES = ("strong_win_rates", "strong_win_rate", "win_rate", "mf", "bert", "causal_llm", "sw_ranking", "random")
_KEPT = ("id", "group", "context")


def read_routellm(path: str | Path, *, weak: str, strong: str, win_rate: str | None = None) -> Imported:
    """Read RouteLLM's win rates and the grades of both models' answers as a score log in router form.

    RouteLLM asks the strong model if the win rate is at least its threshold, so 1 - win rate is the confidence in the weak
    one, and the certified threshold for RouteLLM is 1 - relaxation.

    Args:
        path: the table, such as a file of its evaluations: one row per prompt.
        weak: the column with the grade of the weak model's answer (the Primary), in [0, 1] or true and false.
        strong: the same for the strong model (the Guardian).
        win_rate: the column with the router's win rate of the strong model, in [0, 1]; found by its usual names.
    """
    with Table(path) as table:
        name = win_rate or next((column for column in _WIN_RATES if column in table.types), None)
        for column in (name, weak, strong):
            if column is None or column not in table.types:
                wanted = "win rate: name it with --win-rate" if column is None else f"column '{column}'"
                raise ScoreLogError(f"{path}: there is no {wanted}; it has {', '.join(sorted(table.types))}")
        rates = table.scalars(str(name))
        _refuse_outside(path, str(name), rates)
        texts = {column: table.texts(column).tolist() for column in _KEPT if column in table.types}
        if "context" not in texts and "prompt" in table.types:
            texts["context"] = table.texts("prompt").tolist()
        unused = Tally()
        for column in table.types:
            if column not in (name, weak, strong, "prompt", *_KEPT):
                unused.add("columns", column)
        grades = [table.scalars(column, truths=True) for column in (weak, strong)]
    log = ScoreLog.from_router(confidence=1 - rates, primary_grade=grades[0], guardian_grade=grades[1], **texts)
    note = "RouteLLM's threshold is 1 - relaxation: `router-NAME-THRESHOLD`, rounded down if it is rounded"
    return Imported(log=log, source="routellm", models=(weak, strong), unused=unused, notes=(note, *counted(log)))


def _refuse_outside(path: str | Path, name: str, rates: Floats) -> None:
    outside = (rates < 0) | (rates > 1)
    if outside.any():
        row = int(outside.argmax())
        raise ScoreLogError(f"{path}: row {row + 1}, column '{name}': a win rate is from 0 to 1, not {rates[row]:g}")


def read_wide(
    path: str | Path, *, primary: Sequence[str], guardian: Sequence[str], outcomes: Sequence[str] = ()
) -> Imported:
    """Read a table with one column per option and model, such as p_yes, p_no, g_yes, g_no, as a score log of menus.

    Args:
        path: .csv, .parquet, .jsonl or .jsonl.gz.
        primary: the Primary's columns, one per option, in the order of the options.
        guardian: the Guardian's columns, in the same order.
        outcomes: list columns to report besides `correct`.
    """
    with Table(path) as table:
        for name in (*primary, *guardian):
            remedy = "; name one column per option with --primary and --guardian, separated by commas"
            refuse_absent_column(name, table.types, path, remedy=remedy)
    log = ScoreLog.read(path, primary=primary, guardian=guardian, outcomes=outcomes)
    unused = Tally()
    for name in log.extra:
        unused.add("columns (kept as they are)", name)
    names = ", ".join(primary), ", ".join(guardian)
    return Imported(log=log, source="table", models=names, unused=unused, notes=counted_menus(log))


def counted_menus(log: ScoreLog) -> tuple[str, ...]:
    """Return what rows without scores mean for calibration."""
    return tuple(note.replace("no confidence of the Primary", "no scores of the Primary") for note in counted(log))
