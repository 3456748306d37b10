"""Shuffled: show a scorer the options in an order that its preference for positions cannot exploit.

Knows nothing of how the scorer presents options.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from conformal_arbitrage.scorers.base import Identity, Scorer, Scores
from conformal_arbitrage.types import Query
from conformal_arbitrage.upstream.base import fingerprint


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A scorer that sees the options in an order drawn from a hash of the query: the same query, the same order."""

    scorer: Scorer

    @property
    def identity(self) -> Identity:
        """The scorer's, with the order."""
        return {**self.scorer.identity, "option_order": "shuffled by content"}

    async def score(self, query: Query) -> Scores:
        """Return the scorer's numbers in the query's own order."""
        order = content_order(query)
        places = None if query.places is None else tuple(query.places[k] for k in order)
        shown = replace(query, actions=tuple(query.actions[k] for k in order), places=places or tuple(order))
        scores = await self.scorer.score(shown)
        return replace(scores, values=tuple(scores.values[order.index(k)] for k in range(len(order))))


def content_order(query: Query) -> list[int]:
    """Return an order of the options that is drawn from a hash of the query."""
    digest = hashlib.sha256(fingerprint([query.text, query.actions]).encode()).digest()
    draws = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return draws.permutation(len(query.actions)).tolist()
