"""Operations of a model that a trained token asks for, whatever is recomputed on the way."""

from __future__ import annotations

from collections.abc import Sequence

from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.costs import layer_costs
from rpft.plan.machine import attention_operations


def model_flops(layouts: Sequence[LayerLayout], skeleton: Skeleton, sequence: float) -> float:
    """Floating point operations of one token in rows of ``sequence`` tokens: forward and backward, no recompute.

    Products of weights, and of causal attention over the whole row in every block. A frozen weight has no
    gradient and counts two thirds; an expert counts for the share of tokens that it sees.
    """
    weights = sum(cost.with_recompute for cost in layer_costs(list(layouts), skeleton))
    attention = attention_operations(skeleton.model.config.get_text_config(), 1) * sequence
    return 2 * weights + 3 * attention * skeleton.num_blocks
