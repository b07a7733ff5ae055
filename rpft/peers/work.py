"""The work that all programs share: model, batches and settings of a run, as a folder that any process reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

IGNORED = -100
"""The label of a token that is not trained."""


@dataclass(frozen=True)
class Rows:
    """Lines that go through a model together. All int64 [rows, sequence]; labels are already shifted."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    """Of packed rows; they start again at 0."""

    def on(self, device: torch.device) -> Placed:
        """The same on ``device``; where tokens are trained is found out here, which no step then waits for."""
        flat = self.labels.flatten()
        at = (flat != IGNORED).nonzero().flatten()
        positions = None if self.position_ids is None else self.position_ids.to(device)
        return Placed(self.input_ids.to(device), positions, at.to(device), flat[at].to(device))

    def lines(self, which: slice) -> Rows:
        """Some of the lines."""
        at = None if self.position_ids is None else self.position_ids[which]
        return Rows(self.input_ids[which], self.labels[which], at)

    def untrained(self) -> Rows:
        """The same with nothing that is scored."""
        return replace(self, labels=torch.full_like(self.labels, IGNORED))


@dataclass(frozen=True)
class Placed:
    """Lines on a device: ids and positions [rows, sequence], places of scored tokens in them [n], targets [n]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    at: torch.Tensor
    targets: torch.Tensor


Step = Sequence[Rows]
"""Microbatches."""


@dataclass(frozen=True)
class Work:
    """What is trained on what, and how it is timed."""

    config: str
    """Folder of the model's config.json."""
    weights: str | None
    """Folder of its safetensors files; None: drawn, the same in every process."""
    adapter: str | None
    """Folder in peft's format; without weights in it they are drawn. None: every weight is trained."""
    dtype: str
    attention: str
    compile: bool
    """Whether layers are compiled, as those of the run are."""
    device: str
    """cuda or cpu."""
    deterministic: bool
    learning_rate: float
    """While losses are compared."""
    timed_learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    lr_ratio_b: float
    max_grad_norm: float | None
    delayed: bool
    seed: int
    vram_limit_bytes: int | None
    cpu_threads: int | None
    """Of an operation on the CPU; None: the cores are shared out."""
    compared: tuple[int, ...]
    """Steps whose losses are compared, in order, from the first weights on."""
    window: tuple[int, ...]
    """Steps of a window, the first of which fills the pipeline."""
    window_tokens: tuple[int, ...]
    """Of each of them, without padding."""
    windows: int
    warm_up: int
    """Steps before the windows, which go round the same steps."""
    options: tuple[str, ...] = ()
    """See ``Peer.options``."""

    def save(self, folder: Path, steps: Mapping[int, Step]) -> None:
        """Writes the work into ``folder``; ``steps``: by the numbers that ``compared`` and ``window`` have."""
        tensors = {
            f"{step}.{number}.{name}": tensor.contiguous()
            for step, microbatches in steps.items()
            for number, rows in enumerate(microbatches)
            for name, tensor in vars(rows).items()
            if tensor is not None
        }
        save_file(tensors, folder / "steps.safetensors")
        (folder / "work.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def read_work(folder: Path) -> Work:
    """The work that ``Work.save`` has written."""
    told: dict[str, Any] = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    lists = {key: tuple(value) for key, value in told.items() if isinstance(value, list)}
    return Work(**{**told, **lists})


def read_steps(folder: Path) -> dict[int, list[Rows]]:
    """Its steps by number."""
    found: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    for key, tensor in load_file(folder / "steps.safetensors").items():
        step, number, name = key.split(".")
        found.setdefault(int(step), {}).setdefault(int(number), {})[name] = tensor

    def rows(parts: dict[str, torch.Tensor]) -> Rows:
        return Rows(parts["input_ids"], parts["labels"], parts.get("position_ids"))

    return {step: [rows(parts[n]) for n in range(len(parts))] for step, parts in found.items()}


def share(step: Step, rank: int, world: int) -> list[Rows]:
    """What process ``rank`` of ``world`` computes of a step, as many microbatches as any other.

    Whole microbatches where they come out even, else lines of each; else whole ones again, and where a process
    would have one less than others it computes one without a trained token.
    """
    if len(step) % world == 0:
        return list(step[rank::world])
    if all(len(rows.input_ids) % world == 0 for rows in step):
        return [rows.lines(slice(rank, None, world)) for rows in step]
    own = list(step[rank::world])
    return own if len(own) * world >= len(step) else [*own, step[0].untrained()]
