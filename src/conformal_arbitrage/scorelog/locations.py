"""Where the files of a log in parts are: patterns, folders and URLs, and the Parquet files that these stand for.

A file is taken once, however many names it has. URLs are opened with fsspec.

Knows nothing of what is in a file.
"""

import glob
import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from conformal_arbitrage.errors import ScoreLogError

if TYPE_CHECKING:
    import duckdb

_ENDING: Final = ".parquet"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_LOCAL: Final = "file"
_TABLE_FORMATS: Final = {"_delta_log": "Delta", ".hoodie": "Hudi"}
_ICEBERG: Final = ".metadata.json"
_HIDDEN: Final = ("_", ".")
_STAMPS: Final = ("size", "ETag", "etag", "Last-Modified", "LastModified", "last_modified", "updated", "created")
"""What storages say of a file that changes with it, each in its own words."""


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URL; None for a local path."""
    match = _SCHEME.match(path)
    return None if match is None else match[1]


def is_parquet(path: str) -> bool:
    """Return whether a name is that of a Parquet file."""
    return path.lower().endswith(_ENDING)


def is_many(source: str) -> bool:
    """Return whether a name stands for several files: a pattern, a folder or a URL."""
    folder = source.endswith("/") or _is_folder(source)
    return scheme_of(source) is not None or folder or (_is_pattern(source) and not _is_file(source))


def folder_of(source: str) -> str:
    """Return the folder that several files are in or below: of a pattern that before its first sign."""
    return re.split(r"[*?\[]", source)[0].rpartition("/")[0] if _is_pattern(source) else source.rstrip("/")


def escaped(path: str) -> str:
    """Return a path that DuckDB does not take for a pattern."""
    return re.sub(r"([\[*?])", r"[\1]", path)


def register_storage(connection: "duckdb.DuckDBPyConnection", path: str) -> None:
    """Let a connection open the URLs of a path's scheme."""
    if scheme_of(path) is not None:
        connection.register_filesystem(_dated(_storage(path)))


def find_files(*sources: str) -> list[str]:
    """Return the Parquet files that patterns, folders, files or URLs of these stand for, each of them once."""
    paths = sorted({path for source in sources for path in _found(source)})
    return list({_identity(path): path for path in reversed(paths)}.values())[::-1]


def _found(source: str) -> Sequence[str]:
    if scheme_of(source) == _LOCAL:
        source = source.removeprefix(f"{_LOCAL}://")
    paths = _local_files(source) if scheme_of(source) is None else _remote_files(source)
    if paths != [source]:
        paths = _matches(source, paths) if _is_pattern(source) else paths
        _refuse_table_above(source)
    others = [path for path in paths if not is_parquet(path)]
    if not paths or others:
        what = f"{others[0]} is not a Parquet file" if others else "there are no Parquet files"
        raise ScoreLogError(
            f"{source}: {what}; a log in parts has {_ENDING} files only: write each with ScoreLog.write"
        )
    return paths


def _identity(path: str) -> object:
    """Return what two names of one file have in common: links, and other ways to write a path."""
    if scheme_of(path) is not None:
        return path
    try:
        status = os.stat(path)  # noqa: PTH116  (paths are text here)
    except OSError as error:
        _refuse_unlisted(error)
    return status.st_dev, status.st_ino


def stamp_of(path: str) -> object:
    """Return what is another once a file has other bytes: its size and time, or what its storage says of it."""
    if scheme_of(path) is not None:
        storage = _storage(path)
        with _listing(path):
            storage.invalidate_cache()
            facts = storage.info(path)
        return [str(facts.get(name)) for name in _STAMPS]
    try:
        status = os.stat(path)  # noqa: PTH116  (paths are text here)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_folder(path: str) -> bool:
    return os.path.isdir(path)  # noqa: PTH112  (a name that cannot exist is no error)


def _is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113


def _is_pattern(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _local_files(source: str) -> list[str]:
    if _is_folder(source):
        return _members(source, (path for path in _walk(source) if _is_file(path)))
    if _is_file(source):
        return [source]
    return [path for path in glob.glob(source, recursive=True) if _is_file(path)]  # noqa: PTH207


def _walk(folder: str) -> Iterator[str]:
    """Yield all files below a folder; linked folders too, but none twice."""
    seen = {_identity(folder)}
    for place, folders, files in os.walk(folder, onerror=_refuse_unlisted, followlinks=True):
        inside = {name: _identity(os.path.join(place, name)) for name in folders}  # noqa: PTH118
        folders[:] = [name for name, identity in inside.items() if identity not in seen]
        seen.update(inside.values())
        yield from (os.path.join(place, name) for name in files)  # noqa: PTH118


def _refuse_unlisted(error: OSError) -> NoReturn:
    raise ScoreLogError(f"{error.filename}: cannot be read ({error.strerror}); its rows belong to the log") from error


def _members(folder: str, paths: Iterable[str]) -> list[str]:
    """Return the Parquet files of a folder, without names that begin with _ or a dot: engines keep unfinished work there."""
    members: list[str] = []
    for path in paths:
        names = path.removeprefix(folder).strip("/").split("/")
        format = _table_format(names)
        if format is not None:
            _refuse_table(folder, format)
        if is_parquet(path) and not any(name.startswith(_HIDDEN) for name in names):
            members.append(path)
    return members


def _refuse_table(folder: str, format: str) -> NoReturn:
    raise ScoreLogError(
        f"{folder}: this is a table of {format}, whose folder may also hold rows that were replaced or deleted; "
        "calibrate it with Spark (table:NAME), or write its rows into a folder of their own"
    )


def _refuse_table_above(source: str) -> None:
    """Refuse files in the folder of a table, or in one below it, where a pattern or a folder does not show its account."""
    folder = folder_of(source)
    for mark, format in {**_TABLE_FORMATS, f"metadata/*{_ICEBERG}": "Iceberg"}.items():
        if _is_marked(folder, mark):
            _refuse_table(folder, format)


def _is_marked(folder: str, mark: str) -> bool:
    """Return whether something is in a folder; of a local one also in those above it."""
    if scheme_of(folder) is None:
        here = Path(folder).absolute()
        return any(next(place.glob(mark), None) for place in (here, *here.parents))
    with _listing(folder):
        return bool(_storage(folder).glob(f"{folder}/{mark}"))


def _matches(pattern: str, paths: Sequence[str]) -> list[str]:
    """Return the files that a pattern means: names that begin with _ or a dot only if it says so."""
    said = [part for part in pattern.split("/") if part.startswith(_HIDDEN)]

    def is_meant(path: str) -> bool:
        hidden = [name for name in path.split("/") if name.startswith(_HIDDEN) and name not in (".", "..")]
        return all(any(fnmatchcase(name, part) for part in said) for name in hidden)

    return [path for path in paths if is_meant(path)]


def _table_format(names: Sequence[str]) -> str | None:
    """Return which format of tables keeps its own account of its files under such a path; None if none does."""
    if "metadata" in names and names[-1].endswith(_ICEBERG):
        return "Iceberg"
    return next((format for name, format in _TABLE_FORMATS.items() if name in names), None)


def _remote_files(source: str) -> list[str]:
    storage = _storage(source)
    with _listing(source):
        paths = storage.glob(source) if _is_pattern(source) else storage.find(source)
    named = [str(storage.unstrip_protocol(path)) for path in paths]
    return named if _is_pattern(source) else _members(source, named)


@contextmanager
def _listing(source: str) -> Generator[None]:
    """Translate the errors of a storage that cannot be listed."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise ScoreLogError(f"{source}: cannot be listed ({error}); check the address and your credentials") from error


def _dated(storage: Any) -> Any:
    """Return a file system that says when a file was modified, which DuckDB asks for: never, if it does not know (HTTP)."""
    import fsspec  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]

    if type(storage).modified is fsspec.AbstractFileSystem.modified:  # pyright: ignore[reportUnknownMemberType]
        storage.modified = _never
    return storage


def _never(_: str) -> datetime:
    return datetime.fromtimestamp(0, UTC)


def _storage(url: str) -> Any:
    """Return fsspec's file system for a URL."""
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]

        return fsspec.filesystem(scheme_of(url))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    except (ImportError, ValueError) as error:
        raise ScoreLogError(
            f"{url}: needs fsspec and a file system for {scheme_of(url)}:// ({error}); pip install "
            "'conformal-arbitrage[lake]' and s3fs, gcsfs or adlfs"
        ) from error
