"""calibrate: find the smallest relaxation that keeps a risk budget, and certify it.

Knows nothing of live models, evaluation or the command line.
"""

import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, Literal

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.guarantee import guarantee_text
from conformal_arbitrage.calibration.options import CalibrationOptions, resolve_options
from conformal_arbitrage.core.losses import GuardianSees, Loss, Number, as_fraction
from conformal_arbitrage.core.risk import RiskCurve, check_alpha
from conformal_arbitrage.errors import InfeasibleError, OptionError, ScoreLogError
from conformal_arbitrage.scorelog.log import FrameColumns, ScoreLog, as_score_log
from conformal_arbitrage.scorelog.wide import ScoreColumns
from conformal_arbitrage.types import Boundary, MissingGuardian

UNFIT = "unfit_for_calibration"
"""A column that marks a log whose rows were selected by their scores."""


def calibrate(
    log: ScoreLog | object,
    alpha: Number,
    *,
    primary: ScoreColumns | None = None,
    guardian: ScoreColumns | None = None,
    options: CalibrationOptions | None = None,
    guardian_sees: GuardianSees | None = None,
    boundary: Boundary | None = None,
    loss_bound: Number | None = None,
    loss: Loss | None = None,
    key: bytes | None = None,
    grid: Number | None = None,
    missing_guardian: MissingGuardian | None = None,
) -> Certificate:
    """Find the smallest relaxation that keeps the risk budget: total loss + B <= alpha (n + 1), exactly.

    Pass the options as single keywords or as one object, not both.

    Args:
        log: the recorded scores, or a frame that holds them (pandas, polars, Arrow).
        alpha: the risk budget, above 0 and below the loss bound. A float means the decimal that its repr shows.
        primary: the frame's column of Primary scores, or one column per action; by default "primary".
        guardian: the same for the Guardian.
        options: all options below as one object.
        guardian_sees: "candidates" (the paper, the default), "all" (calibrated on its own loss), or
            "all-restricted-loss" (the paper's CA*).
        boundary: "include" (the paper, the default) keeps every action exactly at the threshold gap; "random" keeps a
            share of them and so spends the whole budget.
        loss_bound: the largest possible loss; may be omitted, and is then 1, if all Guardian scores lie in [0, 1].
        loss: a loss of your own over (row, indices in sight), raised to its monotone envelope.
        key: the secret bytes behind the draws of boundary="random"; generated if omitted.
        grid: restrict the relaxation to 0, grid, ..., 1.
        missing_guardian: "worst_case" counts rows without a Guardian score as a loss of B unless every action is in
            sight.

    Raises:
        InfeasibleError: no relaxation keeps the budget, and your own loss is not 0 with every action in sight.
        ScoreLogError: the log is marked as selected by its scores.
    """
    keywords = {
        "guardian_sees": guardian_sees,
        "boundary": boundary,
        "loss_bound": loss_bound,
        "loss": loss,
        "key": key,
        "grid": grid,
        "missing_guardian": missing_guardian,
    }
    chosen = resolve_options(options, CalibrationOptions, keywords, name="options")
    scores = _log_of(log, primary, guardian)
    if UNFIT in scores.extra:
        raise ScoreLogError(
            f"{scores.source}: contains rows selected by their scores, which breaks exchangeability; export shadow and "
            "audited rows only (arbitrage records export --score-log)"
        )
    return certify(scores, alpha, chosen.with_key(secrets.token_bytes(32)))


def _log_of(data: object, primary: ScoreColumns | None, guardian: ScoreColumns | None) -> ScoreLog:
    """Return a score log as it is, or read one from a frame."""
    columns: FrameColumns = {}
    if primary is not None:
        columns["primary"] = primary
    if guardian is not None:
        columns["guardian"] = guardian
    return as_score_log(data, **columns)


def certify(log: ScoreLog, alpha: Number, options: CalibrationOptions) -> Certificate:
    """Calibrate under options that already have their key; the step that `verify` repeats."""
    curve = options.curve(log)
    bound = curve.bound(options.loss_bound)
    budget = check_alpha(alpha, bound)
    index = curve.search([alpha], options.loss_bound)[0]
    if index is None and options.loss is not None and curve.in_full_sight > 0:
        least = curve.in_full_sight / 10**curve.tick_digits / curve.n
        raise InfeasibleError(
            f"no relaxation keeps alpha {float(budget):g} on {curve.n} rows, and the loss is not 0 with every action in "
            f"sight (mean {least:.4g}); use a larger alpha{' or more rows' if least < budget else ''}"
        )
    total = Fraction(0) if index is None else curve.exact_total(index)
    terms: dict[str, Any] = {
        "status": "always_defer" if index is None else "ok",
        "alpha": _stored(budget, alpha, "alpha"),
        "n": curve.n,
        "loss": options.loss_name,
        "loss_bound": _stored(bound, options.loss_bound, "loss_bound"),
        "guardian_sees": options.guardian_sees,
        "boundary": options.boundary,
        "binarized": log.binary is not None,
        "missing_guardian": options.missing_guardian,
    }
    return Certificate(
        **terms,
        **_threshold(curve, index),
        key_sha256=None if options.key is None else hashlib.sha256(options.key).hexdigest(),
        grid=None if options.grid is None else _stored(as_fraction(options.grid, name="grid"), options.grid, "grid"),
        empirical_risk=float(total / curve.n),
        slack=float(budget - (total + bound) / (curve.n + 1)),
        envelope_excess=curve.envelope_excess,
        **_provenance(log),
        guarantee=guarantee_text(**terms),
        key=options.key,
    )


def _threshold(curve: RiskCurve, index: int | None) -> dict[str, float | None]:
    if index is None:
        return {"relaxation": None, "boundary_u": None}
    u = None if curve.boundary_u is None else float(curve.boundary_u[index])
    return {"relaxation": float(curve.breakpoints[index]), "boundary_u": u}


def _provenance(log: ScoreLog) -> dict[str, Any]:
    from importlib.metadata import version  # takes 20 ms to import

    return {
        "missing_guardian_rows": int(log.missing.sum()),
        "no_opinion_rows": int(log.no_opinion.sum()),
        "score_digits": log.score_digits,
        "columns": dict(zip(("primary", "guardian"), log.columns, strict=True)),
        "identities": _identities(log),
        "log_sha256": log.sha256(),
        "version": version("conformal-arbitrage"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _stored(value: Fraction, given: object, name: str) -> float:
    """Return a number as the certificate stores it: a float that reads back as the same decimal."""
    number = float(value)
    if Fraction(repr(number)) != value:
        raise OptionError(f"{name} must be a decimal of at most 15 digits; got {given!r}")
    return number


def _identities(log: ScoreLog) -> dict[str, Any] | Literal["unbound"]:
    known: Mapping[str, Any] = log.identities or {}
    if not all(column in known for column in log.columns):
        return "unbound"
    identities = {role: known[column] for role, column in zip(("primary", "guardian"), log.columns, strict=True)}
    return identities | ({"grader": known["grader"]} if "grader" in known else {})
