"""The logs and certificates that arguments name: in memory, in parts, in Spark; with notes of who looked at them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.calibration.survey import RowFacts, count_rows, digest_parts
from conformal_arbitrage.calibration.verify import differing
from conformal_arbitrage.cli.output import warn
from conformal_arbitrage.errors import CertificateError, OutputError
from conformal_arbitrage.evaluation.looks import looks_at, looks_path, note_look
from conformal_arbitrage.scorelog.cascade import GUARDIAN_NAME, CascadeLog
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.parts import (
    Engine,
    FileList,
    ScoreParts,
    as_engine,
    find_files,
    is_large,
    is_many,
)
from conformal_arbitrage.scorelog.spark import SparkTable, is_spark
from conformal_arbitrage.scorelog.tables import Table

PairLog = ScoreLog | ScoreParts | SparkTable
AnyLog = PairLog | CascadeLog

SAMPLE = 1_000_000
"""Rows of a log in parts that commands look at which need them all at once."""
_TABLE = "table:"
_NO_TABLE = "table:NAME is for calibrate and verify, with the Spark that holds it: --engine sc://... or spark"


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
) -> ScoreLog:
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
    guardian: str | None = guardian_column or "guardian"
    rows = None if whole else sample_of(path, sample)
    if rows is not None:
        return _sampled(path, primary_column, guardian, outcomes, rows, binarized=binarized)
    if guardian_optional:
        with Table(path) as table:
            guardian = guardian if guardian in table.types else None
    log = ScoreLog.read(path, primary=primary_column or "primary", guardian=guardian, outcomes=outcomes)
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
    return is_many(path) or is_large(path)


def _sampled(
    path: str, primary: str | None, guardian: str | None, outcomes: Sequence[str], rows: int, *, binarized: bool
) -> ScoreLog:
    """Return a uniform sample of a log in parts, and say so."""
    log = ScoreParts.read(path, primary=primary or "primary", guardian=guardian, outcomes=outcomes)
    if len(log) > rows:
        warn(f"from a uniform sample of {rows:,} of {len(log):,} rows (seed 0)")
    sample = log.sample(rows)
    if len(log) > rows:
        sample = sample.taken_from(*lineage_of(log))
    return sample.binarized() if binarized else sample


def open_log(
    log: str, primary: str | None, guardian: str | None, outcomes: tuple[str, ...], engine: str | None, **how: Any
) -> PairLog:
    """Return the table that table:NAME means in the Spark of --engine; any other log as `read_scores` does."""
    if not (log.startswith(_TABLE) and engine):
        return read_scores(log, primary, guardian, outcomes, **how)
    table, columns = log.removeprefix(_TABLE), {"primary": primary or "primary", "guardian": guardian or "guardian"}
    if not is_spark(engine):
        raise click.UsageError(_NO_TABLE)
    if outcomes:
        raise click.UsageError("--outcome is not for a table; export it as Parquet files")
    opened = SparkTable.open(engine, table, **columns)
    return opened.binarized() if how.get("binarized") else opened


def read_scores(
    log: str,
    primary: str | None,
    guardian: str | None,
    outcomes: tuple[str, ...] = (),
    *,
    binarized: bool = False,
    guardian_optional: bool = False,
    whole: bool = False,
) -> ScoreLog | ScoreParts:
    """Read a log into memory, or find the files of one in parts.

    Args:
        log: the argument that names it.
        primary: the Primary's column, if it was named.
        guardian: the Guardian's column, if it was named.
        outcomes: list columns to report besides `correct`.
        binarized: measure the loss on the paper's 0/1 Guardian.
        guardian_optional: whether the Guardian's column may be absent.
        whole: read one file into memory however many rows it has.
    """
    if log.startswith(_TABLE):
        raise click.UsageError(_NO_TABLE)
    if not (is_many(log) or (is_large(log) and not whole)):
        return read_log(
            log, primary, guardian, outcomes, binarized=binarized, guardian_optional=guardian_optional, whole=True
        )
    column: str | None = guardian or "guardian"
    if guardian_optional:
        path = find_files(log)[0]
        with FileList([path]) as listed:
            column = column if column in listed.types_of(path) else None
    parts = ScoreParts.read(log, primary=primary or "primary", guardian=column, outcomes=outcomes)
    return parts.binarized() if binarized else parts


def log_of(
    certificate: Certificate,
    log: str,
    primary: str | None,
    guardian: str | None,
    outcomes: tuple[str, ...],
    engine: str | None,
) -> AnyLog:
    """Return the log that a certificate is to be recomputed from, with the columns that options or the certificate name."""
    if certificate.is_cascade:
        return CascadeLog.read(log, guardian=certificate.path.guardian, models=certificate.path.models)
    scores = open_log(log, *columns_of(certificate, primary, guardian), outcomes, engine)
    part = certificate.provenance.part
    return scores.sample(part.sample) if part is not None and part.sample and isinstance(scores, ScoreParts) else scores


def refuse_overwriting(path: str | Path, certificate: Certificate, *, force: bool) -> None:
    """Refuse to overwrite anything but a certificate of the same log and options.

    Raises:
        OutputError: the file is there, and is another.
    """
    if force or not Path(path).is_file():  # a folder is refused when it is written to
        return
    with suppress(CertificateError):
        if not differing(Certificate.load(path), certificate):
            return
    raise OutputError(
        f"{path}: already exists, and is not the certificate of the same log and options; name another file with -o, or "
        "overwrite it with --force"
    )


def place_of(scores: AnyLog, engine: str | None, jobs: int | None) -> Engine | None:
    """Return where the work on a log in parts is done; None for one in memory."""
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


def read_cascade(path: str, guardian: str | None, models: list[str] | None) -> CascadeLog:
    """Read the log of a cascade with the models that the options name."""
    return CascadeLog.read(path, guardian=guardian or GUARDIAN_NAME, models=models)


def made_from(certificate: Certificate, log: str, primary: str | None, guardian: str | None) -> bool:
    """Return whether a certificate was made from the files of a log in parts, of which a command sees a sample only."""
    if not in_parts(log):
        return False
    names = certificate.evidence.columns
    parts = ScoreParts.read(log, primary=primary or names["primary"], guardian=guardian or names["guardian"])
    parts = parts.binarized() if certificate.loss.binarized else parts
    return digest_parts(parts, as_engine(None)) == certificate.evidence.log_sha256


def counts_of_parts(log: str, primary: str | None, guardian: str | None, *, binarized: bool) -> RowFacts:
    """Return what is counted in all rows of a log in parts, of which a command sees a sample only."""
    found = ScoreParts.read(log, primary=primary or "primary", guardian=guardian or "guardian")
    return count_rows(found.binarized() if binarized else found, as_engine(None))


def lacks_guardian(scores: ScoreLog | ScoreParts) -> bool:
    """Return whether a log has no Guardian scores at all; of one in parts, whether it lacks their column."""
    return scores.guardian is None if isinstance(scores, ScoreParts) else bool(scores.missing.all())


def remember_look(lineage: Sequence[str], command: str, *, terms: str | None = None) -> None:
    """Note that a command looked at a log; a folder that cannot be written gives a warning."""
    try:
        note_look(looks_path(), lineage, command, terms=terms)
    except OutputError as error:
        warn(f"this look was not noted, so calibrate cannot remind you of it: {error}")


def describe_looks(lineage: Sequence[str], *, fixed_before: bool, terms: str | None = None) -> str | None:
    """Return what a certificate says of earlier looks at its log, but for calibrations with the same `terms`; or None."""
    try:
        seen = looks_at(looks_path(), lineage, terms=terms)
    except OutputError as error:
        warn(str(error))
        return None
    if not seen:
        return None
    times = "once" if seen.total() == 1 else f"{seen.total()} times"
    what = f"this log, or one it shares rows with, was looked at {times} before ({', '.join(seen)})"
    if fixed_before:
        return f"{what}; the user states that alpha and options had been fixed before"
    warn(
        f"{what}: alpha and options must have been fixed before; say so with --fixed-before, or calibrate on other rows"
    )
    return f"{what}; alpha and options must have been fixed before, or the guarantee does not hold"


def lineage_of(scores: AnyLog, certificate: Certificate | None = None) -> tuple[str, ...]:
    """Return the digests of the logs that one was taken from, and its own at last; a certificate of it knows the latter."""
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


def columns_of(certificate: Certificate, primary: str | None, guardian: str | None) -> tuple[str, str]:
    """Return the columns named by options, otherwise those the certificate was made with."""
    return primary or certificate.evidence.columns["primary"], guardian or certificate.evidence.columns["guardian"]
