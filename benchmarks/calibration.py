"""Speed and memory of calibration, side by side with a plain NumPy grid, np.sum and MAPIE's CRC; ratios are what counts.

Run by `make bench`, which gives MAPIE an environment of its own. `--write docs/benchmarks.md` keeps the table; `--slow`
adds MAPIE at 100,000 rows, which takes many minutes.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np

from conformal_arbitrage import RiskCurve, ScoreLog, calibrate, evaluate
from conformal_arbitrage.core.risk import LossMeasure

ACTIONS = 4
ALPHAS = np.round(np.linspace(0.01, 0.5, 50), 2)
Row = tuple[str, str, str, str]


def best(function: Callable[[], object], repeats: int = 5) -> float:
    """The fastest of several runs, in seconds: the least disturbed one."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def scores(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random((n, ACTIONS)), rng.random((n, ACTIONS))


def grid_search(primary: np.ndarray, guardian: np.ndarray, alpha: float) -> float:
    """What one writes first: the mean loss at 101 points, in plain NumPy."""
    n = len(primary)
    top, best_guardian = primary.max(axis=1, keepdims=True), guardian.max(axis=1)
    for point in np.arange(101) / 100:
        kept = np.where(primary >= top - point, guardian, -np.inf).max(axis=1)
        if (best_guardian - kept).sum() + 1 <= alpha * (n + 1):
            return float(point)
    return float("nan")


def all_grid_points(primary: np.ndarray, guardian: np.ndarray) -> None:
    grid_search(primary, guardian, alpha=0.0)


def against_grid(n: int) -> Row:
    primary, guardian = scores(n)
    log = ScoreLog.from_arrays(primary, guardian)
    ours = best(lambda: RiskCurve.from_log(log, guardian_sees="candidates").relaxation(0.1))
    grid = best(lambda: all_grid_points(primary, guardian), 2)
    return (f"n = {n:,}: 101-point NumPy grid / ours", f"{grid / ours:.0f} x", "at least 12 x", f"{ours * 1e3:.1f} ms")


def processor(function: Callable[[], object], repeats: int = 5) -> float:
    """The least processor time of several runs, in seconds, all threads together."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def _times(one: float, other: float) -> str:
    return f"{one / other:.0f} x"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def against_sum(n: int) -> list[Row]:
    primary, guardian = scores(n)
    log = ScoreLog.from_arrays(primary, guardian)
    summed = processor(lambda: (np.sum(primary), np.sum(guardian)), 20)
    rows: list[Row] = []
    for sees, most in (("candidates", 35), ("all", 25)):
        ours = processor(lambda sees=sees: RiskCurve.from_log(log, guardian_sees=sees).relaxation(ALPHAS))
        seconds = processor(lambda sees=sees: LossMeasure(guardian_sees=sees).events(log))
        sorted_ = processor(lambda sees=sees: RiskCurve.from_log(log, guardian_sees=sees).totals)
        rows += [
            (
                f"n = {n:,}, 50 alphas, {sees}: ours / np.sum of both",
                _times(ours, summed),
                f"at most {most} x",
                _ms(ours),
            ),
            ("  of which where each row's loss falls", _times(seconds, summed), "", _ms(seconds)),
            ("  the whole curve, sorted, would take", _times(sorted_, summed), "", _ms(sorted_)),
        ]
    return rows


def long_rows() -> list[Row]:
    """Rows of many sizes, against the same scores in rows of one."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 2001, 4000)
    ragged = ScoreLog.from_arrays([rng.random(k) for k in sizes], [rng.random(k) for k in sizes])
    even = ScoreLog.from_arrays(rng.random((4000, 1001)), rng.random((4000, 1001)))
    rows: list[Row] = []
    for sees in ("candidates", "all"):
        ours, peer = (
            processor(lambda one=one, sees=sees: RiskCurve.from_log(one, guardian_sees=sees).relaxation(0.1), 3)
            for one in (ragged, even)
        )
        name = f"4,000 rows of 2 to 2,000 actions / of 1,001, {sees}"
        rows.append((name, f"{ours / peer:.1f} x", "at most 1.5 x", f"{ours * 1e3:.0f} ms"))
    return rows


def scan(path: Path) -> None:
    """What DuckDB takes to look at scores and ids."""
    with duckdb.connect() as connection:
        sums = 'sum(list_sum("primary")), sum(list_sum(guardian)), max(strlen(id))'
        connection.execute(f"select {sums} from '{path}'").fetchall()


def coarse(n: int) -> list[Row]:
    """A random boundary against one that includes everything, on two-decimal scores; and reading the file with its ids."""
    primary, guardian = (np.round(one, 2) for one in scores(n))
    log = ScoreLog.from_arrays(primary, guardian, id=[f"query-{k}" for k in range(n)])
    include = processor(lambda: calibrate(log, 0.1, boundary="include"), 3)
    drawn = processor(lambda: calibrate(log, 0.1, boundary="random", key=bytes(16)), 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.parquet"
        log.write(path)
        read = processor(lambda: ScoreLog.read(path), 3)
        scanned = processor(lambda: scan(path), 3)
    summed = processor(lambda: (np.sum(primary), np.sum(guardian)), 20)
    return [
        (f"n = {n:,}: boundary random / include", f"{drawn / include:.1f} x", "at most 4 x", f"{drawn * 1e3:.0f} ms"),
        (f"n = {n:,}: read Parquet with ids / np.sum of both", f"{read / summed:.0f} x", "", f"{read * 1e3:.0f} ms"),
        ("  / DuckDB's own scan of these columns", f"{read / scanned:.1f} x", "", f"{scanned * 1e3:.0f} ms"),
    ]


def memory(n: int) -> Row:
    primary, guardian = scores(n)
    tracemalloc.start()
    log = ScoreLog.from_arrays(primary, guardian)
    start = time.perf_counter()
    curve = RiskCurve.from_log(log, guardian_sees="candidates")
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = primary.nbytes + guardian.nbytes
    assert len(curve.totals) > n
    return (
        f"n = {n:,}: peak memory beyond the arrays",
        f"{peak / arrays:.2f} x the arrays",
        "at most 3 x",
        f"{seconds:.1f} s",
    )


def many_splits(n: int) -> list[Row]:
    primary, guardian = scores(n)
    plain = ScoreLog.from_arrays(primary, guardian)
    labelled = ScoreLog.from_arrays(primary, guardian, label=np.zeros(n))
    one = best(lambda: RiskCurve.from_log(plain, guardian_sees="candidates").relaxation(ALPHAS))
    costs = {"primary_cost": 1, "guardian_cost": 20}
    rows: list[Row] = []
    for what, log, options in (("scores only", plain, {}), ("with accuracy and costs", labelled, costs)):
        many = best(
            lambda log=log, options=options: evaluate(
                log, ALPHAS.tolist(), calibration_size=n // 2, guardian_sees="candidates", **options
            ),
            4,
        )
        name = f"n = {n:,}: evaluate 30 splits x 50 alphas, {what} / one calibration"
        rows.append((name, f"{many / one:.1f} x", "at most 12 x", f"{many * 1e3:.0f} ms"))
    return rows


MAPIE = """
import json, sys, time
import numpy as np
from mapie.risk_control import MultiLabelClassificationController
data = np.load(sys.argv[1])
controller = MultiLabelClassificationController(
    predict_function=lambda x: x, risk="recall", method="crc", target_level=0.9, predict_params=np.arange(101) / 100
)
start = time.perf_counter()
controller.calibrate(data["closeness"], data["wanted"])
print(json.dumps({"seconds": time.perf_counter() - start, "threshold": float(controller.best_predict_param[0])}))
"""


def against_mapie(python: str, n: int) -> Row:
    """The same problem for both: the wanted action must be in the set, scores are 1 - gap."""
    primary, guardian = scores(n)
    wanted = np.eye(ACTIONS, dtype=int)[guardian.argmax(axis=1)]
    log = ScoreLog.from_arrays(primary, wanted.astype(float))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        np.savez(data, closeness=1 - (primary.max(axis=1, keepdims=True) - primary), wanted=wanted)
        shown = subprocess.run([python, "-c", MAPIE, str(data)], capture_output=True, text=True, check=True).stdout
    theirs = json.loads(shown)
    ours = best(lambda: RiskCurve.from_log(log, guardian_sees="candidates").relaxation(0.1), 20)
    relaxation = float(RiskCurve.from_log(log, guardian_sees="candidates").relaxation(0.1))
    assert abs((1 - theirs["threshold"]) - relaxation) <= 0.02, (theirs, relaxation)
    name = f"n = {n:,}: MAPIE's CRC (101 points) / ours"
    return (
        name,
        f"{theirs['seconds'] / ours:,.0f} x",
        "at least 5,000 x",
        f"{ours * 1e3:.2f} ms, {theirs['seconds']:.1f} s",
    )


def start_up() -> list[Row]:
    def run(*command: str) -> float:
        return best(lambda: subprocess.run(command, check=True, capture_output=True), 7)

    bare = run(sys.executable, "-c", "import numpy")
    imported = run(sys.executable, "-c", "import conformal_arbitrage")
    shown = run(str(Path(sys.executable).parent / "arbitrage"), "--help")
    return [
        ("import conformal_arbitrage / import numpy", f"{imported / bare:.1f} x", "below 0.3 s", f"{imported:.2f} s"),
        ("arbitrage --help / import numpy", f"{shown / bare:.1f} x", "below 0.5 s", f"{shown:.2f} s"),
    ]


HEADER = """\
# Benchmarks of the calibration

Measured by `make bench BENCH="--write docs/benchmarks.md"` on {cores} cores of {machine}
with Python {python} and NumPy {numpy}. Both sides of a ratio are measured in the same run. The last column depends on
the machine.

| measurement | ratio | target | this machine |
|---|---|---|---|
"""
FOOTER = """
## How much faster could it be?

A search for thresholds sorts only the events of the loss in buckets that hold an answer; the rest of the time goes into
rounding, ordering each row's actions (where the Guardian sees everything, only the two best are looked at) and collecting
the events, block by block in the processor's cache. The whole curve is sorted on first use of its breakpoints, which
takes two to three times as long. Fusing the passes over each block in compiled code would save about half of what is left.

The ratios of `evaluate` miss their target because one calibration, their unit, takes half the time it once took.

## The comparison with MAPIE

MAPIE solves the same problem here (the Guardian's choice must stay in the set, scores are 1 - gap, 101 points, one
alpha) and finds the same threshold up to its grid. It loops over rows and points in Python. Its run at 100,000 rows
requires `--slow`.
"""


LEARNED = "\n## Learned scores"
"""What follows in the file is measured by another command, and kept."""


def main() -> None:
    """Measure, print, and keep the table if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mapie", help="a Python that has MAPIE; left out without it")
    parser.add_argument("--slow", action="store_true", help="MAPIE at 100,000 rows too")
    parser.add_argument("--write", help="keep the table in this file")
    options = parser.parse_args()
    rows = [*start_up()]
    if options.mapie:
        rows += [against_mapie(options.mapie, n) for n in ([10_000, 100_000] if options.slow else [10_000])]
    rows += [against_grid(100_000), *against_sum(1_000_000), *long_rows(), *coarse(1_000_000), *many_splits(100_000)]
    rows.append(memory(10_000_000))
    table = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    print(table, end="")
    if options.write:
        facts = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
        target = Path(options.write)
        _, title, learned = target.read_text().partition(LEARNED) if target.exists() else ("", "", "")
        target.write_text(HEADER.format(cores=2, **facts) + table + FOOTER + title + learned)


if __name__ == "__main__":
    main()
