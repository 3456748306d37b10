"""Looks: which rows were looked at before, so that a calibration on them can say so.

A small JSON file holds, per look, 64 bits for each row: enough to recognise subsets, splits and reordered copies, too
little to read anything back. Knows nothing of commands; a caller that finds the file unwritable is told, not stopped.
"""

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.forms import ByGroup, Cluster, Dial, Learned, Threshold
from conformal_arbitrage.errors import OutputError
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.scorelog.fitness import question_digests, text_digests
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.parts import folder_of, is_many, scheme_of
from conformal_arbitrage.scorelog.tables import write_text
from conformal_arbitrage.types import as_object

LOOKS_FILE = ".arbitrage-looks.json"
MOST_LOOKS = 200
MOST_ROWS = 20_000
"""Rows kept per look: those with the smallest digests, so that looks at the same rows keep the same ones."""

Digests = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRows:
    """How much of a log was looked at.

    Attributes:
        share: of its rows, estimated from those kept where a look was large; 0 if none.
        commands: what looked at them.
    """

    share: float
    commands: tuple[str, ...]


def looks_path(config: str | Path, log: str | Path) -> Path:
    """Return where looks are kept: beside the configuration, or beside the log if there is none.

    Those at a log in parts are beside its files, however these are named; those at a URL where the configuration would be.
    """
    if Path(config).exists() or scheme_of(str(log)) is not None:
        return Path(config).resolve().with_name(LOOKS_FILE)
    if is_many(str(log)):
        return Path(folder_of(str(log))).resolve() / LOOKS_FILE
    return Path(log).resolve().with_name(LOOKS_FILE)


def calibration_terms(certificate: Certificate) -> str:
    """Return a digest of what is chosen for a calibration: the same again is no look, another choice is one.

    The budget of a dial is not among it: that may be chosen after looking.
    """
    rule, promise, loss, learned = certificate.rule, certificate.promise, certificate.loss, certificate.learned
    chosen = {
        "rule": [type(rule).__name__, certificate.guardian_sees, certificate.boundary, certificate.by],
        "grid": rule.grid if isinstance(rule, Threshold | ByGroup) else None,
        "small_groups": rule.small_groups if isinstance(rule, ByGroup) else None,
        "score": rule.score if isinstance(rule, Learned) else None,
        "features": None if learned is None else [*learned.features, learned.menu_size, learned.group_source],
        "promise": [
            type(promise).__name__,
            None if isinstance(promise, Dial) else promise.alpha,
            certificate.confidence,
        ],
        "cluster": [promise.cluster, promise.max_cluster_size] if isinstance(promise, Cluster) else None,
        "loss": [loss.name, loss.bound, loss.in_full_sight, loss.zero_one, loss.binarized, loss.missing_guardian],
        "columns": certificate.evidence.columns,
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def note_look(path: Path, log: ScoreLog | CascadeLog, command: str, *, terms: str | None = None) -> None:
    """Note that the rows of a log were looked at.

    Args:
        path: of the file.
        log: the rows.
        command: what looked at them.
        terms: of a calibration, what was chosen for it.

    Raises:
        OutputError: the file cannot be written; nothing else is affected.
    """
    digests, same = _kept(_digests(log)), (command, terms)
    looks = [
        look
        for look in _read(path)
        if (look["command"], look.get("terms")) != same or not np.array_equal(look["rows"], digests)
    ]
    chosen = {} if terms is None else {"terms": terms}
    looks.append(
        {"command": command, "time": datetime.now(UTC).isoformat(timespec="seconds"), "rows": digests, **chosen}
    )
    documents = [look | {"rows": base64.b64encode(look["rows"].tobytes()).decode()} for look in looks[-MOST_LOOKS:]]
    write_text(path, json.dumps({"looks": documents}, indent=1) + "\n")


def seen_rows(path: Path, log: ScoreLog | CascadeLog) -> SeenRows:
    """Return how many rows of a log were looked at, and by which commands.

    A look keeps its smallest digests only, so rows are compared up to the largest that it kept.
    """
    return seen_in_parts(path, [log])


def seen_in_parts(path: Path, parts: Iterable[ScoreLog | CascadeLog], *, terms: str | None = None) -> SeenRows:
    """Return the same for a log in parts, which are looked at one after the other, and only if there were looks.

    Args:
        path: of the file.
        parts: the rows.
        terms: what is chosen for the calibration that asks; an earlier one with the same choice does not count.
    """
    looks = [look for look in _read(path) if terms is None or look.get("terms") != terms]
    hits, compared = np.zeros(len(looks), np.int64), np.zeros(len(looks), np.int64)
    for log in parts if looks else ():
        digests = np.unique(_digests(log))
        for k, look in enumerate(looks):
            rows = look["rows"]
            comparable = digests if len(rows) < MOST_ROWS else digests[digests <= rows[-1]]
            hits[k] += int(np.isin(comparable, rows).sum())
            compared[k] += len(comparable)
    seen = np.flatnonzero(hits).tolist()
    share = max((float(hits[k] / compared[k]) for k in seen), default=0.0)
    return SeenRows(share=share, commands=tuple(dict.fromkeys(str(looks[k]["command"]) for k in seen)))


def _digests(log: ScoreLog | CascadeLog) -> Digests:
    """Return 64 bits per row; those of a cascade stand for its ids, which are the same whatever the Guardian is."""
    return text_digests(log.id.tolist()) if isinstance(log, CascadeLog) else question_digests(log)


def _kept(digests: Digests) -> Digests:
    return np.unique(digests)[:MOST_ROWS].astype("<u8")


def _read(path: Path) -> list[dict[str, Any]]:
    """Return all looks; a damaged entry counts as none, since looks never stop a command."""
    try:
        document = as_object(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: the record of looks cannot be read ({error}); remove it") from error
    entries: list[Any] = document.get("looks") or []
    return [look | {"rows": _decoded(look)} for look in map(as_object, entries) if "command" in look]


def _decoded(look: dict[str, Any]) -> Digests:
    try:
        return np.frombuffer(base64.b64decode(str(look.get("rows", ""))), dtype="<u8")
    except ValueError:
        return np.zeros(0, dtype="<u8")
