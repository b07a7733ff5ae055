"""Functions of tensors as graphs: traced once a shape, cut into what has to run, and compiled.

A traced function is a list of tensor operations without Python in between. Of the recompute and backward of a
block taken as one function, what no gradient needs falls away (its last product above all), and so does whatever
the forward pass has kept: one trace serves every choice of what to keep.

Tracing and compiling are done under one lock, by whichever thread meets a shape first.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from rpft.model.added_products import fuse_added_products
from rpft.model.gradient_sums import add_product_flops, fuse_gradient_sums
from rpft.model.layout import ALIGNMENT_BYTES, align

logger = logging.getLogger(__name__)

KernelKind = Literal["eager", "trace", "compile"]
"""eager: as torch runs the model's own code. trace: graphs, operation by operation. compile: graphs, compiled."""

TensorFunction = Callable[..., tuple[torch.Tensor, ...]]
"""Tensors to a tuple of tensors; may add to some of its arguments in place, and depends on nothing else."""

_VIEWS = (
    torch.ops.aten.t.default,
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
)

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
        self, name: str, key: Hashable, function: TensorFunction, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """``function(*tensors)``. ``name``, ``key`` and how the tensors are laid out decide which graph runs."""
        if not self.graphs:
            return function(*tensors)
        layouts = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)

        def make() -> TensorFunction:
            try:
                return self.compile(self.trace(function, tensors), tensors)
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
            with fake, self._attention(), quiet_fakes():
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

    def _attention(self) -> AbstractContextManager[Any]:
        """Which attention kernel a trace holds: on Hopper cuDNN's, which is faster there than flash attention."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if self._device.type != "cuda" or self._deterministic or torch.version.hip is not None:
            return nullcontext()
        if torch.cuda.get_device_capability(self._device)[0] != 9:
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


class JointGraph:
    """Forward and backward of a block in one graph, from which the parts that a run needs are cut.

    ``module`` takes ``num_data`` tensors (the hidden state and all that decides the output), the output's
    gradient, and the sums to which gradients are added in place; it returns the output and the hidden state's
    gradient, which is left out where nothing below is trained, and then ``num_choices`` choices of routers
    (model/routing.py). Those that the backward depends on are always kept.
    """

    def __init__(self, module: fx.GraphModule, num_data: int, num_choices: int = 0) -> None:
        self._module = module
        _drop_random_states(module.graph)
        nodes = list(module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._data, self._grad, self._sums = (
            placeholders[:num_data],
            placeholders[num_data],
            placeholders[num_data + 1 :],
        )
        returned = list(nodes[-1].args[0])  # type: ignore[arg-type]
        middle = len(returned) - num_choices
        self._output, self._grad_hidden, choices = returned[0], returned[1:middle], returned[middle:]
        self._effects = [node for node in nodes if _writes(node)]
        for node in self._effects:
            if node.args[0] not in self._sums:
                raise Untraceable(f"{node.target} writes into a tensor of the model")
        self._ends = [*self._grad_hidden, *self._effects]
        used = {s for node in _needed(self._ends, [*self._data, *choices]) for s in node.all_input_nodes}
        self._choices = [node for node in dict.fromkeys(choices) if node in used]
        self._backward_nodes = _reached_from([self._grad, *self._sums], nodes)
        self._orders: dict[float, list[list[fx.Node]]] = {}
        """What was chosen for a budget: that takes seconds for a block of many products."""

    def forward(self, kept: Sequence[fx.Node], given: Sequence[fx.Node] = ()) -> fx.GraphModule:
        """(data, given) -> (output, then each of ``kept``)."""
        return self._cut([*self._data, *given], [self._output, *kept])

    def backward(self, kept: Sequence[fx.Node]) -> fx.GraphModule:
        """(data, kept, gradient, sums) -> (gradient of the hidden state, if any): recomputes what is not kept."""
        inputs = [*self._data, *kept, self._grad, *self._sums]
        return self._cut(inputs, self._grad_hidden, self._effects)

    def keep(self, budget_bytes: float) -> list[fx.Node]:
        """The choices of routers, and what else is best kept in ``budget_bytes``: most operations a byte first.

        Candidates are the results of products and attention that the backward would recompute; what lies between
        them is cheap. Counted are the operations which then need not run, those further up included.
        """
        return [*self._choices, *(node for group in self.keep_in_order(budget_bytes) for node in group)]

    def keep_in_order(self, budget_bytes: float = float("inf")) -> list[list[fx.Node]]:
        """As ``keep`` without the choices: the results of one operation after the other, the best first."""
        if budget_bytes not in self._orders:
            self._orders[budget_bytes] = self._choose(budget_bytes)
        return self._orders[budget_bytes]

    def _choose(self, budget_bytes: float) -> list[list[fx.Node]]:
        kept: list[fx.Node] = []
        order: list[list[fx.Node]] = []
        left = budget_bytes
        while True:
            costly = self._recomputed(kept)
            now = sum(costly.values())
            best, best_rate = None, 0.0
            for operation in costly:
                results = self._results(operation, kept)
                size = sum(align(_num_bytes(node), ALIGNMENT_BYTES) for node in results)
                if not results or size > left:
                    continue
                saved = now - sum(self._recomputed([*kept, *results]).values())
                if saved > best_rate * size:
                    best, best_rate = results, saved / size
            if best is None:
                return order
            order.append(best)
            kept += best
            left -= sum(align(_num_bytes(node), ALIGNMENT_BYTES) for node in best)

    def backward_flops(self, kept: Sequence[fx.Node]) -> int:
        """Operations of products and attention in the backward, with what it recomputes."""
        return sum(_flops(node) for node in self._needed_with(kept))

    def _needed_with(self, kept: Sequence[fx.Node]) -> list[fx.Node]:
        """What the backward runs where ``kept`` and the choices are given."""
        return _needed(self._ends, [*self._data, *self._choices, *kept, self._grad, *self._sums])

    def _recomputed(self, kept: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Costly operations of the forward pass that the backward must run again, with their cost."""
        costs = {node: _flops(node) for node in self._needed_with(kept) if node not in self._backward_nodes}
        return {node: cost for node, cost in costs.items() if cost > 0}

    def _results(self, operation: fx.Node, kept: Sequence[fx.Node]) -> list[fx.Node]:
        """The tensors that ``operation`` makes and the backward uses."""
        needed = set(self._needed_with(kept))
        if isinstance(operation.meta["val"], torch.Tensor):
            return [operation]
        return [node for node in operation.users if node in needed and isinstance(node.meta["val"], torch.Tensor)]

    def _cut(
        self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], effects: Sequence[fx.Node] = ()
    ) -> fx.GraphModule:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            made[node] = graph.placeholder(node.name)
            made[node].meta = dict(node.meta)
        needed = set(_needed([*outputs, *effects], inputs))
        waiting = {effect: _sources(effect) & needed & self._backward_nodes for effect in effects}

        def make(end: fx.Node) -> None:
            for node in _in_order(end, made):
                made[node] = graph.node_copy(node, lambda n: made[n])

        # What is recomputed runs right before its first use, and what is added to a sum is added at once: tensors
        # take memory from the one to the other.
        for wanted in self._module.graph.nodes:
            if wanted in waiting or wanted in made:
                continue
            if wanted in outputs or (wanted in needed and wanted in self._backward_nodes):
                make(wanted)
                for effect in [each for each, sources in waiting.items() if all(s in made for s in sources)]:
                    make(effect)
                    del waiting[effect]
        for effect in waiting:
            make(effect)
        graph.output(tuple(made[node] for node in outputs))
        return fx.GraphModule(self._module, graph)


def _drop_random_states(graph: fx.Graph) -> None:
    """Gives the backward of an attention zeros in the place of its forward's random state, which it does not read.

    Dropout is drawn outside of the kernels. Left in, the state would tie the backward to a run of the forward, and
    some kernels keep it on another device than the rest.
    """
    for node in list(graph.nodes):
        if "attention" not in str(node.target) or _argument(node, "dropout_p", 0.0) != 0.0:
            continue
        for result in list(node.users):
            value = result.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.numel() > 2:
                continue
            with graph.inserting_before(node):
                zeros = graph.call_function(
                    torch.ops.aten.zeros.default,
                    (list(value.shape),),
                    {"dtype": value.dtype, "device": value.device},
                )
            zeros.meta["val"] = value
            result.replace_all_uses_with(zeros)
            graph.erase_node(result)


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    """What ``node`` gives for the argument ``name`` of its operation."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get(name, default)


def _writes_into_own_tensors(graph: fx.Graph) -> bool:
    """Whether an operation writes into a tensor that the graph has made itself, which ties its parts together."""
    return any(_writes(node) and node.args[0].op != "placeholder" for node in graph.nodes)  # type: ignore[union-attr]


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


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _reached_from(starts: Iterable[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    reached = set(starts)
    for node in nodes:  # in order, so that one pass sees all
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def _needed(ends: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes that must run for ``ends`` when ``inputs`` are given."""
    given, found = set(inputs), dict.fromkeys(ends)
    stack = list(found)
    while stack:
        node = stack.pop()
        if node in given:
            continue
        for source in node.all_input_nodes:
            if source not in found:
                found[source] = None
                stack.append(source)
    return [node for node in found if node not in given]


def _sources(node: fx.Node) -> set[fx.Node]:
    """The nodes that hold the data which ``node`` reads, whatever views lie between."""
    found, stack = set(), list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source.target in _VIEWS:
            stack += source.all_input_nodes
        else:
            found.add(source)
    return found


def _in_order(end: fx.Node, made: Container[fx.Node]) -> Iterator[fx.Node]:
    """``end`` and what it needs that is not among ``made``, which must get each node as it is given."""
    stack = [end]
    while stack:
        missing = [source for source in stack[-1].all_input_nodes if source not in made]
        if missing:
            stack += reversed(missing)
        else:
            node = stack.pop()
            if node not in made:
                yield node


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize


def _flops(node: fx.Node) -> int:
    """Floating point operations of a product or an attention; 0 for everything else."""
    packet = getattr(node.target, "overloadpacket", None)
    args: Any = map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda n: n.meta["val"])
    if "attention" in str(packet):  # torch's own count knows no shared key heads in some versions
        query, key = (_argument(node, name, None).meta["val"] for name in ("query", "key"))
        packed = query.dim() == 3  # [tokens, heads, size]; how long rows are is not known
        count = 4 * query.numel() * (_argument(node, "max_k", 0) if packed else key.shape[-2])
        return count // 2 if _argument(node, "is_causal", False) else count
    if packet is torch.ops.rpft.add_product:
        return add_product_flops(*(argument.meta["val"] for argument in node.args[1:]))  # type: ignore[union-attr]
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
