"""PathCertificate: a calibrated cascade of several models under one promise, as a file.

Knows nothing of how the chain and its path were chosen, nor of live models or the command line.
"""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from conformal_arbitrage.calibration.chain_tuning import (
    ChainEstimate,
    LossName,
    ModelChain,
    asked_costs,
    stop_losses,
)
from conformal_arbitrage.calibration.documents import check_signature, read_document, write_document
from conformal_arbitrage.calibration.draws import draw
from conformal_arbitrage.calibration.path_guarantee import chain_text, path_guarantee_text, path_summary
from conformal_arbitrage.calibration.project_secret import ProjectSecret
from conformal_arbitrage.calibration.promises import as_written
from conformal_arbitrage.core.arrays import Floats, Indices
from conformal_arbitrage.core.paths import GUARDIAN, PathStop, path_choice
from conformal_arbitrage.errors import CertificateError
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.types import MissingGuardian, as_object

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
