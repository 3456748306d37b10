"""Two runs of lm-evaluation-harness on a real local model, imported, certified and served.

    python -m benchmarks.lm_eval_pair --evaluations .venv-evaluations/bin/python

SmolLM2 answers everyday questions with a bare prompt (the Primary) and with worked examples (the Guardian). What this shows
is the way from an evaluation to a gateway; some orders of 20 questions are no basis for a promise.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from tests.real_model.questions import MENUS

from conformal_arbitrage import ProjectSecret, ScoreLog, calibrate
from conformal_arbitrage.gateway import running
from conformal_arbitrage.importing import read_lm_eval
from conformal_arbitrage.live.config import read_config

ROOT = Path(__file__).resolve().parents[1]
ALPHA = 0.05
EXAMPLES = (
    ("Which is a number?", ("seven", "blue", "wood", "song"), "A"),
    ("Which is a day?", ("salt", "hill", "Monday", "cup"), "C"),
)
SERVED = f"""
alpha = {ALPHA}
[primary]
kind = "replay"
log = "log.parquet"
column = "primary"
[guardian]
kind = "replay"
log = "log.parquet"
column = "guardian"
[gateway]
port = 0
database = "decisions.sqlite"
[policies.everyday]
certificate = "certificate.json"
allow = ["unbound"]
"""


def lettered(options: Sequence[str]) -> str:
    """Return options behind letters."""
    return "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", options, strict=True))


def documents(turns: int) -> list[dict[str, Any]]:
    """Return every question in several orders of its options."""
    worked = "".join(f"{question}\n{lettered(menu)}\nAnswer: {right}\n\n" for question, menu, right in EXAMPLES)
    rows: list[dict[str, Any]] = []
    for question, menu, right in MENUS:
        for turn in range(turns):
            options = menu[turn:] + menu[:turn]
            listed = lettered(options)
            ending = "Answer with the letter and nothing else."
            rows.append(
                {
                    "bare": f"{question}\n{listed}\n{ending}",
                    "worked": f"{worked}{question}\n{listed}\nAnswer:",
                    "answer": options.index(menu[right]),
                }
            )
    return rows


async def served(folder: Path, log: ScoreLog) -> list[dict[str, Any]]:
    """Ask a gateway about every row; it replays what the runs recorded."""
    ids = [] if log.id is None else log.id.tolist()
    menus = [list(row) for row in zip(*[iter([] if log.actions is None else log.actions.tolist())] * 4, strict=True)]
    async with running(read_config(folder / "arbitrage.toml")) as (url, _), aiohttp.ClientSession() as session:
        decisions = []
        for id, menu in zip(ids, menus, strict=True):
            question = {"type": "choice", "instructions": "Which?", "choices": [{"value": text} for text in menu]}
            body = {"model": "everyday", "input": f"Which?\n{id}", "questions": [question]}
            async with session.post(f"{url}/v1/decisions", json=body) as reply:
                document = await reply.json()
                if reply.status != 200:
                    raise SystemExit(f"the gateway answered {reply.status}: {json.dumps(document)[:300]}")
                decisions.append(document["answers"][0]["arbitrage"])
        return decisions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=Path, default=ROOT / ".venv-evaluations" / "bin" / "python")
    parser.add_argument("--turns", type=int, default=4, choices=range(1, 5), help="orders of the options")
    arguments = parser.parse_args()
    python = arguments.evaluations
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents(arguments.turns)))
        server = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "real_model" / "serve.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        with server:
            address = (server.stdout.readline() if server.stdout else "").strip()
            script = ROOT / "tests" / "ecosystem" / "run_smollm2.py"
            subprocess.run([python, script, f"{address}/v1", folder], check=True, timeout=1800)
            server.communicate("")
        imported = asyncio.run(read_lm_eval(folder / "primary", folder / "guardian"))
        imported.log.write(folder / "log.parquet")
        print(json.dumps(imported.to_dict(), indent=2))
        log = ScoreLog.read(folder / "log.parquet")
        certificate = calibrate(log, ALPHA).sign(ProjectSecret.create(folder))
        certificate.save(folder / "certificate.json")
        (folder / "arbitrage.toml").write_text(SERVED)
        decisions = asyncio.run(served(folder, log))
        deferred = [one["decided_by"] == "guardian" for one in decisions]
        same = deferred == certificate.apply(log).deferred.tolist()
        agreement = "all" if same else "NOT all"
        print(f"relaxation {certificate.relaxation}: {sum(deferred)} of {len(deferred)} rows went to the Guardian")
        print(f"{agreement} as the certificate decides offline")
        if not same:
            sys.exit(1)


if __name__ == "__main__":
    main()
