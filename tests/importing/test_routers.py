"""Forecasts of other routers become certificates, and certificates their settings, exact at every value."""

import asyncio
import json

import numpy as np
import pytest

from conformal_arbitrage import CertificateError, ScoreLog, ScoreLogError, calibrate
from conformal_arbitrage.importing import read_litellm, read_vllm_sr, router_setting
from tests.cli import test_cli
from tests.importing.files import completion, write_lines

run = test_cli.run
EPSILON = 2.0**-52
MODELS = {"primary": "small", "guardian": "large"}


def forecasts(rng, count, decimals=2):
    """Forecasts of both models, and whether the small one is right: the likelier the smaller the gap."""
    efficient, capable = np.round(rng.random((2, count)), decimals)
    right = rng.random(count) > 0.4 * np.clip(capable - efficient, 0, 1)
    return [float(p) for p in efficient], [float(p) for p in capable], right


def litellm_calls(rng, count, calibrated=False, decimals=2):
    """Payloads of a routed and of a direct call per question; the forecast comes with the routed one only."""
    for k, (efficient, capable, right) in enumerate(zip(*forecasts(rng, count, decimals), strict=True)):
        decision = {"classifier_model": "judge", "classifier_prompt_version": "llm-v2-1"}
        decision |= {"classifier_efficient_p_solve": efficient, "classifier_capable_p_solve": capable}
        if calibrated:
            decision |= {
                "classifier_calibrated_efficient_p_solve": efficient / 2,
                "classifier_calibration_version": "v1",
            }
            decision |= {"classifier_calibrated_capable_p_solve": capable / 2}
        routed = "small" if k % 2 else "large"
        for model in ("small", "large"):
            yield {
                "call_type": "acompletion", "model_group": model, "startTime": float(2 * k + (model != routed)),
                "messages": [{"role": "user", "content": f"Q{k}"}], "status": "success",
                "metadata": {"routing_decision": decision} if model == routed else {},
                "response": completion("yes" if right or model == "large" else "no", model=model),
            }  # fmt: skip


def replay_records(rng, count):
    for k in range(count):
        margin = float(np.clip(rng.normal(0, 0.2), -2, 2))
        right = rng.random() > 0.4 * np.clip(margin, 0, 1)
        for model in ("small", "large"):
            yield {
                "id": f"{k}{model}", "timestamp": f"2026-11-19T00:00:{k:05}Z", "selected_model": model,
                "request_body": json.dumps({"messages": [{"role": "user", "content": f"Q{k}"}]}),
                "response_body": json.dumps(completion("yes" if right or model == "large" else "no", model=model)),
                "signal_values": {"complexity:needs_reasoning:margin": margin}, "response_status": 200,
            }  # fmt: skip


@pytest.fixture
def imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(documents, **options):
        documents = list(documents)
        calls = write_lines(tmp_path / "calls.jsonl", documents)
        (tmp_path / "doubles.py").write_text("def grade(request, answer, expected):\n    return answer == 'yes'\n")
        options = {**MODELS, "grade": "python:doubles:grade", **options}
        return asyncio.run((read_vllm_sr if "signal" in options else read_litellm)([calls], **options))

    return read


def litellm_keeps_the_efficient_model(efficient, capable, gap):
    return capable - efficient <= gap + EPSILON


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("decimals", [2, 17])
@pytest.mark.parametrize("calibrated", [False, True])
def test_litellm_routes_every_logged_forecast_and_every_neighbour_as_the_certificate_says(
    imported, seed, decimals, calibrated
):
    rng = np.random.default_rng(seed)
    documents = list(litellm_calls(rng, 300, calibrated, decimals))
    log = imported(documents, confidence="forecast").log
    certificate = calibrate(log, 0.02, boundary="include")
    setting = router_setting(certificate)
    assert 0 <= setting.value <= 1
    assert setting.document == {"complexity_router_config": {"llm_v2_config": {"max_quality_gap": setting.value}}}
    decisions = [document["metadata"].get("routing_decision") for document in documents]
    name = "classifier_calibrated_{}_p_solve" if calibrated else "classifier_{}_p_solve"
    pairs = [(made[name.format("efficient")], made[name.format("capable")]) for made in decisions if made]
    deferred = certificate.apply(log).deferred
    kept = [litellm_keeps_the_efficient_model(*pair, setting.value) for pair in pairs]
    assert kept == (~deferred).tolist()
    assert 0 < np.mean(kept) < 1
    edge = setting.value + EPSILON
    for gap in (edge, np.nextafter(edge, 2), np.nextafter(edge, -2), setting.value):
        assert certificate.decide([0, 1 - gap]).deferred is not litellm_keeps_the_efficient_model(
            0.0, gap, setting.value
        )


def test_strictly_read_settings_are_caught(imported):
    rng = np.random.default_rng(1)
    certificate = calibrate(imported(litellm_calls(rng, 300), confidence="forecast").log, 0.05, boundary="include")
    planted = 1 - certificate.relaxation  # the gap of a question that the certificate sends to the capable model
    assert certificate.decide([0, 1 - planted]).deferred
    assert litellm_keeps_the_efficient_model(0.0, planted, planted)


@pytest.mark.parametrize("seed", range(5))
def test_the_semantic_router_calls_hard_what_the_certificate_defers(imported, seed):
    rng = np.random.default_rng(seed)
    documents = list(replay_records(rng, 300))
    log = imported(documents, signal="needs_reasoning").log
    certificate = calibrate(log, 0.02, boundary="include")
    setting = router_setting(certificate)
    [rule] = setting.document["routing"]["signals"]["complexity"]
    assert rule == {"name": "needs_reasoning", "threshold": setting.value}
    threshold = np.float32(json.loads(json.dumps(rule))["threshold"])  # as the router keeps it
    margins = [
        d["signal_values"]["complexity:needs_reasoning:margin"] for d in documents if d["selected_model"] == "small"
    ]
    hard = [margin > float(threshold) for margin in margins]
    assert hard == certificate.apply(log).deferred.tolist()
    assert 0 < np.mean(hard) < 1


# What a rule of this router's configuration may hold (routing.signals.complexity), and of which type.
COMPLEXITY_RULE = {"name": str, "threshold": float, "hard": dict, "easy": dict, "description": str, "composer": dict}


def test_the_setting_of_the_semantic_router_fits_its_configuration(imported):
    log = imported(replay_records(np.random.default_rng(2), 300), signal="needs_reasoning").log
    [rule] = router_setting(calibrate(log, 0.02, boundary="include")).document["routing"]["signals"]["complexity"]
    own = {"name": "needs_reasoning", "threshold": 0.75, "hard": {"candidates": ["a"]}, "easy": {"candidates": ["b"]}}
    merged = own | rule
    assert merged.keys() <= COMPLEXITY_RULE.keys()
    assert all(isinstance(value, COMPLEXITY_RULE[name]) for name, value in merged.items())
    assert abs(merged["threshold"]) <= np.finfo(np.float32).max


def test_questions_without_a_forecast_are_deferred_as_the_router_does(imported):
    documents = list(litellm_calls(np.random.default_rng(3), 300))
    documents[0]["metadata"] = documents[1]["metadata"] = {"routing_decision": {"cause": "llm_v2_fallback"}}
    log = imported(documents, confidence="forecast").log
    assert log.no_opinion.tolist() == [True, *[False] * 299]


def test_forecasts_of_several_classifiers_or_of_none_are_refused(imported):
    documents = list(litellm_calls(np.random.default_rng(3), 20))
    for document in documents[20:]:
        if document["metadata"]:
            document["metadata"] = {
                "routing_decision": document["metadata"]["routing_decision"] | {"classifier_model": "x"}
            }
    with pytest.raises(ScoreLogError, match="forecasts of 2 classifiers"):
        imported(documents, confidence="forecast")
    with pytest.raises(ScoreLogError, match="no answer of the Primary has a confidence"):
        imported([{**document, "metadata": {}} for document in documents], confidence="forecast")


def test_what_no_setting_expresses_is_refused(imported):
    log = imported(litellm_calls(np.random.default_rng(3), 300), confidence="forecast").log
    with pytest.raises(CertificateError, match="calibrate with --boundary include"):
        router_setting(calibrate(log, 0.05, boundary="random", key=b"k"))
    with pytest.raises(CertificateError, match="more often than any setting"):
        router_setting(calibrate(log, 0.001, boundary="include"))
    other = ScoreLog.from_router(confidence=[0.9] * 50, primary_grade=[1.0] * 50, guardian_grade=[1.0] * 50)
    with pytest.raises(CertificateError, match="was not made from forecasts"):
        router_setting(calibrate(other, 0.1, boundary="include"))


def test_the_command_line_goes_from_logs_to_the_setting(run, tmp_path):
    write_lines(tmp_path / "calls.jsonl", litellm_calls(np.random.default_rng(4), 300))
    (tmp_path / "yes.py").write_text("def grade(request, answer, expected):\n    return answer == 'yes'\n")
    models = ("--primary", "small", "--guardian", "large", "--grade", "python:yes:grade")
    run("import", "litellm", "calls.jsonl", *models, "--confidence", "forecast", "-o", "calls.parquet")
    run("calibrate", "calls.parquet", "--alpha", "5%", "--boundary", "include", "-o", "calls.json")
    shown = json.loads(run("certificate", "setting", "calls.json").stdout)
    assert 0 < shown["complexity_router_config"]["llm_v2_config"]["max_quality_gap"] < 1
