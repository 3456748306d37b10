"""The decision record and everything else a gateway must not lose, over SQLite or PostgreSQL.

A store runs operations, which are functions: `await store.run(reviews.take, "ann", teams=["support"])`. Knows nothing of
HTTP, models, what a certificate means, or how a verdict is reached.
"""
