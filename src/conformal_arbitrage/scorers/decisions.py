"""Kind `decisions`: OpenAI's Decisions API, which returns a probability per choice without elicitation.

Knows nothing of prompts: the question and its choices are fields of the request.
"""

from dataclasses import dataclass

from conformal_arbitrage.errors import RefusalError, ReplyError
from conformal_arbitrage.scorers.base import Identity, Scores, check_values
from conformal_arbitrage.scorers.completions import other_model, served_by
from conformal_arbitrage.scorers.kinds import BuildContext, EndpointConfig
from conformal_arbitrage.scorers.rendering import RENDERING, messages_or_text, pictures_identity, require_seen
from conformal_arbitrage.types import JSON, Query
from conformal_arbitrage.upstream.base import Call, Port, fingerprint

_PATH = "/decisions"
FEWEST, MOST = 2, 255
INSTRUCTIONS = "Choose the best answer to the question in the input."


class DecisionsConfig(EndpointConfig, frozen=True, kw_only=True, tag="decisions"):
    """OpenAI's Decisions API."""

    instructions: str = INSTRUCTIONS

    def build(self, context: BuildContext) -> "DecisionsScorer":
        """Build the scorer."""
        served = self.require_pinned(context.section).served
        port = self.connect(context)
        return DecisionsScorer(
            port=port, model=self.model, served=served, instructions=self.instructions, pictures=self.pictures
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsScorer:
    """Scores options by the probabilities of the choices of one question.

    Attributes:
        port: the endpoint.
        model: the model name to request.
        served: the model name that replies must carry, if pinned.
        instructions: the criterion to choose by.
        pictures: whether the model takes pictures.
    """

    port: Port
    model: str
    served: str | None = None
    instructions: str = INSTRUCTIONS
    pictures: bool = False

    @property
    def identity(self) -> Identity:
        """Endpoint, model, rendering and instructions."""
        return {
            "kind": "decisions",
            "endpoint": self.port.origin,
            "model": self.model,
            "served": self.served,
            "rendering": RENDERING,
            "prompt_sha256": fingerprint(self.instructions),
            "parser": "choice probabilities; 1",
            "option_order": "as given",
            **pictures_identity(pictures=self.pictures),
        }

    async def score(self, query: Query) -> Scores:
        """Return the probability of each option."""
        count = len(query.actions)
        if not FEWEST <= count <= MOST or len(set(query.actions)) < count:
            raise ReplyError(f"the Decisions API takes {FEWEST} to {MOST} different choices; got {count}")
        question = {
            "type": "choice",
            "instructions": self.instructions,
            "choices": [{"value": action} for action in query.actions],
        }
        context = query.context
        if not isinstance(context, str):
            require_seen(query, pictures=self.pictures)
            context = messages_or_text(query)
        body = {"model": self.model, "input": context, "questions": [question]}
        reply = await self.port.call(Call(path=_PATH, body=body, id=query.id, output_limit=count + 16))
        served = served_by(reply)
        if self.served is not None and served != self.served:
            raise other_model(served, self.served, reply.spent)
        raw = repr(reply.document.get("answers"))[:2000]
        probabilities = _probabilities(reply.document.get("answers"))
        if probabilities is None:
            raise RefusalError("the model declined this question", spent=reply.spent, raw=raw)
        values = check_values([probabilities.get(a) for a in query.actions], count, spent=reply.spent, raw=raw)
        return Scores(values=values, spent=reply.spent, raw=raw, served=served)


def _probabilities(answers: JSON) -> dict[str, JSON] | None:
    """Return the probabilities by choice, empty if there are none; None if the model refused."""
    answer: JSON = answers[0] if isinstance(answers, list) and answers else None
    if not isinstance(answer, dict):
        return {}
    if answer.get("type") == "refusal":
        return None
    entries: JSON = answer.get("probabilities")
    probabilities: dict[str, JSON] = {}
    entry: JSON
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(value := entry.get("value"), str):
            probabilities[value] = entry.get("probability")
    return probabilities
