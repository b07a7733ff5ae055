"""Training checkpoints: trained weights and moments a layer a file, a state file last, renamed into place whole.

    OUTPUT_DIR/checkpoints/step-00000020/layer-00003.safetensors    master, exp_avg, exp_avg_sq
                                        /state.json                 step, counters, what the run is, file sizes

Frozen weights are not in it: they come from the model's own checkpoint. Working weights are not either: they
are the masters, rounded.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from rpft.errors import UserError
from rpft.files import sync
from rpft.model.host_store import HostStore

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = 1
_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8})$")
_PARTIAL = ".partial"
_STATE = "state.json"


@dataclass(frozen=True)
class TrainState:
    """Where a run stands at a step boundary, and what must be the same for it to go on bit for bit."""

    step: int
    updates_applied: int
    skipped_steps: int
    best_step: int | None
    best_eval_loss: float | None
    run: dict[str, Any]
    """Model, data, batch, schedule and optimizer settings; see ``run_identity``."""


class CheckpointFolder:
    """The checkpoints of one output directory."""

    def __init__(self, output_dir: Path, keep_last: int, keep_best: bool) -> None:
        self.path = output_dir / _FOLDER
        self.keep_last, self.keep_best = keep_last, keep_best

    def save(self, state: TrainState, store: HostStore) -> Path:
        """Writes a checkpoint of a store at rest; older ones beyond ``keep_last`` go when the new one is whole."""
        final = self.path / _name(state.step)
        fresh = final.with_name(final.name + _PARTIAL)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        sizes = {}
        for layer in store.layers:
            if layer.layout.num_trained:
                file = fresh / f"layer-{layer.layout.layer:05d}.safetensors"
                tensors = {
                    "master": layer.master_values(),
                    "exp_avg": layer.exp_avg,
                    "exp_avg_sq": layer.exp_avg_sq,
                }
                save_file(tensors, file)
                sync(file)
                sizes[file.name] = file.stat().st_size
        text = json.dumps({"version": CHECKPOINT_VERSION, "sizes": sizes, **asdict(state)}, indent=1)
        (fresh / _STATE).write_text(text, encoding="utf-8")
        sync(fresh / _STATE)
        shutil.rmtree(final, ignore_errors=True)
        fresh.rename(final)
        sync(self.path)
        self._prune(state)
        return final

    def _prune(self, state: TrainState) -> None:
        """Leaves the last whole ones up to ``state``, the best, and those that a resumed run has not reached."""
        reached = [path for path in self.all() if path.name <= _name(state.step)]
        kept = [path.name for path in reached if _fault(path) is None][-self.keep_last :]
        if self.keep_best and state.best_step is not None:
            kept.append(_name(state.best_step))
        for path in [*reached, *self.path.glob("*" + _PARTIAL)]:
            if path.name not in kept:
                shutil.rmtree(path)

    def all(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        if not self.path.is_dir():
            return []
        return sorted(p for p in self.path.iterdir() if _NAME.match(p.name))

    def newest(self) -> Path:
        """The newest whole checkpoint; a torn one is named and passed over. UserError when there is none."""
        for path in sorted(self.path.glob("*" + _PARTIAL)):
            logger.warning("checkpoint %s was not finished; passing it over", path)
        for path in reversed(self.all()):
            fault = _fault(path)
            if fault is None:
                return path
            logger.warning("checkpoint %s is not whole (%s); going back to the one before", path, fault)
        raise UserError(f"no whole checkpoint in {self.path} to resume from; leave out --resume to start anew")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _fault(path: Path) -> str | None:
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        wrong = [name for name, size in state["sizes"].items() if (path / name).stat().st_size != size]
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{wrong[0]} has another size than was written" if wrong else None


def read_state(path: Path) -> TrainState:
    """The state of a whole checkpoint; UserError for anything else."""
    fault = _fault(path)
    if fault is not None:
        raise UserError(f"{path}: not a whole checkpoint ({fault})")
    data = json.loads((path / _STATE).read_text(encoding="utf-8"))
    if data.pop("version") != CHECKPOINT_VERSION:
        raise UserError(f"{path}: written by another version of rpft, whose checkpoints this one cannot read")
    del data["sizes"]
    data["run"].setdefault("engine", {"host_gradients": "float32"})  # before there was a choice
    return TrainState(**data)


def refuse_another_run(path: Path, state: TrainState, run: dict[str, Any]) -> None:
    """UserError naming each key of ``run`` (see ``run_identity``) that differs from the checkpoint's."""
    before, now = dict(_flat(state.run)), dict(_flat(run))
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if differing:
        lines = "; ".join(f"{key} was {before.get(key)} and is {now.get(key)}" for key in differing)
        raise UserError(
            f"{path} is of another run than the recipe now describes: {lines}. Change it back to go on with that"
            " run, or start this one in another output_dir"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def restore(path: Path, store: HostStore) -> None:
    """Fills masters, moments and working weights of ``store``."""
    for layer in store.layers:
        if layer.layout.num_trained:
            file = path / f"layer-{layer.layout.layer:05d}.safetensors"
            with safe_open(file, framework="pt") as handle:
                layer.exp_avg.copy_(handle.get_tensor("exp_avg"))
                layer.exp_avg_sq.copy_(handle.get_tensor("exp_avg_sq"))
                layer.write_master(handle.get_tensor("master"))
