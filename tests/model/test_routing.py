"""What routers pick in a forward pass is what they pick in its recompute, whatever they would pick by then."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layers import batch_of, functions_of, random_ids, relative_error, zero_sums
from support.models import Loaded, load, skeleton_of, tiny_checkpoint

from rpft.model.adapters import LoraSettings
from rpft.model.graphs import KernelKind
from rpft.model.kept import FromForward
from rpft.model.layers import build_layers

ROUTED = {"qwen3_moe": (2,), "mixtral": (2,), "gpt_oss": (2,), "olmoe": (2,), "deepseek_v3": (2, 1, 2)}
"""Bytes a token of each choice: of two experts; with DeepSeek's, first of two scores a group, and of a group."""

LAYER = 2
ROWS, SEQUENCE, HIDDEN = 2, 16, 64
F32, BF16 = torch.float32, torch.bfloat16

compiled = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"),
]
KERNELS: list[Any] = [
    *(("eager", family) for family in ROUTED),
    *(("trace", family) for family in ("qwen3_moe", "deepseek_v3")),
    *(pytest.param("trace", family, marks=pytest.mark.slow) for family in ("mixtral", "gpt_oss", "olmoe")),
    *(pytest.param("compile", family, marks=compiled) for family in ROUTED),
]


@pytest.fixture(autouse=True, scope="module")
def choices_seen_once() -> None:
    """Here they are looked for anew each time, as in a run."""


@pytest.mark.parametrize("family", ROUTED)
def test_what_a_router_picks_is_found_by_looking_at_the_block(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    skeleton = skeleton_of(tmp_path)
    dense = [()] if family == "deepseek_v3" else []
    assert skeleton.choices == (*dense, *[ROUTED[family]] * (4 - len(dense)))
    embedding, *blocks, head = build_layers(skeleton, F32)
    assert [block.choices for block in blocks] == list(skeleton.choices)
    assert embedding.choices == head.choices == ()
    assert blocks[-1].choice_bytes(1000) == sum(-(-each * 1000 // 256) * 256 for each in ROUTED[family])


def test_a_model_without_experts_picks_nothing_and_many_experts_take_two_bytes(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "dense", "llama")
    assert set(skeleton_of(tmp_path / "dense").choices) == {()}
    tiny_checkpoint(tmp_path / "many", "qwen3_moe", num_experts=300, moe_intermediate_size=8)
    assert set(skeleton_of(tmp_path / "many").choices) == {(4,)}


def test_experts_whose_choice_is_not_seen_are_said_to_be_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in ("qwen3_moe", "qwen3_next"):
        tiny_checkpoint(tmp_path / family, family)
        skeleton_of(tmp_path / family)
    assert "was not seen" not in caplog.text
    monkeypatch.setattr("torch.topk", lambda values, k, dim=-1: values.sort(dim=dim, descending=True))
    assert set(skeleton_of(tmp_path / "qwen3_moe").choices) == {()}
    assert "Qwen3MoeForCausalLM: how a block chooses its experts was not seen" in caplog.text


def random_hidden(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROWS, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def picked_by(loaded: Loaded, hidden: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The indices of every ``torch.topk`` of the block, seen from outside."""
    made, plain = [], torch.topk

    def seen(*args: Any, **kwargs: Any) -> Any:
        made.append(plain(*args, **kwargs))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "topk", seen)
        patch.setattr(torch.Tensor, "topk", seen)
        functions_of(loaded, hidden.dtype).forward(LAYER, hidden, *arguments(loaded), None)
    return [result.indices for result in made]


def arguments(loaded: Loaded) -> tuple[Any, Any]:
    # `data`: as on a worker, a module that sets a weight to itself (peft does) must not count as writing others.
    weights = {name: weight.data for name, weight in loaded.store.layer_weights(LAYER).items()}
    return weights, batch_of(random_ids(ROWS, SEQUENCE))


Gradients = dict[str, torch.Tensor]


def backward(functions: Any, loaded: Loaded, hidden: torch.Tensor, given: Any, with_output: bool) -> Gradients:
    weights, batch = arguments(loaded)
    sums = zero_sums(loaded.store, LAYER)
    _, kept = functions.keep(LAYER, hidden, weights, batch, None, frozenset(sums), True, with_output, given)
    grad_hidden = kept.backward(random_hidden(9, hidden.dtype), sums)
    return {**sums, "hidden": grad_hidden}


def with_choices_of(loaded: Loaded, first: torch.Tensor, hidden: torch.Tensor, patch: Any) -> Gradients:
    """As torch alone gives them, where routers pick for ``hidden`` what they pick for ``first``."""
    fixed = iter(picked_by(loaded, first, patch))

    def again(values: torch.Tensor, *args: Any, dim: int = -1, **kwargs: Any) -> Any:
        indices = next(fixed)
        return torch.return_types.topk((torch.gather(values, dim, indices), indices))

    with patch.context() as changed:
        changed.setattr(torch, "topk", again)
        changed.setattr(torch.Tensor, "topk", again)
        return backward(functions_of(loaded, hidden.dtype), loaded, hidden, None, True)


@pytest.mark.parametrize(("kernels", "family"), KERNELS)
def test_gradients_follow_the_routing_of_the_forward(
    kernels: KernelKind, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recompute is given another hidden state altogether, for which routers would pick other experts."""
    dtype = F32 if kernels == "eager" else BF16
    tiny_checkpoint(tmp_path, family)
    loaded = load(tmp_path, dtype)
    first, second = (random_hidden(seed, dtype) for seed in (1, 2))
    expected = with_choices_of(loaded, first, second, monkeypatch)
    functions = functions_of(loaded, dtype, kernels=kernels)
    weights, batch = arguments(loaded)
    output, parts = functions.forward_keeping(LAYER, first, weights, batch, None, True, 0)
    plain = functions.forward(LAYER, first, weights, batch, None)
    assert torch.equal(output, plain) or kernels == "compile"
    buffer = torch.full(
        (loaded.store.layers[LAYER].layout.choice_bytes(ROWS * SEQUENCE),), 0xFF, dtype=torch.uint8
    )
    for offset, part in parts:
        buffer[offset : offset + part.numel()] = part
    assert 0 < sum(part.numel() for _, part in parts) <= sum(ROUTED[family]) * ROWS * SEQUENCE
    for with_output in (False, True):
        found = backward(functions, loaded, second, FromForward(0, buffer), with_output)
        errors = {name: relative_error(found[name].float(), each.float()) for name, each in expected.items()}
        if kernels == "compile":
            assert max(errors.values()) < 0.05, errors
        else:
            assert max(errors.values()) == 0.0, errors
    others = backward(functions, loaded, second, None, False)
    experts = [name for name in expected if "experts" in name and name.endswith("proj")]
    assert all(relative_error(others[n], expected[n]) > 0.3 for n in experts), "else nothing was tried"


def test_adapters_of_experts_which_torch_runs_itself_follow_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    lora = LoraSettings(4, 8.0, 0.0, [], target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
    loaded = load(tmp_path, F32, lora)
    for name in loaded.store.names():
        if "lora_" in name:
            loaded.store.write(name, 0.1 * torch.randn(loaded.store.tensor(name).shape))
    first, second = (random_hidden(seed, F32) for seed in (1, 2))
    expected = with_choices_of(loaded, first, second, monkeypatch)
    functions = functions_of(loaded, kernels="trace")
    _, parts = functions.forward_keeping(LAYER, first, *arguments(loaded), None, True, 0)
    ((offset, part),) = parts
    assert offset == 0
    found = backward(functions, loaded, second, FromForward(0, part), False)
    assert all(torch.equal(found[name], each) for name, each in expected.items())
