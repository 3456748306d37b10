"""Looks: which logs were looked at before, so that a calibration on one can say so.

A look is noted for the digest of its log, together with those of the logs that this one was taken from. Nothing is inferred
from rows that resemble each other. A caller that finds the file unwritable is told, not stopped.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.promises import ByGroup, Cluster, Dial, Learned, Threshold
from conformal_arbitrage.calibration.secret import looks_folder
from conformal_arbitrage.errors import OutputError
from conformal_arbitrage.scorelog.tables import write_text
from conformal_arbitrage.types import as_object

LOOKS_FILE = "arbitrage-looks.json"
MOST_LOOKS = 1000


def looks_path() -> Path:
    """Return where looks are kept: beside the secret."""
    return looks_folder() / LOOKS_FILE


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


def note_look(path: Path, lineage: Sequence[str], command: str, *, terms: str | None = None) -> None:
    """Note that a log was looked at.

    Args:
        path: of the file.
        lineage: digests of the logs that it was taken from, and its own at last.
        command: what looked at it.
        terms: of a calibration, what was chosen for it.

    Raises:
        OutputError: the file cannot be written; nothing else is affected.
    """
    *parents, digest = lineage
    looks = _read(path)
    look: dict[str, Any] = {"command": command, "log": digest, "parents": parents, "terms": terms}
    earlier = [entry for entry in looks if all(entry.get(name) == value for name, value in look.items())]
    look["times"] = 1 + sum(int(entry.get("times", 1)) for entry in earlier)
    look["last"] = datetime.now(UTC).isoformat(timespec="seconds")
    kept = [entry for entry in looks if entry not in earlier]
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OutputError(f"{path.parent}: cannot be made ({error})") from error
    write_text(path, json.dumps({"looks": [*kept, look][-MOST_LOOKS:]}, indent=1) + "\n")


def looks_at(path: Path, lineage: Sequence[str], *, terms: str | None = None) -> Counter[str]:
    """Return how often each command looked at a log, at one that it was taken from, or at one that was taken from it.

    Args:
        path: of the file.
        lineage: digests of the logs that it was taken from, and its own at last.
        terms: what is chosen for the calibration that asks; an earlier one with the same choice does not count.
    """
    seen = Counter[str]()
    for look in _read(path):
        related = look["log"] in lineage or lineage[-1] in look.get("parents", ())
        if related and (terms is None or look.get("terms") != terms):
            seen[look["command"]] += int(look.get("times", 1))
    return seen


def _read(path: Path) -> list[dict[str, Any]]:
    """Return all looks; a damaged entry counts as none, since looks never stop a command."""
    try:
        document = as_object(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: the record of looks cannot be read ({error}); remove it") from error
    entries: list[Any] = document.get("looks") or []
    return [look for look in map(as_object, entries) if "command" in look and "log" in look]
