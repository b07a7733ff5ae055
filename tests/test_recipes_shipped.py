"""The shipped recipes: each loads, says how it is run, and can be copied to make it one's own."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from rpft.errors import UserError
from rpft.recipe.load import load_recipe
from rpft.recipe.schema import Recipe
from rpft.recipe.shipped import (
    copy_shipped,
    read_header,
    read_shipped,
    shipped_folder,
    shipped_names,
    shipped_path,
)

ROOT = Path(__file__).parents[1]
HUB_IDS = {
    "quickstart": "models/SmolLM2-135M-Instruct",
    "smollm2-135m-full": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3-1.7b-full": "Qwen/Qwen3-1.7B",
    "llama-3.1-8b-full": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-8b-lora": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen3-32b-full": "Qwen/Qwen3-32B",
    "qwen3-235b-a22b-lora": "Qwen/Qwen3-235B-A22B",
}


def test_the_shipped_recipes_are_those_that_are_promised() -> None:
    assert shipped_names() == sorted(HUB_IDS)
    assert shipped_folder() == ROOT / "recipes"


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_recipe_loads_through_the_command_in_its_first_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program, verb, file, *overrides = shlex.split(read_header(name).command)
    assert (program, verb) == ("rpft", "train")
    assert Path(file).resolve() == shipped_path(name)
    recipe = load_recipe(file, overrides)
    assert recipe.model.path == HUB_IDS[name]
    assert recipe.output_dir == f"out/{name}"
    assert (recipe.adapter is None) == name.endswith("-full")


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_recipe_shows_every_section_and_comments_its_trade_offs(name: str) -> None:
    text = read_shipped(name)
    sections = set(Recipe.model_fields) - ({"adapter"} if name.endswith("-full") else set())
    assert set(yaml.safe_load(text)) == sections
    assert text.isascii(), "printed on any console"
    for line in text.splitlines():
        assert len(line) <= 110, line
    commented = [line for line in text.splitlines() if not line.startswith("#") and " # " in line]
    assert len(commented) > 20


@pytest.mark.parametrize("name", shipped_names())
def test_the_header_says_what_it_does_and_what_it_needs(name: str) -> None:
    command, description, hardware = read_shipped(name).splitlines()[:3]
    assert command == f"# rpft train recipes/{name}.yaml"
    assert description.startswith("# ")
    assert hardware.startswith("# Hardware: ")
    assert read_header(name).hardware == hardware.removeprefix("# Hardware: ")


@pytest.mark.parametrize("destination", [None, Path("mine.yaml"), Path("folder"), Path("new folder/mine.yaml")])
def test_a_copy_is_headed_by_its_own_command(
    destination: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    target = copy_shipped("quickstart", destination)
    first_line, *rest = target.read_text().splitlines()
    assert Path(shlex.split(first_line)[3]) == target
    assert rest == read_shipped("quickstart").splitlines()[1:]
    assert load_recipe(target) == load_recipe(shipped_path("quickstart"))


def test_a_copy_never_overwrites(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("precious")
    with pytest.raises(UserError, match=r"mine\.yaml is already there and is not overwritten"):
        copy_shipped("quickstart", mine)
    assert mine.read_text() == "precious"


def test_an_unknown_name_suggests_one() -> None:
    with pytest.raises(UserError, match="did you mean `quickstart`"):
        read_shipped("quikstart")
    with pytest.raises(UserError, match=r"there are llama.*, smollm2-135m-full"):
        read_shipped("zzz")
    assert shipped_path("quickstart.yaml") == shipped_path("quickstart")
