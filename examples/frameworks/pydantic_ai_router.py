"""pydantic-ai: a model that answers with the Primary where its certificate says so, and else with the Guardian.

    model = RoutedModel(OpenAIChatModel("small"), OpenAIChatModel("large"), Certificate.load("certificate.json"))
    agent = Agent(model)

The certificate is one in router form whose confidences are mean token probabilities, as `confidence = "logprob"` and the
importers make them. Tools can ask for approval in the same way: see `approved`.
"""

import math
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from pydantic_ai import ApprovalRequired, ModelMessage, ModelResponse, ModelSettings, RunContext
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.wrapper import WrapperModel

from conformal_arbitrage import Certificate


class RoutedModel(WrapperModel):
    """A Primary and a Guardian under one certificate.

    Let the Guardian's client retry by itself: repeating the whole request would ask the Primary again, until it is sure.

    Args:
        primary: the model that does most of the work; asked with logprobs.
        guardian: the model that answers where the Primary is not sure enough.
        certificate: a certificate in router form.
        on_decision: called with every decision, for your own record.
    """

    def __init__(
        self,
        primary: Model,
        guardian: Model,
        certificate: Certificate,
        on_decision: Callable[[str, float | None], None] = lambda decided_by, confidence: None,
    ) -> None:
        super().__init__(primary)
        self.guardian = guardian
        self.certificate = certificate
        self.on_decision = on_decision

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        """Return the Primary's answer if it stands alone, else the Guardian's."""
        asked: Any = {**(model_settings or {}), "openai_logprobs": True}
        answer = await self.wrapped.request(messages, asked, model_request_parameters)
        confidence = mean_probability(answer)
        decided_by = self.certificate.decide([0, confidence]).decided_by
        self.on_decision(decided_by, confidence)
        if decided_by == "primary":
            return answer
        return await self.guardian.request(messages, model_settings, model_request_parameters)

    def request_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: what was streamed cannot be taken back. The gateway streams; see docs/gateway.md."""
        raise NotImplementedError("use agent.run, or stream through the gateway")


def mean_probability(answer: ModelResponse) -> float | None:
    """Return exp of the mean logprob of the answer's tokens; None, which defers, if there are none."""
    tokens = (answer.provider_details or {}).get("logprobs") or []
    return math.exp(sum(token["logprob"] for token in tokens) / len(tokens)) if tokens else None


def approved(certificate: Certificate, confidence: Callable[..., float | None]) -> Callable[..., Any]:
    """Return a decorator for tools that run by themselves where a confidence is high enough, and else ask for approval.

    Args:
        certificate: a certificate in router form, of graded tool calls.
        confidence: takes the tool's arguments and returns how sure you are that the call is right; None defers.
    """

    def decorate(tool: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @wraps(tool)
        async def guarded(ctx: RunContext[Any], **arguments: Any) -> Any:
            if not ctx.tool_call_approved:
                sure = confidence(**arguments)
                if certificate.decide([0, sure]).deferred:
                    raise ApprovalRequired(metadata={"confidence": sure})
            return await tool(ctx, **arguments)

        return guarded

    return decorate
