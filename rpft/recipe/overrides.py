"""Overrides from the command line: `train.learning_rate=2e-5` put into the tree of a recipe."""

from __future__ import annotations

from typing import Any

from rpft.errors import UserError
from rpft.recipe.explain import unknown_key
from rpft.recipe.keys import Path, allows_null, dotted, element_section_of, field_at, is_list, section_at
from rpft.recipe.yaml_tree import Located, parse_yaml


def apply_override(root: Located, override: str) -> list[str]:
    """Put one `key.sub=value` into ``root``, in place.

    The value is YAML. Elements of a list are named by their index, the first free index appends. A
    section that is not there is made. `null` sets a key that may be null and otherwise removes it, so
    that its default holds.

    Returns the errors of this override, each a line that names it.
    """
    where = f"override {override}"
    key, equals, text = override.partition("=")
    if not equals or not key:
        return [f"{where}: an override is written key=value, as in train.learning_rate=2e-5"]
    try:
        value, errors = parse_yaml(text, where, numbered=False)
    except UserError as error:
        return [str(error)]
    try:
        _put(root, _parse_path(key), value or Located(None, where), where)
    except UserError as error:
        errors.append(f"{where}: {error}")
    return errors


def _parse_path(key: str) -> Path:
    path: Path = ()
    for part in key.split("."):
        field = field_at(path)
        if field is not None and is_list(field.annotation) and section_at(path) is None:
            if not (part.isascii() and part.isdigit() and len(part) < 6):
                raise UserError(f"`{dotted(path)}` is a list; name an element by its index, {dotted(path)}.0")
            path = (*path, int(part))
            continue
        section = section_at(path)
        if section is None:
            raise UserError(f"`{dotted(path)}` is a single value, there is no `{part}` below it")
        path = (*path, part)
        if part not in section.model_fields:
            raise UserError(unknown_key(path))
    return path


def _put(root: Located, path: Path, value: Located, where: str) -> None:
    node = root
    for depth, part in enumerate(path[:-1], start=1):
        children = _children(node, path[: depth - 1])
        if isinstance(children, dict):
            node = children.setdefault(str(part), _default(path[:depth], where))
        else:
            node = _element(children, int(part), path[:depth], where)
    children, last = _children(node, path[:-1]), path[-1]
    if isinstance(children, dict):
        field = field_at(path)
        assert field is not None
        if value.value is None and not allows_null(field.annotation):
            children.pop(str(last), None)
        else:
            children[str(last)] = value
    elif value.value is None:
        if int(last) < len(children):
            del children[int(last)]
    else:
        _element(children, int(last), path, where)
        children[int(last)] = value


def _children(node: Located, path: Path) -> dict[str, Located] | list[Located]:
    """What stands below a node, made where it is missing or written in its short form."""
    kind = dict if section_at(path) else list
    if node.value is None:
        node.value = kind()
    elif isinstance(node.value, str) and isinstance(path[-1], int):
        node.value = {"path": Located(node.value, node.where)}
    if isinstance(node.value, (dict, list)) and isinstance(node.value, kind):
        return node.value
    wanted = "a section" if kind is dict else "a list"
    raise UserError(f"`{dotted(path)}`, given at {node.where}, is not {wanted}, so nothing can be set below it")


def _default(path: Path, where: str) -> Located:
    """A node for a key that is not written: the default list, or an empty section."""
    if section_at(path):
        return Located({}, where)
    field = field_at(path)
    assert field is not None
    default: Any = field.get_default()
    elements = default if isinstance(default, tuple) and not element_section_of(field.annotation) else ()
    return Located([Located(element, where) for element in elements], where)


def _element(elements: list[Located], index: int, path: Path, where: str) -> Located:
    if index > len(elements):
        raise UserError(
            f"`{dotted(path[:-1])}` has {len(elements)} elements, so the next index is {len(elements)}"
        )
    if index == len(elements):
        elements.append(Located({} if section_at(path) else None, where))
    return elements[index]
