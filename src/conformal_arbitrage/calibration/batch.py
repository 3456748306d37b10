"""Batches: which machine labels of a finite pile of items may be kept, with no assumption about where they come from."""

import csv
import hashlib
import hmac
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from conformal_arbitrage.calibration.certificate import Certificate, batch_figure, issue, signed_bytes
from conformal_arbitrage.calibration.learned import WIDTH, answer_place, text_embedding
from conformal_arbitrage.calibration.promises import POOR_LABEL, WRONG_LABEL, Batch, Cutoff, Evidence
from conformal_arbitrage.calibration.secret import ProjectSecret, user_folder
from conformal_arbitrage.calibration.sentences import wrong_allowed
from conformal_arbitrage.core.bounds import accepts_sample, hypergeometric_limit, shared_bets
from conformal_arbitrage.core.exact import Bools, Floats, Integers, n_rows
from conformal_arbitrage.core.features import STRENGTHS, FeatureRows, FeatureSet, feature_matrix, fit_ridges, rounded
from conformal_arbitrage.core.risk import Number, as_fraction
from conformal_arbitrage.errors import CertificateError, ConfigError, OptionError, OutputError, ScoreLogError
from conformal_arbitrage.scorelog.log import Words, cell_hashes, log_digest, mixed, read_confidence, sum_of_hashes
from conformal_arbitrage.scorelog.parts import PartsTable, is_many
from conformal_arbitrage.scorelog.spark import SparkTable
from conformal_arbitrage.scorelog.tables import (
    ColumnReader,
    FrameTable,
    Strings,
    Table,
    TextBytes,
    all_distinct,
    new_folder,
    quoted,
    strings,
    write_text,
)
from conformal_arbitrage.types import as_object

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
        graded: whether verdicts are losses from 0 to 1.
    """

    items: int
    rows: Integers
    error: float
    level: float
    confidence: float
    pilot: int = 0
    number: int = 1
    key: bytes = b""
    graded: bool = False

    @property
    def limit(self) -> int:
        """How many wrong items of the sample may lie below the cutoff; -1 if it is too small to say anything."""
        return hypergeometric_limit(
            self.items - self.pilot,
            wrong_allowed(self.error, self.items),
            len(self.rows) - self.pilot,
            as_fraction(self.level, name="level"),
        )


_WORDS_AT_ONCE: Final = 1 << 14
_SIP: Final = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


def keyed_words(key: bytes, domain: str, names: Words) -> Integers:
    """Return a number for each item that nobody can predict without the key, other ones for each domain.

    It is SipHash-2-4 of the item's name, so that it does not matter where among the others an item stands.
    """
    halves = np.frombuffer(hmac.digest(key, domain.encode(), "sha256")[:16], "<u8")
    words = np.empty(len(names), np.uint64)
    for start in range(0, len(names), _WORDS_AT_ONCE):  # few enough for the processor's cache
        words[start : start + _WORDS_AT_ONCE] = sip_hashes(halves, names[start : start + _WORDS_AT_ONCE])
    words >>= np.uint64(1)
    return words.view(np.int64)


def sip_hashes(key: Words, words: Words) -> Words:
    """Return SipHash-2-4 (Aumasson and Bernstein 2012) of words of eight bytes."""
    state: list[Words] = [np.full(len(words), np.uint64(start) ^ key[k % 2]) for k, start in enumerate(_SIP)]
    for block in (words, np.uint64(8 << 56)):  # the second says how long the first is
        state[3] ^= block
        _sip_rounds(state, 2)
        state[0] ^= block
    state[2] ^= np.uint64(0xFF)
    _sip_rounds(state, 4)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _sip_rounds(state: list[Words], rounds: int) -> None:
    for _ in range(rounds):
        _sip_half(state, (0, 1, 13), (2, 3, 16))
        state[0] = _rotated(state[0], 32)
        _sip_half(state, (2, 1, 17), (0, 3, 21))
        state[2] = _rotated(state[2], 32)


def _sip_half(state: list[Words], *steps: tuple[int, int, int]) -> None:
    for left, right, bits in steps:
        state[left] += state[right]
        state[right] = _rotated(state[right], bits)
        state[right] ^= state[left]


def _rotated(words: Words, bits: int) -> Words:
    turned = words << np.uint64(bits)
    turned |= words >> np.uint64(64 - bits)
    return turned


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
_ROWS_AT_ONCE: Final = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchLabels:
    """A batch with what experts say about its sample: all that a certificate is computed from.

    Attributes:
        risk: of each item; what it is for an item without a machine label does not matter.
        labelled: which items have a machine label.
        draw: the sample.
        wrong: of each item drawn, in the order of the draw: 1 if its machine label is wrong, 0 if not, or its loss if the
            draw is graded; NaN if nobody could say.
        names: by which draws tell items apart; by default their numbers.
        learned: what the risk was learned from on the pilot; empty if it was not.
        fixed: error and level, if they are others than those of the draw, so that nothing is promised.
    """

    risk: Floats
    labelled: Bools
    draw: BatchDraw
    wrong: Floats
    names: Words | None = None
    learned: tuple[str, ...] = ()
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
        before[equal] = self.ties(equal) < rule.tie
        return self.pile & before

    def ties(self, rows: Integers) -> Integers:
        """Return the draws that order some items of equal risk; those of the sample have another domain."""
        return keyed_words(self.draw.key, "ties", rows.astype(np.uint64) if self.names is None else self.names[rows])

    def sha256(self) -> str:
        """Return the digest of what the certificate depends on."""
        n = len(self.risk)
        said = np.full(n, -1.0)
        said[self.draw.rows] = np.where(np.isnan(self.wrong), 2.0, self.wrong)
        total = 0
        for start in range(0, n, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, n))
            given = self.labelled[rows]
            columns = [np.where(given, self.risk[rows], 0.0), given.astype(np.float64), said[rows]]
            total += sum_of_hashes(12, np.arange(len(given) + 1), columns, None)
        return log_digest(n, total)


def certify_batch(
    risk: ArrayLike,
    sampled: BatchDraw | ArrayLike,
    wrong: Sequence[bool | None] | ArrayLike,
    *,
    error: Number | None = None,
    confidence: Number | None = None,
    labelled: ArrayLike | None = None,
    pilot: int = 0,
    graded: bool = False,
    key: bytes = b"",
) -> Certificate:
    """Certify which machine labels of a batch may be kept.

    With probability `confidence` over the draw of the sample, at most floor(error n) of the labels kept are wrong. Let k be
    the largest number with P(Hyper(n, floor(error n) + k + 1 bad, K drawn) <= k) <= 1 - confidence. Labels outside the
    sample are kept below the risk of its (k + 1)-th wrong item; floor(error n) of the least risky may be kept anyhow.

    Args:
        risk: of each of the n items; the machine's labels with the lowest risks are kept. It must have been fixed before
            the draw, as `labelled` and `key`; nothing checks that here.
        sampled: the draw; or the numbers of the items drawn, uniformly without replacement, if you drew them yourself.
        wrong: for each item drawn, in that order, whether its machine label is wrong; None if no expert could say, which
            counts as wrong. If graded, a loss from 0 to 1.
        error: the largest share of all items; taken from the draw if there is one.
        confidence: in the promise; taken from the draw if there is one.
        labelled: which items have a machine label; by default all.
        pilot: how many of the items drawn, the first ones, you have learned the risk from, if there is no draw: fixed before
            it, and no other label may have been used. They do not certify.
        graded: whether verdicts are losses from 0 to 1, if there is no draw; fixed before it. The promise is then that the
            losses of the labels kept add up to at most error n, and `sampled` has to be in the order of the draw.
        key: behind the draws that order items of equal risk, if there is no draw.

    Returns:
        A certificate with a `Batch` promise. It promises nothing if error or confidence are not those of the draw.
    """
    risks, fixed = _risks(risk), None
    if isinstance(sampled, BatchDraw):
        draw, fixed = sampled, _other_shares(sampled, error, confidence)
    else:
        if error is None or confidence is None:
            raise OptionError(
                "name error= and confidence=, as they were fixed before the draw, or pass the draw itself"
            )
        draw = _own_draw(len(risks), sampled, *check_shares(error, confidence), pilot, key, graded=graded)
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


def _other_shares(draw: BatchDraw, error: Number | None, confidence: Number | None) -> tuple[Fraction, Fraction] | None:
    """Return the error and the level that were given, if they are not those of the draw."""
    before = as_fraction(draw.error, name="error"), as_fraction(draw.level, name="level")
    given = (
        before[0] if error is None else as_fraction(error, name="error"),
        before[1] if confidence is None else 1 - as_fraction(confidence, name="confidence"),
    )
    return None if given == before else check_shares(given[0], 1 - given[1])


def certify_labels(labels: BatchLabels) -> Certificate:
    """Return the certificate of a batch; see `certify_batch`."""
    draw, n = labels.draw, labels.draw.items
    if labels.fixed is not None:
        draw = _with_shares(draw, *labels.fixed)
    certify, said = draw.rows[draw.pilot :], labels.wrong[draw.pilot :]
    unknown = labels.labelled[certify] & np.isnan(said)
    losses = np.where(labels.labelled[certify], np.where(unknown, 1.0, said), 0.0)
    wrong = certify[losses > 0]
    limit = loss_limit(labels, certify, losses, draw) if draw.graded else draw.limit
    rule = find_cutoff(labels, wrong, limit, wrong_allowed(draw.error, n))
    promise = Batch(
        error=draw.error,
        confidence=draw.confidence,
        level=draw.level,
        sample=len(draw.rows),
        limit=None if draw.graded else draw.limit,
        pilot=draw.pilot,
        draw=draw.number,
        chosen_after=labels.fixed is not None,
    )
    evidence = Evidence(
        n=n,
        log_sha256=labels.sha256(),
        empirical_risk=float(losses.sum()) / max(len(certify), 1),
        missing_guardian_rows=int(unknown.sum()),
    )
    loss = POOR_LABEL if draw.graded else WRONG_LABEL
    return issue(rule, promise, loss, evidence, identities="unbound", key=None)


def loss_limit(labels: BatchLabels, certify: Integers, losses: Floats, draw: BatchDraw) -> int:
    """Return how many items with a loss may lie below the cutoff, by a betting test that all thresholds share.

    The test accepts a threshold if the sample's losses below it show that those of all items there add up to at most
    error n. The first threshold at which they add up to more is one of the items' own, and a threshold beyond it has no less
    of a loss in any item: so whatever is accepted too much, the test of that one threshold has failed.

    Args:
        labels: the batch.
        certify: the items that certify, in the order of the draw.
        losses: of these.
        draw: the terms.
    """
    level, lost = float(as_fraction(draw.level, name="level")), np.flatnonzero(losses > 0)
    lost = lost[np.lexsort((labels.ties(certify[lost]), labels.risk[certify[lost]]))]
    allowed, items = float(as_fraction(draw.error, name="error") * draw.items), draw.items - draw.pilot
    bets = shared_bets(losses, draw.error, level) if draw.error > 0 else np.ones(len(losses))

    def accepted(count: int) -> bool:
        below = np.zeros(len(losses))
        below[lost[:count]] = losses[lost[:count]]
        return accepts_sample(below, items, allowed, level, bets)

    low, high = -1, len(lost) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low


def find_cutoff(labels: BatchLabels, wrong: Integers, limit: int, allowed: int) -> Cutoff:
    """Return where to stop keeping labels.

    Args:
        labels: the batch.
        wrong: the items of the sample whose label is wrong.
        limit: how many of them may lie below the cutoff; -1 if the sample says nothing.
        allowed: how many of the labels that are kept may be wrong, so that as many may be kept whatever the sample says.
    """
    risk, pile = labels.risk, labels.pile
    outside = int(pile.sum())
    order = wrong[np.lexsort((labels.ties(wrong), risk[wrong]))]
    wrong_at = _places(labels, order)
    if outside <= allowed or -1 < limit >= len(wrong):
        return Cutoff(
            keeps="all" if outside else "none",
            risk=None,
            tie=None,
            kept=outside,
            wrong_at=wrong_at,
            learned=labels.learned,
        )
    least = _item_at(labels, pile, allowed)
    cuts = np.array([least] if limit < 0 else [least, order[limit]])
    at, tie = max(zip(risk[cuts].tolist(), labels.ties(cuts).tolist(), strict=True))
    kept = int(labels.kept(Cutoff(keeps="below", risk=at, tie=tie, kept=0)).sum())
    if not kept:
        return Cutoff(keeps="none", risk=None, tie=None, kept=0, wrong_at=wrong_at, learned=labels.learned)
    return Cutoff(keeps="below", risk=at, tie=tie, kept=kept, wrong_at=wrong_at, learned=labels.learned)


def _item_at(labels: BatchLabels, items: Bools, place: int) -> int:
    """Return the item that stands at a place, from 0, among some items in the order of (risk, tie)."""
    risks = labels.risk[items]
    risks.partition(place)
    value = risks[place]
    equal = np.flatnonzero(items & (labels.risk == value))
    return int(equal[np.argsort(labels.ties(equal), kind="stable")][place - int((risks < value).sum())])


def _places(labels: BatchLabels, wrong: Integers) -> tuple[int, ...]:
    """Return where wrong items of the sample stand in the order of risk, of many only some evenly spread."""
    some = wrong[np.unique(np.linspace(0, len(wrong) - 1, min(len(wrong), _MOST_DRAWN)).astype(np.int64))]
    items = labels.labelled.copy()
    items[labels.draw.rows[: labels.draw.pilot]] = False
    risks = labels.risk[items]
    risks.sort()
    at = np.searchsorted(risks, labels.risk[some])
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
        graded=draw.graded,
    )


def _own_draw(
    items: int, sampled: ArrayLike, error: Fraction, level: Fraction, pilot: int, key: bytes, *, graded: bool
) -> BatchDraw:
    """Return a draw that the caller made."""
    rows = np.asarray(sampled)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise OptionError(f"sampled= takes the numbers of the items drawn, from 0; got {sampled!r:.80}")
    rows = rows.astype(np.int64)
    if rows.size and (rows.min() < 0 or rows.max() >= items):
        raise OptionError(f"the items are numbered from 0 to {items - 1}; sampled= has {rows.min()} to {rows.max()}")
    if len(np.unique(rows)) != len(rows):
        raise OptionError("sampled= names an item twice; the draw is without replacement")
    if not 0 <= pilot <= len(rows):
        raise OptionError(f"pilot= is a part of the {len(rows)} items drawn; got {pilot}")
    if graded and len(rows) > _FEW and bool((np.diff(rows) > 0).all()):
        raise OptionError(
            "sampled= is sorted; graded losses are tested in the order of the draw: pass the items as drawn"
        )
    return BatchDraw(
        items=items,
        rows=rows,
        error=float(error),
        level=float(level),
        confidence=float(1 - level),
        pilot=pilot,
        key=key,
        graded=graded,
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
    """Return verdicts as 1, 0 or NaN, or losses between them if the draw is graded."""
    given: NDArray[np.object_] = np.array(wrong, dtype=object)
    if given.shape != (len(draw.rows),):
        raise OptionError(f"wrong= takes one verdict per item drawn, {len(draw.rows)} here; got {given.shape}")
    verdicts = np.array([_UNKNOWN if said is None or said != said else float(said) for said in given.tolist()])
    fine = (verdicts >= 0) & (verdicts <= 1) if draw.graded else (verdicts == 0) | (verdicts == 1)
    other = ~(np.isnan(verdicts) | fine)
    if other.any():
        place = int(other.argmax())
        may = "a loss from 0 to 1" if draw.graded else "True (wrong), False"
        raise OptionError(f"verdict {place} is {given[place]!r}; it must be {may} or None (nobody could say)")
    return verdicts


# --- The items of a table ---


class BatchColumns(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which columns of a table say what.

    Attributes:
        answer: the machine's label; empty where it has none.
        confidence: in that label.
        id: of the item; rows are numbered if there is none.
        truth: experts' labels as far as they are known already; they fill in what experts are given to label.
        group: of the item, such as a language; a pilot's score is learned from it.
        text: of the item; a pilot's score is learned from it as a vector.
    """

    answer: str = "answer"
    confidence: str = "confidence"
    id: str | None = None
    truth: str | None = None
    group: str | None = None
    text: str | None = None

    @property
    def named(self) -> list[str]:
        """All that have a name."""
        return [name for name in msgspec.structs.astuple(self) if name is not None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchItems:
    """The items of a table, as far as a certificate depends on them: two numbers each.

    Attributes:
        risk: 1 - confidence; infinite for an item without a machine label.
        labelled: which items have a machine label.
        hashes: a number for each row that another id, label or confidence changes, and of a pilot another group or text.
        ids: the same for each id; None if there are none.
        names: by which draws tell items apart: by id, else by content and place among equals; see `keyed_words`.
        features: what a score is learned from; None without a pilot.
        columns: a digest of each of these columns.
        marks: by which items are recognised in another table, see `_marks`.
        converted: what the confidences were, if they had to be converted.
    """

    risk: Floats
    labelled: Bools
    hashes: Words
    ids: Words | None
    names: Words
    columns: dict[str, str]
    marks: dict[str, list[int]]
    converted: str | None
    features: "ItemFeatures | None" = None

    @property
    def digest(self) -> str:
        """The digest of all rows: in whichever order if they have ids, else in theirs, where a place is all an item has."""
        if self.ids is None:
            return hashlib.sha256(self.hashes.astype("<u8").tobytes()).hexdigest()
        return log_digest(len(self.hashes), int(self.hashes.sum()))


def open_items(source: object) -> ColumnReader:
    """Open a table of items, or a score log: a file, a folder or a pattern of Parquet files, a frame, or a table of Spark.

    Of a score log the Primary is the machine: its first choice among the actions, or in router form its answer, is the
    label, and how sure it was of that the confidence. What tells of either is not among the columns, nor is the Guardian.
    """
    if isinstance(source, SparkTable):
        table = PartsTable(source.copied(), name=source.source)
    elif not isinstance(source, str | Path):
        table = FrameTable(source)
    else:
        table = PartsTable(str(source)) if is_many(str(source)) else Table(source)
    if (columns := _items_of_log(table.types)) is not None:
        table.select(columns)
    return table


_KEPT_OF_LOG: Final = ("id", "context", "group", "actions")


def _items_of_log(types: Mapping[str, str]) -> dict[str, str] | None:
    """Return the columns of items in a score log, as SQL; None for a table that is none, or has no answers."""
    routed = "primary_answer" in types
    if "primary" not in types or "answer" in types or not (routed or "actions" in types):
        return None
    scores = 'try_cast("primary" as double[])'
    options = "from_json(actions, '[\"VARCHAR\"]')" if types.get("actions") == "VARCHAR" else "actions"
    sure = f"{scores}[2]" if routed else f"list_max({scores})"
    known = f"len({scores}) > 0 and list_bool_and([not isnan(coalesce(score, 'nan')) for score in {scores}])"
    answer = "primary_answer" if routed else f"{options}[list_position({scores}, {sure})]"
    columns = {name: quoted(name) for name in _KEPT_OF_LOG if name in types and not (routed and name == "actions")}
    columns |= {"answer": f"case when {known} then {answer} end", "confidence": f"case when {known} then {sure} end"}
    if not routed and "label" in types:
        columns["truth"] = f"{options}[try_cast(label as bigint) + 1]"
    elif not routed and "correct" in types:
        columns["truth"] = f"{options}[list_position(try_cast(correct as double[]), 1)]"
    elif "expected" in types:
        columns["truth"] = "expected"
    return columns


def read_items(table: ColumnReader, columns: BatchColumns, *, marked: bool = True, pilot: bool = False) -> BatchItems:
    """Read what a certificate depends on.

    Args:
        table: the items.
        columns: what its columns say.
        marked: read also what items are recognised by in another table.
        pilot: read also what a score is learned from.

    Raises:
        ScoreLogError: a column is absent, or a machine label has no confidence.
    """
    for name in columns.named:
        if name not in table.types:
            raise ScoreLogError(
                f"{table.source}: there is no column '{name}'; it has {', '.join(table.types)}; name the columns "
                "(--answer-column, --confidence-column, --id-column, --truth-column)"
            )
    confidence, converted = read_confidence(table, columns.confidence)
    hashed, labelled, kinds = np.empty(table.rows, np.uint64), np.empty(table.rows, np.bool_), list[str]()

    def read_answers(rows: slice, texts: TextBytes) -> None:
        hashed[rows], labelled[rows] = cell_hashes(texts), np.diff(texts.bounds) > 0
        if not rows.start:
            kinds.append(_kind_of(texts))

    table.map_texts([columns.answer], read_answers)
    unsure = ~np.isfinite(confidence)
    _refuse_unsure(table.source, columns, labelled & unsure)
    confidence[unsure] = 0
    cells = {columns.answer: hashed, columns.confidence: cell_hashes(confidence)}
    read = {columns.answer: (hashed, "".join(kinds))}
    if columns.id is not None:
        read[columns.id] = _text_hashes(table, columns.id)
        cells[columns.id] = read[columns.id][0]
    features = _read_features(table, columns, cells) if pilot else None
    hashes, risk = _row_hashes(list(cells.values())), np.subtract(1, confidence, out=confidence)
    risk[~labelled] = np.inf
    return BatchItems(
        risk=risk,
        labelled=labelled,
        hashes=hashes,
        ids=None if columns.id is None else cells[columns.id],
        names=names_of(hashes) if columns.id is None else cells[columns.id],
        features=features,
        columns={name: log_digest(table.rows, int(column.sum())) for name, column in cells.items()},
        marks=_marks(table, columns, cells, read) if marked else {},
        converted=converted,
    )


def _row_hashes(columns: Sequence[Words]) -> Words:
    """Return the hash of each row from those of its cells."""
    hashes = np.empty(len(columns[0]), np.uint64)
    for start in range(0, len(hashes), _WORDS_AT_ONCE):  # few enough for the processor's cache
        block = slice(start, start + _WORDS_AT_ONCE)
        sums = columns[0][block].copy()
        for place, column in enumerate(columns[1:], 1):
            sums += column[block] * np.uint64(2 * place + 1)
        hashes[block] = mixed(sums)
    return hashes


def names_of(hashes: Words) -> Words:
    """Return names of items: their hashes, and other numbers for those after the first of equal ones."""
    if all_distinct(hashes):
        return hashes
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    place = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    names = hashes.copy()
    names[order] += mixed(place.astype(np.uint64))  # of 0 it is 0
    return names


def _refuse_unsure(source: str, columns: BatchColumns, bad: Bools) -> None:
    if bad.any():
        raise ScoreLogError(
            f"{source}: row {int(bad.argmax()) + 1} has a label in '{columns.answer}' and no number in "
            f"'{columns.confidence}' ({n_rows(int(bad.sum()), 'has', 'have')} none); give it a confidence, or empty the "
            "label, so that experts label it"
        )


def _column_hashes(table: ColumnReader, name: str) -> tuple[Words, str]:
    """Return the hashes of a column's cells, whatever it is named for, and of which kind they are."""
    if table.types[name].startswith(_FRACTIONS):
        return cell_hashes(table.scalars(name)), "fraction"
    return _text_hashes(table, name)


def _text_hashes(table: ColumnReader, name: str) -> tuple[Words, str]:
    """Return the hashes of a column as texts, and of which kind they are."""
    hashes, kinds = np.empty(table.rows, np.uint64), list[str]()

    def read(rows: slice, texts: TextBytes) -> None:
        hashes[rows] = cell_hashes(texts)
        if not kinds:
            kinds.append(_kind_of(texts))

    table.map_texts([name], read)
    return hashes, "".join(kinds)


def _kind_of(texts: TextBytes) -> str:
    """Tell whether the first cells of a column are a text, a number or a fraction."""
    said = [text for text in texts[_LOOKED_AT].strings().tolist() if text]
    if all(text.isdecimal() for text in said):
        return "number"
    return "fraction" if all(_FRACTION.fullmatch(text) for text in said) else "text"


def _refuse_same_ids(table: ColumnReader, name: str | None, items: BatchItems) -> None:
    """Refuse an item without an id, and two that have the same. After the draw the digest shows that there is none."""
    hashes = items.ids
    if name is None or hashes is None:
        return
    if not all_distinct(hashes) or (hashes == cell_hashes(TextBytes.of(strings([""])))).any():
        seen: dict[str, int] = {}
        for row, id in enumerate(table.texts(name).tolist()):
            if not id:
                raise ScoreLogError(f"{table.source}: row {row + 1} has no id in '{name}'; give every row one")
            first = seen.setdefault(id, row)
            if first != row:
                raise ScoreLogError(
                    f"{table.source}: rows {first + 1} and {row + 1} have the id {id!r} in '{name}'; make ids unique"
                )


_MARKS: Final = 1000
_FRACTIONS: Final = ("FLOAT", "DOUBLE", "DECIMAL")
_FRACTION: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|nan", re.IGNORECASE)
_LOOKED_AT: Final = slice(0, 100)
_TELLING_TEXT: Final = 0.95
"""A text column tells items apart if so many of its cells are different: others are shared by other piles, too."""


def _marks(
    table: ColumnReader, columns: BatchColumns, cells: dict[str, Words], read: dict[str, tuple[Words, str]]
) -> dict[str, list[int]]:
    """Return by what items are recognised in another table: the smallest hashes of what they are, by kind.

    An item is known by its id, by each of its texts, by its content, which is all but id, label, confidence and truth, and,
    whichever columns are named for what, by its whole row without fractions, which machines compute anew. What is the same
    in many rows tells none of them apart and is left out; where nothing else is left, fractions are compared, too.
    """
    spoken_for, fractions = {columns.answer, columns.confidence, columns.id, columns.truth}, list[str]()
    whole, content = (np.zeros(table.rows, np.uint64) for _ in range(2))
    marks: dict[str, list[int]] = {}
    for name, type in table.types.items():
        if type.startswith(_FRACTIONS) and name in spoken_for - read.keys():
            fractions.append(name)
            continue
        hashes, kind = read[name] if name in read else _column_hashes(table, name)
        if kind == "fraction":
            fractions.append(name)
        else:
            whole += hashes
        if name not in spoken_for:
            content += hashes
        if name == columns.id:
            marks["id"] = _smallest(hashes)
        elif name not in spoken_for and kind == "text":
            marks[f"column {name}"] = _smallest(hashes, telling=_TELLING_TEXT)
    marks |= {"content": _smallest(content), "row": _smallest(whole)}
    if not marks["row"]:
        for name in fractions:
            whole += _column_hashes(table, name)[0]
        marks["row"] = _smallest(whole)
    marks = {kind: smallest for kind, smallest in marks.items() if smallest}
    if not marks:
        said = cells[columns.answer] * np.uint64(3) + cells[columns.confidence]
        marks = {"row": _smallest(whole, telling=0), "said": _smallest(said, telling=0)}
    return marks


def _smallest(hashes: Words, *, telling: float = 0.5) -> list[int]:
    """Return the smallest of some hashes; none if they tell fewer than such a share of the rows apart."""
    some = hashes if len(hashes) <= 2 * _MARKS else np.partition(hashes, 2 * _MARKS)[: 2 * _MARKS]
    distinct = np.unique(some)
    return [] if len(distinct) < telling * len(some) else distinct[:_MARKS].tolist()


# --- A score learned from a pilot ---


_FEWEST: Final = 10
"""A score is learned from a pilot with so many wrong labels and right ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemFeatures:
    """What a score is learned from beside the confidence.

    Attributes:
        answer: the place of each item's machine label, -1 if it has none; see `answer_place`.
        group: the name of each item's group, "" if it has none; None without groups.
        text: each item's text; None without texts.
    """

    answer: Integers
    group: Strings | None
    text: Strings | None

    @property
    def learned_from(self) -> tuple[str, ...]:
        """Return what there is, in words."""
        optional = (("group", self.group), ("text", self.text))
        return ("confidence", "answer", *(name for name, values in optional if values is not None))

    def rows(self, margin: Floats, chosen: Integers) -> FeatureRows:
        """Return what the features of some items are computed from."""
        return FeatureRows(
            margin=margin[chosen],
            top=np.zeros(len(chosen), np.int64),
            group=None if self.group is None else self.group[chosen].tolist(),
            text=None if self.text is None else text_embedding().vectors(self.text[chosen].tolist()),
            answer=self.answer[chosen],
        )


def _read_features(table: ColumnReader, columns: BatchColumns, cells: dict[str, Words]) -> ItemFeatures:
    """Read what a score is learned from; what is read becomes part of what the rows are recognised by."""
    texts = {name: table.text_bytes(name) for name in (columns.group, columns.text) if name is not None}
    for name, column in texts.items():
        cells[name] = cell_hashes(column)
    _, first, which = np.unique(cells[columns.answer], return_index=True, return_inverse=True)
    answers = table.some_rows(first, [columns.answer])
    places = np.array([answer_place(answer or "") for (answer,) in answers], dtype=np.int64)
    return ItemFeatures(
        answer=places[which],
        group=None if columns.group is None else texts[columns.group].strings(),
        text=None if columns.text is None else texts[columns.text].strings(),
    )


def learned_risk(items: BatchItems, pilot: Integers, wrong: Floats) -> tuple[Floats, tuple[str, ...]]:
    """Return the risk of each item, learned from a pilot alone, and what it was learned from.

    It is the ridge of a learned score, with and without the label, of the strength whose squared error is least when each
    item of the pilot is predicted by the others. A pilot with hardly any wrong or right labels teaches nothing: then it is
    the stated risk.

    Args:
        items: the items, read with their features.
        pilot: the items that train the score.
        wrong: 1 for each of them whose label is wrong, 0 for right, NaN if nobody could say; losses are rounded.
    """
    known = items.labelled[pilot] & ~np.isnan(wrong)
    rows, loss = pilot[known], np.rint(wrong[known]).astype(np.int64)
    if items.features is None or min(loss.sum(), len(loss) - loss.sum()) < _FEWEST:
        return items.risk, ()
    confidence = np.where(items.labelled, 1 - items.risk, 0.0)
    margin = confidence / max(float(confidence.max()), 1.0)
    trained = items.features.rows(margin, rows)
    groups = tuple(sorted(set(trained.group or ()) - {""}))
    text = 0 if trained.text is None else WIDTH
    tried: list[tuple[float, FeatureSet, Floats]] = []
    for answers in (False, True):
        features = FeatureSet(groups=groups, text=text, answers=answers)
        fits = fit_ridges(
            feature_matrix(features, trained), features.penalties(), loss, np.zeros(len(loss)), trained.margin,
            strengths=STRENGTHS,
        )  # fmt: skip
        left_out = (loss - fits.fitted) / (1 - fits.leverage)
        errors = rounded((left_out**2).mean(axis=1))
        tried += [
            (float(error), features, fits.rotation @ weights)
            for error, weights in zip(errors, fits.weights, strict=True)
        ]
    _, features, weights = min(tried, key=lambda entry: entry[0])
    risk = np.full(len(items.risk), np.inf)
    labelled = np.flatnonzero(items.labelled)
    for start in range(0, len(labelled), _ROWS_AT_ONCE):
        some = labelled[start : start + _ROWS_AT_ONCE]
        risk[some] = rounded(feature_matrix(features, items.features.rows(margin, some)) @ weights)
    said = items.features.learned_from
    return risk, said if features.answers else tuple(name for name in said if name != "answer")


# --- Draw a sample ---


DRAWS_FILE: Final = "arbitrage-batches.json"
_SHARED: Final = 20
"""Two tables are of the same items if they share a twentieth of what they are recognised by."""


class BatchTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was fixed before experts labelled: batch.json, signed with the project's secret.

    Attributes:
        table: where the items are, seen from the folder; None for a frame.
        columns: what its columns say.
        items: how many there are.
        error, confidence: as asked for.
        promised: the probability over this draw and earlier ones of the same items.
        sample: how many items are drawn.
        pilot: how many of them train a score.
        graded: whether machine labels have losses from 0 to 1.
        draw: which draw from these items it is.
        digest: of the rows in their order.
        digests: of each column.
        created: when, in UTC.
        pilot_verdicts: the digest of the pilot's verdicts, fixed by the first certificate; None before it.
        secret_id: the fingerprint of the secret behind the draws.
        signature: of everything else.
    """

    table: str | None
    columns: BatchColumns
    items: int
    error: float
    confidence: float
    promised: float
    sample: int
    pilot: int
    graded: bool
    draw: int
    digest: str
    digests: dict[str, str]
    created: str
    pilot_verdicts: str | None = None
    secret_id: str
    signature: str | None = None

    def drawn(self, secret: ProjectSecret, names: Words) -> BatchDraw:
        """Return the sample, which follows from these terms, the items' names and the secret that drew."""
        secret = secret.as_of(self.secret_id)
        words = keyed_words(secret.sample_key, f"{self.digest} {self.draw}", names)
        return BatchDraw(
            items=self.items,
            rows=first_words(words, self.sample),
            error=self.error,
            level=float(1 - as_fraction(self.confidence, name="confidence")),
            confidence=self.promised,
            pilot=self.pilot,
            number=self.draw,
            key=hmac.digest(secret.order_key, self.digest.encode(), "sha256"),
            graded=self.graded,
        )

    def signed(self, secret: ProjectSecret) -> "BatchTerms":
        """Return the terms signed."""
        return msgspec.structs.replace(self, signature=secret.sign(self._content()))

    def check(self, secret: ProjectSecret, source: str) -> None:
        """Refuse terms that were changed after the draw, or made with another secret.

        Raises:
            CertificateError: they are not as they were signed.
        """
        if self.signature is None or not secret.verifies(self._content(), self.signature):
            if self.secret_id not in secret.fingerprints:
                raise CertificateError(
                    f"{source}: was drawn with another secret ({self.secret_id}) than this project's ({secret.id}), or "
                    "changed after the draw; use that secret, or restore the file"
                )
            raise CertificateError(
                f"{source}: was changed after the draw; restore it, since what is chosen after the labels promises nothing"
            )

    def _content(self) -> bytes:
        """Return what the signature covers: all but where the table is, whose content the digest is of."""
        unsigned: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, signature=None, table=None))
        return signed_bytes(unsigned)


def draw_batch(
    source: object,
    *,
    error: Number,
    sample: int,
    pilot: int = 0,
    graded: bool = False,
    confidence: Number = 0.95,
    columns: BatchColumns | None = None,
    secret: ProjectSecret | None = None,
    check: "Callable[[DrawnBatch], None]" = lambda _: None,
) -> "DrawnBatch":
    """Draw the items of a table that experts are to label.

    The sample follows from the rows and the project's secret. Every draw is noted in the user's configuration directory,
    so that a second one from the same items, recognised by their ids or contents, says that it is the second: draw r
    promises 1 - r (1 - confidence) over all of them.

    Args:
        source: a file, a folder of Parquet files, a frame, or a `SparkTable` with ids; a row has a label and a confidence.
        error: the largest share of all items that may be kept with a wrong machine label.
        sample: how many items experts label.
        pilot: how many of them train the score by which the others are ordered, and do not certify.
        graded: machine labels get losses from 0 to 1, which add up to at most error n for those kept.
        confidence: the probability of the promise.
        columns: which columns say what; by default `answer`, `confidence` and, if there is one, `id`.
        secret: the project's secret; by default it is looked for, or made.
        check: is called before the draw is noted, which what it raises prevents, so that a draw of no use does not count.

    Raises:
        OptionError: a number is out of range, a column has two roles, or these items were drawn from so often that nothing
            can be promised.
    """
    share, level = check_shares(error, confidence)
    secret = secret or ProjectSecret.find()
    columns, items = _checked_items(source, columns, sample=sample, pilot=pilot)
    number, spent, note = _counted_draw(items, [float(share), float(level), sample, secret.id, pilot, graded])
    terms = BatchTerms(
        table=str(source) if isinstance(source, str | Path) else None,
        columns=columns,
        items=len(items.risk),
        error=float(share),
        confidence=float(1 - level),
        promised=float(1 - spent),
        sample=sample,
        pilot=pilot,
        graded=graded,
        draw=number,
        digest=items.digest,
        digests=items.columns,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        secret_id=secret.id,
    )
    batch = DrawnBatch(source=source, terms=terms.signed(secret), items=items, draw=terms.drawn(secret, items.names))
    check(batch)
    note()
    return batch


def _checked_items(
    source: object, columns: BatchColumns | None, *, sample: int, pilot: int
) -> tuple[BatchColumns, BatchItems]:
    """Read the items to draw from, and refuse what could not be drawn, or not be read again."""
    with open_items(source) as table:
        columns = columns or BatchColumns(id="id" if "id" in table.types else None)
        _refuse_unordered(source, columns)
        _refuse_roles(columns)
        _refuse_pilot(pilot, sample, columns)
        items = read_items(table, columns, pilot=pilot > 0)
        _refuse_same_ids(table, columns.id, items)
    n = len(items.risk)
    if not 1 <= sample <= n:
        raise OptionError(f"the sample must be 1 to {n} of the {n} items; got {sample}")
    return columns, items


def _refuse_roles(columns: BatchColumns) -> None:
    """Refuse one column for two purposes, and ids that are called like a column that is written."""
    roles = {"answer": columns.answer, "confidence": columns.confidence, "truth": columns.truth, "id": columns.id}
    for (role, name), (other, same) in combinations(roles.items(), 2):
        if name is not None and name == same:
            raise OptionError(
                f"column '{name}' is named for {role} and {other}; name another (--{role}-column, --{other}-column)"
            )
    if columns.id is not None and columns.id.casefold() in _WRITTEN:
        raise OptionError(
            f"ids are in column '{columns.id}', and a column of that name is written for experts; rename it in the table, "
            "or name another (--id-column)"
        )


def _counted_draw(items: BatchItems, chosen: list[float | int | str]) -> tuple[int, Fraction, Callable[[], None]]:
    """Return the number of a draw, with which probability all so far may fail, and what notes it.

    Refuse one that promises nothing.
    """
    number, spent, note = _count_draw(items, chosen)
    if spent >= 1:
        raise OptionError(
            f"this is draw {number} from these items, and together the draws may fail with probability {float(spent):g}, so "
            "that nothing is promised by a choice among them; keep the first draw, or let experts label every item"
        )
    return number, spent, note


def _refuse_unordered(source: object, columns: BatchColumns) -> None:
    """Refuse rows without ids that have no order either."""
    if isinstance(source, SparkTable) and columns.id is None:
        raise OptionError(
            f"{source.source}: rows of Spark have no order by which they could be told apart; name a column of ids "
            "(--id-column)"
        )


def _refuse_pilot(pilot: int, sample: int, columns: BatchColumns) -> None:
    if not 0 <= pilot < max(sample, 1):
        raise OptionError(
            f"the pilot must be 0 to {sample - 1} of the {sample} items of the sample, whose others certify; got {pilot}"
        )
    if not pilot and (columns.group is not None or columns.text is not None):
        raise OptionError("a group or text column is for the score that a pilot trains; name the size of one, pilot=")
    if columns.text is not None:
        text_embedding()


def _count_draw(items: BatchItems, chosen: list[float | int | str]) -> tuple[int, Fraction, Callable[[], None]]:
    """Return a draw's number among those from the same items, the level that these spend together, and what notes it.

    The same draw again is none: it has the same sample.
    """
    draws = _read_draws()
    same = [entry for entry in draws if _are_shared(entry, items)]
    again = [place for place, entry in enumerate(same) if [entry["digest"], entry["chosen"]] == [items.digest, chosen]]
    earlier = same[: again[0]] if again else same
    spent = sum(
        (as_fraction(entry["chosen"][1], name="level") for entry in earlier), as_fraction(chosen[1], name="level")
    )

    def note() -> None:
        if again:
            return
        _write_draws([*draws, {"digest": items.digest, "chosen": chosen, "marks": items.marks}])

    return len(earlier) + 1, spent, note


def _write_draws(draws: Sequence[dict[str, Any]]) -> None:
    folder = user_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error}); draws are noted there") from error
    write_text(folder / DRAWS_FILE, json.dumps({"draws": draws}) + "\n")


def _read_draws() -> list[dict[str, Any]]:
    path = user_folder() / DRAWS_FILE
    try:
        entries: list[Any] = as_object(json.loads(path.read_bytes())).get("draws") or []
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: the record of draws cannot be read ({error}); restore it") from error
    return [entry for entry in map(as_object, entries) if {"digest", "chosen", "marks"} <= entry.keys()]


def _are_shared(entry: dict[str, Any], items: BatchItems) -> bool:
    """Tell whether an earlier draw was from these items, or from a good part of them."""
    if entry["digest"] == items.digest:
        return True
    pairs = product(items.marks.values(), entry["marks"].values())  # what is an id may be called otherwise
    for marks, earlier in pairs:
        last = min(marks[-1], earlier[-1])  # below it both lists are whole
        ours, theirs = ({mark for mark in some if mark <= last} for some in (marks, earlier))
        if _SHARED * len(ours & theirs) >= max(min(len(ours), len(theirs)), 1):
            return True
    return False


# --- The folder of a batch ---


TERMS, SAMPLE, CERTIFICATE = "batch.json", "sample.csv", "certificate.json"
KEPT, TODO, LABELS, FIGURE = "kept.csv", "todo.csv", "labels.csv", "figure.svg"
_HASHES: Final = "rows.npy"
_EXPERT, _RIGHT, _UNDECIDED = "expert", "right", "?"
_WRITTEN: Final = frozenset({"row", _EXPERT, _RIGHT, "label", "by"})
"""Columns of the files beside those of the table, in whichever case."""
_UNSHOWN: Final = _WRITTEN - {"label", "by"}
_TRUTHS: Final = {"1": 1.0, "true": 1.0, "yes": 1.0, "0": 0.0, "false": 0.0, "no": 0.0}
_FEW: Final = 3
_MOST_LABELS: Final = 1000
"""Of more different labels, or more than half as many as items, it is not known what experts may write."""
_MOST_COMPARED: Final = 100_000
"""More different labels are compared exactly, without a look at whether case tells any of them apart."""
LabelComparison = Callable[[str, str], bool]
BatchProgress = Callable[[str], None]


def same_label(answer: str, expert: str) -> bool:
    """Tell whether two labels are the same but for case and white space around words."""
    return _plain(answer) == _plain(expert)


def exactly_same_label(answer: str, expert: str) -> bool:
    """Tell whether two labels are the same but for white space around them."""
    return answer.strip() == expert.strip()


def _plain(label: str) -> str:
    return " ".join(label.casefold().split())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filled:
    """What experts wrote into a file.

    Attributes:
        expert: their label of each item; "" where there is none yet, "?" where nobody could say.
        right: whether the machine's label is right, where they said so; NaN elsewhere.
    """

    expert: list[str]
    right: Floats

    @property
    def empty(self) -> Bools:
        """Which items have no verdict yet."""
        return np.array([not label for label in self.expert], np.bool_) & np.isnan(self.right)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnBatch:
    """A table of items with the sample that experts label.

    Attributes:
        source: the table.
        terms: what was fixed before the draw.
        items: what the table says.
        draw: the sample.
    """

    source: object
    terms: BatchTerms
    items: BatchItems = field(repr=False)
    draw: BatchDraw = field(repr=False)
    _read_labels: dict[str, tuple[list[str], bool]] = field(default_factory=dict, init=False, repr=False)

    @property
    def rows(self) -> Integers:
        """The items drawn, counted from 0, in the order of the draw."""
        return self.draw.rows

    def labels(self, wrong: Sequence[bool | None] | ArrayLike) -> BatchLabels:
        """Return the batch with verdicts on the items drawn, for `verify`; see `certify_batch`."""
        verdicts, pilot = _verdicts(wrong, self.draw), self.draw.pilot
        risk, learned = (
            learned_risk(self.items, self.rows[:pilot], verdicts[:pilot]) if pilot else (self.items.risk, ())
        )
        return BatchLabels(
            risk=risk,
            labelled=self.items.labelled,
            draw=self.draw,
            wrong=verdicts,
            names=self.items.names,
            learned=learned,
        )

    def certify(self, wrong: Sequence[bool | None] | ArrayLike) -> Certificate:
        """Certify which machine labels may be kept, from verdicts on the items drawn; see `certify_batch`."""
        return certify_labels(self.labels(wrong))

    def comparison(self) -> LabelComparison:
        """Return how labels are compared: without case and white space, unless labels of the table differ in nothing else.

        Labels of the machine are held against each other, and so are those that the table has of experts.
        """
        names = filter(None, (self.terms.columns.answer, self.terms.columns.truth))
        return same_label if all(self._labels_of(name)[1] for name in names) else exactly_same_label

    def _labels_of(self, name: str) -> tuple[list[str], bool]:
        """Return the first different labels of a column, sorted, and whether all remain different without case."""
        if name not in self._read_labels:
            with open_items(self.source) as table:
                labels = table.distinct_texts(name, _MOST_COMPARED)
            exact = {label.strip() for label in labels}
            apart = len(labels) <= _MOST_COMPARED and len({_plain(label) for label in exact}) == len(exact)
            self._read_labels[name] = labels[: _MOST_LABELS + 1], apart
        return self._read_labels[name]

    def labels_of_machine(self, most: int) -> list[str]:
        """Return the different labels of the machine, sorted; one more than `most` (at most 1000) if there are more."""
        return [label for label in self._labels_of(self.terms.columns.answer)[0] if label.strip()][: most + 1]

    def unknown_labels(self, given: Iterable[str], known: Iterable[str] = ()) -> Counter[str]:
        """Return how often experts gave a label that the table never has, nor is known; nothing if labels are free text."""
        columns, most = self.terms.columns, min(_MOST_LABELS, self.terms.items // 2)
        labels = [label for name in filter(None, (columns.answer, columns.truth)) for label in self._labels_of(name)[0]]
        if len(labels) > most:
            return Counter()
        plain = self._plainly(None)
        usual = {plain(label) for label in (*labels, *known, "", _UNDECIDED)}
        return Counter(label for label in given if plain(label) not in usual)

    def never_machine(self, given: Sequence[str]) -> list[str]:
        """Return two labels, one of experts and one of the machine, if the machine never gives any label of experts."""
        plain, own = self._plainly(None), self.labels_of_machine(_MOST_LABELS)
        said = [label for label in given if label not in ("", _UNDECIDED)]
        return [said[0], own[0]] if said and own and not {*map(plain, said)} & {*map(plain, own)} else []

    def _plainly(self, same: LabelComparison | None) -> Callable[[str], str]:
        """Return what makes labels equal that are the same."""
        return _plain if (same or self.comparison()) is same_label else str.strip

    def check_folder(self, folder: str | Path) -> None:
        """Refuse a folder that holds another draw, or cannot be written to."""
        folder = Path(folder)
        if (folder / TERMS).exists():
            if not _same_draw(_read_terms(folder), self.terms):
                raise OutputError(f"{folder}: holds another draw; name a new folder")
            return
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise OutputError(f"{folder}: cannot be written to; name another folder")

    def write(self, folder: str | Path, *, show_answers: bool = False) -> None:
        """Write the sample for experts to label, and what was fixed before they did, into a new folder.

        The folder of this same draw stays as it is.

        Args:
            folder: the folder.
            show_answers: show experts the machine's labels, which may sway them.
        """
        folder, table = Path(folder), self.terms.table
        self.check_folder(folder)
        if (folder / TERMS).exists():
            return  # labelling may have begun
        new_folder(folder)
        terms = msgspec.structs.replace(self.terms, table=None if table is None else os.path.relpath(table, folder))
        with open_items(self.source) as reader:
            names = self.terms.columns
            shown = _shown(reader, names, show_answers=show_answers)
            cells = reader.some_rows(self.rows, [*shown, *([] if names.truth is None else [names.truth])])
        truths = [""] * len(cells) if names.truth is None else [row.pop() or "" for row in cells]
        lines = [
            [str(number + 1), *(cell or "" for cell in row), truth]
            for number, row, truth in zip(self.rows.tolist(), cells, truths, strict=True)
        ]
        buffer = io.BytesIO()
        np.save(buffer, self.items.hashes)
        (folder / _HASHES).write_bytes(buffer.getvalue())
        write_text(folder / SAMPLE, _as_csv(["row", *shown, _EXPERT], lines))
        _write_terms(folder, terms)

    def read_sample(self, folder: str | Path, *, same: LabelComparison | None = None) -> tuple[Filled, Floats]:
        """Return what experts wrote about the items drawn, and whether each machine label is wrong.

        Args:
            folder: of the batch.
            same: whether a machine label and an expert's are the same; by default `comparison`.

        Raises:
            ScoreLogError: the file is not as it was written, or the pilot is not labelled as a whole, or its verdicts are
                others than those of the first certificate.
        """
        filled, pilot, same = self._read(Path(folder) / SAMPLE, self.rows), self.draw.pilot, same or self.comparison()
        if filled.empty[:pilot].any():
            raise ScoreLogError(
                f"{Path(folder) / SAMPLE}: {int(filled.empty[:pilot].sum())} of the first {pilot} items, the pilot, have no "
                f"label yet; fill in column '{_EXPERT}', with {_UNDECIDED} where nobody can say: the score is learned from "
                "all of them at once"
            )
        with open_items(self.source) as table:
            answers = table.some_rows(self.rows, [self.terms.columns.answer])
        self._refuse_contradictions(Path(folder) / SAMPLE, filled, [answer or "" for (answer,) in answers], same)
        wrong = np.array(
            [
                _wrong(answer or "", expert, right, same)
                for (answer,), expert, right in zip(answers, filled.expert, filled.right.tolist(), strict=True)
            ]
        )
        terms = _read_terms(Path(folder))
        fixed = terms.pilot_verdicts or next((entry.get("pilot") for entry in _noted(terms, _read_draws())), None)
        if fixed is not None and _digest_of_verdicts(wrong[:pilot]) != fixed:
            raise ScoreLogError(
                f"{Path(folder) / SAMPLE}: verdicts on the first {pilot} items, the pilot, were changed after the first "
                "certificate; restore them: the score is learned from them, and must not be fitted to what the others say"
            )
        return filled, wrong

    def _refuse_contradictions(self, path: Path, filled: Filled, answers: Sequence[str], same: LabelComparison) -> None:
        """Refuse verdicts that say right beside another label than the machine's, or wrong beside the same."""
        for row, answer, expert, right in zip(self.rows, answers, filled.expert, filled.right.tolist(), strict=True):
            if right != right or expert in ("", _UNDECIDED):
                continue
            agrees = same(answer, expert)
            if right < 1 if agrees else right == 1 and not self.draw.graded:
                raise ScoreLogError(
                    f"{path}: {self.named([row])} has {right:g} in column '{_RIGHT}' (1 is yes, 0 is no), and in "
                    f"'{_EXPERT}' {'the machine' if agrees else 'another label than the machine'}'s; correct one of them, "
                    "or leave it empty"
                )

    def _refuse_empty(self, path: Path, filled: Filled, rows: Integers) -> None:
        if filled.empty.any():
            raise ScoreLogError(
                f"{path}: {int(filled.empty.sum())} of {len(rows)} items have no label yet, such as "
                f"{self.named(rows[filled.empty])}; fill in column '{_EXPERT}', with {_UNDECIDED} where nobody can say"
            )

    def named(self, rows: Sequence[int] | Integers) -> str:
        """Return what some items are called, the first few: by their ids, or the numbers of their rows."""
        some, name = np.array(rows[:_FEW], dtype=np.int64), self.terms.columns.id
        if name is None:
            return ", ".join(f"row {row + 1}" for row in some.tolist())
        with open_items(self.source) as table:
            return ", ".join(str(id) for (id,) in table.some_rows(some, [name]))

    def write_certified(
        self, folder: str | Path, certificate: Certificate, *, same: LabelComparison | None = None,
        secret: ProjectSecret | None = None, tell: BatchProgress = lambda _: None,
    ) -> None:  # fmt: skip
        """Write a certificate with its figure, the labels that are kept, and what is left to experts.

        Labels that experts have given to what was left before stay. The verdicts on a pilot are fixed from the first on.

        Args:
            folder: of the batch.
            certificate: from its labels.
            same: as for `read_sample`.
            secret: the project's secret.
            tell: is told what is being written.
        """
        folder, rule = Path(folder), certificate.rule
        if not isinstance(rule, Cutoff):
            raise OptionError("this is not the certificate of a batch")
        wrong = self.read_sample(folder, same=same)[1]
        _fix_pilot(folder, wrong[: self.draw.pilot], secret or ProjectSecret.find())
        kept = self.labels(wrong).kept(rule)
        left = ~kept
        left[self.rows] = False
        names = self.terms.columns
        certificate.save(folder / CERTIFICATE)
        write_text(
            folder / FIGURE, batch_figure(certificate).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        )
        with open_items(self.source) as table:
            ids = [] if names.id is None else [names.id]
            tell(f"writing {KEPT}: {rule.kept} items")
            table.copy_rows(folder / KEPT, kept, [*ids, names.answer], {})
            tell(f"writing {TODO}: {int(left.sum())} items")
            given, beside = "''" if names.truth is None else f"coalesce({quoted(names.truth)}::varchar, '')", None
            if (earlier := self._earlier(folder)) is not None:
                given, beside = f"coalesce(nullif(given, ''), {given})", {"given": earlier}
            table.copy_rows(folder / TODO, left, _shown(table, names), {_EXPERT: given}, beside)

    def finish(
        self, folder: str | Path, certificate: Certificate, *, same: LabelComparison | None = None
    ) -> dict[str, int]:
        """Write the label of every item, and who gave it; return how many each gave.

        Args:
            folder: of the batch.
            certificate: what `certify` gave.
            same: as for `read_sample`.

        Raises:
            ScoreLogError: experts have not labelled all that was left to them.
            CertificateError: the certificate is not that of the sample's verdicts.
        """
        folder, rule, n = Path(folder), certificate.rule, self.terms.items
        if not isinstance(rule, Cutoff):
            raise OptionError("this is not the certificate of a batch")
        sampled, wrong = self.read_sample(folder, same=same)
        self._refuse_empty(folder / SAMPLE, sampled, self.rows)
        labels = self.labels(wrong)
        now = certify_labels(labels)
        if (now.rule, now.promise, now.evidence) != (rule, certificate.promise, certificate.evidence):
            raise CertificateError(
                f"{folder / CERTIFICATE}: the verdicts in {SAMPLE} are others than those of the certificate; run `arbitrage "
                f"batch certify {folder}` again"
            )
        kept = labels.kept(rule)
        rest = ~kept
        rest[self.rows] = False
        left = np.flatnonzero(rest)
        todo = self._read(folder / TODO, left)
        self._refuse_empty(folder / TODO, todo, left)
        expert = np.full(n, None, dtype=object)
        confirmed = np.zeros(n, np.bool_)
        plain = self._plainly(same)
        spelling: dict[str, str | None] = {plain(label): label for label in self.labels_of_machine(_MOST_LABELS)}
        spelling |= {"": None, _UNDECIDED: None}
        for rows, filled in ((self.rows, sampled), (left, todo)):
            expert[rows] = [spelling.get(plain(label), label) for label in filled.expert]
            confirmed[rows] = filled.right == 1
        answer = f"source.{quoted(self.terms.columns.answer)}::varchar"
        label = f"case when kept or (expert is null and confirmed) then {answer} else expert end"
        by = "case when kept then 'machine' when expert is null and not confirmed then 'undecided' else 'expert' end"
        ids = [] if self.terms.columns.id is None else [self.terms.columns.id]
        with open_items(self.source) as table:
            beside = {"kept": kept, "expert": expert, "confirmed": confirmed}
            table.copy_rows(folder / LABELS, np.ones(n, np.bool_), ids, {"label": label, "by": by}, beside)
        undecided = int(sum(text is None for text in expert[~kept & ~confirmed]))
        return {"machine": int(kept.sum()), "expert": n - int(kept.sum()) - undecided, "undecided": undecided}

    def unlabelled(self, folder: Path) -> tuple[dict[int, str], dict[int, str]]:
        """Return what experts see of the items that have no label yet, by key: of the sample, and of what is left to them.

        It follows from an item's own row, and is never the machine's label.
        """
        sample, left = (self._unlabelled(folder / name) for name in (SAMPLE, TODO))
        return sample, left

    def _unlabelled(self, path: Path) -> dict[int, str]:
        if not _has_items(path):
            return {}
        with Table(path) as table:
            keys, shown = self._keys(table).tolist(), _shown(table, self.terms.columns)
            columns = [_texts_of(table, name) for name in shown]
            empty = _filled(path, table, graded=self.draw.graded).empty.tolist()
        return {
            key: "\n".join(f"{name}: {cell}" for name, cell in zip(shown, cells, strict=True) if cell)
            for key, blank, *cells in zip(keys, empty, *columns, strict=True)
            if blank
        }

    def fill_in(self, folder: Path, labels: Mapping[int, str]) -> None:
        """Write labels, by key, into the files of experts; what they wrote there stays."""
        for path in filter(_has_items, (folder / SAMPLE, folder / TODO)):
            with Table(path) as table:
                keys, empty = self._keys(table).tolist(), _filled(path, table, graded=self.draw.graded).empty.tolist()
                given = [labels.get(key, "") if blank else "" for key, blank in zip(keys, empty, strict=True)]
                if any(given):
                    others = [name for name in table.types if name not in ("row", _EXPERT)]
                    label = f"coalesce(nullif(given, ''), source.{_EXPERT})" if _EXPERT in table.types else "given"
                    beside = {"row": _texts_of(table, "row"), "given": given}
                    columns = {name: np.array(cells, dtype=object) for name, cells in beside.items()}
                    table.copy_rows(path, np.ones(table.rows, np.bool_), others, {_EXPERT: label}, columns)

    def _earlier(self, folder: Path) -> NDArray[np.object_] | None:
        """Return the labels in an earlier list of what is left to experts, by item; None if there are none."""
        if not _has_items(folder / TODO):
            return None
        with Table(folder / TODO) as table:
            labels = table.texts(_EXPERT).tolist()
            if not any(labels):
                return None
            keys = self._keys(table)
            rows = self._numbered(table, keys)
            if rows is None:  # the table's rows, or the file's numbers, are not as they were
                rows = _places_of(keys, self._own_keys(np.arange(self.terms.items)))
        given = np.full(self.terms.items, "", dtype=object)
        given[rows[rows >= 0]] = np.array(labels, dtype=object)[rows >= 0]
        return given

    def _numbered(self, table: ColumnReader, keys: Words) -> Integers | None:
        """Return the items that a file's column `row` names, without a search; None if one is another than its id says."""
        if "row" not in table.types:
            return None
        try:
            numbers = np.nan_to_num(table.scalars("row"))
        except ScoreLogError:  # words, where ids tell rows apart
            return None
        if not ((numbers >= 1) & (numbers <= self.terms.items)).all():
            return None
        rows = numbers.astype(np.int64) - 1
        return rows if (self._own_keys(rows) == keys).all() else None

    def _keys(self, table: ColumnReader) -> Words:
        """Return what tells the rows of a file apart that experts fill in: ids, or the numbers of rows."""
        name = self.terms.columns.id or "row"
        if name not in table.types or not {_EXPERT, _RIGHT} & table.types.keys():
            missing = _EXPERT if name in table.types else name
            raise ScoreLogError(
                f"{table.source}: there is no column '{missing}'; fill in the file as it was written, with all columns"
            )
        if self.terms.columns.id is not None:
            return cell_hashes(table.text_bytes(self.terms.columns.id))
        numbers = table.scalars("row")
        if not (numbers == np.floor(numbers)).all() or (numbers < 1).any():
            raise ScoreLogError(
                f"{table.source}: column 'row' must number every row; restore the numbers that were written"
            )
        return numbers.astype(np.uint64)

    def _own_keys(self, rows: Integers) -> Words:
        """Return the same of items of the table."""
        return (rows + 1).astype(np.uint64) if self.items.ids is None else self.items.ids[rows]

    def _read(self, path: Path, rows: Integers) -> Filled:
        """Read a file that experts filled in; refuse one whose rows are not those that were given to them."""
        if not len(rows):
            return Filled(expert=[], right=np.zeros(0))
        name = self.terms.columns.id or "row"
        with Table(path) as table:
            places, said = _places_of(self._keys(table), self._own_keys(rows)), table.texts(name)
            filled = _filled(path, table, graded=self.draw.graded)
        counts = np.bincount(places[places >= 0], minlength=len(rows))
        problems = {
            "not given to experts: edited, or another draw's or table's": said[places < 0].tolist(),
            "twice": list(dict.fromkeys(said[(places >= 0) & (counts[places] > 1)].tolist())),
        }
        absent = rows[counts == 0]
        if len(absent):
            problems["missing"] = [self.named(absent), *[""] * (len(absent) - 1)]
        for problem, which in problems.items():
            if which:
                some = ", ".join(filter(None, which[:_FEW]))
                raise ScoreLogError(
                    f"{path}: {n_rows(len(which))} {problem}, such as {some} (column '{name}'); keep the "
                    "rows as they were written, and leave the label empty where there is none yet"
                )
        order = np.argsort(places)
        return Filled(expert=[filled.expert[place] for place in order.tolist()], right=filled.right[order])


def _places_of(keys: Words, rows: Words) -> Integers:
    """Return the place of each key among those of some rows; -1 if it is not among them."""
    order = np.argsort(rows, kind="stable")
    places = order[np.minimum(np.searchsorted(rows, keys, sorter=order), len(rows) - 1)] if len(rows) else keys
    return np.where(rows[places] == keys, places, -1) if len(rows) else np.full(len(keys), -1)


def open_batch(folder: str | Path, source: object = None, *, secret: ProjectSecret | None = None) -> DrawnBatch:
    """Open the folder of a batch, and check that neither its terms nor its table were changed since the draw.

    Args:
        folder: what `DrawnBatch.write` wrote.
        source: the table; by default where it was at the draw.
        secret: the project's secret.

    Raises:
        CertificateError: the terms were changed, or drawn with another secret.
        ScoreLogError: the table was changed; the message says what.
    """
    folder, secret = Path(folder), secret or ProjectSecret.find()
    terms = _read_terms(folder)
    terms.check(secret, str(folder / TERMS))
    source = _place(folder, terms.table) if source is None else source
    with open_items(source) as table:
        items = read_items(table, terms.columns, marked=False, pilot=terms.pilot > 0)
        if items.digest != terms.digest or len(items.risk) != terms.items:
            raise ScoreLogError(
                f"{table.source}: {_what_changed(folder, terms, items)}; restore the table that was drawn from"
            )
    return DrawnBatch(source=source, terms=terms, items=items, draw=terms.drawn(secret, items.names))


def read_labels(folder: str | Path, source: object = None) -> BatchLabels:
    """Return a batch with what experts wrote about its sample, from its folder, for `verify`; see `open_batch`."""
    batch = open_batch(folder, source)
    return batch.labels(batch.read_sample(folder)[1])


def _read_terms(folder: Path) -> BatchTerms:
    try:
        return msgspec.json.decode((folder / TERMS).read_bytes(), type=BatchTerms)
    except OSError as error:
        raise ConfigError(
            f"{folder / TERMS}: cannot be read ({error.strerror}); name the folder of `batch draw`"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder / TERMS}: is damaged ({error}); restore it") from error


def _same_draw(terms: BatchTerms, other: BatchTerms) -> bool:
    """Tell whether two terms are of the same draw, whenever it was asked for and wherever the table is."""
    elsewhere = {"created": "", "table": None, "pilot_verdicts": None, "signature": None}
    return msgspec.structs.replace(terms, **elsewhere) == msgspec.structs.replace(other, **elsewhere)


def _digest_of_verdicts(wrong: Floats) -> str:
    return hashlib.sha256(np.where(np.isnan(wrong), 2.0, wrong).astype("<f8").tobytes()).hexdigest()


def _fix_pilot(folder: Path, wrong: Floats, secret: ProjectSecret) -> None:
    """Note the verdicts on a pilot with the terms of its batch, before the first certificate is written."""
    terms = _read_terms(folder)
    terms.check(secret, str(folder / TERMS))
    if len(wrong) and terms.pilot_verdicts is None:
        digest, draws = _digest_of_verdicts(wrong), _read_draws()
        _write_terms(folder, msgspec.structs.replace(terms, pilot_verdicts=digest).signed(secret))
        for entry in _noted(terms, draws):  # for other folders of the same draw
            entry["pilot"] = digest
            _write_draws(draws)


def _noted(terms: BatchTerms, draws: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Return the notes of a draw; there is none where another user drew."""
    level = float(1 - as_fraction(terms.confidence, name="confidence"))
    chosen = [terms.error, level, terms.sample, terms.secret_id, terms.pilot, terms.graded]
    return (entry for entry in draws if [entry["digest"], entry["chosen"]] == [terms.digest, chosen])


def _write_terms(folder: Path, terms: BatchTerms) -> None:
    document: dict[str, Any] = msgspec.to_builtins(terms)
    write_text(folder / TERMS, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _place(folder: Path, table: str | None) -> str:
    if table is None:
        raise OptionError(
            f"{folder / TERMS}: the items were a frame or a table of Spark; pass it again, source= (--table, with --engine)"
        )
    return os.path.normpath(folder / table)


def _what_changed(folder: Path, terms: BatchTerms, items: BatchItems) -> str:
    """Return how a table differs from the one that was drawn from."""
    n, columns = len(items.risk), [name for name, digest in items.columns.items() if terms.digests.get(name) != digest]
    where = f"columns {', '.join(columns)}" if columns else "which label belongs to which item"
    if n != terms.items:
        return f"there {'is' if n == 1 else 'are'} {n_rows(n)}, and there were {terms.items} at the draw"
    try:
        before = np.load(folder / _HASHES)
    except (OSError, ValueError):
        return f"it was changed since the draw ({where})"
    changed = np.flatnonzero(~np.isin(items.hashes, before)) if before.dtype == np.uint64 else np.zeros(0, np.int64)
    if not len(changed):
        return "its rows are in another order than at the draw, and have no ids by which they could be told apart"
    first = f", the first is row {changed[0] + 1}" if len(changed) else ""
    return f"{n_rows(len(changed), 'was', 'were')} changed since the draw{first} ({where})"


def _shown(table: ColumnReader, names: BatchColumns, *, show_answers: bool = False) -> list[str]:
    """Return the columns that experts see: all but the machine's label, its confidence and what is known of the truth."""
    hidden = {names.confidence, names.truth, *(() if show_answers else (names.answer,))}
    first = [] if names.id is None else [names.id]
    return [
        *first,
        *(name for name in table.types if name not in {*hidden, *first} and name.casefold() not in _UNSHOWN),
    ]


def _texts_of(table: ColumnReader, name: str) -> list[str]:
    """Return a column as texts without white space around them; empty ones if there is none."""
    return [str(text).strip() for text in table.texts(name).tolist()] if name in table.types else [""] * table.rows


def _has_items(path: Path) -> bool:
    """Tell whether there is a file of experts with a line after its header."""
    if not path.exists():
        return False
    with path.open("rb") as stream:
        return bool(next(stream, b"")) and bool(next(stream, b""))


def _filled(path: Path, table: ColumnReader, *, graded: bool) -> Filled:
    """Return what experts wrote, row by row of a file."""
    given = _RIGHT in table.types
    right = _truths(path, table.texts(_RIGHT).tolist(), graded=graded) if given else np.full(table.rows, np.nan)
    return Filled(expert=_texts_of(table, _EXPERT), right=right)


def _wrong(answer: str, expert: str, right: float, same: LabelComparison) -> float:
    if right == right:
        return 1 - right
    return _UNKNOWN if expert in ("", _UNDECIDED) else float(not same(answer, expert))


def _truths(path: Path, texts: Sequence[str], *, graded: bool) -> Floats:
    """Return yes and no as 1 and 0, grades between them if losses are graded, and nothing as NaN."""
    truths = [_truth(text.strip().lower(), graded=graded) for text in texts]
    for row, truth in enumerate(truths):
        if truth is None:
            may = "yes, no or a grade from 0 to 1" if graded else "yes or no"
            raise ScoreLogError(
                f"{path}: row {row + 1}, column '{_RIGHT}': {texts[row]!r:.40} is not {may}; correct it"
            )
    return np.array(truths, dtype=np.float64)


def _truth(text: str, *, graded: bool) -> float | None:
    if text in {"", _UNDECIDED}:
        return np.nan
    if graded and text not in _TRUTHS:
        try:
            grade = float(text)
        except ValueError:
            return None
        return grade if 0 <= grade <= 1 else None
    return _TRUTHS.get(text)


def _as_csv(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


# --- Planning ---


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanRow:
    """What a sample of this size may save.

    Attributes:
        sample: items that experts label to certify.
        limit: wrong ones among them below the cutoff; -1 if the sample is too small.
        saved: the share of all items whose machine label is kept, if confidences are what they say.
        saved_if_twice: the same if twice as many labels are wrong as they say.
    """

    sample: int
    limit: int
    saved: float
    saved_if_twice: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How many items experts should label.

    Attributes:
        items: how many there are.
        error, confidence: of the promise.
        best: the size of the sample, among those shown, that saves most; None if none saves anything.
        rows: what several sizes may save.
    """

    items: int
    error: float
    confidence: float
    best: int | None
    rows: tuple[BatchPlanRow, ...]


def plan_batch(
    source: object,
    *,
    error: Number,
    confidence: Number = 0.95,
    samples: Sequence[int] = (),
    pilot: int = 0,
    columns: BatchColumns | None = None,
) -> BatchPlan:
    """Show what samples of several sizes may save, by the confidences of the machine, which may be wrong.

    Nothing is drawn. The promise does not rest on the confidences; how much is saved does.

    Args:
        source: as for `draw_batch`.
        error: the largest share of all items that may be kept with a wrong machine label.
        confidence: the probability of the promise.
        samples: sizes to show; by default some that are usual for as many items.
        pilot: how many of the items of a sample train a score; what that gains cannot be foreseen, and is not in the table.
        columns: as for `draw_batch`.

    Raises:
        OptionError: confidences are no probabilities, so that nothing can be expected from them.
    """
    share, level = check_shares(error, confidence)
    with open_items(source) as table:
        columns = columns or BatchColumns(id="id" if "id" in table.types else None)
        items = read_items(table, columns, marked=False)
        _refuse_same_ids(table, columns.id, items)
        if items.labelled.any() and items.risk[items.labelled].min() < 0:
            highest = 1 - float(items.risk[items.labelled].min())
            raise OptionError(
                f"{table.source}: confidences go up to {highest:g}, so they are no probabilities and nothing can be "
                "expected from them; write 87 as 87% or 0.87, or draw without a plan"
            )
    n, risk = len(items.risk), np.sort(items.risk[items.labelled])
    sizes = sorted(dict.fromkeys(samples)) or [size for size in _usual_samples(n) if pilot < size < n]
    if not sizes or not all(pilot < size <= n for size in sizes) or pilot < 0:
        beyond = f", more than the {pilot} of the pilot" if pilot else ""
        raise OptionError(f"a sample has 1 to {n} items{beyond}; got {list(sizes)}")
    expected = [np.cumsum(np.minimum(times * risk, 1.0)) for times in (1, 2)]
    rows = list[BatchPlanRow]()
    for size in sizes:
        limit = hypergeometric_limit(n - pilot, wrong_allowed(float(share), n), size - pilot, level)
        saved, twice = (_saved(wrong, size, limit, wrong_allowed(float(share), n), n, pilot) for wrong in expected)
        rows.append(BatchPlanRow(sample=size, limit=limit, saved=saved, saved_if_twice=twice))
    best = max(rows, key=lambda row: row.saved + row.saved_if_twice)
    size = best.sample if best.saved + best.saved_if_twice else None
    return BatchPlan(items=n, error=float(share), confidence=float(1 - level), best=size, rows=tuple(rows))


def _usual_samples(n: int) -> list[int]:
    """Return 1, 2 and 5 times each power of ten, and a tenth, fifth and third of all."""
    return sorted({1, *(lead * 10**k for k in range(2, 8) for lead in (1, 2, 3, 5)), n // 10, n // 5, n // 3} - {0, 1})


def _saved(wrong: Floats, sample: int, limit: int, allowed: int, n: int, pilot: int) -> float:
    """Return the share of items kept: up to where the sample is expected to hold one wrong item more than the limit."""
    before = int(np.searchsorted(wrong, (limit + 1) * n / (sample - pilot))) if limit >= 0 else 0
    return max(before * (1 - sample / n), min(allowed, n - sample)) / n
