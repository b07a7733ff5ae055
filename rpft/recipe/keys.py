"""Finding a key in the schema, and saying what may be written there."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rpft.recipe.schema import Recipe
from rpft.recipe.section import Expected

Path = tuple[str | int, ...]

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def dotted(path: Sequence[str | int]) -> str:
    """ "data.train.0.path" for ("data", "train", 0, "path")."""
    return ".".join(str(part) for part in path)


def fields_in(model: type[BaseModel], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Every field of a model and, depth first, of the sections and list elements below it.

    A list element is addressed as 0.
    """
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path, field
        if section := section_of(field.annotation):
            yield from fields_in(section, path)
        elif section := element_section_of(field.annotation):
            yield from fields_in(section, (*path, 0))


def field_at(path: Sequence[str | int]) -> FieldInfo | None:
    """The field that a path names; for an element of a list, the list's. None if the schema has none."""
    model: type[BaseModel] | None = Recipe
    field = None
    for part in path:
        if isinstance(part, int):
            if field is None or not is_list(field.annotation):
                return None
            model = element_section_of(field.annotation)
        elif model is None or part not in model.model_fields:
            return None
        else:
            field = model.model_fields[part]
            model = section_of(field.annotation)
    return field


def section_at(path: Sequence[str | int]) -> type[BaseModel] | None:
    """The section that stands at a path, None when the path is not one of a section."""
    if not path:
        return Recipe
    field = field_at(path)
    if field is None:
        return None
    return element_section_of(field.annotation) if isinstance(path[-1], int) else section_of(field.annotation)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class of `Train` or `Adapter | None`."""
    for choice in _choices(annotation):
        # On Python 3.10 tuple[str, ...] passes for a class, and issubclass refuses it.
        if get_origin(choice) is None and isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def element_section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class of `tuple[Source, ...]`."""
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def is_list(annotation: Any) -> bool:
    """Whether a list may be written for this type."""
    return any(get_origin(choice) is tuple for choice in _choices(annotation))


def allows_null(annotation: Any) -> bool:
    """Whether null is a value of this type."""
    return type(None) in _choices(annotation)


def expected(field: FieldInfo) -> str:
    """What may be written for a key: "a whole number >= 1, or null"."""
    for item in field.metadata:
        if isinstance(item, Expected):
            return item.text
    words = []
    for choice in _choices(field.annotation):
        if get_origin(choice) is Literal:
            values = list(get_args(choice))
            words.append(f"one of {', '.join(values)}" if len(values) > 1 else f"only {values[0]}")
        elif section := element_section_of(choice):
            words.append(f"a list; each element a path or a mapping with {', '.join(section.model_fields)}")
        elif section := section_of(choice):
            words.append(f"a section with {', '.join(section.model_fields)}")
        else:
            words.append(_WORDS[choice] + (_bounds(field) if choice in (int, float) else ""))
    text = ", or ".join(words)
    return f"{text}; not empty" if any(hasattr(item, "min_length") for item in field.metadata) else text


def suggest(path: Path) -> str:
    """What a person may have meant by an unknown key: a key of the same section or of another one."""
    key, parent = str(path[-1]), path[:-1]
    section = section_at(parent)
    assert section is not None
    every_key = [known for known, _ in fields_in(Recipe)]
    last_word = key.rpartition(".")[2]
    homes = [known[:-1] for known in every_key if known[-1] == last_word and known[:-1] != parent]
    if homes:
        return f"`{last_word}` belongs {' or '.join(_under(home) for home in homes)}"
    if close := difflib.get_close_matches(key.lower(), section.model_fields, n=1):
        return f"did you mean `{close[0]}`?"
    elsewhere = {str(known[-1]): dotted(known) for known in every_key}
    if close := difflib.get_close_matches(key.lower(), elsewhere, n=1, cutoff=0.75):
        return f"did you mean `{elsewhere[close[0]]}`?"
    return f"the keys {_under(parent)} are {', '.join(section.model_fields)}"


def _under(parent: Path) -> str:
    return f"under `{dotted(parent)}:`" if parent else "at the top level"


def _bounds(field: FieldInfo) -> str:
    found = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return " " + " and ".join(found) if found else ""


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return [annotation]
