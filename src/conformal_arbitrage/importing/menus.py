"""Two models' log-likelihoods of the same options as a score log of menus.

Knows nothing of the tool that wrote them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.importing.pairing import NEITHER, Tally, Unpaired, refuse_unpaired
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import as_list

Numbers = list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuRow:
    """One model's view of one question.

    Attributes:
        id: the question.
        group: its task.
        context: its text.
        options: the texts to choose from.
        likelihoods: of the options, in logarithms; NaN if unknown.
        target: the right option as the tool names it: an index, a list of them, or a text.
        right: the tool's own verdict on this model's top option, 1 or 0; None if it has none.
        place: where it was read, for messages.
    """

    id: str
    group: str
    context: str
    options: Sequence[str]
    likelihoods: Numbers
    target: str
    right: float | None
    place: str

    @property
    def top(self) -> int:
        """The option that the model prefers, the first of equals."""
        return int(np.argmax(self.likelihoods))

    def correct(self, *, texts: bool) -> Numbers:
        """Return 1 for right options, 0 for wrong ones, NaN where the file does not say; see `_reads_texts`."""
        places = _places(self.target, self.options, texts=texts)
        if places is not None:
            return [float(k in places) for k in range(len(self.options))]
        known = [math.nan] * len(self.options)
        if self.right is None:
            return known
        if self.right == 1:
            known = [0.0] * len(self.options)
        elif len(self.options) == 2:
            known = [1.0, 1.0]
        known[self.top] = self.right
        return known


def menu_log(
    primary: Mapping[str, MenuRow], guardian: Mapping[str, MenuRow], *, unpaired: Unpaired, unused: Tally, metric: str
) -> tuple[ScoreLog, tuple[str, ...]]:
    """Return the rows that both models have as a log, and what the reader should know.

    Raises:
        ScoreLogError: no question is common to both, the options differ, or some questions have one model only.
    """
    shared = [id for id in primary if id in guardian]
    if not shared:
        raise ScoreLogError("no question was asked of both models; give two runs over the same tasks")
    for id, name in refuse_unpaired(primary, guardian, unpaired=unpaired):
        unused.add(f"questions that only the {name} was asked", id)
    scored: list[str] = []
    for id in shared:
        if softmax(primary[id].likelihoods) or softmax(guardian[id].likelihoods):
            scored.append(id)
        else:
            unused.add(NEITHER, id)
    ours, theirs = [primary[id] for id in scored], [guardian[id] for id in scored]
    for p, g in zip(ours, theirs, strict=True):
        if len(p.options) != len(g.options):
            raise ScoreLogError(
                f"{p.place}: {len(p.options)} options, {len(g.options)} in {g.place}; run the same task"
            )
    texts = _reads_texts(ours + theirs)
    correct = [[row.correct(texts=texts) for row in rows] for rows in (ours, theirs)]
    log = ScoreLog.from_arrays(
        [softmax(row.likelihoods) for row in ours],
        [softmax(row.likelihoods) for row in theirs],
        id=scored,
        group=[row.group for row in ours],
        context=[row.context for row in ours],
        actions=[list(row.options) for row in ours],
        outcomes={"correct": [_either(p, g) for p, g in zip(*correct, strict=True)]},
    )
    differing = [
        f"{count} verdicts ({metric}) on the {name} differ from these scores, such as ties"
        for name, rows in (("Primary", ours), ("Guardian", theirs))
        if (count := _differences(rows, texts=texts))
    ]
    return log, (*differing, *_advice(log))


def softmax(likelihoods: Sequence[float]) -> Numbers | None:
    """Return the softmax of log-likelihoods; None if one is unknown, or none is possible."""
    top = max(likelihoods)
    if any(math.isnan(value) for value in likelihoods) or math.isinf(top):
        return None
    weights = [math.exp(value - top) for value in likelihoods]
    return [weight / math.fsum(weights) for weight in weights]


def _places(target: str, options: Sequence[str], *, texts: bool) -> set[int] | None:
    """Return the indices of the right options; None if the target does not name options."""
    indices = _indices(target, len(options))
    named = {options.index(target)} if target in options else None
    return (named or indices) if texts else (indices or named)


def _indices(target: str, count: int) -> set[int] | None:
    """Return the indices that a target such as "2" or "[0, 2]" names; None if it is something else."""
    try:
        value: object = json.loads(target)
    except (ValueError, RecursionError):
        return None
    places = as_list(value) or [value]
    numbers = {place for place in places if isinstance(place, int) and 0 <= place < count}
    return numbers if numbers and len(numbers) == len(places) else None


def _reads_texts(rows: Sequence[MenuRow]) -> bool:
    """Tell whether targets such as "2" are options rather than indices: as fits the tool's own verdicts better."""
    return _differences(rows, texts=True) < _differences(rows, texts=False)


def _either(ours: Numbers, theirs: Numbers) -> Numbers:
    """Return what one or the other run says."""
    return [theirs[k] if math.isnan(value) else value for k, value in enumerate(ours)]


def _differences(rows: Sequence[MenuRow], *, texts: bool) -> int:
    """Count the tool's own verdicts that differ from these scores and targets."""
    verdicts = [(row.correct(texts=texts)[row.top], row.right) for row in rows if row.right is not None]
    return sum(ours != theirs for ours, theirs in verdicts if not math.isnan(ours))


def _advice(log: ScoreLog) -> tuple[str, ...]:
    correct = log.outcome("correct")
    notes = [
        "the loss is in the Guardian's probabilities; calibrate with --binarize for the share of questions that it gets "
        "right and the decision does not"
    ]
    if unknown := int(np.isnan(correct).sum()):
        notes.append(f"{unknown} options are neither right nor wrong by the file, so --binarize may not use their rows")
    return tuple(notes)
