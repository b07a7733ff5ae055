"""Forward and backward of a block as one graph, cut into what has to run.

Of the recompute and backward of a block taken as one function, what no gradient needs falls away (its last product
above all), and so does whatever the forward pass has kept: one trace serves every choice of what to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from rpft.model.graph_nodes import (
    argument,
    data_sources,
    flops,
    in_order,
    needed_for,
    num_bytes,
    reached_from,
    writes,
)
from rpft.model.graphs import Untraceable
from rpft.model.layout import ALIGNMENT_BYTES, align


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
        self._effects = [node for node in nodes if writes(node)]
        for node in self._effects:
            if node.args[0] not in self._sums:
                raise Untraceable(f"{node.target} writes into a tensor of the model")
        self._ends = [*self._grad_hidden, *self._effects]
        used = {s for node in needed_for(self._ends, [*self._data, *choices]) for s in node.all_input_nodes}
        self._choices = [node for node in dict.fromkeys(choices) if node in used]
        self._backward_nodes = reached_from([self._grad, *self._sums], nodes)
        backward = [node for node in self._needed_with([]) if node in self._backward_nodes]
        self._asked_for = {source: None for node in backward for source in node.all_input_nodes}
        """What the backward is given of the forward, in order."""
        self._costs = {node: flops(node) for node in nodes if node.op == "call_function"}
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
                size = sum(align(num_bytes(node), ALIGNMENT_BYTES) for node in results)
                if not results or size > left:
                    continue
                saved = now - sum(self._recomputed([*kept, *results]).values())
                if saved > best_rate * size:
                    best, best_rate = results, saved / size
            if best is None:
                return order
            order.append(best)
            kept += best
            left -= sum(align(num_bytes(node), ALIGNMENT_BYTES) for node in best)

    def backward_flops(self, kept: Sequence[fx.Node]) -> int:
        """Operations of products and attention in the backward, with what it recomputes."""
        return sum(self._costs.get(node, 0) for node in self._needed_with(kept))

    def _needed_with(self, kept: Sequence[fx.Node]) -> list[fx.Node]:
        """What the backward runs where ``kept`` and the choices are given."""
        return needed_for(self._ends, [*self._data, *self._choices, *kept, self._grad, *self._sums])

    def _recomputed(self, kept: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Costly operations of the forward pass that the backward must run again, with their cost."""
        needed = needed_for(self._asked_for, [*self._data, *self._choices, *kept, *self._backward_nodes])
        return {node: cost for node in needed if (cost := self._costs.get(node, 0)) > 0}

    def _results(self, operation: fx.Node, kept: Sequence[fx.Node]) -> list[fx.Node]:
        """The tensors that ``operation`` makes and the backward uses."""
        if isinstance(operation.meta["val"], torch.Tensor):
            return [operation]
        needed = set(self._needed_with(kept))
        return [node for node in operation.users if node in needed and isinstance(node.meta["val"], torch.Tensor)]

    def _cut(
        self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], effects: Sequence[fx.Node] = ()
    ) -> fx.GraphModule:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            made[node] = graph.placeholder(node.name)
            made[node].meta = dict(node.meta)
        needed = set(needed_for([*outputs, *effects], inputs))
        waiting = {effect: data_sources(effect) & needed & self._backward_nodes for effect in effects}

        def make(end: fx.Node) -> None:
            for node in in_order(end, made):
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
        if "attention" not in str(node.target) or argument(node, "dropout_p", 0.0) != 0.0:
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
