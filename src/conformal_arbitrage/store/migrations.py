"""The tables, as numbered migrations; a released migration never changes.

    events       append-only; a tombstone keeps only writer, seq and hash; what replaces an event is sealed
    checkpoints  per writer, the last event that was pruned without a tombstone
    heads        per writer, its last event, signed every second
    roster       one row: the names of all writers and the newest version of every policy, signed
    claims       idempotency keys: pending, decided or finished; the responses of finished ones are in replays
    begun        ids of the decisions begun under an idempotency key, by the question's place in the request
    audits       questions to ask in the background; `lease` is the time from which an audit may be taken
    spending     what all gateways have used of a limit, by parts of its window
    undelivered  decisions of which nothing was delivered, by a digest of their question, for a retry without a key
    policies     every installed certificate; `origin` is the version that first installed it
    configured   per policy, the digest of the certificate file that the last start found
    conversations  sessions in force: the model that answers all turns, until it has been idle for long enough
    deliveries   messages to webhooks; one may be taken from `due` on, and was delivered or given up at `done`
    ledgers      one row per ledger: how many rows, known losses and changes it has; whoever changes it locks this first
    ledger       decisions drawn for an audit, with their losses; `news` counts what was recorded since a row was settled
    calibration_rows  rows for a later calibration, by the digest of their log; `log` is empty for those of decisions
    gathered     per writer, the last event that calibration rows were brought up to
    sign_ins     who is signed in to the console, by the digest of their cookie
    tallies      what the decisions of a policy's version came to, by the hour
    tally_marks  per writer, the last event that was counted
    unguaranteed decisions without a guarantee, for the console to list
    reviews      questions for people; `held` and `votes` are counted in the row itself, which every change locks
    review_claims  who holds an item, and until when without a sign of life
    review_seen  who voted on a decision, skipped it or read its record, and is not asked about it again
    votes        each counts from `counts` on, unless it is withdrawn before; `edit` has changed arguments of tool calls
    review_requests  requests of callers that people decide; the body is there until the request is complete
    presence     when each reviewer was last there
    review_links  by which one person can vote on one item, once; the link itself takes the project's secret
    review_calls  when webhooks were last told that questions wait for a team
    changes      one row; grows with every installation, and with every key created or revoked
    keys         API keys by digest
    probes       what is written to find out whether writing works
    schema_version  one row: how many migrations were made, and how many a release must know to work with the result

An additive migration only adds what an earlier release may leave alone: tables, plain indexes, columns that are null or have
a default, none of which it would have to fill. Releases of one minor version differ by additive migrations alone, so that
gateways of two of them can share a database while one replaces the other.

Knows nothing of what is done with the tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store.dialect import Session


def m001_first_tables(session: Session) -> None:
    """Create the tables of the first release."""
    session.define(
        "create table events (writer {text} not null, seq {integer} not null, hash {text} not null, id {text}, "
        "kind {text}, at {real}, body {text}, policy {text}, key_id {text}, decided_by {text}, primary key (writer, seq))",
        "create unique index decisions on events (id) where kind = 'decision'",
        "create index decisions_by_time on events (at) where kind = 'decision'",
        "create index later_events on events (id) where kind <> 'decision'",
        "create index tombstones on events (writer, seq) where body is null",
        "create table checkpoints (writer {text} primary key, seq {integer} not null, hash {text} not null)",
        "create table claims (key_id {text} not null, name {text} not null, body_sha256 {text} not null, "
        "owner {text} not null, state {text} not null, lease {real} not null, expires {real} not null, "
        "primary key (key_id, name))",
        "create index claims_by_expiry on claims (expires)",
        "create table replays (key_id {text} not null, name {text} not null, status {integer} not null, "
        "headers {text} not null, body {bytes} not null, expires {real} not null, primary key (key_id, name))",
        "create index replays_by_expiry on replays (expires)",
        "create table audits (id {text} primary key, policy {text} not null, payload {text} not null, "
        "lease {real} not null)",
        "create table policies (name {text} not null, version {integer} not null, origin {integer} not null, "
        "certificate {text} not null, installed {real} not null, installed_by {text} not null, "
        "primary key (name, version))",
        "create table changes (count {integer} not null)",
        "insert into changes (count) values (0)",
        "create table keys (id {text} primary key, sha256 {text} not null unique, scope {text} not null, "
        "label {text} not null, created {real} not null, revoked {real})",
    )


def m002_decisions_begun(session: Session) -> None:
    """Create the table of decisions that another attempt under the same idempotency key continues."""
    session.define(
        "create table begun (key_id {text} not null, name {text} not null, place {integer} not null, "
        "body_sha256 {text} not null, id {text} not null, expires {real} not null, primary key (key_id, name, place))",
        "create index begun_by_expiry on begun (expires)",
    )


def m003_audit_retries_and_spending(session: Session) -> None:
    """Count the attempts and the age of audits, and create the table of limits that gateways share."""
    session.define(
        "alter table audits add column attempts {integer} not null default 0",
        "alter table audits add column queued {real} not null default 0",
        "create index audits_by_lease on audits (lease, id)",
        "create table spending (name {text} not null, part {integer} not null, reserved {integer} not null, "
        "spent {integer} not null, primary key (name, part))",
    )
    session.run(f"update audits set queued = {session.dialect.now}")


def m004_seals(session: Session) -> None:
    """Create what makes later changes visible, and what retries without a key continue."""
    session.define(
        "alter table events add column seal {text}",
        "alter table checkpoints add column seal {text}",
        "alter table replays add column seal {text}",
        "alter table policies add column seal {text}",
        "create table heads (writer {text} primary key, seq {integer} not null, hash {text} not null, "
        "at {real} not null, seal {text} not null)",
        "create table roster (document {text} not null, seal {text} not null)",
        "create table configured (policy {text} primary key, sha256 {text} not null)",
        "create table undelivered (id {text} primary key, digest {text} not null, expires {real} not null)",
        "create index undelivered_by_digest on undelivered (digest, expires)",
        "alter table changes add column undelivered_until {real} not null default 0",
        "alter table keys add column expires {real}",
        "alter table keys add column policies {text}",
    )


REPLACED = """kind = 'completion' and body like '%"decided_by":"fallback"%'"""
"""The completions by which a safe action replaced the Guardian's; a partial index holds them."""


def m005_every_filter(session: Session) -> None:
    """Create an index for every filter of records, in the order of a page, and the table of probes.

    A filter that names neither a key nor a policy, or not who decided, takes one range of an index for each value.
    """
    session.define(
        "drop index decisions_by_time",
        "create index decisions_by_time on events (at, id) where kind = 'decision'",
        "create index decisions_by_key on events (key_id, policy, decided_by, at, id) where kind = 'decision'",
        "create index decisions_by_policy on events (policy, decided_by, at, id) where kind = 'decision'",
        f"create index replaced_decisions on events (id) where {REPLACED}",
        "create table probes (id {text} primary key, body {bytes} not null)",
    )


def m006_conversations(session: Session) -> None:
    """Create the table of sessions, each with the model that answers all of its turns."""
    session.define(
        "create table conversations (key_id {text} not null, policy {text} not null, name {text} not null, "
        "id {text} not null, decided_by {text} not null, version {integer} not null, expires {real} not null, "
        "primary key (key_id, policy, name))",
        "create index conversations_by_expiry on conversations (expires)",
    )


def m007_deliveries(session: Session) -> None:
    """Create the table of messages to webhooks."""
    session.define(
        "create table deliveries (id {text} not null, endpoint {text} not null, type {text} not null, "
        "body {text} not null, created {real} not null, due {real} not null, attempts {integer} not null default 0, "
        "done {real}, error {text}, seal {text}, primary key (id, endpoint))",
        "create index deliveries_by_due on deliveries (endpoint, due, id) where done is null",
        "create index deliveries_by_time on deliveries (created, id)",
    )


def m008_ledger(session: Session) -> None:
    """Create the ledger of audited decisions, and the index of alarms; audits know whose models they are for."""
    session.define(
        "create table ledgers (number {integer} primary key, policy {text} not null, version {integer} not null, "
        "lifts {integer} not null, identities {text} not null, segment {text} not null, length {integer} not null, "
        "known {integer} not null, changes {integer} not null, "
        "unique (policy, version, lifts, identities, segment))",
        "create table ledger (ledger {integer} not null, seq {integer} not null, id {text} not null, "
        "drawn {real} not null, due {real} not null, slot {text}, loss {real}, served {real}, known_order {integer}, "
        "known_at {real}, change {integer} not null, news {integer} not null default 0, primary key (ledger, seq))",
        "create unique index ledger_by_id on ledger (id)",
        "create unique index ledger_by_slot on ledger (ledger, slot) where slot is not null",
        "create index ledger_by_change on ledger (ledger, change)",
        "create index ledger_with_news on ledger (id) where news > 0",
        "create unique index notices on events (policy, id) where kind in ('alarm', 'lift')",
        "alter table audits add column identities {text} not null default ''",
    )


def m009_calibration_rows(session: Session) -> None:
    """Create the table of rows that are fit for calibration, which survives pruning."""
    session.define(
        "create table calibration_rows (policy {text} not null, log {text} not null, place {integer} not null, "
        "id {text} not null, identities {text} not null, body {text} not null, seal {text}, "
        "primary key (policy, log, place, id))",
        "create index calibration_rows_by_id on calibration_rows (log, id)",
        "create table gathered (writer {text} primary key, seq {integer} not null)",
        "insert into gathered (writer, seq) values ('', 0)",
    )


def m010_margins_of_audits(session: Session) -> None:
    """Let the ledger keep margins, for a notice that they have changed."""
    session.define("alter table ledger add column margin {real}")


def m011_gains_in_the_ledger(session: Session) -> None:
    """Let the ledger say in a column of its own that nothing was delivered: -1, which said it, is a loss if gains count."""
    session.define("alter table ledger add column undelivered {integer} not null default 0")
    session.run("update ledger set undelivered = 1, served = null where served = -1")


def m012_console(session: Session) -> None:
    """Create what the console keeps: sign-ins, counts by the hour, and lists of decisions to look up."""
    counts = ("decisions", "by_primary", "by_guardian", "by_fallback", "no_guarantee", "unknown_cost", "guardian_calls")
    columns = [f"{name} {{integer}} not null" for name in (*counts, "audit_calls")]
    columns += [f"{name} {{real}} not null" for name in ("cost", "guardian_cost", "audit_cost")]
    session.define(
        "create table sign_ins (sha256 {text} primary key, key_id {text} not null, created {real} not null, "
        "seen {real} not null, expires {real} not null)",
        "create index sign_ins_by_expiry on sign_ins (expires)",
        "create table tallies (policy {text} not null, version {integer} not null, hour {integer} not null, "
        f"{', '.join(columns)}, primary key (policy, version, hour))",
        "create index tallies_by_hour on tallies (hour)",
        "create table tally_marks (writer {text} primary key, seq {integer} not null)",
        "insert into tally_marks (writer, seq) values ('', 0)",
        "create table unguaranteed (policy {text} not null, id {text} not null, primary key (policy, id))",
        "create index ledger_by_number_and_id on ledger (ledger, id)",
    )


def m013_readable_by(session: Session) -> None:
    """Let a database say which earlier releases can work with it."""
    session.define("alter table schema_version add column readable_by {integer} not null default 0")


def m014_reviews(session: Session) -> None:
    """Create the review queue: items, who holds them, who saw them, votes, the requests that wait, and who is there."""
    session.define(
        "create table reviews (id {text} primary key, decision {text} not null, purpose {text} not null, "
        "policy {text} not null, team {text} not null, request {text}, payload {text}, protocol {text} not null, "
        "identities {text} not null, menu {text} not null, panel {integer} not null, rule {text} not null, "
        "escalates {integer} not null, price {real}, lease {real} not null, undo {real} not null, "
        "drawn {integer} not null, needed {integer} not null, held {integer} not null default 0, "
        "votes {integer} not null default 0, level {integer} not null default 0, state {text} not null, "
        "due {real} not null, ready {real}, deadline {real}, created {real} not null, taken {real}, closed {real}, "
        "outcome {text}, revision {integer} not null default 0, unique (decision, purpose))",
        "create index open_reviews on reviews (team, level, due, id) where state = 'open'",
        "create index ready_reviews on reviews (ready) where state = 'open'",
        "create index overdue_reviews on reviews (deadline) where state = 'open'",
        "create index reviews_by_request on reviews (request)",
        "create index ended_reviews on reviews (closed)",
        "create table review_claims (token {text} primary key, item {text} not null, reviewer {text} not null unique, "
        "level {integer} not null, since {real} not null, lease {real} not null)",
        "create index review_claims_by_item on review_claims (item)",
        "create index review_claims_by_lease on review_claims (lease)",
        "create table review_seen (decision {text} not null, reviewer {text} not null, why {text} not null, "
        "team {text} not null, at {real} not null, primary key (decision, reviewer))",
        "create index review_skips on review_seen (at) where why = 'skipped'",
        "create table votes (token {text} primary key, item {text} not null, reviewer {text} not null, "
        "level {integer} not null, at {real} not null, counts {real} not null, choice {integer} not null, "
        "held {real} not null, active {real}, late {integer} not null, withdrawn {real})",
        "create index votes_by_item on votes (item)",
        "create index votes_by_time on votes (at)",
        "create table review_requests (id {text} primary key, key_id {text} not null, name {text} not null, "
        "policy {text} not null, route {text} not null, body {bytes}, created {real} not null, "
        "expires {real} not null, unique (key_id, name))",
        "create index waiting_review_requests on review_requests (created) where body is not null",
        "create index review_requests_by_expiry on review_requests (expires)",
        "create table presence (reviewer {text} primary key, seen {real} not null)",
        "create table review_calls (team {text} primary key, called {real} not null)",
    )


def m015_edited_calls(session: Session) -> None:
    """Let a vote carry the arguments of tool calls as the reviewer changed them."""
    session.define("alter table votes add column edit {text}")


def m016_grading_marks(session: Session) -> None:
    """Note how far each chain of events was read for answers that people are to grade."""
    session.define(
        "create table grading_marks (policy {text} not null, writer {text} not null, seq {integer} not null, "
        "primary key (policy, writer))"
    )


def m017_review_links(session: Session) -> None:
    """Create the table of links by which one person can vote on one item, once."""
    session.define(
        "create table review_links (id {text} primary key, item {text} not null, reviewer {text} not null, "
        "level {integer} not null, created {real} not null, expires {real} not null, used {real}, revoked {real}, "
        "unique (item, reviewer))"
    )
    session.define("create index review_links_by_expiry on review_links (expires)")
    session.define("create index review_links_by_reviewer on review_links (reviewer, expires)")


def m018_link_turns(session: Session) -> None:
    """Count how often the vote of a link was taken back, so that a form from before that is recognized."""
    session.define("alter table review_links add column turns {integer} not null default 0")


def m019_fallbacks(session: Session) -> None:
    """Let the console list decisions that a safe action answered; those of an earlier release may be, and are looked at."""
    session.define("alter table unguaranteed add column perhaps_fallback {integer} not null default 1")
    session.run(
        "update unguaranteed set perhaps_fallback = 0 where not exists (select 1 from events d where d.kind = 'decision' "
        "and d.id = unguaranteed.id and d.decided_by = 'fallback') and not exists "
        f"(select 1 from events where {REPLACED} and id = unguaranteed.id)"
    )
    session.define("create index fallbacks on unguaranteed (policy, id) where perhaps_fallback = 1")


def m020_returned_reviews(session: Session) -> None:
    """Count what reviewers gave back, or left until their lease ended."""
    session.define(
        "create table review_returns (reviewer {text} not null, team {text} not null, at {real} not null, "
        "lapsed {integer} not null)",
        "create index review_returns_by_time on review_returns (at)",
    )


def m021_team_members(session: Session) -> None:
    """Keep who was on each team since when, for the chart of what they decide."""
    session.define(
        "create table team_members (team {text} not null, at {real} not null, people {text} not null)",
        "create index team_members_by_time on team_members (team, at)",
    )


MIGRATIONS: Sequence[Callable[[Session], None]] = (
    m001_first_tables,
    m002_decisions_begun,
    m003_audit_retries_and_spending,
    m004_seals,
    m005_every_filter,
    m006_conversations,
    m007_deliveries,
    m008_ledger,
    m009_calibration_rows,
    m010_margins_of_audits,
    m011_gains_in_the_ledger,
    m012_console,
    m013_readable_by,
    m014_reviews,
    m015_edited_calls,
    m016_grading_marks,
    m017_review_links,
    m018_link_turns,
    m019_fallbacks,
    m020_returned_reviews,
    m021_team_members,
)
"""The function at index k takes a database from version k to k + 1."""

ADDITIVE = frozenset(
    {
        m013_readable_by,
        m014_reviews,
        m015_edited_calls,
        m016_grading_marks,
        m017_review_links,
        m018_link_turns,
        m019_fallbacks,
        m020_returned_reviews,
        m021_team_members,
    }
)
"""Those that leave a database usable for releases that do not know them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSchema:
    """Which tables a database has.

    Attributes:
        version: how many migrations were made.
        readable_by: how many of them a release has to know.
        before: how many had been made when it was opened.
    """

    version: int
    readable_by: int
    before: int


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
    session.define("create table if not exists schema_version (version {integer} not null)")
    schema = read_schema(session, location)
    if schema.version >= len(MIGRATIONS):
        return schema
    for migration in MIGRATIONS[schema.version :]:
        migration(session)
    session.run("delete from schema_version")
    session.run("insert into schema_version (version) values (?)", len(MIGRATIONS))
    if m013_readable_by in MIGRATIONS:
        session.run("update schema_version set readable_by = ?", least_reader())
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
    """Return which tables a database has that has been migrated before.

    Raises:
        StoreError: a later release of this package wrote it, and this one cannot work with it.
    """
    rows = session.rows("select * from schema_version")
    version, readable_by = (int(rows[0][0]), int(rows[0][-1])) if rows else (0, 0)
    if version > len(MIGRATIONS) and not 0 < readable_by <= len(MIGRATIONS):
        raise StoreError(
            f"{location}: the database has schema version {version}, which takes a release that knows {readable_by}, and "
            f"this release knows {len(MIGRATIONS)}; upgrade conformal-arbitrage, or name another database"
        )
    return StoreSchema(version=version, readable_by=readable_by, before=version)
