"""Who gets in, what a form needs, and the headers of every reply."""

import re
import socket
import time

import pytest
import requests

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway.auth import FIRST_KEY, new_key
from conformal_arbitrage.store import keys
from tests.console.filled import EVIL, Visit, token_of
from tests.gateway.house import House, until

PAGES = ("/console", "/console/decisions", "/console/policies/support", "/console/keys", "/console/health")


def raw(house, method, path, **options):
    return requests.request(method, house.url + path, timeout=60, allow_redirects=False, **options)


def test_every_reply_carries_the_policy(filled):
    visit = Visit(filled, filled.keys["admin"])
    replies = [visit.open(path) for path in (*PAGES, "/console/nothing", "/console/sign-in")]
    replies += [
        raw(filled, "GET", "/console"),
        raw(filled, "POST", "/console/sign-out"),
        raw(filled, "DELETE", "/console"),
    ]
    for reply in replies:
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cross-origin-opener-policy"] == "same-origin"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["referrer-policy"] == "same-origin"


def test_static_files_are_immutable_under_their_digest(filled):
    page = Visit(filled).open("/console/sign-in").text
    paths = re.findall(r'(?:href|src)="(/console/static/[^"]+)"', page)
    assert len(paths) >= 3
    for path in paths:
        reply = raw(filled, "GET", path)
        assert reply.status_code == 200
        assert "immutable" in reply.headers["cache-control"]
    assert raw(filled, "GET", re.sub(r"/[0-9a-f]{16}/", "/0123456789abcdef/", paths[0])).status_code == 404
    assert raw(filled, "GET", paths[0].rsplit("/", 1)[0] + "/..%2fapp.py").status_code in (303, 404)


@pytest.mark.parametrize("path", PAGES)
def test_without_a_key_one_is_sent_to_the_sign_in_page(filled, path):
    reply = raw(filled, "GET", path)
    assert (reply.status_code, reply.headers["location"]) == (303, "/console/sign-in")


def test_an_api_key_in_a_header_does_not_open_the_console_and_a_cookie_does_not_open_the_api(filled):
    reply = raw(filled, "GET", "/console", headers={"Authorization": f"Bearer {filled.keys['admin']}"})
    assert reply.status_code == 303
    visit = Visit(filled, filled.keys["admin"])
    assert visit.open("/v1/models").status_code == 401


@pytest.mark.parametrize("key", ["", "arb-nothing", "the key of scope call", EVIL[0]])
def test_other_keys_are_refused(filled, key):
    visit = Visit(filled)
    given = filled.keys["call"] if key.startswith("the key") else key
    reply = visit.send_form("/console/sign-in", visit.open("/console/sign-in"), key=given)
    assert reply.status_code == 401
    assert not visit.cookies
    assert not key or key not in reply.text


def test_the_cookie_has_the_port_and_is_out_of_reach_of_scripts(filled):
    visit = Visit(filled)
    page = visit.open("/console/sign-in")
    reply = visit.post(
        filled.url + "/console/sign-in", data={"csrf": token_of(page.text), "key": filled.keys["admin"]},
        timeout=60, allow_redirects=False,
    )  # fmt: skip
    cookie = reply.headers["set-cookie"]
    assert cookie.startswith(f"arbitrage-{filled.port}=")
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert "secure" not in cookie.lower()


def test_behind_https_the_cookie_is_bound_to_the_host(house, monkeypatch):
    admin, sha256 = new_key()
    monkeypatch.setenv(FIRST_KEY, sha256)
    gate = house(House, gateway={"public_url": "https://gate.example"})
    headers = {"Host": "gate.example", "Sec-Fetch-Site": "same-origin"}
    page = raw(gate, "GET", "/console/sign-in", headers=headers)
    reply = raw(gate, "POST", "/console/sign-in", headers=headers, data={"csrf": token_of(page.text), "key": admin})
    assert reply.headers["set-cookie"].startswith("__Host-arbitrage-443=")
    assert "secure" in reply.headers["set-cookie"].lower()
    assert raw(gate, "GET", "/console/sign-in", headers={"Host": "other.example"}).status_code == 403


def test_an_address_for_others_without_any_key_is_refused_with_the_command_that_makes_one(house):
    with pytest.raises(ConfigError, match=r"reached at public_url = .https://gate.example.*arbitrage keys create"):
        house(House, gateway={"public_url": "https://gate.example"})


@pytest.mark.parametrize(
    ("peer", "host", "passed_on"),
    [
        ("192.0.2.7", "127.0.0.1", []),
        ("127.0.0.1", "gate.example", []),
        ("127.0.0.1", "127.0.0.1", [(b"x-forwarded-for", b"192.0.2.7")]),
        ("127.0.0.1", "127.0.0.1", [(b"via", b"1.1 gate.example")]),
    ],
)
def test_without_a_key_only_this_machine_under_its_own_name_is_served(house, peer, host, passed_on):
    gate = house(House)

    sent = []

    async def status(path):
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"host", host.encode()), *passed_on], "client": (peer, 1),
            "server": ("127.0.0.1", 1), "scheme": "http", "root_path": "",
            "http_version": "1.1",
        }  # fmt: skip
        sent.clear()

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": b""}

        await gate.app(scope, receive, send)
        return sent[0]["status"]

    assert [gate.run(status(path)) for path in ("/v1/models", "/console")] == [403, 403]
    assert gate.run(status("/")) == 200
    assert b"support" not in sent[1]["body"]


def test_signing_in_again_makes_a_new_cookie_and_ends_the_old_one(filled):
    visit = Visit(filled, filled.keys["admin"])
    name = f"arbitrage-{filled.port}"
    first = visit.cookies[name]
    visit.send_form("/console/sign-in", visit.open("/console/sign-in"), key=filled.keys["admin"])
    assert visit.cookies[name] != first
    assert raw(filled, "GET", "/console", cookies={name: first}).status_code == 303


def test_signing_out_ends_the_sign_in(filled):
    visit = Visit(filled, filled.keys["review"])
    cookie = dict(visit.cookies)
    visit.send_form("/console/sign-out", visit.open("/console"))
    assert raw(filled, "GET", "/console", cookies=cookie).status_code == 303


def test_a_revoked_key_is_out_with_the_next_request(filled):
    key, name = filled.fresh_key("review")
    visit = Visit(filled, key)
    assert visit.open("/console").status_code == 200
    filled.with_store(lambda store: store.run(keys.revoke, name))
    reply = visit.open("/console", allow_redirects=False)
    assert reply.headers["location"] == "/console/sign-in?why=over"


def test_a_sign_in_is_over_after_an_hour_without_a_page_and_after_twelve_in_any_case(filled, monkeypatch):
    for column, back in (("seen", 3700), ("expires", 13 * 3600)):
        visit = Visit(filled, filled.keys["review"])
        import sqlite3
        from contextlib import closing

        with closing(sqlite3.connect(filled.folder / "arbitrage.sqlite", isolation_level=None)) as database:
            database.execute(f"update sign_ins set {column} = {column} - {back}")
        assert visit.open("/console", allow_redirects=False).status_code == 303


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 303),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Sec-Fetch-Site": None, "Origin": "own"}, 303),
        ({"Sec-Fetch-Site": None, "Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": None, "Origin": "null"}, 403),
        ({"Sec-Fetch-Site": None}, 403),
        ({"csrf": ""}, 403),
        ({"csrf": "0" * 64}, 403),
        ({"csrf": "%C3%A4"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    ],
)
def test_a_form_needs_its_origin_and_its_token(filled, change, status):
    visit = Visit(filled, filled.keys["review"])
    token = token_of(visit.open("/console").text)
    headers = {"Sec-Fetch-Site": "same-origin", "Content-Type": "application/x-www-form-urlencoded", **change}
    token = headers.pop("csrf", token)
    if headers.get("Origin") == "own":
        headers["Origin"] = filled.url
    fields = {name: value for name, value in headers.items() if value is not None}
    cookies = dict(visit.cookies)
    reply = raw(filled, "POST", "/console/sign-out", headers=fields, cookies=cookies, data=f"csrf={token}".encode())
    assert reply.status_code == status, reply.text


def test_the_token_of_an_earlier_sign_in_is_refused(filled):
    first = Visit(filled, filled.keys["review"])
    old = token_of(first.open("/console").text)
    second = Visit(filled, filled.keys["review"])
    reply = second.post(filled.url + "/console/sign-out", data={"csrf": old}, timeout=60)
    assert reply.status_code == 403


def test_bytes_that_are_no_text_are_refused_in_words(filled):
    """What a browser never sends: in headers, cookies, paths and forms."""
    visit = Visit(filled, filled.keys["admin"])
    cookie = "; ".join(f"{one.name}={one.value}" for one in visit.cookies).encode()
    name = cookie.partition(b"=")[0]
    form = b"Sec-Fetch-Site: same-origin\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 3\r\n"
    host = f"Host: 127.0.0.1:{filled.port}\r\nConnection: close\r\n".encode()
    requests_sent = {
        b"GET /console HTTP/1.1\r\nConnection: close\r\nHost: \xff\xfe\r\n\r\n": 403,
        b"GET /console HTTP/1.1\r\nConnection: close\r\nHost: 127.0.0.1@evil.example\r\n\r\n": 403,
        b"GET /console HTTP/1.1\r\n" + host + b"Cookie: " + name + b"=\xff\x80; ;=\r\n\r\n": 303,
        b"GET /console/decisions/%ff%zz%00 HTTP/1.1\r\n" + host + b"Cookie: " + cookie + b"\r\n\r\n": 404,
        b"GET /console/policies/%0d%0aX:1 HTTP/1.1\r\n" + host + b"Cookie: " + cookie + b"\r\n\r\n": 404,
        b"POST /console/keys HTTP/1.1\r\n"
        + host
        + form
        + b"Cookie: "
        + cookie
        + b"\r\nX-CSRF-Token: \xff\r\n\r\na=b": 403,
        b"POST /console/keys HTTP/1.1\r\n" + host + form + b"Cookie: " + cookie + b"\r\n\r\n\xff=1": 400,
    }
    for sent, status in requests_sent.items():
        with socket.create_connection(("127.0.0.1", filled.port), timeout=60) as connection:
            connection.sendall(sent)
            reply = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))
        assert reply.startswith(f"HTTP/1.1 {status} ".encode()), (sent, reply[:200])
        assert b"\r\nX:1" not in reply.partition(b"\r\n\r\n")[0]


@pytest.mark.parametrize("body", [b"a=" + b"x" * 100_001, b"&".join(b"a%d=1" % k for k in range(51)), b"csrf=\xff"])
def test_large_or_malformed_forms_are_refused(filled, body):
    visit = Visit(filled, filled.keys["review"])
    headers = {"Sec-Fetch-Site": "same-origin", "Content-Type": "application/x-www-form-urlencoded"}
    reply = raw(filled, "POST", "/console/sign-out", headers=headers, cookies=dict(visit.cookies), data=body)
    assert reply.status_code in (400, 403, 413)


@pytest.mark.parametrize("scope", ["review", "operate"])
def test_reviewers_and_operators_do_not_change_anything(filled, scope):
    visit = Visit(filled, filled.fresh_key(scope)[0])
    if scope == "operate":
        page = visit.open("/console/policies/broken")
        assert "Change what is in force" not in page.text
    page = visit.open("/console")
    assert page.status_code == 200
    assert visit.open("/console/keys").status_code == 403
    for path in ("install", "rollback", "lift", "renew", "choose", "check"):
        assert visit.send_form(f"/console/policies/broken/{path}", page, certificate="{}").status_code == 403
    assert visit.send_form("/console/keys", page, label="x", scope="admin").status_code == 403


def test_getting_a_page_changes_nothing(filled):
    visit = Visit(filled, filled.keys["admin"])
    for path in ("/console/sign-out", "/console/policies/broken/lift", "/console/policies/broken/rollback"):
        assert visit.open(path).status_code in (404, 405)


def test_before_the_first_key_the_console_is_open_on_this_machine_only_and_says_so(house):
    gate = house(House)
    visit = Visit(gate)
    page = visit.open("/console")
    assert "No API key exists yet" in page.text
    assert raw(gate, "GET", "/console", headers={"Host": "evil.example"}).status_code == 403
    reply = visit.send_form("/console/keys", page, label="mine", scope="review")
    assert reply.status_code == 422  # nobody could make a second one
    page_after = visit.send_form("/console/keys", page, label="mine", scope="admin")
    key = re.search(r"arb-[\w-]{43}", page_after.text).group()
    until(lambda: raw(gate, "GET", "/console").status_code == 303)
    assert Visit(gate, key).open("/console/keys").status_code == 200
    assert key not in Visit(gate, key).open("/console/keys").text


def test_no_key_or_cookie_reaches_the_log(filled):
    visit = Visit(filled, filled.keys["admin"])
    visit.open("/console")
    time.sleep(0)
    text = b"\n".join(filled.lines).decode()
    assert "/console" in text
    assert filled.keys["admin"] not in text
    assert visit.cookies[f"arbitrage-{filled.port}"] not in text
