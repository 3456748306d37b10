"""From the models of a configuration to the pair behind each policy, its Guardian within the gateway's limits.

Knows nothing of certificates or requests.
"""

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway.policy_table import MenuPair, ModelPair, TextPair
from conformal_arbitrage.gateway.reviewing import Desk, ReviewScorer
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import Config, Form
from conformal_arbitrage.live.reviews import ReviewTerms, review_terms
from conformal_arbitrage.scorers.quota import Quota, QuotaAnswerer, QuotaScorer
from conformal_arbitrage.types import Spent


def pairs_of(models: Models, quota: Quota | None = None, desk: Desk | None = None) -> dict[str, ModelPair]:
    """Return the two models of every policy; policies with the same models in the same form share them.

    Args:
        models: builds them.
        quota: limits how often Guardians are asked, if given; people limit themselves.
        desk: where people are asked who are a Guardian; None if only identities are wanted.

    Raises:
        ConfigError: a model cannot be used, or its cost cannot be limited as configured.
    """
    config = models.config
    shared: dict[tuple[str, str, Form], ModelPair] = {}
    pairs: dict[str, ModelPair] = {}
    for name in config.policies:
        terms = review_terms(config, name)
        if terms is not None:
            pairs[name] = _people(models, name, terms, desk)
            continue
        if config.policies[name].cascade:
            pairs[name] = _cascade(models, config.form_of(name), quota)
            continue
        key = config.section_of(name, "primary"), config.section_of(name, "guardian"), config.form_of(name)
        if key not in shared:
            shared[key] = _pair(models, *key, quota)
        pairs[name] = shared[key]
    return pairs


def _people(models: Models, policy: str, terms: ReviewTerms, desk: Desk | None) -> MenuPair:
    """Return a model and the people behind it."""
    if models.config.policies[policy].cascade:
        raise ConfigError(
            f"[policies.{policy}] people answer as the Guardian of one Primary, not of a cascade; drop cascade = true"
        )
    guardian = ReviewScorer(terms, None) if desk is None else desk.serve(policy, terms)
    primary = models.scorer("primary", models.config.section_of(policy, "primary"))
    return MenuPair(primary=primary, guardian=guardian, review=terms, fallback=models.config.task.safe_action)


def _pair(models: Models, primary: str, guardian: str, form: Form, quota: Quota | None) -> ModelPair:
    task = models.config.task
    if form == "menu":
        scorer = models.scorer("guardian", guardian)
        guarded = scorer if quota is None else QuotaScorer(scorer, quota)
        return MenuPair(primary=models.scorer("primary", primary), guardian=guarded, fallback=task.safe_action)
    answerer = models.answerer("guardian", guardian)
    limited = answerer if quota is None else QuotaAnswerer(answerer, quota)
    return TextPair(primary=models.answerer("primary", primary), guardian=limited, fallback=task.safe_answer)


def _cascade(models: Models, form: Form, quota: Quota | None) -> ModelPair:
    """Return the models of a cascade, each policy's own."""
    task = models.config.task
    if form == "menu":
        scorers, name, scorer = models.cascade_scorers()
        guarded = scorer if quota is None else QuotaScorer(scorer, quota)
        first = next(iter(scorers.values()))
        return MenuPair(primary=first, guardian=guarded, models=scorers, guardian_name=name, fallback=task.safe_action)
    answerers, name, answerer = models.cascade_answerers()
    limited = answerer if quota is None else QuotaAnswerer(answerer, quota)
    primary = next(iter(answerers.values()))
    return TextPair(primary=primary, guardian=limited, models=answerers, guardian_name=name, fallback=task.safe_answer)


def check_spending(config: Config, models: Models) -> None:
    """Check that the largest cost of every Guardian call is known, once all pairs are built.

    Raises:
        ConfigError: it is not, and there is a limit on cost.
    """
    if config.gateway.guardian_cost_per_hour is None:
        return
    for policy in config.policies:
        section = config.section_of(policy, "guardian")
        model = config.section(section)
        if section not in models.capped:
            raise ConfigError(
                f"guardian_cost_per_hour cannot limit [{section}]: kind '{model.kind}' makes no calls that could be priced; "
                "remove the limit, or use guardian_calls_per_minute"
            )
        pricing = model.pricing()
        by_length = pricing is None or pricing.cost(Spent(calls=1, input_tokens=1, output_tokens=None)) is None
        if by_length and not model.limits_replies(config.form_of(policy)):
            raise ConfigError(
                "guardian_cost_per_hour needs a limit on the length of replies in free text; set max_tokens in "
                f"[{section}]"
            )


def check_policies(config: Config) -> None:
    """Check that a configuration has policies, that no name or alias stands for two, and that sessions are possible.

    Raises:
        ConfigError: it has none, or a name does, or a policy of menus is to decide by session.
    """
    if not config.policies:
        raise ConfigError("the configuration has no policy; add a section [policies.NAME] with a certificate")
    names = [alias for name, settings in config.policies.items() for alias in (name, *settings.aliases)]
    for name, settings in config.policies.items():
        if settings.sticky is not None and config.form_of(name) != "text":
            raise ConfigError(
                f'[policies.{name}] sticky = "session" is for free text; set form = "text", or leave it out'
            )
        if not 0 < settings.session_idle < float("inf"):
            raise ConfigError(f"[policies.{name}] session_idle must be above 0 seconds; got {settings.session_idle!r}")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"{min(twice)!r} names two policies; give each name and alias once")
