"""What names the group of a live query is part of a certificate's identities, or it says nothing of it."""

from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import Certificate, OptionError, ScoreLog, calibrate, verify
from conformal_arbitrage.calibration.certificate import group_source_of
from tests.certificates import altered

MODELS = {"primary": {"kind": "x"}, "guardian": {"kind": "y"}}


def log_of(identities=MODELS, n=80):
    rng = np.random.default_rng(0)
    margin = np.round(rng.random(n), 2)
    guardian = np.where((rng.random(n) < 0.2)[:, None], [0.0, 1.0], [1.0, 0.0])
    log = ScoreLog.from_arrays(
        np.stack([margin, np.zeros(n)], axis=1), guardian, group=["a", "b"] * (n // 2), identities=identities
    )
    return replace(log, extra={"tenant": np.array(["c", "d"] * (n // 2), dtype=object)})


def test_a_log_says_what_named_its_groups_and_so_does_its_certificate():
    log = log_of({**MODELS, "group": {"source": "metadata.subject"}})
    certificate = calibrate(log, 0.1, by="group")
    assert group_source_of(certificate) == "metadata.subject"
    assert dict(certificate.facts())["groups"] == "named by metadata.subject in live requests"
    assert Certificate.from_dict(certificate.to_dict()) == certificate
    assert verify(certificate, log).ok
    assert group_source_of(calibrate(log, 0.1)) is None
    assert group_source_of(calibrate(log, 0.1, by="tenant")) is None, "that is another column"
    again = calibrate(log, 0.1, by="group", group_source="metadata.subject")
    assert altered(again, created=certificate.provenance.created) == certificate
    with pytest.raises(OptionError, match=r"were named by metadata\.subject; got group_source 'metadata\.x'"):
        calibrate(log, 0.1, by="group", group_source="metadata.x")


def test_a_log_that_does_not_say_it_takes_an_option():
    log = log_of()
    certificate = calibrate(log, 0.1, by="tenant", group_source="metadata.tenant")
    assert group_source_of(certificate) == "metadata.tenant"
    assert verify(certificate, log).ok
    assert not verify(calibrate(log, 0.1, by="tenant"), log_of({**MODELS, "primary": {"kind": "z"}})).ok
    with pytest.raises(OptionError, match="group_source= says what names a group: give by="):
        calibrate(log, 0.1, group_source="metadata.tenant")


def test_a_log_without_identities_has_nothing_to_bind():
    assert group_source_of(calibrate(log_of(None), 0.1, by="group")) is None
    with pytest.raises(OptionError, match="this log names no models to bind"):
        calibrate(log_of(None), 0.1, by="group", group_source="metadata.subject")
