"""Sums of two products in one product less memory: the second is added on top of the first.

An adapter adds to each projection a product of its own, in the forward pass and again in the gradient of the
hidden state. Both products are as large as the projection's result; with the second added by the product itself
there is one such tensor instead of two, and no pass over memory to add them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rpft.model.graph_nodes import RESHAPES
from rpft.model.operations import nothing, operation

_HALVES = (torch.bfloat16, torch.float16)

_FEW = 8
"""A product over so many times fewer elements than the other is little work beside the memory of its result."""


@operation("add_scaled_product(Tensor(a!) total, Tensor left, Tensor right, float scale) -> ()", nothing)
def add_scaled_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    """``total`` [m, n] += ``scale`` * ``left`` [m, k] @ ``right`` [k, n], added up before it is rounded."""
    total.addmm_(left, right, alpha=scale)


def fuse_added_products(module: fx.GraphModule) -> None:
    """In a traced graph, makes ``add_scaled_product`` of sums of two products that have no other use.

    The product over few elements, an adapter's, is added to the other. Only in half precision, where the sum is
    then rounded once instead of three times; float32 keeps its order of operations.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs or node.meta["val"].dtype not in _HALVES:
            continue
        found = [_product_behind(value, node) for value in node.args]
        if None in found:
            continue
        (first, first_scale), (second, second_scale) = found  # type: ignore[misc]
        base, added, scale = node.args[0], second, second_scale
        if _inner_size(second) > _inner_size(first):
            (first, first_scale), base, added, scale = (second, second_scale), node.args[1], first, first_scale
        if first_scale != 1.0 or _inner_size(added) * _FEW > _inner_size(first):
            continue
        with graph.inserting_before(node):
            effect = graph.call_function(
                torch.ops.rpft.add_scaled_product.default, (first, *added.args, float(scale))
            )
        effect.meta["val"] = None
        node.replace_all_uses_with(base)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _product_behind(value: Any, user: fx.Node) -> tuple[fx.Node, float] | None:
    """(the product that ``value`` is, viewed and scaled, with no user but ``user``; its scale)."""
    scale = 1.0
    while isinstance(value, fx.Node) and list(value.users) == [user] and value.meta["val"].dtype in _HALVES:
        if value.target is torch.ops.aten.mm.default:
            return value, scale
        if value.target is torch.ops.aten.mul.Tensor and isinstance(value.args[1], (int, float)):
            scale *= value.args[1]
        elif value.target not in RESHAPES:
            return None
        value, user = value.args[0], value
    return None


def _inner_size(product: fx.Node) -> int:
    left: Any = product.args[0]
    return left.meta["val"].shape[1]
