import pytest

from tests.gateway.house import House


@pytest.fixture
def house(tmp_path):
    """Start gateways; all are stopped in the end."""
    started = []

    def start(**options):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        gateway = House(folder, **options)
        gateway.__enter__()
        started.append(gateway)
        return gateway

    yield start
    for gateway in started:
        gateway.__exit__()
