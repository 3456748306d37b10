"""A gateway as a child process, models for it that keep a list of their calls, and callers that do not give up."""

import asyncio
import hashlib
import json
import os
import random
import re
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import aiohttp
import numpy as np

from conformal_arbitrage import ProjectSecret, ScoreLog, calibrate
from conformal_arbitrage.models import FunctionScorer
from conformal_arbitrage.store import pages as stored_pages

ROOT = Path(__file__).resolve().parents[2]
SECRET = "the-secret-of-these-tests"
OURS = ProjectSecret.from_text(SECRET, source="tests")
ACTIONS = ("refund", "reject", "ask")
LOST = (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError)
_NAME = re.compile(r"<(\S+)>")


def named_in(text):
    """The request's name, which every question holds in angle brackets."""
    match = _NAME.search(text)
    return None if match is None else match[1]


def numbers(role, text, count):
    """Scores that depend on the question only."""
    seed = hashlib.sha256(f"{role} {text}".encode()).digest()
    scores = np.random.default_rng(list(seed)).dirichlet(np.ones(count))
    return scores.round(6).tolist()


def _note(role, text):
    """One line in the list of calls; a single append, so that a kill leaves no half line."""
    path = os.environ.get("CALLS")
    if path is not None:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{role} {named_in(text)}\n".encode())
        os.close(file)


async def primary(query):
    _note("primary", query.text)
    await asyncio.sleep(random.uniform(0, 0.004))
    return numbers("primary", query.text, len(query.actions))


async def guardian(query):
    _note("guardian", query.text)
    await asyncio.sleep(random.uniform(0, 0.03))
    return numbers("guardian", query.text, len(query.actions))


def certificate(alpha, rows=400):
    """A certificate of these two models."""
    texts = [f"calibration {k}" for k in range(rows)]
    log = ScoreLog.from_arrays(
        *([numbers(role, text, len(ACTIONS)) for text in texts] for role in ("primary", "guardian"))
    )
    who = {f.__name__: dict(FunctionScorer(f, name=f.__name__).identity) for f in (primary, guardian)}
    object.__setattr__(log, "identities", who)
    return calibrate(log, alpha, guardian_sees="all", key=OURS.boundary_key).sign(OURS)


def write_config(folder, database, *, audit_rate=0.3, alpha=0.1):
    """A configuration of these two models; its path."""
    certificate(alpha).save(folder / "certificate.json")
    path = folder / "arbitrage.toml"
    path.write_text(f"""\
[primary]
kind = "function"
function = "tests.gateway.durability:primary"
name = "primary"
concurrency = 64

[guardian]
kind = "function"
function = "tests.gateway.durability:guardian"
name = "guardian"
concurrency = 64

[gateway]
database = "{database}"

[policies.support]
certificate = "certificate.json"
audit_rate = {audit_rate}
content = "full"
expose = "full"
""")
    return path


class Gateway:
    """`arbitrage serve` in a process of its own, on a free port; it may be killed and started again."""

    def __init__(self, config, *, errors_to=None, **environment):
        self._command = [sys.executable, "-c", "from conformal_arbitrage.cli import main; main()"]
        self._command += ["serve", "--config", str(config), "--port", "0"]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._environment = {**os.environ, "ARBITRAGE_SECRET": SECRET, "PYTHONPATH": paths, **environment}
        self._errors = Path(config).with_suffix(".log")
        self._errors_to = errors_to  # a descriptor instead of that file
        self.up = asyncio.Event()

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *exc):
        if self.process.returncode is None:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), 60)

    async def start(self):
        with self._errors.open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, cwd=ROOT, env=self._environment, stdout=asyncio.subprocess.PIPE,
                stderr=errors if self._errors_to is None else self._errors_to,
            )  # fmt: skip
        line = (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode()
        match = re.match(r"Listening on (http://\S+)\. ", line)
        assert match is not None, f"{line}\n{self._errors.read_text()[-2000:]}"
        self.url = match[1]
        self.up.set()

    async def kill(self):
        self.up.clear()
        self.process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(self.process.wait(), 60)

    @property
    def memory(self):
        """Bytes of memory in use by the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def decision_request(name, questions=1):
    body = {"type": "choice", "instructions": "What is to be done?", "choices": [{"value": a} for a in ACTIONS]}
    return "/v1/decisions", {"model": "support", "input": f"<{name}> it broke", "questions": [body] * questions}


def chat_request(name, *, stream=False):
    body = {"model": "support", "messages": [{"role": "user", "content": f"<{name}> it broke"}]}
    return "/v1/chat/completions", {**body, "arbitrage": {"actions": list(ACTIONS)}, "stream": stream}


def ids_in(status_headers, body):
    """The decisions that a reply names, as far as it was read."""
    ids = re.findall(rb'"arbitrage": ?\{"id": ?"([^"]+)"', body)
    header = status_headers.get("x-arbitrage-decision-id")
    return tuple(dict.fromkeys([*([header] if header else []), *(id.decode() for id in ids)]))


def all_records(store):
    """Every decision of a store."""

    async def read():
        found, before = [], None
        while page := await store.run(stored_pages.records, stored_pages.RecordFilter(before=before), limit=1000):
            found += page
            before = page[-1].id
        return found

    return read()


def guardian_answered(record):
    """Whether the Guardian's view is part of the decision, so that an audit need not ask for it."""
    return any(leg.role == "guardian" and leg.error is None for leg in record.decision.legs)


def decisions_by_name(records):
    """How many decisions were made for every request's name; a caller's going away is none."""
    return Counter(named_in(str(r.decision.content.context)) for r in records if r.decided_by != "cancelled")


def calls_by_name(path, role="primary"):
    """How often a model was asked for every request's name."""
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return Counter(name for who, name in lines if who == role)


def run_sql(where, statement):
    """A statement behind the store's back; its rows, if it has any."""
    if where.startswith("postgres"):
        import psycopg

        with psycopg.connect(where, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []
    with closing(sqlite3.connect(where, isolation_level=None, timeout=30)) as connection:
        return connection.execute(statement).fetchall()


def encoded(body):
    return json.dumps(body).encode()
