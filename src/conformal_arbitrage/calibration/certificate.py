"""Certificate: a threshold that keeps a risk budget, as a file that can be compared, verified and applied.

Knows nothing of how the threshold was found, nor of live models, evaluation or the command line.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from sys import maxsize
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.calibration.ancestry import Ancestry
from conformal_arbitrage.calibration.combinations import refusal
from conformal_arbitrage.calibration.consistency import refuse_contradictions, worded
from conformal_arbitrage.calibration.decisions import (
    Decisions,
    decide_by_group,
    decide_by_score,
    decide_rows,
    guardian_choice,
)
from conformal_arbitrage.calibration.documents import (
    SCHEMA,
    check_signature,
    convert_document,
    joined_arrays,
    read_document,
    signed_bytes,
    split_arrays,
    write_document,
)
from conformal_arbitrage.calibration.draws import draw, drawing, draws
from conformal_arbitrage.calibration.facts import certificate_facts, certificate_summary
from conformal_arbitrage.calibration.learned_score import (
    LearnedScore,
    LearnedTerms,
    read_score,
    read_sidecar,
    sidecar_path,
)
from conformal_arbitrage.calibration.notebook import html_paragraph, html_rule, html_table
from conformal_arbitrage.calibration.project_secret import ProjectSecret
from conformal_arbitrage.calibration.stops import DialStop, GroupThreshold, Membership, group_threshold, lower_stop
from conformal_arbitrage.core.gaps import SINGLE_DIGITS, as_row, is_single, row_gaps, row_margin, row_sight
from conformal_arbitrage.core.losses import GuardianSees
from conformal_arbitrage.errors import CertificateError, OptionError
from conformal_arbitrage.scorelog.files import write_bytes
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Boundary, Decision, LearnedUse, MissingGuardian

Status = Literal["ok", "always_defer", "by_group", "learned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A calibrated rule and its guarantee; saved as certificate.json.

    Attributes:
        status: "ok"; "always_defer" if no relaxation keeps the budget but deferring every query does; "by_group" if
            each group has a threshold of its own; "learned" if a learned score decides.
        relaxation: actions within this gap of the top one are candidates; None to defer every query, as a certificate
            by groups does with those of an unknown group, or if a learned score decides.
        boundary_u: for boundary="random", the largest draw that keeps an action exactly at the threshold gap.
        alpha: the risk budget.
        n: rows of the log.
        loss: "guardian_regret", "net" (gains counted) or the name of the user's loss.
        loss_bound: the largest possible loss.
        full_sight_loss: the largest loss with every action in sight, as declared; 0 for the Guardian regret.
        guardian_sees: what a deferral shows the Guardian, and so what the loss was measured on.
        boundary: the rule exactly at the threshold gap.
        key_sha256: digest of the key behind the draws.
        grid: the step of the grid that the relaxation was restricted to.
        binarized: whether the loss was measured on the 0/1 Guardian.
        router: whether the log has the router form: two graded answers and a confidence.
        missing_guardian: how rows without a Guardian score were counted.
        missing_guardian_rows: how many there were; a binarised row whose right answer is unknown is one of them.
        no_opinion_rows: rows in which the Primary had no opinion; they defer.
        score_digits: significant decimals of a Primary score, 12 or 6.
        fewest_actions: the smallest menu of the log; None if not recorded (schema 1).
        most_actions: the largest.
        empirical_risk: total loss / n at the relaxation; of a learned score, with each row decided by the others.
        slack: alpha - (total + loss_bound) / (n + 1), the unspent part of the budget; with clusters of at most M rows,
            alpha - (total + M loss_bound) / (n + M); with a confidence, by groups or learned, alpha - total / n.
        envelope_excess: how far a user's loss was raised to make it monotone, as a mean over rows.
        columns: the log's columns that played Primary and Guardian.
        identities: the scorers that made the scores, or "unbound".
        log_sha256: digest of the log's content.
        version: the version of this package.
        created: time of creation, in UTC.
        guarantee: the guarantee in words.
        cluster: the column that says which rows belong together; None if rows are exchangeable one by one.
        clusters: number of clusters.
        max_cluster_size: the most rows that any cluster may ever have, as declared.
        regret: for loss="net", the mean loss on the log with gains not counted; else None.
        spread: for loss="net", the standard deviation of the long-run loss of one certificate; else None.
        confidence: the probability with which the long-run loss of this one certificate is at most alpha (of a dial: all
            stops, by groups: in all groups); None if the promise is an average over calibrations.
        zero_one: true if every loss is declared to be 0 or the bound; else None.
        dial: the stops among which alpha may be chosen after looking; None unless it is a dial.
        by: the column that says which group a row belongs to; None without groups.
        groups: the threshold of each group; None without groups.
        small_groups: "merge" if small groups share one; else None.
        unit: "session" if a row is a whole session and the guarantee is about the next one; None if a row is a query.
        score: "auto" or "learned" if the score is learned; None if it is the margin.
        learned: what the score is learned from; None unless a learned score decides.
        looked_at: what is known of earlier looks at these rows, in words; None if there was none.
        ancestry: where it stands in a chain of certificates; None if it begins one. If it was tightened, `relaxation` and
            `boundary_u` are larger than the log gave, and everything else is as the log gave it.
        margin_quantiles: thresholds that defer 0, 0.1 %, ..., 100 % of the rows, for a guard; None if they are not kept.
        secret_id: the fingerprint of the project secret that signed it, and behind the draws; None if unsigned.
        signature: of everything else, with the project's secret; None if unsigned, as all of schema 1 are.
        key: the secret behind the draws; never part of the saved certificate.
        fit: the learned score itself; saved in a file beside the certificate, whose digest `learned` holds.
    """

    schema: int = SCHEMA
    status: Status
    relaxation: float | None
    boundary_u: float | None
    alpha: float
    n: int
    loss: str
    loss_bound: float
    full_sight_loss: float = 0.0
    guardian_sees: GuardianSees
    boundary: Boundary
    key_sha256: str | None
    grid: float | None
    binarized: bool
    router: bool = False
    missing_guardian: MissingGuardian | None
    missing_guardian_rows: int
    no_opinion_rows: int
    score_digits: Literal[6, 12]
    fewest_actions: int | None = None
    most_actions: int | None = None
    empirical_risk: float
    slack: float
    envelope_excess: float
    columns: dict[str, str]
    identities: dict[str, Any] | Literal["unbound"]
    log_sha256: str
    version: str
    created: str
    guarantee: str
    cluster: str | None = None
    clusters: int | None = None
    max_cluster_size: int | None = None
    regret: float | None = None
    spread: float | None = None
    confidence: float | None = None
    zero_one: Literal[True] | None = None
    dial: tuple[DialStop, ...] | None = None
    by: str | None = None
    groups: dict[str, GroupThreshold] | None = None
    small_groups: Literal["merge"] | None = None
    unit: Literal["session"] | None = None
    score: Literal["auto", "learned"] | None = None
    learned: LearnedTerms | None = None
    looked_at: str | None = None
    ancestry: Ancestry | None = None
    margin_quantiles: str | None = None
    secret_id: str | None = None
    signature: str | None = None
    key: bytes | None = field(default=None, repr=False, compare=False)
    fit: LearnedScore | None = field(default=None, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path, *, key: bytes | None = None, secret: ProjectSecret | None = None) -> "Certificate":
        """Read a certificate from a file.

        Args:
            path: the file.
            key: the key behind its draws; needed to use a certificate with boundary="random" unless the project's
                secret, which it is derived from, is given.
            secret: the project's secret; the signature is verified with it.

        Raises:
            CertificateError: the file is missing, damaged, contradictory or of another schema version; the key or the
                signature is wrong; or the file with the arrays of a learned score is absent or altered.
        """
        source = Path(path)
        certificate = cls.from_dict(read_document(source), key=key, source=str(source))
        if certificate.learned is not None and certificate.fit is None:
            certificate = certificate.with_arrays(read_sidecar(source), source=str(sidecar_path(source)))
        if secret is None:
            return certificate
        certificate.check_signature(secret, source=str(source))
        return certificate.with_key_of(secret)

    @classmethod
    def from_dict(cls, document: Any, *, key: bytes | None = None, source: str = "certificate") -> "Certificate":
        """Build a certificate from its JSON document and check that its fields are consistent.

        Args:
            document: what `to_dict` returned.
            key: as in `load`.
            source: where the document came from, for error messages.
        """
        content, arrays = split_arrays(document, source)
        certificate = convert_document(content, cls, source)
        refuse_contradictions(certificate, source)
        if arrays is not None:
            certificate = certificate.with_arrays(arrays, source=source)
        return certificate if key is None else certificate._with_key(key)

    def to_dict(self, *, with_arrays: bool = False) -> dict[str, Any]:
        """Return the certificate as a JSON document, without the key.

        Args:
            with_arrays: put the arrays of a learned score into it, so that one document holds everything.
        """
        document = asdict(replace(self, key=None, fit=None))
        del document["key"], document["fit"]
        return document if self.fit is None or not with_arrays else joined_arrays(document, self.fit.packed)

    def save(self, path: str | Path) -> None:
        """Write certificate.json and, for a learned score, certificate.npz beside it; the key is not part of either."""
        if self.fit is not None:
            write_bytes(sidecar_path(path), self.fit.packed)
        write_document(path, self.to_dict())

    def with_arrays(self, packed: bytes, *, source: str = "certificate") -> "Certificate":
        """Return the certificate with its learned score, from the content of the file beside it.

        Raises:
            CertificateError: the arrays are not those that it was made with, or it has no learned score.
        """
        return replace(self, fit=read_score(self, packed, source))

    @property
    def signed(self) -> bool:
        """Whether there is a signature; `load(path, secret=...)` and `check_signature` verify it."""
        return self.signature is not None

    def sign(self, secret: ProjectSecret) -> "Certificate":
        """Return the certificate signed with the project's secret."""
        unsigned = replace(self, schema=SCHEMA, secret_id=secret.id, signature=None)
        return replace(unsigned, signature=secret.sign(signed_bytes(unsigned.to_dict())))

    def check_signature(self, secret: ProjectSecret, *, source: str = "certificate") -> None:
        """Check that this certificate is as it was signed.

        Raises:
            CertificateError: it is unsigned, was changed, or was signed with another secret.
        """
        content = signed_bytes(replace(self, signature=None).to_dict())
        check_signature(content, self.signature, secret, signed_with=self.secret_id, source=source)

    def candidates(
        self,
        primary_scores: object,
        *,
        id: str | None = None,
        group: Membership = None,
        tokens: float | None = None,
        text: str | None = None,
    ) -> NDArray[np.intp]:
        """Return the indices of one query's candidates: a single one is chosen, several go to the Guardian.

        Args:
            primary_scores: one number per action; None or NaN anywhere means no opinion, so every action is kept.
            id: the query's id, fixed before its scores; required for boundary="random".
            group, tokens, text: as in `decide`.
        """
        return np.array(self.sight(primary_scores, id=id, group=group, tokens=tokens, text=text)[0], dtype=np.intp)

    def sight(
        self,
        primary_scores: object,
        *,
        id: str | None = None,
        group: Membership = None,
        tokens: float | None = None,
        text: str | None = None,
    ) -> tuple[list[int], float, LearnedUse | None]:
        """Return one query's candidates as plain integers, its margin, and how a learned score decided if there is one."""
        plain = _are_floats(primary_scores)
        self._refuse_single(not plain and is_single(primary_scores))
        if self.learned is not None:
            scores: Any = primary_scores if plain else as_row(primary_scores)[:, 0].tolist()
            return self._learned_sight(scores, id, group, tokens, text)
        relaxation, boundary_u = self.threshold(group)
        u = 0.0 if boundary_u is None else self._draw(id)
        return *row_sight(primary_scores, relaxation, digits=self.score_digits, u=u, boundary_u=boundary_u), None

    def _learned_sight(
        self, scores: Sequence[float], id: str | None, group: Membership, tokens: float | None, text: str | None
    ) -> tuple[list[int], float, LearnedUse | None]:
        if group is not None and not isinstance(group, str):
            raise OptionError(f"several groups and learned do not go together: {refusal('several groups', 'learned')}")
        gaps = row_gaps(scores, digits=self.score_digits)
        stands, use = self.learned_score().decide(scores, gaps, self._draw(id), group, tokens, text)
        return [gaps.index(0.0)] if stands else list(range(len(gaps))), row_margin(gaps), use

    def uncovered_features(self, use: LearnedUse | None) -> str | None:
        """Return why a decision is not covered: it lacks a feature that every logged row has; None if it is."""
        if use is None or self.learned is None:
            return None
        lacking = [name for name in use.missing if not self.learned.missing[name]]
        return f"the learned score lacks the query's {' and '.join(lacking)}" if lacking else None

    def learned_score(self) -> LearnedScore:
        """Return the learned score; raise a CertificateError that says how to provide it if there is none."""
        if self.fit is None:
            raise CertificateError(
                "the arrays of the learned score are missing: Certificate.load(path) reads them from the .npz file beside "
                "the certificate"
            )
        return self.fit

    def threshold(self, group: Membership = None) -> tuple[float | None, float | None]:
        """Return the relaxation and the boundary draw for a query; of several groups the largest one's."""
        return (self.relaxation, self.boundary_u) if self.groups is None else group_threshold(self.groups, group)

    def decide(
        self,
        primary_scores: object,
        *,
        guardian: object = None,
        id: str | None = None,
        group: Membership = None,
        tokens: float | None = None,
        text: str | None = None,
    ) -> Decision:
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
            group: the query's group or groups, for a certificate by groups; one that is not known defers. For a learned
                score the group that is one of its features.
            tokens: the Primary's output tokens, if they are a feature of the learned score.
            text: the question as plain text, if it is a feature of the learned score.
        """
        candidates, margin, use = self.sight(primary_scores, id=id, group=group, tokens=tokens, text=text)
        deferred = len(candidates) > 1
        action: int | None = candidates[0]
        if deferred:
            size = len(row_gaps(primary_scores, digits=self.score_digits))
            shown = candidates if self.guardian_sees == "candidates" else range(size)
            action = None if guardian is None else guardian_choice(guardian, shown, size=size)
        return Decision(
            id=id,
            action=action,
            candidates=tuple(candidates),
            decided_by="guardian" if deferred else "primary",
            margin=margin,
            relaxation=self.threshold(group)[0],
            learned=use,
        )

    def apply(self, log: ScoreLog) -> Decisions:
        """Decide every row of a log."""
        self._refuse_single(log.score_digits < self.score_digits)
        same_digits, sees_all = replace(log, score_digits=self.score_digits), self.guardian_sees != "candidates"
        if self.groups is not None and self.by is not None:
            u = drawing(self.secret(), log) if self.boundary == "random" else None
            return decide_by_group(same_digits, self.groups, by=self.by, u=u, sees_all=sees_all)
        if self.learned is not None:
            return decide_by_score(same_digits, self.learned_score(), draws(self.secret(), log))
        u = None if self.boundary_u is None else drawing(self.secret(), log)
        return decide_rows(same_digits, relaxation=self.relaxation, boundary_u=self.boundary_u, u=u, sees_all=sees_all)

    def choose(self, alpha: float) -> "Certificate":
        """Return a dial set to another budget, the largest stop that does not exceed it; unsigned.

        Raises:
            CertificateError: this certificate has no dial.
            OptionError: alpha lies below the lowest stop.
        """
        if self.dial is None:
            raise CertificateError(
                "this certificate has no dial, so its alpha was fixed before calibration; calibrate with dial=True (--dial)"
            )
        stop = lower_stop(self.dial, alpha)
        chosen = replace(
            self,
            status="always_defer" if stop.relaxation is None else "ok",
            alpha=stop.alpha,
            relaxation=stop.relaxation,
            boundary_u=stop.boundary_u,
            empirical_risk=stop.empirical_risk,
            slack=stop.alpha - stop.empirical_risk,
            secret_id=None,
            signature=None,
        )
        return replace(chosen, guarantee=worded(chosen))

    @property
    def promise(self) -> Literal["crc", "high_probability"]:
        """What kind of guarantee it is: on average over calibrations, or of this one with high probability."""
        return "crc" if self.confidence is None else "high_probability"

    def _refuse_single(self, single: bool) -> None:
        """Refuse scores of less precision than the certificate's: equal scores would no longer have equal gaps."""
        if single and self.score_digits > SINGLE_DIGITS:
            raise OptionError(
                f"the scores are single precision, and the certificate was made from double precision ({self.score_digits} "
                "digits); compute them in float64, or calibrate again on a log in single precision"
            )

    def facts(self) -> list[tuple[str, str]]:
        """Return what matters most as name and value pairs, for people."""
        return certificate_facts(self)

    def with_looks(self, text: str) -> "Certificate":
        """Return the certificate with what is known of earlier looks at its rows, in words."""
        return replace(self, looked_at=text)

    def __repr__(self) -> str:
        shown = ("status", "relaxation", "alpha", "n", "loss", "guardian_sees", "boundary")
        return f"Certificate({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _repr_html_(self) -> str:
        rest = html_rule(self.relaxation, of="confidence" if self.router else "lead") + html_paragraph(self.guarantee)
        return html_table([("status", self.status), *self.facts(), ("loss", self.loss)]) + rest

    @property
    def sizes(self) -> range:
        """The sizes of menus that the guarantee covers; all, if the certificate does not record them (schema 1)."""
        if self.fewest_actions is None or self.most_actions is None:
            return range(maxsize)
        return range(self.fewest_actions, self.most_actions + 1)

    def outside(self, size: int) -> str | None:
        """Return why a menu of this size has no guarantee; None if it has one."""
        if size in self.sizes:
            return None
        covered = f"{self.fewest_actions} to {self.most_actions}"
        return f"the query has {size} action{'' if size == 1 else 's'}; those of the certificate's log have {covered}"

    @property
    def summary(self) -> str:
        """The guarantee in two lines; `guarantee` is the whole."""
        return certificate_summary(self)

    def with_key_of(self, secret: ProjectSecret) -> "Certificate":
        """Return the certificate with the key behind its draws, if that is derived from the project's secret."""
        if self.key_sha256 is None or self.key is not None:
            return self
        return replace(self, key=secret.find_boundary_key(self.key_sha256))

    def _with_key(self, key: bytes) -> "Certificate":
        if not isinstance(key, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CertificateError(f"key= takes bytes, not {type(key).__name__}")
        if self.key_sha256 is None:
            raise CertificateError('this certificate has no key (boundary="include"); omit key=')
        if not hmac.compare_digest(hashlib.sha256(key).hexdigest(), self.key_sha256):
            raise CertificateError(
                "the key is not the one this certificate was made with; use the project's secret of then"
            )
        return replace(self, key=key)

    def secret(self) -> bytes:
        """Return the key; raise a CertificateError that says how to provide it if there is none."""
        if self.key is None:
            raise CertificateError(
                'boundary="random" needs the key behind the draws: Certificate.load(path, secret=ProjectSecret.find()), or '
                "set ARBITRAGE_SECRET"
            )
        return self.key

    def _draw(self, id: str | None) -> float:
        if not isinstance(id, str) or not id:
            raise OptionError(f'boundary="random" needs the query\'s id, a non-empty text; pass id= (got {id!r})')
        return draw(self.secret(), id)


def _are_floats(scores: Any) -> bool:
    """Tell whether scores are Python's own floats, as live ones are."""
    return type(scores) in (tuple, list) and all(type(score) is float for score in scores)
