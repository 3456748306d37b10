"""Renewal as it runs in production keeps the budget: decisions of a real log in a real store, renewed again and again.

Each policy is one run: its certificate comes from rows of the log drawn at random, and so does its traffic. Queries are
ordered by their margin, or by a score that every renewal learns anew.
"""

import asyncio
import time
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from conformal_arbitrage import Certificate, Features, ProjectSecret, ScoreLog, calibrate
from conformal_arbitrage.collecting.renewal import RenewablePolicy, install_successor, outlook, successor
from conformal_arbitrage.models.port import fingerprint
from conformal_arbitrage.store import events, policies
from conformal_arbitrage.store.record import AuditBody, DecisionBody, Event, new_id
from conformal_arbitrage.store.sqlite import SQLiteStore
from conformal_arbitrage.types import Leg, Spent

pytestmark = pytest.mark.proof
ALPHA, POLICIES, FIRST, RENEWALS, DAY = 0.1, 40, 50, 3, 86400.0
SECRET = ProjectSecret((b"a long enough project secret",))
IDENTITIES = {"primary": {"kind": "x", "model": "p"}, "guardian": {"kind": "x", "model": "g"}}


class Traffic:
    """Queries drawn from a log with replacement, and the long-run loss of a certificate on it."""

    def __init__(self, log, seed, **options):
        self.log, self.options = log, options
        self.rows = [log.row(k) for k in range(len(log))]
        self.margin = calibrate(log, ALPHA).apply(log).margin
        self.loss = np.array([max(row.guardian) - row.guardian[int(np.argmax(row.primary))] for row in self.rows])
        self.rng = np.random.default_rng(seed)

    def draw(self, count):
        return [self.rows[k] for k in self.rng.integers(0, len(self.rows), count)]

    def risk(self, certificate):
        if certificate.learned is not None:
            return float((self.loss * ~certificate.with_key_of(SECRET).apply(self.log).deferred).mean())
        relaxation = certificate.relaxation
        return 0.0 if relaxation is None else float((self.loss * (self.margin > relaxation)).mean())

    def certificate(self):
        rows = self.draw(FIRST)
        log = ScoreLog.from_arrays(
            [row.primary for row in rows], [row.guardian for row in rows], id=range(FIRST), identities=IDENTITIES
        )
        return calibrate(log, ALPHA, key=SECRET.boundary_key, **self.options).sign(SECRET)

    def events(self, policy, count):
        """Decisions that the audit coin drew, each with its audit."""
        for row in self.draw(count):
            id, size = new_id(), len(row.primary)
            leg = Leg(role="primary", scores=tuple(map(float, row.primary)), spent=Spent(), seconds=0.0, served="m")
            body = DecisionBody(
                legs=(leg,),
                mode="enforce",
                form="menu",
                size=size,
                audited=True,
                identities_sha256=fingerprint(IDENTITIES),
            )
            yield Event(id=id, body=body, policy=policy, key_id="k", decided_by="primary")
            yield Event(id=id, body=AuditBody(scores=tuple(map(float, row.guardian))))


async def risks(store, traffic, name):
    """Return the long-run losses of a policy's certificates, from the first to the last renewal."""
    policy = RenewablePolicy(name=name, identities=IDENTITIES, human_guardian=False, secret=SECRET)
    await store.run(policies.install, name, traffic.certificate().to_dict(with_arrays=True), by="test")
    await asyncio.sleep(0.003)  # rows count from the millisecond after
    rows = 0
    for renewal in range(1, RENEWALS + 1):
        await store.run(events.commit, list(traffic.events(name, FIRST * 2 ** (renewal - 1) - rows)))
        rows = FIRST * 2 ** (renewal - 1)
        ahead = await outlook(store, policy, now=time.time() + 2 * DAY)
        assert (ahead.renewal, ahead.due) == (renewal, True)
        await install_successor(store, ahead, await successor(store, policy, ahead), by="test")
    history = await store.run(policies.history, name)
    return [traffic.risk(Certificate.from_dict(dict(version.certificate))) for version in reversed(history)]


@pytest.fixture(scope="module", params=["margin", "learned"])
def chains(request, tmp_path_factory):
    """The long-run losses of the certificates of every policy, policies x certificates."""
    science = files("conformal_arbitrage") / "data" / "science.parquet"
    log = ScoreLog.read(str(science), primary="qwen15b", guardian="expert")
    if request.param == "learned":
        some = replace(log.select(np.flatnonzero(log.sizes == 4)[:400]), group=None)
        traffic = Traffic(some, seed=13, score="auto", features=Features(menu_size=4))
    else:
        traffic = Traffic(log, seed=12)

    async def whole():
        store = SQLiteStore(str(tmp_path_factory.mktemp("renewal") / "store.db"), keys=SECRET.record_keys)
        try:
            return [await risks(store, traffic, f"p{k}") for k in range(POLICIES)]
        finally:
            await store.close()

    return np.array(asyncio.run(whole()))


def within(risks):
    return risks.mean() <= ALPHA + 4 * risks.std() / len(risks) ** 0.5


def test_certificates_renewed_from_records_keep_the_budget_of_all_decisions(chains):
    assert chains.shape == (POLICIES, RENEWALS + 1)
    served = FIRST * np.array([1, 1, 2, 4])  # rows, and so decisions, under each certificate
    mean = np.average(chains, axis=1, weights=served)
    assert within(mean)
    assert mean.mean() > 0.9 * ALPHA


def test_keeping_the_cheaper_of_the_same_certificates_is_caught(chains):
    cheaper = np.maximum.accumulate(chains, axis=1)[:, 1:].mean(axis=1)
    assert not within(cheaper)
