"""LangChain and LangGraph: middleware that routes every model call of an agent under a certificate.

    small = ChatOpenAI(model="small").bind(logprobs=True)
    agent = create_agent(small, tools, middleware=[Routed(certificate, guardian=large)])

If the Guardian is a person, the graph is interrupted, and resumed with the person's answer:

    agent = create_agent(small, tools, middleware=[RoutedToPerson(certificate)], checkpointer=InMemorySaver())
    agent.invoke(Command(resume="the answer"), config)

The certificate is one in router form whose confidences are mean token probabilities, from calls like the agent's.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langgraph.types import interrupt

from conformal_arbitrage import Certificate


class Routed(AgentMiddleware):
    """The agent's model is the Primary, and another model the Guardian.

    Let the Guardian's client retry by itself: repeating the whole call would ask the Primary again, until it is sure.

    Args:
        certificate: a certificate in router form.
        guardian: the model that answers where the Primary is not sure enough.
    """

    def __init__(self, certificate: Certificate, guardian: BaseChatModel) -> None:
        super().__init__()
        self.certificate = certificate
        self.guardian = guardian

    def wrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
    ) -> ModelResponse | AIMessage:
        """Return the Primary's message if it stands alone, else the Guardian's."""
        response = handler(request)
        deferred = self.certificate.decide([0, mean_probability(response.result[-1])]).deferred
        return handler(request.override(model=self.guardian)) if deferred else response

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelResponse | AIMessage:
        """Do the same, asynchronously."""
        response = await handler(request)
        deferred = self.certificate.decide([0, mean_probability(response.result[-1])]).deferred
        return await handler(request.override(model=self.guardian)) if deferred else response


class RoutedToPerson(AgentMiddleware):
    """The agent's model is the Primary, and a person the Guardian.

    The decision is a step of its own after the model's: a graph that is resumed runs its step again, and the Primary must
    not be asked a second time.

    Args:
        certificate: a certificate in router form.
    """

    def __init__(self, certificate: Certificate) -> None:
        super().__init__()
        self.certificate = certificate

    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Keep the Primary's message if it stands alone, else interrupt, and put the person's answer in its place."""
        proposal = state["messages"][-1]
        if not self.certificate.decide([0, mean_probability(proposal)]).deferred:
            return None
        answer = interrupt({"question": state["messages"][-2].content, "proposal": proposal.content})
        return {"messages": [AIMessage(content=str(answer), id=proposal.id)]}


def mean_probability(message: Any) -> float | None:
    """Return exp of the mean logprob of a message's tokens; None, which defers, if there are none."""
    tokens = ((message.response_metadata or {}).get("logprobs") or {}).get("content") or []
    return math.exp(sum(token["logprob"] for token in tokens) / len(tokens)) if tokens else None
