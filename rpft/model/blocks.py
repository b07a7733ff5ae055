"""How a worker runs the blocks of one kind, forward and backward: as torch runs them, or as graphs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree

from rpft.model.adapters import adapts_parameters
from rpft.model.block_backward import EagerKept, GraphKept, Kept, Weights
from rpft.model.dropout import counted_dropout, draw_keys, drawn_dropout, placed_dropout
from rpft.model.graphs import Kernels, TensorFunction, Untraceable
from rpft.model.joint_graph import JointGraph
from rpft.model.kept import FromForward, KeptLayout
from rpft.model.quant import PackedWeight
from rpft.model.quant_weight import open_weights
from rpft.model.router_loss import LOSS, WEIGHT, Router, ScoreWatch, ends_of_backward, load_balancing_loss
from rpft.model.routing import Choices, recorded_choices, replayed_choices

_ONE_THREAD = threading.Lock()
"""Held by a forward pass that uses torch's cache of parametrizations, which is one for the whole process."""


@dataclass(frozen=True, eq=False)
class BlockCall:
    """Everything but the hidden state that the model passes to one block: masks, rotary tables, positions."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        return pytree.tree_flatten((self.args, self.kwargs))

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in a fixed order."""
        return [leaf for leaf in self._flat[0] if isinstance(leaf, torch.Tensor)]

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """What of the call decides a graph: how its tensors are laid out, and everything else by value."""
        leaves = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in self._flat[0]
        )
        return leaves, repr(self._flat[1])

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> BlockCall:
        """The same call with other tensors in the places of ``tensors``."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._flat[0]]
        return BlockCall(*pytree.tree_unflatten(leaves, self._flat[1]))


class Block:
    """The blocks of one kind: they share code and shapes, and differ in their weights."""

    def __init__(
        self,
        name: str,
        template: nn.Module,
        kernels: Kernels,
        quantized: Mapping[str, PackedWeight],
        choices: Choices = (),
        router: Router | None = None,
        coefficient: float = 0.0,
        output_width: int | None = None,
    ) -> None:
        """``template``: a block without weights, on the device. ``name`` is for messages. ``router``: the one that
        is to have a load-balancing loss, times ``coefficient``. ``output_width``: elements a token of the output;
        None: as many as the input has.
        """
        self._name, self._template, self._kernels = name, template, kernels
        self._quantized, self._choices = quantized, choices
        self._scores = None if router is None else ScoreWatch(template, router)
        self._coefficient, self._output_width = coefficient, output_width
        self._caches = adapts_parameters(template)
        every = [
            *template.named_parameters(remove_duplicate=False),
            *template.named_buffers(remove_duplicate=False),
        ]
        self._is_tied = len({id(tensor) for _, tensor in every}) < len(every)
        self._graphs = kernels.graphs and not self._caches
        self.trained = frozenset(n for n, p in template.named_parameters() if p.requires_grad)

    def run(self, hidden: torch.Tensor, weights: Weights, call: BlockCall) -> torch.Tensor:
        """The block's own code over ``weights``."""
        saves: AbstractContextManager[Any] = nullcontext()
        if self._quantized:
            weights, opened = open_weights(weights, self._quantized)
            saves = opened.made_again()
        with saves, _ONE_THREAD if self._caches else nullcontext():
            # To look for ties at each call takes as long as the Python code of a small block.
            out = functional_call(
                self._template, weights, (hidden, *call.args), call.kwargs, tie_weights=self._is_tied
            )
        return out[0] if isinstance(out, tuple) else out

    def forward(self, hidden: torch.Tensor, weights: Weights, call: BlockCall, place: int | None) -> torch.Tensor:
        """The block's output; what a gradient needs is not kept. ``place``: see ``placed_dropout``."""
        at = self._at(hidden, weights, call, place) if self._graphs else None
        if at is None:
            with torch.no_grad(), placed_dropout(place):
                return self.run(hidden, weights, call)
        with torch.no_grad():
            return self._kernels.call(self._name, at.key, at.run, at.data, 0)[0]

    def keep(
        self,
        hidden: torch.Tensor,
        weights: Weights,
        call: BlockCall,
        place: int | None,
        with_grad_hidden: bool,
        with_output: bool,
        given: FromForward | None,
    ) -> tuple[torch.Tensor | None, Kept]:
        """Prepares the backward: (the output, what it leaves). Without ``with_output`` the output may be None.

        ``given``: what ``forward_keeping`` kept; None where this is the only forward, or nothing was kept. As a
        graph a block keeps everything costly if its output is asked for; if not, nothing has run yet, and the
        recompute is a part of the backward.
        """
        traced = self._traced(hidden, weights, call, place, with_grad_hidden)
        if traced is None:
            return self._keep_eagerly(hidden, weights, call, place, with_grad_hidden, given)
        if given is not None and not with_output:
            values = self._kept_layout(traced, given.budget_bytes).tensors_in(given.buffer)
            return None, self._graph_kept(traced, weights, given.budget_bytes, values)
        if not with_output:
            return None, self._graph_kept(traced, weights, None, [])
        everything = float("inf")
        output, values = self._run_keeping(traced, everything, given)
        return output, self._graph_kept(traced, weights, everything, values)

    def forward_keeping(
        self,
        hidden: torch.Tensor,
        weights: Weights,
        call: BlockCall,
        place: int | None,
        with_grad_hidden: bool,
        budget_bytes: int,
    ) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]:
        """The output, and (offset, bytes) of parts of one flat buffer: what routers pick, and what is best kept in
        ``budget_bytes`` behind it.
        """
        traced = self._traced(hidden, weights, call, place, with_grad_hidden)
        if traced is None and not self._choices:
            return self.forward(hidden, weights, call, place), []
        if traced is None:
            with torch.no_grad(), placed_dropout(place), recorded_choices(self._choices) as made:
                output = self.run(hidden, weights, call)
            return output, KeptLayout(made).parts(made)
        output, values = self._run_keeping(traced, budget_bytes)
        return output, self._kept_layout(traced, budget_bytes).parts(values)

    def keep_options(self, hidden: torch.Tensor, weights: Weights, call: BlockCall) -> list[tuple[int, float]]:
        """What keeping more saves: (bytes kept, work of the backward as a share of that with nothing kept)."""
        traced = self._traced(hidden, weights, call, None, with_grad_hidden=True)
        if traced is None:
            return [(0, 1.0)]
        joint = traced.joint
        groups = joint.keep_in_order()
        options, kept = [], []
        whole = joint.backward_flops([])
        for group in [[], *groups]:
            kept += group
            size = KeptLayout([node.meta["val"] for node in kept]).num_bytes
            options.append((size, joint.backward_flops(kept) / whole))
        return options

    def _run_keeping(
        self, traced: _Traced, budget: float, given: FromForward | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Runs the forward, as far as it is not ``given``; (the output, the tensors kept, given ones too)."""
        joint, wanted, nodes = traced.joint, traced.joint.keep(budget), list[Any]()
        data, values = traced.at.data, list[torch.Tensor]()
        if given is not None:
            nodes = joint.keep(given.budget_bytes)
            values = self._kept_layout(traced, given.budget_bytes).tensors_in(given.buffer)
        others = [node for node in wanted if node not in nodes]

        def make() -> TensorFunction:
            return self._kernels.compile(joint.forward(others, nodes), [*data, *values])

        key = "keep", traced.key, budget, None if given is None else given.budget_bytes
        with torch.no_grad():
            output, *made = self._kernels.once(key, make)(*data, *values)
        by_node = dict(zip([*nodes, *others], [*values, *made], strict=True))
        return output, [by_node[node] for node in wanted]

    def _graph_kept(
        self, traced: _Traced, weights: Weights, budget: float | None, values: list[torch.Tensor]
    ) -> GraphKept:
        """``budget``: see ``JointGraph.keep``; None where nothing is kept, not even what routers pick."""
        joint = traced.joint
        trained = tuple(name for name in weights if name in self.trained)
        if self._scores is not None:
            trained += (LOSS, WEIGHT)

        def graph_for(tensors: list[torch.Tensor]) -> TensorFunction:
            return self._kernels.once(
                ("backward", traced.key, budget, tensors[-1 - len(trained)].stride()),
                lambda: self._kernels.compile(
                    joint.backward([] if budget is None else joint.keep(budget)), tensors
                ),
            )

        return GraphKept(graph_for, [*traced.at.data, *values], trained)

    def _kept_layout(self, traced: _Traced, budget: float) -> KeptLayout:
        def make() -> KeptLayout:
            return KeptLayout([node.meta["val"] for node in traced.joint.keep(budget)])

        return self._kernels.once(("layout", traced.key, budget), make)

    def _traced(
        self, hidden: torch.Tensor, weights: Weights, call: BlockCall, place: int | None, with_grad_hidden: bool
    ) -> _Traced | None:
        """The block's joint graph for this call; None where torch runs the block itself."""
        at = self._at(hidden, weights, call, place) if self._graphs else None
        joint = None if at is None else self._joint(at, weights, with_grad_hidden)
        if at is None or joint is None:
            return None
        return _Traced(at, joint, (at.key, with_grad_hidden))

    def _keep_eagerly(
        self,
        hidden: torch.Tensor,
        weights: Weights,
        call: BlockCall,
        place: int | None,
        with_grad_hidden: bool,
        given: FromForward | None,
    ) -> tuple[torch.Tensor, Kept]:
        hidden = hidden.detach().requires_grad_(with_grad_hidden)
        leaves = {n: w.detach().requires_grad_() for n, w in weights.items() if n in self.trained}
        again = recorded_choices if given is None else partial(replayed_choices, buffer=given.buffer)
        with torch.enable_grad(), placed_dropout(place), again(self._choices) as picked:
            output = self.run(hidden, {**weights, **leaves}, call)
            loss = self._take_router_loss(picked)
        return output, EagerKept(output, hidden, leaves, loss, self._coefficient)

    def _take_router_loss(self, picked: list[torch.Tensor]) -> torch.Tensor | None:
        """The load-balancing loss, if any, of the run that has just picked experts, which it did last."""
        return None if self._scores is None else load_balancing_loss(self._scores.take(), picked[-1])

    def _at(self, hidden: torch.Tensor, weights: Weights, call: BlockCall, place: int | None) -> _At | None:
        """The block as a function of tensors; None where how many dropouts it draws depends on values."""
        names = tuple(weights)
        laid_out = (hidden.shape, hidden.stride(), hidden.dtype)
        key = (self._name, laid_out, names, call.signature, self._template.training)
        draws = 0
        if place is not None and self._template.training:
            draws = self._kernels.once(("draws", key), lambda: self._count_draws(hidden, weights, call))
            if draws is None:
                return None
        keys = [] if place is None or not draws else [draw_keys(place, draws).to(hidden.device, non_blocking=True)]
        splits = 1 + len(call.tensors), 1 + len(call.tensors) + len(keys)

        def run(*data: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tensors, drawn, values = data[1 : splits[0]], data[splits[0] : splits[1]], data[splits[1] :]
            with drawn_dropout(drawn[0]) if drawn else nullcontext():
                own = dict(zip(names, values, strict=True))
                return (self.run(data[0], own, call.with_tensors(tensors)),)

        return _At((*key, draws), run, [hidden, *call.tensors, *keys, *weights.values()], splits[1])

    def _count_draws(self, hidden: torch.Tensor, weights: Weights, call: BlockCall) -> int | None:
        fake = FakeTensorMode()
        try:
            with torch.no_grad(), counted_dropout() as count, fake:
                own: Weights = {name: fake.from_tensor(weight) for name, weight in weights.items()}
                tensors = [fake.from_tensor(tensor) for tensor in call.tensors]
                self.run(fake.from_tensor(hidden), own, call.with_tensors(tensors))
        except Exception as error:  # torch and the model raise many kinds for "depends on a value"
            self._kernels.report(self._name, error)
            return None
        return count()

    def _joint(self, at: _At, weights: Weights, with_grad_hidden: bool) -> JointGraph | None:
        """Forward and backward as one graph; None, said once, where they cannot be one."""
        num_data, names = len(at.data), tuple(weights)

        def joint(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            data, grad, sums = list(tensors[:num_data]), tensors[num_data], tensors[num_data + 1 :]
            hidden = data[0] = data[0].detach().requires_grad_(with_grad_hidden)
            leaves = []
            for number, name in enumerate(names, at.first_weight):
                if name in self.trained:
                    data[number] = data[number].detach().requires_grad_()
                    leaves.append(data[number])
            with torch.enable_grad(), recorded_choices(self._choices) as made:
                (output,) = at.run(*data)
                loss = self._take_router_loss(made)
                wanted = [*leaves, hidden] if with_grad_hidden else leaves
                balance: Weights = {} if loss is None else dict(zip((LOSS, WEIGHT), sums[-2:], strict=True))
                ends, end_grads = ends_of_backward(output, grad, loss, balance, self._coefficient)
                grads = torch.autograd.grad(ends, wanted, end_grads, allow_unused=True)
            for total, value in zip(sums, grads[: len(leaves)], strict=False):
                if value is not None:
                    total.add_(value)
            return (output.detach(), *grads[len(leaves) :], *made)

        def make() -> JointGraph | None:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            with fake:
                data = [fake.from_tensor(tensor) for tensor in at.data]
                sums = [
                    torch.empty(weights[n].shape, device=at.data[0].device) for n in names if n in self.trained
                ]
                if self._scores is not None:
                    sums += [torch.empty((), device=at.data[0].device) for _ in (LOSS, WEIGHT)]
                lead, width = data[0].shape[:-1], self._output_width or data[0].shape[-1]
                inputs = [*data, data[0].new_empty(*lead, width), *sums]
            try:
                module = self._kernels.trace_fakes(joint, inputs, fake)
                return JointGraph(module, num_data, sum(each > 0 for each in self._choices))
            except Untraceable as reason:
                self._kernels.report(self._name, reason)
                return None

        return self._kernels.once(("joint", at.key, with_grad_hidden), make)


class _At(NamedTuple):
    """A block with everything but its tensors settled."""

    key: tuple[Any, ...]
    run: TensorFunction
    data: list[torch.Tensor]
    """Hidden state, tensors of the call, keys of dropout if any, weights."""
    first_weight: int
    """Where the weights begin in ``data``."""


class _Traced(NamedTuple):
    """A block whose forward and backward are one graph."""

    at: _At
    joint: JointGraph
    key: tuple[Any, ...]
    """Tells the graph from those of other shapes and settings."""
