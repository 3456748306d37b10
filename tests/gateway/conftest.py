import pytest

from tests.gateway.house import House


@pytest.fixture
def house(tmp_path):
    """Start gateways; all are stopped in the end."""
    started = []

    def start(**options):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        made = House(folder, **options)
        made.__enter__()
        started.append(made)
        return made

    yield start
    for made in started:
        made.__exit__()
