"""The gateway: an OpenAI-compatible service that keeps a risk quota and a record of every decision."""

from conformal_arbitrage.gateway.gateway import Parts, create_app
from conformal_arbitrage.gateway.server import application, run, running, serve

__all__ = ["Parts", "application", "create_app", "run", "running", "serve"]
