"""Joining logs: the rows of several, one after the other, as one log.

Knows nothing of where they came from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Scalar
from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.scorelog.columns import Usage
from conformal_arbitrage.scorelog.log import ScoreLog


def join_logs(logs: Sequence[ScoreLog], source: str) -> ScoreLog:
    """Return one log with the rows of several, which must have the same columns.

    Args:
        logs: the logs, in order; ids are not compared across them.
        source: what to call the whole, for messages.
    """
    first = logs[0]
    sizes = np.concatenate([log.sizes for log in logs])
    return replace(
        first,
        primary=np.concatenate([log.primary for log in logs]),
        guardian=np.concatenate([log.guardian for log in logs]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        no_opinion=np.concatenate([log.no_opinion for log in logs]),
        missing=np.concatenate([log.missing for log in logs]),
        id=_joined([log.id for log in logs]),
        label=_joined([log.label for log in logs]),
        group=_joined([log.group for log in logs]),
        context=_joined([log.context for log in logs]),
        actions=_joined([log.actions for log in logs]),
        lists=_joined_by_name([log.lists for log in logs], source),
        binary=_joined([log.binary for log in logs]),
        primary_usage=_joined_usage([log.primary_usage for log in logs]),
        guardian_usage=_joined_usage([log.guardian_usage for log in logs]),
        extra=_joined_by_name([log.extra for log in logs], source),
        source=source,
    )


def _joined(columns: Sequence[NDArray[Scalar] | None]) -> NDArray[Scalar] | None:
    present = [values for values in columns if values is not None]
    return np.concatenate(present) if present else None


def _joined_usage(usages: Sequence[Usage]) -> Usage:
    return Usage(**{f.name: _joined([getattr(one, f.name) for one in usages]) for f in fields(Usage)})


def _joined_by_name(columns: Sequence[Mapping[str, NDArray[Any]]], source: str) -> dict[str, NDArray[Any]]:
    names = set(columns[0])
    for others in columns:
        if set(others) != names:
            name = sorted(names ^ set(others))[0]
            raise ScoreLogError(
                f"{source}: column '{name}' is a list of numbers per action in some rows only; make it one everywhere, or "
                "leave it out"
            )
    return {name: np.concatenate([others[name] for others in columns]) for name in columns[0]}
