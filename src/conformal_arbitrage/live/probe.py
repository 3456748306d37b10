"""check: ask each model of a configuration one tiny question, to find out how it wants to be called.

The result (the elicitation mode, the name of the token limit, the model served) is pinned in the configuration and
never switched afterwards.

Knows nothing of score logs, certificates or kinds of models.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from msgspec import structs

from conformal_arbitrage.errors import ReplyError, ScorerError, UpstreamError
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import SECTIONS, Config
from conformal_arbitrage.live.repeats import repeat_noise
from conformal_arbitrage.scorers.completions import served_by
from conformal_arbitrage.scorers.kinds import Form, ModelConfig, Pinned, Section
from conformal_arbitrage.types import ChatRequest, Query, Spent
from conformal_arbitrage.upstream.base import spent_of

QUESTION = Query("Which of these is a colour?", ("red", "seven"), id="check")
REQUEST = ChatRequest({"messages": [{"role": "user", "content": "Name a colour, in one word."}]}, id="check")


@dataclass(slots=True, kw_only=True)
class ProbeResult:
    """What a check learned about one model.

    Attributes:
        role: its section, which is its role in the short form.
        kind: the kind of scorer.
        problem: why it cannot be used; None if it can.
        pinned: the values to write into the configuration.
        priced: whether its cost is known.
        logprobs: whether it lists token probabilities; None if that was not tested.
        tested: whether it was sent a question; a function or a person is not.
        notes: what else its user should know.
        noise: how much its lead differs between answers to one question; None if that was not measured.
        decimals: of its scores, if they are few; None likewise.
    """

    role: str
    kind: str
    model: str | None = None
    served: str | None = None
    problem: str | None = None
    pinned: Pinned | None = None
    seconds: float = 0.0
    spent: Spent = field(default_factory=Spent)
    priced: bool = False
    logprobs: bool | None = None
    tested: bool = True
    notes: list[str] = field(default_factory=list[str])
    noise: float | None = None
    decimals: int | None = None


async def check_models(config: Config, *, repeats: int = 0) -> list[ProbeResult]:
    """Test every model of a configuration; ask Primaries so many times more, to measure how much their leads differ."""
    return [await _check(config, section, model, repeats) for section, model in config.sections.items()]


async def _check(config: Config, section: str, model: ModelConfig, repeats: int) -> ProbeResult:
    result = ProbeResult(role=section, kind=model.kind, priced=model.pricing() is not None)
    role, forms = _use(config, section)
    form = config.task.form if config.task.form in forms else min(forms)
    config = _with_form(config, form)
    result.model = model.label if model.has_endpoint else None
    try:
        if model.untested is None:
            await _probe(config, role, model, result, forms - {form})
            if repeats > 1 and role == "primary":
                await _measure(config, model, result, repeats)
        else:
            await _load(structs.replace(config, **{role: model}), role)
            result.tested = False
            result.notes.append(model.untested)
    except ScorerError as error:
        result.problem = _advice(error, over_http=model.has_endpoint)
    if role == "primary" and result.problem is not None:
        result.problem += "; with such a Primary every query would be deferred"
    return result


async def _measure(config: Config, model: ModelConfig, result: ProbeResult, repeats: int) -> None:
    """Measure the repeat noise of a Primary that works."""
    noise = await repeat_noise(config, model.with_pinned(result.pinned), repeats)
    result.noise, result.decimals = noise.spread, noise.decimals
    result.spent += noise.spent
    result.notes += noise.notes()


async def _load(config: Config, role: Section) -> None:
    """Build a model that needs no test; that it can be loaded is worth knowing."""
    async with Models(config) as models:
        models.answerer(role) if config.task.form == "text" else models.scorer(role)


def _use(config: Config, section: str) -> tuple[Section, set[Form]]:
    """Return the role to test a model in, the Primary's if it plays that, and all its forms."""
    uses = config.uses(section) or {"guardian": {config.task.form}}
    return next(role for role in SECTIONS if role in uses), set[Form]().union(*uses.values())


async def _probe(
    config: Config, role: Section, model: ModelConfig, result: ProbeResult, other_forms: Collection[Form]
) -> None:
    """Find the first variant that works, then test what else depends on it."""
    await _first_variant(config, role, model, result)
    await _check_members(config, role, model, result)
    probe = model.logprob_probe(role, config.task.form, result.pinned)
    result.logprobs = model.lists_logprobs if probe is None else await _succeeds(config, role, probe)
    if result.spent.reasoning_tokens:
        share = f"{result.spent.reasoning_tokens} of {result.spent.output_tokens}"
        result.notes.append(f"{share} output tokens were spent on reasoning; leave room in max_tokens")
    if role in ("primary", "guardian"):
        for form in other_forms:
            await _ask(_with_form(config, form), role, model.with_pinned(result.pinned), result)


async def _check_members(config: Config, role: Section, model: ModelConfig, result: ProbeResult) -> None:
    """Ask every endpoint of a pool by itself: all must serve the same model string.

    Raises:
        UpstreamError: one fails.
        ReplyError: one serves another.
    """
    unpinned = None if result.pinned is None else structs.replace(result.pinned, served=None)
    served, members = result.served, model.members()
    for url, member in members.items():
        try:
            await _ask(config, role, member.with_pinned(unpinned), result)
        except UpstreamError as error:
            text = (
                f"{url}, one of {len(members)} endpoints of the pool, fails: {error}; repair it, or remove it from urls"
            )
            raise UpstreamError(text, status=error.status) from error
        if result.served != served:
            raise ReplyError(
                f"{url} serves {result.served!r:.80}, and another endpoint of its pool {served!r:.80}; all must serve the "
                "same model string"
            )


async def _first_variant(config: Config, role: Section, model: ModelConfig, result: ProbeResult) -> None:
    variants = model.variants(role, config.task.form)
    for variant in variants:
        try:
            await _ask(config, role, variant, result)
        except (UpstreamError, ReplyError) as error:
            if variant is variants[-1] or not variant.try_next(error):
                raise
            continue
        result.pinned = variant.learned(result.served)
        return


def _with_form(config: Config, form: Form) -> Config:
    return structs.replace(config, task=structs.replace(config.task, form=form))


async def _ask(config: Config, role: Section, model: ModelConfig, result: ProbeResult) -> None:
    """Ask a model one tiny question, in place of the configured one, without its cache and with few retries."""
    quick = structs.replace(model, attempts=min(model.attempts, 2), cache=None)
    async with Models(structs.replace(config, **{role: quick})) as models:
        start = time.perf_counter()
        try:
            ask = _judge if role == "judge" else _answer if config.task.form == "text" else _score
            result.served, spent = await ask(models, role)
        except ScorerError as error:
            result.spent += spent_of(error)
            raise
        result.seconds = time.perf_counter() - start
        result.spent += spent


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


async def _succeeds(config: Config, role: Section, model: ModelConfig) -> bool:
    try:
        await _ask(config, role, model, ProbeResult(role=role, kind=model.kind))
    except ScorerError:
        return False
    return True


def _advice(error: ScorerError, *, over_http: bool) -> str:
    """Return what went wrong, and the remedy where it is known."""
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
