"""The README's first recipe is a recipe."""

import re
from pathlib import Path

from rpft.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]


def test_the_first_recipe_of_ones_own_loads_and_has_at_most_ten_lines(tmp_path: Path):
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert text is not None
    assert len(text.group(1).splitlines()) <= 10
    path = tmp_path / "mine.yaml"
    path.write_text(text.group(1), encoding="utf-8")
    recipe = load_recipe(path)
    assert recipe.adapter is not None
    assert recipe.data.eval_fraction == 0.05
