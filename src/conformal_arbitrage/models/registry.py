"""The kinds of scorers that a configuration can name: those of this package, and those of installed packages.

A package adds a kind by an entry point in the group `conformal_arbitrage.scorers`: its name is the kind, its value the
`ModelConfig` subclass with that tag. It is imported only when a configuration names the kind.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.models.chat import ChatConfig
from conformal_arbitrage.models.choices import DecisionsConfig, LogprobConfig, SamplingConfig
from conformal_arbitrage.models.kinds import ModelConfig, UserCode, describe
from conformal_arbitrage.models.others import FunctionConfig, HumanConfig, LocalConfig, ReplayConfig

ENTRY_POINT_GROUP = "conformal_arbitrage.scorers"
BUILT_IN: Mapping[str, type[ModelConfig]] = {
    "chat": ChatConfig,
    "logprob": LogprobConfig,
    "sampling": SamplingConfig,
    "decisions": DecisionsConfig,
    "function": FunctionConfig,
    "replay": ReplayConfig,
    "human": HumanConfig,
    "local": LocalConfig,
}


def kind_names() -> list[str]:
    """Return the names of all kinds, built-in ones first; loads no other package."""
    return list(dict.fromkeys([*BUILT_IN, *sorted(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))]))


def kind_named(name: str) -> type[ModelConfig] | None:
    """Return the configuration struct of a kind; None if there is no such kind.

    Raises:
        ConfigError: the package that adds the kind is broken, or two packages add it.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    entries = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if len(entries) > 1:
        packages = " and ".join(sorted(_package(entry) for entry in entries))
        raise ConfigError(f"kind '{name}' is added by {packages}; uninstall one of them")
    return _loaded(entries[0]) if entries else None


def _package(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else entry.dist.name


def _loaded(entry: EntryPoint) -> type[ModelConfig]:
    """Import a kind of another package and check that it can be used."""
    source = f"kind '{entry.name}' of package {_package(entry)} ({entry.value})"

    def broken(error: Exception) -> ConfigError:
        return ConfigError(f"{source} cannot be loaded ({describe(error)}); fix or uninstall that package")

    with UserCode(broken):
        config: object = entry.load()
    if not isinstance(config, type) or not issubclass(config, ModelConfig):
        raise ConfigError(f"{source} is not a subclass of ModelConfig; correct that package")
    if config.__struct_config__.tag != entry.name:
        raise ConfigError(f"{source} has the tag {config.__struct_config__.tag!r}; it must be the entry point's name")
    if config.build is ModelConfig.build:
        raise ConfigError(f"{source} does not define `build`; correct that package")
    return config
