"""A gateway on a free port of loopback over two scripted upstreams: `with House(folder) as house`."""

import asyncio
import hashlib
import json
import math
import threading
import time
from contextlib import AsyncExitStack, ExitStack, contextmanager
from itertools import count

import openai
import requests
import uvicorn

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.gateway import application
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.server import Connections, ServerSettings
from conformal_arbitrage.live.build import open_record
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import keys, pages
from conformal_arbitrage.store.record import new_id
from tests.scripted import Upstream, completion

SURE, UNSURE = (0.9, 0.1), (0.5, 0.4, 0.1)  # the relaxation of every certificate here is between their margins
QUESTION = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}, {"value": "c"}]}
MESSAGES = [{"role": "user", "content": "Say it."}]
DECISION = {"model": "support", "input": "A letter.", "questions": [QUESTION]}
CHAT = {"model": "support", "messages": MESSAGES}
MENU = {**CHAT, "arbitrage": {"actions": ["a", "b", "c"]}}


def votes(*shares, model="m", usage=(10, 5)):
    """An upstream of the Decisions API that gives the choices these probabilities, in their order."""

    def reply(path, body, number):
        values = [choice["value"] for choice in body["questions"][0]["choices"]]
        given = [*shares, *[0.0] * len(values)]
        listed = [{"value": v, "probability": p} for v, p in zip(values, given, strict=False)]
        tokens = {"input_tokens": usage[0], "output_tokens": usage[1]}
        return {"model": model, "answers": [{"type": "choice", "probabilities": listed}], "usage": tokens}

    return reply


def says(text, sure=None, **rest):
    """An upstream that answers with a text, with token probabilities that amount to `sure`."""
    logprobs = None if sure is None else {"content": [{"token": "t", "logprob": math.log(sure)}]}
    return lambda *_: completion(text, logprobs=logprobs, **rest)


def failing(status=500, message="it broke"):
    return lambda *_: (status, {"error": {"message": message}})


async def _hang(*_):
    await asyncio.sleep(60)


def hanging(*_):
    return _hang()


def toml(value):
    return json.dumps(value)


def section(name, values):
    return "\n".join([f"[{name}]", *(f"{key} = {toml(value)}" for key, value in values.items()), ""])


@contextmanager
def houses(folder):
    """A function that starts gateways, each in a folder of its own; all are stopped in the end."""
    numbers = count()
    with ExitStack() as started:

        def start(kind=House, **options):
            place = folder / str(next(numbers))
            place.mkdir()
            return started.enter_context(kind(place, **options))

        yield start


class House:
    """Both upstreams, a configuration in a folder with a certificate, and the gateway, which may be started again."""

    def __init__(
        self, folder, *, form="menu", primary=None, guardian=None, certificate=True, models=None, calibration=None,
        **sections,
    ):  # fmt: skip
        self.folder, self.form, self.certified = folder, form, certificate
        self.models, self.calibration = models or {}, calibration or {}
        self.sections = {"policies.support": {}, "gateway": {}, "task": {}}
        for name, values in sections.items():
            self.sections["policies.support" if name == "policy" else name] = values
        menu = form == "menu"
        self.primary = Upstream(primary or (votes(*SURE) if menu else says("mine", 0.9)))
        self.guardian = Upstream(guardian or (votes(0, 1) if menu else says("theirs")))
        self.headers, self.lines, self.clock = {}, [], time.time
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._upstreams = AsyncExitStack()
        self._serving = None
        self._listening = None

    def __enter__(self):
        self._thread.start()
        self.run(self._upstreams.enter_async_context(self.primary))
        self.run(self._upstreams.enter_async_context(self.guardian))
        self.path = self.folder / "arbitrage.toml"
        self.configure()
        self.start()
        return self

    def __exit__(self, *exc):
        self.stop()
        self.run(self._upstreams.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def run(self, work, timeout=60):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def configure(self):
        """Write the configuration, and a certificate made with these models."""
        self._write({})
        if self.certified:
            self.certificate().save(self.folder / "rule.json")
            self._write({"certificate": "rule.json"})
        self.config = read_config(self.path)

    def _write(self, first):
        kind = "decisions" if self.form == "menu" else "chat"
        parts = [section("task", {"form": self.form, **self.sections["task"]})]
        for role, upstream in (("primary", self.primary), ("guardian", self.guardian)):
            sure = {"confidence": "logprob"} if (role, kind) == ("primary", "chat") else {}
            model = {"kind": kind, "url": upstream.url, "model": "m", "price": [1.0, 1.0], "attempts": 1, **sure}
            parts += [
                section(role, {**model, **self.models.get(role, {})}),
                section(f"{role}.pinned", self.models.get(f"{role}.pinned", {})),
            ]
        parts += [section(name, values) for name, values in self.sections.items() if name.startswith("gateway")]
        policies = {name: values for name, values in self.sections.items() if name.startswith("policies.")}
        for name, values in policies.items():
            fields = {**first, **values}
            parts.append(section(name, {key: value for key, value in fields.items() if value is not None}))
        self.path.write_text("\n".join(parts))

    def certificate(self, alpha=0.05, identities=None, policy="support"):
        """A rule whose relaxation is 0.3 over menus and 0.5 in free text."""
        config = read_config(self.path)
        made_by = identities or identities_of(config, policy)
        if config.form_of(policy) == "menu":
            rows = [[0.9, 0.1, 0.0]] * 100 + [[0.6, 0.3, 0.1]] * 100
            right = [[1.0, 0.0, 0.0]] * 100 + [[0.0, 1.0, 0.0]] * 100
            log = ScoreLog.from_arrays(rows, right, id=[f"r{k}" for k in range(200)], identities=made_by)
        else:
            grades = {"primary_grade": [1.0] * 100 + [0.0] * 100, "guardian_grade": [1.0] * 200}
            made_by = {**made_by, "grader": {"kind": "exact"}}
            log = ScoreLog.from_router(confidence=[0.9] * 100 + [0.5] * 100, **grades, identities=made_by)
        return calibrate(log, alpha, **{"boundary": "include", **self.calibration}).sign(ProjectSecret.find())

    def start(self):
        ready = threading.Event()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(ready), self._loop)
        ends = time.monotonic() + 60
        while not ready.wait(0.01):
            assert time.monotonic() < ends, "the gateway did not start in time"
            if self._serving.done():
                self._serving.result()

    async def _serve(self, ready):
        metrics = Metrics()
        async with application(self.config, self.lines.append, metrics, lambda: self.clock()) as gateway:
            settings = ServerSettings(gateway.app, Connections(self.config.gateway, metrics))
            settings.port, settings.timeout_graceful_shutdown = 0, 5
            self.app, self._server = gateway.app, uvicorn.Server(settings)
            serving = asyncio.ensure_future(self._server.serve(self._listening))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            self.port = self._server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            ready.set()
            await serving

    def stop(self):
        if self._serving is not None:
            if not self._serving.done():
                self._server.should_exit = True
            self._serving.result(30)
            self._serving = None

    def restart(self):
        self.stop()
        self.start()

    def restart_on_its_port(self):
        """Start again where callers look for it, and leave open requests a second to end."""
        self._server.config.timeout_graceful_shutdown = 1
        self._listening = [self._server.servers[0].sockets[0].dup()]  # nobody else can take the port meanwhile
        self.restart()
        self._listening = None

    def with_store(self, use):
        """Open the record beside the gateway, as the command line does, and use it."""

        async def opened():
            async with await open_record(self.config) as store:
                return await use(store)

        return self.run(opened())

    def key(self, scope="call", label=""):
        """A fresh key and its id."""
        secret, name = f"arb-{scope}-{new_id()}", new_id()
        sha256 = hashlib.sha256(secret.encode()).hexdigest()
        self.with_store(lambda store: store.run(keys.create, id=name, sha256=sha256, scope=scope, label=label))
        return secret, name

    def keyed(self, scope="call"):
        """Headers with a fresh key."""
        return {"Authorization": f"Bearer {self.key(scope)[0]}"}

    def ask(self, method, path, body=None, *, headers=None, data=None, **rest):
        fields = {**({} if body is None and data is None else {"Content-Type": "application/json"}), **self.headers}
        sent = json.dumps(body).encode() if body is not None else data
        return requests.request(
            method, self.url + path, data=sent, headers={**fields, **(headers or {})}, timeout=60, **rest
        )

    def get(self, path, **rest):
        return self.ask("GET", path, **rest)

    def post(self, path, body=None, **rest):
        return self.ask("POST", path, body, **rest)

    def put(self, path, body=None, **rest):
        return self.ask("PUT", path, body, **rest)

    def decide(self, body=DECISION, **rest):
        return self.post("/v1/decisions", body, **rest)

    def chat(self, body=CHAT, **rest):
        return self.post("/v1/chat/completions", body, **rest)

    def records(self, limit=100, **filters):
        wanted = pages.RecordFilter(**filters)
        return self.with_store(lambda store: store.run(pages.records, wanted, limit=limit))

    def client(self, key="none", **rest):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **rest)

    def async_client(self, key="none", **rest):
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **rest)


def chunks(response):
    """The documents of a finished stream, without comments and [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def until(happened, seconds=60):
    """Wait until something is true, and give it."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if found := happened():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def error_of(response, status, code=None):
    """The error object of a refusal, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    return error
