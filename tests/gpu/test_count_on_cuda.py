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
from rpft.model.quant_choice import quantize_base
from rpft.plan.choose import model_shape
from rpft.plan.count import Microbatch, count_layers
from rpft.plan.profile import LayerMeter, LayerProfile, OnDevice, layers_by_kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, SEQUENCE, DTYPE = 2, 2048, torch.bfloat16
SIZES = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 32768, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
LORA = LoraSettings(16, 32, 0.0, ["q_proj", "k_proj", "v_proj", "o_proj"])
CASES = {
    "llama": ("llama", "eager", None, None),
    "experts": ("qwen3_moe", "eager", None, None),
    "nf4": ("llama", "eager", LORA, "nf4"),
    "compiled": ("llama", "compile", None, None),
    "compiled LoRA": ("llama", "compile", LORA, None),
}
MOST = {"eager": 1.1, "compile": 1.4}
"""How far above the truth: of compiled graphs the order is not known."""


def backward(profile: LayerProfile) -> int:
    return profile.backward_bytes


def segment(profile: LayerProfile) -> int:
    return profile.kept_bytes + profile.kept_backward_bytes


@pytest.mark.parametrize("name", CASES)
def test_what_is_counted_is_what_the_allocator_gives_out(name: str) -> None:
    family, kernels, lora, quantize = CASES[name]
    config = tiny_config(family, **SIZES)
    skeleton = cut(build_model(config, DTYPE, "auto"))
    if lora is not None:
        inject_lora(skeleton, lora, "shape")
    if quantize is not None:
        quantize_base(skeleton, quantize, DTYPE)
    layouts = build_layers(skeleton, DTYPE)
    counted = count_layers(skeleton, layouts, Microbatch(ROWS, SEQUENCE, model_shape(config, 2), DTYPE, kernels))
    functions = LayerFunctions(skeleton, torch.device("cuda:0"), DTYPE, kernels)
    meter = LayerMeter(functions, layouts, ROWS, SEQUENCE, config.vocab_size, gauge=BytesAlone())
    contexts = 4 * BytesAlone().run(meter.context)[2]  # of so many microbatches masks and tables are held
    shares = {}
    for layers in layers_by_kind(functions, len(layouts)):
        measured, found = meter.measure(layers[0]), counted[layers[0]]
        print(f"\n{name}, layer {layers[0]}: counted {found}\n  measured {measured}")
        for most, beside in ((backward, contexts), (segment, 0)):
            if most(measured):
                shares[layers[0], most.__name__] = most(found) / (most(measured) + beside)
    print(f"{name}: counted over measured", {key: round(share, 3) for key, share in shares.items()})
    assert all(1 <= share <= MOST[kernels] for share in shares.values()), shares


class BytesAlone(OnDevice):
    """Measures no time, which takes a second a layer."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda:0"))

    def seconds(self, work):
        work()  # makes graphs
        return 0.0
