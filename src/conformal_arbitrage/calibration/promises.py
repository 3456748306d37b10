"""The parts of a certificate: how a query is decided, what is promised in which loss, on what evidence, made by whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct

from conformal_arbitrage.calibration.learned import LearnedTerms
from conformal_arbitrage.calibration.options import NET, REGRET, DialStop, GroupThreshold, SmallGroups
from conformal_arbitrage.core.chains import (
    GUARDIAN,
    NO_ANSWER,
    PRICES,
    PathStop,
    answer_numbers,
    feature_count,
    linear,
    next_actions,
    probability,
    stage_features,
)
from conformal_arbitrage.core.exact import Bools, Floats, Integers
from conformal_arbitrage.core.risk import GuardianSees
from conformal_arbitrage.types import Boundary, MissingGuardian

MOST_MODELS = 3
"""Before the Guardian of a cascade."""
Status = Literal["ok", "always_defer", "by_group", "learned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStep:
    """What is expected once some models of a chain have answered.

    Attributes:
        asked: their places in the chain, in the order of being asked.
        losses: coefficients for the loss of giving the last answer: of what the Guardian does better and, if gains were
            predicted, of what it does worse; empty before any answer.
        ahead: for each later model, a row of coefficients per price: what asking it and going on from there comes to, in
            Guardian calls.
    """

    asked: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]
    ahead: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def rows(self) -> list[tuple[float, ...]]:
        """All rows of coefficients."""
        return [*self.losses, *(row for rows in self.ahead for row in rows)]

    def actions(self, features: Floats, unable: Bools, policy: Integers) -> Integers:
        """Return GUARDIAN, a later model's place to ask it, or again the last one's to give its answer.

        Args:
            features: rows x columns.
            unable: rows on which the last model has given no answer.
            policy: places on the path from 1, as an array that broadcasts with the rows.
        """
        loss = np.full(len(features), np.inf)
        if self.losses:
            predicted = [probability(features, np.array(coefficients)) for coefficients in self.losses]
            loss = np.where(unable, np.inf, predicted[0] - sum(predicted[1:]))
        ahead = [linear(features, np.array(rows)[policy - 1]) for rows in self.ahead]
        last = self.asked[-1] if self.asked else GUARDIAN
        actions = np.array([GUARDIAN, last, *range(last + 1, last + 1 + len(ahead))])
        return actions[next_actions(loss / np.array(PRICES)[policy - 1], ahead)]


class ChainRows(NamedTuple):
    """What the models of a chain did on the rows of a log, as rows x models.

    Attributes:
        confidence: NaN where a model gave none.
        answers: numbered with the chain's `answers` first.
        unasked: whether nobody asked the model.
    """

    confidence: Floats
    answers: Integers
    unasked: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChain:
    """Models, and the path: a policy for each price, from "always the Guardian" to ever cheaper ones.

    A policy asks models in order and may leave out any: after each answer, that and its confidence decide whether it is
    given, or which later model is asked, or the Guardian.

    Attributes:
        models: the names, in the order in which they are asked.
        answers: those that have features of their own.
        steps: one for each set of models that may have answered, smaller ones first.
    """

    models: tuple[str, ...]
    answers: tuple[str, ...]
    steps: tuple[ChainStep, ...]

    def follow(self, rows: ChainRows, policy: Integers) -> tuple[Integers, Bools]:
        """Return who answers, a place in the chain or GUARDIAN, and who is asked: policies x rows, the latter x models.

        A model whose answer nobody asked for answers, as the log cannot say what would follow: with the largest loss.

        Args:
            policy: places on the path, as an array that broadcasts with the rows; 0 is "always the Guardian".
        """
        confidence, answers, unasked = rows
        shape = np.broadcast_shapes(policy.shape, (1, len(confidence)))
        chosen, asked = np.full(shape, GUARDIAN), np.zeros((*shape, len(self.models)), dtype=np.bool_)
        reached: dict[tuple[int, ...], Bools] = {(): np.broadcast_to(policy > 0, shape)}
        for step in self.steps:
            here = reached[step.asked]
            if not here.any():
                reached |= {(*step.asked, j): here for j in self.later(step.asked)}
                continue
            actions = self.step_actions(step, confidence, answers, policy)
            if step.asked:
                last = step.asked[-1]
                actions = np.where(unasked[:, last], last, actions)
                asked[here, last] = True
                chosen[here & (actions == last)] = last
            reached |= {(*step.asked, j): here & (actions == j) for j in self.later(step.asked)}
        return chosen, asked

    def step_actions(self, step: ChainStep, confidence: Floats, answers: Integers, policy: Integers) -> Integers:
        """Return what a step does with each row; models that it does not know of are not looked at."""
        features, _ = stage_features(confidence, answers, step.asked, len(self.answers))
        unable = np.isnan(confidence[:, step.asked[-1]]) if step.asked else np.ones(len(confidence), dtype=np.bool_)
        return step.actions(features, unable, policy)

    def later(self, asked: Sequence[int]) -> range:
        """Return the places of the models that may be asked next."""
        return range(asked[-1] + 1 if asked else 0, len(self.models))

    def after(
        self, confidences: Sequence[float | None], answers: Sequence[str | None], policy: int
    ) -> tuple[tuple[int, ...], int]:
        """Return whom one query's replies so far came from, and what is next, as in `ChainStep.actions`.

        Args:
            confidences: of the models asked so far, in this order; None where one failed.
            answers: of these models.
            policy: the query's place on the path.
        """
        known, said = np.full((1, len(self.models)), np.nan), np.full((1, len(self.models)), NO_ANSWER)
        steps = {step.asked: step for step in self.steps}
        asked: tuple[int, ...] = ()

        def following() -> int:
            place = np.array([[policy]])
            return int(self.step_actions(steps[asked], known, said, place)[0, 0]) if policy else GUARDIAN

        for confidence, number in zip(confidences, answer_numbers(answers, self.answers).tolist(), strict=True):
            model = following()
            if model not in self.later(asked):  # these replies came from another chain
                return asked, GUARDIAN
            known[0, model], said[0, model] = np.nan if confidence is None else confidence, number
            asked = (*asked, model)
        return asked, following()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEstimate:
    """What a chain is expected to cost at the risk budget, as a share of the Guardian's cost alone."""

    models: tuple[str, ...]
    cost: float
    gains: bool = False
    """Whether its path counts what the Guardian is expected to do worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTuning:
    """The part of a log that a chain was chosen and fitted on; the certificate's rows are the others.

    Attributes:
        share: of the log, as asked for.
        seed: of the hash that drew them.
        fixed: whether the chain was given, and only its path fitted.
        estimates: what each chain that was considered would cost, the chosen one first; of a given one with the net loss
            only.
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
        chains = sorted(self.estimates[: len(self.estimates) - len(pairs)], key=lambda estimate: estimate.cost)
        if self.fixed or len(pairs) < 2 or not chains:
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


def chain_steps(models: int) -> list[tuple[int, ...]]:
    """Return every set of models that may have answered, smaller ones first."""
    return [asked for size in range(models + 1) for asked in combinations(range(models), size)]


def is_chain(chain: ModelChain) -> bool:
    """Tell whether a chain names models, each once, and has the numbers of all its steps."""
    count = len(chain.models)
    if not 1 <= count <= MOST_MODELS or len(set(chain.models)) < count:
        return False
    if [step.asked for step in chain.steps] != chain_steps(count):
        return False
    return all(_is_step(step, count, len(chain.answers)) for step in chain.steps)


def _is_step(step: ChainStep, models: int, known: int) -> bool:
    columns, last = feature_count(len(step.asked), known), step.asked[-1] if step.asked else -1
    return (
        len(step.losses) in ((1, 2) if step.asked else (0,))
        and [len(rows) for rows in step.ahead] == [len(PRICES)] * (models - 1 - last)
        and all(len(row) == columns and all(map(isfinite, row)) for row in step.rows)
    )


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
        position, u: where to stop: queries with draws below u are decided by the policy at this position of the path, from
            1, others by the one before it; None if the Guardian answers everything.
        rounded: whether losses other than 0, 1 and -1 were rounded by a draw.
        tuning: the rows that the chain was chosen on.
        cost: mean dollars per query at the stop.
        guardian_cost: mean dollars per query if the Guardian alone is asked.
        guardian_share: share of the rows that the Guardian answers.
    """

    chain: ModelChain
    models: tuple[str, ...]
    guardian: str
    position: int | None
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
        no_opinion_rows: rows in which the Primary had no opinion; they defer. Of a chain, in which some model failed.
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
