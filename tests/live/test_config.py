import asyncio
import json

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ConformalArbitrage, ConformalRouter, ScoreLog, StaleCalibrationError, calibrate
from conformal_arbitrage.cli import cli
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import Pinned, read_config, template, write_pinned
from tests.scripted import Upstream, completion, scores

GOOD = """\
alpha = 0.1

[primary]
kind = "chat"
url = "http://127.0.0.1:9/v1"
model = "small"

[guardian]
kind = "function"
function = "operator:attrgetter"
name = "rule"
"""


def write(folder, text):
    path = folder / "arbitrage.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("form", ["menu", "text"])
def test_what_init_writes_is_a_valid_configuration(form, tmp_path):
    read = read_config(write(tmp_path, template(form)))
    assert (read.task.form, read.guardian_sees, read.alpha) == (form, "all", 0.05)
    assert read.task.settings == ("pinned" if form == "menu" else "as requested")


def test_init_does_not_overwrite_a_file_without_force(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    assert run.invoke(cli, ["init"]).exit_code == 0
    assert read_config().task.form == "text"
    assert run.invoke(cli, ["init", "--form", "menu"]).exit_code != 0
    assert run.invoke(cli, ["init", "--form", "menu", "--force"]).exit_code == 0
    assert read_config().task.form == "menu"


def test_init_names_the_endpoints_it_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local = [
        "--primary-url",
        "http://127.0.0.1:9/v1",
        "--primary-model",
        "small",
        "--guardian-url",
        "https://ai.example/v1",
    ]
    assert CliRunner().invoke(cli, ["init", *local]).exit_code == 0
    read = read_config()
    assert (read.primary.url, read.primary.model, read.primary.key_env) == ("http://127.0.0.1:9/v1", "small", None)
    assert (read.guardian.url, read.guardian.key_env) == ("https://ai.example/v1", "OPENAI_API_KEY")
    assert read.policies["assistant"].certificate == "certificate.json"
    wrong = CliRunner().invoke(cli, ["init", "--force", "--guardian-url", "localhost:8000"])
    assert (wrong.exit_code, "--guardian-url must be a URL" in wrong.output) == (2, True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('model = "small"', 'modle = "small"', "line 6: there is no key 'modle'; did you mean 'model'?"),
        ("alpha = 0.1", "alhpa = 0.1", "line 1: there is no key 'alhpa'; did you mean 'alpha'?"),
        ('kind = "chat"', 'kind = "chatt"', "line 4: kind: Invalid value 'chatt'; did you mean 'chat'?"),
        ('model = "small"', "model = 7", "line 6: model: Expected `str`, got `int`"),
        ('url = "http://127.0.0.1:9/v1"\n', "", "line 3: [primary] lacks the key 'url'"),
        ("[guardian]", "[gaurdian]", "there is no key 'gaurdian'; did you mean 'guardian'?"),
        ('model = "small"', 'model = "small', "not valid TOML"),
        ('model = "small"', 'model = "small"\nattempts = 0', "line 7: attempts must be above 0; got 0"),
        ('model = "small"', 'model = "small"\ntemperature = "hot"', "line 7: temperature"),
        ("alpha = 0.1", "alpha = -1", "line 1: alpha must be above 0"),
        ("[primary]", "[task]\nform = 'text'\n\n[primary]", 'needs confidence = "logprob" or "ask"'),
        (
            'model = "small"',
            'model = "small"\n[primary.pinned]\nmod = "plain"',
            "line 8: there is no key 'mod'; did you mean",
        ),
        ("alpha = 0.1", "alpha = 0.1\nfolder = 'x'", "line 2: there is no key 'folder'"),
    ],
)
def test_a_bad_file_is_refused_with_the_line_and_the_nearest_key(old, new, message, tmp_path):
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, GOOD.replace(old, new, 1)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_the_command_that_writes_one(tmp_path):
    with pytest.raises(ConfigError, match="`arbitrage init` writes one"):
        read_config(tmp_path / "arbitrage.toml")


def test_pinned_values_replace_earlier_ones_and_nothing_else(tmp_path):
    path = write(tmp_path, "# mine\n" + GOOD)
    write_pinned(path, {"primary": Pinned(mode="json_object", served='a "b" \\ c\n')})
    write_pinned(path, {"primary": Pinned(mode="json_schema", served='a "b" \\ c\n')})
    text = path.read_text()
    assert text.startswith("# mine\n" + GOOD.rstrip())
    assert text.count("[primary.pinned]") == 1
    assert read_config(path).primary.pinned == Pinned(mode="json_schema", served='a "b" \\ c\n')


def test_an_unchecked_model_is_not_called(tmp_path):
    models = Models(read_config(write(tmp_path, GOOD)))
    with pytest.raises(ConfigError, match="run `arbitrage check`"):
        models.scorer("primary")


def test_a_missing_secret_is_reported_by_its_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    text = GOOD.replace('model = "small"', 'model = "small"\nkey_env = "NO_SUCH_KEY"\n[primary.pinned]\nmode = "plain"')
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        Models(read_config(write(tmp_path, text))).scorer("primary")


# check determines how an endpoint wants to be called, and pins it


def check(tmp_path, reply, text=None, role="primary", *, extra=(), json_output=True, input=None):
    """Run `arbitrage check` on a chat Primary behind a scripted server; return the result, the file and the server."""

    async def run():
        async with Upstream(reply) as upstream:
            config = (text or GOOD).replace("http://127.0.0.1:9/v1", upstream.url)
            config = config.replace('function = "operator:attrgetter"', 'function = "tests.live.test_config:rule"')
            path = write(tmp_path, config)
            arguments = ["check", "--config", str(path), *(["--json"] if json_output else []), *extra]
            done = await asyncio.to_thread(CliRunner().invoke, cli, arguments, input=input)
            return done, path, upstream

    done, path, upstream = asyncio.run(run())
    return done, path, upstream


def rule(query):
    return [1.0] * len(query.actions)


def logprobs(*pairs):
    top = [{"token": token, "logprob": value, "bytes": None} for token, value in pairs]
    return {"content": [{"token": pairs[0][0], "logprob": pairs[0][1], "bytes": None, "top_logprobs": top}]}


def endpoint(*, schema=True, json_mode=True, plain=True, field="max_tokens", gives_logprobs=True):
    """Return an endpoint that supports some of the variants."""

    def reply(path, body, number):
        form = (body.get("response_format") or {}).get("type", "plain")
        if field not in body:
            return 400, {"error": {"message": f"Unsupported parameter: use '{field}' instead."}}
        if (form == "json_schema" and not schema) or (form == "json_object" and not json_mode):
            return 400, {"error": {"message": "response_format is not supported"}}
        if body.get("logprobs"):
            return completion(
                "A", model="small-1", logprobs=logprobs(("A", -0.1), ("B", -2.5)) if gives_logprobs else None
            )
        if form == "plain" and not plain:
            return completion("Red is a colour.", model="small-1")
        return scores(0.9, 0.1, model="small-1")

    return reply


@pytest.mark.parametrize(
    ("supported", "mode", "field"),
    [
        ({}, "json_schema", "max_tokens"),
        ({"schema": False}, "json_object", "max_tokens"),
        ({"schema": False, "json_mode": False}, "plain", "max_tokens"),
        ({"field": "max_completion_tokens"}, "json_schema", "max_completion_tokens"),
    ],
)
def test_check_pins_the_first_variant_that_works(supported, mode, field, tmp_path):
    done, path, _ = check(tmp_path, endpoint(**supported))
    assert done.exit_code == 0, done.output
    pinned = read_config(path).primary.pinned
    assert pinned == Pinned(mode=mode, token_field=field, served="small-1")
    model = json.loads(done.stdout)["models"][0]
    assert (model["served"], model["logprobs"], model["problem"]) == ("small-1", True, None)


def test_check_reports_whether_logprobs_are_available(tmp_path):
    done, _, _ = check(tmp_path, endpoint(gives_logprobs=False))
    assert json.loads(done.stdout)["models"][0]["logprobs"] is False


@pytest.mark.parametrize("available", [True, False])
def test_check_reports_logprobs_of_models_in_free_text(tmp_path, available):
    model = 'kind = "chat"\nurl = "http://127.0.0.1:9/v1"\nmodel = "small"\n'
    text = f'[task]\nform = "text"\n[primary]\n{model}confidence = "ask"\n[guardian]\n{model}'
    plain = endpoint(gives_logprobs=available)

    def reply(path, body, number):
        if body.get("logprobs"):
            return plain(path, body, number)
        rated = "How sure are you" in str(body["messages"])
        return completion('{"confidence": 0.9}' if rated else "red", model="small-1")

    done, _, _ = check(tmp_path, reply, text)
    assert [model["logprobs"] for model in json.loads(done.stdout)["models"]] == [available] * 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda *_: completion("no idea"), "every query would be deferred"),
        (lambda *_: (401, {"error": {"message": "bad key"}}), "is the key right?"),
        (lambda *_: (400, {"error": {"message": "temperature is not supported"}}), 'set temperature = "default"'),
        (lambda *_: completion("", finish="length", usage=(10, 50), reasoning=50), "50 of them for reasoning"),
    ],
)
def test_check_refuses_a_primary_that_could_only_defer_and_writes_nothing(reply, message, tmp_path):
    done, path, _ = check(tmp_path, reply)
    assert done.exit_code != 0
    assert message in done.stderr
    assert "pinned" not in path.read_text()


TEXT = """\
[task]
form = "text"

[primary]
kind = "chat"
url = "http://127.0.0.1:9/v1"
model = "small"
confidence = "CONFIDENCE"

[guardian]
kind = "chat"
url = "http://127.0.0.1:9/v1"
model = "large"
"""


def test_check_refuses_logprob_confidence_if_the_endpoint_lists_none(tmp_path):
    done, _, _ = check(tmp_path, lambda *_: completion("Red"), TEXT.replace("CONFIDENCE", "logprob"))
    assert done.exit_code != 0
    assert "no confidence came with the answer" in done.stdout
    done, _, _ = check(tmp_path, lambda *_: completion("Red"), TEXT.replace("CONFIDENCE", "ask"))
    assert "no confidence came with the answer: the rating call returned no number" in done.stdout
    assert 'use confidence = "ask"' not in done.stdout


def test_check_pins_how_the_confidence_is_requested_in_text_form(tmp_path):
    def reply(path, body, number):
        form = (body.get("response_format") or {}).get("type")
        if form == "json_schema":
            return 400, {"error": {"message": "response_format json_schema is not supported"}}
        return completion('{"confidence": 0.7}' if form else "Red", model=body["model"])

    done, path, _ = check(tmp_path, reply, TEXT.replace("CONFIDENCE", "ask"))
    assert done.exit_code == 0, done.output
    assert read_config(path).primary.pinned.mode == "json_object"
    assert read_config(path).guardian.pinned.mode == "plain"


def test_the_key_is_in_no_file_and_in_no_output(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_KEY", "sk-very-secret-0123456789")
    text = GOOD.replace('model = "small"', 'model = "small"\nkey_env = "TEST_KEY"')

    def reply(path, body, number):
        return 401, {
            "error": {"message": "wrong key sk-very-secret-0123456789, sent as Bearer sk-very-secret-0123456789"}
        }

    done, path, upstream = check(tmp_path, reply, text)
    assert upstream.headers[0]["Authorization"] == "Bearer sk-very-secret-0123456789"
    assert "very-secret" not in done.output + str(done.exception) + path.read_text()


JUDGED = (
    GOOD
    + """
[judge]
kind = "chat"
url = "http://127.0.0.1:9/v1"
model = "judge"
"""
)


def judging(content):
    return lambda path, body, n: completion(content) if body["model"] == "judge" else endpoint()(path, body, n)


def test_check_asks_a_judge_for_a_grade_within_the_limit_that_grading_sets(tmp_path):
    done, path, upstream = check(tmp_path, judging('{"grade": 1}'), JUDGED)
    assert done.exit_code == 0, done.output
    [body] = [body for body in upstream.bodies if body["model"] == "judge"]
    assert (body["max_tokens"], "red" in body["messages"][0]["content"]) == (50, True)
    assert read_config(path).judge.pinned is not None


def test_check_refuses_a_judge_that_does_not_grade(tmp_path):
    done, _, _ = check(tmp_path, judging("Red is a fine colour."), JUDGED)
    assert done.exit_code == 2
    assert "there is no grade" in done.output


def test_a_judge_that_fails_does_not_keep_the_other_models_from_being_pinned(tmp_path):
    done, path, _ = check(tmp_path, judging("Red is a fine colour."), JUDGED, json_output=False)
    assert done.exit_code == 2
    assert "--grade judge cannot be used: [judge]" in done.stderr
    assert read_config(path).primary.pinned is not None
    assert read_config(path).judge.pinned is None
    done, path, _ = check(tmp_path, lambda *_: (500, {}), JUDGED, json_output=False)
    assert "this configuration cannot be used: [primary]" in done.stderr
    assert read_config(path).primary.pinned is None


def test_check_does_not_say_that_a_function_answers(tmp_path):
    done, _, _ = check(tmp_path, endpoint(), json_output=False)
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "not asked" in rows["Guardian"]
    assert " yes " in rows["Primary"]
    done, _, _ = check(tmp_path, endpoint())
    assert [model["tested"] for model in json.loads(done.stdout)["models"]] == [True, False]


def test_check_tests_both_forms_if_policies_use_both(tmp_path):
    both = GOOD.replace('model = "small"', 'model = "small"\nmax_tokens = 60\nconfidence = "logprob"')
    both += '[policies.free]\nform = "text"\nmode = "shadow"\n'
    both = both.replace(
        'kind = "function"', 'kind = "chat"\nurl = "http://127.0.0.1:9/v1"\nmodel = "large"\nmax_tokens = 60'
    )
    both = "\n".join(line for line in both.splitlines() if not line.startswith(("function =", "name =")))
    done, _, upstream = check(tmp_path, endpoint(), both)
    assert done.exit_code == 0, done.output
    for model in ("small", "large"):
        prompts = [body["messages"][-1]["content"] for body in upstream.bodies if body["model"] == model]
        assert "Name a colour, in one word." in prompts
        assert any("Answer choices" in text for text in prompts)
    done, _, _ = check(tmp_path, endpoint(gives_logprobs=False), both)
    assert done.exit_code == 2
    assert "no confidence came with the answer" in done.output


UNTESTED = """\
[primary]
kind = "replay"
log = "log.jsonl"
column = "cheap"

[guardian]
kind = "KIND"
name = "team"
"""


@pytest.mark.parametrize(
    ("kind", "note"), [("human", "A person: nothing to test."), ("function", "A function: loaded, not called.")]
)
def test_check_builds_models_that_need_no_test_and_says_why(kind, note, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"id": "a", "cheap": [0.2, 0.8]}\n')
    text = UNTESTED.replace("KIND", kind)
    done, _, _ = check(
        tmp_path, endpoint(), text + ('function = "operator:attrgetter"\n' if kind == "function" else "")
    )
    assert done.exit_code == 0, done.output
    notes = [model["notes"] for model in json.loads(done.stdout)["models"]]
    assert notes == [["Recorded scores: loaded, nothing to test."], [note]]


def test_check_refuses_recorded_scores_that_cannot_be_loaded(tmp_path):
    done, _, _ = check(tmp_path, endpoint(), UNTESTED.replace("KIND", "human"))
    assert done.exit_code != 0


def test_two_functions_with_one_name_are_refused(tmp_path):
    rules = '[primary]\nkind = "function"\nfunction = "operator:add"\nname = "rule"\n'
    rules += '[guardian]\nkind = "function"\nfunction = "operator:FUNCTION"\nname = "rule"\n'
    assert read_config(write(tmp_path, rules.replace("FUNCTION", "add"))).guardian.label == "rule"
    with pytest.raises(ConfigError, match="line 8: both functions are called 'rule'; rename one"):
        read_config(write(tmp_path, rules.replace("FUNCTION", "sub")))


def test_text_form_refuses_a_kind_that_only_scores_options(tmp_path):
    text = GOOD.replace('kind = "function"\nfunction = "operator:attrgetter"', 'kind = "human"')
    text = text.replace('model = "small"', 'model = "small"\nconfidence = "ask"') + '[task]\nform = "text"\n'
    with pytest.raises(ConfigError, match="line 10: text form needs kind 'chat' or 'function' as guardian"):
        read_config(write(tmp_path, text))
    models = Models(read_config(write(tmp_path, text.replace('form = "text"', ""))))
    with pytest.raises(ConfigError, match=r"\[guardian\] kind 'human' cannot answer in free text"):
        models.answerer("guardian")


def test_a_section_that_is_missing_is_named(tmp_path):
    models = Models(read_config(write(tmp_path, GOOD)))
    for build in (models.scorer, models.answerer):
        with pytest.raises(ConfigError, match=r"no section \[stronger\]; add one"):
            build("stronger")


BY_FUNCTIONS = """\
[task]
safe_action = "wait"
safe_answer = "One moment."
[primary]
kind = "function"
function = "constant_models:small"
name = "small"
[guardian]
kind = "function"
function = "constant_models:large"
name = "large"
"""
CONSTANT_MODELS = """\
class Constant:
    def __init__(self, name):
        self.identity = {"kind": "constant", "name": name}
    def __call__(self, query):
        return [0.5] * len(query.actions)
    async def answer(self, request):
        raise NotImplementedError
small, large = Constant("small"), Constant("large")
"""


@pytest.mark.parametrize(("form", "kind"), [("menu", ConformalArbitrage), ("text", ConformalRouter)])
def test_each_form_has_a_policy_with_its_own_fallback(form, kind, tmp_path):
    confidence, grades = [0.1, 0.9] * 10, [1.0] * 20
    log = ScoreLog.from_router(confidence=confidence, primary_grade=grades, guardian_grade=grades)
    certificate = calibrate(log, 0.2)
    (tmp_path / "constant_models.py").write_text(CONSTANT_MODELS)
    models = Models(read_config(write(tmp_path, BY_FUNCTIONS)))
    bind = models.policy if form == "menu" else models.router
    policy = bind(certificate, allow=["unbound"])
    assert type(policy) is kind
    assert getattr(policy, "safe_action", None) == ("wait" if form == "menu" else None)
    assert getattr(policy, "safe_answer", None) == ("One moment." if form == "text" else None)
    with pytest.raises(StaleCalibrationError, match="unbound"):
        bind(certificate)


# a second check asks before it replaces what certificates are bound to


def pinned_before(**values):
    lines = [f'{name} = "{value}"' for name, value in {"mode": "json_schema", **values}.items()]
    return GOOD.replace('model = "small"', "\n".join(['model = "small"', "[primary.pinned]", *lines]))


def save_certificate(folder, name, served):
    primary = {"kind": "chat", "model": "small", "served": served, "mode": "json_schema", "token_field": "max_tokens"}
    identities = {"primary": primary, "guardian": {"kind": "function", "name": "g"}}
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 30, [[1.0, 0.0]] * 30, identities=identities)
    calibrate(log, 0.1).save(folder / name)


@pytest.fixture
def rolled(tmp_path):
    """A configuration and certificates from before the provider replaced its model."""
    save_certificate(tmp_path, "Old.json", "small-0")
    save_certificate(tmp_path, "new.json", "small-1")
    (tmp_path / "other.json").write_text("[]")
    return tmp_path


def test_check_names_a_change_and_the_certificates_it_makes_stale_and_writes_nothing(rolled):
    done, path, _ = check(rolled, endpoint(), pinned_before(served="small-0", token_field="max_tokens"))
    assert done.exit_code == 2
    assert "[primary] served: 'small-0' is pinned, 'small-1' was found; stale would be Old.json;" in done.stderr
    assert read_config(path).primary.pinned.served == "small-0"


def test_check_replaces_what_is_pinned_if_told_to(rolled):
    text = pinned_before(served="small-0", token_field="max_tokens")
    done, path, _ = check(rolled, endpoint(), text, extra=["--yes"])
    assert done.exit_code == 0, done.output
    assert read_config(path).primary.pinned.served == "small-1"


def test_check_asks_nothing_if_nothing_changed(rolled):
    done, _, _ = check(rolled, endpoint(), pinned_before(served="small-1", token_field="max_tokens"))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("reply", "served"), [("y\n", "small-1"), ("n\n", "small-0")])
def test_a_person_at_a_terminal_is_asked(rolled, monkeypatch, reply, served):
    monkeypatch.setattr("conformal_arbitrage.cli.models.has_terminal", lambda: True)
    text = pinned_before(served="small-0", token_field="max_tokens")
    done, path, _ = check(rolled, endpoint(), text, json_output=False, input=reply)
    assert done.exit_code == (0 if served == "small-1" else 2), done.output
    assert "Replace what is pinned?" in done.stderr
    assert read_config(path).primary.pinned.served == served
