"""Responses on the wire: head and body leave together, and nothing is held back."""

import json
import socket

from tests.gateway.house import DECISION

HOST = b"Host: 127.0.0.1\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"


def connect(house):
    return socket.create_connection(("127.0.0.1", house.port), timeout=60)


def decision(*headers):
    data = json.dumps(DECISION).encode()
    lines = [b"Content-Type: application/json", b"Content-Length: %d" % len(data), *headers]
    return b"POST /v1/decisions HTTP/1.1\r\n" + HOST + b"\r\n".join(lines) + b"\r\n\r\n", data


def received(peer, *ends):
    """Read until each of some texts has come, in that order."""
    data, start = b"", 0
    for end in ends:
        while (place := data.find(end, start)) < 0:
            portion = peer.recv(2**16)
            assert portion, data
            data += portion
        start = place + len(end)
    return data


def test_the_head_of_a_response_without_a_body_is_sent_and_the_connection_goes_on(house):
    with connect(house()) as peer:
        peer.sendall(LIVE.replace(b"GET", b"HEAD"))
        assert received(peer, b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        peer.sendall(LIVE)
        assert received(peer, b"\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_a_caller_who_waits_for_100_continue_gets_it_before_the_answer(house):
    head, data = decision(b"Expect: 100-continue")
    with connect(house()) as peer:
        peer.sendall(head)
        assert received(peer, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.sendall(data)
        assert received(peer, b"\r\n\r\n", b'"usage"').startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_whole_and_in_order(house):
    with connect(house()) as peer:
        peer.sendall(b"".join(decision()) + LIVE + b"".join(decision()))
        data = received(peer, b"HTTP/1.1 200", b'"usage"', b"HTTP/1.1 200", b"\r\n\r\n", b"HTTP/1.1 200", b'"usage"')
    assert data.count(b"HTTP/1.1 ") == 3


def test_a_response_is_whole_before_a_connection_closes(house):
    head, data = decision(b"Connection: close")
    with connect(house()) as peer:
        peer.sendall(head + data)
        reply = b""
        while portion := peer.recv(2**16):
            reply += portion
    headers, _, body = reply.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in headers
    assert json.loads(body)["answers"]
