"""Turning what pydantic found into lines a person can act on: place, key, what was found, what is allowed."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from rpft.recipe.checks import find_conflicts
from rpft.recipe.keys import Path, dotted, expected, field_at, fields_in, section_at, suggest
from rpft.recipe.scalars import plain_scalar
from rpft.recipe.schema import Recipe
from rpft.recipe.yaml_tree import Located, Unreadable

_MAX_SHOWN = 60


def explain(error: ValidationError, root: Located) -> list[str]:
    """One line for every fault of a recipe, in the order of the schema's keys."""
    faults: dict[Path, str] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == "conflicts" or isinstance(detail["input"], Unreadable):
            continue
        path = _path_in_schema(detail["loc"])
        faults.setdefault(path, _message(path, detail, root))
    # A list that fails in an element may also be called too short: the element's own line says it better.
    inner = {path for path in faults if not any(p != path and p[: len(path)] == path for p in faults)}
    lines = [f"{_where(root, path)}: {message}" for path, message in faults.items() if path in inner]
    return lines + explain_conflicts(root)


def explain_conflicts(root: Located) -> list[str]:
    """The contradictions between those sections that are right by themselves."""
    values = root.plain() if isinstance(root.value, dict) else {}
    sections: dict[str, Any] = {"adapter": None}  # most recipes have none
    names = ["model", "data", "train", "engine", "checkpoint"]
    for name in [*names, "adapter"] if values.get("adapter") else names:
        model = section_at((name,))
        assert model is not None
        try:
            sections[name] = model.model_validate(values.get(name, {}))
        except ValidationError:
            sections[name] = None
    lines = []
    for conflict in find_conflicts(**sections, has_adapter=values.get("adapter") is not None):
        paths = [tuple(key.split(".")) for key in conflict.keys]
        written = [path for path in paths if _find(root, path)[1] == len(path)]
        lines.append(f"{_where(root, (written or paths)[0])}: {conflict.message}")
    return lines


def unknown_key(path: Path) -> str:
    """The message for a key that the schema does not have."""
    return f"{dotted(path)}: unknown key; {suggest(path)}"


def _message(path: Path, detail: Any, root: Located) -> str:
    if detail["type"] == "extra_forbidden":
        return unknown_key(path)
    field = field_at(path)
    assert field is not None
    allowed = expected(field)
    if isinstance(path[-1], int) and (section := section_at(path)):
        allowed = f"a path or a mapping with {', '.join(section.model_fields)}"
    name = dotted(path)
    node, depth = _find(root, path)
    if detail["type"] == "missing" and depth < len(path):
        return f"{name}: missing; expected {allowed}"
    if detail["type"] == "value_error":
        return f"{name}: {detail['ctx']['error']}"
    found = node.plain() if depth == len(path) else detail["input"]
    return f"{name}: expected {allowed}; found {_show(found)}{_advice(allowed, found)}"


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
    text = f"the text {value!r}" if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _advice(allowed: str, found: Any) -> str:
    if isinstance(found, str):
        if found.lower() in ("yes", "no", "on", "off", "y", "n") and "true or false" in allowed:
            return "; write true or false"
        unquoted = plain_scalar(found.replace("_", "").replace(",", ""))
        if isinstance(unquoted, (int, float)) and "number" in allowed:
            return f"; write {unquoted} without quotes, commas or underscores"
        if allowed.startswith("a list"):
            return f"; write [{found}]"
        if plain_scalar(found.lower()) in (True, False) and "true or false" in allowed:
            return "; write it in lower case, without quotes"
    elif isinstance(found, (bool, int, float)) and "text" in allowed:
        return "; put it in quotes"
    elif isinstance(found, float) and found.is_integer() and "whole number" in allowed:
        return f"; write {int(found)}"
    return ""


def _path_in_schema(loc: tuple[str | int, ...]) -> Path:
    """A pydantic location without the names of union members that it appends."""
    known = {path for path, _ in fields_in(Recipe)}
    for end in range(len(loc), 0, -1):
        first = tuple(0 if isinstance(part, int) else part for part in loc[:end])
        parent_is_section = section_at(loc[: end - 1]) is not None
        if first in known or (parent_is_section and isinstance(loc[end - 1], str)) or section_at(loc[:end]):
            return loc[:end]
    return ()


def _find(root: Located, path: Path) -> tuple[Located, int]:
    """The node at a path, or the nearest one above it, and how many parts of the path lead to it."""
    node = root
    for depth, part in enumerate(path):
        value = node.value
        if isinstance(value, dict) and part in value:
            node = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            node = value[part]
        else:
            return node, depth
    return node, len(path)


def _where(root: Located, path: Path) -> str:
    return _find(root, path)[0].where
