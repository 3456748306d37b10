"""The pages of the documentation site: complete, and without links to nowhere; `make docs` lets Sphinx build them."""

import re

import pytest
from benchmarks.site import main

import conformal_arbitrage
from conformal_arbitrage.cli import cli


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "pages"
    main(folder)
    return folder


def test_every_name_and_command_is_in_the_reference(pages):
    names, commands = (pages / "api.md").read_text(), (pages / "commands.md").read_text()
    for name in conformal_arbitrage.__all__:
        assert f"### {name}\n" in names
    for name in cli.commands:
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
    listed = (pages / "index.md").read_text().split("```{toctree}")[1]
    assert {page.stem for page in pages.glob("*.md")} - {"index"} <= set(listed.split())
    start = (pages / "readers.md").read_text()
    for reader in ("Data scientists", "Application developers", "Operators", "Reviewers", "Statisticians"):
        assert f"**{reader}**" in start
