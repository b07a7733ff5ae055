"""From how many tokens on compute hides a step's transfers and its update, and what a rule of thumb says of it.

Uploads hide in a forward slot of at least FLOP/s over bytes/s tokens, and in a backward slot of a third of that;
the update hides in a step of at least workers x FLOP/s over 8 x parameters/s. The rule is for weights of 2 bytes,
all trained and used by every token: a forward takes 2 operations a parameter and token, recompute and backward 6.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from rpft.plan.rates import Rates
from rpft.plan.step_shape import StepShape


class HiddenFrom(NamedTuple):
    """Tokens from which on compute takes at least as long as what it is to hide."""

    forward: float
    """Of a slot: the uploads of blocks, behind their forward."""
    backward: float
    """Of a slot: the uploads of blocks, or the downloads of their gradients, behind recompute and backward."""
    update: float
    """Of a step, all workers together."""

    def step(self, rounds: int) -> float:
        """Tokens of a step of so many rounds that hide all of it; a slot has those of a round."""
        return max(rounds * self.forward, rounds * self.backward, self.update)


def hidden_from(shape: StepShape, rates: Rates, resident: Collection[int] = ()) -> HiddenFrom:
    """By the times and bytes of ``shape``, as if times went with the tokens and forwards kept nothing.

    ``resident``: see ``Plan``.
    """
    blocks = list(enumerate(shape.loads))[1:-1]
    uploaded = sum(load.weight_bytes - load.frozen_bytes * (layer in resident) for layer, load in blocks)
    downloaded = sum(load.gradient_bytes for _, load in blocks)
    forward, backward = _block_seconds(shape)
    # The head has no forward but that in its backward.
    step = sum([*(load.forward for load in shape.loads[:-1]), *(load.backward for load in shape.loads)])
    update = sum(load.num_trained for load in shape.loads) / rates.update
    up, down = uploaded / rates.up, downloaded / rates.down
    return HiddenFrom(up / forward, max(up, down) / backward, shape.num_workers * update * shape.tokens / step)


def by_the_rule(shape: StepShape, rates: Rates) -> HiddenFrom:
    """With the FLOP/s that the blocks of ``shape``, all trained, come to if only their weights' products count."""
    num_params = sum(load.num_trained for load in shape.loads[1:-1])
    flops = 8 * num_params / sum(_block_seconds(shape))
    return HiddenFrom(flops / rates.up, flops / rates.up / 3, shape.num_workers * flops / (8 * rates.update))


def _block_seconds(shape: StepShape) -> tuple[float, float]:
    """Of all blocks (forward, recompute and backward) a token."""
    blocks = shape.loads[1:-1]
    seconds = sum(load.forward for load in blocks), sum(load.backward for load in blocks)
    return seconds[0] / shape.tokens, seconds[1] / shape.tokens
