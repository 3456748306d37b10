"""How soon a monitor sees that a loss is too high, and what it costs, side by side with MAPIE's RiskMonitoring.

Both watch the same streams of audited losses in one run, at the same stated level. Run by `make bench-monitoring`, which
gives MAPIE an environment of its own; `--write docs/benchmarks-monitoring.md` keeps the page.
"""

import argparse
import json
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from conformal_arbitrage.monitoring.evidence import BETS, START_EVERY, log_evidence
from conformal_arbitrage.monitoring.lines import block_size, watch_lines
from conformal_arbitrage.monitoring.monitor import LedgerRow, Monitor

LINE = 0.05
STREAMS = {1.25: (16, 16_000), 1.5: (40, 6_000), 2.0: (100, 2_500), 5.0: (100, 500)}
"""True loss over the line -> streams, and audits in each."""
LEVEL = 0.05

MAPIE = """
import json, sys, time
import numpy as np
from mapie.exchangeability_testing import RiskMonitoring
streams, delays = np.load(sys.argv[1]), []
line, level = float(sys.argv[2]), float(sys.argv[3])
for test_level in (level, 4 * level):
    delays.append({name: [] for name in streams})
    for name in streams:
        for losses in streams[name]:
            monitor = RiskMonitoring(risk="accuracy", threshold=line, test_level=test_level, warn=False)
            monitor.update(np.zeros(len(losses), dtype=int), losses.astype(int))
            seen = np.flatnonzero(monitor.online_risk_lower_bound_sequence_history > monitor.threshold)
            delays[-1][name].append(int(seen[0]) + 1 if len(seen) else None)
monitor = RiskMonitoring(risk="accuracy", threshold=line, test_level=level, warn=False)
few = streams["2.0"][0][:300].astype(int)
start = time.perf_counter()
for loss in few:
    monitor.update(np.zeros(1, dtype=int), np.array([loss]))
print(json.dumps({"delays": delays, "per_audit": (time.perf_counter() - start) / len(few)}))
"""


def draw_streams(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {str(ratio): rng.random(shape) < ratio * LINE for ratio, shape in STREAMS.items()}


def our_delays(losses: np.ndarray, evidence: float) -> list[int | None]:
    """Audits until the evidence reaches a level, stream by stream."""
    block = block_size(LINE)
    whole = losses.shape[1] // block
    means = losses[:, : whole * block].reshape(len(losses), whole, block).mean(axis=2).T
    reached = log_evidence(means, LINE) >= np.log(evidence)
    return [int(run.argmax() + 1) * block if run.any() else None for run in reached.T]


def shown(delays: list[int | None]) -> tuple[str, float]:
    """The median and the 90 % delay; a stream without an alarm counts as later than its end."""
    late = [np.inf if delay is None else delay for delay in delays]
    median, slow = (float(np.quantile(late, q, method="higher")) for q in (0.5, 0.9))
    return " / ".join("later" if np.isinf(one) else f"{one:,.0f}" for one in (median, slow)), median


def delay_rows(mapie: str) -> tuple[list[str], float]:
    """The table of delays, and MAPIE's seconds per audit."""
    streams = draw_streams()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "streams.npz"
        np.savez(data, **streams)
        command = [mapie, "-c", MAPIE, str(data), str(LINE), str(LEVEL)]
        theirs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rows = []
    for name, losses in streams.items():
        ours, our_median = shown(our_delays(losses, 1 / LEVEL))
        red, _ = shown(our_delays(losses, 2 / LEVEL))
        (other, their_median), (one_side, whole) = (shown(delays[name]) for delays in theirs["delays"])
        ratios = f"{our_median / their_median:.2f}, {our_median / whole:.2f}"
        rows.append(f"| {float(name):g} | {len(losses)} | {ours} | {red} | {other} | {one_side} | {ratios} |")
    return rows, theirs["per_audit"]


def running(audits: int = 10_000, delay: int = 200) -> float:
    """Seconds per audited decision: a row, its outcome `delay` audits later, and two looks for red."""
    losses = (np.random.default_rng(1).random(audits) < LINE).astype(float).tolist()
    monitor = Monitor(watch_lines(LINE, n=2000, binary=True))
    start = time.perf_counter()
    for seq in range(1, audits + delay + 1):
        if seq <= audits:
            monitor.observe([LedgerRow(seq, 1e9)])
            monitor.red(float(seq))
        if seq > delay:
            monitor.observe([LedgerRow(seq - delay, 1e9, losses[seq - delay - 1])])
            monitor.red(float(seq))
    return (time.perf_counter() - start) / audits


def plain_recursion(losses: np.ndarray) -> float:
    """Seconds of the evidence by its recursion in plain Python, block after block."""
    start = time.perf_counter()
    means = losses.reshape(-1, block_size(LINE)).mean(axis=1).tolist()
    bets, wealth, starts, peak = BETS.tolist(), [0.0] * len(BETS), 0, 1.0
    for block, mean in enumerate(means):
        if block % START_EVERY == 0:
            starts += 1
        share = 1 / (len(bets) * starts * (starts + 1)) if block % START_EVERY == 0 else 0.0
        wealth = [(one + share) * (1 + eta * mean) / (1 + eta * LINE) for one, eta in zip(wealth, bets, strict=True)]
        peak = max(peak, sum(wealth) + 1 / (starts + 1))
    return time.perf_counter() - start


def from_scratch(rows: int = 1_000_000) -> tuple[float, float]:
    """Seconds to recompute a ledger with its state and limits, and of the plain recursion for one line."""
    losses = (np.random.default_rng(2).random(rows) < 0.8 * LINE).astype(float)
    lines = watch_lines(LINE, n=2000, binary=True)
    start = time.perf_counter()
    Monitor.from_ledger(lines, losses).standing(0.0)
    return time.perf_counter() - start, plain_recursion(losses)


def page(mapie: str) -> str:
    delays, their_audit = delay_rows(mapie)
    our_audit = running()
    scratch, plain = from_scratch()
    table = "\n".join(delays)
    audit = (
        "work per audited decision, outcomes 200 audits late (peer: MAPIE's update)",
        f"{1e3 * our_audit:.3f} ms", f"{1e3 * their_audit:.0f} ms", f"{our_audit / their_audit:.5f}", "below 0.05 ms",
    )  # fmt: skip
    ledger = (
        "1,000,000 ledger rows from scratch, with limits (peer: the recursion for one line in plain Python)",
        f"{scratch:.2f} s", f"{plain:.2f} s", f"{scratch / plain:.2f}", "below 10 s",
    )  # fmt: skip
    return f"""# Benchmarks of the monitor

Measured by `make bench-monitoring BENCH="--write docs/benchmarks-monitoring.md"` on {platform.machine()} with Python
{platform.python_version()} and NumPy {np.__version__}. Both sides see the same streams in the same run.

## How soon a loss above the line is seen

Audits until the alarm, median / 90 %, for independent losses of 0 or 1 and a line of {LINE}. Both monitors state that a
false alarm, ever, has a probability of at most {LEVEL:g}: evidence 20 here, `test_level={LEVEL:g}` and `threshold={LINE}`
for MAPIE's RiskMonitoring. That keeps half of its level for a reference set and half of the rest for the other side, so the
next column gives it `test_level={4 * LEVEL:g}`: {LEVEL:g} on this side alone. Red takes evidence 40.

| true loss / line | streams | ours, evidence 20 | ours, evidence 40 | MAPIE | MAPIE, one side | ours / MAPIE, medians |
|---|---|---|---|---|---|---|
{table}

## What it costs

| measurement | ours | peer | ratio | target |
|---|---|---|---|---|
{_cells(*audit)}
{_cells(*ledger)}
"""


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mapie", required=True, metavar="PYTHON", help="an interpreter that has MAPIE")
    parser.add_argument("--write", metavar="FILE", help="write the page to this file as well")
    arguments = parser.parse_args()
    text = page(arguments.mapie)
    print(text)
    if arguments.write:
        Path(arguments.write).write_text(text)


if __name__ == "__main__":
    main()
