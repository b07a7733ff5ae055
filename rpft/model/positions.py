"""Rotary positions beyond those that a model's config has, by YaRN or by dividing every position."""

from __future__ import annotations

from typing import Any, Literal

from rpft.errors import UserError


def scale_positions(config: Any, kind: Literal["yarn", "linear"], factor: float) -> None:
    """Gives ``config`` ``factor`` times as many positions; a model that is built from it computes them.

    yarn: Peng et al., arXiv 2309.00071; linear: Chen et al., arXiv 2306.15595. UserError for a model without
    rotary positions, with several kinds of them, or with positions that its config already scales.
    """
    text = config.get_text_config()
    rotary, positions = getattr(text, "rope_parameters", None), getattr(text, "max_position_embeddings", None)
    problem = None
    if not rotary or positions is None:
        problem = "has no rotary positions"
    elif "rope_type" not in rotary:
        problem = f"has several kinds of rotary positions, {', '.join(rotary)}: scale them in its config.json"
    elif rotary["rope_type"] != "default":
        problem = f"already scales its positions (rope_type {rotary['rope_type']} in config.json)"
    if problem is not None:
        raise UserError(f"model.rope_scaling: model {config.model_type!r} {problem}; leave model.rope_scaling out")
    assert rotary is not None
    assert positions is not None
    scaled = {**rotary, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = positions
    if getattr(text, "head_dim", 0) is None:  # what it means; transformers' YaRN wants it said
        text.head_dim = text.hidden_size // text.num_attention_heads
    text.rope_parameters = scaled
    text.max_position_embeddings = int(positions * factor)


def can_be_scaled(config: Any) -> bool:
    """Whether ``scale_positions`` would take ``config``."""
    rotary = getattr(config.get_text_config(), "rope_parameters", None)
    return bool(rotary) and rotary.get("rope_type") == "default"
