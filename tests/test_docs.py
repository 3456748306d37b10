"""Run every code block in README.md, CONTRIBUTING.md and docs/, in order, in a folder with the output of `make demo`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import conformal_arbitrage
from conformal_arbitrage import ArbitrageError, Certificate, calibrate
from conformal_arbitrage.cli import cli
from conformal_arbitrage.cli.demo import run_demo
from conformal_arbitrage.live.config import read_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    run_demo(folder)
    return folder


@pytest.mark.proof
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_code_block_runs(page, demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(demo, tmp_path / "demo")
    names = {}
    for kind, code in BLOCK.findall(page.read_text()):
        if kind == "python":
            exec(compile(code, str(page), "exec"), names)
        elif kind == "sh":
            run_shell(code)
        elif kind == "toml":
            Path("arbitrage.toml").write_text(code)
            read_config()
        else:
            raise AssertionError(f"{page.name}: a block of kind {kind!r} would not be run")
    verify_certificates(tmp_path, known=[path.read_bytes() for path in demo.glob("*.json")])


def verify_certificates(folder, known=()):
    """Verify every certificate below a folder, known ones apart, from one of the logs there; return their paths."""
    logs = [path for ending in ("parquet", "csv", "jsonl") for path in sorted(folder.rglob(f"*.{ending}"))]
    certificates = []
    for path in sorted(folder.rglob("*.json")):
        try:
            Certificate.load(path)
        except ArbitrageError:  # another kind of document
            continue
        if path.read_bytes() in known:
            continue
        certificates.append(path)
        outputs = [CliRunner().invoke(cli, ["verify", str(path), str(log)]) for log in logs]
        assert any(output.exit_code == 0 for output in outputs), (path, [output.stderr for output in outputs])
    return certificates


def run_shell(code):
    """Run the commands; of a make target only check that it exists, since it would install everything again."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    code = code.replace("\\\n", "").replace("source .venv/bin/activate\n", "")  # which the path stands for
    for line in code.splitlines():
        dry = line.startswith("make ")
        command = line.replace("make ", "make --dry-run ", 1) if dry else line
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, check=False,
            cwd=ROOT if dry else Path.cwd(), env=os.environ | {"PATH": path},
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stderr)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_has_a_target(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_documented_numbers_are_current(science):
    assert f"{calibrate(science, 0.05, guardian_sees='all').relaxation}: how far" in (ROOT / "README.md").read_text()


def test_every_dependency_is_documented():
    declared = re.findall(r'^  "([a-z]+)[>=\[]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert declared
    for name in declared:
        assert name in text


def test_the_reference_lists_every_public_name():
    text = (ROOT / "docs" / "reference.md").read_text()
    for name in conformal_arbitrage.__all__:
        assert f"`{name}`" in text, name


def test_every_bound_names_a_test_that_exists():
    text = (ROOT / "docs" / "bounds.md").read_text()
    rows = re.findall(r"^\| .+ \| `(tests/\S+\.py)::(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 16
    for file, name in rows:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (file, name)
    table = text[text.index("| bound | test |") :].splitlines()[2:]
    assert len(table) == len(rows), "a row of the table names no test"
