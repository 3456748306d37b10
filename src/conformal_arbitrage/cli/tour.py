"""The demo: the whole tool on real scores recorded for this project.

Knows nothing of terminals; `demo_command` prints what it returns.
"""

import asyncio
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from msgspec import structs

from conformal_arbitrage.calibration.calibrate import calibrate
from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.project_secret import ProjectSecret
from conformal_arbitrage.core.choices import row_argmax
from conformal_arbitrage.errors import ConfigError, OutputError
from conformal_arbitrage.evaluation.costs import CostOptions
from conformal_arbitrage.evaluation.figures import save_figure
from conformal_arbitrage.evaluation.frontier import Frontier, evaluate
from conformal_arbitrage.evaluation.inspection import Inspection, inspect
from conformal_arbitrage.evaluation.monitor_figures import save_simulation
from conformal_arbitrage.evaluation.simulation import Scenario, Simulation, simulate
from conformal_arbitrage.live.config import Config, read_config
from conformal_arbitrage.scorelog.files import write_bytes, write_text
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorers import ReplayScorer
from conformal_arbitrage.types import COST_DIGITS

ALPHA = 0.05
CALIBRATION, QUESTIONS, TRIALS = 1000, 300, 2000
ALPHAS = (0.02, 0.05, 0.1, 0.15, 0.2)
PRIMARY_COST, GUARDIAN_COST = 0.0002, 0.50
SCENARIO = Scenario(decisions=60_000, audit_rate=0.1, renewal_rows=1000, seed=3)
STORY = """\
2369 science questions (ARC, OpenBookQA, SciQ), each with its options. Qwen2.5-Coder-1.5B, a small local model, is the \
Primary; a human expert (the answer key) is the Guardian. Assumed costs per question: $0.0002 for the model, $0.50 for \
the expert. How often is the expert needed if at most 5 % of the answers may be worse than the expert's?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The result of sending questions through the gateway.

    Attributes:
        questions: number of questions sent, none of them used for calibration.
        deferred: number of questions that went to the expert.
        loss: share of answers worse than the expert's.
        cost: dollars spent.
        always: dollars that always asking the expert would have cost.
    """

    questions: int
    deferred: int
    loss: float
    cost: float
    always: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The results of the demo, and the files it wrote."""

    good: Inspection
    poor: Inspection
    certificate: Certificate
    deferred: float
    frontier: Frontier
    served: Served | None
    simulation: Simulation
    files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the results as a JSON document."""
        return {
            "good": self.good.to_dict(),
            "poor": self.poor.to_dict(),
            "certificate": self.certificate.to_dict(),
            "deferred": self.deferred,
            "frontier": self.frontier.to_dict(),
            "served": None if self.served is None else asdict(self.served),
            "simulation": self.simulation.to_dict(),
            "files": list(self.files),
        }


def run_demo(out: str | Path) -> Demo:
    """Inspect, calibrate, evaluate and serve the bundled log; write log, certificates and figure to a folder."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created ({error.strerror}); use another folder") from error
    path = folder / "science.parquet"
    write_bytes(path, (files("conformal_arbitrage") / "data" / "science.parquet").read_bytes())
    log = ScoreLog.read(path, primary="qwen15b", guardian="expert")
    poor = ScoreLog.read(path, primary="smollm2", guardian="qwen15b")
    secret = ProjectSecret.search(folder) or ProjectSecret.create(folder)
    costs = CostOptions(primary_cost=PRIMARY_COST, guardian_cost=GUARDIAN_COST)
    frontier = evaluate(log, ALPHAS, calibration_size=1000, trials=TRIALS, costs=costs)
    certificate = calibrate(log, ALPHA).sign(secret)
    simulation = simulate(log, ALPHA, scenario=SCENARIO, costs=costs, confidence=0.95, zero_one=True)
    figures = ["frontier.png", "simulation.png"] if find_spec("matplotlib") else []
    written = tuple(str(folder / name) for name in ("science.parquet", "certificate.json", "scores.csv", *figures))
    write_text(folder / "scores.csv", graded_table(log))
    certificate.save(written[1])
    if figures:
        save_figure(frontier, written[-2])
        save_simulation(simulation, written[-1])
    served = None
    if find_spec("starlette") and find_spec("uvicorn"):
        write_gateway(folder, log)
        served = _serve(folder, log)
        written += tuple(str(folder / name) for name in ("arbitrage.toml", "gateway.json"))
    return Demo(
        good=inspect(log, costs=costs),
        poor=inspect(poor),
        certificate=certificate,
        deferred=float(certificate.apply(log).deferred.mean()),
        frontier=frontier,
        served=served,
        simulation=simulation,
        files=written,
    )


def graded_table(log: ScoreLog) -> str:
    """Return the log as a plain table: how far the Primary leads, and whether each model is right."""
    ids = [str(k) for k in range(len(log))] if log.id is None else log.id.tolist()
    rows = [sorted(row) for row in np.split(log.primary, log.offsets[1:-1])]
    correct = log.outcome("correct")
    right = [correct[log.offsets[:-1] + row_argmax(scores, log.offsets)] for scores in (log.primary, log.guardian)]
    lines = zip(ids, rows, *right, strict=True)
    text = "".join(f"{id},{scores[-1] - scores[-2]:.6g},{ours:g},{theirs:g}\n" for id, scores, ours, theirs in lines)
    return f"id,confidence,small_ok,expert_ok\n{text}"


def write_gateway(folder: Path, log: ScoreLog) -> None:
    """Write a certificate from some of the rows, bound to replays of the log, and a configuration that serves it."""
    columns = {role: ReplayScorer.read(folder / "science.parquet", role) for role in log.columns}
    rows = np.random.default_rng(0).permutation(len(log))[:CALIBRATION]
    bound = replace(log.select(np.sort(rows)), identities={name: dict(s.identity) for name, s in columns.items()})
    calibrate(bound, ALPHA).sign(ProjectSecret.find(folder)).save(folder / "gateway.json")
    write_text(folder / "arbitrage.toml", CONFIGURATION)


def _serve(folder: Path, log: ScoreLog) -> Served:
    """Send rows that were not used for calibration to a gateway with a record of its own: the folder's may ask for keys.

    Raises:
        KeyboardInterrupt: the gateway was told to stop.
    """
    config = read_config(folder / "arbitrage.toml")
    rest = np.random.default_rng(0).permutation(len(log))[CALIBRATION : CALIBRATION + QUESTIONS].tolist()
    with TemporaryDirectory(prefix="arbitrage-demo-") as own:
        listening = structs.replace(config.gateway, port=0, database=str(Path(own) / "decisions.sqlite"))
        answers = asyncio.run(_through_the_gateway(structs.replace(config, gateway=listening), log, rest))
    if answers is None:
        raise KeyboardInterrupt
    chosen = np.array([ord(answer["choice"][-1]) - ord("A") for answer in answers])
    decisions = [answer["arbitrage"] for answer in answers]
    return Served(
        questions=len(rest),
        deferred=sum(one["decided_by"] == "guardian" for one in decisions),
        loss=0.0 if log.label is None else float((chosen != log.label[rest]).mean()),
        cost=round(sum(leg["cost"] for one in decisions for leg in one["legs"]), COST_DIGITS),
        always=GUARDIAN_COST * len(rest),
    )


async def _through_the_gateway(config: Config, log: ScoreLog, rows: Sequence[int]) -> list[dict[str, Any]] | None:
    """Return the answers to rows sent in OpenAI's wire format to a gateway on loopback; None if a signal stopped it."""
    import aiohttp

    from conformal_arbitrage.gateway import running

    async with running(config) as (url, _), aiohttp.ClientSession(url) as session:
        questions = asyncio.gather(*(ask_gateway(session, log, row) for row in rows))
        if threading.current_thread() is threading.main_thread():
            # in place of the gateway's handler, which would answer all of them first
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, questions.cancel)
        try:
            return await questions
        except (asyncio.CancelledError, aiohttp.ClientConnectorError):  # nothing listens once it was told to stop
            return None


async def ask_gateway(session: Any, log: ScoreLog, row: int, policy: str = "science") -> dict[str, Any]:
    """Ask a gateway about a row of the log, whose scores it replays.

    Raises:
        ConfigError: it answered with an error.
    """
    choices = [{"value": f"Answer {chr(ord('A') + k)}"} for k in range(int(log.sizes[row]))]
    question = {"type": "choice", "instructions": "Answer this science question.", "choices": choices}
    name = "" if log.id is None else str(log.id[row])
    body = {"model": policy, "input": name, "questions": [question]}
    async with session.post("/v1/decisions", json=body) as response:
        document = await response.json()
    if response.status != 200:
        raise ConfigError(f"the demo's gateway answered {response.status}: {document['error']['message']}")
    return document["answers"][0]


MODELS = f"""\
alpha = {ALPHA}

[primary]
kind = "replay"
log = "science.parquet"
column = "qwen15b"
price_per_call = {PRIMARY_COST}

[guardian]
kind = "replay"
log = "science.parquet"
column = "expert"
price_per_call = {GUARDIAN_COST}
"""
"""The models of the bundled questions, and the risk budget."""

CONFIGURATION = f"""\
# The bundled questions served by replaying what was recorded: `arbitrage serve --config arbitrage.toml`.
{MODELS}
[gateway]
database = "decisions.sqlite"

[policies.science]
certificate = "gateway.json"
"""
