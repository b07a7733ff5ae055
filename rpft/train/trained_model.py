"""A run's model without its weights, where each of these is, and what becomes of it when its adapter is merged."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpft.errors import UserError
from rpft.model.adapters import inject_lora
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint, read_config, resolve_checkpoint
from rpft.model.cut import cut
from rpft.model.layer_reader import LayerReader
from rpft.model.layers import build_layers
from rpft.model.layout import LayerLayout
from rpft.model.merge import Drift, Merge, Tensors
from rpft.model.skeleton import Skeleton
from rpft.train.model_parts import lora_settings, read_scaled_config
from rpft.train.run_folder import RunFolder, TrainedFolder, TrainedTensors, read_json, trained_tensors


@dataclass(frozen=True)
class TrainedModel:
    """A model without its weights, and where each of them is."""

    base: Path
    """Whose files hold what was not trained; of a finished full run its result."""
    config: Any
    attention: str
    skeleton: Skeleton
    peft_model: Any | None
    layouts: list[LayerLayout]
    tensors: TrainedTensors

    def reader(self) -> LayerReader:
        """Reads what was not trained."""
        return LayerReader(Checkpoint(self.base), self.skeleton, self.layouts)


class Merged:
    """A model that has no adapter any more, made of a trained one layer by layer."""

    def __init__(self, model: TrainedModel, dtype: torch.dtype) -> None:
        """``dtype``: that it is to have."""
        self._model, self._dtype = model, dtype
        self._merge, self.config = Merge(model.skeleton, model.layouts), copy.deepcopy(model.config)
        self.unties = self._merge.unties
        """Whether embedding and head were tied and get weights of their own."""
        if self.unties:
            self.config.tie_word_embeddings = self.config.get_text_config().tie_word_embeddings = False
        self.skeleton = cut(build_model(copy.deepcopy(self.config), dtype, model.attention))

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        specs = (spec for layout in build_layers(self.skeleton, self._dtype) for spec, _ in layout.own.values())
        return sum(spec.num_bytes for spec in specs)

    def layers(self, probe_ids: torch.Tensor | None = None) -> Iterator[tuple[Tensors, Drift | None]]:
        """Each layer's tensors by their names in the model; see ``Merge.run``."""
        model = self._model
        return self._merge.run(self.skeleton, model.reader(), model.tensors, self._dtype, probe_ids)


def open_trained(run: RunFolder, trained: TrainedFolder, base: str | None, original: bool = True) -> TrainedModel:
    """The model of ``run`` with the weights of ``trained``; UserError where something is missing or another's.

    ``original``: whether the base model must be the unquantised one.
    """
    recipe = run.recipe
    dtype = getattr(torch, recipe.model.dtype)
    if recipe.adapter is None and trained.state is None:
        folder, config = trained.path, read_config(trained.path)
    else:
        folder = base_folder(run, base)
        if original and quantised_by(folder) == "bitsandbytes":
            raise UserError(
                f"the base model {folder} is quantised, and what was trained belongs into the original: give the"
                " folder or hub id of the unquantised model with --base, or take the adapter with --adapter-only"
            )
        config = read_scaled_config(recipe, folder)
    skeleton = cut(build_model(copy.deepcopy(config), dtype, recipe.model.attention))
    peft_model = None
    if recipe.adapter is not None:
        peft_model = inject_lora(skeleton, lora_settings(recipe.adapter), base or recipe.model.path)
    layouts = build_layers(skeleton, dtype)
    tensors = trained_tensors(trained, layouts, peft_model)
    return TrainedModel(folder, config, recipe.model.attention, skeleton, peft_model, layouts, tensors)


def open_untrained(folder: Path, config: Any, dtype: torch.dtype) -> TrainedModel:
    """The model in ``folder``, as it is."""
    skeleton = cut(build_model(copy.deepcopy(config), dtype, "auto"))
    return TrainedModel(
        folder, config, "auto", skeleton, None, build_layers(skeleton, dtype), TrainedTensors({}, {})
    )


def quantised_by(folder: Path) -> str | None:
    """The method, if the weights in ``folder`` are quantised; but for bitsandbytes models are published so."""
    settings = read_json(folder / "config.json").get("quantization_config")
    return None if settings is None else str(settings.get("quant_method"))


def base_folder(run: RunFolder, base: str | None) -> Path:
    """The folder of the base model; UserError with the way out where it is not to be had."""
    model = run.recipe.model
    try:
        return resolve_checkpoint(base or model.path, None if base else model.revision)
    except UserError as error:
        raise UserError(
            f"the base model of {run.path} is not where it was: {error}. If it has moved, give its folder with"
            " --base; a relative path is looked for from the current directory"
        ) from error
