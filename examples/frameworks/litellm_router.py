"""LiteLLM: a routing strategy for its Router that chooses the deployment under a certificate, before any model is asked.

    router = Router(model_list=[...])    # deployments of "small" and "large", and of the name that callers use
    router.set_custom_routing_strategy(CertifiedRouting(router, certificate, win_rate, primary="small", guardian="large"))

The confidence is that of a router that looks at the prompt only, such as RouteLLM (1 - win rate): make the certificate
with `arbitrage import routellm`. To decide by the Primary's own answer, put the gateway behind LiteLLM instead.
"""

from collections.abc import Callable
from typing import Any

from litellm.types.router import CustomRoutingStrategyBase

from conformal_arbitrage import Certificate

Chat = list[dict[str, Any]]


class CertifiedRouting(CustomRoutingStrategyBase):
    """Deployments of the Primary where the confidence is high enough, else of the Guardian.

    Args:
        router: LiteLLM's Router, whose deployments are chosen from.
        certificate: a certificate in router form.
        confidence: takes the messages and returns how sure you are that the Primary's answer will do; None defers.
        primary: the model name of the Primary's deployments.
        guardian: that of the Guardian's.
    """

    def __init__(
        self,
        router: Any,
        certificate: Certificate,
        confidence: Callable[[Chat], float | None],
        *,
        primary: str,
        guardian: str,
    ) -> None:
        self.router = router
        self.certificate = certificate
        self.confidence = confidence
        self.models = {"primary": primary, "guardian": guardian}

    def get_available_deployment(self, model: str, messages: Chat | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return a deployment of the model that the certificate chooses."""
        decision = self.certificate.decide([0, self.confidence(messages or [])])
        chosen = self.models["guardian" if decision.deferred else "primary"]
        return next(one for one in self.router.model_list if one["model_name"] == chosen)

    async def async_get_available_deployment(
        self, model: str, messages: Chat | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Do the same, asynchronously."""
        return self.get_available_deployment(model, messages)
