"""Calibrations on a real session of Spark, classic and Connect in one Java machine, in a process of their own.

    python -m tests.calibration.on_spark FOLDER                            what the tests run
    python -m tests.calibration.on_spark FOLDER --rounds 50 --logs DIR     and at length; see `make engines`

Prints one JSON line per check: its name, and what differs from what was expected.
"""

import argparse
import csv
import json
import os
import re
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars
from benchmarks.scale import processor_seconds

from conformal_arbitrage import (
    BatchColumns,
    ScoreLog,
    ScoreParts,
    SparkTable,
    calibrate,
    draw_batch,
    open_batch,
    verify,
)
from conformal_arbitrage.scorelog.parts import Processes, Threads
from conformal_arbitrage.scorelog.spark import ship_package
from tests.calibration.planted import (
    FAULTS,
    ROWS,
    PlantedTable,
    differences,
    differing,
    edge_log,
    is_caught,
)
from tests.calibration.spoiled import said_of_table, spoiled_logs
from tests.calibration.test_parts import KEY, OPTIONS, Dying, some_log, spoil, told, write_parts

COMBINATIONS = (
    ("unit", "classic", {}),
    ("coarse", "connect", {"guardian_sees": "candidates", "boundary": "random", "key": KEY}),
    ("single", "classic", {"guardian_sees": "all-restricted-loss", "grid": "0.05"}),
)


def report(name, differences):
    print(json.dumps({"check": name, "differences": differences}, default=repr), flush=True)


def open_sessions():
    """A classic session that also serves Spark Connect, and a session connected to it."""
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # it will not live for long
        "spark.driver.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.default.parallelism": "2",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
    }
    builder = SparkSession.builder.master("local[2,4]")  # a task may fail three times
    for name, value in settings.items():
        builder = builder.config(name, value)
    classic = builder.getOrCreate()
    classic.sparkContext.setLogLevel("ERROR")
    service = getattr(classic._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    port = getattr(service, "MODULE$").localPort()
    return classic, ConnectSession.builder.remote(f"sc://127.0.0.1:{port}").create()


def ways(folder, sessions, columns):
    """Every session's way to calibrate the files of a folder: what is calibrated, and no engine."""
    log = ScoreParts.read(folder, **columns)
    for name, session in sessions.items():
        frame = session.read.parquet(str(folder))
        if log.files[0].single(log.primary):  # a note in the files, which Spark does not see
            frame = frame.withColumn(log.primary, frame[log.primary].cast("array<float>"))
        yield name, SparkTable(frame=frame, **columns), None


def local_ways(folder, columns):
    """The ways without Spark, for comparisons at length."""
    log = ScoreParts.read(folder, **columns)
    yield "threads", log, Threads(2)
    yield "processes", log, Processes(2)


def compared(log, folder, alpha, sessions, keywords, columns, *, local=()):
    """Return what differs from the certificate of the rows in memory, by way."""
    expected = calibrate(log, alpha, **keywords)
    found = {}
    for way, source, engine in (*ways(folder, sessions, columns), *local):
        certificate = calibrate(source, alpha, engine=engine, **keywords)
        found[way] = differing(expected, certificate)
    return {way: differences for way, differences in found.items() if differences}


def check_equality(folder, sessions):
    for kind, name, keywords in COMBINATIONS:
        log = some_log(500, kind=kind, missing=0.1)
        keywords = {"missing_guardian": "worst_case", **keywords}
        where = write_parts(log, folder / kind, [200])
        report(f"equal: {kind}", compared(log, where, "0.3", {name: sessions[name]}, keywords, {}))


def check_binarised_and_verified(folder, sessions):
    log = replace(some_log(300), identities=None)  # a table does not name its models
    where = write_parts(log, folder / "binary", [120])
    table = SparkTable(frame=sessions["connect"].read.parquet(str(where)))
    certificate = calibrate(table.binarized(), "0.2")
    differences = differing(calibrate(log.binarized(), "0.2"), certificate) | verify(certificate, table).differences
    files = ScoreParts.read(where)
    differences |= {f"files: {name}": what for name, what in verify(certificate, files).differences.items()}
    by_files = calibrate(files.binarized(), "0.2")
    differences |= {f"table: {name}": what for name, what in verify(by_files, table).differences.items()}
    if "log_sha256" not in verify(certificate, SparkTable(frame=table.frame.where("id != 'q7'"))).differences:
        differences |= {"log_sha256": "a row less was not seen"}
    report("binarised and verified", differences)


class DyingTable(SparkTable):
    marker = ""

    def run(self, work, parts, /):
        return super().run(Dying(work, self.marker), parts)


def check_kills(folder, sessions):
    """A worker is killed in the middle of a pass: Spark does its part again."""
    log = some_log(300)
    where = write_parts(log, folder / "kills", [100, 200])
    expected, differences = calibrate(log, "0.2"), {}
    for name, session in sessions.items():
        DyingTable.marker = str(folder / f"{name}-died")
        frame = session.read.parquet(str(where)).repartition(3)
        differences[name] = differing(expected, calibrate(DyingTable(frame=frame), "0.2"))
        if not Path(DyingTable.marker).exists():
            differences[DyingTable.marker] = "no worker died"
    report("a worker is killed", {name: one for name, one in differences.items() if one})


def check_refusals(folder, sessions):
    """Faults name the file, or the partition, and the row; repeated ids, other types and moving rows are refused."""
    where = write_parts(replace(some_log(90), identities=None), folder / "faults", [30, 60])
    path, good = where / "scores-01.parquet", folder / "good.parquet"
    shutil.copy(path, good)
    spoil(path, "q47")
    one = sessions["classic"].read.parquet(str(path)).repartition(1)
    frame = sessions["connect"].read.parquet(str(good))
    messages = {
        "partition": told(lambda: calibrate(SparkTable(frame=one, name="table lake.scores"), "0.2")),
        "id": told(lambda: calibrate(SparkTable(frame=frame.unionAll(frame)), "0.2")),
        "type": told(lambda: calibrate(SparkTable(frame=frame, primary="id"), "0.2")),
        "column": told(lambda: calibrate(SparkTable(frame=frame, primary="qwen"), "0.2")),
        "rows": told(lambda: calibrate(SparkTable(frame=frame.where("id = ''")), "0.2")),
        "table": told(lambda: SparkTable.open("spark", "nothing")),
        "moving": told(lambda: calibrate_moving(sessions["classic"], folder / "moving")),
        "unforeseen": told(lambda: list(SparkTable(frame=one).run(len, []))),
    }
    report("refusals", messages)


def check_faults(folder, sessions, *, everything):
    """Faults planted in the workers are caught: each in one way, or in all of them."""
    edge = edge_log()
    where = write_parts(edge[0], folder / "edge", [ROWS // 2])
    found = {}
    frames = {name: session.read.parquet(str(where)).repartition(2) for name, session in sessions.items()}
    for number, fault in enumerate(FAULTS):
        for name in sessions if everything else [list(sessions)[number % len(sessions)]]:
            PlantedTable.fault = fault
            if not is_caught(*edge, PlantedTable(frame=frames[name])):
                found[f"{fault} on {name}"] = "not caught"
    for frame in frames.values():
        found |= differences(*edge, SparkTable(frame=frame))
    report("planted faults", found)


def check_spoiled(folder, sessions):
    """Rows that cannot be used are named by their partition and number, or by their file."""
    found = {}
    for what, where in spoiled_logs(folder / "spoiled").items():
        for name, session in sessions.items():
            frame = session.read.parquet(str(where)).coalesce(1)
            said = told(lambda f=frame: calibrate(SparkTable(frame=f), "0.2"))
            if not re.match(said_of_table(what), said):
                found[f"{what} {name}"] = said
    report("spoiled parts", found)


def calibrate_moving(session, folder):
    """Calibrate files that are replaced after the first pass."""
    write_parts(some_log(400, kind="coarse"), folder, [200])
    frame = session.read.parquet(str(folder))

    def replace_rows(_):
        write_parts(some_log(400, seed=9, kind="coarse"), folder, [200])

    calibrate(SparkTable(frame=frame), "0.1", boundary="random", key=KEY, progress=replace_rows)


def check_commands(folder, session):
    """The command line takes the session of Spark's own settings, and a table of its catalog."""
    from click.testing import CliRunner

    from conformal_arbitrage.cli import cli

    log = some_log(200)
    where = write_parts(log, folder / "commands", [80])
    session.read.parquet(str(where)).createOrReplaceTempView("scores")
    source, output = "table:scores", str(folder / "c.json")
    arguments = ["calibrate", source, "--engine", "spark", "--alpha", "0.2", "-o", output, "--json"]
    calibrated = CliRunner().invoke(cli, arguments)
    verified = CliRunner().invoke(cli, ["verify", output, source, "--engine", "spark"])
    expected = calibrate(log, "0.2")
    if calibrated.exit_code or verified.exit_code:
        report("commands", {"calibrate": (calibrated.stderr, calibrated.exception), "verify": verified.stderr})
        return
    document = json.loads(calibrated.stdout)
    values = document["rule"]["relaxation"], document["on_this_log"]["deferred"]
    report("commands", {} if values == (expected.relaxation, expected.apply(log).deferred.mean()) else values)


def check_batches(folder, sessions):
    """A batch of a table is drawn, certified and written as that of the same rows in memory, whatever their order."""
    os.environ["XDG_CONFIG_HOME"], os.environ["ARBITRAGE_SECRET"] = str(folder / "config"), "a-secret-of-these-checks"
    rng, rows = np.random.default_rng(5), folder / "items"
    rows.mkdir()
    for part in range(3):
        answers, sure = rng.choice(["yes", "no", ""], 400, p=[0.5, 0.45, 0.05]), rng.uniform(0.5, 1, 400).round(3)
        polars.DataFrame(
            {"id": [f"i{part}-{k}" for k in range(400)], "text": [f"text {k}" for k in range(400)],
             "answer": answers, "confidence": sure}
        ).write_parquet(rows / f"part-{part}.parquet")  # fmt: skip
    differences = {}
    expected = done_batch(str(rows), folder / "in memory")
    for name, session in sessions.items():
        frame = session.read.parquet(str(rows)).repartition(4)
        table = SparkTable(frame=frame, name="table items")
        found = done_batch(table, folder / f"batch of {name}")
        differences |= {f"{name}: {what}": found[what] for what in expected if found[what] != expected[what]}
        other = SparkTable(frame=frame.where("id != 'i1-7'"), name="table items")
        said = told(lambda source=other, name=name: open_batch(folder / f"batch of {name}", source))
        if not said.startswith("ScoreLogError: table items: there are 1199 rows, and there were 1200"):
            differences[f"{name}: a row less"] = said
        said = told(lambda source=table: draw_batch(source, error=0.1, sample=9, columns=BatchColumns()))
        if "name a column of ids" not in said:
            differences[f"{name}: no ids"] = said
    sessions["classic"].read.parquet(str(rows)).createOrReplaceTempView("items")
    differences |= by_command(folder / "by command", len(expected["sample.csv"]))
    report("batches", differences)


def by_command(folder, drawn):
    """The same draw and a certificate by the command line, from the catalog of the session of Spark's own settings."""
    from click.testing import CliRunner

    from conformal_arbitrage.cli import cli

    engine, draw = ["--engine", "spark"], ["--error", "0.1", "--sample", "200", "-o", str(folder)]
    commands = {
        "plan": ["plan", "table:items", "--error", "0.1", *engine],
        "draw": ["draw", "table:items", *draw, *engine],
        "certify": ["certify", str(folder), "--table", "table:items", *engine],
        "without": ["certify", str(folder)],
    }
    shown = {name: CliRunner().invoke(cli, ["batch", *command]) for name, command in commands.items()}
    said = {
        name: result.stderr for name, result in shown.items() if result.exit_code != (2 if name == "without" else 0)
    }
    if "--table, with --engine" not in " ".join(shown["without"].stderr.split()):
        said["without"] = shown["without"].stderr
    return said if len(sorted_rows(folder / "sample.csv")) == drawn else {**said, "sample": "another size"}


def done_batch(source, folder):
    """Draw, label, certify and finish a batch; return what came of it."""
    batch = draw_batch(source, error=0.1, sample=200, pilot=60, columns=BatchColumns(id="id"))
    batch.write(folder)
    for name in ("sample.csv", "todo.csv"):
        if name == "todo.csv":
            batch = open_batch(folder, source)
            certificate = batch.certify(batch.read_sample(folder)[1])
            batch.write_certified(folder, certificate)
        with (folder / name).open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        with (folder / name).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows({**row, "expert": "yes" if int(row["id"].partition("-")[2]) % 3 else "no"} for row in rows)
    counts = open_batch(folder, source).finish(folder, certificate)
    files = {name: sorted_rows(folder / name) for name in ("sample.csv", "kept.csv", "todo.csv", "labels.csv")}
    return {
        "rule": certificate.rule,
        "evidence": certificate.evidence,
        "promise": certificate.promise,
        **files,
        **counts,
    }


def sorted_rows(path):
    """The rows of a file without their numbers, which are those of a place in memory."""
    with path.open(newline="") as stream:
        return sorted(tuple(cell for name, cell in row.items() if name != "row") for row in csv.DictReader(stream))


def check_real_logs(logs, folder, sessions):
    """Every recorded log, at several budgets, in every way."""
    for path in sorted(logs.glob("*.parquet")) if logs is not None else ():
        if path.name.startswith(("cascade", "frugalml", "pac")):  # no columns of a pair
            continue
        names = ("qwen15b", "expert") if path.name == "science.parquet" else ("primary", "guardian")
        columns = dict(zip(("primary", "guardian"), names, strict=True))
        log = ScoreLog.read(path, **columns)
        where = write_parts(log, folder / path.stem, np.linspace(0, len(log), 4).astype(int).tolist())
        local = list(local_ways(where, columns))
        for alpha in ("0.02", "0.1"):
            for sees in ("all", "candidates"):
                keywords = {"guardian_sees": sees, "missing_guardian": "worst_case"}
                found = compared(log, where, alpha, sessions, keywords, columns, local=local)
                report(f"real log: {path.stem} {alpha} {sees}", found)


def check_hostile(rounds, folder, sessions):
    """Random logs of odd sizes, kinds and options, in every way."""
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        kind = str(rng.choice(["unit", "coarse", "single"]))
        log = some_log(int(rng.integers(2, 200)), seed, kind=kind, missing=0.1)
        where = write_parts(log, folder / f"hostile-{seed}", rng.integers(0, len(log) + 1, 2).tolist())
        keywords = {**OPTIONS[seed % len(OPTIONS)], "missing_guardian": "worst_case"}
        alpha = str(rng.choice(["0.9", "0.5", "0.2", "0.05", "0.01"]))
        local = local_ways(where, {})
        report(f"hostile: {seed}", compared(log, where, alpha, sessions, keywords, {}, local=local))
        shutil.rmtree(where)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--logs", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    classic, connected = open_sessions()
    ship_package(connected)
    sessions = {"classic": classic, "connect": connected}
    check_equality(given.folder, sessions)
    check_binarised_and_verified(given.folder, sessions)
    check_kills(given.folder, sessions)
    check_refusals(given.folder, sessions)
    check_faults(given.folder, sessions, everything=bool(given.rounds))
    check_commands(given.folder, classic)
    check_batches(given.folder, sessions)
    if given.rounds:
        check_spoiled(given.folder, sessions)
    check_hostile(given.rounds, given.folder, sessions)
    check_real_logs(given.logs, given.folder, sessions)
    print(f"{processor_seconds():.0f} s of processor time", file=sys.stderr)
    connected.stop()
    classic.stop()


if __name__ == "__main__":
    main()
