import asyncio
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ChatRequest, ScoreLog
from conformal_arbitrage.cli import cli
from conformal_arbitrage.collecting.collect import Collection, collect, collected_totals, has_person
from conformal_arbitrage.collecting.questions import Requests
from conformal_arbitrage.errors import ArbitrageError
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models.port import fingerprint
from tests.certificates import said
from tests.scripted import Upstream, completion, scores

COMMAND = [sys.executable, "-c", "from conformal_arbitrage.cli import main; main()"]
PATH = "/chat/completions"


@contextmanager
def serving(reply):
    """Run an upstream in its own thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    upstream = Upstream(reply)
    try:
        asyncio.run_coroutine_threadsafe(upstream.__aenter__(), loop).result()
        yield upstream
    finally:
        asyncio.run_coroutine_threadsafe(upstream.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(cli, [str(a) for a in arguments])
        assert result.exit_code == code, (result.exit_code, result.output, result.stderr, result.exception)
        return result

    return invoke


def configure(url, **sections):
    """Write arbitrage.toml with pinned chat models called small and large; keyword arguments override keys."""
    chat = {"kind": "chat", "url": url, "attempts": 1}
    models = {
        "primary": chat | {"model": "small", "price": [1.0, 2.0]},
        "guardian": chat | {"model": "large", "price": [10.0, 20.0]},
    }
    if "judge" in sections:
        models["judge"] = chat | {"model": "judge", "price": [100.0, 200.0]}
    for name, extra in sections.items():
        models[name] = {k: v for k, v in (models.get(name, {}) | extra).items() if v is not None}
    lines = []
    for name, keys in models.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
        if keys.get("kind") in ("chat", "sampling", "logprob"):
            lines += [f"[{name}.pinned]", 'mode = "plain"']
    Path("arbitrage.toml").write_text("\n".join(lines) + "\n")


def write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_menus(count, **more):
    rows = [{"id": f"q{n}", "question": f"Question {n}?", "choices": ["left", "right"], "answer": "A", **more}
            for n in range(count)]  # fmt: skip
    write_rows("questions.jsonl", rows)


def write_requests(count, expected="fine", **more):
    rows = [{"id": f"q{n}", "messages": [{"role": "user", "content": f"Request {n}?"}], "expected": expected, **more}
            for n in range(count)]  # fmt: skip
    write_rows("requests.jsonl", rows)


def number_in(body):
    """Return the number of the question in a request."""
    return int(re.search(r"(?:Question|Request) (\d+)\?", json.dumps(body["messages"]))[1])


def both(path, body, number):
    """The small model is unsure, the large one is not."""
    return scores(0.6, 0.4, model="small-1") if body["model"] == "small" else scores(0.1, 0.9, model="large-1")


def stored_keys(output):
    path = Path(f"{output}.replies.sqlite")
    if not path.exists():
        return set()
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("select name from sqlite_master where name = 'replies'").fetchall()
        return {key for (key,) in connection.execute("select key from replies")} if tables else set()


MENU = ["collect", "questions.jsonl", "-o", "log.parquet"]
TEXT = ["collect", "requests.jsonl", "-o", "log.parquet", "--form", "text"]
ASK = {"confidence": "ask"}


def answers(first, second="fine", confidence=0.8, judge=None):
    """Return a server for text form: an answer from each model, and a rating of the Primary's."""

    def reply(path, body, number):
        if body["model"] == "judge":
            return judge(body) if judge else completion('{"grade": 0.25}')
        if "How sure are you" in body["messages"][0]["content"]:
            return completion(json.dumps({"confidence": confidence}), usage=(30, 3))
        answer = first if body["model"] == "small" else second
        return answer(body) if callable(answer) else completion(answer, model=f"{body['model']}-1")

    return reply


@pytest.mark.parametrize(("settings", "warned"), [({}, True), ({"temperature": 0}, False)])
def test_rows_without_settings_are_pointed_out_where_requests_keep_their_own(run, settings, warned):
    write_requests(2, **settings)
    with serving(answers("fine")) as upstream:
        configure(upstream.url, primary=ASK, task={"settings": "as requested"})
        shown = run(*TEXT, "--grade", "exact")
    assert ("no row has settings" in shown.stderr) is warned
    log = ScoreLog.read("log.parquet")
    assert ("settings" in log.extra) is not warned
    assert log.identities["requests"] == {
        "settings": "as requested",
        "fields": {name: [value] for name, value in settings.items()},
    }


# menu form


def test_a_menu_log_holds_scores_identities_tokens_costs_replies_and_labels(run):
    write_menus(3, group="space")
    with serving(both) as upstream:
        configure(upstream.url)
        shown = run(*MENU).stdout
    log = ScoreLog.read("log.parquet")
    assert log.primary.tolist() == [0.6, 0.4] * 3
    assert log.guardian.tolist() == [0.1, 0.9] * 3
    assert log.id.tolist() == ["q0", "q1", "q2"]
    assert log.label.tolist() == [0, 0, 0]
    assert log.group.tolist() == ["space"] * 3
    assert log.context.tolist() == ["Question 0?", "Question 1?", "Question 2?"]
    assert log.actions.tolist() == ["left", "right"] * 3
    assert log.primary_usage.input_tokens.tolist() == [10] * 3
    assert log.guardian_usage.output_tokens.tolist() == [5] * 3
    assert log.primary_usage.cost.tolist() == pytest.approx([20e-6] * 3)
    assert log.guardian_usage.cost.tolist() == pytest.approx([200e-6] * 3)
    assert json.loads(log.extra["primary_raw"][2]) == {"scores": [0.6, 0.4]}
    assert log.extra["guardian_served"].tolist() == ["large-1"] * 3
    assert log.extra["primary_error"].tolist() == [""] * 3
    for role, name in (("primary", "small"), ("guardian", "large")):
        identity = log.identities[role]
        assert (identity["endpoint"], identity["model"], identity["mode"]) == (upstream.url, name, "plain")
    assert len(upstream.bodies) == 6
    assert "primary: 3 rows, 0 failed, cost $6e-05" in shown
    assert "Written: log.parquet; raw replies in log.parquet.replies.sqlite" in shown


def test_a_collected_log_can_be_calibrated(run):
    write_menus(60)
    with serving(both) as upstream:
        configure(upstream.url)
        run(*MENU)
    run("calibrate", "log.parquet", "--alpha", "0.05", "-o", "certificate.json")
    certificate = json.loads(Path("certificate.json").read_text())
    assert said(certificate, "identities")["guardian"]["model"] == "large"


def test_a_primary_that_fails_has_no_opinion_and_a_guardian_that_fails_is_missing(run):
    def reply(path, body, number):
        row = number_in(body)
        if body["model"] == "small" and row == 1:
            return completion("I would rather not say.")
        if body["model"] == "large" and row == 2:
            return 400, {"error": {"message": "no such thing"}}
        return both(path, body, number)

    write_menus(4)
    with serving(reply) as upstream:
        configure(upstream.url)
        result = run(*MENU)
        log = ScoreLog.read("log.parquet")
        assert len(log) == 4
        assert log.no_opinion.tolist() == [False, True, False, False]
        assert log.missing.tolist() == [False, False, True, False]
        assert log.guardian[2:4].tolist() == [0.1, 0.9]
        assert log.extra["primary_error"][1].startswith("ReplyError: there is no JSON object")
        assert log.extra["primary_raw"][1] == "I would rather not say."
        assert log.primary_usage.cost[1] == pytest.approx(20e-6)  # an unreadable reply is still paid for
        assert log.extra["guardian_error"][2] == f"UpstreamError: {upstream.url}: status 400 (no such thing)"
        assert "no such thing" in log.extra["guardian_raw"][2]
        assert "1 row has no Guardian score" in result.stderr
        sent = len(upstream.bodies)
        upstream.reply = both
        run(*MENU)
        again = upstream.bodies[sent:]
    assert [(body["model"], number_in(body)) for body in again] == [
        ("large", 2)
    ]  # a stored reply is not requested again
    assert ScoreLog.read("log.parquet").missing.tolist() == [False] * 4


def test_limit_asks_about_the_first_rows_only(run):
    write_menus(9)
    with serving(both) as upstream:
        configure(upstream.url)
        run(*MENU, "--limit", "2")
        assert sorted(map(number_in, upstream.bodies)) == [0, 0, 1, 1]
        assert ScoreLog.read("log.parquet").id.tolist() == ["q0", "q1"]
        run(*MENU)
        assert sorted(map(number_in, upstream.bodies)) == sorted([*range(9)] * 2)


def test_concurrency_bounds_the_calls_in_flight(run):
    async def slow(path, body, number):
        await asyncio.sleep(0.02)
        return both(path, body, number)

    write_menus(12)
    with serving(slow) as upstream:
        configure(upstream.url)
        run(*MENU, "--concurrency", "3")
        assert upstream.most_at_once == 3


def test_samples_of_one_question_are_kept_apart(run):
    letters = Counter()

    def reply(path, body, number):
        if body["model"] == "large":
            return both(path, body, number)
        digest = fingerprint(body)
        letters[digest] += 1
        return completion("ABA"[letters[digest] - 1])

    write_menus(4)
    with serving(reply) as upstream:
        configure(upstream.url, primary={"kind": "sampling", "samples": 3})
        run(*MENU)
        assert ScoreLog.read("log.parquet").primary.tolist() == pytest.approx([2 / 3, 1 / 3] * 4)
        assert len(upstream.bodies) == 16
        run(*MENU)
        assert len(upstream.bodies) == 16
    assert ScoreLog.read("log.parquet").primary.tolist() == pytest.approx([2 / 3, 1 / 3] * 4)


def test_equal_questions_with_different_ids_are_each_sent(run):
    write_rows("questions.jsonl", [{"id": n, "question": "Question 0?", "choices": ["x", "y"]} for n in "ab"])
    with serving(both) as upstream:
        configure(upstream.url)
        run(*MENU, "--concurrency", "1")
        assert len(upstream.bodies) == 4


def test_shuffled_options_reach_the_model_in_another_order_but_the_log_in_the_original_one(run):
    def prefers(path, body, number):
        shown = json.loads(re.search(r"Answer choices:\n(.*)\n", body["messages"][-1]["content"])[1])
        return scores(*({"left": 0.6, "middle": 0.3, "right": 0.1}[option] for option in shown))

    rows = [{"question": f"Question {n}?", "choices": ["left", "middle", "right"]} for n in range(12)]
    write_rows("questions.jsonl", rows)
    with serving(prefers) as upstream:
        configure(upstream.url)
        run(*MENU, "--shuffle-options")
        orders = {re.search(r"Answer choices:\n(.*)\n", b["messages"][-1]["content"])[1] for b in upstream.bodies}
    log = ScoreLog.read("log.parquet")
    assert len(orders) > 2
    assert log.primary.tolist() == pytest.approx([0.6, 0.3, 0.1] * 12)
    assert log.actions.tolist() == ["left", "middle", "right"] * 12
    assert log.identities["guardian"]["option_order"] == "shuffled by content"


def test_json_prints_one_document(run):
    write_menus(2)
    with serving(lambda p, b, n: (400, {}) if b["model"] == "large" and number_in(b) else both(p, b, n)) as upstream:
        configure(upstream.url)
        result = run(*MENU, "--json")
    assert json.loads(result.stdout) == {
        "rows": 2, "missing_guardian_rows": 1, "primary_failures": 0, "primary_cost": pytest.approx(40e-6),
        "guardian_failures": 1, "guardian_cost": pytest.approx(200e-6), "output": "log.parquet",
        "cost": pytest.approx(240e-6), "replies": "log.parquet.replies.sqlite",
    }  # fmt: skip
    assert result.stderr == ""


@pytest.mark.parametrize(("model", "name"), [("small", "Primary"), ("large", "Guardian")])
def test_a_model_that_fails_on_all_of_the_first_rows_stops_the_collection_with_one_line(run, model, name):
    def reply(path, body, number):
        return (401, {"error": {"message": "bad key"}}) if body["model"] == model else both(path, body, number)

    write_menus(60)
    with serving(reply) as upstream:
        configure(upstream.url)
        result = run(*MENU, "--json", "--concurrency", "4", code=2)
        assert 40 <= len(upstream.bodies) <= 50
    wanted = f"arbitrage: the {name} failed on all of the first 20 rows"
    assert re.fullmatch(
        rf"{wanted} \(UpstreamError: .*401 \(bad key\)\); fix that first: `arbitrage check`\n", result.stderr
    )
    assert not Path("log.parquet").exists()


def test_one_success_among_the_first_rows_lets_the_collection_continue(run):
    def reply(path, body, number):
        return both(path, body, number) if body["model"] == "large" or number_in(body) == 19 else (400, {})

    write_menus(40)
    with serving(reply) as upstream:
        configure(upstream.url)
        run(*MENU, "--concurrency", "2")
    assert ScoreLog.read("log.parquet").no_opinion.sum() == 39


# money


def priced(path, body, number):
    """Report fewer tokens than the request has bytes and than its limit, varying by question."""
    row = number_in(body)
    return scores(0.6, 0.4, usage=(150 + row % 7, 20 + row % 11))


def bill(upstream, reply, prices):
    """Return what the server would charge for all requests."""
    total = 0.0
    for number, body in enumerate(upstream.bodies):
        usage = reply(PATH, body, number)["usage"]
        into, out = prices[body["model"]]
        total += (into * usage["prompt_tokens"] + out * usage["completion_tokens"]) / 1e6
    return total


def size(body):
    return len(json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode())


def test_a_dry_run_sends_nothing_and_prices_the_requests_at_their_limits(run):
    write_menus(5)
    with serving(both) as upstream:
        configure(upstream.url, guardian={"max_tokens": 80})
        shown = json.loads(run(*MENU, "--dry-run", "--json").stdout)
        table = run(*MENU, "--dry-run").stdout
        assert upstream.bodies == []
        assert sorted(path.name for path in Path.cwd().iterdir()) == ["arbitrage.toml", "questions.jsonl"]
        run(*MENU)
        sent = {name: [b for b in upstream.bodies if b["model"] == name] for name in ("small", "large")}
    small, large = (sum(size(body) // 4 for body in sent[name]) for name in ("small", "large"))
    usages = [model["spent"] for model in shown["models"]]
    assert [f["calls"] for f in usages] == [5, 5]
    assert [f["input_tokens"] for f in usages] == [small, large]
    assert [f["output_tokens"] for f in usages] == [5 * 50, 5 * 80]
    cost = (small * 1 + 250 * 2 + large * 10 + 400 * 20) / 1e6
    assert shown["cost"] == pytest.approx(cost)
    assert f"Cost: about ${cost:.2g}. Nothing was sent" in table
    assert [model["role"] for model in shown["models"]] == ["primary", "guardian"]
    assert [line.split()[0] for line in table.splitlines() if upstream.url in line] == ["Primary", "Guardian"]


def test_a_dry_run_counts_samples_ratings_and_judgements(run):
    write_menus(2)
    with serving(both) as upstream:
        configure(upstream.url, primary={"kind": "sampling", "samples": 3})
        shown = json.loads(run(*MENU, "--dry-run", "--json").stdout)
        assert [model["spent"]["calls"] for model in shown["models"]] == [6, 2]
        write_requests(2)
        configure(upstream.url, primary=ASK, judge={})
        shown = json.loads(run(*TEXT, "--grade", "judge", "--dry-run", "--json").stdout)
        assert [model["spent"]["calls"] for model in shown["models"]] == [4, 2, 4]
        assert upstream.bodies == []


def test_a_dry_run_needs_no_api_key(run):
    with serving(priced) as upstream:
        configure(upstream.url, primary={"key_env": "SOME_PROVIDERS_KEY"})
        write_menus(2)
        assert json.loads(run(*MENU, "--dry-run", "--json").stdout)["models"]
        assert "SOME_PROVIDERS_KEY is not set" in run(*MENU, code=2).stderr


def test_a_dry_run_excludes_stored_replies(run):
    write_menus(5)
    with serving(both) as upstream:
        configure(upstream.url)
        run(*MENU, "--limit", "3")
        shown = json.loads(run(*MENU, "--dry-run", "--json").stdout)
        assert [model["spent"]["calls"] for model in shown["models"]] == [2, 2]
        run(*MENU)
        assert json.loads(run(*MENU, "--dry-run", "--json").stdout)["cost"] == 0
        assert len(upstream.bodies) == 10


def test_an_unknown_price_is_reported_as_unknown(run):
    write_menus(2)
    with serving(both) as upstream:
        configure(upstream.url, guardian={"price": None})
        assert "Cost: unknown; set price = [IN, OUT] in [guardian]." in run(*MENU, "--dry-run").stdout
        assert json.loads(run(*MENU, "--dry-run", "--json").stdout)["cost"] is None
        assert "set price = [IN, OUT]" in run(*MENU, "--max-cost", "1", code=2).stderr
        assert upstream.bodies == []
        assert "guardian: 2 rows, 0 failed, cost unknown" in run(*MENU).stdout
        assert json.loads(run(*MENU, "--json").stdout)["guardian_cost"] is None
    assert ScoreLog.read("log.parquet").guardian_usage.cost is None
    assert ScoreLog.read("log.parquet").primary_usage.cost is not None


PRICES = {"small": (1.0, 2.0), "large": (10.0, 20.0)}


@pytest.mark.parametrize("concurrency", [1, 16])
def test_a_collection_stops_before_exceeding_its_cost_limit_and_resumes_with_a_higher_one(run, concurrency):
    write_menus(120)
    with serving(priced) as upstream:
        configure(upstream.url)
        result = run(*MENU, "--max-cost", "0.2", "--concurrency", concurrency, code=2)
        assert re.search(
            r"arbitrage: the next call could take the bill past \$0.2 .*higher --max-cost\n$", result.stderr
        )
        assert not Path("log.parquet").exists()
        before = len(upstream.bodies)
        assert 20 < before < 240
        assert 0.05 < bill(upstream, priced, PRICES) <= 0.2
        run(*MENU, "--max-cost", "0.5", "--concurrency", concurrency)
        assert bill(upstream, priced, PRICES) <= 0.5
        assert len(upstream.bodies) <= 240 + concurrency
    log = ScoreLog.read("log.parquet")
    total = float(log.primary_usage.cost.sum() + log.guardian_usage.cost.sum())
    assert total == pytest.approx(sum(
        (p * (150 + n % 7) + q * (20 + n % 11)) / 1e6 for n in range(120) for p, q in PRICES.values()
    ))  # fmt: skip


def test_the_cost_limit_covers_all_runs_of_a_collection(run):
    write_menus(120)
    with serving(priced) as upstream:
        configure(upstream.url)
        run(*MENU, "--max-cost", "0.1", "--concurrency", "1", code=2)
        before = len(upstream.bodies)
        for _ in range(3):
            run(*MENU, "--max-cost", "0.1", "--concurrency", "1", code=2)
        assert len(upstream.bodies) - before <= 10  # a cheap Primary call may still fit where a Guardian call does not
        assert bill(upstream, priced, PRICES) <= 0.1


def test_a_cost_limit_is_refused_if_the_cost_of_stored_replies_is_unknown(run):
    dear = {"price": [1000.0, 2000.0]}
    write_menus(120)
    with serving(priced) as upstream:
        configure(upstream.url, primary=dear, guardian={"price": None})
        run(*MENU, "--limit", "60")
        spent = float(ScoreLog.read("log.parquet").primary_usage.cost.sum())
        configure(upstream.url, primary=dear)
        run(*MENU, "--max-cost", spent + 0.5, code=2)
        assert Counter(body["model"] for body in upstream.bodies)["small"] == 60


def test_a_cost_limit_below_any_call_sends_nothing(run):
    write_menus(3)
    with serving(priced) as upstream:
        configure(upstream.url)
        run(*MENU, "--max-cost", "0.000001", code=2)
        assert upstream.bodies == []


# text form


def test_a_text_log_is_in_router_form_with_confidences_grades_answers_and_the_cost_of_the_rating(run):
    write_requests(3, group="space")

    def sometimes(body):
        return completion("fine" if number_in(body) else "wrong", usage=(20, 4))

    with serving(answers(sometimes)) as upstream:
        configure(upstream.url, primary=ASK)
        run(*TEXT, "--grade", "exact")
        sent = list(upstream.bodies)
    log = ScoreLog.read("log.parquet")
    assert log.is_router
    assert log.primary.tolist() == [0, 0.8] * 3
    assert log.guardian.tolist() == [1, 0, 1, 1, 1, 1]
    assert log.outcome("correct").tolist() == [1, 0, 1, 1, 1, 1]
    assert log.extra["primary_answer"].tolist() == ["wrong", "fine", "fine"]
    assert log.extra["guardian_answer"].tolist() == ["fine"] * 3
    assert log.extra["guardian_served"].tolist() == ["large-1"] * 3
    assert log.group.tolist() == ["space"] * 3
    assert log.context.tolist()[1] == "Request 1?"
    assert log.primary_usage.input_tokens.tolist() == [50] * 3
    assert log.primary_usage.cost.tolist() == pytest.approx([(50 * 1 + 7 * 2) / 1e6] * 3)
    assert log.identities["grader"] == {"kind": "exact"}
    assert log.identities["primary"]["confidence"] == "ask"
    assert Counter(body["model"] for body in sent) == {"small": 6, "large": 3}


def test_the_confidence_can_come_from_the_logprobs_of_the_answer(run):
    write_requests(2)
    tokens = {"content": [{"token": "fi", "logprob": -0.1}, {"token": "ne", "logprob": -0.3}]}
    with serving(answers(lambda body: completion("fine", logprobs=tokens))) as upstream:
        configure(upstream.url, primary={"confidence": "logprob"})
        run(*TEXT, "--grade", "exact")
        assert len(upstream.bodies) == 4
    assert ScoreLog.read("log.parquet").primary.tolist() == pytest.approx([0, 0.818731] * 2, abs=1e-6)


def test_in_text_form_a_failed_primary_defers_and_a_failed_guardian_is_missing(run):
    def first(body):
        return (400, {"error": "no"}) if number_in(body) == 1 else completion("fine")

    def second(body):
        return (400, {"error": "no"}) if number_in(body) == 2 else completion("fine")

    write_requests(4)
    with serving(answers(first, second)) as upstream:
        configure(upstream.url, primary=ASK)
        run(*TEXT, "--grade", "exact")
    log = ScoreLog.read("log.parquet")
    assert log.no_opinion.tolist() == [False, True, False, False]
    assert log.missing.tolist() == [False, False, True, False]
    assert "status 400" in log.extra["primary_error"][1]
    assert "status 400" in log.extra["guardian_error"][2]
    assert log.extra["primary_answer"].tolist() == ["fine", '{"error": "no"}', "fine", "fine"]


def test_an_unreadable_rating_means_no_opinion_but_keeps_the_answer(run):
    write_requests(2)
    with serving(answers("fine", confidence="very")) as upstream:
        configure(upstream.url, primary=ASK)
        run(*TEXT, "--grade", "exact")
    log = ScoreLog.read("log.parquet")
    assert log.no_opinion.tolist() == [True, True]
    assert log.extra["primary_answer"].tolist() == ["fine", "fine"]
    assert log.extra["primary_error"].tolist() == ["", ""]


def test_grade_regex_looks_for_the_pattern(run):
    write_requests(2, expected=r"^4\d\b")
    with serving(answers("42 it is", "about 42")) as upstream:
        configure(upstream.url, primary=ASK)
        run(*TEXT, "--grade", "regex")
    assert ScoreLog.read("log.parquet").outcome("correct").tolist() == [0, 1] * 2


def test_grade_json_equal_compares_tool_calls_ignoring_ids_spaces_and_order(run):
    def call(arguments):
        function = {"name": "weather", "arguments": arguments}
        return completion(None, tool_calls=[{"id": "call_7", "type": "function", "function": function}])

    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    expected = [{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}]
    write_requests(2, expected=expected, tools=tools)
    first, second = '{"city": "Oslo"}', '{ "days":2, "city":"Oslo" }'
    with serving(answers(lambda body: call(first), lambda body: call(second))) as upstream:
        configure(upstream.url, primary=ASK)
        run(*TEXT, "--grade", "json-equal")
        bodies = [body for body in upstream.bodies if "tools" in body]
    log = ScoreLog.read("log.parquet")
    assert log.outcome("correct").tolist() == [1, 0] * 2
    assert json.loads(log.extra["guardian_answer"][0]) == expected
    assert [body["tools"] for body in bodies] == [tools] * 4


def test_grade_judge_asks_the_judge_about_each_answer(run):
    def judge(body):
        seen = body["messages"][0]["content"]
        assert "# Reference answer\nfine" in seen
        return completion('{"grade": 0.25}' if "# Answer\npoor" in seen else '{"grade": 0.75}')

    write_requests(2)
    with serving(answers("poor", "fair", judge=judge)) as upstream:
        configure(upstream.url, primary=ASK, judge={})
        run(*TEXT, "--grade", "judge")
        calls = Counter(body["model"] for body in upstream.bodies)
        run(*TEXT, "--grade", "judge")
        assert Counter(body["model"] for body in upstream.bodies) == calls == {"small": 4, "large": 2, "judge": 4}
    log = ScoreLog.read("log.parquet")
    assert log.outcome("correct").tolist() == [0.75, 0.25] * 2
    assert log.guardian.tolist() == [1, 0.5] * 2
    assert log.identities["grader"]["model"] == "judge"


def test_an_unreadable_grade_leaves_the_row_without_a_guardian_score(run):
    write_requests(2)
    with serving(answers("poor", "fair", judge=lambda body: completion("hard to say"))) as upstream:
        configure(upstream.url, primary=ASK, judge={})
        run(*TEXT, "--grade", "judge")
    assert ScoreLog.read("log.parquet").missing.tolist() == [True, True]


def test_grade_by_a_python_function_sync_or_async(run, monkeypatch):
    Path("my_graders.py").write_text(
        "def share(request, answer, expected):\n"
        "    return len(set(answer) & set(expected)) / len(set(expected))\n"
        "async def wordy(request, answer, expected):\n"
        "    return None if 'Request 1?' in request.messages[0]['content'] else answer == expected\n"
        "def percent(request, answer, expected):\n"
        "    return 100\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "my_graders", raising=False)
    write_requests(2, expected="abcd")
    with serving(answers("ab", "abcd")) as upstream:
        configure(upstream.url, primary=ASK)
        run(*TEXT, "--grade", "python:my_graders:share")
        log = ScoreLog.read("log.parquet")
        assert log.outcome("correct").tolist() == [1, 0.5] * 2
        assert log.identities["grader"].items() >= {"kind": "python", "name": "my_graders:share"}.items()
        run(*TEXT, "--grade", "python:my_graders:wordy")
        log = ScoreLog.read("log.parquet")
        assert log.outcome("correct")[:2].tolist() == [1, 0]
        assert log.missing.tolist() == [False, True]
        assert "a grade is a number from 0 to 1" in run(*TEXT, "--grade", "python:my_graders:percent", code=2).stderr
        assert "cannot be loaded" in run(*TEXT, "--grade", "python:my_graders:nothing", code=2).stderr
        assert len(upstream.bodies) == 6  # grading again costs no further answers


def collect_with_keys(keys, *arguments):
    return subprocess.run(
        [*COMMAND, *TEXT, "--grade", "human", *arguments],
        input=keys, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_person_grades_with_keys_and_can_continue_later(run):
    write_requests(3)
    with serving(answers(lambda body: completion(f"poor {number_in(body)}"), "fair")) as upstream:
        configure(upstream.url, primary=ASK)
        first = collect_with_keys("y\nx\nn\n", "--concurrency", "1", "--limit", "1")
        assert first.returncode == 0, first.stderr
        grades = sorted(ScoreLog.read("log.parquet").outcome("correct").tolist())
        assert grades == [0, 1]
        assert "user: Request 0?" in first.stderr
        assert "answer: poor 0" in first.stderr
        assert "expected: fine" in first.stderr
        assert "large" not in first.stderr  # the person does not see which model answered
        second = collect_with_keys("h\nh\n-\n-\n", "--concurrency", "1", "--json")
        assert second.returncode == 0, second.stderr
        assert "Request 0?" not in second.stderr
        assert json.loads(second.stdout)["missing_guardian_rows"] == 1
        assert len(upstream.bodies) == 9
    log = ScoreLog.read("log.parquet")
    assert sorted(log.outcome("correct")[:2].tolist()) == grades
    assert log.outcome("correct")[2:4].tolist() == [0.5, 0.5]
    assert log.missing.tolist() == [False, False, True]


def test_text_form_needs_a_known_grader_and_expected_answers(run):
    write_rows("requests.jsonl", [{"messages": [{"role": "user", "content": "Request 0?"}]}])
    with serving(answers("fine")) as upstream:
        configure(upstream.url, primary=ASK)
        assert "needs --grade" in run(*TEXT, code=2).stderr
        assert (
            "there is no grader 'best'; use one of exact, regex, json-equal"
            in run(*TEXT, "--grade", "best", code=2).stderr
        )
        assert "--grade exact needs the expected answers" in run(*TEXT, "--grade", "exact", code=2).stderr
        assert "no section [judge]" in run(*TEXT, "--grade", "judge", code=2).stderr


def test_a_dry_run_counts_models_that_are_functions_and_people(run):
    Path("my_models.py").write_text("def length(query):\n    return [len(a) / 10 for a in query.actions]\n")
    write_menus(2)
    with serving(both) as upstream:
        configure(
            upstream.url,
            primary={"kind": "function", "url": None, "model": None, "name": "length", "function": "my_models:length"},
        )
        shown = json.loads(run(*MENU, "--dry-run", "--json").stdout)
        assert [m["spent"]["calls"] for m in shown["models"]] == [2, 2]
        configure(upstream.url, guardian={"kind": "human", "url": None, "model": None, "name": "team"})
        json.loads(run(*MENU, "--dry-run", "--json").stdout)
        assert upstream.bodies == []


def test_a_dry_run_grades_nothing(run):
    Path("my_strict.py").write_text(
        "import json\ndef strict(request, answer, expected):\n    return json.loads(answer)['ok']\n"
    )
    write_requests(2)
    with serving(answers("fine")) as upstream:
        configure(upstream.url, primary=ASK)
        for how in ("human", "python:my_strict:strict"):
            shown = json.loads(run(*TEXT, "--grade", how, "--dry-run", "--json").stdout)
            assert [m["spent"]["calls"] for m in shown["models"]] == [4, 2]
            assert shown["cost"] is not None
        assert upstream.bodies == []


def test_keys_may_come_from_a_file(run):
    write_requests(1)
    Path("keys").write_text("y\nn\n")
    with serving(answers("poor", "fair")) as upstream, Path("keys").open() as keys:
        configure(upstream.url, primary=ASK)
        process = subprocess.run(
            [*COMMAND, *TEXT, "--grade", "human"], stdin=keys, capture_output=True, text=True, timeout=60
        )
        assert process.returncode == 0, process.stderr[-500:]


def test_equal_answers_to_one_request_are_graded_once(run):
    write_requests(3)
    seen = []

    def judge(body):
        seen.append(body)
        return completion(json.dumps({"grade": len(seen) / 10}))

    with serving(answers("same", "same", judge=judge)) as upstream:
        configure(upstream.url, primary=ASK, judge={})
        run(*TEXT, "--grade", "judge")
        log = ScoreLog.read("log.parquet")
        run(*TEXT, "--grade", "judge")
        again = ScoreLog.read("log.parquet")
    assert len(seen) == 3
    assert log.outcome("correct").tolist() == again.outcome("correct").tolist()


def test_a_custom_grader_that_fails_is_reported_on_one_line(run):
    Path("my_broken.py").write_text("def broken(request, answer, expected):\n    return 1 / 0\n")
    write_requests(2)
    with serving(answers("fine")) as upstream:
        configure(upstream.url, primary=ASK)
        assert "ZeroDivisionError" in run(*TEXT, "--grade", "python:my_broken:broken", code=2).stderr


# mistakes


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_sent(run):
    write_menus(2)
    with serving(both) as upstream:
        configure(upstream.url)
        run("collect", "questions.jsonl", "-o", "log.xlsx", code=2)
        run("collect", "questions.jsonl", "-o", "questions.jsonl", code=2)
        run("collect", "questions.jsonl", "-o", "no/such/folder/log.parquet", code=2)
        assert upstream.bodies == []


def test_an_unchecked_model_is_not_called(run):
    write_menus(2)
    with serving(both) as upstream:
        configure(upstream.url)
        text = Path("arbitrage.toml").read_text()
        Path("arbitrage.toml").write_text(text.replace('[primary.pinned]\nmode = "plain"\n', ""))
        assert "run `arbitrage check`" in run(*MENU, code=2).stderr
        assert upstream.bodies == []


# an interrupted collection resumes

ROWS, SAMPLES, CONCURRENCY, KILLS, SEED = 80, 3, 8, 20, 7


def sampled(path, body, number):
    """Reply with a function of the request alone, after a random delay."""
    digest = sha256(json.dumps(body, sort_keys=True).encode()).digest()
    usage = (100 + digest[0], 1 + digest[1] % 7)
    letter = completion("AB"[digest[2] % 2] if digest[3] % 8 else "neither", usage=usage)
    document = letter if body["model"] == "small" else scores(digest[2] / 255, digest[3] / 255, usage=usage)

    async def later():
        await asyncio.sleep(0.002 + 0.008 * random.random())
        return document

    return later()


def key_of(upstream, body):
    """Return the key under which the reply to a request is stored."""
    sample, role = (body["seed"] - SEED, "primary") if body["model"] == "small" else (0, "guardian")
    return fingerprint([role, upstream.url, PATH, body, sample, f"q{number_in(body)}"])


def quiet(upstream):
    """Wait until no request is in flight."""
    seen = -1
    while upstream.under_way or seen != len(upstream.bodies):
        seen = len(upstream.bodies)
        time.sleep(0.03)


def until(reached, process):
    """Wait until a process has reached a state."""
    ends = time.monotonic() + 60
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < ends, "the collection makes no progress"
        time.sleep(0.0005)


@contextmanager
def collect_in_a_process(output):
    arguments = ["collect", "questions.jsonl", "-o", output, "--concurrency", str(CONCURRENCY), "--json"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def collect_to_the_end(output):
    with collect_in_a_process(output) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    return json.loads(out)


@pytest.mark.proof
def test_a_collection_killed_twenty_times_ends_like_an_undisturbed_one_and_repeats_no_stored_call(run):
    draws = random.Random(20)
    needed = ROWS * (SAMPLES + 1)
    write_menus(ROWS)
    with serving(sampled) as upstream:
        configure(upstream.url, primary={"kind": "sampling", "samples": SAMPLES, "seed": SEED})
        collect_to_the_end("undisturbed.jsonl")
        assert len(upstream.bodies) == needed
        upstream.bodies.clear()
        stored = set()
        for _ in range(KILLS):
            start = len(upstream.bodies)
            after = start + draws.randint(1, 24)
            with collect_in_a_process("log.jsonl") as process:
                until(lambda after=after: len(upstream.bodies) >= after, process)
                time.sleep(draws.random() * 0.005)
                os.kill(process.pid, signal.SIGKILL)
            quiet(upstream)
            sent = Counter(key_of(upstream, body) for body in upstream.bodies[start:])
            assert set(sent.values()) == {1}
            assert not set(sent) & stored
            kept = stored_keys("log.jsonl")
            assert stored <= kept
            assert kept - stored <= set(sent)
            assert len(kept - stored) >= len(sent) - CONCURRENCY
            stored = kept
        assert len(stored) < needed
        assert not Path("log.jsonl").exists()
        start = len(upstream.bodies)
        figures = collect_to_the_end("log.jsonl")
        assert figures["rows"] == ROWS
        last = Counter(key_of(upstream, body) for body in upstream.bodies[start:])
        assert last == Counter(stored_keys("log.jsonl") - stored)
        assert len(stored_keys("log.jsonl")) == needed
        assert len(upstream.bodies) <= needed + KILLS * CONCURRENCY
        collect_to_the_end("log.jsonl")
        assert len(upstream.bodies) == start + sum(last.values())
    for ending in ("", ".meta.json"):
        assert Path(f"log.jsonl{ending}").read_bytes() == Path(f"undisturbed.jsonl{ending}").read_bytes()


def test_a_collection_interrupted_from_the_keyboard_says_how_to_resume(run):
    async def slow(path, body, number):
        await asyncio.sleep(0.05)
        return scores(0.6, 0.4)

    write_menus(50)
    with serving(slow) as upstream:
        configure(upstream.url)
        with collect_in_a_process("log.jsonl") as process:
            until(lambda: len(upstream.bodies) >= 30, process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert re.fullmatch(r"arbitrage: interrupted; .* same command .*\n", err)
        assert len(stored_keys("log.jsonl")) >= 30 - CONCURRENCY
        collect_to_the_end("log.jsonl")
        assert len(upstream.bodies) <= 100 + CONCURRENCY


def test_a_collection_at_its_cost_limit_finishes_and_stores_calls_in_flight(run):
    async def slow(path, body, number):
        await asyncio.sleep(0.02)
        return priced(path, body, number)

    write_menus(120)
    with serving(slow) as upstream:
        configure(upstream.url)
        for cents in range(14, 26, 2):
            run(*MENU, "--max-cost", cents / 100, "--concurrency", "16", code=2)
            quiet(upstream)
            assert len(upstream.bodies) == len(stored_keys("log.parquet"))
            assert bill(upstream, priced, PRICES) <= cents / 100


# the function behind the command


def test_collect_takes_paths_writes_the_log_and_returns_it(run):
    write_menus(4)
    seen = []
    with serving(both) as upstream:
        configure(upstream.url)
        expected = asyncio.run(
            Collection.of("arbitrage.toml", "questions.jsonl", output="log.parquet", limit=3).estimate()
        )
        assert [(one.origin, one.spent.calls) for one in expected] == [(upstream.url, 3)] * 2
        assert upstream.bodies == []
        log = asyncio.run(
            collect(
                "arbitrage.toml",
                "questions.jsonl",
                output="log.parquet",
                limit=3,
                progress=lambda progress: seen.append((progress.done, progress.total)),
            )
        )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert log.primary.tolist() == ScoreLog.read("log.parquet").primary.tolist() == [0.6, 0.4] * 3
    assert collected_totals(log)["rows"] == 3


def test_collect_takes_a_configuration_and_questions_in_memory(run):
    with serving(answers("fine")) as upstream:
        configure(upstream.url, task={"form": "text"}, primary=ASK)
        rows = Requests(
            requests=[ChatRequest({"messages": [{"role": "user", "content": "Hi"}]}, id="a")], expected=["fine"]
        )
        log = asyncio.run(collect(read_config(), rows, output="log.jsonl", grade="exact"))
    assert log.is_router
    assert log.id.tolist() == ["a"]


def test_collect_refuses_an_output_it_could_not_write_before_any_call(run):
    write_menus(1)
    with serving(both) as upstream:
        configure(upstream.url)
        with pytest.raises(ArbitrageError):
            asyncio.run(collect("arbitrage.toml", "questions.jsonl", output="no/such/folder/log.parquet"))
        assert upstream.bodies == []


def test_a_person_takes_part_as_a_model_or_as_a_grader(run):
    configure("http://127.0.0.1:9/v1")
    assert not has_person(read_config(), "exact")
    assert has_person(read_config(), "human")
    configure(
        "http://127.0.0.1:9/v1", guardian={"kind": "human", "url": None, "model": None, "price": None, "name": "team"}
    )
    assert has_person(read_config())


def test_a_custom_grader_that_raises_a_scorer_error_leaves_the_row_ungraded(run):
    Path("my_unsure.py").write_text(
        "from conformal_arbitrage import ReplyError\n"
        "def unsure(request, answer, expected):\n    raise ReplyError('cannot tell')\n"
    )
    write_requests(2)
    with serving(answers("fine")) as upstream:
        configure(upstream.url, primary=ASK)
        run(*TEXT, "--grade", "python:my_unsure:unsure")
    assert ScoreLog.read("log.parquet").missing.tolist() == [True, True]


def test_a_dry_run_counts_the_ratings_of_a_model_whose_name_is_pinned(run):
    write_requests(3)
    with serving(answers("fine")) as upstream:
        configure(upstream.url, primary=ASK)
        text = Path("arbitrage.toml").read_text()
        Path("arbitrage.toml").write_text(text.replace('mode = "plain"', 'mode = "plain"\nserved = "small-1"', 1))
        shown = json.loads(run(*TEXT, "--grade", "exact", "--dry-run", "--json").stdout)
    assert [model["spent"]["calls"] for model in shown["models"]] == [6, 3]


def test_a_fixed_set_of_options_and_the_column_of_answers_that_was_found(run):
    write_rows("tickets.jsonl", [{"text": f"Number {k}?", "label": "bug"} for k in range(2)])
    with serving(both) as upstream:
        configure(upstream.url)
        done = run(
            "collect", "tickets.jsonl", "-o", "log.parquet", "--question-column", "text", "--choices", "bug, other"
        )
    assert "The answers were taken from the column 'label'." in done.stderr
    log = ScoreLog.read("log.parquet")
    assert log.actions.tolist() == ["bug", "other"] * 2
    assert log.label.tolist() == [0, 0]


# a floor below which no Guardian is asked


def leading(path, body, number):
    """The small model leads by a twentieth more from question to question, and agrees with the large one in the end."""
    if body["model"] == "large":
        return scores(0.1, 0.9, model="large-1")
    lead = number_in(body) / 20
    return scores(0.5 + lead / 2, 0.5 - lead / 2)


def test_no_guardian_is_asked_below_the_floor_and_the_log_says_so(run):
    write_menus(10)
    with serving(leading) as upstream:
        configure(upstream.url)
        shown = run(*MENU, "--floor", "0.2").stdout
        asked = sorted(number_in(body) for body in upstream.bodies if body["model"] == "large")
    assert asked == [4, 5, 6, 7, 8, 9], "a lead of exactly 0.2 is asked about"
    log = ScoreLog.read("log.parquet")
    assert (log.floor, log.below_floor.tolist()) == (0.2, [True] * 4 + [False] * 6)
    assert log.missing.tolist() == log.below_floor.tolist()
    assert [cost > 0 for cost in log.guardian_usage.cost] == [False] * 4 + [True] * 6
    assert "guardian: 10 rows, 0 failed, cost $0.0012" in shown
    assert "not asked: the Guardian about 4 rows below the floor 0.2, which saved about $0.0008" in shown
    totals = collected_totals(log)
    assert (totals["missing_guardian_rows"], totals["not_asked_rows"]) == (0, 4)
    assert totals["saved"] == pytest.approx(0.0008)


def test_a_log_with_a_floor_goes_its_whole_way(run):
    rows = [{"id": f"q{n}", "question": f"Question {n % 20}?", "choices": ["left", "right"], "answer": "B"}
            for n in range(60)]  # fmt: skip
    write_rows("questions.jsonl", rows)
    with serving(leading) as upstream:
        configure(upstream.url)
        run(*MENU, "--floor", "0.2")
    shown = run("inspect", "log.parquet").stdout
    assert "the Guardian in 12 rows below the floor 0.2" in shown
    run("calibrate", "log.parquet", "-o", "certificate.json", "--alpha", "0.2")
    run("verify", "certificate.json", "log.parquet")
    assert "12 rows below the floor 0.2" in run("certificate", "show", "certificate.json").stdout
    run("assess", "certificate.json", "log.parquet")
    assert (
        "choose on the pilot"
        in run("evaluate", "log.parquet", "--alpha", "0.2", "--calibration-size", "20", code=2).stderr
    )


def test_a_primary_that_failed_is_not_asked_about_until_it_answers(run):
    write_menus(3)

    def failing(path, body, number):
        return (500, {}) if failing.down and number_in(body) == 2 else leading(path, body, number)

    failing.down = True
    with serving(failing) as upstream:
        configure(upstream.url)
        run(*MENU, "--floor", "0.05")
        assert ScoreLog.read("log.parquet").below_floor.tolist() == [True, False, True]
        failing.down = False
        run(*MENU, "--floor", "0.05")
    assert ScoreLog.read("log.parquet").below_floor.tolist() == [True, False, False]


def test_a_collection_resumes_with_the_floor_it_began_with_and_no_other(run):
    write_menus(10)
    with serving(leading) as upstream:
        configure(upstream.url)
        run(*MENU, "--floor", "0.2", "--limit", "6")
        sent = len(upstream.bodies)
        for other, remedy in (("0.3", "pass --floor 0.2"), (None, "pass --floor 0.2")):
            arguments = [] if other is None else ["--floor", other]
            for more in ([], ["--dry-run"]):
                refused = run(*MENU, *arguments, *more, code=2).stderr
                assert "this collection began with the floor 0.2" in refused.replace("\n", " ")
                assert remedy in refused.replace("\n", " ")
        assert len(upstream.bodies) == sent
        run(*MENU, "--floor", "0.2")
        assert len(upstream.bodies) == 16, "10 of the Primary, 6 of the Guardian, none twice"
        run("collect", "questions.jsonl", "-o", "whole.parquet")
        refused = run("collect", "questions.jsonl", "-o", "whole.parquet", "--floor", "0.2", code=2).stderr
        assert "this collection began without a floor" in refused.replace("\n", " ")
        assert "leave --floor out" in refused.replace("\n", " ")


def test_a_pilot_is_left_out_and_tells_what_the_floor_saves(run):
    write_menus(10)
    with serving(leading) as upstream:
        configure(upstream.url)
        run("collect", "questions.jsonl", "-o", "pilot.parquet", "--limit", "4")
        dry = [*MENU, "--floor", "0.1", "--dry-run"]
        shown = run(*dry, "--pilot", "pilot.parquet").stdout
        assert "The floor saves about 3 of the Guardian's calls (50 %, as in the pilot), $0.00" in shown
        saving = json.loads(run(*dry, "--pilot", "pilot.parquet", "--json").stdout)["expected_saving"]
        assert (saving["calls"], saving["cost"] > 0) == (3, True)
        assert "--pilot says how many are not" in run(*dry).stdout
        assert not Path("log.parquet.replies.sqlite").exists(), "a dry run writes nothing"
        run(*MENU, "--floor", "0.1", "--pilot", "pilot.parquet")
    assert ScoreLog.read("log.parquet").id.tolist() == [f"q{n}" for n in range(4, 10)]


def test_a_dry_run_does_not_count_what_stored_replies_show_to_lie_below_the_floor(run):
    write_menus(10)
    with serving(leading) as upstream:
        configure(upstream.url)
        run(*MENU, "--floor", "0.2", "--limit", "6")
        models = json.loads(run(*MENU, "--floor", "0.2", "--dry-run", "--json").stdout)["models"]
    counted = {model["role"]: model["spent"]["calls"] for model in models}
    assert counted == {"primary": 4, "guardian": 5}, "4 unknown ones, and a tie, which is as good as unknown here"


def test_progress_says_what_is_saved(run):
    write_menus(10)
    seen = []
    with serving(leading) as upstream:
        configure(upstream.url)
        asyncio.run(
            collect(
                "arbitrage.toml", "questions.jsonl", output="log.parquet", floor=0.2, concurrency=1,
                progress=lambda progress: seen.append((progress.not_asked, progress.saved)),
            )
        )  # fmt: skip
    assert seen[3] == (4, None), "nothing is known of a Guardian's price before it was asked"
    assert seen[-1] == (4, pytest.approx(0.0008))


def test_below_the_floor_of_a_confidence_nothing_is_graded(run):
    write_requests(4)

    def reply(path, body, number):
        if body["model"] == "small" and "How sure are you" in body["messages"][0]["content"]:
            return completion(json.dumps({"confidence": number_in(body) / 4}), usage=(30, 3))
        return answers("fine")(path, body, number)

    with serving(reply) as upstream:
        configure(upstream.url, primary=ASK, judge={})
        run(*TEXT, "--grade", "judge", "--floor", "0.5")
        by_model = Counter(body["model"] for body in upstream.bodies)
    assert by_model == {"small": 8, "large": 2, "judge": 2}, "the two answers of a row are equal and graded once"
    log = ScoreLog.read("log.parquet")
    assert (log.is_router, log.below_floor.tolist()) == (True, [True, True, False, False])


def test_a_guardian_that_fails_on_all_of_the_first_rows_that_it_is_asked_about_stops_the_collection(run):
    rows = [{"id": f"q{n}", "question": f"Question {n % 20}?", "choices": ["left", "right"]} for n in range(60)]
    write_rows("questions.jsonl", rows)
    with serving(
        lambda path, body, number: leading(path, body, number) if body["model"] == "small" else 500
    ) as upstream:
        configure(upstream.url)
        failed = run(*MENU, "--floor", "0.2", "--concurrency", "1", code=2).stderr
    assert "the Guardian failed on all of the first 20 rows" in failed.replace("\n", " ")


def test_cascades_and_pilots_without_ids_are_refused(run):
    write_menus(2)
    ScoreLog.from_arrays([[0.0, 0.4]], [[0.0, 1.0]]).write("pilot.parquet")
    configure("http://127.0.0.1:9/v1")
    assert "floor and path do not go together" in run(*MENU, "--path", "--floor", "0.2", code=2).stderr
    refused = run(*MENU, "--floor", "0.2", "--pilot", "pilot.parquet", code=2).stderr
    assert "has no `id` column" in refused.replace("\n", " ")
