"""verify: recompute a certificate from its log, to the bit, and report what differs.

Knows nothing of how the differences are shown.
"""

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from conformal_arbitrage.calibration.ancestry import Ancestry, CalibratedThreshold
from conformal_arbitrage.calibration.calibrate import certify, certify_parts, engine_of
from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.consistency import worded
from conformal_arbitrage.calibration.facts import group_source_of
from conformal_arbitrage.calibration.learned_score import Features
from conformal_arbitrage.calibration.options import NET, REGRET, CalibrationOptions
from conformal_arbitrage.core.losses import Loss
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.engines import Engine, PassProgress, silent
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.parts import ScoreParts
from conformal_arbitrage.scorelog.spark_table import SparkTable

_NOT_RECOMPUTED = frozenset(
    {"schema", "version", "created", "key", "fit", "columns", "looked_at", "secret_id", "signature"}
)
_MOST_REPLAYED = 2000
"""Rows on which the decisions of a learned score are compared: they take time, and equal arrays decide alike."""
_NOT_IN_SCHEMA_1 = frozenset({"guarantee", "router", "fewest_actions", "most_actions"})
"""Worded or absent in schema 1, which this release does not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of `verify`; true if the certificate holds.

    Attributes:
        differences: field -> (value in the certificate, recomputed value); empty if the certificate holds.
    """

    differences: Mapping[str, tuple[Any, Any]]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return "Verification(ok)" if self.ok else f"Verification(differs in {', '.join(self.differences)})"


def verify(
    certificate: Certificate,
    log: ScoreLog | ScoreParts | SparkTable,
    *,
    loss: Loss | None = None,
    engine: Engine | Executor | str | None = None,
    progress: PassProgress = silent,
) -> Verification:
    """Recompute a certificate from its log, to the bit.

    Args:
        certificate: the certificate, with its key if it has one.
        log: the log it was made from, in memory, in parts or in Spark; binarized here if the certificate says so.
        loss: your own loss, if the certificate names one.
        engine: for a log in parts, where the work is done; by default threads on all cores.
        progress: is told about every pass over a log in parts.

    Returns:
        An object with `ok` and `differences`, which is true if the certificate holds.
    """
    if (loss is None) != (certificate.loss in (REGRET, NET)):
        raise OptionError(
            f"the loss of this certificate is '{certificate.loss}'; "
            "from Python: verify(certificate, log, loss=THAT_FUNCTION)"
        )
    options = options_of(certificate, loss=loss)
    if certificate.binarized and (log.binary is None or log.binary is False):
        log = log.binarized()
    if isinstance(log, ScoreParts | SparkTable):
        recomputed = certify_parts(log, certificate.alpha, options, engine=engine_of(log, engine), progress=progress)
    else:
        recomputed = certify(log, certificate.alpha, options)
    if certificate.ancestry is not None:
        recomputed = _in_place_of(certificate, certificate.ancestry, recomputed)
    skipped = _NOT_RECOMPUTED | _NOT_IN_SCHEMA_1 if certificate.schema == 1 else _NOT_RECOMPUTED
    names = [f.name for f in fields(Certificate) if f.name not in skipped]
    pairs = {name: (getattr(certificate, name), getattr(recomputed, name)) for name in names}
    if certificate.learned is not None and not isinstance(log, SparkTable):
        pairs |= _learned_pairs(
            certificate, recomputed, log.sample(_MOST_REPLAYED) if isinstance(log, ScoreParts) else log
        )
    return Verification(differences={name: pair for name, pair in pairs.items() if pair[0] != pair[1]})


def options_of(certificate: Certificate, *, loss: Loss | None = None) -> CalibrationOptions:
    """Return the options that a certificate was calibrated with.

    Args:
        certificate: the certificate, with its key if it has one.
        loss: your own loss, if the certificate names one.
    """
    return CalibrationOptions(
        guardian_sees=certificate.guardian_sees,
        boundary=certificate.boundary,
        loss_bound=certificate.loss_bound,
        loss=NET if certificate.loss == NET else loss,
        full_sight_loss=None if loss is None else certificate.full_sight_loss,
        grid=certificate.grid,
        missing_guardian=certificate.missing_guardian,
        cluster=certificate.cluster,
        max_cluster_size=certificate.max_cluster_size,
        confidence=certificate.confidence,
        zero_one=certificate.zero_one or False,
        dial=certificate.dial is not None,
        by=certificate.by,
        small_groups=certificate.small_groups or "defer",
        group_source=group_source_of(certificate),
        margins=certificate.margin_quantiles is not None,
        score=certificate.score or "margin",
        features=_features(certificate),
        key=None if certificate.key_sha256 is None else certificate.secret(),
    )


def _in_place_of(certificate: Certificate, ancestry: Ancestry, recomputed: Certificate) -> Certificate:
    """Return what the log gives, put where a certificate stands in its chain."""
    if ancestry.calibrated is not None:
        own = CalibratedThreshold(relaxation=recomputed.relaxation, boundary_u=recomputed.boundary_u)
        ancestry = replace(ancestry, calibrated=own)
        recomputed = replace(recomputed, relaxation=certificate.relaxation, boundary_u=certificate.boundary_u)
    recomputed = replace(recomputed, ancestry=ancestry)
    return replace(recomputed, guarantee=worded(recomputed))


def _features(certificate: Certificate) -> Features | None:
    """Return what a learned score was learned from; None without one."""
    terms = certificate.learned
    if terms is None:
        return None
    return Features(
        groups="group" in terms.features,
        tokens="tokens" in terms.features,
        menu_size=terms.menu_size,
        group_source=terms.group_source,
        text="text" in terms.features,
    )


def _learned_pairs(certificate: Certificate, recomputed: Certificate, log: ScoreLog) -> dict[str, tuple[Any, Any]]:
    """Return what differs in a learned score: its terms, its arrays beyond 1e-9, and decisions on the log.

    The digest of the file is not compared, since the same arrays may be compressed into other bytes.
    """
    if certificate.learned is None or recomputed.learned is None:
        return {}
    same_file = replace(recomputed.learned, sha256=certificate.learned.sha256)
    ours, theirs = certificate.learned_score(), recomputed.learned_score()
    differing = ours.differs_from(theirs)
    pairs: dict[str, tuple[Any, Any]] = {
        "learned": (certificate.learned, same_file),
        "arrays": (", ".join(differing), ""),
    }
    if not differing:
        some = log.select(np.linspace(0, len(log) - 1, min(len(log), _MOST_REPLAYED)).astype(np.int64))
        kept = [tuple((~one.apply(some).deferred).nonzero()[0].tolist()) for one in (certificate, recomputed)]
        pairs["decisions"] = (kept[0], kept[1])
    return pairs
