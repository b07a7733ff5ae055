"""Which weights of a model are stored quantised: the frozen matrices of its blocks, fused experts included."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

import torch
from torch import nn

from rpft.errors import UserError
from rpft.model.quant import BLOCK, PackedWeight, QuantKind, is_packable
from rpft.model.skeleton import Skeleton

logger = logging.getLogger(__name__)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def quantize_base(
    skeleton: Skeleton,
    kind: QuantKind,
    dtype: torch.dtype,
    *,
    only: Collection[str] | None = None,
    nested: bool = True,
) -> None:
    """Notes in ``skeleton`` which frozen weights are stored as ``kind``; to be called after adapters are in.

    As in bitsandbytes these are the linear layers of the blocks, not embedding and head; the experts that
    transformers fuses to weights of three dimensions are quantised too. ``only``: names of the weights that are
    quantised in the checkpoint; its other linear layers then stay as they are, while experts, which it holds one
    by one, do not. ``nested``: as in ``PackedWeight``. Raises UserError where there is no such weight.
    """
    prefix = skeleton.model.base_model_prefix + "."
    chosen = None if only is None else {name.removeprefix(prefix) for name in only}
    found: dict[str, PackedWeight] = {}
    left: list[str] = []
    for name, parameter in _matrices(skeleton):
        stored = skeleton.checkpoint_names.get(id(parameter))
        if stored is None:
            continue
        if chosen is not None and parameter.dim() == 2 and stored.removeprefix(prefix) not in chosen:
            continue
        shape = tuple(parameter.shape)
        if is_packable(kind, shape):
            found[name] = PackedWeight(kind, shape, dtype, nested)
        else:
            left.append(f"{name} {list(shape)}")
    if not found:
        raise UserError(
            f"model.quantize is {kind}, and no block of {type(skeleton.model).__name__} has a frozen linear layer"
            " or fused experts to be quantised; set it to none"
        )
    if left:
        logger.warning(
            "%d weight(s) stay in working precision, since their elements are no multiple of %d: %s%s",
            len(left),
            BLOCK,
            ", ".join(left[:3]),
            " ..." if len(left) > 3 else "",
        )
    skeleton.quantized = found


def _matrices(skeleton: Skeleton) -> Iterator[tuple[str, nn.Parameter]]:
    """(full name, parameter) of every frozen linear weight and every frozen stack of matrices in the blocks."""
    for block in range(skeleton.num_blocks):
        prefix = f"{skeleton.blocks_path}.{block}"
        for path, module in skeleton.model.get_submodule(prefix).named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                linear = isinstance(module, nn.Linear) and name == "weight"
                stack = parameter.dim() == 3 and not isinstance(module, _CONVOLUTIONS)
                if not parameter.requires_grad and (linear or stack):
                    yield ".".join(part for part in (prefix, path, name) if part), parameter
