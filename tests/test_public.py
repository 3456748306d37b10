import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

import conformal_arbitrage
from conformal_arbitrage import ScoreLog, calibrate, evaluate, inspect

SOURCE = Path(conformal_arbitrage.__file__).parent
HEAVY = {
    "aiohttp", "asyncio", "click", "dask", "datasets", "duckdb", "fsspec", "genai_prices", "jinja2", "matplotlib",
    "opentelemetry", "pandas", "polars", "psycopg", "pyarrow", "pyspark", "rich", "scipy", "sklearn", "sqlite3", "ssl",
    "starlette", "tokenizers", "uvicorn", "xllamacpp",
}  # fmt: skip
NOT_OF_REQUESTS = (
    "calibration.calibrate", "calibration.cascade", "calibration.learning", "calibration.tuning", "calibration.verify",
    "collecting", "core.trials", "evaluation", "experiments", "gateway.console", "gateway.renewer", "gateway.telemetry",
    "importing", "scorelog.cascade", "scorelog.log", "scorelog.parts", "scorelog.spark",
)  # fmt: skip
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_all_lists_exactly_the_public_names():
    modules = {m.name for m in pkgutil.iter_modules(conformal_arbitrage.__path__)}
    public = {name for name in dir(conformal_arbitrage) if not name.startswith("_")} - modules
    assert public == set(conformal_arbitrage.__all__)
    assert all(hasattr(conformal_arbitrage, name) for name in public)
    assert list(conformal_arbitrage.__all__) == sorted(conformal_arbitrage.__all__)


def test_star_import_gives_every_public_name():
    names = {}
    exec("from conformal_arbitrage import *", names)
    assert set(conformal_arbitrage.__all__) <= set(names)


def test_the_verbs_of_the_command_line_are_functions_of_the_package():
    for verb in ("collect", "inspect", "plan", "split", "calibrate", "verify", "evaluate"):
        assert callable(getattr(conformal_arbitrage, verb))


def test_the_version_is_the_installed_one():
    assert conformal_arbitrage.__version__ == version("conformal-arbitrage")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        conformal_arbitrage.nothing  # noqa: B018


def test_collect_is_loaded_on_first_use():
    code = (
        "import sys, conformal_arbitrage as c; m = 'conformal_arbitrage.collecting'; print(m in sys.modules); c.collect"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "False\n"
    assert conformal_arbitrage.collect is importlib.import_module("conformal_arbitrage.collecting.collect").collect


def test_the_package_is_marked_as_typed():
    assert (SOURCE / "py.typed").exists()


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "conformal_arbitrage", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == f"arbitrage, version {version('conformal-arbitrage')}\n"


def test_the_error_tree_matches_the_drawing_in_its_module():
    errors = importlib.import_module("conformal_arbitrage.errors")
    classes = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.ArbitrageError)}
    drawn = {word for word in errors.__doc__.replace("├──", " ").replace("└──", " ").split() if word.endswith("Error")}
    assert classes == drawn


def test_names_are_loaded_from_where_type_checkers_find_them():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    typed = {name.name: node.module for node in imports for name in node.names if node.module.startswith("conformal")}
    loaded_from = {name: f"conformal_arbitrage.{module}" for name, module in conformal_arbitrage._HOMES.items()}
    assert loaded_from == typed
    assert sorted(typed) == conformal_arbitrage.__all__


def test_importing_the_package_loads_no_heavy_library():
    assert loaded("import conformal_arbitrage") & {*HEAVY, "numpy"} == set()
    assert loaded("from conformal_arbitrage import *") & HEAVY == {"asyncio", "sqlite3", "ssl"}  # of live models
    assert loaded("from conformal_arbitrage import calibrate, evaluate, ScoreLog, Certificate") & HEAVY == set()


def test_the_command_line_loads_a_library_with_the_command_that_needs_it():
    assert loaded("from conformal_arbitrage.cli import main") & {*HEAVY, "numpy"} == {"click"}


def test_a_gateway_loads_nothing_that_its_requests_do_not_need():
    modules = loaded_modules("import conformal_arbitrage.cli.serve, conformal_arbitrage.gateway.server")
    packages = {name.removeprefix("conformal_arbitrage.") for name in modules}
    assert {name for name in packages if name.startswith(NOT_OF_REQUESTS)} == set()
    assert (
        modules & {"aiohttp", "duckdb", "jinja2", "matplotlib", "numpy.random", "opentelemetry", "psycopg", "zipfile"}
        == set()
    )


def loaded(statement):
    """Return the top-level modules that a statement loads."""
    return {name.partition(".")[0] for name in loaded_modules(statement)}


def loaded_modules(statement):
    """Return the modules that a statement loads, in a process that does not measure coverage."""
    code = f"{statement}; import sys; print(*sys.modules)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return set(ran.stdout.split())


def test_functions_stay_small():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno <= 60, (path, node.name)


def assigned(node):
    """Return the names that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def definitions(path):
    """Yield the names of the classes, functions and type aliases (in CamelCase) at the top level of a module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from (name for name in assigned(node) if name[0].isupper() and (len(name) == 1 or not name.isupper()))


def test_no_public_name_is_defined_in_two_modules():
    homes = defaultdict(set)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in definitions(path):
            operation = (
                path.parent.name == "store" and name.islower()
            )  # is read with its module: reviews.take, claims.take
            if not name.startswith("_") and not name.endswith("_command") and not operation:
                homes[name].add(str(path.relative_to(SOURCE)))
    shared = {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1}
    assert not shared, "rename one of each:\n" + "\n".join(f"  {n}: {', '.join(p)}" for n, p in shared.items())


def test_commands_of_the_command_line_have_distinct_function_names():
    names = [name for path in (SOURCE / "cli").glob("*.py") for name in definitions(path)]
    assert len([name for name in names if name.endswith("_command")]) > 15
    assert len(names) == len(set(names))


EVIL = "<script>alert('x')</script>"


def evil_objects():
    """Return a certificate, a frontier and an inspection with hostile names in every free text field."""

    def loss(row, sight):
        return 0.0

    loss.__name__ = EVIL
    scores = {"primary": [[0.9, 0.1]] * 30, "guardian": [[1.0, 0.0]] * 30}
    log = ScoreLog.from_arrays(**scores, outcomes={EVIL: [[1.0, 0.0]] * 30})
    return [
        calibrate(log, 0.2, loss=loss, loss_bound=1),
        evaluate(log, [0.2], calibration_size=10, trials=2),
        inspect(log),
    ]


@pytest.mark.parametrize("place", range(3), ids=["certificate", "frontier", "inspection"])
def test_html_representations_escape_all_text(place):
    page = evil_objects()[place]._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.startswith("<table>")


def test_text_representations_are_short(science):
    certificate = calibrate(science, 0.05, guardian_sees="all")
    assert repr(certificate) == (
        "Certificate(status='ok', relaxation=0.457141, alpha=0.05, n=2369, loss='guardian_regret', guardian_sees='all', "
        "boundary='random')"
    )
    frontier = evaluate(science, [0.05, 0.1], calibration_size=500, trials=2)
    assert repr(frontier) == "Frontier(alphas=[0.05, 0.1], trials=2, calibration_size=500, n=2369)"
    assert len(repr(inspect(science))) < 250
