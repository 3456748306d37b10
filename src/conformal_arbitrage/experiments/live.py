"""The paper's datasets scored by the models of arbitrage.toml: through collect, so resumable, priced, and dry first.

The PKU Guardian is the paper's rule, the reply of lowest severity by the dataset's own labels; only its Primary is
asked, with the pair prompt.

Knows nothing of tables or reports.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from conformal_arbitrage.collecting.collect import Collection, Estimated, Progress, replies_path
from conformal_arbitrage.errors import OptionError, SourceError
from conformal_arbitrage.experiments.corpora import Corpus, Rows, load
from conformal_arbitrage.experiments.protocol import Part, Source
from conformal_arbitrage.live.config import Chat, Config, Network
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorers.replay import ReplayScorer
from conformal_arbitrage.upstream.pricing import dollars
from conformal_arbitrage.upstream.wrappers import stored_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Live scores for the paper's experiments.

    Attributes:
        config: the models; [stronger] is the second Primary of truthfulqa-mini.
        folder: where logs and replies are kept.
        data: a local copy of the datasets; the hub if None.
        rows: at most so many rows of each dataset, balanced over subjects.
        seed: of that sample.
        concurrency: upstream calls at once.
        max_cost: dollars for everything in this folder together.
        told: shown the progress of each collection.
    """

    config: Config
    folder: Path
    data: Path | None = None
    rows: int | None = None
    seed: int = 0
    concurrency: int = 16
    max_cost: float | None = None
    told: Callable[[Progress], None] | None = None
    _logs: dict[Part, ScoreLog] = field(default_factory=dict["Part", ScoreLog])

    def __post_init__(self) -> None:
        """Refuse what the datasets cannot be asked with."""
        if self.config.task.form != "menu":
            raise OptionError('the paper\'s experiments are over menus; set form = "menu" in the configuration')

    def source(self) -> Source:
        """Where the experiments get these scores from."""
        names = [model.model if isinstance(model, Network) else structs.asdict(model).get("name", "local") for model in
                 (self.config.primary, self.config.guardian)]  # fmt: skip
        where = (
            "the paper's datasets" if self.data is None else f"a local copy of the paper's datasets ({self.data.name})"
        )
        some = "" if self.rows is None else f", a sample of {self.rows} rows of each"
        title = f"live scores of {names[0]} (Primary) and {names[1]} (Guardian) on {where}{some}"
        return Source(title=title, read=self.read, spent=lambda: dollars(self.spent()))

    def spent(self) -> float | None:
        """What everything in this folder cost; None if that is not known of every reply."""
        known, unknown = self._stored()
        return None if unknown else known

    def _stored(self) -> tuple[float, int]:
        found = [stored_cost(path) for path in self.folder.glob("*.replies.sqlite")]
        return sum(cost for cost, _ in found), sum(unknown for _, unknown in found)

    def read(self, part: Part) -> ScoreLog:
        """The scores of one part, asked for where they are not stored yet."""
        if part not in self._logs:
            rows = self._rows(part)
            self.folder.mkdir(parents=True, exist_ok=True)
            collection = self._collection(part, rows)
            log = _with_severity(asyncio.run(collection.run(self.told)), rows)
            log.write(collection.output)
            self._logs[part] = replace(log, source=Path(collection.output).name)
        return self._logs[part]

    def estimate(self, part: Part) -> list[Estimated]:
        """What asking about one part would take."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(self._collection(part, self._rows(part)).estimate())

    def _rows(self, part: Part) -> Rows:
        corpus: Corpus = "truthfulqa" if part == "truthfulqa-stronger" else part
        return load(corpus, self.data, rows=self.rows, seed=self.seed)

    def _collection(self, part: Part, rows: Rows) -> Collection:
        output = self.folder / f"{part}.parquet"
        others = self._stored()[0] - stored_cost(replies_path(output))[0]
        left = None if self.max_cost is None else self.max_cost - others
        return Collection(
            config=self._asked(part),
            rows=rows.menus,
            output=output,
            concurrency=self.concurrency,
            max_cost=left,
            guardian=_severity_rule(rows),
        )

    def _asked(self, part: Part) -> Config:
        if part == "truthfulqa-stronger":
            if self.config.stronger is None:
                raise SourceError("truthfulqa-mini needs a second, stronger Primary: add a section [stronger]")
            return structs.replace(self.config, primary=self.config.stronger)
        primary = self.config.primary
        if part == "pku" and isinstance(primary, Chat):
            return structs.replace(self.config, primary=structs.replace(primary, prompt="pair"))
        return self.config


def _severity_rule(rows: Rows) -> ReplayScorer | None:
    """The Guardian of PKU: the less severe the better."""
    if rows.severity is None:
        return None
    ids = [str(query.id) for query in rows.menus.queries]
    values = -np.array(rows.severity, dtype=np.float64).ravel()
    offsets = np.arange(0, len(values) + 1, 2)
    return ReplayScorer.of_values(ids, values, offsets, column="-severity")


def _with_severity(log: ScoreLog, rows: Rows) -> ScoreLog:
    if rows.severity is None:
        return log
    lists = {**log.lists, "severity": np.array(rows.severity, dtype=np.float64).ravel()}
    return replace(log, lists=lists, outcomes=(*log.outcomes, "severity"))
