"""Clients as applications use them: with only the base URL changed, every call works, and claims its guarantee.

The clients have environments of their own, which `make test-clients` installs.
"""

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.gateway.house import House, says
from tests.scripted import Stream, chunk, ending, scores, sse

pytestmark = pytest.mark.proof
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RAIN, CITY = "It rains in Oslo.", '{"city": "Oslo"}'
MODELS = {"primary": {"kind": "chat", "confidence": "logprob"}, "guardian": {"kind": "chat"}}
ENVIRONMENTS = {"current": ".venv-clients", "earlier": ".venv-clients-earlier"}


def words(text):
    async def portions():
        for word in text.split(" "):
            yield sse(chunk({"content": word if word == text.split(" ")[0] else f" {word}"}))
            await asyncio.sleep(0.01)
        yield ending()

    return Stream(portions())


def model(sure):
    """A model that rates options, calls the tool it is offered once, fills in a schema, or says that it rains."""

    def reply(path, body, number):
        request_body = json.dumps(body["messages"])
        confidence = 0.1 if "slowly" in request_body and sure is not None else sure
        if '\\"scores\\"' in request_body:
            return scores(0.9, 0.05, 0.05)
        if body.get("tools") and "tool" not in [message["role"] for message in body["messages"]]:
            function = {"name": body["tools"][0]["function"]["name"], "arguments": CITY}
            calls = [{"id": "call-1", "type": "function", "function": function}]
            return says(None, confidence, tool_calls=calls, finish="tool_calls")()
        if body.get("stream"):
            return words(RAIN)
        return says(CITY if "response_format" in body else RAIN, confidence)()

    return reply


@pytest.fixture
def gateway(tmp_path):
    """A gateway with a policy over menus and one in free text, under names that applications already use."""
    shadow = {"form": "text", "mode": "shadow", "certificate": None, "aliases": ["gpt-4o"]}
    with House(
        tmp_path, models=MODELS, primary=model(0.9), guardian=model(None), task={"settings": "as requested"},
        policy={"aliases": ["gpt-4o-mini"]}, **{"policies.talk": shadow},
    ) as house:  # fmt: skip
        house.certificate(policy="talk").save(tmp_path / "talk.json")
        house.sections["policies.talk"] = {"form": "text", "certificate": "talk.json", "aliases": ["gpt-4o"]}
        house.configure()
        house.restart()
        yield house


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_call_of_the_clients_works_and_claims_its_guarantee(gateway, name):
    python = ROOT / ENVIRONMENTS[name] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{ENVIRONMENTS[name]} is not installed; `make test-clients` installs it")
    fields = {**os.environ, "OPENAI_BASE_URL": f"{gateway.url}/v1", "OPENAI_API_KEY": "none", "PYTHONPATH": ""}
    done = subprocess.run(
        [python, HERE / f"{name}.py"], env=fields, capture_output=True, text=True, timeout=300, check=False
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failures = [f"{one['library']} {one['version']}: {one['call']}\n{one['error']}" for one in outcomes if one["error"]]
    assert not failures, "\n".join(failures)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(outcomes) == sum(text.startswith(("def ", "async def ")) for text in calls(name))
    records = gateway.records(limit=1000)
    assert len(records) >= len(outcomes)
    assert [record.decision.no_guarantee for record in records] == [None] * len(records)


def calls(name):
    """The lines of a module that define a call."""
    lines = (HERE / f"{name}.py").read_text().splitlines()
    return [line for place, line in enumerate(lines) if "():" in line and '"""' in lines[place + 1]]


def packages(name):
    """The packages whose calls a module makes."""
    return re.findall(r'"[a-z]+": "([a-z-]+)"', (HERE / f"{name}.py").read_text().partition("PACKAGES = ")[2])


def test_the_table_of_the_docs_names_what_was_run():
    documented = (ROOT / "docs" / "frameworks.md").read_text()
    pins = [line for name in ("current", "earlier") for line in (HERE / f"{name}.txt").read_text().splitlines()]
    for library in {one for name in ENVIRONMENTS for one in packages(name)}:
        versions = [pin.partition("==")[2] for pin in pins if pin.partition("==")[0] == library]
        assert versions
        for version in versions:
            assert f"| {library} | {version} |" in documented, (library, version)
