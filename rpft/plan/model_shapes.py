"""Models that one need not have: the shapes of some are shipped, those of others come from a config.json."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from rpft.errors import UserError
from rpft.model.checkpoint import read_config


def shape_names() -> list[str]:
    """Names of the shipped shapes, sorted."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def read_shape(name: str) -> Any:
    """The transformers config of a shipped shape, or of a folder; UserError where there is none."""
    if name in shape_names():
        from transformers import AutoConfig

        values = yaml.safe_load((_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
        return AutoConfig.for_model(**values)
    if Path(name).is_dir():
        return read_config(Path(name))
    close = difflib.get_close_matches(name.lower(), shape_names(), n=1, cutoff=0.4)
    advice = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(shape_names())}."
    raise UserError(f"no model shape is called {name!r}; {advice} A folder with a config.json will do too")


def _folder() -> Path:
    return Path(__file__).with_name("models")
