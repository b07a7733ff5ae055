"""A recipe: all its sections, whose keys stand in sections/, and what must hold between them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rpft.recipe.checks import find_conflicts
from rpft.recipe.section import Section
from rpft.recipe.sections.adapter import Adapter
from rpft.recipe.sections.checkpoint import Checkpoint
from rpft.recipe.sections.data import Data
from rpft.recipe.sections.engine import Engine
from rpft.recipe.sections.logging import Logging
from rpft.recipe.sections.model import Model
from rpft.recipe.sections.optimizer import Optimizer
from rpft.recipe.sections.train import Train


class Recipe(Section):
    """One run. ``Recipe(**sections)`` checks as strictly as a file; ``load_recipe`` explains its errors."""

    model: Model
    data: Data
    adapter: Adapter | None = None
    train: Train = Field(default_factory=Train)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    engine: Engine = Field(default_factory=Engine)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    logging: Logging = Field(default_factory=Logging)
    output_dir: str = Field(
        min_length=1,
        description="Folder for metrics, checkpoints and the result (as written, relative to the current "
        "directory).",
    )

    @model_validator(mode="after")
    def _no_conflicts(self) -> Recipe:
        sections = self.model, self.data, self.adapter, self.train, self.engine, self.checkpoint
        conflicts = list(find_conflicts(*sections, has_adapter=self.adapter is not None))
        if conflicts:
            raise PydanticCustomError("conflicts", "{text}", {"text": "; ".join(c.message for c in conflicts)})
        return self

    def with_values(self, section: str, **values: Any) -> Recipe:
        """This recipe with other values in one of its sections; they are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})
