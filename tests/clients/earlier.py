"""Calls by instructor and LlamaIndex, which want an earlier openai client than the others."""

import os

import instructor
import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI
from running import MENU, RAIN, SLOWLY, TEXT, Place, Routed, Team, run

ASKED = [{"role": "user", "content": "I was charged twice."}]


def openai_chat():
    """chat completion, temperature=0"""
    reply = openai.OpenAI().chat.completions.create(model=TEXT, messages=ASKED, temperature=0)
    assert reply.choices[0].message.content == RAIN


def openai_responses():
    """response, streamed live"""
    stream = openai.OpenAI().responses.create(model=TEXT, input=SLOWLY, stream=True)
    assert list(stream)[-1].response.output_text == RAIN


def instructor_menu():
    """an enum by a tool, temperature=0"""
    client = instructor.from_openai(openai.OpenAI())
    routed = client.chat.completions.create(model=MENU, messages=ASKED, response_model=Routed, temperature=0)
    assert routed.team is Team.BILLING


def instructor_menu_schema():
    """an enum by a JSON schema"""
    client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
    assert client.chat.completions.create(model=MENU, messages=ASKED, response_model=Routed).team is Team.BILLING


async def instructor_async():
    """a free model, asynchronous"""
    client = instructor.from_openai(openai.AsyncOpenAI())
    place = await client.chat.completions.create(model=TEXT, messages=ASKED, response_model=Place, temperature=0)
    assert place.city == "Oslo"


def llama(**more):
    return OpenAI(api_base=os.environ["OPENAI_BASE_URL"], **more)


def llama_complete():
    """complete, temperature=0"""
    assert llama(model=TEXT, temperature=0).complete("What is the weather?").text == RAIN


def llama_chat():
    """chat, with its default temperature"""
    assert llama(model=TEXT).chat([ChatMessage(role="user", content="What is the weather?")]).message.content == RAIN


def llama_stream():
    """stream_chat, live"""
    *_, last = llama(model=TEXT).stream_chat([ChatMessage(role="user", content=SLOWLY)])
    assert last.message.content == RAIN


def llama_tool():
    """predict_and_call with a tool"""

    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"rain in {city}"

    reply = llama(model=TEXT, temperature=0).predict_and_call(
        [FunctionTool.from_defaults(weather)], "What is the weather?"
    )
    assert "rain in Oslo" in str(reply)


def llama_menu():
    """structured_predict, an enum, temperature=0"""
    from llama_index.core.prompts import PromptTemplate

    routed = llama(model=MENU, temperature=0).structured_predict(Routed, PromptTemplate("I was charged twice."))
    assert routed.team is Team.BILLING


CALLS = [
    openai_chat, openai_responses, instructor_menu, instructor_menu_schema, instructor_async, llama_complete, llama_chat,
    llama_stream, llama_tool, llama_menu,
]  # fmt: skip
PACKAGES = {"openai": "openai", "instructor": "instructor", "llama": "llama-index-llms-openai"}

if __name__ == "__main__":
    run(globals(), PACKAGES)
