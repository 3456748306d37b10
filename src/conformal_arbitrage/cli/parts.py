"""Commands on a log in parts: what calibrate, verify, apply and assess do with a pattern, a folder, a URL, a large file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.applying import DecisionCounts
    from conformal_arbitrage.calibration.certificate import Certificate
    from conformal_arbitrage.calibration.decisions import Decisions
    from conformal_arbitrage.calibration.parts import RowCounts
    from conformal_arbitrage.scorelog.engines import Engine
    from conformal_arbitrage.scorelog.log import ScoreLog
    from conformal_arbitrage.scorelog.parts import ScoreParts
    from conformal_arbitrage.scorelog.spark_table import SparkTable

    Scores = ScoreLog | ScoreParts | SparkTable

_TABLE = "table:"
_NO_TABLE = "table:NAME is for calibrate and verify, with the Spark that holds it: --engine sc://... or spark"

engine_options = options.chained(
    click.option(
        "--engine",
        metavar="NAME",
        help="What reads a log in parts (a pattern, a folder, a URL, or one Parquet file of more than 10 million rows): "
        "threads, processes, a Dask scheduler (tcp://...) or Spark (sc://..., spark://..., local[N], or spark for what its "
        "own settings say). For table:NAME, the Spark that holds the table.  [default: threads]",
    ),
    click.option(
        "--jobs", type=click.IntRange(1, 10_000), metavar="N", help="Threads or processes.  [default: all cores]"
    ),
)


def place_of(scores: "Scores", engine: str | None, jobs: int | None) -> "Engine | None":
    """Return where the work on a log in parts is done; None for one in memory."""
    from conformal_arbitrage.scorelog.engines import as_engine
    from conformal_arbitrage.scorelog.parts import ScoreParts
    from conformal_arbitrage.scorelog.spark_table import SparkTable

    if isinstance(scores, ScoreParts):
        return as_engine(engine, jobs)
    if isinstance(scores, SparkTable) and jobs is None:
        return scores
    if jobs is not None or engine is not None:
        raise click.UsageError(
            "--engine and --jobs are for a log in parts: give a pattern, a folder, a URL, or one Parquet file of more than "
            "10 million rows"
        )
    return None


def tell_pass(line: str) -> None:
    """Print what was done to stderr."""
    click.echo(f"arbitrage: {line}", err=True)


def read_scores(
    log: str,
    primary: str | None,
    guardian: str | None,
    outcomes: tuple[str, ...] = (),
    *,
    binarized: bool = False,
    guardian_optional: bool = False,
    digest: str = "",
    whole: bool = False,
) -> "ScoreLog | ScoreParts":
    """Read a log into memory, or find the files of one in parts.

    Args:
        log: the argument that names it.
        primary: the Primary's column, if it was named.
        guardian: the Guardian's column, if it was named.
        outcomes: list columns to report besides `correct`.
        binarized: measure the loss on the paper's 0/1 Guardian.
        guardian_optional: whether the Guardian's column may be absent.
        digest: of the certificate to compare with, which says whether it was made in memory or in parts.
        whole: read one file into memory however many rows it has.
    """
    from conformal_arbitrage.scorelog.digests import FILES
    from conformal_arbitrage.scorelog.locations import find_files, is_many
    from conformal_arbitrage.scorelog.parts import FileList, ScoreParts, is_large

    if log.startswith(_TABLE):
        raise click.UsageError(_NO_TABLE)
    whole = whole or bool(digest)
    if not (is_many(log) or digest.startswith(FILES) or (is_large(log) and not whole)):
        return options.read_log(
            log, primary, guardian, outcomes, binarized=binarized, guardian_optional=guardian_optional, whole=True
        )
    column: str | None = guardian or "guardian"
    if guardian_optional:
        path = find_files(log)[0]
        with FileList([path]) as listed:
            column = column if column in listed.types_of(path) else None
    parts = ScoreParts.read(log, primary=primary or "primary", guardian=column, outcomes=outcomes)
    return parts.binarized() if binarized else parts


def find_scores(
    log: str, primary: str | None, guardian: str | None, outcomes: tuple[str, ...], engine: str | None, **how: Any
) -> "Scores":
    """Return the table that table:NAME means in the Spark of --engine; any other log as `read_scores` does."""
    if not (log.startswith(_TABLE) and engine):
        return read_scores(log, primary, guardian, outcomes, **how)
    from conformal_arbitrage.scorelog.spark import is_spark
    from conformal_arbitrage.scorelog.spark_table import SparkTable

    table, columns = log.removeprefix(_TABLE), {"primary": primary or "primary", "guardian": guardian or "guardian"}
    if not is_spark(engine):
        raise click.UsageError(_NO_TABLE)
    if outcomes:
        raise click.UsageError("--outcome is not for a table; export it as Parquet files")
    opened = SparkTable.open(engine, table, **columns)
    return opened.binarized() if how.get("binarized") else opened


def made_from(certificate: "Certificate", log: str, primary: str | None, guardian: str | None) -> bool:
    """Return whether a certificate was made from the files of a log in parts, of which a command sees a sample only."""
    from conformal_arbitrage.calibration.parts import digest_parts
    from conformal_arbitrage.scorelog.digests import FILES
    from conformal_arbitrage.scorelog.engines import as_engine
    from conformal_arbitrage.scorelog.parts import ScoreParts

    if not (options.in_parts(log) and certificate.log_sha256.startswith(FILES)):
        return False
    names = certificate.columns
    parts = ScoreParts.read(log, primary=primary or names["primary"], guardian=guardian or names["guardian"])
    parts = parts.binarized() if certificate.binarized else parts
    return digest_parts(parts, as_engine(None)) == certificate.log_sha256


def counts_of_parts(log: str, primary: str | None, guardian: str | None, *, binarized: bool) -> "RowCounts":
    """Return what is counted in all rows of a log in parts, of which a command sees a sample only."""
    from conformal_arbitrage.calibration.parts import count_rows
    from conformal_arbitrage.scorelog.engines import as_engine
    from conformal_arbitrage.scorelog.parts import ScoreParts

    found = ScoreParts.read(log, primary=primary or "primary", guardian=guardian or "guardian")
    return count_rows(found.binarized() if binarized else found, as_engine(None))


def lacks_guardian(scores: "ScoreLog | ScoreParts") -> bool:
    """Return whether a log has no Guardian scores at all; of one in parts, whether it lacks their column."""
    from conformal_arbitrage.scorelog.parts import ScoreParts

    return scores.guardian is None if isinstance(scores, ScoreParts) else bool(scores.missing.all())


def use_of_parts(certificate: "Certificate", log: "ScoreParts | SparkTable", engine: "Engine | None") -> dict[str, Any]:
    """Return how often the Guardian is asked on a log in parts; costs are not added up."""
    from conformal_arbitrage.scorelog.engines import as_engine

    if certificate.learned is not None:
        deferred = certificate.learned.deferred
    else:
        counts = _decided(certificate, log, as_engine(engine), None)
        deferred = counts.deferred / counts.rows
    return {"deferred": deferred, "cost_per_1000": None, "guardian_cost_per_1000": None}


def decide_scores(
    certificate: "Certificate", scores: "ScoreLog | ScoreParts", engine: "Engine | None", output: str | None
) -> "DecisionCounts":
    """Decide every row of a log: one in parts into a folder, one in memory into a file, if one is named."""
    from conformal_arbitrage.calibration.applying import count_decisions
    from conformal_arbitrage.scorelog.engines import as_engine
    from conformal_arbitrage.scorelog.parts import ScoreParts

    if not isinstance(scores, ScoreParts):
        decisions = certificate.apply(scores)
        _write_decisions(decisions, output)
        return count_decisions(certificate, decisions)
    if output is not None and Path(output).is_file():
        raise click.UsageError(f"{output} is a file; a log in parts is decided into a folder, one file per part")
    return _decided(certificate, scores, as_engine(engine), output)


def _write_decisions(decisions: "Decisions", output: str | None) -> None:
    """Write decisions as JSON Lines, or as Parquet if the name says so."""
    from conformal_arbitrage.calibration.applying import decisions_table
    from conformal_arbitrage.scorelog.files import write_table, write_text

    if output is not None and output.endswith(".parquet"):
        write_table(output, decisions_table(decisions))
    elif output is not None:
        write_text(output, "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in decisions.to_dicts()))


def _decided(
    certificate: "Certificate", log: "ScoreParts | SparkTable", engine: "Engine", folder: str | None
) -> "DecisionCounts":
    from conformal_arbitrage.calibration.applying import decide_parts

    counts = decide_parts(certificate, log, engine, folder)
    tell_pass(f"decided: {counts.rows:,} rows")
    return counts
