"""Several pairs of models in one gateway: each policy asks its own two models, under certificates of their own."""

import json
import re
from contextlib import AsyncExitStack
from functools import partial

import pytest

from conformal_arbitrage import Certificate, ScoreLog
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live.config import read_config
from tests.gateway.house import (
    DECISION,
    SURE,
    UNSURE,
    House,
    error_of,
    failing,
    says,
    section,
    toml,
    until,
    votes,
)
from tests.gateway.test_modes import command
from tests.scripted import Upstream, completion

REFUNDS = {**DECISION, "model": "refunds"}


class Pairs(House):
    """The pair of the short form behind `support`, and the models small, large and writer behind other policies."""

    def __init__(self, folder, *, refunds=None, **rest):
        super().__init__(folder, **rest)
        self.small, self.large = Upstream(votes(*SURE, model="s")), Upstream(votes(0, 0, 1, model="l"))
        self.writer = Upstream(says("written", 0.9, model="w"))
        self.refunds = refunds or {}
        self._more = AsyncExitStack()

    def __enter__(self):
        self._thread.start()
        for upstream in (self.small, self.large, self.writer):
            self.run(self._more.enter_async_context(upstream))
        self._thread = _Started(self._thread)
        return super().__enter__()

    def __exit__(self, *exc):
        self.stop()
        self.run(self._more.aclose())
        super().__exit__()

    def configure(self):
        super().configure()
        self.certificate(policy="refunds").save(self.folder / "refunds.json")
        self.rule = {"certificate": "refunds.json"}
        super().configure()

    rule = {"mode": "shadow"}  # noqa: RUF012 - until there is a certificate

    def _write(self, first):
        super()._write(first)
        parts = [self.path.read_text()]
        for name, upstream in (("small", self.small), ("large", self.large)):
            model = {"kind": "decisions", "url": upstream.url, "model": name, "price": [1.0, 1.0], "attempts": 1}
            parts += [section(f"models.{name}", model), section(f"models.{name}.pinned", {"served": name[0]})]
        chat = {"kind": "chat", "url": self.writer.url, "model": "writer", "attempts": 1, "confidence": "logprob"}
        parts += [section("models.writer", chat), section("models.writer.pinned", {})]
        named = {"primary": "small", "guardian": "large"}
        parts.append(section("policies.refunds", {**named, **self.rule, **self.refunds}))
        written = {"primary": "writer", "guardian": "writer", "form": "text", "mode": "shadow"}
        parts.append(section("policies.letters", written))
        self.path.write_text("\n".join(parts))


class _Started:
    """A thread that runs already."""

    def __init__(self, thread):
        self._thread = thread

    def start(self):
        pass

    def join(self, timeout):
        self._thread.join(timeout)


@pytest.fixture
def pairs(house):
    return partial(house, Pairs)


def test_each_policy_asks_its_own_two_models(pairs):
    gateway = pairs()
    assert gateway.decide().status_code == 200
    assert (len(gateway.primary.bodies), len(gateway.small.bodies)) == (1, 0)
    [answer] = gateway.decide(REFUNDS).json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"], answer["arbitrage"]["guarantee"]) == (
        "a", "primary", "crc",
    )  # fmt: skip
    gateway.small.reply = votes(*UNSURE, model="s")
    [answer] = gateway.decide({**REFUNDS, "input": "Another."}).json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"]) == ("c", "guardian")
    assert (len(gateway.small.bodies), len(gateway.large.bodies), len(gateway.guardian.bodies)) == (2, 1, 0)
    reply = gateway.chat({"model": "letters", "messages": [{"role": "user", "content": "Hello."}]})
    assert reply.json()["choices"][0]["message"]["content"] == "written"
    assert len(gateway.writer.bodies) == 2  # it plays both roles
    assert sorted(one["id"] for one in gateway.get("/v1/models").json()["data"]) == ["letters", "refunds", "support"]


def test_a_certificate_of_one_pair_is_refused_by_another(pairs):
    gateway = pairs()
    other = Certificate.load(gateway.folder / "rule.json").to_dict()
    error = error_of(gateway.put("/v1/arbitrage/policies/refunds", {"certificate": other}), 422, "certificate_refused")
    assert "primary.model" in error["message"]
    own = Certificate.load(gateway.folder / "refunds.json")
    assert own.identities["primary"]["endpoint"] == gateway.small.url
    assert own.identities["guardian"]["endpoint"] == gateway.large.url


def test_a_guardian_that_is_down_is_named_for_its_policy_alone(pairs):
    gateway = pairs()
    gateway.small.reply, gateway.large.reply = votes(*UNSURE, model="s"), failing()
    for k in range(12):
        error_of(gateway.decide({**REFUNDS, "input": f"Letter {k}."}), 502, "guardian_failed")
    problems = gateway.get("/health/ready").json()["problems"]
    assert [one["policy"] for one in problems] == ["refunds"]
    figures = gateway.get("/metrics").text
    resting = dict(re.findall(r'^arbitrage_guardian_resting{policy="(\w+)"} (\S+)$', figures, re.MULTILINE))
    assert resting == {"support": "0.0", "refunds": "1.0", "letters": "0.0"}


def test_audits_ask_the_guardian_of_their_policy(pairs):
    gateway = pairs(refunds={"audit_rate": 1.0})
    gateway.decide(REFUNDS)
    [record] = until(lambda: [r for r in gateway.records(policy="refunds") if r.audit])
    assert (record.audit.scores, record.audit.served) == ((0.0, 0.0, 1.0), "l")
    assert not gateway.guardian.bodies
    out = gateway.folder / "log.parquet"
    command("records", "export", "--policy", "refunds", "--score-log", "-o", out, "--config", gateway.path)
    identities = ScoreLog.read(out).identities
    assert (identities["primary"]["model"], identities["guardian"]["model"]) == ("small", "large")


def test_limits_on_the_guardian_cover_the_guardians_of_all_policies(pairs):
    gateway = pairs(primary=votes(*UNSURE), gateway={"guardian_calls_per_minute": 3})
    gateway.small.reply = votes(*UNSURE, model="s")
    bodies = [{**body, "input": f"{k}"} for k in range(2) for body in (DECISION, REFUNDS)]
    assert [gateway.decide(body).status_code for body in bodies] == [200, 200, 200, 429]


def test_check_tests_every_named_model_and_pins_it_under_its_name(pairs):
    gateway = pairs()
    gateway.writer.reply = lambda *_: completion("red", model="w", logprobs={"content": [{"logprob": -0.1}]})
    text = re.sub(r"\[models\.\w+\.pinned\]\n(served.*\n)?", "", gateway.path.read_text())
    gateway.path.write_text(text)
    document = json.loads(command("check", "--config", gateway.path, "--yes", "--json").stdout)
    assert [one["role"] for one in document["models"]] == [
        "primary", "guardian", "models.small", "models.large", "models.writer",
    ]  # fmt: skip
    config = read_config(gateway.path)
    assert {name: model.pinned.served for name, model in config.models.items()} == {
        "small": "s", "large": "l", "writer": "w",
    }  # fmt: skip
    gateway.large.reply = votes(0, 0, 1, model="l2")
    changed = command("check", "--config", gateway.path, "--json", code=2)
    assert "[models.large] served: 'l' is pinned, 'l2' was found" in changed.stderr
    assert "refunds.json" in changed.stderr


def test_collect_calibrate_and_ask_take_the_pair_of_a_policy(pairs):
    gateway = pairs()
    questions, log, rule = (gateway.folder / name for name in ("questions.csv", "log.parquet", "asked.json"))
    questions.write_text("question,A,B,C\n" + "".join(f"Which is it {k}?,x,y,z\n" for k in range(30)))
    command(
        "collect", questions, "-o", log, "--choice-columns", "A,B,C", "--config", gateway.path, "--policy", "refunds"
    )
    assert (len(gateway.small.bodies), len(gateway.large.bodies), len(gateway.primary.bodies)) == (30, 30, 0)
    assert ScoreLog.read(log).identities == identities_of(gateway.config, "refunds")
    command("calibrate", log, "--alpha", "0.5", "--guardian-sees", "all", "-o", rule, "--config", gateway.path)
    asking = ["ask", rule, "Which?", "--action", "x", "--action", "y", "--action", "z", "--config", gateway.path]
    decision = json.loads(command(*asking, "--policy", "refunds", "--json").stdout)
    assert decision["no_guarantee"] is None
    assert "primary.model" in command(*asking, code=2).stderr  # the pair of the short form is another


SHORT = section("primary", {"kind": "human", "name": "a"}) + section("guardian", {"kind": "human", "name": "b"})
SMALL = section("models.small", {"kind": "human", "name": "s"})
LARGE = section("models.large", {"kind": "human", "name": "l"})


def written(folder, *parts):
    (folder / "arbitrage.toml").write_text("\n".join(parts))
    return folder / "arbitrage.toml"


def policy(**values):
    return section("policies.refunds", values)


@pytest.mark.parametrize(
    ("parts", "line", "message"),
    [
        ([SHORT, policy(guardian="large")], 9, "there is no section [models.large]; there are none"),
        ([SHORT, SMALL, policy(guardian="smal")], 13, "there is no section [models.smal]; there are small"),
        ([SMALL, policy(primary="small")], 1, "the file lacks a section [guardian] with at least kind =, or guardian = N"),
        ([SHORT, SMALL.replace("name", "nmae")], 10, "there is no key 'nmae'; did you mean 'name'?"),
        ([SHORT, SMALL.replace("human", "humna")], 9, "kind: Invalid value 'humna'; did you mean 'human'?"),
        ([SHORT, SMALL.replace('kind = "human"', "")], 8, "[models.small] lacks the key 'kind'"),
        ([SHORT, SMALL.replace("small", '"a b"')], 8, "a model's name has letters, digits, _ and -; got 'a b'"),
        ([SHORT, SMALL + "concurrency = 0\n"], 11, "concurrency must be above 0; got 0"),
        ([SHORT, policy(primry="small")], 9, "there is no key 'primry'; did you mean 'primary'?"),
        ([SMALL, LARGE, policy(primary="small", guardian="large", form="text")], 2, "text form needs kind 'chat'"),
        ([SMALL, LARGE.replace('"l"', '"s"'), policy(primary="small", guardian="large")], 0, None),
        ([], 1, "the file lacks a section [primary] with at least kind ="),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(tmp_path, parts, line, message):
    path = written(tmp_path, *parts)
    if message is None:
        assert read_config(path).models  # two people of one name answer alike
        return
    with pytest.raises(ConfigError) as failure:
        read_config(path)
    assert f"line {line}: {message}" in str(failure.value), str(failure.value)


def test_without_the_short_form_a_command_says_to_choose_a_policy(tmp_path):
    path = written(tmp_path, SMALL, LARGE, policy(primary="small", guardian="large", mode="shadow"))
    config = read_config(path)
    with pytest.raises(ConfigError, match=r"no section \[primary\]; add one, or choose a policy with --policy"):
        config.section("primary")
    with pytest.raises(ConfigError, match="there is no policy 'refund'; there are refunds"):
        config.for_policy("refund")
    short = config.for_policy("refunds")
    assert (short.primary.name, short.guardian.name, short.models) == ("s", "l", {})
    assert toml("refunds")[1:-1] in short.policies
