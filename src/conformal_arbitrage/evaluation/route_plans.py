"""Route plans: the settings of a recommendation in a file, so that it can be repeated and compared.

A plan names the log relative to its own folder, and records the choice that was made and the digest of the rows that
were certified. Knows nothing of terminals or of the project's secret.
"""

import json
import os
import shlex
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, structs

from conformal_arbitrage.calibration.learned_score import ScoreKind
from conformal_arbitrage.calibration.parts import refuse_repeated_ids
from conformal_arbitrage.errors import ConfigError, OptionError
from conformal_arbitrage.evaluation.costs import CostOptions
from conformal_arbitrage.evaluation.recommendation import TUNING_SHARE, recommend
from conformal_arbitrage.evaluation.route_options import PromisedLoss, Recommendation
from conformal_arbitrage.scorelog.files import Table, write_text
from conformal_arbitrage.scorelog.locations import scheme_of
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.parts import ScoreParts, first_rows
from conformal_arbitrage.types import MissingGuardian

_NOT_SCORES = ("correct", "label", "actions")


class PlanResult(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a recommendation led to, for comparison with a repetition of it; without a relaxation or a score, all defer."""

    primary: str
    guardian: str
    loss: PromisedLoss
    score: ScoreKind = "margin"
    text: bool = False
    boundary: str
    relaxation: float | None = None
    boundary_u: float | None = None
    score_sha256: str | None = None
    tuning_rows: int
    certified_rows: int
    certified_sha256: str


class RoutePlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a recommendation depends on besides the rows and the project's secret.

    Attributes:
        log: the score log, relative to the folder of the plan.
        alpha: the risk budget, as written.
        primary_columns: the Primaries to choose from; if empty, the column `primary` or, without one, every column of
            scores.
        guardian_columns: the same for the Guardian.
        text: also try a score that is learned from texts.
        sample: of a log in parts, how many rows to draw and look at; None for one file, which is read whole.
        result: what came of it.
    """

    log: str
    alpha: str
    loss: PromisedLoss = "regret"
    share: float = TUNING_SHARE
    seed: int = 0
    trials: int = 20
    primary_columns: tuple[str, ...] = ()
    guardian_columns: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()
    binarize: bool = False
    text: bool = False
    loss_bound: str | None = None
    missing_guardian: MissingGuardian | None = None
    primary_cost: float | None = None
    guardian_cost: float | None = None
    primary_price: tuple[float, float] | None = None
    guardian_price: tuple[float, float] | None = None
    sample: int | None = None
    result: PlanResult | None = None

    def source(self, folder: Path) -> str:
        """Return the log, given the folder of the plan: a path, a pattern or a URL."""
        return self.log if scheme_of(self.log) is not None else str(folder / self.log)

    def logs(self, folder: Path) -> list[ScoreLog]:
        """Read the log once for every pair of columns to choose from; of one in parts the same sample each time."""
        path = self.source(folder)
        primaries, guardians = self._columns(path)
        pairs = [(p, g) for p, g in product(primaries, guardians) if p != g]
        if not pairs:
            raise OptionError(
                f"{path}: there is no pair of score columns; name them with --primary-column and --guardian-column"
            )
        logs = [self._read(path, *pair) for pair in pairs]
        return [log.binarized() for log in logs] if self.binarize else logs

    def _read(self, path: str, primary: str, guardian: str) -> ScoreLog:
        if self.sample is None:
            return ScoreLog.read(path, primary=primary, guardian=guardian, outcomes=self.outcomes)
        log = ScoreParts.read(path, primary=primary, guardian=guardian, outcomes=self.outcomes)
        refuse_repeated_ids(log)
        return log.sample(self.sample)

    def _columns(self, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the columns that may play each role."""
        primaries, guardians = self.primary_columns, self.guardian_columns
        with Table(path) if self.sample is None else first_rows(path) as table:
            primaries = primaries or (("primary",) if "primary" in table.types else ())
            guardians = guardians or (("guardian",) if "guardian" in table.types else ())
            if not primaries or not guardians:
                skipped = {*_NOT_SCORES, *self.outcomes}
                lists = {name: table.numbers_if_any(name) for name in table.types if name not in skipped}
                scores = tuple(name for name, values in lists.items() if values is not None and (values[1] > 0).any())
                primaries = primaries or tuple(name for name in scores if name not in guardians)
                guardians = guardians or tuple(name for name in scores if name not in self.primary_columns)
        return primaries, guardians

    def recommend(self, logs: list[ScoreLog], key: bytes | None) -> Recommendation:
        """Choose and certify as the plan says."""
        return recommend(
            logs,
            self.alpha,
            loss=self.loss,
            share=self.share,
            seed=self.seed,
            trials=self.trials,
            key=key,
            loss_bound=self.loss_bound,
            missing_guardian=self.missing_guardian,
            text=self.text,
            costs=CostOptions(
                primary_cost=self.primary_cost,
                guardian_cost=self.guardian_cost,
                primary_price=self.primary_price,
                guardian_price=self.guardian_price,
            ),
        )

    def with_result(self, recommendation: Recommendation) -> "RoutePlan":
        """Return the plan with what came of it."""
        chosen, certificate = recommendation.chosen, recommendation.certificate
        result = PlanResult(
            primary=chosen.primary,
            guardian=chosen.guardian,
            loss=chosen.loss,
            score=chosen.score,
            text=chosen.text,
            boundary=chosen.boundary,
            relaxation=certificate.relaxation,
            boundary_u=certificate.boundary_u,
            score_sha256=None if certificate.learned is None else certificate.learned.sha256,
            tuning_rows=len(recommendation.tuning),
            certified_rows=len(recommendation.certified),
            certified_sha256=certificate.log_sha256,
        )
        return structs.replace(self, result=result)

    def differences(self, repeated: "RoutePlan") -> list[str]:
        """Return in which fields a repetition came to another result; nothing if the plan has none."""
        if self.result is None or repeated.result is None:
            return []
        then, now = structs.asdict(self.result), structs.asdict(repeated.result)
        return [f"{name} was {then[name]!r} and is now {now[name]!r}" for name in then if then[name] != now[name]]

    def commands(self, folder: Path, certificate: str) -> list[str]:
        """Return the commands that come to the same certificate by hand."""
        if self.result is None:
            return []
        result, log = self.result, self.source(folder)
        log = log if scheme_of(log) is not None else os.path.relpath(log)
        columns = ["--primary-column", result.primary, "--guardian-column", result.guardian]
        rule = ["--boundary", result.boundary, "--loss", result.loss, "--score", result.score]
        rule += ["--text"] if result.text else []
        further = [] if self.loss_bound is None else ["--loss-bound", self.loss_bound]
        further += ["--binarize"] if self.binarize else []
        further += [] if self.missing_guardian is None else ["--missing-guardian", self.missing_guardian]
        split = [
            "split",
            log,
            "tuning.parquet",
            "certify.parquet",
            "--share",
            f"{self.share:g}",
            "--seed",
            str(self.seed),
            *([] if self.sample is None else ["--sample", str(self.sample)]),
        ]
        rows = ["calibrate", "certify.parquet", "--alpha", self.alpha]
        calibrate = [*rows, *rule, *further, *columns, "-o", certificate]
        return [shlex.join(["arbitrage", *command]) for command in ([*split, *columns], calibrate)]

    def write(self, path: str | Path) -> None:
        """Write the plan as TOML."""
        document = {name: value for name, value in structs.asdict(self).items() if value not in (None, ())}
        result = document.pop("result", None)
        lines = [f"# Written by `arbitrage recommend`; `arbitrage recommend --from {Path(path).name}` repeats it.\n"]
        lines += [f"{name} = {_toml(value)}\n" for name, value in document.items()]
        if isinstance(result, PlanResult):
            figures = {name: value for name, value in structs.asdict(result).items() if value is not None}
            lines += ["\n[result]\n", *(f"{name} = {_toml(value)}\n" for name, value in figures.items())]
        write_text(path, "".join(lines))


def read_route_plan(path: str | Path) -> RoutePlan:
    """Read a plan.

    Raises:
        ConfigError: the file is absent, or not a plan.
    """
    if not Path(path).exists():
        raise ConfigError(
            f"{path}: there is no such file; write it with `arbitrage recommend LOG --alpha A -o {path}`, or name another"
        )
    try:
        return convert(tomllib.loads(Path(path).read_text(encoding="utf-8")), RoutePlan)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(
            f"{path}: not a plan of `arbitrage recommend` ({error}); write one with `arbitrage recommend LOG -o {path}`"
        ) from error


def _toml(value: Any) -> str:
    """Return a value as TOML, which takes JSON for texts, numbers, truth values and lists of them."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
