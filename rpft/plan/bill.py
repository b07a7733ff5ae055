"""The memory bill of a plan: host RAM, device memory, the result; and what the machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rpft import host
from rpft.model.frozen_file import frozen_file_bytes
from rpft.model.graphs import KernelKind
from rpft.model.head import HEAD_CHUNK_TOKENS
from rpft.model.host_store import store_bytes
from rpft.model.layout import LayerLayout
from rpft.model.moments import StateFormat
from rpft.model.moments_file import moments_file_bytes, moments_pieces, window_bytes
from rpft.plan.plan import Plan, Stage
from rpft.plan.profile import LayerProfile, memory_measured
from rpft.plan.sizes import RESULTS_IN_FLIGHT, boundary_buffers, keeping_layers, worker_sizes

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

HEAD_CHUNK_BYTES_PER_LOGIT: dict[KernelKind, float] = {"eager": 14, "trace": 14, "compile": 4.2}
"""Logits in the working dtype, in float32, their softmax and its gradient; compiled, logits and gradient alone."""


@dataclass(frozen=True)
class Bill:
    """Bytes that a run takes. ``device`` is of one worker; without measurements its activations are estimates."""

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
class ModelShape:
    """What of a model's config decides the size of activations."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    itemsize: int


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
    """What each layer was measured to take; None where nothing was."""
    whole_masters: bool = False
    """As of the host store."""
    workers_in_ram: int = 0
    """Workers that have no memory of their own: those of the CPU pool."""
    readers: int = 0
    """Workers that read frozen weights ahead from the disk; 0 where those lie in RAM."""
    state_format: StateFormat = "fp32"
    """Of the moments."""
    moments_on_disk: bool = False


def make_bill(plan: Plan, layouts: list[LayerLayout], work: Workload) -> Bill:
    """What ``plan`` takes for ``work``."""
    shape, max_tokens = work.shape, work.max_tokens
    boundary = max_tokens * shape.hidden_size * shape.itemsize
    sizes = worker_sizes(layouts, plan, boundary, work.gradient_dtype, max_tokens)
    keeping = keeping_layers(layouts, plan, _first_trained(layouts))
    host = {
        "weights, gradients, optimizer state": store_bytes(
            layouts,
            work.gradient_dtype,
            two_copies=work.delayed,
            whole_masters=work.whole_masters,
            state_format=work.state_format,
            frozen_on_disk=work.readers > 0,
            moments_on_disk=work.moments_on_disk,
        ),
        "hidden states between stages": boundary_buffers(plan, _first_trained(layouts)) * boundary,
        "kept for the backward": len(keeping) * plan.num_microbatches * sizes.kept_bytes,
        "process": _PROCESS_BYTES + (_COMPILER_BYTES if work.kernels == "compile" else 0),
    }
    if work.readers:
        host[READ_AHEAD] = 2 * work.readers * sizes.weight_bytes
    pieces = moments_pieces(layouts, work.state_format) if work.moments_on_disk else []
    if pieces:
        host[MOMENTS_WINDOW] = window_bytes(pieces)
    device = {
        "weight, gradient and hidden-state buffers": sizes.total_bytes - sizes.resident_bytes,
        "frozen weights that stay": sizes.resident_bytes,
    }
    if work.profiles is None or not memory_measured(work.profiles):
        device |= _estimated_activations(plan, layouts, work)
    else:
        measured = _measured_activations(plan, work.profiles)
        device |= {"activations": measured, "gaps between them": int(_GAPS * measured)}
    device["results on their way down"] = RESULTS_IN_FLIGHT * (boundary + plan.keep_bytes_per_token * max_tokens)
    if any(layout.choices for layout in layouts):
        given, sent = (
            max(
                (sum(layouts[i].choice_bytes(max_tokens) for i in keeping if i in s.layers) for s in some),
                default=0,
            )
            for some in (_segments(plan), plan.forward)
        )
        device["choices of routers"] = given + RESULTS_IN_FLIGHT * sent
    if work.workers_in_ram:
        host["memory of the workers"] = work.workers_in_ram * sum(device.values())
    trained = sum(layout.num_trained for layout in layouts)
    frozen = any(layout.num_trained == 0 or layout.host_bytes > layout.num_trained * 4 for layout in layouts)
    result = trained * shape.itemsize if frozen else sum(layout.host_bytes for layout in layouts)
    result += RESULT_EXTRAS_BYTES
    frozen_file = frozen_file_bytes(layouts) if work.readers else 0
    totals = sum(host.values()), sum(device.values()), result
    return Bill(*totals, host, device, frozen_file, moments_file_bytes(pieces))


def _first_trained(layouts: list[LayerLayout]) -> int:
    return next(layout.layer for layout in layouts if layout.grad_elements)


def _segments(plan: Plan) -> list[Stage]:
    return [plan.fused, *(s for stage in plan.backward[1:] for s in plan.segments(stage))]


def _estimated_activations(plan: Plan, layouts: list[LayerLayout], work: Workload) -> dict[str, int]:
    shape, max_tokens = work.shape, work.max_tokens
    longest = max(len(segment.layers) for segment in _segments(plan))
    block = estimated_block_bytes(shape, max_tokens)
    logits = min(max_tokens, HEAD_CHUNK_TOKENS[work.kernels]) * shape.vocab_size
    weight = max(layout.dequantized_bytes for layout in layouts)
    return {
        "activations of a recomputed segment (estimate)": longest * block,
        "gradients of a layer before they are summed": max(layout.grad_elements for layout in layouts)
        * shape.itemsize,
        "logits of a chunk": int(logits * HEAD_CHUNK_BYTES_PER_LOGIT[work.kernels]),
    } | ({"a weight, dequantised": weight} if weight else {})


def estimated_block_bytes(shape: ModelShape, tokens: int) -> int:
    """What autograd keeps of a block: about ten hidden states and four of the widened ones."""
    return tokens * shape.itemsize * (10 * shape.hidden_size + 4 * shape.intermediate_size)


def _measured_activations(plan: Plan, profiles: Sequence[LayerProfile]) -> int:
    """The most that a slot holds: in a segment all layers but the last are kept, and that one is recomputed."""
    most = max((profiles[i].forward_bytes for stage in plan.forward for i in stage.layers), default=0)
    for segment in _segments(plan):
        kept = [profiles[layer] for layer in segment.layers[:-1]]
        last = profiles[segment.last]
        peaks = [last.backward_bytes, *(profile.kept_backward_bytes for profile in kept)]
        most = max(most, sum(profile.kept_bytes for profile in kept) + max(peaks))
    return most


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
