"""Certificate: a threshold that keeps a risk budget, as a file that can be compared, verified and applied."""

import hashlib
import hmac
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache
from math import ceil, inf
from pathlib import Path
from sys import maxsize
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import to_builtins
from numpy.typing import NDArray

from conformal_arbitrage.calibration.learned import (
    FEWEST_ROWS,
    LearnedScore,
    LearnedTerms,
    read_score,
    read_sidecar,
    sidecar_path,
)
from conformal_arbitrage.calibration.notebook import html_paragraph, html_rule, html_table
from conformal_arbitrage.calibration.options import (
    NET,
    REGRET,
    STOPS,
    DialStop,
    GroupThreshold,
    Kind,
    Membership,
    group_threshold,
    lower_stop,
    refusal,
    threshold_rank,
)
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.secret import ProjectSecret, draw, drawing, draws
from conformal_arbitrage.calibration.words import TERMS, as_written, guarantee_text, summary_lines
from conformal_arbitrage.core.exact import (
    SINGLE_DIGITS,
    Bools,
    Floats,
    Integers,
    as_row,
    guardian_choices,
    is_candidate,
    is_single,
    margins,
    numbers_or_none,
    row_gaps,
    row_margin,
    row_sight,
    sorted_gaps,
)
from conformal_arbitrage.core.losses import GuardianSees, as_fraction
from conformal_arbitrage.core.rows import blocks
from conformal_arbitrage.core.walk import SMALLEST_BOUND, Draw
from conformal_arbitrage.errors import CertificateError, LaterCertificateError, OptionError, ScoreLogError
from conformal_arbitrage.scorelog.fitness import column_texts
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import write_bytes, write_text
from conformal_arbitrage.types import Boundary, Decision, LearnedUse, MissingGuardian, as_object

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# --- Ancestry ---


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


# --- Decisions ---


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decisions:
    """One decision per row, as arrays; indexing or iterating gives `Decision` objects.

    Attributes:
        log: the log whose rows were decided.
        action: index of the chosen action; -1 if the Guardian decides and its scores are missing.
        deferred: whether the Guardian decides.
        margin: how far the Primary's top action leads.
        candidate: for every action of every row, flat: whether it is a candidate.
        relaxation: the threshold; None if every row is deferred.
        by_group: the threshold of each row, infinite where it is deferred, if groups have their own; else None.
        learned: how a learned score decided each row; None without one.
    """

    log: ScoreLog
    action: Integers
    deferred: Bools
    margin: Floats
    candidate: Bools
    relaxation: float | None
    by_group: Floats | None = None
    learned: Sequence[LearnedUse | None] | None = None

    def __len__(self) -> int:
        return len(self.action)

    def __getitem__(self, row: int) -> Decision:
        start, stop = self.log.offsets[row], self.log.offsets[row + 1]
        action = int(self.action[row])
        return Decision(
            id=None if self.log.id is None else str(self.log.id[row]),
            action=None if action < 0 else action,
            candidates=tuple(np.flatnonzero(self.candidate[start:stop]).tolist()),
            decided_by="guardian" if self.deferred[row] else "primary",
            margin=float(self.margin[row]),
            relaxation=self._relaxation(row),
            learned=None if self.learned is None else self.learned[row],
        )

    def __iter__(self) -> Iterator[Decision]:
        return (self[row] for row in range(len(self)))

    def _relaxation(self, row: int) -> float | None:
        if self.by_group is None:
            return self.relaxation
        return float(self.by_group[row]) if np.isfinite(self.by_group[row]) else None

    def candidate_counts(self) -> Integers:
        """Return the number of candidates of every row."""
        return np.add.reduceat(self.candidate.astype(np.int64), self.log.offsets[:-1])

    def to_dicts(self) -> Iterator[dict[str, Any]]:
        """Yield every decision as a JSON document; an infinite margin (a single action) becomes null."""
        for row, decision in enumerate(self):
            texts = self.log.row(row).actions if self.log.actions is not None else None
            yield {
                "row": row + 1,
                "id": decision.id,
                "action": decision.action,
                **({} if texts is None else {"answer": None if decision.action is None else texts[decision.action]}),
                "decided_by": decision.decided_by,
                "candidates": list(decision.candidates),
                "margin": None if np.isinf(decision.margin) else decision.margin,
                **({} if decision.learned is None else {"learned": to_builtins(decision.learned)}),
            }


def decide_by_group(
    log: ScoreLog, groups: Mapping[str, GroupThreshold], *, by: str, u: Draw | None, sees_all: bool
) -> Decisions:
    """Apply to every row the threshold of its group; a row of an unknown group, or of none, is deferred."""
    names = column_texts(log, by)
    if names is None:
        raise ScoreLogError(f"{log.source}: there is no column '{by}', which the certificate takes its groups from")
    pairs = [group_threshold(groups, name or None) for name in names]
    relaxation = np.array([np.inf if low is None else low for low, _ in pairs])
    boundary_u = None if u is None else np.array([1.0 if draw is None else draw for _, draw in pairs])
    return decide_rows(log, relaxation=relaxation, boundary_u=boundary_u, u=u, sees_all=sees_all)


def decide_by_score(log: ScoreLog, score: LearnedScore, u: Floats) -> Decisions:
    """Decide every row of a log by a learned score, each as a live query would be."""
    groups, lengths = column_texts(log, "group"), log.primary_usage.output_tokens
    texts = None if log.context is None else log.context.tolist()
    kept, uses = np.zeros(len(log), np.bool_), list[LearnedUse | None]()
    for row in range(len(log)):
        scores = log.primary[log.offsets[row] : log.offsets[row + 1]].tolist()
        tokens = None if lengths is None else float(lengths[row])
        group = None if groups is None else groups[row] or None
        gaps = row_gaps(scores, digits=log.score_digits)
        text = None if texts is None else texts[row]
        kept[row], use = score.decide(scores, gaps, float(u[row]), group, tokens, text)
        uses.append(use)
    decisions = decide_rows(log, relaxation=np.where(kept, 0.0, np.inf), boundary_u=None, u=None, sees_all=True)
    return replace(decisions, by_group=None, learned=uses)


def decide_rows(
    log: ScoreLog,
    *,
    relaxation: float | Floats | None,
    boundary_u: float | Floats | None,
    u: Draw | None,
    sees_all: bool,
) -> Decisions:
    """Apply a threshold, one for all rows or one for each, to every row.

    The decision is the top action if it stands alone, otherwise the Guardian's choice. Draws are asked for where an action
    stands exactly at the threshold.
    """
    n = len(log)
    action, margin = np.empty(n, dtype=np.int64), np.empty(n)
    deferred = np.empty(n, dtype=np.bool_)
    candidate = np.empty(len(log.primary), dtype=np.bool_)
    thresholds = np.broadcast_to(np.inf if relaxation is None else relaxation, n)
    draws_at = None if boundary_u is None else np.broadcast_to(boundary_u, n)
    for block in blocks(log.offsets):
        gap, order = sorted_gaps(block.of(log.primary), digits=log.score_digits)
        at, threshold = None if draws_at is None else block.per_row(draws_at), block.per_row(thresholds)
        draw = np.zeros(gap.shape[1])
        if u is not None and at is not None:
            tied = np.flatnonzero((gap == threshold).any(axis=0))
            draw[tied] = u(block.row_numbers(tied))
        kept = is_candidate(gap, threshold, u=draw, boundary_u=at)
        last = kept.sum(axis=0) - 1
        choices = guardian_choices(block.of(log.guardian), order, sees_all=sees_all)
        chosen = np.take_along_axis(choices, last[None, :], axis=0)[0]
        chosen[(last > 0) & block.per_row(log.missing)] = -1
        action[block.rows], deferred[block.rows], margin[block.rows] = chosen, last > 0, margins(gap)
        by_action = np.empty_like(kept)
        np.put_along_axis(by_action, order, kept, axis=0)
        candidate[block.flat] = by_action.T.ravel()
    return Decisions(
        log=log,
        action=action,
        deferred=deferred,
        margin=margin,
        candidate=candidate,
        relaxation=None if isinstance(relaxation, np.ndarray) else relaxation,
        by_group=relaxation if isinstance(relaxation, np.ndarray) else None,
    )


def guardian_choice(scores: object, shown: Sequence[int], *, size: int) -> int | None:
    """Return the action the Guardian scores highest among those shown, the first one among equals.

    Args:
        scores: one number per action of the whole menu; only those of the actions shown are read.
        shown: indices of the actions shown, ascending.
        size: number of actions in the menu.

    Returns:
        None if the score of an action shown is None or NaN.
    """
    numbers = numbers_or_none(scores)
    if numbers is None or numbers.shape != (size,) or np.isinf(numbers[list(shown)]).any():
        raise OptionError(f"guardian= takes one finite number per action, {size} here; got {scores!r:.80}")
    values = numbers[list(shown)]
    return None if np.isnan(values).any() else shown[int(values.argmax())]


# --- The certificate as a JSON document ---


SCHEMA = 2
_READABLE = (1, SCHEMA)
_NOT_WRITTEN = frozenset({"key", "fit"})
_ADDED = (
    "regret", "spread", "confidence", "zero_one", "dial", "by", "groups", "small_groups", "unit", "ancestry",
    "margin_quantiles", "score", "learned", "text_sha256",
)  # fmt: skip
"""Fields that the first certificates of schema 2 lack; a signature covers them where they are set."""
ON_THIS_LOG = "on_this_log"
"""What `calibrate --json` prints beside the fields: figures about the log, which no reader of a certificate takes."""
_ARRAYS = "arrays"
_Certificate = TypeVar("_Certificate", bound="DataclassInstance")


@cache
def package_version() -> str:
    """Return the version of this package; each lookup takes longer than the calibration of a small log."""
    from importlib.metadata import version  # takes 20 ms to import

    return version("conformal-arbitrage")


def read_document(source: Path) -> Any:
    """Return the JSON document in a file.

    Raises:
        CertificateError: it is missing, or not JSON.
    """
    try:
        return json.loads(source.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise CertificateError(f"{source}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{source}: is not JSON ({error}); calibrate again") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def write_document(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write a document as JSON that people can read."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def convert_document(document: object, kind: type[_Certificate], source: str) -> _Certificate:
    """Return a document as the dataclass `kind`, checked field by field.

    Raises:
        CertificateError: it is of another schema version, or a field is unknown or of another type.
    """
    content = {name: value for name, value in as_object(document).items() if name != ON_THIS_LOG}
    if content.get("kind") == "path":
        raise CertificateError(
            f"{source}: is the certificate of a cascade, which verify, apply, ask, serve and `certificate show` take"
        )
    schema = content.get("schema")
    if schema not in _READABLE:
        raise LaterCertificateError(
            f"{source}: schema version {schema!r} is none of those that this release reads, 1 and {SCHEMA}; calibrate again"
        )
    unknown = set(content) - ({f.name for f in fields(kind)} - _NOT_WRITTEN)
    if unknown:
        raise LaterCertificateError(f"{source}: unknown field {min(unknown)!r}; calibrate again")
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise CertificateError(f"{source}: {error}; calibrate again") from error


def joined_arrays(document: Mapping[str, Any], packed: bytes) -> dict[str, Any]:
    """Return a document that holds the arrays of a learned score too; its signature covers them by their digest."""
    return {**document, _ARRAYS: b64encode(packed).decode()}


def split_arrays(document: object, source: str) -> tuple[dict[str, Any], bytes | None]:
    """Return a document without the arrays in it, and these; None if it has none.

    Raises:
        CertificateError: they are not base64.
    """
    content = dict(as_object(document))
    packed: object = content.pop(_ARRAYS, None)
    if packed is None:
        return content, None
    try:
        return content, b64decode(str(packed), validate=True)
    except ValueError as error:
        raise CertificateError(f"{source}: its arrays are not base64 ({error}); calibrate again") from error


def signed_bytes(document: Mapping[str, Any]) -> bytes:
    """Return what a signature covers: every field, those that came later only where they are set."""
    covered = {name: value for name, value in document.items() if name not in _ADDED or value is not None}
    if covered.get("learned") is not None:
        terms = as_object(covered["learned"])
        covered["learned"] = {name: value for name, value in terms.items() if name not in _ADDED or value is not None}
    return json.dumps(covered, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def check_signature(
    content: bytes, signature: str | None, secret: ProjectSecret, *, signed_with: str | None, source: str
) -> None:
    """Check that a certificate is as it was signed.

    Args:
        content: what the signature covers.
        signature: the signature; None if there is none.
        secret: the project's secret.
        signed_with: the fingerprint of the secret that signed it, as the certificate states it.
        source: where the certificate came from.

    Raises:
        CertificateError: it is unsigned, was changed, or was signed with another secret.
    """
    if signature is None:
        raise CertificateError(f"{source}: is unsigned; calibrate again with the project's secret at hand")
    if not secret.verifies(content, signature):
        raise CertificateError(
            f"{source}: the signature is not that of this project's secret {secret.id}: the certificate was changed, "
            f"or signed with another secret ({signed_with}); calibrate again, or add that secret after a comma"
        )


# --- The margins of the calibration rows, as 1,001 quantiles that a certificate keeps for the guard ---


QUANTILES = 1001
Threshold = tuple[float, float | None]
"""A relaxation and, for a random boundary, the largest draw that keeps an action exactly at it."""
_NOTHING = "-"


def margin_quantiles(margins: Floats, u: Floats | None = None) -> list[Threshold | None]:
    """Return the thresholds that defer 0, 0.1 %, ..., 100 % of the calibration rows or just more.

    Args:
        margins: one per row; infinite for a menu of one action, which is never deferred.
        u: one draw per row for a random boundary.

    Returns:
        For each share the smallest threshold that defers it; None where nothing finite does.
    """
    order = np.argsort(margins, kind="stable") if u is None else np.lexsort((u, margins))
    ranks = [max(ceil(k * len(margins) / (QUANTILES - 1)), 1) - 1 for k in range(QUANTILES)]
    return [_threshold(margins, u, int(order[rank])) for rank in ranks]


def write_quantiles(quantiles: Sequence[Threshold | None]) -> str:
    """Return quantiles as a text: MARGIN or MARGIN/DRAW for each, "-" where there is none."""
    return " ".join(map(_text, quantiles))


def read_quantiles(text: str) -> list[Threshold | None]:
    """Return the quantiles in a text.

    Raises:
        CertificateError: there are not 1,001, one is malformed, or they do not ascend.
    """
    try:
        quantiles = [_parsed(part) for part in text.split(" ")]
    except ValueError as error:
        raise CertificateError(f"margin_quantiles: {error}; calibrate again") from error
    ranks = [threshold_rank(*(one or (None, None))) for one in quantiles]
    if len(quantiles) != QUANTILES or ranks != sorted(ranks):
        raise CertificateError(f"margin_quantiles must be {QUANTILES} ascending thresholds; calibrate again")
    return quantiles


def are_quantiles(text: str, *, drawn: bool) -> bool:
    """Tell whether a text holds quantiles, all of them with draws or none."""
    try:
        quantiles = read_quantiles(text)
    except CertificateError:
        return False
    return all((one[1] is not None) == drawn for one in quantiles if one is not None)


def base_share(certified: Threshold, quantiles: Sequence[Threshold | None]) -> float:
    """Return the largest stored share whose quantile does not exceed the certified threshold; 0 if none does."""
    below = sum(one is not None and threshold_rank(*one) <= threshold_rank(*certified) for one in quantiles)
    return max(below - 1, 0) / (QUANTILES - 1)


def _threshold(margins: Floats, u: Floats | None, row: int) -> Threshold | None:
    if np.isinf(margins[row]):
        return None
    return float(margins[row]), None if u is None else float(u[row])


def _text(threshold: Threshold | None) -> str:
    if threshold is None:
        return _NOTHING
    margin, draw = threshold
    return repr(margin) if draw is None else f"{margin!r}/{draw!r}"


def _parsed(part: str) -> Threshold | None:
    if part == _NOTHING:
        return None
    margin, slash, draw = part.partition("/")
    threshold = float(margin), float(draw) if slash else None
    if not 0 <= threshold[0] < inf or not 0 <= threshold_rank(*threshold)[1] <= 1:
        raise ValueError(f"{part!r:.40} is not a margin of 0 or more with a draw from 0 to 1")
    return threshold


# --- Consistency ---


_MOST_RENEWALS = 60
"""More doublings than any store has rows for."""
_FAR_FUTURE = 2.0**37
"""Seconds since 1970 that no clock will show; a later time could not be written as a date."""


def refuse_contradictions(certificate: "Certificate", source: str) -> None:
    """Reject a certificate whose fields contradict each other.

    Args:
        certificate: the certificate.
        source: where it came from, for the message.
    """
    _refuse(certificate, _impossible(certificate), source)
    if certificate.schema > 1:
        _refuse(certificate, _contradictions(certificate), source)


def worded(certificate: "Certificate") -> str:
    """Return the guarantee in the words that the fields of a certificate imply."""
    text = guarantee_text(**{name: getattr(certificate, name) for name in TERMS})
    if certificate.ancestry is None:
        return text
    terms = {name: getattr(certificate, name) for name in ("alpha", "confidence", "relaxation", "by")}
    return chain_words(text, certificate.ancestry, **terms)


def least_loss(certificate: "Certificate") -> float:
    """Return the smallest loss that a decision can have."""
    return -certificate.loss_bound if certificate.loss == NET else 0.0


def _impossible(certificate: "Certificate") -> dict[str, bool]:
    """Return which fields no certificate of any schema can have together."""
    return {
        "status": (certificate.status == "by_group") != (certificate.groups is not None)
        or (certificate.status == "learned") != (certificate.learned is not None),
        "relaxation": (certificate.relaxation is None) != (certificate.status != "ok")
        or (certificate.relaxation is not None and not 0 <= certificate.relaxation < float("inf")),
        "alpha": not 0 < certificate.alpha < certificate.loss_bound < float("inf"),
        "full_sight_loss": not 0 <= certificate.full_sight_loss <= certificate.alpha
        or (certificate.full_sight_loss != 0 and certificate.loss in (REGRET, NET)),
        "boundary_u": (certificate.boundary_u is not None)
        != (certificate.boundary == "random" and certificate.status == "ok")
        or not 0 <= (certificate.boundary_u or 0.0) < 1,
        "n": certificate.n < 1,
        "max_cluster_size": len(
            {v is None for v in (certificate.cluster, certificate.clusters, certificate.max_cluster_size)}
        )
        > 1
        or not (1 if certificate.max_cluster_size is None else certificate.max_cluster_size) >= 1,
        "columns": set(certificate.columns) != {"primary", "guardian"},
        "identities": certificate.identities != "unbound" and not _are_identities(certificate.identities),
        "ancestry": certificate.ancestry is not None and not _fits_chain(certificate, certificate.ancestry),
        "key_sha256": (certificate.key_sha256 is not None) != _is_keyed(certificate),
    }


def _refuse(certificate: "Certificate", wrong: Mapping[str, bool], source: str) -> None:
    for name, bad in wrong.items():
        if bad:
            value = getattr(certificate, name)
            raise CertificateError(f"{source}: {name} {value!r:.80} contradicts the rest; calibrate again")


def _contradictions(certificate: "Certificate") -> dict[str, bool]:
    """Return which fields are not what the others imply, as far as that shows without the log."""
    total, slack = certificate.empirical_risk * certificate.n, _expected_slack(certificate)
    average = certificate.confidence is None and certificate.groups is None and certificate.learned is None
    # otherwise deferring may be needed with budget left
    sure = average and certificate.grid is None and certificate.full_sight_loss == 0
    fewest, most, deferring = certificate.fewest_actions, certificate.most_actions, certificate.status == "always_defer"
    return {
        "loss_bound": certificate.loss_bound < SMALLEST_BOUND,
        "empirical_risk": not least_loss(certificate) <= certificate.empirical_risk <= certificate.loss_bound
        or (deferring and total != 0),
        "slack": abs(slack - certificate.slack) > 1e-12 * max(1.0, certificate.loss_bound)
        or (sure and certificate.slack >= 0 if deferring else average and certificate.slack < 0),
        **_wrong_parts(certificate),
        "score": certificate.score is not None and not _may_be_learned(certificate),
        "learned": certificate.learned is not None and not _are_terms(certificate, certificate.learned),
        "grid": certificate.grid is not None and not _is_on_grid(certificate),
        "envelope_excess": certificate.envelope_excess < 0
        or (certificate.envelope_excess > 0 and certificate.loss in (REGRET, NET)),
        "regret": (certificate.regret is None) != (certificate.loss != NET)
        or (certificate.regret is not None and certificate.regret < certificate.empirical_risk - 1e-12),
        "spread": (certificate.spread is None) != (certificate.loss != NET)
        or not 0 <= (certificate.spread or 0.0) <= certificate.loss_bound,
        "unit": certificate.unit is not None
        and (not certificate.router or certificate.loss != REGRET or certificate.cluster is not None),
        "no_opinion_rows": not 0 <= certificate.no_opinion_rows <= certificate.n,
        "missing_guardian_rows": not 0
        <= certificate.missing_guardian_rows
        <= (certificate.n if certificate.missing_guardian else 0),
        "fewest_actions": fewest is None or most is None or not 1 <= fewest <= most,
        "router": certificate.router and (fewest, most) != (2, 2),
        "signature": (certificate.signature is None) != (certificate.secret_id is None),
        "guarantee": certificate.guarantee != worded(certificate),
    }


def _expected_slack(certificate: "Certificate") -> float:
    if certificate.confidence is not None or certificate.groups is not None or certificate.learned is not None:
        return certificate.alpha - certificate.empirical_risk
    total, unseen = certificate.empirical_risk * certificate.n, certificate.max_cluster_size or 1
    return certificate.alpha - (total + unseen * certificate.loss_bound) / (certificate.n + unseen)


def _may_be_learned(certificate: "Certificate") -> bool:
    """Tell whether the other fields are those of a learned score."""
    plain = certificate.loss == REGRET and certificate.unit is None and certificate.confidence is None
    rule = certificate.guardian_sees == "all" and certificate.boundary == "random"
    return plain and rule and certificate.cluster is None and certificate.groups is None and certificate.status != "ok"


def _are_terms(certificate: "Certificate", terms: LearnedTerms) -> bool:
    """Tell whether what a certificate says about its learned score can be true."""
    return (
        certificate.score is not None
        and certificate.n >= FEWEST_ROWS
        and terms.features[:2] == ("margin", "position")
        and len(set(terms.features)) == len(terms.features)
        and ("menu" in terms.features) == (terms.menu_size is not None)
        and set(terms.missing) == set(terms.features) & {"group", "tokens", "text"}
        and ("text" in terms.features) == (terms.text_sha256 is not None)
        and all(0 <= count <= certificate.n for count in terms.missing.values())
        and 0 <= terms.rounded_rows <= terms.rows <= certificate.n
        and terms.rows >= 1
        and 0 <= terms.deferred <= 1
        and certificate.empirical_risk <= certificate.alpha
    )


def _is_keyed(certificate: "Certificate") -> bool:
    """Tell whether a key is behind the draws, or behind the order of the rows of the betting test."""
    binary = certificate.zero_one or (
        certificate.binarized and certificate.loss_bound == 1 and certificate.loss == REGRET
    )
    return certificate.boundary == "random" or (certificate.confidence is not None and not binary)


def _wrong_parts(certificate: "Certificate") -> dict[str, bool]:
    """Return which of confidence, dial, groups and quantiles are not what the other fields imply."""
    confidence, dial, groups = certificate.confidence, certificate.dial, certificate.groups
    return {
        "confidence": confidence is not None and (not 0 < confidence < 1 or certificate.cluster is not None),
        "dial": dial is not None and (confidence is None or not _is_dial(certificate, dial)),
        "by": (certificate.by is None) != (groups is None),
        "groups": groups is not None and (certificate.cluster is not None or not _are_groups(certificate, groups)),
        "margin_quantiles": certificate.margin_quantiles is not None
        and not are_quantiles(certificate.margin_quantiles, drawn=certificate.boundary == "random"),
        "small_groups": certificate.small_groups is not None
        and (groups is None or confidence is not None or not _share_threshold(certificate, groups)),
    }


def _is_dial(certificate: "Certificate", dial: Sequence[DialStop]) -> bool:
    """Tell whether stops are the declared ones, ever smaller thresholds, and the chosen one is among them."""
    bound = as_fraction(certificate.loss_bound, name="loss_bound")
    ranks = [threshold_rank(stop.relaxation, stop.boundary_u) for stop in dial]
    chosen = (certificate.alpha, certificate.relaxation, certificate.boundary_u, certificate.empirical_risk)
    return (
        [stop.alpha for stop in dial] == [float(Fraction(stop) * bound) for stop in STOPS]
        and ranks == sorted(ranks, reverse=True)
        and chosen in [(stop.alpha, stop.relaxation, stop.boundary_u, stop.empirical_risk) for stop in dial]
    )


def _are_groups(certificate: "Certificate", groups: Mapping[str, GroupThreshold]) -> bool:
    """Tell whether groups have rows, thresholds and losses that make up the whole."""
    losses = sum(group.n * group.empirical_risk for group in groups.values())
    return (
        sum(group.n for group in groups.values()) == certificate.n
        and abs(losses / certificate.n - certificate.empirical_risk) <= 1e-12 * max(1.0, certificate.loss_bound)
        and all(_is_group(certificate, group) for group in groups.values())
    )


def _share_threshold(certificate: "Certificate", groups: Mapping[str, GroupThreshold]) -> bool:
    """Tell whether all small groups have the same threshold."""
    fewest = rows_needed(certificate.alpha, certificate.loss_bound)
    return len({(group.relaxation, group.boundary_u) for group in groups.values() if group.n < fewest}) <= 1


def _is_group(certificate: "Certificate", group: GroupThreshold) -> bool:
    drawn = certificate.boundary == "random" and group.relaxation is not None
    relaxation, u = group.relaxation or 0.0, group.boundary_u or 0.0
    return group.n >= 1 and 0 <= relaxation < float("inf") and (group.boundary_u is not None) == drawn and 0 <= u < 1


def _fits_chain(certificate: "Certificate", ancestry: Ancestry) -> bool:
    """Tell whether a certificate has the rows of its place in the chain and, if it was tightened, a larger relaxation."""
    calibrated, counted = ancestry.calibrated, ancestry.step in ("scheduled", "after red")
    own = threshold_rank(certificate.relaxation, certificate.boundary_u)
    rows = 0 if ancestry.renewal < 1 else ancestry.first * 2 ** (ancestry.renewal - 1) + ancestry.collected
    return (
        0 <= ancestry.renewal <= _MOST_RENEWALS
        and ancestry.first >= 1
        and 0 <= ancestry.collected <= certificate.n
        and 0 <= ancestry.since < _FAR_FUTURE
        and (calibrated is not None) == (ancestry.step == "tightened")
        and (calibrated is None or own > threshold_rank(calibrated.relaxation, calibrated.boundary_u))
        and (not counted or certificate.n == rows or (certificate.groups is not None and certificate.n < rows))
    )


def _is_on_grid(certificate: "Certificate") -> bool:
    if certificate.grid is None or certificate.relaxation is None:
        return True
    step = as_fraction(certificate.grid, name="grid")
    return step > 0 and certificate.relaxation == float(round(certificate.relaxation / step) * step) <= 1


def _are_identities(identities: Mapping[str, Any]) -> bool:
    return {"primary", "guardian"} <= set(identities) and all(isinstance(one, dict) for one in identities.values())


# --- What a certificate says to people, besides its guarantee ---


_AT_0 = {
    False: "the Primary's choice stands wherever it leads; ties at the top are deferred, however many there are",
    True: "the Primary's answer is given wherever its confidence is above 0",
}
_NO_RELAXATION = {
    "ok": "",
    "always_defer": "none: every query is deferred",
    "by_group": "one for each group",
    "learned": "none: a learned score decides",
}


def certificate_facts(certificate: "Certificate") -> list[tuple[str, str]]:
    """Return what matters most as name and value pairs, for people."""
    none = _NO_RELAXATION[certificate.status]
    relaxation = none if certificate.relaxation is None else f"{certificate.relaxation:.12g}"
    relaxation += f"  ({_AT_0[certificate.router]})" if certificate.relaxation == 0 else ""
    relaxation += f"  (at this gap, draws up to {certificate.boundary_u:.6f})" if certificate.boundary_u else ""
    facts = [
        ("relaxation", relaxation),
        ("rule", f"the Guardian sees {certificate.guardian_sees}; boundary {certificate.boundary}"),
        (
            "risk budget",
            f"alpha {as_written(certificate.alpha)}, losses in [{as_written(least_loss(certificate))}, "
            f"{as_written(certificate.loss_bound)}], {certificate.n} rows",
        ),
    ]
    facts += [*_sure_facts(certificate), *_learned_facts(certificate)]
    if certificate.cluster is not None:
        sizes = f"at most {certificate.max_cluster_size} rows each"
        facts.append(("clusters", f"{certificate.clusters} by '{certificate.cluster}', {sizes}"))
    if certificate.status in ("ok", "learned"):
        gross = "" if certificate.regret is None else f" (with gains not counted {certificate.regret:.4f})"
        unused = f"unused budget {certificate.slack:.4f}"
        facts.append(("on this log", f"loss {certificate.empirical_risk:.4f}{gross}, {unused}"))
    if certificate.looked_at is not None:
        facts.append(("looked at before", certificate.looked_at))
    if certificate.ancestry is not None:
        facts += chain_facts(certificate.ancestry)
    no_opinion, missing = certificate.no_opinion_rows, certificate.missing_guardian_rows
    if no_opinion or missing:
        facts.append(("missing scores", f"Primary in {no_opinion} rows (deferred), Guardian in {missing}"))
    return facts


def _learned_facts(certificate: "Certificate") -> list[tuple[str, str]]:
    terms = certificate.learned
    if terms is None:
        return []
    size = f"{terms.rows} rows, {terms.columns} features from {', '.join(terms.features)}"
    rounded = f"; {terms.rounded_rows} losses rounded by a draw" if terms.rounded_rows else ""
    each = f"{100 * terms.deferred:.1f} % of the rows, each decided by the others"
    return [("score", f"{certificate.score}: {size}{rounded}"), ("deferred", each)]


def _sure_facts(certificate: "Certificate") -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if certificate.confidence is not None:
        facts.append(
            (
                "confidence",
                f"{as_written(certificate.confidence)} that this certificate's long-run loss is at most alpha",
            )
        )
    if certificate.dial is not None:
        stops = ", ".join(as_written(stop.alpha) for stop in certificate.dial)
        facts.append(("dial", f"stops {stops}; set to {as_written(certificate.alpha)}"))
    if (source := group_source_of(certificate)) is not None:
        facts.append(("groups", f"named by {source} in live requests"))
    for name, group in (certificate.groups or {}).items():
        rule = "deferred" if group.relaxation is None else f"relaxation {group.relaxation:.12g}"
        facts.append((f"{certificate.by} {name}", f"{rule}, {group.n} rows"))
    return facts


def group_source_of(certificate: "Certificate") -> str | None:
    """Return what names the group of a live query, of a certificate by groups; None if nobody said."""
    if certificate.by is None or certificate.identities == "unbound":
        return None
    return certificate.identities.get("group", {}).get("source")


def certificate_summary(certificate: "Certificate") -> str:
    """Return the guarantee in two lines; that there is none, if so."""
    if certificate.ancestry is not None and certificate.ancestry.no_guarantee is not None:
        return f"There is no guarantee: {certificate.ancestry.no_guarantee}."
    return summary_lines(
        alpha=certificate.alpha,
        n=certificate.n,
        router=certificate.router,
        relaxation=certificate.relaxation,
        guardian_sees=certificate.guardian_sees,
        confidence=certificate.confidence,
        by=certificate.by,
        unit=certificate.unit,
        clusters=certificate.clusters,
        learned=certificate.learned is not None,
    )


# --- Certificate ---


Status = Literal["ok", "always_defer", "by_group", "learned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A calibrated rule and its guarantee; saved as certificate.json.

    Attributes:
        status: "ok"; "always_defer" if no relaxation keeps the budget but deferring every query does; "by_group" if
            each group has a threshold of its own; "learned" if a learned score decides.
        relaxation: actions within this gap of the top one are candidates; None to defer every query, as a certificate
            by groups does with those of an unknown group, or if a learned score decides.
        boundary_u: for boundary="random", the largest draw that keeps an action exactly at the threshold gap.
        alpha: the risk budget.
        n: rows of the log.
        loss: "guardian_regret", "net" (gains counted) or the name of the user's loss.
        loss_bound: the largest possible loss.
        full_sight_loss: the largest loss with every action in sight, as declared; 0 for the Guardian regret.
        guardian_sees: what a deferral shows the Guardian, and so what the loss was measured on.
        boundary: the rule exactly at the threshold gap.
        key_sha256: digest of the key behind the draws.
        grid: the step of the grid that the relaxation was restricted to.
        binarized: whether the loss was measured on the 0/1 Guardian.
        router: whether the log has the router form: two graded answers and a confidence.
        missing_guardian: how rows without a Guardian score were counted.
        missing_guardian_rows: how many there were; a binarised row whose right answer is unknown is one of them.
        no_opinion_rows: rows in which the Primary had no opinion; they defer.
        score_digits: significant decimals of a Primary score, 12 or 6.
        fewest_actions: the smallest menu of the log; None if not recorded (schema 1).
        most_actions: the largest.
        empirical_risk: total loss / n at the relaxation; of a learned score, with each row decided by the others.
        slack: alpha - (total + loss_bound) / (n + 1), the unspent part of the budget; with clusters of at most M rows,
            alpha - (total + M loss_bound) / (n + M); with a confidence, by groups or learned, alpha - total / n.
        envelope_excess: how far a user's loss was raised to make it monotone, as a mean over rows.
        columns: the log's columns that played Primary and Guardian.
        identities: the scorers that made the scores, or "unbound".
        log_sha256: digest of the log's content.
        version: the version of this package.
        created: time of creation, in UTC.
        guarantee: the guarantee in words.
        cluster: the column that says which rows belong together; None if rows are exchangeable one by one.
        clusters: number of clusters.
        max_cluster_size: the most rows that any cluster may ever have, as declared.
        regret: for loss="net", the mean loss on the log with gains not counted; else None.
        spread: for loss="net", the standard deviation of the long-run loss of one certificate; else None.
        confidence: the probability with which the long-run loss of this one certificate is at most alpha (of a dial: all
            stops, by groups: in all groups); None if the promise is an average over calibrations.
        zero_one: true if every loss is declared to be 0 or the bound; else None.
        dial: the stops among which alpha may be chosen after looking; None unless it is a dial.
        by: the column that says which group a row belongs to; None without groups.
        groups: the threshold of each group; None without groups.
        small_groups: "merge" if small groups share one; else None.
        unit: "session" if a row is a whole session and the guarantee is about the next one; None if a row is a query.
        score: "auto" or "learned" if the score is learned; None if it is the margin.
        learned: what the score is learned from; None unless a learned score decides.
        looked_at: what is known of earlier looks at these rows, in words; None if there was none.
        ancestry: where it stands in a chain of certificates; None if it begins one. If it was tightened, `relaxation` and
            `boundary_u` are larger than the log gave, and everything else is as the log gave it.
        margin_quantiles: thresholds that defer 0, 0.1 %, ..., 100 % of the rows, for a guard; None if they are not kept.
        secret_id: the fingerprint of the project secret that signed it, and behind the draws; None if unsigned.
        signature: of everything else, with the project's secret; None if unsigned, as all of schema 1 are.
        key: the secret behind the draws; never part of the saved certificate.
        fit: the learned score itself; saved in a file beside the certificate, whose digest `learned` holds.
    """

    schema: int = SCHEMA
    status: Status
    relaxation: float | None
    boundary_u: float | None
    alpha: float
    n: int
    loss: str
    loss_bound: float
    full_sight_loss: float = 0.0
    guardian_sees: GuardianSees
    boundary: Boundary
    key_sha256: str | None
    grid: float | None
    binarized: bool
    router: bool = False
    missing_guardian: MissingGuardian | None
    missing_guardian_rows: int
    no_opinion_rows: int
    score_digits: Literal[6, 12]
    fewest_actions: int | None = None
    most_actions: int | None = None
    empirical_risk: float
    slack: float
    envelope_excess: float
    columns: dict[str, str]
    identities: dict[str, Any] | Literal["unbound"]
    log_sha256: str
    version: str
    created: str
    guarantee: str
    cluster: str | None = None
    clusters: int | None = None
    max_cluster_size: int | None = None
    regret: float | None = None
    spread: float | None = None
    confidence: float | None = None
    zero_one: Literal[True] | None = None
    dial: tuple[DialStop, ...] | None = None
    by: str | None = None
    groups: dict[str, GroupThreshold] | None = None
    small_groups: Literal["merge"] | None = None
    unit: Literal["session"] | None = None
    score: Literal["auto", "learned"] | None = None
    learned: LearnedTerms | None = None
    looked_at: str | None = None
    ancestry: Ancestry | None = None
    margin_quantiles: str | None = None
    secret_id: str | None = None
    signature: str | None = None
    key: bytes | None = field(default=None, repr=False, compare=False)
    fit: LearnedScore | None = field(default=None, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path, *, key: bytes | None = None, secret: ProjectSecret | None = None) -> "Certificate":
        """Read a certificate from a file.

        Args:
            path: the file.
            key: the key behind its draws; needed to use a certificate with boundary="random" unless the project's
                secret, which it is derived from, is given.
            secret: the project's secret; the signature is verified with it.

        Raises:
            CertificateError: the file is missing, damaged, contradictory or of another schema version; the key or the
                signature is wrong; or the file with the arrays of a learned score is absent or altered.
        """
        source = Path(path)
        certificate = cls.from_dict(read_document(source), key=key, source=str(source))
        if certificate.learned is not None and certificate.fit is None:
            certificate = certificate.with_arrays(read_sidecar(source), source=str(sidecar_path(source)))
        if secret is None:
            return certificate
        certificate.check_signature(secret, source=str(source))
        return certificate.with_key_of(secret)

    @classmethod
    def from_dict(cls, document: Any, *, key: bytes | None = None, source: str = "certificate") -> "Certificate":
        """Build a certificate from its JSON document and check that its fields are consistent.

        Args:
            document: what `to_dict` returned.
            key: as in `load`.
            source: where the document came from, for error messages.
        """
        content, arrays = split_arrays(document, source)
        certificate = convert_document(content, cls, source)
        refuse_contradictions(certificate, source)
        if arrays is not None:
            certificate = certificate.with_arrays(arrays, source=source)
        return certificate if key is None else certificate._with_key(key)

    def to_dict(self, *, with_arrays: bool = False) -> dict[str, Any]:
        """Return the certificate as a JSON document, without the key.

        Args:
            with_arrays: put the arrays of a learned score into it, so that one document holds everything.
        """
        document = asdict(replace(self, key=None, fit=None))
        del document["key"], document["fit"]
        return document if self.fit is None or not with_arrays else joined_arrays(document, self.fit.packed)

    def save(self, path: str | Path) -> None:
        """Write certificate.json and, for a learned score, certificate.npz beside it; the key is not part of either."""
        if self.fit is not None:
            write_bytes(sidecar_path(path), self.fit.packed)
        write_document(path, self.to_dict())

    def with_arrays(self, packed: bytes, *, source: str = "certificate") -> "Certificate":
        """Return the certificate with its learned score, from the content of the file beside it.

        Raises:
            CertificateError: the arrays are not those that it was made with, or it has no learned score.
        """
        return replace(self, fit=read_score(self, packed, source))

    @property
    def signed(self) -> bool:
        """Whether there is a signature; `load(path, secret=...)` and `check_signature` verify it."""
        return self.signature is not None

    def sign(self, secret: ProjectSecret) -> "Certificate":
        """Return the certificate signed with the project's secret."""
        unsigned = replace(self, schema=SCHEMA, secret_id=secret.id, signature=None)
        return replace(unsigned, signature=secret.sign(signed_bytes(unsigned.to_dict())))

    def check_signature(self, secret: ProjectSecret, *, source: str = "certificate") -> None:
        """Check that this certificate is as it was signed.

        Raises:
            CertificateError: it is unsigned, was changed, or was signed with another secret.
        """
        content = signed_bytes(replace(self, signature=None).to_dict())
        check_signature(content, self.signature, secret, signed_with=self.secret_id, source=source)

    def candidates(
        self,
        primary_scores: object,
        *,
        id: str | None = None,
        group: Membership = None,
        tokens: float | None = None,
        text: str | None = None,
    ) -> NDArray[np.intp]:
        """Return the indices of one query's candidates: a single one is chosen, several go to the Guardian.

        Args:
            primary_scores: one number per action; None or NaN anywhere means no opinion, so every action is kept.
            id: the query's id, fixed before its scores; required for boundary="random".
            group, tokens, text: as in `decide`.
        """
        return np.array(self.sight(primary_scores, id=id, group=group, tokens=tokens, text=text)[0], dtype=np.intp)

    def sight(
        self,
        primary_scores: object,
        *,
        id: str | None = None,
        group: Membership = None,
        tokens: float | None = None,
        text: str | None = None,
    ) -> tuple[list[int], float, LearnedUse | None]:
        """Return one query's candidates as plain integers, its margin, and how a learned score decided if there is one."""
        plain = _are_floats(primary_scores)
        self._refuse_single(not plain and is_single(primary_scores))
        if self.learned is not None:
            scores: Any = primary_scores if plain else as_row(primary_scores)[:, 0].tolist()
            return self._learned_sight(scores, id, group, tokens, text)
        relaxation, boundary_u = self.threshold(group)
        u = 0.0 if boundary_u is None else self._draw(id)
        return *row_sight(primary_scores, relaxation, digits=self.score_digits, u=u, boundary_u=boundary_u), None

    def _learned_sight(
        self, scores: Sequence[float], id: str | None, group: Membership, tokens: float | None, text: str | None
    ) -> tuple[list[int], float, LearnedUse | None]:
        if group is not None and not isinstance(group, str):
            raise OptionError(f"several groups and learned do not go together: {refusal('several groups', 'learned')}")
        gaps = row_gaps(scores, digits=self.score_digits)
        stands, use = self.learned_score().decide(scores, gaps, self._draw(id), group, tokens, text)
        return [gaps.index(0.0)] if stands else list(range(len(gaps))), row_margin(gaps), use

    def uncovered_features(self, use: LearnedUse | None) -> str | None:
        """Return why a decision is not covered: it lacks a feature that every logged row has; None if it is."""
        if use is None or self.learned is None:
            return None
        lacking = [name for name in use.missing if not self.learned.missing[name]]
        return f"the learned score lacks the query's {' and '.join(lacking)}" if lacking else None

    def learned_score(self) -> LearnedScore:
        """Return the learned score; raise a CertificateError that says how to provide it if there is none."""
        if self.fit is None:
            raise CertificateError(
                "the arrays of the learned score are missing: Certificate.load(path) reads them from the .npz file beside "
                "the certificate"
            )
        return self.fit

    def threshold(self, group: Membership = None) -> tuple[float | None, float | None]:
        """Return the relaxation and the boundary draw for a query; of several groups the largest one's."""
        return (self.relaxation, self.boundary_u) if self.groups is None else group_threshold(self.groups, group)

    def decide(
        self,
        primary_scores: object,
        *,
        guardian: object = None,
        id: str | None = None,
        group: Membership = None,
        tokens: float | None = None,
        text: str | None = None,
    ) -> Decision:
        """Decide one query: the Primary's top action if it stands alone, otherwise the Guardian's choice.

        `decided_by` says whose decision it is. If it is the Primary's, `action` is final. If it is the Guardian's,
        `action` is None unless its scores are passed as well: then it is the action that the Guardian scores highest
        among those a deferral shows (the candidates, or every action, as `guardian_sees` says), the first one among
        equals. `apply` decides the rows of a log in the same way.

        Args:
            primary_scores: one number per action; None or NaN anywhere means no opinion, so the query is deferred.
            guardian: the Guardian's scores, one per action of the whole menu. Only those of the actions shown are
                read, the others may be None; `action` stays None if one of those is None or NaN.
            id: the query's id, fixed before its scores; required for boundary="random".
            group: the query's group or groups, for a certificate by groups; one that is not known defers. For a learned
                score the group that is one of its features.
            tokens: the Primary's output tokens, if they are a feature of the learned score.
            text: the question as plain text, if it is a feature of the learned score.
        """
        candidates, margin, use = self.sight(primary_scores, id=id, group=group, tokens=tokens, text=text)
        deferred = len(candidates) > 1
        action: int | None = candidates[0]
        if deferred:
            size = len(row_gaps(primary_scores, digits=self.score_digits))
            shown = candidates if self.guardian_sees == "candidates" else range(size)
            action = None if guardian is None else guardian_choice(guardian, shown, size=size)
        return Decision(
            id=id,
            action=action,
            candidates=tuple(candidates),
            decided_by="guardian" if deferred else "primary",
            margin=margin,
            relaxation=self.threshold(group)[0],
            learned=use,
        )

    def apply(self, log: ScoreLog) -> Decisions:
        """Decide every row of a log."""
        self._refuse_single(log.score_digits < self.score_digits)
        same_digits, sees_all = replace(log, score_digits=self.score_digits), self.guardian_sees != "candidates"
        if self.groups is not None and self.by is not None:
            u = drawing(self.secret(), log) if self.boundary == "random" else None
            return decide_by_group(same_digits, self.groups, by=self.by, u=u, sees_all=sees_all)
        if self.learned is not None:
            return decide_by_score(same_digits, self.learned_score(), draws(self.secret(), log))
        u = None if self.boundary_u is None else drawing(self.secret(), log)
        return decide_rows(same_digits, relaxation=self.relaxation, boundary_u=self.boundary_u, u=u, sees_all=sees_all)

    def choose(self, alpha: float) -> "Certificate":
        """Return a dial set to another budget, the largest stop that does not exceed it; unsigned.

        Raises:
            CertificateError: this certificate has no dial.
            OptionError: alpha lies below the lowest stop.
        """
        if self.dial is None:
            raise CertificateError(
                "this certificate has no dial, so its alpha was fixed before calibration; calibrate with dial=True (--dial)"
            )
        stop = lower_stop(self.dial, alpha)
        chosen = replace(
            self,
            status="always_defer" if stop.relaxation is None else "ok",
            alpha=stop.alpha,
            relaxation=stop.relaxation,
            boundary_u=stop.boundary_u,
            empirical_risk=stop.empirical_risk,
            slack=stop.alpha - stop.empirical_risk,
            secret_id=None,
            signature=None,
        )
        return replace(chosen, guarantee=worded(chosen))

    @property
    def kinds(self) -> list[Kind]:
        """What kind of certificate this is, in the words of `NO_PROOF`."""
        kinds: dict[Kind, bool] = {
            "net": self.loss == NET,
            "own loss": self.loss not in (NET, REGRET),
            "learned": self.score is not None,
            "cluster": self.cluster is not None,
            "session": self.unit == "session",
            "groups": self.by is not None,
            "merged groups": self.small_groups is not None,
        }
        return [kind for kind, holds in kinds.items() if holds]

    @property
    def promise(self) -> Literal["crc", "high_probability"]:
        """What kind of guarantee it is: on average over calibrations, or of this one with high probability."""
        return "crc" if self.confidence is None else "high_probability"

    def _refuse_single(self, single: bool) -> None:
        """Refuse scores of less precision than the certificate's: equal scores would no longer have equal gaps."""
        if single and self.score_digits > SINGLE_DIGITS:
            raise OptionError(
                f"the scores are single precision, and the certificate was made from double precision ({self.score_digits} "
                "digits); compute them in float64, or calibrate again on a log in single precision"
            )

    def facts(self) -> list[tuple[str, str]]:
        """Return what matters most as name and value pairs, for people."""
        return certificate_facts(self)

    def with_looks(self, text: str) -> "Certificate":
        """Return the certificate with what is known of earlier looks at its rows, in words."""
        return replace(self, looked_at=text)

    def __repr__(self) -> str:
        shown = ("status", "relaxation", "alpha", "n", "loss", "guardian_sees", "boundary")
        return f"Certificate({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _repr_html_(self) -> str:
        rest = html_rule(self.relaxation, of="confidence" if self.router else "lead") + html_paragraph(self.guarantee)
        return html_table([("status", self.status), *self.facts(), ("loss", self.loss)]) + rest

    @property
    def sizes(self) -> range:
        """The sizes of menus that the guarantee covers; all, if the certificate does not record them (schema 1)."""
        if self.fewest_actions is None or self.most_actions is None:
            return range(maxsize)
        return range(self.fewest_actions, self.most_actions + 1)

    def outside(self, size: int) -> str | None:
        """Return why a menu of this size has no guarantee; None if it has one."""
        if size in self.sizes:
            return None
        covered = f"{self.fewest_actions} to {self.most_actions}"
        return f"the query has {size} action{'' if size == 1 else 's'}; those of the certificate's log have {covered}"

    @property
    def summary(self) -> str:
        """The guarantee in two lines; `guarantee` is the whole."""
        return certificate_summary(self)

    def with_key_of(self, secret: ProjectSecret) -> "Certificate":
        """Return the certificate with the key behind its draws, if that is derived from the project's secret."""
        if self.key_sha256 is None or self.key is not None:
            return self
        return replace(self, key=secret.find_boundary_key(self.key_sha256))

    def _with_key(self, key: bytes) -> "Certificate":
        if not isinstance(key, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CertificateError(f"key= takes bytes, not {type(key).__name__}")
        if self.key_sha256 is None:
            raise CertificateError('this certificate has no key (boundary="include"); omit key=')
        if not hmac.compare_digest(hashlib.sha256(key).hexdigest(), self.key_sha256):
            raise CertificateError(
                "the key is not the one this certificate was made with; use the project's secret of then"
            )
        return replace(self, key=key)

    def secret(self) -> bytes:
        """Return the key; raise a CertificateError that says how to provide it if there is none."""
        if self.key is None:
            raise CertificateError(
                'boundary="random" needs the key behind the draws: Certificate.load(path, secret=ProjectSecret.find()), or '
                "set ARBITRAGE_SECRET"
            )
        return self.key

    def _draw(self, id: str | None) -> float:
        if not isinstance(id, str) or not id:
            raise OptionError(f'boundary="random" needs the query\'s id, a non-empty text; pass id= (got {id!r})')
        return draw(self.secret(), id)


def _are_floats(scores: Any) -> bool:
    """Tell whether scores are Python's own floats, as live ones are."""
    return type(scores) in (tuple, list) and all(type(score) is float for score in scores)
