"""Weight gradients straight into their float32 sums: one product that adds, instead of a product and a sum.

A product of bfloat16 matrices is accumulated in float32 anyway. Added from there it is neither rounded nor written
and read again, which counts most for the head, whose gradient is large beside the tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from rpft.model.operations import nothing, operation

_TRANSPOSES = (torch.ops.aten.t.default, torch.ops.aten.detach.default)


@operation("add_product(Tensor(a!) total, Tensor left, Tensor right) -> ()", nothing)
def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total`` [m, n], float32, += ``left`` [m, k] @ ``right`` [k, n]."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left @ right)


def fuse_gradient_sums(module: fx.GraphModule) -> None:
    """In a traced graph, makes ``add_product`` of ``total.add_(left @ right)`` whose product has no other use."""
    graph = module.graph
    _split_sums(graph)
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.add_.Tensor or node.kwargs:
            continue
        total, value = node.args
        if not isinstance(value, fx.Node) or total.meta["val"].dtype != torch.float32:
            continue
        product, turned = _product_behind(value)
        if product is None:
            continue
        left, right = product.args
        with graph.inserting_before(node):
            if turned:  # (left @ right).t() is right.t() @ left.t()
                left, right = (graph.call_function(torch.ops.aten.t.default, (n,)) for n in (right, left))
                for made, source in ((left, product.args[1]), (right, product.args[0])):
                    made.meta["val"] = source.meta["val"].t()
            added = graph.call_function(torch.ops.rpft.add_product.default, (total, left, right))
        added.meta["val"] = None
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _split_sums(graph: fx.Graph) -> None:
    """Adds the terms of ``total.add_(a + b)`` one by one: gradients of a weight that was used several times."""
    waiting = [node for node in graph.nodes if node.target is torch.ops.aten.add_.Tensor and not node.kwargs]
    while waiting:
        node = waiting.pop()
        total, value = cast(list[Any], node.args)
        views: list[fx.Node] = []
        while isinstance(value, fx.Node) and len(value.users) == 1 and value.target in _TRANSPOSES:
            views.append(value)
            value = value.args[0]
        terms = _terms(value)
        if total.meta["val"].dtype != torch.float32 or not terms:
            continue
        with graph.inserting_before(node):
            for term in terms:
                for view in reversed(views):
                    seen, term = term, graph.call_function(cast(Any, view.target), (term,))
                    term.meta["val"] = cast(Any, view.target)(seen.meta["val"])
                added = graph.call_function(torch.ops.aten.add_.Tensor, (total, term))
                added.meta["val"] = total.meta["val"]
                waiting.append(added)
        node.replace_all_uses_with(total)
        for unused in (node, *views, value):
            graph.erase_node(unused)  # type: ignore[arg-type]


def _terms(value: Any) -> list[Any]:
    """The two tensors whose sum, used once, ``value`` is; empty where it is none."""
    if not isinstance(value, fx.Node) or value.target is not torch.ops.aten.add.Tensor or value.kwargs:
        return []
    terms = list(value.args)
    return terms if len(value.users) == 1 and all(isinstance(term, fx.Node) for term in terms) else []


def _product_behind(value: fx.Node) -> tuple[fx.Node | None, bool]:
    """(the product that ``value`` is, turned or not, used for nothing else; whether it is turned)."""
    turned = False
    while len(value.users) == 1:
        if value.target is torch.ops.aten.mm.default:
            return value, turned
        if value.target not in _TRANSPOSES:
            break
        turned ^= value.target is torch.ops.aten.t.default
        source = value.args[0]
        assert isinstance(source, fx.Node)
        value = source
    return None, False


def add_product_flops(left: torch.Tensor, right: torch.Tensor) -> int:
    """Floating point operations of one ``add_product``."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]
