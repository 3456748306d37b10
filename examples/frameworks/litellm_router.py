"""LiteLLM: a plugin of its Router that chooses between two models under a certificate, before either is asked.

    models = [{"model_name": "chat", "litellm_params": {"model": "openai/small"}},
              {"model_name": "chat", "litellm_params": {"model": "openai/large"}}]
    plugin = CertifiedRouting(certificate, win_rate, primary="openai/small", guardian="openai/large")
    await Router(models, plugins=[plugin]).acompletion(model="chat", messages=messages)

The confidence is that of a router that looks at the prompt only, such as RouteLLM (1 - win rate): make the certificate
with `arbitrage import routellm`. To decide by the Primary's own answer, put the gateway behind LiteLLM instead.

Within the chosen model LiteLLM balances loads and retries as it always does. Give it no fallback from the Guardian to the
Primary: that would answer with the Primary where the certificate said no.
"""

from collections.abc import Callable
from typing import Any

from litellm.types.router import RoutingContext

from conformal_arbitrage import Certificate

Chat = list[dict[str, Any]]


class CertifiedRouting:
    """Leaves the Primary's deployments where the confidence is high enough, else the Guardian's.

    Names that are not served by both models are left alone.

    Args:
        certificate: a certificate in router form.
        confidence: takes the messages and returns how sure you are that the Primary's answer will do; None defers.
        primary: the `model` in the `litellm_params` of the Primary's deployments.
        guardian: that of the Guardian's.
    """

    def __init__(
        self, certificate: Certificate, confidence: Callable[[Chat], float | None], *, primary: str, guardian: str
    ) -> None:
        self.certificate = certificate
        self.confidence = confidence
        self.primary = primary
        self.guardian = guardian

    async def run(self, context: RoutingContext) -> RoutingContext:
        """Leave one of the two models, and say in the signals which and why."""
        if {self.primary, self.guardian} <= set(context.candidate_models):
            sure = self.confidence(context.structured_messages)
            decided_by = self.certificate.decide([0, sure]).decided_by
            chosen = self.primary if decided_by == "primary" else self.guardian
            context.candidate_models = [model for model in context.candidate_models if model == chosen]
            context.signals["arbitrage"] = {"decided_by": decided_by, "confidence": sure}
        return context
