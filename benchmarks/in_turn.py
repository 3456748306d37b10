"""Compare the gateway of this checkout with that of an older one: CPU per request, in turn, on the same core.

    python -m benchmarks.in_turn OLD_CHECKOUT --runs 5

Each run starts both gateways anew over one mock endpoint and sends them slices of the same load by turns, so that
whatever else the machine does falls on both alike. The ratio of a run is new over old; the median over the runs counts.
OLD_CHECKOUT is a work tree of this repository (`git worktree add --detach OLD_CHECKOUT COMMIT`); both run on this
interpreter, each with its own source.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import uvloop
from benchmarks.endpoint import served
from benchmarks.gateway import CONCURRENCY, KINDS, ROOT, Gateway, Kind, free_port, through
from benchmarks.http_load import Mock, load

_PREPARE = "import sys; from pathlib import Path; from benchmarks.gateway import prepared; "
_PREPARE += "prepared(Path(sys.argv[1]), sys.argv[2])"
_SERVE = "from conformal_arbitrage.cli import main; main()"
_WARM_UP = 300
_SLICES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One kind of request: medians over the runs, CPU in milliseconds per request."""

    name: str
    old_ms: float
    new_ms: float
    ratio: float
    over_bare: float


def gateway_of(checkout: Path, folder: Path, url: str, core: int) -> Gateway:
    """Start the gateway of a checkout with a configuration that the checkout itself prepares."""
    port = free_port()
    home = folder / f"gateway-{port}"
    home.mkdir()
    path = os.pathsep.join([str(checkout / "src"), str(checkout)])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", _PREPARE, str(home), url], check=True, env=environment, cwd=home)
    command = [sys.executable, "-c", _SERVE, "serve", "--port", str(port)]
    return Gateway(command, port, core, home, PYTHONPATH=path)


def cpu_of(gateway: Gateway, kind: Kind, count: int) -> float:
    """Return the CPU milliseconds per request that a load takes from a gateway."""
    start = gateway.cpu()
    uvloop.run(load(gateway.url, kind.question, count, CONCURRENCY))
    return (gateway.cpu() - start) * 1e3 / count


def run(old: Path, requests: int, cores: tuple[int, int]) -> dict[str, tuple[float, float, float]]:
    """Return the CPU per request of the old gateway, this one, and the bare pass-through, by kind of request."""
    with tempfile.TemporaryDirectory() as name, served(partial(Mock, 0.0), cores[1]) as url, ExitStack() as stack:
        folder = Path(name)
        gateways = [gateway_of(checkout, folder, url, cores[0]) for checkout in (old, ROOT)]
        gateways.append(through(folder, url, cores[0]))
        for gateway in gateways:
            stack.callback(gateway.stop)
        kinds = {kind.name: kind for kind in KINDS if kind.gateway == "ours"}
        plain = next(kind for kind in KINDS if kind.gateway == "bare")
        figures: dict[str, tuple[float, float, float]] = {}
        for name, kind in kinds.items():
            turns = [(gateways[0], kind), (gateways[1], kind), (gateways[2], plain)]
            for gateway, one in turns:
                cpu_of(gateway, one, _WARM_UP)
            slices = [
                [cpu_of(gateway, one, max(requests // _SLICES, CONCURRENCY)) for gateway, one in turns]
                for _ in range(_SLICES)
            ]
            first, second, bare = (statistics.mean(column) for column in zip(*slices, strict=True))
            figures[name] = first, second, bare
    return figures


def compared(runs: Sequence[dict[str, tuple[float, float, float]]]) -> list[Comparison]:
    """Return the medians over the runs."""
    median = statistics.median
    return [
        Comparison(
            name=name,
            old_ms=median(figures[name][0] for figures in runs),
            new_ms=median(figures[name][1] for figures in runs),
            ratio=median(figures[name][1] / figures[name][0] for figures in runs),
            over_bare=median(figures[name][1] / figures[name][2] for figures in runs),
        )
        for name in runs[0]
    ]


def table(rows: Sequence[Comparison]) -> list[str]:
    """Return the comparison as a Markdown table."""
    lines = ["|  | old, CPU ms | new, CPU ms | new / old | new / bare |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row.name, f"{row.old_ms:.3f}", f"{row.new_ms:.3f}", f"{row.ratio:.2f}", f"{row.over_bare:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT", help="a work tree with the code to compare with")
    parser.add_argument("--runs", type=int, default=5, help="each with new processes; the median counts")
    parser.add_argument("--requests", type=int, default=1500, help="of each kind, to each gateway, in one run")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    old = options.old.resolve()
    if not (old / "benchmarks" / "gateway.py").exists():
        parser.error(f"{options.old} has no benchmarks/gateway.py: name a work tree of this repository")
    core, other = sorted(os.sched_getaffinity(0))[0], sorted(os.sched_getaffinity(0))[-1]
    if core == other:
        parser.error("two cores are needed: one for the gateways, one for the load")
    os.sched_setaffinity(0, {other})
    rows = compared([run(old, options.requests, (core, other)) for _ in range(options.runs)])
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else "\n".join(table(rows)))


if __name__ == "__main__":
    main()
