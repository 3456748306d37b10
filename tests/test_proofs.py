"""What is proven about reviews and the console is listed in proofs.md: its numbers follow, and its tests exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.M)
ROWS = ROW.findall((HERE / "proofs.md").read_text())


@cache
def names_in(path):
    """The names of the tests of a file; none if there is no such file."""
    tree = ast.parse(path.read_text() if path.exists() else "")
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def unknown(listed):
    """Those of some test ids in backticks, separated by commas, that do not exist."""
    ids = [re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", one) for one in listed.split(", ")]
    return [one for one, match in zip(listed.split(", "), ids, strict=True)
            if match is None or match[2] not in names_in(HERE / match[1])]  # fmt: skip


def test_the_list_is_whole_and_numbered():
    table = [line for line in (HERE / "proofs.md").read_text().splitlines() if line.startswith("| ")]
    assert len(ROWS) == len([line for line in table if not line.startswith("| | ")])
    assert [int(number) for number, _, _ in ROWS] == list(range(1, len(ROWS) + 1))
    assert len({what for _, what, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize("number", range(1, len(ROWS) + 1))
def test_each_proof_exists(number):
    assert unknown(ROWS[number - 1][2]) == []


@pytest.mark.parametrize(
    "listed", ["`store/test_reviews.py::test_nothing`", "`store/nothing.py::test_x`", "by eye", ""]
)
def test_what_does_not_exist_is_noticed(listed):
    assert unknown(listed) == [listed]
