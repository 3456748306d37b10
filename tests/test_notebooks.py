"""The notebooks run from the first cell to the last, and what they show is a table or a figure."""

import ast
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof
NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def run_cell(source, names, path):
    """Run a cell; return the value of its last line if that is an expression, as a notebook does."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(path), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(path), "eval"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_and_shows_something(path, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    document = json.loads(path.read_text())
    names = {}
    shown = [
        run_cell("".join(cell["source"]), names, path) for cell in document["cells"] if cell["cell_type"] == "code"
    ]
    pages = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert pages
    assert all(page.startswith(("<table>", "<div>")) and "<script" not in page for page in pages)
    assert any("<svg" in page for page in pages)
    pyplot.close("all")
    if path.stem.startswith("2"):
        *sure, unsure = names["answers"]
        assert sure == [("802", "primary"), ("804", "primary")]
        assert unsure in [("808", "guardian"), ("809", "primary")]  # a draw spends the rest of the budget on such ones
    if path.stem.startswith("3"):
        assert names["standing"].state == "red"


def test_there_are_three_notebooks_without_outputs():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert all(not cell.get("outputs") for cell in cells)
        assert cells[0]["cell_type"] == "markdown"
