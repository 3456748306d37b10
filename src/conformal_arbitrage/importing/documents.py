"""JSON documents in files and folders, and the fields in them.

Knows nothing of what a document means.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.types import JSON, as_list, as_object, is_object

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
        files = (one for one in place.rglob(f"{name}*") if one.is_file() and one.name.endswith(tuple(endings)))
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
