"""The database's schema, for SQLite and PostgreSQL alike, and the check of its version.

Version 1 is `TABLES`. A later release adds a function to `MIGRATIONS`; a released one never changes. An additive migration
only adds what an earlier release may ignore: tables, plain indexes, columns that are null or have a default, none of which
it would have to fill. Releases of one minor version differ by additive migrations alone, so that gateways of two of them
can share a database while one replaces the other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store.integrity import start_roster
from conformal_arbitrage.store.pages import REPLACED
from conformal_arbitrage.store.session import Session, StoreSchema

TABLES = """
-- The record: append-only; a tombstone keeps only writer, seq and hash, and what replaces an event is sealed. Every filter
-- of records has an index in the order of a page; one that names neither a key nor a policy, or not who decided, takes one
-- range of an index for each value.
create table events (
    writer {text} not null, seq {integer} not null, hash {text} not null,
    id {text}, kind {text}, at {real}, body {text}, policy {text}, key_id {text}, decided_by {text}, seal {text},
    primary key (writer, seq)
);
create unique index decisions on events (id) where kind = 'decision';
create index decisions_by_time on events (at, id) where kind = 'decision';
create index decisions_by_key on events (key_id, policy, decided_by, at, id) where kind = 'decision';
create index decisions_by_policy on events (policy, decided_by, at, id) where kind = 'decision';
create index later_events on events (id) where kind <> 'decision';
create index replaced_decisions on events (id) where {replaced};
create index tombstones on events (writer, seq) where body is null;
create unique index notices on events (policy, id) where kind in ('alarm', 'lift', 'exclusion');

-- Per writer, the last event that was pruned without a tombstone.
create table checkpoints (writer {text} primary key, seq {integer} not null, hash {text} not null, seal {text});

-- Per writer, its last event, signed every second.
create table heads (
    writer {text} primary key, seq {integer} not null, hash {text} not null, at {real} not null, seal {text} not null
);

-- One row: the names of all writers, the newest version of every policy and all API keys, signed.
create table roster (document {text} not null, seal {text} not null);

-- One row: the fingerprint of the secret that the database was made with.
create table secret (fingerprint {text} not null);

-- One row: `count` grows with every installation, and with every key created or revoked.
create table changes (count {integer} not null, undelivered_until {real} not null);
insert into changes (count, undelivered_until) values (0, 0);

-- Written to find out whether writing works.
create table probes (id {text} primary key, body {bytes} not null);

-- API keys by digest.
create table keys (
    id {text} primary key, sha256 {text} not null unique, scope {text} not null, label {text} not null,
    created {real} not null, revoked {real}, expires {real}, policies {text}, seal {text}
);

-- Who is signed in to the console, by the digest of their cookie.
create table sign_ins (
    sha256 {text} primary key, key_id {text} not null, created {real} not null, seen {real} not null,
    expires {real} not null, seal {text}
);
create index sign_ins_by_expiry on sign_ins (expires);

-- Every installed certificate; `origin` is the version that first installed it.
create table policies (
    name {text} not null, version {integer} not null, origin {integer} not null, certificate {text} not null,
    installed {real} not null, installed_by {text} not null, seal {text}, primary key (name, version)
);

-- Per policy, the digest of the certificate file that the last start found.
create table configured (policy {text} primary key, sha256 {text} not null, seal {text});

-- Idempotency keys: pending, decided or finished; the responses of finished ones are in replays.
create table claims (
    key_id {text} not null, name {text} not null, body_sha256 {text} not null, owner {text} not null,
    state {text} not null, lease {real} not null, expires {real} not null, primary key (key_id, name)
);
create index claims_by_expiry on claims (expires);
create table replays (
    key_id {text} not null, name {text} not null, status {integer} not null, headers {text} not null,
    body {bytes} not null, expires {real} not null, seal {text}, primary key (key_id, name)
);
create index replays_by_expiry on replays (expires);

-- Ids of the decisions begun under an idempotency key, by the question's place in the request.
create table begun (
    key_id {text} not null, name {text} not null, place {integer} not null, body_sha256 {text} not null,
    id {text} not null, expires {real} not null, primary key (key_id, name, place)
);
create index begun_by_expiry on begun (expires);

-- Decisions of which nothing was delivered, by a digest of their question, for a retry without a key.
create table undelivered (id {text} primary key, digest {text} not null, expires {real} not null);
create index undelivered_by_digest on undelivered (digest, expires);

-- Sessions in force: the model that answers all turns, until it has been idle for long enough.
create table conversations (
    key_id {text} not null, policy {text} not null, name {text} not null, id {text} not null,
    decided_by {text} not null, version {integer} not null, expires {real} not null,
    primary key (key_id, policy, name)
);
create index conversations_by_expiry on conversations (expires);

-- What all gateways have used of a limit, by parts of its window.
create table spending (
    name {text} not null, part {integer} not null, reserved {integer} not null, spent {integer} not null,
    primary key (name, part)
);

-- Questions to ask in the background, and by which models; `lease` is the time from which an audit may be taken.
create table audits (
    id {text} primary key, policy {text} not null, payload {text} not null, lease {real} not null,
    attempts {integer} not null default 0, queued {real} not null, identities {text} not null, seal {text}
);
create index audits_by_lease on audits (lease, id);

-- Messages to webhooks; one may be taken from `due` on, and was delivered or given up at `done`.
create table deliveries (
    id {text} not null, endpoint {text} not null, type {text} not null, body {text} not null, created {real} not null,
    due {real} not null, attempts {integer} not null default 0, done {real}, error {text}, seal {text},
    primary key (id, endpoint)
);
create index deliveries_by_due on deliveries (endpoint, due, id) where done is null;
create index deliveries_by_time on deliveries (created, id);

-- One row per ledger: how many rows, known losses and changes it has, and how many draws fell into a slot that had a row;
-- whoever changes it locks this first.
create table ledgers (
    number {integer} primary key, policy {text} not null, version {integer} not null, lifts {integer} not null,
    identities {text} not null, segment {text} not null, length {integer} not null, known {integer} not null,
    changes {integer} not null, collapsed {integer} not null default 0, unique (policy, version, lifts, identities, segment)
);

-- Decisions drawn for an audit, with their losses; `news` counts what was recorded since a row was settled.
create table ledger (
    ledger {integer} not null, seq {integer} not null, id {text} not null, drawn {real} not null, due {real} not null,
    slot {text}, loss {real}, served {real}, undelivered {integer} not null default 0, known_order {integer},
    known_at {real}, change {integer} not null, news {integer} not null default 0, seal {text},
    primary key (ledger, seq)
);
create unique index ledger_by_id on ledger (id);
create unique index ledger_by_slot on ledger (ledger, slot) where slot is not null;
create index ledger_by_number_and_id on ledger (ledger, id);
create index ledger_by_change on ledger (ledger, change);
create index ledger_with_news on ledger (id) where news > 0;

-- Rows for a later calibration, which survive pruning, by the digest of their log; `log` is empty for those of decisions.
create table calibration_rows (
    policy {text} not null, log {text} not null, place {integer} not null, id {text} not null,
    identities {text} not null, body {text} not null, seal {text}, primary key (policy, log, place, id)
);
create index calibration_rows_by_id on calibration_rows (log, id);

-- Per writer, the last event that calibration rows were brought up to.
create table gathered (writer {text} primary key, seq {integer} not null);
insert into gathered (writer, seq) values ('', 0);

-- What the decisions of a policy's version came to, by the hour.
create table tallies (
    policy {text} not null, version {integer} not null, hour {integer} not null, decisions {integer} not null,
    by_primary {integer} not null, by_guardian {integer} not null, by_fallback {integer} not null,
    no_guarantee {integer} not null, unknown_cost {integer} not null, guardian_calls {integer} not null,
    audit_calls {integer} not null, cost {real} not null, guardian_cost {real} not null, audit_cost {real} not null,
    primary key (policy, version, hour)
);
create index tallies_by_hour on tallies (hour);

-- Per writer, the last event that was counted.
create table tally_marks (writer {text} primary key, seq {integer} not null);
insert into tally_marks (writer, seq) values ('', 0);

-- Decisions without a guarantee, for the console to list; `fallback` is 1 for those that a safe action answered.
create table unguaranteed (
    policy {text} not null, id {text} not null, fallback {integer} not null, primary key (policy, id)
);
create index fallbacks on unguaranteed (policy, id) where fallback = 1;

-- Questions for people; `held` and `votes` are counted in the row itself, which every change locks.
create table reviews (
    id {text} primary key, decision {text} not null, purpose {text} not null, policy {text} not null,
    team {text} not null, request {text}, payload {text}, protocol {text} not null, identities {text} not null,
    menu {text} not null, panel {integer} not null, rule {text} not null, escalates {integer} not null, price {real},
    lease {real} not null, undo {real} not null, drawn {integer} not null, needed {integer} not null,
    held {integer} not null default 0, votes {integer} not null default 0, level {integer} not null default 0,
    state {text} not null, due {real} not null, ready {real}, deadline {real}, created {real} not null, taken {real},
    closed {real}, outcome {text}, revision {integer} not null default 0, question_seal {text}, verdict_seal {text},
    unique (decision, purpose)
);
create index open_reviews on reviews (team, level, due, id) where state = 'open';
create index ready_reviews on reviews (ready) where state = 'open';
create index overdue_reviews on reviews (deadline) where state = 'open';
create index reviews_by_request on reviews (request);
create index ended_reviews on reviews (closed);

-- Who holds an item, and until when without a sign of life.
create table review_claims (
    token {text} primary key, item {text} not null, reviewer {text} not null unique, level {integer} not null,
    since {real} not null, lease {real} not null
);
create index review_claims_by_item on review_claims (item);
create index review_claims_by_lease on review_claims (lease);

-- Who voted on a decision, skipped it or read its record, and is not asked about it again.
create table review_seen (
    decision {text} not null, reviewer {text} not null, why {text} not null, team {text} not null, at {real} not null,
    primary key (decision, reviewer)
);
create index review_skips on review_seen (at) where why = 'skipped';

-- Each vote counts from `counts` on, unless it is withdrawn before.
create table votes (
    token {text} primary key, item {text} not null, reviewer {text} not null, level {integer} not null,
    at {real} not null, counts {real} not null, choice {integer} not null, held {real} not null, active {real},
    late {integer} not null, withdrawn {real}, seal {text}
);
create index votes_by_item on votes (item);
create index votes_by_time on votes (at);

-- Requests of callers that people decide; the body is there until the request is complete.
create table review_requests (
    id {text} primary key, key_id {text} not null, name {text} not null, policy {text} not null, route {text} not null,
    body {bytes}, created {real} not null, expires {real} not null, unique (key_id, name)
);
create index waiting_review_requests on review_requests (created) where body is not null;
create index review_requests_by_expiry on review_requests (expires);

-- When each reviewer was last there.
create table presence (reviewer {text} primary key, seen {real} not null);

-- When webhooks were last told that questions wait for a team.
create table review_calls (team {text} primary key, called {real} not null);

-- Per policy and writer, the last event that was read for answers that people are to grade.
create table grading_marks (
    policy {text} not null, writer {text} not null, seq {integer} not null, primary key (policy, writer)
);
"""


Retention = Literal["record", "expires", "done", "kept"]
"""When the rows of a table go: with the decision that they are about, by `prune`; at the time that they carry, by `sweep`;
when what waits is done; or never, since they hold figures, fingerprints and settings, and nothing that was said."""
RETENTION: Mapping[str, Retention] = {
    "events": "record", "unguaranteed": "record", "reviews": "record", "review_seen": "record", "votes": "record",
    "review_requests": "record", "presence": "record",
    "sign_ins": "expires", "claims": "expires", "replays": "expires", "begun": "expires", "undelivered": "expires",
    "conversations": "expires", "deliveries": "expires",
    "audits": "done", "review_claims": "done",
    "checkpoints": "kept", "heads": "kept", "roster": "kept", "secret": "kept", "changes": "kept", "probes": "kept",
    "keys": "kept", "policies": "kept", "configured": "kept", "spending": "kept", "ledgers": "kept", "ledger": "kept",
    "calibration_rows": "kept", "gathered": "kept", "tallies": "kept", "tally_marks": "kept", "review_calls": "kept",
    "grading_marks": "kept",
}  # fmt: skip
"""The rule of every table."""


def create_tables(session: Session) -> None:
    """Create the tables of the first release."""
    lines = [line for line in TABLES.replace("{replaced}", REPLACED).splitlines() if not line.startswith("--")]
    session.define(*(statement for statement in "\n".join(lines).split(";") if statement.strip()))


MIGRATIONS: Sequence[Callable[[Session], None]] = (create_tables,)
"""The function at index k takes a database from version k to k + 1."""
ADDITIVE: frozenset[Callable[[Session], None]] = frozenset()
"""Those that leave a database usable for releases that do not know them."""


def least_reader() -> int:
    """Return how many migrations a release has to know to work with a database of this one."""
    return max((k for k, migration in enumerate(MIGRATIONS, 1) if migration not in ADDITIVE), default=0)


def migrate(session: Session, location: str) -> StoreSchema:
    """Bring a database to the version of this release, within the current transaction.

    Raises:
        StoreError: a later release of this package wrote it, and this one cannot work with it.
    """
    if session.dialect.migration_lock is not None:
        session.rows(session.dialect.migration_lock)
    session.define(
        "create table if not exists schema_version (version {integer} not null, readable_by {integer} not null)"
    )
    schema = read_schema(session, location)
    if schema.version >= len(MIGRATIONS):
        return schema
    for migration in MIGRATIONS[schema.version :]:
        migration(session)
    session.run("delete from schema_version")
    session.run("insert into schema_version (version, readable_by) values (?, ?)", len(MIGRATIONS), least_reader())
    if schema.version == 0:
        start_roster(session)
    return StoreSchema(version=len(MIGRATIONS), readable_by=least_reader(), before=schema.version)


def check_schema(session: Session, location: str) -> StoreSchema:
    """Return which tables a database has, without changing any.

    Raises:
        StoreError: they are not those of this release, nor of a later one that it can work with.
    """
    [(exists,)] = session.rows(session.dialect.has_schema)
    schema = read_schema(session, location) if exists else StoreSchema(version=0, readable_by=0, before=0)
    if schema.version < len(MIGRATIONS):
        raise StoreError(
            f"{location}: the database has schema version {schema.version}, and this release needs {len(MIGRATIONS)}; run "
            "`arbitrage records migrate` with this release first"
        )
    return schema


def read_schema(session: Session, location: str) -> StoreSchema:
    """Return which tables a database has that has been migrated before."""
    rows = session.rows("select version, readable_by from schema_version")
    version, readable_by = (int(number) for number in rows[0]) if rows else (0, 0)
    if version > len(MIGRATIONS) and not 0 < readable_by <= len(MIGRATIONS):
        raise StoreError(
            f"{location}: the database has schema version {version}, which takes a release that knows {readable_by}, and "
            f"this release knows {len(MIGRATIONS)}; upgrade conformal-arbitrage, or name another database"
        )
    return StoreSchema(version=version, readable_by=readable_by, before=version)
