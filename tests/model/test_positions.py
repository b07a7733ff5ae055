"""Scaled positions are those that transformers computes, and are refused by name where there are none to scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.layers import logits_of, random_ids, relative_error
from support.models import Loaded, tiny_checkpoint, tiny_config
from transformers import AutoModelForCausalLM

from rpft.errors import UserError
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint, read_config
from rpft.model.cut import cut
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.load import load_checkpoint
from rpft.model.positions import can_be_scaled, scale_positions


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "phi3", "mixtral"])
@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_logits_are_those_of_transformers_with_the_same_config(kind: Any, family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family, max_position_embeddings=16)
    config = read_config(tmp_path)
    assert can_be_scaled(config)
    scale_positions(config, kind, 4.0)
    assert config.max_position_embeddings == 64
    rotary = {**read_config(tmp_path).rope_parameters, "rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        rotary["original_max_position_embeddings"] = 16
    changes: dict[str, Any] = {"rope_parameters": rotary, "max_position_embeddings": 64}
    if family == "mixtral":
        changes["head_dim"] = 16  # its config says null, for which transformers' YaRN has no answer
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **changes)
    skeleton = cut(build_model(config, torch.float32, "auto"))
    store = HostStore(build_layers(skeleton, torch.float32))
    load_checkpoint(Checkpoint(tmp_path), skeleton, store)
    ids = random_ids(rows=1, sequence=50)
    expected = theirs.eval()(input_ids=ids).logits
    assert relative_error(logits_of(Loaded(skeleton, store, None), ids), expected) < 1e-5
    unscaled = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=ids).logits
    assert relative_error(unscaled, expected) > 1e-3


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("gpt2", {}, "has no rotary positions"),
        ("gemma3", {}, "has several kinds of rotary positions, sliding_attention, full_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "already scales its positions (rope_type linear",
        ),
    ],
)
def test_positions_that_cannot_be_scaled_are_refused(family: str, changes: Any, problem: str) -> None:
    config = tiny_config(family, **changes)
    assert not can_be_scaled(config)
    with pytest.raises(UserError, match=r"model\.rope_scaling") as refused:
        scale_positions(config, "yarn", 2.0)
    assert problem in str(refused.value)
