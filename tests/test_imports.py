"""Imports point down the list in docs/architecture.md, and never round in a circle, not even for types."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Of each module those of ours that it imports anywhere."""
    paths = {}
    for path in sorted((ROOT / "rpft").rglob("*.py")):
        paths[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    found = {}
    for module, path in paths.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                each = (f"{node.module}.{alias.name}" for alias in node.names)
                named |= {name if name in paths else node.module for name in each}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
        found[module] = (named & paths.keys()) - {module}
    return found


def test_no_import_leads_back_to_where_it_began(imports: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_imports_point_down_the_list(imports: dict[str, set[str]]) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = re.search(r"^Imports point down this list.*\n\n((?:    .*\n)+)", text, re.MULTILINE)
    assert lines is not None
    heads = [line.strip().partition("  ")[0] for line in lines[1].splitlines() if line[4] != " "]
    depths = {name: depth for depth, head in enumerate(heads) for name in re.findall(r"(\w+)(?:/|\.py)", head)}
    ours = {module: module.split(".")[1] for module in imports if "." in module and module != "rpft.__main__"}
    assert set(ours.values()) == depths.keys()
    pairs = [(module, other) for module in ours for other in imports[module] & ours.keys()]
    assert [pair for pair in pairs if depths[ours[pair[0]]] > depths[ours[pair[1]]]] == []
