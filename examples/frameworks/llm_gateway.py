"""A plugin for `llm`: every policy of a gateway is a model on the command line.

    export ARBITRAGE_GATEWAY=http://127.0.0.1:8400
    llm -m arbitrage/support "I was charged twice."

Install it as a package of one module with the entry point group `llm`, or load it with `llm.plugins.pm.register`.
"""

import json
import os
import urllib.request
from collections.abc import Callable

import llm
from llm.default_plugins.openai_models import Chat


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Register the policies of the gateway that the environment names."""
    gateway = os.environ.get("ARBITRAGE_GATEWAY")
    if gateway is None:
        return
    for policy in policies(gateway):
        register(GatewayModel(f"arbitrage/{policy}", model_name=policy, api_base=f"{gateway}/v1"))


class GatewayModel(Chat):
    """A policy of a gateway as a chat model; its key, if it needs one, is in ARBITRAGE_KEY."""

    needs_key = None
    key_env_var = "ARBITRAGE_KEY"

    def __str__(self) -> str:
        return f"Conformal Arbitrage: {self.model_id}"


def policies(gateway: str) -> list[str]:
    """Return the names of a gateway's policies."""
    key = os.environ.get("ARBITRAGE_KEY")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{gateway}/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return [model["id"] for model in json.load(reply)["data"]]
