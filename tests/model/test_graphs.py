"""Layers that run as graphs give the bits of eager ones; compiled, the same numbers but for rounding."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layers import Passed, batch_of, forward_and_backward, functions_of, random_ids, relative_error
from support.models import FAMILIES, MORE_FAMILIES, Loaded, load, tiny_checkpoint

from rpft.model.adapters import LoraSettings, initialise_lora
from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.graphs import Kernels, Untraceable
from rpft.model.head import HEAD_CHUNK_TOKENS
from rpft.model.joint_graph import JointGraph
from rpft.model.kept import FromForward

CPU = torch.device("cpu")
EXPERTS = {"qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "olmoe", "deepseek_v3"}
"""Families whose products of experts are one operation, hence traceable, in bfloat16 only."""

LORA = LoraSettings(4, 8.0, 0.2, ["q_proj", "down_proj", "c_attn", "c_proj"])
SOME_BLOCKS = LoraSettings(4, 8.0, 0.2, r".*layers\.1\..*(q_proj|down_proj)")
ATTENTION = LoraSettings(4, 8.0, 0.2, ["q_proj", "v_proj"])
ADAPTERS = {
    "llama": ("llama", torch.float32, LORA),
    "gpt2, with dropout of its own": ("gpt2", torch.float32, LORA),
    "gemma2, some blocks": ("gemma2", torch.float32, SOME_BLOCKS),
    "qwen3_moe, attention": ("qwen3_moe", torch.bfloat16, ATTENTION),
}


def dtype_of(family: str) -> torch.dtype:
    return torch.bfloat16 if family in EXPERTS else torch.float32


def made(
    folder: Path, family: str, dtype: torch.dtype, lora: LoraSettings | None = None, **changes: Any
) -> Loaded:
    """A tiny model in a store, with an adapter that has learnt something."""
    tiny_checkpoint(folder, family, **changes)
    loaded = load(folder, dtype, lora)
    if lora is not None:
        initialise_lora(loaded.skeleton, loaded.store, seed=1)
        for name in loaded.store.names():
            if "lora_B" in name:  # zero at first, which would hide what dropout does
                loaded.store.write(name, 0.02 * torch.randn(loaded.store.tensor(name).shape))
    return loaded


def check_same_bits(ours: Passed, theirs: Passed) -> None:
    assert torch.equal(ours.loss, theirs.loss)
    different = [n for n, g in theirs.gradients.items() if not torch.equal(ours.gradients[n], g)]
    assert different == []


def num_graphs(functions: LayerFunctions, name: str = "") -> int:
    known = functions._block_kinds[0]._kernels._made
    return sum(1 for key in known if not name or key[0] == name)


WRITES_INSIDE = "falcon"
"""A block that writes into its own results."""

ALIKE = {"llama_tied", "qwen2", "mistral", "olmo2", "mixtral", "gpt_oss", "gpt_neox"}
"""Whose blocks are made of about the same operations as another family's."""

QUICK = [*(family for family in FAMILIES if family not in ALIKE), WRITES_INSIDE]
OTHERS = [family for family in (*FAMILIES, *MORE_FAMILIES) if family not in QUICK]
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in OTHERS]


@pytest.mark.parametrize("family", [*QUICK, *SLOW])
def test_traced_layers_give_the_bits_of_eager_ones_for_tokens_that_they_were_not_traced_with(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = dtype_of(family)
    loaded = made(tmp_path, family, dtype)
    eager, traced = (functions_of(loaded, dtype, kernels=kind) for kind in ("eager", "trace"))
    batches = [batch_of(random_ids(2, 13, seed=seed), skip=3) for seed in range(2)]
    for batch in batches:
        expected = forward_and_backward(eager, loaded.store, batch)
        for with_output in (False, True):
            check_same_bits(forward_and_backward(traced, loaded.store, batch, None, with_output), expected)
        if batch is batches[0]:
            before = num_graphs(traced)
    assert num_graphs(traced) == before, "other tokens need no other graph"
    undone = {r.message for r in caplog.records if "cannot be traced" in r.message}
    assert undone == set()
    signatures = [[call.signature for call in f.context(batches[0])] for f in (eager, traced)]
    assert signatures[0] == signatures[1], "what decides a graph is the same in every run"


@pytest.mark.parametrize("name", ADAPTERS)
def test_traced_adapters_draw_the_dropout_of_eager_ones_and_one_graph_serves_all_draws(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, dtype, lora = ADAPTERS[name]
    loaded = made(tmp_path, family, dtype, lora)
    eager, traced = (functions_of(loaded, dtype, train=True, kernels=kind) for kind in ("eager", "trace"))
    batch, losses, counts = batch_of(random_ids()), [], []
    for key in (5, 6):
        expected = forward_and_backward(eager, loaded.store, batch, key)
        check_same_bits(forward_and_backward(traced, loaded.store, batch, key, key == 6), expected)
        forward_and_backward(traced, loaded.store, batch, key, key == 5)
        losses.append(expected.loss)
        counts.append(num_graphs(traced))
    assert not torch.equal(*losses)
    assert counts[0] == counts[1]
    assert "cannot be traced" not in caplog.text


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phi3", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attention_dropout": 0.3}),
        pytest.param("falcon", {"hidden_dropout": 0.3, "attention_dropout": 0.3}, marks=pytest.mark.slow),
        pytest.param("opt", {"dropout": 0.3, "attention_dropout": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_traced_blocks_with_dropout_give_the_bits_of_eager_ones(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    loaded = made(tmp_path, family, torch.float32, **changes)
    batch = batch_of(random_ids(1, 16))
    for train in (True, False):
        eager, traced = (functions_of(loaded, train=train, kernels=kind) for kind in ("eager", "trace"))
        expected = forward_and_backward(eager, loaded.store, batch, 5)
        check_same_bits(forward_and_backward(traced, loaded.store, batch, 5), expected)


def test_switching_dropout_off_and_on_changes_the_graph_that_runs(tmp_path: Path) -> None:
    loaded = made(tmp_path, "gpt2", torch.float32)
    eager, traced = (functions_of(loaded, kernels=kind) for kind in ("eager", "trace"))
    batch = batch_of(random_ids())
    for mode in (True, False, True):
        eager.train(mode)
        traced.train(mode)
        expected = forward_and_backward(eager, loaded.store, batch, 5)
        check_same_bits(forward_and_backward(traced, loaded.store, batch, 5), expected)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_packs_share_graphs_and_get_each_its_own_mask(family: str, tmp_path: Path) -> None:
    loaded = made(tmp_path, family, torch.float32)
    eager, traced = (functions_of(loaded, kernels=kind) for kind in ("eager", "trace"))
    ids, counts, losses = random_ids(1, 16), [], []
    for first in (3, 9, 12):
        positions = torch.cat([torch.arange(first), torch.arange(16 - first)]).unsqueeze(0)
        batch = batch_of(ids, positions=positions)
        expected = forward_and_backward(eager, loaded.store, batch)
        check_same_bits(forward_and_backward(traced, loaded.store, batch), expected)
        counts.append(num_graphs(traced))
        losses.append(expected.loss.item())
    whole = batch_of(ids)
    check_same_bits(
        forward_and_backward(traced, loaded.store, whole), forward_and_backward(eager, loaded.store, whole)
    )
    assert len(set(losses)) == 3
    assert counts == [counts[0]] * 3


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3_moe"])
def test_whatever_a_forward_keeps_the_gradients_have_the_same_bits(family: str, tmp_path: Path) -> None:
    dtype = dtype_of(family)
    loaded = made(tmp_path, family, dtype)
    functions, batch = functions_of(loaded, dtype, train=True, kernels="trace"), batch_of(random_ids())
    hidden, grad = (torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    weights = loaded.store.layer_weights(1)

    choices = loaded.store.layers[1].layout.choice_bytes(32)

    def gradients(budget: int | None, with_output: bool = False) -> tuple[int, list[torch.Tensor]]:
        sums = {name: torch.zeros(w.shape) for name, w in weights.items()}
        size = 0
        if budget is None:
            _, kept = functions.keep(1, hidden, weights, batch, 5, frozenset(sums), True, with_output)
        else:
            _, parts = functions.forward_keeping(1, hidden, weights, batch, 5, True, budget)
            buffer = torch.full((budget + choices,), 0xFF, dtype=torch.uint8)
            for offset, part in parts:
                buffer[offset : offset + part.numel()] = part
            size = sum(part.numel() for _, part in parts)
            given = FromForward(budget, buffer)
            _, kept = functions.keep(1, hidden, weights, batch, 5, frozenset(sums), True, with_output, given)
        grad_hidden = kept.backward(grad, sums)
        assert grad_hidden is not None
        return size, [grad_hidden, *sums.values()]

    _, expected = gradients(None)
    sizes = []
    for budget in (8 << 10, 16 << 10, 1 << 20):
        size, found = gradients(budget)
        sizes.append(size)
        assert size <= budget + choices
        _, apart = gradients(budget, with_output=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(apart, expected, strict=True))
    assert 0 < sizes[0] < sizes[-1], "else nothing was tried"


def test_a_microbatch_without_trained_tokens_has_gradients_of_zero(tmp_path: Path) -> None:
    loaded = made(tmp_path, "llama_tied", torch.float32)
    batch = batch_of(random_ids(), skip=15)
    assert batch.targets.numel() == 0
    passed = forward_and_backward(functions_of(loaded, kernels="trace"), loaded.store, batch)
    assert passed.loss == 0
    assert passed.gradients
    assert not any(gradient.any() for gradient in passed.gradients.values())


def test_any_number_of_trained_tokens_needs_few_graphs_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpft.model.head._SMALLEST_CHUNK_TOKENS", 4)
    monkeypatch.setitem(HEAD_CHUNK_TOKENS, "trace", 16)
    loaded = made(tmp_path, "gemma2", torch.float32)
    eager, traced = (functions_of(loaded, kernels=kind) for kind in ("eager", "trace"))
    ids = random_ids(2, 24)
    for count in (1, 3, 4, 5, 9, 16, 17, 40):
        at = torch.arange(count)
        batch = DeviceBatch(ids, None, at, ids.flatten()[at + 1])
        ours, theirs = (forward_and_backward(f, loaded.store, batch) for f in (traced, eager))
        assert relative_error(ours.loss, theirs.loss) < 1e-6
        errors = {n: relative_error(ours.gradients[n], g) for n, g in theirs.gradients.items()}
        assert max(errors.values()) < 1e-5, errors
    assert num_graphs(traced, "the loss and its gradient") == 3, "4, 8 and 16 tokens"


# ---- graphs themselves


def test_what_a_function_writes_into_tensors_of_its_own_does_not_tie_its_graph_together() -> None:
    def function(x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = x * 2
        own[:, 1:].mul_(3).add_(x[:, 1:])
        own[torch.tensor([0, 2])] = 1.0
        total.add_(own.sum(0))
        return (own.exp(),)

    kernels, x = Kernels("trace", CPU), torch.randn(3, 4)
    module = kernels.trace(function, [x, torch.zeros(4)])
    nodes = list(module.graph.nodes)
    written = [node for node in nodes if node.op == "call_function" and node.target._schema.is_mutable]
    assert [(str(node.target), node.args[0]) for node in written] == [("aten.add_.Tensor", nodes[1])]
    ours, theirs = torch.ones(4), torch.ones(4)
    assert torch.equal(module(x, ours)[0], function(x, theirs)[0])
    assert torch.equal(ours, theirs)


def test_a_graph_that_writes_into_its_data_is_refused_as_a_block() -> None:
    def function(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.add_(1), grad * 2

    module = Kernels("trace", CPU).trace(function, [torch.randn(3), torch.randn(3)])
    with pytest.raises(Untraceable, match="writes into a tensor of the model"):
        JointGraph(module, num_data=1)


def test_tensors_that_lie_otherwise_get_a_graph_of_their_own() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * x.stride(0) + x.flatten().view(x.shape),)

    kernels, x = Kernels("trace", CPU), torch.randn(4, 4)
    for tensor in (x, x.t(), x):
        assert torch.equal(kernels.call("f", (), function, [tensor], 1)[0], function(tensor)[0])


def test_an_operation_whose_result_lies_otherwise_than_torchs_rules_tell_is_followed() -> None:
    """The kernel's strides are those of the gradient, the rule's those of the input."""

    def function(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.ops.aten.softplus_backward(grad, x, 1.0, 20.0).reshape(24),)

    kernels, grad, x = Kernels("trace", CPU), torch.randn(6, 4).t(), torch.randn(4, 6)
    assert torch.equal(kernels.call("f", (), function, [grad, x], 2)[0], function(grad, x)[0])


def test_what_depends_on_values_is_run_by_torch_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x[x > 0] * 2,)

    kernels = Kernels("trace", CPU)
    for size in (4, 5, 4):
        x = torch.randn(size)
        assert torch.equal(kernels.call("f", (), function, [x], 1)[0], function(x)[0])
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_without_memory_to_try_kernels_they_are_tried_when_they_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compile_once_memory_is_spared(module: Any, tensors: Any, **settings: Any) -> Any:
        asked.append(settings.get("options"))
        if len(asked) == 1:
            raise RuntimeError("Failed to run autotuning code block: CUDA out of memory.")
        return module

    monkeypatch.setattr("torch._inductor.standalone_compile", compile_once_memory_is_spared)
    kernels = Kernels("compile", torch.device("cpu"))
    (result,) = kernels.call("f", "key", lambda a: (a + 1,), [torch.ones(2)], 1)
    assert result.tolist() == [2.0, 2.0]
    assert asked == [None, {"config_patches": {"triton.autotune_at_compile_time": False}}]


def test_many_threads_that_meet_a_key_at_once_make_one_graph() -> None:
    kernels, made_by, found = Kernels("trace", CPU), [], []
    barrier = threading.Barrier(8)

    def meet() -> None:
        barrier.wait(10.0)
        found.append(kernels.once("key", lambda: made_by.append(threading.get_ident()) or object()))

    threads = [threading.Thread(target=meet) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert len(made_by) == 1
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


# ---- compiled

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler for CPU kernels"
)


def check_close(ours: Passed, theirs: Passed, tolerance: float) -> None:
    assert relative_error(ours.loss, theirs.loss) < tolerance
    errors = {n: relative_error(ours.gradients[n].float(), g.float()) for n, g in theirs.gradients.items()}
    assert max(errors.values()) < tolerance, errors


ALL_EXPERTS = {"num_experts_per_tok": 4}
"""Else a rounding that sends one token to another expert is all that shows."""

COMPILED: dict[str, tuple[str, torch.dtype, LoraSettings | None, dict[str, Any], float]] = {
    "llama, LoRA": ("llama", torch.float32, LORA, {}, 1e-5),
    "llama, LoRA, bfloat16": ("llama", torch.bfloat16, LORA, {}, 4e-2),
    "gpt2 with dropout": ("gpt2", torch.float32, None, {}, 1e-5),
    "gemma2, LoRA on some blocks": ("gemma2", torch.float32, SOME_BLOCKS, {}, 1e-5),
    "falcon": ("falcon", torch.float32, None, {}, 1e-5),
    "qwen3_moe, bfloat16": ("qwen3_moe", torch.bfloat16, None, ALL_EXPERTS, 4e-2),
    "gpt_oss, bfloat16": ("gpt_oss", torch.bfloat16, None, ALL_EXPERTS, 4e-2),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_give_the_numbers_of_eager_ones_but_for_rounding(name: str, tmp_path: Path) -> None:
    family, dtype, lora, changes, tolerance = COMPILED[name]
    loaded = made(tmp_path, family, dtype, lora, **changes)
    eager, compiled = (functions_of(loaded, dtype, train=True, kernels=kind) for kind in ("eager", "compile"))
    for seed in range(2):
        batch = batch_of(random_ids(2, 13, seed=seed))
        expected = forward_and_backward(eager, loaded.store, batch, 5)
        for with_output in (False, True):
            check_close(forward_and_backward(compiled, loaded.store, batch, 5, with_output), expected, tolerance)
