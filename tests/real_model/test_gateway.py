"""The gateway in front of a real model, asked by the official client, in menu form and in free text."""

import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from conformal_arbitrage import ProjectSecret, ScoreLog, calibrate
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live.config import read_config
from tests.real_model.test_smollm2 import CHAT, arbitrage

pytestmark = pytest.mark.live


@contextmanager
def serving(folder):
    command = [str(Path(sys.executable).with_name("arbitrage")), "serve", "--port", "0"]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = server.stdout.readline().split()[2].rstrip(".")
        with openai.OpenAI(base_url=address + "/v1", api_key="unused", max_retries=0) as client:
            yield client
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()


def prepare(folder, url, form, log):
    short = "max_tokens = 12\n" if form == "text" else ""
    sure = 'confidence = "logprob"\n' if form == "text" else ""
    models = f"[primary]\n{CHAT}{short}{sure}\n[guardian]\n{CHAT}{short}".format(url=url)
    policies = (
        '[policies.support]\ncertificate = "certificate.json"\n[policies.careful]\ncertificate = "careful.json"\n'
    )
    (folder / "arbitrage.toml").write_text(f'[task]\nform = "{form}"\n\n{models}\n{policies}')
    arbitrage(folder, "check")
    identities = identities_of(read_config(folder / "arbitrage.toml"), "support")
    bound = replace(log, identities=identities)
    secret = ProjectSecret.find()
    calibrate(bound, 0.3, guardian_sees="all").sign(secret).save(folder / "certificate.json")
    calibrate(bound, 0.001, guardian_sees="all").sign(secret).save(
        folder / "careful.json"
    )  # too few rows: the Guardian decides


def test_menus_through_the_gateway(url, tmp_path):
    prepare(tmp_path, url, "menu", ScoreLog.from_arrays([[0.9, 0.1], [0.5, 0.5]] * 20, [[1.0, 0.0], [0.0, 1.0]] * 20))
    with serving(tmp_path) as client:
        question = {
            "type": "choice",
            "instructions": "Which is a drink?",
            "choices": [{"value": "water"}, {"value": "stone"}],
        }
        decision = client.decisions.create(model="support", input="Choose.", questions=[question])
        assert decision.answers[0].choice in ("water", "stone")
        schema = {"type": "object", "properties": {"drink": {"type": "string", "enum": ["water", "stone"]}}}
        form = {"type": "json_schema", "json_schema": {"name": "drink", "schema": schema}}
        messages = [{"role": "user", "content": "Which is a drink?"}]
        chosen = client.chat.completions.create(model="support", messages=messages, response_format=form)
        assert json.loads(chosen.choices[0].message.content)["drink"] in ("water", "stone")
        assert chosen.arbitrage["guarantee"] == "crc"


def test_free_text_through_the_gateway(url, tmp_path):
    grades = {"primary_grade": [1, 0] * 20, "guardian_grade": [1, 1] * 20}
    prepare(tmp_path, url, "text", ScoreLog.from_router(confidence=[0.9, 0.1] * 20, **grades))
    with serving(tmp_path) as client:
        messages = [{"role": "user", "content": "Name a colour."}]
        answer = client.chat.completions.create(model="support", messages=messages)
        assert answer.choices[0].message.content
        pieces = list(client.chat.completions.create(model="support", messages=messages, stream=True))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert pieces[-1].choices[0].finish_reason
        live = list(client.chat.completions.create(model="careful", messages=messages, stream=True))
        assert (live[0].arbitrage["decided_by"], len(live[-1].arbitrage["legs"])) == ("guardian", 2)
        assert len([piece for piece in live if piece.choices[0].delta.content]) > 2
        assert live[-1].arbitrage["legs"][1]["usage"]["completion_tokens"] > 2
