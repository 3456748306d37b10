"""Options that several commands share, and what arguments name: logs, certificates, configurations, stores."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import reduce, wraps
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click

from conformal_arbitrage.calibration.calibrate import RowFacts, count_rows, digest_parts
from conformal_arbitrage.calibration.certificate import Certificate, read_document
from conformal_arbitrage.calibration.learned import Features
from conformal_arbitrage.calibration.options import refuse_combination
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli.output import warn
from conformal_arbitrage.errors import CertificateError, OutputError, StoreError
from conformal_arbitrage.evaluation.looks import looks_at, note_look
from conformal_arbitrage.live.build import database_exists, database_of, open_record
from conformal_arbitrage.live.config import FILE, Config, read_config
from conformal_arbitrage.scorelog.cascade import GUARDIAN_NAME, CascadeLog
from conformal_arbitrage.scorelog.log import CostOptions, ScoreLog
from conformal_arbitrage.scorelog.parts import (
    GATHERED,
    Engine,
    FileList,
    ScoreParts,
    as_engine,
    find_files,
    is_many,
)
from conformal_arbitrage.scorelog.spark import SparkTable, is_spark
from conformal_arbitrage.scorelog.tables import Table, parquet_rows
from conformal_arbitrage.store.session import Store

Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")
_WITH_PATH = frozenset(
    {"log", "alpha", "config", "loss", "missing_guardian", "fixed_before", "guardian_column", "output"}
    | {"force", "as_json", "path", "chain", "models", "tuning_share", "seed"}
    | {"alphas", "calibration_size", "test_size", "trials", "form"}
)
"""Options that a cascade takes."""
_UNPROVED: Mapping[str, Any] = {
    "confidence": "confidence", "zero_one": "confidence", "dial": "dial", "by": "groups", "margins": "guard",
}  # fmt: skip
"""Options that have no proof for a cascade, each with its name in the table of refusals."""


class WrappingGroup(click.Group):
    """A group whose help wraps the first sentence of a command where click would cut it off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write all commands that are not hidden."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        lines = [
            (name, command.get_short_help_str(limit=1000))
            for name, command in commands.items()
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(lines)


class SectionedCommand(click.Command):
    """A command with many options, whose help groups them: those in no section come first, as the usual ones."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usual options, then each section."""
        places = {name: title for title, names in self.sections.items() for name in names}
        lines: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Usual options", *self.sections)}
        for param in self.get_params(ctx):
            line = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if line is not None:
                lines[places.get(param.name or "", "Usual options")].append(line)
        for title, written in lines.items():
            with formatter.section(title):
                formatter.write_dl(written)


PROMISE = {"What is promised": ("confidence", "zero_one", "dial", "by", "small_groups", "cluster", "max_cluster_size")}
LOSS = {"What counts as a loss": ("loss", "loss_bound", "guardian_sees", "binarize", "missing_guardian", "outcomes")}
SCORE = {"A learned score": ("score", "menu_size", "group_source", "without", "text")}
CASCADE = {"A cascade of several models": ("path", "chain", "models", "tuning_share")}
"""Sections of options that `calibrate` and `evaluate` share."""


class Share(click.ParamType[str]):
    """A number in the user's decimals, which the library reads exactly; 5% is 0.05."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text of the number.

        Raises:
            BadParameter: a percentage is not a number.
        """
        text = str(value).strip()
        if not text.endswith("%"):
            return text
        try:
            return f"{Decimal(text[:-1].strip()) / 100:f}"
        except InvalidOperation:
            self.fail(f"{text!r} is not a percentage such as 5%", param, ctx)


SHARE = Share()


def chained(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return several options as one decorator."""
    return lambda command: reduce(lambda wrapped, decorate: decorate(wrapped), reversed(decorators), command)


def bundled(name: str, kind: type[Any], *decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return several options as one decorator; the command gets them as one argument, an object with a field for each."""

    def decorate(command: Any) -> Any:
        @wraps(command)
        def gathered(*args: Any, **values: Any) -> Any:
            fields = {field: values.pop(field) for field in kind.__annotations__ if field in values}
            return command(*args, **values, **{name: kind(**fields)})

        return chained(*decorators)(gathered)

    return decorate


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a log that options name; None for the usual one."""

    primary_column: str | None = None
    guardian_column: str | None = None
    outcomes: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, Any]:
        """The columns of both models, as the library takes them."""
        return {"primary": self.primary_column or "primary", "guardian": self.guardian_column or "guardian"}

    def of(self, certificate: Certificate) -> "Columns":
        """Return the same, but where no option names a model's column that which a certificate was made with."""
        certificate.refuse_cascade()
        known = certificate.evidence.columns
        return replace(
            self,
            primary_column=self.primary_column or known["primary"],
            guardian_column=self.guardian_column or known["guardian"],
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where the work on a log in parts is done, as options name it."""

    engine: str | None
    jobs: int | None

    def of(self, scores: "AnyLog") -> Engine | None:
        """Return the engine for a log; None for one in memory."""
        if isinstance(scores, ScoreParts):
            return as_engine(self.engine, self.jobs)
        if isinstance(scores, SparkTable) and self.jobs is None:
            return scores
        if self.jobs is not None or self.engine is not None:
            raise click.UsageError(
                "--engine and --jobs are for a log in parts: give a pattern, a folder, a URL, or one Parquet file of more "
                "than 10 million rows"
            )
        return None


class OneThreshold(TypedDict):
    """How one threshold is calibrated, in the library's keywords."""

    guardian_sees: Any
    boundary: Any
    loss_bound: str | None
    confidence: str | None
    zero_one: bool


alpha = click.option(
    "--alpha",
    type=SHARE,
    metavar="A",
    help="The risk budget, a limit on the expected loss, such as 0.05 or 5%.  [default: as configured]",
)
alphas = click.option(
    "--alpha",
    "alphas",
    type=SHARE,
    multiple=True,
    required=True,
    metavar="A",
    help="A risk budget, such as 0.05 or 5%; may be repeated.",
)
fixed_before = click.option(
    "--fixed-before", is_flag=True, help="State that alpha and options were fixed before these rows were looked at."
)
_roles = chained(
    click.option("--primary-column", metavar="NAME", help="Column of the Primary's scores.  [default: primary]"),
    click.option("--guardian-column", metavar="NAME", help="Column of the Guardian's scores.  [default: guardian]"),
)
_outcomes = click.option(
    "--outcome", "outcomes", multiple=True, metavar="NAME", help="List column to report as an outcome; may be repeated."
)
roles = bundled("columns", Columns, _roles)
columns = bundled("columns", Columns, _roles, _outcomes)
sample = click.option(
    "--sample",
    type=click.IntRange(1, 10_000_000),
    metavar="N",
    help="Rows of a log in parts to look at, drawn uniformly without replacement.  [default: 1000000]",
)
binarize = click.option("--binarize", is_flag=True, help="Measure the loss on the paper's 0/1 Guardian; needs labels.")
_guardian_sees = click.option(
    "--guardian-sees",
    type=click.Choice(["all", "candidates", "all-restricted-loss"]),
    default="all",
    show_default=True,
    help="Actions that a deferral shows the Guardian: every one, or the candidates as in the paper.",
)
_boundary = click.option(
    "--boundary",
    type=click.Choice(["random", "include"]),
    help="Keep a random share of the actions exactly at the threshold gap, which spends the whole budget, or every one.  "
    "[default: random; include if the log has no ids]",
)
missing_guardian = click.option(
    "--missing-guardian",
    type=click.Choice(["worst_case"]),
    help="Count rows without a Guardian score as the largest loss.",
)
loss_bound = click.option(
    "--loss-bound", metavar="B", help="Largest possible loss; needed if Guardian scores, or grades, leave [0, 1]."
)


def _named_loss(_: click.Context, __: click.Parameter, loss: str) -> str | None:
    """Return the loss as the library names it."""
    return None if loss == "regret" else loss


rule = chained(
    _guardian_sees,
    _boundary,
    click.option(
        "--loss",
        type=click.Choice(["regret", "net"]),
        default="regret",
        show_default=True,
        callback=_named_loss,
        help="Count what the Guardian does better (regret), or that minus what it does worse (net); net needs labels.",
    ),
    loss_bound,
    binarize,
    missing_guardian,
)
threshold = bundled(
    "threshold",
    OneThreshold,
    _guardian_sees,
    _boundary,
    loss_bound,
    click.option(
        "--confidence",
        type=SHARE,
        metavar="C",
        help="Certify that the long-run loss of the certificate is within the budget, with this probability.",
    ),
    click.option("--zero-one", is_flag=True, help="Declare that every loss is 0 or the bound."),
)
primary_cost = click.option("--primary-cost", type=float, metavar="$", help="Dollars per query of the Primary.")
guardian_cost = click.option("--guardian-cost", type=float, metavar="$", help="Dollars per query of the Guardian.")
cost_options = chained(
    primary_cost,
    guardian_cost,
    click.option(
        "--primary-price",
        type=(float, float),
        metavar="IN OUT",
        help="Dollars per million input and output tokens of the Primary, for recorded token counts.",
    ),
    click.option("--guardian-price", type=(float, float), metavar="IN OUT", help="The same for the Guardian."),
)
costs = bundled("costs", CostOptions, cost_options)
cluster = chained(
    click.option(
        "--cluster",
        metavar="COLUMN",
        help="Rows that belong together, such as a conversation: clusters are exchangeable.",
    ),
    click.option(
        "--max-cluster-size",
        type=int,
        metavar="M",
        help="The most rows that any cluster may ever have; with --cluster.",
    ),
)
confident = chained(
    click.option(
        "--confidence",
        type=SHARE,
        metavar="C",
        help="Certify that the long-run loss of this one certificate is within the budget, with this probability.",
    ),
    click.option(
        "--zero-one", is_flag=True, help="Declare that every loss is 0 or the bound; makes --confidence cheaper."
    ),
    click.option(
        "--dial",
        is_flag=True,
        help="Certify ten budgets together: `arbitrage certificate choose` may pick one after looking; with --confidence.",
    ),
    click.option(
        "--by", metavar="COLUMN", help="One threshold and one promise for each group of rows, such as a tenant."
    ),
    click.option(
        "--small-groups",
        type=click.Choice(["defer", "merge"]),
        default="defer",
        show_default=True,
        help="What to do with groups of too few rows: defer them, or let them share a threshold; with --by.",
    ),
)
learned = chained(
    click.option(
        "--score",
        type=click.Choice(["margin", "auto", "learned"]),
        default="margin",
        show_default=True,
        help="Order queries by their margin, by a score learned from these rows, or by whichever keeps more of them "
        "(auto).",
    ),
    click.option(
        "--menu-size",
        type=int,
        metavar="N",
        help="Every query has this many actions: a learned score then uses the probability of each.",
    ),
    click.option(
        "--group-source",
        metavar="NAME",
        help="What names the group of a live query, such as metadata.subject; a policy must name the same.",
    ),
    click.option(
        "--without",
        "without",
        multiple=True,
        type=click.Choice(["groups", "tokens", "answers"]),
        help="Learn without the log's groups, its token counts or its answers; may be repeated.",
    ),
    click.option("--text", is_flag=True, help="Learn from the texts of the queries as well; needs the extra `text`."),
    click.option(
        "--answers",
        is_flag=True,
        help="Learn from what the Primary answered, also the top action.  [default: if a column `answer` says it]",
    ),
)
path_options = chained(
    click.option(
        "--path",
        is_flag=True,
        help="Calibrate a cascade of several models; LOG has NAME_confidence, NAME_grade, NAME_cost, NAME_answer of each.",
    ),
    click.option("--chain", metavar="A,B", help="With --path: ask these models, in this order.  [default: chosen]"),
    click.option("--models", metavar="A,B,...", help="With --path: choose the chain among these.  [default: all]"),
    click.option(
        "--tuning-share",
        type=float,
        default=0.4,
        show_default=True,
        metavar="S",
        help="With --path: share of the rows to choose and fit the chain on.",
    ),
)
engine_options = bundled(
    "place",
    Place,
    click.option(
        "--engine",
        metavar="NAME",
        help="What reads a log in parts (a pattern, a folder, a URL, or one Parquet file of more than 10 million rows): "
        "threads, processes or a Dask scheduler (tcp://...). For table:NAME, the Spark that holds the table (sc://..., "
        "spark://..., local[N], or spark for what its own settings say).  [default: threads]",
    ),
    click.option(
        "--jobs", type=click.IntRange(1, 10_000), metavar="N", help="Threads or processes.  [default: all cores]"
    ),
)
force = click.option("--force", is_flag=True, help="Overwrite an existing certificate of another log or other options.")
full = click.option("--full", is_flag=True, help="Print the whole guarantee, and what its arithmetic rests on.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
config_file = click.option(
    "--config", default="arbitrage.toml", show_default=True, metavar="FILE", help="The configuration file."
)
policy = click.option(
    "--policy", metavar="NAME", help="The policy whose models to use.  [default: the Primary and Guardian of the file]"
)


def paid_run(*, limit: str, dry_run: str, max_cost: str) -> Callable[[Command], Command]:
    """Return the options of a command that pays for many calls, with what they mean there."""
    dollars = click.FloatRange(0, min_open=True)
    return chained(
        click.option("--limit", type=click.IntRange(1), metavar="N", help=limit),
        click.option(
            "--concurrency", type=click.IntRange(1), default=16, show_default=True,
            help="Maximum number of concurrent calls.",
        ),
        click.option("--dry-run", is_flag=True, help=dry_run),
        click.option("--max-cost", type=dollars, metavar="$", help=max_cost),
    )  # fmt: skip


# --- Options as the library takes them ---


def learned_options(further: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a learned score out of a command's, and return them as the library names them.

    Raises:
        UsageError: features are named for the margin, which has none.
    """
    names = ("score", "menu_size", "group_source", "without", "text", "answers")
    score, menu_size, group_source, without, text, answers = (further.pop(name) for name in names)
    if score == "margin":
        alone = group_source is not None and further.get("by") is None
        if menu_size is not None or without or text or answers or alone:
            raise click.UsageError(
                "--menu-size, --group-source, --without, --text and --answers are for a learned score; give --score auto as "
                "well (--group-source goes with --by, too)"
            )
        return {"score": score, "group_source": group_source}
    groups, tokens = ("groups" not in without, "tokens" not in without)
    features = Features(
        groups=groups,
        tokens=tokens,
        menu_size=menu_size,
        group_source=group_source,
        text=text,
        answers=False if "answers" in without else answers or None,
    )
    return {"score": score, "features": features}


def chain_options(further: dict[str, Any], *also: str) -> dict[str, Any] | None:
    """Take the options of a cascade out of a command's, and return them as the library names them; None for a pair.

    Args:
        further: the command's options.
        also: those that only a cascade has, besides `path_options`.

    Raises:
        OptionError: an option has no proof for a cascade.
        UsageError: an option has no meaning for a cascade, or is one of a cascade without --path.
    """
    names = ("chain", "models", "tuning_share", *also)
    values = {name: further.pop(name) for name in names}
    if further.pop("path"):
        _refuse_others()
        return values | {name: listed(text) for name in ("chain", "models") if (text := values[name]) is not None}
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} describes a cascade; add --path")
    return None


def _refuse_others() -> None:
    """Refuse options that have no meaning, or no proof, for a cascade."""
    context = click.get_current_context()
    for name in context.params:
        if context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE or name in _WITH_PATH:
            continue
        if name in _UNPROVED:
            refuse_combination(_UNPROVED[name], "path")
        raise click.UsageError(
            f"--{name.replace('_', '-')} has no meaning for a cascade; leave it out, or leave out --path"
        )


def listed(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def refuse_existing(path: str, *, force: bool) -> None:
    """Refuse to overwrite a file that is not asked to be."""
    if Path(path).exists() and not force:
        raise OutputError(f"{path}: already exists; choose another name with -o, or overwrite it with --force")


def refuse_same(source: str, output: str | None) -> None:
    """Refuse an output that would overwrite the input."""
    if output is not None and os.path.realpath(source) == os.path.realpath(output):
        raise click.UsageError(f"{output} would overwrite the input; give the output another name")


# --- Configurations, and the secret and the store beside them ---


def read_policy_config(config: str, policy: str | None) -> Config:
    """Read a configuration, and bring the pair of a policy into its short form if one is named."""
    configuration = read_config(config)
    return configuration if policy is None else configuration.for_policy(policy)


def read_configured(config: str | None) -> Config:
    """Read the configuration that alpha is taken from.

    Raises:
        UsageError: none is named, and there is none here.
    """
    if config is None and not Path(FILE).exists():
        raise click.UsageError(f"give --alpha, the risk budget; there is no {FILE} here to take it from")
    return read_config(config or FILE)


def with_store(config: str, use: Callable[[Store], Awaitable[Value]], *, only_existing: bool = False) -> Value:
    """Open the configured store, use it, and close it.

    Args:
        config: the configuration file.
        use: what to do with the store.
        only_existing: refuse to create a database, for commands that only read.

    Raises:
        StoreError: there is none, and none may be created.
    """
    if only_existing and not database_exists(read_config(config)):
        raise StoreError(
            f"there is no database at {database_of(read_config(config))} yet; `arbitrage serve` creates it, or name another "
            "configuration with --config"
        )

    async def run() -> Value:
        async with await open_record(read_config(config)) as store:
            return await use(store)

    return asyncio.run(run())


# --- The logs and certificates that arguments name ---

PairLog = ScoreLog | ScoreParts | SparkTable
AnyLog = PairLog | CascadeLog

SAMPLE = 1_000_000
"""Rows of a log in parts that commands look at which need them all at once."""
_TABLE = "table:"
_NO_TABLE = "table:NAME is for calibrate and verify, with the Spark that holds it: --engine sc://... or spark"


def read_log(
    path: str,
    columns: Columns,
    *,
    binarized: bool = False,
    guardian_optional: bool = False,
    sample: int | None = None,
    whole: bool = False,
) -> ScoreLog:
    """Read the log that an argument names, with the columns that the options name.

    Args:
        binarized: measure the loss on the paper's 0/1 Guardian.
        guardian_optional: whether the Guardian's column may be absent.
        sample: how many rows of a log in parts to draw.
        whole: read one file into memory however many rows it has.
    """
    rows = None if whole else sample_of(path, sample)
    if rows is not None:
        return _sampled(path, columns, rows, binarized=binarized)
    roles = columns.roles
    if guardian_optional:
        with Table(path) as table:
            roles["guardian"] = roles["guardian"] if roles["guardian"] in table.types else None
    log = ScoreLog.read(path, **roles, outcomes=columns.outcomes)
    return log.binarized() if binarized else log


def sample_of(path: str, sample: int | None) -> int | None:
    """Return how many rows to draw from a log in parts; None for one that is read whole, which takes no --sample."""
    if in_parts(path):
        return sample or SAMPLE
    if sample is not None:
        raise click.UsageError(
            "--sample is for a log in parts: a pattern, a folder, a URL, or one Parquet file of more than 10 million rows"
        )
    return None


def in_parts(path: str) -> bool:
    """Return whether a log is read in parts: a pattern, a folder, a URL, or one Parquet file with very many rows."""
    return (parquet_rows(path) or 0) > GATHERED if os.path.isfile(path) else is_many(path)  # noqa: PTH113


def _sampled(path: str, columns: Columns, rows: int, *, binarized: bool) -> ScoreLog:
    """Return a uniform sample of a log in parts, and say so."""
    log = ScoreParts.read(path, **columns.roles, outcomes=columns.outcomes)
    if len(log) > rows:
        warn(f"from a uniform sample of {rows:,} of {len(log):,} rows (seed 0)")
    sample = log.sample(rows)
    if len(log) > rows:
        sample = sample.taken_from(*lineage_of(log))
    return sample.binarized() if binarized else sample


def open_log(log: str, columns: Columns, place: Place, **how: Any) -> tuple[PairLog, Engine | None]:
    """Return the log that an argument names, and where the work on it is done."""
    scores = _opened(log, columns, place.engine, **how)
    return scores, place.of(scores)


def _opened(log: str, columns: Columns, engine: str | None, **how: Any) -> PairLog:
    """Return the table that table:NAME means in the Spark of --engine; any other log as `read_scores` does."""
    if not (log.startswith(_TABLE) and engine):
        return read_scores(log, columns, **how)
    if not is_spark(engine):
        raise click.UsageError(_NO_TABLE)
    if columns.outcomes:
        raise click.UsageError("--outcome is not for a table; export it as Parquet files")
    opened = SparkTable.open(engine, log.removeprefix(_TABLE), **columns.roles)
    return opened.binarized() if how.get("binarized") else opened


def open_table(table: str, engine: str | None) -> str | SparkTable:
    """Return the table that table:NAME means in the Spark of --engine; another name as it is."""
    if not table.startswith(_TABLE):
        if engine is not None:
            raise click.UsageError(f"--engine is for table:NAME here, a table of Spark; got {table}")
        return table
    if engine is None or not is_spark(engine):
        raise click.UsageError(f"{table}: name the Spark that holds the table: --engine sc://... or spark")
    return SparkTable.open(engine, table.removeprefix(_TABLE))


def read_scores(
    log: str, columns: Columns, *, binarized: bool = False, guardian_optional: bool = False, whole: bool = False
) -> ScoreLog | ScoreParts:
    """Read a log into memory, or find the files of one in parts; see `read_log`."""
    if log.startswith(_TABLE):
        raise click.UsageError(_NO_TABLE)
    if not in_parts(log) or (whole and os.path.isfile(log)):  # noqa: PTH113
        return read_log(log, columns, binarized=binarized, guardian_optional=guardian_optional, whole=True)
    roles = columns.roles
    if guardian_optional:
        path = find_files(log)[0]
        with FileList([path]) as listed:
            roles["guardian"] = roles["guardian"] if roles["guardian"] in listed.types_of(path) else None
    parts = ScoreParts.read(log, **roles, outcomes=columns.outcomes)
    return parts.binarized() if binarized else parts


def log_of(certificate: Certificate, log: str, columns: Columns, engine: str | None) -> AnyLog:
    """Return the log that a certificate is to be recomputed from, with the columns that options or the certificate name."""
    if certificate.is_cascade:
        return CascadeLog.read(log, guardian=certificate.path.guardian, models=certificate.path.models)
    scores = _opened(log, columns.of(certificate), engine)
    part = certificate.provenance.part
    return scores.sample(part.sample) if part is not None and part.sample and isinstance(scores, ScoreParts) else scores


def refuse_overwriting(
    path: str | Path, differs: Callable[[Certificate], object], *, force: bool, another: str = "file"
) -> None:
    """Refuse to overwrite anything but a certificate of the same log and options.

    Args:
        differs: whether the one that is there is another, such as its `differences`.
        another: what -o names.

    Raises:
        OutputError: the file is there, and is another.
    """
    if force or not Path(path).is_file():  # a folder is refused when it is written to
        return
    with suppress(CertificateError):
        if not differs(Certificate.from_dict(read_document(Path(path)), source=str(path))):
            return
    raise OutputError(
        f"{path}: already exists, and is not the certificate of the same log and options; name another {another} in -o, or "
        "overwrite it with --force"
    )


def read_cascade(path: str, guardian: str | None, models: list[str] | None) -> CascadeLog:
    """Read the log of a cascade with the models that the options name."""
    return CascadeLog.read(path, guardian=guardian or GUARDIAN_NAME, models=models)


def made_from(certificate: Certificate, log: str, columns: Columns) -> bool:
    """Return whether a certificate was made from the files of a log in parts, of which a command sees a sample only."""
    if not in_parts(log):
        return False
    parts = ScoreParts.read(log, **columns.of(certificate).roles)
    parts = parts.binarized() if certificate.loss.binarized else parts
    return digest_parts(parts, as_engine(None)) == certificate.evidence.log_sha256


def counts_of_parts(log: str, columns: Columns, *, binarized: bool) -> RowFacts:
    """Return what is counted in all rows of a log in parts, of which a command sees a sample only."""
    parts = ScoreParts.read(log, **columns.roles)
    return count_rows(parts.binarized() if binarized else parts, as_engine(None))


def lacks_guardian(scores: ScoreLog | ScoreParts) -> bool:
    """Return whether a log has no Guardian scores at all; of one in parts, whether it lacks their column."""
    return scores.guardian is None if isinstance(scores, ScoreParts) else bool(scores.missing.all())


def remember_look(
    lineage: Sequence[str], command: str, *, beside: Sequence[str] = (), terms: str | None = None
) -> None:
    """Note that a command looked at a log; a folder that cannot be written gives a warning."""
    try:
        note_look(lineage, command, beside=beside, terms=terms)
    except OutputError as error:
        warn(f"this look was not noted, so calibrate cannot remind you of it: {error}")


def describe_looks(lineage: Sequence[str], *, fixed_before: bool, terms: str | None = None) -> str | None:
    """Return what a certificate says of earlier looks at its log, but for calibrations with the same `terms`; or None."""
    try:
        looks = looks_at(lineage, terms=terms)
    except OutputError as error:
        warn(str(error))
        return None
    if not looks.commands:
        return None
    total = looks.commands.total()
    times = "once" if total == 1 else f"{total} times"
    what = f"this log, or one it shares rows with, was looked at {times} before ({', '.join(looks.commands)})"
    if looks.calibrations:
        what += f", and this is calibration {looks.calibrations + 1} of it"
    if fixed_before:
        return f"{what}; the user states that alpha and options had been fixed before"
    warn(
        f"{what}: alpha and options must have been fixed before; say so with --fixed-before, or calibrate on other rows"
    )
    return f"{what}; alpha and options must have been fixed before, or the guarantee does not hold"


def lineage_of(scores: AnyLog, certificate: Certificate | None = None) -> tuple[str, ...]:
    """Return the digests of the logs that one was taken from, and its own at last; a certificate of it knows the latter."""
    if certificate is not None and isinstance(scores, ScoreLog) and scores.binary is None:
        return (*scores.origins(), certificate.evidence.log_sha256)
    if isinstance(scores, ScoreLog | CascadeLog):
        return scores.lineage()
    if certificate is not None and not scores.binary:
        return (certificate.evidence.log_sha256,)
    return (digest_parts(replace(scores, binary=False), scores if isinstance(scores, SparkTable) else as_engine(None)),)


def load_certificate(path: str) -> Certificate:
    """Load a certificate of a pair or of a cascade, with its key."""
    return _checked(Certificate.load(path), path)


def load_pair_certificate(path: str) -> Certificate:
    """Load a certificate of a pair, with its key."""
    certificate = load_certificate(path)
    certificate.refuse_cascade(source=path)
    return certificate


def _checked(certificate: Certificate, path: str) -> Certificate:
    """Return a certificate with its key if the project's secret is at hand, and verify its signature.

    A certificate without a signature gives a warning: anybody may have edited it.

    Raises:
        CertificateError: it is not the project's, or something was changed.
    """
    secret = ProjectSecret.search()
    if secret is None:
        return certificate
    if certificate.signed:
        certificate.check_signature(secret, source=path)
    else:
        warn(
            f"{path} is not signed, so nothing shows that it is as it was calibrated; "
            "`arbitrage verify` recomputes it from its log"
        )
    return certificate.with_key_of(secret)
