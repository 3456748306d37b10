"""What a gateway replies over loopback, for `bits.py`: statuses, headers and bodies without ids, times and sentences.

The road is that of a user: `collect` asks a mock endpoint, `calibrate` certifies, `keys create` makes keys, and `serve` runs
in a process of its own. Nothing of the package is imported.
"""

import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import duckdb
import requests
from benchmarks.bits import Bits, command, digest, rounded, thresholds, without

_CONFIG = """\
alpha = 0.1
[task]
form = "menu"
[primary]
kind = "chat"
url = "{url}"
model = "small"
price = [1.0, 2.0]
attempts = 1
[guardian]
kind = "chat"
url = "{url}"
model = "large"
price = [10.0, 20.0]
attempts = 1
[models.writer]
kind = "chat"
url = "{url}"
model = "writer"
confidence = "logprob"
price = [1.0, 2.0]
attempts = 1
[models.editor]
kind = "chat"
url = "{url}"
model = "editor"
price = [10.0, 20.0]
attempts = 1
[models.people]
kind = "human"
name = "the team"
[teams."the team"]
members = ["ann"]
[gateway]
database = "arbitrage.sqlite"
[policies.planets]
mode = "shadow"
audit_rate = 1.0
content = "full"
aliases = ["gpt-4o"]
expose = "full"
[policies.letters]
mode = "shadow"
primary = "writer"
guardian = "editor"
form = "text"
[policies.desk]
guardian = "people"
mode = "shadow"
[policies.desk.review]
wait = 50.0
undo = 0.0
"""
_OPTIONS = ["Jupiter", "Saturn", "Neptune", "Earth"]
_HEADERS = ("content-type", "x-arbitrage-decided-by", "x-arbitrage-alpha", "x-arbitrage-cost", "x-should-retry")
_VARYING = (
    "id", "created", "created_at", "seconds", "latency", "latency_ms", "time", "at", "asked", "drawn", "since", "until",
    "installed", "last_audit", "reason", "reasons", "signature", "next", "key_id", "token", "expires", "waiting", "age",
    "item_id", "response_id", "completed_at", "drift", "identities", "identities_sha256", "certificate", "log_sha256",
    "secret_id", "note",
)  # fmt: skip
"""Fields of replies that differ from run to run, hold sentences, or belong to documents that are recorded elsewhere."""


class _Upstream(BaseHTTPRequestHandler):
    """A chat endpoint whose answers depend on the model and on the number after # in the question."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = re.search(r"#(\d+)", json.dumps(body["messages"]))
        place = int(number[1]) % 10 if number else None
        if number and int(number[1]) >= 1000 and body["model"] == "large":
            place = 0  # the Guardian disagrees, however sure the Primary is
        if body.get("stream"):
            self._send(b"".join(_events(_text(body["model"], place))), "text/event-stream")
        else:
            self._send(json.dumps(_completion(body, place)).encode(), "application/json")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


def _text(model: str, place: int | None) -> str:
    """The large models are always right, the small ones on seven questions of ten; `check` asks about two options."""
    if place is None:
        return json.dumps({"scores": [0.9, 0.1]}) if model in ("small", "large") else "right answer"
    if model == "small":
        top, rest = 25 + 7 * place, 25 - (7 * place) // 3
        return json.dumps({"scores": [top / 100, rest / 100, rest / 100, rest / 100]})
    if model == "large":
        return json.dumps({"scores": [0.0, 1.0, 0.0, 0.0] if place < 3 else [1.0, 0.0, 0.0, 0.0]})
    return "wrong answer" if model == "writer" and place < 3 else "right answer"


def _completion(body: Mapping[str, Any], place: int | None) -> Bits:
    message = {"role": "assistant", "content": _text(body["model"], place)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    if body.get("logprobs"):
        tokens = [
            {"token": word, "logprob": math.log((9.5 if place is None else place + 0.5) / 10)}
            for word in ("one", "two")
        ]
        choice["logprobs"] = {"content": tokens}
    usage = {"prompt_tokens": 200, "completion_tokens": 20, "total_tokens": 220}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "mock"}
    return {**head, "choices": [choice], "usage": usage}


def _events(text: str) -> Iterator[bytes]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
    for word in text.split():
        choice = {"index": 0, "delta": {"role": "assistant", "content": word + " "}, "finish_reason": None}
        yield b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
    yield b"data: " + json.dumps({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}).encode()
    usage = {"prompt_tokens": 200, "completion_tokens": 2, "total_tokens": 202}
    yield b"\n\ndata: " + json.dumps({**head, "choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


@contextmanager
def mock() -> Iterator[str]:
    """Yield the address of the endpoint, which runs in a thread."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Upstream)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the address of `arbitrage serve`, in a process of its own."""
    line = [sys.executable, "-m", "conformal_arbitrage", "serve", "--port", "0"]
    with (folder / "serve.log").open("wb") as errors:
        process = subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        match = re.search(r"http://\S+?(?=\. )", process.stdout.readline())
        if match is None:
            raise RuntimeError(f"the gateway did not start: {(folder / 'serve.log').read_text()[-2000:]}")
        yield match[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


def prepare(folder: Path, url: str) -> Bits:
    """Collect, calibrate and configure both policies by the command line; return the bits of their logs and rules."""
    config, bits = folder / "arbitrage.toml", Bits()
    config.write_text(_CONFIG.format(url=url))
    command("check")
    menus = [
        {"id": f"menu-{k}", "question": f"Which planet? #{k}", "choices": _OPTIONS, "answer": 0} for k in range(100)
    ]
    letters = [
        {"id": f"letter-{k}", "messages": [{"role": "user", "content": f"Say it. #{k}"}], "expected": "right answer"}
        for k in range(100)
    ]
    asked = {
        "planets": (menus, ("--answer-is", "index")),
        "letters": (letters, ("--answer-column", "expected", "--grade", "exact")),
    }
    for policy, (rows, options) in asked.items():
        questions, log = folder / f"{policy}.jsonl", folder / f"{policy}.parquet"
        questions.write_text("\n".join(map(json.dumps, rows)) + "\n")
        command("collect", questions, "-o", log, "--policy", policy, *options)
        certificate = command(
            "calibrate", log, "--boundary", "include", "--fixed-before", "-o", folder / f"{policy}.json", "--json"
        )
        with duckdb.connect(config={"threads": 1}) as connection:
            scores = connection.execute(f"select id, \"primary\", guardian from '{log}' order by id").fetchall()
        bits[policy] = {"scores": digest(repr(scores).encode()), **thresholds(certificate)}
    for policy in asked:
        shadow, certified = (
            f"[policies.{policy}]\n{line}" for line in ('mode = "shadow"', f'certificate = "{policy}.json"')
        )
        config.write_text(config.read_text().replace(shadow, certified))
    return bits


def plain(value: Any) -> Any:
    """Return a document without what differs from run to run."""
    return rounded(without({"": value}, *_VARYING)[""])


def reply(response: requests.Response) -> Bits:
    """Return what counts of a reply: status, headers, and the body, as events if it is a stream."""
    headers = {name: response.headers[name] for name in _HEADERS if name in response.headers}
    bits: Bits = {"status": response.status_code, "headers": headers}
    if "event-stream" in response.headers.get("content-type", ""):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        events = [plain(json.loads(line)) for line in lines if line != "[DONE]"]
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events if event.get("choices")]
        spoken = [event.get("delta", "") for event in events if str(event.get("type")).endswith("output_text.delta")]
        return {
            **bits,
            "events": dict(Counter(str(event.get("type") or event.get("object") or "other") for event in events)),
            "text": "".join(deltas) + "".join(spoken),
            "done": lines[-1:] == ["[DONE]"],
            "arbitrage": next((event["arbitrage"] for event in events if event.get("arbitrage")), None),
        }
    if "json" in response.headers.get("content-type", ""):
        body = response.json()
        if response.status_code >= 400:
            body["error"].pop("message", None)
        bits["body"] = plain(body)
    return bits


def figures(response: requests.Response) -> Bits:
    """Return what counts of a page: its status, and every text on it that holds a figure, with how often it is there."""
    page = re.sub(r"(?s)<(script|style|svg)\b.*?</\1>", " ", response.text)
    page = re.sub(r"127\.0\.0\.1:\d+", "HOST", page)
    texts = [" ".join(text.split()) for text in re.findall(r">([^<>]+)<", page)]
    texts = [
        text for text in texts if re.search(r"\d", text) and not re.search(r"\d{2}:\d{2}|20\d{2}|\w{26}|\bms\b", text)
    ]
    texts = [text for text in texts if len(text) <= 40 and not re.search(r"#|\d s\b|second|minute|hour|day", text)]
    return {"status": response.status_code, "figures": dict(sorted(Counter(texts).items()))}


class Caller:
    """Somebody with a key."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url
        self._session = requests.Session()
        if key:
            self._session.headers["authorization"] = f"Bearer {key}"

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> requests.Response:
        """Send a request with a JSON body, or with bytes as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        return self._session.request(method, self._url + path, data=data, headers=sent, timeout=60)

    def sign_in(self, key: str) -> "Caller":
        """Sign in to the console."""
        self._session.headers["sec-fetch-site"] = "same-origin"
        csrf = re.search(r'name="csrf" value="(\w+)"', self.page("/console/sign-in").text)
        form = {"key": key, "csrf": csrf[1] if csrf else ""}
        self._session.post(f"{self._url}/console/sign-in", data=form, timeout=60).raise_for_status()
        return self

    def page(self, path: str) -> requests.Response:
        """Ask for a page of the console."""
        return self._session.get(self._url + path, timeout=60)


def until(happened: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until something is true, and return it."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if value := happened():
            return value
        time.sleep(0.05)
    raise RuntimeError("it did not happen in time")


def menu(number: int, **more: Any) -> Bits:
    """A chat request about a menu."""
    messages = [{"role": "user", "content": f"Which planet? #{number}"}]
    return {"model": "planets", "messages": messages, "arbitrage": {"actions": _OPTIONS}, **more}


def letter(number: int, **more: Any) -> Bits:
    """A chat request in free text."""
    return {"model": "letters", "messages": [{"role": "user", "content": f"Say it. #{number}"}], **more}


def decision(number: int, model: str = "planets") -> Bits:
    """A request of the Decisions API."""
    question = {"type": "choice", "instructions": "Which?", "choices": [{"value": option} for option in _OPTIONS]}
    return {"model": model, "input": f"A planet. #{number}", "questions": [question]}


def answers(caller: Caller) -> Bits:
    """Return replies on all roads on which a model decides."""
    chat, responses = "/v1/chat/completions", "/v1/responses"
    schema = {"type": "object", "properties": {"planet": {"type": "string", "enum": _OPTIONS}}, "required": ["planet"]}
    asked = {
        "menu/primary": (chat, menu(7)),
        "menu/guardian": (chat, menu(1)),
        "menu/alias": (chat, menu(8, model="gpt-4o")),
        "menu/stream": (chat, menu(5, stream=True)),
        "menu/schema": (
            chat,
            {**without(menu(6), "arbitrage"),
             "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}},
        ),
        "menu/ignored": (chat, menu(9, temperature=0.5)),
        "text/primary": (chat, letter(7)),
        "text/guardian": (chat, letter(1)),
        "text/stream/primary": (chat, letter(8, stream=True)),
        "text/stream/guardian": (chat, letter(0, stream=True, stream_options={"include_usage": True})),
        "responses/primary": (responses, {"model": "letters", "input": "Say it. #9"}),
        "responses/guardian": (responses, {"model": "letters", "input": "Say it. #2"}),
        "responses/stream": (responses, {"model": "letters", "input": "Say it. #2", "stream": True}),
        "decisions/primary": ("/v1/decisions", decision(4)),
        "decisions/guardian": ("/v1/decisions", decision(2)),
    }  # fmt: skip
    return {name: reply(caller.ask("POST", path, body)) for name, (path, body) in asked.items()}


def refusals(caller: Caller, stranger: Caller) -> Bits:
    """Return replies to what is refused."""
    chat = "/v1/chat/completions"
    asked = {
        "no key": (stranger, "POST", chat, menu(7)),
        "not JSON": (caller, "POST", chat, b"{"),
        "unknown model": (caller, "POST", chat, menu(7, model="nobody")),
        "no messages": (caller, "POST", chat, {"model": "planets"}),
        "unknown field": (caller, "POST", chat, menu(7, surprise=1)),
        "several": (caller, "POST", chat, letter(7, n=2)),
        "pinned": (caller, "POST", chat, letter(7, temperature=0.9)),
        "stateful": (caller, "POST", "/v1/responses", {"model": "letters", "input": "x", "previous_response_id": "r"}),
        "no questions": (caller, "POST", "/v1/decisions", {"model": "planets", "input": "x", "questions": []}),
        "scope": (caller, "PUT", "/v1/arbitrage/policies/planets", {}),
        "no record": (caller, "GET", "/v1/arbitrage/records/01HZZZZZZZZZZZZZZZZZZZZZZZ", None),
        "no route": (caller, "GET", "/v1/nothing", None),
        "method": (caller, "GET", chat, None),
    }
    return {name: reply(who.ask(method, path, body)) for name, (who, method, path, body) in asked.items()}


def repeated(caller: Caller) -> Bits:
    """Return what an idempotency key does: the same bytes again, and a refusal for another body."""
    chat, bodies = "/v1/chat/completions", (menu(7), menu(7), menu(6))
    first, second, other = (caller.ask("POST", chat, body, idempotency_key="once") for body in bodies)
    return {"first": reply(first), "same bytes": first.content == second.content, "other body": reply(other)}


def people(caller: Caller, ann: Caller) -> Bits:
    """Return the road of a question that a person decides."""
    outcome: list[requests.Response] = []
    thread = threading.Thread(target=lambda: outcome.append(caller.ask("POST", "/v1/decisions", decision(1, "desk"))))
    thread.start()
    claimed = until(lambda: (taken := ann.ask("POST", "/v1/arbitrage/reviews/claim", {})).status_code == 200 and taken)
    vote = ann.ask("POST", f"/v1/arbitrage/reviews/{claimed.json()['token']}/vote", {"choice": 2})
    thread.join()
    empty = ann.ask("POST", "/v1/arbitrage/reviews/claim", {})
    return {
        "claim": sorted(claimed.json()),
        "vote": vote.status_code,
        "reply": reply(outcome[0]),
        "empty": empty.status_code,
    }


SCOPES = ("call", "admin", "review")


def create_keys() -> dict[str, str]:
    """Create a key of each scope; the reviewer's is that of a member of the team."""
    return {scope: command("keys", "create", "--scope", scope, "--label", "ann", "--json")["key"] for scope in SCOPES}


def transcript(folder: Path) -> Bits:
    """Run a gateway, and return what it replied."""
    with mock() as url:
        bits: Bits = {"prepared": prepare(folder, url)}
        keys = create_keys()
        with served(folder) as address:
            caller, admin, ann = (Caller(address, keys[scope]) for scope in SCOPES)
            stranger = Caller(address)
            bits |= answers(caller)
            bits["refused"] = refusals(caller, stranger)
            bits["repeated"] = repeated(caller)
            for number in (*range(40), 1003, 1006, 1009):
                caller.ask("POST", "/v1/decisions", decision(number)).raise_for_status()
            monitor = "/v1/arbitrage/policies/planets/monitor"
            bits["people"] = people(caller, ann)
            bits["monitor"] = _settled(lambda: reply(admin.ask("GET", monitor)))
            page = admin.ask("GET", "/v1/arbitrage/records?policy=planets&limit=5")
            bits["records"] = reply(page)
            record = page.json()["data"][-1]["id"]
            bits["record"] = reply(admin.ask("GET", f"/v1/arbitrage/records/{record}"))
            feedback = f"/v1/arbitrage/records/{record}/feedback"
            bits["feedback"] = reply(ann.ask("POST", feedback, {"comment": "well done"}))
            bits["policy"] = reply(admin.ask("GET", "/v1/arbitrage/policies/planets"))
            bits["models"] = reply(caller.ask("GET", "/v1/models"))
            bits["live"] = reply(stranger.ask("GET", "/health/live"))["status"]
            bits["ready"] = reply(stranger.ask("GET", "/health/ready"))["status"]
            visitor = Caller(address).sign_in(keys["admin"])
            pages = (
                "",
                "/policies/planets",
                "/decisions",
                "/decisions?who=guardian",
                f"/decisions/{record}",
                "/health",
            )
            for path in pages:
                bits["console" + path.replace(record, "ID")] = figures(visitor.page("/console" + path))
        bits["monitor command"] = plain(command("monitor", "planets", "--json"))
        command("records", "export", "--policy", "planets", "--score-log", "-o", folder / "exported.parquet")
        again = command("calibrate", folder / "exported.parquet", "--boundary", "include", "--fixed-before", "--json")
        bits["exported"] = thresholds(again)
        bits["verified"] = command("records", "verify", "--json").get("ok")
    return bits


def _settled(ask: Callable[[], Bits]) -> Bits:
    """Return a reply once it has stayed the same for a while: audits run in the background."""
    last, since = ask(), time.monotonic()
    ends = time.monotonic() + 60
    while time.monotonic() < min(since + 3, ends):
        time.sleep(0.2)
        if (now := ask()) != last:
            last, since = now, time.monotonic()
    return last
