"""The learned score of a certificate: what it is learned from, texts as vectors, and the rule they make."""

import hashlib
import importlib
import importlib.util
import io
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.chains import normal_answer
from conformal_arbitrage.core.exact import SINGLE_DIGITS, Bools, Floats, Integers, n_rows, row_argmax
from conformal_arbitrage.core.features import (
    ANSWERS,
    MARGIN,
    STRENGTHS,
    VERSION,
    FeatureRows,
    FeatureSet,
    LearnedRule,
    RidgeFits,
    feature_matrix,
    fit_ridges,
    learned_rule,
    query_features,
)
from conformal_arbitrage.errors import CertificateError, OptionError
from conformal_arbitrage.scorelog.fitness import column_texts
from conformal_arbitrage.types import LearnedUse

if TYPE_CHECKING:
    from conformal_arbitrage.scorelog.log import ScoreLog

# --- Texts as vectors of fixed length, from a table of token vectors that ships inside a package ---


WIDTH = 48
"""Columns of a vector."""
_SCALE = 6.0
"""Times unit length, so that the penalty of a learned score weighs a text like its other features."""
_DECIMALS, _AXIS_DECIMALS = 6, 4
"""Vectors and axes are rounded to these, so that the noise of another processor's arithmetic does not show."""
_MOST_CHARACTERS = 20_000
"""Of a text; what follows is not read."""
_PACKAGE = "wordllama"
_TABLE, _TOKENIZER = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextEmbedding:
    """Turns texts into vectors.

    Attributes:
        table: tokens x dimensions.
        axes: dimensions x `WIDTH`.
        tokenizer: has `encode(text, add_special_tokens=)`, whose result has `ids`.
        sha256: digest of the files and the axes.
    """

    table: NDArray[np.float32] = field(repr=False)
    axes: Floats = field(repr=False)
    tokenizer: Any = field(repr=False)
    sha256: str

    def vector(self, text: str) -> list[float]:
        """Return the vector of a text; zeros if it has no tokens."""
        ids: list[int] = self.tokenizer.encode(text[:_MOST_CHARACTERS], add_special_tokens=False).ids
        total: Floats = np.add.reduce(self.table[ids], axis=0, dtype=np.float64)
        length = float(np.sqrt((total * total).sum()))
        if length == 0:
            return [0.0] * WIDTH
        return np.round((total / length) @ self.axes * _SCALE, _DECIMALS).tolist()

    def vectors(self, texts: Sequence[str]) -> Floats:
        """Return the vectors of many texts, texts x columns; each is computed as `vector` does, to the bit."""
        distinct = {text: self.vector(text) for text in dict.fromkeys(texts)}
        return np.array([distinct[text] for text in texts]).reshape(len(texts), WIDTH)


@cache
def text_embedding() -> TextEmbedding:
    """Return the embedding of the extra `text`; it is read once.

    Raises:
        OptionError: the extra is not installed, or its files are not those that this release knows.
    """
    spec = importlib.util.find_spec(_PACKAGE)  # without importing it: that would bring HTTP clients along
    if spec is None or spec.origin is None:
        raise OptionError(
            f"texts as features need the packages {_PACKAGE} and tokenizers; run `pip install 'conformal-arbitrage[text]'`"
        )
    folder = Path(spec.origin).parent
    try:
        weights, words = (folder / _TABLE).read_bytes(), (folder / _TOKENIZER).read_bytes()
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_buffer(words)
        table = _read_table(weights)
    except (OSError, ImportError, ValueError, KeyError) as error:
        raise OptionError(
            f"texts as features need {_PACKAGE} with {_TABLE}, and tokenizers ({error}); run `pip install "
            "'conformal-arbitrage[text]'`"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    axes = _principal_axes(table)
    digest = hashlib.sha256()
    for part in (weights, words, axes.astype("<f8").tobytes()):
        digest.update(hashlib.sha256(part).digest())
    return TextEmbedding(table=table, axes=axes, tokenizer=tokenizer, sha256=digest.hexdigest())


def _read_table(content: bytes) -> NDArray[np.float32]:
    """Return the only array of a safetensors file, of half precision."""
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    [described] = [entry for name, entry in header.items() if name != "__metadata__"]
    if described["dtype"] != "F16":
        raise ValueError(f"its numbers are {described['dtype']}, not F16")
    begin, end = described["data_offsets"]
    flat = np.frombuffer(content[start + begin : start + end], dtype="<f2")
    return flat.reshape(described["shape"]).astype(np.float32)


def _principal_axes(table: NDArray[np.float32]) -> Floats:
    """Return the axes along which the tokens vary most, the first one first, each with its largest entry positive."""
    centred = table.astype(np.float64)
    centred -= centred.mean(axis=0)
    _, axes = np.linalg.eigh(centred.T @ centred)
    axes = axes[:, ::-1][:, :WIDTH]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None, :], axis=0)
    return np.round(axes * np.sign(largest), _AXIS_DECIMALS).astype(np.float64)


# --- The learned score of a certificate ---


def answer_place(answer: str | None) -> int:
    """Return the place of an answer among the columns that answers are hashed to; -1 if there is none.

    The hash knows no log: a vocabulary, or a least count, taken from the logged rows alone would treat the query otherwise
    than them, which breaks any budget.
    """
    if not answer or not (normal := normal_answer(answer)):
        return -1
    return int.from_bytes(hashlib.sha256(b"answer v1\0" + normal.encode("utf-8", "replace")).digest()[:8]) % ANSWERS


def logged_answers(log: "ScoreLog") -> list[str] | None:
    """Return what the Primary answered in every row by the log's columns, empty where unknown; None without them."""
    named = [answers for name in ("answer", "primary_answer") if (answers := column_texts(log, name)) is not None]
    return named[0] if named else None


def answers_of(log: "ScoreLog") -> list[str] | None:
    """Return what the Primary answered in every row, empty where unknown; None if the log does not say.

    It is the column `answer`, or `primary_answer` as importers and `collect` write it; of menus, the top action's text.
    """
    answers = logged_answers(log)
    if answers is not None or log.actions is None or log.is_router:
        return answers
    return [str(text) for text in log.actions[log.offsets[:-1] + row_argmax(log.primary, log.offsets)].tolist()]


ScoreKind = Literal["margin", "auto", "learned"]
"""What queries are ordered by: the margin, a learned score, or whichever of them keeps most rows."""
FeatureName = Literal["margin", "position", "menu", "group", "tokens", "text", "answer"]
FEWEST_ROWS, MOST_ROWS = 50, 50_000
_KINDS = {
    "margin": "f", "u": "f", "tokens": "f", "scores": "f", "text": "f", "top": "i", "group": "i", "loss": "i", "names": "U",
    "answer": "i",
}  # fmt: skip
_TOLERANCE = 1e-9
_LARGEST_FILE = 2**28
"""Bytes of all arrays together: a small file may be compressed from a giant one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a score is learned from besides the margin and the position of the top action.

    Attributes:
        groups: use the log's `group` column, if it has one; each query then names its group.
        tokens: use the Primary's output tokens, if the log records them.
        menu_size: the number of actions of every query, as declared: each action's probability is then a feature, and a
            query of another size is deferred.
        group_source: what names the group of a live query, such as "metadata.subject"; whoever decides live must name the
            same.
        text: use the log's `context` as a vector of fixed length; needs the extra `text`.
        answers: use what the Primary answered: the log's column `answer` or `primary_answer` or, of menus, the text of the
            top action. None uses such a column if there is one. Scores learned without answers stay candidates.
    """

    groups: bool = True
    tokens: bool = True
    menu_size: int | None = None
    group_source: str | None = None
    text: bool = False
    answers: bool | None = None

    def __post_init__(self) -> None:
        """Refuse a menu that is too large."""
        FeatureSet(menu_size=self.menu_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTerms:
    """What a certificate says about its learned score.

    Attributes:
        features: what it is learned from: "margin" and "position" always, "menu", "group", "tokens", "text" and "answer" if
            used.
        version: of the features' transforms.
        menu_size: the declared number of actions; None if menus may differ.
        group_source: what names the group of a live query; None if that has no name, or groups are not used.
        penalties: the strengths of the ridge penalty that are tried.
        rows: rows that the fits hold; rows that are always deferred are not among them.
        columns: number of features.
        rounded_rows: rows whose loss was neither 0 nor the bound, and was rounded by a draw.
        missing: rows of the log that lack a feature, by its name.
        deferred: share of the log's rows that go to the Guardian if each is decided by the others, counted exactly for rows
            with a loss or a gain, and closely for the others.
        sha256: digest of the file that holds the arrays.
        text_sha256: digest of what turns a text into a vector; None if texts are not used.
    """

    features: tuple[FeatureName, ...]
    version: int
    menu_size: int | None
    group_source: str | None
    penalties: tuple[float, ...]
    rows: int
    columns: int
    rounded_rows: int
    missing: dict[str, int]
    deferred: float
    sha256: str
    text_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRows:
    """The rows that a score is learned from.

    Attributes:
        rows: what their features are computed from.
        names: the groups that have a column of their own.
        menu_size: as declared.
        loss: -1, 0 or 1 of each, in units of the bound.
        u: the draw of each.
        net: whether losses may be negative, though none may be.
    """

    rows: FeatureRows
    names: tuple[str, ...]
    menu_size: int | None
    loss: Integers
    u: Floats
    net: bool

    @property
    def features(self) -> FeatureSet:
        """Which features there are."""
        tokens, text = self.rows.tokens is not None, WIDTH if self.rows.text is not None else 0
        answers = self.rows.answer is not None
        return FeatureSet(menu_size=self.menu_size, groups=self.names, tokens=tokens, text=text, answers=answers)

    def fits(self) -> list[RidgeFits]:
        """Fit every strength of the penalty to as many features as `FeatureSet.widths` says, fewer first."""
        matrix, margin, features = self.matrix(), self.rows.margin, self.features
        weights = [features.penalties()[:width] for width in features.widths()]
        answer = self.rows.answer if self.net else None
        return [
            fit_ridges(
                matrix[:, : len(weight)],
                weight,
                self.loss,
                self.u,
                margin,
                strengths=STRENGTHS,
                answer=answer,
            )
            for weight in weights
        ]

    def matrix(self) -> Floats:
        """Return the features of every row."""
        return feature_matrix(self.features, self.rows)

    def arrays(self) -> dict[str, Any]:
        """Return the rows as arrays by name."""
        place = {name: k for k, name in enumerate(self.names)}
        group = (
            None if self.rows.group is None else np.array([place.get(name, -1) for name in self.rows.group], np.int32)
        )
        named = {
            "margin": self.rows.margin,
            "top": self.rows.top.astype(np.int32),
            "scores": self.rows.scores,
            "group": group,
            "names": None if self.rows.group is None else np.array(self.names, dtype=np.str_),
            "tokens": self.rows.tokens,
            "text": self.rows.text,
            "answer": None if self.rows.answer is None else self.rows.answer.astype(np.int32),
            "loss": self.loss.astype(np.int8),
            "u": self.u,
        }
        return {name: values for name, values in named.items() if values is not None}


def pack(rows: ScoreRows) -> bytes:
    """Return rows as the content of a .npz file."""
    content = io.BytesIO()
    np.savez_compressed(content, **rows.arrays())
    return content.getvalue()


def unpack(packed: bytes, terms: LearnedTerms, source: str, *, net: bool) -> ScoreRows:
    """Return the rows in a .npz file.

    Args:
        packed: its content.
        terms: of the certificate, which it must agree with.
        source: where it came from, for messages.
        net: whether the certificate's loss is the net loss.

    Raises:
        CertificateError: it was changed, or is not what the certificate describes.
    """
    if hashlib.sha256(packed).hexdigest() != terms.sha256:
        raise CertificateError(
            f"{source}: is not the file that the certificate was made with (its digest is another one); restore it from "
            "where the certificate was made, or calibrate again"
        )
    if terms.version != VERSION or terms.penalties != STRENGTHS:
        raise CertificateError(
            f"{source}: its score was learned by version {terms.version} of the features, and this release computes version "
            f"{VERSION}; calibrate again"
        )
    try:
        arrays = _read_arrays(packed, terms)
        rows = _score_rows(arrays, terms, net=net)
    except (ValueError, KeyError, OSError) as error:
        raise CertificateError(f"{source}: is damaged ({error}); calibrate again") from error
    return rows


def _read_arrays(packed: bytes, terms: LearnedTerms) -> dict[str, Any]:
    """Return the arrays of a file, each of its kind and with one entry per row."""
    import zipfile  # takes 5 ms, which other certificates need not wait for

    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error
    if size > _LARGEST_FILE:
        raise ValueError(f"its arrays would take {size} bytes, more than {_LARGEST_FILE}")
    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    for name, values in arrays.items():
        if _KINDS.get(name) != values.dtype.kind or (name != "names" and len(values) != terms.rows):
            raise ValueError(f"array {name!r} has type {values.dtype} and {n_rows(len(values))}")
        if values.dtype.kind == "f" and name != "tokens" and not np.isfinite(values).all():
            raise ValueError(f"array {name!r} holds a number that is not finite")
    return arrays


def _score_rows(arrays: Mapping[str, Any], terms: LearnedTerms, *, net: bool) -> ScoreRows:
    names = tuple(str(name) for name in arrays["names"]) if "group" in terms.features else ()
    scores = arrays["scores"].reshape(terms.rows, terms.menu_size) if terms.menu_size is not None else None
    if not (arrays["margin"] > 0).all() or not np.isin(arrays["loss"], (-1, 0, 1)).all():
        raise ValueError("a margin is not above 0, or a loss none of -1, 0 and 1")
    rows = FeatureRows(
        margin=arrays["margin"],
        top=arrays["top"].astype(np.int64),
        scores=scores,
        group=None if "group" not in terms.features else _named(arrays["group"], names),
        tokens=arrays["tokens"] if "tokens" in terms.features else None,
        text=arrays["text"].reshape(terms.rows, WIDTH) if "text" in terms.features else None,
        answer=arrays["answer"].astype(np.int64) if "answer" in terms.features else None,
    )
    loss = arrays["loss"].astype(np.int64)
    return ScoreRows(rows=rows, names=names, menu_size=terms.menu_size, loss=loss, u=arrays["u"], net=net)


def _named(places: Integers, names: tuple[str, ...]) -> list[str]:
    texts = (*names, "")
    return [texts[place] for place in places.tolist()]  # -1 is the last


@dataclass(slots=True, kw_only=True, eq=False)
class LearnedScore:
    """A learned score, ready to decide.

    Attributes:
        rows: the rows that it was learned from.
        packed: the same as the content of the file beside the certificate.
        digits: significant decimals of a Primary score, 12 or 6.
        budget: how many losses the rows and a query may have.
        with_margin: whether the margin itself is a candidate.
        floor: a query with a smaller margin is deferred.
    """

    rows: ScoreRows
    packed: bytes = field(repr=False)
    digits: int
    budget: int
    with_margin: bool
    floor: float = 0.0
    _rules: list[LearnedRule] = field(init=False, repr=False, default_factory=list[LearnedRule])
    _features: FeatureSet = field(init=False, repr=False, default=FeatureSet())

    def __post_init__(self) -> None:
        """Note which features there are, since every query asks."""
        self._features = self.rows.features

    def rules(self) -> list[LearnedRule]:
        """Return the fitted rules, those of fewer features first; they are built once."""
        if not self._rules:
            matrix = self.rows.matrix()
            for fits in self.rows.fits():
                margin = self.with_margin and not self._rules
                columns = matrix[:, : len(fits.rotation)]
                self._rules.append(learned_rule(fits, columns, budget=self.budget, with_margin=margin))
        return self._rules

    def decide(
        self,
        scores: Sequence[float],
        gaps: Sequence[float],
        u: float,
        group: str | None,
        tokens: float | None,
        text: str | None = None,
        answer: str | None = None,
    ) -> tuple[bool, LearnedUse | None]:
        """Return whether the Primary's top action stands, and how that was decided.

        Args:
            scores: the Primary's.
            gaps: their gaps.
            u: the query's draw.
            group: its group; None if unknown.
            tokens: the Primary's output tokens; None if unknown.
            text: the question; None if unknown.
            answer: what the Primary answered; None if unknown.

        Returns:
            None in place of how, if there is nothing to decide: one action, a tie at the top, a margin below the floor, or a
            menu of another size than the declared one.
        """
        features = self._features
        if len(gaps) == 1:
            return True, None
        top, margin = gaps.index(0.0), sorted(gaps)[1]
        if margin == 0 or margin < self.floor or features.menu_size not in (None, len(gaps)):
            return False, None
        single = self.digits == SINGLE_DIGITS
        exact: list[float] = np.array(scores, dtype=np.float32).astype(np.float64).tolist() if single else list(scores)
        words = text_embedding().vector(text) if features.text and text else ()
        said = answer_place(answer) if features.answers else -1
        places, values = query_features(features, margin, top, exact, group, tokens, words, said)
        new = self.rows.rows.group is not None and bool(group) and group not in features.groups
        decided, extra, to_beat = None, 0, -1
        for number, rule in enumerate(self.rules()):
            known = bisect_left(places, len(rule.rotation))
            better = rule.decide(places[:known], values[:known], u, margin, unseen=new, answer=said, to_beat=to_beat)
            if better is not None:
                decided, extra, to_beat = better, number, better.kept_rows
        assert decided is not None, "the first rule has nothing to beat"
        name = "margin" if decided.candidate == MARGIN else f"penalty {STRENGTHS[decided.candidate - 1]:g}"
        further = ["the answer"] * features.answers + ["the text"] * bool(features.text)
        name += f" with {' and '.join(further[:extra])}" if extra else ""
        missing = self.missing(group, tokens, words, said)
        return decided.kept, LearnedUse(candidate=name, count=decided.kept_rows, score=decided.score, missing=missing)

    def missing(
        self, group: str | None, tokens: float | None, words: Sequence[float] = (), answer: int = -1
    ) -> tuple[str, ...]:
        """Return the features that a query lacks."""
        rows = self.rows.rows
        lacks = (
            ("group", rows.group is not None and not group),
            ("tokens", rows.tokens is not None and tokens is None),
            ("text", rows.text is not None and not any(words)),
            ("answer", rows.answer is not None and answer < 0),
        )
        return tuple(name for name, lacking in lacks if lacking)

    def differs_from(self, other: "LearnedScore") -> list[str]:
        """Return the names of the arrays that differ from those of another score by more than 1e-9, relatively."""
        ours, theirs = self.rows.arrays(), other.rows.arrays()
        return [name for name in sorted({*ours, *theirs}) if not _alike(ours.get(name), theirs.get(name))]


def _alike(array: Any, other: Any) -> bool:
    if array is None or other is None or array.shape != other.shape:
        return False
    if array.dtype.kind != "f":
        return bool((array == other).all())
    return bool(np.allclose(array, other, rtol=_TOLERANCE, atol=0.0, equal_nan=True))


def sidecar_path(certificate: str | Path) -> Path:
    """Return where the arrays of a certificate lie: beside it, as .npz."""
    path = Path(certificate)
    return path.with_suffix(".npz") if path.suffix == ".json" else path.with_name(path.name + ".npz")


def read_sidecar(certificate: str | Path) -> bytes:
    """Return the content of the file beside a certificate.

    Raises:
        CertificateError: there is none.
    """
    path = sidecar_path(certificate)
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(
            f"{path}: cannot be read ({error.strerror}); the certificate's score is learned, and its arrays lie in this "
            "file: copy it along with the certificate, or calibrate again"
        ) from error


def refuse_row_count(n: int, source: str) -> None:
    """Refuse logs that are too small to learn from, or too large to hold.

    Raises:
        OptionError: the log has fewer or more rows than a learned score takes.
    """
    if n < FEWEST_ROWS:
        raise OptionError(
            f"{source}: a learned score needs {FEWEST_ROWS} rows or more, and there are {n}; use the margin (--score margin)"
        )
    if n > MOST_ROWS:
        raise OptionError(
            f"{source}: a learned score keeps every row at hand, at most {MOST_ROWS}, and there are {n}; take a random "
            "part, or learn on a split (arbitrage learn)"
        )


def used_rows(margin: Floats, sizes: Integers, menu_size: int | None) -> Bools:
    """Return which rows a score is learned from: not those that are always deferred, nor those with one action."""
    fits_menu = np.ones(len(sizes), np.bool_) if menu_size is None else sizes == menu_size
    return (margin > 0) & (sizes > 1) & fits_menu
