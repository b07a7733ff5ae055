"""The schema as a commented recipe: every key with its meaning, its type and its default."""

from __future__ import annotations

import textwrap

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rpft.recipe.dump import to_yaml
from rpft.recipe.keys import allows_null, element_section_of, expected, section_of
from rpft.recipe.schema import Recipe

_WIDTH = 100
REQUIRED = "REQUIRED"


def schema_text() -> str:
    """Every key of a recipe as YAML that loads once each REQUIRED is replaced."""
    return "\n".join(_section_lines(Recipe, "")).strip() + "\n"


def _section_lines(section: type[BaseModel], indent: str) -> list[str]:
    lines: list[str] = []
    for name, field in section.model_fields.items():
        inner, element = section_of(field.annotation), element_section_of(field.annotation)
        if inner:
            state = "optional section" if allows_null(field.annotation) else "section"
            lines += ["", *_comment(f"{inner.__doc__} ({state})", indent), f"{indent}{name}:"]
            lines += _section_lines(inner, indent + "  ")
            continue
        if section is Recipe:
            lines.append("")
        lines += _comment(f"{field.description}", indent)
        lines += _comment(f"[{expected(field)}]", indent)
        if element and field.is_required():
            element_lines = _section_lines(element, indent + "    ")
            lines += [f"{indent}{name}:", f"{indent}  -", *element_lines]
        else:
            lines.append(f"{indent}{name}: {default_text(field)}")
    return lines


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False)


def default_text(field: FieldInfo) -> str:
    """The default as YAML on one line, or REQUIRED."""
    if field.is_required():
        return REQUIRED
    default = field.get_default()
    if isinstance(default, tuple):
        return "[" + ", ".join(to_yaml(value).split("\n")[0] for value in default) + "]"
    return to_yaml(default).split("\n")[0]
