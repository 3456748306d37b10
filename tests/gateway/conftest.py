from contextlib import ExitStack
from itertools import count

import pytest

from tests.gateway.house import House


@pytest.fixture
def house(tmp_path):
    """Start gateways, each in a folder of its own; all are stopped in the end."""
    numbers = count()
    with ExitStack() as started:

        def start(kind=House, **options):
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            return started.enter_context(kind(folder, **options))

        yield start
