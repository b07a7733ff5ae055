"""Checkpoints in FP8 and MXFP4 load as the plain ones that hold their values, in whatever form these are kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import load, tiny_checkpoint
from support.recipes import make_project, run_rpft
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings

FILE = "model.safetensors"
LORA = LoraSettings(4, 8.0, 0.0, ["o_proj"])
BLOCK = [32, 48]
"""No dimension of the tiny models but some is a multiple of both."""

Pair = tuple[Path, Path]
"""A checkpoint in FP8 or MXFP4, and the plain one of the same values."""


def write(folder: Path, base: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> Path:
    shutil.copytree(base, folder)
    save_file(tensors, folder / FILE, {"format": "pt"})
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def in_fp8(folder: Path, base: Path) -> Pair:
    """What of ``base`` is a matrix of a block, as DeepSeek and Qwen publish theirs."""
    stored, plain = {}, {}
    for name, tensor in load_file(base / FILE).items():
        stored[name] = plain[name] = tensor
        if tensor.dim() == 2 and "_proj" in name:
            rows, columns = tensor.shape
            scale = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) + 0.5
            stored[name] = (16 * tensor).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            each = scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
            plain[name] = stored[name].float() * each
    settings = {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}
    return write(folder / "fp8", base, stored, settings), write(folder / "plain", base, plain, None)


def in_mxfp4(folder: Path, base: Path) -> Pair:
    """Random experts, as GPT-OSS has them."""
    stored, plain = {}, {}
    generator = torch.Generator().manual_seed(2)
    for name, tensor in load_file(base / FILE).items():
        if tensor.dim() != 3:
            stored[name] = plain[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        shape = experts, columns, rows // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 123, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return write(folder / "mxfp4", base, stored, settings), write(folder / "plain", base, plain, None)


KINDS: dict[str, tuple[str, Callable[[Path, Path], Pair]]] = {
    "FP8": ("llama", in_fp8),
    "FP8 of experts one by one": ("deepseek_v3", in_fp8),
    "MXFP4": ("gpt_oss", in_mxfp4),
}
KEPT: dict[str, dict[str, Any]] = {
    "in full": {},
    "bfloat16": {"dtype": torch.bfloat16, "lora": LORA},
    "nf4": {"lora": LORA, "quantize": "nf4"},
    "int8": {"lora": LORA, "quantize": "int8"},
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, make = KINDS[request.param]
    folder = tmp_path_factory.mktemp("floats")
    tiny_checkpoint(folder / "base", family)
    return make(folder, folder / "base")


@pytest.mark.parametrize("kept", KEPT)
def test_every_byte_is_that_of_the_plain_checkpoint_of_the_same_values(kept: str, pair: Pair) -> None:
    ours, plain = (load(folder, **KEPT[kept]).store for folder in pair)
    for mine, other in zip(ours.layers, plain.layers, strict=True):
        assert torch.equal(mine.weights, other.weights)
        assert torch.equal(mine.master, other.master)


@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_experts_in_groups_are_read_from_them_too(kind: str, tmp_path: Path) -> None:
    family, make = KINDS[kind]
    tiny_checkpoint(tmp_path / "base", family)
    stores = [load(f, lora=LORA, quantize="nf4", groups=2).store for f in make(tmp_path, tmp_path / "base")]
    for mine, other in zip(stores[0].layers, stores[1].layers, strict=True):
        assert torch.equal(mine.weights, other.weights)


def test_a_run_of_gpt_oss_as_it_is_published_trains_exports_and_answers(tmp_path: Path) -> None:
    made = make_project(
        tmp_path, "gpt_oss", sections={"adapter": {"r": 4, "target_modules": ["q_proj", "o_proj"]}}
    )
    published, plain = in_mxfp4(made.folder, made.folder / "base")
    words = ["train.max_steps=2", "model.quantize=nf4"]
    runs = {
        name: made.train_well(name, *words, f"model.path={folder}")
        for name, folder in {"out": published, "plain out": plain}.items()
    }
    assert runs["out"].losses == runs["plain out"].losses
    exported, said = {}, {}
    for name in runs:
        ran = run_rpft("export", str(made.folder / name))
        assert ran.code == 0, ran.err
        exported[name] = load_file(made.folder / name / "export" / FILE)
        ran = run_rpft("generate", str(made.folder / name), "one two", "--max-new-tokens", "8")
        assert ran.code == 0, ran.err
        said[name] = ran.out
    assert said["out"] == said["plain out"]
    assert all(torch.equal(exported["plain out"][name], value) for name, value in exported["out"].items())
    assert AutoModelForCausalLM.from_pretrained(made.folder / "out" / "export").config.model_type == "gpt_oss"


def test_what_does_not_fit_together_is_refused_by_name(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "llama")
    folder, _ = in_fp8(tmp_path, tmp_path / "base")
    tensors = load_file(folder / FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, f"{name}_scale_inv": torch.ones(2, 2)}, folder / FILE, {"format": "pt"})
    with pytest.raises(UserError, match=rf"{name}: its factors are \[2, 2\], and its blocks \[3, 2\]"):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"quantised \(fp8\); .* FP8 with factors for blocks"):
        load(folder)
    tiny_checkpoint(tmp_path / "four" / "base", "gpt_oss")
    experts, _ = in_mxfp4(tmp_path / "four", tmp_path / "four" / "base")
    config = json.loads((experts / "config.json").read_text())
    (experts / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))
    with pytest.raises(UserError, match="has 4 experts, the config asks for 8"):
        load(experts)
