"""The pages of the documentation site: complete, and without links to nowhere; `make docs` lets Sphinx build them."""

import importlib
import re

import click
import pytest
from benchmarks.site import CONTENTS, MODULES, fields, main

from conformal_arbitrage.cli import cli


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "pages"
    main(folder)
    return folder


def test_every_name_and_command_is_in_the_reference(pages):
    names, commands = (pages / "api.md").read_text(), (pages / "commands.md").read_text()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            assert re.search(rf"^`{{5}}{{py:(function|class|exception)}} {name}\b", names, re.MULTILINE), name
    assert re.search(r"^`{4}{py:method} apply\(log: ", names, re.MULTILINE), "without self"
    for name in cli.list_commands(click.Context(cli)):
        assert f"## arbitrage {name}\n" in commands


def test_links_lead_to_pages_and_headings_of_the_site(pages):
    for page in pages.glob("*.md"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#?)([^)\s]*)\)", text):
            assert "://" not in target, (page.name, target)
            other = pages / target if target else page
            assert other.exists(), (page.name, target)
            if anchor:
                headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, (page.name, target, anchor)


def test_every_page_is_in_the_list_and_each_reader_has_a_start(pages):
    listed = [page for chapter in CONTENTS.values() for page in chapter]
    assert sorted(listed) == sorted(page.stem for page in pages.glob("*.md") if page.stem != "index")
    start = (pages / "readers.md").read_text()
    for reader in ("Data scientists", "Application developers", "Operators", "Reviewers", "Auditors", "Statisticians"):
        assert f"\n## {reader}" in start


def test_sections_of_docstrings_become_fields():
    text = """Do it.

Args:
    one, two: what
        goes on: here.
    **more: others.

Returns:
    the sum,
    in all.

Raises:
    ValueError: never.

The end."""
    assert fields(text).split("\n\n") == [
        "Do it.", ":param one,two: what goes on: here.\n:param **more: others.", ":returns: the sum, in all.",
        ":raises ValueError: never.", "The end.\n",
    ]  # fmt: skip
