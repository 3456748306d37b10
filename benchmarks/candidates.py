"""Does agreement among samples tell right answers from wrong ones better than a stated confidence? Asked of a real model.

    make bench-candidates

SmolLM2-135M, which ships in a package, answers short questions with known answers behind its own server on loopback, once
for each source of a confidence. Everything goes through `collect`, as a user's questions would.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conformal_arbitrage import ScoreLog, inspect
from conformal_arbitrage.collecting.collect import collect
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models.port import Answer
from conformal_arbitrage.types import ChatRequest

SERVER = Path(__file__).parent.parent / "tests" / "real_model" / "serve.py"
SOURCES = {
    'stated in a second call (confidence = "ask")': 'confidence = "ask"\n',
    'mean token probability (confidence = "logprob")': 'confidence = "logprob"\n',
    "agreement of 4 samples (candidates = 4)": "candidates = 4\ntemperature = 0.8\nseed = 1\n",
}
CONFIG = """
[task]
form = "text"

[primary]
kind = "chat"
url = "{url}"
model = "smollm2-135m"
max_tokens = 12
timeout = 300
deadline = 900
{source}
[primary.pinned]
mode = "json_object"

[guardian]
kind = "function"
function = "benchmarks.candidates:expert"
name = "expert"
"""
CAPITALS = """France Paris, Italy Rome, Spain Madrid, Germany Berlin, England London, Japan Tokyo, China Beijing,
Russia Moscow, Egypt Cairo, Greece Athens, Portugal Lisbon, Austria Vienna, Ireland Dublin, Norway Oslo, Sweden Stockholm,
Finland Helsinki, Poland Warsaw, Hungary Budapest, Cuba Havana, Peru Lima, Kenya Nairobi, Turkey Ankara, India Delhi,
Iran Tehran, Iraq Baghdad"""
OPPOSITES = """hot cold, big small, up down, left right, day night, old young, fast slow, happy sad, open closed, wet dry,
hard soft, high low, early late, rich poor, light dark, full empty, strong weak, loud quiet, good bad, black white"""
YOUNG = """dog puppy, cat kitten, cow calf, horse foal, sheep lamb, bear cub, frog tadpole, hen chick, duck duckling,
deer fawn"""


def pairs(text: str) -> list[tuple[str, str]]:
    """Return the two words of each entry."""
    words = [entry.split() for entry in text.replace("\n", " ").split(",")]
    return [(first, second) for first, second in words]


def questions() -> dict[str, str]:
    """Return every question with its answer."""
    body = {f"What is the capital of {a}? Answer in one word.": b for a, b in pairs(CAPITALS)}
    body |= {f"What is the opposite of {a}? Answer in one word.": b for a, b in pairs(OPPOSITES)}
    body |= {f"What is a young {a} called? Answer in one word.": b for a, b in pairs(YOUNG)}
    sums = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    return body | {f"What is {a} + {b}? Answer with a number.": str(a + b) for a, b in sums}


class Key:
    """The answer key as a Guardian."""

    identity: Mapping[str, Any] = {"kind": "answer key"}

    async def answer(self, request: ChatRequest) -> Answer:
        """Answer as the key does."""
        return Answer(message={"role": "assistant", "content": questions()[str(request.messages[-1]["content"])]})


expert = Key()


@contextmanager
def served() -> Iterator[str]:
    """Run the model's server and give its address."""
    server = subprocess.Popen([sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip() + "/v1"
    finally:
        server.communicate()


async def collected(folder: Path, url: str, source: str) -> ScoreLog:
    """Collect answers and grades with one source of a confidence."""
    (folder / "arbitrage.toml").write_text(CONFIG.format(url=url, source=source), encoding="utf-8")
    return await collect(
        read_config(folder / "arbitrage.toml"), folder / "questions.jsonl", output=folder / "log.parquet", grade="regex",
        concurrency=4,
    )  # fmt: skip


def measured(name: str, log: ScoreLog) -> list[str]:
    """Return one line of the table."""
    inspection = inspect(log)
    shares = {use.alpha: use.deferred_random for use in inspection.budgets}
    right = inspection.outcomes["correct"]["primary"]
    asked = ["all" if shares[alpha] is None else f"{100 * shares[alpha]:.0f} %" for alpha in (0.05, 0.1, 0.2)]
    return [name, f"{right:.2f}", f"{inspection.auc or 0.5:.3f}", *asked]


def main() -> None:
    """Ask with every source of a confidence and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="ask only the first questions")
    limit = parser.parse_args().limit
    header = ["confidence", "right", "AUC", "to the Guardian at 0.05", "at 0.1", "at 0.2"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    rows = [
        {"id": f"q{k}", "messages": [{"role": "user", "content": text}], "expected": rf"(?i)\b{answer}\b"}
        for k, (text, answer) in enumerate(list(questions().items())[:limit])
    ]
    with served() as url:
        for name, source in SOURCES.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "questions.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                log = asyncio.run(collected(Path(folder), url, source))
                print(f"| {' | '.join(measured(name, log))} |", flush=True)


if __name__ == "__main__":
    main()
