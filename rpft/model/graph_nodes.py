"""What can be asked about the operations of a traced graph: what needs what, what one writes, what it costs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from rpft.model.gradient_sums import add_product_flops

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)
"""Operations that give the same values in another shape."""

VIEWS = (
    *RESHAPES,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
)
"""Operations that give all of the data that they are given, in the same memory."""


def writes(node: fx.Node) -> bool:
    """Whether an operation writes into a tensor that it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def argument(node: fx.Node, name: str, default: Any) -> Any:
    """What ``node`` gives for the argument ``name`` of its operation."""
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get(name, default)


def reached_from(starts: Iterable[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """``starts`` and those of ``nodes``, in the order of their graph, that depend on one of them."""
    reached = set(starts)
    for node in nodes:  # in order, so that one pass sees all
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def needed_for(ends: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> list[fx.Node]:
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


def data_sources(node: fx.Node) -> set[fx.Node]:
    """The nodes that hold the data which ``node`` reads, whatever views lie between."""
    found, stack = set(), list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source.target in VIEWS:
            stack += source.all_input_nodes
        else:
            found.add(source)
    return found


def in_order(end: fx.Node, made: Container[fx.Node]) -> Iterator[fx.Node]:
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


def num_bytes(node: fx.Node) -> int:
    """Bytes of the tensor that an operation makes."""
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize


def flops(node: fx.Node) -> int:
    """Floating point operations of a product or an attention; 0 for everything else."""
    packet = getattr(node.target, "overloadpacket", None)
    args: Any = map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda n: n.meta["val"])
    if "attention" in str(packet):  # torch's own count knows no shared key heads in some versions
        query, key = (argument(node, name, None).meta["val"] for name in ("query", "key"))
        packed = query.dim() == 3  # [tokens, heads, size]; how long rows are is not known
        count = 4 * query.numel() * (argument(node, "max_k", 0) if packed else key.shape[-2])
        return count // 2 if argument(node, "is_causal", False) else count
    if packet is torch.ops.rpft.add_product:
        return add_product_flops(*(each.meta["val"] for each in node.args[1:]))  # type: ignore[union-attr]
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
