"""Every sentence of a certificate: what holds, under which assumptions, and what is not promised."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import sqrt

from conformal_arbitrage.calibration.options import DialStop, GroupThreshold
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.promises import (
    Ancestry,
    Average,
    Batch,
    ByGroup,
    Cluster,
    Confident,
    Cutoff,
    Dial,
    Evidence,
    Learned,
    LivePromise,
    LiveRule,
    LossTerms,
    Net,
    Own,
    Path,
    PerSession,
    Promise,
    Rule,
    Step,
    Threshold,
)
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.core.features import spendable_losses
from conformal_arbitrage.core.risk import as_fraction


def guarantee(
    rule: Rule, promise: Promise, loss: LossTerms, evidence: Evidence, ancestry: Ancestry | None = None
) -> str:
    """Return the guarantee of one certificate as a paragraph, with what its chain adds to it, or takes from it."""
    if isinstance(rule, Cutoff) or isinstance(promise, Batch):
        return _batch_guarantee(rule, promise, evidence)
    if isinstance(rule, Path):
        text = _path_guarantee(rule, promise, loss, evidence)
    else:
        text = _pair_guarantee(rule, promise, loss, evidence)
    return text if ancestry is None else _in_chain(text, ancestry, rule, promise)


def summary(rule: Rule, promise: Promise, loss: LossTerms, evidence: Evidence, ancestry: Ancestry | None = None) -> str:
    """Return the rule in a line, and the guarantee in three: promise, conditions, and what is not promised."""
    if ancestry is not None and ancestry.no_guarantee is not None:
        return f"There is no guarantee: {ancestry.no_guarantee}."
    if isinstance(rule, Cutoff) or isinstance(promise, Batch):
        return _batch_summary(rule, promise, evidence)
    if rule.status == "always_defer":
        whom = rule.guardian if isinstance(rule, Path) else "the Guardian"
        return (
            f"Every query goes to {whom}: {n_rows(evidence.n, 'allows', 'allow')} no threshold that keeps a budget of "
            f"{as_written(promise.alpha)}."
        )
    lines = [
        f"Promise: {_bounded(rule, promise, loss)}.",
        f"Conditions: {_conditions(promise, evidence.n)}.",
        f"Not promised: {_left_open(rule, promise, loss, evidence)}.",
    ]
    return "\n".join([_rule_line(rule, promise, evidence), *lines])


def _rule_line(rule: LiveRule, promise: LivePromise, evidence: Evidence) -> str:
    """Return who answers when."""
    if isinstance(rule, Path):
        chain = chain_text((*rule.chain.models, rule.guardian))
        return f"{chain}: each answer says whether it is given, or whom to ask next."
    if isinstance(rule, ByGroup):
        small = (
            " if it has enough rows, and shares one with the others that do not" if rule.small_groups == "merge" else ""
        )
        return f"Each group by '{rule.by}' has a threshold of its own{small}; unknown groups are deferred."
    if isinstance(rule, Learned):
        stands = "answer is given" if evidence.router else "choice stands"
        return f"A score learned from these rows says where the Primary's {stands}; otherwise the Guardian decides."
    threshold, shown = repr(rule.relaxation), "the candidates" if rule.guardian_sees == "candidates" else "every action"
    if isinstance(promise, PerSession):
        says = f"The Primary answers a session if its confidence at first is above {threshold}, else the Guardian does."
        return says + _at_threshold(rule)
    if evidence.router:
        says = f"The Primary's answer is given where its confidence is above {threshold}, else the Guardian's."
    else:
        says = f"The Primary's choice stands where it leads by more than {threshold}, else the Guardian sees {shown}."
    return says + _at_threshold(rule) + (_BINDS if floor_binds(rule, evidence) else "")


_BINDS = " That is the floor of the collection: a log without it might ask the Guardian less."


def _at_threshold(rule: Threshold) -> str:
    """Return what the draws at the threshold do, as a sentence after others; none if they decide nothing, as at 0."""
    if not rule.relaxation or rule.boundary_u is None:
        return ""
    stands = f"{100 * (1 - rule.boundary_u):.3g} %"
    return f" At exactly {rule.relaxation!r} a draw decides: the Primary's stands in {stands} of cases."


def as_written(value: float) -> str:
    """Return a number as short as it can be written exactly: a bound that is rounded may promise more than is proved."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


# --- A batch ---


def _batch_guarantee(rule: Rule, promise: Promise, evidence: Evidence) -> str:
    """Return the promise about one batch of items; about any other pair of rule and promise there is none."""
    if not (isinstance(rule, Cutoff) and isinstance(promise, Batch)):
        return ""
    if promise.chosen_after:
        return (
            "There is no guarantee: error or confidence are not those that were fixed before the sample was drawn, and one "
            "chosen after the labels can be chosen by them."
        )
    n, certify = evidence.n, promise.sample - promise.pilot
    earlier = "the draw" if promise.draw == 1 else _EARLIER_DRAWS.format(earlier=promise.draw - 1)
    share = as_written(promise.error)
    kept = f"at most {wrong_allowed(promise.error, n)} of the {rule.kept} machine labels that are kept ({share} of all {n} "
    kept += "items, rounded down) differ from what the experts would say"
    if promise.limit is None:
        kept = (
            f"the losses of the {rule.kept} machine labels that are kept, each from 0 to 1 as experts would grade it, "
        )
        kept += f"add up to at most {share} times {n}"
    sentences = [
        f"Experts label {promise.sample} of these {n} items, drawn without replacement, all subsets alike. If items, "
        "machine labels, risks, error, confidence and the size of the sample were fixed before the draw, and an expert's "
        "verdict does not depend on an item's being in the sample, then with probability at least "
        f"{as_written(promise.confidence)} over {earlier}, {kept}.",
        "Nothing is assumed about the items, the machine or its confidence.",
        _KEEPS[rule.keeps].format(risk=repr(rule.risk)),
        _PILOT.format(pilot=promise.pilot) if promise.pilot else "",
        f"The score was learned from {', '.join(rule.learned)}." if rule.learned else "",
        f"Of the {certify} items that certify, {evidence.missing_guardian_rows} without a verdict count as wrong.",
        "Experts are the truth here; an item that no expert can label is delivered as undecided and not counted. Nothing is "
        "promised for a subgroup or for any other item.",
    ]
    return " ".join(filter(None, sentences))


def _batch_summary(rule: Rule, promise: Promise, evidence: Evidence) -> str:
    if not (isinstance(rule, Cutoff) and isinstance(promise, Batch)):
        return ""
    n, experts = evidence.n, evidence.n - rule.kept
    kept = f"at most {wrong_allowed(promise.error, n)} of those kept differ from what the experts would say"
    if promise.limit is None:
        kept = f"the losses of those kept add up to at most {as_written(promise.error)} times {n}"
    says = f"{rule.kept} of {n} machine labels are kept ({100 * rule.kept / n:.1f} %); experts label {experts} items."
    if promise.chosen_after:
        return f"{says}\nThere is no guarantee: error or confidence were not fixed before the draw."
    return "\n".join(
        [
            says,
            f"Promise: with probability {as_written(promise.confidence)} {kept}.",
            "Conditions: all was fixed before the draw but the verdicts, and these do not depend on it.",
            "Not promised: anything about a part of these items, or about others.",
        ]
    )


_PILOT = (
    "The first {pilot} of the drawn items, a number set beforehand, may train the score by which the others are ordered, "
    "and no other verdict does; they have the experts' labels and do not certify."
)


def wrong_allowed(error: float, n: int) -> int:
    """Return how many wrong labels may be kept among n items: floor(error n), with error as the decimal it is written as."""
    return int(as_fraction(error, name="error") * n)


_EARLIER_DRAWS = "this draw and the {earlier} earlier of samples from these items, for all of them together"
_KEEPS = {
    "none": "No machine label is kept: experts label every item.",
    "all": "Every machine label outside the sample is kept.",
    "below": (
        "A machine label is kept if its item is outside the sample and comes before risk {risk}, items of equal risk in the "
        "order of keyed draws that have nothing to do with the sample; experts label the rest."
    ),
}


# --- A pair ---


def _pair_guarantee(
    rule: Threshold | ByGroup | Learned, promise: LivePromise, loss: LossTerms, evidence: Evidence
) -> str:
    router = evidence.router
    described = _described(loss, router=router, session=isinstance(promise, PerSession))
    absent = _counted_without_guardian(loss.missing_guardian)
    if rule.status == "always_defer":
        return " ".join([_always_defer(promise.alpha, loss, router=router), described, absent])
    parts = [_promised(rule, promise, loss, evidence.n), described]
    if isinstance(rule, Learned):
        parts += [_learned_rule(rule, promise.alpha, loss, evidence), *_missing_text(loss)]
        parts += [_learned_luck(promise.alpha)]
    else:
        sight = (_OWN_SIGHT if isinstance(loss, Own) else _SIGHT)[rule.guardian_sees]
        parts.append(_router_rule(rule, promise, evidence.score_digits) if router else sight)
        if rule.boundary == "random":
            drawn = _at_threshold(rule) if isinstance(rule, Threshold) else ""
            parts.append(_RANDOM.format(what="Confidences" if router else "Actions") + drawn)
        parts += _missing_text(loss)
        if isinstance(rule, Threshold) and not isinstance(promise, Confident | Dial):
            parts.append(
                _LUCK.format(alpha=as_written(promise.alpha), spread=f"{_spread(promise, loss, evidence):.2g}")
            )
    if isinstance(loss, Net):
        parts.append(f"With gains not counted, the mean loss on this log is {loss.regret:.4g}.")
    parts += _floor_text(evidence)
    not_promised = _not_promised(router=router, grouped=isinstance(rule, ByGroup), dial=isinstance(promise, Dial))
    return " ".join([*parts, absent, not_promised])


def _promised(rule: Threshold | ByGroup | Learned, promise: LivePromise, loss: LossTerms, n: int) -> str:
    """Return the sentence of a promise."""
    if isinstance(rule, ByGroup):
        return _groups_promise(rule, promise, rows_needed(promise.alpha, loss.bound))
    match promise:
        case Average(alpha=alpha):
            fixed = (
                "options, features, loss and bound" if isinstance(rule, Learned) else "options, loss, bound and scores"
            )
            return _promise(alpha, n, net=isinstance(loss, Net), fixed=fixed)
        case Confident(alpha=alpha, confidence=confidence):
            return _confident_promise(alpha, n, confidence)
        case Dial(alpha=alpha, confidence=confidence, stops=stops):
            return _dial_promise(alpha, n, confidence, stops)
        case Cluster(alpha=alpha, clusters=clusters, max_cluster_size=largest):
            return _cluster_promise(alpha, n, clusters, largest)
        case PerSession(alpha=alpha):
            return _session_promise(alpha, n)


def _groups_promise(rule: ByGroup, promise: LivePromise, fewest: int) -> str:
    """Return the sentence of a certificate by groups; those of fewer rows may share a threshold."""
    alpha, merged = promise.alpha, rule.small_groups == "merge"
    confident = isinstance(promise, Confident)
    sentence = _confident_group_promise(alpha, promise.confidence) if confident else _group_promise(alpha)
    shared = f" {_shared_promise(alpha, fewest)}" if merged else ""
    return f"{sentence}{shared} {_group_list(rule.by, rule.groups, fewest if merged else 0)}"


def _spread(promise: LivePromise, loss: LossTerms, evidence: Evidence) -> float:
    """Return how far the long-run loss of one certificate typically lies from alpha."""
    if evidence.spread is not None:
        return evidence.spread
    size = promise.max_cluster_size if isinstance(promise, Cluster) else 1
    return sqrt(promise.alpha * (loss.bound - promise.alpha) * size / evidence.n)


def _bounded(rule: LiveRule, promise: LivePromise, loss: LossTerms) -> str:
    """Return what is promised, in a line."""
    alpha, group = as_written(promise.alpha), ""
    if isinstance(rule, ByGroup):
        group = " of each group"
        group += " of enough rows, and of the smaller ones taken together," if rule.small_groups == "merge" else ""
    counted = " (gains counted)" if isinstance(loss, Net) else ""
    match promise:
        case Cluster():
            return (
                f"the expected total loss{counted} of the next cluster is at most {alpha} times its expected number of "
                "queries"
            )
        case Confident(confidence=confidence) | Dial(confidence=confidence):
            certain = f"with probability {as_written(confidence)} the long-run loss{counted} of this certificate"
            return f"{certain}{group.replace(' of', ' in', 1)} is at most {alpha}"
        case _:
            unit = "session" if isinstance(promise, PerSession) else "decision"
            return f"the expected loss of the next {unit}{group}{counted} is at most {alpha}"


def _conditions(promise: LivePromise, n: int) -> str:
    """Return under which conditions a promise holds, in a line."""
    rows = f"{promise.clusters} clusters" if isinstance(promise, Cluster) else n_rows(n)
    drawn = " (independent draws of it)" if isinstance(promise, Confident | Dial) else ""
    fixed = "options were" if isinstance(promise, Dial) else "alpha and options were"
    return f"traffic, models and settings stay as in these {rows}{drawn}; {fixed} fixed before anyone looked at them"


def _left_open(rule: LiveRule, promise: LivePromise, loss: LossTerms, evidence: Evidence) -> str:
    """Return what is not promised, in a line."""
    parts = "parts of a group" if isinstance(rule, ByGroup) else "parts of the traffic"
    limits = f"a limit for single questions, {parts} or changed traffic"
    if isinstance(promise, Confident | Dial):
        return limits
    above = f"that the long-run loss of this one certificate stays below {as_written(promise.alpha)}"
    if isinstance(rule, Threshold | Path):
        spread = f"{_spread(promise, loss, evidence):.2g}"
        above += f" (in up to about half of all calibrations it is above, typically by less than {spread})"
    return f"{limits}; {above}"


def _described(loss: LossTerms, *, router: bool, session: bool) -> str:
    """Return what the loss is, and what is declared about it."""
    described = _SESSION_LOSS.format(bound=as_written(loss.bound)) if session else _loss(loss, router=router)
    described += _in_full_sight(loss.full_sight_loss, router=router) if isinstance(loss, Own) else ""
    return described + (_ZERO_ONE.format(bound=as_written(loss.bound)) if loss.zero_one else "")


def _loss(loss: LossTerms, *, router: bool) -> str:
    if isinstance(loss, Net):
        choice = "answer given" if router else "action taken"
        what = f"the grade of the Guardian's choice minus that of the {choice}, negative where the latter is the better one"
        return f"The loss is {what}; it is assumed to be at most {as_written(loss.bound)}."
    if isinstance(loss, Own):
        what = f"the user's own '{loss.name}', on its monotone envelope"
    elif router:
        what = "how much better the Guardian's answer is graded than the one given, and 0 where it is not better"
    elif loss.binarized:
        what = "1 if the Guardian's top answer is right and not in sight, else 0"
    else:
        what = "the Guardian regret: its best score over all actions minus its best score over those in sight"
    return f"The loss is {what}; it is assumed to lie in [0, {as_written(loss.bound)}]."


def _router_rule(rule: Threshold | ByGroup, promise: LivePromise, score_digits: int) -> str:
    relaxation = rule.relaxation if isinstance(rule, Threshold) else None
    if isinstance(promise, PerSession):
        return _SESSION_RULE.format(relaxation=repr(relaxation), digits=score_digits)
    threshold = "the threshold of its group" if relaxation is None else repr(relaxation)
    return (
        f"There are two answers: the Primary's is given where its confidence is above {threshold}, compared after "
        f"it is rounded to {score_digits} significant digits; otherwise the Guardian's is given."
    )


def _missing_text(loss: LossTerms) -> list[str]:
    """Return the sentence about rows without a Guardian score, if they are counted."""
    if not loss.missing_guardian:
        return []
    which = _UNLABELLED if loss.binarized and not isinstance(loss, Own) else ""
    return [_MISSING.format(bound=as_written(loss.bound), least=as_written(loss.in_full_sight), which=which)]


def _floor_text(evidence: Evidence) -> list[str]:
    """Return the sentence about rows that the Guardian was not asked about, if the log was collected with a floor."""
    if evidence.floor is None:
        return []
    what = "confidence" if evidence.router else "margin"
    return [_FLOOR.format(what=what, floor=repr(evidence.floor), rows=evidence.not_asked_rows, n=evidence.n)]


def floor_binds(rule: Rule, evidence: Evidence) -> bool:
    """Tell whether a threshold stands right at the floor, so that it might lie lower without one."""
    groups = rule.groups.values() if isinstance(rule, ByGroup) else ()
    thresholds = [rule.relaxation] if isinstance(rule, Threshold) else [group.relaxation for group in groups]
    return evidence.floor is not None and evidence.floor in thresholds


def _learned_rule(rule: Learned, alpha: float, loss: LossTerms, evidence: Evidence) -> str:
    """Return how a learned score decides, and how it counts losses between 0 and the bound."""
    terms, n, bound, net = rule.terms, evidence.n, loss.bound, isinstance(loss, Net)
    if terms is None:
        return ""
    losses = spendable_losses(as_fraction(alpha, name="alpha"), as_fraction(bound, name="loss_bound"), n)
    stands = "answer is given" if evidence.router else "top action stands"
    features = ", ".join(_FEATURES[name] for name in terms.features)
    penalties = ", ".join(as_written(penalty) for penalty in terms.penalties)
    further = [name for name in ("answer", "text") if name in terms.features]
    answers = {
        0: "",
        1: f", each without the {' and '.join(further)} and with it",
        2: ", each without answer and text, with the answer, and with both",
    }[len(further)]
    among = (
        f"the penalties {penalties}{answers}"
        if rule.score == "learned"
        else f"the margin itself and the penalties {penalties}{answers}"
    )
    fixed = "" if terms.menu_size is None else f" A query with other than {terms.menu_size} actions is deferred."
    unit, logged = as_written(bound), "a loss or a gain" if net else "a loss"
    if net:
        before = f"before the losses of these rows, minus their gains, first exceed {losses - 1}"
        exact = (
            f"losses of -{unit}, 0 and {unit}; any other counts as one of these by a draw that does not lower its mean"
        )
    else:
        before = f"before the losses of these rows and its own exceed {losses}"
        exact = f"losses of 0 or {unit}; a loss in between counts as one of the two by a keyed draw that keeps its mean"
    weighed = (
        ", which the share of gains among rows passed before with the same answer lowers,"
        if net and "answer" in terms.features
        else ","
    )
    return (
        f"The score is a ridge regression of the {'size of the loss' if net else 'loss'} on {features}, learned from these "
        f"same rows, none of which is set aside: a query is decided as if it had been logged with {logged}, every row is "
        f"scored by the fit to all others, and the Primary's {stands} if the query comes, in the order of this "
        f"score{weighed} {before}; otherwise the Guardian decides with everything in sight. Of {among}, the one that "
        f"keeps most rows{', if gains counted as losses,' if net else ''} decides.{fixed} This is exact for {exact}, as in "
        f"{terms.rounded_rows} of these rows. Scores are compared after they are rounded to nine decimals, and equal ones "
        "are told apart by a keyed hash of the query's id: the key is the same for every calibration of this project and is "
        "secret, and an id is fixed before its scores are known. A query that lacks a feature which every logged row has is "
        "not covered."
    )


_INDEPENDENT = (
    "are independent draws of the traffic to come (same models, prompts and settings; no row dropped because of its "
    "outcome)"
)
_FIXED = "were fixed before this log was looked at"


def _confident_promise(alpha: float, n: int, confidence: float) -> str:
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


def _confident_group_promise(alpha: float, confidence: float) -> str:
    return (
        f"If the logged queries of each group {_INDEPENDENT}, and alpha, confidence, options, loss, bound, scores and "
        f"groups {_FIXED}, then with probability at least {as_written(confidence)} over calibration logs, the long-run loss "
        f"of the decisions of each group is at most {as_written(alpha)}, in all groups together."
    )


def _shared_promise(alpha: float, fewest: int) -> str:
    return (
        f"This holds for groups of {n_rows(fewest)} or more. The others share one threshold: if all logged queries and the "
        f"next one are exchangeable, the expected loss of the next decision of any of them is at most {as_written(alpha)} "
        "on average over these groups, those that the log does not have included, and it may be higher in one of them."
    )


def _group_list(by: str, groups: Mapping[str, GroupThreshold], fewest: int) -> str:
    """Return which groups have a threshold, which share one, and which are deferred."""
    alone = {name: group for name, group in groups.items() if group.n >= fewest}
    named = [f"{name} ({n_rows(group.n)})" for name, group in alone.items() if group.relaxation is not None]
    shared = [
        f"{name} ({n_rows(group.n)})"
        for name, group in groups.items()
        if name not in alone and group.relaxation is not None
    ]
    deferred = [f"{name} ({n_rows(group.n)})" for name, group in groups.items() if group.relaxation is None]
    parts = [f"Groups are given by '{by}'."]
    parts += [f"Those with a threshold are {', '.join(named)}."] if named else []
    parts += [f"Those that share one are {', '.join(shared)}."] if shared else []
    parts += [f"Always deferred, since their rows cannot keep the budget: {', '.join(deferred)}."] if deferred else []
    rest = "A query of no known group is deferred, and one of several groups gets the largest threshold of theirs."
    return " ".join([*parts, rest])


_FEATURES = {
    "margin": "the margin",
    "position": "the position of the top action",
    "menu": "the probability of each action",
    "group": "the group",
    "tokens": "the Primary's output tokens",
    "text": "the text of the query",
    "answer": "the Primary's answer",
}


def _learned_luck(alpha: float) -> str:
    """Return what is not known about one calibration."""
    above = f"The long-run loss of this one certificate may lie above {as_written(alpha)}"
    return f"{above}, and nothing is proved about how far."


def _not_promised(*, router: bool, grouped: bool, dial: bool) -> str:
    return _NOT_PROMISED.format(
        group="another group or a part of one" if grouped else "a subgroup",
        chosen="" if dial else ", or for an alpha chosen after looking",
        confidence="confidence" if router else "margin",
    )


def _counted_without_guardian(missing_guardian: str | None) -> str:
    counted = "" if missing_guardian else "counts as if the Guardian had chosen, and "
    return _WITHOUT_GUARDIAN.format(counted=counted)


def _promise(alpha: float, n: int, *, net: bool, fixed: str) -> str:
    bounded = (
        "expected grade of the next decision, averaged over calibration logs of this size as well as over queries, is at "
        f"most {as_written(alpha)} below that of the Guardian's choice, gains counted."
        if net
        else "expected loss of the next decision, averaged over calibration logs of this size as well as over queries, is "
        f"at most {as_written(alpha)}."
    )
    return (
        f"If these {n} logged queries and the next one are exchangeable (same traffic, models, prompts and settings; no "
        f"row dropped because of its outcome), and alpha, {fixed} {_FIXED}, then the {bounded}"
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


def _always_defer(alpha: float, loss: LossTerms, *, router: bool) -> str:
    why = "so it was declared" if isinstance(loss, Own) else "it is 0 by definition, whatever the queries"
    where = (
        "is answered by the Guardian"
        if router
        else "with more than one action goes to the Guardian with every action in sight"
    )
    return (
        f"No relaxation keeps the budget {as_written(alpha)} on this log, so every query {where}. The loss is then "
        f"{_at_most(loss.in_full_sight)}: {why}."
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
_FLOOR = (
    "The Guardian was not asked about rows whose {what} lies below {floor}: {rows} of these {n}, which count as deferred. A "
    "query below that floor always goes to the Guardian. The floor, too, has to be fixed before this log is looked at."
)
_UNLABELLED = ", or in which it is unknown whether its top answer is right,"
_NOT_PROMISED = (
    "Nothing is promised for {group}, for changed or adversarial traffic{chosen}; whoever writes the context can raise the "
    "Primary's {confidence}."
)


# --- A cascade ---


def chain_text(models: Sequence[str]) -> str:
    """Return models in the order in which they are asked."""
    return " > ".join(models)


def _path_guarantee(rule: Path, promise: LivePromise, loss: LossTerms, evidence: Evidence) -> str:
    alpha, n, guardian, net = as_written(promise.alpha), evidence.n, rule.guardian, isinstance(loss, Net)
    if rule.status == "always_defer":
        return (
            f"{'This' if n == 1 else 'These'} {n_rows(n, 'is', 'are')} too few for any stop on the path at alpha {alpha}, "
            f"so every query is answered by the Guardian, {guardian}. The loss is then 0: it is 0 by definition, "
            f"whatever the queries. {_LOSSES[net]}"
        )
    parts = [
        f"If these {n} logged queries and the next one are exchangeable (same traffic, models, prompts and settings; no row "
        "dropped because of its outcome), and alpha, loss, tuning share and seed were fixed before this log was looked at, "
        f"then the {(_NET if net else _REGRET).format(alpha=alpha)}",
        _LOSSES[net],
        f"Models are asked in the order {chain_text((*rule.chain.models, guardian))}, where some may be left out: each "
        f"answer and its confidence say whether it is given or whom to ask next, at last {guardian}, the Guardian. Models, "
        f"order and path were chosen on {rule.tuning.rows} other rows, and the stop on these alone; it is one promise for "
        "the whole cascade, not one for each model.",
        _DRAWS,
    ]
    parts += [_ROUNDED] if rule.rounded else []
    parts += [_PATH_MISSING] if loss.missing_guardian else []
    parts.append(_LUCK.format(alpha=alpha, spread=f"{evidence.spread:.2g}"))
    parts += (
        [f"With gains not counted, the mean loss on these rows is {loss.regret:.4g}."] if isinstance(loss, Net) else []
    )
    return " ".join([*parts, _PATH_NOT_PROMISED])


_REGRET = (
    "expected loss of the next decision, averaged over calibration logs of this size as well as over queries, is at most "
    "{alpha}."
)
_NET = (
    "expected grade of the next decision, averaged over calibration logs of this size as well as over queries, is at most "
    "{alpha} below that of the Guardian's answer, gains counted."
)
_LOSSES = {
    False: (
        "The loss is how much better the Guardian's answer is graded than the one given, and 0 where it is not better; "
        "grades lie in [0, 1]."
    ),
    True: (
        "The loss is the grade of the Guardian's answer minus that of the one given, negative where the latter is the "
        "better one; grades lie in [0, 1]."
    ),
}
_DRAWS = (
    "Which of the two policies beside the stop decides a query is said by a keyed hash of its id: the key is the same for "
    "every calibration of this project and is secret, and an id is fixed before any answer is known."
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


# --- The chain of certificates that one belongs to ---


def chain_facts(ancestry: Ancestry) -> list[tuple[str, str]]:
    """Return where a certificate stands in its chain, for people."""
    steps: dict[Step, str] = {
        "scheduled": f"scheduled renewal {ancestry.renewal}",
        "tightened": "the relaxation was raised",
        "after red": "the first since an alarm",
        "after looking": "installed after looking: no guarantee",
    }
    union = f", {ancestry.collected} of its rows collected" if ancestry.collected else ""
    ahead = f"the next renewal takes {n_rows(ancestry.first * 2**ancestry.renewal)} since {_date(ancestry.since)}"
    before = f"after {ancestry.predecessor_sha256[:12]}, from {ancestry.root_sha256[:12]}"
    return [("chain", f"{steps[ancestry.step]}{union}; {before}"), ("schedule", ahead)]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _in_chain(text: str, ancestry: Ancestry, rule: LiveRule, promise: LivePromise) -> str:
    """Return the guarantee of one certificate together with what its chain adds to it, or takes from it."""
    alpha, relaxation = promise.alpha, rule.relaxation if isinstance(rule, Threshold) else None
    if ancestry.step == "after looking":
        return _NONE.format(alpha=as_written(alpha))
    parts, since = [text], _date(ancestry.since)
    if ancestry.step == "tightened" and ancestry.calibrated is not None:
        parts.append(_TIGHTENED.format(before=ancestry.calibrated.relaxation, after=relaxation))
    if ancestry.renewal:
        began = "began after an alarm: only rows since then count" if ancestry.step == "after red" else "has a schedule"
        union = _UNION.format(rows=n_rows(ancestry.collected)) if ancestry.collected else ""
        schedule = _SCHEDULE.format(began=began, first=ancestry.first, since=since, union=union, k=ancestry.renewal)
        parts.append(f"{schedule} {_chain_promise(rule, promise)}")
    return " ".join(parts)


def _chain_promise(rule: LiveRule, promise: LivePromise) -> str:
    alpha, whose = as_written(promise.alpha), "decision of a group" if isinstance(rule, ByGroup) else "decision"
    if isinstance(promise, Confident | Dial):
        return _CONFIDENT_CHAIN.format(alpha=alpha, confidence=as_written(promise.confidence), whose=whose)
    return _CHAIN.format(alpha=alpha, whose=whose)


_NONE = (
    "There is no guarantee: this certificate was calibrated and installed after looking, outside the schedule of its "
    "chain. Who installs a certificate whenever it is cheaper keeps the lucky ones: over 20 such looks, their loss was "
    "1.1 to 1.4 times alpha (here {alpha}) in simulation. The next scheduled renewal has a guarantee again."
)
_TIGHTENED = (
    "The relaxation was raised afterwards, from {before!r} on its log to {after!r}. The loss of a decision falls as the "
    "relaxation grows, so that what is promised for the smaller one holds for the larger one, whenever and for whatever "
    "reason it was raised."
)
_UNION = ", the first renewal together with the {rows} of the log that the chain began with"
_SCHEDULE = (
    "This certificate belongs to a chain that {began}. Renewal k is calibrated on the first {first} x 2^(k - 1) rows of "
    "queries since {since}{union}, when the last of them is due, and is installed whatever comes out; this is renewal {k}."
)
_CHAIN = (
    "If nobody's looking changed that schedule, then for every {whose}, fixed in advance, the expected loss over "
    "calibrations and queries is at most {alpha}, whichever certificate of the chain is in force."
)
_CONFIDENT_CHAIN = (
    "If nobody's looking changed that schedule, then for every {whose}, fixed in advance, the certificate of the chain that "
    "is in force has a long-run loss of at most {alpha} with probability at least {confidence} over calibrations; that is "
    "of each certificate by itself, not of all of them together."
)
