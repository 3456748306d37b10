"""What a release consists of agrees with itself; `make release` builds and installs it."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_names_the_version_and_the_license_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors", "preferred-citation"} <= set(citation)
    assert f"## {PROJECT['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_threat_model_names_targets_and_pages_that_exist():
    text = (ROOT / "SECURITY.md").read_text()
    targets = set(re.findall(r"`make ([a-z-]+)`", text))
    assert {"release", "sbom"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for page in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / page).exists(), page
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    assert f"There are {words[len(PROJECT['dependencies']) - 1]} required dependencies" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell):
    script = subprocess.run(
        [Path(sys.executable).with_name("arbitrage")], capture_output=True, text=True, check=True, timeout=60,
        env=os.environ | {"_ARBITRAGE_COMPLETE": f"{shell}_source"},
    )  # fmt: skip
    assert "_ARBITRAGE_COMPLETE" in script.stdout
    words = {"COMP_WORDS": "arbitrage import lm", "COMP_CWORD": "2" if shell != "fish" else "lm"}
    done = subprocess.run(
        [Path(sys.executable).with_name("arbitrage")], capture_output=True, text=True, check=True, timeout=60,
        env=os.environ | words | {"_ARBITRAGE_COMPLETE": f"{shell}_complete"},
    )  # fmt: skip
    assert "lm-eval" in done.stdout
