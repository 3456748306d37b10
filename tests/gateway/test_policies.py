import asyncio

import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway import application
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import policies as stored_policies
from tests.certificates import edited, said
from tests.gateway.house import UNSURE, House, error_of, section, votes

URL = "/v1/arbitrage/policies/support"


def document(gateway, alpha, **rest):
    return {**gateway.certificate(alpha, **rest).to_dict()}


def alpha_of(gateway):
    return gateway.decide().headers["x-arbitrage-alpha"]


def other_models(gateway):
    return {"primary": {"kind": "decisions", "model": "other"}, "guardian": {"kind": "decisions", "model": "other"}}


def test_the_policy_in_force_and_its_history_can_be_seen(house):
    gateway = house()
    policies = gateway.get(URL).json()
    assert (policies["name"], policies["version"]) == ("support", 1)
    [version] = policies["history"]
    assert (version["active"], version["installed_by"]) == (True, "configuration")
    assert said(version["certificate"], "alpha") == 0.05


def test_a_certificate_is_in_force_from_the_next_request_on(house):
    gateway = house()
    assert alpha_of(gateway) == "0.05"
    made_version = gateway.put(URL, {"certificate": document(gateway, 0.1)}).json()
    assert (made_version["version"], made_version["active"]) == (2, True)
    assert alpha_of(gateway) == "0.1"
    assert gateway.get(URL).json()["version"] == 2
    gateway.restart()
    assert alpha_of(gateway) == "0.1"


def test_a_dry_run_checks_and_changes_nothing(house):
    gateway = house()
    assert gateway.put(URL, {"certificate": document(gateway, 0.1), "dry_run": True}).json() == {
        "status": "would be installed"
    }
    assert alpha_of(gateway) == "0.05"
    assert len(gateway.get(URL).json()["history"]) == 1
    stale = document(gateway, 0.1, identities=other_models(gateway))
    error_of(gateway.put(URL, {"certificate": stale, "dry_run": True}), 422, "certificate_refused")


def test_a_certificate_of_other_models_is_refused_with_what_differs(house):
    gateway = house()
    stale = document(gateway, 0.1, identities=other_models(gateway))
    assert "primary.model" in error_of(gateway.put(URL, {"certificate": stale}), 422, "certificate_refused")["message"]
    assert alpha_of(gateway) == "0.05"


@pytest.mark.parametrize(
    "change",
    [
        {"guarantee": "Everything is fine."}, {"alpha": 0.5}, {"relaxation": "x"}, {"n": 10**30},
        {"alpha": -1}, {"schema": 99}, {"unknown": 1}, {"identities": "unbound"}, {"identities": {}}, {"identities": 5},
    ],
)  # fmt: skip
def test_a_certificate_that_was_tampered_with_is_refused(house, change):
    gateway = house()
    changed = edited(document(gateway, 0.1), change)
    reply = gateway.put(URL, {"certificate": changed})
    error_of(reply, 422, "certificate_refused")
    assert alpha_of(gateway) == "0.05"


@pytest.mark.parametrize(
    "body", [{}, {"certificate": 1}, {"certificate": {}}, {"certificate": {}, "threshold": 0.1}, []]
)
def test_anything_else_than_a_certificate_is_refused(house, body):
    gateway = house()
    assert gateway.put(URL, body).status_code in (400, 422)
    assert alpha_of(gateway) == "0.05"


def test_a_rollback_goes_back_one_version_at_a_time(house):
    gateway = house()
    for alpha in (0.1, 0.2):
        gateway.put(URL, {"certificate": document(gateway, alpha)})
    assert alpha_of(gateway) == "0.2"
    assert gateway.post(f"{URL}/rollback", {}).json()["version"] == 4
    assert alpha_of(gateway) == "0.1"
    gateway.post(f"{URL}/rollback", {})
    assert alpha_of(gateway) == "0.05"
    error_of(gateway.post(f"{URL}/rollback", {}), 409, "nothing_to_roll_back")


def test_a_rollback_to_a_certificate_of_other_models_is_refused_and_changes_nothing(house):
    gateway = house()
    stale = document(gateway, 0.3, identities=other_models(gateway))
    gateway.with_store(lambda store: store.run(stored_policies.install, "support", stale, by="elsewhere"))
    gateway.put(URL, {"certificate": document(gateway, 0.1)})
    assert alpha_of(gateway) == "0.1"
    error_of(gateway.post(f"{URL}/rollback", {}), 422, "certificate_refused")
    assert alpha_of(gateway) == "0.1"
    assert len(gateway.get(URL).json()["history"]) == 3


def test_a_certificate_installed_by_another_gateway_takes_effect(house):
    gateway = house()
    fresh = document(gateway, 0.1)
    gateway.with_store(lambda store: store.run(stored_policies.install, "support", fresh, by="elsewhere"))
    assert alpha_of(gateway) == "0.1"


def test_what_another_gateway_installs_for_other_models_leaves_this_one_s_version_in_force(house):
    gateway = house(**{"policies.second": {"aliases": ["two"]}})
    stale = document(gateway, 0.3, identities=other_models(gateway))
    gateway.with_store(lambda store: store.run(stored_policies.install, "support", stale, by="elsewhere"))
    assert alpha_of(gateway) == "0.05"
    assert gateway.get(URL).json()["version"] == 1
    ready = gateway.get("/health/ready").json()
    assert sorted(ready["policies"]) == ["second", "support"]
    [problem] = ready["problems"]
    assert problem["policy"] == "support"
    assert "version 2 was made for other models or by a later release" in problem["problem"]
    gateway.put(URL, {"certificate": document(gateway, 0.1)})
    assert alpha_of(gateway) == "0.1"
    assert "problems" not in gateway.get("/health/ready").json()


def test_policies_that_are_not_configured_are_not_found(house):
    gateway = house()
    other = "/v1/arbitrage/policies/other"
    error_of(gateway.get(other), 404)
    error_of(gateway.put(other, {"certificate": document(gateway, 0.1)}), 404)
    error_of(gateway.post(f"{other}/rollback", {}), 404)


def test_what_a_certificate_allows_by_name_is_answered_without_a_guarantee(house):
    gateway = house(primary=votes(*UNSURE), policy={"allow": ["primary.model"]})
    identities = gateway.certificate().identities
    other = {**identities, "primary": {**identities["primary"], "model": "other"}}
    assert gateway.put(URL, {"certificate": document(gateway, 0.1, identities=other)}).status_code == 200
    [answer] = gateway.decide().json()["answers"]
    assert answer["arbitrage"]["guarantee"] == "none"
    assert "primary.model" in answer["arbitrage"]["reason"]


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        ({"allow": ["primary.modle"]}, r"allow names 'primary.modle', which neither .* did you mean 'primary.model'"),
        ({"allow": ["unsinged"]}, "did you mean 'unsigned'"),
        ({"allow": ["x"]}, "'x', which neither the certificate nor the models have; remove it"),
        ({"aliases": [""]}, r"\[policies.support\] aliases has ''"),
        ({"aliases": ["two", " "]}, "aliases has ' ', which no request can name"),
    ],
)
def test_typos_in_allow_and_empty_aliases_are_refused(tmp_path, policy, complaint):
    gateway = House(tmp_path, policy=policy)
    with pytest.raises(ConfigError, match=complaint):
        gateway.__enter__()
    gateway._serving = None
    gateway.__exit__()


def test_a_person_without_a_terminal_is_refused_at_the_start(tmp_path):
    person = {"kind": "human", "name": "team"}
    path = tmp_path / "arbitrage.toml"
    path.write_text(
        "\n".join([section("primary", person), section("guardian", person), "[policies.support]", 'mode = "shadow"'])
    )

    async def start():
        async with application(read_config(path)):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match=r"\[primary\] is a person, and there is no terminal"):
        asyncio.run(start())


def unsigned(gateway, alpha):
    return {**document(gateway, alpha), "secret_id": None, "signature": None}


def test_an_unsigned_certificate_is_refused_with_both_remedies(house):
    gateway = house()
    message = error_of(gateway.put(URL, {"certificate": unsigned(gateway, 0.1)}), 422, "certificate_refused")["message"]
    assert "is unsigned; calibrate again" in message
    assert 'allow = ["unsigned"]' in message


def test_a_certificate_by_groups_needs_a_policy_that_says_where_groups_are_named(house):
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 60, [[1, 0]] * 60, group=["a", "b"] * 30)
    reply = house().put(URL, {"certificate": calibrate(log, 0.1, by="group").to_dict()})
    assert 'set group = "metadata.NAME" in [policies.support]' in error_of(reply, 422, "certificate_refused")["message"]


@pytest.mark.parametrize("change", [{"relaxation": 0.31}, {"created": "2020-01-01T00:00:00+00:00"}])
def test_a_certificate_changed_after_signing_is_refused(house, change):
    gateway = house()
    reply = gateway.put(URL, {"certificate": edited(document(gateway, 0.1), change)})
    assert "the certificate was changed" in error_of(reply, 422, "certificate_refused")["message"]


def test_an_unsigned_certificate_allowed_by_name_decides_without_a_guarantee(house):
    gateway = house(policy={"allow": ["unsigned"], "expose": "full"})
    assert gateway.decide().json()["answers"][0]["arbitrage"]["guarantee"] == "crc"
    gateway.put(URL, {"certificate": unsigned(gateway, 0.1)})
    claimed = gateway.decide().json()["answers"][0]["arbitrage"]
    assert claimed["guarantee"] == "none"
