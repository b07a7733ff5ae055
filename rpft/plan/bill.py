"""The memory bill of a plan: host RAM, device memory, the result; and what the machine has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rpft import host
from rpft.model.frozen_file import frozen_file_bytes
from rpft.model.graphs import KernelKind
from rpft.model.host_store import store_bytes
from rpft.model.layout import LayerLayout, first_trained
from rpft.model.moments import StateFormat
from rpft.model.moments_file import moments_file_bytes, moments_pieces, window_bytes
from rpft.plan.estimate import ModelShape, estimated_bytes
from rpft.plan.plan import Plan, Stage, smallest_stages
from rpft.plan.profile import LayerProfile, memory_measured
from rpft.plan.sizes import (
    RESULTS_IN_FLIGHT,
    Sums,
    WorkerSizes,
    WorkerSizing,
    boundary_bytes_on_host,
    keeping_layers,
)

_PROCESS_BYTES = 3 << 29
"""Interpreter, torch, transformers and tokenised data: 1.5 GiB."""

_COMPILER_BYTES = 1 << 30
"""What Inductor holds in this process once layers are compiled."""

_GAPS = 0.1
"""Between tensors that come and go, of what they take: measured as what torch reserves beyond its peak."""

READ_AHEAD = "read ahead from the disk"
"""The part of ``Bill.host_parts`` into which frozen weights are read."""

MOMENTS_WINDOW = "moments on their way"
"""The part of ``Bill.host_parts`` in which moments are updated that lie on the disk."""

RESULT_EXTRAS_BYTES = 32 << 20
"""Tokenizer, configuration and the heads of the files: up to 32 MiB."""


@dataclass(frozen=True)
class Bill:
    """Bytes that a run takes. ``device`` is of one worker."""

    host: int
    device: int
    result: int
    """Of what is saved at the end; checkpoints come on top (train/room.py)."""
    host_parts: dict[str, int]
    device_parts: dict[str, int]
    frozen_file: int
    """Of frozen weights on the disk while the run lasts."""
    moments_file: int
    """Of moments there."""


@dataclass(frozen=True)
class Workload:
    """What of a recipe decides the memory of a run, beside the model and the plan."""

    shape: ModelShape
    max_tokens: int
    """Rows x sequence of the largest microbatch."""
    accumulation: int
    """Microbatches of a step."""
    delayed: bool
    """Whether updates are applied one step late."""
    kernels: KernelKind = "eager"
    gradient_dtype: torch.dtype = torch.float32
    """Of the host gradients."""
    profiles: Sequence[LayerProfile] | None = None
    """What each layer was measured to take, or should by a datasheet; None where nothing is known."""
    counted: Callable[[], Sequence[LayerProfile]] | None = None
    """Gives the bytes of each layer where none are measured (plan/count.py); None: by shapes of weights."""
    whole_masters: bool = False
    """As of the host store."""
    workers_in_ram: int = 0
    """Workers that have no memory of their own: those of the CPU pool."""
    readers: int = 0
    """Workers that read frozen weights ahead from the disk; 0 where those lie in RAM."""
    state_format: StateFormat = "fp32"
    """Of the moments."""
    moments_on_disk: bool = False


class Billing:
    """Makes the bills of any plans for one model and workload; what no plan changes is worked out once."""

    def __init__(self, layouts: Sequence[LayerLayout], work: Workload) -> None:
        self._layouts, self._work = layouts, work
        shape, max_tokens = work.shape, work.max_tokens
        self._boundary = max_tokens * shape.hidden_size * shape.itemsize
        self._sizing = WorkerSizing(layouts, self._boundary, work.gradient_dtype, max_tokens)
        self._first_trained = first_trained(layouts)
        self._store_bytes = store_bytes(
            layouts,
            work.gradient_dtype,
            two_copies=work.delayed,
            whole_masters=work.whole_masters,
            state_format=work.state_format,
            frozen_on_disk=work.readers > 0,
            moments_on_disk=work.moments_on_disk,
        )
        self._pieces = moments_pieces(layouts, work.state_format) if work.moments_on_disk else []
        trained = sum(layout.num_trained for layout in layouts)
        frozen = any(layout.num_trained == 0 or layout.host_bytes > layout.num_trained * 4 for layout in layouts)
        result = trained * shape.itemsize if frozen else sum(layout.host_bytes for layout in layouts)
        self._result = result + RESULT_EXTRAS_BYTES
        self._frozen_file = frozen_file_bytes(layouts) if work.readers else 0
        self._activations = _Activations(_bytes_of_layers(layouts, work))
        kept_from = max(self._first_trained, 1)
        chosen = (layout.choice_bytes(max_tokens) if layout.layer >= kept_from else 0 for layout in layouts)
        self._choices = Sums(chosen) if any(layout.choices for layout in layouts) else None

    def of(self, plan: Plan) -> Bill:
        """What ``plan`` takes."""
        sizes = self._sizing.of(plan)
        device = self._device(plan, sizes)
        host = self._host(plan, sizes, device, self._between_stages(plan))
        totals = sum(host.values()), sum(device.values()), self._result
        return Bill(*totals, host, device, self._frozen_file, moments_file_bytes(self._pieces))

    def fits(self, plan: Plan, vram_bytes: int | None, ram_bytes: int | None) -> bool:
        """Whether ``plan`` takes no more of a device and of RAM than that; None: no limit."""
        sizes = self._sizing.of(plan)
        device = self._device(plan, sizes)
        if vram_bytes is not None and sum(device.values()) > vram_bytes:
            return False
        if ram_bytes is None:
            return True
        # An input of each layer and two gradients: no plan keeps more of a microbatch, and to count takes long.
        most = plan.num_microbatches * (plan.num_layers + 2) * sizes.boundary_bytes
        if sum(self._host(plan, sizes, device, most).values()) <= ram_bytes:
            return True
        return sum(self._host(plan, sizes, device, self._between_stages(plan)).values()) <= ram_bytes

    def _device(self, plan: Plan, sizes: WorkerSizes) -> dict[str, int]:
        results = sizes.boundary_bytes + plan.keep_bytes_per_token * self._work.max_tokens
        device = {
            "weight, gradient and hidden-state buffers": sizes.total_bytes - sizes.resident_bytes,
            "frozen weights that stay": sizes.resident_bytes,
            **self._activations.of(plan),
            "results on their way down": RESULTS_IN_FLIGHT * results,
        }
        if self._choices is not None:
            given = self._choices.largest(_segments(plan)[1:])  # the fused stage is given none
            device["choices of routers"] = given + RESULTS_IN_FLIGHT * self._choices.largest(plan.forward)
        return device

    def _between_stages(self, plan: Plan) -> int:
        return boundary_bytes_on_host(
            plan, self._layouts, self._first_trained, self._boundary, self._work.max_tokens
        )

    def _host(
        self, plan: Plan, sizes: WorkerSizes, device: Mapping[str, int], between_stages: int
    ) -> dict[str, int]:
        work, keeping = self._work, keeping_layers(self._layouts, plan, self._first_trained)
        host = {
            "weights, gradients, optimizer state": self._store_bytes,
            "hidden states between stages": between_stages,
            "kept for the backward": len(keeping) * plan.num_microbatches * sizes.kept_bytes,
            "process": _PROCESS_BYTES + (_COMPILER_BYTES if work.kernels == "compile" else 0),
        }
        if work.readers:
            host[READ_AHEAD] = 2 * work.readers * sizes.weight_bytes
        if self._pieces:
            host[MOMENTS_WINDOW] = window_bytes(self._pieces)
        if work.workers_in_ram:
            host["memory of the workers"] = work.workers_in_ram * sum(device.values())
        return host


def least_device_bytes(layouts: Sequence[LayerLayout], work: Workload) -> int:
    """What every plan takes of a worker: buffers for stages of one layer, and the largest of the weights that are
    made there."""
    boundary = work.max_tokens * work.shape.hidden_size * work.shape.itemsize
    sizing = WorkerSizing(layouts, boundary, work.gradient_dtype, work.max_tokens)
    smallest = sizing.of(smallest_stages(len(layouts), 1, "layer"))
    return smallest.total_bytes + max(layout.dequantized_bytes + layout.adapted_bytes for layout in layouts)


def make_bill(plan: Plan, layouts: Sequence[LayerLayout], work: Workload) -> Bill:
    """What one plan takes for ``work``; for many there is ``Billing``."""
    return Billing(layouts, work).of(plan)


def _segments(plan: Plan) -> list[Stage]:
    """What is recomputed at a time, the fused stage first."""
    return [plan.fused, *(s for stage in plan.backward[1:] for s in plan.segments(stage))]


def _bytes_of_layers(layouts: Sequence[LayerLayout], work: Workload) -> Sequence[LayerProfile]:
    if work.profiles is not None and memory_measured(work.profiles):
        return work.profiles
    return work.counted() if work.counted is not None else estimated_bytes(layouts, work.shape, work.max_tokens)


class _Activations:
    """Activations from what each layer takes."""

    def __init__(self, profiles: Sequence[LayerProfile]) -> None:
        self._kept = Sums(profile.kept_bytes for profile in profiles)
        self._kept_backward = [profile.kept_backward_bytes for profile in profiles]
        self._backward = [profile.backward_bytes for profile in profiles]
        self._forward = [profile.forward_bytes for profile in profiles]

    def of(self, plan: Plan) -> dict[str, int]:
        """The most that a slot holds: all layers of a segment but the last are kept, that one is recomputed."""
        below = plan.fused.first
        most = max(self._forward[:below], default=0)
        if plan.recompute == "layer":  # each layer below the fused stage is a segment
            most = max(most, *self._backward[:below], self._peak(plan.fused))
        else:
            most = max(most, *map(self._peak, plan.backward))
        return {"activations": most, "gaps between them": int(_GAPS * most)}

    def _peak(self, segment: Stage) -> int:
        first, last = segment
        kept = self._kept.of(Stage(first, last - 1))
        return kept + max(self._backward[last], max(self._kept_backward[first:last], default=0))


def available_host_bytes() -> int:
    """RAM that this process may still take: what the system has free, within the limits of its control groups."""
    import psutil

    available, left = psutil.virtual_memory().available, host.memory_left_by_groups()
    return available if left is None else min(available, left)


def gib(num_bytes: int) -> str:
    """For people: bytes as GiB, or MiB below one, or KiB."""
    if num_bytes < 1 << 20:
        return f"{num_bytes / 2**10:.0f} KiB"
    if num_bytes < 1 << 30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"
