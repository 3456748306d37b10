"""The guarantee in words: what holds, under which assumptions, and what is not promised.

Every sentence is written here; a certificate whose text is not the one its fields imply is refused, and `verify` rebuilds
it. A change of wording is therefore a new schema of the certificate. docs/guarantee.md names the test behind each bound.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from math import sqrt

from conformal_arbitrage.calibration.learned_score import LearnedTerms
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.promises import (
    as_written,
    learned_luck,
    learned_promise,
    learned_rule_text,
    sure_promise,
)
from conformal_arbitrage.calibration.stops import DialStop, GroupThreshold


def guarantee_text(
    *,
    status: str,
    alpha: float,
    relaxation: float | None,
    loss_bound: float,
    full_sight_loss: float,
    n: int,
    loss: str,
    binarized: bool,
    router: bool,
    guardian_sees: str,
    boundary: str,
    missing_guardian: str | None,
    score_digits: int,
    clusters: int | None = None,
    max_cluster_size: int | None = None,
    regret: float | None = None,
    spread: float | None = None,
    confidence: float | None = None,
    zero_one: bool | None = None,
    dial: Sequence[DialStop] | None = None,
    by: str | None = None,
    groups: Mapping[str, GroupThreshold] | None = None,
    small_groups: str | None = None,
    unit: str | None = None,
    score: str | None = None,
    learned: LearnedTerms | None = None,
) -> str:
    """Return the guarantee of one certificate as a paragraph."""
    own_loss = loss not in ("guardian_regret", "net")
    described = _loss(loss, loss_bound, binarized=binarized, router=router, unit=unit)
    described += _in_full_sight(full_sight_loss, router=router) if own_loss else ""
    described += _ZERO_ONE.format(bound=as_written(loss_bound)) if zero_one else ""
    if status == "always_defer":
        deferring = _always_defer(alpha, full_sight_loss, own_loss=own_loss, router=router)
        return " ".join([deferring, described, _counted_without_guardian(missing_guardian)])
    if learned is not None:
        parts = [learned_promise(alpha, n), described, learned_rule_text(learned, alpha, loss_bound, n, score, router)]
        parts += _missing_text(missing_guardian, loss_bound, full_sight_loss, binarized=binarized)
        parts += [learned_luck(alpha), _counted_without_guardian(missing_guardian)]
        return " ".join([*parts, _not_promised(router=router, grouped=False, dial=False)])
    if unit == "session":
        promise = _session_promise(alpha, n)
    elif confidence is not None or groups is not None:
        few = rows_needed(alpha, loss_bound) if small_groups else None
        promise = sure_promise(alpha, n, confidence=confidence, dial=dial, by=by, groups=groups, fewest=few)
    elif clusters is not None:
        promise = _cluster_promise(alpha, n, clusters, max_cluster_size or 1)
    else:
        promise = _promise(alpha, n, loss)
    sight = (_OWN_SIGHT if own_loss else _SIGHT)[guardian_sees]
    parts = [promise, described, _router_rule(relaxation, score_digits, unit) if router else sight]
    parts += [_RANDOM.format(what="Confidences" if router else "Actions")] if boundary == "random" else []
    parts += _missing_text(missing_guardian, loss_bound, full_sight_loss, binarized=binarized and not own_loss)
    if confidence is None and groups is None:
        usual = sqrt(alpha * (loss_bound - alpha) * (max_cluster_size or 1) / n) if spread is None else spread
        parts.append(_LUCK.format(alpha=as_written(alpha), spread=f"{usual:.2g}"))
    parts += [] if regret is None else [f"With gains not counted, the mean loss on this log is {regret:.4g}."]
    not_promised = _not_promised(router=router, grouped=groups is not None, dial=dial is not None)
    return " ".join([*parts, _counted_without_guardian(missing_guardian), not_promised])


TERMS = tuple(signature(guarantee_text).parameters)
"""The fields of a certificate that its guarantee depends on."""


def summary_lines(
    *,
    alpha: float,
    n: int,
    router: bool,
    relaxation: float | None,
    guardian_sees: str,
    confidence: float | None = None,
    by: str | None = None,
    unit: str | None = None,
    clusters: int | None = None,
    learned: bool = False,
) -> str:
    """Return the guarantee in two lines, for a screen; the certificate holds the whole."""
    if learned:
        stands = "answer is given" if router else "choice stands"
        rule = f"A score learned from these rows says where the Primary's {stands}; otherwise the Guardian decides."
        return f"{rule}\n{_bounded(alpha, n, confidence)}"
    if by is not None:
        return f"Each group by '{by}' has a threshold of its own; unknown groups are deferred.\n" + _bounded(
            alpha, n, confidence
        )
    if relaxation is None:
        return (
            f"Every query goes to the Guardian: no relaxation keeps a budget of {as_written(alpha)} on these {n} rows."
        )
    if router:
        rule = f"The Primary's answer is given where its confidence is above {relaxation!r}, else the Guardian's."
    else:
        shown = "the candidates" if guardian_sees == "candidates" else "every action"
        rule = (
            f"The Primary's choice stands where it leads by more than {relaxation!r}, else the Guardian sees {shown}."
        )
    if unit == "session":
        rule = (
            f"The Primary answers a session if its confidence at first is above {relaxation!r}, else the Guardian does."
        )
    if clusters is not None:
        return (
            f"{rule}\nThe expected total loss of the next cluster is at most {as_written(alpha)} times its expected number "
            f"of queries, if traffic, models and settings stay as in these {clusters} clusters."
        )
    return f"{rule}\n{_bounded(alpha, n, confidence, unit)}"


def _bounded(alpha: float, n: int, confidence: float | None, unit: str | None = None) -> str:
    stays = f"if traffic, models and settings stay as in these {n} rows."
    if confidence is None:
        return f"The expected loss of the next {unit or 'decision'} is at most {as_written(alpha)}, {stays}"
    sure = f"With probability {as_written(confidence)} the long-run loss of this certificate"
    return f"{sure} is at most {as_written(alpha)}, {stays}"


def _missing_text(missing_guardian: str | None, bound: float, least: float, *, binarized: bool) -> list[str]:
    """Return the sentence about rows without a Guardian score, if they are counted."""
    if not missing_guardian:
        return []
    which = _UNLABELLED if binarized else ""
    return [_MISSING.format(bound=as_written(bound), least=as_written(least), which=which)]


def _not_promised(*, router: bool, grouped: bool, dial: bool) -> str:
    return _NOT_PROMISED.format(
        group="another group or a part of one" if grouped else "a subgroup",
        chosen="" if dial else ", or for an alpha chosen after looking",
        confidence="confidence" if router else "margin",
    )


def _counted_without_guardian(missing_guardian: str | None) -> str:
    counted = "" if missing_guardian else "counts as if the Guardian had chosen, and "
    return _WITHOUT_GUARDIAN.format(counted=counted)


def _promise(alpha: float, n: int, loss: str) -> str:
    bounded = (
        "expected grade of the next decision, averaged over calibration logs of this size as well as over queries, is at "
        f"most {as_written(alpha)} below that of the Guardian's choice, gains counted."
        if loss == "net"
        else "expected loss of the next decision, averaged over calibration logs of this size as well as over queries, is "
        f"at most {as_written(alpha)}."
    )
    return (
        f"If these {n} logged queries and the next one are exchangeable (same traffic, models, prompts and settings; no "
        "row dropped because of its outcome), and alpha, options, loss, bound and scores were fixed before this log was "
        f"looked at, then the {bounded}"
    )


def _cluster_promise(alpha: float, n: int, clusters: int, largest: int) -> str:
    return (
        f"If these {clusters} clusters ({n} logged queries) and the next one are exchangeable (same traffic, models, "
        "prompts and settings; no row dropped because of its outcome), no cluster ever has more than "
        f"{largest} queries, and alpha, options, loss, bound and scores were fixed before this log was looked at, then the "
        "expected total loss over the queries of the next cluster, averaged over calibration logs as well as over "
        f"clusters, is at most {as_written(alpha)} times its expected number of queries: {as_written(alpha)} per query over "
        "many new clusters. "
        "A query of a cluster that is in this log is not covered."
    )


def _session_promise(alpha: float, n: int) -> str:
    return (
        f"If these {n} logged sessions and the next one are exchangeable (same traffic, models, prompts and settings; no "
        "session dropped because of its outcome), the loss of a turn does not depend on whose answers came before it in "
        "its session, and alpha, options, bound and scores were fixed before this log was looked at, then the expected "
        f"loss of the next session, averaged over calibration logs of this size as well as over sessions, is at most "
        f"{as_written(alpha)}. The unit is a session, not a turn: if long sessions lose more, the average over turns may be "
        "higher."
    )


def _in_full_sight(loss: float, *, router: bool) -> str:
    sight = "With both answers in sight" if router else "With every action in sight"
    return f" {sight} it is declared to be {_at_most(loss)} for every query."


def _at_most(loss: float) -> str:
    return f"at most {as_written(loss)}" if loss else "0"


def _always_defer(alpha: float, full_sight_loss: float, *, own_loss: bool, router: bool) -> str:
    why = "so it was declared" if own_loss else "it is 0 by definition, whatever the queries"
    where = (
        "is answered by the Guardian"
        if router
        else "with more than one action goes to the Guardian with every action in sight"
    )
    return (
        f"No relaxation keeps the budget {as_written(alpha)} on this log, so every query {where}. The loss is then "
        f"{_at_most(full_sight_loss)}: {why}."
    )


def _loss(loss: str, bound: float, *, binarized: bool, router: bool, unit: str | None) -> str:
    if unit == "session":
        return _SESSION_LOSS.format(bound=as_written(bound))
    if loss == "net":
        choice = "answer given" if router else "action taken"
        what = f"the grade of the Guardian's choice minus that of the {choice}, negative where the latter is the better one"
        return f"The loss is {what}; it is assumed to be at most {as_written(bound)}."
    if loss != "guardian_regret":
        what = f"the user's own '{loss}', on its monotone envelope"
    elif router:
        what = "how much better the Guardian's answer is graded than the one given, and 0 where it is not better"
    elif binarized:
        what = "1 if the Guardian's top answer is right and not in sight, else 0"
    else:
        what = "the Guardian regret: its best score over all actions minus its best score over those in sight"
    return f"The loss is {what}; it is assumed to lie in [0, {as_written(bound)}]."


def _router_rule(relaxation: float | None, score_digits: int, unit: str | None) -> str:
    if unit == "session":
        return _SESSION_RULE.format(relaxation=repr(relaxation), digits=score_digits)
    threshold = "the threshold of its group" if relaxation is None else repr(relaxation)
    return (
        f"There are two answers: the Primary's is given where its confidence is above {threshold}, compared after "
        f"it is rounded to {score_digits} significant digits; otherwise the Guardian's is given."
    )


_SIGHT = {
    "candidates": (
        "A deferral shows the Guardian the candidates only: the bound is on the best candidate by its scores for the whole "
        "menu, and reaches the chosen action only if the Guardian, shown fewer options, still ranks them alike."
    ),
    "all": (
        "A deferral shows the Guardian every action, and the loss is counted so: that of the Primary's top action where it "
        "stands alone, else 0."
    ),
    "all-restricted-loss": (
        "The threshold comes from the loss of the candidates alone; a deferral shows the Guardian every action, which does "
        "not raise the loss."
    ),
}
_OWN_SIGHT = {
    "candidates": "A deferral shows the Guardian the candidates only, and the loss is counted on them.",
    "all": "The loss is counted on the Primary's top action where it stands alone, else on all actions.",
    "all-restricted-loss": "The loss is counted on the candidates; a deferral shows the Guardian every action.",
}
_RANDOM = (
    "{what} exactly at the threshold are kept or not by a keyed hash of the query's id: the key is the same for every "
    "calibration of this project and is secret, and an id is fixed before its scores are known."
)
_SESSION_LOSS = (
    "The loss of a session is the mean over its turns of how much better the Guardian's answer is graded than the one "
    "given, and 0 where it is not better; it is assumed to lie in [0, {bound}]."
)
_SESSION_RULE = (
    "The first turn decides for the whole session: the Primary answers every turn where its confidence in its first answer "
    "is above {relaxation}, compared after it is rounded to {digits} significant digits; otherwise the Guardian does."
)
_MISSING = (
    "Rows without a Guardian score{which} were counted as a loss of {bound}, and of {least} with everything in sight; a "
    "live query whose Guardian would fail counts in the same way."
)
_WITHOUT_GUARDIAN = (
    "A deferred query whose Guardian cannot be had {counted}gets no answer, or a configured one that carries no guarantee, "
    "never the Primary's. The bound is on the average over all queries, not over those that got an answer."
)
_LUCK = (
    "The long-run loss of this one certificate may lie above {alpha} (in up to about half of all calibrations it does, "
    "typically by less than {spread}, one standard deviation)."
)
_ZERO_ONE = " Every loss is declared to be 0 or {bound}."
_UNLABELLED = ", or in which it is unknown whether its top answer is right,"
_NOT_PROMISED = (
    "Nothing is promised for {group}, for changed or adversarial traffic{chosen}; whoever writes the context can raise the "
    "Primary's {confidence}."
)
