"""JSON documents in ZIP archives, also in those compressed with Zstandard.

Python before 3.14 cannot inflate Zstandard, and DuckDB can: the raw members go to a temporary folder, and DuckDB reads them.

Knows nothing of what a document means.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile, ZipInfo

from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.importing.documents import Document
from conformal_arbitrage.types import as_object

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ZSTANDARD = 93
_LARGEST_MEMBER = 1 << 30


def read_members(path: Path, *, start: str, end: str = ".json") -> Iterator[tuple[str, Document]]:
    """Yield the JSON objects of an archive whose names begin and end like this; of equal names, the last.

    Raises:
        ScoreLogError: it is no archive, or a member cannot be read.
    """
    try:
        with ZipFile(path) as archive:
            members = {one.filename: one for one in archive.infolist() if _is_named(one, start, end)}
            _refuse_giants(path, members.values())
            packed = [one for one in members.values() if one.compress_type == _ZSTANDARD]
            texts = _inflated(path, packed) if packed else {}
            for name, member in members.items():
                text = texts[name] if name in texts else archive.read(member).decode()
                yield name, as_object(json.loads(text))
    except (OSError, BadZipFile, NotImplementedError, RuntimeError, ValueError, struct.error, zlib.error) as error:
        raise ScoreLogError(f"{path}: cannot be read ({error}); is the file complete?") from error


def _is_named(member: ZipInfo, start: str, end: str) -> bool:
    return member.filename.startswith(start) and member.filename.endswith(end)


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
