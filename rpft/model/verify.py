"""Checks at load that the layers do what the model does: at its two ends, and with packed rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.func import functional_call

from rpft.errors import UserError
from rpft.model.blocks import BlockCall
from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.host_store import HostStore
from rpft.model.refuse import tensors_in
from rpft.model.skeleton import ShellState, Skeleton, stub_blocks

_NUM_TOKENS = 8
_TOLERANCE = 1e-5
"""Allowed difference relative to the largest logit, or two rounding steps of a coarser dtype."""


def verify_head(skeleton: Skeleton, store: HostStore, dtype: torch.dtype) -> None:
    """UserError by name where layers 0 and L + 1 together give other logits than the model with identity blocks.

    Runs on the CPU with views of the store's weights: ``_NUM_TOKENS`` rows of the embedding and two products
    with the head, whatever the number of blocks. What a family does after its head (soft-capping, scaling) or
    does with the tokens besides looking them up shows here, before a wrong loss is trained on.
    """
    model = skeleton.model
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.linspace(0, vocabulary - 1, _NUM_TOKENS).long().view(2, -1)
    first, last = store.layer_weights(0), store.layer_weights(len(store.layers) - 1)
    with torch.no_grad():
        functions = LayerFunctions(skeleton, torch.device("cpu"), dtype)
        functions.train(False)
        nothing = torch.empty(0, dtype=torch.long)
        batch = DeviceBatch(ids, None, nothing, nothing)
        ours = functions.logits(functions.forward(0, None, first, batch, None), last, batch).float()
        theirs = functional_call(
            _with_identity_blocks(skeleton), {**first, **last}, (), {"input_ids": ids}, tie_weights=False
        ).logits
        theirs = theirs.float()
    if ours.shape == theirs.shape:
        largest = theirs.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        allowed = largest * max(_TOLERANCE, 2 * torch.finfo(dtype).eps)
        if torch.allclose(ours, theirs, rtol=0.0, atol=allowed, equal_nan=True):
            return
        found = f"logits differ by up to {(ours - theirs).abs().max().item():.3g}, the largest being {largest:.3g}"
    else:
        found = f"logits have shape {list(ours.shape)}, not {list(theirs.shape)}"
    raise UserError(
        f"{type(model).__name__} is not supported: run as embedding and head alone its {found};"
        " it does something around its blocks that the chunked loss would leave out"
    )


def verify_packing(skeleton: Skeleton, dtype: torch.dtype) -> None:
    """UserError by name where rows that are packed behind each other would see each other.

    A family that makes its masks from position ids gives every block one in which the second row of a pack is
    cut off from the first; a family that does not, or a block without such a mask, mixes the rows.
    """
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    nothing = torch.empty(0, dtype=torch.long)
    functions = LayerFunctions(skeleton, torch.device("cpu"), dtype)
    batch = DeviceBatch(torch.zeros_like(positions), positions, nothing, nothing)
    problem = "not every block is given a mask that keeps packed rows apart"
    try:
        if all(_cuts_off(call, start=3) for call in functions.context(batch)):
            return
    except TypeError as error:
        problem = f"it takes no position ids ({error})"
    name = type(skeleton.model).__name__
    raise UserError(f"data.packing is not possible with {name}: {problem}; set it to false")


def _cuts_off(call: BlockCall, start: int) -> bool:
    """Whether a mask among the arguments hides the tokens before ``start`` from those after it."""
    for tensor in tensors_in((call.args, call.kwargs)):
        if tensor.dim() >= 3 and tensor.shape[-1] == tensor.shape[-2] > start:
            across = tensor[..., start:, :start]
            hidden = ~across if tensor.dtype == torch.bool else across <= -1e4
            if hidden.all():
                return True
    return False


def _with_identity_blocks(skeleton: Skeleton) -> Any:
    state = ShellState(skeleton.returns_tuple)
    state.action = lambda index, hidden, args, kwargs: hidden
    shell = copy.deepcopy(skeleton.model, {id(skeleton.blocks): skeleton.blocks})
    stub_blocks(shell, skeleton.blocks_path, state)
    return shell.eval()
