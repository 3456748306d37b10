"""Rows of sessions: one per session, with the confidence of its first turn and the mean loss of all its turns.

Turns of one session resemble each other and share one decision, so single turns are not exchangeable with new ones; whole
sessions are.

Knows nothing of stores or HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.scorelog.fitness import SESSION_TURNS
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.router import ROUTER_ACTIONS
from conformal_arbitrage.scorelog.tables import strings

_NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """One turn of a session.

    Attributes:
        session: the session's id.
        at: when it was recorded, in seconds.
        confidence: of the Primary in its answer; NaN if it gave none. Only that of the first turn decides.
        primary_grade: of the Primary's answer; NaN if unknown.
        guardian_grade: of the Guardian's.
        primary_failed: the Primary gave no answer, so the Guardian's was given and nothing was lost.
    """

    session: str
    at: float
    confidence: float
    primary_grade: float
    guardian_grade: float
    primary_failed: bool = False

    @property
    def loss(self) -> float:
        """How much is lost where the Primary's answer is given; NaN if a grade is unknown."""
        if self.primary_failed:
            return 0.0
        return float(np.maximum(0.0, self.guardian_grade - self.primary_grade))  # Python's max would take NaN for 0


def session_log(
    turns: Sequence[SessionTurn], *, idle: float, now: float, identities: Mapping[str, Any] | None = None
) -> ScoreLog:
    """Return one row per session, in the order in which they began.

    A session may go on until it has been idle for long enough. Sessions that began no earlier than the first one that may
    still go on are left out, all of them: a choice among them would prefer short ones.

    Args:
        turns: of all sessions, oldest first.
        idle: seconds without a turn after which a session is over.
        now: the current time, on the clock of the turns.
        identities: of the models that made every turn.

    Raises:
        StoreError: no session is over.
    """
    sessions: dict[str, list[SessionTurn]] = {}
    for turn in turns:
        sessions.setdefault(turn.session, []).append(turn)
    open_since = min((own[0].at for own in sessions.values() if own[-1].at + idle > now), default=float("inf"))
    over = {name: own for name, own in sessions.items() if own[0].at < open_since}
    if not over:
        raise StoreError(f"no session is over yet; one ends {idle:g} seconds after its last turn")
    losses = np.array([np.mean([turn.loss for turn in own]) for own in over.values()])
    best = np.where(np.isnan(losses), _NAN, 1.0)
    grades = [
        [np.mean([t.guardian_grade for t in own]), np.mean([t.primary_grade for t in own])] for own in over.values()
    ]
    log = ScoreLog.from_arrays(
        np.array([[0.0, own[0].confidence] for own in over.values()]),
        np.column_stack([best, 1.0 - losses]),
        id=list(over),
        actions=[ROUTER_ACTIONS] * len(over),
        outcomes={"correct": np.array(grades)},
        identities=None if identities is None else {**identities, "session": {"idle": idle}},
    )
    return replace(log, extra={**log.extra, SESSION_TURNS: strings([str(len(own)) for own in over.values()])})
