"""From a recipe file and overrides to a validated recipe; every error of a recipe is reported at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from rpft.errors import UserError
from rpft.recipe.dump import dump_recipe
from rpft.recipe.explain import explain
from rpft.recipe.keys import allows_null, field_at, section_at
from rpft.recipe.overrides import apply_override
from rpft.recipe.schema import Recipe
from rpft.recipe.shipped import shipped_names
from rpft.recipe.yaml_tree import Located, parse_yaml

__all__ = ["dump_recipe", "load_recipe"]


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply the overrides in order, and validate the result.

    Args:
        path: a YAML file. Paths inside it are kept as written, relative to the current directory.
        overrides: `key.sub=value` each, the value in YAML.

    Raises UserError, one line for each fault with its file:line or override.
    """
    origin = os.fspath(path)
    root, errors = parse_yaml(_read(Path(path), origin), origin)
    if root is None:
        raise UserError(f"{origin}: the recipe is empty; `rpft recipes show-schema` shows every key")
    if not isinstance(root.value, dict):
        raise UserError(f"{root.where}: a recipe is a mapping of sections (`model:`, `data:`, ...)")
    for override in overrides:
        errors += apply_override(root, override)
    _open_empty_sections(root)
    recipe = None
    try:
        recipe = Recipe.model_validate(root.plain())
    except ValidationError as error:
        errors += explain(error, root)
    if recipe is None or errors:
        headline = [] if len(errors) == 1 else [f"{len(errors)} errors in {origin}:"]
        raise UserError("\n  ".join([*headline, *errors]))
    return recipe


def _read(path: Path, origin: str) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        advice = "`rpft recipes` lists the shipped ones"
        if path.stem in shipped_names():
            advice = f"`rpft recipes copy {path.stem}` makes the shipped recipe yours"
        raise UserError(f"{origin}: no such recipe; {advice}") from None
    except IsADirectoryError:
        inside = path / "recipe.yaml"
        advice = f"{inside} is the recipe of the run there" if inside.is_file() else "a recipe is a YAML file"
        raise UserError(f"{origin}: that is a folder; {advice}") from None
    except OSError as error:
        raise UserError(f"{origin}: cannot read the recipe: {error.strerror}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{origin}:{line}: byte 0x{content[error.start]:02x} is not UTF-8; save the recipe as UTF-8"
        ) from None


def _open_empty_sections(root: Located) -> None:
    """A section whose keys are all left out, or commented out, has its defaults."""
    assert isinstance(root.value, dict)
    for name, node in root.value.items():
        field = field_at((name,))
        if node.value is None and field and section_at((name,)) and not allows_null(field.annotation):
            node.value = {}
