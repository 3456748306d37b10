"""OpenAI Agents SDK: the agent's model is a policy of the gateway, and tool calls ask for approval under a certificate.

    set_gateway("http://127.0.0.1:8400/v1", key="...")
    agent = Agent(name="support", model="POLICY", tools=[refund])

The gateway answers on the Responses API, which the SDK speaks by default: nothing but the base URL changes.
"""

from collections.abc import Callable
from typing import Any

from agents import RunContextWrapper, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

from conformal_arbitrage import Certificate


def set_gateway(url: str, key: str = "none") -> None:
    """Send every call of the SDK to a gateway; traces would go to another place, so they are off."""
    set_tracing_disabled(disabled=True)
    set_default_openai_client(AsyncOpenAI(base_url=url, api_key=key), use_for_tracing=False)


def needs_approval(
    certificate: Certificate, confidence: Callable[[dict[str, Any]], float | None]
) -> Callable[..., Any]:
    """Return what `function_tool(needs_approval=...)` takes: whether a person has to approve a call.

    Args:
        certificate: a certificate in router form, of graded tool calls.
        confidence: takes the call's arguments and returns how sure you are that the call is right; None asks the person.
    """

    async def deferred(context: RunContextWrapper[Any], arguments: dict[str, Any], call_id: str) -> bool:
        return certificate.decide([0, confidence(arguments)]).deferred

    return deferred
