"""Certificates that no longer fit are named: beside the configuration, in a gateway's database, by their grader."""

import asyncio
import json
import linecache
import re
import sys

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ConformalRouter, ScoreLog, calibrate
from conformal_arbitrage.cli import cli
from conformal_arbitrage.errors import CertificateError
from conformal_arbitrage.live.check import grader_change
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.live.graders import SEVERAL, FunctionGrader
from conformal_arbitrage.models.kinds import load_object
from conformal_arbitrage.store import policies
from conformal_arbitrage.store.location import open_store
from tests.live.test_config import GOOD, check, endpoint, pinned_before, save_certificate, write

POLICY = "\n[policies.support]\nmode = 'shadow'\n"


def install(folder, document):
    async def run():
        async with await open_store(folder / "arbitrage.sqlite") as store:
            await store.run(policies.install, "support", document, by="test")

    asyncio.run(run())


def test_check_names_stale_certificates_that_only_the_database_has(tmp_path):
    save_certificate(tmp_path, "old.json", "small-0")
    install(tmp_path, json.loads((tmp_path / "old.json").read_text()))
    (tmp_path / "old.json").unlink()
    text = pinned_before(served="small-0", token_field="max_tokens") + POLICY
    done, path, _ = check(tmp_path, endpoint(), text)
    assert done.exit_code == 2
    assert "stale would be version 1 of policy support in the database;" in done.stderr
    assert read_config(path).primary.pinned.served == "small-0"


def test_a_certificate_in_a_file_and_in_the_database_is_named_once(tmp_path):
    save_certificate(tmp_path, "old.json", "small-0")
    install(tmp_path, json.loads((tmp_path / "old.json").read_text()))
    done, _, _ = check(tmp_path, endpoint(), pinned_before(served="small-0", token_field="max_tokens") + POLICY)
    assert "stale would be old.json;" in done.stderr


def test_check_makes_no_database_and_says_if_one_cannot_be_read(tmp_path):
    text = pinned_before(served="small-0", token_field="max_tokens") + POLICY
    done, _, _ = check(tmp_path, endpoint(), text)
    assert "no certificate at hand depends on it" in done.stderr
    assert not (tmp_path / "arbitrage.sqlite").exists()
    (tmp_path / "arbitrage.sqlite").write_text("not a database, by far")
    done, _, _ = check(tmp_path, endpoint(), text)
    assert "certificates in the gateway's database are not looked at" in done.stderr
    install_broken = {"schema": 2}
    (tmp_path / "arbitrage.sqlite").unlink()
    install(tmp_path, install_broken)
    done, _, _ = check(tmp_path, endpoint(), text)
    assert "no certificate at hand depends on it" in done.stderr


RUBRIC = "def polite(request, answer, expected):\n    return {}\n"


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """A configuration, a grading function, and how to make the identities of a log that it graded."""
    write(tmp_path, GOOD)

    def with_rubric(value):
        monkeypatch.delitem(sys.modules, "rubric", raising=False)
        (tmp_path / "rubric.py").write_text(RUBRIC.format(value))
        linecache.checkcache()

    with_rubric(0.5)
    grader = FunctionGrader(function=load_object("rubric:polite", tmp_path), name="rubric:polite").identity
    models = {"primary": {"kind": "answer"}, "guardian": {"kind": "answer"}}
    return tmp_path, with_rubric, {**models, "grader": dict(grader)}


def router_log(identities):
    grades = {"primary_grade": [1.0] * 40, "guardian_grade": [1.0] * 40}
    return ScoreLog.from_router(confidence=[0.5] * 40, **grades, identities=identities)


def test_a_grader_whose_source_changed_is_named_by_check_and_calibrate(graded, monkeypatch):
    folder, with_rubric, identities = graded
    router_log(identities).write(folder / "log.parquet")
    calibrate(router_log(identities), 0.1).save(folder / "text.json")
    arguments = ["calibrate", str(folder / "log.parquet"), "--alpha", "0.1", "--config", str(folder / "arbitrage.toml")]
    assert "grader" not in CliRunner().invoke(cli, arguments).stderr
    assert json.loads(check(folder, endpoint())[0].stdout)["stale_graders"] == {}
    with_rubric(0.6)
    reason = "the grader python:rubric:polite has changed since (source_sha256)"
    assert f"{reason}: the guarantee is about the grades in this log" in CliRunner().invoke(cli, arguments).stderr
    done, _, _ = check(folder, endpoint(), extra=["--yes"])
    assert json.loads(done.stdout)["stale_graders"] == {"text.json": reason}
    assert f"text.json: {reason}; grade or collect again" in done.stderr


@pytest.mark.parametrize(
    ("grader", "reason"),
    [
        ({"kind": "exact"}, None),
        ({"kind": "human"}, None),
        ({"kind": "feedback"}, None),
        ({"kind": "judge", "model": "m"}, "the grader judge cannot be had any more"),
        ({"kind": "python", "name": "gone:away"}, "the grader python:gone:away cannot be had any more"),
        ({"kind": SEVERAL, "graders": [{"kind": "judge"}, {"kind": "human"}]}, "several graders .* \\(human, judge\\)"),
        (None, None),
    ],
)
def test_graders_are_compared_by_kind(tmp_path, grader, reason):
    identities = {} if grader is None else {"grader": grader}
    change = grader_change(read_config(write(tmp_path, GOOD)), identities)
    assert (change is None) if reason is None else re.search(reason, change)
    assert grader_change(read_config(write(tmp_path, GOOD)), "unbound") is None


class Constant:
    def __init__(self):
        self.identity = {"kind": "constant"}


def test_a_router_refuses_a_certificate_of_menus_whatever_is_allowed():
    menus = calibrate(ScoreLog.from_arrays([[0.9, 0.1]] * 30, [[1.0, 0.0]] * 30), 0.1)
    text = calibrate(router_log(None), 0.1)
    models = {"primary": Constant(), "guardian": Constant(), "allow": ["unbound"]}
    with pytest.raises(CertificateError, match="was made from menus"):
        ConformalRouter(certificate=menus, **models)
    assert ConformalRouter(certificate=text, **models).certificate is text
