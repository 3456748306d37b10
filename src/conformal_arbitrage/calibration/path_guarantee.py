"""The guarantee of a cascade in words; a certificate whose text is not the one its fields imply is refused."""

from collections.abc import Sequence

from conformal_arbitrage.calibration.promises import as_written


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
    parts += [_MISSING] if missing_guardian else []
    parts.append(_LUCK.format(alpha=as_written(alpha), spread=f"{spread:.2g}"))
    parts += [f"With gains not counted, the mean loss on these rows is {regret:.4g}."] if regret is not None else []
    return " ".join([*parts, _NOT_PROMISED])


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
_MISSING = "Rows without a grade were counted as a loss of 1."
_LUCK = (
    "The long-run loss of this one certificate may lie above {alpha} (in up to about half of all calibrations it does, "
    "typically by less than {spread}, one standard deviation)."
)
_NOT_PROMISED = (
    "A query whose Guardian cannot be had gets no answer, or a configured one that carries no guarantee, never that of a "
    "model that the path passed over. Nothing is promised for a subgroup, for changed or adversarial traffic, or for an "
    "alpha chosen after looking; whoever writes the context can raise a model's confidence."
)
