"""The routes of the review queue: reviewers take questions and vote, callers ask how far theirs have come.

Knows nothing of how votes are counted.
"""

import asyncio
from dataclasses import asdict
from math import isfinite
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.chat_requests import converted, decoded
from conformal_arbitrage.gateway.middleware import Handler, Incoming, json_response
from conformal_arbitrage.gateway.review_figures import own_figures, team_figures
from conformal_arbitrage.gateway.reviewing import TICK, Assignment, Desk, Seat
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.store.base import SavedResponse, Scope, Store
from conformal_arbitrage.store.review_base import ReviewOutcome, ReviewRequest

_ROOT = "/v1/arbitrage/reviews"
_LONGEST_WAIT = 55.0


class Ballot(Struct, forbid_unknown_fields=True):
    """A vote: the place of the chosen option as shown, or a grade for each answer in the order shown.

    Attributes:
        active: how many seconds the reviewer was.
    """

    choice: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    grades: tuple[float, ...] | None = None
    active: float | None = None


class ReviewRoutes:
    """The review queue over HTTP."""

    def __init__(self, store: Store, desk: Desk, config: GatewayConfig) -> None:
        self._store = store
        self._desk = desk
        self._config = config

    def routes(self) -> list[tuple[str, str, Scope, Handler]]:
        """Return the routes: method, path, scope and handler."""
        return [
            ("GET", _ROOT, "review", self.figures),
            ("GET", f"{_ROOT}/{{decision}}", "call", self.progress),
            ("POST", f"{_ROOT}/claim", "review", self.claim),
            ("POST", f"{_ROOT}/{{token}}/renew", "review", self.renew),
            ("POST", f"{_ROOT}/{{token}}/return", "review", self.give_back),
            ("POST", f"{_ROOT}/{{token}}/skip", "review", self.skip),
            ("POST", f"{_ROOT}/{{token}}/vote", "review", self.vote),
            ("POST", f"{_ROOT}/{{token}}/undo", "review", self.undo),
        ]

    async def claim(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/claim: the question that the reviewer holds, or the next."""
        assignment = await self._desk.take(self._desk.seat(request.caller))
        return Response(status_code=204) if assignment is None else _shown(assignment)

    async def renew(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/renew."""
        seat, token = self._held(request)
        if not await self._desk.renew(seat, token):
            raise _lost()
        return Response(status_code=204)

    async def give_back(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/return."""
        await self._desk.give_back(*self._held(request))
        return Response(status_code=204)

    async def skip(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/skip."""
        seat, token = self._held(request)
        if not await self._desk.skip(seat, token):
            raise _lost()
        return Response(status_code=204)

    async def vote(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/vote."""
        seat, token = self._held(request)
        ballot: Ballot = converted(decoded(request.content, self._config), Ballot)
        if ballot.active is not None and not (isfinite(ballot.active) and 0 <= ballot.active < 86400):
            raise RequestError("active must be a number of seconds, from 0 to a day", status=422, param="active")
        vote = ballot.choice if ballot.grades is None else ballot.grades
        if vote is None or (ballot.choice is not None and ballot.grades is not None):
            raise RequestError("a vote has a choice or, where answers are graded, grades", status=422, param="choice")
        counts = await self._desk.vote(seat, token, vote, ballot.active)
        if counts is None:
            raise RequestError(
                "this question was given to someone else; claim another one", status=409, code="item_gone"
            )
        return json_response({"counts_in": round(counts, 3)})

    async def undo(self, request: Incoming) -> Response:
        """POST /v1/arbitrage/reviews/{token}/undo."""
        assignment = await self._desk.undo(*self._held(request))
        if assignment is None:
            raise RequestError("this vote counts already, or there is none", status=409, code="vote_counts")
        return _shown(assignment)

    def _held(self, request: Incoming) -> tuple[Seat, str]:
        return self._desk.seat(request.caller), str(request.path_params["token"])[:64].replace("\0", "")

    async def figures(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/reviews: backlog, times and agreement of every team; of people, only admins see all."""
        caller = request.caller
        teams = await team_figures(self._store, self._desk, blind=caller.scope != "admin")
        if caller.scope != "admin":
            teams = [own_figures(team, caller.label or caller.id) for team in teams]
        return json_response({"object": "list", "data": [asdict(team) for team in teams]})

    async def progress(self, request: Incoming) -> Response:
        """GET /v1/arbitrage/reviews/{decision}: how far people have come, and the reply once there is one."""
        decision = str(request.path_params["decision"])[:64].replace("\0", "")
        ends = asyncio.get_running_loop().time() + _wait(request)
        while True:
            document = await self._progress(request, decision)
            if document["status"] != "waiting" or asyncio.get_running_loop().time() >= ends:
                return json_response(document)
            await asyncio.sleep(TICK)

    async def _progress(self, request: Incoming, decision: str) -> dict[str, object]:
        review = await self._store.review_request(decision)
        if review is None or review[0].key_id != request.caller.id:  # a reviewer may be asked about it next
            raise RequestError("there is no such review", status=404, code="review_not_found")
        waiting, outcome = review
        request.caller.check_policy(waiting.policy)
        reply = None if waiting.body else await self._store.saved_response(waiting.key_id, waiting.name)
        return {"id": decision, "status": _status(waiting, outcome, reply), "reply": _reply(reply)}


def _wait(request: Incoming) -> float:
    try:
        wait = float(request.query_params.get("wait", "0"))
    except ValueError as error:
        raise RequestError("wait must be a number of seconds", param="wait") from error
    if not 0 <= wait <= _LONGEST_WAIT:
        raise RequestError(f"wait must be from 0 to {_LONGEST_WAIT:g} seconds", param="wait")
    return wait


def _status(waiting: ReviewRequest, outcome: ReviewOutcome, reply: SavedResponse | None) -> str:
    """Return how far a request has come: it is decided once its reply is there, not with the last vote."""
    if waiting.body:
        return "waiting"
    if outcome.state in ("expired", "failed") and (reply is None or reply.status != 200):
        return outcome.state
    return "decided" if outcome.state != "withdrawn" else "expired"


def _reply(reply: SavedResponse | None) -> object:
    """Return a stored reply: its document, or the text of a stream."""
    if reply is None:
        return None
    if reply.headers.get("content-type") == "application/json":
        return msgspec.json.decode(reply.body)
    return reply.body.decode(errors="replace")


def _shown(assignment: Assignment) -> Response:
    document = asdict(assignment)
    if assignment.kind == "grade":
        document["answers"] = document.pop("options")
        del document["primary_choice"]  # whose answer is whose is never told
    return json_response(document)


def _lost() -> RequestError:
    return RequestError("this question is no longer yours; claim another one", status=409, code="lease_lost")
