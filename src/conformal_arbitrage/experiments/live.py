"""The paper's datasets scored by the models of arbitrage.toml, through collect: resumable, priced, with a dry run.

The PKU Guardian is the paper's rule, the reply of lowest severity by the dataset's own labels; only its Primary is
called, with the pair prompt.

Knows nothing of tables or reports.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from conformal_arbitrage.collecting.collect import Collection, Progress
from conformal_arbitrage.collecting.paying import EndpointEstimate, replies_path
from conformal_arbitrage.errors import OptionError, SourceError
from conformal_arbitrage.experiments.corpora import Corpus, LoadedCorpus, load_corpus
from conformal_arbitrage.experiments.protocol import Part, Source
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorers.replay import ReplayScorer
from conformal_arbitrage.upstream.cache import stored_cost
from conformal_arbitrage.upstream.pricing import dollars


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Live scores for the paper's experiments.

    Attributes:
        config: the models; [stronger] is the second Primary of truthfulqa-mini.
        folder: where logs and replies are kept.
        data: a local copy of the datasets; the hub if None.
        rows: at most this many rows of each dataset, balanced over subjects.
        seed: of that sample.
        concurrency: maximum number of concurrent upstream calls.
        max_cost: limit in dollars for everything in this folder together.
        on_progress: called with the progress of each collection.
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
        some = "" if self.rows is None else f", a sample of {self.rows} rows of each"
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
