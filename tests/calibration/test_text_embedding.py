"""Texts as features of a learned score: vectors from a table inside a package, the same in a log and live."""

import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from conformal_arbitrage import Certificate, CertificateError, Features, OptionError, ScoreLog, calibrate, learn, verify
from conformal_arbitrage.calibration import learned as module
from conformal_arbitrage.calibration.learned import WIDTH, text_embedding
from conformal_arbitrage.calibration.secret import ProjectSecret

KEY, SECRET = b"k" * 32, ProjectSecret((b"the secret of this project",))
TOPICS = {
    "law": ["Which court hears appeals in contract law?", "Is a verbal contract binding under tort law?"],
    "cooking": ["How long does one boil an egg?", "Which flour is best for baking bread?"],
}


def world(n=300, seed=0, **changes):
    """Return a log in which the topic of the question, which no column names, tells where the Primary fails."""
    rng = np.random.default_rng(seed)
    topic = rng.choice(list(TOPICS), n)
    text = [str(rng.choice(TOPICS[one])) + f" ({rng.integers(100)})" for one in topic]
    wrong = rng.random(n) < np.where(topic == "law", 0.7, 0.03)
    columns = {
        "confidence": np.round(rng.random(n), 2) + 0.01,
        "primary_grade": 1.0 - wrong,
        "guardian_grade": np.ones(n),
        "context": text,
        "id": [f"{seed}-{k}" for k in range(n)],
    }
    return ScoreLog.from_router(**columns | changes)


def learned(log, *, text=True, alpha=0.1):
    return calibrate(log, alpha, boundary="random", key=KEY, score="auto", features=Features(text=text))


def test_texts_about_the_same_thing_are_near_each_other():
    embedding = text_embedding()
    one, same, other = embedding.vectors([TOPICS["law"][0], TOPICS["law"][1], TOPICS["cooking"][0]])
    assert one @ same > one @ other
    assert embedding.vector(TOPICS["law"][0]) == one.tolist(), "to the bit"
    assert 0 < np.linalg.norm(one) <= 6
    assert embedding.vector("") == [0.0] * WIDTH
    assert embedding.vector("a " * 50_000) == embedding.vector("a " * 10_000), "what follows is not read"
    assert len(embedding.sha256) == 64
    assert embedding.vectors([]).shape == (0, WIDTH)


def test_topics_that_no_group_names_are_learned_from_texts():
    log, rest = world(), world(seed=1)
    without, certificate = learned(log, text=False), learned(log)
    assert certificate.learned.features == ("margin", "position", "text")
    assert certificate.learned.columns == without.learned.columns + WIDTH
    assert certificate.learned.missing == {"text": 0}
    assert certificate.learned.text_sha256 == text_embedding().sha256
    assert "the text of the query" in certificate.guarantee
    assert certificate.apply(rest).deferred.mean() < without.apply(rest).deferred.mean() - 0.1
    assert learn(world(600), features=Features(text=True)).scored.is_router


def test_a_saved_certificate_verifies_and_decides_live_as_in_a_replay(tmp_path):
    log, rest = world(), world(n=80, seed=2)
    learned(log).sign(SECRET).save(tmp_path / "certificate.json")
    loaded = Certificate.load(tmp_path / "certificate.json", key=KEY)
    loaded.check_signature(SECRET)
    assert verify(loaded, log)
    for row, replayed in enumerate(loaded.apply(rest)):
        live = loaded.decide([0.0, float(rest.primary[2 * row + 1])], id=str(rest.id[row]), text=str(rest.context[row]))
        assert (live.learned, live.decided_by) == (replayed.learned, replayed.decided_by)
    silent = loaded.decide([0.0, 0.5], id="x")
    assert silent.learned.missing == ("text",)
    assert loaded.uncovered_features(silent.learned) == "the learned score lacks the query's text"
    other = replace(log, context=np.array(["another question"] * len(log)))
    assert not verify(loaded, other)


def test_the_terms_say_whether_texts_are_used():
    document = learned(world()).to_dict()
    document["rule"]["terms"]["text_sha256"] = None
    with pytest.raises(CertificateError, match="learned"):
        Certificate.from_dict(document)


def test_a_log_without_texts_is_refused_and_empty_ones_are_counted():
    with pytest.raises(OptionError, match="there is no `context` column, so texts cannot be learned from"):
        learned(world(context=None))
    some = world(context=["", *world().context.tolist()[1:]])
    assert learned(some).learned.missing == {"text": 1}


@pytest.fixture
def fresh():
    text_embedding.cache_clear()
    yield
    text_embedding.cache_clear()


def test_without_the_extra_texts_are_refused_with_the_remedy(fresh, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'conformal-arbitrage\[text\]'"):
        text_embedding()


def test_files_that_are_not_those_that_are_known_are_refused(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    with pytest.raises(OptionError, match=r"needs? wordllama with weights/l2_supercat_256.safetensors"):
        text_embedding()
    header = json.dumps({"table": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
    with pytest.raises(ValueError, match="its numbers are F32, not F16"):
        module._read_table(len(header).to_bytes(8, "little") + header + bytes(8))
