"""A front and groups of experts make what the whole block makes, and experts that cannot be cut off stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import EXPERTS, randomise
from support.layers import (
    batch_of,
    forward_and_backward,
    functions_of,
    put_together,
    random_ids,
    relative_error,
)
from support.models import Loaded, load, skeleton_of
from support.recipes import tiny_tokenizer

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings, initialise_lora
from rpft.model.cut_experts import cut_experts, ever_more_groups, find_stacks
from rpft.model.expert_groups import example_input
from rpft.model.layers import freeze_all, layer_names
from rpft.model.save import save_result
from rpft.model.skeleton import Skeleton

LORA = LoraSettings(4, 8.0, 0.0, ["q_proj", "o_proj", "kv_b_proj"])
ON_EXPERTS = replace(LORA, target_modules=["q_proj"], target_parameters=EXPERTS)
TRAINED: dict[str, LoraSettings | None] = {
    "adapters of attention, router whole": LORA,
    "in full": None,
    "adapters of experts": ON_EXPERTS,
    "adapters of experts by their old names": replace(LORA, target_modules=["w1", "w2", "w3"]),
    "experts whole beside adapters": replace(LORA, modules_to_save=("mlp.experts",)),
}
ROUTER, FULL, ADAPTED, OLD_NAMES, BESIDE = TRAINED
SLOW_FAMILIES = ("qwen3_moe", "olmoe", "qwen3_next")
MADE = [
    *((family, ROUTER) for family in ("mixtral", "gpt_oss", "deepseek_v3")),
    *(("gpt_oss", FULL), ("gpt_oss", ADAPTED), ("mixtral", OLD_NAMES), ("qwen3_moe", BESIDE)),
    *(pytest.param(family, ROUTER, marks=pytest.mark.slow) for family in SLOW_FAMILIES),
    *(pytest.param(family, FULL, marks=pytest.mark.slow) for family in ("mixtral", "deepseek_v3", *SLOW_FAMILIES)),
    *(pytest.param(family, ADAPTED, marks=pytest.mark.slow) for family in ("mixtral", "olmoe", "qwen3_moe")),
]
Checkpoints = Callable[..., Path]


def loaded_in(
    groups: int, folder: Path, dtype: torch.dtype, quantize: Any = None, lora: LoraSettings | None = LORA
) -> Loaded:
    loaded = load(folder, dtype, lora, quantize, groups)
    if lora is not None:
        initialise_lora(loaded.skeleton, loaded.store, 3)
        randomise(loaded)
    return loaded


def many(family: str) -> dict[str, Any]:
    """Eight experts, four of them picked."""
    key = {"deepseek_v3": "n_routed_experts", "mixtral": "num_local_experts", "gpt_oss": "num_local_experts"}
    return {key.get(family, "num_experts"): 8, "num_experts_per_tok": 4}


@pytest.mark.parametrize(("family", "trained"), MADE)
def test_groups_make_what_the_whole_block_makes(family: str, trained: str, checkpoint: Checkpoints) -> None:
    folder, batch, lora = checkpoint(family, **many(family)), batch_of(random_ids()), TRAINED[trained]
    looked_for = ".experts."
    if trained == ROUTER:
        looked_for = "mlp.router" if family == "gpt_oss" else "mlp.gate"
        lora = replace(LORA, modules_to_save=(looked_for,))
    whole = loaded_in(1, folder, torch.float32, lora=lora)
    expected = forward_and_backward(functions_of(whole, train=True), whole.store, batch)
    cut = loaded_in(4, folder, torch.float32, lora=lora)
    blocks = 3 if family == "deepseek_v3" else 4  # whose first block has no experts
    assert len(cut.store.layers) == len(whole.store.layers) + 4 * blocks
    found = forward_and_backward(functions_of(cut, train=True), cut.store, batch)
    assert relative_error(found.loss, expected.loss) < 1e-6
    gradients = put_together(found.gradients, cut.store)
    assert gradients.keys() == expected.gradients.keys()
    assert any(looked_for in name for name in gradients)
    for name, gradient in expected.gradients.items():
        assert relative_error(gradients[name], gradient) < 1e-5, name


@pytest.mark.parametrize(
    ("quantize", "trained"),
    [
        ("nf4", ROUTER),
        *(pytest.param(kind, ROUTER, marks=pytest.mark.slow) for kind in (None, "int8")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((None, FULL), ("nf4", ADAPTED))),
    ],
)
def test_as_graphs_and_quantised_they_are_as_near_as_bfloat16_is(
    quantize: Any, trained: str, checkpoint: Checkpoints
) -> None:
    """Sums of groups are rounded once more: no further from the exact gradient than those of the whole are."""
    folder, batch = checkpoint("qwen3_moe", **many("qwen3_moe")), batch_of(random_ids())

    def gradient(groups: int, dtype: torch.dtype, kernels: Any = "eager") -> torch.Tensor:
        loaded = loaded_in(groups, folder, dtype, quantize, TRAINED[trained])
        passed = forward_and_backward(functions_of(loaded, dtype, True, kernels), loaded.store, batch)
        gradients = put_together(passed.gradients, loaded.store)
        return torch.cat([gradients[name].flatten() for name in sorted(gradients)])

    exact, whole = gradient(1, torch.float32), gradient(1, torch.bfloat16)
    eager, traced = (gradient(4, torch.bfloat16, kernels) for kernels in ("eager", "trace"))
    assert torch.equal(eager, traced)
    assert relative_error(traced, exact) < 1.5 * relative_error(whole, exact)


def test_their_parts_of_the_stacks_are_those_of_the_whole(checkpoint: Checkpoints) -> None:
    folder = checkpoint("qwen3_moe")
    for quantize in (None, "nf4"):
        whole, cut = (load(folder, lora=LORA, quantize=quantize, groups=n).store for n in (1, 2))
        for name in whole.names():
            if ".experts." not in name:
                assert torch.equal(whole.tensor(name), cut.tensor(name)), name
                continue
            base, dot, suffix = name.partition("_proj")
            parts = [cut.tensor(f"{base}{dot}{mark}{suffix}") for mark in ("[0:2]", "[2:4]")]
            stack = whole.tensor(name)
            assert torch.equal(torch.cat(parts) if len(parts[0]) < len(stack) else parts[0], stack), name


@pytest.mark.parametrize(("family", "trained"), [("qwen3_moe", FULL), ("gpt_oss", FULL), ("gpt_oss", ADAPTED)])
def test_what_is_saved_of_groups_is_what_is_saved_of_whole_blocks(
    family: str, trained: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder, lora = checkpoint(family), TRAINED[trained]
    files = []
    for groups in (1, 2):
        loaded, out = loaded_in(groups, folder, torch.bfloat16, lora=lora), tmp_path / str(groups)
        config = loaded.skeleton.model.config
        save_result(out, loaded.skeleton, loaded.store, config, tiny_tokenizer(), loaded.peft_model)
        files.append({path.name: path.read_bytes() for path in out.glob("*.safetensors")})
    assert len(files[0]) == 1
    assert files[0] == files[1]


def test_layers_are_named_by_block_and_experts(checkpoint: Checkpoints) -> None:
    skeleton = load(checkpoint("qwen3_moe"), lora=LORA, groups=2).skeleton
    assert layer_names(skeleton)[:5] == ["embedding", "block 0", "block 0[0:2]", "block 0[2:4]", "block 1"]


def test_an_example_of_what_a_group_is_given_sends_tokens_to_its_experts(checkpoint: Checkpoints) -> None:
    loaded = load(checkpoint("qwen3_moe"), lora=LORA, groups=2)
    functions = functions_of(loaded)
    for layer in (2, 3):
        given = functions.example_input(layer, 2, 8)
        assert given.shape == (2, 8, functions.input_width(layer))
        part = loaded.skeleton.parts[layer - 1]
        weights = loaded.store.layer_weights(layer)
        output = functions.forward(layer, given, weights, batch_of(random_ids(2, 8)), None)
        assert output.shape == (2, 8, functions.input_width(layer + 1))
        nothing = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        without = functions.forward(layer, given, nothing, batch_of(random_ids(2, 8)), None)
        assert not torch.equal(output, without)
        assert example_input(torch.zeros(2, 8, 64), part).shape == given.shape


def frozen(folder: Path) -> Skeleton:
    skeleton = skeleton_of(folder)
    freeze_all(skeleton.model)
    return skeleton


def test_ever_more_groups_are_of_one_size_and_of_two_experts_at_least(checkpoint: Checkpoints) -> None:
    skeleton = frozen(checkpoint("qwen3_moe", num_experts=12))
    assert [each.num_groups for each in ever_more_groups(skeleton, torch.float32)] == [2, 4]
    with pytest.raises(UserError, match=r"cannot be in 5 groups .* possible: 1, 2, 3, 4, 6"):
        cut_experts(skeleton, 5, torch.float32)


def test_a_dense_model_has_nothing_to_cut(checkpoint: Checkpoints) -> None:
    assert list(ever_more_groups(frozen(checkpoint("llama")), torch.float32)) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: block.mlp.experts.register_buffer("more", torch.zeros(1)), "more than weights"),
        (lambda block: block.mlp.register_forward_hook(lambda m, i, output: 2 * output), "aten.mul"),
        (lambda block: block.register_forward_hook(lambda m, i, output: i[0]), "does not depend on them"),
    ],
    ids=["more than weights", "scaled behind", "not used"],
)
def test_experts_that_cannot_be_cut_off_stay_and_that_is_said(
    change: Any, reason: str, checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    skeleton = frozen(checkpoint("qwen3_moe"))
    for block in skeleton.blocks:
        change(block)
    assert find_stacks(skeleton, torch.float32) == (None,) * 4
    (said,) = [record.getMessage() for record in caplog.records if "stay in one layer" in record.getMessage()]
    assert reason in said


def test_experts_that_do_not_skip_what_is_not_theirs_stay(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    skeleton = frozen(checkpoint("qwen3_moe"))
    kind: Any = type(skeleton.blocks[0].get_submodule("mlp.experts"))
    run = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, h, i, w: run(self, h, i.clamp(max=self.num_experts - 1), w))
    assert find_stacks(skeleton, torch.float32) == (None,) * 4
    assert "groups of them do not add up to all" in caplog.text
