"""The guarantee in words: what holds, under which assumptions, and what is not promised.

Every sentence is written here; `verify` rebuilds the text and compares it.
"""

from math import sqrt


def guarantee_text(
    *,
    status: str,
    alpha: float,
    loss_bound: float,
    n: int,
    loss: str,
    binarized: bool,
    guardian_sees: str,
    boundary: str,
    missing_guardian: str | None,
) -> str:
    """Return the guarantee of one certificate as a paragraph."""
    own_loss = loss != "guardian_regret"
    described = _loss(loss, loss_bound, binarized=binarized)
    if status != "ok":
        return " ".join([_always_defer(alpha, own_loss=own_loss), described])
    parts = [_promise(alpha, n), described, (_OWN_SIGHT if own_loss else _SIGHT)[guardian_sees]]
    parts += [_RANDOM] if boundary == "random" else []
    if missing_guardian:
        unless = "" if own_loss else " unless everything was in sight"
        parts.append(_MISSING.format(bound=f"{loss_bound:g}", unless=unless))
    spread = sqrt(alpha * (loss_bound - alpha) / n)
    parts.append(
        f"The long-run loss of this one certificate may lie above {alpha:g} (in up to about half of all calibrations it "
        f"does, typically by less than {spread:.2g}, one standard deviation)."
    )
    return " ".join([*parts, _NOT_PROMISED])


def _promise(alpha: float, n: int) -> str:
    return (
        f"If these {n} logged queries and the next one are exchangeable (same traffic, models, prompts and settings; no "
        "row dropped because of its outcome), and alpha, options, loss, bound and scores were fixed before this log was "
        "looked at, then the expected loss of the next decision, averaged over calibration logs of this size as well as "
        f"over queries, is at most {alpha:g}."
    )


def _always_defer(alpha: float, *, own_loss: bool) -> str:
    why = (
        "it was 0 on every row of this log, and is assumed to be 0 always"
        if own_loss
        else "it is 0 by definition, whatever the queries"
    )
    return (
        f"No relaxation keeps the budget {alpha:g} on this log, so every query with more than one action goes to the "
        f"Guardian with every action in sight. The loss is then 0: {why}."
    )


def _loss(loss: str, bound: float, *, binarized: bool) -> str:
    if loss != "guardian_regret":
        what = f"the user's own '{loss}', on its monotone envelope"
    elif binarized:
        what = "1 if the Guardian's top answer is right and not in sight, else 0"
    else:
        what = "the Guardian regret: its best score over all actions minus its best score over those in sight"
    return f"The loss is {what}; it is assumed to lie in [0, {bound:g}]."


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
    "Actions exactly at the threshold gap are kept or not by a keyed hash of the query's id: the key was drawn once, "
    "without regard to the log, and is secret, and an id is fixed before its scores are known."
)
_MISSING = (
    "Rows without a Guardian score were counted as a loss of {bound}{unless}; a live query whose "
    "Guardian fails is counted in the same way."
)
_NOT_PROMISED = (
    "Nothing is promised for a subgroup, for changed or adversarial traffic, or for an alpha chosen after looking; whoever "
    "writes the context can raise the Primary's margin."
)
