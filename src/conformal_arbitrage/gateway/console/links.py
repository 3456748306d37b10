"""The page of a link: one question for one person, who need not sign in; only its form changes anything.

Programs that look at links in messages fetch them before people do, so to open one takes nothing and notes nothing. The page
is a function of the question alone, as the review page is.

Knows nothing of how links are signed or offered.
"""

from collections.abc import Mapping

from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.review import shown_calls, typed_arguments
from conformal_arbitrage.gateway.console.visits import Visit
from conformal_arbitrage.gateway.review_links import may_vote
from conformal_arbitrage.gateway.tool_calls import ARGUMENTS, checked_edit
from conformal_arbitrage.store.review_base import LinkState, ReviewLink, ReviewQuestion

_FOREIGN = (404, "This link is not valid", "It is incomplete, or it was never made here.")
_CLOSED = (410, "This question is no longer open", "There is nothing left to do here.")
_STATES: Mapping[LinkState, tuple[int, str, str]] = {
    "used": (410, "This link has been used", "An answer was given with it, and counts once."),
    "revoked": (410, "This link was revoked", "Sign in to the console to review."),
    "expired": (410, "This link has expired", "Sign in to the console to review."),
    "closed": _CLOSED,
    "taken": (409, "Someone else has this question", "If they leave it, the link works again until it expires."),
}


class LinkPage:
    """The routes under /console/links."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts

    async def show(self, visit: Visit) -> Response:
        """GET /console/links/TOKEN: the question, or why there is none."""
        link, question = await self._opened(visit)
        return self._over(visit, link) if link is None or question is None else self._form(visit, link, question)

    async def vote(self, visit: Visit) -> Response:
        """POST /console/links/TOKEN: the answer, which uses the link up."""
        link, question = await self._opened(visit)
        if link is None or question is None:
            return self._over(visit, link)
        try:
            choice = _choice(visit.form, question)
            edit = checked_edit(question, choice, typed_arguments(visit.form))
        except RequestError as error:
            return self._form(visit, link, question, said=str(error))
        if await self._parts.store.vote_by_link(link.id, choice, edit=edit):
            self._parts.desk.wake.set()
            return self._said(visit, 200, "Recorded", "Thank you. You can close this page.")
        return self._over(visit, await self._parts.store.review_link(link.id))

    async def _opened(self, visit: Visit) -> tuple[ReviewLink | None, ReviewQuestion | None]:
        """Return the link, if it is one, and its question, if it can be answered now."""
        link = await self._parts.links.opened(self._parts.store, visit.named("token"))
        if link is None or link.question is None or not await may_vote(self._parts.store, self._parts.desk, link):
            return link, None
        return link, link.question

    def _form(self, visit: Visit, link: ReviewLink, question: ReviewQuestion, *, said: str = "") -> Response:
        own = question.instructions
        return self._parts.pages.page(
            "link.html", visit, status=422 if said else 200, item=question, policy=link.policy, said=said,
            instructions=own if own is not None else self._parts.desk.instructions.get(link.policy, ""),
            chosen=visit.form.get("choice", ""), calls=shown_calls(question.calls, visit.form),
        )  # fmt: skip

    def _over(self, visit: Visit, link: ReviewLink | None) -> Response:
        """Say why a link does not work."""
        return self._said(visit, *(_FOREIGN if link is None else _STATES.get(link.state, _CLOSED)))

    def _said(self, visit: Visit, status: int, title: str, text: str) -> Response:
        return self._parts.pages.page(
            "link.html", visit, status=status, item=None, title=title, text=text, said="", calls=()
        )


def _choice(form: Mapping[str, str], question: ReviewQuestion) -> int:
    """Return the place that was chosen.

    Raises:
        RequestError: nothing was, or there is no such place.
    """
    text = form.get("choice", "")
    if not text.isascii() or not text.isdigit() or len(text) > len(ARGUMENTS) or int(text) >= len(question.options):
        raise RequestError("Choose one of the options first.", status=422)
    return int(text)
