import pytest

from tests.gateway.durability import SECRET
from tests.gateway.house import House, houses


@pytest.fixture
def house(tmp_path):
    """Start gateways, each in a folder of its own; all are stopped in the end."""
    with houses(tmp_path) as start:
        yield start


@pytest.fixture
def home(where, tmp_path, monkeypatch):
    """A function that starts a gateway on either database."""
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    houses = []

    def start(gateway=None, **options):
        houses.append(House(tmp_path, gateway={"database": where, **(gateway or {})}, **options))
        return houses[-1].__enter__()

    yield start
    for gateway in houses:
        gateway.__exit__()
