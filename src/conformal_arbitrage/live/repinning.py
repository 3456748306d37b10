"""What a new check changes in the pinned values, and which certificates that makes stale.

Knows nothing of how models are tested.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.errors import CertificateError
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.live.probe import ProbeResult
from conformal_arbitrage.scorers.kinds import Pinned, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedChange:
    """A pinned value that a check would replace."""

    role: Section
    name: str
    before: str | None
    now: str | None

    def __str__(self) -> str:
        return f"[{self.role}] {self.name}: {self.before!r} is pinned, {self.now!r} was found"


def pinned_changes(config: Config, results: Sequence[ProbeResult]) -> list[PinnedChange]:
    """Return how the results of a check differ from what the configuration has pinned; nothing for a first check."""
    changes: list[PinnedChange] = []
    for result in results:
        before: Pinned | None = getattr(config.section(result.role), "pinned", None)
        if before is None or result.pinned is None:
            continue
        now = structs.asdict(result.pinned)
        changes += [
            PinnedChange(role=result.role, name=name, before=value, now=now[name])
            for name, value in structs.asdict(before).items()
            if value != now[name]
        ]
    return changes


def stale_certificates(config: Config, changes: Collection[PinnedChange]) -> list[Path]:
    """Return the certificates that were made with the values to be replaced.

    Looks at those of the policies and at the .json files beside the configuration; what a gateway has installed from
    elsewhere is in its database and not seen here.
    """
    folder = Path(config.folder)
    named = {folder / one.certificate for one in config.policies.values() if one.certificate is not None}
    return [path for path in sorted({*named, *folder.glob("*.json")}) if _is_stale(config, path, changes)]


def _is_stale(config: Config, path: Path, changes: Collection[PinnedChange]) -> bool:
    try:
        identities = Certificate.load(path).identities
    except CertificateError:  # absent, or another kind of JSON
        return False
    if identities == "unbound":
        return False
    models = {role: getattr(section, "model", None) for role, section in config.sections.items()}

    def hits(change: PinnedChange) -> bool:
        identity: dict[str, Any] = identities.get(change.role, {})
        return identity.get("model") == models[change.role] and identity.get(change.name) == change.before

    return any(map(hits, changes))
