"""A name means one thing: no public class is defined twice in the package, and no public function twice in a room."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tpucare"


def public(kind: type[ast.ClassDef | ast.FunctionDef], path: Path) -> set[str]:
    body = ast.parse(path.read_text("utf-8")).body
    return {node.name for node in body if isinstance(node, kind) and not node.name.startswith("_")}


def test_no_class_name_is_defined_twice() -> None:
    found = Counter(name for path in PACKAGE.rglob("*.py") for name in public(ast.ClassDef, path))
    assert {name for name, count in found.items() if count > 1} == set()


def test_no_function_name_is_defined_twice_in_a_room() -> None:
    rooms = ((path.relative_to(PACKAGE).parts[0], path) for path in PACKAGE.rglob("*.py"))
    found = Counter(f"{room}.{name}" for room, path in rooms for name in public(ast.FunctionDef, path))
    assert {name for name, count in found.items() if count > 1} == set()
