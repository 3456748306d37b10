"""docs/architecture.md names every package; the source keeps the rules that the page states."""

import ast
import re
from pathlib import Path

import conformal_arbitrage

SOURCE = Path(conformal_arbitrage.__file__).parent
PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
MOST_CASTS = 20


def test_every_package_is_named():
    text = PAGE.read_text()
    packages = [path.parent.name for path in SOURCE.glob("*/__init__.py")]
    assert packages
    assert not [name for name in packages if f"`{name}`" not in text]


def test_few_casts():
    calls = [
        (path.name, node.lineno)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast"
    ]
    assert len(calls) <= MOST_CASTS, calls


def test_fields_of_gateway_and_store_have_a_type():
    untyped = [
        (path.name, cls.name, ast.unparse(field.target))
        for package in ("gateway", "store")
        for path in (SOURCE / package).rglob("*.py")
        for cls in ast.walk(ast.parse(path.read_text()))
        if isinstance(cls, ast.ClassDef)
        for field in cls.body
        if isinstance(field, ast.AnnAssign) and re.search(r"\bAny\b", ast.unparse(field.annotation))
    ]
    assert untyped == []


def test_no_source_file_holds_a_control_character():
    for path in SOURCE.rglob("*.py"):
        assert not re.search(rb"[\x00-\x08\x0b-\x1f]", path.read_bytes()), path
