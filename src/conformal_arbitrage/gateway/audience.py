"""The audiences of a gateway: one table of what the key of each opens and shows, and the views of the store that follow.

All of it lists what is shown: a field, a route or an operation that nobody has listed is shown to no one but admins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.store.keys import Scope
from conformal_arbitrage.store.record import (
    CompletionBody,
    Content,
    DecisionBody,
    DecisionRecord,
    FeedbackBody,
    Fields,
    Grades,
    document,
)
from conformal_arbitrage.store.session import Store, StoreView, View
from conformal_arbitrage.types import Leg, Spent

Awaits = Callable[[DecisionRecord], bool]
"""Tells whether people have yet to judge a decision, beyond what is in the queue."""

_SPENT = frozenset(Spent.__struct_fields__)
CALLER: Fields = {
    DecisionRecord: {"id", "created", "policy", "key_id", "decided_by", "decision", "completion", "feedback"},
    DecisionBody: {
        *(
            "schema",
            "action",
            "candidates",
            "no_guarantee",
            "legs",
            "cost",
            "alpha",
            "version",
            "mode",
            "form",
            "content",
        ),
        *("size", "overridden", "pending", "session", "held", "cancelled", "group"),
    },
    CompletionBody: {"finish", "leg", "before", "action", "decided_by", "no_guarantee", "cost", "content", "at"},
    FeedbackBody: {"grade", "grades", "reason", "label", "comment", "by", "at"},
    Content: {"context", "actions", "request", "primary_answer", "answer", "chain_answers"},
    Grades: {"primary", "guardian", "chain"},
    Leg: {"role", "spent", "seconds", "served", "reply"},
    Spent: _SPENT,
}
"""What callers see of their records: what replies show, and never whether a decision was drawn for an audit."""
EXPOSED: Fields = {
    **CALLER,
    DecisionBody: {*CALLER[DecisionBody], "margin", "relaxation"},
    Leg: {*CALLER[Leg], "scores"},
}
"""What they see under a policy with `expose = "full"`."""
UNJUDGED: Fields = {
    DecisionRecord: {"id", "created", "policy", "key_id", "decision"},
    DecisionBody: {"schema", "alpha", "version", "mode", "form", "content", "size", "overridden", "group"},
    Content: {"context", "actions", "request"},
}
"""What lists show admins, who may be on a team, of a decision that people have yet to judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audience:
    """Those who have a key of one scope.

    Attributes:
        name: what they are called.
        opens: the scopes whose routes their key opens.
        records: the decisions that they see: their own, those that people have judged or need not, all, or none.
        shown: the fields of these that they see; None for every field.
    """

    name: str
    opens: frozenset[Scope]
    records: Literal["own", "settled", "all", "none"]
    shown: Fields | None


AUDIENCES: Mapping[Scope, Audience] = {
    "call": Audience(name="caller", opens=frozenset({"call"}), records="own", shown=CALLER),
    "review": Audience(name="reviewer", opens=frozenset({"call", "review"}), records="settled", shown=None),
    "operate": Audience(name="operator", opens=frozenset({"operate"}), records="none", shown={}),
    "admin": Audience(name="admin", opens=frozenset({"call", "review", "operate", "admin"}), records="all", shown=None),
}
"""Every audience by the scope of its keys. A key that is bound to policies shows the same of these, and nothing beyond."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling.

    Attributes:
        scope: what the key permits.
        policies: the only policies it is good for; None for all.
        label: the key's, which names a person on a team.
    """

    id: str
    scope: Scope
    policies: tuple[str, ...] | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the person, as teams know it."""
        return self.label or self.id

    def opens(self, scope: Scope) -> bool:
        """Return whether the key opens routes of a scope."""
        return scope in AUDIENCES[self.scope].opens

    def sees(self, policy: str) -> bool:
        """Return whether the key is good for a policy."""
        return self.policies is None or policy in self.policies

    def check_policy(self, policy: str, named: str | None = None) -> None:
        """Refuse a policy that the key is not good for, whether or not there is such a policy.

        Args:
            named: what the request calls it, if it is another name.
        """
        if not self.sees(policy):
            raise RequestError(
                f"this key is bound to {', '.join(self.policies or ())}; policy {named or policy:.80} needs another",
                status=403, code="insufficient_scope", param="model",
            )  # fmt: skip

    def check_unbound(self, what: str) -> None:
        """Refuse what concerns all policies to a key that is bound to some."""
        if self.policies is not None:
            raise RequestError(
                f"this key is bound to {', '.join(self.policies)}; {what} needs one that is not", status=403,
                code="insufficient_scope",
            )  # fmt: skip


class Views:
    """The store as each caller reaches it.

    Args:
        awaits: for admins, and then for reviewers, who must not recognize a later question by an earlier decision.
    """

    def __init__(self, store: Store, awaits: Awaits, blind_awaits: Awaits) -> None:
        self._store = store
        self._awaits = awaits
        self._blind_awaits = blind_awaits

    def of(self, caller: Caller) -> StoreView:
        """Return the store as a caller reaches it."""
        policies = None if caller.policies is None else frozenset(caller.policies)
        kind = AUDIENCES[caller.scope].records
        if kind in ("none", "own"):
            return StoreView(self._store, View(policies=policies, key_id=caller.id))
        blind = kind == "settled"
        awaits = self._blind_awaits if blind else self._awaits
        return StoreView(self._store, View(policies=policies, awaits=awaits, blind=blind))

    def own(self, caller: Caller) -> StoreView:
        """Return what is the caller's own, whatever else their key shows."""
        policies = None if caller.policies is None else frozenset(caller.policies)
        return StoreView(self._store, View(policies=policies, key_id=caller.id))


def shown_record(record: DecisionRecord, caller: Caller, *, exposed: bool) -> dict[str, object]:
    """Return a record as a caller sees it; `exposed` is whether its policy shows callers margins and scores."""
    shown = AUDIENCES[caller.scope].shown
    if caller.scope == "call":
        shown = EXPOSED if exposed else CALLER
        mine = tuple(feedback for feedback in record.feedback if feedback.by == caller.id)
        record = replace(record, feedback=mine)  # others give theirs on audits
    return document(record, shown=shown)


def unjudged_record(record: DecisionRecord) -> dict[str, object]:
    """Return a record that people have yet to judge, as lists show it to admins."""
    return {**document(record, shown=UNJUDGED), "withheld": "under review"}
