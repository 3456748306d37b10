"""calibrate, Certificate, verify: a threshold that keeps a risk budget, as a file that can be diffed and checked.

Knows nothing of live models, evaluation or the command line.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.calibration.decisions import Decisions, decide_rows
from conformal_arbitrage.calibration.guarantee import guarantee_text
from conformal_arbitrage.calibration.options import REGRET, Terms, draw, draws
from conformal_arbitrage.core.gaps import row_candidates, row_gaps, row_margin
from conformal_arbitrage.core.losses import GuardianSees, Loss, Number, exact
from conformal_arbitrage.core.risk import RiskCurve, check_alpha
from conformal_arbitrage.errors import CertificateError, InfeasibleError, OptionError, ScoreLogError
from conformal_arbitrage.scorelog.files import replacing, writable, write_bytes, write_text
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Boundary, MissingGuardian

SCHEMA = 1
UNFIT = "unfit_for_calibration"
_LARGEST_KEY = 1024
_NOT_RECOMPUTED = frozenset({"schema", "version", "created", "key", "columns"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A calibrated rule and what it promises; saved as certificate.json.

    Attributes:
        status: "ok", or "always_defer" if no relaxation keeps the budget and deferring everything does.
        relaxation: actions within this gap of the top are candidates; None for always_defer.
        boundary_u: for boundary="random", up to which draw an action exactly at the gap is kept.
        alpha: the risk budget.
        n: rows of the log.
        loss: "guardian_regret" or the name of the user's loss.
        loss_bound: the largest possible loss.
        guardian_sees: what a deferral shows, and so what the loss was measured on.
        boundary: the rule exactly at the threshold gap.
        key_sha256: digest of the key behind the draws.
        grid: the step of the grid the relaxation was restricted to.
        binarized: whether the loss was measured on the 0/1 Guardian.
        missing_guardian: how rows without a Guardian score were counted.
        missing_guardian_rows: how many there were.
        no_opinion_rows: rows in which the Primary had no opinion; they defer.
        score_digits: significant decimals of a Primary score, 12 or 6.
        empirical_risk: total loss / n at the relaxation.
        slack: alpha - (total + loss_bound) / (n + 1): budget left unspent.
        envelope_excess: how far a user's loss was raised to make it monotone, mean over rows.
        columns: the log's columns that played Primary and Guardian.
        identities: who made the scores, or "unbound".
        log_sha256: digest of the log's content.
        version: of this package.
        created: when, in UTC.
        guarantee: the promise in words.
        key: the secret behind the draws; kept out of the certificate.
    """

    schema: int = SCHEMA
    status: Literal["ok", "always_defer"]
    relaxation: float | None
    boundary_u: float | None
    alpha: float
    n: int
    loss: str
    loss_bound: float
    guardian_sees: GuardianSees
    boundary: Boundary
    key_sha256: str | None
    grid: float | None
    binarized: bool
    missing_guardian: MissingGuardian | None
    missing_guardian_rows: int
    no_opinion_rows: int
    score_digits: Literal[6, 12]
    empirical_risk: float
    slack: float
    envelope_excess: float
    columns: dict[str, str]
    identities: dict[str, Any] | Literal["unbound"]
    log_sha256: str
    version: str
    created: str
    guarantee: str
    key: bytes | None = field(default=None, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path, *, key: bytes | None = None) -> "Certificate":
        """Read a certificate.

        Args:
            path: the file.
            key: the secret that was saved beside it; needed to use a boundary="random" rule.

        Raises:
            CertificateError: the file is absent, damaged, of another schema version, or the key is another one.
        """
        source = Path(path)
        try:
            document = json.loads(source.read_bytes(), parse_constant=_refuse_constant)
        except OSError as error:
            raise CertificateError(f"{source}: cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise CertificateError(f"{source}: is not JSON ({error}); calibrate again") from error
        return cls.from_dict(document, key=key, source=str(source))

    @classmethod
    def from_dict(cls, document: Any, *, key: bytes | None = None, source: str = "certificate") -> "Certificate":
        """A certificate from its JSON document, checked."""
        content = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
        schema = content.get("schema")
        if schema != SCHEMA:
            raise CertificateError(
                f"{source}: schema version {schema!r} is not {SCHEMA}, the one this release reads; calibrate again"
            )
        unknown = set(content) - ({f.name for f in fields(cls)} - {"key"})
        if unknown:
            raise CertificateError(f"{source}: unknown field {min(unknown)!r}; calibrate again")
        try:
            made = msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise CertificateError(f"{source}: {error}; calibrate again") from error
        made._check(source)
        return made if key is None else made._with_key(key)

    def to_dict(self) -> dict[str, Any]:
        """The certificate as a JSON document; the key is not part of it."""
        document = asdict(self)
        del document["key"]
        return document

    def save(self, path: str | Path) -> None:
        """Write certificate.json and, where there is a key, certificate.key beside it (readable by its owner only)."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if self.key is None:
            write_text(path, text)
            return
        writable(path)
        self._keep_other_key(key_path(path))
        with replacing(key_path(path)) as draft:  # takes its place only once the certificate has
            write_bytes(draft, self.key, private=True)
            write_text(path, text)

    def _keep_other_key(self, path: Path) -> None:
        if path.exists() and read_key(path) != self.key:
            raise CertificateError(
                f"{path}: holds the key of another certificate; give another name, or move that key away"
            )

    def candidates(self, primary_scores: object, *, id: str | None = None) -> NDArray[np.intp]:
        """Indices of the actions that stay in sight of one query: one alone is chosen, several go to the Guardian.

        Args:
            primary_scores: one number per action; None or NaN anywhere means no opinion, so all stay.
            id: the query's id, fixed before its scores; needed for boundary="random".
        """
        return np.array(self.sight(primary_scores, id=id)[0], dtype=np.intp)

    def sight(self, primary_scores: object, *, id: str | None = None) -> tuple[list[int], float]:
        """The candidates of one query as plain numbers, and how far the top action leads."""
        gap = row_gaps(primary_scores, digits=self.score_digits)
        u = 0.0 if self.boundary_u is None else self._draw(id)
        return row_candidates(gap, self.relaxation, u=u, boundary_u=self.boundary_u), row_margin(gap)

    def apply(self, log: ScoreLog) -> Decisions:
        """The rule on every row of a log."""
        u = None if self.boundary_u is None else draws(self.secret(), log)
        same = replace(log, score_digits=self.score_digits)
        return decide_rows(
            same,
            relaxation=self.relaxation,
            boundary_u=self.boundary_u,
            u=u,
            sees_all=self.guardian_sees != "candidates",
        )

    def _check(self, source: str) -> None:
        """Refuse a document whose parts contradict each other."""
        wrong = {
            "relaxation": (self.relaxation is None) != (self.status == "always_defer")
            or (self.relaxation is not None and not 0 <= self.relaxation < float("inf")),
            "alpha": not 0 < self.alpha < self.loss_bound < float("inf"),
            "boundary_u": (self.boundary_u is not None) != (self.boundary == "random" and self.status == "ok")
            or not 0 <= (self.boundary_u or 0.0) < 1,
            "n": self.n < 1,
            "columns": set(self.columns) != {"primary", "guardian"},
            "identities": self.identities != "unbound" and not _are_identities(self.identities),
            "key_sha256": (self.key_sha256 is not None) != (self.boundary == "random"),
        }
        for name, bad in wrong.items():
            if bad:
                value = getattr(self, name)
                raise CertificateError(f"{source}: {name} {value!r} contradicts the rest; calibrate again")

    def _with_key(self, key: bytes) -> "Certificate":
        if not isinstance(key, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CertificateError('key= takes bytes: read_key("certificate.key")')
        if self.key_sha256 is None:
            raise CertificateError('this certificate uses no key (boundary="include"); leave it out')
        if not hmac.compare_digest(hashlib.sha256(key).hexdigest(), self.key_sha256):
            raise CertificateError(
                "the key is not the one this certificate was made with; use the .key file saved beside it"
            )
        return replace(self, key=key)

    def secret(self) -> bytes:
        """The key, or an error that says how to give it."""
        if self.key is None:
            raise CertificateError(
                'boundary="random" needs the key saved beside the certificate: '
                "Certificate.load(path, key=read_key(KEY_FILE)) or --key-file KEY_FILE"
            )
        return self.key

    def _draw(self, id: str | None) -> float:
        if not isinstance(id, str) or not id:
            raise OptionError(f'boundary="random" needs the query\'s id, a text; pass id= (got {id!r})')
        return draw(self.secret(), id)


def _are_identities(found: Mapping[str, Any]) -> bool:
    return {"primary", "guardian"} <= set(found) and all(isinstance(one, dict) for one in found.values())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def key_path(certificate: str | Path) -> Path:
    """Where a certificate's key is kept."""
    path = Path(certificate)
    return path.with_suffix(".key") if path.suffix == ".json" else path.with_name(path.name + ".key")


def read_key(path: str | Path) -> bytes:
    """A key from the file that `Certificate.save` wrote: its bytes."""
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: the key cannot be read ({error.strerror})") from error
    if not 0 < len(key) <= _LARGEST_KEY:
        raise CertificateError(
            f"{path}: is not a key file ({len(key)} bytes); use the one saved beside the certificate"
        )
    return key


def calibrate(
    log: ScoreLog,
    alpha: Number,
    *,
    guardian_sees: GuardianSees = "candidates",
    boundary: Boundary = "include",
    loss_bound: Number | None = None,
    loss: Loss | None = None,
    key: bytes | None = None,
    grid: Number | None = None,
    missing_guardian: MissingGuardian | None = None,
) -> Certificate:
    """Find the smallest relaxation that keeps the risk budget: total loss + B <= alpha (n + 1), exactly.

    Args:
        log: the recorded scores.
        alpha: the risk budget, above 0 and below the bound. A float stands for the decimal its repr shows.
        guardian_sees: "candidates" (the paper), "all" (calibrated on its own loss), or "all-restricted-loss" (the
            paper's CA*).
        boundary: "include" keeps all actions exactly at the threshold gap (the paper); "random" keeps a share of them
            and so spends the whole budget.
        loss_bound: the largest possible loss; may be left out, and is then 1, if all Guardian scores lie in [0, 1].
        loss: a user's loss over (row, indices in sight); it is raised to its monotone envelope.
        key: secret bytes behind the draws of boundary="random"; drawn fresh unless given.
        grid: restrict the relaxation to 0, grid, ..., 1.
        missing_guardian: "worst_case" counts rows without a Guardian score as a loss of B unless everything is in sight.

    Raises:
        InfeasibleError: no relaxation keeps the budget, and a user's loss is not 0 with everything in sight.
        ScoreLogError: the log is marked as chosen by its scores.
    """
    if UNFIT in log.extra:
        raise ScoreLogError(
            f"{log.source}: holds rows that were chosen by their scores, which breaks exchangeability; export shadow and "
            "audited rows only (arbitrage records export --score-log)"
        )
    terms = Terms(
        guardian_sees=guardian_sees,
        boundary=boundary,
        loss_bound=loss_bound,
        loss=loss,
        grid=grid,
        missing_guardian=missing_guardian,
        key=secrets.token_bytes(32) if boundary == "random" and key is None else key,
    )
    return _calibrate(log, alpha, terms)


def _calibrate(log: ScoreLog, alpha: Number, terms: Terms) -> Certificate:
    curve = terms.curve(log)
    bound = curve.bound(terms.loss_bound)
    budget = check_alpha(alpha, bound)
    found = curve.search([alpha], terms.loss_bound)[0]
    if found is None and terms.loss is not None and curve.in_full_sight > 0:
        least = curve.in_full_sight / 10**curve.tick_digits / curve.n
        raise InfeasibleError(
            f"no relaxation keeps alpha {float(budget):g} on {curve.n} rows, and the loss is not 0 with every action in "
            f"sight (mean {least:.4g}); give a larger alpha{' or more rows' if least < budget else ''}"
        )
    total = Fraction(0) if found is None else curve.exact_total(found)
    promised: dict[str, Any] = {
        "status": "always_defer" if found is None else "ok",
        "alpha": _stored(budget, alpha, "alpha"),
        "n": curve.n,
        "loss": terms.loss_name,
        "loss_bound": _stored(bound, terms.loss_bound, "loss_bound"),
        "guardian_sees": terms.guardian_sees,
        "boundary": terms.boundary,
        "binarized": log.binary is not None,
        "missing_guardian": terms.missing_guardian,
    }
    return Certificate(
        **promised,
        **_found(curve, found),
        key_sha256=None if terms.key is None else hashlib.sha256(terms.key).hexdigest(),
        grid=None if terms.grid is None else _stored(exact(terms.grid, name="grid"), terms.grid, "grid"),
        empirical_risk=float(total / curve.n),
        slack=float(budget - (total + bound) / (curve.n + 1)),
        envelope_excess=curve.envelope_excess,
        **_provenance(log),
        guarantee=guarantee_text(**promised),
        key=terms.key,
    )


def _found(curve: RiskCurve, index: int | None) -> dict[str, Any]:
    if index is None:
        return {"relaxation": None, "boundary_u": None}
    u = None if curve.boundary_u is None else float(curve.boundary_u[index])
    return {"relaxation": float(curve.breakpoints[index]), "boundary_u": u}


def _provenance(log: ScoreLog) -> dict[str, Any]:
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


def rows_needed(alpha: Number, loss_bound: Number = 1) -> int:
    """The fewest rows at which a budget can be kept without always deferring: ceil(B / alpha) - 1."""
    bound = exact(loss_bound, name="loss_bound")
    return -int(-bound // check_alpha(alpha, bound)) - 1


def _stored(value: Fraction, given: object, name: str) -> float:
    """A number as the certificate stores it: a float that reads back as the same decimal."""
    number = float(value)
    if Fraction(repr(number)) != value:
        raise OptionError(f"{name} must be a decimal of at most 15 digits; got {given!r}")
    return number


def _identities(log: ScoreLog) -> dict[str, Any] | Literal["unbound"]:
    known: Mapping[str, Any] = log.identities or {}
    if not all(column in known for column in log.columns):
        return "unbound"
    found = {role: known[column] for role, column in zip(("primary", "guardian"), log.columns, strict=True)}
    return found | ({"grader": known["grader"]} if "grader" in known else {})


def verify(certificate: Certificate, log: ScoreLog, *, loss: Loss | None = None) -> dict[str, tuple[Any, Any]]:
    """Recompute a certificate from its log, to the bit.

    Args:
        certificate: the certificate, with its key if it has one.
        log: the log it was made from; binarised here where the certificate says so.
        loss: the user's loss, if the certificate names one.

    Returns:
        What differs: field -> (in the certificate, recomputed). Empty if it holds.
    """
    if (loss is None) != (certificate.loss == REGRET):
        raise OptionError(
            f"this certificate's loss is '{certificate.loss}'; from Python: verify(certificate, log, loss=THAT_FUNCTION)"
        )
    terms = Terms(
        guardian_sees=certificate.guardian_sees,
        boundary=certificate.boundary,
        loss_bound=certificate.loss_bound,
        loss=loss,
        grid=certificate.grid,
        missing_guardian=certificate.missing_guardian,
        key=certificate.secret() if certificate.boundary == "random" else None,
    )
    rebinarize = certificate.binarized and log.binary is None
    again = _calibrate(log.binarized() if rebinarize else log, certificate.alpha, terms)
    names = [f.name for f in fields(Certificate) if f.name not in _NOT_RECOMPUTED]
    pairs = {name: (getattr(certificate, name), getattr(again, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
