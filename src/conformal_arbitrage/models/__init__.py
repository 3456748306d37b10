"""Live models: ports and wrappers, prompts and parsers, and the kinds that a configuration can name."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from conformal_arbitrage.models.chat import ChatAnswerer, ChatConfig, ChatScorer
    from conformal_arbitrage.models.choices import DecisionsScorer, LogprobScorer, SamplingScorer
    from conformal_arbitrage.models.completions import Settings
    from conformal_arbitrage.models.endpoint import Endpoint, Pool
    from conformal_arbitrage.models.kinds import (
        BuildContext,
        ChatEndpointConfig,
        EndpointConfig,
        ModelConfig,
        Pinned,
    )
    from conformal_arbitrage.models.others import (
        FunctionConfig,
        FunctionScorer,
        HumanScorer,
        LocalScorer,
        ReplayScorer,
    )
    from conformal_arbitrage.models.port import (
        Answer,
        Answerer,
        Call,
        Identity,
        Port,
        Reply,
        Scorer,
        Scores,
        StreamingAnswerer,
        WholePort,
        Wrapper,
    )
    from conformal_arbitrage.models.rendering import Confidences, PairPrompt, Prompt, Shuffled
    from conformal_arbitrage.models.resilience import (
        Breaker,
        Cache,
        Capped,
        Limit,
        Price,
        Priced,
        RateLimit,
        Retry,
        SpendingLimit,
    )

__all__ = [
    "Answer",
    "Answerer",
    "Breaker",
    "BuildContext",
    "Cache",
    "Call",
    "Capped",
    "ChatAnswerer",
    "ChatConfig",
    "ChatEndpointConfig",
    "ChatScorer",
    "Confidences",
    "DecisionsScorer",
    "Endpoint",
    "EndpointConfig",
    "FunctionConfig",
    "FunctionScorer",
    "HumanScorer",
    "Identity",
    "Limit",
    "LocalScorer",
    "LogprobScorer",
    "ModelConfig",
    "PairPrompt",
    "Pinned",
    "Pool",
    "Port",
    "Price",
    "Priced",
    "Prompt",
    "RateLimit",
    "ReplayScorer",
    "Reply",
    "Retry",
    "SamplingScorer",
    "Scorer",
    "Scores",
    "Settings",
    "Shuffled",
    "SpendingLimit",
    "StreamingAnswerer",
    "WholePort",
    "Wrapper",
]


if not _typing.TYPE_CHECKING:  # a type checker would take every unknown name for one of these
    _NAMES = {
        "chat": "ChatAnswerer ChatConfig ChatScorer",
        "choices": "DecisionsScorer LogprobScorer SamplingScorer",
        "completions": "Settings",
        "endpoint": "Endpoint Pool",
        "kinds": "BuildContext ChatEndpointConfig EndpointConfig ModelConfig Pinned",
        "others": "FunctionConfig FunctionScorer HumanScorer LocalScorer ReplayScorer",
        "port": "Answer Answerer Call Identity Port Reply Scorer Scores StreamingAnswerer WholePort Wrapper",
        "rendering": "Confidences PairPrompt Prompt Shuffled",
        "resilience": "Breaker Cache Capped Limit Price Priced RateLimit Retry SpendingLimit",
    }
    _HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        """Load a name on first use: a price should not load every kind of model."""
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """List the names that are loaded on first use as well."""
        return sorted({*globals(), *__all__})
