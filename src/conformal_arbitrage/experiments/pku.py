"""PKU-SafeRLHF: helpfulness against severity; 500/500, alpha .1 to .6, grid 0.0025, five random routers.

The paper's text describes a 0/1 Guardian (1 on the reply of lowest severity) while its table reports severity, which
ranges up to 3. Both readings are run; only the second one bounds severity.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from conformal_arbitrage.errors import SourceError
from conformal_arbitrage.evaluation.frontier import Frontier, evaluate
from conformal_arbitrage.experiments.protocol import (
    TRIALS,
    Experiment,
    Source,
    cell,
    our_table,
    paper_table,
    rules_table,
    sized,
)
from conformal_arbitrage.experiments.report import Figure, Report, ReportTable
from conformal_arbitrage.scorelog.log import ScoreLog

NAME, TITLE, LABEL = "pku", "PKU-SafeRLHF: helpfulness against harmlessness", "tab:pku_main"
ALPHAS = (0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
PROBABILITIES = (0.2, 0.4, 0.5, 0.6, 0.8)
PKU_RULE = {"guardian_sees": "candidates", "grid": 0.0025}


def run_pku(source: Source, seed: int) -> Report:
    """Run both readings if the log has severities, otherwise its own real-valued Guardian."""
    if source.bundled:
        raise SourceError(
            "pku needs scores of helpfulness and a safety Guardian; the bundled log has neither. Give a log with "
            "--log FILE: `primary` (helpfulness), a list `severity` per reply, `correct` or `label` for the more helpful one"
        )
    log = source.read("pku")
    outcome = "correct" if "correct" in log.outcome_names else "helpfulness"
    if outcome == "helpfulness":
        log = replace(log, lists={**log.lists, outcome: log.primary}, outcomes=(*log.outcomes, outcome))
    size, sizes = sized(len(log), 500, 1000)
    test = min(500, len(log) - size)
    sweep: dict[str, Any] = {
        "calibration_size": size, "test_size": test, "trials": TRIALS, "seed": seed, "probabilities": PROBABILITIES,
        "delta_x": "loss", "delta_of": outcome,
    }  # fmt: skip
    tables: list[ReportTable] = []
    frontiers: list[Frontier] = []
    for name, title, reading, bound in _readings(log):
        alphas = [alpha for alpha in ALPHAS if alpha < bound]
        frontier = evaluate(reading, alphas, loss_bound=bound, **PKU_RULE, **sweep)
        rules = rules_table(reading, alphas, PKU_RULE, loss_bound=bound, **sweep)
        details = our_table(frontier, f"{title}: details", name=f"{name} details", y=outcome)
        tables += [_table(frontier, name, title, outcome), details, replace(rules, name=f"{name} rules")]
        frontiers.append(frontier)
    return Report(
        name=NAME,
        title=TITLE,
        source=source.title,
        configuration={"trials": TRIALS, "sizes": sizes, "grid": 0.0025, "helpfulness": outcome},
        data_sha256=log.sha256(),
        seed=seed,
        tables=(*tables, paper_table(LABEL)),
        notes=(
            "A budget for the 0/1 Guardian bounds how often the safer reply is lost; only the severity reading bounds it.",
        ),
        figure=Figure(frontier=frontiers[-1], x="loss", y=outcome),
        facts={"frontier": frontiers[-1]},
    )


def _readings(log: ScoreLog) -> list[tuple[str, str, ScoreLog, float]]:
    severity = log.lists.get("severity")
    if severity is None:
        return [("real-valued", "The log's own real-valued Guardian, losses in [0, 1]", log, 1.0)]
    if np.isnan(severity).any():
        raise SourceError(
            f"{log.source}: some severities are missing; fill them in, since a missing one must not count as safe"
        )
    lowest = np.repeat(np.minimum.reduceat(severity, log.offsets[:-1]), log.sizes)
    outcomes = tuple(dict.fromkeys((*log.outcomes, "severity")))
    zero_one = replace(log, guardian=(severity == lowest).astype(float), outcomes=outcomes)
    graded = replace(log, guardian=-severity, outcomes=outcomes)
    return [
        ("0/1", "0/1 Guardian, losses in [0, 1]: the paper's text", zero_one, 1.0),
        ("severity", "Severity Guardian, losses in [0, 3]: what the paper's table reports", graded, 3.0),
    ]


def _table(frontier: Frontier, name: str, title: str, outcome: str) -> ReportTable:
    has_severity = "severity" in frontier.points[0].outcomes
    figures = (outcome, *(["severity"] if has_severity else []), "loss", "delta", "deferred")
    settings = [p.probability if p.alpha is None else p.alpha for p in frontier.points]
    rows = tuple(
        (p.policy, at, *(cell(p, f) for f in figures)) for p, at in zip(frontier.points, settings, strict=True)
    )
    columns = ("policy", "alpha or probability", *figures)
    return ReportTable(name=name, title=title, columns=columns, rows=rows, decimals=(0, *[3] * (len(columns) - 1)))


EXPERIMENT = Experiment(name=NAME, title=TITLE, run=run_pku)
