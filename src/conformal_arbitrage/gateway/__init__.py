"""The gateway: an OpenAI-compatible service that keeps a risk quota and a record of every decision."""

from conformal_arbitrage.gateway.gateway import Gateway, application
from conformal_arbitrage.gateway.server import run, running, serve

__all__ = ["Gateway", "application", "run", "running", "serve"]
