"""docs/recipe.md: it is what the schema says, and its examples are recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.recipes import run_rpft

from rpft.recipe.examples import EXAMPLES
from rpft.recipe.keys import dotted, fields_in, section_of
from rpft.recipe.load import load_recipe
from rpft.recipe.reference import reference
from rpft.recipe.schema import Recipe

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"


def test_the_page_is_what_the_command_prints() -> None:
    printed = run_rpft("recipes", "show-schema", "--markdown")
    assert (printed.code, printed.out) == (0, reference())
    message = "the schema has changed: rpft recipes show-schema --markdown > docs/recipe.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), message


def test_every_key_has_a_heading_of_its_own() -> None:
    lines = set(reference().splitlines())
    for path, field in fields_in(Recipe):
        if path[:2] == ("data", "eval") and len(path) > 2:  # as those of data.train
            continue
        if len(path) == 1 and section_of(field.annotation):
            assert f"## {path[0]}" in lines
        else:
            assert {f"## `{dotted(path)}`", f"### `{dotted(path)}`"} & lines, dotted(path)


@pytest.mark.parametrize("key", EXAMPLES)
def test_an_example_sets_its_key_and_loads(key: str, tmp_path: Path) -> None:
    assert key in {dotted(path) for path, _ in fields_in(Recipe)}
    values = yaml.safe_load(EXAMPLES[key])
    node = values
    for part in key.split("."):
        node = node[int(part)] if part.isdigit() else node[part]
    whole = {"model": {"path": "m"}, "data": {"train": ["rows.jsonl"]}, "output_dir": "out", **values}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(whole), encoding="utf-8")
    load_recipe(path)
