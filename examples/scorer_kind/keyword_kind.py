"""Kind `keywords`: score each option by the weights of the words it contains."""

from dataclasses import dataclass

from conformal_arbitrage import Query
from conformal_arbitrage.models import BuildContext, Identity, ModelConfig, Scores


class KeywordsConfig(ModelConfig, frozen=True, kw_only=True, tag="keywords"):
    """A section with `kind = "keywords"` and `words = {refund = 0.7, lawyer = -1.0}`."""

    words: dict[str, float]

    def build(self, context: BuildContext) -> "KeywordsScorer":
        """Build the scorer."""
        return KeywordsScorer(self.words)


@dataclass(frozen=True)
class KeywordsScorer:
    """Adds up the weights of the words that occur in an option."""

    words: dict[str, float]

    @property
    def identity(self) -> Identity:
        """Everything that the scores depend on; certificates are bound to it."""
        return {"kind": "keywords", "words": repr(sorted(self.words.items()))}

    async def score(self, query: Query) -> Scores:
        """Return one number per option."""
        texts = [action.lower() for action in query.actions]
        return Scores(values=tuple(sum(w for word, w in self.words.items() if word in text) for text in texts))
