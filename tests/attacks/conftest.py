"""The fixtures of the gateway's tests."""

from tests.gateway.conftest import house

__all__ = ["house"]
