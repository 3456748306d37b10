"""A world whose Primary gets worse by a factor of three at a known question, and callers that ask in its order."""

import asyncio
import os
import time

import numpy as np

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.models import FunctionScorer
from conformal_arbitrage.monitoring.evidence import log_evidence
from tests.gateway.durability import OURS, encoded, named_in

ALPHA, RATE, WORSE, UNSURE = 0.05, 0.04, 3.0, 0.4
ACTIONS = ("refund", "reject", "ask")
_CHANGE, _SEED = "DEGRADES_AT", "WORLD_SEED"


def world(number):
    """Who is right about a question, whether the Primary is sure, and whether it is wrong; fixed by number and seed."""
    sure, wrong, right = np.random.default_rng([int(os.environ.get(_SEED, "0")), number]).random(3)
    rate = RATE * (WORSE if number >= int(os.environ.get(_CHANGE, str(2**40))) else 1.0)
    is_sure = sure >= UNSURE
    chance = rate / (1 - UNSURE) if is_sure else 0.5
    return int(right * 3), is_sure, wrong < chance


def primary_scores(number):
    right, sure, wrong = world(number)
    order = [(right + wrong + k) % 3 for k in range(3)]
    scores = [0.0] * 3
    for place, score in zip(order, (0.9, 0.1, 0.0) if sure else (0.5, 0.4, 0.1), strict=True):
        scores[place] = score
    return scores


def guardian_scores(number):
    return [float(k == world(number)[0]) for k in range(3)]


def number_in(query):
    return int(named_in(query.text))


async def primary(query):
    return primary_scores(number_in(query))


async def guardian(query):
    return guardian_scores(number_in(query))


def certificate(rows=2000):
    """A certificate of these two models, from questions before all others."""
    numbers = range(10_000_000, 10_000_000 + rows)
    who = {f.__name__: dict(FunctionScorer(f, name=f.__name__).identity) for f in (primary, guardian)}
    log = ScoreLog.from_arrays(
        [primary_scores(k) for k in numbers], [guardian_scores(k) for k in numbers], identities=who
    )
    return calibrate(log, ALPHA, guardian_sees="all").sign(OURS)


def write_config(folder, database, *, audit_rate):
    certificate().save(folder / "certificate.json")
    path = folder / "arbitrage.toml"
    models = "".join(
        f'[{role}]\nkind = "function"\nfunction = "tests.gateway.degrading:{role}"\nname = "{role}"\nconcurrency = 64\n'
        for role in ("primary", "guardian")
    )
    policy = f'[policies.support]\ncertificate = "certificate.json"\naudit_rate = {audit_rate}\ncontent = "full"\n'
    path.write_text(f'{models}[gateway]\ndatabase = "{database}"\n{policy}')
    return path


def environment(change, seed=0):
    return {_CHANGE: str(change), _SEED: str(seed)}


def questions(first, count):
    """A request with a number of questions."""
    choices = [{"value": action} for action in ACTIONS]
    asked = [
        {"type": "choice", "instructions": f"<{number}> What is to be done?", "choices": choices}
        for number in range(first, first + count)
    ]
    return {"model": "support", "input": "It broke.", "questions": asked}


async def ask(session, url, first, count):
    """Ask a number of questions at once; return who decided each."""
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/decisions", data=encoded(questions(first, count)), headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return [answer["arbitrage"]["decided_by"] for answer in (await reply.json())["answers"]]


async def monitor(session, url):
    async with session.get(f"{url}/v1/arbitrage/policies/support/monitor") as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def settled(session, url, count, seconds=120.0):
    """Wait until the losses of so many audits are known, or the policy is in safe mode; return where it stands."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        shown = await monitor(session, url)
        if shown["mode"] == "safe" or (shown.get("audits") and shown["audits"]["known"] >= count):
            return shown
        await asyncio.sleep(0.02)
    raise AssertionError(f"fewer than {count} losses are known after {seconds} s: {shown}")


def crossing(losses, lines):
    """The number of the audit with which the evidence against the red line is first enough."""
    blocks = len(losses) // lines["block"]
    means = np.asarray(losses[: blocks * lines["block"]]).reshape(blocks, lines["block"]).mean(axis=1)
    crossed = log_evidence(means[:, None], lines["red"])[:, 0] >= np.log(40.0)
    return (int(crossed.argmax()) + 1) * lines["block"] if crossed.any() else None


def longest_delay(lines, before, *, share=0.9, runs=1000, after=4000):
    """The audits from the change to red that this share of such worlds stays within, by simulation."""
    rng = np.random.default_rng(7)
    rates = np.concatenate([np.full(before, RATE), np.full(after, WORSE * RATE)])
    losses = rng.random((len(rates), runs)) < rates[:, None]
    blocks = len(rates) // lines["block"]
    means = losses[: blocks * lines["block"]].reshape(blocks, lines["block"], runs).mean(axis=1)
    crossed = log_evidence(means, lines["red"]) >= np.log(40.0)
    first = np.where(crossed.any(axis=0), crossed.argmax(axis=0) + 1.0, np.inf) * lines["block"]
    return float(np.quantile(first, share, method="higher")) - before
