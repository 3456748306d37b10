"""The ledger's rows: what to write when the coin draws a decision, and what the decision's record says of its loss later.

The Guardian is asked only where the loss is not known without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.options import NET
from conformal_arbitrage.core.losses import GuardianSees
from conformal_arbitrage.monitoring.lines import Lines, ledger_names
from conformal_arbitrage.monitoring.outcomes import (
    AuditedDecision,
    Verdict,
    decision_loss,
    due_days,
    is_counted,
    served_loss,
    session_slot,
)
from conformal_arbitrage.store.ledger import LedgerKey, LedgerNews, NewRow, Settlement
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import (
    UNDELIVERED,
    AuditQuestion,
    DecisionRecord,
    FeedbackBody,
    MenuQuestion,
    time_of,
)
from conformal_arbitrage.types import DAY, DecidedBy, Decision

_DECIDERS: dict[str, DecidedBy] = {"primary": "primary", "fallback": "fallback"}
Trusted = Callable[[FeedbackBody], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """What the loss of a decision depends on beside the decision.

    Attributes:
        guardian_sees: what a deferral shows the Guardian.
        binarized: whether the loss is that of the 0/1 Guardian.
        loss_bound: the largest possible loss.
        net: whether it counts gains.
    """

    guardian_sees: GuardianSees
    binarized: bool
    loss_bound: float
    net: bool = False

    @classmethod
    def of(cls, certificate: Certificate) -> "LossFacts":
        """Return those of a certificate."""
        return cls(
            guardian_sees=certificate.guardian_sees,
            binarized=certificate.loss.binarized,
            loss_bound=certificate.loss_bound,
            net=certificate.loss.name == NET,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedPolicy:
    """What the monitor of a policy's version needs to know.

    Attributes:
        key: its ledger; of a certificate by groups, each ledger has this key with its own name.
        lines: what each ledger is watched against, by its name: "" without groups.
        facts: what losses depend on.
        by_people: whether the Guardian is a person, who may take days.
        ledgers: by group, the name of its ledger; None without groups. The queries of any other group are all deferred.
    """

    key: LedgerKey
    lines: Mapping[str, Lines]
    facts: LossFacts
    by_people: bool
    ledgers: Mapping[str, str] | None = None

    @classmethod
    def of(
        cls, certificate: Certificate, key: LedgerKey, lines: Mapping[str, Lines], *, by_people: bool
    ) -> "WatchedPolicy":
        """Return what the monitor of a certificate needs to know."""
        ledgers = None if certificate.groups is None else ledger_names(certificate)
        return cls(key=key, lines=lines, facts=LossFacts.of(certificate), by_people=by_people, ledgers=ledgers)

    def key_of(self, group: str | None) -> LedgerKey | None:
        """Return the ledger of a query of a group; None if all of these are deferred, so that there is nothing to watch."""
        if self.ledgers is None:
            return self.key
        name = self.ledgers.get(group or "")
        return None if name is None else replace(self.key, group=name)

    def keys(self) -> list[LedgerKey]:
        """Return all ledgers."""
        return [replace(self.key, group=name) if name else self.key for name in self.lines]


def drawn_audit(
    watched: WatchedPolicy,
    decision: Decision,
    question: AuditQuestion,
    *,
    overridden: bool,
    session: str | None,
    group: str | None = None,
) -> Audit:
    """Return the audit of a decision that the coin drew in mode enforce, with its row of the ledger.

    Args:
        watched: the policy's ledger.
        decision: as far as it has come with the Primary's leg.
        question: what to ask the Guardian, unless the loss is known without.
        overridden: the request changed a pinned setting: it belongs in no ledger.
        session: a keyed digest of the request's session; None if it names none.
        group: what the request names; None if it names none.
    """
    id, key = str(decision.id), watched.key_of(group)
    audited = _drawn_decision(decision, question, watched.facts)
    loss = decision_loss(audited, loss_bound=watched.facts.loss_bound)
    primary_leg = any(leg.role == "primary" for leg in decision.legs)
    row = None
    if key is not None and is_counted(drawn=True, primary_leg=primary_leg, mode="enforce", overridden=overridden):
        drawn = time_of(id)
        row = NewRow(
            key=key,
            drawn=drawn,
            due=drawn + DAY * due_days(audited, human_guardian=watched.by_people),
            loss=loss,
            slot=None if session is None else session_slot(session, drawn),
        )
    return Audit(
        id=id,
        policy=watched.key.policy,
        question=question,
        ask=loss is None,
        identities_sha256=watched.key.identities_sha256,
        row=row,
    )


def _drawn_decision(decision: Decision, question: AuditQuestion, facts: LossFacts) -> AuditedDecision:
    menu = isinstance(question, MenuQuestion)
    return AuditedDecision(
        decided_by=decision.decided_by,
        form="menu" if menu else "text",
        guardian_sees=facts.guardian_sees,
        size=len(question.actions) if isinstance(question, MenuQuestion) else 2,
        candidates=decision.candidates,
        action=decision.action,
        binarized=facts.binarized,
        net=facts.net,
    )


def still_unanswered(audit: Audit | None, decision: Decision) -> Audit | None:
    """Return the audit of a drawn decision whose Guardian has not answered, for it to be asked later; None for any other.

    The loss is known without; as a row for calibration the decision needs the Guardian's view.
    """
    answered = any(leg.role == "guardian" and leg.error is None for leg in decision.legs)
    if audit is None or decision.decided_by == "primary" or answered:
        return None
    return replace(audit, ask=True)


def rule_candidates(certificate: Certificate | None, decision: Decision, group: str | None) -> tuple[int, ...]:
    """Return what a certificate's rule makes of the Primary's scores, where safe mode defers everything."""
    scores = next((leg.scores for leg in decision.legs if leg.role == "primary"), None)
    if certificate is None or scores is None:
        return decision.candidates
    row = (0.0, *scores) if certificate.evidence.router else scores
    return tuple(certificate.sight(row, id=decision.id, group=group)[0])


def settlement(
    news: LedgerNews, record: DecisionRecord | None, facts: LossFacts | None, now: float, trusted: Trusted
) -> Settlement:
    """Return what is known of a row.

    Args:
        news: the row.
        record: the decision's; None if it was pruned.
        facts: of the certificate it was made under; None if that cannot be read.
        now: the time.
        trusted: tells whether a label counts, by who gave it.
    """
    if record is None or facts is None:
        return Settlement(id=news.id, news=news.news, at=now)
    audited, verdict = _audited_decision(record, facts), _verdict(record, trusted)
    loss = decision_loss(audited, verdict, loss_bound=facts.loss_bound)
    return Settlement(
        id=news.id,
        news=news.news,
        at=now,
        loss=loss,
        served=_served(record, audited, verdict, facts),
        delivered=_is_delivered(record),
        failed=loss is None and _audit_failed(record),
    )


def _audited_decision(record: DecisionRecord, facts: LossFacts) -> AuditedDecision:
    body = record.decision
    return AuditedDecision(
        decided_by=_DECIDERS.get(record.decided_by, "guardian"),
        form=body.form or "menu",
        guardian_sees=facts.guardian_sees,
        size=body.size,
        candidates=body.candidates,
        action=body.action,
        binarized=facts.binarized,
        net=facts.net,
    )


def _served(record: DecisionRecord, audited: AuditedDecision, verdict: Verdict, facts: LossFacts) -> float | None:
    """Return the loss of what the caller got, where that is not the rule's own."""
    if audited.decided_by != "fallback" or not _is_delivered(record):
        return None
    return served_loss(audited, verdict, loss_bound=facts.loss_bound)


def _is_delivered(record: DecisionRecord) -> bool:
    """Return whether the caller got the answer that was decided, as far as is known."""
    end = record.completion
    return end is None or end.finish not in UNDELIVERED


def _same_models(record: DecisionRecord) -> bool:
    """Return whether the audit, if there is one, was answered by the models of the decision."""
    return record.audit is None or record.audit.identities_sha256 == record.decision.identities_sha256


def _audit_failed(record: DecisionRecord) -> bool:
    """Return whether there was an audit that will never tell the loss."""
    return record.audit is not None and (record.audit.error is not None or not _same_models(record))


def _verdict(record: DecisionRecord, trusted: Trusted) -> Verdict:
    if not _same_models(record):
        return Verdict()
    audit = record.audit
    return Verdict(
        scores=None if audit is None else audit.scores,
        label=_label(record, trusted),
        grades=_grades(record),
    )


def _grades(record: DecisionRecord) -> tuple[float, float] | None:
    """Return the first grades of both answers, once there is a Guardian's answer that they can be about."""
    if record.decided_by == "primary" and (record.audit is None or record.audit.error is not None):
        return None
    both = next((one.grades for one in record.feedback if one.grades is not None), None)
    return None if both is None else (both.primary, both.guardian)


def _label(record: DecisionRecord, trusted: Trusted) -> int | None:
    """Return the index of the right action, as the first trusted label says."""
    label = next((one.label for one in record.feedback if one.label is not None and trusted(one)), None)
    content = record.decision.content
    if isinstance(label, str):
        actions = None if content is None else content.actions
        return actions.index(label) if isinstance(actions, tuple) and label in actions else None
    return label if label is not None and 0 <= label < record.decision.size else None
