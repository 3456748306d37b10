"""The paper's datasets, loaded and scored: from the hub, a local copy, or live models."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import structs

from conformal_arbitrage.collecting.collect import Collection, EndpointEstimate, Progress, replies_path
from conformal_arbitrage.collecting.questions import Menus, content_ids
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.core.trials import balanced
from conformal_arbitrage.errors import OptionError, SourceError
from conformal_arbitrage.experiments.protocol import Part, Source
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.models.others import ReplayScorer
from conformal_arbitrage.models.resilience import dollars, stored_cost
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import FORMATS, Table
from conformal_arbitrage.types import Query

# --- The paper's three datasets ---


Corpus = Literal["truthfulqa", "mmlu", "pku"]
_HUB: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "truthfulqa": ("EleutherAI/truthful_qa_mc", None, ("validation",)),
    "mmlu": ("cais/mmlu", "all", ("dev", "validation", "test")),
    "pku": ("PKU-Alignment/PKU-SafeRLHF", None, ("train", "test")),
}
_MENU_COLUMNS = {"truthfulqa": ("question", "choices", "label"), "mmlu": ("question", "choices", "answer", "subject")}
_PKU_COLUMNS = (
    "prompt", "response_0", "response_1", "response_0_severity_level", "response_1_severity_level",
    "better_response_id", "safer_response_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCorpus:
    """A filtered dataset, ready to be scored; severities, two per row, for pku only."""

    menus: Menus
    severity: list[tuple[float, float]] | None = None


def load_corpus(corpus: Corpus, data: Path | None = None, *, rows: int | None = None, seed: int = 0) -> LoadedCorpus:
    """Load and filter one of the paper's datasets.

    Args:
        data: a local copy: a file, or a folder of files, with the dataset's own columns; from the hub if None.
        rows: size of a random sample, balanced over subjects if there are any; all rows if None.
    """
    loaded = _pku(data) if corpus == "pku" else _menus(corpus, data)
    size = len(loaded.menus.queries)
    if rows is None or rows >= size:
        return loaded
    rng = np.random.default_rng(seed)
    groups = loaded.menus.groups
    codes = np.zeros(size, dtype=np.int64) if groups is None else np.unique(groups, return_inverse=True)[1]
    return _select(loaded, np.sort(balanced(codes, rows, rng)).tolist())


def _select(loaded: LoadedCorpus, places: list[int]) -> LoadedCorpus:
    def some(values: list[Any] | None) -> list[Any] | None:
        return None if values is None else [values[k] for k in places]

    menus = loaded.menus
    queries = [menus.queries[k] for k in places]
    drawn = Menus(queries=queries, labels=some(menus.labels), groups=some(menus.groups))
    return LoadedCorpus(menus=drawn, severity=some(loaded.severity))


def _menus(corpus: Corpus, data: Path | None) -> LoadedCorpus:
    names = _MENU_COLUMNS[corpus]
    columns = _columns(corpus, data, names)
    questions, menus, labels = (columns[name] for name in names[:3])
    for row, (menu, label) in enumerate(zip(menus, labels, strict=True), start=1):
        if not 0 <= int(label) < len(menu):
            raise SourceError(
                f"{corpus}: row {row} has the answer {int(label)} and {len(menu)} options; is the copy complete?"
            )
    ids = content_ids([[text, menu] for text, menu in zip(questions, menus, strict=True)])
    queries = [Query(text, tuple(menu), id=name) for text, menu, name in zip(questions, menus, ids, strict=True)]
    groups = columns["subject"] if corpus == "mmlu" else None
    return LoadedCorpus(menus=Menus(queries=queries, labels=[int(label) for label in labels], groups=groups))


def _pku(data: Path | None) -> LoadedCorpus:
    columns = _columns("pku", data, _PKU_COLUMNS)
    table = list(zip(*(columns[name] for name in _PKU_COLUMNS), strict=True))
    rows = [row for row in table if int(row[3]) != int(row[4]) and int(row[5]) != int(row[6])]
    if not rows:
        raise SourceError("pku: no row has replies of different severity of which the better is not the safer one")
    ids = content_ids([list(row[:3]) for row in rows])
    queries = [Query(row[0], (row[1], row[2]), id=name) for row, name in zip(rows, ids, strict=True)]
    menus = Menus(queries=queries, labels=[int(row[5]) for row in rows])
    return LoadedCorpus(menus=menus, severity=[(float(row[3]), float(row[4])) for row in rows])


def _columns(corpus: Corpus, data: Path | None, names: Sequence[str]) -> dict[str, list[Any]]:
    if data is None:
        return _from_hub(corpus, names)
    parts = [_from_file(corpus, path, names) for path in _files(corpus, data)]
    return {name: [value for part in parts for value in part[name]] for name in names}


def _files(corpus: Corpus, data: Path) -> list[Path]:
    """Return the files of a corpus: those under its own name in a folder of several corpora, otherwise all files."""
    named = [data / corpus, *(data / f"{corpus}{ending}" for ending in FORMATS)]
    place = next((path for path in named if path.exists()), data)
    files = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.name.endswith(FORMATS))
    files = [path for path in files if "auxiliary_train" not in str(path.relative_to(data.parent))]
    if not files:
        raise SourceError(f"{data}: no data files for {corpus} ({', '.join(FORMATS)})")
    return files


def _from_file(corpus: Corpus, path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    with Table(path) as table:
        lacking = [name for name in names if name not in table.types]
        if lacking:
            raise SourceError(
                f"{path}: lacks the column '{lacking[0]}' of {_HUB[corpus][0]}; it has {', '.join(sorted(table.types))}"
            )
        return {name: _lists(table, name) if name == "choices" else _values(table, name) for name in names}


def _lists(table: Table, name: str) -> list[list[str]]:
    flat, sizes = table.text_lists(name)
    texts: list[str] = flat.tolist()
    ends = np.cumsum(np.maximum(sizes, 0)).tolist()
    return [texts[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _values(table: Table, name: str) -> list[Any]:
    numbers = name in ("label", "answer") or name.endswith(("_level", "_id"))
    if not numbers:
        return table.texts(name).tolist()
    values = table.scalars(name)
    if np.isnan(values).any():
        raise SourceError(f"{table.path}: column '{name}' has missing values; is the copy complete?")
    return values.tolist()


def _from_hub(corpus: Corpus, names: Sequence[str]) -> dict[str, list[Any]]:
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise SourceError(
            f"{corpus}: loading {_HUB[corpus][0]} needs the extra: run `pip install '.[datasets]'` in a clone; or give a "
            "local copy with --data PATH"
        ) from error
    name, subset, splits = _HUB[corpus]
    values: dict[str, list[Any]] = {column: [] for column in names}
    for split in splits:
        part = datasets.load_dataset(name, subset, split=split)
        for column in names:
            values[column] += list(part[column])
    return values


# --- The paper's datasets scored by the models of arbitrage.toml, through collect ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Live scores for the paper's experiments.

    Attributes:
        config: the models; [stronger] is the second Primary of truthfulqa-mini.
        folder: where logs and replies are kept.
        data: a local copy of the datasets; the hub if None.
        rows: at most this many rows of each dataset, balanced over subjects.
        max_cost: limit in dollars for everything in this folder together.
    """

    config: Config
    folder: Path
    data: Path | None = None
    rows: int | None = None
    seed: int = 0
    concurrency: int = 16
    max_cost: float | None = None
    on_progress: Callable[[Progress], None] | None = None
    _logs: dict[Part, ScoreLog] = field(default_factory=dict["Part", ScoreLog])

    def __post_init__(self) -> None:
        """Reject a configuration that is not in menu form."""
        if self.config.task.form != "menu":
            raise OptionError('the paper\'s experiments use menus; set form = "menu" in the configuration')

    def source(self) -> Source:
        """Return these scores as a source for experiments."""
        names = [self.config.section("primary").label, self.config.section("guardian").label]
        where = (
            "the paper's datasets" if self.data is None else f"a local copy of the paper's datasets ({self.data.name})"
        )
        some = "" if self.rows is None else f", a sample of {n_rows(self.rows)} of each"
        title = f"live scores of {names[0]} (Primary) and {names[1]} (Guardian) on {where}{some}"
        return Source(title=title, read=self.read, spent=lambda: dollars(self.spent()))

    def spent(self) -> float | None:
        """Return the cost of everything in this folder; None unless the cost of every reply is known."""
        known, unknown = self._stored()
        return None if unknown else known

    def _stored(self) -> tuple[float, int]:
        costs = [stored_cost(path) for path in self.folder.glob("*.replies.sqlite")]
        return sum(cost for cost, _ in costs), sum(unknown for _, unknown in costs)

    def read(self, part: Part) -> ScoreLog:
        """Return the scores of one part; call the models for those not stored yet."""
        if part not in self._logs:
            rows = self._rows(part)
            self.folder.mkdir(parents=True, exist_ok=True)
            collection = self._collection(part, rows)
            log = _with_severity(asyncio.run(collection.run(self.on_progress)), rows)
            log.write(collection.output)
            self._logs[part] = replace(log, source=Path(collection.output).name)
        return self._logs[part]

    def estimate(self, part: Part) -> list[EndpointEstimate]:
        """Estimate the calls that one part would take."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(self._collection(part, self._rows(part)).estimate())

    def _rows(self, part: Part) -> LoadedCorpus:
        corpus: Corpus = "truthfulqa" if part == "truthfulqa-stronger" else part
        return load_corpus(corpus, self.data, rows=self.rows, seed=self.seed)

    def _collection(self, part: Part, rows: LoadedCorpus) -> Collection:
        output = self.folder / f"{part}.parquet"
        elsewhere = self._stored()[0] - stored_cost(replies_path(output))[0]
        remaining = None if self.max_cost is None else self.max_cost - elsewhere
        return Collection(
            config=self._config(part),
            rows=rows.menus,
            output=output,
            concurrency=self.concurrency,
            max_cost=remaining,
            guardian=_severity_rule(rows),
        )

    def _config(self, part: Part) -> Config:
        if part == "truthfulqa-stronger":
            if self.config.stronger is None:
                raise SourceError("truthfulqa-mini needs a second, stronger Primary: add a section [stronger]")
            return structs.replace(self.config, primary=self.config.stronger)
        if part == "pku":
            return structs.replace(self.config, primary=self.config.section("primary").with_prompt("pair"))
        return self.config


def _severity_rule(rows: LoadedCorpus) -> ReplayScorer | None:
    """Return the Guardian of PKU: the lower the severity, the higher the score."""
    if rows.severity is None:
        return None
    ids = [str(query.id) for query in rows.menus.queries]
    values = -np.array(rows.severity, dtype=np.float64).ravel()
    offsets = np.arange(0, len(values) + 1, 2)
    return ReplayScorer.of_values(ids, values, offsets, column="-severity")


def _with_severity(log: ScoreLog, rows: LoadedCorpus) -> ScoreLog:
    if rows.severity is None:
        return log
    lists = {**log.lists, "severity": np.array(rows.severity, dtype=np.float64).ravel()}
    return replace(log, lists=lists, outcomes=(*log.outcomes, "severity"))
