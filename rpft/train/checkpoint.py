"""Training checkpoints on disk: the folder of each, which are whole, which may go.

    OUTPUT_DIR/checkpoints/step-00000020/layer-00003.safetensors    masters and moments (checkpoint_layers.py)
                                        /layer-00003-experts-0-64.safetensors    of a group of its experts
                                        /state.json                 step, counters, what the run is; size and
                                                                    SHA-256 of every file, and of itself

A checkpoint is written under another name, synced, and renamed when it is whole. Frozen weights are not in it:
they come from the model's own checkpoint. Working weights are their masters, rounded, and are in it only where
updates are delayed and they lag behind. Random streams are functions of the seed and the step, as is the order of
the rows, so that the step is all that is kept of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rpft import files
from rpft.errors import UserError
from rpft.model.layout import LayerLayout
from rpft.model.moments import StateFormat
from rpft.recipe.sections.adapter import Adapter
from rpft.recipe.sections.model import Model
from rpft.recipe.sections.optimizer import Optimizer
from rpft.train.checkpoint_layers import LAYER_FILE, layer_file, layer_file_bytes
from rpft.train.shards import FileRecord, file_record

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = 2
_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8})$")
_PARTIAL = ".partial"
_STATE = "state.json"
_STATE_BYTES = 64 << 10
"""More than state.json takes, beside its line a layer."""
_MOST_STATE_BYTES = 64 << 20
_READING_THREADS = 4


class _Torn(Exception):
    """Why a folder is no whole checkpoint."""


@dataclass(frozen=True)
class TrainState:
    """Where a run stands at a step boundary, and what must be the same for it to go on bit for bit."""

    step: int
    updates_applied: int
    skipped_steps: int
    skipped_in_a_row: int
    best_step: int | None
    best_eval_loss: float | None
    run: dict[str, Any]
    """Model, data, batch, schedule and optimizer settings; see ``resume.run_identity``."""
    about: dict[str, Any]
    """The whole recipe, the plan and the versions: what may differ when the run goes on, and is said then."""
    passed_over: list[int] = field(default_factory=list)
    """Steps that the run does not learn from, because their loss once jumped."""
    rewinds: int = 0
    """How often it has gone back because of such steps."""


class CheckpointFolder:
    """The checkpoints of one output directory."""

    def __init__(self, output_dir: Path, keep_last: int, keep_best: bool) -> None:
        self.path = output_dir / _FOLDER
        self.keep_last, self.keep_best = keep_last, keep_best

    def write(
        self,
        state: TrainState,
        layouts: list[LayerLayout],
        write_layer: Callable[[int, Path], FileRecord],
        before_commit: Callable[[], None],
    ) -> Path:
        """Writes a checkpoint; older ones beyond ``keep_last`` go when it is whole.

        ``write_layer`` writes a layer's file; the order is that of ``layouts``. ``before_commit`` is called when
        nothing but the names of the files is missing on the disk.
        """
        final = self.path / _name(state.step)
        fresh = final.with_name(final.name + _PARTIAL)
        files.remove_tree(fresh)
        fresh.mkdir(parents=True)
        records = {}
        for layout in layouts:
            if layout.num_trained:
                name = layer_file(layout)
                records[name] = write_layer(layout.layer, fresh / name)
        for name in records:
            files.sync(fresh / name)
        before_commit()
        files.write_whole(fresh / _STATE, _manifest(state, records))
        files.sync(fresh)
        if final.exists():  # torn, or made before the run went on from an older one: out of the way, and pruned
            replaced = final.with_name(final.name + ".replaced" + _PARTIAL)
            files.remove_tree(replaced)
            files.rename(final, replaced)
        files.rename(fresh, final)
        self._prune(state)
        return final

    def _prune(self, state: TrainState) -> None:
        """Leaves the last whole ones up to ``state``, the best, and those that a resumed run has not reached."""
        reached = [path for path in self.all() if path.name <= _name(state.step)]
        kept = [path.name for path in reached if fault(path, deep=False) is None][-self.keep_last :]
        if self.keep_best and state.best_step is not None:
            kept.append(_name(state.best_step))
        for path in [*reached, *self.path.glob("*" + _PARTIAL)]:
            if path.name not in kept:
                files.remove_tree(path)

    def remove_oldest(self, best_step: int | None) -> Path | None:
        """Removes the oldest that is neither the newest whole one nor the best; None when there is none."""
        whole = [path for path in self.all() if fault(path, deep=False) is None]
        needed = {path.name for path in whole[-1:]}
        if self.keep_best and best_step is not None:
            needed.add(_name(best_step))
        for path in [*self.path.glob("*" + _PARTIAL), *self.all()]:
            if path.name not in needed:
                files.remove_tree(path)
                return path
        return None

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is, if it is there."""
        return self.path / _name(step)

    def all(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        if not self.path.is_dir():
            return []
        return sorted(p for p in self.path.iterdir() if _NAME.match(p.name))

    def newest_before(self, step: int) -> Path | None:
        """The newest whole checkpoint of a step before ``step``, or None."""
        earlier = [path for path in self.all() if path.name < _name(step)]
        return next((path for path in reversed(earlier) if fault(path) is None), None)

    def remove_after(self, kept: Path) -> None:
        """Removes those that are newer than ``kept``: the run that they are of has gone another way."""
        for path in self.all():
            if path.name > kept.name:
                files.remove_tree(path)

    def newest(self) -> Path:
        """The newest whole checkpoint; a torn one is named and passed over. UserError when there is none."""
        for path in sorted(self.path.glob("*" + _PARTIAL)):
            logger.warning("checkpoint %s was not finished; passing it over", path)
        for path in reversed(self.all()):
            wrong = fault(path)
            if wrong is None:
                return path
            logger.warning("checkpoint %s is not whole (%s); going back to the one before", path, wrong)
        raise UserError(
            f"no whole checkpoint in {self.path} to resume from; leave out --resume to start anew, in another"
            " output_dir where this one holds a run"
        )


def _name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_bytes(layouts: list[LayerLayout], lagging: bool, state_format: StateFormat = "fp32") -> int:
    """Bytes that a checkpoint takes on the disk, rounded up a little."""
    trained = [layout for layout in layouts if layout.num_trained]
    return sum(layer_file_bytes(layout, lagging, state_format) for layout in trained) + _STATE_BYTES


# -- state.json --------------------------------------------------------------------------------------------


def _manifest(state: TrainState, records: dict[str, FileRecord]) -> str:
    content = {
        "version": CHECKPOINT_VERSION,
        **asdict(state),
        "files": {name: asdict(record) for name, record in records.items()},
    }
    return json.dumps({**content, "sha256": content_digest(content)}, indent=1)


def content_digest(content: dict[str, Any]) -> str:
    """The checksum that state.json holds of its own content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> tuple[TrainState, dict[str, FileRecord]]:
    """(state, files) of the checkpoint ``path``; _Torn where state.json is not as rpft writes it."""
    file = path / _STATE
    try:
        if file.stat().st_size > _MOST_STATE_BYTES:
            raise _Torn(f"{_STATE} is larger than any that rpft writes")
        content = json.loads(file.read_text(encoding="utf-8"))
        written = content.pop("sha256", None)
        version = content.pop("version")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _Torn(f"{type(error).__name__}: {error}") from error
    if version == CHECKPOINT_VERSION and written != content_digest({"version": version, **content}):
        raise _Torn(f"{_STATE} is not as it was written: its checksum differs")
    if version != CHECKPOINT_VERSION:
        raise _Torn(f"version {version} of the format, which this rpft cannot read")
    try:
        records = {str(name): FileRecord(**record) for name, record in content.pop("files").items()}
        state = TrainState(**content)
        numbers = (state.step, state.updates_applied, state.skipped_steps, state.skipped_in_a_row, state.rewinds)
        if not all(type(number) is int and number >= 0 for number in (*numbers, *state.passed_over)):
            raise ValueError("a count that is none")
        run = state.run
        run.setdefault("engine", {"host_gradients": "float32"})  # before there was a choice
        # Keys of these sections that came later stood at their defaults.
        if run.get("model"):
            run["model"] = {**Model(path=run["model"]["path"]).model_dump(mode="json"), **run["model"]}
        if run.get("optimizer"):
            run["optimizer"] = {**Optimizer().model_dump(mode="json"), **run["optimizer"]}
        if run.get("adapter"):
            run["adapter"] = {**Adapter().model_dump(mode="json"), **run["adapter"]}
        state.about.items()
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise _Torn(f"{_STATE} does not hold what it should ({type(error).__name__}: {error})") from error
    return state, records


def fault(path: Path, deep: bool = True) -> str | None:
    """What keeps ``path`` from being a whole checkpoint. ``deep``: every byte is read, else sizes are compared."""
    try:
        _, records = _read_manifest(path)
        for name, record in records.items():
            if not LAYER_FILE.fullmatch(name):
                return f"it names a file {name!r}"
            if (path / name).stat().st_size != record.num_bytes:
                return f"{name} has another size than was written"
        if deep:
            with ThreadPoolExecutor(_READING_THREADS, "checksum") as pool:
                found = pool.map(file_record, [path / name for name in records])
            for (name, record), now in zip(records.items(), found, strict=True):
                if now != record:
                    return f"{name} is not as it was written: its checksum differs"
    except _Torn as torn:
        return str(torn)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def check_whole(path: Path) -> None:
    """UserError where ``path`` is no whole checkpoint."""
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint; its folder is one of OUTPUT_DIR/checkpoints")
    wrong = fault(path)
    if wrong is not None:
        raise UserError(f"{path}: not a whole checkpoint ({wrong}); take the one before")


def read_state(path: Path) -> TrainState:
    """The state of a checkpoint; UserError where state.json is not as it was written."""
    try:
        return _read_manifest(path)[0]
    except _Torn as torn:
        raise UserError(f"{path}: not a whole checkpoint ({torn})") from torn
