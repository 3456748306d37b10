"""Renewal: when a certificate is replaced by one from more rows, on which rows, and what is never done.

A certificate is calibrated again at row counts that double, on exactly the first so many rows, and is installed whatever
comes out: each certificate is exchangeable with the next decision, and overlapping rows do no harm. The time of a renewal
may not depend on losses, so it is when the last row's outcome is due, whether or not it is known. Installing a certificate
only if it is cheaper keeps the lucky ones, and breaks the budget. Raising the relaxation is allowed at any time, since the
loss falls. After an alarm only rows that came after it count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from conformal_arbitrage.calibration.certificate import Certificate, document_sha256
from conformal_arbitrage.calibration.learned import FeatureName
from conformal_arbitrage.calibration.options import refuse_combination, threshold_rank
from conformal_arbitrage.calibration.planning import plan, sure_rows_needed
from conformal_arbitrage.calibration.promises import Ancestry, CalibratedThreshold, Step
from conformal_arbitrage.core.risk import as_fraction
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.types import as_object


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalChain:
    """Where a policy stands in its schedule.

    Attributes:
        root_sha256: digest of the certificate that the chain began with.
        since: rows of queries that arrived after this time count, in seconds since 1970.
        first: rows that the first renewal takes.
        renewal: the number of the last renewal; 0 if there was none.
        alarmed: whether the next renewal begins a new chain, after an alarm.
    """

    root_sha256: str
    since: float
    first: int
    renewal: int = 0
    alarmed: bool = False

    def rows(self, renewal: int) -> int:
        """Return how many rows a renewal takes: first x 2^(renewal - 1)."""
        return self.first * 2 ** (renewal - 1)

    def due(self, rows: int) -> int | None:
        """Return the newest renewal that is due, or None.

        Args:
            rows: how many rows since the start are due: their outcomes are known, or count as missing.
        """
        renewal = self.renewal
        while self.rows(renewal + 1) <= rows:
            renewal += 1
        return None if renewal == self.renewal else renewal


def chain_of(certificate: Certificate, *, installed: float, alarm: float | None = None) -> RenewalChain:
    """Return the chain that a certificate in force belongs to.

    Args:
        installed: when it was first installed, in seconds since 1970.
        alarm: when the policy's last alarm was raised.
    """
    ancestry = certificate.ancestry
    if ancestry is None:
        chain = RenewalChain(root_sha256=document_sha256(certificate.to_dict()), since=installed, first=certificate.n)
    else:
        chain = RenewalChain(
            root_sha256=ancestry.root_sha256, since=ancestry.since, first=ancestry.first, renewal=ancestry.renewal
        )
    if alarm is None or alarm <= chain.since:
        return chain
    return replace(chain, since=alarm, first=rows_after_alarm(certificate), renewal=0, alarmed=True)


def rows_after_alarm(certificate: Certificate) -> int:
    """Return how many rows since an alarm the next certificate takes: those that `plan` suggests, or what it needs.

    With groups it is so many for each: how they fall on the groups is up to the traffic.
    """
    suggested = plan(certificate.alpha, loss_bound=certificate.loss_bound).suggested_rows
    groups = len(certificate.groups or "1")
    if certificate.confidence is None:
        return groups * suggested
    sure = sure_rows_needed(
        certificate.alpha,
        certificate.loss_bound,
        confidence=1 - (1 - as_fraction(certificate.confidence, name="confidence")) / groups,
        dial=certificate.dial is not None,
    )
    return groups * max(suggested, sure)


def renewed(
    calibrated: Certificate,
    predecessor: Certificate,
    chain: RenewalChain,
    *,
    step: Step,
    renewal: int,
    collected: int = 0,
) -> Certificate:
    """Return a certificate in its place in the chain, unsigned.

    Args:
        calibrated: what the rows gave.
        renewal: the number of the last scheduled renewal, this one included if it is one.
        collected: rows of the log that the chain began with, among those of this certificate.
    """
    before = document_sha256(predecessor.to_dict())
    ancestry = Ancestry(
        step=step,
        renewal=renewal,
        first=chain.first,
        since=chain.since,
        collected=collected,
        root_sha256=before if step == "after red" else chain.root_sha256,
        predecessor_sha256=before,
    )
    return replace(calibrated, ancestry=ancestry, secret_id=None, signature=None).worded()


def tightened(
    predecessor: Certificate, fresh: Certificate, largest_margin: float, chain: RenewalChain
) -> Certificate | None:
    """Return the predecessor with the larger relaxation of another calibration, unsigned; None if that is not larger.

    Rows, budget and log stay the predecessor's, and so does its promise: the loss only falls.

    Args:
        fresh: a calibration of the same kind, on any rows.
        largest_margin: of those rows; it is the new relaxation if none keeps the budget on them.

    Raises:
        OptionError: there is no proof for this kind of certificate.
    """
    refuse_tightening(predecessor)
    if predecessor.status == "always_defer":
        return None
    raised = CalibratedThreshold(relaxation=fresh.relaxation, boundary_u=fresh.boundary_u)
    if fresh.relaxation is None:
        drawn = predecessor.boundary == "random"
        raised = CalibratedThreshold(relaxation=largest_margin, boundary_u=_LAST_DRAW if drawn else None)
    new, old = (threshold_rank(known.relaxation, known.boundary_u) for known in (raised, predecessor))
    if new <= old:
        return None
    earlier = predecessor.ancestry
    known = None if earlier is None else earlier.calibrated
    calibrated = CalibratedThreshold(relaxation=predecessor.relaxation, boundary_u=predecessor.boundary_u)
    before = document_sha256(predecessor.to_dict())
    ancestry = Ancestry(
        step="tightened",
        renewal=chain.renewal,
        first=chain.first,
        since=chain.since,
        collected=0 if earlier is None else earlier.collected,
        root_sha256=chain.root_sha256,
        predecessor_sha256=before,
        calibrated=known or calibrated,
    )
    higher = predecessor.with_threshold(raised.relaxation, raised.boundary_u)
    return replace(higher, ancestry=ancestry, secret_id=None, signature=None).worded()


def preferred_to(documents: Mapping[int, Mapping[str, Any]], version: int) -> int | None:
    """Return the number of the scheduled version that a version was preferred to; None if it was not chosen.

    Installing a certificate that defers less than the one that the schedule produced, of the same models, keeps the
    lucky one of the two. A certificate that defers at least as much keeps the scheduled one's budget, if losses cannot be
    negative and it promises no more; so does another stop of the same dial.

    Args:
        documents: the certificates of a policy by version, up to this one.
    """
    document, models = documents[version], _models(documents[version])
    same = (number for number, earlier in documents.items() if number <= version and _models(earlier) == models)
    newest = max((number for number in same if _is_scheduled(documents, number)), default=version)
    return newest if newest != version and _is_choice(document, documents[newest]) else None


def _part(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    return as_object(document.get(name))


def _models(document: Mapping[str, Any]) -> object:
    """Return whose answers a certificate is about, and who grades them; how queries are grouped makes no other models."""
    identities = as_object(_part(document, "provenance").get("identities"))
    return {name: identities.get(name) for name in ("primary", "guardian", "grader")}


def _is_scheduled(documents: Mapping[int, Mapping[str, Any]], number: int) -> bool:
    """Tell whether a version is a renewal, new then, that took the place of the certificate that it was made to replace."""
    ancestry, before = _part(documents[number], "ancestry"), documents.get(number - 1)
    if ancestry.get("step") not in ("scheduled", "after red") or before is None:
        return False
    if any(earlier == documents[number] for other, earlier in documents.items() if other < number):
        return False
    return ancestry.get("predecessor_sha256") == document_sha256(before)


def _is_choice(document: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Tell whether a certificate defers less than another somewhere, or promises what the other does not."""
    same_log = _part(document, "evidence").get("log_sha256") == _part(than, "evidence").get("log_sha256")
    promise, other = _part(document, "promise"), _part(than, "promise")
    if same_log and "stops" in promise and "stops" in other:
        return False
    ranks, others = _ranks(document), _ranks(than)
    loss, its_loss = _part(document, "loss"), _part(than, "loss")
    if "net" in (loss.get("type"), its_loss.get("type")) and ranks != others:  # its mean may rise with what is deferred
        return True
    if any(loss.get(name) != its_loss.get(name) for name in ("type", "name", "bound")):
        return True
    if promise.get("alpha", 0) < other.get("alpha", 0) or promise.get("confidence", 0) > other.get("confidence", 0):
        return True
    return not ranks or any(rank < others.get(name, _DEFERS_ALL) for name, rank in ranks.items())


def _ranks(document: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return how much each group of a certificate defers; "" without groups, and nothing for any other rule."""
    rule = _part(document, "rule")
    thresholds = as_object(rule["groups"]) if "groups" in rule else {"": rule} if "relaxation" in rule else {}
    ranks = {name: as_object(threshold) for name, threshold in thresholds.items()}
    return {name: threshold_rank(rank.get("relaxation"), rank.get("boundary_u")) for name, rank in ranks.items()}


_DEFERS_ALL = threshold_rank(None, None)
_LAST_DRAW = 1 - 2**-53
"""The largest draw there is: every action at the threshold is kept."""


_STORED: Final = frozenset[FeatureName](("margin", "position", "menu"))
"""What a score may be learned from that is to be renewed. Groups are left out: a request could name one that nobody has."""


def refuse_renewal(certificate: Certificate) -> None:
    """Refuse a certificate that stored rows cannot renew, such as a score learned from what they do not hold.

    Raises:
        OptionError: with the reason.
    """
    learned, kinds = certificate.learned, certificate.kinds
    if learned is not None and _STORED.issuperset(learned.features):
        kinds.remove("learned")
    refuse_combination("renewal", *kinds)


def refuse_tightening(certificate: Certificate) -> None:
    """Refuse a certificate whose loss may rise with the relaxation, or that has several thresholds.

    Raises:
        OptionError: with the reason.
    """
    refuse_combination("tighten", *certificate.kinds)
    if certificate.dial is not None:
        raise OptionError(
            "a dial is tightened by setting it to a lower stop: arbitrage certificate choose --alpha ..., then install it"
        )
    if certificate.ancestry is not None and certificate.ancestry.no_guarantee is not None:
        raise OptionError(
            "the certificate in force was installed after looking, so that there is no promise to keep by tightening; wait "
            "for the next scheduled renewal, or calibrate on new rows"
        )
