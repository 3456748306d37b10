"""What goes together: features that have no proof for a kind of certificate are refused by name.

Most of what happens after calibration uses that the loss falls as the relaxation grows. Net losses, paths of more than two
models and learned scores lack that; clusters and losses of one's own have limits of their own.

Knows nothing of policies or configuration files.
"""

from typing import Literal, get_args

from conformal_arbitrage.errors import OptionError

Feature = Literal[
    "guard", "tighten", "renewal", "several groups", "confidence", "dial", "groups", "range", "red line", "monitor"
]
Kind = Literal["net", "path", "learned", "cluster", "own loss", "groups", "merged groups", "session"]

_RISES = "the loss of {kind} may rise with the relaxation, and this rests on its falling"
_CLUSTERED = "its rows are not independent of each other, and this counts them as if they were"
_BY_HAND = "; export the rows and calibrate by hand, which begins a new chain"
_NO_CLUSTERS = "stored rows do not say which cluster they belong to" + _BY_HAND
_NO_OWN_LOSS = "the gateway can only compute losses that are registered with it by name" + _BY_HAND
_NO_SESSIONS = "the schedule counts rows of single queries, and a session is due when it is over" + _BY_HAND
_NOT_BUILT = (
    "a proof exists, by walking every breakpoint from the side that defers, but not the search that would use it"
)
_SIGNED = "a path has several thresholds, and the red line of gains and losses is known for one"
REFUSED: dict[tuple[Feature, Kind], str] = {
    ("guard", "net"): _RISES,
    ("guard", "path"): _RISES,
    ("guard", "learned"): _RISES,
    ("guard", "groups"): "each group would need a guard of its own, from its own audits, which is not built",
    ("guard", "session"): "the promise is about whole sessions, and an audit is about one turn",
    ("tighten", "net"): _RISES,
    ("tighten", "path"): _RISES,
    ("tighten", "learned"): _RISES,
    ("tighten", "cluster"): _NO_CLUSTERS,
    ("tighten", "groups"): "each group has a threshold of its own, and one is raised at a time; calibrate by hand",
    ("tighten", "own loss"): _NO_OWN_LOSS,
    ("tighten", "session"): _NO_SESSIONS,
    ("renewal", "path"): "stored rows hold the scores of two models" + _BY_HAND,
    ("renewal", "learned"): "stored rows hold no features to learn from" + _BY_HAND,
    ("renewal", "cluster"): _NO_CLUSTERS,
    ("renewal", "own loss"): _NO_OWN_LOSS,
    ("renewal", "session"): _NO_SESSIONS,
    ("several groups", "net"): _RISES,
    ("several groups", "path"): _RISES,
    ("several groups", "learned"): _RISES,
    ("confidence", "net"): _NOT_BUILT,
    ("dial", "net"): _NOT_BUILT,
    ("groups", "net"): _NOT_BUILT,
    ("confidence", "path"): _NOT_BUILT,
    ("dial", "path"): _NOT_BUILT,
    ("groups", "path"): _NOT_BUILT,
    ("dial", "groups"): "a dial has one threshold per stop; calibrate the rows of one group with a dial",
    (
        "confidence",
        "merged groups",
    ): "which groups are small depends on the log, so its rows of small groups are no independent draws of their traffic",
    ("confidence", "learned"): "the score was learned on the rows that it would be certified on",
    ("dial", "learned"): "the score was learned on the rows that it would be certified on",
    ("groups", "learned"): "one score is learned from all rows; calibrate the rows of one group",
    ("range", "net"): "its law is known for losses of 0 or the bound only",
    ("range", "path"): "its law is known for one threshold only",
    ("range", "learned"): "its law is known for a score that was fixed before",
    ("red line", "path"): _SIGNED,
    ("monitor", "path"): _SIGNED,
    (
        "red line",
        "learned",
    ): "nothing is proved about the luck of such a calibration; learn on a split, or watch amber only",
    ("confidence", "cluster"): _CLUSTERED,
    ("dial", "cluster"): _CLUSTERED,
    ("groups", "cluster"): "a cluster may reach over several groups",
    ("range", "cluster"): _CLUSTERED,
    ("red line", "cluster"): _CLUSTERED + "; watch amber only",
    (
        "red line",
        "merged groups",
    ): "which groups are small depends on the log, so nothing is proved about the luck of their calibration",
    ("monitor", "session"): "the promise is about whole sessions, and an audit is about one turn",
    ("monitor", "own loss"): "the gateway can only compute losses that are registered with it by name",
}
"""(feature, kind of certificate) -> why there is no proof for the two together."""


def refusal(feature: Feature, kind: Kind) -> str | None:
    """Return why a feature has no proof for a kind of certificate; None if it has one."""
    if feature not in get_args(Feature) or kind not in get_args(Kind):
        raise OptionError(f"unknown feature {feature!r} or kind {kind!r}; see `Feature` and `Kind`")
    reason = REFUSED.get((feature, kind))
    return None if reason is None else reason.format(kind=kind)


def refuse_combination(feature: Feature, *kinds: Kind) -> None:
    """Refuse a feature for a certificate of these kinds.

    Raises:
        OptionError: one of them has no proof for it.
    """
    for kind in kinds:
        reason = refusal(feature, kind)
        if reason is not None:
            raise OptionError(f"{feature} and {kind} do not go together: {reason}")
