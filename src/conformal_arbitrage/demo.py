"""The demo: the whole tool once, on real scores recorded for this project."""

from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conformal_arbitrage.certificate import Calibration, calibrate
from conformal_arbitrage.errors import OutputError
from conformal_arbitrage.figures import plot
from conformal_arbitrage.files import write_bytes
from conformal_arbitrage.frontier import Frontier, costs_of, evaluate
from conformal_arbitrage.inspection import Inspection, inspect
from conformal_arbitrage.logs import ScoreLog

ALPHA = 0.05
ALPHAS = (0.02, 0.05, 0.1, 0.15, 0.2)
PRIMARY_COST, GUARDIAN_COST = 0.0002, 0.50
STORY = """\
2369 science questions (ARC, OpenBookQA, SciQ), each with its options. Qwen2.5-Coder-1.5B, a small local model, is the
Primary; a human expert (the answer key) is the Guardian. Assumed costs: $0.0002 for the model, $0.50 for the expert,
a question. How often must the expert be asked if at most 5 % of the answers may be worse than the expert's?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demo found and wrote."""

    good: Inspection
    poor: Inspection
    calibration: Calibration
    deferred: float
    frontier: Frontier
    files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The demo as a JSON document."""
        return {
            "good": self.good.to_dict(),
            "poor": self.poor.to_dict(),
            "certificate": self.calibration.to_dict(),
            "deferred": self.deferred,
            "frontier": self.frontier.to_dict(),
            "files": list(self.files),
        }


def run_demo(out: str | Path) -> Demo:
    """Inspect, calibrate and evaluate the bundled log; write it, the certificate and the figure to a folder."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror}); give another folder") from error
    bundled = files("conformal_arbitrage") / "data" / "science.parquet"
    with as_file(bundled) as path:
        log = ScoreLog.read(path, primary="qwen15b", guardian="expert")
        poor = ScoreLog.read(path, primary="smollm2", guardian="qwen15b")
    costs = costs_of(log, primary_cost=PRIMARY_COST, guardian_cost=GUARDIAN_COST)
    frontier = evaluate(
        log,
        ALPHAS,
        calibration_size=1000,
        trials=100,
        guardian_sees="all",
        primary_cost=PRIMARY_COST,
        guardian_cost=GUARDIAN_COST,
    )
    calibration = calibrate(log, ALPHA, guardian_sees="all")
    names = ["science.parquet", "certificate.json", *(["frontier.png"] if find_spec("matplotlib") else [])]
    written = tuple(str(folder / name) for name in names)
    write_bytes(written[0], bundled.read_bytes())
    calibration.save(written[1])
    if len(written) > 2:
        plot(frontier, written[2])
    return Demo(
        good=inspect(log, costs=costs),
        poor=inspect(poor),
        calibration=calibration,
        deferred=float(calibration.apply(log).deferred.mean()),
        frontier=frontier,
        files=written,
    )
