"""What `recommend` returns: the chosen way to route, all that were tried, and what they mean in words.

Knows nothing of how the choice was made.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.learned_score import ScoreKind
from conformal_arbitrage.core.bounds import Interval
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Boundary

PromisedLoss = Literal["regret", "net"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOption:
    """One way to route, with what the tuning rows say of it.

    Attributes:
        primary: the Primary's column.
        guardian: the Guardian's column.
        loss: what is promised: "regret", or "net" with gains counted.
        score: what queries are ordered by: their "margin", or "auto", a score learned from the rows of the certificate or
            the margin, whichever keeps more of them.
        boundary: "include" or "random".
        deferred: expected share of queries sent to the Guardian with as many rows as the certificate has.
        spread: standard deviation of that share over random halves of the tuning rows.
        deferred_with: the share with 2 and 4 times as many rows and, under "any", with any number of them.
        cost_per_1000: expected dollars per 1000 queries; None if costs are unknown.
        eligible: whether it could be chosen: it promises the loss that was asked for.
        text: whether the score is learned from the texts of the queries as well.
    """

    primary: str
    guardian: str
    loss: PromisedLoss
    score: ScoreKind
    boundary: Boundary
    deferred: float
    spread: float
    deferred_with: dict[str, float]
    cost_per_1000: float | None
    eligible: bool
    text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recommendation:
    """What to run, and the certificate that runs it.

    Attributes:
        source: the log.
        alpha: the risk budget.
        tuning: the rows that the choice was made on.
        certified: the other rows, which the certificate was made from.
        share: of the rows that were used for tuning.
        seed: of the split.
        chosen: the option that the certificate is for.
        options: all options, the cheapest first.
        left_out: options that do not apply, with the reason.
        deferred: share of the tuning rows that the certificate sends to the Guardian.
        deferred_interval: a 95 % confidence interval for its share of new queries, if rows are independent draws. The
            certificate has not seen these rows; that an option was chosen on them is allowed for.
        cost_per_1000: dollars per 1000 queries on the tuning rows; None if costs are unknown.
        cost_error: its standard error.
        guardian_cost_per_1000: dollars per 1000 queries of the Guardian alone.
        certificate: the certificate.
    """

    source: str
    alpha: float
    tuning: ScoreLog
    certified: ScoreLog
    share: float
    seed: int
    chosen: RouteOption
    options: tuple[RouteOption, ...]
    left_out: dict[str, str]
    deferred: float
    deferred_interval: Interval
    cost_per_1000: float | None
    cost_error: float | None
    guardian_cost_per_1000: float | None
    certificate: Certificate

    def to_dict(self) -> dict[str, Any]:
        """Return the recommendation as a JSON document."""
        objects = ("chosen", "options", "certificate", "tuning", "certified")
        own = {name: getattr(self, name) for name in self.__slots__ if name not in objects}
        return own | {
            "tuning_rows": len(self.tuning),
            "certified_rows": len(self.certified),
            "chosen": asdict(self.chosen),
            "options": [asdict(option) for option in self.options],
            "more_rows": self.more_rows(),
            "certificate": self.certificate.to_dict(),
        }

    def facts(self) -> list[tuple[str, str]]:
        """Return the choice and what it costs as name and value pairs, for people."""
        chosen, (low, high) = self.chosen, self.deferred_interval
        facts = [
            ("run", f"{chosen.primary} as the Primary, {chosen.guardian} as the Guardian"),
            ("loss", f"{chosen.loss}, at most {self.alpha:g} on average"),
            ("score", _describe_score(chosen, self.certificate)),
            ("boundary", chosen.boundary),
            ("rows", f"{len(self.tuning)} to choose on, {len(self.certified)} others to certify on"),
            (
                "asks the Guardian",
                f"about {100 * self.deferred:.1f} % of the queries (95 % interval {100 * low:.1f} to {100 * high:.1f} %)",
            ),
        ]
        if self.cost_per_1000 is not None and self.guardian_cost_per_1000 is not None:
            cost = f"${self.cost_per_1000:.4g} per 1000 queries (standard error {self.cost_error or 0.0:.2g})"
            facts.append(("costs", f"{cost}; the Guardian alone ${self.guardian_cost_per_1000:.4g}"))
        return facts

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of all options, the chosen one marked; a single pair of models is not repeated."""
        header = ["option", "loss", "score", "boundary", "sent to the Guardian", "with 2 x the rows", "with any number"]
        priced = any(option.cost_per_1000 is not None for option in self.options)
        rows = [_cells(option, chosen=option is self.chosen, priced=priced) for option in self.options]
        if len({pair_of(option) for option in self.options}) == 1:
            header, rows = ["", *header[1:]], [[row[0][:1], *row[1:]] for row in rows]
        return [*header, "$ per 1000"] if priced else header, rows

    def more_rows(self) -> str:
        """Return what more rows to certify on would buy, in words."""
        here, twice = self.chosen.deferred, self.chosen.deferred_with["2"]
        limit = self.chosen.deferred_with["any"]
        learning = " A learned score also gets better with rows." if self.chosen.score != "margin" else ""
        if here - limit < 0.01:
            return (
                "More rows would hardly help: even with any number of them the share falls by "
                f"{_points(here - limit)}.{learning}"
            )
        return (
            f"More rows would help: twice as many lower the share by about {_points(here - twice)}, any number of them by "
            f"about {_points(here - limit)}.{learning}"
        )

    def why_this_loss(self) -> str:
        """Return what the other loss would cost, and why it is not chosen here."""
        other = next((o for o in self.options if not o.eligible and pair_of(o) == pair_of(self.chosen)), None)
        if other is None:
            return "The loss says what is promised, so it is never chosen for you: --loss regret or --loss net."
        saves = f"--loss {other.loss} would ask the Guardian about {100 * other.deferred:.1f} % of the queries"
        meaning = (
            "it lets answers that beat the Guardian's make up for worse ones"
            if other.loss == "net"
            else "it gives no credit for answers that beat the Guardian's"
        )
        return f"{saves}, but promises something else ({meaning}), so it is yours to choose."

    def __repr__(self) -> str:
        chosen = self.chosen
        return (
            f"Recommendation(primary={chosen.primary!r}, guardian={chosen.guardian!r}, loss={chosen.loss!r}, "
            f"score={chosen.score!r}, boundary={chosen.boundary!r}, deferred={self.deferred:.3f}, alpha={self.alpha:g})"
        )


def _cells(option: RouteOption, *, chosen: bool, priced: bool) -> list[str]:
    cells = [
        f"{'> ' if chosen else '  '}{option.primary} -> {option.guardian}",
        option.loss,
        f"{option.score}, texts" if option.text else option.score,
        option.boundary,
        f"{100 * option.deferred:.1f} % ± {100 * option.spread:.1f}",
        f"{100 * option.deferred_with['2']:.1f} %",
        f"{100 * option.deferred_with['any']:.1f} %",
    ]
    if priced:
        cells.append("-" if option.cost_per_1000 is None else f"{option.cost_per_1000:.4g}")
    return cells


def _describe_score(option: RouteOption, certificate: Certificate) -> str:
    """Return what queries are ordered by, and what a live query has to carry for it."""
    if certificate.learned is None:
        return option.score
    return f"{option.score}, learned from {', '.join(certificate.learned.features)}"


def _points(share: float) -> str:
    return f"{100 * max(share, 0.0):.1f} points"


def pair_of(option: RouteOption) -> tuple[str, str]:
    """Return the columns of an option's models."""
    return option.primary, option.guardian
