"""Build the wheel and the source distribution, check what is in them, and install them into clean environments.

    python -m benchmarks.release --tools .venv-release/bin/python [--pythons python3.11 python3.12] [--extras plot gateway]

Prints what each installation takes on disk, and how long its import takes, alone and with names, beside NumPy's. Exits
with code 1 if a check fails. Not measured here: anything that the tests do.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST_BASE = 200e6
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = tuple(extra for extra in PROJECT["optional-dependencies"] if extra != "dev")
NEEDED = ("conformal_arbitrage/py.typed", "conformal_arbitrage/data/science.parquet", "licenses/LICENSE")
TIMING = """
import json, subprocess, sys, time
def best(statement):
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)
ours = "from conformal_arbitrage import ScoreLog, calibrate, evaluate"
print(json.dumps([best("import conformal_arbitrage"), best(ours), best("import numpy")]))
"""


def run(*command: object, cwd: Path = ROOT) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=1200)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout


def build(tools: Path, out: Path) -> tuple[Path, Path]:
    """Build both from the tree, and the wheel again from the source distribution: all files must be the same."""
    run(tools, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", out)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        [tree] = Path(folder).iterdir()
        run(tools, "-m", "build", "--no-isolation", "--wheel", "--outdir", Path(folder, "again"), cwd=tree)
        [again] = Path(folder, "again").glob("*.whl")
        if contents(wheel) != contents(again):
            sys.exit("the wheel of the source distribution differs from that of the tree")
    return wheel, sdist


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def check_contents(wheel: Path, sdist: Path) -> None:
    names = list(contents(wheel))
    for needed in NEEDED:
        if not any(name.endswith(needed) for name in names):
            sys.exit(f"{wheel.name} lacks {needed}")
    foreign = [name for name in names if not name.startswith(("conformal_arbitrage/", "conformal_arbitrage-"))]
    if foreign:
        sys.exit(f"{wheel.name} installs {foreign}")
    with tarfile.open(sdist) as archive:
        inside = archive.getnames()
    for needed in ("README.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "tests/conftest.py"):
        if not any(name.endswith(needed) for name in inside):
            sys.exit(f"{sdist.name} lacks {needed}")
    if any("/.venv" in name or name.endswith("arbitrage.secret") for name in inside):
        sys.exit(f"{sdist.name} holds an environment or a secret")


def install(python: str, wheel: Path, extra: str | None) -> dict[str, object]:
    """Install into a clean environment; return its size and the seconds of imports."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        own = Path(folder, "bin", "python")
        [packages] = Path(folder, "lib").glob("python*/site-packages")
        before = size(packages)
        target = f"{wheel}[{extra}]" if extra else str(wheel)
        quiet = ("--quiet", "--disable-pip-version-check", "--no-compile")
        run(own, "-m", "pip", "install", *quiet, "--constraint", ROOT / "constraints.txt", target, cwd=Path(folder))
        taken = size(packages) - before
        shown = run(Path(folder, "bin", "arbitrage"), "--version", cwd=Path(folder)).strip()
        alone, ours, numpys = json.loads(run(own, "-c", TIMING, cwd=Path(folder)))
        run(own, "-m", "pip", "check", cwd=Path(folder))
    return {"python": python, "extra": extra, "megabytes": round(taken / 1e6), "version": shown,
            "import_seconds": round(alone, 3), "with_names": round(ours, 3), "numpy": round(numpys, 3)}  # fmt: skip


def works(python: str) -> bool:
    """Tell whether there is such a Python; a shim may stand for none."""
    return shutil.which(python) is not None and not subprocess.run([python, "-c", ""], capture_output=True).returncode


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, default=ROOT / ".venv-release" / "bin" / "python")
    parser.add_argument("--pythons", nargs="*", default=[f"python3.{minor}" for minor in (11, 12, 13, 14)])
    parser.add_argument("--extras", nargs="*", default=list(EXTRAS))
    arguments = parser.parse_args()
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    wheel, sdist = build(arguments.tools.absolute(), out)
    print(run(arguments.tools.absolute(), "-m", "twine", "check", "--strict", wheel, sdist).strip())
    check_contents(wheel, sdist)
    declared = PROJECT["version"]
    pythons = [python for python in arguments.pythons if works(python)]
    for python in pythons:
        for extra in (None, *arguments.extras):
            row = install(python, wheel, extra)
            print(json.dumps(row), flush=True)
            if row["version"] != f"arbitrage, version {declared}":
                sys.exit(f"the installed version is {row['version']!r}; pyproject.toml says {declared}")
            if extra is None and float(str(row["megabytes"])) * 1e6 > LARGEST_BASE:
                sys.exit(f"the base installation takes {row['megabytes']} MB; the limit is {LARGEST_BASE / 1e6:.0f}")
    print(f"{wheel.name} and {sdist.name}: built, checked, installed with {', '.join(pythons)}")


if __name__ == "__main__":
    main()
