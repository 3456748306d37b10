"""The page of a link: one question for one person, who need not sign in; only its form changes anything.

Programs that look at links in messages fetch them before people do, so to open one takes nothing and notes nothing. The page
is a function of the question alone, as the review page is. Admins see on the page of the team which links are out, and can
revoke them.

Knows nothing of how links are signed or offered.
"""

import logging
from collections.abc import Mapping

from msgspec.structs import replace
from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.rendering import redirect
from conformal_arbitrage.gateway.console.review import shown_calls, typed_arguments, vote_of
from conformal_arbitrage.gateway.console.visits import Visit
from conformal_arbitrage.gateway.review_links import may_vote
from conformal_arbitrage.gateway.tool_calls import checked_edit
from conformal_arbitrage.gateway.verdicts import place_of_vote
from conformal_arbitrage.store.link_base import LinkState, ReviewLink
from conformal_arbitrage.store.review_base import ReviewQuestion

_log = logging.getLogger("conformal_arbitrage.gateway")
_FOREIGN = (404, "This link is not valid", "It is incomplete, or it was never made here.")
_CLOSED = (410, "This question is no longer open", "There is nothing left to do here.")
_RECORDED = (200, "Recorded", "Thank you. You can close this page.")
_LEFT = (200, "Left to someone else", "Thank you. You can close this page.")
_STATES: Mapping[LinkState, tuple[int, str, str]] = {
    "used": (410, "This link has been used", "An answer was given with it, and counts once."),
    "skipped": (410, "This link has been used", "You left the question to someone else."),
    "revoked": (410, "This link was revoked", "Sign in to the console to review."),
    "expired": (410, "This link has expired", "Sign in to the console to review."),
    "closed": _CLOSED,
    "taken": (409, "Someone else has this question", "If they leave it, the link works again until it expires."),
}
_TAKEN_BACK = "Taken back. Answer again, or leave the question to someone else."
_STALE = "That page was older than your last step here. Nothing was changed by it: this is the question as it is now."
_LONGEST_TURN = 9


class LinkPage:
    """The routes under /console/links, and the one that revokes links."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts

    async def show(self, visit: Visit) -> Response:
        """GET /console/links/TOKEN: the question, or why there is none."""
        return self._page(visit, await self._opened(visit))

    async def act(self, visit: Visit) -> Response:
        """POST /console/links/TOKEN: vote or skip, which uses the link up, or take the vote back."""
        link = await self._opened(visit)
        act, turn = visit.form.get("act", "vote"), _turn(visit.form)
        if link is not None and act == "undo" and link.undo:
            undone = await self._parts.store.undo_by_link(link.id, turn=turn)
            return self._page(visit, await self._opened(visit), said=_TAKEN_BACK if undone else "")
        if link is None or link.question is None:
            return self._page(visit, link)
        if act == "skip":
            done = _LEFT if await self._parts.store.skip_by_link(link.id, turn=turn) else None
        else:
            try:
                done = _RECORDED if await self._vote(visit, link, link.question, turn) else None
            except RequestError as error:
                return self._form(visit, link, link.question, said=str(error), status=422)
        self._parts.desk.wake.set()
        return self._page(visit, await self._opened(visit), done=done, said="" if done else _STALE)

    async def _vote(self, visit: Visit, link: ReviewLink, question: ReviewQuestion, turn: int) -> bool:
        """Vote; return whether the link could be used.

        Raises:
            RequestError: nothing was chosen, or the arguments of a tool call are not what the tool takes.
        """
        place = place_of_vote(question, vote_of(visit.form))
        edit = checked_edit(question, place, typed_arguments(visit.form))
        return await self._parts.store.vote_by_link(link.id, place, turn=turn, edit=edit) is not None

    async def revoke(self, visit: Visit) -> Response:
        """POST /console/team/links: revoke one link, or all of a team."""
        id, team = visit.form.get("id") or None, visit.form.get("team") or None
        if id or team:
            count = await self._parts.store.revoke_links(id=id, team=team, policies=visit.who.policies)
            _log.info("%d links were revoked by %s", count, visit.who.key_id)
        return redirect("/console/team")

    async def _opened(self, visit: Visit) -> ReviewLink | None:
        """Return the link, if it is one; of somebody who may not vote any more, it is good for nothing."""
        link = await self._parts.links.opened(self._parts.store, visit.named("token"))
        if link is None or await may_vote(self._parts.store, self._parts.desk, link):
            return link
        return replace(link, state="closed" if link.state == "open" else link.state, question=None, undo=False)

    def _page(
        self, visit: Visit, link: ReviewLink | None, *, done: tuple[int, str, str] | None = None, said: str = ""
    ) -> Response:
        """Show a link as it is, after what was done with it."""
        if link is not None and link.question is not None and done is None:
            stale = said == _STALE
            return self._form(visit, link, link.question, said=said, status=409 if stale else 200)
        if done is None and link is not None:
            done = _RECORDED if link.undo else _STATES.get(link.state, _CLOSED)
        status, title, text = done or _FOREIGN
        return self._parts.pages.page(
            "link.html", visit, status=status, item=None, link=link, title=title, text=text, said="", calls=()
        )

    def _form(self, visit: Visit, link: ReviewLink, question: ReviewQuestion, *, said: str, status: int) -> Response:
        own = question.instructions
        typed: Mapping[str, str] = visit.form if status == 422 else {}
        return self._parts.pages.page(
            "link.html", visit, status=status, item=question, link=link, said=said, wrong=status != 200,
            instructions=own if own is not None else self._parts.desk.instructions.get(link.policy, ""),
            typed=typed, calls=shown_calls(question.calls, typed),
        )  # fmt: skip


def _turn(form: Mapping[str, str]) -> int:
    """Return the turn that a form belongs to; -1 if it is none."""
    text = form.get("turn", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LONGEST_TURN else -1
