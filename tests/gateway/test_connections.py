"""Slow and giant clients, and giant replies: what one peer does costs the others nothing."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
import requests
import uvicorn
from uvicorn.server import ServerState

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway.chat import event_stream
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.server import Connections, GuardedProtocol, ServerSettings, group_of
from conformal_arbitrage.live.config import GatewayConfig, read_config
from conformal_arbitrage.models.endpoint import Assembly, events
from tests.gateway.durability import Gateway, decision_request, write_config
from tests.gateway.house import CHAT, DECISION, hanging, says, until
from tests.scripted import Stream, chunk, ending, sse

PART = "x" * 100
HOST = b"Host: 127.0.0.1\r\n"
JSON = b"Content-Type: application/json\r\n"
QUICK = {"header_timeout": 0.4, "body_timeout": 0.4, "idle_timeout": 0.4, "write_timeout": 0.4}
PATIENT = {"header_timeout": 60, "body_timeout": 60, "idle_timeout": 60, "write_timeout": 60}


def connect(house, source="127.0.0.1"):
    peer = socket.create_connection(("127.0.0.1", house.port), timeout=60, source_address=(source, 0))
    peer.settimeout(20)
    return peer


def request(body, path="/v1/decisions", length=None, headers=b""):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(data) if length is None else length}\r\n".encode()
    return head + HOST + JSON + headers + b"\r\n" + data


def everything(peer):
    """What a peer is sent until the connection ends."""
    data = b""
    try:
        while portion := peer.recv(2**16):
            data += portion
    except ConnectionResetError:
        pass
    return data


def status_of(peer):
    """The status of the reply, and how the connection went on: True if it ended."""
    data = everything(peer)
    return int(data.split(b" ")[1]) if data else None


def closed(house, reason):
    """How many connections were closed for a reason."""
    match = re.search(rf'arbitrage_connections_closed_total{{reason="{reason}"}} (\S+)', house.get("/metrics").text)
    return 0 if match is None else int(float(match[1]))


def cpu_seconds(process):
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# headers


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nX-Long: ", b"GET /", b"", b"GET / HTTP/1.1\r\n"])
def test_headers_without_end_are_cut_off_early(house, start):
    filler = {b"": b"\r\n" * 5000, b"GET / HTTP/1.1\r\n": b"a: b\r\n" * 2000}.get(start, b"x" * 10_000)
    gateway = house(gateway=PATIENT)
    with connect(gateway) as peer:
        sent = 0
        try:
            peer.sendall(start)
            for _ in range(15_000):  # 150 MB
                peer.sendall(filler)
                sent += len(filler)
        except OSError:
            pass
        assert sent < 40_000_000
        assert status_of(peer) in (431, 400)
    assert closed(gateway, "header_too_large") + closed(gateway, "malformed") == 1


@pytest.mark.proof
async def test_a_header_of_150_megabytes_gets_431_for_less_cpu_than_sending_it_takes(tmp_path):
    async with Gateway(write_config(tmp_path, tmp_path / "arbitrage.db")) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        before = cpu_seconds(gateway.process.pid)
        mine = time.process_time()
        replies = await asyncio.gather(*(asyncio.to_thread(_giant_header, port) for _ in range(4)))
        theirs, mine = cpu_seconds(gateway.process.pid) - before, time.process_time() - mine
    assert all(reply.startswith(b"HTTP/1.1 431 ") for reply in replies)
    assert theirs < 1 + mine  # 24 s for each of them before


def _giant_header(port):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        try:
            peer.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
            for _ in range(150):
                peer.sendall(b"x" * 1_000_000)
        except OSError:
            pass
        return everything(peer)


def test_headers_up_to_the_limit_are_accepted_also_with_a_large_body(house):
    gateway = house(gateway={"max_header": 5000, **PATIENT})
    fits = {**DECISION, "input": "x" * 300_000}
    assert gateway.decide(fits, headers={"X-Long": "y" * 4000}).status_code == 200
    assert gateway.decide(fits, headers={"X-Long": "y" * 5000}).status_code == 431
    assert gateway.decide(DECISION, headers={"X-Long": "y" * 5000}).json()["error"]["code"] == (
        "request_header_fields_too_large"
    )


def test_a_second_request_on_a_connection_has_the_same_limit_while_the_first_is_answered(house):
    gateway = house(primary=hanging, gateway=PATIENT)
    with connect(gateway) as peer:
        peer.sendall(request(DECISION) + b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 100_000)
        assert everything(peer) == b""  # the first is cut off too: a reply now would be taken for its own
    until(lambda: not gateway.primary.under_way)
    assert closed(gateway, "header_too_large") == 1


@pytest.mark.parametrize("half", [b"GET /v1/models HT", b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Half: y"])
def test_half_sent_headers_get_408_in_time(house, half):
    gateway = house(gateway={**PATIENT, "header_timeout": 0.4})
    with connect(gateway) as peer:
        peer.sendall(half)
        assert status_of(peer) == 408
    assert closed(gateway, "head_timeout") == 1


def test_headers_that_trickle_in_get_408_too(house):
    gateway = house(gateway={**PATIENT, "header_timeout": 0.4})
    with connect(gateway) as peer:
        peer.sendall(b"GET /v1/models HTTP/1.1\r\nX-Slow: ")
        peer.settimeout(0.05)
        reply = b""
        for _ in range(200):
            try:
                peer.sendall(b"x")
                reply = peer.recv(100)
                break
            except TimeoutError:
                continue
        assert reply.startswith(b"HTTP/1.1 408 ")


# bodies


def test_half_sent_bodies_get_408_in_time(house):
    gateway = house(gateway={**PATIENT, "body_timeout": 0.4})
    with connect(gateway) as peer:
        peer.sendall(request(DECISION, length=100_000))
        assert status_of(peer) == 408
    assert closed(gateway, "body_timeout") == 1
    assert gateway.primary.bodies == []


def test_a_body_below_the_rate_is_cut_off_and_one_above_it_is_not(house):
    gateway = house(gateway={**PATIENT, "body_timeout": 0.2, "body_rate": 20_000, "max_body": 200_000})
    data = json.dumps({**DECISION, "input": "x" * 60_000}).encode()
    with connect(gateway) as peer:
        peer.sendall(request(b"".decode(), length=len(data)).removesuffix(b'""'))
        for start in range(0, len(data), 6000):  # twice the rate, and longer than the time for a body without bytes
            peer.sendall(data[start : start + 6000])
            time.sleep(0.15)
        assert peer.recv(12) == b"HTTP/1.1 200"
    with connect(gateway) as peer:
        peer.sendall(request(b"".decode(), length=len(data)).removesuffix(b'""'))
        peer.settimeout(0.1)
        reply = b""
        for start in range(300):
            try:
                peer.sendall(data[start * 100 : start * 100 + 100])
                reply = peer.recv(12)
                break
            except TimeoutError:
                continue
        assert reply == b"HTTP/1.1 408"


def test_512_unfinished_bodies_do_not_give_others_429(house):
    gateway = house(gateway={**PATIENT, "max_in_flight": 8})
    peers = [connect(gateway) for _ in range(64)]
    try:
        for peer in peers:
            peer.sendall(request(DECISION, length=100_000))
        time.sleep(0.3)
        assert gateway.decide().status_code == 200
        assert "arbitrage_in_flight 1.0" in gateway.get("/metrics").text
    finally:
        for peer in peers:
            peer.close()


def test_unfinished_bodies_hold_a_bounded_amount_of_memory(house):
    gateway = house(gateway={**PATIENT, "max_body": 100_000})
    half = request(b"".decode(), length=100_000).removesuffix(b'""') + b" " * 90_000
    peers = [connect(gateway) for _ in range(100)]  # 9 MB, of which 6.4 may wait
    try:
        for peer in peers:
            peer.sendall(half)
        assert until(lambda: closed(gateway, "unfinished")) >= 20
        assert gateway.decide({**DECISION, "input": "x" * 80_000}).status_code == 200
        assert peers[0].recv(12) == b"HTTP/1.1 408"
    finally:
        for peer in peers:
            peer.close()


def test_chunks_with_endless_extensions_trailers_or_single_bytes_are_cut_off(house):
    gateway = house(gateway=PATIENT)
    head = b"POST /v1/decisions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + JSON + b"\r\n"
    endless = {
        "extension": (b"1;x=", b"y" * 65_536),
        "trailer": (b"0\r\nx: ", b"y" * 65_536),
        "bytes": (b"", b"1\r\nx\r\n" * 10_000),
    }
    for start, filler in endless.values():
        with connect(gateway) as peer:
            sent = 0
            try:
                peer.sendall(head + start)
                for _ in range(2000):
                    peer.sendall(filler)
                    sent += len(filler)
            except OSError:
                pass
            assert sent < 40_000_000
            assert status_of(peer) in (413, 400)


def test_trailers_are_no_headers(house):
    gateway = house(gateway=PATIENT)
    secret, _ = gateway.key("call")
    body = json.dumps(DECISION).encode()
    with connect(gateway) as peer:
        head = b"POST /v1/decisions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + JSON + b"\r\n"
        trailer = f"0\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()
        peer.sendall(head + f"{len(body):x}\r\n".encode() + body + b"\r\n" + trailer)
        assert peer.recv(12) == b"HTTP/1.1 401"


def test_a_refused_request_may_send_the_rest_of_its_body_and_the_connection_goes_on(house):
    gateway = house(gateway=PATIENT)
    secret, _ = gateway.key("call")
    with connect(gateway) as peer:
        peer.sendall(request("", length=50_000).removesuffix(b'""'))
        refusal = b""
        while not refusal.endswith(b"}}"):
            refusal += peer.recv(2**16)
        assert refusal.startswith(b"HTTP/1.1 401")
        peer.sendall(b" " * 50_000)
        peer.sendall(request(DECISION, headers=f"Authorization: Bearer {secret}\r\n".encode()))
        assert peer.recv(12) == b"HTTP/1.1 200"


def test_a_refused_request_that_never_ends_is_cut_off(house):
    gateway = house(gateway=PATIENT)
    gateway.key("call")
    with connect(gateway) as peer:
        peer.sendall(request("", length=50_000).removesuffix(b'""'))
        assert status_of(peer) == 401
    with connect(gateway) as peer:
        sent = 0
        try:
            peer.sendall(request("", length=10**9).removesuffix(b'""'))
            for _ in range(2000):
                peer.sendall(b" " * 100_000)
                sent += 100_000
        except OSError:
            pass
        assert sent < 100_000_000


def test_whoever_is_refused_while_reading_is_paused_and_leaves_gives_its_place_back(house):
    gateway = house(gateway={**PATIENT, "max_body": 10_000, "connections_per_address": 60})
    head = b"POST /v1/decisions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + JSON + b"\r\n"
    peers = [connect(gateway, "127.0.0.5") for _ in range(60)]
    for peer in peers:
        peer.sendall(head + b"ffffff\r\n" + b"x" * 150_000)
    assert until(lambda: closed(gateway, "body_too_large")) == 60
    for peer in peers:
        peer.close()
    until(lambda: "arbitrage_connections 1.0" in gateway.get("/metrics").text, 30)
    with connect(gateway, "127.0.0.5") as again:
        again.sendall(request(DECISION))
        assert again.recv(12) == b"HTTP/1.1 200"


def test_whoever_is_refused_and_stays_without_reading_or_leaving_is_cut_off(house):
    gateway = house(gateway={**PATIENT, "max_body": 10_000})
    head = b"POST /v1/decisions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + JSON + b"\r\n"
    with connect(gateway) as peer:
        peer.sendall(head + b"ffffff\r\n" + b"x" * 150_000)
        assert status_of(peer) == 413
        until(lambda: "arbitrage_connections 1.0" in gateway.get("/metrics").text, 30)
    assert closed(gateway, "refused_timeout") == 1


# connections


def test_idle_connections_are_closed_and_busy_ones_are_not(house):
    gateway = house(gateway={**PATIENT, "idle_timeout": 0.4})
    with connect(gateway) as peer:
        assert everything(peer) == b""
    with connect(gateway) as peer:
        peer.sendall(b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n")
        assert peer.recv(12) == b"HTTP/1.1 200"
        assert b"alive" in everything(peer)
    assert closed(gateway, "idle_timeout") == 2


def test_a_slow_answer_is_not_the_callers_fault(house):
    async def late(*_):
        await asyncio.sleep(2)
        return {"model": "m", "answers": []}

    gateway = house(primary=late, gateway=QUICK)
    assert gateway.decide().status_code == 200


def test_an_address_has_so_many_connections_and_others_have_theirs(house):
    gateway = house(gateway={**PATIENT, "connections_per_address": 5})
    peers = [connect(gateway, "127.0.0.2") for _ in range(5)]
    try:
        with connect(gateway, "127.0.0.2") as one_more:
            assert status_of(one_more) == 429
        assert gateway.decide().status_code == 200
        peers.pop().close()
        until(lambda: "arbitrage_connections 5.0" in gateway.get("/metrics").text)
        with connect(gateway, "127.0.0.2") as again:
            again.sendall(request(DECISION))
            assert again.recv(12) == b"HTTP/1.1 200"
    finally:
        for peer in peers:
            peer.close()


def test_a_trusted_proxy_speaks_for_others_and_anyone_else_does_not(house):
    gateway = house(
        primary=hanging, gateway={**PATIENT, "connections_per_address": 2, "trusted_proxies": ["127.0.0.3/32"]}
    )
    key = f"Authorization: {gateway.keyed()['Authorization']}\r\n".encode()
    for_one = key + b"X-Forwarded-For: 10.0.0.9, 198.51.100.7:4711\r\n"
    for_other = key + b"X-Forwarded-For: 198.51.100.8, 127.0.0.3\r\n"
    peers = [connect(gateway, "127.0.0.3") for _ in range(6)]
    try:
        for peer in peers[:2]:
            peer.sendall(request(DECISION, headers=for_one))
        until(lambda: gateway.primary.under_way == 2)
        peers[2].sendall(request(DECISION, headers=for_one))
        assert peers[2].recv(12) == b"HTTP/1.1 429"
        peers[3].sendall(request(DECISION, headers=for_other))
        until(lambda: gateway.primary.under_way == 3)
        peers[0].close()
        until(lambda: gateway.primary.under_way == 2)
        peers[4].sendall(request(DECISION, headers=for_one))
        until(lambda: gateway.primary.under_way == 3)
    finally:
        for peer in peers:
            peer.close()
    strangers = [connect(gateway, "127.0.0.4") for _ in range(2)]
    for number, peer in enumerate(strangers):
        peer.sendall(request(DECISION, headers=key + f"X-Forwarded-For: 192.0.2.{number}\r\n".encode()))
    with connect(gateway, "127.0.0.4") as third:
        assert status_of(third) == 429
    for peer in strangers:
        peer.close()


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("198.51.100.7", "198.51.100.7"),
        ("198.51.100.7:4711", "198.51.100.7"),
        ("::ffff:198.51.100.7", "198.51.100.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2:aaaa::1]:4711", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
        ("", ""),
    ],
)
def test_addresses_are_grouped_by_who_has_them(host, group):
    assert group_of(host) == group


def test_a_full_gateway_closes_those_that_idle_longest_and_never_a_request(house):
    gateway = house(primary=hanging, gateway={**PATIENT, "max_connections": 10})
    busy = connect(gateway)
    busy.sendall(request(DECISION))
    until(lambda: gateway.primary.under_way)
    idle = [connect(gateway) for _ in range(9)]
    time.sleep(1.5)  # the sweep has seen them
    try:
        assert requests.get(gateway.url + "/health/live", timeout=60).status_code == 200
        gone = [peer for peer in idle if _ended(peer)]
        assert 1 <= len(gone) <= 2
        assert gateway.primary.under_way == 1
    finally:
        for peer in [busy, *idle]:
            peer.close()


@pytest.mark.proof
def test_the_limit_on_open_files_is_raised_for_connections_or_they_are_fewer():
    code = (
        "import resource; from conformal_arbitrage.gateway.server import descriptors_for; "
        "from conformal_arbitrage.live.config import GatewayConfig; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard})); "
        "print(descriptors_for(GatewayConfig(max_connections=500, max_in_flight=100)), "
        "resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    for hard, shown in ((4096, "500 956"), (920, "464 920"), (256, "128 256")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(hard=hard)], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == shown


def _ended(peer):
    peer.settimeout(0.05)
    try:
        return peer.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_a_connection_has_so_many_requests_in_line(house):
    gateway = house(primary=hanging, gateway=PATIENT)
    alive = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"
    with connect(gateway) as peer:
        peer.sendall(alive * 60 + alive.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert everything(peer).count(b"alive") == 61
    with connect(gateway) as peer:
        peer.sendall(request(DECISION))
        until(lambda: gateway.primary.under_way)
        peer.sendall(alive * 2000)
        assert everything(peer) == b""
    until(lambda: not gateway.primary.under_way)  # the first in line is told that its caller is gone
    assert closed(gateway, "malformed") == 1


def test_whoever_leaves_with_requests_in_line_is_noticed(house):
    gateway = house(primary=hanging, gateway=PATIENT)
    peer = connect(gateway)
    peer.sendall(request(DECISION) + b"GET /health/live HTTP/1.1\r\n")
    until(lambda: gateway.primary.under_way)
    peer.close()
    until(lambda: not gateway.primary.under_way, 20)


# replies


async def _without_end(*_):
    async def portions():
        yield sse(chunk({"content": "first"}))
        for _ in range(2000):
            yield sse(*[chunk({"content": PART})] * 50)
        yield ending()

    return Stream(portions())


def test_a_stream_that_nobody_reads_holds_back_the_guardian_and_is_cut_off(house):
    gateway = house(
        form="text", primary=says("mine", 0.1), guardian=_without_end, gateway={**PATIENT, "write_timeout": 1}
    )
    with connect(gateway) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(request({**CHAT, "stream": True}, path="/v1/chat/completions"))
        until(lambda: gateway.guardian.under_way)
        until(lambda: closed(gateway, "unread"), 20)
        until(lambda: not gateway.guardian.under_way)
    assert until(lambda: [record.completion.finish for record in gateway.records() if record.completion]) == [
        "cancelled"
    ]


async def test_a_stream_that_is_always_ready_leaves_time_to_others():
    async def send(_):
        pass

    turns = []

    async def other():
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async with event_stream(send, "support") as stream:
        for _ in range(1000):
            await stream.put(b"data: {}\n\n")
    task.cancel()
    assert len(turns) > 50


def test_replies_that_nobody_reads_hold_a_bounded_amount_of_memory(house):
    gateway = house(form="text", primary=says("x" * 1_000_000, 0.9), gateway={**PATIENT, "max_body": 50_000})
    peers = [connect(gateway) for _ in range(10)]
    try:
        for peer in peers:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.sendall(request(CHAT, path="/v1/chat/completions"))
        assert until(lambda: closed(gateway, "unread")) >= 4  # of 10 MB, 3.2 may wait
        assert gateway.chat().status_code == 200
    finally:
        for peer in peers:
            peer.close()


def test_a_gateway_that_is_told_to_stop_does_not_wait_for_half_a_body(house):
    gateway = house(gateway=PATIENT)
    with connect(gateway) as peer:
        peer.sendall(request(DECISION, length=100_000))
        time.sleep(0.2)
        gateway.stop()
        assert everything(peer) == b""


def test_an_upgrade_to_another_protocol_is_ignored(house):
    gateway = house(gateway=PATIENT)
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    with connect(gateway) as peer:
        peer.sendall(b"GET /v1/models HTTP/1.1\r\n" + HOST + upgrade + b"\r\n")
        assert status_of(peer) == 200


# all of them at once


def crowd(port):
    """1,000 idle, 1,000 half-sent, 200 that do not read and 60 that are refused while reading is paused."""
    alive = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"
    chunked = b"POST /v1/decisions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + JSON + b"\r\nffffff\r\n"
    kinds = {
        b"": 1000,
        b"GET /v1/models HTTP/1.1\r\nX-Half: y": 500,
        request(DECISION, length=50_000): 500,
        alive * 99: 200,
        chunked + b"x" * 200_000: 60,
    }
    peers = []
    for place, (sent, count) in enumerate(kinds.items()):
        for _ in range(count):
            peer = socket.socket()
            if sent.startswith(alive):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.settimeout(60)
            peer.bind((f"127.0.0.{place + 2}", 0))
            peer.connect(("127.0.0.1", port))
            peer.sendall(sent)
            peers.append(peer)
    return peers


async def slowest_of(session, count=400):
    """The 99th percentile of the seconds that a decision takes, four at a time."""
    times = []

    async def ask(names):
        for name in names:
            route, body = decision_request(f"{time.monotonic_ns()} {name}")
            start = time.perf_counter()
            async with session.post(route, json=body) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
            times.append(time.perf_counter() - start)

    await asyncio.gather(*(ask(range(first, count, 4)) for first in range(4)))
    return sorted(times)[int(0.99 * count)]


@pytest.mark.proof
async def test_a_crowd_of_bad_connections_does_not_slow_others_down_and_leaves_no_place_taken(tmp_path):
    patient = "header_timeout = 120\nbody_timeout = 120\nidle_timeout = 300\nwrite_timeout = 30\nmax_body = 100000\n"
    path = write_config(tmp_path, tmp_path / "arbitrage.db", audit_rate=0)
    path.write_text(path.read_text().replace("[gateway]", f"[gateway]\n{patient}connections_per_address = 1001"))

    async def open_connections(session):
        async with session.get("/metrics") as reply:
            return float(re.search(r"^arbitrage_connections (\S+)", await reply.text(), re.MULTILINE)[1])

    ratios, back = [], 0.0
    async with Gateway(path) as gateway, aiohttp.ClientSession(gateway.url) as session:
        port = int(gateway.url.rpartition(":")[2])
        await slowest_of(session)  # warm
        usual = await open_connections(session)
        for _ in range(3):
            alone = await slowest_of(session)
            peers = await asyncio.to_thread(crowd, port)
            try:
                await asyncio.sleep(3)  # until nobody reads what is written
                waiting = time.monotonic()
                while await open_connections(session) <= 2000:
                    await asyncio.sleep(0.2)
                    assert time.monotonic() - waiting < 60
                crowded = await slowest_of(session)
            finally:
                for peer in peers:
                    peer.close()
            print(f"p99 {1000 * alone:.1f} ms alone, {1000 * crowded:.1f} ms in the crowd")
            ratios.append(crowded / alone)
            left = time.monotonic()
            while await open_connections(session) > usual:
                await asyncio.sleep(0.2)
                assert time.monotonic() - left < 60
            back = max(back, time.monotonic() - left)
    ratios.sort()
    print(
        f"p99 with the crowd / without: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; places back after {back:.1f} s"
    )
    assert ratios[0] < 2  # what else runs on the machine only adds to the others


# settings


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("header_timeout = 0", "header_timeout must be above 0 and finite (leave it out for the default); got 0"),
        ("body_rate = -1", "body_rate must be above 0"),
        ("idle_timeout = nan", "idle_timeout must be above 0"),
        ("write_timeout = inf", "write_timeout must be above 0"),
        ('trusted_proxies = ["10.0.0.0/8", "proxy"]', "trusted_proxies must be addresses, or networks"),
    ],
)
def test_limits_that_cannot_be_used_are_refused_by_line(house, line, complaint):
    path = house().path
    path.write_text(path.read_text().replace("[gateway]", f"[gateway]\n{line}"))
    number = path.read_text().splitlines().index(line) + 1
    with pytest.raises(ConfigError, match=re.escape(f"line {number}: ") + re.escape(complaint)):
        read_config(path)


# joining


def assemble_text(parts):
    assembly = Assembly()
    for _ in range(parts):
        assembly.add(chunk({"content": PART}))
    assert len(assembly.document()["choices"][0]["message"]["content"]) == parts * len(PART)


def assemble_arguments(parts):
    assembly = Assembly()
    for _ in range(parts):
        assembly.add(chunk({"tool_calls": [{"index": 0, "function": {"arguments": PART}}]}))
    [call] = assembly.document()["choices"][0]["message"]["tool_calls"]
    assert len(call["function"]["arguments"]) == parts * len(PART)


def read_one_event(parts):
    async def portions():
        yield b"data: "
        for _ in range(parts):
            yield PART.encode()
        yield b"\n\n"

    async def story():
        return [len(event) async for event in events(portions())]

    assert asyncio.run(story()) == [parts * len(PART)]


def cpu_of(work, size):
    start = time.process_time()
    work(size)
    return time.process_time() - start


@pytest.mark.parametrize("work", [assemble_text, assemble_arguments, read_one_event])
def test_joining_four_times_as_many_chunks_takes_about_four_times_as_long(work):
    work(1000)
    small = min(cpu_of(work, 15_000) for _ in range(3))
    assert min(cpu_of(work, 60_000) for _ in range(3)) < 8 * small  # 16 if every chunk copied what came before


# what the guard uses of uvicorn beside its documented interface

OF_PROTOCOL = [
    "app",
    "client",
    "cycle",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "server_state",
    "transport",
    "_start_asgi_task",
]
OF_CYCLE = ["disconnected", "keep_alive", "message_event", "response_complete", "response_started", "transport"]
OF_FLOW = ["read_paused", "resume_reading", "resume_writing", "write_paused"]
OF_SERVER = [
    "capture_signals",
    "force_exit",
    "handle_exit",
    "lifespan",
    "server_state",
    "should_exit",
    "shutdown",
    "started",
]
OVERRIDDEN = [
    "connection_lost",
    "connection_made",
    "data_received",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "resume_writing",
    "send_400_response",
    "shutdown",
    "_start_asgi_task",
]


class SilentTransport(asyncio.Transport):
    def write(self, data):
        pass

    def close(self):
        pass

    def is_closing(self):
        return False


async def _served(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def guarded_request():
    """A connection after its first request, and its server."""
    settings = ServerSettings(_served, Connections(GatewayConfig(), Metrics()))
    settings.load()
    server = uvicorn.Server(settings)
    server.lifespan = settings.lifespan_class(settings)
    protocol = GuardedProtocol(settings, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(SilentTransport())
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    await asyncio.gather(*protocol.server_state.tasks)
    return protocol, server


def test_uvicorn_has_the_internals_that_the_guard_of_connections_uses():
    protocol, server = asyncio.run(guarded_request())
    state, base = protocol.server_state, GuardedProtocol.__mro__[1]
    used = {
        protocol: OF_PROTOCOL, protocol.cycle: OF_CYCLE, protocol.flow: OF_FLOW, server: OF_SERVER, base: OVERRIDDEN,
        protocol.config: ["encoded_headers"], state: ["default_headers", "tasks", "total_requests"],
    }  # fmt: skip
    gone = [
        f"{type(part).__name__}.{name}" for part, names in used.items() for name in names if not hasattr(part, name)
    ]
    assert not gone, (
        f"uvicorn {uvicorn.__version__} has moved {', '.join(gone)}: read gateway/server.py against its httptools_impl.py, "
        "then raise the bound in pyproject.toml"
    )
    assert (protocol.phase, state.total_requests) == ("idle", 1)
