"""What a traced graph takes of memory, from the graph alone: as it stands, or with its operations fused.

Fused, no tensor is made of what can be computed again where it is read: of pointwise operations between products,
attention and sums only those results lie in memory that such an operation is given, or that leave the graph. What
they are made from lives until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from rpft.model.graph_nodes import VIEWS, writes
from rpft.model.layout import ALIGNMENT_BYTES, align

_aten = torch.ops.aten

_PARTS = "expand unsqueeze squeeze select slice split split_with_sizes unbind as_strided diagonal"
_VIEWS = {view.overloadpacket for view in VIEWS} | {getattr(_aten, name) for name in _PARTS.split()}

_PLAIN = """
    _to_copy clone full full_like zeros zeros_like ones ones_like arange empty scalar_tensor new_zeros new_full
    new_ones repeat where masked_fill slice_backward cat select_backward new_empty empty_like gather index
    nll_loss_backward _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data nll_loss_forward
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
"""
_MADE_WHERE_READ = {getattr(_aten, name) for name in _PLAIN.split()}
"""Beside what torch calls pointwise."""


def peak_bytes(module: fx.GraphModule, fused: bool) -> int:
    """The most that a call of ``module`` holds at once beside its arguments, results included."""
    nodes = list(module.graph.nodes)
    last = len(nodes)
    number = {node: index for index, node in enumerate(nodes)}
    returned = set(nodes[-1].all_input_nodes)
    stored = {node for node in nodes if (_is_stored(node, returned) if fused else _makes_tensor(node))}
    ends: dict[fx.Node, int] = {}
    for node in nodes:
        if node in stored or writes(node) or _is_reduced(node) or node.op == "output":
            at = last if node.op == "output" else number[node]
            for source in _read(node, stored):
                ends[source] = max(ends.get(source, 0), at)
    held = most = 0
    leaves: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node in stored or _is_reduced(node):
            size = sum(map(_size, _tensors(node)))
            held += size
            end = ends.get(node, index)
            leaves[end] = leaves.get(end, 0) + size
            most = max(most, held)
        held -= leaves.pop(index, 0)
    return most


def _is_view(node: fx.Node) -> bool:
    target = getattr(node.target, "overloadpacket", None)
    return target in _VIEWS or (node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem")


def _is_pointwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in _MADE_WHERE_READ


def _is_reduced(node: fx.Node) -> bool:
    """Whether ``node`` sums up what is made where it is read."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.reduction in node.target.tags


def _makes_tensor(node: fx.Node) -> bool:
    return node.op == "call_function" and not writes(node) and not _is_view(node)


def _is_stored(node: fx.Node, returned: set[fx.Node]) -> bool:
    if not _makes_tensor(node) or _is_reduced(node):
        return False
    if not _is_pointwise(node):
        return True
    return any(_needs_tensor(user, returned) for user in _users(node)) or node in returned


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """What reads ``node``, through views."""
    for user in node.users:
        if _is_view(user):
            yield user
            yield from _users(user)
        else:
            yield user


def _needs_tensor(user: fx.Node, returned: set[fx.Node]) -> bool:
    if user in returned or user.op == "output":
        return True
    if _is_view(user) or _is_pointwise(user) or _is_reduced(user):
        return False
    return not (writes(user) and torch.Tag.pointwise in user.target.tags)  # type: ignore[union-attr]


def _read(node: fx.Node, stored: set[fx.Node]) -> set[fx.Node]:
    """The tensors in memory from which ``node`` is made, whatever is computed on the way."""
    found, seen, stack = set(), set(), list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in seen:
            continue
        seen.add(source)
        if source in stored or _is_reduced(source):
            found.add(source)
        else:
            stack += source.all_input_nodes
    return found


def _tensors(node: fx.Node) -> Sequence[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _size(tensor: torch.Tensor) -> int:
    return align(tensor.numel() * tensor.dtype.itemsize, ALIGNMENT_BYTES)
