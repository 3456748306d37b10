"""Groups: which rows the threshold of each group comes from.

Small groups may share one threshold. A group is small if it has fewer than a number of rows, fixed in advance, with the
query counted as one of its rows: whether a row is in a small group must not depend on which of the rows is the query. So a
group with exactly `fewest` rows has a threshold of its own, since its next query makes it one more; but for a query of a
smaller group it is one of the small ones, and its rows are part of theirs. Among the rows of small groups, query included,
every one is equally likely to be the query: the budget is kept on average over them, not in each of them.

Knows nothing of losses, certificates or how thresholds are found.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from conformal_arbitrage.core.arrays import Indices

SmallGroups = Literal["defer", "merge"]
"""What happens to a group whose rows cannot keep the budget: its queries are deferred, or such groups share a threshold."""


def threshold_rows(rows: Sequence[Indices], fewest: int | None) -> list[Indices]:
    """Return the rows that the threshold of each group comes from: its own, or those of all small groups.

    Args:
        rows: the rows of each group.
        fewest: groups of fewer rows share a threshold; None if each has its own.
    """
    if fewest is None or not rows:
        return list(rows)
    shared = np.sort(np.concatenate([own for own in rows if len(own) <= fewest] or [rows[0][:0]]))
    return [shared if len(own) < fewest else own for own in rows]


def shared_size(sizes: Mapping[str, int], fewest: int) -> int:
    """Return how many rows the threshold that small groups share comes from."""
    return sum(size for size in sizes.values() if size <= fewest)
