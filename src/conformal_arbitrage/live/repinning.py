"""What a new check changes in the pinned values.

Knows nothing of how models are tested, or of certificates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from conformal_arbitrage.live.config import Config
from conformal_arbitrage.live.probe import ProbeResult
from conformal_arbitrage.scorers.kinds import Pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedChange:
    """A pinned value that a check would replace."""

    role: str
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
