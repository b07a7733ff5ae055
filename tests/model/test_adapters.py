"""LoRA starts as the base model, trains nothing else, and loads in peft with the logits that rpft computed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.adapters import EXPERTS, KINDS, LORA, load_lora, randomise, save, trained_names
from support.layers import batch_of, forward_and_backward, functions_of, logits_of, random_ids, relative_error
from support.models import load, tiny_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings, initialise_lora, names_in_file
from rpft.model.graphs import KernelKind

FAMILIES = ["llama", "llama_tied", "qwen2", "gpt2", "phi3", "qwen3_moe", "gemma3", "falcon"]
NAMED = LoraSettings(r=4, alpha=8.0, dropout=0.0, target_modules=["q_proj", "v_proj"])


class Products(TorchDispatchMode):
    """Notes the multiplications of every matrix product that is run."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.sizes.append(args[0].shape[0] * args[0].shape[1] * args[1].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_output_is_the_base_model_s_and_only_adapters_are_trained(family: str, tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path, family).eval()
    loaded = load_lora(tmp_path)
    ids = random_ids()
    assert relative_error(logits_of(loaded, ids), base(input_ids=ids).logits) < 1e-5
    names = trained_names(loaded)
    assert names
    assert all("lora_" in name for name in names)
    assert all(loaded.store.tensor(name).any() == ("lora_A" in name) for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_adapter_gives_the_same_logits_in_peft(family: str, tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", family)
    ids = random_ids()
    plain = base.eval()(input_ids=ids).logits
    loaded = load_lora(tmp_path / "base")
    randomise(loaded)
    folder = save(loaded, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(model, str(folder)).eval()(input_ids=ids).logits
    assert relative_error(logits_of(loaded, ids), theirs) < 1e-5
    assert relative_error(theirs, plain) > 0.01


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if number % 2 else pytest.mark.slow) for number, kind in enumerate(KINDS)]
)
def test_every_kind_of_adapter_starts_as_the_base_model_and_loads_in_peft(kind: str, tmp_path: Path) -> None:
    family, changes = KINDS[kind]
    base = tiny_checkpoint(tmp_path / "base", family).eval()
    ids = random_ids()
    loaded = load_lora(tmp_path / "base", replace(LORA, **changes))
    assert relative_error(logits_of(loaded, ids), base(input_ids=ids).logits) < 1e-5
    randomise(loaded)
    folder = save(loaded, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(model, str(folder)).eval()(input_ids=ids).logits
    assert relative_error(logits_of(loaded, ids), theirs) < 1e-5
    assert relative_error(theirs, base(input_ids=ids).logits) > 0.01
    names = names_in_file(loaded.peft_model, [layer.layout for layer in loaded.store.layers])
    stored = load_file(folder / "adapter_model.safetensors")
    assert names.keys() >= set(trained_names(loaded))
    assert all(torch.equal(stored[names[name]], loaded.store.tensor(name)) for name in trained_names(loaded))


def test_a_module_that_is_trained_whole_is_held_once_and_starts_exactly(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path, "llama")
    loaded = load_lora(tmp_path, replace(NAMED, modules_to_save=("embed_tokens",)), dtype=torch.bfloat16)
    names = [name for name in loaded.store.names() if "embed_tokens" in name]
    assert names == ["model.embed_tokens.modules_to_save.default.weight"]
    assert torch.allclose(loaded.store.master(names[0]), base.model.embed_tokens.weight, rtol=1e-6)


def test_a_module_to_save_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(UserError, match=r"adapter\.modules_to_save .*'wte'"):
        load(tmp_path, lora=replace(NAMED, modules_to_save=("wte",)))


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, {"dora": True}], ids=str)
def test_dropout_and_dora_of_layers_that_are_experts_are_refused(settings: Any, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(UserError, match=r"adapter\.target_modules 'all-linear'.*set adapter\.dropout to 0 and"):
        load_lora(tmp_path, replace(LORA, **settings))


def test_fused_gate_and_up_of_experts_have_twice_the_rank_and_peft_s_wrong_warning_is_not_told(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """It says that their rank is ignored, since it looks for them among modules; they are parameters."""
    config = tiny_checkpoint(tmp_path, "qwen3_moe").config
    store = load_lora(tmp_path, LoraSettings(4, 8.0, 0.0, ["gate_proj", "up_proj", "down_proj"])).store
    assert not [str(warning.message) for warning in recwarn if "pattern" in str(warning.message)]
    stacks = [name for name in store.names() if ".experts." in name and "lora_A" in name]
    assert {len(store.tensor(name)) // config.num_experts for name in stacks} == {4, 8}


def test_parameters_that_match_nothing_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(UserError, match=r"adapter\.target_modules \[\], target_parameters \['mlp\.experts"):
        load(tmp_path, lora=replace(NAMED, target_modules=[], target_parameters=EXPERTS))


@pytest.mark.parametrize("kernels", ["eager", "trace"])
def test_the_backward_of_a_frozen_block_computes_no_weight_gradient(kernels: KernelKind, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    loaded = load_lora(tmp_path, LoraSettings(4, 8.0, 0.0, r"model\.layers\.1\..*_proj"))
    functions, batch = functions_of(loaded, kernels=kernels), batch_of(random_ids())
    weights = loaded.store.layer_weights(4)  # block 3, frozen, above block 1, which is trained
    hidden, grad = torch.randn(2, *batch.input_ids.shape, 64)
    for _ in range(2):  # graphs are made in the first
        with Products() as forward:
            functions.forward(4, hidden, weights, batch, None)
        with Products() as backward:
            _, kept = functions.keep(4, hidden, weights, batch, None, frozenset(), True, True)
            assert kept.backward(grad, {}) is not None
    assert len(forward.sizes) == 7
    assert sum(backward.sizes) == 2 * sum(forward.sizes)  # the forward again and the hidden state's gradient alone


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "phi3"])
def test_gradients_of_adapters_are_those_of_peft(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", family)
    loaded = load_lora(tmp_path / "base")
    randomise(loaded)
    folder = save(loaded, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(model, str(folder), is_trainable=True).eval()
    batch = batch_of(random_ids())
    logits = theirs(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.trained_at]
    torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum").backward()
    ours = forward_and_backward(functions_of(loaded), loaded.store, batch).gradients
    expected = {
        name.removeprefix("base_model.model."): p.grad
        for name, p in theirs.named_parameters()
        if p.grad is not None
    }
    assert set(ours) == set(expected) == set(trained_names(loaded))
    assert max(relative_error(ours[name], expected[name]) for name in ours) < 1e-5


def test_the_adapter_s_files_hold_adapter_tensors_alone_and_name_the_base(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "qwen2")
    folder = save(load_lora(tmp_path / "base", NAMED), tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 4 * 2 * 2
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in tensors)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert not any(path.suffix == ".bin" for path in folder.iterdir())


def test_first_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")

    def first_weights(seed: int, noise: int, settings: LoraSettings = LORA) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        loaded = load_lora(tmp_path, settings, seed)
        return {name: loaded.store.tensor(name) for name in trained_names(loaded) if "lora_A" in name}

    one, again, other = first_weights(3, 0), first_weights(3, 1), first_weights(4, 0)
    assert all(torch.equal(weight, again[name]) for name, weight in one.items())
    assert not any(torch.equal(weight, other[name]) for name, weight in one.items())
    weights = list(one.values())
    alike = [(i, j) for i in range(len(weights)) for j in range(i) if torch.equal(weights[i], weights[j])]
    assert not alike


def test_initialising_leaves_the_random_state_and_no_weight_in_the_model(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    loaded = load(tmp_path, lora=LoraSettings(4, 8.0, 0.0, ["q_proj", "embed_tokens"]))
    state = torch.get_rng_state()
    trainable = [n for n, p in loaded.skeleton.model.named_parameters() if p.requires_grad]
    initialise_lora(loaded.skeleton, loaded.store, 3)
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.is_meta for parameter in loaded.skeleton.model.parameters())
    assert trainable == [n for n, p in loaded.skeleton.model.named_parameters() if p.requires_grad]


def test_masters_of_a_bf16_adapter_start_at_its_working_weights(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    loaded = load_lora(tmp_path, dtype=torch.bfloat16)
    for name in trained_names(loaded):
        master = loaded.store.master(name)
        assert torch.equal(master.bfloat16(), loaded.store.tensor(name)), name


@pytest.mark.parametrize("targets", [["no_such_module"], r".*\.no_such_module", "no_such_module"])
def test_targets_that_match_nothing_are_refused(targets: str | list[str], tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(UserError, match=r"adapter\.target_modules .*no_such_module"):
        load(tmp_path, lora=LoraSettings(4, 8.0, 0.0, targets))


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (["q_proj", "down_proj"], {f"{i}.{m}" for i in range(4) for m in ("self_attn.q_proj", "mlp.down_proj")}),
        (r".*layers\.[02]\.self_attn\.(k|v)_proj", {f"{i}.self_attn.{m}_proj" for i in (0, 2) for m in "kv"}),
        (["layers.3.mlp.up_proj"], {"3.mlp.up_proj"}),
    ],
    ids=["list", "regular expression", "full names"],
)
def test_lists_and_regular_expressions_pick_modules(
    targets: str | list[str], modules: set[str], tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, "llama")
    names = trained_names(load(tmp_path, lora=LoraSettings(4, 8.0, 0.0, targets)))
    assert {name.removeprefix("model.layers.").partition(".lora_")[0] for name in names} == modules


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["embed_tokens"]),
        ("llama", ["embed_tokens", "lm_head", "o_proj"]),
        ("llama_tied", ["embed_tokens", "o_proj"]),
        ("gpt2", ["wte", "wpe", "c_attn"]),
    ],
)
def test_adapters_on_the_embedding_and_the_head_give_the_logits_of_peft(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path / "base", family)
    loaded = load_lora(tmp_path / "base", LoraSettings(4, 8.0, 0.0, targets))
    randomise(loaded)
    folder = save(loaded, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = random_ids()
    theirs = PeftModel.from_pretrained(model, str(folder)).eval()(input_ids=ids).logits
    assert relative_error(logits_of(loaded, ids), theirs) < 1e-5
    assert forward_and_backward(functions_of(loaded), loaded.store, batch_of(ids)).gradients.keys() == set(
        trained_names(loaded)
    )


def test_dropout_of_adapters_is_placed_like_any_other(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    loaded = load_lora(tmp_path, LoraSettings(4, 8.0, 0.5, "all-linear"))
    randomise(loaded)
    batch = batch_of(random_ids())
    losses = []
    for key, noise in ((1, 0), (1, 1), (2, 0)):
        torch.manual_seed(noise)
        losses.append(forward_and_backward(functions_of(loaded, train=True), loaded.store, batch, key).loss)
    assert losses[0] == losses[1] != losses[2]
