"""Kinds of other packages: how questions are rendered becomes part of their identity by itself."""

import asyncio

import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.live.binding import differences
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.models import ModelConfig, Scores
from conformal_arbitrage.models.port import Answer
from conformal_arbitrage.models.rendering import RENDERING, VERBATIM
from conformal_arbitrage.types import ChatRequest, Query


class Plugin:
    """A model of another package, which says nothing of how it reads questions."""

    def __init__(self, **more):
        self.identity = {"kind": "plugin", **more}

    async def score(self, query):
        return Scores(values=tuple(float(len(action)) for action in query.actions))

    async def answer(self, request):
        return Answer(message={"role": "assistant", "content": "An answer."})


class Streaming(Plugin):
    async def stream(self, request):
        yield {"choices": []}
        yield await self.answer(request)


class PluginConfig(ModelConfig, frozen=True, kw_only=True, tag="plugin"):
    streams: bool = False
    own: str | None = None

    def build(self, context):
        return Plugin() if self.own is None else Plugin(rendering=self.own)

    def build_answerer(self, context):
        return Streaming() if self.streams else Plugin()


def models(**options):
    return Models(Config(primary=PluginConfig(**options), guardian=PluginConfig(**options)))


def test_a_scorer_of_another_package_gets_the_rendering_and_keeps_its_scores():
    scorer = models().scorer("primary")
    assert scorer.identity == {"kind": "plugin", "rendering": RENDERING}
    assert asyncio.run(scorer.score(Query("?", ("a", "bb")))).values == (1.0, 2.0)


def test_one_that_names_its_own_rendering_keeps_it():
    assert models(own="pictures 3").scorer("primary").identity["rendering"] == "pictures 3"


def test_a_certificate_from_another_rendering_is_told_apart(monkeypatch):
    then = models().scorer("primary").identity
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 30, [[1.0, 0.0]] * 30, identities={"primary": then, "guardian": then})
    certificate = calibrate(log, 0.1)
    assert differences(certificate, {"primary": then, "guardian": then}) == {}
    monkeypatch.setattr("conformal_arbitrage.live.build.RENDERING", "messages 2")
    now = models().scorer("primary").identity
    assert set(differences(certificate, {"primary": now, "guardian": now})) == {
        "primary.rendering",
        "guardian.rendering",
    }


@pytest.mark.parametrize("streams", [False, True])
def test_an_answerer_of_another_package_answers_and_streams_as_before(streams):
    answerer = models(streams=streams).answerer("guardian")
    assert answerer.identity == {"kind": "plugin", "rendering": VERBATIM}
    request = ChatRequest({"messages": [{"role": "user", "content": "Hi."}]}, id="q")

    async def items():
        return [item async for item in answerer.stream(request)]

    *chunks, last = asyncio.run(items())
    assert len(chunks) == streams
    assert last == asyncio.run(answerer.answer(request))
