"""Every sentence of a certificate: what holds, under which assumptions, and what is not promised."""

from collections.abc import Mapping, Sequence
from inspect import signature
from math import sqrt

from conformal_arbitrage.calibration.learned import LearnedTerms
from conformal_arbitrage.calibration.options import DialStop, GroupThreshold
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.core.learned import spendable_losses
from conformal_arbitrage.core.losses import as_fraction

# --- The sentences of certificates of special kinds ---


def as_written(value: float) -> str:
    """Return a number as short as it can be written exactly: a bound that is rounded may promise more than is proved."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def sure_promise(
    alpha: float,
    n: int,
    *,
    confidence: float | None,
    dial: Sequence[DialStop] | None,
    by: str | None,
    groups: Mapping[str, GroupThreshold] | None,
    fewest: int | None = None,
) -> str:
    """Return the sentence of a certificate with a confidence, a dial or groups; those of fewer rows share a threshold."""
    if groups is not None:
        sentence = _group_promise(alpha) if confidence is None else _sure_group_promise(alpha, confidence)
        shared = "" if fewest is None else f" {_shared_promise(alpha, fewest)}"
        return f"{sentence}{shared} {_group_list(by or '', groups, fewest or 0)}"
    return (
        _sure_promise(alpha, n, confidence or 0.0) if dial is None else _dial_promise(alpha, n, confidence or 0.0, dial)
    )


_INDEPENDENT = (
    "are independent draws of the traffic to come (same models, prompts and settings; no row dropped because of its "
    "outcome)"
)
_FIXED = "were fixed before this log was looked at"


def _sure_promise(alpha: float, n: int, confidence: float) -> str:
    return (
        f"If these {n} logged queries {_INDEPENDENT}, and alpha, confidence, options, loss, bound and scores {_FIXED}, then "
        f"with probability at least {as_written(confidence)} over calibration logs of this size, the long-run loss of this "
        f"one certificate, which is its expected loss per decision, is at most {as_written(alpha)}."
    )


def _dial_promise(alpha: float, n: int, confidence: float, dial: Sequence[DialStop]) -> str:
    stops = ", ".join(f"{as_written(stop.alpha)}" for stop in dial)
    return (
        f"If these {n} logged queries {_INDEPENDENT}, and confidence, options, loss, bound and scores {_FIXED}, then with "
        f"probability at least {as_written(confidence)} over calibration logs of this size, the long-run loss at every stop "
        f"of the dial ({stops}) is at most that stop, at all of them together. So alpha may be chosen among them after "
        f"looking; it is set to {as_written(alpha)}."
    )


def _group_promise(alpha: float) -> str:
    return (
        "If the logged queries of a group and its next one are exchangeable (same traffic, models, prompts and settings; no "
        f"row dropped because of its outcome), and alpha, options, loss, bound, scores and groups {_FIXED}, then the "
        "expected loss of the next decision of that group, averaged over calibration logs as well as over its queries, is "
        f"at most {as_written(alpha)}."
    )


def _sure_group_promise(alpha: float, confidence: float) -> str:
    return (
        f"If the logged queries of each group {_INDEPENDENT}, and alpha, confidence, options, loss, bound, scores and "
        f"groups {_FIXED}, then with probability at least {as_written(confidence)} over calibration logs, the long-run loss "
        f"of the decisions of each group is at most {as_written(alpha)}, in all groups together."
    )


def _shared_promise(alpha: float, fewest: int) -> str:
    return (
        f"This holds for groups of {fewest} rows or more. The others share one threshold: if all logged queries and the "
        f"next one are exchangeable, the expected loss of the next decision of any of them is at most {as_written(alpha)} "
        "on average over these groups, those that the log does not have included, and it may be higher in one of them."
    )


def _group_list(by: str, groups: Mapping[str, GroupThreshold], fewest: int) -> str:
    """Return which groups have a threshold, which share one, and which are deferred."""
    own = {name: group for name, group in groups.items() if group.n >= fewest}
    named = [f"{name} ({group.n} rows)" for name, group in own.items() if group.relaxation is not None]
    shared = [
        f"{name} ({group.n} rows)" for name, group in groups.items() if name not in own and group.relaxation is not None
    ]
    deferred = [f"{name} ({group.n} rows)" for name, group in groups.items() if group.relaxation is None]
    parts = [f"Groups are given by '{by}'."]
    parts += [f"Those with a threshold are {', '.join(named)}."] if named else []
    parts += [f"Those that share one are {', '.join(shared)}."] if shared else []
    parts += [f"Always deferred, since their rows cannot keep the budget: {', '.join(deferred)}."] if deferred else []
    rest = "A query of no known group is deferred, and one of several groups gets the largest threshold of theirs."
    return " ".join([*parts, rest])


def learned_promise(alpha: float, n: int) -> str:
    """Return what a certificate with a learned score promises."""
    return (
        f"If these {n} logged queries and the next one are exchangeable (same traffic, models, prompts and settings; no row "
        f"dropped because of its outcome), and alpha, options, features, loss and bound {_FIXED}, then the expected loss of "
        "the next decision, averaged over calibration logs of this size as well as over queries, is at most "
        f"{as_written(alpha)}."
    )


_FEATURES = {
    "margin": "the margin",
    "position": "the position of the top action",
    "menu": "the probability of each action",
    "group": "the group",
    "tokens": "the Primary's output tokens",
    "text": "the text of the query",
}


def learned_rule_text(terms: LearnedTerms, alpha: float, bound: float, n: int, score: str | None, router: bool) -> str:
    """Return how a learned score decides, and how it counts losses between 0 and the bound."""
    losses = spendable_losses(as_fraction(alpha, name="alpha"), as_fraction(bound, name="loss_bound"), n)
    stands = "answer is given" if router else "top action stands"
    features = ", ".join(_FEATURES[name] for name in terms.features)
    penalties = ", ".join(as_written(penalty) for penalty in terms.penalties)
    among = f"the penalties {penalties}" if score == "learned" else f"the margin itself and the penalties {penalties}"
    fixed = "" if terms.menu_size is None else f" A query with other than {terms.menu_size} actions is deferred."
    return (
        f"The score is a ridge regression of the loss on {features}, learned from these same rows, none of which is set "
        "aside: a query is decided as if it had been logged with a loss, every row is scored by the fit to all others, and "
        f"the Primary's {stands} if the query comes, in the order of this score, before the losses of these rows and its "
        f"own exceed {losses}; otherwise the Guardian decides with everything in sight. Of {among}, the one that keeps most "
        f"rows decides.{fixed} This is exact for losses of 0 or {as_written(bound)}; a loss in between counts as one of the "
        f"two by a keyed draw that keeps its mean, as in {terms.rounded_rows} of these rows. Scores are compared after they "
        "are rounded to nine decimals, and equal ones are told apart by a keyed hash of the query's id: the key is the same "
        "for every calibration of this project and is secret, and an id is fixed before its scores are known. A query that "
        "lacks a feature which every logged row has is not covered."
    )


def learned_luck(alpha: float) -> str:
    """Return what is not known about one calibration."""
    above = f"The long-run loss of this one certificate may lie above {as_written(alpha)}"
    return f"{above}, and nothing is proved about how far."


# --- The guarantee in words ---


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


# --- The guarantee of a cascade in words; a certificate whose text is not the one its fields imply is refused ---


def chain_text(models: Sequence[str]) -> str:
    """Return models in the order in which they are asked."""
    return " > ".join(models)


def path_guarantee_text(
    *,
    status: str,
    models: Sequence[str],
    guardian: str,
    alpha: float,
    n: int,
    tuning_rows: int,
    loss: str,
    rounded: bool,
    missing_guardian: str | None,
    spread: float,
    regret: float | None,
) -> str:
    """Return the guarantee of one cascade as a paragraph."""
    if status == "always_defer":
        return (
            f"These {n} rows are too few for any stop on the path at alpha {as_written(alpha)}, so every query is answered "
            f"by the Guardian, {guardian}. The loss is then 0: it is 0 by definition, whatever the queries. {_LOSSES[loss]}"
        )
    bounded = _NET.format(alpha=as_written(alpha)) if loss == "net" else _REGRET.format(alpha=as_written(alpha))
    parts = [
        f"If these {n} logged queries and the next one are exchangeable (same traffic, models, prompts and settings; no row "
        "dropped because of its outcome), and alpha, loss, tuning share and seed were fixed before this log was looked at, "
        f"then the {bounded}",
        _LOSSES[loss],
        f"Models are asked in the order {chain_text((*models, guardian))}, and the first answer that enters the path before "
        f"its stop is given; if none does, that of {guardian}, the Guardian, is. Models, order and path were chosen on "
        f"{tuning_rows} other rows, and the stop on these alone; it is one promise for the whole cascade, not one for each "
        "model.",
        _DRAWS,
    ]
    parts += [_ROUNDED] if rounded else []
    parts += [_PATH_MISSING] if missing_guardian else []
    parts.append(_LUCK.format(alpha=as_written(alpha), spread=f"{spread:.2g}"))
    parts += [f"With gains not counted, the mean loss on these rows is {regret:.4g}."] if regret is not None else []
    return " ".join([*parts, _PATH_NOT_PROMISED])


def path_summary(models: Sequence[str], guardian: str, alpha: float, n: int, loss: str, *, status: str) -> str:
    """Return the guarantee in two lines, for a screen."""
    if status == "always_defer":
        return f"Every query goes to {guardian}: {n} rows are too few for alpha {as_written(alpha)}."
    net = " (gains counted)" if loss == "net" else ""
    return (
        f"{chain_text((*models, guardian))}: the first answer before the path's stop is given, else the Guardian's.\n"
        f"The expected loss of the next decision{net} is at most {as_written(alpha)}, if traffic, models and settings stay "
        f"as in these {n} rows."
    )


_REGRET = (
    "expected loss of the next decision, averaged over calibration logs of this size as well as over queries, is at most "
    "{alpha}."
)
_NET = (
    "expected grade of the next decision, averaged over calibration logs of this size as well as over queries, is at most "
    "{alpha} below that of the Guardian's answer, gains counted."
)
_LOSSES = {
    "guardian_regret": (
        "The loss is how much better the Guardian's answer is graded than the one given, and 0 where it is not better; "
        "grades lie in [0, 1]."
    ),
    "net": (
        "The loss is the grade of the Guardian's answer minus that of the one given, negative where the latter is the "
        "better one; grades lie in [0, 1]."
    ),
}
_DRAWS = (
    "Answers that enter the path exactly at the stop are given or not by a keyed hash of the query's id: the key is the "
    "same for every calibration of this project and is secret, and an id is fixed before any answer is known."
)
_ROUNDED = (
    "Losses between 0 and 1 (or -1) were rounded up or down by a second keyed draw, which keeps their expectation."
)
_PATH_MISSING = "Rows without a grade were counted as a loss of 1."
_PATH_NOT_PROMISED = (
    "A query whose Guardian cannot be had gets no answer, or a configured one that carries no guarantee, never that of a "
    "model that the path passed over. Nothing is promised for a subgroup, for changed or adversarial traffic, or for an "
    "alpha chosen after looking; whoever writes the context can raise a model's confidence."
)
