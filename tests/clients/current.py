"""Calls by the openai client, the Agents SDK, LangChain and pydantic-ai."""

import openai
from agents import Agent as SDKAgent
from agents import ModelSettings as SDKSettings
from agents import Runner, function_tool, set_tracing_disabled
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from running import MENU, RAIN, SLOWLY, TEXT, Place, Routed, Team, run

set_tracing_disabled(disabled=True)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "What is the weather?"}]


def openai_chat():
    """chat completion, temperature=0, max_tokens, seed"""
    reply = openai.OpenAI().chat.completions.create(model=TEXT, messages=ASKED, temperature=0, max_tokens=50, seed=1)
    assert reply.choices[0].message.content == RAIN


def openai_chat_stream():
    """chat completion, streamed live, with usage"""
    asked = [{"role": "user", "content": SLOWLY}]
    stream = openai.OpenAI().chat.completions.create(
        model=TEXT, messages=asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == RAIN
    assert chunks[-1].usage.total_tokens > 0


def openai_menu():
    """chat completion, parsed from an enum, temperature=0"""
    reply = openai.OpenAI().chat.completions.parse(model=MENU, messages=ASKED, response_format=Routed, temperature=0)
    assert reply.choices[0].message.parsed.team is Team.BILLING


def openai_responses():
    """response, temperature=0"""
    assert openai.OpenAI().responses.create(model=TEXT, input="What is the weather?", temperature=0).output_text == RAIN


async def openai_responses_async():
    """response, asynchronous"""
    async with openai.AsyncOpenAI() as client:
        assert (await client.responses.create(model=TEXT, input="What is the weather?")).output_text == RAIN


def openai_responses_stream():
    """response, streamed live"""
    with openai.OpenAI().responses.stream(model=TEXT, input=SLOWLY) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == RAIN


def openai_responses_tools():
    """response with a tool, two turns"""
    client = openai.OpenAI()
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
    first = client.responses.create(model=TEXT, input=ASKED, tools=tools)
    [call] = first.output
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    assert client.responses.create(model=TEXT, input=[*ASKED, call, result], tools=tools).output_text == RAIN


def openai_responses_menu():
    """response, parsed from an enum"""
    reply = openai.OpenAI().responses.parse(model=MENU, input="I was charged twice.", text_format=Routed)
    assert reply.output_parsed.team is Team.BILLING


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


def agents_text():
    """default model class, temperature=0"""
    agent = SDKAgent(name="a", instructions="Be brief.", model=TEXT, model_settings=SDKSettings(temperature=0))
    assert Runner.run_sync(agent, "What is the weather?").final_output == RAIN


def agents_tool():
    """default model class, a function tool"""
    agent = SDKAgent(name="a", instructions="Be brief.", model=TEXT, tools=[weather])
    result = Runner.run_sync(agent, "What is the weather?")
    assert result.final_output == RAIN
    assert any("rain in Oslo" in str(item.to_input_item()) for item in result.new_items)


async def agents_stream():
    """default model class, streamed live"""
    streamed = Runner.run_streamed(SDKAgent(name="a", model=TEXT), SLOWLY)
    kinds = [event.type async for event in streamed.stream_events()]
    assert streamed.final_output == RAIN
    assert "raw_response_event" in kinds


def agents_menu():
    """default model class, output type with an enum"""
    agent = SDKAgent(name="a", model=MENU, output_type=Routed)
    assert Runner.run_sync(agent, "I was charged twice.").final_output.team is Team.BILLING


def langchain_invoke():
    """invoke, temperature=0"""
    assert ChatOpenAI(model=TEXT, temperature=0).invoke("What is the weather?").content == RAIN


def langchain_stream():
    """stream, live"""
    assert "".join(chunk.content for chunk in ChatOpenAI(model=TEXT).stream(SLOWLY)) == RAIN


@tool
def forecast(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


def langchain_tools():
    """bind_tools"""
    [call] = ChatOpenAI(model=TEXT, temperature=0).bind_tools([forecast]).invoke("What is the weather?").tool_calls
    assert (call["name"], call["args"]) == ("forecast", {"city": "Oslo"})


def langchain_menu():
    """with_structured_output, an enum, temperature=0"""
    model = ChatOpenAI(model=MENU, temperature=0).with_structured_output(Routed)
    assert model.invoke("I was charged twice.").team is Team.BILLING


def langchain_menu_tool():
    """with_structured_output by function calling, an enum"""
    model = ChatOpenAI(model=MENU, temperature=0).with_structured_output(Routed, method="function_calling")
    assert model.invoke("I was charged twice.").team is Team.BILLING


def langchain_responses():
    """invoke through the Responses API"""
    assert ChatOpenAI(model=TEXT, temperature=0, use_responses_api=True).invoke("What is the weather?").text == RAIN


def pydantic_chat():
    """agent over chat completions, temperature=0"""
    agent = Agent(OpenAIChatModel(TEXT), model_settings={"temperature": 0, "max_tokens": 50}, instructions="Be brief.")
    assert agent.run_sync("What is the weather?").output == RAIN


def pydantic_tool():
    """agent with a tool"""
    agent = Agent(OpenAIChatModel(TEXT))

    @agent.tool_plain
    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"rain in {city}"

    assert agent.run_sync("What is the weather?").output == RAIN


def pydantic_menu():
    """agent with an output type, an enum"""
    agent = Agent(OpenAIChatModel(MENU), output_type=Routed, model_settings={"temperature": 0})
    assert agent.run_sync("I was charged twice.").output.team is Team.BILLING


async def pydantic_stream():
    """agent, streamed live"""
    async with Agent(OpenAIChatModel(TEXT)).run_stream(SLOWLY) as result:
        assert await result.get_output() == RAIN


def pydantic_responses():
    """agent over the Responses API"""
    assert Agent(OpenAIResponsesModel(TEXT)).run_sync("What is the weather?").output == RAIN


def pydantic_structured():
    """agent over the Responses API with an output type in free text"""
    assert Agent(OpenAIResponsesModel(TEXT), output_type=Place).run_sync("Which city?").output.city == "Oslo"


CALLS = [
    openai_chat, openai_chat_stream, openai_menu, openai_responses, openai_responses_async, openai_responses_stream,
    openai_responses_tools, openai_responses_menu, agents_text, agents_tool, agents_stream, agents_menu, langchain_invoke,
    langchain_stream, langchain_tools, langchain_menu, langchain_menu_tool, langchain_responses, pydantic_chat,
    pydantic_tool, pydantic_menu, pydantic_stream, pydantic_responses, pydantic_structured,
]  # fmt: skip
PACKAGES = {
    "openai": "openai", "agents": "openai-agents", "langchain": "langchain-openai", "pydantic": "pydantic-ai-slim",
}  # fmt: skip

if __name__ == "__main__":
    run(globals(), PACKAGES)
