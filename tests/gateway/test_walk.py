"""From two endpoints to a gateway with a guarantee: `check`, `collect`, `calibrate`, `serve`, and no other step."""

import json
import re
import urllib.request
from pathlib import Path

import pytest

from tests.collecting.test_collect import number_in, run, serving, write_rows
from tests.gateway.test_start import serving as served
from tests.scripted import completion, scores

__all__ = ["run"]
PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"

BY_HAND = """\
alpha = 0.05

[task]
form = "{form}"

[primary]
kind = "chat"
url = "{url}"
model = "small"
{confidence}
[guardian]
kind = "chat"
url = "{url}"
model = "large"

[policies.assistant]
certificate = "certificate.json"
"""


def small_and_large(path, body, number):
    """The small model is right and sure about even requests, wrong and unsure about odd ones, the less the later."""
    text = json.dumps(body["messages"])
    number = number_in(body) if "Request" in text else 0
    hard, unsure = number % 2 == 1, number / 10_000
    large = body["model"] == "large"
    if "Answer choices" in text:
        return scores(*((0.9, 0.1) if large or not hard else (0.4 + unsure, 0.6 - unsure)), model=body["model"])
    if "How sure are you" in text:
        return completion(json.dumps({"confidence": 0.4 - unsure if hard else 0.95}), model=body["model"])
    return completion("fine" if large or not hard else "wrong", model=body["model"])


def write_questions(form, count=100):
    rows = [{"id": f"q{n}", "messages": [{"role": "user", "content": f"Request {n}?"}], "expected": "fine"}
            for n in range(count)]  # fmt: skip
    if form == "menu":
        rows = [{"id": row["id"], "question": f"Request {n}?", "choices": ["left", "right"], "answer": "A"}
                for n, row in enumerate(rows)]  # fmt: skip
    write_rows("questions.jsonl", rows)


def asked(lines, number, form):
    address = re.search(r"http://[\d.:]+", next(line for line in lines if line.startswith("curl")))[0]
    body = {"model": "assistant", "messages": [{"role": "user", "content": f"Request {number}?"}]}
    if form == "menu":
        body["arbitrage"] = {"actions": ["left", "right"]}
    call = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=60) as reply:
        document = json.load(reply)
    decision = document["arbitrage"]
    return document["choices"][0]["message"]["content"], decision["decided_by"], decision["guarantee"]


def walk(url):
    """Return the commands of the first section of docs/gateway.md, with a scripted server in the place of both endpoints."""
    section = PAGE.read_text().split("\n## ")[1]
    commands = [line.strip() for line in section.splitlines() if line.startswith("    arbitrage ")]
    assert [command.split()[1] for command in commands] == ["init", "check", "collect", "calibrate", "serve"]
    assert "--guardian-url" not in commands[0]
    commands[0] = commands[0].replace("http://localhost:11434/v1", url).replace("llama3.2", "small")
    commands[0] = commands[0].replace("--guardian-model gpt-5.4", f"--guardian-url {url} --guardian-model large")
    return [command.split()[1:] for command in commands[:-1]]


@pytest.mark.parametrize("start", ["as documented", "by hand: text", "by hand: menu"])
def test_four_commands_lead_from_two_endpoints_to_answers_with_a_guarantee(run, tmp_path, start):
    form = "menu" if start.endswith("menu") else "text"
    write_questions(form)
    with serving(small_and_large) as upstream:
        init, *commands = walk(upstream.url)
        if start == "as documented":
            run(*init)
        else:
            confidence = 'confidence = "ask"\n' if form == "text" else ""
            Path("arbitrage.toml").write_text(BY_HAND.format(form=form, url=upstream.url, confidence=confidence))
        for command in commands:
            run(*(command if form == "text" else [word for word in command if word not in ("--grade", "exact")]))
        with served(tmp_path) as lines:
            fine = "fine" if form == "text" else "left"
            assert asked(lines, 1000, form) == (fine, "primary", "crc")
            assert asked(lines, 1001, form) == (fine, "guardian", "crc")
        run("records", "verify")
