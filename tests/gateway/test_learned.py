"""A learned score behind the gateway: its arrays travel with the certificate, and decisions are those of a replay."""

from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import Certificate, Features, ScoreLog, Usage, calibrate
from conformal_arbitrage.calibration.learned import text_embedding
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live import binding
from conformal_arbitrage.live.config import read_config
from tests.gateway.house import MENU, House, error_of, votes

URL = "/v1/arbitrage/policies/support"


class LearnedHouse(House):
    """Certified by a learned score: the group says far more about the loss than the margin does."""

    def certificate(self, alpha=0.02, identities=None, policy="support", n=200):
        config = read_config(self.path)
        rng = np.random.default_rng(0)
        scores = np.round(rng.dirichlet([1.0, 1.0, 1.0], n), 2)
        group = rng.choice(["easy", "hard"], n)
        lost = rng.random(n) < np.where(group == "hard", 0.7, 0.02)
        guardian = np.ones((n, 3))
        guardian[np.arange(n), scores.argmax(axis=1)] = ~lost
        log = ScoreLog.from_arrays(
            scores, guardian, id=[f"r{k}" for k in range(n)], group=group,
            primary_usage=Usage(output_tokens=np.full(n, 5.0)), identities=identities or identities_of(config, policy),
        )  # fmt: skip
        secret = ProjectSecret.find()
        features = Features(menu_size=3, group_source="metadata.subject")
        certificate = calibrate(
            log, alpha, boundary="random", key=secret.boundary_key, score="auto", features=features
        )  # fmt: skip
        return certificate.sign(secret)


def learned(house, **options):
    return house(
        LearnedHouse, policy={"group": "metadata.subject", "expose": "full"}, primary=votes(0.7, 0.2, 0.1), **options
    )


def about(subject):
    return {**MENU, "metadata": {"subject": subject}}


def document(gateway, alpha):
    return gateway.certificate(alpha).to_dict(with_arrays=True)


def test_decisions_are_those_of_a_replay_and_their_records_say_how(house):
    gateway = learned(house)
    assert (gateway.folder / "rule.npz").exists()
    answers = {}
    for subject in ("easy", "hard", "geology", None):
        body = MENU if subject is None else about(subject)
        reply = gateway.chat(body)
        assert reply.status_code == 200, reply.text
        answers[subject] = reply.json()["choices"][0]["message"]["content"]
    assert (answers["easy"], answers["hard"]) == ("a", "b"), "the Primary says a, the Guardian b"
    certificate = gateway.certificate()
    certificate = certificate.with_key_of(ProjectSecret.find())
    for record, subject in zip(gateway.records(), (None, "geology", "hard", "easy"), strict=True):
        replayed = certificate.decide([0.7, 0.2, 0.1], id=record.id, group=subject, tokens=5)
        assert record.decision.learned == replayed.learned
        assert record.decided_by == replayed.decided_by
        lacking = None if subject else "the learned score lacks the query's group"
        assert record.decision.no_guarantee == lacking
        assert record.decision.relaxation is None


def test_it_is_installed_rolled_back_and_kept_over_a_restart(house):
    gateway = learned(house)
    installed = gateway.put(URL, {"certificate": document(gateway, 0.3)})
    assert installed.json()["version"] == 2, installed.text
    kept = Certificate.from_dict(gateway.get(URL).json()["history"][0]["certificate"])
    assert kept.fit.packed == gateway.certificate(0.3).fit.packed
    gateway.restart()
    assert gateway.chat(about("easy")).headers["x-arbitrage-alpha"] == "0.3"
    assert gateway.post(f"{URL}/rollback", {}).json()["version"] == 3
    assert gateway.chat(about("hard")).headers["x-arbitrage-alpha"] == "0.02"
    assert gateway.chat(about("hard")).json()["choices"][0]["message"]["content"] == "b"


def test_one_without_its_arrays_or_with_others_is_refused(house):
    gateway = learned(house)
    bare = gateway.certificate(0.2).to_dict()
    refused = error_of(gateway.put(URL, {"certificate": bare}), 422, "certificate_refused")
    assert "the arrays of the learned score are missing" in refused["message"]
    other = {**bare, "arrays": document(gateway, 0.02)["arrays"][:-8] + "AAAAAAA="}
    refused = error_of(gateway.put(URL, {"certificate": other}), 422, "certificate_refused")
    assert "is not the file that the certificate was made with" in refused["message"]
    assert gateway.chat(about("easy")).headers["x-arbitrage-alpha"] == "0.02"


def test_another_source_of_groups_is_refused(house, tmp_path):
    with pytest.raises(Exception, match=r"features\.group: 'metadata\.subject' then, 'metadata\.topic' now"):
        house(LearnedHouse, policy={"group": "metadata.topic"})
    with pytest.raises(
        ConfigError, match=r'group must be "metadata\.NAME", a field of the metadata of a request, or "key"'
    ):
        house(LearnedHouse, policy={"group": "topic"})


def test_shadow_mode_records_what_the_score_would_do(house):
    gateway = house(
        LearnedHouse, policy={"group": "metadata.subject", "mode": "shadow"}, primary=votes(0.7, 0.2, 0.1)
    )  # fmt: skip
    assert gateway.chat(about("easy")).status_code == 200
    [record] = gateway.records()
    assert record.decision.candidates == (0,)
    assert record.decision.learned is not None


class ReadingHouse(House):
    """Certified by a score that was learned from texts: questions about law are lost."""

    def certificate(self, alpha=0.1, identities=None, policy="support", n=300):
        config, rng = read_config(self.path), np.random.default_rng(0)
        law = rng.random(n) < 0.5
        text = [f"{LAW if one else EGGS} ({k % 7})" for k, one in enumerate(law)]
        scores = np.round(rng.dirichlet([1.0, 1.0, 1.0], n), 2)
        guardian = np.ones((n, 3))
        guardian[np.arange(n), scores.argmax(axis=1)] = rng.random(n) > np.where(law, 0.7, 0.02)
        log = ScoreLog.from_arrays(
            scores, guardian, id=[f"r{k}" for k in range(n)], context=text,
            identities=identities or identities_of(config, policy),
        )  # fmt: skip
        secret, features = ProjectSecret.find(), Features(text=True)
        return calibrate(log, alpha, boundary="random", key=secret.boundary_key, score="auto", features=features).sign(
            secret
        )


LAW, EGGS = "Which court hears appeals in contract law?", "How long does one boil an egg?"


def test_a_score_that_reads_texts_reads_those_of_the_requests(house, monkeypatch):
    gateway = house(ReadingHouse, primary=votes(0.7, 0.2, 0.1))
    said = {}
    for text in (LAW, EGGS):
        reply = gateway.chat({**MENU, "messages": [{"role": "user", "content": text}]})
        assert reply.status_code == 200, reply.text
        said[text] = reply.json()["choices"][0]["message"]["content"]
    assert said == {LAW: "b", EGGS: "a"}, "the Primary says a, the Guardian b"
    certificate = gateway.certificate().with_key_of(ProjectSecret.find())
    for record, text in zip(gateway.records(), (EGGS, LAW), strict=True):
        replayed = certificate.decide([0.7, 0.2, 0.1], id=record.id, text=text)
        assert record.decision.learned == replayed.learned
        assert record.decision.no_guarantee is None
    gateway.stop()
    other = replace(text_embedding(), sha256="0" * 64)
    monkeypatch.setattr(binding, "text_embedding", lambda: other)
    with pytest.raises(Exception, match=r"features\.text: embedding \w{12} then, 000000000000 now"):
        gateway.start()
    gateway._serving = None  # it never served
