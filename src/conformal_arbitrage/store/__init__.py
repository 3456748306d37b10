"""The decision record and everything else a gateway must not lose, over SQLite or PostgreSQL.

A store runs operations, which are functions: `await store.run(reviews.take, "ann", teams=["support"])`. Knows nothing of
HTTP, models, what a certificate means, or how a verdict is reached.
"""

from conformal_arbitrage.store.claims import Claim, Claimed, Reservation, SavedResponse, Shortage
from conformal_arbitrage.store.keys import KeyInfo, Scope
from conformal_arbitrage.store.ledger import AuditRow, Ledger, LedgerKey, LedgerNews, LedgerRows, NewRow, Settlement
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.outbox import Audit, Delivery, OutboxBacklog, Subscriptions, WebhookEvent
from conformal_arbitrage.store.policies import Notice, PolicyVersion
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.record import (
    AlarmBody,
    AuditBody,
    AuditQuestion,
    CompletionBody,
    Content,
    DecisionBody,
    DecisionRecord,
    Event,
    EventBody,
    EventKind,
    FeedbackBody,
    Grades,
    JSONObject,
    LiftBody,
    MenuQuestion,
    NoticeBody,
    TextQuestion,
    new_id,
)
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.store.sqlite import SQLiteStore

__all__ = [
    "AlarmBody",
    "Audit",
    "AuditBody",
    "AuditQuestion",
    "AuditRow",
    "Claim",
    "Claimed",
    "CompletionBody",
    "Content",
    "DecisionBody",
    "DecisionRecord",
    "Delivery",
    "Event",
    "EventBody",
    "EventKind",
    "FeedbackBody",
    "Grades",
    "JSONObject",
    "KeyInfo",
    "Ledger",
    "LedgerKey",
    "LedgerNews",
    "LedgerRows",
    "LiftBody",
    "MenuQuestion",
    "NewRow",
    "Notice",
    "NoticeBody",
    "OutboxBacklog",
    "PolicyVersion",
    "PostgresStore",
    "Reservation",
    "SQLiteStore",
    "SavedResponse",
    "Scope",
    "Settlement",
    "Shortage",
    "Store",
    "Subscriptions",
    "TextQuestion",
    "WebhookEvent",
    "new_id",
    "open_store",
]
