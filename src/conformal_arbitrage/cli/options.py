"""Options that several commands share, and reading a log."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from conformal_arbitrage.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console

    from conformal_arbitrage.calibration.cascade import PathCertificate
    from conformal_arbitrage.calibration.certificate import Certificate
    from conformal_arbitrage.calibration.secret import ProjectSecret
    from conformal_arbitrage.live.config import Config
    from conformal_arbitrage.scorelog.cascade import CascadeLog
    from conformal_arbitrage.scorelog.log import ScoreLog
    from conformal_arbitrage.scorelog.parts import ScoreParts
    from conformal_arbitrage.scorelog.spark import SparkTable


# --- Shared by several commands ---


Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")


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


def chained(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return several options as one decorator."""
    return lambda command: reduce(lambda wrapped, decorate: decorate(wrapped), reversed(decorators), command)


columns = chained(
    click.option("--primary-column", metavar="NAME", help="Column of the Primary's scores.  [default: primary]"),
    click.option("--guardian-column", metavar="NAME", help="Column of the Guardian's scores.  [default: guardian]"),
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
_loss_bound = click.option(
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
    _loss_bound,
    binarize,
    click.option(
        "--missing-guardian",
        type=click.Choice(["worst_case"]),
        help="Count rows without a Guardian score as the largest loss.",
    ),
)
threshold = chained(
    _guardian_sees,
    _boundary(help="Keep every action exactly at the threshold gap, or a random share of them."),
    _loss_bound,
    binarize,
    click.option(
        "--confidence",
        metavar="C",
        help="Certify that the long-run loss of the certificate is within the budget, with this probability.",
    ),
    click.option("--zero-one", is_flag=True, help="Declare that every loss is 0 or the bound."),
)
costs = chained(
    click.option("--primary-cost", type=float, metavar="$", help="Dollars per query of the Primary."),
    click.option("--guardian-cost", type=float, metavar="$", help="Dollars per query of the Guardian."),
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
sure = chained(
    click.option(
        "--confidence",
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


def read_pair(config: str, policy: str | None) -> "Config":
    """Read a configuration, and bring the pair of a policy into its short form if one is named."""
    from conformal_arbitrage.live.config import read_config

    configuration = read_config(config)
    return configuration if policy is None else configuration.for_policy(policy)


def read_configured(config: str | None) -> "Config":
    """Read the configuration that alpha is taken from.

    Raises:
        UsageError: none is named, and there is none here.
    """
    from conformal_arbitrage.live.config import FILE, read_config

    if config is None and not Path(FILE).exists():
        raise click.UsageError(f"give --alpha, the risk budget; there is no {FILE} here to take it from")
    return read_config(config or FILE)


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
    from conformal_arbitrage.calibration.learned import Features

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


def read_log(
    path: str,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: Sequence[str] = (),
    *,
    binarized: bool = False,
    guardian_optional: bool = False,
    sample: int | None = None,
    whole: bool = False,
) -> "ScoreLog":
    """Read the log that an argument names, with the columns that the options name.

    Args:
        path: the argument.
        primary_column: the Primary's column, if it was named.
        guardian_column: the Guardian's column, if it was named.
        outcomes: list columns to report besides `correct`.
        binarized: measure the loss on the paper's 0/1 Guardian.
        guardian_optional: whether the Guardian's column may be absent.
        sample: how many rows of a log in parts to draw.
        whole: read one file into memory however many rows it has.
    """
    from conformal_arbitrage.scorelog.log import ScoreLog
    from conformal_arbitrage.scorelog.tables import Table

    guardian: str | None = guardian_column or "guardian"
    rows = None if whole else sample_of(path, sample)
    if rows is not None:
        return _sampled(path, primary_column, guardian, outcomes, rows, binarized=binarized)
    if guardian_optional:
        with Table(path) as table:
            guardian = guardian if guardian in table.types else None
    log = ScoreLog.read(path, primary=primary_column or "primary", guardian=guardian, outcomes=outcomes)
    return log.binarized() if binarized else log


SAMPLE = 1_000_000
"""Rows of a log in parts that commands look at which need them all at once."""


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
    from conformal_arbitrage.scorelog.parts import is_large, is_many

    return is_many(path) or is_large(path)


def _sampled(
    path: str, primary: str | None, guardian: str | None, outcomes: Sequence[str], rows: int, *, binarized: bool
) -> "ScoreLog":
    """Return a uniform sample of a log in parts, and say so."""
    from conformal_arbitrage.scorelog.parts import ScoreParts

    log = ScoreParts.read(path, primary=primary or "primary", guardian=guardian, outcomes=outcomes)
    if len(log) > rows:
        warn(f"from a uniform sample of {rows:,} of {len(log):,} rows (seed 0)")
    sample = log.sample(rows)
    return sample.binarized() if binarized else sample


def remember_look(
    scores: "ScoreLog | CascadeLog", path: str, command: str, *, config: str | None = None, terms: str | None = None
) -> None:
    """Note that a command looked at these rows; a folder that cannot be written gives a warning."""
    from conformal_arbitrage.evaluation.looks import looks_path, note_look
    from conformal_arbitrage.live.config import FILE

    try:
        note_look(looks_path(config or FILE, path), scores, command, terms=terms)
    except OutputError as error:
        warn(f"this look was not noted, so calibrate cannot remind you of it: {error}")


def describe_looks(
    scores: "ScoreLog | CascadeLog | ScoreParts | SparkTable", path: str, config: str | None, *,
    fixed_before: bool, terms: str | None = None,
) -> str | None:  # fmt: skip
    """Return what a certificate says of earlier looks at these rows, but for calibrations with the same `terms`; or None."""
    from conformal_arbitrage.evaluation.looks import looks_path, seen_in_parts
    from conformal_arbitrage.live.config import FILE
    from conformal_arbitrage.scorelog.parts import ScoreParts
    from conformal_arbitrage.scorelog.spark import SparkTable

    if isinstance(scores, SparkTable):
        return None
    rows = (part.load(["context"]) for part in scores.parts()) if isinstance(scores, ScoreParts) else [scores]
    try:
        seen = seen_in_parts(looks_path(config or FILE, path), rows, terms=terms)
    except OutputError as error:
        warn(str(error))
        return None
    if not seen.share:
        return None
    what = f"{100 * seen.share:.3g} % of these rows were looked at before ({', '.join(seen.commands)})"
    if fixed_before:
        return f"{what}; the user states that alpha and options had been fixed before"
    warn(
        f"{what}: alpha and options must have been fixed before; say so with --fixed-before, or calibrate on other rows"
    )
    return f"{what}; alpha and options must have been fixed before, or the guarantee does not hold"


def project_secret(config: str | None, *folders: Path) -> "ProjectSecret | None":
    """Return the project's secret from the environment, the configuration's folder, or the first of others that has one."""
    from conformal_arbitrage.calibration.secret import ProjectSecret

    return ProjectSecret.search(*([] if config is None else [Path(config).parent]), *folders)


def refuse_same(source: str, output: str | None) -> None:
    """Refuse an output that would overwrite the input."""
    if output is not None and os.path.realpath(source) == os.path.realpath(output):
        raise click.UsageError(f"{output} would overwrite the input; give the output another name")


def print_json(document: object) -> None:
    """Print one JSON document to stdout; a data class becomes an object."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, default=asdict))


def warn(message: str) -> None:
    """Print a warning to stderr, on one line."""
    click.echo(f"arbitrage: warning: {message}", err=True)


def wrapped(text: str) -> str:
    """Return paragraphs wrapped to a readable width, or to that of a narrower terminal; no word is broken."""
    wrap = textwrap.TextWrapper(width=readable_width(), break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(line) for line in text.split("\n"))


def readable_width() -> int:
    """Return how many columns a paragraph may have."""
    return min(100, console().width)


def role_name(role: str) -> str:
    """Return a role as people read it; a model's own name as it is."""
    return role.capitalize() if role in ("primary", "guardian") else role


def progress(line: str) -> None:
    """Print a line of progress to stderr."""
    click.echo(line, err=True)


def console() -> "Console":
    """Return the terminal, or a wide console if stdout is redirected, so that tables do not wrap."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 170, highlight=False, soft_wrap=False)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print name and value pairs, aligned."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in facts:
        table.add_row(name, value)
    console().print(table)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table whose first column is text and whose others are figures.

    A narrow terminal gets headers, and if need be the first column, on several lines; figures are not cut.
    """
    from rich import box
    from rich.table import Table

    lines, screen = [list(row) for row in rows], console()
    widths = _widths(list(zip(header, *lines, strict=True)), screen.width)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False)
    for k, (name, width) in enumerate(zip(header, widths, strict=True)):
        table.add_column(name, justify="left" if k == 0 else "right", no_wrap=k == 0 and width is None, width=width)
    for line in lines:
        table.add_row(*line)
    screen.print(table)


def _widths(columns: Sequence[Sequence[str]], screen: int) -> list[int | None]:
    """Return the widths of a table's columns: figures and words whole, and the first column before the headers."""
    least = [max(_unbroken(cell) for cell in column) for column in columns]
    spare = screen - sum(least) - 3 * (len(columns) - 1) - 2  # between columns, and at the two edges
    if spare < 0:
        return [None] * len(columns)
    widths: list[int | None] = []
    for column, width in zip(columns, least, strict=True):
        more = min(spare, max(map(len, column)) - width)
        widths.append(width + more)
        spare -= more
    return widths


def _unbroken(cell: str) -> int:
    """Return the width of a short figure with its sign, or of the longest word."""
    figure = len(cell) <= 12 and any(sign.isdigit() for sign in cell)
    return len(cell) if figure else max(map(len, cell.split()), default=0)


def run_coroutine(work: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine; asyncio is loaded with the first, since most commands do without."""
    import asyncio

    return asyncio.run(work)


# --- Signatures of certificates that commands load ---


def check_signed(certificate: "Certificate | PathCertificate", secret: "ProjectSecret | None", path: str) -> None:
    """Verify a signature if the project's secret is at hand, and warn if there is none: then anybody may have edited it.

    Raises:
        CertificateError: it is not the project's, or something was changed.
    """
    if secret is not None and certificate.signed:
        certificate.check_signature(secret, source=path)
    elif secret is not None:
        warn(
            f"{path} is not signed, though this project has a secret: nothing shows that it is as it was calibrated; "
            "`arbitrage verify` recomputes it from its log"
        )
