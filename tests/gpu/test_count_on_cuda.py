"""Bytes of layers that are counted without data, against what CUDA's allocator gives out for them."""

from __future__ import annotations

import pytest
import torch
from support.models import tiny_config

from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.build import build_model
from rpft.model.cut import cut
from rpft.model.functions import LayerFunctions
from rpft.model.layers import build_layers
from rpft.plan.choose import model_shape
from rpft.plan.count import Microbatch, count_layers
from rpft.plan.profile import LayerMeter, LayerProfile, layers_by_kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, SEQUENCE, DTYPE = 2, 2048, torch.bfloat16
SIZES = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 32768, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
MOST = {"eager": 1.1, "compile": 1.8}
"""How far above the truth: compiled graphs are counted with a margin."""


def most(profile: LayerProfile) -> int:
    return max(profile.backward_bytes, profile.kept_bytes + profile.kept_backward_bytes, profile.forward_bytes)


@pytest.mark.parametrize("kernels", MOST)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("family", "attention"), [("llama", "auto"), ("qwen3", "eager"), ("qwen3_moe", "auto")])
def test_what_is_counted_is_what_the_allocator_gives_out(family, attention, lora, kernels) -> None:
    config = tiny_config(family, **SIZES)
    skeleton = cut(build_model(config, DTYPE, attention))
    if lora:
        inject_lora(skeleton, LoraSettings(16, 32, 0.0, ["q_proj", "k_proj", "v_proj", "o_proj"]), "shape")
    layouts = build_layers(skeleton, DTYPE)
    counted = count_layers(skeleton, layouts, Microbatch(ROWS, SEQUENCE, model_shape(config, 2), DTYPE, kernels))
    functions = LayerFunctions(skeleton, torch.device("cuda:0"), DTYPE, kernels)
    meter = LayerMeter(functions, layouts, ROWS, SEQUENCE, config.vocab_size)
    shares = {}
    for layers in layers_by_kind(functions, len(layouts)):
        shares[layers[0]] = most(counted[layers[0]]) / most(meter.measure(layers[0]))
    print(f"{family} {attention} {kernels}: counted over allocated {shares}")
    assert all(1 <= share <= MOST[kernels] for share in shares.values()), shares
