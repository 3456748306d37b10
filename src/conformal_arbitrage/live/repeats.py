"""Repeat noise: how much a Primary's lead differs when it is asked the same question again, and how coarse its scores are.

Neither harms the guarantee, as long as a question is asked once: what is calibrated is the single answer. Noise blurs the
order of queries, so more of them are deferred; coarse scores make many queries share one lead, and then a random boundary
spends the part of the budget that a threshold has to leave.

Knows nothing of how a model is found to work; see `probe`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from conformal_arbitrage.errors import ReplyError
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.scorers.kinds import ModelConfig
from conformal_arbitrage.types import ChatRequest, Query, Spent

_FINEST = 6
_COARSE = 2
_DEBATABLE = Query("Which of these is the warmest colour?", ("red", "orange", "yellow", "pink"))
_OPEN = ChatRequest({"messages": [{"role": "user", "content": "Name the warmest colour, in one word."}]})


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatNoise:
    """What repeated answers to one question show.

    Attributes:
        repeats: how often it was asked.
        spread: the largest lead (or confidence) minus the smallest.
        decimals: of the scores; None if they have more than six.
        spent: what the answers took.
    """

    repeats: int
    spread: float
    decimals: int | None
    spent: Spent

    def notes(self) -> list[str]:
        """Return what this means for calibration, in words."""
        notes = [f"asked {self.repeats} times, its lead differs by {self.spread:.3g}"]
        if self.spread > 0:
            notes[0] += "; calibrate on single answers, and never ask again until one is sure"
        if self.decimals is not None and self.decimals <= _COARSE:
            notes.append(
                f"its scores have {self.decimals} decimals, so many queries share a lead: calibrate with --boundary random, "
                "which spends the whole budget"
            )
        return notes


async def repeat_noise(config: Config, model: ModelConfig, repeats: int) -> RepeatNoise:
    """Ask a Primary one debatable question several times.

    Args:
        config: the task; its form says what is asked.
        model: the Primary, as it is pinned.
        repeats: how often to ask.

    Raises:
        ScorerError: an answer could not be had.
    """
    uncached = structs.replace(config, primary=structs.replace(model, cache=None))
    leads: list[float] = []
    seen: list[float] = []
    spent = Spent()
    async with Models(uncached) as models:
        for number in range(repeats):
            ask = _confidence if config.task.form == "text" else _scores
            scores, cost = await ask(models, f"check-{number}")
            first, second = sorted((*scores, 0.0), reverse=True)[:2]
            leads.append(round(first - second, 12))
            seen += scores
            spent += cost
    return RepeatNoise(
        repeats=repeats, spread=round(max(leads) - min(leads), 12), decimals=_decimals(seen), spent=spent
    )


async def _scores(models: Models, id: str) -> tuple[Sequence[float], Spent]:
    scores = await models.scorer("primary").score(structs.replace(_DEBATABLE, id=id))
    return scores.values, scores.spent


async def _confidence(models: Models, id: str) -> tuple[Sequence[float], Spent]:
    answer = await models.answerer("primary").answer(structs.replace(_OPEN, id=id))
    if answer.confidence is None:
        raise ReplyError("no confidence came with a repeated answer", spent=answer.spent)
    return (answer.confidence,), answer.spent


def _decimals(values: Sequence[float]) -> int | None:
    """Return the fewest decimals that show every value; None if six do not."""
    return next((d for d in range(_FINEST + 1) if all(abs(v - round(v, d)) < 1e-9 for v in values)), None)
