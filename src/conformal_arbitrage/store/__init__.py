"""The decision record and everything else a gateway must not lose: one protocol, over SQLite or PostgreSQL."""

from conformal_arbitrage.store.base import (
    Audit,
    AuditBacklog,
    Claim,
    Claimed,
    KeyInfo,
    PolicyVersion,
    Reservation,
    SavedResponse,
    Scope,
    Shortage,
    Store,
)
from conformal_arbitrage.store.ids import new_id
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.record import (
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
    MenuQuestion,
    TextQuestion,
)
from conformal_arbitrage.store.sqlite import SQLiteStore

__all__ = [
    "Audit",
    "AuditBacklog",
    "AuditBody",
    "AuditQuestion",
    "Claim",
    "Claimed",
    "CompletionBody",
    "Content",
    "DecisionBody",
    "DecisionRecord",
    "Event",
    "EventBody",
    "EventKind",
    "FeedbackBody",
    "Grades",
    "JSONObject",
    "KeyInfo",
    "MenuQuestion",
    "PolicyVersion",
    "PostgresStore",
    "Reservation",
    "SQLiteStore",
    "SavedResponse",
    "Scope",
    "Shortage",
    "Store",
    "TextQuestion",
    "new_id",
    "open_store",
]
