"""A run's output directory read back: its recipe, and the trained weights of its result or of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from rpft import __version__
from rpft.data.asking import Asking
from rpft.errors import UserError
from rpft.model.adapters import names_in_file
from rpft.model.layout import LayerLayout
from rpft.recipe.load import load_recipe
from rpft.recipe.schema import Recipe
from rpft.train.checkpoint import CheckpointFolder, TrainState, check_whole, read_state
from rpft.train.checkpoint_layers import layer_file
from rpft.train.metrics import MetricsFile
from rpft.train.output_dir import result_folder
from rpft.train.rows import data_settings, load_tokenizer, use_template
from rpft.train.saved_tensors import saved_tensors

RECIPE_FILE, ABOUT_FILE = "recipe.yaml", "about.json"
LATEST, BEST, BASE = "latest", "best", "base"


@dataclass(frozen=True)
class TrainedFolder:
    """Where trained weights stand: a result, or a checkpoint and its state."""

    path: Path
    state: TrainState | None

    @property
    def described(self) -> str:
        """For people."""
        return "the finished result" if self.state is None else f"the checkpoint of step {self.state.step}"


@dataclass(frozen=True)
class RunFolder:
    """The output directory of a run that has at least begun."""

    path: Path
    recipe: Recipe

    @property
    def result(self) -> Path:
        """The folder of the result, which is there when the run has finished."""
        return self.path / result_folder(self.recipe).name

    @property
    def checkpoints(self) -> CheckpointFolder:
        settings = self.recipe.checkpoint
        return CheckpointFolder(self.path, settings.keep_last, settings.keep_best)

    @property
    def metrics_path(self) -> Path:
        return MetricsFile(self.path).path

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that are whole."""
        return MetricsFile(self.path).lines()

    def find(self, wanted: str) -> TrainedFolder:
        """``latest``: the result, or the newest whole checkpoint; ``best``; or a checkpoint's folder or its name.

        UserError where there is none, or it is torn.
        """
        if wanted == LATEST:
            return self._latest()
        if wanted == BEST:
            return self._best()
        inside = self.checkpoints.path / wanted
        path = inside if inside.is_dir() else Path(wanted)
        if not path.is_dir():
            there = ", ".join(each.name for each in self.checkpoints.all()) or "none"
            raise UserError(f"--checkpoint {wanted}: {self.path} has no such checkpoint; there are: {there}")
        check_whole(path)
        return TrainedFolder(path, read_state(path))

    def _latest(self) -> TrainedFolder:
        saved = self.checkpoints.all()
        if self.result.is_dir() and all(p.stat().st_mtime <= self.result.stat().st_mtime for p in saved):
            return TrainedFolder(self.result, None)
        newest = self._newest()
        return TrainedFolder(newest, read_state(newest))

    def _newest(self) -> Path:
        try:
            return self.checkpoints.newest()
        except UserError:
            raise UserError(
                f"{self.path} holds no result ({self.result.name}/) and no whole checkpoint: nothing of this run"
                " is saved yet. Let it finish, interrupt it once, or set checkpoint.every_steps"
            ) from None

    def _best(self) -> TrainedFolder:
        best = read_state(self._newest()).best_step
        if best is None:
            raise UserError(
                f"{self.path}: no evaluation stands in the newest checkpoint, so none is the best; set"
                " train.eval_every and checkpoint.keep_best, or take --checkpoint latest"
            )
        path = self.checkpoints.folder_of(best)
        if not path.is_dir():
            raise UserError(
                f"{self.path}: the evaluation loss was lowest after step {best}, of which no checkpoint is kept;"
                " checkpoint.keep_best keeps it. Take --checkpoint latest"
            )
        check_whole(path)
        return TrainedFolder(path, read_state(path))


def open_run(path: Path) -> RunFolder:
    """The run in ``path``; UserError where there is none."""
    if not (path / RECIPE_FILE).is_file():
        wrong = (
            f"no {RECIPE_FILE} in it" if path.is_dir() else "that is a file" if path.exists() else "no such folder"
        )
        raise UserError(f"{path}: {wrong}; give the output directory of a run (its output_dir)")
    try:
        return RunFolder(path, load_recipe(path / RECIPE_FILE))
    except UserError as error:
        made_by = _version_that_ran(path)
        if made_by in (None, __version__):
            raise
        raise UserError(f"{error}\nThe run was made by rpft {made_by}; this is rpft {__version__}") from error


def _version_that_ran(path: Path) -> str | None:
    """Of rpft; None where nothing there says it."""
    try:
        found = read_json(path / ABOUT_FILE)["versions"]["rpft"]
    except (UserError, KeyError, TypeError):
        return None
    return str(found)


class _Place(NamedTuple):
    """Where a tensor stands."""

    said: str
    """For people."""
    read: Callable[[], torch.Tensor | None]
    """Gives it; None where it is not there."""


class TrainedTensors(Mapping[str, torch.Tensor]):
    """Trained tensors by their names in the model that runs, read one at a time.

    A tensor that several layers use stands under each of its names. Those of a checkpoint are float32 masters.
    """

    def __init__(self, places: dict[str, _Place], shapes: dict[str, tuple[int, ...]]) -> None:
        self._places, self._shapes = places, shapes

    def __getitem__(self, name: str) -> torch.Tensor:
        said, read = self._places[name]
        tensor = read()
        if tensor is None or tuple(tensor.shape) != self._shapes[name]:
            found = "missing" if tensor is None else list(tensor.shape)
            raise UserError(
                f"{said} is {found}, and the recipe's model has {list(self._shapes[name])}: the weights are"
                " of another recipe or another base model"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def trained_tensors(trained: TrainedFolder, layouts: list[LayerLayout], peft_model: Any | None) -> TrainedTensors:
    """What was trained of the model with ``layouts``; nothing of a finished full run, whose result is whole."""
    shapes = {b.name: b.shape for layout in layouts for b in layout.bindings if b.grad_offset is not None}
    if trained.state is not None:
        owners = {name: own for layout in layouts for name, own in _owners(layout, layouts).items()}
        return TrainedTensors(
            {n: _in_checkpoint(trained.path, layouts[i], own) for n, (i, own) in owners.items()}, shapes
        )
    if peft_model is None:
        return TrainedTensors({}, {})
    file = trained.path / "adapter_model.safetensors"
    names = names_in_file(peft_model, layouts)
    return TrainedTensors({name: _in_adapter(file, key) for name, key in names.items() if name in shapes}, shapes)


def _in_checkpoint(path: Path, layout: LayerLayout, name: str) -> _Place:
    def read() -> torch.Tensor | None:
        with saved_tensors(path, layout.number) as saved:
            return saved.read("master", layout.own[name][0])

    return _Place(f"{path / layer_file(layout)}: master.{name}", read)


def _in_adapter(file: Path, key: str) -> _Place:
    def read() -> torch.Tensor | None:
        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(key) if key in set(handle.keys()) else None

    return _Place(f"{file}: {key}", read)


def asked_as_trained(run: RunFolder, trained: TrainedFolder | None, base: Path) -> tuple[Any, Asking]:
    """The tokenizer with the chat template that the run's rows had, and how the model is asked with it.

    ``trained``: None where nothing that the run has saved is looked at.
    """
    spec = run.recipe.data
    if trained is not None and trained.state is None:
        tokenizer = load_tokenizer(trained.path)  # saved with the result
    else:
        tokenizer = use_template(load_tokenizer(base), spec)
    return tokenizer, Asking(tokenizer, data_settings(spec.model_copy(update={"chat_template": None})))


def _owners(layout: LayerLayout, layouts: list[LayerLayout]) -> dict[str, tuple[int, str]]:
    """For each trained tensor that a layer uses, the layer that owns it and its name there."""
    owners = {}
    for binding in layout.bindings:
        if binding.grad_offset is None:
            continue
        if binding.name in layout.own:
            owners[binding.name] = layout.layer, binding.name
            continue
        piece = next(p for p in layout.weight_pieces if p.region_offset == binding.byte_offset)
        own = layouts[piece.layer].own
        owner = next(n for n, (spec, offset) in own.items() if offset == piece.start and spec.trained)
        owners[binding.name] = piece.layer, owner
    return owners


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty where there is no such file. UserError where it is something else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); it is damaged: move it away") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content
