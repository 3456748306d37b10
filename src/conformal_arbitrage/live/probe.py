"""check: one tiny question to each model of a configuration, to find out how it wants to be asked.

What is found (the elicitation mode, the name of the token limit, the model served) is pinned in the configuration, and
not switched afterwards.

Knows nothing of logs or certificates.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from msgspec import structs

from conformal_arbitrage.errors import CutOffError, ReplyError, ScorerError, UpstreamError
from conformal_arbitrage.live.build import Models, Section, pricing_of
from conformal_arbitrage.live.config import (
    AnyModel,
    Chat,
    Chatting,
    Config,
    Form,
    Function,
    Human,
    Logprob,
    Network,
    Pinned,
    Replay,
)
from conformal_arbitrage.scorers.chat import Mode, TokenField, served_by
from conformal_arbitrage.scorers.prompts import PROMPTS
from conformal_arbitrage.types import ChatRequest, Query, Spent
from conformal_arbitrage.upstream.base import spent_of

QUESTION = Query("Which of these is a colour?", ("red", "seven"), id="check")
REQUEST = ChatRequest({"messages": [{"role": "user", "content": "Name a colour, in one word."}]}, id="check")


@dataclass(slots=True, kw_only=True)
class Found:
    """What a check found out about one model.

    Attributes:
        role: its part.
        kind: of scorer.
        problem: why it cannot be used; None if it can.
        pinned: what to write into the configuration.
        priced: whether its cost is known.
        logprobs: whether it gives token probabilities; None if not asked.
    """

    role: Section
    kind: str
    model: str | None = None
    served: str | None = None
    problem: str | None = None
    pinned: Pinned | None = None
    seconds: float = 0.0
    spent: Spent = field(default_factory=Spent)
    priced: bool = False
    logprobs: bool | None = None
    notes: list[str] = field(default_factory=list[str])


async def check_models(config: Config) -> list[Found]:
    """Ask every model of a configuration something tiny."""
    roles: tuple[Section, ...] = ("primary", "guardian", "judge", "stronger")
    return [await _check(config, role) for role in roles if getattr(config, role) is not None]


async def _check(config: Config, role: Section) -> Found:
    model: AnyModel = getattr(config, role)
    found = Found(role=role, kind=str(model.__struct_config__.tag), priced=pricing_of(model) is not None)
    found.model = model.model if isinstance(model, Network) else None
    try:
        if isinstance(model, Human | Replay | Function):
            async with Models(config) as models:
                models.answerer(role) if config.task.form == "text" else models.scorer(role)
            found.notes.append(f"not asked, being a {found.kind}; that it can be loaded is all that was checked")
        elif isinstance(model, Chat):
            await _probe_chat(config, role, model, found)
        else:
            await _probe(config, role, model, found)
        for form in config.forms - {config.task.form} if role in ("primary", "guardian") else ():
            await _asked_in(form, config, role, model, found)
    except ScorerError as error:
        found.problem = _advice(error, over_http=isinstance(model, Network))
    if role == "primary" and found.problem is not None:
        found.problem += "; with such a Primary every query would be deferred"
    return found


async def _probe(config: Config, role: Section, model: AnyModel, found: Found) -> None:
    """A scorer with one way of being asked, or in text form a function that answers."""
    for token_field in get_args(TokenField) if isinstance(model, Chatting) else ("max_tokens",):
        pinned = Pinned(token_field=token_field)
        tried = structs.replace(model, pinned=pinned) if isinstance(model, Network) else model
        try:
            await _asked(_with(config, role, tried), role, found)
        except UpstreamError as error:
            if not _wants_other_field(error, token_field):
                raise
            continue
        if isinstance(model, Network):
            found.pinned = structs.replace(pinned, served=found.served)
        found.logprobs = True if isinstance(model, Logprob) else None
        return


async def _probe_chat(config: Config, role: Section, model: Chat, found: Found) -> None:
    """Try structured output by schema, then JSON mode, then plain text; and both names of the token limit."""
    failure: ScorerError | None = None
    for pinned in _ways(config, role, model):
        tried = _with(config, role, structs.replace(model, pinned=pinned, reask=False))
        try:
            await _asked(tried, role, found)
        except (UpstreamError, ReplyError) as error:
            failure = error
            if isinstance(error, CutOffError) or not _worth_another_way(error):
                raise
            continue
        found.pinned = structs.replace(pinned, served=found.served)
        if config.task.form == "menu" and role != "judge":
            found.logprobs = await _has_logprobs(config, role, model, pinned)
        if found.spent.reasoning_tokens:
            share = f"{found.spent.reasoning_tokens} of {found.spent.output_tokens}"
            found.notes.append(f"{share} output tokens went into reasoning; leave room in max_tokens")
        return
    raise failure or ScorerError("there is no way to ask it")


def _ways(config: Config, role: Section, model: Chat) -> list[Pinned]:
    prompt = PROMPTS.get(model.prompt)
    structured = role == "judge" or config.task.form == "text" or prompt is None or prompt.schema(2) is not None
    rated = config.task.form == "menu" or (role == "primary" and model.confidence == "ask")
    modes: list[Mode] = (
        ["json_schema", "json_object", "plain"] if structured and rated and role != "judge" else ["plain"]
    )
    fields: list[TokenField] = ["max_tokens", "max_completion_tokens"]
    return [Pinned(mode=mode, token_field=field) for mode in modes for field in fields]


async def _asked_in(form: Form, config: Config, role: Section, model: AnyModel, found: Found) -> None:
    """The other question too, by the way that was found, where policies have both forms."""
    pinned = structs.replace(model, pinned=found.pinned) if isinstance(model, Network) else model
    if not isinstance(model, Human | Replay | Function):
        await _asked(
            _with(structs.replace(config, task=structs.replace(config.task, form=form)), role, pinned), role, found
        )


async def _asked(config: Config, role: Section, found: Found) -> None:
    """One tiny question by the configuration's own way."""
    async with Models(config) as models:
        start = time.perf_counter()
        try:
            ask = _judge if role == "judge" else _answer if config.task.form == "text" else _score
            found.served, spent = await ask(models, role)
        except ScorerError as error:
            found.spent += spent_of(error)
            raise
        found.seconds = time.perf_counter() - start
        found.spent += spent


async def _judge(models: Models, role: Section) -> tuple[str | None, Spent]:
    reply = (await models.judge().judged(REQUEST, "red", None))[1]
    return served_by(reply), reply.spent


async def _score(models: Models, role: Section) -> tuple[str | None, Spent]:
    scores = await models.scorer(role).score(QUESTION)
    return scores.served, scores.spent


async def _answer(models: Models, role: Section) -> tuple[str | None, Spent]:
    answer = await models.answerer(role).answer(REQUEST)
    if role == "primary" and answer.confidence is None:
        raise ReplyError(
            'no confidence came with the answer; use confidence = "ask", or an endpoint that lists logprobs',
            spent=answer.spent,
        )
    return answer.served, answer.spent


async def _has_logprobs(config: Config, role: Section, model: Chat, pinned: Pinned) -> bool:
    names = {f.name for f in structs.fields(Chatting)}
    shared: dict[str, Any] = {name: value for name, value in structs.asdict(model).items() if name in names}
    shared["pinned"] = structs.replace(pinned, served=None)
    asked = _with(config, role, Logprob(**shared))
    return await _succeeds(lambda: _asked(asked, role, Found(role=role, kind="logprob")))


async def _succeeds(ask: Callable[[], Awaitable[None]]) -> bool:
    try:
        await ask()
    except ScorerError:
        return False
    return True


def _with(config: Config, role: Section, model: AnyModel) -> Config:
    quick = structs.replace(model, attempts=min(model.attempts, 2), cache=None)
    return structs.replace(config, **{role: quick})


def _wants_other_field(error: UpstreamError, tried: str) -> bool:
    return error.status in (400, 422) and tried == "max_tokens" and "max_completion_tokens" in str(error)


def _worth_another_way(error: ScorerError) -> bool:
    """A reply that cannot be read, or a request refused for its form; not one refused for its temperature or key."""
    if isinstance(error, UpstreamError):
        return error.status in (400, 404, 415, 422, 500, 501) and "temperature" not in str(error)
    return True


def _advice(error: ScorerError, *, over_http: bool) -> str:
    """What went wrong, and what to do about it where that is known."""
    text = str(error)
    status = error.status if isinstance(error, UpstreamError) else None
    if status in (401, 403):
        return f"{text}; is the key right? key_env names the variable that holds it"
    if status == 404:
        return f"{text}; are url and model right?"
    if status is not None and "temperature" in text:
        return f'{text}; set temperature = "default"'
    if over_http and isinstance(error, UpstreamError) and status is None:
        return f"{text}; is the server running at this url?"
    return text
