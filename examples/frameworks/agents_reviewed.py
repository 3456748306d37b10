"""OpenAI Agents SDK: tool calls that a person approves, edits or rejects before the agent gets them.

    model = reviewed_model("http://127.0.0.1:8400/v1", "POLICY", key="...")
    agent = Agent(name="support", model=model, tools=[refund_order])

The gateway does it: [policies.POLICY.review] has tool_calls = ["refund_*"], and people work at /console/review. The agent
gets the call as approved or edited, or an answer that says that it was rejected. While nobody has decided, the gateway says
409 every `wait` seconds, and the client comes back with the same Idempotency-Key, which joins the same review.
"""

from typing import Any
from uuid import uuid4

from agents import ModelSettings, OpenAIResponsesModel
from openai import AsyncOpenAI


class ReviewedModel(OpenAIResponsesModel):
    """A policy of the gateway whose tool calls may wait for a person: every call has a key to come back with."""

    async def get_response(
        self, system_instructions: Any, input: Any, model_settings: ModelSettings, *rest: Any, **named: Any
    ) -> Any:
        """Ask the gateway; attempts of the client at the same call share its key."""
        key = {**(model_settings.extra_headers or {}), "Idempotency-Key": str(uuid4())}
        own = model_settings.resolve(ModelSettings(extra_headers=key))
        return await super().get_response(system_instructions, input, own, *rest, **named)


def reviewed_model(url: str, policy: str, *, key: str = "none", attempts: int = 60) -> ReviewedModel:
    """Return a policy as the model of an agent.

    Args:
        url: of the gateway, with /v1.
        policy: its name.
        key: an API key of scope call.
        attempts: how often the client comes back, each for `wait` seconds: 60 are about fifty minutes.
    """
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=attempts)
    return ReviewedModel(model=policy, openai_client=client)
