"""The sentences of certificates of special kinds: with high probability, by group, with a learned score.

Part of the guarantee's wording; see `guarantee_text`.
"""

from collections.abc import Mapping, Sequence

from conformal_arbitrage.calibration.learned_score import LearnedTerms
from conformal_arbitrage.calibration.stops import DialStop, GroupThreshold
from conformal_arbitrage.core.learned import spendable_losses
from conformal_arbitrage.core.losses import as_fraction


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
