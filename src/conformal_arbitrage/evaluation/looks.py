"""Looks: which logs were looked at before, so that a calibration on one can say so.

A look is noted for the digest of its log, together with those of the logs that this one was taken from, in one file for all
folders and secrets of a user. Nothing is inferred from rows that resemble each other. A caller that finds the file
unwritable is told, not stopped.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.promises import ByGroup, Cluster, Confident, Dial, Learned, Threshold
from conformal_arbitrage.calibration.promises import Path as PathRule
from conformal_arbitrage.calibration.secret import user_folder
from conformal_arbitrage.errors import OutputError
from conformal_arbitrage.scorelog.tables import write_text

LOOKS_FILE = "arbitrage-looks.json"
MOST_LOOKS = 1000


class Look(msgspec.Struct, kw_only=True):
    """A look as it is noted.

    Attributes:
        parents: digests of the logs that it was taken from.
        beside: digests of logs that the same run looked at, such as the rows that it chose on.
        terms: of a calibration, what was chosen for it.
    """

    command: str
    log: str
    parents: list[str] = []
    beside: list[str] = []
    terms: str | None = None
    times: int = 1
    last: str = ""

    @property
    def kind(self) -> tuple[object, ...]:
        """What looks have in common that are counted together."""
        return self.command, self.log, self.parents, self.beside, self.terms


class _File(msgspec.Struct):
    looks: list[msgspec.Raw] = []


@dataclass(frozen=True, slots=True)
class Looks:
    """What is known of earlier looks at a log.

    Attributes:
        commands: how often each command looked at it, at a log that it was taken from, or at one that was taken from it.
        calibrations: how many other calibrations there were of it, or of logs that share an origin with it.
    """

    commands: Counter[str]
    calibrations: int


def looks_path() -> Path:
    """Return where looks are kept: in the user's configuration directory, whatever the folder and the secret."""
    return user_folder() / LOOKS_FILE


def calibration_terms(certificate: Certificate) -> str:
    """Return a digest of what is chosen for a calibration: the same again is no look, another choice is one.

    The secret behind the draws and the seed of a chain's tuning count as chosen, since drawing again until the result
    pleases is choosing. The budget of a dial does not: that may be chosen after looking.
    """
    rule, promise, loss = certificate.rule, certificate.promise, certificate.loss
    learned = rule.terms if isinstance(rule, Learned) else None
    chosen: dict[str, object] = {
        "rule": type(rule).__name__,
        "margin": [rule.guardian_sees, rule.boundary, rule.grid] if isinstance(rule, Threshold | ByGroup) else None,
        "groups": [rule.by, rule.small_groups] if isinstance(rule, ByGroup) else None,
        "score": rule.score if isinstance(rule, Learned) else None,
        "features": None if learned is None else [*learned.features, learned.menu_size, learned.group_source],
        "chain": _chain_terms(rule) if isinstance(rule, PathRule) else None,
        "promise": [
            type(promise).__name__,
            None if isinstance(promise, Dial) else promise.alpha,
            promise.confidence if isinstance(promise, Confident | Dial) else None,
        ],
        "cluster": [promise.cluster, promise.max_cluster_size] if isinstance(promise, Cluster) else None,
        "loss": msgspec.to_builtins(loss),
        "columns": certificate.evidence.columns,
        "key": certificate.provenance.key_sha256,
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def _chain_terms(rule: PathRule) -> list[object]:
    """Return what is chosen for a cascade: its models, or those that one was chosen among, and the tuning rows."""
    tuning = rule.tuning
    return [rule.chain.models if tuning.fixed else rule.models, rule.guardian, tuning.share, tuning.seed]


def note_look(
    lineage: Sequence[str],
    command: str,
    *,
    beside: Sequence[str] = (),
    terms: str | None = None,
    path: Path | None = None,
) -> None:
    """Note that a log was looked at.

    Args:
        lineage: digests of the logs that it was taken from, and its own at last.
        beside: digests of logs that the same run looked at: it counts once, whichever of them is calibrated.
        terms: of a calibration, what was chosen for it.
        path: where looks are kept; `looks_path()` if None.

    Raises:
        OutputError: the file cannot be written; nothing else is affected.
    """
    path = path or looks_path()
    *parents, digest = lineage
    look = Look(command=command, log=digest, parents=parents, beside=list(beside), terms=terms)
    looks = _read(path)
    look.times += sum(earlier.times for earlier in looks if earlier.kind == look.kind)
    look.last = datetime.now(UTC).isoformat(timespec="seconds")
    kept = [*(earlier for earlier in looks if earlier.kind != look.kind), look][-MOST_LOOKS:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OutputError(f"{path.parent}: cannot be made ({error})") from error
    write_text(path, json.dumps({"looks": msgspec.to_builtins(kept)}, indent=1) + "\n")


def looks_at(lineage: Sequence[str], *, terms: str | None = None, path: Path | None = None) -> Looks:
    """Return the looks at a log that count against a calibration of it.

    Parts of one log are apart as far as looks go, unless both are calibrated: a part that was drawn again until its
    certificate pleased was chosen.

    Args:
        lineage: digests of the logs that it was taken from, and its own at last.
        terms: what is chosen for the calibration that asks; an earlier one of this log with the same choice does not count.
        path: where looks are kept; `looks_path()` if None.
    """
    commands, calibrations = Counter[str](), set[tuple[str, str]]()
    for look in _read(path or looks_path()):
        if look.terms is not None and (look.log, look.terms) == (lineage[-1], terms):
            continue
        related = not {look.log, *look.beside}.isdisjoint(lineage) or lineage[-1] in look.parents
        if look.terms is not None and (related or set(look.parents) & set(lineage)):
            calibrations.add((look.log, look.terms))
            related = True
        if related:
            commands[look.command] += look.times
    return Looks(commands, len(calibrations))


def _read(path: Path) -> list[Look]:
    """Return all looks; a damaged entry counts as none, since looks never stop a command."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=_File).looks
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: the record of looks cannot be read ({error}); remove it") from error
    return [look for entry in entries if (look := _look(entry)) is not None]


def _look(entry: msgspec.Raw) -> Look | None:
    try:
        return msgspec.json.decode(entry, type=Look)
    except msgspec.ValidationError:
        return None
