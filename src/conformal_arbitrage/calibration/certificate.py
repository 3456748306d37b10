"""Certificate: a threshold that keeps a risk budget, as a file that can be compared, verified and applied."""

import hashlib
import hmac
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache
from math import ceil, inf
from pathlib import Path
from sys import maxsize
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np
from msgspec import structs, to_builtins
from numpy.typing import NDArray

from conformal_arbitrage.calibration import promises
from conformal_arbitrage.calibration.learned import (
    FEWEST_ROWS,
    LearnedScore,
    LearnedTerms,
    answers_of,
    read_sidecar,
    sidecar_path,
    unpack,
)
from conformal_arbitrage.calibration.notebook import html_paragraph, html_rule, html_steps, html_table
from conformal_arbitrage.calibration.options import (
    STOPS,
    DialStop,
    GroupThreshold,
    Kind,
    Membership,
    group_threshold,
    lower_stop,
    refusal,
    threshold_rank,
    unproved,
)
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.promises import (
    Ancestry,
    Batch,
    ByGroup,
    Cluster,
    Confident,
    Cutoff,
    Dial,
    Evidence,
    Learned,
    LossTerms,
    Net,
    Own,
    PerSession,
    Promise,
    Provenance,
    Rule,
    Status,
    Threshold,
    is_chain,
)
from conformal_arbitrage.calibration.secret import ProjectSecret, draw, drawing, question_draw
from conformal_arbitrage.calibration.sentences import (
    as_written,
    chain_facts,
    chain_text,
    floor_binds,
    guarantee,
    summary,
    wrong_allowed,
)
from conformal_arbitrage.core.bounds import Interval, hypergeometric_limit, next_range
from conformal_arbitrage.core.chains import PRICES, policies_of
from conformal_arbitrage.core.exact import (
    SINGLE_DIGITS,
    Bools,
    Draw,
    Floats,
    Integers,
    as_row,
    choose_rows,
    is_single,
    n_rows,
    numbers_or_none,
    row_gaps,
    row_margin,
    row_sight,
)
from conformal_arbitrage.core.features import spendable_losses
from conformal_arbitrage.core.risk import SMALLEST_BOUND, GuardianSees, as_fraction
from conformal_arbitrage.errors import CertificateError, LaterCertificateError, OptionError, ScoreLogError
from conformal_arbitrage.scorelog.fitness import column_texts
from conformal_arbitrage.scorelog.tables import write_bytes, write_text
from conformal_arbitrage.types import Boundary, Decision, LearnedUse, as_object

if TYPE_CHECKING:  # a gateway reads no logs
    from conformal_arbitrage.scorelog.log import Costs, ScoreLog

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

    log: "ScoreLog"
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

    def cost_per_1000(self, costs: "Costs", guardian_sees: GuardianSees) -> float:
        """Return dollars per 1000 queries: a deferral pays for both models."""
        sizes = self.log.sizes
        shown = self.candidate_counts() if guardian_sees == "candidates" else sizes
        rows = np.flatnonzero(self.deferred)
        leg = costs.guardian.of(rows, shown[rows], sizes[rows])
        return 1000 * float(costs.primary.sum() + leg.sum()) / len(self)

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
    log: "ScoreLog", groups: Mapping[str, GroupThreshold], *, by: str, u: Draw | None, sees_all: bool
) -> Decisions:
    """Apply to every row the threshold of its group; a row of an unknown group, or of none, is deferred."""
    names = column_texts(log, by)
    if names is None:
        raise ScoreLogError(f"{log.source}: there is no column '{by}', which the certificate takes its groups from")
    pairs = [group_threshold(groups, name or None) for name in names]
    relaxation = np.array([np.inf if low is None else low for low, _ in pairs])
    boundary_u = None if u is None else np.array([1.0 if draw is None else draw for _, draw in pairs])
    return decide_rows(log, relaxation=relaxation, boundary_u=boundary_u, u=u, sees_all=sees_all)


def decide_by_score(log: "ScoreLog", score: LearnedScore, u: Floats) -> Decisions:
    """Decide every row of a log by a learned score, each as a live query would be."""
    groups, lengths = column_texts(log, "group"), log.primary_usage.output_tokens
    texts, answers = None if log.context is None else log.context.tolist(), answers_of(log)
    kept, uses = np.zeros(len(log), np.bool_), list[LearnedUse | None]()
    for row in range(len(log)):
        scores = log.primary[log.offsets[row] : log.offsets[row + 1]].tolist()
        tokens = None if lengths is None else float(lengths[row])
        group = None if groups is None else groups[row] or None
        gaps = row_gaps(scores, digits=log.score_digits)
        text = None if texts is None else texts[row]
        answer = None if answers is None else answers[row]
        kept[row], use = score.decide(scores, gaps, float(u[row]), group, tokens, text, answer)
        uses.append(use)
    decisions = decide_rows(log, relaxation=np.where(kept, 0.0, np.inf), boundary_u=None, u=None, sees_all=True)
    return replace(decisions, by_group=None, learned=uses)


def decide_rows(
    log: "ScoreLog",
    *,
    relaxation: float | Floats | None,
    boundary_u: float | Floats | None,
    u: Draw | None,
    sees_all: bool,
) -> Decisions:
    """Apply a threshold, one for all rows or one for each; draws are asked for where an action stands right at it."""
    chosen = choose_rows(log, relaxation, boundary_u, u, sees_all=sees_all)
    several = isinstance(relaxation, np.ndarray)
    return Decisions(
        log=log,
        action=chosen.action,
        deferred=chosen.deferred,
        margin=chosen.margin,
        candidate=chosen.candidate,
        relaxation=None if several else relaxation,
        by_group=relaxation if several else None,
    )


def guardian_choice(scores: object, shown: Sequence[int], *, size: int) -> int | None:
    """Return the action the Guardian scores highest among those shown, the first one among equals.

    Args:
        scores: one number per action of the whole menu; only those of the actions shown are read.

    Returns:
        None if the score of an action shown is None or NaN.
    """
    numbers = numbers_or_none(scores)
    if numbers is None or numbers.shape != (size,) or np.isinf(numbers[list(shown)]).any():
        raise OptionError(f"guardian= takes one finite number per action, {size} here; got {scores!r:.80}")
    values = numbers[list(shown)]
    return None if np.isnan(values).any() else shown[int(values.argmax())]


# --- The certificate as a JSON document ---


SCHEMA = 1
_WRITTEN = (
    "schema", "rule", "promise", "loss", "evidence", "provenance", "guarantee", "looked_at", "ancestry", "secret_id",
    "signature",
)  # fmt: skip
ON_THIS_LOG = "on_this_log"
"""What `calibrate --json` prints beside the fields: figures about the log, which no reader of a certificate takes."""
_ARRAYS = "arrays"


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


def _convert(document: Mapping[str, Any], source: str) -> "Certificate":
    """Return a document as a certificate, checked field by field.

    Raises:
        LaterCertificateError: it is of another schema version, or a field or a kind is unknown.
        CertificateError: a field is missing or of another type.
    """
    content = {name: value for name, value in document.items() if name != ON_THIS_LOG}
    schema = content.get("schema")
    if schema != SCHEMA:
        raise LaterCertificateError(
            f"{source}: schema version {schema!r:.40} is not the one that this release reads, {SCHEMA}; calibrate again"
        )
    unknown = set(content) - set(_WRITTEN)
    if unknown:
        raise LaterCertificateError(f"{source}: unknown field {min(unknown)!r}; calibrate again")
    try:
        return msgspec.convert(content, Certificate)
    except msgspec.ValidationError as error:
        kind = LaterCertificateError if _UNKNOWN.search(str(error)) else CertificateError
        raise kind(f"{source}: {error}; calibrate again") from error


_UNKNOWN = re.compile(r"unknown field|`\$\.\w+\.type`$")
"""How msgspec says that it knows a field, or the tag of a part, not."""


def is_cascade(document: Mapping[str, Any]) -> bool:
    """Tell whether a document is the certificate of a cascade, without reading the rest."""
    return as_object(document.get("rule")).get("type") == "path"


def joined_arrays(document: Mapping[str, Any], packed: bytes) -> dict[str, Any]:
    """Return a document that holds the arrays of a learned score too; its signature covers them by their digest."""
    return {**document, _ARRAYS: b64encode(packed).decode()}


def split_arrays(document: object, source: str) -> tuple[dict[str, Any], bytes | None]:
    """Return a document without the arrays in it, and these; None if it has none.

    Raises:
        CertificateError: they are not base64.
    """
    content: dict[str, Any] = {**document} if isinstance(document, Mapping) else {}  # which lacks every field
    packed: object = content.pop(_ARRAYS, None)
    if packed is None:
        return content, None
    try:
        return content, b64decode(str(packed), validate=True)
    except ValueError as error:
        raise CertificateError(f"{source}: its arrays are not base64 ({error}); calibrate again") from error


def signed_bytes(document: Mapping[str, Any]) -> bytes:
    """Return what a signature covers: every field that is set, in an order of its own."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def document_sha256(document: Mapping[str, Any]) -> str:
    """Return a digest of a certificate's document; it holds that of a learned score's arrays, in it or not."""
    return hashlib.sha256(signed_bytes({name: part for name, part in document.items() if name != _ARRAYS})).hexdigest()


# --- The margins of the calibration rows, as 1,001 quantiles that a certificate keeps for the guard ---


QUANTILES = 1001
MarginThreshold = tuple[float, float | None]
"""A relaxation and, for a random boundary, the largest draw that keeps an action exactly at it."""
_NOTHING = "-"


def margin_quantiles(margins: Floats, u: Floats | None = None) -> list[MarginThreshold | None]:
    """Return the thresholds that defer 0, 0.1 %, ..., 100 % of the calibration rows or just more.

    Args:
        margins: one per row; infinite for a menu of one action, which is never deferred.

    Returns:
        For each share the smallest threshold that defers it; None where nothing finite does.
    """
    order = np.argsort(margins, kind="stable") if u is None else np.lexsort((u, margins))
    ranks = [max(ceil(k * len(margins) / (QUANTILES - 1)), 1) - 1 for k in range(QUANTILES)]
    return [_threshold(margins, u, int(order[rank])) for rank in ranks]


def write_quantiles(quantiles: Sequence[MarginThreshold | None]) -> str:
    """Return quantiles as a text: MARGIN or MARGIN/DRAW for each, "-" where there is none."""
    return " ".join(map(_text, quantiles))


def read_quantiles(text: str) -> list[MarginThreshold | None]:
    """Return the quantiles in a text.

    Raises:
        CertificateError: there are not 1,001, one is malformed, or they do not ascend.
    """
    try:
        quantiles = [_parsed(part) for part in text.split(" ")]
    except ValueError as error:
        raise CertificateError(f"margin_quantiles: {error}; calibrate again") from error
    ranks = [threshold_rank(*(quantile or (None, None))) for quantile in quantiles]
    if len(quantiles) != QUANTILES or ranks != sorted(ranks):
        raise CertificateError(f"margin_quantiles must be {QUANTILES} ascending thresholds; calibrate again")
    return quantiles


def are_quantiles(text: str, *, drawn: bool) -> bool:
    """Tell whether a text holds quantiles, all of them with draws or none."""
    try:
        quantiles = read_quantiles(text)
    except CertificateError:
        return False
    return all((quantile[1] is not None) == drawn for quantile in quantiles if quantile is not None)


def base_share(certified: MarginThreshold, quantiles: Sequence[MarginThreshold | None]) -> float:
    """Return the largest stored share whose quantile does not exceed the certified threshold; 0 if none does."""
    below = sum(
        quantile is not None and threshold_rank(*quantile) <= threshold_rank(*certified) for quantile in quantiles
    )
    return max(below - 1, 0) / (QUANTILES - 1)


def _threshold(margins: Floats, u: Floats | None, row: int) -> MarginThreshold | None:
    if np.isinf(margins[row]):
        return None
    return float(margins[row]), None if u is None else float(u[row])


def _text(threshold: MarginThreshold | None) -> str:
    if threshold is None:
        return _NOTHING
    margin, draw = threshold
    return repr(margin) if draw is None else f"{margin!r}/{draw!r}"


def _parsed(part: str) -> MarginThreshold | None:
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


def _refuse_contradictions(certificate: "Certificate", source: str) -> None:
    """Reject a certificate whose numbers contradict each other, as far as that shows without the log.

    Raises:
        CertificateError: two kinds have no proof together, or a number is not what the others imply.
    """
    refused, deferring = unproved(certificate.kinds), certificate.status == "always_defer"
    if refused is not None:
        raise CertificateError(f"{source}: {refused[0]} contradicts the rest: {refused[2]}; calibrate again")
    if certificate.is_batch:
        checks = _wrong_batch(certificate)
    else:
        checks = (
            _wrong_terms(certificate) | _wrong_rule(certificate, deferring) | _wrong_evidence(certificate, deferring)
        )
    wrong = next(((name, value) for name, (value, wrong) in checks.items() if wrong), None)
    if wrong is None and certificate.guarantee != certificate.worded().guarantee:
        wrong = "guarantee", certificate.guarantee
    if wrong is not None:
        raise CertificateError(f"{source}: {wrong[0]} {wrong[1]!r:.80} contradicts the rest; calibrate again")


_Checks = dict[str, tuple[object, bool]]
"""name -> the value of a field, and whether it is wrong."""


def _wrong_rule(certificate: "Certificate", deferring: bool) -> _Checks:
    rule, n, bound = certificate.rule, certificate.n, certificate.loss.bound
    match rule:
        case Threshold():
            drawn = rule.boundary == "random" and rule.relaxation is not None
            return {
                "relaxation": (rule.relaxation, not 0 <= (rule.relaxation or 0.0) < inf),
                "boundary_u": (rule.boundary_u, not _is_draw(rule.boundary_u, drawn=drawn)),
                "grid": (rule.grid, rule.grid is not None and not _is_on_grid(rule.relaxation, rule.grid)),
            }
        case ByGroup():
            losses = sum(group.n * group.empirical_risk for group in rule.groups.values())
            off = abs(losses / max(n, 1) - certificate.evidence.empirical_risk) > 1e-12 * max(1.0, bound)
            good = all(_is_group(group, rule.boundary) for group in rule.groups.values())
            whole = sum(group.n for group in rule.groups.values()) == n
            return {"groups": (rule.groups, off or not good or not whole or not _share_threshold(certificate, rule))}
        case Learned():
            return {"learned": (rule.terms, rule.terms is not None and not _are_terms(certificate, rule.terms))}
        case promises.Path():
            return _wrong_path(certificate, rule, deferring)
        case Cutoff():
            return _wrong_batch(certificate)


def _wrong_batch(certificate: "Certificate") -> _Checks:
    """Check the certificate of a batch, as far as that shows without the items."""
    rule, promise, evidence, n = certificate.rule, certificate.promise, certificate.evidence, certificate.n
    if not (isinstance(rule, Cutoff) and isinstance(promise, Batch)):
        return {"rule": (certificate.rule, True)}
    graded, below = promise.limit is None, rule.keeps == "below"
    outside = n - promise.sample
    return {
        "promise": (promise, not _is_batch(promise, n) or not (graded or promise.limit == _batch_limit(promise, n))),
        "risk": (rule.risk, (rule.risk is not None) != below or not -inf < (rule.risk or 0.0) < inf),
        "tie": (rule.tie, (rule.tie is not None) != below),
        "kept": (rule.kept, not 0 <= rule.kept <= outside or (rule.kept > 0) == (rule.keeps == "none")),
        "learned": (rule.learned, bool(rule.learned) and not promise.pilot),
        "wrong_at": (rule.wrong_at, list(rule.wrong_at) != sorted(set(rule.wrong_at) & set(range(n)))),
        "empirical_risk": (evidence.empirical_risk, not 0 <= evidence.empirical_risk <= 1),
        "missing_guardian_rows": (
            evidence.missing_guardian_rows, not 0 <= evidence.missing_guardian_rows <= promise.sample,
        ),
        "loss": (certificate.loss, certificate.loss != (promises.POOR_LABEL if graded else promises.WRONG_LABEL)),
        "ancestry": (certificate.ancestry, certificate.ancestry is not None),
        "signature": (certificate.signature, (certificate.signature is None) != (certificate.secret_id is None)),
    }  # fmt: skip


def _is_batch(promise: Batch, n: int) -> bool:
    """Tell whether the numbers of a promise about n items can belong together."""
    shares = 0 <= promise.error < 1 and 0 < promise.level < 1 and 0 < promise.confidence <= 1 - promise.level + 1e-12
    return n >= 1 and shares and 0 <= promise.pilot <= promise.sample <= n and promise.draw >= 1


def _batch_limit(promise: Batch, n: int) -> int:
    """Return how many wrong items of the sample may lie below the cutoff; the pilot is neither sampled nor kept."""
    return hypergeometric_limit(
        n - promise.pilot,
        wrong_allowed(promise.error, n),
        promise.sample - promise.pilot,
        as_fraction(promise.level, name="level"),
    )


def _wrong_path(certificate: "Certificate", rule: promises.Path, deferring: bool) -> _Checks:
    chain = rule.chain
    return {
        "chain": (chain, not is_chain(chain) or rule.guardian in chain.models),
        "models": (rule.models, not set(chain.models) <= set(rule.models)),
        "position": (
            rule.position,
            (rule.position is None) != deferring
            or not 0 < (1 if rule.position is None else rule.position) <= len(PRICES),
        ),
        "u": (rule.u, (rule.u is None) != deferring or not 0 <= (rule.u or 0.0) <= 1),
        "tuning": (rule.tuning, rule.tuning.rows < 1),
        "grades": (certificate.loss, certificate.loss.bound != 1),
        "loss": (certificate.loss, isinstance(certificate.loss, Own)),
        "evidence": (certificate.evidence, certificate.evidence.slack is not None),
    }


def _wrong_terms(certificate: "Certificate") -> _Checks:
    """Check the numbers of promise, loss and provenance, and the place in the chain."""
    promise, loss, evidence, provenance = (
        certificate.promise, certificate.loss, certificate.evidence, certificate.provenance,
    )  # fmt: skip
    confidence, ancestry = certificate.confidence, certificate.ancestry
    keyed = certificate.rule.boundary == "random" or (confidence is not None and not loss.binary)
    checks: _Checks = {
        "alpha": (promise.alpha, not 0 < promise.alpha < loss.bound < inf),
        "loss_bound": (loss.bound, loss.bound < SMALLEST_BOUND),
        "full_sight_loss": (loss.in_full_sight, not 0 <= loss.in_full_sight <= promise.alpha),
        "confidence": (confidence, confidence is not None and not 0 < confidence < 1),
        "regret": (certificate.loss, isinstance(loss, Net) and loss.regret < evidence.empirical_risk - 1e-12),
        "envelope_excess": (certificate.loss, isinstance(loss, Own) and loss.envelope_excess < 0),
        "identities": (provenance.identities, not _are_identities(certificate)),
        "key_sha256": (provenance.key_sha256, (provenance.key_sha256 is not None) != keyed),
        "signature": (certificate.signature, (certificate.signature is None) != (certificate.secret_id is None)),
        "ancestry": (ancestry, ancestry is not None and not _fits_chain(certificate, ancestry)),
    }
    if isinstance(promise, Cluster):
        checks["max_cluster_size"] = (promise.max_cluster_size, promise.max_cluster_size < 1)
    if isinstance(promise, Dial):
        checks["dial"] = (promise.stops, not _is_dial(certificate, promise))
    return checks


def _wrong_evidence(certificate: "Certificate", deferring: bool) -> _Checks:
    rule, loss, evidence = certificate.rule, certificate.loss, certificate.evidence
    n, risk = evidence.n, evidence.empirical_risk
    computed = isinstance(loss, Net) or isinstance(rule, promises.Path)
    checks: _Checks = {
        "n": (n, n < 1),
        "empirical_risk": (risk, not loss.least <= risk <= loss.bound or (deferring and risk != 0)),
        "spread": (
            evidence.spread,
            (evidence.spread is not None) != computed or not 0 <= (evidence.spread or 0.0) <= loss.bound,
        ),
        "missing_guardian_rows": (
            evidence.missing_guardian_rows,
            not 0 <= evidence.missing_guardian_rows <= (n if loss.missing_guardian else 0),
        ),
        "no_opinion_rows": (evidence.no_opinion_rows, not 0 <= evidence.no_opinion_rows <= n),
    }
    if isinstance(rule, promises.Path):
        return checks
    fewest, most, quantiles = evidence.fewest_actions, evidence.most_actions, evidence.margin_quantiles
    return checks | {
        "slack": (evidence.slack, not _is_slack(certificate, evidence.slack, deferring)),
        "columns": (evidence.columns, set(evidence.columns) != {"primary", "guardian"}),
        "score_digits": (evidence.score_digits, evidence.score_digits not in (SINGLE_DIGITS, 12)),
        "fewest_actions": (fewest, not 1 <= fewest <= most),
        "router": (evidence.router, evidence.router and (fewest, most) != (2, 2)),
        "margin_quantiles": (
            quantiles,
            quantiles is not None and not are_quantiles(quantiles, drawn=rule.boundary == "random"),
        ),
        "floor": (evidence.floor, not _is_floor(certificate, evidence.floor)),
        "not_asked_rows": (
            evidence.not_asked_rows,
            not 0 <= evidence.not_asked_rows <= (0 if evidence.floor is None else n),
        ),
    }


def _is_floor(certificate: "Certificate", floor: float | None) -> bool:
    """Tell whether the Primary answers no query below a floor; a learned score defers these by itself."""
    if floor is None:
        return True
    stops, groups = certificate.dial or (), (certificate.groups or {}).values()
    thresholds = [certificate.relaxation, *(part.relaxation for part in (*stops, *groups))]
    lowest = min((relaxation for relaxation in thresholds if relaxation is not None), default=inf)
    return 0 < floor < inf and floor <= lowest and not unproved(certificate.kinds, "floor")


def _is_slack(certificate: "Certificate", slack: float | None, deferring: bool) -> bool:
    """Tell whether the unspent part of the budget is what the other numbers imply, and the rule spends it."""
    rule, promise, evidence, bound = certificate.rule, certificate.promise, certificate.evidence, certificate.loss.bound
    average = isinstance(rule, Threshold) and not isinstance(promise, Confident | Dial)
    if average or (deferring and not isinstance(promise, Confident | Dial)):
        unseen = promise.max_cluster_size if isinstance(promise, Cluster) else 1
        total = evidence.empirical_risk * evidence.n
        expected = promise.alpha - (total + unseen * bound) / (evidence.n + unseen)
    else:
        expected = promise.alpha - evidence.empirical_risk
    if slack is None or abs(expected - slack) > 1e-12 * max(1.0, bound):
        return False
    if not deferring:
        return not average or slack >= 0
    # a grid, or a loss in full sight, may need deferring with budget left
    spent = average and isinstance(rule, Threshold) and rule.grid is None and certificate.loss.in_full_sight == 0
    return not (spent or isinstance(rule, Learned)) or slack < 0


def _are_terms(certificate: "Certificate", terms: LearnedTerms) -> bool:
    """Tell whether what a certificate says about its learned score can be true."""
    return (
        certificate.n >= FEWEST_ROWS
        and terms.features[:2] == ("margin", "position")
        and len(set(terms.features)) == len(terms.features)
        and ("menu" in terms.features) == (terms.menu_size is not None)
        and set(terms.missing) == set(terms.features) & {"group", "tokens", "text", "answer"}
        and ("text" in terms.features) == (terms.text_sha256 is not None)
        and all(0 <= count <= certificate.n for count in terms.missing.values())
        and 0 <= terms.rounded_rows <= terms.rows <= certificate.n
        and terms.rows >= 1
        and 0 <= terms.deferred <= 1
        and certificate.evidence.empirical_risk <= certificate.alpha
    )


def _is_dial(certificate: "Certificate", dial: Dial) -> bool:
    """Tell whether stops are the declared ones, ever smaller thresholds, and the chosen one is among them."""
    bound = as_fraction(certificate.loss.bound, name="loss_bound")
    ranks = [threshold_rank(stop.relaxation, stop.boundary_u) for stop in dial.stops]
    chosen = (dial.alpha, certificate.relaxation, certificate.boundary_u, certificate.evidence.empirical_risk)
    return (
        [stop.alpha for stop in dial.stops] == [float(Fraction(stop) * bound) for stop in STOPS]
        and ranks == sorted(ranks, reverse=True)
        and chosen in [(stop.alpha, stop.relaxation, stop.boundary_u, stop.empirical_risk) for stop in dial.stops]
    )


def _share_threshold(certificate: "Certificate", rule: ByGroup) -> bool:
    """Tell whether all small groups have the same threshold, if they are to share one."""
    if rule.small_groups == "defer":
        return True
    fewest = rows_needed(certificate.alpha, certificate.loss.bound)
    return len({(group.relaxation, group.boundary_u) for group in rule.groups.values() if group.n < fewest}) <= 1


def _is_group(group: GroupThreshold, boundary: Boundary) -> bool:
    drawn = boundary == "random" and group.relaxation is not None
    return group.n >= 1 and 0 <= (group.relaxation or 0.0) < inf and _is_draw(group.boundary_u, drawn=drawn)


def _is_draw(u: float | None, *, drawn: bool) -> bool:
    return (u is not None) == drawn and 0 <= (u or 0.0) < 1


def _fits_chain(certificate: "Certificate", ancestry: Ancestry) -> bool:
    """Tell whether a certificate has the rows of its place in the chain and, if it was tightened, a larger relaxation."""
    calibrated, counted = ancestry.calibrated, ancestry.step in ("scheduled", "after red")
    threshold = threshold_rank(certificate.relaxation, certificate.boundary_u)
    rows = 0 if ancestry.renewal < 1 else ancestry.first * 2 ** (ancestry.renewal - 1) + ancestry.collected
    return (
        0 <= ancestry.renewal <= _MOST_RENEWALS
        and ancestry.first >= 1
        and 0 <= ancestry.collected <= certificate.n
        and 0 <= ancestry.since < _FAR_FUTURE
        and (calibrated is not None) == (ancestry.step == "tightened")
        and (calibrated is None or threshold > threshold_rank(calibrated.relaxation, calibrated.boundary_u))
        and (not counted or certificate.n == rows or (certificate.groups is not None and certificate.n < rows))
    )


def _is_on_grid(relaxation: float | None, grid: float) -> bool:
    if relaxation is None:
        return True
    step = as_fraction(grid, name="grid")
    return step > 0 and relaxation == float(round(relaxation / step) * step) <= 1


def _are_identities(certificate: "Certificate") -> bool:
    """Tell whether every scorer of the rule is named, or none."""
    identities, rule = certificate.provenance.identities, certificate.rule
    if identities == "unbound":
        return True
    needed = {*rule.chain.models, rule.guardian} if isinstance(rule, promises.Path) else {"primary", "guardian"}
    return needed <= set(identities) and all(isinstance(identity, dict) for identity in identities.values())


# --- What a certificate says to people, besides its guarantee ---


_AT_0 = {
    False: "the Primary's choice stands wherever it leads; ties at the top are deferred, however many there are",
    True: "the Primary's answer is given wherever its confidence is above 0",
}
_SEES = {
    "all": "the Guardian sees every action",
    "candidates": "the Guardian sees the candidates",
    "all-restricted-loss": "the Guardian sees every action, though the loss counts the candidates",
}
_AT_THRESHOLD = {
    "include": "; every action exactly at the threshold is a candidate",
    "random": "; a draw says which actions exactly at the threshold are candidates",
}
_NO_RELAXATION = {
    "ok": "",
    "always_defer": "none: every query is deferred",
    "by_group": "one for each group",
    "learned": "none: a learned score decides",
}


def _pair_facts(certificate: "Certificate") -> list[tuple[str, str]]:
    rule, promise, loss, evidence = certificate.rule, certificate.promise, certificate.loss, certificate.evidence
    held = certificate.relaxation
    relaxation = _NO_RELAXATION[certificate.status] if held is None else f"{held:.12g}"
    relaxation += f"  ({_AT_0[evidence.router]})" if certificate.relaxation == 0 else ""
    facts = [
        ("relaxation", relaxation),
        (
            "rule",
            _SEES[certificate.guardian_sees]
            + ("" if certificate.relaxation == 0 else _AT_THRESHOLD[certificate.boundary]),
        ),
        (
            "risk budget",
            f"alpha {as_written(promise.alpha)}, losses in [{as_written(loss.least)}, {as_written(loss.bound)}], "
            f"{n_rows(evidence.n)}",
        ),
    ]
    facts += [*_confidence_facts(certificate), *_learned_facts(certificate)]
    if isinstance(promise, Cluster):
        sizes = f"at most {n_rows(promise.max_cluster_size)} each"
        facts.append(("clusters", f"{promise.clusters} by '{promise.cluster}', {sizes}"))
    if held is not None or certificate.learned is not None:
        gross = f" (with gains not counted {loss.regret:.4f})" if isinstance(loss, Net) else ""
        facts.append(("on this log", f"loss {evidence.empirical_risk:.4f}{gross}"))
    if certificate.looked_at is not None:
        facts.append(("looked at before", certificate.looked_at))
    if certificate.ancestry is not None:
        facts += chain_facts(certificate.ancestry)
    no_opinion, missing = evidence.no_opinion_rows, evidence.missing_guardian_rows
    if no_opinion or missing:
        facts.append(("missing scores", f"Primary in {n_rows(no_opinion)} (deferred), Guardian in {missing}"))
    if evidence.floor is not None:
        binds = "; it binds: a log without it might ask the Guardian less" if floor_binds(rule, evidence) else ""
        facts.append(("not asked", f"{n_rows(evidence.not_asked_rows)} below the floor {evidence.floor:.12g}{binds}"))
    return facts


def _learned_facts(certificate: "Certificate") -> list[tuple[str, str]]:
    rule, terms = certificate.rule, certificate.learned
    if not isinstance(rule, Learned) or terms is None:
        return []
    size = f"{terms.rows} rows, {terms.columns} features from {', '.join(terms.features)}"
    rounded = f"; {terms.rounded_rows} losses rounded by a draw" if terms.rounded_rows else ""
    each = f"{100 * terms.deferred:.1f} % of the rows, each decided by the others"
    return [("score", f"{rule.score}: {size}{rounded}"), ("deferred", each)]


def _confidence_facts(certificate: "Certificate") -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    promise = certificate.promise
    if isinstance(promise, Confident | Dial):
        means = f"{as_written(promise.confidence)} that this certificate's long-run loss is at most alpha"
        facts.append(("confidence", means))
    if isinstance(promise, Dial):
        stops = ", ".join(as_written(stop.alpha) for stop in promise.stops)
        facts.append(("dial", f"stops {stops}; set to {as_written(promise.alpha)}"))
    if (source := group_source_of(certificate)) is not None:
        facts.append(("groups", f"named by {source} in live requests"))
    for name, group in (certificate.groups or {}).items():
        rule = "deferred" if group.relaxation is None else f"relaxation {group.relaxation:.12g}"
        facts.append((f"{certificate.by} {name}", f"{rule}, {n_rows(group.n)}"))
    return facts


def _path_facts(certificate: "Certificate", rule: promises.Path) -> list[tuple[str, str]]:
    tuning, loss, evidence = rule.tuning, certificate.loss, certificate.evidence
    chosen = "as given" if tuning.fixed else f"chosen among {len(tuning.estimates)}"
    models = chain_text((*rule.chain.models, rule.guardian))
    facts = [
        ("chain", f"{models}  ({chosen}, on {tuning.rows} other rows)"),
        (
            "risk budget",
            f"alpha {as_written(certificate.alpha)}, loss {loss.name}, {n_rows(evidence.n)} to calibrate on",
        ),
    ]
    if rule.position is not None and rule.u is not None:
        facts.append(("stop", f"policy {rule.position} of the path for draws below {rule.u:.6f}, else the one before"))
        gross = f" (with gains not counted {loss.regret:.4f})" if isinstance(loss, Net) else ""
        facts.append(("on these rows", f"loss {evidence.empirical_risk:.4f}{gross}"))
    relative = rule.cost / rule.guardian_cost if rule.guardian_cost else 1.0
    instead = f"${1000 * rule.cost:.4g} instead of ${1000 * rule.guardian_cost:.4g} per 1000 queries"
    answers = f"the Guardian answers {100 * rule.guardian_share:.1f} %"
    facts.append(("cost", f"{relative:.3f} of the Guardian's alone ({instead}); {answers}"))
    if evidence.no_opinion_rows:
        facts.append(
            ("failed models", f"in {n_rows(evidence.no_opinion_rows)}, passed over; live ones have to fail alike")
        )
    if evidence.missing_guardian_rows:
        facts.append(("missing grades", f"in {n_rows(evidence.missing_guardian_rows)}, counted as the largest loss"))
    if certificate.looked_at is not None:
        facts.append(("looked at before", certificate.looked_at))
    advice = tuning.advice
    return facts if advice is None else [*facts, ("on the tuning rows", advice)]


def _batch_facts(rule: Cutoff, promise: Batch, evidence: Evidence) -> list[tuple[str, str]]:
    n = evidence.n
    risk = "" if rule.risk is None else f"{rule.risk:.12g}"
    below = {"below": f"risk below {risk}", "all": "all outside the sample", "none": "none"}[rule.keeps]
    certify, graded = promise.sample - promise.pilot, promise.limit is None
    allowed = f"losses of {as_written(promise.error * n)}" if graded else f"{wrong_allowed(promise.error, n)}"
    lost = f"{evidence.empirical_risk * certify:.6g} lost by {certify}"
    wrong = f"{round(evidence.empirical_risk * certify)} of {certify} wrong; cutoff after {promise.limit}"
    facts = [
        ("kept", f"{rule.kept} of {n} machine labels, {100 * rule.kept / n:.1f} %  ({below})"),
        ("experts", f"{promise.sample} items of the sample and {n - promise.sample - rule.kept} more"),
        ("wrong labels", f"at most {allowed}, {as_written(promise.error)} of all items"),
        ("confidence", f"{as_written(promise.confidence)} over the draw of the sample"),
        ("in the sample", lost if graded else wrong),
    ]
    if promise.pilot:
        score = f"; score learned from {', '.join(rule.learned)}" if rule.learned else ""
        facts.append(("pilot", f"the first {promise.pilot} items of the sample, which do not certify{score}"))
    if promise.draw > 1:
        facts.append(("draws", f"the {promise.draw - 1} earlier of these items included"))
    if evidence.missing_guardian_rows:
        facts.append(("no verdict", f"{evidence.missing_guardian_rows} items of the sample, counted as wrong"))
    return facts


def batch_figure(certificate: "Certificate") -> str:
    """Return the figure of a batch as SVG: wrong labels against items in the order of risk, and where keeping ends.

    What is drawn is estimated from the sample, each of whose items stands for n / sample; nothing for another certificate.
    """
    rule, promise, n = certificate.rule, certificate.promise, certificate.n
    if not (isinstance(rule, Cutoff) and isinstance(promise, Batch)):
        return ""
    items, certify = n - promise.pilot, promise.sample - promise.pilot
    wrong = certificate.evidence.empirical_risk * items
    points = [(place / n, (k + 1) / len(rule.wrong_at) * wrong / n) for k, place in enumerate(rule.wrong_at)]
    kept, rest = rule.kept / n, n - rule.kept - promise.sample
    caption = f"kept {rule.kept}, checked {promise.sample}, left {rest}"
    cut = kept * items / max(items - certify, 1)
    return html_steps(f"wrong labels in order of risk: {caption}", points, cut=cut, line=promise.error)


def group_source_of(certificate: "Certificate") -> str | None:
    """Return what names the group of a live query, of a certificate by groups; None if nobody said."""
    if certificate.by is None or certificate.identities == "unbound":
        return None
    return certificate.identities.get("group", {}).get("source")


# --- Certificate ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A calibrated rule and its guarantee; saved as certificate.json.

    Attributes:
        rule: how a query is decided.
        promise: what is promised, in its own numbers.
        loss: in which loss.
        evidence: what the log says.
        provenance: who made it, with which models.
        guarantee: the guarantee in words.
        looked_at: what is known of earlier looks at these rows, in words; None if there was none.
        ancestry: where it stands in a chain of certificates; None if it begins one. If it was tightened, `relaxation` and
            `boundary_u` are larger than the log gave, and everything else is as the log gave it.
        secret_id: the fingerprint of the project secret that signed it, and behind the draws; None if unsigned.
        signature: of everything else, with the project's secret; None if unsigned.
        key: the secret behind the draws; never part of the saved certificate.
        fit: the learned score itself; saved in a file beside the certificate, whose digest the rule holds.
        unchecked: why nothing shows that a loaded certificate is as it was calibrated; decisions then have no guarantee.
    """

    schema: int = SCHEMA
    rule: Rule
    promise: Promise
    loss: LossTerms
    evidence: Evidence
    provenance: Provenance
    guarantee: str
    looked_at: str | None = None
    ancestry: Ancestry | None = None
    secret_id: str | None = None
    signature: str | None = None
    key: bytes | None = field(default=None, repr=False, compare=False)
    fit: LearnedScore | None = field(default=None, repr=False, compare=False)
    unchecked: str | None = field(default=None, repr=False, compare=False)

    @property
    def status(self) -> Status:
        """Whether one threshold decides ("ok"), groups, a learned score, or nothing: every query is deferred."""
        return self.rule.status

    @property
    def alpha(self) -> float:
        """The risk budget."""
        return self.promise.alpha

    @property
    def confidence(self) -> float | None:
        """The probability with which the promise holds of this one certificate; None if it is an average over them."""
        return self.promise.confidence if isinstance(self.promise, Confident | Dial) else None

    @property
    def dial(self) -> tuple[DialStop, ...] | None:
        """The stops of a dial."""
        return self.promise.stops if isinstance(self.promise, Dial) else None

    @property
    def relaxation(self) -> float | None:
        """The one threshold, if there is one."""
        return self.rule.relaxation if isinstance(self.rule, Threshold) else None

    @property
    def boundary_u(self) -> float | None:
        """Its boundary draw."""
        return self.rule.boundary_u if isinstance(self.rule, Threshold) else None

    @property
    def by(self) -> str | None:
        """The column of the groups that have a threshold each."""
        return self.rule.by if isinstance(self.rule, ByGroup) else None

    @property
    def groups(self) -> dict[str, GroupThreshold] | None:
        """The thresholds of groups."""
        return self.rule.groups if isinstance(self.rule, ByGroup) else None

    @property
    def learned(self) -> LearnedTerms | None:
        """What a learned score that decides is learned from."""
        return self.rule.terms if isinstance(self.rule, Learned) else None

    @property
    def path(self) -> promises.Path:
        """The rule of a cascade; raise a CertificateError if this is not one's certificate."""
        if not isinstance(self.rule, promises.Path):
            raise CertificateError("this is the certificate of a pair, not of a cascade; calibrate with --path")
        return self.rule

    @property
    def is_cascade(self) -> bool:
        """Whether several models are asked in turn."""
        return isinstance(self.rule, promises.Path)

    @property
    def is_batch(self) -> bool:
        """Whether it is about a batch of items, not about queries to come."""
        return isinstance(self.promise, Batch) or isinstance(self.rule, Cutoff)

    @property
    def guardian_sees(self) -> GuardianSees:
        """What a deferral shows the Guardian."""
        return self.rule.guardian_sees

    @property
    def boundary(self) -> Boundary:
        """The rule exactly at a threshold."""
        return self.rule.boundary

    @property
    def n(self) -> int:
        """Rows of the log."""
        return self.evidence.n

    @property
    def loss_bound(self) -> float:
        """The largest possible loss."""
        return self.loss.bound

    @property
    def identities(self) -> dict[str, Any] | Literal["unbound"]:
        """The scorers that made the scores."""
        return self.provenance.identities

    @property
    def kinds(self) -> list[Kind]:
        """What kind of certificate this is, in the words of `NO_PROOF`."""
        kinds: dict[Kind, bool] = {
            "net": isinstance(self.loss, Net),
            "own loss": isinstance(self.loss, Own),
            "path": isinstance(self.rule, promises.Path),
            "learned": isinstance(self.rule, Learned),
            "cluster": isinstance(self.promise, Cluster),
            "session": isinstance(self.promise, PerSession),
            "confidence": self.confidence is not None,
            "dial": isinstance(self.promise, Dial),
            "groups": isinstance(self.rule, ByGroup),
            "merged groups": isinstance(self.rule, ByGroup) and self.rule.small_groups == "merge",
            "menus": not self.evidence.router,
            "restricted sight": self.guardian_sees != "all",
            "included boundary": self.boundary != "random",
        }
        return [kind for kind, holds in kinds.items() if holds]

    @classmethod
    def load(cls, path: str | Path, *, key: bytes | None = None, secret: ProjectSecret | None = None) -> "Certificate":
        """Read a certificate from a file.

        Its signature is verified with the secret that is at hand. Where that fails, since it is unsigned, was changed, or
        was signed with a secret that is not here, its decisions say that they have no guarantee.

        Args:
            path: the file.
            key: the key behind its draws; needed to use a certificate with boundary="random" unless the project's
                secret, which it is derived from, is at hand.
            secret: the project's secret, which must have signed it; by default the one that is at hand, if any.

        Raises:
            CertificateError: the file is missing, damaged, contradictory or of another schema version; the key or the
                signature is wrong; or the file with the arrays of a learned score is absent or altered.
        """
        source = Path(path)
        certificate = cls.from_dict(read_document(source), key=key, source=str(source))
        if certificate.learned is not None and certificate.fit is None:
            certificate = certificate.with_arrays(read_sidecar(source), source=str(sidecar_path(source)))
        if secret is not None:
            certificate.check_signature(secret, source=str(source))
            return certificate.with_key_of(secret)
        at_hand = ProjectSecret.search()
        unchecked = certificate.why_unchecked(at_hand)
        keyed = certificate if at_hand is None else certificate.with_key_of(at_hand)
        return replace(keyed, unchecked=unchecked)

    @classmethod
    def from_dict(cls, document: Any, *, key: bytes | None = None, source: str = "certificate") -> "Certificate":
        """Build a certificate from its JSON document and check that its fields are consistent.

        Args:
            document: what `to_dict` returned.
            key: as in `load`.
            source: where the document came from, for error messages.
        """
        content, arrays = split_arrays(document, source)
        certificate = _convert(content, source)
        _refuse_contradictions(certificate, source)
        if arrays is not None:
            certificate = certificate.with_arrays(arrays, source=source)
        return certificate if key is None else certificate._with_key(key)

    def to_dict(self, *, with_arrays: bool = False) -> dict[str, Any]:
        """Return the certificate as a JSON document, without the key; what it does not have is left out.

        Args:
            with_arrays: put the arrays of a learned score into it, so that one document holds everything.
        """
        values = {name: value for name in _WRITTEN if (value := getattr(self, name)) is not None}
        document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))  # as it will be read
        return document if self.fit is None or not with_arrays else joined_arrays(document, self.fit.packed)

    def worded(self) -> "Certificate":
        """Return the certificate with the guarantee in the words that its other parts imply."""
        text = guarantee(self.rule, self.promise, self.loss, self.evidence, self.ancestry)
        return replace(self, guarantee=text)

    def with_threshold(self, relaxation: float | None, boundary_u: float | None) -> "Certificate":
        """Return the certificate with one threshold in place of its own, of groups or of a learned score; not worded."""
        rule = Threshold(
            relaxation=relaxation,
            boundary_u=boundary_u,
            guardian_sees=self.guardian_sees,
            boundary=self.boundary,
            grid=self.rule.grid if isinstance(self.rule, Threshold | ByGroup) else None,
        )
        return replace(self, rule=rule, fit=None)

    def save(self, path: str | Path) -> None:
        """Write certificate.json and, for a learned score, certificate.npz beside it; the key is not part of either.

        A certificate without a signature is signed with the secret that `ProjectSecret.find` finds or makes.
        """
        signed = self if self.signed else self.sign(ProjectSecret.find())
        if self.fit is not None:
            write_bytes(sidecar_path(path), self.fit.packed)
        write_document(path, signed.to_dict())

    def with_arrays(self, packed: bytes, *, source: str = "certificate") -> "Certificate":
        """Return the certificate with its learned score, from the content of the file beside it.

        Raises:
            CertificateError: the arrays are not those that it was made with, or it has no learned score.
        """
        rule, evidence = self.rule, self.evidence
        if not isinstance(rule, Learned) or rule.terms is None:
            raise CertificateError(
                f"{source}: holds arrays of a learned score, and the certificate has none; leave them out"
            )
        alpha, bound = (as_fraction(value, name="alpha") for value in (self.alpha, self.loss.bound))
        score = LearnedScore(
            rows=unpack(packed, rule.terms, source, net=isinstance(self.loss, Net)),
            packed=packed,
            digits=evidence.score_digits,
            budget=spendable_losses(alpha, bound, evidence.n),
            with_margin=rule.score == "auto",
            floor=evidence.floor or 0.0,
        )
        return replace(self, fit=score)

    @property
    def signed(self) -> bool:
        """Whether there is a signature; `load(path, secret=...)` and `check_signature` verify it."""
        return self.signature is not None

    def sign(self, secret: ProjectSecret) -> "Certificate":
        """Return the certificate signed with the project's secret."""
        unsigned = replace(self, secret_id=secret.id, signature=None)
        return replace(unsigned, signature=secret.sign(signed_bytes(unsigned.to_dict())))

    def why_unchecked(self, secret: ProjectSecret | None) -> str | None:
        """Return why the signature does not show that this is what was calibrated; None if it does."""
        if self.signature is None:
            reason = "is not signed"
        elif secret is None or self.secret_id not in secret.fingerprints:
            reason = f"was signed with the secret {self.secret_id}, which is not at hand (set ARBITRAGE_SECRET)"
        elif not self._verified(secret):
            reason = "was changed since it was signed"
        else:
            return None
        return f"the certificate {reason}; `arbitrage verify` recomputes it from its log"

    def check_signature(self, secret: ProjectSecret, *, source: str = "certificate") -> None:
        """Check that this certificate is as it was signed.

        Raises:
            CertificateError: it is unsigned, was changed, or was signed with another secret.
        """
        if self.signature is None:
            raise CertificateError(f"{source}: is unsigned; calibrate again with the project's secret at hand")
        if not self._verified(secret):
            raise CertificateError(
                f"{source}: the signature is not that of this project's secret {secret.id}: the certificate was changed, "
                f"or signed with another secret ({self.secret_id}); calibrate again, or add that secret after a comma"
            )

    def _verified(self, secret: ProjectSecret) -> bool:
        unsigned = signed_bytes(replace(self, signature=None).to_dict())
        return self.signature is not None and secret.verifies(unsigned, self.signature)

    def candidates(
        self,
        primary_scores: object,
        *,
        id: str | None = None,
        group: Membership = None,
        tokens: float | None = None,
        text: str | None = None,
        actions: Sequence[str] | None = None,
        answer: str | None = None,
    ) -> NDArray[np.intp]:
        """Return the indices of one query's candidates: a single one is chosen, several go to the Guardian.

        Args:
            primary_scores: one number per action; None or NaN anywhere means no opinion, so every action is kept.
            id, group, tokens, text, actions, answer: as in `decide`.
        """
        sight = self.sight(primary_scores, id=id, group=group, tokens=tokens, text=text, actions=actions, answer=answer)
        return np.array(sight[0], dtype=np.intp)

    def sight(
        self,
        primary_scores: object,
        *,
        id: str | None = None,
        group: Membership = None,
        tokens: float | None = None,
        text: str | None = None,
        actions: Sequence[str] | None = None,
        answer: str | None = None,
    ) -> tuple[list[int], float, LearnedUse | None]:
        """Return one query's candidates as plain integers, its margin, and how a learned score decided if there is one."""
        plain = _are_floats(primary_scores)
        self._refuse_single(not plain and is_single(primary_scores))
        if self.learned is not None:
            scores: Any = primary_scores if plain else as_row(primary_scores)[:, 0].tolist()
            return self._learned_sight(scores, id, group, tokens, text, actions, answer)
        self.refuse_cascade()
        relaxation, boundary_u = self.threshold(group)
        u = 0.0 if boundary_u is None else self._draw(id, text, actions, primary_scores)
        return *row_sight(
            primary_scores, relaxation, digits=self.evidence.score_digits, u=u, boundary_u=boundary_u
        ), None

    def _learned_sight(
        self,
        scores: Sequence[float],
        id: str | None,
        group: Membership,
        tokens: float | None,
        text: str | None,
        actions: Sequence[str] | None,
        answer: str | None,
    ) -> tuple[list[int], float, LearnedUse | None]:
        if group is not None and not isinstance(group, str):
            raise OptionError(f"several groups and learned do not go together: {refusal('several groups', 'learned')}")
        gaps = row_gaps(scores, digits=self.evidence.score_digits)
        u = self._draw(id, text, actions, scores)
        if answer is None and actions is not None and not self.evidence.router:
            answer = actions[gaps.index(0.0)]
        stands, use = self.learned_score().decide(scores, gaps, u, group, tokens, text, answer)
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
        actions: Sequence[str] | None = None,
        answer: str | None = None,
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
            id: the query's id, fixed before its scores. Without one, or if the log had none, the draw of a random boundary
                is that of the question: its text and actions or, without a text, its scores; the same question has the
                same draw.
            group: the query's group or groups, for a certificate by groups; one that is not known defers. For a learned
                score the group that is one of its features.
            tokens: the Primary's output tokens, if they are a feature of the learned score.
            text: the question as plain text; a learned score may have it as a feature.
            actions: the texts to choose from.
            answer: what the Primary answered, if it is a feature of the learned score; of menus, the top action's text.
        """
        if self.evidence.router and np.size(cast("Any", primary_scores)) == 1:
            raise OptionError(
                f"the certificate is of a confidence: give [0, confidence], such as [0, 0.9]; got {primary_scores!r:.80}"
            )
        candidates, margin, use = self.sight(
            primary_scores, id=id, group=group, tokens=tokens, text=text, actions=actions, answer=answer
        )
        deferred, size = len(candidates) > 1, _size(primary_scores)
        action: int | None = candidates[0]
        if deferred:
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
            no_guarantee=self.unchecked or self.outside(size),
        )

    def apply(self, log: "ScoreLog") -> Decisions:
        """Decide every row of a log."""
        self.refuse_cascade()
        self._refuse_single(log.score_digits < self.evidence.score_digits)
        same_digits = replace(log, score_digits=self.evidence.score_digits)
        sees_all, rule = self.guardian_sees != "candidates", self.rule
        if isinstance(rule, ByGroup):
            u = self._drawing(same_digits) if rule.boundary == "random" else None
            return decide_by_group(same_digits, rule.groups, by=rule.by, u=u, sees_all=sees_all)
        if self.learned is not None:
            return decide_by_score(same_digits, self.learned_score(), self._drawing(same_digits)(np.arange(len(log))))
        u = None if self.boundary_u is None else self._drawing(same_digits)
        return decide_rows(same_digits, relaxation=self.relaxation, boundary_u=self.boundary_u, u=u, sees_all=sees_all)

    def choose(self, alpha: float) -> "Certificate":
        """Return a dial set to another budget, the largest stop that does not exceed it; unsigned.

        Raises:
            CertificateError: this certificate has no dial.
            OptionError: alpha lies below the lowest stop.
        """
        if not isinstance(self.promise, Dial):
            raise CertificateError(
                "this certificate has no dial, so its alpha was fixed before calibration; calibrate with dial=True (--dial)"
            )
        stop = lower_stop(self.promise.stops, alpha)
        risk = stop.empirical_risk
        chosen = self.with_threshold(stop.relaxation, stop.boundary_u)
        return replace(
            chosen,
            promise=structs.replace(self.promise, alpha=stop.alpha),
            evidence=structs.replace(self.evidence, empirical_risk=risk, slack=stop.alpha - risk),
            secret_id=None,
            signature=None,
        ).worded()

    def next_model(
        self, confidences: Sequence[float | None], answers: Sequence[str | None], *, id: str
    ) -> tuple[list[str], str]:
        """Return whom a cascade has asked so far about a query, and whom next.

        The last of them once more means that its answer is given; the Guardian is named like any other.

        Args:
            confidences: of the models asked so far, in this order; None where one failed.
            answers: their answers as text.
            id: the query's id, fixed before any answer.
        """
        chain = self.path.chain
        (policy,) = policies_of(self.path.stop, np.array([draw(self.secret(), id)])).tolist()
        asked, following = chain.after(confidences, answers, policy)
        return [chain.models[j] for j in asked], [*chain.models, self.path.guardian][following]

    def refuse_cascade(self, *, source: str = "certificate") -> None:
        """Refuse the certificate of a cascade, or of a batch, where that of a pair is needed.

        Raises:
            CertificateError: it is one.
        """
        if self.is_batch:
            raise CertificateError(
                f"{source}: is the certificate of a batch, which is about those items and decides no others; "
                "`arbitrage batch`, verify and `certificate show` take it"
            )
        if isinstance(self.rule, promises.Path):
            raise CertificateError(
                f"{source}: is the certificate of a cascade, which verify, apply, ask, serve and `certificate show` take"
            )

    def _refuse_single(self, single: bool) -> None:
        """Refuse scores of less precision than the certificate's: equal scores would no longer have equal gaps."""
        digits = self.evidence.score_digits
        if single and digits > SINGLE_DIGITS:
            raise OptionError(
                f"the scores are single precision, and the certificate was made from double precision ({digits} "
                "digits); compute them in float64, or calibrate again on a log in single precision"
            )

    def facts(self) -> list[tuple[str, str]]:
        """Return what matters most as name and value pairs, for people."""
        if isinstance(self.rule, Cutoff) and isinstance(self.promise, Batch):
            return _batch_facts(self.rule, self.promise, self.evidence)
        return _path_facts(self, self.rule) if isinstance(self.rule, promises.Path) else _pair_facts(self)

    def further_facts(self) -> list[tuple[str, str]]:
        """Return what only those need who check the arithmetic: the draw of the threshold, and the budget left unspent."""
        facts: list[tuple[str, str]] = []
        if self.boundary_u:
            facts.append(("at the threshold", f"draws up to {self.boundary_u:.6f} are candidates"))
        if self.status in ("ok", "learned") and not self.is_cascade:
            facts.append(("unused budget", f"{self.evidence.slack:.4f}"))
        return facts

    def of_part(self, part: promises.CertifiedPart) -> "Certificate":
        """Return the certificate with the part of a log that it was made from."""
        return replace(self, provenance=structs.replace(self.provenance, part=part))

    def with_looks(self, text: str) -> "Certificate":
        """Return the certificate with what is known of earlier looks at its rows, in words."""
        return replace(self, looked_at=text)

    def __repr__(self) -> str:
        return (
            f"Certificate(status={self.status!r}, relaxation={self.relaxation!r}, alpha={self.alpha!r}, n={self.n!r}, "
            f"loss={self.loss.name!r}, guardian_sees={self.guardian_sees!r}, boundary={self.boundary!r})"
        )

    def _repr_html_(self) -> str:
        if self.is_batch:
            return html_table(self.facts()) + batch_figure(self) + html_paragraph(self.guarantee)
        of = "confidence" if self.evidence.router else "lead"
        rest = html_rule(self.relaxation, of=of) + html_paragraph(self.guarantee)
        return html_table([("status", self.status), *self.facts(), ("loss", self.loss.name)]) + rest

    @property
    def sizes(self) -> range:
        """The sizes of menus that the guarantee covers; all, of a cascade."""
        return (
            range(maxsize)
            if isinstance(self.rule, promises.Path)
            else range(self.evidence.fewest_actions, self.evidence.most_actions + 1)
        )

    def outside(self, size: int) -> str | None:
        """Return why a menu of this size has no guarantee; None if it has one."""
        if size in self.sizes:
            return None
        covered = f"{self.evidence.fewest_actions} to {self.evidence.most_actions}"
        return f"the query has {size} action{'' if size == 1 else 's'}; those of the certificate's log have {covered}"

    @property
    def summary(self) -> str:
        """The rule in a line and the guarantee in three; `guarantee` is the whole."""
        return summary(self.rule, self.promise, self.loss, self.evidence, self.ancestry)

    def next_range(self) -> Interval | None:
        """Return the range of the mean loss over as many decisions as the log has rows, as shares of the loss bound.

        None where its law is not known.
        """
        chosen = self.ancestry is not None and self.ancestry.step != "scheduled"
        if not self.loss.binary or chosen or self.confidence is not None or self.groups is not None:
            return None
        return None if unproved(self.kinds, "range") else next_range(self.n, self.alpha / self.loss_bound, self.n)

    @property
    def luck(self) -> str:
        """What is known of many decisions under this certificate, which share its luck, in a sentence."""
        if self.status == "always_defer":
            return "all are deferred, so they lose nothing"
        ends = self.next_range()
        if ends is None:
            return "they share this certificate's luck, and only audits say how far their mean loss lies from alpha"
        low, high = (self.loss_bound * end for end in ends)
        return (
            f"over the next {self.n:,}, the mean loss lies in {low:.3g} to {high:.3g} for 95 % of calibrations "
            "and traffic, if these are exchangeable and the budget is spent; more of them share the same luck, and hardly "
            "narrow it"
        )

    def differences(self, other: "Certificate") -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ, by name, with both values; who made a certificate when is not compared."""
        pairs: dict[str, tuple[Any, Any]] = {
            name: (getattr(self, name), getattr(other, name)) for name in ("ancestry", "guarantee")
        }
        for part in ("rule", "promise", "loss", "evidence"):
            pairs |= _field_pairs(part, getattr(self, part), getattr(other, part))
        names = "identities", "key_sha256"
        pairs |= {name: (getattr(self.provenance, name), getattr(other.provenance, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def with_key_of(self, secret: ProjectSecret) -> "Certificate":
        """Return the certificate with the key behind its draws, if that is derived from the project's secret."""
        if self.provenance.key_sha256 is None or self.key is not None:
            return self
        return replace(self, key=secret.find_boundary_key(self.provenance.key_sha256))

    def _with_key(self, key: bytes) -> "Certificate":
        if not isinstance(key, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CertificateError(f"key= takes bytes, not {type(key).__name__}")
        if self.provenance.key_sha256 is None:
            raise CertificateError('this certificate has no key (boundary="include"); omit key=')
        if not hmac.compare_digest(hashlib.sha256(key).hexdigest(), self.provenance.key_sha256):
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

    def _drawing(self, log: "ScoreLog") -> Draw:
        keyed_by = self.evidence.draws
        context = None if keyed_by == "scores" else log.context
        return drawing(self.secret(), log if keyed_by == "id" else replace(log, id=None, context=context))

    def _draw(self, id: str | None, text: str | None, actions: Sequence[str] | None, scores: object) -> float:
        if id is not None and not isinstance(id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"a query's id is a text; got {id!r}")
        if id and self.evidence.draws == "id":
            return draw(self.secret(), id)
        text = None if self.evidence.draws == "scores" else text
        return question_draw(self.secret(), text, actions, row_gaps(scores, digits=self.evidence.score_digits))


_NOT_COMPARED = frozenset({"columns", "terms"})
"""The names of columns decide nothing, and what a score is learned from is compared by itself."""


def _field_pairs(part: str, first: msgspec.Struct, second: msgspec.Struct) -> dict[str, tuple[Any, Any]]:
    """Return the fields of a part of two certificates; the kinds alone, if these differ."""
    if type(first) is not type(second):
        return {part: (type(first).__name__, type(second).__name__)}
    names = [name for name in first.__struct_fields__ if name not in _NOT_COMPARED]
    return {name: (getattr(first, name), getattr(second, name)) for name in names}


def _size(scores: Any) -> int:
    """Return how many actions there are scores for."""
    return len(scores if _are_floats(scores) else as_row(scores))


def _are_floats(scores: Any) -> bool:
    """Tell whether scores are Python's own floats, as live ones are."""
    return type(scores) in (tuple, list) and all(type(score) is float for score in scores)


def read_pair(document: Mapping[str, Any]) -> Certificate:
    """Build the certificate of a pair from its JSON document; refuse that of a cascade, as `refuse_cascade` does."""
    certificate = Certificate.from_dict(dict(document))
    certificate.refuse_cascade()
    return certificate


def issue(
    rule: Rule,
    promise: Promise,
    loss: LossTerms,
    evidence: Evidence,
    *,
    identities: dict[str, Any] | Literal["unbound"],
    key: bytes | None,
    fit: LearnedScore | None = None,
) -> Certificate:
    """Put what a calibration gave into a certificate, with its guarantee in words."""
    provenance = Provenance(
        identities=identities,
        version=package_version(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        key_sha256=None if key is None else hashlib.sha256(key).hexdigest(),
    )
    certificate = Certificate(
        rule=rule, promise=promise, loss=loss, evidence=evidence, provenance=provenance, guarantee="", key=key, fit=fit
    )
    return certificate.worded()
