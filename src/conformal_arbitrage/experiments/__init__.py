"""The paper's experiments, to be read alongside it; run by `arbitrage reproduce`.

Scores come from the bundled log, from a recorded one, or from live models (`live`).
"""

import time
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

from conformal_arbitrage.errors import OptionError, ScoreLogError, SourceError
from conformal_arbitrage.experiments.protocol import Experiment, Part, Source
from conformal_arbitrage.experiments.report import Report, write_report
from conformal_arbitrage.experiments.studies import MMLU, PKU, THEORY, TRUTHFULQA
from conformal_arbitrage.experiments.summary import summary_markdown
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import new_folder, write_text

_ALL = (*TRUTHFULQA, MMLU, PKU, THEORY)
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
BUNDLED_COSTS = (0.0002, 0.50)


def bundled_source(costs: tuple[float, float] | None = None) -> Source:
    """Return the log that ships with the package: small local models, and the answer key as a human expert."""

    def read(part: Part) -> ScoreLog:
        primary = "qwen15b" if part == "truthfulqa-stronger" else "smollm2"
        with as_file(files("conformal_arbitrage") / "data" / "science.parquet") as path:
            return ScoreLog.read(path, primary=primary, guardian="expert")

    title = (
        "the bundled log: 2369 science questions, small local models, the answer key as an expert; not the paper's data"
    )
    return Source(title=title, read=read, bundled=True, costs=costs or BUNDLED_COSTS)


def log_source(
    path: str | Path,
    *,
    primary: str = "primary",
    guardian: str = "guardian",
    stronger: str | None = None,
    costs: tuple[float, float] | None = None,
) -> Source:
    """Return a recorded score log as a source; `stronger` is the column of a second Primary, for truthfulqa-mini."""
    log = ScoreLog.read(path, primary=primary, guardian=guardian)

    def read(part: Part) -> ScoreLog:
        if part != "truthfulqa-stronger":
            return log
        if stronger is None:
            raise SourceError(
                "truthfulqa-mini needs scores of a second, stronger Primary; name their column with --stronger-column"
            )
        return ScoreLog.read(path, primary=stronger, guardian=guardian)

    title = f"{Path(path).name}: {len(log)} recorded rows, columns {primary} and {guardian}; not the paper's data"
    return Source(title=title, read=read, costs=costs)


def parts_of(name: str, config: Config) -> list[Part]:
    """Return the parts whose scores an experiment, or "all", needs; "all" skips a stronger Primary if there is none."""
    needed: list[Part] = []
    for key in _named(name):
        part: Part = "truthfulqa"
        if key in ("mmlu", "pku"):
            part = key
        elif key == "truthfulqa-mini":
            part = "truthfulqa-stronger"
        optional = part == "truthfulqa-stronger" and name == "all" and config.stronger is None
        if key != "theory" and part not in needed and not optional:
            needed.append(part)
    return needed


def _named(name: str) -> list[str]:
    if name != "all" and name not in EXPERIMENTS:
        raise OptionError(f"there is no experiment '{name}'; choose one of all, {', '.join(EXPERIMENTS)}")
    return list(EXPERIMENTS) if name == "all" else [name]


def reproduce(
    name: str,
    source: Source,
    *,
    out: str | Path,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Report], dict[str, str]]:
    """Run one experiment, or "all", and write the reports.

    Args:
        name: an experiment's name, or "all".
        on_progress: called with a line of text before each experiment of "all".

    Returns:
        The reports by name, and the reason for each experiment that the source does not support.
    """
    chosen = [EXPERIMENTS[key] for key in _named(name)]
    if seed < 0:
        raise OptionError(f"seed must be 0 or more; got {seed}")
    folder = Path(out)
    reports: dict[str, Report] = {}
    skipped: dict[str, str] = {}
    for experiment in chosen:
        if name == "all":
            on_progress(f"{experiment.name}: {experiment.title}")
        start = time.perf_counter()
        try:
            report = experiment.run(source, seed)
        except (SourceError, ScoreLogError, OptionError) as error:
            if name != "all":
                raise
            skipped[experiment.name] = str(error)
            text = f"Source: {source.title}\n\n# {experiment.title}\n\nNot run: {error}\n"
            write_text(new_folder(folder) / f"{experiment.name}.md", text)
            continue
        spent = None if source.spent is None else source.spent()
        write_report(report, new_folder(folder), seconds=time.perf_counter() - start, spent=spent)
        reports[experiment.name] = report
    if name == "all":
        write_text(folder / "summary.md", summary_markdown(reports, skipped, source.title))
    return reports, skipped
