"""Cascades: tune a chain of models on one part of a log, and certify it on the rest."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate, issue
from conformal_arbitrage.calibration.promises import (
    Average,
    ChainEstimate,
    ChainTuning,
    Evidence,
    ModelChain,
    Net,
    Path,
    Regret,
)
from conformal_arbitrage.calibration.secret import draw, project_key
from conformal_arbitrage.calibration.tuning import (
    LossName,
    asked_costs,
    chain_rows,
    chosen_losses,
    estimate_chains,
    fit_chain,
    stop_losses,
    stop_on,
    tuning_rows,
    unknown_losses,
)
from conformal_arbitrage.core.chains import GUARDIAN, policies_of, rounded_losses
from conformal_arbitrage.core.exact import Bools, Floats, Indices, Integers
from conformal_arbitrage.core.risk import Number, check_alpha
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.types import MissingGuardian

TUNING_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CascadeDecisions:
    """Who answers each row of a log.

    Attributes:
        answered_by: the place of the model in the chain; -1 is the Guardian.
        asked: rows x models of the chain.
        cost: dollars per row, of every model asked.
        loss: per row; NaN where it is unknown.
    """

    answered_by: Integers
    asked: Bools
    cost: Floats
    loss: Floats

    @property
    def guardian_share(self) -> float:
        """The share of rows that the Guardian answers."""
        return float((self.answered_by == GUARDIAN).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeOptions:
    """How a cascade is tuned and calibrated.

    Attributes:
        key: behind the draws, the same for all calibrations of a project: `ProjectSecret.find().boundary_key`.
        loss: None for what the Guardian does better, or "net": what it does better minus what it does worse.
        chain: models to ask in this order; by default they are chosen.
        tuning_share: the share of the rows to choose and fit on.
        seed: of the draw of these rows.
        missing_guardian: "worst_case" counts rows without a grade as the largest loss; by default they are an error.
    """

    key: bytes
    loss: Literal["net"] | None = None
    chain: Sequence[str] | None = None
    tuning_share: float = TUNING_SHARE
    seed: int = 0
    missing_guardian: MissingGuardian | None = None

    @property
    def loss_name(self) -> LossName:
        """The loss as certificates name it."""
        return "guardian_regret" if self.loss is None else self.loss


def calibrate_cascade(
    log: CascadeLog,
    alpha: Number,
    *,
    key: bytes | None = None,
    loss: Literal["net"] | None = None,
    chain: Sequence[str] | None = None,
    tuning_share: float = TUNING_SHARE,
    seed: int = 0,
    missing_guardian: MissingGuardian | None = None,
) -> Certificate:
    """Choose the cheapest chain of models for a risk budget, and certify it on rows that it was not chosen on.

    Args:
        log: the recorded answers of all models.
        alpha: the risk budget, above 0 and below 1.
        key: as the other arguments, a field of `CascadeOptions`; by default the project's.
        loss: None, or "net".
        chain: models to ask in this order; by default they are chosen.
        tuning_share: the share of the rows to choose and fit on.
        seed: of the draw of these rows.
        missing_guardian: how rows without a grade count.

    Raises:
        ScoreLogError: a grade is missing, or no model is cheaper than the Guardian.
        OptionError: an option is out of its range, or there are too few rows.
    """
    options = CascadeOptions(
        key=key or project_key(),
        loss=loss,
        chain=None if chain is None else tuple(chain),
        tuning_share=tuning_share,
        seed=seed,
        missing_guardian=missing_guardian,
    )
    tuned = tune_chain(log, check_alpha(alpha, Fraction(1)), options)
    return certify_chain(log, alpha, options, tuned)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedChain:
    """A chain fitted on a tuning part, and the rows that are left."""

    chain: ModelChain
    estimates: tuple[ChainEstimate, ...]
    tuning: Indices
    rest: Indices


def tune_chain(log: CascadeLog, alpha: Fraction, options: CascadeOptions) -> TunedChain:
    """Choose a chain on the tuning part, unless one is given, and fit its path there."""
    tuning, rest = tuning_rows(log, share=options.tuning_share, seed=options.seed)
    part, loss, missing = log.select(tuning), options.loss_name, options.missing_guardian
    models, estimates = log.models if options.chain is None else tuple(options.chain), tuple[ChainEstimate, ...]()
    if not models or len(set(models)) < len(models):
        raise OptionError(f"a chain names at least one model, each once; got {', '.join(models) or 'none'}")
    stop_losses(log, log.columns_of(models), loss, missing)  # so that an error names the row of the whole log
    gains = False
    if options.chain is None or loss == "net":
        only = options.chain
        estimates = estimate_chains(
            part, alpha=alpha, loss=loss, missing=missing, n=len(rest), seed=options.seed, models=only
        )
        models, gains = estimates[0].models, estimates[0].gains
    chain = fit_chain(part, models, loss, missing, gains=gains)
    return TunedChain(chain=chain, estimates=estimates, tuning=tuning, rest=rest)


def certify_chain(log: CascadeLog, alpha: Number, options: CascadeOptions, tuned: TunedChain) -> Certificate:
    """Calibrate a chain that was fitted elsewhere; the step that `verify` repeats."""
    rows, chain = log.select(tuned.rest), tuned.chain
    budget, n = check_alpha(alpha, Fraction(1)), len(tuned.rest)
    if Fraction(repr(float(budget))) != budget:
        raise OptionError(f"alpha must be a decimal of at most 15 digits; got {alpha!r}")
    places = rows.columns_of(chain.models)
    losses = stop_losses(rows, places, options.loss_name, options.missing_guardian)
    u, v = _draws(options.key, rows), _draws(hmac.digest(options.key, b"rounding v1", "sha256"), rows)
    replies = chain_rows(rows, chain.models, chain.answers)
    stop = stop_on(chain, replies, rounded_losses(losses, v), u, alpha=budget)
    chosen, asked = (part[0] for part in chain.follow(replies, policies_of(stop, u)[None]))
    row_losses, cost = chosen_losses(losses, chosen[None])[0], asked_costs(rows, chain.models, chosen, asked)
    spread, risk = float(np.sqrt((row_losses**2).sum()) / n), float(row_losses.mean())
    regret = float(np.maximum(row_losses, 0.0).mean())
    missing = options.missing_guardian
    rule = Path(
        chain=chain,
        models=log.models,
        guardian=log.guardian,
        position=None if stop is None else stop.position,
        u=None if stop is None else stop.u,
        rounded=bool((losses != np.rint(losses)).any()),
        tuning=ChainTuning(
            rows=len(tuned.tuning),
            share=options.tuning_share,
            seed=options.seed,
            ids_sha256=_ids_digest(log, tuned.tuning),
            fixed=options.chain is not None,
            estimates=tuned.estimates,
        ),
        cost=float(cost.mean()),
        guardian_cost=float(rows.guardian_cost.mean()),
        guardian_share=float((chosen == GUARDIAN).mean()),
    )
    net = options.loss == "net"
    return issue(
        rule,
        Average(alpha=float(budget)),
        Net(bound=1.0, missing_guardian=missing, regret=regret) if net else Regret(bound=1.0, missing_guardian=missing),
        Evidence(
            n=n,
            log_sha256=log.sha256(),
            empirical_risk=risk,
            no_opinion_rows=int((np.isnan(replies.confidence) & ~replies.unasked).any(axis=1).sum()),
            missing_guardian_rows=int(unknown_losses(rows, places).any(axis=1).sum()),
            spread=spread,
        ),
        identities=_identities(log, chain.models),
        key=options.key,
    )


def apply_cascade(certificate: Certificate, log: CascadeLog) -> CascadeDecisions:
    """Decide every row of a log, which needs the columns of the chain's models."""
    rule = certificate.path
    chain, policies = rule.chain, policies_of(rule.stop, _draws(certificate.secret(), log))
    chosen, asked = (part[0] for part in chain.follow(chain_rows(log, chain.models, chain.answers), policies[None]))
    name: LossName = "net" if isinstance(certificate.loss, Net) else "guardian_regret"
    losses = stop_losses(log, log.columns_of(chain.models), name, "worst_case")
    return CascadeDecisions(
        answered_by=chosen,
        asked=asked,
        cost=asked_costs(log, chain.models, chosen, asked),
        loss=chosen_losses(losses, chosen[None])[0],
    )


def _draws(key: bytes, log: CascadeLog) -> Floats:
    return np.array([draw(key, id) for id in log.id.tolist()])


def _ids_digest(log: CascadeLog, rows: Indices) -> str:
    digest = hashlib.sha256()
    for name in sorted(log.id[rows].tolist()):
        text = name.encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()


def _identities(log: CascadeLog, models: Sequence[str]) -> dict[str, Any] | Literal["unbound"]:
    known, names = log.identities or {}, (*models, log.guardian)
    if not all(name in known for name in names):
        return "unbound"
    return {name: known[name] for name in (*names, "grader", "requests") if name in known}
