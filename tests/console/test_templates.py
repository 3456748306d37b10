"""Rules that keep text from becoming code: what templates may not have, and what the static files are."""

import gzip
import re
from pathlib import Path

import pytest

from conformal_arbitrage.gateway import console

HERE = Path(console.__file__).parent
TEMPLATES = sorted((HERE / "templates").glob("*.html"))
STATIC = sorted((HERE / "static").iterdir())
MOST_BYTES = 12_000
FORBIDDEN = {
    "unescaped text": r"\|\s*safe\b|autoescape|Markup",
    "style attributes": r"\sstyle\s*=",
    "event attributes": r"\son[a-z]+\s*=",
    "inline scripts": r"<script(?![^>]*\ssrc=)",
    "inline styles": r"<style",
    "anything from elsewhere": r"(?:src|href|action)\s*=\s*[\"']?(?:https?:)?//",
    "unquoted attributes": r"\s[\w-]+=\{\{",
    "attributes that run": r"(?:href|src|action)=\"\{\{(?!\s*(?:static|href|link|here|older|wanted\.link))",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_template_has(what):
    assert len(TEMPLATES) >= 8
    for path in TEMPLATES:
        if what == "inline styles" and path.name == "report.html":
            continue  # a file of its own, which no gateway serves
        assert not re.search(FORBIDDEN[what], path.read_text()), (what, path.name)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("unescaped text", "{{ x|safe }}"), ("style attributes", '<p style="x">'), ("event attributes", '<p onclick="x">'),
        ("inline scripts", "<script>x</script>"), ("inline styles", "<style>"), ("unquoted attributes", "<p id={{ x }}>"),
        ("anything from elsewhere", '<img src="https://x">'), ("attributes that run", '<a href="{{ x }}">'),
    ],
)  # fmt: skip
def test_the_rules_catch_what_they_are_for(what, text):
    assert re.search(FORBIDDEN[what], text)


def test_only_charts_makes_markup():
    makers = [path.name for path in HERE.glob("*.py") if "Markup(" in path.read_text()]
    assert makers == ["charts.py"]


def test_no_script_turns_text_into_markup():
    scripts = [path for path in STATIC if path.suffix == ".js"]
    assert scripts
    for path in scripts:
        match = re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", path.read_text())
        assert not match, path.name


def test_the_files_are_small():
    sizes = {path.name: len(gzip.compress(path.read_bytes(), mtime=0)) for path in STATIC}
    assert sum(sizes.values()) <= MOST_BYTES, sizes
