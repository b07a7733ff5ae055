"""What each layer takes of a device's memory, counted: it is run on tensors without data, which cost no memory.

Everything a worker does with a layer is done here with the same code: forward, recompute and backward, and the
parts of a segment. Operation by operation the bytes of all tensors that are alive are added up, as an allocator
would see them, with what kernels take for themselves. Compiled graphs are counted by the tensors of the traced
ones (model/graph_memory.py), and with what another order of their operations may take.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rpft.model.added_products import fuse_added_products
from rpft.model.functions import LayerFunctions
from rpft.model.graph_memory import peak_bytes
from rpft.model.graphs import KernelKind, Kernels, TensorFunction, quiet_fakes
from rpft.model.layout import LayerLayout, align
from rpft.model.packed_attention import NAME as PACKED
from rpft.model.packed_attention import Unfit, register
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import Workload
from rpft.plan.estimate import ModelShape, estimated_layer
from rpft.plan.profile import LayerMeter, LayerProfile, layers_by_kind

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ALLOCATED_IN = 512
"""Bytes to whose multiples CUDA's allocator rounds."""

_FLASH_ROWS, _FLASH_WIDTH, _WIDEST_FLASH = 128, 32, 256
"""Flash attention's float32 sums for the gradient of queries: rounded up to so many rows and columns of a head."""

_COMPILED_HEAD = 1.1
"""Of the sizes of the fused graph: 4.2 bytes a logit were measured, and 4.0 are counted."""

_COMPILED_KEPT_BACKWARD = 1.25
"""Of the sizes of a block's graph: up to 1.20 of them were measured (docs/memory.md), since the compiler orders
operations in its own way."""

_CONTEXTS = 4
"""Of masks and tables that blocks are given: those of so many microbatches are held (model/trunk.py)."""

_lock = threading.Lock()
_counted: dict[str, tuple[LayerProfile, ...]] = {}


@dataclass(frozen=True)
class Microbatch:
    """The largest that comes, and how layers run it."""

    rows: int
    sequence: int
    shape: ModelShape
    dtype: torch.dtype
    kernels: KernelKind = "eager"
    on_gpu: bool = True
    row_tokens: int | None = None
    """Of packed rows; None: one a line."""
    varlen: bool = False
    """Whether packed rows attend by variable lengths where blocks can."""
    dropout: bool = False


def count_layers(skeleton: Skeleton, layouts: Sequence[LayerLayout], batch: Microbatch) -> list[LayerProfile]:
    """The bytes of every layer's profile, its seconds 0; counted once a process for what is alike."""
    key = _digest(skeleton, layouts, batch)
    with _lock:
        if key not in _counted:
            try:
                _counted[key] = tuple(_count(skeleton, list(layouts), batch))
            except Unfit:  # as a run finds out, which then attends with masks
                _counted[key] = tuple(_count(skeleton, list(layouts), replace(batch, varlen=False)))
        return list(_counted[key])


def counting(
    skeleton: Skeleton, layouts: Sequence[LayerLayout], work: Workload, sequence: int, dtype: torch.dtype
) -> Workload:
    """``work`` with the bytes of layers on a GPU counted when they are asked for, in lines of ``sequence``."""
    batch = Microbatch(work.max_tokens // sequence, sequence, work.shape, dtype, work.kernels)
    return replace(work, counted=partial(count_layers, skeleton, layouts, batch))


def _count(skeleton: Skeleton, layouts: list[LayerLayout], batch: Microbatch) -> list[LayerProfile]:
    held, gpu = HeldBytes(batch.on_gpu), ExitStack()
    if batch.on_gpu:
        gpu.enter_context(_GpuAttention())
    functions = LayerFunctions(
        skeleton,
        torch.device("cpu"),
        batch.dtype,
        batch.kernels,
        make_kernels=partial(_CountedKernels, held),
    )
    functions.expect(batch.rows * batch.sequence, untried=True)
    if batch.varlen:
        register()
        functions.attend_by(PACKED)
    meter = LayerMeter(
        functions,
        layouts,
        batch.rows,
        batch.sequence,
        batch.shape.vocab_size,
        dropout=batch.dropout,
        row_tokens=batch.row_tokens,
        gauge=held,
    )
    found: dict[int, LayerProfile] = {}
    with gpu, quiet_fakes(), _rows_as_told(batch), FakeTensorMode(allow_non_fake_inputs=True), held:
        contexts = _CONTEXTS * held.run(meter.context)[2]
        for layers in layers_by_kind(functions, len(layouts)):
            found |= dict.fromkeys(layers, _of_layer(meter, layers[0], skeleton, batch))
    return [_beside(contexts, found[layer]) for layer in range(len(layouts))]


def _beside(num_bytes: int, profile: LayerProfile) -> LayerProfile:
    """``profile`` with so many bytes that are held all the time."""
    forward, backward = profile.forward_bytes + num_bytes, profile.backward_bytes + num_bytes
    return replace(profile, forward_bytes=forward, backward_bytes=backward)


def _of_layer(meter: LayerMeter, layer: int, skeleton: Skeleton, batch: Microbatch) -> LayerProfile:
    try:
        profile = meter.measure(layer)
        return profile if batch.kernels != "compile" else _as_compiled(profile, meter, layer, batch)
    except Unfit:
        raise
    except Exception as error:  # torch and the model raise many kinds for "depends on a value"
        logger.debug("layer %d cannot be counted, and is estimated: %s", layer, error)
    layout, is_head = meter.layouts[layer], layer == len(meter.layouts) - 1
    config, scores = skeleton.model.config.get_text_config(), 0
    if skeleton.model.config._attn_implementation == "eager":
        pairs = batch.rows * config.num_attention_heads * batch.sequence**2
        scores = pairs * (3 * batch.dtype.itemsize + 8)
    return estimated_layer(layout, is_head, batch.shape, batch.rows * batch.sequence, scores)


def _as_compiled(profile: LayerProfile, meter: LayerMeter, layer: int, batch: Microbatch) -> LayerProfile:
    """``profile`` of traced graphs, with what the compiler may add, which orders operations in its own way.

    Whatever its order, a recompute makes no more than a forward leaves that leaves everything, and the backward
    takes the rest.
    """
    if layer == len(meter.layouts) - 1:
        return replace(profile, backward_bytes=int(_COMPILED_HEAD * profile.backward_bytes))
    if layer == 0:
        return profile
    output = batch.rows * batch.sequence * meter.functions.input_width(layer + 1) * batch.dtype.itemsize
    most = profile.kept_bytes - output + profile.kept_backward_bytes
    return replace(
        profile,
        backward_bytes=max(profile.backward_bytes, most),
        kept_backward_bytes=int(_COMPILED_KEPT_BACKWARD * profile.kept_backward_bytes),
    )


class HeldBytes(TorchDispatchMode):
    """A ``Gauge`` of the bytes of tensors: inside, counts those that are made and still alive."""

    def __init__(self, on_gpu: bool) -> None:
        """``on_gpu``: whether the tensors stand for some on a GPU, whose kernels take other memory."""
        super().__init__()
        self._on_gpu, self._now, self._most = on_gpu, 0, 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _grouped(*args) if func is torch.ops.aten._grouped_mm.default else func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in made]
        if any(id(storage) not in self._known for storage in storages):
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            old = {id(tensor.untyped_storage()) for tensor in given}
            for storage in storages:
                if id(storage) not in self._known and id(storage) not in old:
                    self._note(storage)
        self.take(_workspace_bytes(func, args, made, self._on_gpu))
        return result

    def take(self, num_bytes: int) -> None:
        """Counts what is taken for a moment beside all that is held."""
        self._most = max(self._most, self._now + num_bytes)

    def _note(self, storage: torch.UntypedStorage) -> None:
        size, key = align(storage.nbytes(), _ALLOCATED_IN), id(storage)

        def gone(_: object) -> None:
            self._now -= size
            del self._known[key]

        self._now += size
        self._known[key] = weakref.ref(storage, gone)

    def seconds(self, work: Callable[[], object]) -> float:
        """None: nothing is computed."""
        return 0.0

    def warm(self, work: Callable[[], object]) -> None:
        """Nothing: what making graphs takes is not counted."""

    def run(self, work: Callable[[], T]) -> tuple[T, int, int]:
        """See ``Gauge``."""
        before = self._most = self._now
        result = work()
        return result, self._most - before, self._now - before


def _grouped(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, *rest: Any) -> torch.Tensor:
    """In the place of products of groups of tokens, whose stand-in without data knows bfloat16 only."""
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])


def _workspace_bytes(func: Any, args: Sequence[Any], made: Sequence[torch.Tensor], on_gpu: bool) -> int:
    """What an operation takes beside its results while it runs."""
    name = func.overloadpacket.__name__
    if not on_gpu and name == "dequantize_blocks":  # looked up, and scaled, in float32
        return 2 * 4 * made[0].numel() + args[1].numel() * 4
    if not on_gpu:
        return _converted_bytes(func, args, made)
    if "attention_backward" in name:
        return _attention_workspace_bytes(name, *args[1:3])
    if name == "embedding_dense_backward":  # sorts its indices
        return 5 * 8 * args[1].numel()
    return 0


def _converted_bytes(func: Any, args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Of operands that a pointwise operation on the CPU brings to one precision."""
    if torch.Tag.pointwise not in func.tags or func.overloadpacket.__name__ in ("copy_", "_to_copy"):
        return 0
    given = [each for each in args if isinstance(each, torch.Tensor) and each.dim()]
    dtypes = {each.dtype for each in given}
    if len(dtypes) < 2 or not made:
        return 0
    common = max(dtypes, key=lambda dtype: (dtype.is_floating_point, dtype.itemsize))
    return sum(each.numel() * common.itemsize for each in given if each.dtype != common)


def _attention_workspace_bytes(name: str, query: torch.Tensor, key: torch.Tensor) -> int:
    """Of a fused attention's backward: float32 sums for the gradient of queries, a number a row, and the gradients
    of keys and values for every head of queries.
    """
    packed = query.dim() == 3  # [tokens, heads, size], else [rows, heads, tokens, size]
    rows, heads, tokens, width = (1, query.shape[1], query.shape[0], query.shape[2]) if packed else query.shape
    lines = rows * heads * align(tokens, _FLASH_ROWS)
    taken = lines * 4 * (align(width, _FLASH_WIDTH) + 2)
    if key.shape[1] != heads:
        taken += 2 * key.numel() // key.shape[1] * heads * key.dtype.itemsize
    if "efficient" in name and width > 128:
        taken *= 3
    return taken


class _GpuAttention(TorchFunctionMode):
    """Attends by the kernels that torch would take on a GPU: flash, or where there is a mask the efficient one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    aten, width = torch.ops.aten, query.shape[-1]
    alike = width == value.shape[-1] <= _WIDEST_FLASH
    if attn_mask is None and alike and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    if key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    bias = None
    if attn_mask is not None:
        mask = attn_mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        bias = mask.expand(*query.shape[:-1], key.shape[-2])
    scaled = {"scale": scale}
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, is_causal, **scaled)[0]


class _CountedKernels(Kernels):
    """Graphs of which nothing is run but counted; what making them takes is not."""

    def __init__(self, held: HeldBytes, kind: KernelKind, device: torch.device, deterministic: bool) -> None:
        super().__init__(kind, device, deterministic)
        self._held, self._of_block = held, True

    def call(self, name: str, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        """See ``Kernels``."""
        self._of_block = name.startswith("block")
        try:
            return super().call(name, *given, **named)
        finally:
            self._of_block = True

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """See ``Kernels``."""

        def uncounted() -> Any:
            with _disable_current_modes():
                return make()

        return super().once(key, uncounted)

    def compile(self, module: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> TensorFunction:
        """See ``Kernels``."""
        if self.kind == "trace":
            return super().compile(module, tensors)
        fuse_added_products(module)
        held, taken = self._held, peak_bytes(module, fused=not self._of_block)
        (returned,) = next(iter(reversed(module.graph.nodes))).args
        examples = [node.meta["val"] for node in returned]  # type: ignore[union-attr]

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            held.take(taken)
            return tuple(torch.empty_strided(e.shape, e.stride(), dtype=e.dtype) for e in examples)

        return run

    def report(self, what: str, reason: Exception) -> None:
        """Nobody waits for it here: the run says it."""


@contextmanager
def _rows_as_told(batch: Microbatch) -> Iterator[None]:
    """Tells transformers whether rows are packed: where it cannot look at positions it makes masks as if."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    if batch.row_tokens is not None or not hasattr(masking_utils, name):
        yield
        return
    with mock.patch.object(masking_utils, name, return_value=None):
        yield


def _digest(skeleton: Skeleton, layouts: Sequence[LayerLayout], batch: Microbatch) -> str:
    """Of all that decides the bytes: config, adapters, what is trained and quantised, and the microbatch."""
    config = {key: value for key, value in skeleton.model.config.to_dict().items() if not key.startswith("_")}
    config["attention"] = skeleton.model.config._attn_implementation
    tensors = [
        [(b.name, list(b.shape), str(b.dtype), b.grad_offset is not None) for b in layout.bindings]
        for layout in layouts
    ]
    told = [config, tensors, skeleton.router_loss, skeleton.num_groups, repr(batch)]
    return hashlib.blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
