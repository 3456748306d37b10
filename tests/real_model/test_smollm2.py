"""The whole way with a real model: SmolLM2-135M behind xllamacpp's server, and in this process.

What such a small model says is of no consequence; that every step works with real replies is.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformal_arbitrage import Certificate, ScoreLog
from tests.real_model.questions import MENUS, REQUESTS

pytestmark = pytest.mark.live

CHAT = 'kind = "chat"\nurl = "{url}"\nmodel = "smollm2-135m"\nprice = [0.1, 0.4]\n'
KINDS = {
    "chat": CHAT,
    "logprob": CHAT.replace("chat", "logprob"),
    "sampling": CHAT.replace("chat", "sampling") + "samples = 3\nseed = 1\ntemperature = 0.1\n",
    "local": 'kind = "local"\nprice = [0, 0]\n',
}


def arbitrage(folder, *arguments):
    command = [str(Path(sys.executable).with_name("arbitrage")), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize(("primary", "guardian"), [("chat", "logprob"), ("sampling", "local")])
def test_menus_from_check_to_a_live_decision(primary, guardian, url, tmp_path):
    sections = f"[primary]\n{KINDS[primary]}\n[guardian]\n{KINDS[guardian]}".format(url=url)
    (tmp_path / "arbitrage.toml").write_text(f"alpha = 0.3\n\n{sections}")
    rows = [{"question": text, "choices": menu, "answer": right} for text, menu, right in MENUS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    checked = json.loads(arbitrage(tmp_path, "check", "--json"))
    assert checked["ok"]
    assert "smollm2-135m" in {model["served"] for model in checked["models"]}
    arbitrage(tmp_path, "collect", "questions.jsonl", "-o", "log.parquet", "--concurrency", "4", "--max-cost", "1")
    log = ScoreLog.read(tmp_path / "log.parquet")
    assert len(log) == 20
    assert not log.missing.any()
    assert log.primary_usage.cost.sum() > 0
    assert [log.identities[role]["kind"] for role in ("primary", "guardian")] == [primary, guardian]
    assert log.label.tolist() == [right for _, _, right in MENUS]

    arbitrage(
        tmp_path, "calibrate", "log.parquet", "--alpha", "0.3", "--guardian-sees", "all", "-o", "certificate.json"
    )
    assert Certificate.load(tmp_path / "certificate.json").identities["primary"]["kind"] == primary
    question = [
        "ask",
        "certificate.json",
        "Which of these is a drink?",
        "--action",
        "water",
        "--action",
        "stone",
        "--action",
        "sand",
        "--action",
        "iron",
        "--json",
    ]
    decision = json.loads(arbitrage(tmp_path, *question))
    assert decision["answer"] in ("water", "stone", "sand", "iron")
    assert decision["no_guarantee"] is None
    assert decision["spent"]["cost"] is not None


@pytest.mark.parametrize("confidence", ["logprob", "ask"])
def test_free_text_from_check_to_a_live_decision(confidence, url, tmp_path):
    models = f'[primary]\n{CHAT}confidence = "{confidence}"\nmax_tokens = 16\n\n[guardian]\n{CHAT}max_tokens = 16\n'
    (tmp_path / "arbitrage.toml").write_text(f'alpha = 0.3\n\n[task]\nform = "text"\n\n{models}'.format(url=url))
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in REQUESTS))

    arbitrage(tmp_path, "check")
    arbitrage(tmp_path, "collect", "requests.jsonl", "-o", "log.parquet", "--grade", "regex", "--concurrency", "4")
    log = ScoreLog.read(tmp_path / "log.parquet")
    assert len(log) == 20
    assert log.is_router
    assert log.identities["grader"] == {"kind": "regex"}
    assert not log.no_opinion.all()
    assert any(log.extra["primary_answer"].tolist())

    arbitrage(
        tmp_path, "calibrate", "log.parquet", "--alpha", "0.3", "--guardian-sees", "all", "-o", "certificate.json"
    )
    decision = json.loads(arbitrage(tmp_path, "ask", "certificate.json", "Name a colour.", "--json"))
    assert decision["answer"]["content"]
    assert decision["decided_by"] in ("primary", "guardian")
