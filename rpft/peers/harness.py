"""The one loop that every peer goes through: losses from the first weights on, then windows, timed, and memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from rpft.model.adapters import learns_faster
from rpft.peers.work import Placed, Step, Work, read_steps, share


@dataclass(frozen=True)
class Place:
    """Where one process stands among those of a peer."""

    device: torch.device
    rank: int = 0
    world: int = 1


@dataclass(frozen=True)
class Result:
    """What a peer did. Memory in bytes; VRAM of the device that held most."""

    losses: list[float]
    """Of the steps that are compared, mean over trained tokens."""
    windows: list[list[float]]
    """Seconds of each step; a step ends where its update is made, or, where that is left to others, begun."""
    drained: list[float]
    """Seconds of each window, from rest to rest."""
    vram_bytes: int
    vram_reserved_bytes: int
    ram_bytes: int
    """Resident in all its processes, or what the machine has come to use since it began, if that is more."""


class Adapter(Protocol):
    """A peer that is ready to train."""

    devices: list[torch.device]
    """That this process has."""
    on_device: bool
    """Whether a step is over where the device has done it: else it ends in work of the host."""

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of what follows; nothing is under way."""
        ...

    def place(self, step: Step) -> Any:
        """``step`` as ``step`` takes it: on the devices where that is this adapter's way."""
        ...

    def step(self, step: Any, trained_tokens: int) -> Tensor | float:
        """One step, with its update; the sum of this process's losses, over ``trained_tokens``."""
        ...

    def finish(self) -> None:
        """Waits for what steps have left to others."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """What all steps run in."""
        ...


class DataParallel:
    """What adapters share whose processes each take a part of a step's microbatches."""

    on_device = True

    def __init__(self, place: Place) -> None:
        self._place = place
        self.devices = [place.device]

    def place(self, step: Step) -> list[Placed]:
        return [rows.on(self._place.device) for rows in share(step, self._place.rank, self._place.world)]

    def finish(self) -> None:
        """An update is part of its step."""

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()


Build = Callable[[Work, Place], Adapter]


def groups(named: Iterable[tuple[str, Any]], work: Work) -> list[dict[str, Any]]:
    """Parameters as torch's optimizers take them: decay on matrices only, LoRA+'s rate where the run has one."""
    kinds: dict[tuple[bool, bool], list[Any]] = {}
    for name, parameter in named:
        decays = parameter.dim() >= 2 and not name.rsplit(".", 1)[-1].endswith("bias")
        fast = work.lr_ratio_b != 1.0 and learns_faster(name, parameter.dim())
        kinds.setdefault((decays, fast), []).append(parameter)
    return [
        {
            "params": part,
            "weight_decay": work.weight_decay * decays,
            **({"ratio": work.lr_ratio_b} if fast else {}),
        }
        for (decays, fast), part in kinds.items()
    ]


def set_rate(optimizer: Any, rate: float) -> None:
    """Sets the learning rate of every group that ``groups`` made."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("ratio", 1.0)


def _settle(work: Work) -> None:
    """Process-wide settings, before any tensor exists."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.use_deterministic_algorithms(work.deterministic)
    torch.set_num_threads(work.cpu_threads or max(1, ((os.cpu_count() or 1) - world) // world))


def _join(work: Work) -> Place:
    """This process's place; with several, torchrun's variables say it, and they are joined."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = work.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return Place(device, rank, world)


def _limit_memory(work: Work, devices: Sequence[torch.device]) -> None:
    """Holds the peer to the VRAM that the run may use."""
    for device in devices:
        if work.vram_limit_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, work.vram_limit_bytes / total), device)


def run(build: Build, work: Work, folder: Path, limited: bool) -> Result:
    """Does ``work``, which lies in ``folder``, in this process, with the others that torchrun started.

    ``limited``: whether VRAM is held to the run's limit. The result is whole in process 0.
    """
    used_before = _used_bytes()
    _settle(work)
    place = _join(work)
    if limited and place.device.type == "cuda":
        everywhere = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
        _limit_memory(work, everywhere if place.world == 1 else [place.device])
    adapter = build(work, place)
    steps = read_steps(folder)
    trained = {n: sum(int((rows.labels >= 0).sum()) for rows in step) for n, step in steps.items()}
    placed = {number: adapter.place(step) for number, step in steps.items()}

    def train(number: int) -> Tensor | float:
        return adapter.step(placed[number], trained[number])

    with adapter.scope():
        adapter.set_rate(work.learning_rate)
        losses = [_summed(train(number), place) / trained[number] for number in work.compared]
        _drain(adapter)
        adapter.set_rate(work.timed_learning_rate)
        for n in range(work.warm_up):
            train(work.window[n % len(work.window)])
        _drain(adapter)
        for device in _cuda(adapter):
            torch.cuda.reset_peak_memory_stats(device)
        windows, drained = [], []
        for _ in range(work.windows):
            seconds, total = _window(adapter, work.window, train, place)
            windows.append(seconds)
            drained.append(total)
    vram, reserved = _most([max((ask(d) for d in _cuda(adapter)), default=0) for ask in _MEMORY], place)
    resident = int(_summed(float(psutil.Process().memory_info().rss), place))
    ram = max(resident, _used_bytes() - used_before)
    result = Result(losses, windows, drained, vram, reserved, ram)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def write_result(result: Result, path: Path) -> None:
    """For the process that started this one."""
    path.write_text(json.dumps(asdict(result)), encoding="utf-8")


def read_result(path: Path) -> Result:
    """What ``write_result`` has written."""
    return Result(**json.loads(path.read_text(encoding="utf-8")))


_MEMORY = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)


def _window(
    adapter: Adapter, steps: Sequence[int], train: Callable[[int], object], place: Place
) -> tuple[list[float], float]:
    """(seconds of each step, seconds of them all), drained at both ends."""
    on_device = adapter.on_device and place.device.type == "cuda"

    def mark() -> Any:
        if not on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    if dist.is_initialized():
        dist.barrier()
    _drain(adapter)
    started = time.perf_counter()
    marks = [mark()]
    for number in steps:
        train(number)
        marks.append(mark())
    _drain(adapter)
    total = time.perf_counter() - started
    return [a.elapsed_time(b) / 1e3 if on_device else b - a for a, b in pairwise(marks)], total


def _drain(adapter: Adapter) -> None:
    adapter.finish()
    for device in _cuda(adapter):
        torch.cuda.synchronize(device)


def _cuda(adapter: Adapter) -> list[torch.device]:
    return [device for device in adapter.devices if device.type == "cuda"]


def _summed(loss: Tensor | float, place: Place) -> float:
    """Over all processes."""
    if place.world == 1:
        return float(loss)
    total = torch.tensor(float(loss), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _most(numbers: Sequence[int], place: Place) -> list[int]:
    """The largest of each over all processes."""
    largest = torch.tensor(numbers, dtype=torch.int64)
    if place.world > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def _used_bytes() -> int:
    """RAM in use on the machine: what a process has page-locked through CUDA is no part of its resident set."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available
