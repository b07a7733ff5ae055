"""A merged model is base plus adapter, added in float32 and rounded once, whatever the adapter and the family."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.adapters import KINDS, LORA, load_lora, randomise, save
from support.layers import random_ids, relative_error
from support.models import Loaded, tiny_checkpoint
from transformers import AutoModelForCausalLM

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint, read_config
from rpft.model.cut import cut
from rpft.model.layer_reader import LayerReader
from rpft.model.merge import Drift, Merge
from rpft.model.save import write_config, write_layers

TIED = {
    "tied, at the embedding": ("llama_tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied, at the head": ("llama_tied", {"target_modules": ["lm_head"]}),
    "tied, at both, DoRA": ("qwen3", {"target_modules": ["embed_tokens", "lm_head"], "dora": True}),
}


QUICK = ("DoRA of transposed weights", "tied embedding trained whole", "fused experts", "tied, at both, DoRA")
ALL_KINDS = [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in [*KINDS, *TIED]]


def merge(
    loaded: Loaded, base: Path, folder: Path, dtype: torch.dtype, ids: torch.Tensor | None = None
) -> Drift | None:
    """Merges what is in the store into ``folder``."""
    layouts = [layer.layout for layer in loaded.store.layers]
    work = Merge(loaded.skeleton, layouts)
    config = copy.deepcopy(read_config(base))
    if work.unties:
        config.tie_word_embeddings = False
    plain = cut(build_model(copy.deepcopy(config), dtype, "auto"))
    trained = {s.name: loaded.store.master(s.name) for lay in layouts for s, _ in lay.own.values() if s.trained}
    reader = LayerReader(Checkpoint(base), loaded.skeleton, layouts)
    drifts = []

    def layers():
        for tensors, drift in work.run(plain, reader, trained, dtype, ids):
            drifts.append(drift)
            yield tensors

    folder.mkdir()
    write_config(config, dtype, folder)
    write_layers(plain, layers(), folder, 1 << 30)
    return drifts[-1]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_merged_model_gives_the_logits_of_base_and_adapter(kind: str, tmp_path: Path) -> None:
    family, changes = {**KINDS, **TIED}[kind]
    tiny_checkpoint(tmp_path / "base", family)
    loaded = load_lora(tmp_path / "base", replace(LORA, **changes))
    randomise(loaded)
    adapter = save(loaded, tmp_path / "adapter")
    ids = random_ids(rows=1)
    drift = merge(loaded, tmp_path / "base", tmp_path / "merged", torch.float32, ids)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, str(adapter)).eval()(input_ids=ids).logits
    model: Any
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)  # type: ignore
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = model.eval()(input_ids=ids).logits
    assert relative_error(ours, theirs) < 1e-5
    assert drift is not None
    assert drift.max_abs == pytest.approx((ours - theirs).abs().max().item(), abs=1e-4)
    assert drift.top1_agreement == 1.0
    assert drift.tokens == ids.numel()
    assert drift.largest == pytest.approx(theirs.abs().max().item(), rel=1e-4)


def test_a_bf16_merge_is_the_float32_sum_rounded_once(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "base", "llama")
    model.bfloat16().save_pretrained(tmp_path / "base")
    loaded = load_lora(tmp_path / "base", LoraSettings(4, 8.0, 0.0, ["q_proj"]), dtype=torch.bfloat16)
    randomise(loaded)
    drift = merge(loaded, tmp_path / "base", tmp_path / "merged", torch.bfloat16, random_ids(rows=1))
    merged = tensors_in(tmp_path / "merged")
    for number in range(4):
        path = f"model.layers.{number}.self_attn.q_proj"
        a, b = (loaded.store.master(f"{path}.lora_{part}.default.weight") for part in "AB")
        exact = model.get_parameter(f"{path}.weight").float() + 2.0 * (b @ a)
        assert torch.equal(merged[f"{path}.weight"], exact.bfloat16())
        other = f"model.layers.{number}.mlp.up_proj.weight"
        assert torch.equal(merged[other], model.get_parameter(other))
    assert drift is not None
    assert 0 < drift.mean_abs < drift.max_abs < 0.1 * drift.largest
    assert 0.5 < drift.top1_agreement <= 1.0


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def test_layers_are_read_one_at_a_time_and_every_tensor_once(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "mixtral")
    loaded = load_lora(tmp_path)
    layouts = [layer.layout for layer in loaded.store.layers]
    reader = LayerReader(Checkpoint(tmp_path), loaded.skeleton, layouts)
    for layer, layout in enumerate(layouts):
        found = reader.read(layer)
        specs = [spec for spec, _ in layout.own.values() if spec.checkpoint_name is not None]
        assert found.keys() == {spec.checkpoint_name for spec in specs}
        for spec in specs:
            assert torch.equal(found[spec.checkpoint_name or ""], loaded.store.tensor(spec.name))


def test_a_base_of_another_size_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "llama")
    tiny_checkpoint(tmp_path / "other", "llama", intermediate_size=112)
    loaded = load_lora(tmp_path / "base")
    reader = LayerReader(
        Checkpoint(tmp_path / "other"), loaded.skeleton, [layer.layout for layer in loaded.store.layers]
    )
    with pytest.raises(UserError, match=r"mlp\.\w+_proj\.weight is \[.*112.*not the model that was trained"):
        reader.read(1)
