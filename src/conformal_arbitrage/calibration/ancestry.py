"""Ancestry: where a certificate stands in a chain of certificates, and the sentence that holds for the chain.

A certificate without an ancestry begins a chain. Its successors follow a schedule of row counts, are tightened versions of
one that does, begin a new chain after an alarm, or were installed after looking and so promise nothing.

Knows nothing of how a threshold is found, of rows or of databases.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from conformal_arbitrage.calibration.promises import as_written

Step = Literal["scheduled", "tightened", "after red", "after looking"]
"""How a certificate came to follow another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedThreshold:
    """A relaxation with its boundary draw."""

    relaxation: float | None
    boundary_u: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """Where a certificate stands in its chain.

    Attributes:
        step: how it came to follow its predecessor.
        renewal: the number of the last scheduled renewal of the chain, from 1; 0 if there was none yet.
        first: rows that the first renewal takes; renewal k takes the first 2^(k - 1) times as many.
        since: rows of queries that arrived after this time count, in seconds since 1970.
        collected: rows of the log of the chain's first certificate among those of this one.
        root_sha256: digest of the certificate that the chain began with.
        predecessor_sha256: digest of the certificate that this one replaced.
        calibrated: of a tightened certificate, the threshold that its log gave; None for any other.
    """

    step: Step
    renewal: int
    first: int
    since: float
    collected: int = 0
    root_sha256: str
    predecessor_sha256: str
    calibrated: CalibratedThreshold | None = None

    @property
    def no_guarantee(self) -> str | None:
        """Why decisions under this certificate have no guarantee; None if they have one."""
        return _LOOKED if self.step == "after looking" else None


def document_sha256(document: Mapping[str, Any]) -> str:
    """Return a digest of a certificate's document; fields without a value do not count, so releases may add some."""
    content = {name: value for name, value in document.items() if value is not None}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def chain_facts(ancestry: Ancestry) -> list[tuple[str, str]]:
    """Return where a certificate stands in its chain, for people."""
    steps: dict[Step, str] = {
        "scheduled": f"scheduled renewal {ancestry.renewal}",
        "tightened": "the relaxation was raised",
        "after red": "the first since an alarm",
        "after looking": "installed after looking: no guarantee",
    }
    union = f", {ancestry.collected} of its rows collected" if ancestry.collected else ""
    ahead = f"the next renewal takes {ancestry.first * 2**ancestry.renewal} rows since {_date(ancestry.since)}"
    before = f"after {ancestry.predecessor_sha256[:12]}, from {ancestry.root_sha256[:12]}"
    return [("chain", f"{steps[ancestry.step]}{union}; {before}"), ("schedule", ahead)]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def chain_words(
    guarantee: str,
    ancestry: Ancestry,
    *,
    alpha: float,
    confidence: float | None = None,
    relaxation: float | None = None,
    by: str | None = None,
) -> str:
    """Return the guarantee of one certificate together with what its chain adds to it, or takes from it."""
    if ancestry.step == "after looking":
        return _NONE.format(alpha=as_written(alpha))
    parts, since = [guarantee], _date(ancestry.since)
    if ancestry.step == "tightened" and ancestry.calibrated is not None:
        parts.append(_TIGHTENED.format(before=ancestry.calibrated.relaxation, after=relaxation))
    if ancestry.renewal:
        began = "began after an alarm: only rows since then count" if ancestry.step == "after red" else "has a schedule"
        union = _UNION.format(rows=ancestry.collected) if ancestry.collected else ""
        schedule = _SCHEDULE.format(began=began, first=ancestry.first, since=since, union=union, k=ancestry.renewal)
        parts.append(f"{schedule} {_chain_promise(alpha, confidence, by)}")
    return " ".join(parts)


def _chain_promise(alpha: float, confidence: float | None, by: str | None) -> str:
    whose = "decision" if by is None else "decision of a group"
    if confidence is not None:
        return _SURE_CHAIN.format(alpha=as_written(alpha), confidence=as_written(confidence), whose=whose)
    return _CHAIN.format(alpha=as_written(alpha), whose=whose)


_LOOKED = "the certificate was installed after looking at what it would save, outside the schedule"
_NONE = (
    "There is no guarantee: this certificate was calibrated and installed after looking, outside the schedule of its "
    "chain. Who installs a certificate whenever it is cheaper keeps the lucky ones: over 20 such looks, their loss was "
    "1.1 to 1.4 times alpha (here {alpha}) in simulation. The next scheduled renewal has a guarantee again."
)
_TIGHTENED = (
    "The relaxation was raised afterwards, from {before!r} on its log to {after!r}. The loss of a decision falls as the "
    "relaxation grows, so that what is promised for the smaller one holds for the larger one, whenever and for whatever "
    "reason it was raised."
)
_UNION = ", the first renewal together with the {rows} rows of the log that the chain began with"
_SCHEDULE = (
    "This certificate belongs to a chain that {began}. Renewal k is calibrated on the first {first} x 2^(k - 1) rows of "
    "queries since {since}{union}, when the last of them is due, and is installed whatever comes out; this is renewal {k}."
)
_CHAIN = (
    "If nobody's looking changed that schedule, then for every {whose}, fixed in advance, the expected loss over "
    "calibrations and queries is at most {alpha}, whichever certificate of the chain is in force."
)
_SURE_CHAIN = (
    "If nobody's looking changed that schedule, then for every {whose}, fixed in advance, the certificate of the chain that "
    "is in force has a long-run loss of at most {alpha} with probability at least {confidence} over calibrations; that is "
    "of each certificate by itself, not of all of them together."
)
