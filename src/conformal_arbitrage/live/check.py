"""check: ask each model one tiny question, measure repeat noise, pin what it says, and name stale certificates."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from conformal_arbitrage.calibration.certificate import Certificate, read_pair
from conformal_arbitrage.errors import ArbitrageError, CertificateError, ReplyError, ScorerError, UpstreamError
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import ROLES, SECTIONS, Config
from conformal_arbitrage.live.graders import SEVERAL
from conformal_arbitrage.live.reviewers import grading_terms
from conformal_arbitrage.models.completions import served_by
from conformal_arbitrage.models.kinds import Form, ModelConfig, Pinned, Section
from conformal_arbitrage.models.port import spent_of
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.types import ChatRequest, Query, Spent, as_object

# --- Repeat noise ---


_FINEST = 6
_COARSE = 2
_DEBATABLE = Query("Which of these is the warmest colour?", ("red", "orange", "yellow", "pink"))
_OPEN = ChatRequest({"messages": [{"role": "user", "content": "Name the warmest colour, in one word."}]})


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatNoise:
    """What repeated answers to one question show.

    Attributes:
        repeats: how often it was asked.
        spread: the largest lead (or confidence) minus the smallest.
        decimals: of the scores; None if they have more than six.
    """

    repeats: int
    spread: float
    decimals: int | None
    spent: Spent

    def notes(self) -> list[str]:
        """Return what this means for calibration, in words."""
        notes = [f"asked {self.repeats} times, its lead differs by {self.spread:.3g}"]
        if self.spread > 0:
            notes[0] += "; calibrate on single answers, and never ask again until one is sure"
        if self.decimals is not None and self.decimals <= _COARSE:
            notes.append(
                f"its scores have {self.decimals} decimals, so many queries share a lead: keep --boundary random, "
                "the default, which spends the whole budget"
            )
        return notes


async def repeat_noise(config: Config, model: ModelConfig, repeats: int) -> RepeatNoise:
    """Ask a Primary one debatable question several times.

    Args:
        config: the task; its form says what is asked.
        model: the Primary, as it is pinned.
        repeats: how often to ask.

    Raises:
        ScorerError: an answer could not be had.
    """
    uncached = structs.replace(config, primary=structs.replace(model, cache=None))
    leads: list[float] = []
    seen: list[float] = []
    spent = Spent()
    async with Models(uncached) as models:
        for number in range(repeats):
            ask = _confidence if config.task.form == "text" else _scores
            scores, cost = await ask(models, f"check-{number}")
            first, second = sorted((*scores, 0.0), reverse=True)[:2]
            leads.append(round(first - second, 12))
            seen += scores
            spent += cost
    return RepeatNoise(
        repeats=repeats, spread=round(max(leads) - min(leads), 12), decimals=_decimals(seen), spent=spent
    )


async def _scores(models: Models, id: str) -> tuple[Sequence[float], Spent]:
    scores = await models.scorer("primary").score(structs.replace(_DEBATABLE, id=id))
    return scores.values, scores.spent


async def _confidence(models: Models, id: str) -> tuple[Sequence[float], Spent]:
    answer = await models.answerer("primary").answer(structs.replace(_OPEN, id=id))
    if answer.confidence is None:
        raise ReplyError("no confidence came with a repeated answer", spent=answer.spent)
    return (answer.confidence,), answer.spent


def _decimals(values: Sequence[float]) -> int | None:
    """Return the fewest decimals that show every value; None if six do not."""
    return next((d for d in range(_FINEST + 1) if all(abs(v - round(v, d)) < 1e-9 for v in values)), None)


# --- check ---


QUESTION = Query("Which of these is a colour?", ("red", "seven"), id="check")
REQUEST = ChatRequest({"messages": [{"role": "user", "content": "Name a colour, in one word."}]}, id="check")


@dataclass(slots=True, kw_only=True)
class ProbeResult:
    """What a check learned about one model.

    Attributes:
        role: its section, which is its role in the short form.
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
    probe = model.logprob_probe(role, result.pinned)
    menu = _with_form(config, "menu")
    result.logprobs = model.lists_logprobs if probe is None else await _succeeds(menu, role, probe)
    if result.spent.reasoning_tokens:
        share = f"{result.spent.reasoning_tokens} of {result.spent.output_tokens}"
        result.notes.append(f"{share} output tokens were spent on reasoning; leave room in max_tokens")
    if role in ("primary", "guardian"):
        for form in other_forms:
            await _ask(_with_form(config, form), role, model.with_pinned(result.pinned), result)


async def _check_members(config: Config, role: Section, model: ModelConfig, result: ProbeResult) -> None:
    """Ask every endpoint of a pool by itself: all must serve the same model string."""
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
        asked = getattr(models.config.section(role), "confidence", None) == "ask"
        why = (
            ": the rating call returned no number; see that the model may end its reply (max_tokens) and that it can rate"
            if asked
            else '; use confidence = "ask", or an endpoint that lists logprobs'
        )
        raise ReplyError(f"no confidence came with the answer{why}", spent=answer.spent)
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


# --- What a new check changes in the pinned values ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedChange:
    """A pinned value that a check would replace."""

    role: str
    name: str
    before: str | None
    now: str | None

    def __str__(self) -> str:
        return f"[{self.role}] {self.name}: {self.before!r} is pinned, {self.now!r} was found"


def pinned_changes(config: Config, results: Sequence[ProbeResult]) -> list[PinnedChange]:
    """Return how the results of a check differ from what the configuration has pinned; nothing for a first check."""
    changes: list[PinnedChange] = []
    for result in results:
        before: Pinned | None = getattr(config.section(result.role), "pinned", None)
        if before is None or result.pinned is None:
            continue
        now = structs.asdict(result.pinned)
        changes += [
            PinnedChange(role=result.role, name=name, before=value, now=now[name])
            for name, value in structs.asdict(before).items()
            if value != now[name]
        ]
    return changes


# --- Which certificates no longer fit the configuration ---


_UNKNOWN_GRADERS = ("feedback", "none")  # grades that were sent over HTTP: who made them is not on record


def certificates_at_hand(config: Config, installed: Sequence[PolicyVersion] = ()) -> dict[str, Certificate]:
    """Return every certificate that can be found, by a name for people.

    Args:
        config: names files, and its folder may hold others.
        installed: the versions in force in a gateway's database.
    """
    folder = Path(config.folder)
    named = {folder / policy.certificate for policy in config.policies.values() if policy.certificate is not None}
    certificates: dict[str, Certificate] = {}
    for path in sorted({*named, *folder.glob("*.json")}):
        try:
            certificate = Certificate.load(path)
            certificate.refuse_cascade(source=str(path))
        except CertificateError:  # absent, or another kind of JSON
            continue
        certificates[path.name] = certificate
    for version in installed:
        try:
            certificate = read_pair(version.certificate)
        except CertificateError:  # `serve` refuses it, with the reason
            continue
        if certificate not in certificates.values():
            certificates[f"version {version.version} of policy {version.name} in the database"] = certificate
    return certificates


def stale_certificates(
    certificates: Mapping[str, Certificate], config: Config, changes: Collection[PinnedChange]
) -> list[str]:
    """Return the names of the certificates that were made with the values to be replaced."""
    return [name for name, certificate in certificates.items() if _is_stale(certificate, config, changes)]


def _is_stale(certificate: Certificate, config: Config, changes: Collection[PinnedChange]) -> bool:
    identities = certificate.identities
    if identities == "unbound":
        return False
    models = {role: getattr(section, "model", None) for role, section in config.sections.items()}

    def hits(change: PinnedChange) -> bool:
        roles = [change.role] if change.role in SECTIONS else ROLES
        bound: list[dict[str, Any]] = [identities.get(role, {}) for role in roles]
        model = models[change.role]
        return any(identity.get("model") == model and identity.get(change.name) == change.before for identity in bound)

    return any(map(hits, changes))


def stale_graders(certificates: Mapping[str, Certificate], config: Config) -> dict[str, str]:
    """Return why the losses of certificates were measured by another grader than today's, by the certificate's name."""
    reasons = {name: grader_change(config, certificate.identities) for name, certificate in certificates.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def grader_change(config: Config, identities: object) -> str | None:
    """Return how the grader of a log or certificate differs from the one of that name today; None if it does not.

    A changed grader measures another loss: what it certified holds for the loss of then, not for that of now.

    Args:
        config: the judge, and the folder of a function's module.
        identities: of a log or certificate.
    """
    grader = as_object(as_object(identities).get("grader"))
    if not grader:
        return None
    if grader.get("kind") == SEVERAL:
        kinds = ", ".join(sorted({str(as_object(member).get("kind")) for member in grader.get("graders", [])}))
        return f"several graders made the grades ({kinds}), so the loss is a mixture of what they measure"
    return None if grader.get("kind") in _UNKNOWN_GRADERS else _difference(config, grader)


def _difference(config: Config, then: Mapping[str, Any]) -> str | None:
    how = f"python:{then['name']}" if then.get("kind") == "python" else str(then.get("kind"))
    if "page" in then:
        return _team_difference(config, then)
    try:
        now = dict(Models(config, Extras(keyless=True)).grader(how).identity)
    except ArbitrageError as error:
        return f"the grader {how} cannot be had any more ({error})"
    return _changed(how, then, now)


def _team_difference(config: Config, then: Mapping[str, Any]) -> str | None:
    """Return how those who graded through the review queue differ from whoever does today."""
    everyone = [terms.identity for policy in config.policies if (terms := grading_terms(config, policy)) is not None]
    reasons = [_changed("human", then, now) for now in everyone]
    if not reasons:
        return 'people graded through the review queue, and no policy has grading = "review" any more'
    return None if None in reasons else reasons[0]


def _changed(how: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    changed = [name for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]
    return f"the grader {how} has changed since ({', '.join(changed)})" if changed else None
