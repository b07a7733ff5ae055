"""The rules that every section of a recipe shares."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rpft.recipe.sizes import parse_bytes


class Section(BaseModel):
    """Unknown keys are errors; a value is never converted, save that a whole number may be a float."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Expected:
    """Stands beside a type whose name would not tell a person what may be written there."""

    text: str


def listed(**kwargs: Any) -> Any:
    """A field that YAML writes as a list and a recipe, being immutable, keeps as a tuple.

    Only the container is converted; its elements stay strict.
    """
    return Field(strict=False, **kwargs)


def list_as_tuple(value: Any) -> Any:
    """What `listed` does, for a list that is one choice among others."""
    return tuple(value) if isinstance(value, list) else value


def bytes_or_null(value: Any) -> Any:
    """Read a size with or without a unit."""
    return None if value is None else parse_bytes(value)


class FrozenMapping(dict[str, Any]):
    """A mapping as the value of a key of a recipe, which is immutable and can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("a recipe cannot be changed")


def frozen_mapping(value: dict[str, Any] | None) -> FrozenMapping | None:
    """What a recipe keeps of a mapping that YAML writes."""
    return None if value is None else FrozenMapping(value)


def day(value: str) -> str:
    """Refuse text that is no date."""
    try:
        date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"expected a date such as 2024-07-26; found {value!r}") from None
    return value


def no_yaml_1_1_boolean(value: Any) -> Any:
    """Refuse `yes`, `on` and the like where text is allowed and a boolean was surely meant."""
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        raise ValueError(f"found the word {value!r}; write true or false (a folder of that name: ./{value})")
    return value
