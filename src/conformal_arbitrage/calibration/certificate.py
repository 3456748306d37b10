"""Certificate: a threshold that keeps a risk budget, as a file that can be compared, verified and applied.

Knows nothing of how the threshold was found, nor of live models, evaluation or the command line.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.calibration.decisions import Decisions, decide_rows, guardian_choice
from conformal_arbitrage.calibration.draws import draw, draws
from conformal_arbitrage.calibration.notebook import html_paragraph, html_table
from conformal_arbitrage.core.gaps import row_gaps, row_sight
from conformal_arbitrage.core.losses import GuardianSees
from conformal_arbitrage.errors import CertificateError, OptionError
from conformal_arbitrage.scorelog.files import replacing, writable, write_bytes, write_text
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Boundary, Decision, MissingGuardian, as_object

SCHEMA = 1
_LARGEST_KEY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A calibrated rule and its guarantee; saved as certificate.json.

    Attributes:
        status: "ok", or "always_defer" if no relaxation keeps the budget but deferring every query does.
        relaxation: actions within this gap of the top one are candidates; None for always_defer.
        boundary_u: for boundary="random", the largest draw that keeps an action exactly at the threshold gap.
        alpha: the risk budget.
        n: rows of the log.
        loss: "guardian_regret" or the name of the user's loss.
        loss_bound: the largest possible loss.
        guardian_sees: what a deferral shows the Guardian, and so what the loss was measured on.
        boundary: the rule exactly at the threshold gap.
        key_sha256: digest of the key behind the draws.
        grid: the step of the grid that the relaxation was restricted to.
        binarized: whether the loss was measured on the 0/1 Guardian.
        missing_guardian: how rows without a Guardian score were counted.
        missing_guardian_rows: how many there were.
        no_opinion_rows: rows in which the Primary had no opinion; they defer.
        score_digits: significant decimals of a Primary score, 12 or 6.
        empirical_risk: total loss / n at the relaxation.
        slack: alpha - (total + loss_bound) / (n + 1), the unspent part of the budget.
        envelope_excess: how far a user's loss was raised to make it monotone, as a mean over rows.
        columns: the log's columns that played Primary and Guardian.
        identities: the scorers that made the scores, or "unbound".
        log_sha256: digest of the log's content.
        version: the version of this package.
        created: time of creation, in UTC.
        guarantee: the guarantee in words.
        key: the secret behind the draws; never part of the saved certificate.
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
        """Read a certificate from a file.

        Args:
            path: the file.
            key: the secret saved beside it; needed to use a certificate with boundary="random".

        Raises:
            CertificateError: the file is missing, damaged or of another schema version, or the key is the wrong one.
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
        """Build a certificate from its JSON document and check that its fields are consistent.

        Args:
            document: what `to_dict` returned.
            key: as in `load`.
            source: where the document came from, for error messages.
        """
        content = as_object(document)
        schema = content.get("schema")
        if schema != SCHEMA:
            raise CertificateError(
                f"{source}: schema version {schema!r} is not {SCHEMA}, the one this release reads; calibrate again"
            )
        unknown = set(content) - ({f.name for f in fields(cls)} - {"key"})
        if unknown:
            raise CertificateError(f"{source}: unknown field {min(unknown)!r}; calibrate again")
        try:
            certificate = msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise CertificateError(f"{source}: {error}; calibrate again") from error
        certificate._check(source)
        return certificate if key is None else certificate._with_key(key)

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as a JSON document, without the key."""
        document = asdict(self)
        del document["key"]
        return document

    def save(self, path: str | Path) -> None:
        """Write certificate.json and, if there is a key, certificate.key beside it, readable by its owner only."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if self.key is None:
            write_text(path, text)
            return
        writable(path)
        self._keep_other_key(key_path(path))
        with replacing(key_path(path)) as draft:  # the key moves into place only after the certificate was written
            write_bytes(draft, self.key, private=True)
            write_text(path, text)

    def _keep_other_key(self, path: Path) -> None:
        if path.exists() and read_key(path) != self.key:
            raise CertificateError(
                f"{path}: holds the key of another certificate; choose another name or move that key elsewhere"
            )

    def candidates(self, primary_scores: object, *, id: str | None = None) -> NDArray[np.intp]:
        """Return the indices of one query's candidates: a single one is chosen, several go to the Guardian.

        Args:
            primary_scores: one number per action; None or NaN anywhere means no opinion, so every action is kept.
            id: the query's id, fixed before its scores; required for boundary="random".
        """
        return np.array(self.sight(primary_scores, id=id)[0], dtype=np.intp)

    def sight(self, primary_scores: object, *, id: str | None = None) -> tuple[list[int], float]:
        """Return one query's candidates as plain integers, and its margin."""
        u = 0.0 if self.boundary_u is None else self._draw(id)
        return row_sight(primary_scores, self.relaxation, digits=self.score_digits, u=u, boundary_u=self.boundary_u)

    def decide(self, primary_scores: object, *, guardian: object = None, id: str | None = None) -> Decision:
        """Decide one query: the Primary's top action if it stands alone, otherwise the Guardian's choice.

        `decided_by` says whose decision it is. If it is the Primary's, `action` is final. If it is the Guardian's,
        `action` is None unless its scores are passed as well: then it is the action that the Guardian scores highest
        among those a deferral shows (the candidates, or every action, as `guardian_sees` says), the first one among
        equals. `apply` decides the rows of a log in the same way.

        Args:
            primary_scores: one number per action; None or NaN anywhere means no opinion, so the query is deferred.
            guardian: the Guardian's scores, one per action of the whole menu. Only those of the actions shown are
                read, the others may be None; `action` stays None if one of those is None or NaN.
            id: the query's id, fixed before its scores; required for boundary="random".
        """
        kept, margin = self.sight(primary_scores, id=id)
        deferred = len(kept) > 1
        action: int | None = kept[0]
        if deferred:
            size = len(row_gaps(primary_scores, digits=self.score_digits))
            shown = kept if self.guardian_sees == "candidates" else range(size)
            action = None if guardian is None else guardian_choice(guardian, shown, size=size)
        return Decision(
            id=id,
            action=action,
            candidates=tuple(kept),
            decided_by="guardian" if deferred else "primary",
            margin=margin,
            relaxation=self.relaxation,
        )

    def apply(self, log: ScoreLog) -> Decisions:
        """Decide every row of a log."""
        u = None if self.boundary_u is None else draws(self.secret(), log)
        same_digits = replace(log, score_digits=self.score_digits)
        return decide_rows(
            same_digits,
            relaxation=self.relaxation,
            boundary_u=self.boundary_u,
            u=u,
            sees_all=self.guardian_sees != "candidates",
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return what matters most as name and value pairs, for people."""
        relaxation = "none: every query is deferred" if self.relaxation is None else f"{self.relaxation:.12g}"
        relaxation += "  (the Primary alone keeps this budget; only ties are deferred)" if self.relaxation == 0 else ""
        relaxation += f"  (at this gap, draws up to {self.boundary_u:.6f})" if self.boundary_u else ""
        facts = [
            ("relaxation", relaxation),
            ("rule", f"the Guardian sees {self.guardian_sees}; boundary {self.boundary}"),
            ("risk budget", f"alpha {self.alpha:g}, losses in [0, {self.loss_bound:g}], {self.n} rows"),
        ]
        if self.status == "ok":
            facts.append(("on this log", f"loss {self.empirical_risk:.4f}, unused budget {self.slack:.4f}"))
        if self.no_opinion_rows or self.missing_guardian_rows:
            missing = f"Primary in {self.no_opinion_rows} rows (deferred), Guardian in {self.missing_guardian_rows}"
            facts.append(("missing scores", missing))
        return facts

    def __repr__(self) -> str:
        shown = ("status", "relaxation", "alpha", "n", "loss", "guardian_sees", "boundary")
        return f"Certificate({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _repr_html_(self) -> str:
        loss = ("loss", self.loss)
        return html_table([("status", self.status), *self.facts(), loss]) + html_paragraph(self.guarantee)

    def _check(self, source: str) -> None:
        """Reject a document whose fields contradict each other."""
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
            raise CertificateError('this certificate has no key (boundary="include"); omit key=')
        if not hmac.compare_digest(hashlib.sha256(key).hexdigest(), self.key_sha256):
            raise CertificateError(
                "the key is not the one this certificate was made with; use the .key file saved beside it"
            )
        return replace(self, key=key)

    def secret(self) -> bytes:
        """Return the key; raise a CertificateError that says how to provide it if there is none."""
        if self.key is None:
            raise CertificateError(
                'boundary="random" needs the key saved beside the certificate: '
                "Certificate.load(path, key=read_key(KEY_FILE)) or --key-file KEY_FILE"
            )
        return self.key

    def _draw(self, id: str | None) -> float:
        if not isinstance(id, str) or not id:
            raise OptionError(f'boundary="random" needs the query\'s id, a non-empty text; pass id= (got {id!r})')
        return draw(self.secret(), id)


def _are_identities(identities: Mapping[str, Any]) -> bool:
    return {"primary", "guardian"} <= set(identities) and all(isinstance(one, dict) for one in identities.values())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def key_path(certificate: str | Path) -> Path:
    """Return where the key of a certificate is kept."""
    path = Path(certificate)
    return path.with_suffix(".key") if path.suffix == ".json" else path.with_name(path.name + ".key")


def read_key(path: str | Path) -> bytes:
    """Read a key from the file that `Certificate.save` wrote."""
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: the key cannot be read ({error.strerror})") from error
    if not 0 < len(key) <= _LARGEST_KEY:
        raise CertificateError(
            f"{path}: is not a key file ({len(key)} bytes); use the one saved beside the certificate"
        )
    return key
