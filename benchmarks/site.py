"""Prepare the pages of the documentation site: those of docs/, and a reference of names and commands made from the code.

    python -m benchmarks.site build/pages

`make docs` then lets Sphinx build them, with every warning an error. Links that lead out of docs/ become plain names, since
the site stands alone.
"""

import ast
import importlib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import click

import conformal_arbitrage
from conformal_arbitrage.cli import cli

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("conformal_arbitrage", "conformal_arbitrage.importing")
CONTENTS = {
    "Start": ("readers", "guarantee", "faq"),
    "From data to a certificate": (
        "score-logs", "importing", "choosing", "batch", "swap", "certificates", "options", "compare", "cascades", "scale",
    ),
    "Where decisions are made": ("live", "gateway", "frameworks", "reviews", "console"),
    "In production": ("production", "operations", "growth", "security"),
    "Why it holds": ("theory", "bounds", "paper"),
    "Measured": ("bench", "benchmarks", "benchmarks-gateway", "benchmarks-monitoring"),
    "Reference": ("reference", "api", "commands", "architecture", "changelog"),
}  # fmt: skip
CONFIGURATION = """\
project = "Conformal Arbitrage"
author = "The Conformal Arbitrage developers"
extensions = ["myst_parser"]
myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 4
python_maximum_signature_line_length = 90
add_module_names = False
toc_object_entries_show_parents = "hide"
smartquotes = False
html_theme = "furo"
html_title = f"Conformal Arbitrage {version}"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["build"]
"""
STYLE = """\
/* Lines of code and tables have up to 120 characters: take the room where the list of headings leaves it. */
@media (min-width: 96em) { .content { width: 58em; } }
@media (max-width: 82em) { .content { width: 58em; max-width: 100%; } }
"""
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
FIELDS = {"Args": "param", "Attributes": "ivar", "Raises": "raises"}


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
    (target / "index.md").write_text(index())
    version = f'version = release = "{conformal_arbitrage.__version__}"\n'
    (target / "conf.py").write_text(version + CONFIGURATION)
    (target / "_static").mkdir()
    (target / "_static" / "site.css").write_text(STYLE)


def standing_alone(text: str) -> str:
    """Return a page without links that lead out of the site; its names stay."""
    text = text.replace("](../SECURITY.md)", "](security.md)")
    return re.sub(r"\[([^\]]+)\]\((?:\.\./|docs/)[^)]*\)", r"\1", text)


def from_root(text: str) -> str:
    """Return a page of the root with its links into docs/ as links beside it."""
    return re.sub(r"\]\(docs/", "](", text)


def index() -> str:
    """Return the first page: the introduction of the README, and the list of all pages."""
    readme = from_root((ROOT / "README.md").read_text())
    parts = [standing_alone(readme[: readme.index("## The library")])]
    for caption, pages in CONTENTS.items():
        listed = "\n".join(pages)
        parts.append(f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n:hidden:\n\n{listed}\n```\n")
    return "\n".join(parts)


def api() -> str:
    """Return every public name with its signature and docstring."""
    parts = ["# All names\n", "Made from the code. [The reference](reference.md) says in a line what each is for.\n"]
    for module in map(importlib.import_module, MODULES):
        parts += [f"## {module.__name__}\n", f"```{{py:module}} {module.__name__}\n```\n"]
        names = {name: getattr(module, name) for name in module.__all__}
        kinds = {"Functions": inspect.isroutine, "Classes": is_class, "Errors": is_error}
        for heading, belongs in kinds.items():
            chosen = [name for name, value in names.items() if belongs(value)]
            if chosen:
                parts.append(f"### {heading}\n")
                parts += [Documented(name, names[name]).page(5) for name in chosen]
        left = [name for name, value in names.items() if not any(belongs(value) for belongs in kinds.values())]
        if left:
            sys.exit(f"{', '.join(left)}: neither functions nor classes; say in benchmarks/site.py where they belong")
    return "\n".join(parts)


def is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def is_class(value: object) -> bool:
    return inspect.isclass(value) and not is_error(value)


class Documented:
    """A public function, class, method or property, as a directive of Sphinx."""

    def __init__(self, name: str, value: object) -> None:
        self.name = name
        self.value = value

    @cached_property
    def function(self) -> object:
        """The plain function behind a class's method or property."""
        if isinstance(self.value, classmethod | staticmethod):
            return self.value.__func__
        return self.value.fget if isinstance(self.value, property) else self.value

    def page(self, fence: int) -> str:
        """Return the directive; those of methods are inside that of their class."""
        ticks = "`" * fence
        parts = [f"{ticks}{{py:{self.kind()}}} {self.name}{self.signature()}", *self.options(), ""]
        parts += [fields(inspect.getdoc(self.function) or "")]
        parts += [member.page(fence - 1) for member in self.members()]
        return "\n".join((*parts, f"{ticks}\n"))

    def kind(self) -> str:
        """Return what Sphinx calls it."""
        if inspect.isclass(self.value):
            return "exception" if is_error(self.value) else "class"
        return "property" if isinstance(self.value, property) else "function" if self.top else "method"

    @property
    def top(self) -> bool:
        """Whether it is a name of its module."""
        return "." not in getattr(self.value, "__qualname__", ".")

    def options(self) -> Iterator[str]:
        """Yield what the directive says of the kind of function."""
        if isinstance(self.value, classmethod | staticmethod):
            yield f":{type(self.value).__name__}:"
        if inspect.iscoroutinefunction(self.function):
            yield ":async:"

    def members(self) -> Iterator["Documented"]:
        """Yield the public methods and properties of a class, in the order of its source."""
        for name, value in vars(self.value).items() if is_class(self.value) else ():
            member = Documented(name, value)
            if not name.startswith("_") and (inspect.isfunction(member.function) and member.function.__doc__):
                yield member

    def signature(self) -> str:
        """Return the arguments as the source has them; those of a class only if it has an `__init__` of its own."""
        function = vars(self.value).get("__init__") if inspect.isclass(self.value) else self.function
        if isinstance(self.value, property) or not inspect.isfunction(function):
            return ""
        try:
            source = inspect.getsource(inspect.unwrap(function))
        except OSError:  # made by a decorator, such as that of dataclasses
            return ""
        node = ast.parse(textwrap.dedent(source)).body[0]
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return ""
        if (node.args.args and not self.top) or inspect.isclass(self.value):
            node.args.args = node.args.args[0 if isinstance(self.value, staticmethod) else 1 :]
        returns = "" if node.returns is None or inspect.isclass(self.value) else f" -> {ast.unparse(node.returns)}"
        return f"({ast.unparse(node.args)}){returns}".replace("\n", " ")


def fields(text: str) -> str:
    """Return a docstring with its sections as field lists."""
    before, *sections = SECTION.split(text)
    parts = [before.rstrip()]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        entries, _, after = textwrap.dedent(body.strip("\n")).partition("\n\n")
        parts.append("\n".join(section(title, entries)))
        parts += [textwrap.dedent(after)] if after.strip() else []
    return "\n\n".join(parts) + "\n"


def section(title: str, text: str) -> Iterator[str]:
    """Yield the fields of a section."""
    if title not in FIELDS:
        yield f":returns: {' '.join(text.split())}"
        return
    for entry in re.split(r"\n(?=\S)", text):
        name, _, meaning = entry.partition(":")
        yield f":{FIELDS[title]} {name.strip().replace(', ', ',')}: {' '.join(meaning.split())}"


def commands() -> str:
    """Return the help of every command."""
    parts = ["# All commands\n", "Made from the code: what `--help` prints.\n"]

    def add(command: click.Command, name: str, parent: click.Context | None, depth: int) -> None:
        context = click.Context(command, info_name=name, parent=parent, max_content_width=100, terminal_width=100)
        parts.append(f"{'#' * depth} {context.command_path}\n")
        parts.append(f"```text\n{command.get_help(context)}\n```\n")
        for child in command.list_commands(context) if isinstance(command, click.Group) else ():
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                add(found, child, context, 2 if parent is None else 3)

    add(cli, "arbitrage", None, 2)
    return "\n".join(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
