"""LoRA starts as the base model, trains nothing else, and loads in peft with the logits that rpft computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.layers import batch_of, forward_and_backward, functions_of, logits_of, random_ids, relative_error
from support.models import Loaded, load, tiny_checkpoint
from transformers import AutoModelForCausalLM

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings, initialise_lora, save_lora

FAMILIES = ["llama", "llama_tied", "qwen2", "gpt2", "phi3", "qwen3_moe", "gemma3", "falcon"]
LORA = LoraSettings(r=4, alpha=8.0, dropout=0.0, target_modules="all-linear")
NAMED = LoraSettings(r=4, alpha=8.0, dropout=0.0, target_modules=["q_proj", "v_proj"])


def load_lora(
    folder: Path, settings: LoraSettings = LORA, seed: int = 3, dtype: torch.dtype = torch.float32
) -> Loaded:
    loaded = load(folder, dtype, settings)
    initialise_lora(loaded.skeleton, loaded.store, seed)
    return loaded


def trained_names(loaded: Loaded) -> list[str]:
    return [spec.name for layer in loaded.store.layers for spec, _ in layer.layout.own.values() if spec.trained]


def randomise(loaded: Loaded) -> None:
    """Gives every adapter weight a random value, as training would."""
    generator = torch.Generator().manual_seed(8)
    for name in trained_names(loaded):
        loaded.store.write(name, 0.1 * torch.randn(loaded.store.tensor(name).shape, generator=generator))


def save(loaded: Loaded, folder: Path) -> Path:
    folder.mkdir()
    save_lora(loaded.peft_model, loaded.store, folder)
    return folder


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
