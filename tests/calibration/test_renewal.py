from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import Certificate, ProjectSecret, ScoreLog, calibrate, verify
from conformal_arbitrage.calibration.certificate import document_sha256
from conformal_arbitrage.calibration.promises import Ancestry, CalibratedThreshold, Learned, PerSession
from conformal_arbitrage.calibration.schedule import (
    RenewalChain,
    chain_of,
    refuse_renewal,
    refuse_tightening,
    renewed,
    rows_after_alarm,
    tightened,
)
from conformal_arbitrage.calibration.sentences import chain_facts
from conformal_arbitrage.errors import CertificateError, OptionError
from tests.certificates import altered

SECRET = ProjectSecret((b"a long enough project secret",))


def log_of(n, seed=0, loss=0.3, **columns):
    """A log in which the Primary loses with probability loss (1 - margin)."""
    rng = np.random.default_rng(seed)
    margin = rng.random(n)
    lost = rng.random(n) < loss * (1 - margin)
    guardian = np.where(lost[:, None], [0.0, 1.0], [1.0, 0.0])
    return ScoreLog.from_arrays(np.stack([margin, np.zeros(n)], axis=1), guardian, id=range(n), **columns)


def chain(**changed):
    return RenewalChain(**{"root_sha256": "r" * 64, "since": 1000.0, "first": 100, **changed})


def test_renewals_are_due_at_doubled_numbers_of_rows():
    assert [chain().rows(k) for k in (1, 2, 3, 4)] == [100, 200, 400, 800]
    assert [chain().due(rows) for rows in (0, 99, 100, 199, 200, 399, 400)] == [None, None, 1, 1, 2, 2, 3]
    assert chain(renewal=2).due(399) is None
    assert chain(renewal=2).due(400) == 3


def test_a_certificate_without_ancestry_begins_a_chain():
    certificate = calibrate(log_of(300), 0.1)
    begun = chain_of(certificate, installed=50.0)
    assert begun == RenewalChain(root_sha256=document_sha256(certificate.to_dict()), since=50.0, first=300)
    assert chain_of(certificate, installed=50.0, alarm=49.0) == begun  # of an earlier certificate


def test_a_renewal_goes_on_with_the_chain_and_says_its_sentence():
    root = calibrate(log_of(100), 0.1)
    begun = chain_of(root, installed=50.0)
    first = renewed(calibrate(log_of(200, 1), 0.1), root, begun, step="scheduled", renewal=1, collected=100).sign(
        SECRET
    )
    assert Certificate.from_dict(first.to_dict()) == first
    assert "for every decision, fixed in advance, the expected loss over calibrations and queries is at most 0.1" in (
        first.guarantee
    )
    assert "together with the 100 rows of the log that the chain began with" in first.guarantee
    assert dict(first.facts())["schedule"] == "the next renewal takes 200 rows since 1970-01-01T00:00:50+00:00"
    assert chain_of(first, installed=99.0) == replace(begun, renewal=1)
    second = renewed(
        calibrate(log_of(200, 2), 0.1), first, chain_of(first, installed=99.0), step="scheduled", renewal=2
    )
    assert second.ancestry.predecessor_sha256 == document_sha256(first.to_dict())
    assert second.ancestry.root_sha256 == document_sha256(root.to_dict())
    assert verify(second, log_of(200, 2)).ok
    assert verify(first, log_of(200, 1)).ok
    assert set(verify(first, log_of(200, 3)).differences) >= {"log_sha256"}


def test_with_a_confidence_each_certificate_of_a_chain_has_it_and_not_all_together():
    root = calibrate(log_of(200), 0.1, confidence=0.9, zero_one=True)
    next = renewed(
        calibrate(log_of(200, 1), 0.1, confidence=0.9, zero_one=True), root, chain_of(root, installed=1.0),
        step="scheduled", renewal=1,
    )  # fmt: skip
    assert "of each certificate by itself, not of all of them together" in next.guarantee
    assert "fixed in advance, the expected loss" not in next.guarantee


def test_an_alarm_begins_a_new_chain_on_the_rows_after_it():
    root = calibrate(log_of(100), 0.1)
    alarmed = chain_of(root, installed=50.0, alarm=60.0)
    assert (alarmed.alarmed, alarmed.since, alarmed.first, alarmed.renewal) == (True, 60.0, 99, 0)
    after = renewed(calibrate(log_of(99), 0.1), root, alarmed, step="after red", renewal=1)
    assert "began after an alarm: only rows since then count" in after.guarantee
    assert after.ancestry.root_sha256 == after.ancestry.predecessor_sha256
    assert not chain_of(after, installed=70.0, alarm=60.0).alarmed
    assert chain_of(after, installed=70.0, alarm=61.0).alarmed


def test_a_confidence_needs_its_own_rows_after_an_alarm():
    sure = calibrate(log_of(400), 0.1, confidence=0.9, zero_one=True)
    surest = calibrate(log_of(400), 0.1, confidence=0.9999999, zero_one=True)
    assert rows_after_alarm(sure) == 99
    assert rows_after_alarm(surest) == 153


def test_tightening_keeps_rows_budget_and_log_and_raises_the_relaxation():
    log = log_of(300)
    root = calibrate(log, 0.1)
    begun = chain_of(root, installed=50.0)
    harder = calibrate(log_of(300, 1, loss=0.6), 0.1)
    tight = tightened(root, harder, 1.0, begun)
    assert tight.relaxation == harder.relaxation > root.relaxation
    assert tight.evidence == root.evidence
    assert tight.ancestry.calibrated == CalibratedThreshold(relaxation=root.relaxation, boundary_u=root.boundary_u)
    assert "what is promised for the smaller one holds for the larger one" in tight.guarantee
    assert Certificate.from_dict(tight.to_dict()) == tight
    assert verify(tight, log).ok
    assert chain_of(tight, installed=99.0) == begun
    again = tightened(tight, calibrate(log_of(300, 2, loss=0.9), 0.1), 1.0, begun)
    assert again.ancestry.calibrated == tight.ancestry.calibrated
    assert verify(again, log).ok


def test_tightening_never_lowers_the_relaxation():
    root = calibrate(log_of(300, loss=0.6), 0.1)
    assert tightened(root, calibrate(log_of(300, loss=0.3), 0.1), 1.0, chain()) is None
    assert tightened(root, root, 1.0, chain()) is None


@pytest.mark.parametrize("boundary", ["include", "random"])
def test_rows_that_keep_no_budget_raise_the_relaxation_to_their_largest_margin(boundary):
    key = {"key": b"k" * 16} if boundary == "random" else {}
    root = calibrate(log_of(300), 0.1, boundary=boundary, **key)
    few = calibrate(log_of(5), 0.1, boundary=boundary, **key)
    assert few.relaxation is None
    tight = tightened(root, few, 0.97, chain())
    assert tight.relaxation == 0.97
    assert Certificate.from_dict(tight.to_dict(), key=key.get("key")) == tight
    assert tight.decide([0.97, 0.0], id="x").deferred


def test_a_certificate_that_always_defers_is_not_tightened():
    root = calibrate(log_of(5), 0.1)
    assert tightened(root, calibrate(log_of(300), 0.1), 1.0, chain()) is None


def test_after_looking_there_is_no_guarantee_in_words():
    root = calibrate(log_of(100), 0.1)
    begun = chain_of(root, installed=50.0)
    looked = renewed(calibrate(log_of(150), 0.1), root, begun, step="after looking", renewal=0)
    assert looked.guarantee.startswith("There is no guarantee")
    assert looked.summary.startswith("There is no guarantee")
    assert dict(looked.facts())["chain"].startswith("installed after looking: no guarantee")
    assert looked.ancestry.no_guarantee is not None
    assert Certificate.from_dict(looked.to_dict()) == looked
    assert chain_of(looked, installed=60.0) == begun  # the schedule goes on
    with pytest.raises(OptionError, match="no promise to keep by tightening"):
        refuse_tightening(looked)


def test_what_has_no_proof_is_refused_by_name():
    net = log_of(300, label=np.zeros(300, int))
    with pytest.raises(OptionError, match="tighten and net do not go together"):
        refuse_tightening(calibrate(net, 0.1, loss="net", boundary="random", key=b"k" * 16))
    grouped = calibrate(log_of(300, group=["a", "b"] * 150), 0.1, by="group")
    refuse_renewal(grouped)  # each group has its own rows, and the schedule counts those of all
    with pytest.raises(OptionError, match="tighten and groups do not go together"):
        refuse_tightening(grouped)
    clustered = calibrate(log_of(300, group=["a", "b", "c"] * 100), 0.1, cluster="group", max_cluster_size=100)
    with pytest.raises(OptionError, match="renewal and cluster do not go together"):
        refuse_renewal(clustered)
    sessions = replace(calibrate(log_of(300), 0.1), promise=PerSession(alpha=0.1))
    for refuse in (refuse_renewal, refuse_tightening):
        with pytest.raises(OptionError, match="and session do not go together"):
            refuse(sessions)
    own = calibrate(log_of(300), 0.1, loss=lambda row, sight: 0.0, loss_bound=1)
    with pytest.raises(OptionError, match="renewal and own loss do not go together"):
        refuse_renewal(own)
    learned = replace(calibrate(log_of(300), 0.1), rule=Learned(score="auto", terms=None))
    for refuse in (refuse_renewal, refuse_tightening):
        with pytest.raises(OptionError, match="and learned do not go together"):
            refuse(learned)
    dial = calibrate(log_of(300), 0.1, confidence=0.9, zero_one=True, dial=True)
    with pytest.raises(OptionError, match="lower stop"):
        refuse_tightening(dial)
    refuse_renewal(dial)


@pytest.mark.parametrize(
    "changed",
    [
        {"renewal": 2}, {"renewal": -1}, {"renewal": 61}, {"first": 0}, {"first": 99}, {"collected": -1},
        {"collected": 201}, {"since": -1.0}, {"since": 2.0**40}, {"step": "tightened"},
        {"calibrated": CalibratedThreshold(relaxation=0.0, boundary_u=None)},
    ],
)  # fmt: skip
def test_an_ancestry_that_does_not_fit_its_certificate_is_refused(changed):
    root = calibrate(log_of(100), 0.1)
    first = renewed(
        calibrate(log_of(200), 0.1), root, chain_of(root, installed=5.0), step="scheduled", renewal=1, collected=100
    )
    wrong = replace(first, ancestry=replace(first.ancestry, **changed))
    if changed.get("since") != 2.0**40:
        wrong = wrong.worded()
    with pytest.raises(CertificateError, match="contradicts the rest"):
        Certificate.from_dict(wrong.to_dict())


def test_a_tightened_certificate_cannot_hide_a_lower_relaxation():
    root = calibrate(log_of(300), 0.1)
    tight = tightened(root, calibrate(log_of(300, 1, loss=0.6), 0.1), 1.0, chain())
    lower = altered(tight, relaxation=0.0)
    with pytest.raises(CertificateError, match=r"ancestry .* contradicts the rest"):
        Certificate.from_dict(lower.worded().to_dict())
    forged = replace(
        lower, ancestry=replace(tight.ancestry, calibrated=CalibratedThreshold(relaxation=-1.0, boundary_u=None))
    )
    forged = forged.worded()
    assert set(verify(forged, log_of(300)).differences) == {"ancestry", "guarantee"}


def test_the_signature_covers_the_ancestry():
    root = calibrate(log_of(100), 0.1)
    first = renewed(calibrate(log_of(100), 0.1), root, chain_of(root, installed=5.0), step="scheduled", renewal=1)
    signed = first.sign(SECRET)
    signed.check_signature(SECRET)
    with pytest.raises(CertificateError, match="was changed"):
        replace(signed, ancestry=replace(signed.ancestry, since=6.0)).check_signature(SECRET)


def test_facts_say_what_step_it_was():
    place = Ancestry(
        step="scheduled", renewal=1, first=10, since=0.0, root_sha256="a" * 64, predecessor_sha256="b" * 64
    )
    for step, words in {
        "scheduled": "scheduled renewal 1", "tightened": "the relaxation was raised", "after red": "since an alarm",
        "after looking": "no guarantee",
    }.items():  # fmt: skip
        assert words in dict(chain_facts(replace(place, step=step)))["chain"]
    assert "3 of its rows collected" in dict(chain_facts(replace(place, collected=3)))["chain"]
