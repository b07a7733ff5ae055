"""Finds the experts of each block that can be layers of their own, and cuts a model there.

No family is known by name. A stack can be cut off if what it makes is added to the block's output and goes nowhere
else, which is read from the block's operations, and if groups of its experts together make what all of them do,
which is tried on a small one of random weights.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from rpft.errors import UserError
from rpft.model.expert_groups import Asked, resized
from rpft.model.graph_nodes import RESHAPES
from rpft.model.graphs import quiet_fakes
from rpft.model.parts import Stack, is_parameter_adapter, is_stack
from rpft.model.probe import Probe
from rpft.model.skeleton import BlockInput, Skeleton, kinds_of_blocks, replace_module
from rpft.model.slices import slice_of

logger = logging.getLogger(__name__)

_TRIED_EXPERTS, _TRIED_TOKENS, _TRIED_SIZE = 4, 24, 16
_TOLERANCE = 0.02
"""Relative: sums of other order, in whatever precision."""

_MOVES = (
    *RESHAPES,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
)
"""Operations that change no value of what goes through."""


class _NotApart(Exception):
    """Why experts cannot be layers of their own."""


def cut_experts(skeleton: Skeleton, num_groups: int, dtype: torch.dtype) -> Skeleton:
    """``skeleton`` with the experts of each block in ``num_groups`` layers; 1: in the layer of their block.

    UserError where they cannot be cut so.
    """
    if num_groups == 1:
        return replace(skeleton, stacks=(), num_groups=1)
    stacks = find_stacks(skeleton, dtype)
    possible = _group_counts(stacks)
    if num_groups not in possible:
        raise UserError(
            f"the experts of each block of {type(skeleton.model).__name__} cannot be in {num_groups} groups as the"
            f" model is trained here; possible: {', '.join(map(str, possible))}"
        )
    return replace(skeleton, stacks=stacks, num_groups=num_groups)


def ever_more_groups(skeleton: Skeleton, dtype: torch.dtype) -> Iterator[Skeleton]:
    """``skeleton`` with its experts in groups, each time at least twice as many; nothing where none can be cut."""
    stacks, before = find_stacks(skeleton, dtype), 1
    for count in _group_counts(stacks):
        if count >= 2 * before:
            before = count
            yield replace(skeleton, stacks=stacks, num_groups=count)


def find_stacks(skeleton: Skeleton, dtype: torch.dtype) -> tuple[Stack | None, ...]:
    """For each block its experts, if they can be layers of their own; if not, that is said once."""
    known: dict[int, Stack | None] = {}
    blocks = zip(kinds_of_blocks(skeleton), skeleton.blocks, skeleton.inputs, strict=True)
    for kind, block, given in blocks:
        if kind not in known:
            try:
                known[kind] = _find_stack(block, given, dtype)
            except _NotApart as reason:
                known[kind] = None
                logger.warning("%s: its experts stay in one layer: %s", type(skeleton.model).__name__, reason)
    return tuple(known[kind] for kind in kinds_of_blocks(skeleton))


def _group_counts(stacks: tuple[Stack | None, ...]) -> list[int]:
    """Into how many groups all of ``stacks`` can be cut, ascending: all of one size, of two experts at least."""
    experts = {stack.num_experts for stack in stacks if stack is not None}
    common = math.gcd(*experts) if experts else 1
    return [n for n in range(1, common // 2 + 1) if common % n == 0] or [1]


def _find_stack(block: nn.Module, given: BlockInput, dtype: torch.dtype) -> Stack | None:
    stacks = [path for path, module in block.named_modules() if is_stack(module)]
    # What peft wraps a module in answers as the module does: the innermost is meant.
    found = [path for path in stacks if not any(other.startswith(path + ".") for other in stacks)]
    if not found:
        return None
    if len(found) > 1:
        raise _NotApart(f"there are {len(found)} stacks of them in a block")
    path, experts = found[0], block.get_submodule(found[0])
    if any(True for _ in experts.buffers()):
        raise _NotApart("they have more than weights")
    path = _with_adapters(block, path)
    picked, weights_dtype = _added_at_the_end(block, path, given, dtype)
    stack = Stack(path, int(experts.num_experts), picked, weights_dtype)  # type: ignore[arg-type]
    unit = math.gcd(*(size for p in experts.parameters() for size in p.shape[1:]))
    _make_the_same_in_groups(block.get_submodule(path), stack, unit, given.hidden.shape[-1], dtype)
    return stack


def _with_adapters(block: nn.Module, path: str) -> str:
    """The path of the outermost adapter of the parameters of the stack at ``path``; its own where it has none."""
    parent = path.rpartition(".")[0]
    while parent and is_parameter_adapter(block.get_submodule(parent)):
        path, parent = parent, parent.rpartition(".")[0]
    return path


def _added_at_the_end(
    block: nn.Module, path: str, given: BlockInput, dtype: torch.dtype
) -> tuple[int, torch.dtype]:
    """(How many experts a token is sent to, precision of their weights), of a stack whose result is only added."""
    fake, asked = FakeTensorMode(allow_non_fake_inputs=True), _Instead()
    shell = copy.deepcopy(block)
    replace_module(shell, path, asked)
    tensors = [*shell.named_parameters(), *shell.named_buffers()]

    def like(tensor: torch.Tensor) -> torch.dtype:
        return dtype if tensor.is_floating_point() else tensor.dtype

    def faked(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=like(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    with fake:
        own = {name: torch.empty(t.shape, dtype=like(t)) for name, t in tensors}
        hidden, args, kwargs = pytree.tree_map(faked, tuple(given))
        made = torch.empty_like(hidden)

    def run(made: torch.Tensor) -> torch.Tensor:
        asked.made = made
        output = functional_call(shell, own, (hidden, *args), kwargs)
        return output[0] if isinstance(output, tuple) else output

    try:
        with torch.no_grad(), quiet_fakes(), fake:
            graph = make_fx(run, tracing_mode="real")(made).graph
    except Exception as error:  # torch and the model raise many kinds
        raise _NotApart(f"their block cannot be traced ({str(error).splitlines()[0]})") from error
    if len(asked.calls) != 1 or len(asked.calls[0]) != 3:
        raise _NotApart("they are not called once with hidden states, indices and weights")
    (states, indices, weights), tokens = asked.calls[0], hidden.shape[:-1].numel()
    shapes = states.shape == (tokens, hidden.shape[-1]) and indices.shape == weights.shape
    if not shapes or states.dtype != hidden.dtype or indices.shape[0] != tokens or indices.dim() != 2:
        raise _NotApart(f"they are given {[list(each.shape) for each in asked.calls[0]]}")
    _check_only_added(graph)
    return indices.shape[1], weights.dtype


class _Instead(Asked):
    """Gives ``made`` for what the experts make."""

    made: torch.Tensor

    def forward(self, *asked: torch.Tensor) -> torch.Tensor:
        self.calls.append(asked)
        return self.made.view(asked[0].shape)


def _check_only_added(graph: fx.Graph) -> None:
    """Follows the placeholder of ``graph`` to its output; _NotApart where it is more than added to something."""
    (start,) = [node for node in graph.nodes if node.op == "placeholder"]
    reached = {start}
    for node in graph.nodes:
        sources = [each for each in node.all_input_nodes if each in reached]
        if not sources:
            continue
        added = node.target is torch.ops.aten.add.Tensor and not node.kwargs and node.args[0] is not node.args[1]
        if node.op != "output" and not (len(sources) == 1 and (added or node.target in _MOVES)):
            raise _NotApart(f"{node.target} comes between what they make and the block's output")
        reached.add(node)
    if not any(node.op == "output" for node in reached):
        raise _NotApart("the block's output does not depend on them")


def _make_the_same_in_groups(
    experts: nn.Module, stack: Stack, unit: int, hidden_size: int, dtype: torch.dtype
) -> None:
    """Tries two groups of two experts beside all four of a small stack; _NotApart where their sum is another.

    ``unit`` divides all sizes of an expert.
    """

    def small(count: int) -> nn.Module:
        return resized(experts, stack.num_experts, count, lambda size: size // unit * _TRIED_SIZE)

    probe, whole = Probe(torch.device("cpu"), dtype), small(_TRIED_EXPERTS)
    own, half = probe.weights(whole), _TRIED_EXPERTS // 2
    hidden = probe.normal(_TRIED_TOKENS, hidden_size // unit * _TRIED_SIZE)
    numbers = torch.arange(_TRIED_TOKENS * min(stack.picked, _TRIED_EXPERTS)) * 7 // 5 % _TRIED_EXPERTS
    indices = numbers.view(_TRIED_TOKENS, -1)
    weights = torch.linspace(0.1, 0.9, indices.numel()).view(indices.shape).to(stack.weights_dtype)
    try:
        with torch.no_grad():
            expected, found = functional_call(whole, own, (hidden, indices, weights)), 0
            for start in (0, half):
                group = range(start, start + half)
                some = {n: slice_of(n, group, _TRIED_EXPERTS).cut_out(weight) for n, weight in own.items()}
                here = (indices >= start) & (indices < start + half)
                numbers = torch.where(here, indices - start, half)
                found = found + functional_call(small(half), some, (hidden, numbers, weights))
    except Exception as error:  # torch and the model raise many kinds
        raise _NotApart(f"some of them do not run alone ({str(error).splitlines()[0]})") from error
    error = (found - expected).float().norm() / expected.float().norm()
    if not error <= _TOLERANCE:
        raise _NotApart("groups of them do not add up to all")
