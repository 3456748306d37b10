"""Cascades live: collect, calibrate and ask through real connections to a scripted upstream."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from conformal_arbitrage import ChatRequest, ProjectSecret, Query
from conformal_arbitrage.calibration.cascade import apply_cascade, calibrate_cascade
from conformal_arbitrage.errors import CertificateError, ConfigError, GuardianError, StaleCalibrationError
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.live.rule import CascadeRouter
from conformal_arbitrage.scorelog.cascade import CascadeLog
from tests.certificates import altered
from tests.cli import test_cli
from tests.collecting.test_collect import serving
from tests.live_cascades import MENU, facts, reply, write_cascade_config
from tests.scripted import completion

run = test_cli.run
SECRET = "a-long-random-text-for-these-tests"
KEY = ProjectSecret.from_text(SECRET, source="test").boundary_key


def write_questions(form, count):
    rows = [
        {"id": f"id{n}", "messages": [{"role": "user", "content": f"Is it q{n} ?"}], "expected": "yes"} if form == "text"
        else {"id": f"id{n}", "question": f"Is it q{n} ?", "choices": list(MENU), "answer": "A"}
        for n in range(count)
    ]  # fmt: skip
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def collected(run, form, count=120):
    """Collect all models' answers, and return the log."""
    write_questions(form, count)
    grade = ["--grade", "exact"] if form == "text" else []
    run("collect", "questions.jsonl", "-o", "cascade.parquet", "--path", *grade)
    return CascadeLog.read("cascade.parquet", guardian="large")


@pytest.mark.parametrize("form", ["text", "menu"])
def test_what_is_collected_and_calibrated_is_what_is_decided_live(run, form, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    with serving(reply) as upstream:
        write_cascade_config(Path(), upstream.url, form=form)
        log = collected(run, form)
        assert log.models == ("small", "middle")
        assert set(log.identities) == {"small", "middle", "large", *(["grader", "requests"] if form == "text" else [])}
        assert log.texts[7].tolist() == [facts(name, "q7")[0] for name in log.models]
        assert (log.cost > 0).all()
        certificate = calibrate_cascade(log, "0.1", key=KEY, chain=("small", "middle"))
        offline = apply_cascade(certificate, log)
        assert len(set(offline.answered_by[:40].tolist())) > 1
        upstream.bodies.clear()
        decisions = asyncio.run(decided(read_config("arbitrage.toml"), certificate, form, range(40)))
    for row, decision in enumerate(decisions):
        place = int(offline.answered_by[row])
        assert decision.no_guarantee is None
        assert decision.decided_by == ("guardian" if place < 0 else "primary")
        roles = ["primary"] * int(offline.asked[row].sum()) + ["guardian"] * (place < 0)
        assert [leg.role for leg in decision.legs] == roles
        name = [*log.models, "large"][place]
        answer = decision.answer if form == "menu" else decision.answer["content"]
        assert answer == facts(name, f"q{row}")[0]
        assert decision.spent.cost == pytest.approx(offline.cost[row])


def test_a_setting_that_no_logged_request_had_leaves_a_cascade_without_a_guarantee(run, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    with serving(reply) as upstream:
        write_cascade_config(Path(), upstream.url, form="text", settings="as requested")
        log = collected(run, "text")
        assert log.identities["requests"] == {"settings": "as requested", "fields": {}}
        certificate = calibrate_cascade(log, "0.1", key=KEY, chain=("small", "middle"))

        async def reasons():
            async with Models(read_config("arbitrage.toml")) as models:
                router = models.router(certificate)
                bodies = [
                    {"messages": [{"role": "user", "content": "Is it q1 ?"}], **more} for more in ({}, {"seed": 1})
                ]
                return [(await router.decide(ChatRequest(body, id="id1"))).no_guarantee for body in bodies]

        assert asyncio.run(reasons()) == [None, "no request of the calibration log had seed 1"]


async def decided(config, certificate, form, rows):
    async with Models(config) as models:
        if form == "menu":
            chooser = models.policy(certificate)
            return [await chooser.decide(Query(f"Is it q{n} ?", MENU, id=f"id{n}")) for n in rows]
        router = models.router(certificate)
        bodies = [{"messages": [{"role": "user", "content": f"Is it q{n} ?"}]} for n in rows]
        return [await router.decide(ChatRequest(body, id=f"id{n}")) for n, body in zip(rows, bodies, strict=True)]


def test_the_command_line_leads_from_questions_to_a_decision(run, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    with serving(reply) as upstream:
        write_cascade_config(Path(), upstream.url)
        write_questions("text", 80)
        estimate = run(
            "collect", "questions.jsonl", "-o", "c.parquet", "--path", "--grade", "exact", "--dry-run"
        ).stdout
        assert "Nothing was sent" in estimate
        assert upstream.bodies == []
        shown = run("collect", "questions.jsonl", "-o", "c.parquet", "--path", "--grade", "exact").stdout
        assert "calibrate c.parquet --path --guardian-column large" in " ".join(shown.split())
        calls = len(upstream.bodies)
        figures = json.loads(
            run("collect", "questions.jsonl", "-o", "c.parquet", "--path", "--grade", "exact", "--json").stdout
        )
        assert len(upstream.bodies) == calls, "nothing is paid for twice"
        assert figures["rows"] == 80
        run("calibrate", "c.parquet", "--path", "--guardian-column", "large", "--alpha", "0.1", "-o", "c.json",
            "--chain", "small,middle")  # fmt: skip
        document = json.loads(run("ask", "c.json", "Is it q3 ?", "--id", "id3", "--json").stdout)
        assert document["decided_by"] in ("primary", "guardian")
        assert "answered by" in run("ask", "c.json", "Is it q3 ?", "--id", "id3").stdout
        checked = json.loads(run("check", "--yes", "--json").stdout)
        assert {one["role"] for one in checked["models"]} == {"models.small", "models.middle", "models.large"}


def failing(*names):
    """Return an upstream on which some models fail."""

    def scripted(path, body, number):
        return (500, {"error": {"message": "down"}}) if body["model"] in names else reply(path, body, number)

    return scripted


@pytest.mark.parametrize("form", ["text", "menu"])
def test_a_model_that_fails_is_passed_over_and_a_guardian_that_fails_is_an_error(run, form):
    with serving(reply) as upstream:
        write_cascade_config(Path(), upstream.url, form=form)
        certificate = calibrate_cascade(collected(run, form), "0.2", key=KEY, chain=("small", "middle"))
        config = read_config("arbitrage.toml")
        upstream.reply = failing("small", "middle")
        [decision] = asyncio.run(decided(config, certificate, form, [1]))
        assert decision.decided_by == "guardian"
        assert [leg.error is None for leg in decision.legs] == [False, False, True]
        upstream.reply = failing("small", "middle", "large")
        with pytest.raises(GuardianError, match="set safe_"):
            asyncio.run(decided(config, certificate, form, [1]))
        safe = {"safe_answer": "ask a person"} if form == "text" else {"safe_action": "maybe"}
        write_cascade_config(Path(), upstream.url, form=form, **safe)
        [fallback] = asyncio.run(decided(read_config("arbitrage.toml"), certificate, form, [1]))
        assert fallback.decided_by == "fallback"
        assert "safe" in fallback.no_guarantee


def test_a_guardian_streams_after_the_chain(run):
    with serving(reply) as upstream:
        write_cascade_config(Path(), upstream.url)
        rule = calibrate_cascade(collected(run, "text"), "0.2", key=KEY, chain=("small",))

        async def stream():
            async with Models(read_config("arbitrage.toml")) as models:
                router = models.router(rule)
                request = ChatRequest(
                    {"messages": [{"role": "user", "content": "Is it q5 ?"}], "temperature": 0.9}, id="x"
                )
                upstream.reply = lambda path, body, number: completion("yes", model=body["model"])
                return [step async for step in router.steps(request, live=True)]

        pending, *_, last = asyncio.run(stream())
        assert pending.answer is None
        assert [leg.role for leg in last.legs] == ["primary", "guardian"]
        assert "overrides temperature" in last.no_guarantee


def test_a_certificate_for_other_models_is_refused(run):
    with serving(reply) as upstream:
        write_cascade_config(Path(), upstream.url)
        calibrated = calibrate_cascade(collected(run, "text"), "0.2", key=KEY, chain=("small",))

        async def build(certificate, **options):
            async with Models(read_config("arbitrage.toml")) as models:
                return models.router(certificate, **options)

        with pytest.raises(CertificateError, match="asks tiny and the Guardian large; this one has small, middle"):
            asyncio.run(build(altered(calibrated, chain=replace(calibrated.path.chain, models=("tiny",)))))
        with pytest.raises(CertificateError, match="needs the key"):
            asyncio.run(build(replace(calibrated, key=None)))
        other = {**calibrated.identities, "small": {**calibrated.identities["small"], "model": "another"}}
        with pytest.raises(StaleCalibrationError, match=r"small\.model"):
            asyncio.run(build(altered(calibrated, identities=other)))
        router = asyncio.run(build(altered(calibrated, identities="unbound"), allow=["unbound"]))
        assert isinstance(router, CascadeRouter)


@pytest.mark.parametrize(
    ("names", "policies", "message"),
    [
        (["small"], "", "models names at least two models"),
        (["small", "small"], "", "each once"),
        (["small", "huge"], "", r"no section \[models.huge\]; there are small, middle, large"),
        (["small", "large"], '[policies.p]\ncascade = true\nprimary = "small"\nmode = "shadow"', "drop primary"),
    ],
)
def test_a_cascade_that_cannot_be_is_refused_with_its_line(tmp_path, names, policies, message):
    write_cascade_config(tmp_path, "http://127.0.0.1:1/v1", names=names, policies=policies)
    with pytest.raises(ConfigError, match=f"line .*{message}"):
        read_config(tmp_path / "arbitrage.toml")


def test_a_policy_without_a_cascade_section_is_refused(tmp_path):
    write_cascade_config(tmp_path, "http://127.0.0.1:1/v1", policies='[policies.p]\ncascade = true\nmode = "shadow"')
    path = tmp_path / "arbitrage.toml"
    assert read_config(path).section_of("p", "guardian") == "models.large"
    path.write_text(path.read_text().replace('[cascade]\nmodels = ["small", "middle", "large"]\n', ""))
    with pytest.raises(ConfigError, match=r"needs a section \[cascade\]"):
        read_config(path)


def test_collecting_needs_a_cascade_prices_and_a_grader(run):
    write_questions("text", 5)
    write_cascade_config(Path(), "http://127.0.0.1:1/v1")
    arguments = ("collect", "questions.jsonl", "-o", "c.parquet", "--path")
    assert "needs --grade" in run(*arguments, code=2).stderr
    text = Path("arbitrage.toml").read_text()
    Path("arbitrage.toml").write_text(text.replace("price = [5.0, 5.0]", ""))
    assert "the price of [models.middle] is unknown" in run(*arguments, "--grade", "exact", code=2).stderr
    Path("arbitrage.toml").write_text(text.replace('[cascade]\nmodels = ["small", "middle", "large"]\n', ""))
    assert "no section [cascade]" in run(*arguments, "--grade", "exact", code=2).stderr


def test_a_model_that_always_fails_stops_a_collection_and_money_limits_it(run):
    with serving(failing("middle")) as upstream:
        write_cascade_config(Path(), upstream.url)
        write_questions("text", 40)
        arguments = ("collect", "questions.jsonl", "-o", "c.parquet", "--path", "--grade", "exact")
        assert "middle failed on all of the first 20 rows" in run(*arguments, "--concurrency", "1", code=2).stderr
        upstream.reply = reply
        assert "max-cost" in run(*arguments, "--max-cost", "0.000001", code=2).stderr
