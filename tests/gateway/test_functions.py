"""Functions of the user's own behind the gateway, in free text: what they get, and what becomes of one that raises."""

import json

import pytest

from conformal_arbitrage.cli.demo import ASSISTANTS, CONSOLE_QUESTIONS
from conformal_arbitrage.models.port import Answer
from tests.gateway.house import CHAT, House, chunks, error_of, section


class Fine:
    identity = {"kind": "own", "name": "fine"}  # noqa: RUF012

    async def answer(self, request):
        return Answer(message={"role": "assistant", "content": "fine"}, confidence=0.9)


class Broken:
    identity = {"kind": "own", "name": "broken"}  # noqa: RUF012

    async def answer(self, request):
        return {}[request.messages[0]["content"]]


fine, broken = Fine(), Broken()


class FunctionHouse(House):
    """A gateway over two objects of Python in free text."""

    def __init__(self, folder, *, functions, **sections):
        super().__init__(folder, form="text", **sections)
        self.functions = functions

    def _write(self, first):
        parts = [section("task", {"form": "text", **self.sections["task"]}), section("gateway", {})]
        for role, function in zip(("primary", "guardian"), self.functions, strict=True):
            parts.append(section(role, {"kind": "function", "function": function, "name": role}))
        parts.append(section("policies.support", {**first, **self.sections["policies.support"]}))
        self.path.write_text("\n".join(parts))


def functions(house, *names, **sections):
    return house(FunctionHouse, functions=[f"tests.gateway.test_functions:{name}" for name in names], **sections)


def test_where_a_primary_raises_the_guardian_decides(house):
    gateway = functions(house, "broken", "fine")
    whole = gateway.chat().json()
    assert whole["choices"][0]["message"]["content"] == "fine"
    assert whole["arbitrage"]["decided_by"] == "guardian"
    parts = chunks(gateway.chat({**CHAT, "stream": True}))
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"]) == "fine"
    legs = [leg for record in gateway.records() for leg in record.decision.legs]
    assert [leg.error.kind for leg in legs if leg.role == "primary"] == ["UpstreamError"] * 2
    assert "Say it." not in json.dumps(gateway.get("/v1/arbitrage/decisions").json()) + "".join(map(str, gateway.lines))


@pytest.mark.parametrize("stream", [False, True])
def test_where_a_guardian_raises_there_is_no_answer(house, stream):
    gateway = functions(house, "broken", "broken")
    said = error_of(gateway.chat({**CHAT, "stream": stream}), 502)
    assert "the Guardian" in said["message"]
    assert "Say it." not in said["message"]
    safe = functions(house, "broken", "broken", task={"safe_answer": "Ask again later."})
    assert safe.chat().json()["arbitrage"]["decided_by"] == "fallback"


def test_the_demo_s_assistants_read_every_form_of_a_message(house):
    question, (_, thorough) = next(iter(CONSOLE_QUESTIONS.items()))
    gateway = house(
        FunctionHouse,
        functions=["assistants:quick", "assistants:thorough"],
        certificate=False,
        policy={"mode": "shadow"},
    )
    for content in (question, [{"type": "text", "text": question}]):
        reply = gateway.chat({**CHAT, "messages": [{"role": "user", "content": content}]}).json()
        assert reply["choices"][0]["message"]["content"] == thorough
    parts = [{"type": "input_text", "text": question}]
    reply = gateway.post("/v1/responses", {"model": "support", "input": [{"role": "user", "content": parts}]}).json()
    assert reply["output"][0]["content"][0]["text"] == thorough
    reply = gateway.chat({**CHAT, "messages": [{"role": "user"}]}).json()
    assert reply["choices"][0]["message"]["content"] == "I cannot tell from here."


@pytest.fixture(autouse=True)
def _assistants(tmp_path, monkeypatch):
    (tmp_path / "assistants.py").write_text(ASSISTANTS)
    monkeypatch.chdir(tmp_path)
