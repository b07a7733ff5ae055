"""What is not a decoder of like blocks is refused by name; everything else is cut where its own code says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models import FAMILIES, MORE_FAMILIES, skeleton_of, tiny_checkpoint, tiny_config
from torch import nn

from rpft.errors import UserError
from rpft.model.build import build_model
from rpft.model.cut import cut, find_blocks
from rpft.model.skeleton import has_dropout, kinds_of_blocks

_SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_GEMMA4 = {**_SMALL, "num_key_value_heads": 1, "head_dim": 16, "vocab_size_per_layer_input": 320}


def skeleton_from(config: Any) -> Any:
    return cut(build_model(config, torch.float32, "auto"))


@pytest.mark.parametrize(
    ("config_class", "settings", "message"),
    [
        ("T5Config", {"d_model": 32, "num_layers": 2}, "'t5' cannot be built for causal language modelling"),
        ("BertConfig", _SMALL, "BertLMHeadModel is not supported"),
        ("ViTConfig", {}, "'vit' cannot be built for causal language modelling"),
        ("XLMConfig", {"vocab_size": 320, "emb_dim": 32, "n_layers": 2, "n_heads": 2}, "XLM.*in one ModuleList"),
        ("XLNetConfig", {"vocab_size": 320, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32}, "XLNetLM"),
        ("MambaConfig", {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}, "MambaForCausalLM is not"),
    ],
)
def test_what_is_not_a_decoder_with_one_list_of_blocks_is_refused_by_name(
    config_class: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        skeleton_from(getattr(transformers, config_class)(**settings))


def test_attention_that_sees_the_tokens_that_follow_is_refused_as_an_encoder() -> None:
    model = build_model(tiny_config("llama"), torch.float32, "auto")
    for block in model.model.layers:
        block.self_attn.is_causal = False
    with pytest.raises(UserError, match="LlamaForCausalLM is not supported: its attention is not causal"):
        cut(model)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4")
def test_blocks_that_are_given_embeddings_beside_the_hidden_state_are_refused() -> None:
    config = transformers.Gemma4TextConfig(**_GEMMA4, num_kv_shared_layers=0, hidden_size_per_layer_input=8)
    with pytest.raises(UserError, match=r"Gemma4ForCausalLM.*embeddings beside the hidden state"):
        skeleton_from(config)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("mixtral", "router_jitter_noise", 0.01),
        ("opt", "layerdrop", 0.1),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gemma3", "num_kv_shared_layers", 2),
    ],
)
def test_settings_that_layers_cannot_reproduce_are_refused_by_key_and_off_is_fine(
    family: str, key: str, value: float
) -> None:
    with pytest.raises(UserError, match=rf"{family}.*{key} = {str(value).lower()}"):
        build_model(tiny_config(family, **{key: value}), torch.float32, "auto")
    assert skeleton_from(tiny_config(family, **{key: type(value)(0)})).num_blocks == 4


def test_attention_that_a_family_lacks_is_refused_and_auto_takes_what_there_is() -> None:
    with pytest.raises(UserError, match=r"gemma2|bloom"):
        build_model(tiny_config("bloom"), torch.float32, "sdpa")
    assert build_model(tiny_config("bloom"), torch.float32, "auto").config._attn_implementation == "eager"
    assert build_model(tiny_config("llama"), torch.float32, "auto").config._attn_implementation == "sdpa"
    assert build_model(tiny_config("llama"), torch.float32, "eager").config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "breaks",
    ["two lists", "norm between blocks", "parameter beside children", "unused module"],
)
def test_models_that_run_their_blocks_another_way_are_refused_with_the_reason(breaks: str) -> None:
    model = build_model(tiny_config("llama"), torch.float32, "auto")
    trunk = model.model
    forward = type(trunk).forward
    if breaks == "two lists":
        trunk.more = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
        message = r"one ModuleList, and found \['model.layers', 'model.more'\]"
    elif breaks == "norm between blocks":

        class Between(type(trunk)):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                layers = self.layers
                self.norm(torch.zeros(1, 1, 64))
                hidden = forward(self, *args, **kwargs)
                self.layers = layers
                layers[0](hidden.last_hidden_state)
                return hidden

        trunk.__class__ = Between
        message = "LlamaForCausalLM is not supported"
    elif breaks == "parameter beside children":
        trunk.scale = nn.Parameter(torch.empty(1, device="meta"))
        message = "model owns parameters beside its children"
    else:
        trunk.spare = nn.Linear(2, 2, device="meta")
        message = "never run: model.spare"
    with pytest.raises(UserError, match=message):
        cut(model)


def test_ends_are_found_by_the_order_of_calls() -> None:
    ends = {
        "llama": (("model.embed_tokens",), ("model.norm", "lm_head")),
        "gpt2": (("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")),
        "opt": (
            ("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"),
            ("model.decoder.project_out", "lm_head"),
        ),
    }
    for family, (before, after) in ends.items():
        skeleton = skeleton_from(tiny_config(family))
        assert (skeleton.embedding_modules, skeleton.head_modules) == (before, after), family
        assert find_blocks(skeleton.model) == skeleton.blocks_path


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_no_weight_is_allocated_and_the_model_itself_is_left_whole(family: str) -> None:
    skeleton = skeleton_from(tiny_config(family))
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    assert skeleton.num_blocks == 4
    assert "Stub" not in str(skeleton.model)
    assert skeleton.model.training


def test_blocks_that_differ_in_a_setting_or_shape_are_of_different_kinds() -> None:
    kinds = {
        family: kinds_of_blocks(skeleton_from(tiny_config(family, **changes)))
        for family, changes in {
            "llama": {},
            "gemma3": {},
            "deepseek_v3": {},
            "qwen3_moe": {"decoder_sparse_step": 2},
            "qwen3_next": {},
        }.items()
    }
    assert kinds == {
        "llama": [0, 0, 0, 0],
        "gemma3": [0, 1, 0, 1],
        "deepseek_v3": [0, 1, 1, 1],
        "qwen3_moe": [0, 1, 0, 1],
        "qwen3_next": [0, 0, 0, 1],
    }


def test_dropout_is_found_in_modules_and_in_settings() -> None:
    assert not has_dropout(build_model(tiny_config("llama"), torch.float32, "auto"))
    assert has_dropout(build_model(tiny_config("llama", attention_dropout=0.1), torch.float32, "auto"))
    assert has_dropout(build_model(tiny_config("gpt2"), torch.float32, "auto"))
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    assert not has_dropout(build_model(tiny_config("gpt2", **off), torch.float32, "auto"))


def test_outputs_that_a_config_asks_for_beside_logits_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_checkpoint(tmp_path, "mixtral", output_router_logits=True, output_hidden_states=True)
    skeleton = skeleton_of(tmp_path)
    assert not skeleton.model.config.output_router_logits
    assert "output_router_logits = true in config.json is not followed" in caplog.text
