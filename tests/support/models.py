"""Tiny random models of many families, as configs, checkpoint folders and host stores.

Vocabulary 320, 4 blocks, hidden 64.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint, read_config
from rpft.model.cut import cut
from rpft.model.cut_experts import cut_experts
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.load import load_checkpoint
from rpft.model.quant import QuantKind
from rpft.model.quant_choice import quantize_base
from rpft.model.skeleton import Skeleton, persistent_buffers

VOCABULARY = 320

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, "num_experts": 4, **_MOE}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
}

_MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "falcon": ("FalconConfig", {}),
    "bloom": ("BloomConfig", {"n_layer": 4, "n_head": 4}),
    "smollm3": ("SmolLM3Config", {}),
    "phi": ("PhiConfig", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "stablelm": ("StableLmConfig", {}),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 8}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 16,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            **_MOE,
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            **_MOE,
        },
    ),
}

FAMILIES = tuple(_FAMILIES)
"""The families that every feature is tried on."""

MORE_FAMILIES = tuple(_MORE_FAMILIES)
"""Families that only the layers themselves are tried on."""

_WITHOUT_SDPA = ("gemma2", "bloom")


def tiny_config(family: str, **changes: Any) -> Any:
    """A fresh config of ``family`` with ``changes``."""
    name, settings = {**_FAMILIES, **_MORE_FAMILIES}[family]
    base = {} if family in ("gpt2", "gptj") else _COMMON
    return getattr(transformers, name)(**{**base, **copy.deepcopy(settings), **changes})


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model of ``family`` with random weights, none of them zero or one, in training mode."""
    config = tiny_config(family, **changes)
    eager = {"attn_implementation": "eager"} if family in _WITHOUT_SDPA else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **eager)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
            for _, buffer in persistent_buffers(model):
                if buffer.is_floating_point():
                    buffer.add_(0.02 * torch.randn_like(buffer))
    return model


def tiny_checkpoint(folder: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """Saves a tiny model into ``folder`` and returns it."""
    model = tiny_model(family, seed, **changes)
    model.save_pretrained(folder)
    return model


@dataclass
class Loaded:
    """A checkpoint folder as rpft holds it; ``peft_model`` is None without an adapter."""

    skeleton: Skeleton
    store: HostStore
    peft_model: Any | None


def skeleton_of(folder: Path, dtype: torch.dtype = torch.float32) -> Skeleton:
    """The skeleton of the checkpoint in ``folder``."""
    return cut(build_model(read_config(folder), dtype, "auto"))


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    lora: LoraSettings | None = None,
    quantize: QuantKind | None = None,
    groups: int = 1,
) -> Loaded:
    """The checkpoint in ``folder`` in a host store; a ``lora`` adapter's weights are left at zero.

    ``groups``: of the experts of each block, every one a layer of its own.
    """
    skeleton = skeleton_of(folder, dtype)
    peft_model = None if lora is None else inject_lora(skeleton, lora, str(folder))
    if quantize is not None:
        quantize_base(skeleton, quantize, dtype)
    skeleton = cut_experts(skeleton, groups, dtype)
    store = HostStore(build_layers(skeleton, dtype))
    load_checkpoint(Checkpoint(folder), skeleton, store)
    return Loaded(skeleton, store, peft_model)
