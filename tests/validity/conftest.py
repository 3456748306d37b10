"""Simulations run without the coverage tracer, which nearly doubles their time: other tests reach the same lines."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark what is collected in this folder; the hook sees the tests of all folders."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.no_cover)
