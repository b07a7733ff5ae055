"""Tiny random models of many families, as configs and as checkpoint folders. Vocabulary 320, 4 blocks, hidden 64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

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

FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str, **changes: Any) -> Any:
    """A fresh config of ``family`` with ``changes``."""
    name, settings = _FAMILIES[family]
    base = {} if family == "gpt2" else _COMMON
    return getattr(transformers, name)(**{**base, **copy.deepcopy(settings), **changes})


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model of ``family`` with random weights, none of them zero or one, in training mode."""
    config = tiny_config(family, **changes)
    eager = {"attn_implementation": "eager"} if family == "gemma2" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **eager)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def tiny_checkpoint(folder: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """Saves a tiny model into ``folder`` and returns it."""
    model = tiny_model(family, seed, **changes)
    model.save_pretrained(folder)
    return model
