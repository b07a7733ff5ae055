"""The model of a config, without its weights."""

from __future__ import annotations

import logging
from typing import Any

import torch

from rpft.errors import UserError
from rpft.model.refuse import refuse_settings

logger = logging.getLogger(__name__)


def build_model(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """The model of ``config`` with its parameters on meta and its buffers real, in training mode.

    ``attention``: sdpa, eager, or auto (sdpa where the family has it). Raises UserError for a family that
    is not a causal language model, lacks the attention asked for, or draws noise that is no dropout.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    refuse_settings(config)
    config.use_cache = False
    config.return_dict = True
    text_config = config.get_text_config()
    for extra in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if getattr(text_config, extra, False):
            logger.warning("%s = true in config.json is not followed: the loss is cross-entropy alone", extra)
            setattr(text_config, extra, False)
    if getattr(text_config, "attn_logit_softcapping", None):
        if attention == "sdpa":  # some versions of transformers take it and leave the soft-capping out
            raise UserError(
                f"model {config.model_type!r} caps its attention scores, which model.attention=sdpa cannot;"
                " use eager or auto"
            )
        attention = "eager"
    kwargs = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    except ValueError as error:
        raise UserError(
            f"model {config.model_type!r} cannot be built for causal language modelling"
            f" with model.attention={attention}: {str(error).splitlines()[0]}"
        ) from error
    if attention == "auto" and model.config._attn_implementation not in ("sdpa", "eager"):
        return build_model(config, dtype, "sdpa")
    model.tie_weights()
    return model.train()
