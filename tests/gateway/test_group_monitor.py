"""One ledger for each group of a certificate, through a real gateway: states, alarms, safe mode, and callers who lie."""

import json
import threading
import time
import unicodedata

import pytest
from click.testing import CliRunner

from conformal_arbitrage import Certificate, ScoreLog, StaleCalibrationError, verify
from conformal_arbitrage.calibration.certificate import group_source_of
from conformal_arbitrage.cli import cli
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import integrity, ledger
from tests.gateway.house import CHAT, DECISION, MENU, QUESTION, SURE, UNSURE, error_of, until, votes
from tests.gateway.test_groups import SUBJECT, URL, GroupHouse, about

AUDITED = {**SUBJECT, "audit_rate": 1.0}


def questions(subject, count=20):
    return {**DECISION, "questions": [QUESTION] * count, "metadata": {"subject": subject}}


def ledgers(made):
    """How many rows each ledger has, by lifts and group."""
    found = made.with_store(lambda store: store.run(ledger.ledgers, "support"))
    return {(one.key.lifts, one.key.group): one.rows for one in found}


def monitor(made):
    return made.get(f"{URL}/monitor").json()


def shown_groups(made):
    document = until(lambda: (shown := monitor(made)).get("groups") and shown)
    return {one["group"]: one for one in document["groups"]}


def known(made, group, count):
    return until(lambda: (one := shown_groups(made)[group])["audits"]["known"] >= count and one)


def right(*top):
    """A Guardian that agrees with the sure Primary."""
    return votes(*top)


def test_each_group_has_a_ledger_and_groups_that_are_always_deferred_have_none(house):
    gateway = house(GroupHouse, policy=AUDITED, primary=votes(0.98, 0.01, 0.01))
    for subject in ("easy", "hard", "hard", "rare", "geology", None):
        assert gateway.chat(about(subject)).status_code == 200
    easy, hard = known(gateway, "easy", 1), known(gateway, "hard", 2)
    assert ledgers(gateway) == {(0, "easy"): 1, (0, "hard"): 2}
    assert len(gateway.guardian.bodies) == 6  # three deferred, three audited: a deferral needs no second answer
    document = monitor(gateway)
    assert (document["state"], document["watched"], document["unwatched"]) == ("blind", True, None)
    assert document["deferred_groups"] == ["odd", "rare", "scarce", "sparse"]
    assert document["reasons"][0].startswith("easy: too few audits")
    assert document["false_red"] == pytest.approx(0.1)  # 0.05 for each of two groups
    certificate = gateway.certificate()
    for name, one in (("easy", easy), ("hard", hard)):
        assert one["members"] == [name]
        assert one["lines"]["alpha"] == 0.05 < one["lines"]["red"]
        assert certificate.groups[name].n == 180
    records = gateway.records()
    assert [record.decision.group for record in records][::-1] == ["easy", "hard", "hard", "rare", "geology", None]
    assert gateway.get(f"/v1/arbitrage/records/{records[-1].id}").json()["decision"]["group"] == "easy"


def test_red_in_one_group_puts_the_whole_policy_into_safe_mode(house):
    """The conservative choice: a Primary that failed one group is not trusted with the others until a person has looked."""
    gateway = house(GroupHouse, policy=AUDITED, primary=votes(0.98, 0.01, 0.01), guardian=right(1, 0))
    gateway.decide(questions("easy"))
    known(gateway, "easy", 20)
    gateway.guardian.reply = votes(0, 1)  # the Primary is wrong from now on
    for _ in range(30):
        gateway.decide(questions("hard"))
        if monitor(gateway)["mode"] == "safe":
            break
        time.sleep(0.2)
    document = until(lambda: (shown := monitor(gateway))["mode"] == "safe" and shown)
    assert (document["state"], document["alarm"]["group"], document["alarm"]["cause"]) == ("red", "hard", "losses")
    assert document["reasons"] == ["hard: the loss is above the red line"]
    assert shown_groups(gateway)["easy"]["state"] == "blind"
    page = gateway.get("/console").text
    assert "Of 2 groups, hard matters most." in page
    for subject in ("easy", "hard"):
        assert gateway.chat(about(subject)).json()["arbitrage"]["decided_by"] == "guardian"
    easy = gateway.records(limit=2)[1]
    assert (easy.decision.mode, easy.decision.group) == ("safe", "easy")
    assert easy.decision.candidates == (0,)  # what the group's threshold would have made of it
    text = gateway.get("/metrics").text
    for line in (
        'arbitrage_state{policy="support",state="red"} 1.0',
        'arbitrage_group_state{group="hard",policy="support",state="red"} 1.0',
        'arbitrage_group_state{group="easy",policy="support",state="red"} 0.0',
        'arbitrage_group_audits{group="easy",policy="support",state="known"} 20.0',
    ):
        assert line in text
    gateway.restart()
    assert gateway.chat(about("easy")).json()["arbitrage"]["decided_by"] == "guardian"
    on_the_command_line(gateway)
    assert gateway.post(f"{URL}/lift", {"reason": "the prompt was taken back"}).status_code == 200
    again = gateway.chat(about("easy")).json()["arbitrage"]
    assert (again["decided_by"], again["guarantee"]) == ("primary", "none")
    until(lambda: ledgers(gateway).get((1, "easy")) == 1)
    assert gateway.with_store(lambda store: integrity.verify(store)) == []


def on_the_command_line(made):
    """The commands show every group, and the alarm's."""

    def run(*arguments):
        result = CliRunner().invoke(cli, [*arguments, "--config", str(made.path)])
        assert result.exit_code == 0, result.output
        return result.stdout

    shown = {one["group"]: one for one in json.loads(run("monitor", "--json"))}
    assert set(shown) == {"easy", "hard"}
    assert (shown["easy"]["state"], shown["hard"]["state"], shown["easy"]["mode"]) == ("blind", "red", "safe")
    assert shown["hard"]["alarm"]["group"] == "hard"
    assert "support easy v1" in run("monitor")
    assert "hard" not in run("monitor", "support", "--group", "easy")
    figure = str(made.folder / "hard.svg")
    run("monitor", "support", "--group", "hard", "--plot", figure)
    both = CliRunner().invoke(cli, ["monitor", "support", "--plot", figure, "--config", str(made.path)])
    assert both.exit_code == 2
    assert "--plot draws one group; add --group with one of" in " ".join(both.output.split())
    other = CliRunner().invoke(cli, ["monitor", "--group", "easier", "--config", str(made.path)])
    assert other.exit_code == 2
    assert "there is no ledger of a group 'easier'" in " ".join(other.output.split())
    month, page = time.strftime("%Y-%m", time.gmtime()), made.folder / "page.html"
    run("report", "support", "--month", month, "-o", str(page))
    text = page.read_text()
    assert '<th scope="row">Group, the one that matters most</th><td>hard</td>' in text
    assert "group easy" in text
    assert "group hard: losses" in text


def test_groups_that_share_a_threshold_share_a_ledger_without_a_red_line(house):
    gateway = house(GroupHouse, policy=AUDITED, primary=votes(0.98, 0.01, 0.01), calibration={"small_groups": "merge"})
    for subject in ("rare", "odd", "geology"):
        assert gateway.chat(about(subject)).status_code == 200
    shared = known(gateway, "small groups", 2)
    assert ledgers(gateway) == {(0, "small groups"): 2}
    assert shared["members"] == ["odd", "rare", "scarce", "sparse"]
    assert shared["lines"]["red"] is None
    assert "which groups are small depends on the log" in shared["lines"]["note"]


HOSTILE = (
    "x" * 513, "easy\0", "\0", "Easy", " easy", "easy ", "small groups", "ea\u200bsy", "\u202eysae", "' or 1=1 --",
    ["easy"], {"easy": 1}, True, 1.5, "\U0001f600" * 40,
)  # fmt: skip


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_names_that_the_certificate_does_not_have_are_deferred_and_leave_no_ledger(house, database, request):
    gateway = {} if database == "sqlite" else {"database": request.getfixturevalue("server").new_database()}
    with pytest.MonkeyPatch.context() as patch:
        if gateway:
            patch.setenv("ARBITRAGE_SECRET", "a-long-enough-secret-for-this-test")
        served = house(GroupHouse, policy=AUDITED, gateway=gateway, primary=votes(0.98, 0.01, 0.01))
        assert served.chat(about("easy")).json()["arbitrage"]["decided_by"] == "primary"
        for name in HOSTILE:
            reply = served.chat(about(name))
            assert reply.status_code == 200, (name, reply.text)
            assert reply.json()["arbitrage"]["decided_by"] == "guardian", name
        surrogate = served.post("/v1/chat/completions", data=json.dumps(about("\ud800")).encode())
        assert surrogate.status_code in (200, 400)
        assert surrogate.status_code == 400 or surrogate.json()["arbitrage"]["decided_by"] == "guardian"
        known(served, "easy", 1)
        assert ledgers(served) == {(0, "easy"): 1}
        recorded = {record.decision.group for record in served.records(limit=100)}
        assert recorded >= {"easy", "Easy", "easy\0", "small groups", None}
        assert "x" * 513 not in recorded
        assert "Easy" not in served.get("/metrics").text
        assert served.with_store(lambda store: integrity.verify(store)) == []


def test_a_composed_name_is_another_group_than_a_decomposed_one(house):
    """They look the same; the certificate has one of the two, and the other is deferred."""

    class Accented(GroupHouse):
        easy = "é"

    gateway = house(Accented, policy=AUDITED, primary=votes(0.98, 0.01, 0.01))
    deciders = [
        gateway.chat(about(unicodedata.normalize(form, "é"))).json()["arbitrage"]["decided_by"]
        for form in ("NFC", "NFD")
    ]
    assert deciders == ["primary", "guardian"]
    until(lambda: ledgers(gateway) == {(0, "é"): 1})


@pytest.mark.parametrize("form", ["menu", "text"])
def test_a_key_belongs_to_one_group(house, form):
    """A caller may not take the threshold of one group for the decision of another."""
    body = MENU if form == "menu" else CHAT
    gateway = house(GroupHouse, form=form, policy={**AUDITED, "content": "full"})
    key = {"Idempotency-Key": "one"}
    first = gateway.chat(about("easy", body), headers=key)
    assert first.status_code == 200, first.text
    error_of(gateway.chat(about("hard", body), headers=key), 422, "idempotency_key_reused")
    assert gateway.chat(about("easy", body), headers=key).headers["x-arbitrage-replayed"] == "true"
    assert ledgers(gateway) == {(0, "easy"): 1}


@pytest.mark.parametrize("form", ["menu", "text"])
def test_a_group_that_the_key_names_is_not_the_callers_to_choose(house, form):
    gateway = house(GroupHouse, form=form, policy={**AUDITED, "group": "key", "content": "full"})
    body = MENU if form == "menu" else CHAT
    deciders = {}
    for label in ("easy", "geology", ""):
        secret, _ = gateway.key("call", label)
        headers = {"Authorization": f"Bearer {secret}"}
        for sent in (about("easy", body), body, {**body, "label": "easy"}):
            reply = gateway.chat(sent, headers=headers)
            if reply.status_code == 200:
                deciders.setdefault(label, set()).add(reply.headers["x-arbitrage-decided-by"])
        with_menu = gateway.decide(about("easy", DECISION), headers=headers)
        if form == "menu":
            deciders[label].add(with_menu.json()["answers"][0]["arbitrage"]["decided_by"])
    assert deciders == {"easy": {"primary"}, "geology": {"guardian"}, "": {"guardian"}}
    assert {record.decision.group for record in gateway.records(limit=100)} == {"easy", "geology", None}
    until(lambda: {group for _, group in ledgers(gateway)} == {"easy"})


def test_another_source_of_groups_is_another_certificate(house):
    gateway = house(GroupHouse, policy=AUDITED)
    rule = gateway.folder / "rule.json"
    assert group_source_of(Certificate.load(rule)) == "metadata.subject"
    gateway.chat(about("easy"))
    known(gateway, "easy", 1)
    gateway.stop()
    gateway.certified = False
    for allow in ([], ["group.source"]):
        gateway.sections["policies.support"] = {**AUDITED, "group": "metadata.tenant", "allow": allow}
        gateway._write({"certificate": "rule.json"})
        gateway.config = read_config(gateway.path)
        if not allow:
            with pytest.raises(
                StaleCalibrationError, match=r"group\.source: 'metadata.subject' then, 'metadata.tenant'"
            ):
                gateway.start()
            gateway._serving = None
    gateway.start()
    answer = gateway.chat({**MENU, "metadata": {"subject": "easy", "tenant": "hard"}}).json()["arbitrage"]
    assert answer["guarantee"] == "none"
    assert gateway.records(limit=1)[0].decision.group == "hard"
    assert len({one.key.identities_sha256 for one in gateway.with_store(lambda store: store.run(ledger.ledgers))}) == 2


def test_an_export_says_what_named_its_groups_and_a_certificate_from_it_is_served(house):
    gateway = house(GroupHouse, policy={**AUDITED, "mode": "shadow"}, primary=votes(0.98, 0.01, 0.01))
    for _ in range(2):
        for subject in ("easy", "hard"):
            gateway.decide(questions(subject, 12))
    out, rule = str(gateway.folder / "log.parquet"), str(gateway.folder / "new.json")
    config = ["--config", str(gateway.path)]
    exported = CliRunner().invoke(cli, ["records", "export", "--policy", "support", "--score-log", "-o", out, *config])
    assert exported.exit_code == 0, exported.output
    log = ScoreLog.read(out)
    assert sorted(log.group.tolist()) == ["easy"] * 24 + ["hard"] * 24
    assert log.identities["group"] == {"source": "metadata.subject"}
    calibrated = CliRunner().invoke(cli, ["calibrate", out, "--by", "group", "--alpha", "0.1", "-o", rule, *config])
    assert calibrated.exit_code == 0, calibrated.output
    assert "named by metadata.subject" in calibrated.output
    assert group_source_of(Certificate.load(rule)) == "metadata.subject"
    document = json.loads((gateway.folder / "new.json").read_text())
    assert gateway.put(URL, {"certificate": document}).status_code == 200
    other = ["calibrate", out, "--by", "group", "--group-source", "metadata.x", "--alpha", "0.1", *config]
    refused = CliRunner().invoke(cli, other)
    assert refused.exit_code == 2
    assert "its groups were named by metadata.subject" in " ".join(refused.output.split())
    assert verify(Certificate.load(rule), log).ok


def test_the_ledger_has_the_questions_of_one_request_in_the_order_of_their_primaries(house):
    """One that waits for its Guardian must not let the decided ones of its request fall behind later requests."""
    waiting = threading.Event()

    def primary(path, body, number):
        return votes(*(UNSURE if "unsure" in json.dumps(body) else SURE))(path, body, number)

    async def answered(path, body, number):
        import asyncio

        while not waiting.is_set():
            await asyncio.sleep(0.01)
        return votes(0, 1)(path, body, number)

    gateway = house(policy={"audit_rate": 1.0}, primary=primary, guardian=answered)
    several = {**DECISION, "questions": [{**QUESTION, "instructions": "unsure"}, QUESTION, QUESTION]}
    replies = []
    asking = threading.Thread(target=lambda: replies.append(gateway.decide(several)))
    asking.start()
    try:
        until(lambda: sum(one.rows for one in gateway.with_store(lambda store: store.run(ledger.ledgers))) == 3)
        last = gateway.decide().json()["answers"][0]["arbitrage"]["id"]
    finally:
        waiting.set()
        asking.join(60)
    answers = replies[0].json()["answers"]
    assert [answer["arbitrage"]["decided_by"] for answer in answers] == ["guardian", "primary", "primary"]
    [one] = gateway.with_store(lambda store: store.run(ledger.ledgers))
    rows = until(
        lambda: (
            (found := gateway.with_store(lambda store: store.run(ledger.changes, one.key, 0)))
            and all(row.loss is not None for row in found)
            and found
        )
    )
    by_place = [row.id for row in sorted(rows, key=lambda row: row.seq)]
    assert set(by_place[:3]) == {answer["arbitrage"]["id"] for answer in answers}
    assert by_place[3:] == [last]
    records = {record.id: record for record in gateway.records()}
    assert {record.completion.finish for id, record in records.items() if id != last} == {"stop"}
    assert all(len(record.decision.legs) == 1 + (record.decided_by == "guardian") for record in records.values())
