"""Write docs/bench.md: at equal promised quality, who asks the expert least, and who keeps the promise.

    python -m benchmarks.promises                  the tables in benchmarks/data
    python -m benchmarks.promises FOLDER           those of another folder; the page keeps what it has of other tables

A table is known by its columns. Items with a machine's label have `answer`, `confidence`, and `truth` or `right`: they are
labelled in batches. Services that answer the same questions have NAME_answer, NAME_confidence, NAME_cost, and `truth` or
NAME_right: the cheapest is asked first, the most accurate is the Guardian, and all of them may be a cascade. A table
NAME-published-curves (method, seed, cost, accuracy) holds what others published about the services of table NAME.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log, sqrt
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from conformal_arbitrage import ArbitrageError, Features, OptionError, ScoreLog, calibrate, learn
from conformal_arbitrage.calibration import batch
from conformal_arbitrage.calibration.promises import Cutoff
from conformal_arbitrage.evaluation.frontier import evaluate_cascade
from conformal_arbitrage.evaluation.show import save_drawing
from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns
from conformal_arbitrage.scorelog.log import read_confidence
from conformal_arbitrage.scorelog.tables import ColumnReader, Table

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROOT = Path(__file__).resolve().parents[1]
DATA, DOCS, PAGE = ROOT / "benchmarks" / "data", ROOT / "docs", "bench.md"
SHIPPED = ("pac-stance", "frugalml-rafdb")
CURVES = "-published-curves"
ERROR, LEVEL = 0.05, 0.05
"""Of batches: the largest share of all items with a wrong label, and how often a draw may miss it."""
ALPHAS = ("0.001", "0.005", "0.01", "0.02", "0.05")
"""Net losses: points of accuracy against the Guardian alone."""
PAIR_ALPHA = 0.01
"""The one that is shown of tables without published curves."""
DRAWS, SPLITS = 300, 200
SLOW = 4
"""A rule that takes seconds a split is run on every so manieth split."""

NAIVE = "threshold on the sample, no margin"
PAC = "PAC labels, their rule"
CONFIDENT = "`calibrate --confidence 0.95`"
BATCH = "`batch certify`"
PILOT = "`batch certify`, with `--pilot`"
PUBLISHED = {"FrugalML": "FrugalML, as published", "FrugalMLQSonly": "FrugalML by score only, as published"}
SAME_ROWS = "threshold on the same rows, no margin"
MARGIN = "`calibrate --loss net`"
LEARNED = "`learn --loss net --answers`, then `calibrate`"
BOOSTED = "the same with `--learner hist-gradient-boosting`"
CASCADE = "`calibrate --path --loss net`"

# --- Rows of a table ---


class Row(Struct, frozen=True, kw_only=True):
    """What one rule did at one budget.

    Attributes:
        promise: "average": the mean loss is at most alpha. "confident": the loss of one draw is at most alpha, but for a
            share `LEVEL` of draws. None: nothing is promised.
        alpha: the budget.
        trials: draws or splits; 0 for a figure that is published.
        loss: mean realised loss.
        loss_error: its standard error.
        over: share of trials with a loss above alpha.
        asked: share of items that experts label, or of queries that the Guardian answers.
        asked_error: its standard error.
        cost: per 10,000 queries, in dollars.
    """

    rule: str
    promise: Literal["average", "confident"] | None
    alpha: float
    trials: int
    loss: float
    loss_error: float | None = None
    over: float | None = None
    asked: float | None = None
    asked_error: float | None = None
    cost: float | None = None

    @property
    def kept(self) -> bool | None:
        """Whether the promise was kept, by three standard errors; None if there is none."""
        if self.promise == "average":
            return self.loss <= self.alpha + 3 * (self.loss_error or 0.0)
        if self.promise == "confident":
            return (self.over or 0.0) <= LEVEL + 3 * sqrt(LEVEL * (1 - LEVEL) / self.trials)
        return None


class Result(Struct, frozen=True, kw_only=True):
    """All rules on one table.

    Attributes:
        kind: "batch", or "services".
        rows: of the table.
        sample: labels of experts, or rows to calibrate on.
        about: roles of the services, or how often the machine is wrong.
    """

    table: str
    kind: Literal["batch", "services"]
    items: int
    sample: int
    about: str
    rows: list[Row]


def measured(
    rule: str, promise: Literal["average", "confident"] | None, alpha: float, loss: Floats, asked: Floats,
    cost: Floats | None = None,
) -> Row:  # fmt: skip
    """Return the row of a rule from its loss, share and cost in each trial."""
    n = len(loss)
    return Row(
        rule=rule,
        promise=promise,
        alpha=alpha,
        trials=n,
        loss=float(loss.mean()),
        loss_error=_error(loss),
        over=float((loss > alpha + 1e-12).mean()),
        asked=float(asked.mean()),
        asked_error=_error(asked),
        cost=None if cost is None else float(cost.mean()),
    )


def _error(values: Floats) -> float | None:
    return float(values.std(ddof=1) / sqrt(len(values))) if len(values) > 1 else None


# --- Batches ---


@dataclass(frozen=True, slots=True, eq=False)
class Pile:
    """Items with machine labels, and which of these are wrong; the same as a log whose Guardian is always right."""

    items: batch.BatchItems
    wrong: Floats
    log: ScoreLog


def read_pile(path: Path) -> Pile:
    """Read a table of items with machine labels."""
    with batch.open_items(path) as table:
        columns = batch.BatchColumns(id="id" if "id" in table.types else None)
        items = batch.read_items(table, columns, marked=False, pilot=True)
        right = _right(table, "right", "answer")
    wrong = np.where(items.labelled & (right == 1), 0.0, 1.0)
    log = ScoreLog.from_router(
        confidence=np.where(items.labelled, np.maximum(1 - items.risk, 0.0), 0.0),
        primary_grade=1 - wrong,
        guardian_grade=np.ones(len(wrong)),
        id=[f"item {k}" for k in range(len(wrong))],
    )
    return Pile(items, wrong, log)


def _right(table: ColumnReader, name: str, answer: str) -> Floats:
    """Return 1 where an answer is right, by a column that says so, or by the truth."""
    if name in table.types:
        return table.scalars(name, truths=True)
    return (table.texts(answer) == table.texts("truth")).astype(np.float64)


def naive_cutoff(risk: Floats, wrong: Floats) -> float:
    """Return the largest cutoff below which at most a share `ERROR` of the sample is wrong."""
    order = np.argsort(risk, kind="stable")
    over = np.flatnonzero(np.cumsum(wrong[order]) > ERROR * len(risk))
    return float(risk[order][over[0]]) if len(over) else np.inf


def pac_cutoff(risk: Floats, wrong: Floats) -> float:
    """Return the cutoff of PAC labels (Candes, Ilyas, Zrnic 2025): machine labels with a risk below it are kept.

    The sample is drawn with replacement. The cutoff is the smallest risk in it at which an upper bound of the mean of
    wrong 1{risk <= cutoff} lies above the error: a betting bound (Waudby-Smith, Ramdas 2024), whose bets are
    sqrt(2 log(1 / level) / (draws variance so far)), at most 3 / 4 of the largest. Infinity if there is none.
    """
    draws = len(risk)
    times = np.arange(1, draws + 1)
    for cutoff in np.unique(risk[wrong == 1]):  # the mean changes nowhere else
        x = wrong * (risk <= cutoff)
        mean = (0.5 + np.cumsum(x)) / (1 + times)
        variance = (0.25 + np.cumsum((x - mean) ** 2)) / (1 + times)
        earlier = np.concatenate([[0.25], variance[:-1]])
        bets = np.minimum(np.sqrt(2 * log(1 / LEVEL) / (draws * earlier)), 0.75 / (1 - ERROR))
        if np.cumsum(np.log1p(-bets * (x - ERROR))).max() < log(1 / LEVEL):
            return float(cutoff)
    return np.inf


def batch_result(name: str, path: Path, draws: int) -> Result:
    """Draw samples from a pile of items, and measure what each rule keeps of the machine's labels."""
    pile = read_pile(path)
    n = len(pile.wrong)
    sample = min(max(500, n // 10), n // 2)
    trials: dict[str, list[tuple[float, float]]] = {}
    for number in range(draws):
        for rule, kept in _kept(pile, sample, number):
            trials.setdefault(rule, []).append((float(pile.wrong[kept].sum() / n), float(1 - kept.sum() / n)))
    rows = [
        measured(rule, None if rule == NAIVE else "confident", ERROR, *np.array(figures).T)
        for rule, figures in trials.items()
    ]
    about = f"{100 * pile.wrong.mean():.1f} % of the machine's labels are wrong"
    return Result(table=name, kind="batch", items=n, sample=sample, about=about, rows=rows)


def _kept(pile: Pile, sample: int, number: int) -> Iterator[tuple[str, Bools]]:
    """Return which machine labels each rule keeps after one draw."""
    items, risk, wrong = pile.items, pile.items.risk, pile.wrong
    n, rng, key = len(wrong), np.random.default_rng(number), number.to_bytes(8)
    rows, again = rng.permutation(n)[:sample], rng.integers(n, size=sample)
    untied = risk + 1e-9 * rng.random(n)  # as the peer does; ours break ties by their own draws

    def outside(drawn: NDArray[np.int64], cutoff: float) -> Bools:
        kept = items.labelled & (untied < cutoff)
        kept[drawn] = False
        return kept

    yield NAIVE, outside(rows, naive_cutoff(untied[rows], wrong[rows]))
    yield PAC, outside(again, pac_cutoff(untied[again], wrong[again]))
    certificate = calibrate(
        pile.log.select(rows), ERROR, confidence=1 - LEVEL, boundary="random", zero_one=True, key=key
    )
    yield CONFIDENT, outside(rows, np.inf) & ~certificate.apply(pile.log).deferred
    for rule, pilot in ((BATCH, 0), (PILOT, 3 * sample // 10)):
        draw = batch.BatchDraw(items=n, rows=rows, error=ERROR, level=LEVEL, confidence=1 - LEVEL, pilot=pilot, key=key)
        order = batch.learned_risk(items, rows[:pilot], wrong[rows[:pilot]])[0] if pilot else risk
        labels = batch.BatchLabels(
            risk=order, labelled=items.labelled, draw=draw, wrong=wrong[rows], names=items.names
        )  # fmt: skip
        cutoff = batch.certify_labels(labels).rule
        assert isinstance(cutoff, Cutoff)
        yield rule, labels.kept(cutoff)


# --- Services with prices ---


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """What one service said to every question, one value per row; no confidence where it gave no answer."""

    name: str
    answer: list[str]
    confidence: Floats
    right: Floats
    cost: Floats


def read_services(path: Path) -> list[Service]:
    """Read a table of services, and return them from the cheapest to the most expensive."""
    with Table(path) as table:
        names = [column.removesuffix("_confidence") for column in table.types if column.endswith("_confidence")]
        services = [
            Service(
                name=name,
                answer=table.texts(f"{name}_answer").tolist(),
                confidence=np.clip(read_confidence(table, f"{name}_confidence")[0], 0.0, 1.0),
                right=_right(table, f"{name}_right", f"{name}_answer"),
                cost=table.scalars(f"{name}_cost"),
            )
            for name in names
        ]
    return sorted(services, key=lambda service: float(service.cost.mean()))


def services_result(name: str, path: Path, splits: int, curves: Path | None) -> Result:
    """Calibrate on halves of a table of services, and measure each rule on the other half, at every budget."""
    services = read_services(path)
    primary, guardian = services[0], max(services, key=lambda service: float(service.right.mean()))
    if primary is guardian:
        raise OptionError(
            f"{path}: the cheapest service, {primary.name}, is the most accurate; there is nothing to save"
        )
    n = len(primary.right)
    rows = [
        *(() if curves is None else published(curves, float(guardian.right.mean()))),
        *_pairs(primary, guardian, splits),
        *_cascade([service for service in services if service is not guardian], guardian, splits),
    ]
    about = (
        f"{primary.name} (right on {100 * primary.right.mean():.1f} %, {_dollars(primary)}) before {guardian.name} "
        f"({100 * guardian.right.mean():.1f} %, {_dollars(guardian)})"
    )
    return Result(table=name, kind="services", items=n, sample=n // 2, about=about, rows=rows)


def _dollars(service: Service) -> str:
    return f"{service.cost.mean():.3g} dollars for 10,000"


def published(curves: Path, best: float) -> Iterator[Row]:
    """Return what published curves cost where their accuracy reaches the Guardian's minus alpha, mean over their runs."""
    with Table(curves) as table:
        method, seed = table.texts("method"), table.scalars("seed")
        cost, accuracy = table.scalars("cost"), table.scalars("accuracy")
    for name, rule in PUBLISHED.items():
        for alpha in map(float, ALPHAS):
            costs: list[float] = []
            for run in np.unique(seed[method == name]):
                mine = np.flatnonzero((method == name) & (seed == run))
                mine = mine[np.argsort(cost[mine])]
                reached = np.maximum.accumulate(accuracy[mine])
                if reached[-1] >= best - alpha:
                    costs.append(float(np.interp(best - alpha, reached, cost[mine])))
            if costs:
                yield Row(rule=rule, promise=None, alpha=alpha, trials=0, loss=alpha, cost=float(np.mean(costs)))


Decide = Callable[[ScoreLog, ScoreLog, int], list[Bools]]
"""From rows to calibrate on, rows to test and the number of the split: which test rows stay with the Primary, by budget."""


def _pairs(primary: Service, guardian: Service, splits: int) -> Iterator[Row]:
    """Return the rules that ask the cheapest service first, and then perhaps the most accurate."""
    log = ScoreLog.from_router(
        confidence=np.nan_to_num(primary.confidence),
        primary_grade=primary.right,
        guardian_grade=guardian.right,
        id=[f"row {k}" for k in range(len(primary.right))],
        answer=primary.answer,
    )
    rules: dict[str, tuple[Decide, int]] = {
        SAME_ROWS: (_same_rows, splits),
        MARGIN: (_by_confidence, splits),
        LEARNED: (_learned_by("ridge"), splits),
        BOOSTED: (_learned_by("hist-gradient-boosting"), max(splits // SLOW, 2)),
    }
    net, half = guardian.right - primary.right, len(log) // 2
    for rule, (decide, trials) in rules.items():
        figures: list[list[tuple[float, float, float]]] = []
        for split in range(trials):
            order = np.random.default_rng(split).permutation(len(log))
            test = order[half:]
            kept = decide(log.select(order[:half]), log.select(test), split)
            figures.append(
                [
                    (
                        float(net[test][keeps].sum() / len(test)),
                        float(1 - keeps.mean()),
                        float((primary.cost[test] + np.where(keeps, 0.0, guardian.cost[test])).mean()),
                    )
                    for keeps in kept
                ]
            )
        for alpha, columns in zip(ALPHAS, np.array(figures).transpose(1, 2, 0), strict=True):
            yield measured(rule, None if rule == SAME_ROWS else "average", float(alpha), *columns)


def _same_rows(rows: ScoreLog, test: ScoreLog, split: int) -> list[Bools]:
    """Spend the budget to the last on the rows that the threshold is chosen on."""
    confidence = rows.primary[1::2]
    order = np.argsort(-confidence, kind="stable")
    right = rows.outcome("correct").reshape(-1, 2)[order]
    total = np.cumsum(right[:, 0] - right[:, 1]) / len(rows)
    within = [np.flatnonzero(total <= float(alpha)) for alpha in ALPHAS]
    return [test.primary[1::2] >= (confidence[order[k[-1]]] if len(k) else np.inf) for k in within]


def _by_confidence(rows: ScoreLog, test: ScoreLog, split: int) -> list[Bools]:
    key = f"split {split}".encode()
    certificates = (calibrate(rows, alpha, loss="net", loss_bound=1, boundary="random", key=key) for alpha in ALPHAS)
    return [~certificate.apply(test).deferred for certificate in certificates]


def _learned_by(learner: Literal["ridge", "hist-gradient-boosting"]) -> Decide:
    def decide(rows: ScoreLog, test: ScoreLog, split: int) -> list[Bools]:
        router = learn(rows, seed=split, learner=learner, loss="net", features=Features(answers=True))
        scored = ScoreLog.from_router(
            confidence=router.confidence(test),
            primary_grade=np.zeros(len(test)),
            guardian_grade=np.zeros(len(test)),
            id=test.id,
        )
        return _by_confidence(router.scored, scored, split)

    return decide


def _cascade(cheaper: Sequence[Service], guardian: Service, splits: int) -> Iterator[Row]:
    """Return the rows of a cascade of all services, which chooses whom to ask on a part of its rows."""
    log = CascadeLog.from_columns(
        id=[f"row {k}" for k in range(len(guardian.right))],
        models={
            service.name: ModelColumns(
                confidence=service.confidence, grade=service.right, cost=service.cost, answer=service.answer
            )
            for service in cheaper
        },
        guardian_grade=guardian.right,
        guardian_cost=guardian.cost,
        guardian=guardian.name,
    )
    evaluation = evaluate_cascade(log, ALPHAS, calibration_size=len(log) // 2, trials=splits, loss="net")
    for point in evaluation.points:
        yield Row(
            rule=CASCADE,
            promise="average",
            alpha=point.alpha,
            trials=splits,
            loss=point.loss,
            loss_error=point.loss_error,
            over=point.over,
            asked=point.guardian_share,
            cost=point.cost * float(guardian.cost.mean()),
        )


# --- The page ---

INTRODUCTION = """# Measured against published figures

At equal promised quality: who asks the expert least, and who keeps the promise? The tables are other people's data,
with an answer, a confidence and the truth for every item; where their authors published figures, these stand beside
ours. All of it is made by

    make bench-promises

offline, in minutes, from the tables in `benchmarks/data`, whose README names sources and licences: stance labels, and
faces (RAFDB) with the curves of FrugalML. Tables of a folder of yours are read by `make bench-promises DATA=FOLDER`:
each Parquet, CSV or JSON Lines file of the same form gets a section here. Every figure is also in
[bench.json](bench.json).

Each rule is given the same table, and its row says

- what it **promises**: nothing; or that the loss is at most alpha on average over calibrations; or in 95 % of all
  draws;
- the mean **loss** that was realised, with its standard error, and the share of draws or splits with a loss **above**
  alpha. A promise on average allows that in about half of them;
- whether a promise was **kept**: a mean loss of at most alpha and three standard errors, or at most 5 % of draws above
  alpha and three standard errors of that share.
"""
BATCHES = """## Batches: which machine labels may be kept

At most 5 % of all items may be kept with a wrong machine label, in 95 % of all draws of a sample that experts label
([batches](batch.md)). "Saved" is the share of all items that no expert labels. The sample is a tenth of the items and
at least 500, a pilot three tenths of it. PAC labels are the rule of Candes, Ilyas and Zrnic (2025), written from the
paper: a sample with replacement, so that fewer different items are drawn, and a betting bound. The first rule is what
one does without a theory.

![Labels saved by each rule on each table; hatched bars promise nothing](bench-batches.png)
"""
CASCADES = """## Services with prices: what a net loss of alpha costs

Services that answer the same questions, each at a price. The net loss is the accuracy of always asking the best one,
minus that of the rule. Half of the rows are there to choose, learn and calibrate, the other half to measure. Costs are
dollars for 10,000 questions.

FrugalML (Chen, Zaharia, Zou 2020) chooses the next service by what the first one answered, and so may
`calibrate --path`. FrugalML's curves are its authors', from halves of the same table, and say which accuracy a price buys.
Costs are read off where that accuracy is the best service's minus alpha, between two points linearly. This is the
kindest reading: the point is chosen on the test rows, and no loss is promised.

![Cost against net loss of each rule](bench-cascades.png)
"""
PAIRS = """## Two models: how often the Guardian is asked at a net loss of 0.01

The cheapest service is the Primary, the most accurate one the Guardian. `learn` takes 40 % of the rows to learn from
what was answered and how confidently, and the certificate rests on the others; with boosted trees, which take seconds,
only a quarter of the halves is run. The cascade may ask the other services, too, so that its cost compares, not its
share.

![Share of questions to the Guardian by each rule on each table](bench-pairs.png)
"""
FURTHER = """## Further tables

The paper's own tables have [a page](paper.md), decision rules of the field on three more logs [another](compare.md),
and cascades of nine published models [a section](cascades.md#what-it-would-cost).
"""


def page(results: Sequence[Result]) -> str:
    """Return the page in Markdown."""
    batches = [result for result in results if result.kind == "batch"]
    services = [result for result in results if result.kind == "services"]
    curves = [result for result in services if _has_curves(result)]
    sections = [
        INTRODUCTION,
        *_section(BATCHES, batches, lambda result: result.rows),
        *_section(CASCADES, curves, lambda result: sorted(result.rows, key=_order)),
        *_section(PAIRS, services, lambda result: [row for row in result.rows if row.alpha == PAIR_ALPHA]),
        FURTHER,
    ]
    return "\n".join(sections)


def _order(row: Row) -> tuple[float, bool]:
    return row.alpha, row.promise is not None


def _has_curves(result: Result) -> bool:
    return any(row.rule in PUBLISHED.values() for row in result.rows)


def _section(text: str, results: Sequence[Result], rows: Callable[[Result], Sequence[Row]]) -> list[str]:
    if not results:
        return []
    return [text, *(_subsection(result, rows(result)) for result in results)]


def _subsection(result: Result, rows: Sequence[Row]) -> str:
    what = "drawn" if result.kind == "batch" else "to calibrate on"
    trials = f"{max(row.trials for row in rows)} {'draws' if result.kind == 'batch' else 'random halves'}"
    lines = [
        f"### {result.table}: {result.items:,} items, {result.sample:,} {what}",
        "",
        f"{result.about}; {trials}.",
        "",
    ]
    header, body = cells(result, rows)
    lines += ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *body)]
    return "\n".join([*lines, "", *_best(result, rows), ""])


def _best(result: Result, rows: Sequence[Row]) -> list[str]:
    """Say which rule asks least at each budget, among those that promise something and kept it, and among all."""
    fewest, fewer = (
        ("asks experts for the fewest labels", "fewer") if result.kind == "batch" else ("costs least", "less")
    )
    said: list[str] = []
    for alpha in sorted({row.alpha for row in rows}):
        here = [row for row in rows if row.alpha == alpha]
        kept = [row for row in here if row.kept]
        if kept:
            best, least = min(kept, key=_paid), min(here, key=_paid)
            text = f"Alpha {alpha:g}: of the rules that kept a promise, {best.rule} {fewest}"
            if least is not best:
                why = "promises nothing" if least.promise is None else "broke its promise"
                text += f"; {100 * (1 - _paid(least) / _paid(best)):.1f} % {fewer} with: {least.rule}, which {why}"
            said.append(f"- {text}.")
    return said


def _paid(row: Row) -> float:
    return row.cost if row.cost is not None else row.asked if row.asked is not None else np.inf


def cells(result: Result, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the lines of a table."""
    in_batch = result.kind == "batch"
    header = ["rule", "promises", "alpha", "loss", "above", "saved" if in_batch else "Guardian asked"]
    header += ["keeps a promise"] if in_batch else ["cost", "keeps a promise"]
    body: list[list[str]] = []
    for row in rows:
        share = None if row.asked is None else 1 - row.asked if in_batch else row.asked
        line = [
            row.rule,
            {"average": "on average", "confident": "in 95 % of draws", None: "nothing"}[row.promise],
            f"{row.alpha:g}",
            f"{row.loss:.4f}" + ("" if row.loss_error is None else f" +- {row.loss_error:.4f}"),
            "" if row.over is None else f"{100 * row.over:.1f} %",
            "" if share is None else f"{100 * share:.1f} %",
        ]
        if in_batch and row.asked_error is not None:
            line[-1] += f" +- {100 * row.asked_error:.2f}"
        if not in_batch:
            line.append("" if row.cost is None else f"{row.cost:.2f}")
        body.append([*line, {True: "yes", False: "**no: broken**", None: "no: none made"}[row.kept]])
    return header, body


# --- Figures ---

COLOURS = {
    NAIVE: "#c4c4c4", PAC: "#8c8c8c", CONFIDENT: "#9ecae9", BATCH: "#3a87c2", PILOT: "#08427a",
    **dict(zip(PUBLISHED.values(), ("#1a1a1a", "#8c8c8c"), strict=True)),
    SAME_ROWS: "#c4c4c4", MARGIN: "#9ecae9", LEARNED: "#3a87c2", BOOSTED: "#08427a", CASCADE: "#d98b2b",
}  # fmt: skip
"""Grey for others' rules, and for those without a promise."""


def figures(results: Sequence[Result], folder: Path) -> None:
    """Draw the figures of the page."""
    batches = [(result, result.rows) for result in results if result.kind == "batch"]
    services = [result for result in results if result.kind == "services"]
    pairs = [(result, [row for row in result.rows if row.alpha == PAIR_ALPHA]) for result in services]
    curves = [result for result in services if _has_curves(result)]
    if batches:
        _draw_bars(folder / "bench-batches.png", batches, "labels saved, % of all items")
    if curves:
        save_drawing(folder / "bench-cascades.png", lambda axes: _draw_costs(axes[0], curves[0]), size=(8, 5))
    if services:
        _draw_bars(folder / "bench-pairs.png", pairs, "questions to the Guardian, %")


def _draw_bars(target: Path, tables: Sequence[tuple[Result, Sequence[Row]]], label: str) -> None:
    """Draw a bar for each rule on each table; a cascade is left out, since its services cost different sums."""
    shown = [[row for row in rows if row.asked is not None and row.rule != CASCADE] for _, rows in tables]
    rules = list(dict.fromkeys(row.rule for rows in shown for row in rows))
    thickness, height = 0.8 / len(rules), 1.6 + 1.1 * len(tables)

    def draw(axes: Any) -> None:
        (axis,) = axes
        for k, ((result, _), rows) in enumerate(zip(tables, shown, strict=True)):
            for row in rows:
                asked = 100 * (row.asked or 0.0)
                width = 100 - asked if result.kind == "batch" else asked
                at = k + (rules.index(row.rule) - (len(rules) - 1) / 2) * thickness
                axis.barh(
                    at, width, 0.92 * thickness, color=COLOURS[row.rule], hatch="" if row.promise else "///",
                    edgecolor="white", linewidth=0.5, label=row.rule.replace("`", "") if k == 0 else None,
                )  # fmt: skip
                said = " (promise broken)" if row.kept is False else ""
                axis.text(width, at, f" {width:.1f}{said}", va="center", fontsize=7)
        axis.set_yticks(range(len(tables)), [result.table for result, _ in tables])
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(
            fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.5 / (height - 1.2)), ncols=2
        )

    save_drawing(target, draw, size=(8, height))


def _draw_costs(axis: Any, result: Result) -> None:
    """Draw the cost of each rule against the budget."""
    for rule in dict.fromkeys(row.rule for row in result.rows):
        rows = [row for row in result.rows if row.rule == rule and row.cost is not None]
        promised = rows[0].promise is not None
        axis.plot(
            [100 * row.alpha for row in rows], [row.cost for row in rows], marker="o", markersize=4, color=COLOURS[rule],
            linestyle="-" if promised else "--", label=rule.replace("`", "") + ("" if promised else " (no promise)"),
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xticks([100 * float(alpha) for alpha in ALPHAS], [f"{100 * float(alpha):g}" for alpha in ALPHAS])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel(f"net loss, points of accuracy ({result.table})")
    axis.set_ylabel("dollars for 10,000 questions")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)


# --- The command ---


def found(folder: Path) -> Iterator[tuple[Literal["batch", "services"], Path, Path | None]]:
    """Return the tables of a folder that have one of the two forms, with the published curves of theirs."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".parquet", ".csv", ".jsonl") or path.stem.endswith(CURVES):
            continue
        with Table(path) as table:
            columns = set(table.types)
        names = {name.removesuffix("_confidence") for name in columns if name.endswith("_confidence")}
        if {"answer", "confidence"} <= columns and columns & {"truth", "right"}:
            yield "batch", path, None
        elif len(names) > 1 and all(
            {f"{name}_answer", f"{name}_cost"} <= columns and {"truth", f"{name}_right"} & columns for name in names
        ):
            curves = [other for other in folder.iterdir() if other.stem == path.stem + CURVES]
            yield "services", path, curves[0] if curves else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every table, print the results, and write the page with its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DATA)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of batches (%(default)s)")
    parser.add_argument("--splits", type=int, default=SPLITS, help="of services (%(default)s)")
    parser.add_argument("--table", action="append", help="only this one; may be repeated")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the page is written (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    known = options.docs / "bench.json"
    results = (
        {}
        if not known.exists()
        else {one.table: one for one in msgspec.json.decode(known.read_bytes(), type=list[Result])}
    )
    new: list[Result] = []
    failed = 0
    for kind, path, curves in found(options.folder):
        if options.table and path.stem not in options.table:
            continue
        start = time.perf_counter()
        try:
            if kind == "batch":
                new.append(batch_result(path.stem, path, options.draws))
            else:
                new.append(services_result(path.stem, path, options.splits, curves))
        except ArbitrageError as error:
            failed += 1
            print(f"{path.stem}: {error}", file=sys.stderr)
            continue
        print(f"{path.stem}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        if not options.json:
            show(new[-1])
    results |= {result.table: result for result in new}
    ordered = sorted(results.values(), key=lambda result: (result.table not in SHIPPED, result.table))
    known.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    (options.docs / PAGE).write_text(page(ordered), encoding="utf-8")
    figures(ordered, options.docs)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(new), indent=1).decode())
    if not new:
        print(f"{options.folder}: no table of services or of items with labels", file=sys.stderr)
    return 1 if failed or not new else 0


def show(result: Result) -> None:
    """Print a table."""
    header, body = cells(result, result.rows)
    lines = [header, *body]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    print(f"\n{result.table}: {result.items:,} items, {result.sample:,} to calibrate on. {result.about}.")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
