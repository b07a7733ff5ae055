"""Bytes of layers that are counted without data, against those that the same layers take with it."""

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
from rpft.plan.count import HeldBytes, Microbatch, count_layers
from rpft.plan.profile import LayerMeter, LayerProfile, layers_by_kind

ROWS, SEQUENCE = 2, 120
SIZES = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 2048, "num_hidden_layers": 2}
LORA = LoraSettings(r=8, alpha=8.0, dropout=0.0, target_modules="all-linear")
DORA = LoraSettings(r=8, alpha=8.0, dropout=0.1, target_modules="all-linear", dora=True)
CASES = {
    "plain": ("llama", "eager", torch.bfloat16, None, None, None, "auto"),
    "packed": ("llama", "eager", torch.float32, None, None, 30, "auto"),
    "scores": ("qwen3", "eager", torch.bfloat16, None, None, None, "eager"),
    "graphs": ("qwen3", "trace", torch.float32, None, None, None, "auto"),
    "dropout": ("llama", "eager", torch.bfloat16, DORA, None, None, "auto"),
    "nf4": ("llama", "eager", torch.bfloat16, LORA, "nf4", None, "auto"),
    "windows": ("gemma3", "eager", torch.bfloat16, None, None, None, "auto"),
    "experts": ("qwen3_moe", "eager", torch.bfloat16, None, None, None, "auto"),
}

SLOW = ("packed", "scores", "windows", "graphs", "dropout", "nf4")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_what_is_counted_is_what_layers_take_as_they_run(name: str) -> None:
    family, kernels, dtype, lora, quantize, row_tokens, attention = CASES[name]
    windows = {"layer_types": ["sliding_attention", "full_attention"]} if name == "windows" else {}
    config = tiny_config(family, **SIZES, **windows)
    skeleton = cut(build_model(config, dtype, attention))
    if lora is not None:
        inject_lora(skeleton, lora, "tiny")
    if quantize is not None:
        quantize_base(skeleton, quantize, dtype)
    layouts = build_layers(skeleton, dtype)
    batch = Microbatch(
        *(ROWS, SEQUENCE, model_shape(config, dtype.itemsize), dtype, kernels),
        on_gpu=False,
        row_tokens=row_tokens,
        dropout=lora is DORA,
    )
    counted = count_layers(skeleton, layouts, batch)
    functions = LayerFunctions(skeleton, torch.device("cpu"), dtype, kernels)
    held = Allocated()
    meter = LayerMeter(
        *(functions, layouts, ROWS, SEQUENCE, config.vocab_size),
        dropout=batch.dropout,
        row_tokens=row_tokens,
        gauge=held,
    )
    contexts = 4 * held.run(meter.context)[2]  # of so many microbatches masks and tables are held
    for layers in layers_by_kind(functions, len(layouts)):
        taken, found = meter.measure(layers[0]), counted[layers[0]]
        for most, beside in ((backward, contexts), (segment, 0)):
            least = most(taken) + beside
            assert least <= most(found) <= 1.1 * least, (layers[0], most.__name__)


def backward(profile: LayerProfile) -> int:
    return profile.backward_bytes


def segment(profile: LayerProfile) -> int:
    return profile.kept_bytes + profile.kept_backward_bytes


class Allocated:
    """What the allocator of the CPU gives out, by torch's own profiler."""

    def seconds(self, work):
        work()  # makes graphs
        return 0.0

    warm = seconds

    def run(self, work):
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = work()
        now = most = 0
        for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                now += event.nbytes()
                most = max(most, now)
        return result, most, now


def test_bytes_count_while_a_tensor_lives_and_views_count_nothing() -> None:
    held = HeldBytes(on_gpu=False)
    given = torch.ones(1000)

    def work() -> torch.Tensor:
        twice = given * 2
        return (twice.view(10, 100) + 1)[0]

    with held:
        result, most, after = held.run(work)
        del result
        assert held.run(lambda: None)[1:] == (0, 0)
    assert (most, after) == (2 * 4096, 4096)


def test_a_layer_that_cannot_run_without_data_is_given_more_than_it_takes(monkeypatch) -> None:
    config = tiny_config("llama", **SIZES)
    skeleton = cut(build_model(config, torch.bfloat16, "auto"))
    layouts = build_layers(skeleton, torch.bfloat16)
    batch = Microbatch(ROWS, SEQUENCE + 8, model_shape(config, 2), torch.bfloat16)
    counted = count_layers(skeleton, layouts, batch)

    def fail(meter: LayerMeter, layer: int) -> LayerProfile:
        raise RuntimeError("depends on a value")

    monkeypatch.setattr(LayerMeter, "measure", fail)
    monkeypatch.setattr("rpft.plan.count._counted", {})
    for less, more in zip(counted, count_layers(skeleton, layouts, batch), strict=True):
        assert backward(less) <= backward(more)
        assert segment(less) <= segment(more)
