"""Options that several commands share, and the configurations and stores that they name."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from conformal_arbitrage.calibration.learned import Features
from conformal_arbitrage.calibration.options import refuse_combination
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.live.config import FILE, Config, read_config
from conformal_arbitrage.live.database import database_exists, database_of, open_record
from conformal_arbitrage.store import Store

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
roles = chained(
    click.option("--primary-column", metavar="NAME", help="Column of the Primary's scores.  [default: primary]"),
    click.option("--guardian-column", metavar="NAME", help="Column of the Guardian's scores.  [default: guardian]"),
)
columns = chained(
    roles,
    click.option(
        "--outcome",
        "outcomes",
        multiple=True,
        metavar="NAME",
        help="List column to report as an outcome; may be repeated.",
    ),
)
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
_boundary = partial(
    click.option, "--boundary", type=click.Choice(["include", "random"]), default="include", show_default=True
)
missing_guardian = click.option(
    "--missing-guardian",
    type=click.Choice(["worst_case"]),
    help="Count rows without a Guardian score as the largest loss.",
)
loss_bound = click.option(
    "--loss-bound", metavar="B", help="Largest possible loss; needed if Guardian scores leave [0, 1]."
)
rule = chained(
    _guardian_sees,
    _boundary(
        help="Keep every action exactly at the threshold gap, or a random share of them, which spends the whole budget "
        "and needs the project's secret."
    ),
    click.option(
        "--loss",
        type=click.Choice(["regret", "net"]),
        default="regret",
        show_default=True,
        help="Count what the Guardian does better (regret), or that minus what it does worse (net); net needs labels and "
        "the project's secret.",
    ),
    loss_bound,
    binarize,
    missing_guardian,
)
threshold = chained(
    _guardian_sees,
    _boundary(help="Keep every action exactly at the threshold gap, or a random share of them."),
    loss_bound,
    binarize,
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
costs = chained(
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
        help="Certify that the long-run loss of this one certificate is within the budget, with this probability; needs "
        "the project's secret, except with --zero-one or --binarize.",
    ),
    click.option(
        "--zero-one", is_flag=True, help="Declare that every loss is 0 or the bound; makes --confidence cheaper."
    ),
    click.option(
        "--dial",
        is_flag=True,
        help="Certify ten budgets together: `arbitrage certificate choose` may pick one after looking; with --confidence "
        "and the secret that it needs.",
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
        "(auto); the latter two need the project's secret.",
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
        type=click.Choice(["groups", "tokens"]),
        help="Learn without the log's groups, or without its token counts; may be repeated.",
    ),
    click.option("--text", is_flag=True, help="Learn from the texts of the queries as well; needs the extra `text`."),
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
engine_options = chained(
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


def loss_and_boundary(loss: str, boundary: str, score: str = "margin") -> tuple[Any, Any]:
    """Return both as the library names them.

    The net loss and learned scores take the random boundary that they need unless told otherwise.
    """
    source = click.get_current_context().get_parameter_source("boundary")
    if (loss == "net" or score != "margin") and source is click.core.ParameterSource.DEFAULT:
        boundary = "random"
    return None if loss == "regret" else loss, boundary


def learned_options(further: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a learned score out of a command's, and return them as the library names them.

    Raises:
        UsageError: features are named for the margin, which has none.
    """
    names = ("score", "menu_size", "group_source", "without", "text")
    score, menu_size, group_source, without, text = (further.pop(name) for name in names)
    if score == "margin":
        alone = group_source is not None and further.get("by") is None
        if menu_size is not None or without or text or alone:
            raise click.UsageError(
                "--menu-size, --group-source, --without and --text are for a learned score; give --score auto as well "
                "(--group-source goes with --by, too)"
            )
        return {"score": score, "group_source": group_source}
    groups, tokens = ("groups" not in without, "tokens" not in without)
    features = Features(groups=groups, tokens=tokens, menu_size=menu_size, group_source=group_source, text=text)
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
        return values | {name: _named(values[name]) for name in ("chain", "models")}
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


def _named(text: str | None) -> list[str] | None:
    """Return the names in a comma-separated text; None if there is none."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


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


def with_store(
    config: str,
    use: Callable[[Store], Awaitable[Value]],
    *,
    only_existing: bool = False,
    migrating: bool = True,
) -> Value:
    """Open the configured store, use it, and close it.

    Args:
        config: the configuration file.
        use: what to do with the store.
        only_existing: refuse to create a database, for commands that only read.
        migrating: whether to bring its tables to this release.

    Raises:
        StoreError: there is none, and none may be created.
    """
    if only_existing and not database_exists(read_config(config)):
        raise StoreError(
            f"there is no database at {database_of(read_config(config))} yet; `arbitrage serve` creates it, or name another "
            "configuration with --config"
        )

    async def run() -> Value:
        store = await open_record(read_config(config), migrating=migrating)
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())
