"""Adapters on tiny models: every kind, loaded, given values as training would, and saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch

from rpft.model.adapters import LoraSettings, initialise_lora, save_lora
from rpft.model.whole_tensors import WholeTensors
from support.models import Loaded, load

LORA = LoraSettings(r=4, alpha=8.0, dropout=0.0, target_modules="all-linear")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "rsLoRA": ("llama", {"rslora": True}),
    "DoRA": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "dora": True}),
    "DoRA of transposed weights": ("gpt2", {"target_modules": ["c_attn"], "dora": True}),
    "embedding and head trained whole": ("llama", {"modules_to_save": ("embed_tokens", "lm_head")}),
    "tied embedding trained whole": ("llama_tied", {"modules_to_save": ("lm_head",)}),
    "norms and router trained whole": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "modules_to_save": ("input_layernorm", "norm", "mlp.gate")},
    ),
    "a router with a buffer trained whole": (
        "deepseek_v3",
        {"target_modules": ["q_a_proj"], "modules_to_save": ("mlp.gate",)},
    ),
    "fused experts": ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS}),
    "fused experts of GPT-OSS": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts by their old names": ("mixtral", {"target_modules": ["w1", "w2", "w3"]}),
}
"""Kind of adapter: family, and what changes of LORA."""


def load_lora(
    folder: Path, settings: LoraSettings = LORA, seed: int = 3, dtype: torch.dtype = torch.float32
) -> Loaded:
    loaded = load(folder, dtype, settings)
    initialise_lora(loaded.skeleton, loaded.store, seed)
    return loaded


def trained_names(loaded: Loaded) -> list[str]:
    return [spec.name for layer in loaded.store.layers for spec, _ in layer.layout.own.values() if spec.trained]


def randomise(loaded: Loaded) -> None:
    """Gives every adapter weight a random value, as training would; the same in whatever slices it lies."""
    generator, wholes = torch.Generator().manual_seed(8), WholeTensors(loaded.store)
    specs = [spec for layer in loaded.store.layers for spec, _ in layer.layout.own.values() if spec.trained]
    for name in sorted({spec.whole_name for spec in specs}):
        wholes.write(name, 0.1 * torch.randn(wholes[name].shape, generator=generator))


def save(loaded: Loaded, folder: Path) -> Path:
    folder.mkdir()
    save_lora(loaded.peft_model, loaded.store, folder)
    return folder


def peft_change(
    folder: Path,
    lora: LoraSettings,
    seed: int,
    prepare: Callable[[Any], Any] = lambda model: None,
    dtype: torch.dtype = torch.float32,
) -> Callable[[Any], Any]:
    """Makes of a model, once it is prepared, what peft trains, with an engine's first adapters."""
    start = load_lora(folder, lora, seed, dtype)

    def change(model: Any) -> Any:
        prepare(model)
        config = peft.LoraConfig(
            r=lora.r, lora_alpha=int(lora.alpha), target_modules=list(lora.target_modules), task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(start.store.tensor(name.removeprefix("base_model.model.")))
        return model

    return change
