"""Cuts a model into embedding, blocks and head by watching it run.

Nothing here knows a model family by name. A recording stub stands in the place of each block; the model's
own code before the first block is the first layer and its own code after the last block is the last layer.
Which parameters belong to which end is seen from the order in which their modules are called.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn

from rpft.errors import UserError
from rpft.model.refuse import refuse_encoder, refuse_side_inputs
from rpft.model.router_loss import find_router
from rpft.model.routing import PROBE_TOKENS, Choices, find_choices
from rpft.model.skeleton import (
    BlockInput,
    EmbeddingStub,
    ShellState,
    Skeleton,
    kinds_of_blocks,
    persistent_buffers,
    replace_module,
    stub_blocks,
)

logger = logging.getLogger(__name__)


def find_blocks(model: Any) -> str:
    """The dotted path of the one ModuleList that holds the decoder blocks, or UserError by name."""
    config = model.config.get_text_config()
    wanted = getattr(config, "num_hidden_layers", None)
    name = type(model).__name__
    lists = [path for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == wanted]
    lists = [p for p in lists if not any(p.startswith(q + ".") for q in lists)]
    if getattr(config, "is_encoder_decoder", False) or len(lists) != 1:
        raise UserError(
            f"{name} is not supported: rpft needs a decoder-only model whose {wanted} blocks stand in one"
            f" ModuleList, and found {lists or 'none'}"
        )
    return lists[0]


def outer_modules(model: nn.Module, blocks_path: str) -> list[str]:
    """Names of the modules outside the blocks that own parameters themselves."""
    return [
        name
        for name, module in model.named_modules()
        if not (name + ".").startswith(blocks_path + ".")
        and any(True for _ in module.named_parameters(recurse=False))
    ]


def cut(model: Any) -> Skeleton:
    """Finds where ``model`` divides into embedding, blocks and head; UserError by name where it does not.

    One pass over a shell of the model, every parameter-owning module outside the blocks replaced by a stub of
    zeros, so that no weight is needed and no product computed.
    """
    name = type(model).__name__
    blocks_path = find_blocks(model)
    outer = outer_modules(model, blocks_path)
    for path in outer:
        if any(True for _ in model.get_submodule(path).children()):
            raise UserError(f"{name} is not supported: {path or 'the model'} owns parameters beside its children")
    blocks = model.get_submodule(blocks_path)
    refuse_encoder(model, blocks)
    count = len(blocks)
    errors: list[str] = []
    for returns_tuple in (False, True):
        shell = copy.deepcopy(model, {id(blocks): blocks})  # which are stubbed, and may be thousands of modules
        state, calls = ShellState(returns_tuple), []
        stub_blocks(shell, blocks_path, state)
        for path in outer:
            replace_module(shell, path, EmbeddingStub(path, model.get_submodule(path), torch.float32, calls))
        seen: list[tuple[torch.Tensor, Any, Any]] = []

        def action(index: int, hidden: Any, args: Any, kwargs: Any, seen: Any = seen, calls: Any = calls) -> Any:
            if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or index != len(seen):
                raise ValueError(f"block {index} was called as number {len(seen)}, or without a hidden state")
            refuse_side_inputs(model, args, kwargs)
            seen.append((hidden, args, kwargs))
            calls.append("<block>")
            return hidden

        state.action = action
        try:
            with torch.enable_grad():
                shell(input_ids=torch.zeros(2, PROBE_TOKENS, dtype=torch.long), use_cache=False)
        except UserError:
            raise
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        if len(seen) == count and len({hidden.shape for hidden, _, _ in seen}) == 1:
            break
    else:
        raise UserError(
            f"{name} is not supported: its blocks are not called once each, in order, with one hidden state"
            + (f" ({errors[0]})" if errors else "")
        )

    first, last = calls.index("<block>"), len(calls) - 1 - calls[::-1].index("<block>")
    before = tuple(dict.fromkeys(calls[:first]))
    after = tuple(dict.fromkeys(calls[last + 1 :]))
    between = [c for c in calls[first:last] if c != "<block>"]
    unused = [path for path in outer if path not in before and path not in after]
    for problem, paths in (("run between its blocks", between), ("never run", unused)):
        if paths:
            raise UserError(f"{name} is not supported: modules with parameters {problem}: {', '.join(paths)}")
    skeleton = Skeleton(model, blocks_path, returns_tuple, before, after, state_names=tuple(model.state_dict()))
    skeleton.inputs = tuple(BlockInput(hidden.detach(), args, kwargs) for hidden, args, kwargs in seen)
    skeleton.choices = _choices(skeleton)
    found = zip(blocks, skeleton.choices, strict=True)  # type: ignore[call-overload]
    skeleton.routers = tuple(find_router(model, block) if picks else None for block, picks in found)
    tensors = [*model.named_parameters(remove_duplicate=False), *persistent_buffers(model)]
    for tensor_name, tensor in tensors:
        skeleton.checkpoint_names.setdefault(id(tensor), tensor_name)
    return skeleton


def _choices(skeleton: Skeleton) -> tuple[Choices, ...]:
    """For each block what its routers pick."""
    kinds, known = kinds_of_blocks(skeleton), dict[int, Choices]()
    for kind, block, given in zip(kinds, skeleton.blocks, skeleton.inputs, strict=True):
        if kind not in known:
            known[kind] = find_choices(block, *given)
            if not known[kind] and any(p.dim() == 3 and min(p.shape[:2]) > 1 for p in block.parameters()):
                logger.warning(
                    "%s: how a block chooses its experts was not seen; a recompute that rounds otherwise may"
                    " choose others",
                    type(skeleton.model).__name__,
                )
    return tuple(known[kind] for kind in kinds)
