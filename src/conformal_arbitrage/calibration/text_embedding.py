"""Texts as vectors of fixed length, from a table of token vectors that ships inside a package.

The vector of a text is the mean of its tokens' vectors, at unit length, along the first principal axes of the table. Nothing
of it is estimated from rows, and nothing is downloaded: the extra `text` installs the package wordllama, of which two files
are read, the table and the tokenizer. A certificate holds the digest of both and of the axes, so that a query is only ever
compared with rows whose vectors were made in the same way.

Knows nothing of losses, fits or certificates.
"""

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.errors import OptionError

WIDTH = 48
"""Columns of a vector."""
_SCALE = 6.0
"""Times unit length, so that the penalty of a learned score weighs a text like its other features."""
_DECIMALS, _AXIS_DECIMALS = 6, 4
"""Vectors and axes are rounded to these, so that the noise of another processor's arithmetic does not show."""
_MOST_CHARACTERS = 20_000
"""Of a text; what follows is not read."""
_PACKAGE = "wordllama"
_TABLE, _TOKENIZER = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextEmbedding:
    """Turns texts into vectors.

    Attributes:
        table: tokens x dimensions.
        axes: dimensions x `WIDTH`.
        tokenizer: has `encode(text, add_special_tokens=)`, whose result has `ids`.
        sha256: digest of the files and the axes.
    """

    table: NDArray[np.float32] = field(repr=False)
    axes: Floats = field(repr=False)
    tokenizer: Any = field(repr=False)
    sha256: str

    def vector(self, text: str) -> list[float]:
        """Return the vector of a text; zeros if it has no tokens."""
        ids: list[int] = self.tokenizer.encode(text[:_MOST_CHARACTERS], add_special_tokens=False).ids
        total: Floats = np.add.reduce(self.table[ids], axis=0, dtype=np.float64)
        length = float(np.sqrt((total * total).sum()))
        if length == 0:
            return [0.0] * WIDTH
        return np.round((total / length) @ self.axes * _SCALE, _DECIMALS).tolist()

    def vectors(self, texts: Sequence[str]) -> Floats:
        """Return the vectors of many texts, texts x columns; each is computed as `vector` does, to the bit."""
        distinct = {text: self.vector(text) for text in dict.fromkeys(texts)}
        return np.array([distinct[text] for text in texts]).reshape(len(texts), WIDTH)


@cache
def text_embedding() -> TextEmbedding:
    """Return the embedding of the extra `text`; it is read once.

    Raises:
        OptionError: the extra is not installed, or its files are not those that this release knows.
    """
    spec = importlib.util.find_spec(_PACKAGE)  # without importing it: that would bring HTTP clients along
    if spec is None or spec.origin is None:
        raise OptionError(
            f"texts as features need the packages {_PACKAGE} and tokenizers; run `pip install 'conformal-arbitrage[text]'`"
        )
    folder = Path(spec.origin).parent
    try:
        weights, words = (folder / _TABLE).read_bytes(), (folder / _TOKENIZER).read_bytes()
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_buffer(words)
        table = _read_table(weights)
    except (OSError, ImportError, ValueError, KeyError) as error:
        raise OptionError(
            f"texts as features need {_PACKAGE} with {_TABLE}, and tokenizers ({error}); run `pip install "
            "'conformal-arbitrage[text]'`"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    axes = _principal_axes(table)
    digest = hashlib.sha256()
    for part in (weights, words, axes.astype("<f8").tobytes()):
        digest.update(hashlib.sha256(part).digest())
    return TextEmbedding(table=table, axes=axes, tokenizer=tokenizer, sha256=digest.hexdigest())


def _read_table(content: bytes) -> NDArray[np.float32]:
    """Return the only array of a safetensors file, of half precision."""
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    [described] = [one for name, one in header.items() if name != "__metadata__"]
    if described["dtype"] != "F16":
        raise ValueError(f"its numbers are {described['dtype']}, not F16")
    begin, end = described["data_offsets"]
    flat = np.frombuffer(content[start + begin : start + end], dtype="<f2")
    return flat.reshape(described["shape"]).astype(np.float32)


def _principal_axes(table: NDArray[np.float32]) -> Floats:
    """Return the axes along which the tokens vary most, the first one first, each with its largest entry positive."""
    centred = table.astype(np.float64)
    centred -= centred.mean(axis=0)
    _, axes = np.linalg.eigh(centred.T @ centred)
    axes = axes[:, ::-1][:, :WIDTH]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None, :], axis=0)
    return np.round(axes * np.sign(largest), _AXIS_DECIMALS).astype(np.float64)
