"""Prepare the pages of the documentation site: those of docs/, and a reference of names and commands made from the code.

    python -m benchmarks.site build/pages

`make docs` then lets Sphinx build them, with every warning an error. Links that lead out of docs/ become plain names, since
the site stands alone.
"""

import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

import click

import conformal_arbitrage
from conformal_arbitrage.cli import cli

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("conformal_arbitrage", "conformal_arbitrage.importing")
FIRST = ("readers", "guarantee", "choosing", "score-logs", "importing", "certificates", "live", "gateway", "production")
CONFIGURATION = """\
project = "Conformal Arbitrage"
author = "The Conformal Arbitrage developers"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"Conformal Arbitrage {version}"
html_show_copyright = False
exclude_patterns = ["build"]
"""


def main(target: Path) -> None:
    """Write all pages to an empty folder."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in (ROOT / "docs").iterdir():
        if path.suffix == ".md":
            (target / path.name).write_text(standing_alone(path.read_text()))
        elif path.is_file():
            shutil.copy(path, target)
    (target / "api.md").write_text(api())
    (target / "commands.md").write_text(commands())
    (target / "changelog.md").write_text(standing_alone((ROOT / "CHANGELOG.md").read_text()))
    (target / "security.md").write_text(from_root((ROOT / "SECURITY.md").read_text()))
    (target / "index.md").write_text(index(target))
    version = f'version = release = "{conformal_arbitrage.__version__}"\n'
    (target / "conf.py").write_text(version + CONFIGURATION)


def standing_alone(text: str) -> str:
    """Return a page without links that lead out of the site; its names stay."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./|docs/)[^)]*\)", r"\1", text)


def from_root(text: str) -> str:
    """Return a page of the root with its links into docs/ as links beside it."""
    return re.sub(r"\]\(docs/", "](", text)


def index(target: Path) -> str:
    """Return the first page: the introduction of the README, and the list of all pages."""
    readme = from_root((ROOT / "README.md").read_text())
    intro = re.sub(r"!\[[^\]]*\]\([^)]*\)\n", "", readme[: readme.index("## How it works")])
    rest = sorted(path.stem for path in target.glob("*.md") if path.stem not in FIRST)
    listed = "\n".join((*FIRST, *rest))
    return f"{standing_alone(intro)}\n```{{toctree}}\n:maxdepth: 1\n:hidden:\n\n{listed}\n```\n"


def api() -> str:
    """Return every public name with its signature and docstring."""
    parts = ["# All names\n"]
    for module in map(importlib.import_module, MODULES):
        parts.append(f"## {module.__name__}\n")
        for name in module.__all__:
            parts += [f"### {name}\n", *documented(name, getattr(module, name))]
    return "\n".join(parts)


def documented(name: str, value: object) -> list[str]:
    """Return the signature and the docstring of a name, and those of a class's public methods."""
    parts = [signature(name, value), block(inspect.getdoc(value) or "")]
    if inspect.isclass(value) and not issubclass(value, Exception):
        for method, member in vars(value).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if not method.startswith("_") and inspect.isfunction(function):
                parts += [f"#### {name}.{method}\n", signature(method, function), block(inspect.getdoc(function) or "")]
    return parts


def signature(name: str, value: object) -> str:
    try:
        shown = str(inspect.signature(value)) if callable(value) else ""
    except ValueError:
        shown = "(...)"
    return block(f"{name}{shown}")


def block(text: str) -> str:
    return f"```text\n{text}\n```\n"


def commands() -> str:
    """Return the help of every command."""
    parts = ["# All commands\n"]

    def add(command: click.Command, name: str, parent: click.Context | None) -> None:
        context = click.Context(command, info_name=name, parent=parent, max_content_width=100, terminal_width=100)
        parts.append(f"## {context.command_path}\n")
        parts.append(block(command.get_help(context)))
        for child in command.list_commands(context) if isinstance(command, click.Group) else ():
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                add(found, child, context)

    add(cli, "arbitrage", None)
    return "\n".join(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
