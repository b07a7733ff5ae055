"""What a run leaves behind loads in transformers with equal logits, and replaces an older folder whole."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.layers import logits_of, random_ids, relative_error
from support.models import FAMILIES, MORE_FAMILIES, Loaded, load, tiny_checkpoint, tiny_model
from transformers import AutoModelForCausalLM

from rpft.model.adapters import LoraSettings, initialise_lora
from rpft.model.checkpoint import read_config
from rpft.model.save import save_model, save_result

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Tokenizer:
    """Stands in for a tokenizer: writes one file."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


class BrokenTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        raise OSError("disk full")


def changed(folder: Path, dtype: torch.dtype = torch.float32) -> Loaded:
    """The checkpoint in ``folder`` with every weight moved, as training would."""
    loaded = load(folder, dtype)
    generator = torch.Generator().manual_seed(4)
    for layer in loaded.store.layers:
        for spec, _ in layer.layout.own.values():
            if spec.trained:
                tensor = loaded.store.tensor(spec.name)
                loaded.store.write(spec.name, tensor + 0.05 * torch.randn(spec.shape, generator=generator))
    return loaded


def save(loaded: Loaded, base: Path, folder: Path, **settings: int) -> Path:
    folder.mkdir()
    save_model(loaded.skeleton, loaded.store, read_config(base), folder, **settings)
    return folder


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_a_saved_model_gives_equal_logits_in_transformers(family: str, tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", family)
    loaded = changed(tmp_path / "base")
    folder = save(loaded, tmp_path / "base", tmp_path / "saved")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model) is type(base)
    ids = random_ids()
    theirs = model.eval()(input_ids=ids).logits
    assert relative_error(logits_of(loaded, ids), theirs) < 1e-5
    assert relative_error(theirs, base.eval()(input_ids=ids).logits) > 0.01


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_the_file_has_the_names_shapes_and_dtypes_that_the_checkpoint_had(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", family)
    folder = save(load(tmp_path / "base"), tmp_path / "base", tmp_path / "saved")
    before, after = load_file(tmp_path / "base" / SINGLE), load_file(folder / SINGLE)
    assert set(after) == set(before)
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "gpt2", "gemma2", "cohere"])
def test_a_tied_head_is_not_in_the_file(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", family)
    folder = save(changed(tmp_path / "base"), tmp_path / "base", tmp_path / "saved")
    assert "lm_head.weight" not in load_file(folder / SINGLE)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_small_shards_come_with_an_index_that_names_every_tensor(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", family)
    loaded = changed(tmp_path / "base")
    folder = save(loaded, tmp_path / "base", tmp_path / "saved", shard_bytes=150_000)
    shards = sorted(folder.glob("*.safetensors"))
    count = len(shards)
    assert count > 2
    assert [s.name for s in shards] == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    index = json.loads((folder / INDEX).read_text())
    tensors = {name: (shard.name, t) for shard in shards for name, t in load_file(shard).items()}
    assert index["weight_map"] == {name: shard for name, (shard, _) in tensors.items()}
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for _, t in tensors.values())
    for shard in shards:
        sizes = [tensor.numel() * 4 for name, tensor in tensors.values() if name == shard.name]
        assert len(sizes) == 1 or sum(sizes) <= 150_000
    ids = random_ids()
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=ids).logits
    assert relative_error(logits_of(loaded, ids), theirs) < 1e-5
    again = load(folder).store
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(again.layers, loaded.store.layers, strict=True))


def test_a_bf16_run_is_saved_in_bf16(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "llama")
    loaded = changed(tmp_path / "base", torch.bfloat16)
    folder = save(loaded, tmp_path / "base", tmp_path / "saved")
    assert {t.dtype for t in load_file(folder / SINGLE).values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_config_is_the_checkpoint_s(use_cache: bool, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "mixtral", use_cache=use_cache, output_router_logits=True)
    folder = save(load(tmp_path / "base"), tmp_path / "base", tmp_path / "saved")
    before, after = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "base", folder))
    assert after["use_cache"] == use_cache
    assert {k: v for k, v in after.items() if k != "transformers_version"} == {
        k: v for k, v in before.items() if k != "transformers_version"
    }


def test_the_generation_config_is_the_checkpoint_s(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(tmp_path / "base")
    folder = save(load(tmp_path / "base"), tmp_path / "base", tmp_path / "saved")
    after = json.loads((folder / "generation_config.json").read_text())
    assert (after["temperature"], after["do_sample"], after["eos_token_id"]) == (0.7, True, [2, 5])
    assert after.get("use_cache", True)


def test_a_result_replaces_an_older_folder_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "llama")
    loaded = changed(tmp_path / "base")
    config = read_config(tmp_path / "base")
    out = tmp_path / "out"
    target = out / "model"
    for leftover in ("model", "model.partial", "model.old"):
        (out / leftover).mkdir(parents=True)
        (out / leftover / "stale.safetensors").write_text("old")
    save_result(target, loaded.skeleton, loaded.store, config, Tokenizer(), None)
    assert [path.name for path in out.iterdir()] == ["model"]
    names = {path.name for path in target.iterdir()}
    assert {"config.json", SINGLE, "tokenizer.json"} <= names
    assert "stale.safetensors" not in names


def test_a_save_that_fails_leaves_the_older_result_whole(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "llama")
    loaded = load(tmp_path / "base")
    config = read_config(tmp_path / "base")
    target = tmp_path / "model"
    save_result(target, loaded.skeleton, loaded.store, config, Tokenizer(), None)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(OSError, match="disk full"):
        save_result(target, loaded.skeleton, loaded.store, config, BrokenTokenizer(), None)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize("lora", [None, LoraSettings(4, 8.0, 0.0, ["q_proj"])], ids=["full", "LoRA"])
def test_a_disk_that_takes_no_more_is_an_error_of_the_disk_and_leaves_nothing(lora: Any, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "llama")
    loaded = load(tmp_path / "base", lora=lora)
    config = read_config(tmp_path / "base")
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # of a file; as full a disk as a test can have
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as caught:
            save_result(out / "model", loaded.skeleton, loaded.store, config, Tokenizer(), loaded.peft_model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert list(out.iterdir()) == []


def test_the_result_of_an_adapter_is_an_adapter(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "llama")
    loaded = load(tmp_path / "base", lora=LoraSettings(4, 8.0, 0.0, ["q_proj"]))
    initialise_lora(loaded.skeleton, loaded.store, 1)
    config = read_config(tmp_path / "base")
    target = tmp_path / "out" / "adapter"
    save_result(target, loaded.skeleton, loaded.store, config, Tokenizer(), loaded.peft_model)
    names = {path.name for path in target.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not names & {SINGLE, "config.json"}
