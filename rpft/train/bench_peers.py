"""A run's work handed to other programs, what they made of it, and how far their losses are from the run's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rpft.data.batches import Microbatch
from rpft.model.adapters import save_lora
from rpft.model.host_store import HostStore
from rpft.peers import PEERS
from rpft.peers.start import run_peer
from rpft.peers.work import Rows, Work, read_work
from rpft.recipe.schema import Recipe
from rpft.train.bench import TIMED_RATE, WINDOWS, InWindows, full_steps
from rpft.train.flight import Flight
from rpft.train.prepare import Prepared

LOSSES = 8
"""Steps whose losses are compared, if nobody says how many."""

_KNOWN_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class PeerMeasured(InWindows):
    """A peer's speed and memory on so many workers."""

    peer: str
    workers: int
    windows: list[float]
    steady: list[float]
    losses: list[float]
    vram_peak_bytes: int
    """Of the worker that held most."""
    vram_reserved_bytes: int
    ram_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        medians = {
            "tokens_per_second": self.tokens_per_second,
            "steady_tokens_per_second": self.steady_tokens_per_second,
        }
        return {**asdict(self), **medians}


@dataclass(frozen=True)
class PeerFailed:
    """A peer that did not do the work."""

    peer: str
    workers: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"peer": self.peer, "workers": self.workers, "failed": self.reason}


PeerOutcome = PeerMeasured | PeerFailed


def cannot_share(recipe: Recipe) -> str | None:
    """Why no peer can do the work of ``recipe``; None where it can be the same."""
    if recipe.model.quantize != "none":
        return f"model.quantize is {recipe.model.quantize}: peers would train on other weights"
    if recipe.engine.emulate_link_gbps is not None:
        return "engine.emulate_link_gbps slows down the transfers of rpft only"
    return None


def hand_over(prepared: Prepared, store: HostStore, folder: Path, compared: Sequence[int], num_steps: int) -> None:
    """Writes the work of the run into ``folder``, which is there. ``store``: with the first weights.

    ``compared``: steps whose losses are compared. ``num_steps``: of a window, beside its first.
    """
    recipe, on_cuda = prepared.recipe, prepared.devices[0].torch_device.type == "cuda"
    config, adapter = folder / "config", folder / "adapter"
    prepared.config.save_pretrained(config)
    if prepared.peft_model is not None:
        adapter.mkdir(exist_ok=True)
        save_lora(prepared.peft_model, store, adapter)
    steps = full_steps(prepared, num_steps)
    window = (steps[-1], *steps)  # as the run's own windows begin
    attention = prepared.skeleton.model.config._attn_implementation
    train, optimizer = recipe.train, recipe.optimizer
    batches = {n: prepared.data.step(n) for n in {*compared, *window}}
    Work(
        config=str(config.absolute()),
        weights=str(prepared.checkpoint.folder.absolute()),
        adapter=None if prepared.peft_model is None else str(adapter.absolute()),
        dtype=recipe.model.dtype,
        attention=attention if attention in _KNOWN_ATTENTION else "sdpa",
        compile=prepared.kernels.kind == "compile",
        device="cuda" if on_cuda else "cpu",
        deterministic=recipe.engine.deterministic,
        learning_rate=train.learning_rate,
        timed_learning_rate=TIMED_RATE,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        lr_ratio_b=1.0 if recipe.adapter is None else recipe.adapter.lr_ratio_b,
        max_grad_norm=train.max_grad_norm,
        delayed=prepared.delayed,
        seed=train.seed,
        vram_limit_bytes=recipe.engine.vram_limit if on_cuda else None,
        cpu_threads=recipe.engine.cpu_threads,
        compared=tuple(compared),
        window=window,
        window_tokens=tuple(Flight(n, batches[n]).tokens for n in window),
        windows=WINDOWS,
        warm_up=len(window),
    ).save(folder, {n: list(map(_rows, step)) for n, step in batches.items()})


def _rows(batch: Microbatch) -> Rows:
    return Rows(batch.input_ids, batch.labels, batch.position_ids)


def do_work(peer: str, folder: Path, workers: int) -> PeerOutcome:
    """What ``peer`` makes of the work in ``folder``, in processes of its own; its output goes into a log there."""
    if not (folder / "work.json").exists():
        return PeerFailed(peer, workers, "there is nothing to do: the run itself could not be prepared")
    work = read_work(folder)
    found = run_peer(peer, folder, workers, folder / f"{peer}.log", work.device == "cuda")
    if isinstance(found, str):
        return PeerFailed(peer, workers, found)
    tokens = work.window_tokens
    return PeerMeasured(
        peer,
        workers,
        windows=[sum(tokens) / seconds for seconds in found.drained],
        steady=[sum(tokens[1:]) / sum(seconds[1:]) for seconds in found.windows],
        losses=found.losses,
        vram_peak_bytes=found.vram_bytes,
        vram_reserved_bytes=found.vram_reserved_bytes,
        ram_bytes=found.ram_bytes,
    )


def title_of(peer: str) -> str:
    """What ``peer`` is, for people."""
    return PEERS[peer].title


def largest_difference(losses: Sequence[float], own: Sequence[float]) -> tuple[float, int] | None:
    """(How far losses are from the run's where they are furthest, at which step of those); None without losses.

    A loss that is no number is infinitely far.
    """
    pairs = list(zip(losses, own, strict=False))
    if not pairs:
        return None
    apart = [abs(theirs - ours) if math.isfinite(theirs - ours) else math.inf for theirs, ours in pairs]
    step = max(range(len(apart)), key=apart.__getitem__)
    return apart[step], step + 1
