"""verify: recompute a certificate from its log, to the bit; apply it to a log in parts."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np

from conformal_arbitrage.calibration.batch import BatchLabels, certify_labels
from conformal_arbitrage.calibration.calibrate import certify
from conformal_arbitrage.calibration.cascade import CascadeOptions, TunedChain, certify_chain, tune_chain
from conformal_arbitrage.calibration.certificate import Certificate, Decisions, group_source_of
from conformal_arbitrage.calibration.learned import Features
from conformal_arbitrage.calibration.options import NET, CalibrationOptions, is_binarized
from conformal_arbitrage.calibration.planning import certified_rows
from conformal_arbitrage.calibration.promises import (
    Ancestry,
    ByGroup,
    CalibratedThreshold,
    Cluster,
    Dial,
    Learned,
    Net,
    Own,
    Threshold,
)
from conformal_arbitrage.core.exact import Floats, Integers
from conformal_arbitrage.core.risk import Loss, check_alpha
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.parts import Engine, PassProgress, ScorePart, ScoreParts, silent
from conformal_arbitrage.scorelog.spark import SparkTable
from conformal_arbitrage.scorelog.tables import Column, TableColumns, strings, write_table

# --- Applying a certificate to a log in parts ---


_PARTS: Final = "part-*.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionCounts:
    """How many rows were decided, and how.

    Attributes:
        candidates: candidates of all rows together.
        undecided: rows that go to the Guardian and have no score of it.
        outside: rows that the guarantee does not cover.
        reason: why, of the first of them.
    """

    rows: int = 0
    deferred: int = 0
    candidates: int = 0
    undecided: int = 0
    outside: int = 0
    reason: str | None = None

    def __add__(self, other: "DecisionCounts") -> "DecisionCounts":
        """Return the counts of both."""
        return DecisionCounts(
            rows=self.rows + other.rows,
            deferred=self.deferred + other.deferred,
            candidates=self.candidates + other.candidates,
            undecided=self.undecided + other.undecided,
            outside=self.outside + other.outside,
            reason=self.reason or other.reason,
        )


@dataclass(frozen=True, slots=True)
class Decide:
    """The work of deciding the rows of a part; with a folder, they are written to a file of their own there."""

    certificate: Certificate
    folder: str | None
    numbers: tuple[int, ...]

    def __call__(self, part: ScorePart) -> DecisionCounts:
        """Decide every row."""
        by = [] if self.certificate.by is None else [self.certificate.by]
        by_text = "id" not in part.file.types or self.certificate.evidence.draws == "text"
        drawn = ["context", "actions"] if self.certificate.boundary == "random" and by_text else []
        log = part.load([*by, *(["actions"] if self.folder is not None else []), *drawn])
        decisions = self.certificate.apply(log)
        if self.folder is not None:
            number = int(np.searchsorted(self.numbers, part.first))
            write_table(Path(self.folder) / _part_name(number), decisions_table(decisions, part.start))
        return count_decisions(self.certificate, decisions)


def count_decisions(certificate: Certificate, decisions: Decisions) -> DecisionCounts:
    """Return how many rows were decided, and how."""
    sizes, counts = np.unique(decisions.log.sizes, return_counts=True)
    reasons = {size: certificate.outside(size) for size in sizes.tolist()}
    outside = {size: reason for size, reason in reasons.items() if reason is not None}
    return DecisionCounts(
        rows=len(decisions),
        deferred=int(decisions.deferred.sum()),
        candidates=int(decisions.candidate.sum()),
        undecided=int((decisions.action < 0).sum()),
        outside=sum(int(count) for size, count in zip(sizes.tolist(), counts.tolist(), strict=True) if size in outside),
        reason=next(iter(outside.values()), None),
    )


def decisions_table(decisions: Decisions, first_row: int = 0) -> TableColumns:
    """Return decisions as a table: row, id, action, answer, decided_by, candidates, margin.

    The row is counted from 1 in its file; an action of -1 waits for the Guardian, and a single action has no margin.
    """
    log, flat = decisions.log, np.flatnonzero(decisions.candidate)
    scalars: list[Column] = [("row", np.arange(first_row + 1, first_row + len(decisions) + 1))]
    if log.id is not None:
        scalars.append(("id", log.id))
    scalars.append(("action", decisions.action))
    if log.actions is not None:
        chosen = log.actions[log.offsets[:-1] + np.maximum(decisions.action, 0)].tolist()
        texts = [None if a < 0 else text for a, text in zip(decisions.action.tolist(), chosen, strict=True)]
        scalars.append(("answer", strings(texts)))
    scalars.append(("decided_by", strings(np.where(decisions.deferred, "guardian", "primary").tolist())))
    scalars.append(("margin", np.where(np.isinf(decisions.margin), np.nan, decisions.margin)))
    places: Integers = flat - np.repeat(log.offsets[:-1], decisions.candidate_counts())
    offsets = np.concatenate([[0], np.cumsum(decisions.candidate_counts())])
    return TableColumns(scalars=scalars, lists=[("candidates", places)], offsets=offsets, metadata={})


def decide_parts(
    certificate: Certificate, log: ScoreParts | SparkTable, engine: Engine, folder: str | Path | None = None
) -> DecisionCounts:
    """Decide every row of a log in parts.

    Args:
        folder: where to write one file of decisions per part (part-00000.parquet, ...), in the order of the parts.
    """
    parts = log.parts()
    if (
        isinstance(log, SparkTable)
        and certificate.boundary == "random"
        and not (log.has_ids and certificate.evidence.draws == "id")
    ):
        log.gather('boundary="random" without ids')  # which it refuses
    if folder is not None:
        _refuse_mixture(Path(folder), log, len(parts))
        Path(folder).mkdir(parents=True, exist_ok=True)
    work = Decide(certificate, None if folder is None else str(folder), tuple(part.first for part in parts))
    return _summed(list(engine.run(work, parts)))


def _refuse_mixture(folder: Path, log: ScoreParts | SparkTable, parts: int) -> None:
    """Refuse a folder in which decisions would lie among the files of the log, or beside those of a longer one.

    Raises:
        OptionError: it is such a folder.
    """
    files = log.files if isinstance(log, ScoreParts) else ()
    if folder.resolve() in {Path(file.path).resolve().parent for file in files}:
        raise OptionError(f"{folder}: the files of the log are there; write decisions into a folder of their own")
    written = {_part_name(number) for number in range(parts)}
    others = sorted(path.name for path in folder.glob(_PARTS) if path.name not in written)
    if others:
        raise OptionError(f"{folder}: holds {others[0]} of another log; empty the folder, or name another one")


def _part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _summed(counts: Sequence[DecisionCounts]) -> DecisionCounts:
    return sum(counts, start=DecisionCounts())


# --- verify ---


_TOLERANCE = 1e-6
"""Between two fits of a cascade on different machines."""
_MOST_REPLAYED = 2000
"""Rows on which the decisions of a learned score are compared: they take time, and equal arrays decide alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of `verify`; true if the certificate holds.

    Attributes:
        differences: field -> (value in the certificate, recomputed value); empty if the certificate holds.
    """

    differences: Mapping[str, tuple[Any, Any]]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return "Verification(ok)" if self.ok else f"Verification(differs in {', '.join(self.differences)})"


def verify(
    certificate: Certificate,
    log: ScoreLog | ScoreParts | SparkTable | CascadeLog | BatchLabels,
    *,
    loss: Loss | None = None,
    engine: Engine | Executor | str | None = None,
    progress: PassProgress = silent,
) -> Verification:
    """Recompute a certificate from its log, to the bit.

    Args:
        certificate: the certificate, with its key if it has one.
        log: the log it was made from, in memory, in parts or in Spark, binarized here if the certificate says so; or the
            whole log of which `recommend` certified a part. Of a cascade, with the models that it was chosen among; of a
            batch, its items with the experts' verdicts.
        loss: your own loss, if the certificate names one.
        engine: for a log in parts, where the work is done; by default threads on all cores.
        progress: is told about every pass over a log in parts.

    Returns:
        An object with `ok` and `differences`, which is true if the certificate holds.
    """
    if isinstance(log, BatchLabels):
        return Verification(differences=certificate.differences(certify_labels(log)))
    if isinstance(log, CascadeLog):
        return Verification(differences=certificate.differences(_recomputed_cascade(certificate, log)))
    certificate.refuse_cascade()
    if isinstance(log, ScoreLog):
        log = certified_rows(log, certificate.provenance.part)
    if (loss is not None) != isinstance(certificate.loss, Own):
        raise OptionError(
            f"the loss of this certificate is '{certificate.loss.name}'; "
            "from Python: verify(certificate, log, loss=THAT_FUNCTION)"
        )
    options = options_of(certificate, loss=loss)
    if certificate.loss.binarized and not is_binarized(log):
        log = log.binarized()
    recomputed = certify(log, certificate.alpha, options, engine=engine, progress=progress)
    if certificate.ancestry is not None:
        recomputed = _in_place_of(certificate, certificate.ancestry, recomputed)
    pairs = certificate.differences(recomputed)
    if certificate.learned is not None and not isinstance(log, SparkTable):
        pairs |= _learned_pairs(
            certificate, recomputed, log.sample(_MOST_REPLAYED) if isinstance(log, ScoreParts) else log
        )
    return Verification(differences={name: pair for name, pair in pairs.items() if pair[0] != pair[1]})


def _recomputed_cascade(certificate: Certificate, log: CascadeLog) -> Certificate:
    """Recompute the certificate of a cascade: the split, the choice, the path and the stop.

    Fitted numbers may differ in their last digits from one machine to another; the stop, and all that follows from it, is
    recomputed to the bit with those of the certificate.
    """
    tuning, fitted = certificate.path.tuning, certificate.path.chain
    options = CascadeOptions(
        key=certificate.secret(),
        loss="net" if isinstance(certificate.loss, Net) else None,
        chain=fitted.models if tuning.fixed else None,
        tuning_share=tuning.share,
        seed=tuning.seed,
        missing_guardian=certificate.loss.missing_guardian,
    )
    tuned = tune_chain(log, check_alpha(certificate.alpha, Fraction(1)), options)
    stored = replace(tuned, chain=fitted, estimates=tuning.estimates)
    return certify_chain(log, certificate.alpha, options, stored if _are_close(tuned, stored) else tuned)


def _are_close(tuned: TunedChain, stored: TunedChain) -> bool:
    """Return whether two chains name the same models, with numbers that may come from the same rows."""
    (names, numbers), (stored_names, stored_numbers) = _numbers(tuned), _numbers(stored)
    if names != stored_names or numbers.shape != stored_numbers.shape:
        return False
    return bool(np.allclose(numbers, stored_numbers, rtol=_TOLERANCE, atol=_TOLERANCE))


def _numbers(tuned: TunedChain) -> tuple[tuple[tuple[str, ...], ...], Floats]:
    """Return the names in a tuned chain and its estimates, and all the numbers."""
    estimates = sorted(tuned.estimates, key=lambda estimate: estimate.models)
    names = (tuned.chain.models, tuned.chain.answers, *(estimate.models for estimate in estimates))
    numbers = [x for step in tuned.chain.steps for row in step.rows for x in row]
    return names, np.array([*numbers, *(estimate.cost for estimate in estimates)])


def options_of(certificate: Certificate, *, loss: Loss | None = None) -> CalibrationOptions:
    """Return the options that a certificate was calibrated with."""
    rule, promise, declared = certificate.rule, certificate.promise, certificate.loss
    plain = rule if isinstance(rule, Threshold | ByGroup) else None
    cluster = promise if isinstance(promise, Cluster) else None
    return CalibrationOptions(
        guardian_sees=rule.guardian_sees,
        boundary=rule.boundary,
        loss_bound=declared.bound,
        loss=NET if isinstance(declared, Net) else loss,
        full_sight_loss=declared.full_sight_loss if isinstance(declared, Own) and loss is not None else None,
        grid=None if plain is None else plain.grid,
        missing_guardian=declared.missing_guardian,
        cluster=None if cluster is None else cluster.cluster,
        max_cluster_size=None if cluster is None else cluster.max_cluster_size,
        confidence=certificate.confidence,
        zero_one=declared.zero_one,
        dial=isinstance(promise, Dial),
        by=certificate.by,
        small_groups=rule.small_groups if isinstance(rule, ByGroup) else "defer",
        group_source=group_source_of(certificate),
        margins=certificate.evidence.margin_quantiles is not None,
        score=rule.score if isinstance(rule, Learned) else "margin",
        features=_features(certificate),
        key=None if certificate.provenance.key_sha256 is None else certificate.secret(),
    )


def _in_place_of(certificate: Certificate, ancestry: Ancestry, recomputed: Certificate) -> Certificate:
    """Return what the log gives, put where a certificate stands in its chain."""
    if ancestry.calibrated is not None:
        threshold = CalibratedThreshold(relaxation=recomputed.relaxation, boundary_u=recomputed.boundary_u)
        ancestry = replace(ancestry, calibrated=threshold)
        recomputed = recomputed.with_threshold(certificate.relaxation, certificate.boundary_u)
    return replace(recomputed, ancestry=ancestry).worded()


def _features(certificate: Certificate) -> Features | None:
    """Return what a learned score was learned from; None without one."""
    terms = certificate.learned
    if terms is None:
        return None
    return Features(
        groups="group" in terms.features,
        tokens="tokens" in terms.features,
        menu_size=terms.menu_size,
        group_source=terms.group_source,
        text="text" in terms.features,
        answers="answer" in terms.features,
    )


def _learned_pairs(certificate: Certificate, recomputed: Certificate, log: ScoreLog) -> dict[str, tuple[Any, Any]]:
    """Return what differs in a learned score: its terms, its arrays beyond 1e-9, and decisions on the log.

    The digest of the file is not compared, since the same arrays may be compressed into other bytes.
    """
    if certificate.learned is None or recomputed.learned is None:
        return {}
    same_file = replace(recomputed.learned, sha256=certificate.learned.sha256)
    ours, theirs = certificate.learned_score(), recomputed.learned_score()
    differing = ours.differs_from(theirs)
    pairs: dict[str, tuple[Any, Any]] = {
        "learned": (certificate.learned, same_file),
        "arrays": (", ".join(differing), ""),
    }
    if not differing:
        some = log.select(np.linspace(0, len(log) - 1, min(len(log), _MOST_REPLAYED)).astype(np.int64))
        kept = [tuple((~rule.apply(some).deferred).nonzero()[0].tolist()) for rule in (certificate, recomputed)]
        pairs["decisions"] = (kept[0], kept[1])
    return pairs
