"""Run the examples in their frameworks, against scripted models and a gateway; print what became of each, as JSON.

Runs in the environment of the frameworks, with the sources of this package but without pytest.
"""

import asyncio
import json
import os
import sys
import traceback
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no prices from the network

from conformal_arbitrage import Certificate

PRIMARY, GUARDIAN, GATEWAY, FILE = (os.environ[name] for name in ("PRIMARY", "GUARDIAN", "GATEWAY", "CERTIFICATE"))
CERTIFICATE = Certificate.load(FILE)
EASY, HARD = "What is the weather?", "What is the weather? Think slowly."  # the Primary is not sure about the second
OURS, THEIRS = "small: it rains.", "large: it rains."


def pydantic_ai_model():
    """a Model: Primary, else Guardian"""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai_router import RoutedModel

    seen = []
    small, large = (
        OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="none")) for url in (PRIMARY, GUARDIAN)
    )
    agent = Agent(RoutedModel(small, large, CERTIFICATE, lambda decided_by, sure: seen.append(decided_by)))
    assert agent.run_sync(EASY).output == OURS
    assert agent.run_sync(HARD).output == THEIRS
    assert seen == ["primary", "guardian"]


def pydantic_ai_approval():
    """approval of tool calls"""
    from pydantic_ai import Agent, DeferredToolRequests, DeferredToolResults, RunContext
    from pydantic_ai.models.test import TestModel
    from pydantic_ai_router import approved

    paid = []
    agent = Agent(TestModel(), output_type=[str, DeferredToolRequests])

    @agent.tool
    @approved(CERTIFICATE, lambda amount: 0.9 if amount < 100 else 0.1)
    async def refund(ctx: RunContext, amount: int) -> str:
        """Refund an amount."""
        paid.append(amount)
        return "paid"

    assert isinstance(agent.run_sync("Refund it.").output, str)
    assert paid == [0]
    strict = Agent(TestModel(), output_type=[str, DeferredToolRequests])

    @strict.tool
    @approved(CERTIFICATE, lambda amount: 0.1)
    async def pay(ctx: RunContext, amount: int) -> str:
        """Refund an amount."""
        paid.append(amount)
        return "paid"

    first = strict.run_sync("Refund it.")
    assert isinstance(first.output, DeferredToolRequests)
    assert paid == [0]
    [call] = first.output.approvals
    results = DeferredToolResults(approvals={call.tool_call_id: True})
    strict.run_sync(message_history=first.all_messages(), deferred_tool_results=results)
    assert paid == [0, 0]


def pydantic_ai_decisions():
    """a decision model: the gateway's Decisions API"""
    from typing import Literal

    from pydantic_ai import Agent
    from pydantic_ai.models.openai_decisions import OpenAIDecisionsModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIDecisionsModel("support", provider=OpenAIProvider(base_url=f"{GATEWAY}/v1", api_key="none"))
    agent = Agent(model, output_type=Literal["billing", "bug", "other"])
    assert agent.run_sync("I was charged twice.").output == "billing"


def langchain_model(url):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=url, api_key="none", logprobs=True)


def langchain_middleware():
    """agent middleware: Primary, else Guardian"""
    from langchain.agents import create_agent
    from langchain_router import Routed

    agent = create_agent(langchain_model(PRIMARY), middleware=[Routed(CERTIFICATE, langchain_model(GUARDIAN))])
    asked = [{"messages": [{"role": "user", "content": question}]} for question in (EASY, HARD)]
    assert [agent.invoke(one)["messages"][-1].content for one in asked] == [OURS, THEIRS]

    async def both():  # on one loop: clients keep connections
        return [(await agent.ainvoke(one))["messages"][-1].content for one in asked]

    assert asyncio.run(both()) == [OURS, THEIRS]


def langgraph_interrupt():
    """interrupt: Primary, else a person"""
    from langchain.agents import create_agent
    from langchain_router import RoutedToPerson
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command

    agent = create_agent(
        langchain_model(PRIMARY), middleware=[RoutedToPerson(CERTIFICATE)], checkpointer=InMemorySaver()
    )
    config = {"configurable": {"thread_id": "1"}}
    state = agent.invoke({"messages": [{"role": "user", "content": HARD}]}, config)
    [pause] = state["__interrupt__"]
    assert pause.value == {"question": HARD, "proposal": OURS}
    final = agent.invoke(Command(resume="A person: it rains."), config)
    assert [message.content for message in final["messages"]] == [HARD, "A person: it rains."]
    easy = agent.invoke({"messages": [{"role": "user", "content": EASY}]}, {"configurable": {"thread_id": "2"}})
    assert easy["messages"][-1].content == OURS


def agents_sdk():
    """the gateway as model, on the Responses API; approval of tool calls"""
    from agents import Agent, Runner, function_tool
    from agents_approval import needs_approval, set_gateway

    set_gateway(f"{GATEWAY}/v1")
    paid = []

    @function_tool(
        needs_approval=needs_approval(CERTIFICATE, lambda arguments: 0.9 if arguments["city"] != "Oslo" else 0.1)
    )
    def weather(city: str) -> str:
        """Return the weather of a city."""
        paid.append(city)
        return "rain"

    async def work():
        plain = await Runner.run(Agent(name="a", model="talk"), HARD)
        assert plain.final_output == THEIRS
        agent = Agent(name="a", model="talk", tools=[weather])
        waiting = await Runner.run(agent, EASY)
        [pause] = waiting.interruptions
        assert paid == []
        state = waiting.to_state()
        state.approve(pause)
        assert (await Runner.run(agent, state)).final_output == OURS
        assert paid == ["Oslo"]

    asyncio.run(work())


def litellm_plugin():
    """a plugin of its Router, before routing"""
    import litellm
    from litellm_router import CertifiedRouting

    def deployment(name, model, url):
        return {"model_name": name, "litellm_params": {"model": model, "api_base": url, "api_key": "none"}}

    seen = []

    def confidence(messages):
        seen.append(messages)
        return 0.1 if "slowly" in messages[-1]["content"] else 0.9

    small, large = ("openai/small", PRIMARY), ("openai/large", GUARDIAN)
    router = litellm.Router(
        [
            deployment("chat", *small),
            deployment("chat", *small),
            deployment("chat", *large),
            deployment("plain", *small),
        ],
        plugins=[CertifiedRouting(CERTIFICATE, confidence, primary=small[0], guardian=large[0])],
    )

    async def ask(model, question):
        reply = await router.acompletion(model=model, messages=[{"role": "user", "content": question}])
        return reply.choices[0].message.content

    async def answers():
        return [await ask("chat", question) for question in (EASY, HARD, HARD, EASY)], await ask("plain", HARD)

    routed, alone = asyncio.run(answers())
    assert routed == [OURS, THEIRS, THEIRS, OURS]
    assert (alone, len(seen)) == (OURS, 4)  # the plugin has no say where there is nothing to choose


def litellm_decisions():
    """a decision model: the gateway's Decisions API"""
    import litellm

    menu = [{"value": "billing", "description": "money"}, {"value": "bug"}, {"value": "other"}]
    question = {"type": "choice", "name": "team", "instructions": "Which team?", "choices": menu}
    call = {"model": "openai/support", "api_base": f"{GATEWAY}/v1", "api_key": "none", "input": "I was charged twice."}
    [answer] = litellm.decisions(questions=[question], **call).answers
    assert (answer.name, answer.choice, answer.confidence) == ("team", "billing", 0.9)
    assert {one.value: one.probability for one in answer.probabilities}["billing"] == 0.9
    criteria = {"billing": "money", "bug": None, "other": None}
    body = {"team": {"type": "choice", "instructions": "Which team?", "criteria": criteria}}
    state = {name: value for name, value in call.items() if name != "input"} | {"state": call["input"]}
    reply = asyncio.run(litellm.asystemone(questions=body, **state))  # the format of System One, translated
    assert reply.answers["team"].choice == "billing"


def llm_plugin():
    """a plugin: policies as models"""
    import llm
    import llm_gateway
    from llm.plugins import pm

    os.environ["ARBITRAGE_GATEWAY"] = GATEWAY
    pm.register(llm_gateway, name="arbitrage")
    model = llm.get_model("arbitrage/talk")
    assert model.prompt(EASY, stream=False).text() == OURS
    assert model.prompt(HARD).text() == THEIRS


RUNS = {
    pydantic_ai_model: "pydantic-ai-slim", pydantic_ai_approval: "pydantic-ai-slim",
    pydantic_ai_decisions: "pydantic-ai-slim", langchain_middleware: "langchain",
    langgraph_interrupt: "langgraph", agents_sdk: "openai-agents",
    litellm_plugin: "litellm", litellm_decisions: "litellm", llm_plugin: "llm",
}  # fmt: skip

if __name__ == "__main__":
    failed = 0
    for call, package in RUNS.items():
        outcome = {"package": package, "version": version(package), "run": call.__doc__, "error": None}
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a framework raises is the outcome
            failed += 1
            outcome["error"] = "".join(traceback.format_exception(error))[-2500:]
        print(json.dumps(outcome), flush=True)
    sys.exit(failed > 0)
