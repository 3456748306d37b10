"""CalibrationOptions, validated once, dials and groups, and the table of combinations that have no proof."""

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, get_args

import numpy as np

from conformal_arbitrage.calibration.learned import Features, ScoreKind
from conformal_arbitrage.calibration.secret import drawing, draws, project_key
from conformal_arbitrage.core.exact import Bools, Draw, Floats, Indices
from conformal_arbitrage.core.risk import (
    Events,
    GuardianSees,
    LogLosses,
    Loss,
    LossMeasure,
    Number,
    RiskCurve,
    as_fraction,
    check_full_sight,
    net_losses,
)
from conformal_arbitrage.errors import InfeasibleError, OptionError, ScoreLogError
from conformal_arbitrage.scorelog.fitness import cluster_sizes
from conformal_arbitrage.types import Boundary, MissingGuardian

if TYPE_CHECKING:  # a gateway reads no logs
    from conformal_arbitrage.scorelog.log import ScoreLog
    from conformal_arbitrage.scorelog.parts import ScoreParts
    from conformal_arbitrage.scorelog.spark import SparkTable

# --- What goes together ---


Feature = Literal[
    "guard", "tighten", "renewal", "several groups", "confidence", "dial", "groups", "range", "red line", "monitor",
    "net", "learned", "session", "simulation", "looking", "floor",
]  # fmt: skip
"""What is asked of a certificate."""
FEATURES: tuple[Feature, ...] = get_args(Feature)
Kind = Literal[
    "net", "path", "learned", "cluster", "own loss", "confidence", "dial", "groups", "merged groups", "session", "menus",
    "restricted sight", "included boundary",
]  # fmt: skip
"""What a certificate is; a calibration both asks and is, so that some names are of both."""

_RISES = "the loss of {kind} may rise with the relaxation, and this rests on its falling"
_NO_RELAXATION = "a learned score has no relaxation to raise; with the margin there is one (--score margin)"
_CLUSTERED = "its rows are not independent of each other, and this counts them as if they were"
_BY_HAND = "; export the rows and calibrate by hand, which begins a new chain"
_NO_CLUSTERS = "stored rows do not say which cluster they belong to" + _BY_HAND
_NO_OWN_LOSS = "the gateway can only compute losses that are registered with it by name" + _BY_HAND
_NO_SESSIONS = "the schedule counts rows of single queries, and a session is due when it is over" + _BY_HAND
_NOT_BUILT = (
    "a proof exists, by walking every breakpoint from the side that defers, but not the search that would use it"
)
_ONE_THRESHOLD = (
    "it replays the Guardian regret with one threshold on the margin; leave loss=, by=, cluster= and score= out"
)
_SINGLE_ROWS = "exchanging single rows would misjudge it; export a log and use `arbitrage evaluate`"
_SESSIONS = (
    "rows that are sessions are certified in router form with the Guardian regret only; leave loss=, cluster=, "
    "confidence=, dial=, by= and score= out"
)
_LEARN_ELSEWHERE = (
    "its proof is for the Guardian regret; learn the score on a part of the rows and calibrate on the others (arbitrage "
    "learn)"
)
_SAME_ROWS = "the score was learned on the rows that it would be certified on"
_SIGNED = "a path has several thresholds, and the red line of gains and losses is known for one"


def _of(reason: str, *kinds: Kind) -> dict[Kind, str]:
    return dict.fromkeys(kinds, reason)


_REFUSED: dict[Feature, dict[Kind, str]] = {
    "guard": {
        **_of(_RISES, "net", "path"),
        "learned": _NO_RELAXATION,
        "groups": "each group would need a guard of its own, from its own audits, which is not built",
        "session": "the promise is about whole sessions, and an audit is about one turn",
    },
    "tighten": {
        **_of(_RISES, "net", "path"),
        "learned": _NO_RELAXATION,
        "cluster": _NO_CLUSTERS,
        "groups": "each group has a threshold of its own, and one is raised at a time; calibrate by hand",
        "own loss": _NO_OWN_LOSS,
        "session": _NO_SESSIONS,
    },
    "renewal": {
        "path": "stored rows hold the scores of two models" + _BY_HAND,
        "learned": "stored rows hold no answers, texts, groups or token counts to learn from; leave these out (calibrate "
        "--score auto --without answers), or use the margin (--score margin)" + _BY_HAND,
        "cluster": _NO_CLUSTERS,
        "own loss": _NO_OWN_LOSS,
        "session": _NO_SESSIONS,
    },
    "several groups": _of(_RISES, "net", "path", "learned"),
    "confidence": {
        **_of(_NOT_BUILT, "net", "path"),
        "merged groups": "which groups are small depends on the log, so its rows of small groups are no independent draws "
        "of their traffic",
        "learned": _SAME_ROWS,
        "cluster": _CLUSTERED,
    },
    "dial": {
        **_of(_NOT_BUILT, "net", "path"),
        "groups": "a dial has one threshold per stop; calibrate the rows of one group with a dial",
        "learned": _SAME_ROWS,
        "cluster": _CLUSTERED,
    },
    "groups": {
        **_of(_NOT_BUILT, "net", "path"),
        "learned": "one score is learned from all rows; calibrate the rows of one group",
        "cluster": "a cluster may reach over several groups",
    },
    "range": {
        "net": "its law is known for losses of 0 or the bound only",
        "path": "its law is known for one threshold only",
        "learned": "its law is known for a score that was fixed before",
        "cluster": _CLUSTERED,
    },
    "red line": {
        "path": _SIGNED,
        "learned": "nothing is proved about the luck of such a calibration; learn on a split, or watch amber only",
        "cluster": _CLUSTERED + "; watch amber only",
        "merged groups": "which groups are small depends on the log, so nothing is proved about the luck of their "
        "calibration",
    },
    "monitor": {
        "path": _SIGNED,
        "session": "the promise is about whole sessions, and an audit is about one turn",
        "own loss": "the gateway can only compute losses that are registered with it by name",
    },
    "net": {
        "restricted sight": 'it compares with the Guardian\'s choice over every action, which needs guardian_sees="all"',
        "included boundary": 'its proof walks tied rows one by one, which needs boundary="random" (--boundary random)',
        "cluster": "its proof walks rows one by one; leave cluster= out, or use the Guardian regret",
    },
    "learned": {
        "restricted sight": 'its proof counts a deferral as no loss, which needs guardian_sees="all"',
        "included boundary": 'draws tell rows of equal scores apart, which needs boundary="random" (--boundary random)',
        "own loss": _LEARN_ELSEWHERE,
        "cluster": "rows of one cluster would be learned from each other; leave cluster= out, or use the margin",
    },
    "session": {
        **_of(_SESSIONS, "menus", "net", "own loss", "cluster", "confidence", "dial", "learned"),
        "groups": "the first turn decides for all, and a later one may name another group; calibrate without groups, or on "
        "single queries",
    },
    "simulation": _of(_ONE_THRESHOLD, "net", "own loss", "cluster", "groups", "learned"),
    "looking": {
        **_of(_SINGLE_ROWS, "net", "own loss", "cluster", "groups", "learned"),
        "session": "turns of one session resemble each other",
    },
    "floor": {
        "own loss": "a deferral may lose by it, and a row that was not asked about does not say how much",
        "restricted sight": "a deferral may lose when the Guardian sees the candidates alone, which needs its scores; use "
        'guardian_sees="all"',
        "path": "each earlier model would need a floor of its own, and every one of them to stay below it",
    },
}
NO_PROOF = {(feature, kind): reason for feature, reasons in _REFUSED.items() for kind, reason in reasons.items()}
"""(feature, kind of certificate) -> why there is no proof for the two together."""


def refusal(feature: Feature, kind: Kind) -> str | None:
    """Return why a feature has no proof for a kind of certificate; None if it has one."""
    if feature not in FEATURES or kind not in get_args(Kind):
        raise OptionError(f"unknown feature {feature!r} or kind {kind!r}; see `Feature` and `Kind`")
    reason = NO_PROOF.get((feature, kind))
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


def unproved(kinds: Sequence[Kind], *wanted: Feature) -> tuple[Feature, Kind, str] | None:
    """Return a feature among these kinds, or asked for besides, that has no proof with one of them; and why."""
    for feature in FEATURES:
        for kind in kinds:
            reason = refusal(feature, kind)
            if reason is not None and (feature in kinds or feature in wanted):
                return feature, kind, reason
    return None


# --- Groups ---


SmallGroups = Literal["defer", "merge"]
"""What happens to a group whose rows cannot keep the budget: its queries are deferred, or such groups share a threshold."""


def threshold_rows(rows: Sequence[Indices], fewest: int | None) -> list[Indices]:
    """Return the rows that the threshold of each group comes from: its own, or those of all small groups.

    Args:
        fewest: groups of fewer rows share a threshold; None if each has its own.
    """
    if fewest is None or not rows:
        return list(rows)
    shared = np.sort(np.concatenate([of_group for of_group in rows if len(of_group) <= fewest] or [rows[0][:0]]))
    return [shared if len(of_group) < fewest else of_group for of_group in rows]


def shared_size(sizes: Mapping[str, int], fewest: int) -> int:
    """Return how many rows the threshold that small groups share comes from."""
    return sum(size for size in sizes.values() if size <= fewest)


# --- The parts of a certificate that holds several thresholds ---


STOPS = ("0.01", "0.015", "0.02", "0.03", "0.04", "0.05", "0.07", "0.1", "0.15", "0.2")
"""The stops of a dial, as shares of the loss bound: fixed here, so that nobody chooses them by looking."""
Membership = str | Sequence[str] | None
"""The group or groups that a query belongs to; the operator says so, not the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialStop:
    """One stop of a dial.

    Attributes:
        relaxation: the threshold that keeps it; None if every query is deferred.
        empirical_risk: total loss / n at the relaxation.
    """

    alpha: float
    relaxation: float | None
    boundary_u: float | None
    empirical_risk: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupThreshold:
    """The threshold of one group.

    Attributes:
        relaxation: the threshold that keeps the budget for this group; None if all of its queries are deferred.
        empirical_risk: total loss / n at the relaxation, over the group's rows.
    """

    n: int
    relaxation: float | None
    boundary_u: float | None
    empirical_risk: float


def lower_stop(dial: Sequence[DialStop], alpha: float) -> DialStop:
    """Return the largest stop that does not exceed alpha.

    Raises:
        OptionError: every stop does.
    """
    within = [stop for stop in dial if stop.alpha <= alpha]
    if not within:
        raise OptionError(f"the lowest stop of the dial is {dial[0].alpha:g}; got alpha {alpha:g}, choose a larger one")
    return within[-1]


def group_threshold(groups: Mapping[str, GroupThreshold], membership: Membership) -> tuple[float | None, float | None]:
    """Return relaxation and boundary draw for a query: the largest of its groups'; (None, None) defers it.

    A query without a group, or of one that the log does not have, is deferred.
    """
    names = [membership] if isinstance(membership, str) else list(membership or ())
    known = [groups.get(name) for name in names]
    pairs = [(group.relaxation, group.boundary_u) for group in known if group is not None]
    if not names or len(pairs) < len(names) or any(relaxation is None for relaxation, _ in pairs):
        return None, None
    return max(pairs, key=lambda pair: threshold_rank(*pair))


def threshold_rank(relaxation: float | None, boundary_u: float | None) -> tuple[float, float]:
    """Return what orders thresholds by how much they defer."""
    return inf if relaxation is None else relaxation, 1.0 if boundary_u is None else boundary_u


# --- CalibrationOptions ---


REGRET = "guardian_regret"
NET: Final = "net"
"""The loss that counts gains: the grade of the Guardian's choice minus that of the decision."""
_Options = TypeVar("_Options")
_LARGEST_CLUSTER = 1_000_000


class CalibrationKeywords(TypedDict, total=False):
    """The fields of `CalibrationOptions` as single keywords; None counts as not given."""

    guardian_sees: GuardianSees | None
    boundary: Boundary | None
    loss_bound: Number | None
    loss: Loss | Literal["net"] | None
    full_sight_loss: Number | None
    grid: Number | None
    missing_guardian: MissingGuardian | None
    key: bytes | None
    cluster: str | None
    max_cluster_size: int | None
    confidence: Number | None
    zero_one: bool | None
    dial: bool | None
    by: str | None
    small_groups: SmallGroups | None
    group_source: str | None
    margins: bool | None
    score: ScoreKind | None
    features: Features | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """How to calibrate: the rule, the loss it is measured in, and how missing scores count.

    Attributes:
        guardian_sees: what a deferral shows the Guardian: "all" (calibrated on its own loss), "candidates" (the
            paper), or "all-restricted-loss" (the paper's CA*).
        boundary: "random" keeps a share of the actions exactly at the threshold gap and so spends the whole budget;
            "include" keeps all of them (the paper). By default random, unless the log has no ids, which tell rows of one
            question apart, or a grid is given.
        loss_bound: the largest possible loss B; may be omitted, and is then 1, if all Guardian scores lie in [0, 1].
            Your own loss always needs it.
        loss: a loss of your own over (row, indices in sight), raised to its monotone envelope; the Guardian regret if
            None; "net" for the `correct` of the Guardian's choice minus that of the decision, gains counted.
        full_sight_loss: the largest value that your own loss can have with every action in sight; 0 if None. There is
            no certificate for a smaller alpha.
        grid: restrict the relaxation to 0, grid, ..., 1, with boundary="include".
        missing_guardian: "worst_case" counts a row without a Guardian score as a loss of B unless every action is in
            sight.
        key: the secret bytes behind the draws, the same for all calibrations of a project; by default those of the secret
            that `ProjectSecret.find` finds.
        cluster: the column that says which rows belong together, such as a conversation; clusters rather than rows are
            then assumed exchangeable.
        max_cluster_size: the most rows that any cluster may ever have, as declared; required with `cluster`.
        confidence: the probability, over calibration logs, with which the long-run loss of this one certificate is to be
            at most alpha; None promises an average over calibrations instead. There is no default.
        zero_one: declare that every loss is 0 or the bound, which makes a confidence cheaper; a binarized log with a
            bound of 1 declares it by itself.
        dial: certify ten fixed budgets together, so that alpha may be chosen among them after looking; needs `confidence`.
        by: the column that says which group a row belongs to: one threshold, and one promise, for each.
        small_groups: groups of fewer than ceil(B / alpha) - 1 rows, which cannot keep the budget alone, are deferred; with
            "merge" they share one threshold, and the promise is about their average.
        group_source: what names the group of a live query, such as "metadata.subject"; a policy must name the same. By
            default what the log says, if it was exported from records.
        margins: keep the quantiles of the margins in the certificate; a policy with a guard needs them.
        score: what queries are ordered by: their margin; "learned", a score learned from this log without setting rows
            aside; or "auto", for each query whichever of the two keeps more rows.
        features: what a learned score is learned from; by default groups and tokens, if the log has them.
    """

    guardian_sees: GuardianSees = "all"
    boundary: Boundary | None = None
    loss_bound: Number | None = None
    loss: Loss | Literal["net"] | None = None
    full_sight_loss: Number | None = None
    grid: Number | None = None
    missing_guardian: MissingGuardian | None = None
    key: bytes | None = None
    cluster: str | None = None
    max_cluster_size: int | None = None
    confidence: Number | None = None
    zero_one: bool = False
    dial: bool = False
    by: str | None = None
    small_groups: SmallGroups = "defer"
    group_source: str | None = None
    margins: bool = False
    score: ScoreKind = "margin"
    features: Features | None = None

    def __post_init__(self) -> None:
        """Reject unknown values and options that exclude each other."""
        self._refuse_unknown_values()
        self._refuse_lone_options()
        refused = unproved(self.kinds, *(("guard",) if self.margins else ()))
        if refused is not None:
            feature, kind, reason = refused
            raise OptionError(f"{feature} and {kind} do not go together: {reason}")
        if not self.learned and self.features is not None:
            raise OptionError('features= are what a score is learned from; give score="auto" (--score auto) as well')
        self._check_own_loss()

    def _refuse_unknown_values(self) -> None:
        for name, known in (
            ("guardian_sees", get_args(GuardianSees)),
            ("boundary", (None, *get_args(Boundary))),
            ("missing_guardian", (None, *get_args(MissingGuardian))),
            ("loss", (self.own_loss, NET)),
            ("small_groups", get_args(SmallGroups)),
            ("score", get_args(ScoreKind)),
        ):
            if getattr(self, name) not in known:
                allowed = ", ".join(repr(value) for value in known)
                raise OptionError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}")

    def _refuse_lone_options(self) -> None:
        """Refuse options that belong to others which are not there, or exclude others that are."""
        if (self.cluster is None) != (self.max_cluster_size is None):
            raise OptionError("cluster and max_cluster_size belong together; give both or neither")
        if self.max_cluster_size is not None and not 1 <= self.max_cluster_size <= _LARGEST_CLUSTER:
            raise OptionError(f"max_cluster_size must lie in 1 to {_LARGEST_CLUSTER}; got {self.max_cluster_size!r}")
        if self.boundary == "include" and self.confidence is None and self.key is not None:
            raise OptionError('a key is used with boundary="random" or a confidence only; drop one of the two')
        if self.boundary == "random" and self.grid is not None:
            raise OptionError('a grid goes with boundary="include" only; drop one of the two')
        if self.key is not None and not (isinstance(self.key, bytes) and self.key):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError("the key must be bytes and not empty; use 16 random bytes or more")
        if self.confidence is not None and not 0 < as_fraction(self.confidence, name="confidence") < 1:
            raise OptionError(f"confidence must lie above 0 and below 1; got {self.confidence!r}")
        if self.dial and self.confidence is None:
            raise OptionError("a dial holds with high probability only; give confidence= (--confidence 0.95)")
        if self.merges and self.by is None:
            raise OptionError('small_groups="merge" needs groups: give by= (--by COLUMN)')
        if self.group_source is not None and self.by is None:
            raise OptionError(
                "group_source= says what names a group: give by= (--by COLUMN), or a learned score's features"
            )

    def _check_own_loss(self) -> None:
        if self.own_loss is not None and self.loss_name in (REGRET, NET):
            raise OptionError(f"your own loss cannot be named {self.loss_name}; rename the function")
        if self.own_loss is not None and self.loss_bound is None:
            raise OptionError("your own loss needs loss_bound=, the largest value it can have, from what it means")
        if self.full_sight_loss is not None:
            if self.own_loss is None:
                raise OptionError("full_sight_loss= is for a loss of your own; the Guardian's own is 0 in full sight")
            if as_fraction(self.full_sight_loss, name="full_sight_loss") < 0:
                raise OptionError(f"full_sight_loss must be 0 or more; got {self.full_sight_loss!r}")

    @property
    def kinds(self) -> list[Kind]:
        """What kind of certificate these options make, in the words of `NO_PROOF`."""
        kinds: dict[Kind, bool] = {
            "net": self.net,
            "own loss": self.own_loss is not None,
            "learned": self.learned,
            "cluster": self.cluster is not None,
            "confidence": self.confidence is not None,
            "dial": self.dial,
            "groups": self.by is not None,
            "merged groups": self.merges,
            "restricted sight": self.guardian_sees != "all",
            "included boundary": self.boundary == "include",
        }
        return [kind for kind, holds in kinds.items() if holds]

    def settled(
        self, log: "ScoreLog | ScoreParts | SparkTable", find_key: Callable[[], bytes] = project_key
    ) -> "CalibrationOptions":
        """Return the options with their boundary for a log, and with a key if draws are made.

        What settles the boundary is that there is a column of ids, never the rows: without ids the draw of a row is that
        of its question, which a query with an id of its own would not share.

        Args:
            log: the log.
            find_key: returns the key if draws are made and none was given.
        """
        drawn = self.grid is None and (self.net or self.learned or log.has_ids)
        boundary: Boundary = self.boundary or ("random" if drawn else "include")
        keyed = boundary == "random"
        if self.confidence is not None:
            keyed |= not self.is_binary(log, as_fraction(self.loss_bound or 1, name="loss_bound"))
        return replace(self, boundary=boundary, key=(self.key or find_key()) if keyed else None)

    def delta(self, groups: int = 1) -> float | None:
        """Return the level of each single test: what the confidence leaves, shared by the stops of a dial and by groups."""
        if self.confidence is None:
            return None
        allowed = 1 - as_fraction(self.confidence, name="confidence")
        return float(allowed / (len(STOPS) if self.dial else 1) / groups)

    def is_binary(self, log: "ScoreLog | ScoreParts | SparkTable", bound: Fraction) -> bool:
        """Tell whether every loss is 0 or the bound by declaration, never by what the log happens to show."""
        return self.zero_one or (is_binarized(log) and self.loss is None and bound == 1)

    @property
    def merges(self) -> bool:
        """Whether small groups share a threshold."""
        return self.small_groups == "merge"

    @property
    def learned(self) -> bool:
        """Whether the score is learned from the log."""
        return self.score != "margin"

    @property
    def net(self) -> bool:
        """Whether gains are counted."""
        return isinstance(self.loss, str)

    @property
    def own_loss(self) -> Loss | None:
        """The user's own loss, if there is one."""
        return None if isinstance(self.loss, str) else self.loss

    def grades(self, log: "ScoreLog") -> Floats | None:
        """Return the outcome that the net loss compares, for every action; None for other losses."""
        if not self.net:
            return None
        if log.binary is not None:
            raise OptionError('loss="net" compares outcomes, not Guardian scores: leave binarized() (--binarize) out')
        if "correct" not in log.outcome_names:
            raise OptionError(
                f'{log.source}: loss="net" needs to know which answers were right; add a `label` or `correct` column'
            )
        return log.outcome("correct")

    def unknown_loss(self, log: "ScoreLog") -> Bools:
        """Return which rows of a log have an unknown loss."""
        grades = self.grades(log)
        return log.unknown_loss if grades is None else np.isnan(net_losses(log, grades))

    def measure(self, log: "ScoreLog") -> LossMeasure:
        """Return how the losses of a log are measured."""
        return LossMeasure(
            guardian_sees=self.guardian_sees,
            loss=self.own_loss,
            grades=self.grades(log),
            missing_loss=self._missing_loss,
            full_sight_loss=self.in_full_sight,
        )

    def losses(self, log: "ScoreLog") -> LogLosses:
        """Return the loss of every row as its candidate set grows."""
        return self.measure(log).losses(log)

    def curve(self, log: "ScoreLog", events: Events | None = None) -> RiskCurve:
        """Return the risk of a log at every relaxation that these options allow; its events, if they are known."""
        measure = self.measure(log)
        events = measure.events(log) if events is None else events
        curve = RiskCurve.from_events(log, events, grades=measure.grades, u=self.drawing(log))
        return curve if self.grid is None else curve.on_grid(self.grid)

    def drawing(self, log: "ScoreLog") -> Draw | None:
        """Return what gives the draws of some rows, or None unless the boundary is random."""
        return None if self.boundary != "random" else drawing(self.drawing_key(), log)

    def draws(self, log: "ScoreLog") -> Floats | None:
        """Return one draw per row, or None unless the boundary is random."""
        return None if self.boundary != "random" else draws(self.drawing_key(), log)

    def rounding_draws(self, log: "ScoreLog") -> Floats:
        """Return the draws that round losses for a learned score, independent of those that tell ties apart.

        They need ids: copies of one row that shared a draw would all lose or all not, which breaks any budget half the
        time.
        """
        if log.id is None:
            raise OptionError(f"{log.source}: a learned score needs an `id` column, unique; row numbers will not do")
        return draws(hmac.digest(self.drawing_key(), b"loss rounding v1", "sha256"), log)

    def drawing_key(self) -> bytes:
        """Return the key behind the draws, which `settled` finds."""
        if self.key is None:
            raise OptionError('boundary="random" needs a key: pass key=, or take options.settled(log)')
        return self.key

    def check_full_sight(
        self, alpha: Fraction, largest: tuple[Fraction, int], *, tick: Fraction, source: str
    ) -> Fraction:
        """Return the declared loss with every action in sight, which no row may exceed, nor may it exceed alpha.

        Without this check, a budget that deferring cannot keep would be certified on lucky logs only, and broken by them.

        Args:
            alpha: the risk budget.
            largest: the largest such loss of the log, and its row.
            tick: the unit that losses were rounded to.
            source: where the log came from, for messages.

        Raises:
            InfeasibleError: the declared loss is above alpha.
            ScoreLogError: a row exceeds it.
        """
        declared = check_full_sight(self.in_full_sight, largest, tick=tick, source=source)
        if declared > alpha:
            raise InfeasibleError(
                f"the loss '{self.loss_name}' can be {float(declared):g} with every action in sight, so that not even "
                f"deferring every query keeps alpha {float(alpha):g}; use an alpha of {float(declared):g} or more"
            )
        return declared

    @property
    def in_full_sight(self) -> Number:
        """The largest loss with every action in sight, as declared."""
        return 0 if self.full_sight_loss is None else self.full_sight_loss

    def clusters(self, log: "ScoreLog") -> int | None:
        """Return the number of clusters of a log, or None without a cluster column; refuse one that is too large."""
        if self.cluster is None or self.max_cluster_size is None:
            return None
        sizes = cluster_sizes(log, self.cluster)
        if sizes.max() > self.max_cluster_size:
            raise ScoreLogError(
                f"{log.source}: a cluster of column '{self.cluster}' has {sizes.max()} rows, more than the declared "
                f"{self.max_cluster_size}; declare the largest that can ever occur: max_cluster_size= "
                "(--max-cluster-size)"
            )
        return len(sizes)

    @property
    def unseen(self) -> int:
        """The most rows that the next unit may have: one, or those of a cluster."""
        return self.max_cluster_size or 1

    @property
    def loss_name(self) -> str:
        """The name of the loss in certificates."""
        if self.loss is None or isinstance(self.loss, str):
            return self.loss or REGRET
        return str(getattr(self.loss, "__name__", type(self.loss).__name__))

    @property
    def _missing_loss(self) -> Number | None:
        if self.missing_guardian is None:
            return None
        return 1 if self.loss_bound is None else self.loss_bound


def is_binarized(log: "ScoreLog | ScoreParts | SparkTable") -> bool:
    """Return whether the loss of a log is measured on the paper's 0/1 Guardian."""
    return log.binary is not None and log.binary is not False


def check_keywords(function: str, keywords: Mapping[str, Any], known: type[Any]) -> None:
    """Refuse a keyword that a function does not take, in Python's own words; `known` is a TypedDict."""
    unknown = set(keywords) - set(known.__annotations__)
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")


def resolve_options(
    options: _Options | None, kind: type[_Options], keywords: Mapping[str, Any], *, name: str
) -> _Options:
    """Return `options`, or build them from single keywords; refuse both at once.

    Args:
        keywords: single keywords; None counts as not given.
        name: the parameter that takes the object, for the message.
    """
    present = {key: value for key, value in keywords.items() if value is not None}
    if options is None:
        return kind(**present)
    if present:
        first = next(iter(present))
        raise OptionError(f"{first}= and {name}= exclude each other; write {name}={kind.__name__}({first}=...)")
    return options
