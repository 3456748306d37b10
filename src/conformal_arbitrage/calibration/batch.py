"""Batches: which machine labels of a finite pile of items may be kept, with no assumption about where they come from."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conformal_arbitrage.calibration.certificate import Certificate, issue
from conformal_arbitrage.calibration.promises import WRONG_LABEL, Batch, Cutoff, Evidence
from conformal_arbitrage.calibration.words import wrong_allowed
from conformal_arbitrage.core.bounds import hypergeometric_limit
from conformal_arbitrage.core.exact import Bools, Floats, Integers
from conformal_arbitrage.core.risk import Number, as_fraction
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.log import log_digest, sum_of_hashes

# --- The draw ---


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchDraw:
    """A sample of items for experts to label, and all that was fixed before they did.

    Attributes:
        items: how many items there are.
        rows: the items drawn, counted from 0, in the order of the draw; the first `pilot` of them train a score.
        error: the largest share of all items with a wrong machine label.
        level: the probability with which this draw may fail.
        confidence: the probability promised over this draw and earlier ones of the same items.
        pilot: how many of the items drawn do not certify.
        number: which draw from these items it is, counted from 1.
        key: behind the draws that order items of equal risk.
    """

    items: int
    rows: Integers
    error: float
    level: float
    confidence: float
    pilot: int = 0
    number: int = 1
    key: bytes = b""

    @property
    def limit(self) -> int:
        """Return how many wrong items of the sample may lie below the cutoff; -1 if it is too small to say anything."""
        return hypergeometric_limit(
            self.items - self.pilot,
            wrong_allowed(self.error, self.items),
            len(self.rows) - self.pilot,
            as_fraction(self.level, name="level"),
        )


def keyed_words(key: bytes, domain: str, items: int) -> Integers:
    """Return a number for each item that nobody can predict without the key, other ones for each domain."""
    seed = int.from_bytes(hmac.digest(key, domain.encode(), "sha256")[:16], "big")
    words = np.random.Philox(key=seed).random_raw(items)
    return (words >> np.uint64(1)).view(np.int64)


def first_words(words: Integers, count: int) -> Integers:
    """Return the places of the smallest words, in their order: a sample of which all subsets are alike."""
    chosen = np.argpartition(words, count)[:count] if count < len(words) else np.arange(len(words))
    return chosen[np.lexsort((chosen, words[chosen]))]


def check_shares(error: Number, confidence: Number) -> tuple[Fraction, Fraction]:
    """Return an error and the level that a confidence leaves, as the decimals that the user wrote.

    Raises:
        OptionError: one of them is out of range.
    """
    share, sure = as_fraction(error, name="error"), as_fraction(confidence, name="confidence")
    if not 0 <= share < 1:
        raise OptionError(f"error must be a share of the items, 0 or more and below 1; got {error} (5 % is 0.05)")
    if not 0 < sure < 1:
        raise OptionError(f"confidence must lie between 0 and 1; got {confidence} (95 % is 0.95)")
    return share, 1 - sure


# --- The certificate ---


_MOST_DRAWN: Final = 100
"""Steps of the figure."""
_UNKNOWN: Final = np.nan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchLabels:
    """A batch with what experts say about its sample: all that a certificate is computed from.

    Attributes:
        risk: of each item; what it is for an item without a machine label does not matter.
        labelled: which items have a machine label.
        draw: the sample.
        wrong: of each item drawn, in the order of the draw: 1 if its machine label is wrong, 0 if not, NaN if nobody could
            say.
        fixed: error and level, if they are others than those of the draw, so that nothing is promised.
    """

    risk: Floats
    labelled: Bools
    draw: BatchDraw
    wrong: Floats
    fixed: tuple[Fraction, Fraction] | None = None

    @property
    def pile(self) -> Bools:
        """Which items are outside the sample and have a machine label."""
        pile = self.labelled.copy()
        pile[self.draw.rows] = False
        return pile

    def kept(self, rule: Cutoff) -> Bools:
        """Return which machine labels a rule keeps."""
        if rule.keeps == "none":
            return np.zeros(len(self.risk), np.bool_)
        if rule.risk is None or rule.tie is None:
            return self.pile
        before = self.risk < rule.risk
        equal = np.flatnonzero(self.risk == rule.risk)
        before[equal] = self.ties()[equal] < rule.tie
        return self.pile & before

    def ties(self) -> Integers:
        """Return the draws that order items of equal risk; those of the sample have another domain."""
        return keyed_words(self.draw.key, "ties", len(self.risk))

    def sha256(self) -> str:
        """Return the digest of what the certificate depends on."""
        n = len(self.risk)
        said = np.full(n, -1.0)
        said[self.draw.rows] = np.where(np.isnan(self.wrong), 2.0, self.wrong)
        columns = [np.where(self.labelled, self.risk, 0.0), self.labelled.astype(np.float64), said]
        return log_digest(n, sum_of_hashes(12, np.arange(n + 1), columns, None))


def certify_batch(
    risk: ArrayLike,
    sampled: BatchDraw | ArrayLike,
    wrong: Sequence[bool | None] | ArrayLike,
    *,
    error: Number | None = None,
    confidence: Number | None = None,
    labelled: ArrayLike | None = None,
    key: bytes = b"",
) -> Certificate:
    """Certify which machine labels of a batch may be kept.

    With probability `confidence` over the draw of the sample, at most floor(error n) of the labels kept are wrong. Let k be
    the largest number with P(Hyper(n, floor(error n) + k + 1 bad, K drawn) <= k) <= 1 - confidence. Labels outside the
    sample are kept below the risk of its (k + 1)-th wrong item; floor(error n) of the least risky may be kept anyhow.

    Args:
        risk: of each of the n items; the machine's labels with the lowest risks are kept.
        sampled: the draw; or the numbers of the items drawn, uniformly without replacement, if you drew them yourself.
        wrong: for each item drawn, in that order, whether its machine label is wrong; None if no expert could say, which
            counts as wrong.
        error: the largest share of all items; taken from the draw if there is one.
        confidence: in the promise; taken from the draw if there is one.
        labelled: which items have a machine label; by default all.
        key: behind the draws that order items of equal risk, if there is no draw.

    Returns:
        A certificate with a `Batch` promise. It promises nothing if error or confidence are not those of the draw.
    """
    risks, fixed = _risks(risk), None
    if isinstance(sampled, BatchDraw):
        draw = sampled
        given = (
            as_fraction(draw.error, name="error") if error is None else as_fraction(error, name="error"),
            as_fraction(draw.level, name="level")
            if confidence is None
            else 1 - as_fraction(confidence, name="confidence"),
        )
        before = as_fraction(draw.error, name="error"), as_fraction(draw.level, name="level")
        fixed = None if given == before else check_shares(given[0], 1 - given[1])
    else:
        if error is None or confidence is None:
            raise OptionError(
                "name error= and confidence=, as they were fixed before the draw, or pass the draw itself"
            )
        draw = _own_draw(len(risks), sampled, *check_shares(error, confidence), key)
    if draw.items != len(risks):
        raise OptionError(
            f"the draw is from {draw.items} items, and there are {len(risks)} risks; pass one for each item"
        )
    has_label = np.ones(len(risks), np.bool_) if labelled is None else np.asarray(labelled, np.bool_)
    if has_label.shape != risks.shape:
        raise OptionError(f"labelled= takes one truth value per item, {len(risks)} here; got {has_label.shape}")
    _refuse_unknown_risks(risks, has_label)
    return certify_labels(
        BatchLabels(risk=risks, labelled=has_label, draw=draw, wrong=_verdicts(wrong, draw), fixed=fixed)
    )


def certify_labels(labels: BatchLabels) -> Certificate:
    """Return the certificate of a batch; see `certify_batch`."""
    draw, n = labels.draw, labels.draw.items
    if labels.fixed is not None:
        draw = _with_shares(draw, *labels.fixed)
    certify, said = draw.rows[draw.pilot :], labels.wrong[draw.pilot :]
    unknown = labels.labelled[certify] & np.isnan(said)
    wrong = certify[labels.labelled[certify] & (unknown | (said == 1))]
    rule = find_cutoff(labels, wrong, draw.limit, wrong_allowed(draw.error, n))
    promise = Batch(
        error=draw.error,
        confidence=draw.confidence,
        level=draw.level,
        sample=len(draw.rows),
        limit=draw.limit,
        pilot=draw.pilot,
        draw=draw.number,
        chosen_after=labels.fixed is not None,
    )
    evidence = Evidence(
        n=n,
        log_sha256=labels.sha256(),
        empirical_risk=len(wrong) / max(len(certify), 1),
        missing_guardian_rows=int(unknown.sum()),
    )
    return issue(rule, promise, WRONG_LABEL, evidence, identities="unbound", key=None)


def find_cutoff(labels: BatchLabels, wrong: Integers, limit: int, allowed: int) -> Cutoff:
    """Return where to stop keeping labels.

    Args:
        labels: the batch.
        wrong: the items of the sample whose label is wrong.
        limit: how many of them may lie below the cutoff; -1 if the sample says nothing.
        allowed: how many of the labels that are kept may be wrong, so that as many may be kept whatever the sample says.
    """
    ties, risk, pile = labels.ties(), labels.risk, labels.pile
    outside = int(pile.sum())
    order = wrong[np.lexsort((ties[wrong], risk[wrong]))]
    wrong_at = _places(labels, order)
    if outside <= allowed or -1 < limit >= len(wrong):
        return Cutoff(keeps="all" if outside else "none", risk=None, tie=None, kept=outside, wrong_at=wrong_at)
    least = _item_at(risk, ties, np.flatnonzero(pile), allowed)
    cut = least if limit < 0 else max(least, order[limit], key=lambda item: (risk[item], ties[item]))
    below = Cutoff(keeps="below", risk=float(risk[cut]), tie=int(ties[cut]), kept=0)
    kept = int(labels.kept(below).sum())
    if not kept:
        return Cutoff(keeps="none", risk=None, tie=None, kept=0, wrong_at=wrong_at)
    return Cutoff(keeps="below", risk=below.risk, tie=below.tie, kept=kept, wrong_at=wrong_at)


def _item_at(risk: Floats, ties: Integers, items: Integers, place: int) -> int:
    """Return the item that stands at a place, from 0, among some items in the order of (risk, tie)."""
    risks = risk[items]
    value = np.partition(risks, place)[place]
    equal = items[risks == value]
    return int(equal[np.argsort(ties[equal], kind="stable")][place - int((risks < value).sum())])


def _places(labels: BatchLabels, wrong: Integers) -> tuple[int, ...]:
    """Return where wrong items of the sample stand in the order of risk, of many only some evenly spread."""
    some = wrong[np.unique(np.linspace(0, len(wrong) - 1, min(len(wrong), _MOST_DRAWN)).astype(np.int64))]
    items = labels.labelled.copy()
    items[labels.draw.rows[: labels.draw.pilot]] = False
    at = np.searchsorted(np.sort(labels.risk[items]), labels.risk[some])
    return tuple(sorted({int(place) for place in at}))


def _with_shares(draw: BatchDraw, error: Fraction, level: Fraction) -> BatchDraw:
    return BatchDraw(
        items=draw.items,
        rows=draw.rows,
        error=float(error),
        level=float(level),
        confidence=float(1 - level),
        pilot=draw.pilot,
        number=draw.number,
        key=draw.key,
    )


def _own_draw(items: int, sampled: ArrayLike, error: Fraction, level: Fraction, key: bytes) -> BatchDraw:
    """Return a draw that the caller made."""
    rows = np.asarray(sampled)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise OptionError(f"sampled= takes the numbers of the items drawn, from 0; got {sampled!r:.80}")
    rows = rows.astype(np.int64)
    if rows.size and (rows.min() < 0 or rows.max() >= items):
        raise OptionError(f"the items are numbered from 0 to {items - 1}; sampled= has {rows.min()} to {rows.max()}")
    if len(np.unique(rows)) != len(rows):
        raise OptionError("sampled= names an item twice; the draw is without replacement")
    return BatchDraw(
        items=items, rows=rows, error=float(error), level=float(level), confidence=float(1 - level), key=key
    )


def _risks(risk: ArrayLike) -> Floats:
    values = np.asarray(risk)
    if values.ndim != 1 or values.dtype.kind not in "fiub" or not values.size:
        raise OptionError(f"risk= takes one number per item, in a flat list; got {risk!r:.80}")
    return values.astype(np.float64)


def _refuse_unknown_risks(risk: Floats, labelled: Bools) -> None:
    bad = labelled & ~np.isfinite(risk)
    if bad.any():
        item = int(bad.argmax())
        raise OptionError(
            f"item {item} has risk {risk[item]} ({int(bad.sum())} items have none that is finite); give it a number, or say "
            "with labelled= that it has no machine label, so that experts label it"
        )


def _verdicts(wrong: Sequence[bool | None] | ArrayLike, draw: BatchDraw) -> Floats:
    """Return verdicts as 1, 0 or NaN."""
    given: NDArray[np.object_] = np.array(wrong, dtype=object)
    if given.shape != (len(draw.rows),):
        raise OptionError(f"wrong= takes one verdict per item drawn, {len(draw.rows)} here; got {given.shape}")
    verdicts = np.array([_UNKNOWN if said is None or said != said else float(said) for said in given.tolist()])
    other = ~(np.isnan(verdicts) | (verdicts == 0) | (verdicts == 1))
    if other.any():
        place = int(other.argmax())
        raise OptionError(
            f"verdict {place} is {given[place]!r}; it must be True (wrong), False or None (nobody could say)"
        )
    return verdicts
