"""The command serve, in a module of its own: it imports no more than a gateway needs."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.gateway.server import run
from conformal_arbitrage.live.config import FILE, ROLES, Config, read_config
from conformal_arbitrage.live.reviewers import review_terms

KEY_VARIABLE = "ARBITRAGE_KEY"
"""The shell variable that the printed call takes an API key from."""


@click.command("serve")
@click.option("--config", default=FILE, show_default=True, metavar="FILE", help="The configuration file.")
@click.option("--host", metavar="ADDRESS", help="Address to listen on.  [default: as configured]")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 picks a free one.  [default: as configured]"
)
@click.option(
    "--no-migrate", is_flag=True, help="Change neither tables nor versions at start; `records migrate` has done it."
)
def serve_command(*, config: str, host: str | None, port: int | None, no_migrate: bool) -> None:
    """Serve the policies of a configuration over an OpenAI-compatible API.

    \b
    arbitrage serve
    arbitrage serve --no-migrate                  one of several, after `arbitrage records migrate`
    """
    configuration = read_config(config)
    configured = configuration.gateway
    listening = structs.replace(
        configured, host=host or configured.host, port=configured.port if port is None else port
    )

    def announce(url: str, keyed: bool) -> None:
        attempt = f"With an API key in ${KEY_VARIABLE}, try" if keyed else "Try"
        click.echo(f"Listening on {url}. {attempt}:\n\n{example_call(configuration, url, keyed=keyed)}\n")
        if (note := example_note(configuration, url)) is not None:
            click.echo(f"{click.wrap_text(note, width=100)}\n")
        entry = "sign in with an API key" if keyed else "without keys, nobody on this machine has to sign in"
        click.echo(f"The console is at {url}/console; {entry}.\n")

    run(structs.replace(configuration, gateway=listening), started=announce, migrating=not no_migrate)


def example_call(config: Config, url: str, *, keyed: bool) -> str:
    """Return a shell command that asks a policy what it can answer: one with a guarantee, if there is one.

    One that people may have to answer carries a key, so that the same call again waits for the same review.

    Args:
        keyed: whether calls need an API key.
    """
    policy = _example_policy(config)
    path, body = _example_request(config, policy)
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    again = " -H 'Idempotency-Key: first'" if review_terms(config, policy) is not None else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url}{path} -H 'Content-Type: application/json'{key}{again} -d {data}"


def example_note(config: Config, url: str) -> str | None:
    """Return what to know of the printed call: that people answer it, and where, or a record; None if a model does."""
    policy = _example_policy(config)
    terms = review_terms(config, policy)
    if terms is None:
        if config.form_of(policy) == "text" or _recorded_question(config, policy) is None:
            return None
        return "The models behind it replay a record: they answer the questions in it, and no others."
    return (
        f"The Guardian is the team {terms.name!r}: what goes to it waits at {url}/console/review for somebody to answer. "
        f"The call is held for {terms.settings.wait:g} s; sent again as it is, it waits for the same answer."
    )


def _example_policy(config: Config) -> str:
    """Return the first policy whose Guardian is a model and whose certificate is in force, or else the first of models."""
    models = [name for name in config.policies if review_terms(config, name) is None]
    enforced = [
        name for name in models if config.policies[name].mode == "enforce" and config.policies[name].certificate
    ]
    return next(iter([*enforced, *models, *config.policies]))


def _example_request(config: Config, policy: str) -> tuple[str, Mapping[str, Any]]:
    if config.form_of(policy) == "text":
        return "/v1/chat/completions", {"model": policy, "messages": [{"role": "user", "content": "Name a colour."}]}
    question, size = _recorded_question(config, policy) or ("Which of these is a colour?", _menu_size(config, policy))
    names = ["red", "seven", *(f"option {place}" for place in range(3, size + 1))][:size]
    choices = [{"value": name} for name in names]
    choice = {"type": "choice", "instructions": "Which?", "choices": choices}
    return "/v1/decisions", {"model": policy, "input": question, "questions": [choice]}


def _recorded_question(config: Config, policy: str) -> tuple[str, int] | None:
    """Return the id of a question that every model which replays a record has, and its size; None if none replays."""
    folder = Path(config.folder)
    pair = (config.section(config.section_of(policy, role)) for role in ROLES)
    records = [menus for model in pair if (menus := model.recorded_menus(folder)) is not None]
    if not records:
        return None
    shared = (name for name in records[0] if all(name in menus for menus in records))
    name = next(shared, None)
    return None if name is None else (name, max(menus[name] for menus in records))


def _menu_size(config: Config, policy: str) -> int:
    """Return the size of a menu that the policy's certificate covers."""
    name = config.policies[policy].certificate
    return 2 if name is None else max(2, Certificate.load(Path(config.folder) / name).evidence.fewest_actions)
