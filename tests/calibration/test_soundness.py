"""Ways in which a live decision could deviate from the calibrated rule, each shown to be impossible."""

import asyncio

import pytest

from conformal_arbitrage import ChatRequest, ConformalArbitrage, GuardianError, Query, ReplyError, Spent
from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.errors import CertificateError, ConfigError
from conformal_arbitrage.live.config import read_config, write_pinned
from conformal_arbitrage.models import Call, ChatAnswerer, HumanScorer, Reply, Scores, Settings
from conformal_arbitrage.models.resilience import Cache
from tests.live.test_policy import QUERY, certify, scorer


class Custom:
    """A user-defined scorer that checks nothing."""

    identity = scorer([1, 0, 0]).identity

    def __init__(self, *values):
        self.values = values

    async def score(self, query):
        return Scores(values=self.values)


def decide(primary, guardian):
    rule = certify(scorer([1, 0, 0]), scorer([1, 0, 0]))
    return asyncio.run(ConformalArbitrage(primary=primary, guardian=guardian, certificate=rule).decide(QUERY))


@pytest.mark.parametrize(
    "values", [(), (1.0,), (1.0, 0.0), (1.0, 0.0, 0.0, 0.0), (float("nan"), 0.0, 0.0), ("1", 0, 0)]
)
def test_scores_that_do_not_match_the_menu_are_a_failure_even_from_a_user_defined_scorer(values):
    decision = decide(Custom(*values), Custom(0.0, 0.0, 1.0))
    assert (decision.decided_by, decision.answer) == ("guardian", "c")
    with pytest.raises(GuardianError):
        decide(Custom(0.4, 0.3, 0.3), Custom(*values))


def test_a_malformed_tool_call_is_a_failure_live_as_in_a_log():
    class Port:
        origin = "here"

        async def call(self, call):
            message = {"role": "assistant", "content": None, "tool_calls": ["oops"]}
            return Reply(document={"choices": [{"message": message}]}, spent=Spent(calls=1, cost=0.5))

    answerer = ChatAnswerer(port=Port(), settings=Settings(model="m"), confidence="logprob")
    with pytest.raises(ReplyError) as caught:
        asyncio.run(answerer.answer(ChatRequest({"messages": []}, id="q")))
    assert caught.value.spent.cost == 0.5


async def test_a_cached_reply_is_never_used_for_another_role(tmp_path):
    class Port:
        origin = "the same place"
        calls = 0

        async def call(self, call):
            self.calls += 1
            return Reply(document={"number": self.calls})

    port = Port()
    first, second = (Cache(port, tmp_path / "r.sqlite", per_query=True, role=r) for r in ("primary", "guardian"))
    call = Call(path="/x", body={}, id="q")
    numbers = [(await cache.call(call)).document["number"] for cache in (first, second, first, second)]
    first.close()
    second.close()
    assert numbers == [1, 2, 1, 2]


def test_two_people_have_two_ports():
    class Seen:
        def __init__(self, port):
            self.origin = port.origin
            origins.append(port.origin)

    origins = []
    for name in ("junior", "senior"):
        HumanScorer(name=name, through=Seen)
    assert len(set(origins)) == 2


def config(tmp_path, text):
    path = tmp_path / "arbitrage.toml"
    path.write_text(text)
    return path


def test_two_functions_cannot_share_a_name(tmp_path):
    text = '[{}]\nkind = "function"\nfunction = "{}"\nname = "rule"\n'
    with pytest.raises(ConfigError, match="line 8: both functions are called 'rule'"):
        read_config(config(tmp_path, text.format("primary", "a:b") + text.format("guardian", "a:c")))


def test_pinning_never_leaves_an_unreadable_file(tmp_path):
    from conformal_arbitrage.live.config import Pinned

    inline = 'primary = {kind = "chat", url = "http://127.0.0.1:9/v1", model = "m"}\n'
    path = config(tmp_path, inline + '[guardian]\nkind = "human"\nname = "me"\n')
    before = path.read_text()
    with pytest.raises(ConfigError, match="section of its own"):
        write_pinned(path, {"primary": Pinned()})
    assert path.read_text() == before


def test_limits_of_zero_are_rejected_for_every_model(tmp_path):
    models = '[primary]\nkind = "human"\nname = "a"\n[guardian]\nkind = "human"\nname = "b"\n'
    for section in ("primary", "guardian"):
        text = models.replace(f"[{section}]\n", f"[{section}]\nrequests_per_minute = 0\n")
        with pytest.raises(ConfigError, match="requests_per_minute must be above 0"):
            read_config(config(tmp_path, text))


def test_a_certificate_with_damaged_identities_is_rejected():
    document = certify(scorer([1, 0, 0]), scorer([1, 0, 0])).to_dict()
    for damaged in ({"primary": []}, {"primary": {}}, {"primary": [], "guardian": {}}):
        with pytest.raises(CertificateError, match="identities"):
            Certificate.from_dict({**document, "identities": damaged})


def test_a_decision_keeps_the_id_of_its_query():
    decision = decide(Custom(0.9, 0.05, 0.05), Custom(0, 0, 1))
    assert decision.id == QUERY.id
    assert isinstance(QUERY, Query)
