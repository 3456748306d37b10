"""Texts as vectors: words and pairs of words, weighted by how rare they are and hashed into fixed columns.

Enough to find questions about the same thing; no model, and nothing to download. Knows nothing of rows or rules.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
WIDTH = 512
_WORD = re.compile(r"\w+")


def text_vectors(texts: Sequence[str]) -> Vectors:
    """Return one vector of length 1 per text, or of length 0 if it has no words: texts x columns."""
    terms = [Counter(_terms(text)) for text in texts]
    frequency = Counter(term for counted in terms for term in counted)
    places = {term: _place(term) for term in frequency}
    vectors = np.zeros((len(texts), WIDTH))
    for row, counted in enumerate(terms):
        for term, count in counted.items():
            column, sign = places[term]
            rarity = math.log((1 + len(texts)) / (1 + frequency[term])) + 1
            vectors[row, column] += sign * (1 + math.log(count)) * rarity
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(length > 0, length, 1.0)).astype(np.float32)


def _terms(text: str) -> list[str]:
    words = _WORD.findall(text.casefold())
    return [*words, *(f"{a} {b}" for a, b in pairwise(words))]


def _place(term: str) -> tuple[int, int]:
    """Return the column of a term and its sign, which makes terms that share a column cancel on average."""
    code = crc32(term.encode())
    return code % WIDTH, 1 if code >> 31 else -1
