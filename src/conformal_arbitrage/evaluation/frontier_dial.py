"""A frontier as a dial in a notebook: one button per budget, in plain HTML and SVG, without scripts or a server.

Knows nothing of how a frontier was computed.
"""

from dataclasses import dataclass
from html import escape
from secrets import token_hex

from conformal_arbitrage.calibration.notebook import html_bars, html_paragraph
from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint

_NOTE = "Choose a budget on these rows, and certify it on others: a budget chosen after looking has no guarantee."


@dataclass(frozen=True, slots=True)
class FrontierDial:
    """The conformal policies of a frontier, one in sight at a time."""

    frontier: Frontier

    def _repr_html_(self) -> str:
        points = self.frontier.of("conformal")
        name = f"ca{token_hex(4)}"  # of this picture: two dials on one page have buttons of their own
        shown = "".join(f"#{name}-{k}:checked~.{name}-{k}{{display:block}}" for k in range(len(points)))
        buttons = "".join(
            f'<input type="radio" name="{name}" id="{name}-{k}"{" checked" if k == 0 else ""}>'
            f'<label for="{name}-{k}"> {escape(f"alpha {point.alpha:g}")} </label>'
            for k, point in enumerate(points)
        )
        figures = "".join(
            f'<div class="{name} {name}-{k}">{self._figure(point)}</div>' for k, point in enumerate(points)
        )
        style = f"<style>.{name}{{display:none}}{shown}</style>"
        return f"<div>{style}{buttons}{figures}{html_paragraph(_NOTE)}</div>"

    def _figure(self, point: FrontierPoint) -> str:
        """Draw one budget beside the models alone."""
        (primary,), (guardian,) = self.frontier.of("primary"), self.frontier.of("guardian")
        shares = [("to the Guardian", point.mean("deferred") or 0.0)]
        bars = [(label, share, f"{100 * share:.1f} %") for label, share in shares]
        loss = point.mean("loss") or 0.0
        bars.append(("loss", loss / self.frontier.loss_bound, f"{loss:.3f} of {point.alpha:g}"))
        for outcome in point.outcomes:
            value, ends = point.mean(outcome) or 0.0, [end.mean(outcome) or 0.0 for end in (primary, guardian)]
            bars.append((outcome, value, f"{value:.3f} ({ends[0]:.3f} to {ends[1]:.3f})"))
        return html_bars(f"alpha {point.alpha:g}, mean of {self.frontier.trials} trials", bars)
