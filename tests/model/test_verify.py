"""A head that does more than the chunked loss knows of is refused when the weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import FAMILIES, MORE_FAMILIES, load, tiny_checkpoint
from transformers import LlamaForCausalLM

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings
from rpft.model.verify import verify_head

MORE_SETTINGS = [("gemma2", {"final_logit_softcapping": 0.5}), ("granite", {"logits_scaling": 0.1})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_family_passes(dtype: torch.dtype, checkpoint: Callable[..., Path]) -> None:
    for family, changes in [*((family, {}) for family in (*FAMILIES, *MORE_FAMILIES)), *MORE_SETTINGS]:
        loaded = load(checkpoint(family, **changes), dtype)
        verify_head(loaded.skeleton, loaded.store, dtype)


class ShiftedByPlace(LlamaForCausalLM):
    """Adds to its logits something that depends on the place in the row, which a chunk does not know."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 0.1 * torch.arange(output.logits.shape[1]).view(1, -1, 1)
        return output


class BiasedByToken(LlamaForCausalLM):
    """Scales its logits by the token that it read."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits * (1 + 0.001 * input_ids.unsqueeze(-1))
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family_class", [ShiftedByPlace, BiasedByToken])
def test_logits_that_a_chunk_cannot_know_are_refused_with_name_and_difference(
    family_class: type, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, "llama")
    loaded = load(tmp_path, dtype)
    loaded.skeleton.model.__class__ = family_class
    with pytest.raises(UserError, match=rf"{family_class.__name__} is not supported.*differ by up to [0-9.]+"):
        verify_head(loaded.skeleton, loaded.store, dtype)


def test_weights_are_neither_copied_nor_changed_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3")
    loaded = load(tmp_path)
    before = [layer.weights.clone() for layer in loaded.store.layers]
    verify_head(loaded.skeleton, loaded.store, torch.float32)
    assert all(torch.equal(a, b.weights) for a, b in zip(before, loaded.store.layers, strict=True))
    model = loaded.skeleton.model
    assert model.training
    assert all(parameter.is_meta for parameter in model.parameters())
    assert type(loaded.skeleton.blocks[0]).__name__ == "Qwen3DecoderLayer"


def test_only_embedding_and_head_are_read(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "mistral")
    loaded = load(tmp_path)
    for layer in loaded.store.layers[1:-1]:
        layer.weights.view(torch.float32).fill_(torch.nan)
    verify_head(loaded.skeleton, loaded.store, torch.float32)


def test_adapters_on_blocks_embedding_and_head_pass(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    targets = ["q_proj", "embed_tokens", "lm_head"]
    loaded = load(tmp_path, lora=LoraSettings(4, 8.0, 0.1, targets))
    verify_head(loaded.skeleton, loaded.store, torch.float32)
