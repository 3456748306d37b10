"""This release as its successor: one more migration, which only adds. `python -m tests.gateway.next_release serve ...`"""

from conformal_arbitrage.cli import main
from conformal_arbitrage.store import postgres, schema
from tests.gateway.durability import guardian as earlier_guardian


def add_notes(session):
    """Add a table and a column that the release before knows nothing of."""
    session.define("create table notes (id {text} primary key, body {text})")
    session.define("alter table audits add column note {text}")


async def guardian(query):
    """The model that the upgrade brings: another function, so another identity."""
    return [1 - score for score in await earlier_guardian(query)]


if __name__ == "__main__":
    schema.MIGRATIONS = postgres.MIGRATIONS = (*schema.MIGRATIONS, add_notes)
    schema.ADDITIVE = schema.ADDITIVE | {add_notes}
    main()
