"""Cascades through the gateway, over real connections: decisions as offline, all legs on record, shadow rows exported."""

import json
from http.client import HTTPConnection

import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage import Certificate
from conformal_arbitrage.calibration.cascade import apply_cascade, calibrate_cascade
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli
from conformal_arbitrage.collecting.records import cascade_log_of
from conformal_arbitrage.errors import OptionError, StoreError
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns
from tests.certificates import edited
from tests.gateway.house import House, error_of, hanging, until
from tests.gateway.test_monitor import exclude
from tests.live_cascades import MENU, NAMES, PRICES, facts, reply, write_cascade_config

URL = "/v1/arbitrage/policies/support"
CHOICES = [{"value": value} for value in MENU]


def log_of(questions, ids, form, identities=None):
    """The log that a collection of these questions gives, from what the scripted models say."""
    answers = {name: [facts(name, question) for question in questions] for name in NAMES}
    right = {name: [float(answer == "yes") for answer, _ in rows] for name, rows in answers.items()}
    calls = {"small": 2, "middle": 2, "large": 1} if form == "text" else dict.fromkeys(NAMES, 1)
    cost = {name: [calls[name] * 15 * PRICES[name][0] / 1e6] * len(questions) for name in NAMES}
    return CascadeLog.from_columns(
        id=ids,
        models={
            name: ModelColumns(
                confidence=[sure if form == "text" or sure > 0 else None for _, sure in answers[name]],
                grade=right[name], cost=cost[name], answer=[answer for answer, _ in answers[name]],
            )
            for name in NAMES[:-1]
        },
        guardian_grade=right["large"], guardian_cost=cost["large"], guardian="large", identities=identities,
    )  # fmt: skip


class CascadeHouse(House):
    """A gateway over a cascade of three models that one upstream serves."""

    def __init__(self, folder, *, form="text", alpha="0.1", chain=("small", "middle"), loss=None, **sections):
        super().__init__(folder, form=form, primary=reply, **sections)
        self.alpha, self.chain, self.loss = alpha, chain, loss

    def _write(self, first):
        fields = {"cascade": True, "mode": "shadow", **({"mode": "enforce"} if first else {}), **first}
        fields |= self.sections["policies.support"]
        lines = ["[policies.support]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
        write_cascade_config(self.folder, self.primary.url, form=self.form, policies="\n".join(lines))

    def certificate(self, **_):
        config = read_config(self.path)
        questions, ids = [f"q{n}" for n in range(400)], [f"row{n}" for n in range(400)]
        known = identities_of(config, "support") | ({"grader": {"kind": "exact"}} if self.form == "text" else {})
        log, secret = log_of(questions, ids, self.form, known), ProjectSecret.find()
        return calibrate_cascade(log, self.alpha, key=secret.boundary_key, chain=self.chain, loss=self.loss).sign(
            secret
        )

    def question(self, number):
        """Ask about one question; return its id."""
        if self.form == "text":
            body = {"model": "support", "messages": [{"role": "user", "content": f"Is it q{number} ?"}]}
            return self.chat(body)
        choice = {"type": "choice", "instructions": "Is it?", "choices": CHOICES}
        return self.decide({"model": "support", "input": f"Is it q{number} ?", "questions": [choice]})


@pytest.mark.parametrize("form", ["text", "menu"])
def test_the_same_certificate_decides_through_the_gateway_as_it_does_offline(house, form):
    gateway = house(CascadeHouse, form=form)
    replies = [gateway.question(number) for number in range(500, 540)]
    assert {response.status_code for response in replies} == {200}
    records = {record.id: record for record in gateway.records(limit=100)}
    shown = [document if form == "text" else document["answers"][0] for document in (r.json() for r in replies)]
    ids = [one["arbitrage"]["id"] for one in shown]
    secret = ProjectSecret.find()
    certificate = Certificate.load(gateway.folder / "rule.json", secret=secret)
    offline = apply_cascade(certificate, log_of([f"q{number}" for number in range(500, 540)], ids, form))
    assert len(set(offline.answered_by.tolist())) > 1
    for row, (id, one) in enumerate(zip(ids, shown, strict=True)):
        place = int(offline.answered_by[row])
        roles = ["primary"] * int(offline.asked[row].sum()) + ["guardian"] * (place < 0)
        assert [leg.role for leg in records[id].decision.legs] == roles
        assert one["arbitrage"]["decided_by"] == ("guardian" if place < 0 else "primary")
        assert one["arbitrage"]["guarantee"] == "crc"
        assert records[id].decision.cost == pytest.approx(offline.cost[row])
        answer = facts([*certificate.path.chain.models, "large"][place], f"q{500 + row}")[0]
        assert answer == (one["choices"][0]["message"]["content"] if form == "text" else one["choice"])


def test_shadow_mode_asks_every_model_and_its_rows_are_exported_as_the_log_of_the_cascade(house):
    gateway = house(CascadeHouse, form="menu", certificate=False)
    gateway.headers = gateway.keyed("call")
    for number in range(30):
        assert gateway.question(number).status_code == 200
    identities = identities_of(gateway.config, "support")
    assert list(identities) == list(NAMES)

    def exported(store, models=NAMES[:-1]):
        return cascade_log_of(store, "support", models=models, guardian="large", identities=identities)

    log = gateway.with_store(exported)
    assert log.identities == identities
    assert len(log) == 30
    expected = log_of([f"q{number}" for number in range(30)], log.id.tolist(), "menu")
    assert np.allclose(log.confidence, expected.confidence, equal_nan=True)
    assert np.allclose(log.cost, expected.cost)
    for one in gateway.records(limit=30):
        assert gateway.post(f"/v1/arbitrage/records/{one.id}/feedback", {"label": 0}).status_code == 200
    assert gateway.with_store(exported).sha256() == log.sha256(), "labels of callers do not count"
    output = str(gateway.folder / "c.jsonl")
    export = ["records", "export", "--policy", "support", "-o", output, "--config", str(gateway.path)]
    shown = CliRunner().invoke(cli, [*export, "--score-log", "--json"])
    assert json.loads(shown.stdout) == {
        "rows": 30,
        "models": ["small", "middle"],
        "guardian": "large",
        "output": output,
    }
    assert CascadeLog.read(output, guardian="large").sha256() == log.sha256()
    assert "30 rows" in CliRunner().invoke(cli, [*export, "--score-log"]).stdout
    assert "give --score-log" in CliRunner().invoke(cli, [*export, "--all"]).stderr
    with pytest.raises(StoreError, match="asked 2 models before the Guardian, and"):
        gateway.with_store(lambda store: exported(store, ("small",)))
    with pytest.raises(StoreError, match="has no rows of shadow mode"):
        gateway.with_store(lambda store: cascade_log_of(store, "other", models=("small",), guardian="large"))


def test_shadow_rows_in_free_text_keep_all_answers_and_are_exported_once_graded(house):
    gateway = house(CascadeHouse, policy={"mode": "shadow", "content": "full"})
    response = gateway.question(3)
    assert response.json()["arbitrage"]["decided_by"] == "guardian"
    [record] = gateway.records()
    assert record.decision.content.chain_answers == tuple(facts(name, "q3")[0] for name in NAMES[:-1])
    assert record.decision.no_guarantee is None

    def exported(store):
        identities = identities_of(gateway.config, "support")
        return cascade_log_of(store, "support", models=NAMES[:-1], guardian="large", identities=identities)

    with pytest.raises(StoreError, match="no row has grades of every model's answer; run `arbitrage records grade"):
        gateway.with_store(exported)
    for number in range(4, 20):
        assert gateway.question(number).status_code == 200
    records = gateway.records(limit=50)[::-1]
    for one in records[:-1]:
        assert gateway.post(f"/v1/arbitrage/records/{one.id}/feedback", {"label": "yes"}).status_code < 300
    grade = ["records", "grade", "--policy", "support", "--grade", "exact", "--json", "--config", str(gateway.path)]
    done = json.loads(CliRunner().invoke(cli, grade).stdout)
    assert (done["newly_graded"], done["no_label"], done["failed"]) == (16, 1, 0)
    assert json.loads(CliRunner().invoke(cli, grade).stdout)["graded"] == 16, "run again to resume"
    log = gateway.with_store(exported)
    expected = log_of([f"q{number}" for number in range(3, 20)], [one.id for one in records], "text")
    assert log.id.tolist() == expected.id.tolist()
    assert np.allclose(log.confidence, expected.confidence)
    assert np.allclose(log.cost, expected.cost)
    assert np.array_equal(log.grade[:16], expected.grade[:16])
    assert np.isnan(log.grade[16]).all(), "without grades it counts as ungraded, and is not left out"
    assert log.identities["grader"]["kind"] == "exact"


def test_audits_ask_the_guardian_and_no_monitor_reads_them(house):
    gateway = house(CascadeHouse, form="menu", policy={"audit_rate": 1.0})
    for number in range(6):
        gateway.question(number)
    audited = until(lambda: [one for one in gateway.records() if one.audit is not None][5:], seconds=60)
    assert audited[0].audit.scores is not None
    shown = gateway.get(f"{URL}/monitor").json()
    assert "a path has several thresholds" in json.dumps(shown)


@pytest.mark.parametrize(("loss", "voided"), [(None, False), ("net", True)])
def test_an_excluded_key_voids_a_net_cascade_for_all(house, loss, voided):
    gateway = house(CascadeHouse, loss=loss)
    _, id = gateway.key("call")
    exclude(gateway, id)
    gateway.headers = gateway.keyed("call")
    gateway.question(1)
    [record] = gateway.records()
    assert ("gains of the excluded keys" in (record.decision.no_guarantee or "")) == voided


def test_certificates_of_the_other_kind_are_refused(house):
    gateway, pair = house(CascadeHouse), house()
    document = json.loads((gateway.folder / "rule.json").read_text())
    refused = pair.put(URL, {"certificate": document})
    assert "set cascade = true" in error_of(refused, 422, "certificate_refused")["message"]
    plain = json.loads((pair.folder / "rule.json").read_text())
    refused = gateway.put(URL, {"certificate": plain})
    assert "the certificate is for two models" in error_of(refused, 422, "certificate_refused")["message"]
    changed = gateway.put(URL, {"certificate": edited(document, {"cost": 0.0})})
    assert "was changed" in error_of(changed, 422, "certificate_refused")["message"]
    assert gateway.put(URL, {"certificate": gateway.certificate().to_dict()}).status_code == 200
    gateway.restart()
    assert gateway.question(1).json()["arbitrage"]["guarantee"] == "crc"


@pytest.mark.parametrize(
    ("settings", "feature"),
    [
        ({"alarm_line": "alpha", "audit_rate": 0.5, "content": "full"}, "red line"),
        ({"guard": True, "audit_rate": 0.5, "mode": "enforce", "content": "full"}, "guard"),
    ],
)
def test_what_has_no_proof_for_a_cascade_is_refused_by_name(house, settings, feature):
    with pytest.raises(OptionError, match=f"{feature} and path do not go together"):
        house(CascadeHouse, policy=settings)


def once_down(name, times=1):
    """Return an upstream on which a model fails at its first calls; whom it was asked as is kept in `asked`."""
    asked, left = [], [times]

    def scripted(path, body, number):
        asked.append(body["model"])
        if body["model"] == name and left[0]:
            left[0] -= 1
            return (500, {"error": {"message": "down"}})
        return reply(path, body, number)

    return scripted, asked


@pytest.mark.parametrize("form", ["text", "menu"])
def test_a_retry_asks_no_model_of_the_chain_again(house, form):
    gateway = house(CascadeHouse, form=form, alpha="0.05", policy={"content": "full"})
    gateway.primary.reply, asked = once_down("large")
    key = {"Idempotency-Key": "k1"}
    number = asked_about(gateway, "small", "middle", "guardian")
    gateway.headers = key
    assert gateway.question(number).status_code == 502
    first = list(asked)
    asked.clear()
    response = gateway.question(number)
    assert response.status_code == 200
    assert set(asked) == {"large"}, "the cheap models keep what they said"
    gateway.headers = {}
    [record] = gateway.records()
    assert [leg.role for leg in record.decision.legs] == ["primary", "primary", "guardian"]
    assert record.decided_by == "guardian"
    assert {"small", "middle", "large"} == set(first)


@pytest.mark.parametrize("form", ["text", "menu"])
def test_a_keyed_decision_of_a_later_model_is_recorded_as_its_own_with_all_legs(house, form):
    gateway = house(CascadeHouse, form=form)
    gateway.headers = {"Idempotency-Key": "k1"}
    certificate = Certificate.load(gateway.folder / "rule.json", secret=ProjectSecret.find())
    for number in range(500, 560):
        gateway.headers = {"Idempotency-Key": f"k{number}"}
        assert gateway.question(number).status_code == 200
    gateway.headers = {}
    records = gateway.records(limit=100)
    ids = [record.id for record in records]
    numbers = range(559, 499, -1)
    offline = apply_cascade(certificate, log_of([f"q{number}" for number in numbers], ids, form))
    assert 1 in offline.answered_by, "the second model answers some"
    for record, place, asked in zip(records, offline.answered_by.tolist(), offline.asked, strict=True):
        assert record.decided_by == ("guardian" if place < 0 else "primary")
        roles = ["primary"] * int(asked.sum()) + ["guardian"] * (place < 0)
        assert [leg.role for leg in record.decision.legs] == roles
        assert not record.decision.pending


def test_a_chain_that_is_left_in_the_middle_goes_to_the_guardian_at_the_next_attempt(house):
    """What the first model said is not drawn again: a caller who leaves and comes back gets no second chance."""
    gateway = house(CascadeHouse, alpha="0.05")
    number = asked_about(gateway, "small", "middle")
    asked = []

    def slow(path, body, _):
        asked.append(body["model"])
        return hanging() if body["model"] == "middle" and slow.hang else reply(path, body, _)

    slow.hang = True
    gateway.primary.reply = slow
    connection = HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    sent = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body=json.dumps(chat_body(number)), headers=sent)
    until(lambda: "middle" in asked, seconds=60)  # so the first model has answered
    connection.close()
    until(lambda: gateway.records(), seconds=60)
    slow.hang = False
    asked.clear()
    assert gateway.chat(chat_body(number)).json()["arbitrage"]["decided_by"] == "guardian"
    assert set(asked) == {"large"}


def asked_about(gateway, *names):
    """Return the number of a question about which these models are asked first, whatever the draw."""
    rule = Certificate.load(gateway.folder / "rule.json", secret=ProjectSecret.find()).path

    def first(number, policy):
        replies = [facts(name, f"q{number}") for name in names[:-1]]
        asked, following = rule.chain.after([sure for _, sure in replies], [answer for answer, _ in replies], policy)
        return [[*rule.chain.models, "guardian"][place] for place in (*asked, following)] == list(names)

    policies = (rule.position - 1, rule.position)
    return next(number for number in range(600, 1000) if all(first(number, policy) for policy in policies))


def chat_body(number):
    return {"model": "support", "messages": [{"role": "user", "content": f"Is it q{number} ?"}]}
