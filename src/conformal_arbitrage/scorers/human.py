"""Kind `human`: a person at the terminal, who sees exactly the options shown and presses a key.

Knows nothing of what the question is about.
"""

from collections.abc import Callable
from string import ascii_lowercase
from typing import ClassVar, Literal

from conformal_arbitrage.errors import UpstreamError
from conformal_arbitrage.monitoring.panels import PANELS, PanelRule
from conformal_arbitrage.scorers.base import Identity, Scores
from conformal_arbitrage.scorers.function import call_for, query_from
from conformal_arbitrage.scorers.kinds import BuildContext, ModelConfig
from conformal_arbitrage.scorers.rendering import RENDERING, require_seen
from conformal_arbitrage.scorers.terminal import SKIP, Terminal
from conformal_arbitrage.types import Query, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, WholePort


class HumanConfig(ModelConfig, frozen=True, kw_only=True, tag="human"):
    """A person at the terminal or, behind a gateway, the team of that name.

    Attributes:
        name: who answers; part of the identity.
        panel: of a team, how many people vote on a question.
        rule: of a panel, whether more than half decides, or all alike.
        instructions: shown above every question.
        overlap: the share of questions that one more person is shown, to measure how far people agree.
        primary_choice: of a team, whether people see what the Primary would choose: everywhere, in audits too.
    """

    name: str
    panel: int = 1
    rule: PanelRule = "majority"
    instructions: str = ""
    overlap: float = 0.0
    primary_choice: Literal["hidden", "shown"] = "hidden"

    is_person: ClassVar[bool] = True
    untested: ClassVar[str | None] = "A person: nothing to test."

    @property
    def label(self) -> str:
        """The name."""
        return self.name

    def mistake(self) -> tuple[str | None, str] | None:
        """Refuse a panel that could tie, and a share that is none."""
        if self.panel not in PANELS:
            return "panel", f"has a panel of {self.panel}; use {', '.join(map(str, PANELS))}"
        if not 0 <= self.overlap <= 1:
            return "overlap", f"overlap must be a share, from 0 to 1 (0.05 for 5 %); got {self.overlap!r}"
        return None

    def build(self, context: BuildContext) -> "HumanScorer":
        """Build the scorer."""
        return HumanScorer(name=self.name, terminal=context.terminal, through=context.wrap)


class HumanPort(WholePort):
    """A person as a port."""

    def __init__(self, terminal: Terminal, name: str) -> None:
        self._terminal = terminal
        self.origin = f"human:{name}"  # replies are stored under it, so one person's are never taken for another's

    async def call(self, call: Call) -> Reply:
        """Show the options and read the key."""
        query = query_from(call)
        keys = ascii_lowercase[: len(query.actions)]
        if len(query.actions) > len(ascii_lowercase):
            raise UpstreamError(f"{len(query.actions)} options are too many for the keys a to z")
        options = "\n".join(f"  {key}  {action}" for key, action in zip(keys, query.actions, strict=True))
        key = await self._terminal.key(f"\n{query.text}\n\n{options}\n\nKey, {SKIP} to skip: ", keys + SKIP)
        if key == SKIP:
            raise UpstreamError("the person skipped this question", spent=Spent(calls=1, cost=None))
        return Reply(document={"choice": keys.index(key)}, spent=Spent(calls=1, cost=None))


class HumanScorer:
    """Scores the option that a person chooses 1, the others 0.

    Args:
        name: who answers, such as "support team"; part of the identity.
        terminal: where keys come from.
        through: wraps the call, such as a cache that lets a person continue another day.
    """

    def __init__(
        self, *, name: str, terminal: Terminal | None = None, through: Callable[[Port], Port] = lambda port: port
    ) -> None:
        self._name = name
        self._port = through(HumanPort(terminal or Terminal(), name))

    @property
    def identity(self) -> Identity:
        """Who answers, and how the question is shown."""
        return {"kind": "human", "name": self._name, "rendering": RENDERING, "option_order": "as given"}

    async def score(self, query: Query) -> Scores:
        """Return the person's choice."""
        require_seen(query)
        reply = await self._port.call(call_for(query))
        chosen = int(reply.document["choice"])
        values = tuple(float(k == chosen) for k in range(len(query.actions)))
        return Scores(values=values, spent=reply.spent, raw=query.actions[chosen])
