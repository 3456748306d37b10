"""A certificate by groups behind the gateway: each request gets its group's threshold, as a replay of the log would."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage import CertificateError, OptionError, ScoreLog, calibrate
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live.config import read_config
from tests.gateway.house import CHAT, DECISION, MENU, House, failing, votes

URL = "/v1/arbitrage/policies/support"
SUBJECT = {"group": "metadata.subject", "expose": "full"}
ASKED = ("easy", "hard", "rare", "geology", "", 7, None)
"""Two groups with a threshold, a small one, an unknown one, and requests that name none."""


class GroupHouse(House):
    """Certified by groups: the easy one has a low threshold, the hard one a high one, and others have 10 rows each."""

    easy = "easy"

    def certificate(self, alpha=0.05, identities=None, policy="support", n=400):
        config = read_config(self.path)
        made_by = identities or identities_of(config, policy)
        group = np.array([self.easy, "hard"] * (n // 2 - 20) + ["rare", "scarce", "sparse", "odd"] * 10)
        sure = np.round(np.random.default_rng(0).uniform(0.34, 0.99, n), 2)
        wrong = (group == "hard") & (sure < 0.9)
        if config.form_of(policy) == "menu":
            rest = (1 - sure) / 2
            guardian = np.column_stack([~wrong, np.ones(n), np.zeros(n)]).astype(float)
            log = ScoreLog.from_arrays(
                np.column_stack([sure, rest, rest]), guardian, id=[f"r{k}" for k in range(n)], group=group,
                identities=made_by,
            )  # fmt: skip
        else:
            log = ScoreLog.from_router(
                confidence=sure, primary_grade=1.0 - wrong, guardian_grade=np.ones(n), group=group,
                id=[f"r{k}" for k in range(n)],
                identities={**made_by, "grader": {"kind": "exact"}},
            )  # fmt: skip
        secret = ProjectSecret.find()
        options = {"boundary": "random", "key": secret.boundary_key, "guardian_sees": "all", **self.calibration}
        return calibrate(log, alpha, by="group", **options).sign(secret)


def varying(path, body, number):
    """A Primary whose lead differs from request to request."""
    top = (0.4, 0.6, 0.8, 0.95)[number % 4]
    return votes(top, (1 - top) / 2, (1 - top) / 2)(path, body, number)


def about(subject, body=MENU, **fields):
    return {**body, **fields} if subject is None else {**body, **fields, "metadata": {"subject": subject}}


def replayed(gateway, records, groups):
    """Decide the recorded rows offline, from the scores that the record holds."""
    certificate = gateway.certificate().with_key_of(ProjectSecret.find())
    scores = [record.decision.legs[0].scores for record in records]
    if gateway.form == "text":
        scores = [(0.0, *given) for given in scores]
    names = [name if isinstance(name, str) else "" for name in groups]
    log = ScoreLog.from_arrays(scores, scores, id=[record.id for record in records], group=names)
    return certificate.apply(log)


@pytest.mark.parametrize("small_groups", ["defer", "merge"])
def test_menu_decisions_are_those_of_a_replay(house, small_groups):
    gateway = house(GroupHouse, policy=SUBJECT, primary=varying, calibration={"small_groups": small_groups})
    groups = [group for group in ASKED for _ in range(4)]
    for number, group in enumerate(groups):
        reply = gateway.chat(about(group, user=f"u{number}"))
        assert reply.status_code == 200, reply.text
        assert reply.json()["arbitrage"]["guarantee"] == "crc"
    records = gateway.records(limit=100)[::-1]
    deciders = {group: set() for group in ASKED}
    for record, group, offline in zip(records, groups, replayed(gateway, records, groups), strict=True):
        decision = record.decision
        assert (record.decided_by, decision.candidates) == (offline.decided_by, offline.candidates)
        assert (decision.margin, decision.relaxation) == (offline.margin, offline.relaxation)
        assert decision.no_guarantee is None
        deciders[group].add(record.decided_by)
    assert deciders["easy"] == {"primary"}
    assert deciders["hard"] == {"primary", "guardian"}
    for group in ("geology", "", 7, None):
        assert deciders[group] == {"guardian"}
    assert deciders["rare"] == ({"guardian"} if small_groups == "defer" else {"primary"})


def test_free_text_and_streams_take_the_threshold_of_the_group(house):
    gateway = house(GroupHouse, form="text", policy=SUBJECT)
    groups = ["easy", "hard", "rare", "geology", None]
    for group in groups:
        assert gateway.chat(about(group, CHAT)).status_code == 200
        assert gateway.chat(about(group, CHAT, stream=True)).status_code == 200
    records = gateway.records(limit=100)[::-1]
    twice = [group for group in groups for _ in range(2)]
    for record, offline in zip(records, replayed(gateway, records, twice), strict=True):
        assert record.decided_by == offline.decided_by
        assert record.decision.relaxation == offline.relaxation
    assert [record.decided_by for record in records[:2]] == ["primary"] * 2
    assert {record.decided_by for record in records[4:]} == {"guardian"}


def test_shadow_mode_records_the_threshold_of_the_group(house):
    gateway = house(GroupHouse, policy={**SUBJECT, "mode": "shadow"}, primary=varying)
    groups = [group for group in ("easy", "hard", None) for _ in range(4)]
    for number, group in enumerate(groups):
        assert gateway.chat(about(group, user=f"u{number}")).status_code == 200
    records = gateway.records(limit=100)[::-1]
    for record, offline in zip(records, replayed(gateway, records, groups), strict=True):
        assert record.decided_by == "guardian"
        assert (record.decision.candidates, record.decision.relaxation) == (offline.candidates, offline.relaxation)


def test_the_decisions_route_takes_the_group_from_its_metadata(house):
    gateway = house(GroupHouse, policy=SUBJECT, primary=votes(0.98, 0.01, 0.01))
    for body, decider in (
        (DECISION, "guardian"),
        (about("easy", DECISION), "primary"),
        (about(7, DECISION), "guardian"),
    ):
        assert gateway.decide(body).json()["answers"][0]["arbitrage"]["decided_by"] == decider
    assert [record.decision.group for record in gateway.records()] == [None, "easy", None]


def test_another_attempt_in_another_group_is_another_decision(house):
    """Or a request could take the threshold of one group and count as a decision of another."""
    gateway = house(GroupHouse, policy=SUBJECT, primary=votes(0.4, 0.3, 0.3), guardian=failing())
    assert gateway.chat(about("hard")).status_code >= 500
    gateway.guardian.reply = votes(0, 1)
    assert gateway.chat(about("easy")).json()["arbitrage"]["decided_by"] == "primary"
    again = gateway.chat(about("hard")).json()["arbitrage"]
    assert again["decided_by"] == "guardian"
    assert len(gateway.primary.bodies) == 2, "the second attempt in the same group keeps the Primary's answer"
    assert len(gateway.records()) == 2


def test_the_command_line_decides_by_group_and_shows_each(house):
    gateway = house(GroupHouse, policy=SUBJECT, primary=votes(0.5, 0.25, 0.25))
    assert gateway.chat(about("easy")).status_code == 200
    config, certificate = ["--config", str(gateway.path)], str(gateway.folder / "rule.json")
    actions = ["--action", "a", "--action", "b", "--action", "c"]
    for group, decider in (("easy", "primary"), ("hard", "guardian"), ("geology", "guardian"), (None, "guardian")):
        named = [] if group is None else ["--group", group]
        command = ["ask", certificate, "Which?", *actions, *named, *config, "--json"]
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["decided_by"] == decider
    shown = CliRunner().invoke(cli, ["monitor", "support", *config])
    assert shown.exit_code == 0, shown.output
    assert "group" in shown.output
    assert "easy" in shown.output
    assert "hard" in shown.output


def test_it_is_installed_listed_rolled_back_and_kept_over_a_restart(house):
    gateway = house(GroupHouse, policy=SUBJECT, primary=votes(0.98, 0.01, 0.01))
    installed = gateway.put(URL, {"certificate": gateway.certificate(0.2).to_dict()})
    assert installed.json()["version"] == 2, installed.text
    gateway.restart()
    assert gateway.chat(about("easy")).headers["x-arbitrage-alpha"] == "0.2"
    assert gateway.post(f"{URL}/rollback", {}).json()["version"] == 3
    assert (
        gateway.chat(about("easy")).json()["arbitrage"]["relaxation"] == gateway.certificate().groups["easy"].relaxation
    )


def test_a_policy_that_does_not_say_where_requests_name_their_group_is_refused(house):
    with pytest.raises(CertificateError, match=r"a threshold for each 'group', and requests name none; set group = "):
        house(GroupHouse)


def test_a_guard_is_refused(house):
    with pytest.raises(
        OptionError, match="guard and groups do not go together: each group would need a guard of its own"
    ):
        house(GroupHouse, policy={**SUBJECT, "guard": True, "audit_rate": 0.5})
