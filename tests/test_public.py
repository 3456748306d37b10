import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import conformal_arbitrage

SOURCE = Path(conformal_arbitrage.__file__).parent


def test_all_is_what_is_public():
    modules = {m.name for m in pkgutil.iter_modules(conformal_arbitrage.__path__)}
    public = {name for name in vars(conformal_arbitrage) if not name.startswith("_")} - modules
    assert public == set(conformal_arbitrage.__all__)
    assert list(conformal_arbitrage.__all__) == sorted(conformal_arbitrage.__all__)


def test_the_error_tree_is_the_one_its_module_draws():
    errors = importlib.import_module("conformal_arbitrage.errors")
    classes = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.ArbitrageError)}
    drawn = {word for word in errors.__doc__.replace("├──", " ").replace("└──", " ").split() if word.endswith("Error")}
    assert classes == drawn


def test_importing_reads_no_heavy_library():
    heavy = ("duckdb", "matplotlib", "rich", "click")
    code = f"import sys, conformal_arbitrage; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"


def test_functions_and_files_stay_small():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno <= 60, (path, node.name)
