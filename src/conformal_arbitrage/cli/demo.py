"""The demo: the whole tool on real scores, and a filled console to try."""

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from msgspec import structs

from conformal_arbitrage.calibration.calibrate import calibrate
from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.logs import show_frontier, show_inspection, show_simulation
from conformal_arbitrage.cli.output import print_json, wrapped
from conformal_arbitrage.core.exact import row_argmax
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.evaluation.frontier import Frontier, evaluate
from conformal_arbitrage.evaluation.inspection import Inspection, inspect
from conformal_arbitrage.evaluation.show import save_simulation
from conformal_arbitrage.evaluation.simulation import Scenario, Simulation, simulate
from conformal_arbitrage.live.config import Config, read_config
from conformal_arbitrage.models import ReplayScorer
from conformal_arbitrage.scorelog.log import CostOptions, ScoreLog
from conformal_arbitrage.scorelog.tables import new_folder, write_bytes, write_text
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
        loss: share of answers worse than the expert's.
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


@click.command("demo")
@click.option("--out", default="demo", show_default=True, metavar="DIR", help="Folder for the files.")
@click.option("--console", is_flag=True, help="Also fill a gateway for the web console, with audits and an alarm.")
@options.as_json
def demo_command(*, out: str, console: bool, as_json: bool) -> None:
    """Tour the tool on bundled real data: inspect, calibrate, evaluate, serve, simulate, and a pair not worth routing.

    \b
    arbitrage demo --out demo
    arbitrage demo --console && arbitrage serve --config demo/console.toml
    """
    demo = run_demo(out)
    if console:
        demo = replace(demo, files=(*demo.files, str(fill_console(Path(out)))))
    if as_json:
        print_json(demo.to_dict())
        return
    click.echo(wrapped(STORY))
    click.echo("\n1. Is the pair worth routing?   arbitrage inspect\n")
    show_inspection(demo.good)
    click.echo("  note: choose a real alpha on other rows than those you certify; see docs/choosing.md")
    click.echo(f"\n2. A certificate at alpha {ALPHA:g}   arbitrage calibrate\n")
    click.echo(wrapped(demo.certificate.summary))
    click.echo(f"\nOn this log {100 * demo.deferred:.0f} % of the questions go to the expert.")
    click.echo("\n3. What each budget buys, on held-out questions   arbitrage evaluate\n")
    show_frontier(demo.frontier)
    click.echo("\n4. A pair not worth routing   arbitrage inspect\n")
    click.echo(wrapped(f"SmolLM2-135M is the Primary, Qwen2.5-Coder-1.5B the Guardian. {demo.poor.verdict}"))
    click.echo("\n5. The same in production: an OpenAI-compatible gateway   arbitrage serve\n")
    click.echo(wrapped(_describe_served(demo.served)))
    click.echo("\n6. The model becomes worse, and nobody is told   arbitrage simulate\n")
    show_simulation(demo.simulation)
    click.echo("\n" + wrapped("Written: " + ", ".join(demo.files)))
    if console:
        click.echo(CONSOLE_TOUR.format(config=Path(out) / FILE))


def _describe_served(served: Served | None) -> str:
    if served is None:
        return (
            "Skipped: the gateway needs its extra, which is not installed; run `pip install '.[gateway]'` in a clone of the "
            "repository, then the demo again."
        )
    return (
        f"{served.questions} questions that were not used for calibration were sent to POST /v1/decisions on this machine. "
        f"{served.deferred} went to the expert, {served.questions - served.deferred} calls were saved: ${served.cost:.2f} "
        f"instead of ${served.always:.2f}. The loss was {served.loss:.3f}; the risk budget is {ALPHA:g}. `make demo-serve` "
        "keeps the gateway running."
    )


def run_demo(out: str | Path) -> Demo:
    """Inspect, calibrate, evaluate and serve the bundled log; write log, certificates and figure to a folder."""
    folder = new_folder(out)
    path = folder / "science.parquet"
    write_bytes(path, (files("conformal_arbitrage") / "data" / "science.parquet").read_bytes())
    log = ScoreLog.read(path, primary="qwen15b", guardian="expert")
    poor = ScoreLog.read(path, primary="smollm2", guardian="qwen15b")
    secret = ProjectSecret.find()
    costs = CostOptions(primary_cost=PRIMARY_COST, guardian_cost=GUARDIAN_COST)
    frontier = evaluate(log, ALPHAS, calibration_size=1000, trials=TRIALS, costs=costs)
    certificate = calibrate(log, ALPHA).sign(secret)
    simulation = simulate(log, ALPHA, scenario=SCENARIO, costs=costs, confidence=0.95, zero_one=True)
    figures = ["frontier.png", "simulation.png"] if find_spec("matplotlib") else []
    written = tuple(str(folder / name) for name in ("science.parquet", "certificate.json", "scores.csv", *figures))
    write_text(folder / "scores.csv", graded_table(log))
    certificate.save(written[1])
    if figures:
        frontier.plot(written[-2])
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
    calibrate(bound, ALPHA).sign(ProjectSecret.find()).save(folder / "gateway.json")
    write_text(folder / "arbitrage.toml", CONFIGURATION)


def _serve(folder: Path, log: ScoreLog) -> Served:
    """Send rows that were not used for calibration to a gateway with a record of its own: the folder's may ask for keys.

    Raises:
        KeyboardInterrupt: the gateway was told to stop.
    """
    config = read_config(folder / "arbitrage.toml")
    rest = np.random.default_rng(0).permutation(len(log))[CALIBRATION : CALIBRATION + QUESTIONS].tolist()
    with TemporaryDirectory(prefix="arbitrage-demo-") as scratch:
        listening = structs.replace(config.gateway, port=0, database=str(Path(scratch) / "decisions.sqlite"))
        answers = asyncio.run(_through_the_gateway(structs.replace(config, gateway=listening), log, rest))
    if answers is None:
        raise KeyboardInterrupt
    chosen = np.array([ord(answer["choice"][-1]) - ord("A") for answer in answers])
    decisions = [answer["arbitrage"] for answer in answers]
    return Served(
        questions=len(rest),
        deferred=sum(decision["decided_by"] == "guardian" for decision in decisions),
        loss=0.0 if log.label is None else float((chosen != log.label[rest]).mean()),
        cost=round(sum(leg["cost"] for decision in decisions for leg in decision["legs"]), COST_DIGITS),
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


# --- A filled console to try ---


FILE = "console.toml"
_CALIBRATION, _QUESTIONS, _HARDER, _WRONG = 1000, 1200, 260, 60
_SINCE = 240
"""Questions after the alarm, more than the 199 that a renewal after it takes."""
_AT_ONCE = 16
_SECONDS = 30.0
_STEP = 0.2


def fill_console(folder: Path) -> Path:
    """Write a configuration with policies beside the demo's log, and send traffic through it; return its file.

    A console that is there already stays: with certificates made again it would open without its alarm.
    """
    config = folder / FILE
    if (folder / "console.sqlite").exists() and config.exists():
        return config
    path = folder / "science.parquet"
    log = ScoreLog.read(path, primary="qwen15b", guardian="expert")
    columns = {role: ReplayScorer.read(path, role) for role in log.columns}
    bound = replace(log, identities={name: dict(scorer.identity) for name, scorer in columns.items()})
    order = np.random.default_rng(1).permutation(len(log))
    easy, hard, others = _by_difficulty(log)
    secret = ProjectSecret.find()
    for name, rows in (("science", order[:_CALIBRATION]), ("exams", easy[:_CALIBRATION])):
        calibrate(bound.select(np.sort(rows)), ALPHA).sign(secret).save(folder / f"{name}.json")
    texts, scores = [text for text, _ in LETTERS], [list(each) for _, each in LETTERS]
    ScoreLog.from_arrays(scores, scores, id=texts).write(folder / "letters.parquet")
    write_text(folder / "assistants.py", ASSISTANTS)
    write_text(config, CONSOLE_CONFIGURATION)
    science = order[_CALIBRATION:][:_QUESTIONS]
    asyncio.run(_fill(config, log, science, hard, others[:_SINCE]))
    return config


def _by_difficulty(log: ScoreLog) -> tuple[Any, Any, Any]:
    """Return rows of which the Primary gets nearly all right, others of which it gets half wrong, and the rest."""
    rng = np.random.default_rng(2)
    right = np.array([int(np.argmax(log.row(row).primary)) for row in range(len(log))]) == log.label
    easy, wrong = rng.permutation(np.flatnonzero(right)), rng.permutation(np.flatnonzero(~right))
    mostly_easy = np.concatenate([easy[: _CALIBRATION - _WRONG], wrong[:_WRONG]])
    harder = rng.permutation(np.concatenate([wrong[_WRONG:][: _HARDER // 2], easy[-_HARDER // 2 :]]))
    rest = np.setdiff1d(np.arange(len(log)), np.concatenate([mostly_easy, harder]))
    return mostly_easy, harder, rng.permutation(rest)


async def _fill(config: Path, log: ScoreLog, science: Any, hard: Any, later: Any) -> None:
    """Send questions to a gateway over the configuration's own record; those for later only after the alarm."""
    import aiohttp

    from conformal_arbitrage.gateway import running

    whole = read_config(config)
    listening = structs.replace(whole, gateway=structs.replace(whole.gateway, port=0))
    async with running(listening) as (url, _), aiohttp.ClientSession(url) as session:
        await _ask_all(session, log, "science", science)
        await _ask_all(session, log, "exams", hard)
        # not until no audit is pending: that holds before the gateway has read the first of them as well
        await _until(session, "exams", lambda monitor: monitor["alarm"] is not None)
        await _ask_all(session, log, "exams", later)
        await asyncio.gather(*(_write_letter(session, text) for text, _ in LETTERS))
        for question in CONSOLE_QUESTIONS:
            await _ask_assistants(session, question)
        await _until(session, "science", lambda monitor: monitor.get("audits", {}).get("pending") == 0)


async def _ask_all(session: Any, log: ScoreLog, policy: str, rows: Any) -> None:
    """Ask a policy about rows of the log, some at once."""
    for start in range(0, len(rows), _AT_ONCE):
        batch = rows[start : start + _AT_ONCE].tolist()
        await asyncio.gather(*(ask_gateway(session, log, row, policy) for row in batch))


async def _until(session: Any, policy: str, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the monitor of a policy shows something.

    Raises:
        ConfigError: it did not.
    """
    for _ in range(round(_SECONDS / _STEP)):
        async with session.get(f"/v1/arbitrage/policies/{policy}/monitor") as response:
            if holds(await response.json()):
                return
        await asyncio.sleep(_STEP)
    raise ConfigError(
        f"the demo's gateway read no audits of {policy} in {_SECONDS:g} seconds; remove the folder and try again"
    )


async def _write_letter(session: Any, text: str) -> None:
    """Ask people about a letter; they have not answered when the caller is told to come back, and the question stays."""
    question = {"type": "choice", "choices": [{"value": team} for team in TEAMS]}
    body = {"model": "letters", "input": text, "questions": [question]}
    async with session.post("/v1/decisions", json=body, headers={"Idempotency-Key": text[:40]}) as response:
        if response.status != 409:
            raise ConfigError(f"the demo's gateway answered {response.status}: {await response.text()}")


async def _ask_assistants(session: Any, question: str) -> None:
    """Ask for an answer in free text; both assistants give one, for people to grade."""
    body = {"model": "answers", "messages": [{"role": "user", "content": question}]}
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise ConfigError(f"the demo's gateway answered {response.status}: {await response.text()}")


TEAMS = ("Billing", "Technical support", "Account and security", "Sales")
LETTERS = (
    (
        "I was charged twice for my plan this month, once on the 3rd and once on the 4th. I also changed my password in "
        "between, because a mail said that someone had signed in from another country. Please return the second payment.",
        (0.46, 0.05, 0.38, 0.11),
    ),
    ("Since the update this morning the app closes whenever I open the calendar.", (0.08, 0.70, 0.12, 0.10)),
    ("A mail says that someone signed in to my account from abroad. I have not travelled.", (0.05, 0.30, 0.55, 0.10)),
    ("What would ten seats cost us if we paid for two years at once?", (0.40, 0.05, 0.05, 0.50)),
    ("My invoice shows VAT although our company has a VAT number. Can you correct it?", (0.65, 0.10, 0.10, 0.15)),
    ("The code for signing in never arrives, although the new phone has the old number.", (0.05, 0.45, 0.40, 0.10)),
)
"""Letters to a support desk, each with what a small model thinks of the teams."""

CONSOLE_QUESTIONS = {
    "My invoice shows VAT although our company has a VAT number. How do I get it corrected?": (
        "I am sorry about that! VAT is always charged and cannot be removed. You can claim it back from your tax office at "
        "the end of the year.",
        "Add the VAT number under Settings, Company, and press Reissue next to the invoice. The corrected one replaces it "
        "within a day; the amount is returned to your card in 5 to 10 days.",
    ),
    "Can I move my booking to next Friday without a fee?": (
        "Yes: up to 48 hours before it begins, changes are free. Open the booking and press Change date.",
        "Yes, if it begins in more than 48 hours. Open Bookings, choose it, and press Change date.",
    ),
    "How many people can be on one team?": (
        "There is no limit on the number of people.",
        "Up to 50 on the standard plan. Larger teams need the enterprise plan.",
    ),
}
"""Questions to a support desk, each with what a quick assistant and a thorough one answer."""

ASSISTANTS = f"""\
# Two assistants that know a few questions, for the demo of grading.
from conformal_arbitrage.models.port import Answer
from conformal_arbitrage.types import message_text

ANSWERS = {CONSOLE_QUESTIONS!r}


class Assistant:
    def __init__(self, name, place):
        self.identity, self._place = {{"kind": "function", "name": name}}, place

    async def answer(self, request):
        both = ANSWERS.get(message_text(request.messages[-1]), ("I do not know.", "I cannot tell from here."))
        return Answer(message={{"role": "assistant", "content": both[self._place]}}, confidence=0.5)


quick, thorough = Assistant("quick assistant", 0), Assistant("thorough assistant", 1)
"""

CONSOLE_TOUR = """
The console:  arbitrage serve --config {config}, then open the address it prints.
There is no key yet, so nobody has to sign in on this machine; `arbitrage keys create --config {config}` ends that.
  exams      is red: its questions became harder than those it was certified on. Click it to see when and how surely; it
             defers every question until you lift the alarm there. 24 hours after the alarm, when all outcomes are in, its
             240 later questions are enough for `arbitrage renew exams --config {config}`.
  science    keeps its promise. Move the slider on its page to see what other budgets would cost.
  Review     has letters for the support team, and answers to grade; press a number.
  Decisions  lists every question: click one to see who decided it and why.
"""
"""What to click, after the demo has filled a console."""

CONSOLE_CONFIGURATION = f"""\
# For `arbitrage serve --config console.toml`: the bundled questions, letters that people answer, and answers that they
# grade; see /console.
{MODELS}
[models.reader]
kind = "replay"
log = "letters.parquet"
column = "primary"

[models.people]
kind = "human"
name = "support team"
instructions = "Which team should answer this message?"

[models.quick]
kind = "function"
function = "assistants:quick"
name = "quick assistant"

[models.thorough]
kind = "function"
function = "assistants:thorough"
name = "thorough assistant"

[teams."support team"]
members = ["reviewer-1", "reviewer-2"]

[gateway]
database = "console.sqlite"

[policies.letters]
primary = "reader"
guardian = "people"
mode = "shadow"
content = "full"

[policies.letters.review]
wait = 1

[policies.answers]
primary = "quick"
guardian = "thorough"
form = "text"
mode = "shadow"
content = "full"
grading = "review"

[policies.science]
certificate = "science.json"
audit_rate = 0.5
content = "full"

[policies.exams]
certificate = "exams.json"
audit_rate = 0.5
content = "full"
"""
