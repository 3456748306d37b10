"""A Primary behind a skip rule: not asked where the rule says so, in collect and in the gateway, and bound to the rule."""

import asyncio
import json

import pytest

from conformal_arbitrage import StaleCalibrationError
from conformal_arbitrage.calibration.skip_rule import SkipRule
from conformal_arbitrage.collecting.collect import collect
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.scorelog.log import ScoreLog
from tests.gateway.house import CHAT, MENU, House

RULE = SkipRule(threshold=0.5, level=0.1, groups={"law": 0.8, "art": 0.0}, group_source="metadata.subject")
POLICY = {"group": "metadata.subject"}


@pytest.fixture
def served(tmp_path):
    """Return what starts a gateway whose Primary is behind the rule; all are closed at the end."""
    open_houses = []

    def start(**options):
        RULE.write(tmp_path / "skip.json")
        models = {"primary": {"skip": "skip.json"}}
        open_houses.append(House(tmp_path, models=models, **{"policy": POLICY, **options}))
        return open_houses[-1].__enter__()

    yield start
    for one in open_houses:
        one.__exit__()


@pytest.mark.parametrize("form", ["menu", "text"])
def test_the_gateway_sends_what_the_rule_skips_straight_to_the_guardian(served, form):
    gateway = served(form=form)
    body = MENU if form == "menu" else CHAT
    for subject in ("art", "law", None):
        reply = gateway.chat({**body, **({} if subject is None else {"metadata": {"subject": subject}})})
        assert reply.status_code == 200, reply.text
    assert (len(gateway.primary.bodies), len(gateway.guardian.bodies)) == (1, 2)
    none, law, art = gateway.records()
    assert [one.decided_by for one in (art, law, none)] == ["primary", "guardian", "guardian"]
    for skipped in (law, none):
        first, second = skipped.decision.legs
        assert (first.role, first.spent.calls, first.error) == ("primary", 0, None)
        assert second.role == "guardian"
        assert skipped.decision.margin == 0
        assert skipped.decision.no_guarantee is None


def test_a_certificate_is_bound_to_the_rule_and_to_what_names_the_group(served, tmp_path):
    gateway = served()
    certificate = gateway.certificate()
    assert certificate.identities["primary"]["skip_sha256"] == RULE.sha256

    def bind(text):
        (tmp_path / "other.toml").write_text(text)

        async def bound():
            async with Models(read_config(tmp_path / "other.toml")) as models:
                models.policy(certificate)

        asyncio.run(bound())

    written = gateway.path.read_text()
    bind(written)
    with pytest.raises(StaleCalibrationError, match=r"primary\.skip_sha256"):
        bind(written.replace('skip = "skip.json"', ""))
    SkipRule(threshold=0.4, level=0.1, groups={"law": 0.8}, group_source="metadata.subject").write(
        tmp_path / "skip.json"
    )
    with pytest.raises(StaleCalibrationError, match=r"primary\.skip_sha256"):
        bind(written)
    RULE.write(tmp_path / "skip.json")
    gateway.stop()
    gateway.path.write_text(written.replace("metadata.subject", "metadata.topic"))
    gateway.config = read_config(gateway.path)
    with pytest.raises(
        Exception, match=r"primary\.skip_group_source: 'metadata.subject' in the rule, 'metadata.topic'"
    ):
        gateway.start()
    gateway._serving = None  # it never served


def test_collecting_leaves_no_opinion_where_the_primary_is_not_asked(served, tmp_path):
    gateway = served()
    rows = [{"question": f"Q{k}?", "choices": ["a", "b"], "group": g} for k, g in enumerate(["law", "art", "law"])]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    log = asyncio.run(collect(gateway.config, tmp_path / "questions.jsonl", output=tmp_path / "log.parquet"))
    assert isinstance(log, ScoreLog)
    margins = log.primary.reshape(-1, 2)
    assert (margins[:, 0] == margins[:, 1]).tolist() == [True, False, True]
    assert log.primary_usage.cost.tolist()[0] == 0
    assert log.identities["primary"]["skip_sha256"] == RULE.sha256


def test_skip_is_for_one_primary(tmp_path):
    def refused(text):
        (tmp_path / "arbitrage.toml").write_text(text)
        with pytest.raises(ConfigError, match="skip is for") as error:
            read_config(tmp_path / "arbitrage.toml")
        return str(error.value)

    model = 'kind = "chat"\nurl = "http://127.0.0.1:9"\nmodel = "m"\n'
    message = refused(f'[primary]\n{model}[guardian]\n{model}skip = "skip.json"\n')
    assert "this model is the guardian; drop it" in message
    cascade = f'[cascade]\nmodels = ["a", "b"]\n[models.a]\n{model}skip = "skip.json"\n[models.b]\n{model}'
    assert "a cascade has its own order" in refused(cascade)
