"""DecisionsScorer: OpenAI's Decisions API, which gives a probability per choice without elicitation.

Knows nothing of prompts: the question and its choices are fields of the request.
"""

from dataclasses import dataclass
from typing import Any, cast

from conformal_arbitrage.errors import RefusalError, ReplyError
from conformal_arbitrage.scorers.base import Identity, Scores, check_values
from conformal_arbitrage.scorers.chat import other_model, served_by
from conformal_arbitrage.types import Query
from conformal_arbitrage.upstream.base import Call, Port, fingerprint

PATH = "/decisions"
FEWEST, MOST = 2, 255
_ROLES = ("user", "system", "developer", "assistant")
INSTRUCTIONS = "Choose the best answer to the question in the input."


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsScorer:
    """Probabilities of the choices of one question.

    Attributes:
        port: the endpoint.
        model: the name to ask for.
        served: the name the endpoint must answer with, if pinned.
        instructions: what to choose by.
    """

    port: Port
    model: str
    served: str | None = None
    instructions: str = INSTRUCTIONS

    @property
    def identity(self) -> Identity:
        """Endpoint, model and instructions."""
        return {
            "kind": "decisions",
            "endpoint": self.port.origin,
            "model": self.model,
            "served": self.served,
            "prompt_sha256": fingerprint(self.instructions),
            "parser": "choice probabilities; 1",
            "option_order": "as given",
        }

    async def score(self, query: Query) -> Scores:
        """The probability of each option."""
        count = len(query.actions)
        if not FEWEST <= count <= MOST or len(set(query.actions)) < count:
            raise ReplyError(f"the Decisions API takes {FEWEST} to {MOST} different choices; got {count}")
        question = {
            "type": "choice",
            "instructions": self.instructions,
            "choices": [{"value": action} for action in query.actions],
        }
        body = {"model": self.model, "input": _input(query), "questions": [question]}
        reply = await self.port.call(Call(path=PATH, body=body, id=query.id, output_limit=count + 16))
        served = served_by(reply)
        if self.served is not None and served != self.served:
            raise other_model(served, self.served, reply.spent)
        raw = repr(reply.document.get("answers"))[:2000]
        found = self._probabilities(reply.document.get("answers"))
        if found is None:
            raise RefusalError("the model declined this question", spent=reply.spent, raw=raw)
        values = check_values([found.get(a) for a in query.actions], count, spent=reply.spent, raw=raw)
        return Scores(values=values, spent=reply.spent, raw=raw, served=served)

    @staticmethod
    def _probabilities(answers: object) -> dict[str, Any] | None:
        """By value; empty if there are none, None if the model refused."""
        first = cast("list[Any]", answers)[0] if isinstance(answers, list) and answers else None
        answer = cast("dict[str, Any]", first) if isinstance(first, dict) else {}
        if answer.get("type") == "refusal":
            return None
        listed: object = answer.get("probabilities")
        entries = cast("list[Any]", listed) if isinstance(listed, list) else []
        found = [cast("dict[str, Any]", e) for e in entries if isinstance(e, dict)]
        return {e["value"]: e.get("probability") for e in found if isinstance(e.get("value"), str)}


def _input(query: Query) -> str | list[dict[str, Any]]:
    """The context as the API takes it: text or plain messages; a conversation with other parts becomes one text."""
    if isinstance(query.context, str):
        return query.context
    plain = all(m.get("role") in _ROLES and isinstance(m.get("content"), str) for m in query.context)
    return [{"role": m["role"], "content": m["content"]} for m in query.context] if plain else query.text
