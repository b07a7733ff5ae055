"""What a layer takes of a device's memory by the shapes of its weights alone: for what cannot be counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rpft.model.head import HEAD_CHUNK_TOKENS
from rpft.model.layout import LayerLayout
from rpft.plan.profile import LayerProfile

_MISJUDGED = 3
"""Times ten hidden states and four widened ones that a block may hold: measured ones held up to 2.4 times."""

_BYTES_PER_LOGIT = 18
"""Logits in the working dtype and in float32, their softmax, its gradient, and that in the working dtype."""

_HEAD_TOKENS = max(HEAD_CHUNK_TOKENS.values())
"""Whose logits exist at once at most, whatever runs the head."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model's config decides the size of activations."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    itemsize: int


def estimated_bytes(layouts: Sequence[LayerLayout], shape: ModelShape, tokens: int) -> list[LayerProfile]:
    """A profile a layer, of its bytes alone: more than layers take that attend without a table of all scores."""
    return [estimated_layer(layout, layout.layer == len(layouts) - 1, shape, tokens) for layout in layouts]


def estimated_layer(
    layout: LayerLayout, is_head: bool, shape: ModelShape, tokens: int, score_bytes: int = 0
) -> LayerProfile:
    """Of one layer. ``score_bytes``: of what its attention makes of all pairs of tokens, if it does."""
    gradients = layout.grad_elements * (shape.itemsize + 4)
    hidden = tokens * shape.hidden_size * shape.itemsize
    if is_head:
        logits = min(tokens, _HEAD_TOKENS) * shape.vocab_size * _BYTES_PER_LOGIT
        return LayerProfile(0.0, 0.0, 0, 8 * hidden + logits + gradients)
    if layout.layer == 0:
        return LayerProfile(0.0, 0.0, 4 * hidden, 4 * hidden + gradients, 2 * hidden, 2 * hidden + gradients)
    block = (
        _MISJUDGED * tokens * shape.itemsize * (10 * shape.hidden_size + 4 * shape.intermediate_size) + score_bytes
    )
    weight, adapted = layout.dequantized_bytes, layout.adapted_bytes
    forward, beside = block + weight + adapted, block + weight + gradients + adapted
    return LayerProfile(0.0, 0.0, forward, block + beside + adapted, block + adapted, beside)
