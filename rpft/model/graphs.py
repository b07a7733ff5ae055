"""Functions of tensors as graphs: traced once a shape, and compiled.

A traced function is a list of tensor operations without Python in between; joint_graph.py cuts that of a block.
Tracing and compiling are done under one lock, by whichever thread meets a shape first.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rpft.model.added_products import fuse_added_products
from rpft.model.gradient_sums import fuse_gradient_sums
from rpft.model.graph_nodes import writes

logger = logging.getLogger(__name__)

KernelKind = Literal["eager", "trace", "compile"]
"""eager: as torch runs the model's own code. trace: graphs, operation by operation. compile: graphs, compiled."""

TensorFunction = Callable[..., tuple[torch.Tensor, ...]]
"""Tensors to a tuple of tensors; may add to some of its arguments in place, and depends on nothing else."""

_ONE_AT_A_TIME = threading.Lock()
"""torch's tracing and compiling keep state that belongs to the process."""


class Untraceable(Exception):
    """A function whose operations depend on values and not on shapes alone, such as routing to experts."""


class Kernels:
    """Runs functions of tensors on one device: directly, or as graphs that are made when a key is first met."""

    def __init__(self, kind: KernelKind, device: torch.device, deterministic: bool = False) -> None:
        self.kind: KernelKind = kind
        self._device, self._deterministic = device, deterministic
        self._made: dict[Hashable, Any] = {}
        self._reported: set[str] = set()

    @property
    def graphs(self) -> bool:
        """Whether functions run as graphs."""
        return self.kind != "eager"

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gives for ``key``, made by one thread at a time and kept."""
        if key not in self._made:
            with _ONE_AT_A_TIME:
                if key not in self._made:
                    self._made[key] = make()
        return self._made[key]

    def call(
        self,
        name: str,
        key: Hashable,
        function: TensorFunction,
        tensors: Sequence[torch.Tensor],
        num_free: int,
        *,
        compiled: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """``function(*tensors)``. ``name``, ``key`` and the layout of the first ``num_free`` tensors decide which
        graph runs: weights of one name have one layout. Not ``compiled``: few operations, with nothing to fuse.
        """
        if not self.graphs:
            return function(*tensors)
        layouts = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors[:num_free])

        def make() -> TensorFunction:
            try:
                module = self.trace(function, tensors)
                return self.compile(module, tensors) if compiled else module
            except Untraceable as reason:
                self.report(name, reason)
                return function

        return self.once((name, key, layouts), make)(*tensors)

    def report(self, what: str, reason: Exception) -> None:
        """Says once that ``what`` runs as torch runs it."""
        if what not in self._reported:
            self._reported.add(what)
            logger.warning("%s cannot be traced and runs uncompiled: %s", what, str(reason).splitlines()[0])

    def trace(self, function: TensorFunction, tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
        """The operations of ``function`` for tensors of these shapes; raises Untraceable."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            inputs = [fake.from_tensor(tensor) for tensor in tensors]
        return self.trace_fakes(function, inputs, fake)

    def trace_fakes(
        self, function: TensorFunction, inputs: Sequence[torch.Tensor], fake: FakeTensorMode
    ) -> fx.GraphModule:
        """As ``trace``, of tensors without data that belong to ``fake``."""
        try:
            with fake, attention_kernels(self._device, self._deterministic), quiet_fakes():
                module = make_fx(function, tracing_mode="real")(*inputs)
                if _writes_into_own_tensors(module.graph):
                    module = make_fx(torch.func.functionalize(module), tracing_mode="real")(*inputs)
                    _add_in_place_again(module.graph)
        except Exception as error:  # torch and the model raise many kinds for "depends on a value"
            raise Untraceable(f"{type(error).__name__}: {error}") from error
        module.graph.eliminate_dead_code()
        module.recompile()
        if self.kind == "compile":
            fuse_gradient_sums(module)
        return module

    def compile(self, module: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> TensorFunction:
        """``module`` ready to be called with tensors like ``tensors``, from any thread."""
        if self.kind == "trace":
            _view_whatever_strides(module)
            return module
        from torch._inductor import standalone_compile

        fuse_added_products(module)
        if not any(node.op == "call_function" for node in module.graph.nodes):
            return module  # nothing to compile
        shapes: Any = {"dynamic_shapes": "from_example_inputs"}
        try:
            return standalone_compile(deepcopy(module), list(tensors), **shapes)
        except RuntimeError as error:  # Inductor tries its kernels on tensors of its own, all at once
            if "out of memory" not in str(error):
                raise
        gc.collect()
        torch.cuda.empty_cache()
        logger.info("kernels are tried when they first run: there is no memory to do it before")
        later = {"config_patches": {"triton.autotune_at_compile_time": False}}
        return standalone_compile(module, list(tensors), **shapes, options=later)


def attention_kernels(device: torch.device, deterministic: bool) -> AbstractContextManager[Any]:
    """Which attention kernels sdpa takes, the first that it can: on Hopper cuDNN's, faster there than flash."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type != "cuda" or deterministic or torch.version.hip is not None:
        return nullcontext()
    if torch.cuda.get_device_capability(device)[0] != 9:
        return nullcontext()
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """torch logs a traceback for what is caught here and said in one line."""
    noisy = logging.getLogger("torch._subclasses.fake_tensor")
    level = noisy.level
    noisy.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        noisy.setLevel(level)


def _writes_into_own_tensors(graph: fx.Graph) -> bool:
    """Whether an operation writes into a tensor that the graph has made itself, which ties its parts together."""
    return any(writes(node) and node.args[0].op != "placeholder" for node in graph.nodes)  # type: ignore[union-attr]


def _add_in_place_again(graph: fx.Graph) -> None:
    """Makes ``total.add_(value)`` again of what functionalising leaves of it: ``total.copy_(total + value)``."""
    for copy in list(graph.nodes):
        if copy.target is not torch.ops.aten.copy_.default:
            continue
        total, added = copy.args
        if added.target is not torch.ops.aten.add.Tensor or added.args[0] is not total or len(added.users) > 1:
            continue
        with graph.inserting_before(copy):
            again = graph.call_function(torch.ops.aten.add_.Tensor, added.args, added.kwargs)
        again.meta["val"] = total.meta["val"]
        copy.replace_all_uses_with(again)
        graph.erase_node(copy)


def _view_whatever_strides(module: fx.GraphModule) -> None:
    """Lets a view copy where it must: some kernels lay out their results otherwise than a trace expects."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    module.recompile()
