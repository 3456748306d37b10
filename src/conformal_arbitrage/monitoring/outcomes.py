"""The loss of one audited decision, and when it is known.

Every decision with a Primary leg that the audit coin drew counts, whoever decided and whether or not an answer was
delivered: leaving some out would select the rest by their scores. Losses are shares of the loss bound, in [0, 1]; in
[-1, 1] if gains count, where a gain beyond the bound counts as the bound.

A loss known from the decision alone needs no call of the Guardian. Asking it again after a deferral would measure how often
it repeats itself, not the loss, which is 0 by definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from conformal_arbitrage.core.risk import GuardianSees, guardian_ticks
from conformal_arbitrage.types import DecidedBy

HOURS_TO_ANSWER = 24
"""A model's scores that are not in by then are missing."""
DAYS_TO_GRADE = 14
"""So are the grades and labels that people give."""
_ONE = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedDecision:
    """What the loss of a decision depends on.

    Attributes:
        decided_by: who chose; "fallback" if the Guardian failed and a safe action was given.
        form: a menu of actions, or two answers in free text.
        guardian_sees: what a deferral showed the Guardian, as the certificate says.
        candidates: indices of those in sight of the rule.
        action: index of the action that was given; None if there was none.
        binarized: whether the certificate's loss is that of the 0/1 Guardian.
        net: whether it counts gains.
    """

    decided_by: DecidedBy
    form: Literal["menu", "text"] = "menu"
    guardian_sees: GuardianSees = "all"
    size: int = 2
    candidates: tuple[int, ...] = ()
    action: int | None = None
    binarized: bool = False
    net: bool = False

    @property
    def everything_in_sight(self) -> bool:
        """Whether the loss is 0 by definition."""
        if self.decided_by == "fallback" or (self.form == "menu" and self.size == 1):
            return True
        if self.decided_by == "primary":
            return False
        return self.form == "text" or self.guardian_sees != "candidates" or len(self.candidates) == self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became known about a decision later; each part may come on its own.

    Attributes:
        scores: the Guardian's scores over the whole menu, from an audit by the models of the decision; None if it failed.
        label: index of the right action.
        grades: of the Primary's and the Guardian's answer in free text.
    """

    scores: Sequence[float | None] | None = None
    label: int | None = None
    grades: tuple[float, float] | None = None


def due_days(decision: AuditedDecision, *, human_guardian: bool = False) -> float:
    """Return after how many days an outcome that is not known yet counts as missing, from the decision on."""
    by_people = human_guardian or decision.form == "text" or decision.binarized or decision.net
    return float(DAYS_TO_GRADE) if by_people else HOURS_TO_ANSWER / 24


def is_counted(*, drawn: bool, primary_leg: bool, mode: str, overridden: bool) -> bool:
    """Tell whether a decision of this policy version belongs in the ledger; nothing that comes later may enter here."""
    return drawn and primary_leg and mode == "enforce" and not overridden


def session_slot(session: str, at: float) -> str:
    """Return the key under which a session's decisions count once per hour; the first audited one does.

    Neighbours in a session are alike, and evidence takes them for independent. Sessions then weigh equally.

    Args:
        session: a keyed digest of the session's name, so that the ledger holds no content.
        at: the time of the decision, in seconds.
    """
    return f"{session} {int(at // 3600)}"


def decision_loss(decision: AuditedDecision, verdict: Verdict | None = None, *, loss_bound: float = 1) -> float | None:
    """Return the loss of the rule as a share of the bound; None while it is unknown.

    A fallback counts 0: the answer had no guarantee, and deferring was right. `served_loss` counts what was delivered.

    Args:
        verdict: what is known of it; without one, the result tells whether an audit is needed at all.
        loss_bound: the certificate's.
    """
    if decision.everything_in_sight:
        return 0.0
    shown = decision.candidates if decision.decided_by == "guardian" else (decision.action,)
    return _loss(decision, shown, verdict or Verdict(), loss_bound)


def served_loss(decision: AuditedDecision, verdict: Verdict | None = None, *, loss_bound: float = 1) -> float | None:
    """Return the loss of the answer that the caller got; None while it is unknown.

    A fallback counts by the later verdict, and as 1 until there is one. This figure may turn amber ("the Guardian fails"),
    never red, since safe mode would ask that Guardian more.

    Args:
        verdict: what is known of it.
        loss_bound: the certificate's.
    """
    if decision.decided_by != "fallback":
        return decision_loss(decision, verdict, loss_bound=loss_bound)
    if decision.form == "menu" and decision.size == 1:
        return 0.0
    loss = _loss(decision, (decision.action,), verdict or Verdict(), loss_bound)
    return 1.0 if loss is None or decision.form == "text" else loss


def _loss(decision: AuditedDecision, shown: Sequence[int | None], verdict: Verdict, bound: float) -> float | None:
    if decision.form == "text":
        return None if verdict.grades is None else _share(*verdict.grades, bound, net=decision.net)
    sight = [action for action in shown if action is not None]
    scores = _whole_scores(verdict.scores, decision.size)
    if decision.net:
        return _net_loss(decision.action, scores, verdict.label, bound)
    if decision.binarized:
        return _binary_loss(sight, scores, verdict.label)
    return None if scores is None or not sight else _share(max(scores[k] for k in sight), max(scores), bound)


def _binary_loss(sight: Sequence[int], scores: Sequence[float] | None, label: int | None) -> float | None:
    """Return 1 if the Guardian's top action is right and not in sight; either of the two may settle it as 0."""
    top = None if scores is None else int(np.argmax(scores))
    if top in sight or label in sight:
        return 0.0
    return None if top is None or label is None else float(top == label)


def _net_loss(action: int | None, scores: Sequence[float] | None, label: int | None, bound: float) -> float | None:
    """Return whether the Guardian's top action is right minus whether the given one is."""
    top = None if scores is None else int(np.argmax(scores))
    if top is None or action is None:
        return None
    if top == action:
        return 0.0
    return None if label is None else _share(float(action == label), float(top == label), bound, net=True)


def _whole_scores(scores: Sequence[float | None] | None, size: int) -> list[float] | None:
    """Return scores for every action, or None if one is absent or not a finite number."""
    if scores is None or len(scores) != size:
        return None
    finite = [score for score in scores if score is not None and np.isfinite(score)]
    return finite if len(finite) == size else None


def _share(given: float, best: float, bound: float, *, net: bool = False) -> float:
    """Return how much better the best was, rounded to ticks as in calibration, as a share of the bound."""
    worse, better = guardian_ticks(np.array([given, best])).tolist()
    return min(max((better - worse) / _ONE / bound, -1.0 if net else 0.0), 1.0)
