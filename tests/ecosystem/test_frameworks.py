"""The examples for frameworks run in the frameworks of today, against scripted models and a gateway.

The frameworks have environments of their own, which `make test-ecosystem` installs.
"""

import json
import os
import re
import subprocess

import pytest

from tests.ecosystem.test_importers import HERE, ROOT
from tests.gateway.house import House, says
from tests.scripted import scores

pytestmark = pytest.mark.proof
EXAMPLES = ROOT / "examples" / "frameworks"
MODELS = {"primary": {"kind": "chat", "confidence": "logprob"}, "guardian": {"kind": "chat"}}


def model(name, sure):
    """A model that calls the tool it is offered once, or says that it rains; its Primary is not sure of slow questions."""

    def reply(path, body, number):
        document = said(body)
        for token in (document["choices"][0].get("logprobs") or {"content": []})["content"]:
            token |= {"bytes": None, "top_logprobs": []}  # some clients ask for all fields
        return document

    def said(body):
        request_body = json.dumps(body["messages"])
        if '\\"scores\\"' in request_body:
            return scores(0.9, 0.05, 0.05)
        confidence = sure if "slowly" not in request_body or sure is None else 0.1
        if body.get("tools") and "tool" not in [message["role"] for message in body["messages"]]:
            function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"city": "Oslo"}'}
            calls = [{"id": "call-1", "type": "function", "function": function}]
            return says(None, confidence, tool_calls=calls, finish="tool_calls")()
        return says(f"{name}: it rains.", confidence)()

    return reply


@pytest.fixture
def gateway(tmp_path):
    shadow = {"form": "text", "mode": "shadow", "certificate": None}
    with House(
        tmp_path, models=MODELS, primary=model("small", 0.9), guardian=model("large", None),
        task={"settings": "as requested"}, **{"policies.talk": shadow},
    ) as house:  # fmt: skip
        house.certificate(policy="talk").save(tmp_path / "talk.json")
        certified = {"form": "text", "certificate": "talk.json"}
        house.sections |= {"policies.talk": certified}
        house.configure()
        house.restart()
        yield house


def run(environment, script, folder, **given):
    """Run a script with the sources of this package and the examples; return its outcomes."""
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {environment}; make test-ecosystem installs it")
    paths = [str(EXAMPLES), str(ROOT / "src"), os.environ["PYTHONPATH"]]
    environ = (
        os.environ
        | given
        | {"PYTHONPATH": os.pathsep.join(paths), "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    )
    done = subprocess.run(
        [python, HERE / script], env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=400
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failures = [f"{one['package']}: {one['run']}\n{one['error']}" for one in outcomes if one["error"]]
    assert not failures, "\n".join(failures)
    assert done.returncode == 0, done.stderr[-3000:]
    return outcomes


def documented():
    """The rows of the table of frameworks: package, version, what was run."""
    text = (ROOT / "docs" / "frameworks.md").read_text()
    return [tuple(row) for row in re.findall(r"^\| ([a-z-]+) \| ([\d.]+) \| [^|]+ \| (.+) \|$", text, re.MULTILINE)]


def test_examples_route_by_certificate_in_their_frameworks(gateway, tmp_path):
    outcomes = run(
        ".venv-frameworks", "run_frameworks.py", tmp_path, PRIMARY=gateway.primary.url,
        GUARDIAN=gateway.guardian.url, GATEWAY=gateway.url, CERTIFICATE=str(tmp_path / "talk.json"),
    )  # fmt: skip
    assert len(outcomes) == 9
    for one in outcomes:
        assert (one["package"], one["version"], one["run"]) in documented()


def test_the_approver_of_inspect_approves_or_escalates(gateway, tmp_path):
    [outcome] = run(".venv-evaluations", "run_inspect.py", tmp_path, CERTIFICATE=str(tmp_path / "talk.json"))
    assert (outcome["package"], outcome["version"], outcome["run"]) in documented()


def test_examples_are_short_and_every_one_is_documented():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    text = (ROOT / "docs" / "frameworks.md").read_text()
    assert names == set(re.findall(r"\[([a-z_]+\.py)\]", text))
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 120, path
    pins = "".join((HERE / f"{name}.txt").read_text() for name in ("frameworks", "evaluations"))
    for package, version, _ in documented():
        assert f"{package}=={version}\n" in pins
    assert len(documented()) == 10
