"""A recipe back to YAML, every key written out."""

from __future__ import annotations

from typing import Any

import yaml

from rpft.recipe import scalars
from rpft.recipe.schema import Recipe


def dump_recipe(recipe: Recipe) -> str:
    """YAML with every key of ``recipe``, defaults included; loading it gives an equal recipe."""
    return to_yaml(recipe.model_dump())


def to_yaml(value: Any) -> str:
    """Block YAML that YAML 1.1 and 1.2 readers understand alike."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would take for something else, such as 1e-4 or yes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "'" if not isinstance(scalars.plain_scalar(text), str) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(tuple, yaml.SafeDumper.represent_list)
