"""arbitrage.toml: read, check, write. A bad file is refused with the line and the nearest valid key.

Secrets are not part of it: it names the environment variables that hold them.

Knows nothing of how models are asked; `models` builds scorers from it.
"""

import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct, structs

from conformal_arbitrage.core.losses import GuardianSees
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.scorelog.files import write_text
from conformal_arbitrage.scorers.answers import Confidence
from conformal_arbitrage.scorers.chat import Mode, TokenField
from conformal_arbitrage.scorers.decisions import INSTRUCTIONS

FILE = "arbitrage.toml"
Form = Literal["menu", "text"]


class Pinned(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What `arbitrage check` found out about an endpoint; part of the identity."""

    mode: Mode = "plain"
    token_field: TokenField = "max_tokens"
    served: str | None = None


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """What all kinds share.

    Attributes:
        price: dollars per million input and output tokens; the provider's list price unless given.
        price_per_call: dollars per call, for people and services that count so.
        concurrency: calls at once.
        deadline: seconds for one call and its retries.
        cache: a SQLite file with replies to reuse.
    """

    price: tuple[float, float] | None = None
    price_per_call: float | None = None
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    attempts: int = 5
    deadline: float = 120.0
    cache: str | None = None


class Network(Model, frozen=True, kw_only=True):
    """What all HTTP endpoints share."""

    url: str
    model: str
    key_env: str | None = None
    key_header: str = "Authorization"
    timeout: float = 60.0
    pinned: Pinned | None = None


class Chatting(Network, frozen=True, kw_only=True):
    """What all chat endpoints share; temperature "default" sends none."""

    temperature: float | Literal["default"] = 0.1
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    seed: int | None = None


class Chat(Chatting, frozen=True, kw_only=True, tag="chat"):
    """Confidences elicited from a chat model; in text form, its answers."""

    prompt: str = "confidences"
    reask: bool = False
    confidence: Confidence | None = None


class Logprob(Chatting, frozen=True, kw_only=True, tag="logprob"):
    """Probabilities of the answer letters."""


class Samples(Chatting, frozen=True, kw_only=True, tag="sampling"):
    """Shares of k samples."""

    temperature: float | Literal["default"] = 1.0
    samples: int = 5
    normaliser: str | None = None


class Decisions(Network, frozen=True, kw_only=True, tag="decisions"):
    """OpenAI's Decisions API."""

    instructions: str = INSTRUCTIONS


class Function(Model, frozen=True, kw_only=True, tag="function"):
    """A callable: `function = "MODULE:NAME"`, under a name."""

    function: str
    name: str


class Replay(Model, frozen=True, kw_only=True, tag="replay"):
    """Recorded scores, or the answer key with column = "label"."""

    log: str
    column: str


class Human(Model, frozen=True, kw_only=True, tag="human"):
    """A person at the terminal."""

    name: str


class Local(Model, frozen=True, kw_only=True, tag="local"):
    """Weights in this process; SmolLM2 unless a .gguf file is named."""

    weights: str | None = None


AnyModel = Chat | Logprob | Samples | Decisions | Function | Replay | Human | Local
KINDS: dict[str, type[Model]] = {
    "chat": Chat, "logprob": Logprob, "sampling": Samples, "decisions": Decisions, "function": Function,
    "replay": Replay, "human": Human, "local": Local,
}  # fmt: skip


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked, and what to do if the Guardian fails."""

    form: Form = "menu"
    shuffle_options: bool = False
    safe_action: str | None = None
    safe_answer: str | None = None


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy that the gateway serves.

    Attributes:
        certificate: the file to begin with; later ones may be installed over HTTP. Shadow mode can do without.
        form: choices from menus, or free text; as in [task] unless given.
        mode: "enforce" the rule, or "shadow": ask both, answer with the Guardian's choice, record the Primary's.
        audit_rate: in enforce, the share of decisions about which the Guardian is asked all the same, in the background.
        content: what the record keeps of questions and answers.
        expose: what callers see of a decision; relaxation and margin only with "full".
        overrides: what to do with a request that overrides a pinned setting: refuse it, or answer without a guarantee.
        aliases: further model names that mean this policy.
        allow: differences between certificate and models that are put up with, giving up the guarantee.
    """

    certificate: str | None = None
    form: Form | None = None
    mode: Literal["enforce", "shadow"] = "enforce"
    audit_rate: float = 0.0
    content: Literal["full", "hashed", "off"] = "hashed"
    expose: Literal["id", "full"] = "id"
    overrides: Literal["refuse", "none"] = "refuse"
    aliases: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway listens, what it remembers, and its limits.

    Attributes:
        database: a file, or a postgresql:// URL; {NAME} in it is taken from the environment.
        requests_per_minute: per API key.
        guardian_calls_per_minute: over all callers; a dead Primary sends everything there.
        guardian_cost_per_hour: dollars, over all callers.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    database: str = "arbitrage.sqlite"
    max_body: int = 1_000_000
    max_questions: int = 32
    max_actions: int = 255
    max_action_length: int = 10_000
    max_depth: int = 64
    max_in_flight: int = 512
    requests_per_minute: int | None = None
    guardian_calls_per_minute: int | None = None
    guardian_cost_per_hour: float | None = None


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checked configuration."""

    alpha: float = 0.05
    guardian_sees: GuardianSees = "all"
    task: Task = Task()
    primary: AnyModel
    guardian: AnyModel
    judge: Chat | None = None
    stronger: AnyModel | None = None
    gateway: GatewayConfig = GatewayConfig()
    policies: dict[str, PolicyConfig] = {}
    folder: str = ""

    def form_of(self, policy: str) -> Form:
        """What a policy answers: choices from menus, or free text."""
        return self.policies[policy].form or self.task.form

    @property
    def forms(self) -> frozenset[Form]:
        """What the models are asked for: in the task, and by any policy."""
        return frozenset({self.task.form, *map(self.form_of, self.policies)})


def read_config(path: str | Path = FILE) -> Config:
    """Read and check a configuration.

    Raises:
        ConfigError: with the file, the line and what to do.
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror}); `arbitrage init` writes one") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is not UTF-8 text ({error.reason}); save it again as UTF-8") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: is not TOML: {error}") from error
    if "folder" in document:
        raise ConfigError(f"{source}: line {line_of(text, (), 'folder')}: there is no key 'folder'")
    try:
        made = msgspec.convert({**document, "folder": str(source.resolve().parent)}, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explained(str(error), text, document)}") from error
    _check(made, source, text)
    return made


_ABOVE_0 = (
    "concurrency", "requests_per_minute", "tokens_per_minute", "attempts", "deadline", "timeout", "samples", "max_tokens",
)  # fmt: skip


def _check(config: Config, source: Path, text: str) -> None:
    """Refuse what no type shows."""
    for role in ("primary", "guardian", "judge", "stronger"):
        model: Model | None = getattr(config, role)
        if model is None:
            continue
        for name in _ABOVE_0:
            value = getattr(model, name, None)
            if value is not None and not value > 0:
                line = line_of(text, (role,), name)
                raise ConfigError(f"{source}: line {line}: {name} must be above 0; got {value!r}")
        if role != "stronger" and "text" in config.forms and not isinstance(model, Chat | Function):
            line = line_of(text, (role,), "kind")
            raise ConfigError(f"{source}: line {line}: text form needs kind 'chat' or 'function' as {role}")
    primary = config.primary
    if "text" in config.forms and isinstance(primary, Chat) and primary.confidence is None:
        raise ConfigError(
            f'{source}: line {line_of(text, ("primary",), None)}: in text form the Primary needs confidence = "logprob" '
            'or "ask"; without one it can only defer'
        )
    guardian = config.guardian
    pair = (primary, guardian) if isinstance(primary, Function) and isinstance(guardian, Function) else None
    if pair is not None and pair[0].name == pair[1].name and pair[0].function != pair[1].function:
        raise ConfigError(
            f"{source}: line {line_of(text, ('guardian',), 'name')}: both functions are called {pair[0].name!r}; give each "
            "its own, since replies and certificates are bound to it"
        )
    if not config.alpha > 0:
        raise ConfigError(f"{source}: line {line_of(text, (), 'alpha')}: alpha must be above 0; got {config.alpha!r}")


def _explained(message: str, text: str, document: Mapping[str, Any]) -> str:
    """A validation message with the line and, for an unknown key, the nearest valid one."""
    what, _, path = message.partition(" - at `$")
    parts = tuple(part for part in path.rstrip("`").split(".") if part)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if unknown is not None:
        valid = _keys_of(parts, document)
        near = get_close_matches(unknown[1], valid, n=1, cutoff=0.5)
        help_text = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(valid)}"
        return f"line {line_of(text, parts, unknown[1])}: there is no key '{unknown[1]}'; {help_text}"
    if missing is not None:
        where = f"[{'.'.join(parts)}]" if parts else "the file"
        needed = " with at least kind =" if not parts and missing[1] in ("primary", "guardian") else ""
        named = f"a section [{missing[1]}]{needed}" if needed else f"the key '{missing[1]}'"
        return f"line {line_of(text, parts, None)}: {where} lacks {named}"
    *section, key = parts or ("",)
    if key == "kind":
        near = get_close_matches(str(document.get(section[0], {}).get("kind")), KINDS, n=1, cutoff=0.4)
        what += f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(KINDS)}"
    key = re.sub(r"\[.*\]", "", key)
    return f"line {line_of(text, tuple(section), key)}: {key}: {what}"


def _keys_of(parts: tuple[str, ...], document: Mapping[str, Any]) -> list[str]:
    """The valid keys of a section."""
    if not parts:
        return [f.name for f in structs.fields(Config) if f.name != "folder"]
    if parts[-1] == "pinned":
        return [f.name for f in structs.fields(Pinned)]
    plain: dict[str, type[Struct]] = {"task": Task, "gateway": GatewayConfig, "policies": PolicyConfig}
    if parts[0] in plain:
        return [f.name for f in structs.fields(plain[parts[0]])]
    section: object = document.get(parts[0])
    kind = str(cast("dict[str, Any]", section).get("kind")) if isinstance(section, dict) else ""
    return ["kind", *(f.name for f in structs.fields(KINDS.get(kind, Chat)))]


def line_of(text: str, section: tuple[str, ...], key: str | None) -> int:
    """The line of a key, or of its section's header if it is not there; 1 if neither is."""
    here: tuple[str, ...] = ()
    header = 1
    for number, line in enumerate(text.splitlines(), start=1):
        found = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$", line)
        if found is not None:
            here = tuple(part.strip().strip("\"'") for part in found[1].split("."))
            header = number if here == section else header
            if key is not None and here == (*section, key):
                return number
        elif here == section and key is not None and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return header


def with_task(config: Config, path: str | Path, **changed: Any) -> Config:
    """The configuration with another task, such as a form given on the command line, checked as if it stood in the file.

    Raises:
        ConfigError: the models do not go with it.
    """
    made = structs.replace(config, task=structs.replace(config.task, **changed))
    _check(made, Path(path), Path(path).read_text(encoding="utf-8"))
    return made


def write_pinned(path: str | Path, pinned: Mapping[str, Pinned]) -> None:
    """Write what was found out into the configuration, under [ROLE.pinned]; the rest stays as it is, comments too.

    Raises:
        ConfigError: the file writes its models in another way than as sections; it is left as it was.
    """
    source = Path(path)
    kept: list[str] = []
    dropping = False
    for line in source.read_text(encoding="utf-8").splitlines():
        header = re.match(r"\s*\[\s*(.+?)\s*\]\s*(#.*)?$", line)
        if header is not None:
            dropping = header[1] in {f"{role}.pinned" for role in pinned}
        if not dropping:
            kept.append(line)
    while kept and not kept[-1].strip():
        kept.pop()
    for role, found in pinned.items():
        kept += ["", f"[{role}.pinned]  # found out by `arbitrage check`; part of the identity"]
        kept += [f"{name} = {_toml(value)}" for name, value in structs.asdict(found).items() if value is not None]
    text = "\n".join(kept) + "\n"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{source}: what was found out cannot be written into it ({error}); write each model as a section of its own, "
            "[primary], and drop `pinned = ...` in it"
        ) from error
    write_text(source, text)


def _toml(text: object) -> str:
    """A basic string."""
    plain = str(text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda c: f"\\u{ord(c[0]):04x}", plain) + '"'


_TEMPLATE = """\
# Conformal Arbitrage. Next: `arbitrage check`, `arbitrage collect`, `arbitrage calibrate`, `arbitrage ask`.
alpha = 0.05             # on average at most 5 points worse than always asking the Guardian
guardian_sees = "all"    # a deferral shows the Guardian every option; calibrated on that loss

[task]
form = "{form}"            # "menu": choose from options; "text": free text and tool calls
# {safe} = "..."    # what to take if the Guardian fails; without it that is an error

[primary]                # cheap or helpful: does most of the work
kind = "chat"            # or decisions, logprob, sampling, function, replay, human, local
url = "https://api.openai.com/v1"    # any OpenAI-compatible endpoint, such as http://localhost:11434/v1
model = "gpt-5.4-nano"
key_env = "OPENAI_API_KEY"           # the environment variable with the key; leave out if none is needed
{confidence}# temperature = "default"            # for models that take none; the paper's is 0.1
# max_tokens = 2000                  # for models that reason before they answer

[guardian]               # careful or safe: steps in when it matters
kind = "chat"
url = "https://api.openai.com/v1"
model = "gpt-5.4"
key_env = "OPENAI_API_KEY"
"""


_CONFIDENCE = """\
confidence = "ask"                   # a second short call rates the answer; or "logprob", from the same call
"""


def template(form: Form) -> str:
    """A short commented configuration to start from."""
    menu = form == "menu"
    return _TEMPLATE.format(
        form=form, safe="safe_action" if menu else "safe_answer", confidence="" if menu else _CONFIDENCE
    )
