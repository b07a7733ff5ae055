"""Refuses by name what a model does between or inside its blocks that the layers would not reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rpft.errors import UserError

_NOISE_SUFFIXES = ("jitter_noise", "layerdrop", "drop_path_rate")
"""Config keys of random draws other than dropout: a recompute on another worker would draw others."""


def refuse_settings(config: Any) -> None:
    """UserError for a config whose blocks draw noise in training, depend on their number, or share state."""
    config = config.get_text_config()
    for key, value in sorted(config.to_dict().items()):
        if not isinstance(value, bool | int | float) or value == 0:
            continue
        if key.endswith(_NOISE_SUFFIXES):
            raise UserError(
                f"model {config.model_type!r}: {key} = {value} in config.json makes training draw noise that"
                " cannot be drawn again when a layer is recomputed; set it to 0"
            )
        if key == "scale_attn_by_inverse_layer_idx":
            raise UserError(
                f"model {config.model_type!r} is not supported with {key} = true in config.json:"
                " its blocks depend on their number"
            )
        if key == "num_kv_shared_layers":
            raise UserError(
                f"model {config.model_type!r} is not supported with {key} = {value} in config.json:"
                " its blocks use keys and values of other blocks"
            )


def refuse_encoder(model: nn.Module, blocks: nn.ModuleList) -> None:
    """UserError where every attention of the blocks says that it also sees the tokens that follow."""
    causal = {bool(m.is_causal) for block in blocks for m in block.modules() if hasattr(m, "is_causal")}
    if causal == {False}:
        raise UserError(
            f"{type(model).__name__} is not supported: its attention is not causal, it is an encoder"
            " (if it is meant as a decoder, its config needs is_decoder = true)"
        )


def refuse_side_inputs(model: nn.Module, args: Any, kwargs: Any) -> None:
    """UserError where a block is given something else that the embedding's weights made than the hidden state.

    The embedding must have been a stub whose output requires a gradient, which shows in all that is made of it.
    """
    if any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
        raise UserError(
            f"{type(model).__name__} is not supported: its blocks are given embeddings beside the hidden state"
        )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
