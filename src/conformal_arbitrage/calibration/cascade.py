"""Cascades: tune a chain of models on one part of a log, and certify it on the rest."""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from conformal_arbitrage.calibration.certificate import check_signature, package_version, read_document, write_document
from conformal_arbitrage.calibration.secret import ProjectSecret, draw
from conformal_arbitrage.calibration.verify import Verification
from conformal_arbitrage.calibration.words import as_written, chain_text, path_guarantee_text, path_summary
from conformal_arbitrage.core.chains import (
    GUARDIAN,
    LEVELS,
    PathStop,
    calibrate_path,
    fit_ridge_logistic,
    path_choice,
    path_corners,
    path_entries,
    predicted_losses,
    rounded_losses,
    stage_features,
)
from conformal_arbitrage.core.exact import Floats, Indices, Integers
from conformal_arbitrage.core.losses import Number
from conformal_arbitrage.core.walk import check_alpha
from conformal_arbitrage.errors import CertificateError, OptionError, ScoreLogError
from conformal_arbitrage.scorelog.cascade import NO_ANSWER, CascadeLog, normal_answer
from conformal_arbitrage.types import MissingGuardian, as_object

# --- Tuning of cascades ---


LossName = Literal["guardian_regret", "net"]
FEWEST_TUNING_ROWS: Final = 20
_REPEATS: Final = 3
_BEST_PAIRS: Final = 3
_ENTRY_DIGITS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChain:
    """Models that are asked in order, and where an answer of each enters the path.

    Attributes:
        models: the names, in the order in which they are asked.
        coefficients: of each stage, for the predicted loss of stopping there; empty with one model, whose path is its
            confidence alone.
        corners: the path, one threshold per stage at each corner; empty with one model.
    """

    models: tuple[str, ...]
    coefficients: tuple[tuple[float, ...], ...] = ()
    corners: tuple[tuple[float, ...], ...] = ()

    @property
    def end(self) -> float:
        """A position beyond every entry."""
        return float(len(self.corners) or 2)

    def entries(self, confidence: Floats, answers: Integers) -> Floats:
        """Return where on the path each row may stop at each model; inf if nowhere.

        Args:
            confidence: rows x models of the chain; NaN where a model gave none.
            answers: rows x models; equal numbers are equal answers.
        """
        stages = range(len(self.models))
        return np.column_stack([self.stage_entries(stage, confidence, answers) for stage in stages])

    def stage_entries(self, stage: int, confidence: Floats, answers: Integers) -> Floats:
        """Return the column of `entries` for one stage; later models are not looked at."""
        unable = np.isnan(confidence[:, stage])
        if not self.corners:
            return np.where(unable, np.inf, np.round(1 - confidence[:, stage], _ENTRY_DIGITS))
        features = stage_features(confidence, answers, stage)
        risk = np.where(unable, np.nan, predicted_losses(features, np.array(self.coefficients[stage])))
        return path_entries(risk[:, None], np.array(self.corners)[:, [stage]])[:, 0]

    def entry(self, confidences: Sequence[float | None], answers: Sequence[str | None]) -> float:
        """Return where one query may stop at the last model that has answered, given what all so far have said."""
        known = np.array([[np.nan if one is None else one for one in confidences]], dtype=np.float64)
        codes: dict[str, int] = {}
        replies = [codes.setdefault(normal_answer(one), len(codes)) if one else NO_ANSWER for one in answers]
        return float(self.stage_entries(len(confidences) - 1, known, np.array([replies], dtype=np.int64))[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEstimate:
    """What a chain is expected to cost at the risk budget, as a share of the Guardian's cost alone."""

    models: tuple[str, ...]
    cost: float


def tuning_rows(log: CascadeLog, *, share: float, seed: int) -> tuple[Indices, Indices]:
    """Return the rows to tune on and those to calibrate on, drawn by a hash of seed and id.

    Raises:
        OptionError: the share leaves too few rows to tune on, or none to calibrate on.
    """
    if seed < 0:
        raise OptionError(f"seed must be 0 or more; got {seed}")
    cut = round(share * len(log)) if 0 < share < 1 else 0
    if not FEWEST_TUNING_ROWS <= cut < len(log):
        raise OptionError(
            f"{log.source}: a tuning share of {share:g} of {len(log)} rows is {cut} rows; tuning a chain takes at least "
            f"{FEWEST_TUNING_ROWS}, and rows must be left to calibrate on: collect more, or use another share"
        )
    ranks = [hashlib.sha256(f"tuning {seed};{name}".encode()).digest() for name in log.id.tolist()]
    order = np.array(sorted(range(len(log)), key=ranks.__getitem__), dtype=np.intp)
    return order[:cut], np.sort(order[cut:])


def stop_losses(log: CascadeLog, places: Sequence[int], loss: LossName, missing: MissingGuardian | None) -> Floats:
    """Return rows x models: the loss of answering with each model, 1 where it is unknown.

    Raises:
        ScoreLogError: a loss is unknown, and that is not to be counted as the largest.
    """
    difference = log.guardian_grade[:, None] - log.grade[:, places]
    unknown = np.isnan(difference) & ~np.isnan(log.confidence[:, places])
    if unknown.any() and missing is None:
        row, j = (int(k) for k in np.argwhere(unknown)[0])
        absent = np.isnan(log.guardian_grade[row])
        column = f"{log.guardian if absent else log.models[places[j]]}_grade"
        raise ScoreLogError(
            f"{log.source}: row {row + 1}, column '{column}': no grade; grade it, or count such rows as the largest loss: "
            'missing_guardian="worst_case" (--missing-guardian worst_case). A row that is dropped breaks the guarantee'
        )
    losses = np.where(np.isnan(difference), unknown.astype(np.float64), difference)
    return np.maximum(losses, 0.0) if loss == "guardian_regret" else losses


def asked_costs(log: CascadeLog, places: Sequence[int]) -> Floats:
    """Return rows x (models + 1): dollars of all models asked until one answers; the last column is the Guardian's."""
    return np.cumsum(np.column_stack([log.cost[:, places], log.guardian_cost]), axis=1)


def fit_chain(log: CascadeLog, models: Sequence[str], loss: LossName, missing: MissingGuardian | None) -> ModelChain:
    """Fit predicted losses and a path to the rows of a tuning part.

    What is predicted is the regret, for the net loss too: where the Guardian would have done better. Predicting the net
    loss itself costs more on every log that was tried.
    """
    if len(models) == 1:
        return ModelChain(models=tuple(models))
    if len(models) not in LEVELS:
        raise OptionError(f"a chain has at most {max(LEVELS)} models before the Guardian; got {', '.join(models)}")
    places = log.columns_of(models)
    confidence, answers = log.confidence[:, places], log.answer[:, places]
    losses = stop_losses(log, places, loss, missing)
    coefficients: list[Floats] = []
    risks = np.full(confidence.shape, np.nan)
    for stage in range(len(models)):
        features, able = stage_features(confidence, answers, stage), ~np.isnan(confidence[:, stage])
        coefficients.append(fit_ridge_logistic(features[able], np.maximum(losses[able, stage], 0.0)))
        risks[able, stage] = predicted_losses(features[able], coefficients[-1])
    corners = path_corners(risks, losses, asked_costs(log, places), LEVELS[len(models)])
    return ModelChain(
        models=tuple(models),
        coefficients=tuple(tuple(one.tolist()) for one in coefficients),
        corners=tuple(tuple(corner.tolist()) for corner in corners),
    )


def estimate_chains(
    log: CascadeLog,
    *,
    alpha: Fraction,
    loss: LossName,
    missing: MissingGuardian | None,
    n: int,
    seed: int,
) -> tuple[ChainEstimate, ...]:
    """Estimate what pairs and longer chains cost at a budget, by cross-fitting on a tuning part; the cheapest first.

    Candidates are every model that is cheaper than the Guardian, and chains of two that end with one of the best of
    these. Each is fitted on one half and calibrated on the other, with the room for the next query's loss scaled to the
    rows that the certificate will have.

    Args:
        log: the tuning part.
        alpha: the risk budget.
        loss: what is bounded.
        missing: how unknown losses count.
        n: the rows that the certificate will be calibrated on.
        seed: of the halves and of the draws.
    """
    means = dict(zip(log.models, log.cost.mean(axis=0).tolist(), strict=True))
    cheaper = [name for name in log.models if means[name] < log.guardian_cost.mean()]
    if not cheaper:
        raise ScoreLogError(
            f"{log.source}: no model is cheaper than the Guardian {log.guardian}; check the cost columns, or name another "
            "Guardian"
        )

    def estimated(models: tuple[str, ...]) -> ChainEstimate:
        cost = _estimated_cost(log, models, alpha, loss, missing, n=n, seed=seed)
        return ChainEstimate(models=models, cost=cost)

    pairs = sorted((estimated((name,)) for name in cheaper), key=lambda one: one.cost)
    best = {pair.models[0] for pair in pairs[:_BEST_PAIRS]}
    chains = [estimated((a, b)) for b in cheaper if b in best for a in cheaper if means[a] < means[b]]
    return tuple(sorted((*pairs, *chains), key=lambda one: one.cost))


def _estimated_cost(
    log: CascadeLog,
    models: tuple[str, ...],
    alpha: Fraction,
    loss: LossName,
    missing: MissingGuardian | None,
    *,
    n: int,
    seed: int,
) -> float:
    """Return the mean cost of a chain over halves of the tuning part, relative to the Guardian's."""
    rng, total, rows = np.random.default_rng(seed), 0.0, 0
    for _ in range(_REPEATS):
        order = rng.permutation(len(log))
        halves = order[: len(log) // 2], order[len(log) // 2 :]
        for fitted_on, rest in (halves, halves[::-1]):
            chain, held_out = fit_chain(log.select(fitted_on), models, loss, missing), log.select(rest)
            total += _cost_on(held_out, chain, alpha, loss, missing, n=n, rng=rng)
            rows += len(rest)
    return total / rows / float(log.guardian_cost.mean())


def _cost_on(
    log: CascadeLog,
    chain: ModelChain,
    alpha: Fraction,
    loss: LossName,
    missing: MissingGuardian | None,
    *,
    n: int,
    rng: np.random.Generator,
) -> float:
    """Return the total cost of a chain on rows that it was not fitted on, calibrated on these."""
    places, size = log.columns_of(chain.models), len(log)
    u, v = rng.random(size), rng.random(size)
    entries = chain.entries(log.confidence[:, places], log.answer[:, places])
    room = Fraction(size, n)
    losses = rounded_losses(stop_losses(log, places, loss, missing), v)
    stop = calibrate_path(entries, losses, u, alpha=alpha + (1 - room) / (size + 1))
    return float(asked_costs(log, places)[np.arange(size), path_choice(entries, u, stop)].sum())


# --- PathCertificate ---


PATH_SCHEMA = 1
KIND = "path"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTuning:
    """The part of a log that a chain was chosen and fitted on; the certificate's rows are the others.

    Attributes:
        rows: how many rows.
        share: of the log, as asked for.
        seed: of the hash that drew them.
        ids_sha256: digest of their ids.
        fixed: whether the chain was given, and only its path fitted.
        estimates: what each chain that was considered would cost, cheapest first; empty if the chain was given.
    """

    rows: int
    share: float
    seed: int
    ids_sha256: str
    fixed: bool = False
    estimates: tuple[ChainEstimate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CascadeDecisions:
    """Who answers each row of a log.

    Attributes:
        answered_by: the place of the model in the chain; -1 is the Guardian.
        cost: dollars per row, of every model asked.
        loss: per row; NaN where it is unknown.
    """

    answered_by: Indices
    cost: Floats
    loss: Floats

    @property
    def guardian_share(self) -> float:
        """The share of rows that the Guardian answers."""
        return float((self.answered_by == GUARDIAN).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCertificate:
    """A calibrated cascade and its guarantee; saved like any other certificate, with kind "path".

    Attributes:
        status: "ok", or "always_defer" if these rows cannot keep the budget: the Guardian answers everything.
        chain: the models in the order in which they are asked, with their path.
        models: the cheap models of the log that the chain was chosen among.
        guardian: the Guardian's name.
        position, u: where on the path to stop: an answer is given if its entry and its query's draw come before.
        alpha: the risk budget.
        n: rows that it was calibrated on.
        loss: "guardian_regret", or "net" (gains counted).
        loss_bound: the largest possible loss; grades lie in [0, 1].
        missing_guardian: how rows without a grade were counted.
        missing_rows: how many there were.
        rounded: whether losses other than 0, 1 and -1 were rounded by a draw.
        tuning: the rows that the chain was chosen on.
        empirical_risk: mean loss at the stop.
        regret: for the net loss, the mean loss with gains not counted; else None.
        spread: one standard deviation of the long-run loss of one certificate.
        cost: mean dollars per query at the stop.
        guardian_cost: mean dollars per query if the Guardian alone is asked.
        guardian_share: share of these rows that the Guardian answers.
        key_sha256: digest of the key behind the draws.
        identities: of the chain's models and the Guardian, by name, or "unbound".
        log_sha256: digest of the log's content.
        version, created, guarantee, looked_at, secret_id, signature, key: as in `Certificate`.
    """

    kind: Literal["path"] = KIND
    schema: int = PATH_SCHEMA
    status: Literal["ok", "always_defer"]
    chain: ModelChain
    models: tuple[str, ...]
    guardian: str
    position: float | None
    u: float | None
    alpha: float
    n: int
    loss: LossName
    loss_bound: float = 1.0
    missing_guardian: MissingGuardian | None
    missing_rows: int
    rounded: bool
    tuning: ChainTuning
    empirical_risk: float
    regret: float | None
    spread: float
    cost: float
    guardian_cost: float
    guardian_share: float
    key_sha256: str
    identities: dict[str, Any] | Literal["unbound"]
    log_sha256: str
    version: str
    created: str
    guarantee: str
    looked_at: str | None = None
    secret_id: str | None = None
    signature: str | None = None
    key: bytes | None = field(default=None, repr=False, compare=False)

    @classmethod
    def load(
        cls, path: str | Path, *, key: bytes | None = None, secret: ProjectSecret | None = None
    ) -> "PathCertificate":
        """Read a certificate of a cascade from a file; arguments and errors are those of `Certificate.load`."""
        document = read_document(Path(path))
        certificate = cls.from_dict(document, key=key, source=str(path))
        if secret is None:
            return certificate
        certificate.check_signature(secret, source=str(path))
        return certificate.with_key_of(secret)

    @classmethod
    def from_dict(cls, document: Any, *, key: bytes | None = None, source: str = "certificate") -> "PathCertificate":
        """Build a certificate from its JSON document and check that its fields are consistent."""
        content = as_object(document)
        if content.get("kind") != KIND or content.get("schema") != PATH_SCHEMA:
            raise CertificateError(
                f"{source}: is not the certificate of a cascade that this release reads (kind {content.get('kind')!r:.40}, "
                f"schema {content.get('schema')!r:.40}); calibrate again with --path"
            )
        unknown = set(content) - ({f.name for f in fields(cls)} - {"key"})
        if unknown:
            raise CertificateError(f"{source}: unknown field {min(unknown)!r}; calibrate again")
        try:
            certificate = msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise CertificateError(f"{source}: {error}; calibrate again") from error
        _refuse_contradictions(certificate, source)
        return certificate if key is None else certificate.with_key(key)

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as a JSON document, without the key."""
        document = asdict(self)
        del document["key"]
        return document

    def save(self, path: str | Path) -> None:
        """Write certificate.json; the key is not part of it."""
        write_document(path, self.to_dict())

    @property
    def signed(self) -> bool:
        """Whether there is a signature."""
        return self.signature is not None

    def sign(self, secret: ProjectSecret) -> "PathCertificate":
        """Return the certificate signed with the project's secret."""
        unsigned = replace(self, secret_id=secret.id, signature=None)
        return replace(unsigned, signature=secret.sign(unsigned._canonical()))

    def check_signature(self, secret: ProjectSecret, *, source: str = "certificate") -> None:
        """Check that this certificate is as it was signed.

        Raises:
            CertificateError: it is unsigned, was changed, or was signed with another secret.
        """
        content = replace(self, signature=None)._canonical()
        check_signature(content, self.signature, secret, signed_with=self.secret_id, source=source)

    def _canonical(self) -> bytes:
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def stop(self) -> PathStop | None:
        """Where the path stops; None if the Guardian answers everything."""
        return None if self.position is None or self.u is None else PathStop(self.position, self.u)

    def stops(self, confidences: Sequence[float | None], answers: Sequence[str | None], *, id: str) -> bool:
        """Tell whether the answer of the model that was asked last is given.

        Args:
            confidences: of the models asked so far, in the chain's order; None where one failed.
            answers: their answers as text.
            id: the query's id, fixed before any answer.
        """
        stop = self.stop
        if stop is None:
            return False
        entry = self.chain.entry(confidences, answers)
        return path_choice(np.array([[entry]]), np.array([draw(self.secret(), id)]), stop).tolist() == [0]

    def apply(self, log: CascadeLog) -> CascadeDecisions:
        """Decide every row of a log, which needs the columns of the chain's models."""
        places = log.columns_of(self.chain.models)
        key = self.secret()
        u = np.array([draw(key, id) for id in log.id.tolist()])
        entries = self.chain.entries(log.confidence[:, places], log.answer[:, places])
        chosen, rows = path_choice(entries, u, self.stop), np.arange(len(log))
        losses = np.column_stack([stop_losses(log, places, self.loss, "worst_case"), np.zeros(len(log))])
        return CascadeDecisions(
            answered_by=chosen, cost=asked_costs(log, places)[rows, chosen], loss=losses[rows, chosen]
        )

    def with_key_of(self, secret: ProjectSecret) -> "PathCertificate":
        """Return the certificate with the key behind its draws, if that is derived from the project's secret."""
        return self if self.key is not None else replace(self, key=secret.find_boundary_key(self.key_sha256))

    def with_key(self, key: bytes) -> "PathCertificate":
        """Return the certificate with its key.

        Raises:
            CertificateError: it is another one's.
        """
        if not hmac.compare_digest(hashlib.sha256(key).hexdigest(), self.key_sha256):
            raise CertificateError("the key is not the one this certificate was made with; use the project's secret")
        return replace(self, key=key)

    def with_looks(self, text: str) -> "PathCertificate":
        """Return the certificate with what is known of earlier looks at its rows, in words."""
        return replace(self, looked_at=text)

    def secret(self) -> bytes:
        """Return the key; raise a CertificateError that says how to provide it if there is none."""
        if self.key is None:
            raise CertificateError(
                "a cascade needs the key behind its draws: PathCertificate.load(path, secret=ProjectSecret.find())"
            )
        return self.key

    @property
    def summary(self) -> str:
        """The guarantee in two lines; `guarantee` is the whole."""
        return path_summary(self.chain.models, self.guardian, self.alpha, self.n, self.loss, status=self.status)

    @property
    def advice(self) -> str | None:
        """What the estimates say about pairs and longer chains; None if there was nothing to choose."""
        pairs = [one for one in self.tuning.estimates if len(one.models) == 1]
        chains = [one for one in self.tuning.estimates if len(one.models) > 1]
        if len(pairs) < 2 or not chains:
            return None
        best, usual, chain = pairs[0], pairs[len(pairs) // 2], chains[0]
        expected = (
            f"before the Guardian, {best.models[0]} alone is expected to take {100 * best.cost:.0f} % of the Guardian's "
            f"cost, {usual.models[0]} alone {100 * usual.cost:.0f} %, and the best longer chain, "
            f"{chain_text(chain.models)}, {100 * chain.cost:.0f} %"
        )
        if usual.cost - best.cost > best.cost - chain.cost:
            return f"the right pair matters more than a longer chain: {expected}"
        return f"a longer chain pays: {expected}"

    def facts(self) -> list[tuple[str, str]]:
        """Return what matters most as name and value pairs, for people."""
        chosen = "as given" if self.tuning.fixed else f"chosen among {len(self.tuning.estimates)}"
        facts = [
            (
                "chain",
                f"{chain_text((*self.chain.models, self.guardian))}  ({chosen}, on {self.tuning.rows} other rows)",
            ),
            (
                "risk budget",
                f"alpha {as_written(self.alpha)}, loss {self.loss}, {self.n} rows to calibrate on",
            ),
        ]
        if self.position is not None and self.u is not None:
            facts.append(("stop", f"position {self.position:.9g} of the path, there draws below {self.u:.6f}"))
            gross = "" if self.regret is None else f" (with gains not counted {self.regret:.4f})"
            facts.append(("on these rows", f"loss {self.empirical_risk:.4f}{gross}"))
        relative = self.cost / self.guardian_cost if self.guardian_cost else 1.0
        facts.append(
            (
                "cost",
                f"{relative:.3f} of the Guardian's alone (${1000 * self.cost:.4g} instead of "
                f"${1000 * self.guardian_cost:.4g} per 1000 queries); the Guardian answers "
                f"{100 * self.guardian_share:.1f} %",
            )
        )
        if self.missing_rows:
            facts.append(("missing grades", f"in {self.missing_rows} rows, counted as the largest loss"))
        if self.looked_at is not None:
            facts.append(("looked at before", self.looked_at))
        return facts if self.advice is None else [*facts, ("on the tuning rows", self.advice)]


def is_path_document(document: Any) -> bool:
    """Tell whether a JSON document is the certificate of a cascade."""
    return as_object(document).get("kind") == KIND


def worded_path(certificate: PathCertificate) -> str:
    """Return the guarantee in the words that the fields of a certificate imply."""
    return path_guarantee_text(
        status=certificate.status,
        models=certificate.chain.models,
        guardian=certificate.guardian,
        alpha=certificate.alpha,
        n=certificate.n,
        tuning_rows=certificate.tuning.rows,
        loss=certificate.loss,
        rounded=certificate.rounded,
        missing_guardian=certificate.missing_guardian,
        spread=certificate.spread,
        regret=certificate.regret,
    )


def _refuse_contradictions(certificate: PathCertificate, source: str) -> None:
    """Reject a certificate whose fields contradict each other, as far as that shows without its log."""
    chain, stages = certificate.chain, len(certificate.chain.models)
    deferring = certificate.status == "always_defer"
    corners = np.array(chain.corners, dtype=np.float64) if _rectangular(chain.corners, stages) else None
    learned = bool(chain.corners)
    wrong = {
        "chain": stages == 0
        or len(set(chain.models)) < stages
        or certificate.guardian in chain.models
        or learned != (stages > 1)
        or len(chain.coefficients) != (stages if learned else 0)
        or any(len(one) != 2 + 3 * stage for stage, one in enumerate(chain.coefficients))
        or (learned and (corners is None or bool((np.diff(corners, axis=0) < 0).any() or (corners[0] != 0).any()))),
        "models": not set(chain.models) <= set(certificate.models),
        "position": (certificate.position is None) != deferring or not 0 <= (certificate.position or 0.0) <= chain.end,
        "u": (certificate.u is None) != deferring or not 0 <= (certificate.u or 0.0) < 1,
        "alpha": not 0 < certificate.alpha < certificate.loss_bound,
        "loss_bound": certificate.loss_bound != 1,
        "n": certificate.n < 1,
        "tuning": certificate.tuning.rows < 1,
        "regret": (certificate.regret is None) != (certificate.loss != "net"),
        "empirical_risk": not -1 <= certificate.empirical_risk <= 1,
        "guarantee": certificate.guarantee != worded_path(certificate),
    }
    for name, bad in wrong.items():
        if bad:
            value = getattr(certificate, name)
            raise CertificateError(f"{source}: {name} {value!r:.80} contradicts the rest; calibrate again")


def _rectangular(corners: tuple[tuple[float, ...], ...], stages: int) -> bool:
    return all(len(corner) == stages for corner in corners)


# --- calibrate_cascade ---


TUNING_SHARE = 0.4
_NOT_RECOMPUTED = frozenset({"schema", "version", "created", "key", "looked_at", "secret_id", "signature"})
_TOLERANCE = 1e-6
"""Between two fits of the same rows on different machines; positions are then recomputed with the stored fit."""


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
    key: bytes,
    loss: Literal["net"] | None = None,
    chain: Sequence[str] | None = None,
    tuning_share: float = TUNING_SHARE,
    seed: int = 0,
    missing_guardian: MissingGuardian | None = None,
) -> PathCertificate:
    """Choose the cheapest chain of models for a risk budget, and certify it on rows that it was not chosen on.

    Args:
        log: the recorded answers of all models.
        alpha: the risk budget, above 0 and below 1.
        key: as the other arguments, a field of `CascadeOptions`.
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
        key=key,
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
    if options.chain is None:
        estimates = estimate_chains(part, alpha=alpha, loss=loss, missing=missing, n=len(rest), seed=options.seed)
        models = estimates[0].models
    chain = fit_chain(part, models, loss, missing)
    return TunedChain(chain=chain, estimates=estimates, tuning=tuning, rest=rest)


def certify_chain(log: CascadeLog, alpha: Number, options: CascadeOptions, tuned: TunedChain) -> PathCertificate:
    """Calibrate a chain that was fitted elsewhere; the step that `verify` repeats."""
    rows, chain = log.select(tuned.rest), tuned.chain
    budget, n = check_alpha(alpha, Fraction(1)), len(tuned.rest)
    if Fraction(repr(float(budget))) != budget:
        raise OptionError(f"alpha must be a decimal of at most 15 digits; got {alpha!r}")
    places = rows.columns_of(chain.models)
    losses = stop_losses(rows, places, options.loss_name, options.missing_guardian)
    u, v = _draws(options.key, rows), _draws(hmac.digest(options.key, b"rounding v1", "sha256"), rows)
    entries = chain.entries(rows.confidence[:, places], rows.answer[:, places])
    stop = calibrate_path(entries, rounded_losses(losses, v), u, alpha=budget)
    chosen = path_choice(entries, u, stop)
    row_losses = np.column_stack([losses, np.zeros(n)])[np.arange(n), chosen]
    cost = asked_costs(rows, places)[np.arange(n), chosen]
    certificate = PathCertificate(
        status="always_defer" if stop is None else "ok",
        chain=chain,
        models=log.models,
        guardian=log.guardian,
        position=None if stop is None else min(stop.position, chain.end),
        u=None if stop is None else stop.u,
        alpha=float(budget),
        n=n,
        loss=options.loss_name,
        missing_guardian=options.missing_guardian,
        missing_rows=int((np.isnan(rows.guardian_grade) | np.isnan(rows.grade[:, places]).any(axis=1)).sum()),
        rounded=bool((losses != np.rint(losses)).any()),
        tuning=ChainTuning(
            rows=len(tuned.tuning),
            share=options.tuning_share,
            seed=options.seed,
            ids_sha256=_ids_digest(log, tuned.tuning),
            fixed=options.chain is not None,
            estimates=tuned.estimates,
        ),
        empirical_risk=float(row_losses.mean()),
        regret=float(np.maximum(row_losses, 0.0).mean()) if options.loss == "net" else None,
        spread=float(np.sqrt((row_losses**2).sum()) / n),
        cost=float(cost.mean()),
        guardian_cost=float(rows.guardian_cost.mean()),
        guardian_share=float((chosen < 0).mean()),
        key_sha256=hashlib.sha256(options.key).hexdigest(),
        identities=_identities(log, chain.models),
        log_sha256=log.sha256(),
        guarantee="",
        key=options.key,
        **_provenance(),
    )
    return replace(certificate, guarantee=worded_path(certificate))


def verify_cascade(certificate: PathCertificate, log: CascadeLog) -> Verification:
    """Recompute the certificate of a cascade from its log: the split, the choice, the path and the stop.

    Fitted numbers may differ in their last digits from one machine to another; the stop, and all that follows from it, is
    recomputed to the bit with those of the certificate.

    Args:
        certificate: the certificate, with its key.
        log: the log it was made from, with the models that it was chosen among.
    """
    tuning = certificate.tuning
    options = CascadeOptions(
        key=certificate.secret(),
        loss="net" if certificate.loss == "net" else None,
        chain=certificate.chain.models if tuning.fixed else None,
        tuning_share=tuning.share,
        seed=tuning.seed,
        missing_guardian=certificate.missing_guardian,
    )
    tuned = tune_chain(log, check_alpha(certificate.alpha, Fraction(1)), options)
    if _close(_numbers(tuned), _numbers(replace(tuned, chain=certificate.chain, estimates=tuning.estimates))):
        tuned = replace(tuned, chain=certificate.chain, estimates=tuning.estimates)
    recomputed = certify_chain(log, certificate.alpha, options, tuned)
    names = [f.name for f in fields(PathCertificate) if f.name not in _NOT_RECOMPUTED]
    pairs = {name: (getattr(certificate, name), getattr(recomputed, name)) for name in names}
    return Verification(differences={name: pair for name, pair in pairs.items() if pair[0] != pair[1]})


def _numbers(tuned: TunedChain) -> tuple[tuple[tuple[str, ...], ...], Floats]:
    """Return the names in a tuned chain and its estimates, and all the numbers."""
    names = (tuned.chain.models, *sorted(one.models for one in tuned.estimates))
    by_name = sorted(tuned.estimates, key=lambda one: one.models)
    numbers = [x for row in (*tuned.chain.coefficients, *tuned.chain.corners) for x in row]
    return names, np.array([*numbers, *(one.cost for one in by_name)])


def _close(one: tuple[object, Floats], other: tuple[object, Floats]) -> bool:
    same_shape = one[0] == other[0] and one[1].shape == other[1].shape
    return same_shape and bool(np.allclose(one[1], other[1], rtol=_TOLERANCE, atol=_TOLERANCE))


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


def _provenance() -> dict[str, Any]:
    return {
        "version": package_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
