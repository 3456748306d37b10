"""Streams of news: nothing between a page and its stream is lost, and they do not keep the server from stopping."""

import re
import threading
import time
from contextlib import suppress

import pytest
import requests

from conformal_arbitrage.gateway.console import news
from tests.console.filled import Visit
from tests.gateway.house import House, until


def since_of(page):
    return re.search(r'data-since="([^"]+)"', page.text).group(1)


def first_event(house, since, seconds=30):
    """The first event of a stream, as its kind and id."""
    with requests.get(f"{house.url}/console/events?since={since}", stream=True, timeout=seconds) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines(decode_unicode=True)
        kind = next(line for line in lines if line.startswith("event:"))
        return kind.removeprefix("event: "), next(lines).removeprefix("id: ")


def test_what_happened_between_the_page_and_its_stream_is_told(house):
    gate = house(House, policy={"audit_rate": 1.0})
    since = since_of(Visit(gate).open("/console"))
    gate.decide()
    kind, id = first_event(gate, since)
    assert kind == "figures"
    assert id != since


def test_what_happens_later_is_told(house):
    gate = house(House, policy={"audit_rate": 1.0})
    since = since_of(Visit(gate).open("/console"))
    told = []
    listener = threading.Thread(target=lambda: told.append(first_event(gate, since)))
    listener.start()
    time.sleep(0.3)
    gate.decide()
    listener.join(30)
    assert told[0][0] == "figures"


class Open:
    """A stream that has begun and stays open; what reads its lines must live as long."""

    def __init__(self, house):
        self.reply = requests.get(f"{house.url}/console/events", stream=True, timeout=30)
        self.lines = self.reply.iter_lines()
        next(self.lines)


def test_a_stream_does_not_keep_the_server_from_stopping(house, caplog):
    gate = house(House)
    streams = [Open(gate) for _ in range(3)]
    gate.stop()
    for stream in streams:
        with suppress(requests.exceptions.ChunkedEncodingError):
            assert not [line for line in stream.lines if line.startswith(b"event")]  # they end
        stream.reply.close()
    assert "exceeded" not in caplog.text  # the server would have given up on open connections, and said so


@pytest.mark.parametrize("limit", ["MOST_STREAMS", "MOST_OF_ONE"])
def test_beyond_the_most_streams_there_is_no_content(house, monkeypatch, limit):
    monkeypatch.setattr(news, limit, 1)
    gate = house(House)
    first = Open(gate)
    assert requests.get(f"{gate.url}/console/events", timeout=30).status_code == 204
    first.reply.close()

    def free():
        with requests.get(f"{gate.url}/console/events", stream=True, timeout=30) as reply:
            return reply.status_code == 200

    until(free)


def test_nobody_takes_all_streams_from_others(house, monkeypatch):
    monkeypatch.setattr(news, "MOST_OF_ONE", 1)
    gate = house(House)
    keys = [gate.key("review")[0] for _ in range(2)]
    with Visit(gate, keys[0]) as one, Visit(gate, keys[1]) as other, one.open("/console/events", stream=True) as first:
        lines = first.iter_lines()  # which must live as long as the stream
        assert next(lines)
        for visit, status in ((one, 204), (other, 200)):
            with visit.open("/console/events", stream=True) as reply:
                assert reply.status_code == status
