"""A filled console to try: policies with traffic, audits, an alarm and a queue of reviews; all of it real requests.

One policy gets questions like those it was calibrated on. The other was calibrated on questions that the small model finds
easy, and then gets harder ones: its audits show it, and an alarm puts it into safe mode. A third one asks people about
letters, which wait for whoever opens the review page, and the answers of a fourth one wait to be graded there.

Knows nothing of terminals.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from conformal_arbitrage.calibration.calibrate import calibrate
from conformal_arbitrage.calibration.project_secret import ProjectSecret
from conformal_arbitrage.cli.tour import ALPHA, MODELS, ask_gateway
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.scorelog.files import write_text
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorers import ReplayScorer

FILE = "console.toml"
_CALIBRATION, _QUESTIONS, _HARDER, _WRONG = 1000, 1200, 260, 60
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
    easy, hard = _by_difficulty(log)
    secret = ProjectSecret.find(folder)
    for name, rows in (("science", order[:_CALIBRATION]), ("exams", easy[:_CALIBRATION])):
        calibrate(bound.select(np.sort(rows)), ALPHA).sign(secret).save(folder / f"{name}.json")
    texts, scores = [text for text, _ in LETTERS], [list(each) for _, each in LETTERS]
    ScoreLog.from_arrays(scores, scores, id=texts).write(folder / "letters.parquet")
    write_text(folder / "assistants.py", ASSISTANTS)
    write_text(config, CONSOLE_CONFIGURATION)
    traffic = {"science": order[_CALIBRATION:][:_QUESTIONS].tolist(), "exams": hard.tolist()}
    asyncio.run(_fill(config, log, traffic))
    return config


def _by_difficulty(log: ScoreLog) -> tuple[Any, Any]:
    """Return rows of which the Primary gets nearly all right, and others of which it gets half wrong."""
    rng = np.random.default_rng(2)
    right = np.array([int(np.argmax(log.row(row).primary)) for row in range(len(log))]) == log.label
    easy, wrong = rng.permutation(np.flatnonzero(right)), rng.permutation(np.flatnonzero(~right))
    mostly_easy = np.concatenate([easy[: _CALIBRATION - _WRONG], wrong[:_WRONG]])
    return mostly_easy, rng.permutation(np.concatenate([wrong[_WRONG:][: _HARDER // 2], easy[-_HARDER // 2 :]]))


async def _fill(config: Path, log: ScoreLog, traffic: dict[str, Sequence[int]]) -> None:
    """Send questions to a gateway over the configuration's own record."""
    import aiohttp

    from conformal_arbitrage.gateway import running

    whole = read_config(config)
    listening = structs.replace(whole, gateway=structs.replace(whole.gateway, port=0))
    async with running(listening) as (url, _), aiohttp.ClientSession(url) as session:
        for policy, rows in traffic.items():
            for start in range(0, len(rows), _AT_ONCE):
                batch = rows[start : start + _AT_ONCE]
                await asyncio.gather(*(ask_gateway(session, log, row, policy) for row in batch))
            await _settled(session, policy)
        await asyncio.gather(*(_write_letter(session, text) for text, _ in LETTERS))
        for question in QUESTIONS:
            await _ask_assistants(session, question)


async def _settled(session: Any, policy: str) -> None:
    """Wait until the audits of a policy have outcomes, for a while."""
    for _ in range(round(_SECONDS / _STEP)):
        async with session.get(f"/v1/arbitrage/policies/{policy}/monitor") as response:
            if (await response.json()).get("audits", {}).get("pending") == 0:
                return
        await asyncio.sleep(_STEP)


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

QUESTIONS = {
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
from conformal_arbitrage.scorers.base import Answer

ANSWERS = {QUESTIONS!r}


class Assistant:
    def __init__(self, name, place):
        self.identity, self._place = {{"kind": "function", "name": name}}, place

    async def answer(self, request):
        both = ANSWERS.get(request.messages[-1]["content"], ("I do not know.", "I cannot tell from here."))
        return Answer(message={{"role": "assistant", "content": both[self._place]}}, confidence=0.5)


quick, thorough = Assistant("quick assistant", 0), Assistant("thorough assistant", 1)
"""

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
