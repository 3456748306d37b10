"""The parts of a certificate: how a query is decided, what is promised in which loss, on what evidence, made by whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from conformal_arbitrage.calibration.learned import LearnedTerms
from conformal_arbitrage.calibration.options import NET, REGRET, DialStop, GroupThreshold, SmallGroups
from conformal_arbitrage.core.chains import (
    NO_ANSWER,
    PathStop,
    normal_answer,
    path_choice,
    path_entries,
    predicted_losses,
    stage_features,
)
from conformal_arbitrage.core.exact import Floats, Integers
from conformal_arbitrage.core.risk import GuardianSees
from conformal_arbitrage.types import Boundary, MissingGuardian

Status = Literal["ok", "always_defer", "by_group", "learned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChain:
    """Models that are asked in order, and where an answer of each enters the path.

    Attributes:
        models: the names, in the order in which they are asked.
        coefficients: of each stage, for the predicted loss of stopping there; empty with one model, whose path is its
            confidence alone.
        corners: the path, one threshold per stage at each corner; empty with one model.
    """

    models: tuple[str, ...]
    coefficients: tuple[tuple[float, ...], ...] = ()
    corners: tuple[tuple[float, ...], ...] = ()

    @property
    def end(self) -> float:
        """A position beyond every entry."""
        return float(len(self.corners) or 2)

    def entries(self, confidence: Floats, answers: Integers) -> Floats:
        """Return where on the path each row may stop at each model; inf if nowhere.

        Args:
            confidence: rows x models of the chain; NaN where a model gave none.
            answers: rows x models; equal numbers are equal answers.
        """
        stages = range(len(self.models))
        return np.column_stack([self.stage_entries(stage, confidence, answers) for stage in stages])

    def stage_entries(self, stage: int, confidence: Floats, answers: Integers) -> Floats:
        """Return the column of `entries` for one stage; later models are not looked at."""
        unable = np.isnan(confidence[:, stage])
        if not self.corners:
            return np.where(unable, np.inf, np.round(1 - confidence[:, stage], 12))
        features = stage_features(confidence, answers, stage)
        risk = np.where(unable, np.nan, predicted_losses(features, np.array(self.coefficients[stage])))
        return path_entries(risk[:, None], np.array(self.corners)[:, [stage]])[:, 0]

    def entry(self, confidences: Sequence[float | None], answers: Sequence[str | None]) -> float:
        """Return where one query may stop at the last model that has answered, given what all so far have said."""
        known = np.array(
            [[np.nan if confidence is None else confidence for confidence in confidences]], dtype=np.float64
        )
        codes: dict[str, int] = {}
        replies = [codes.setdefault(normal_answer(text), len(codes)) if text else NO_ANSWER for text in answers]
        return float(self.stage_entries(len(confidences) - 1, known, np.array([replies], dtype=np.int64))[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEstimate:
    """What a chain is expected to cost at the risk budget, as a share of the Guardian's cost alone."""

    models: tuple[str, ...]
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTuning:
    """The part of a log that a chain was chosen and fitted on; the certificate's rows are the others.

    Attributes:
        share: of the log, as asked for.
        seed: of the hash that drew them.
        fixed: whether the chain was given, and only its path fitted.
        estimates: what each chain that was considered would cost, cheapest first; empty if the chain was given.
    """

    rows: int
    share: float
    seed: int
    ids_sha256: str
    fixed: bool = False
    estimates: tuple[ChainEstimate, ...] = ()

    @property
    def advice(self) -> str | None:
        """What the estimates say about pairs and longer chains; None if there was nothing to choose."""
        pairs = [estimate for estimate in self.estimates if len(estimate.models) == 1]
        chains = [estimate for estimate in self.estimates if len(estimate.models) > 1]
        if len(pairs) < 2 or not chains:
            return None
        best, usual, chain = pairs[0], pairs[len(pairs) // 2], chains[0]
        expected = (
            f"before the Guardian, {best.models[0]} alone is expected to take {100 * best.cost:.0f} % of the Guardian's "
            f"cost, {usual.models[0]} alone {100 * usual.cost:.0f} %, and the best longer chain, "
            f"{' > '.join(chain.models)}, {100 * chain.cost:.0f} %"
        )
        if usual.cost - best.cost > best.cost - chain.cost:
            return f"the right pair matters more than a longer chain: {expected}"
        return f"a longer chain pays: {expected}"


def is_chain(chain: ModelChain) -> bool:
    """Tell whether a chain names models, each once, and has the numbers of a path for them if there are several."""
    stages, learned = len(chain.models), bool(chain.corners)
    if not stages or len(set(chain.models)) < stages or learned != (stages > 1):
        return False
    if [len(numbers) for numbers in chain.coefficients] != [2 + 3 * stage for stage in range(stages if learned else 0)]:
        return False
    if any(len(corner) != stages for corner in chain.corners):
        return False
    corners = np.array(chain.corners, dtype=np.float64).reshape(-1, stages)
    return not learned or bool((np.diff(corners, axis=0) >= 0).all() and (corners[0] == 0).all())


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a certificate; a field that has its default is not written."""


# --- Rules: how a query is decided ---


class _Drawn(_Part, frozen=True, kw_only=True):
    """A rule of which draws tell apart what stands right at its line; whoever is deferred to answers by themselves."""

    @property
    def guardian_sees(self) -> GuardianSees:
        """Everything: a deferral counts as no loss."""
        return "all"

    @property
    def boundary(self) -> Boundary:
        """Random, by the draws."""
        return "random"


class Threshold(_Part, tag="threshold", frozen=True, kw_only=True):
    """One threshold on the margin.

    Attributes:
        relaxation: actions within this gap of the top one are candidates; None to defer every query.
        boundary_u: for boundary="random", the largest draw that keeps an action exactly at the threshold gap.
        guardian_sees: what a deferral shows the Guardian, and so what the loss was measured on.
        boundary: the rule exactly at the threshold gap.
        grid: the step of the grid that the relaxation was restricted to.
    """

    relaxation: float | None
    boundary_u: float | None
    guardian_sees: GuardianSees
    boundary: Boundary
    grid: float | None = None

    @property
    def status(self) -> Status:
        """Whether there is a relaxation."""
        return "always_defer" if self.relaxation is None else "ok"


class ByGroup(_Part, tag="by_group", frozen=True, kw_only=True):
    """A threshold for each group; a query of an unknown group is deferred.

    Attributes:
        by: the column that says which group a row belongs to.
        small_groups: "merge" if small groups share one.
        guardian_sees, boundary, grid: as in `Threshold`.
    """

    by: str
    groups: dict[str, GroupThreshold]
    guardian_sees: GuardianSees
    boundary: Boundary
    grid: float | None = None
    small_groups: SmallGroups = "defer"

    @property
    def status(self) -> Status:
        """That groups decide."""
        return "by_group"


class Learned(_Drawn, tag="learned", frozen=True, kw_only=True):
    """A score learned from the rows of the log.

    Attributes:
        score: "learned", or "auto" if the margin is a candidate as well.
        terms: what it is learned from; None if there is no room for a single loss, so that every query is deferred.
    """

    score: Literal["auto", "learned"]
    terms: LearnedTerms | None

    @property
    def status(self) -> Status:
        """Whether there is a score."""
        return "always_defer" if self.terms is None else "learned"


class Path(_Drawn, tag="path", frozen=True, kw_only=True):
    """A cascade: models that are asked in order, and where on their path to stop.

    Attributes:
        chain: the models in the order in which they are asked, with their path.
        models: the cheap models of the log that the chain was chosen among.
        position, u: where to stop: an answer is given if its entry and its query's draw come before; None if the Guardian
            answers everything.
        rounded: whether losses other than 0, 1 and -1 were rounded by a draw.
        tuning: the rows that the chain was chosen on.
        cost: mean dollars per query at the stop.
        guardian_cost: mean dollars per query if the Guardian alone is asked.
        guardian_share: share of the rows that the Guardian answers.
    """

    chain: ModelChain
    models: tuple[str, ...]
    guardian: str
    position: float | None
    u: float | None
    rounded: bool
    tuning: ChainTuning
    cost: float
    guardian_cost: float
    guardian_share: float

    @property
    def status(self) -> Status:
        """Whether there is a stop."""
        return "always_defer" if self.position is None else "ok"

    @property
    def stop(self) -> PathStop | None:
        """Where the path stops; None if the Guardian answers everything."""
        return None if self.position is None or self.u is None else PathStop(self.position, self.u)

    def stops(self, confidences: Sequence[float | None], answers: Sequence[str | None], u: float) -> bool:
        """Tell whether the answer of the model that was asked last is given.

        Args:
            confidences: of the models asked so far, in the chain's order; None where one failed.
        """
        stop = self.stop
        if stop is None:
            return False
        return path_choice(np.array([[self.chain.entry(confidences, answers)]]), np.array([u]), stop).tolist() == [0]


class Cutoff(_Drawn, tag="cutoff", frozen=True, kw_only=True):
    """Machine labels are kept where the risk is low; experts label the sample and the rest of a batch.

    Attributes:
        keeps: "below" the cutoff, in the order of (risk, tie), "all" or "none" of the items outside the sample.
        risk: of the first item that is not kept; None unless `keeps` is "below".
        tie: the draw that orders it among items of equal risk; None unless `keeps` is "below".
        kept: how many machine labels are kept.
        wrong_at: places of wrong items of the sample in the order of risk, from 0, for a figure: each, or some if many.
        learned: what the risk was learned from on the pilot; empty if it is as it was stated.
    """

    keeps: Literal["below", "all", "none"]
    risk: float | None
    tie: int | None
    kept: int
    wrong_at: tuple[int, ...] = ()
    learned: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """Whether any machine label is kept."""
        return "ok" if self.kept else "always_defer"


LiveRule = Threshold | ByGroup | Learned | Path
"""What can decide queries to come."""
Rule = LiveRule | Cutoff


# --- Promises ---


class Average(_Part, tag="average", frozen=True, kw_only=True):
    """The expected loss of the next decision, over calibrations and queries, is at most alpha."""

    alpha: float


class Confident(_Part, tag="confident", frozen=True, kw_only=True):
    """With this probability the long-run loss of this one certificate is at most alpha, by groups in all of them."""

    alpha: float
    confidence: float


class Dial(_Part, tag="dial", frozen=True, kw_only=True):
    """With this probability the long-run loss is within every stop, so alpha may be chosen among them after looking."""

    alpha: float
    confidence: float
    stops: tuple[DialStop, ...]


class Cluster(_Part, tag="cluster", frozen=True, kw_only=True):
    """The expected total loss of the next cluster is at most alpha times its expected number of queries.

    Attributes:
        alpha: the risk budget of a query.
        cluster: the column that says which rows belong together.
        clusters: how many the log has.
        max_cluster_size: the most rows that any cluster may ever have, as declared.
    """

    alpha: float
    cluster: str
    clusters: int
    max_cluster_size: int


class PerSession(_Part, tag="session", frozen=True, kw_only=True):
    """The expected loss of the next session is at most alpha; a row is a whole session."""

    alpha: float


class Batch(_Part, tag="batch", frozen=True, kw_only=True):
    """With this probability over the draw of the sample, at most floor(error n) kept machine labels of a batch are wrong.

    Attributes:
        error: the largest share of all n items.
        confidence: the probability, over all draws of a sample from these items.
        level: the probability with which this one draw may fail.
        sample: how many of the items were drawn for experts to label.
        pilot: how many of them trained the score, and do not certify.
        draw: which draw of a sample from these items it was, counted from 1.
        limit: wrong items of the sample below the cutoff at most; -1 if the sample is too small to say anything. None if
            losses are graded, so that they are added up instead.
        chosen_after: whether error or confidence are others than those fixed before the draw, so that nothing is promised.
    """

    error: float
    confidence: float
    level: float
    sample: int
    limit: int | None
    pilot: int = 0
    draw: int = 1
    chosen_after: bool = False

    @property
    def alpha(self) -> float:
        """The largest share of wrong labels."""
        return self.error


LivePromise = Average | Confident | Dial | Cluster | PerSession
"""What can be promised about queries to come."""
Promise = LivePromise | Batch


# --- Losses ---


class _Bounded(_Part, frozen=True, kw_only=True):
    """What every loss has.

    Attributes:
        zero_one: whether every loss is declared to be 0 or the bound.
        binarized: whether it was measured on the 0/1 Guardian.
        missing_guardian: how rows without a Guardian score were counted.
    """

    bound: float
    zero_one: bool = False
    binarized: bool = False
    missing_guardian: MissingGuardian | None = None

    @property
    def in_full_sight(self) -> float:
        """The largest loss with every action in sight."""
        return 0.0

    @property
    def least(self) -> float:
        """The smallest loss that a decision can have."""
        return 0.0

    @property
    def binary(self) -> bool:
        """Whether every loss is 0 or the bound by declaration."""
        return self.zero_one


class Regret(_Bounded, tag=REGRET, frozen=True, kw_only=True):
    """What the Guardian does better."""

    @property
    def binary(self) -> bool:
        """Whether every loss is 0 or the bound by declaration."""
        return self.zero_one or (self.binarized and self.bound == 1)

    @property
    def name(self) -> str:
        """As options and people call it."""
        return REGRET


class Net(_Bounded, tag=NET, frozen=True, kw_only=True):
    """What the Guardian does better minus what it does worse.

    Attributes:
        regret: the mean loss on the log with gains not counted.
    """

    regret: float

    @property
    def name(self) -> str:
        """As options and people call it."""
        return NET

    @property
    def least(self) -> float:
        """The smallest loss that a decision can have."""
        return -self.bound


class Own(_Bounded, tag="own", frozen=True, kw_only=True):
    """The user's own loss.

    Attributes:
        name: of the function.
        full_sight_loss: the largest loss with every action in sight, as declared.
        envelope_excess: how far it was raised to make it monotone, as a mean over rows.
    """

    name: str
    full_sight_loss: float = 0.0
    envelope_excess: float = 0.0

    @property
    def in_full_sight(self) -> float:
        """The largest loss with every action in sight."""
        return self.full_sight_loss


LossTerms = Regret | Net | Own
WRONG_LABEL = Regret(bound=1.0, zero_one=True, missing_guardian="worst_case")
POOR_LABEL = Regret(bound=1.0, missing_guardian="worst_case")
"""Of a batch: 1 for a machine label that differs from the expert's, or has no verdict to compare with."""


# --- Evidence, provenance, and the place in a chain ---


class Evidence(_Part, frozen=True, kw_only=True):
    """What a log says about a rule; the fields from `slack` on are of pairs, not of cascades, `spread` apart.

    Attributes:
        n: rows of the log; of a cascade, those that it was calibrated on.
        log_sha256: digest of the log's content.
        empirical_risk: total loss / n; of a learned score, with each row decided by the others.
        missing_guardian_rows: rows without a Guardian score; a binarised row whose right answer is unknown is one of them.
        spread: one standard deviation of the long-run loss of one certificate, for a net loss or a cascade.
        slack: alpha - (total + loss_bound) / (n + 1), the unspent part of the budget; with clusters of at most M rows,
            alpha - (total + M loss_bound) / (n + M); with a confidence, by groups or learned, alpha - total / n.
        no_opinion_rows: rows in which the Primary had no opinion; they defer.
        router: whether the log has the router form: two graded answers and a confidence.
        score_digits: significant decimals of a Primary score, 12 or 6.
        fewest_actions, most_actions: the smallest and the largest menu.
        columns: the log's columns that played Primary and Guardian.
        margin_quantiles: thresholds that defer 0, 0.1 %, ..., 100 % of the rows, for a guard; None if they are not kept.
        floor: the margin below which the Guardian was not asked about rows, and always is about queries.
        not_asked_rows: rows with a smaller margin.
        draws: what the draw of a random boundary is keyed by: the row's id or, in a log without ids, its question, as text
            or as scores. That of a query is keyed alike.
    """

    n: int
    log_sha256: str
    empirical_risk: float
    missing_guardian_rows: int = 0
    spread: float | None = None
    slack: float | None = None
    no_opinion_rows: int = 0
    router: bool = False
    score_digits: int = 12
    fewest_actions: int = 0
    most_actions: int = 0
    columns: dict[str, str] = {}
    margin_quantiles: str | None = None
    floor: float | None = None
    not_asked_rows: int = 0
    draws: Literal["id", "text", "scores"] = "id"


class CertifiedPart(_Part, frozen=True, kw_only=True):
    """Which part of a log a certificate was made from: what a random split left over from choosing options.

    Attributes:
        rows: of the whole log.
        share: of them that options were chosen on.
        sample: rows that were drawn from a log in parts before the split; None if all were used.
    """

    rows: int
    share: float
    seed: int
    sample: int | None = None


class Provenance(_Part, frozen=True, kw_only=True):
    """Who made a certificate, and with which models.

    Attributes:
        identities: the scorers that made the scores, by role, or of a cascade by name; or "unbound".
        key_sha256: digest of the key behind the draws.
        part: the part of a log that it was made from; None for all rows of a log.
    """

    identities: dict[str, Any] | Literal["unbound"]
    version: str
    created: str
    key_sha256: str | None = None
    part: CertifiedPart | None = None


Step = Literal["scheduled", "tightened", "after red", "after looking"]
"""How a certificate came to follow another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedThreshold:
    """A relaxation with its boundary draw."""

    relaxation: float | None
    boundary_u: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """Where a certificate stands in its chain.

    Attributes:
        step: how it came to follow its predecessor.
        renewal: the number of the last scheduled renewal of the chain, from 1; 0 if there was none yet.
        first: rows that the first renewal takes; renewal k takes the first 2^(k - 1) times as many.
        since: rows of queries that arrived after this time count, in seconds since 1970.
        collected: rows of the log of the chain's first certificate among those of this one.
        root_sha256: digest of the certificate that the chain began with.
        predecessor_sha256: digest of the certificate that this one replaced.
        calibrated: of a tightened certificate, the threshold that its log gave; None for any other.
    """

    step: Step
    renewal: int
    first: int
    since: float
    collected: int = 0
    root_sha256: str
    predecessor_sha256: str
    calibrated: CalibratedThreshold | None = None

    @property
    def no_guarantee(self) -> str | None:
        """Why decisions under this certificate have no guarantee; None if they have one."""
        if self.step != "after looking":
            return None
        return "the certificate was installed after looking at what it would save, outside the schedule"
