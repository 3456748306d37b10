"""Renewal on a real store: what is due, on which rows, what is installed; every certificate is recomputed from its rows."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import Certificate, Features, ProjectSecret, ScoreLog, calibrate, verify
from conformal_arbitrage.calibration.certificate import document_sha256, group_source_of
from conformal_arbitrage.calibration.schedule import preferred_to
from conformal_arbitrage.collecting.renewal import (
    RenewablePolicy,
    import_log,
    install_successor,
    looked_at_successor,
    outlook,
    successor,
    tighter,
)
from conformal_arbitrage.errors import CertificateError, ConfigError, OptionError, StoreError
from conformal_arbitrage.models.port import fingerprint
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import policies
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.record import AlarmBody, AuditBody, DecisionBody, Event, FeedbackBody, Grades, new_id
from conformal_arbitrage.store.sqlite import SQLiteStore
from conformal_arbitrage.types import Leg, Spent

SECRET = ProjectSecret((b"a long enough project secret",))
IDENTITIES = {"primary": {"kind": "x", "model": "p"}, "guardian": {"kind": "x", "model": "g"}}
POLICY = RenewablePolicy(name="support", identities=IDENTITIES, human_guardian=False, secret=SECRET)
ALPHA, N, DAY = 0.1, 40, 86400.0
EXACT = {"kind": "exact"}


class World:
    """A store with a policy, and live rows drawn from one distribution; time passes by asking later."""

    def __init__(self, store, seed=0, loss=0.3):
        self.store, self.rng, self.loss = store, np.random.default_rng(seed), loss

    def collected(self, n=N, **options):
        """A log, and the certificate made from it, signed."""
        primary, guardian = self.scores(n)
        log = ScoreLog.from_arrays(primary, guardian, id=[f"c{k}" for k in range(n)], identities=IDENTITIES)
        return log, calibrate(log, ALPHA, **{"boundary": "include", **options}).sign(SECRET)

    def scores(self, n):
        margin = np.round(self.rng.random(n), 3)
        lost = self.rng.random(n) < self.loss * (1 - margin)
        return np.stack([margin, np.zeros(n)], axis=1), np.where(lost[:, None], [0.0, 1.0], [1.0, 0.0])

    async def install(self, certificate):
        return await self.store.run(policies.install, "support", certificate.to_dict(with_arrays=True), by="test")

    async def arrive(self, n, *, unknown=(), sleep=True, groups=None):
        """Record audited decisions, each with its audit unless that is unknown; return their scores."""
        if sleep:
            await asyncio.sleep(0.01)  # ids have milliseconds, and rows count from an installation on
        primary, guardian = self.scores(n)
        for k in range(n):
            id = new_id()
            leg = Leg(role="primary", scores=tuple(primary[k].tolist()), spent=Spent(), seconds=0.0, served="m")
            body = DecisionBody(
                legs=(leg,),
                mode="enforce",
                form="menu",
                size=2,
                audited=True,
                identities_sha256=fingerprint(IDENTITIES),
                group=None if groups is None else groups[k],
            )
            events = [Event(id=id, body=body, policy="support", key_id="k", decided_by="primary")]
            if k not in unknown:
                events.append(Event(id=id, body=AuditBody(scores=tuple(guardian[k].tolist()))))
            await self.store.run(stored_events.commit, events)
        guardian[list(unknown)] = np.nan
        return primary, guardian

    async def ahead(self, days=2.0, policy=POLICY):
        return await outlook(self.store, policy, now=time.time() + days * DAY)

    async def renew(self, days=2.0):
        ahead = await self.ahead(days)
        next = await successor(self.store, POLICY, ahead)
        return next, await install_successor(self.store, ahead, next, by="test")

    async def alarm(self, version):
        body = AlarmBody(
            version=version, lifts=0, identities_sha256=fingerprint(IDENTITIES), cause="losses", audits=1, known=1,
            missing=0, line=0.2, log_evidence=4.0,
        )  # fmt: skip
        assert await self.store.run(policies.raise_alarm, "support", body)
        await asyncio.sleep(0.01)


@pytest.fixture(params=["sqlite", "postgres"])
def world(request, tmp_path):
    """A function that runs a test's body on a world of its own, in both databases."""
    if request.param == "sqlite":
        store = SQLiteStore(str(tmp_path / "store.db"), keys=SECRET.record_keys)
    else:
        store = PostgresStore(request.getfixturevalue("server").new_database(), keys=SECRET.record_keys)

    def run(body, **options):
        async def whole():
            try:
                return await body(World(store, **options))
            finally:
                await store.close()

        return asyncio.run(whole())

    return run


def expected(primary, guardian, alpha=ALPHA, **options):
    return calibrate(ScoreLog.from_arrays(primary, guardian), alpha, missing_guardian="worst_case", **options)


def test_a_chain_follows_its_schedule_on_exactly_the_first_rows(world):
    async def body(world):
        _, root = world.collected()
        await world.install(root)
        primary, guardian = await world.arrive(N - 1)
        assert not (await world.ahead()).due
        with pytest.raises(StoreError, match="takes 40 rows whose outcomes are due, and there are 39"):
            await successor(world.store, POLICY, await world.ahead())
        more = await world.arrive(4 * N, sleep=False)
        primary, guardian = np.concatenate([primary, more[0]]), np.concatenate([guardian, more[1]])
        assert not (await world.ahead(days=0.5)).due  # the outcomes are known, and not due: time may not depend on them
        ahead = await world.ahead()
        assert (ahead.renewal, ahead.rows, ahead.arrived, ahead.due, ahead.step) == (3, 160, 199, True, "scheduled")
        next, version = await world.renew()
        assert version.version == 2
        first = expected(primary[:160], guardian[:160])
        assert (next.certificate.n, next.certificate.relaxation) == (160, first.relaxation)
        assert next.certificate.alpha == ALPHA
        assert next.certificate.ancestry.root_sha256 == document_sha256(root.to_dict())
        assert verify(next.certificate, next.log).ok
        next.certificate.check_signature(SECRET)
        assert (await world.ahead()).renewal == 4
        assert not (await world.ahead()).due
        assert await install_successor(world.store, ahead, next, by="another gateway") is None
        return await world.store.run(policies.history, "support")

    assert [version.version for version in world(body)] == [2, 1]


def test_rows_of_which_nothing_is_known_when_they_are_due_count_as_the_worst_case(world):
    async def body(world):
        await world.install(world.collected()[1])
        primary, guardian = await world.arrive(N, unknown=(3, 7))
        next, _ = await world.renew()
        assert next.certificate.evidence.missing_guardian_rows == 2
        assert next.certificate.relaxation == expected(primary, guardian).relaxation
        known = ~np.isnan(guardian).any(axis=1)
        assert (
            next.certificate.relaxation
            >= calibrate(ScoreLog.from_arrays(primary[known], guardian[known]), ALPHA).relaxation
        )

    world(body)


def test_an_imported_log_joins_the_first_renewal_only(world, tmp_path):
    async def body(world):
        log, root = world.collected()
        log.write(tmp_path / "log.parquet")
        await world.install(root)
        assert await import_log(world.store, POLICY, tmp_path / "log.parquet") is None
        assert await import_log(world.store, POLICY, tmp_path / "log.parquet") is None
        primary, guardian = await world.arrive(N)
        next, _ = await world.renew()
        both = [
            np.concatenate(pair)
            for pair in zip((log.primary.reshape(-1, 2), log.guardian.reshape(-1, 2)), (primary, guardian), strict=True)
        ]
        assert next.certificate.n == 2 * N
        assert next.certificate.ancestry.collected == N
        assert next.certificate.relaxation == expected(*both).relaxation
        more = await world.arrive(N)
        second, _ = await world.renew()
        live = [np.concatenate(pair) for pair in zip((primary, guardian), more, strict=True)]
        assert (second.certificate.n, second.certificate.ancestry.collected) == (2 * N, 0)
        assert second.certificate.relaxation == expected(*live).relaxation
        assert second.certificate.ancestry.predecessor_sha256 == document_sha256(next.certificate.to_dict())

    world(body)


def test_a_log_that_comes_after_rows_to_look_at_or_is_another_one_is_not_imported(world, tmp_path):
    async def body(world):
        log, root = world.collected()
        log.write(tmp_path / "log.parquet")
        world.collected()[0].write(tmp_path / "other.parquet")
        await world.install(root)
        with pytest.raises(ConfigError, match="is not the log that a certificate of this policy was made from"):
            await import_log(world.store, POLICY, tmp_path / "other.parquet")
        await world.arrive(1)
        assert "1 row has arrived" in await import_log(world.store, POLICY, tmp_path / "log.parquet")
        assert (await world.ahead()).collected == 0

    world(body)


def test_after_an_alarm_only_the_rows_since_then_count(world):
    async def body(world):
        await world.install(world.collected()[1])
        await world.arrive(3 * N)
        await world.alarm(1)
        primary, guardian = await world.arrive(98)
        ahead = await world.ahead()
        assert (ahead.step, ahead.rows, ahead.arrived, ahead.due) == ("after red", 99, 98, False)
        with pytest.raises(StoreError, match="had an alarm"):
            await tighter(world.store, POLICY, ahead, now=time.time())
        more = await world.arrive(1, sleep=False)
        next, _ = await world.renew()
        rows = [np.concatenate(pair) for pair in zip((primary, guardian), more, strict=True)]
        assert next.certificate.ancestry.step == "after red"
        assert (next.certificate.n, next.certificate.relaxation) == (99, expected(*rows).relaxation)
        after = await world.ahead()
        assert (after.step, after.renewal, after.rows, after.due) == ("scheduled", 2, 198, False)
        assert not after.chain.alarmed

    world(body)


def test_tightening_raises_the_relaxation_and_the_schedule_goes_on(world):
    async def body(world):
        await world.install(world.collected(200)[1])
        world.loss = 0.7
        await world.arrive(60, unknown=(59,))
        ahead = await world.ahead(days=0.0)
        next = await tighter(world.store, POLICY, ahead, now=time.time())
        assert next.log.missing.sum() == 0  # not due yet, so it does not count
        assert next.certificate.relaxation > ahead.certificate.relaxation
        assert next.certificate.n == 200
        await install_successor(world.store, ahead, next, by="test")
        after = await world.ahead()
        assert (after.version, after.renewal, after.rows, after.arrived) == (2, 1, 200, 60)
        with pytest.raises(StoreError, match="no rows since version 2"):
            await tighter(world.store, POLICY, after, now=time.time())
        await world.arrive(140)
        scheduled, _ = await world.renew()
        assert scheduled.certificate.ancestry.step == "scheduled"
        assert scheduled.certificate.n == 200

    world(body)


def test_rows_that_ask_for_no_larger_relaxation_change_nothing(world):
    async def body(world):
        world.loss = 0.9
        await world.install(world.collected(200)[1])
        world.loss = 0.0
        await world.arrive(100)
        assert await tighter(world.store, POLICY, await world.ahead(), now=time.time()) is None

    world(body)


def test_after_looking_the_certificate_says_that_it_has_no_guarantee(world):
    async def body(world):
        await world.install(world.collected()[1])
        with pytest.raises(StoreError, match="no rows fit for calibration"):
            await looked_at_successor(world.store, POLICY, await world.ahead())
        await world.arrive(N // 2)
        ahead = await world.ahead()
        next = await looked_at_successor(world.store, POLICY, ahead)
        assert next.certificate.n == N // 2
        assert next.certificate.guarantee.startswith("There is no guarantee")
        await install_successor(world.store, ahead, next, by="test")
        with pytest.raises(OptionError, match="installed after looking"):
            await tighter(world.store, POLICY, await world.ahead(), now=time.time())
        await world.arrive(N // 2)
        scheduled, _ = await world.renew()
        assert scheduled.certificate.ancestry.no_guarantee is None
        assert scheduled.certificate.n == N

    world(body)


def test_options_of_the_certificate_in_force_are_kept(world):
    async def body(world):
        _, root = world.collected(60, boundary="random", key=SECRET.boundary_key, confidence=0.9)
        await world.install(root)
        await world.arrive(60)
        next, _ = await world.renew()
        certificate = next.certificate
        assert (certificate.boundary, certificate.confidence, certificate.alpha) == ("random", 0.9, ALPHA)
        assert certificate.provenance.key_sha256 == root.provenance.key_sha256
        assert certificate.identities == root.identities
        assert "of each certificate by itself" in certificate.guarantee
        assert verify(certificate.with_key_of(SECRET), next.log).ok

    world(body)


def test_a_score_learned_from_what_rows_hold_is_learned_anew(world, tmp_path):
    async def body(world):
        learned = {"boundary": "random", "key": SECRET.boundary_key, "score": "auto", "features": Features(menu_size=2)}
        log, root = world.collected(60, **learned)
        log.write(tmp_path / "log.parquet")
        await world.install(root)
        assert await import_log(world.store, POLICY, tmp_path / "log.parquet") is None
        primary, guardian = await world.arrive(60)
        first, _ = await world.renew()
        more = await world.arrive(60)
        second, version = await world.renew()
        assert [next.certificate.n for next in (first, second)] == [120, 120]
        assert second.certificate.ancestry.predecessor_sha256 == document_sha256(first.certificate.to_dict())
        assert Certificate.from_dict(dict(version.certificate)).fit.packed == second.certificate.fit.packed
        history = {one.version: one.certificate for one in await world.store.run(policies.history, "support")}
        assert [preferred_to(history, number) for number in (2, 3)] == [None, None]
        rows = [np.concatenate(pair) for pair in zip((primary, guardian), more, strict=True)]
        certificate = second.certificate.with_key_of(SECRET)
        again = calibrate(replace(second.log, identities=None), ALPHA, missing_guardian="worst_case", **learned)
        assert second.log.primary.reshape(-1, 2) == pytest.approx(rows[0])
        assert certificate.learned.sha256 == again.learned.sha256
        assert verify(certificate, second.log).ok
        grouped = replace(log, group=np.array(["a", "b"] * 30, dtype=object))
        certificate = calibrate(grouped, ALPHA, **{**learned, "features": None}).sign(SECRET)
        await world.install(certificate)
        with pytest.raises(OptionError, match=r"renewal and learned .* no answers, texts, groups"):
            await world.ahead()

    world(body)


def test_rows_of_other_models_and_certificates_that_cannot_be_renewed_do_not_count(world):
    async def body(world):
        await world.arrive(2)
        with pytest.raises(StoreError, match="has no certificate to renew"):
            await world.ahead()
        log, root = world.collected()
        await world.install(root)
        await world.arrive(N)
        other = RenewablePolicy(
            name="support", identities={**IDENTITIES, "guardian": {"kind": "y"}}, human_guardian=False, secret=SECRET
        )
        assert (await world.ahead(policy=other)).arrived == 0
        clustered = ScoreLog.from_arrays(
            log.primary.reshape(-1, 2), log.guardian.reshape(-1, 2), group=["a", "b"] * (N // 2), identities=IDENTITIES
        )
        await world.install(calibrate(clustered, ALPHA, cluster="group", max_cluster_size=N // 2).sign(SECRET))
        with pytest.raises(OptionError, match="renewal and cluster do not go together"):
            await world.ahead()
        await world.store.run(policies.install, "support", {"rule": {"type": "path"}}, by="test")
        with pytest.raises(OptionError, match="renewal and path do not go together"):
            await world.ahead()
        await world.install(calibrate(log, ALPHA))
        with pytest.raises(CertificateError, match="is unsigned"):
            await world.ahead()

    world(body)


def with_tenants(log, names):
    return replace(log, extra={"tenant": np.array(names, dtype=object)})


def test_groups_are_renewed_each_on_its_own_rows(world):
    async def body(world):
        primary, guardian = world.scores(N)
        names = ["a", "b", "c", "c"] * (N // 4)
        log = with_tenants(
            ScoreLog.from_arrays(primary, guardian, id=[f"c{k}" for k in range(N)], identities=IDENTITIES), names
        )
        root = calibrate(log, ALPHA, by="tenant", boundary="include", group_source="metadata.tenant").sign(SECRET)
        await world.install(root)
        live = ["a", "b", "made up", None] * (N // 4)
        own = [k for k, name in enumerate(live) if name in root.groups]
        scores, verdicts = await world.arrive(N, groups=live)
        next, version = await world.renew()
        certificate = Certificate.from_dict(dict(version.certificate))
        assert (certificate.n, set(certificate.groups)) == (N // 2, {"a", "b"})
        assert group_source_of(certificate) == "metadata.tenant"
        assert certificate.ancestry.renewal == 1
        assert "for every decision of a group, fixed in advance" in certificate.guarantee
        again = with_tenants(
            ScoreLog.from_arrays(scores[own], verdicts[own], identities=IDENTITIES), [live[k] for k in own]
        )
        expected = calibrate(again, ALPHA, by="tenant", boundary="include")
        assert {n: g.relaxation for n, g in certificate.groups.items()} == {
            n: g.relaxation for n, g in expected.groups.items()
        }
        assert verify(certificate, next.log).ok
        await world.arrive(N, groups=["c"] * N)  # "c" has no rows for a while, and comes back
        _, version = await world.renew()
        assert set(Certificate.from_dict(dict(version.certificate)).groups) == {"a", "b", "c"}
        await world.alarm(version.version)
        assert (await world.ahead()).rows == 3 * 99  # ten times what each of its groups needs

    world(body)


def test_rows_of_groups_that_nobody_certified_renew_nothing(world):
    async def body(world):
        primary, guardian = world.scores(N)
        log = ScoreLog.from_arrays(primary, guardian, group=["a"] * N, identities=IDENTITIES)
        await world.install(calibrate(log, ALPHA, by="group", boundary="include").sign(SECRET))
        await world.arrive(N, groups=[f"made up {k}" for k in range(N)])
        with pytest.raises(StoreError, match="none of the rows is of a group that a certificate has"):
            await world.renew()

    world(body)


def test_the_log_of_groups_joins_the_first_renewal(world, tmp_path):
    async def body(world):
        primary, guardian = world.scores(N)
        names, path = ["a", "b"] * (N // 2), tmp_path / "log.parquet"
        log = ScoreLog.from_arrays(
            primary, guardian, id=[f"c{k}" for k in range(N)], group=names, identities=IDENTITIES
        )
        log.write(path)
        await world.install(calibrate(log, ALPHA, by="group", boundary="include").sign(SECRET))
        assert await import_log(world.store, POLICY, path) is None
        await world.arrive(N, groups=["b", "b"] * (N // 2))
        next, version = await world.renew()
        certificate = Certificate.from_dict(dict(version.certificate))
        assert {name: group.n for name, group in certificate.groups.items()} == {"a": N // 2, "b": N + N // 2}
        assert certificate.ancestry.collected == N
        assert verify(certificate, next.log).ok

    world(body)


def test_people_have_two_weeks(world):
    async def body(world):
        await world.install(world.collected()[1])
        await world.arrive(N)
        people = RenewablePolicy(name="support", identities=IDENTITIES, human_guardian=True, secret=SECRET)
        assert [(await world.ahead(days=days, policy=people)).due for days in (13.9, 14.1)] == [False, True]

    world(body)


def text_body(confidence):
    leg = Leg(role="primary", scores=(confidence,), spent=Spent(), seconds=0.0, served="m")
    return DecisionBody(legs=(leg,), mode="shadow", form="text", size=2, identities_sha256=fingerprint(IDENTITIES))


def test_in_free_text_both_answers_are_graded_by_the_certificates_grader_or_the_row_is_missing(world, tmp_path):
    confidence = [0.9, 0.8, 0.7, 0.6] * 10
    own = [1.0, 0.5, 1.0, 0.25] * 10

    async def body(world):
        log = ScoreLog.from_router(
            confidence=confidence,
            primary_grade=own,
            guardian_grade=[1.0] * 40,
            identities={**IDENTITIES, "grader": EXACT},
        )
        log.write(tmp_path / "log.parquet")
        root = calibrate(log, 0.2, boundary="include").sign(SECRET)
        await world.install(root)
        assert await import_log(world.store, POLICY, tmp_path / "log.parquet") is None
        await asyncio.sleep(0.01)
        graders = [EXACT] * 37 + [{"kind": "other"}, None]
        for k in range(40):
            id = new_id()
            await world.store.run(
                stored_events.commit,
                [Event(id=id, body=text_body(confidence[k]), policy="support", key_id="k", decided_by="guardian")],
            )
            if k < len(graders):
                grades = FeedbackBody(grades=Grades(primary=own[k], guardian=1.0), grader=graders[k])
                await world.store.run(stored_events.commit, [Event(id=id, body=grades)])
        assert not (await world.ahead(days=13)).due
        next, _ = await world.renew(days=15)
        assert next.certificate.evidence.router
        assert next.certificate.n == 80
        assert next.certificate.evidence.missing_guardian_rows == 3
        assert next.certificate.identities["grader"] == EXACT
        regret = [*own, *own[:37], *[np.nan] * 3]
        both = ScoreLog.from_router(confidence=confidence * 2, primary_grade=regret, guardian_grade=[1.0] * 80)
        assert next.certificate.relaxation == calibrate(both, 0.2, missing_guardian="worst_case").relaxation

    world(body)


def test_a_binarized_certificate_is_renewed_by_labels(world, tmp_path):
    async def body(world):
        primary, guardian = world.scores(N)
        label = guardian.argmax(axis=1)
        log = ScoreLog.from_arrays(primary, guardian, id=range(N), label=label, identities=IDENTITIES)
        log.write(tmp_path / "log.parquet")
        await world.install(calibrate(log.binarized(), ALPHA, boundary="include").sign(SECRET))
        assert await import_log(world.store, POLICY, tmp_path / "log.parquet") is None
        await asyncio.sleep(0.01)
        live = world.scores(N)
        for k in range(N):
            id = new_id()
            leg = Leg(role="primary", scores=tuple(live[0][k].tolist()), spent=Spent(), seconds=0.0, served="m")
            whole = DecisionBody(
                legs=(leg,), mode="shadow", form="menu", size=2, identities_sha256=fingerprint(IDENTITIES)
            )
            await world.store.run(
                stored_events.commit,
                [
                    Event(id=id, body=whole, policy="support", key_id="k", decided_by="guardian"),
                    Event(id=id, body=AuditBody(scores=tuple(live[1][k].tolist()))),
                    *([Event(id=id, body=FeedbackBody(label=int(live[1][k].argmax())))] if k else []),
                ],
            )
        next, _ = await world.renew(days=15)
        assert next.certificate.loss.binarized
        assert next.certificate.n == 2 * N
        assert next.certificate.evidence.missing_guardian_rows == 1
        assert Certificate.from_dict(next.certificate.to_dict()) == next.certificate

    world(body)
