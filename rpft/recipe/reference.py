"""The page docs/recipe.md: every key of a recipe, made from the schema."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from rpft.recipe.examples import EXAMPLES
from rpft.recipe.keys import Path, allows_null, dotted, element_section_of, expected, section_of
from rpft.recipe.schema import Recipe
from rpft.recipe.schema_text import REQUIRED, default_text

_INTRODUCTION = """\
# Every key of a recipe

This page is made from the schema by `rpft recipes show-schema --markdown`; without the option the same is printed
as a commented recipe. A recipe is one YAML file. A key that is not here is an error, with its line and the key
that was meant. YAML is read as of version 1.2: `1e-4` is a number, `yes` is a word. `${env:NAME}` and
`${env:NAME:-default}` stand for environment variables. Paths are relative to the current directory.

Any key can be set on the command line, after the recipe: `rpft train mine.yaml train.learning_rate=5e-5
data.train.0.max_rows=1000`. `null` sets a key that may be null, and otherwise takes it back to its default.

Only `model.path`, `data.train` and `output_dir` must be there.
"""
_WIDTH = 115


def reference() -> str:
    """Markdown: a heading a key, with what may be written, the default, the meaning, and an example for some."""
    parts = [_INTRODUCTION]
    parts += [_key(("output_dir",), Recipe, level="##")]
    for name, field in Recipe.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            optional = " Optional: it may be left out, or null." if allows_null(field.annotation) else ""
            parts.append(f"## {name}\n\n{_escaped(f'{section.__doc__}{optional}')}\n{_example((name,))}")
            parts += _keys(section, (name,))
    return "\n".join(parts)


def _keys(section: type[BaseModel], above: Path) -> Iterator[str]:
    for name, field in section.model_fields.items():
        path = (*above, name)
        if inner := section_of(field.annotation):
            yield f"### {_heading(path)}\n\n{_escaped(str(inner.__doc__))}\n{_example(path)}"
            yield from _keys(inner, path)
            continue
        yield _key(path, section, level="###")
        element = element_section_of(field.annotation)
        if element and path == ("data", "train"):
            yield from _keys(element, (*path, 0))


def _key(path: Path, section: type[BaseModel], level: str) -> str:
    field = section.model_fields[str(path[-1])]
    default = default_text(field)
    state = "required" if default == REQUIRED else f"default `{default}`"
    meaning = "\n".join(textwrap.wrap(f"{field.description}", _WIDTH, break_on_hyphens=False))
    head = f"{level} {_heading(path)}\n\n*{_escaped(expected(field))}; {state}*\n\n"
    return head + _escaped(meaning) + "\n" + _example(path)


def _heading(path: Path) -> str:
    """An element of a list is addressed as on the command line, as 0."""
    return f"`{dotted(path)}`"


def _example(path: Path) -> str:
    example = EXAMPLES.get(dotted(path))
    return "" if example is None else f"\n```yaml\n{example}\n```\n"


def _escaped(text: str) -> str:
    """Markdown takes * and < for its own outside of code."""
    parts = text.split("`")
    parts[::2] = [html.escape(part, quote=False).replace("*", r"\*").replace("_", r"\_") for part in parts[::2]]
    return "`".join(parts)
