"""AdamW with moments in 8 bits, in lines of torch: what `optimizer.state: 8bit` must come to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from rpft.model import dynamic_map
from rpft.model.moments import BLOCK


def in_eight_bits(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """Every value by the nearest of its block's 256, found by looking at all of them; a square never by zero."""
    found = []
    for block in values.split(BLOCK):
        scale = block.abs().max()
        levels = dynamic_map.values(signed)
        scaled = block / scale if scale else block
        distance = (scaled.double()[:, None] - levels.double()).abs()
        number = distance.argmin(1)
        if not signed:
            number = torch.where((number == 0) & (block > 0), 1, number)
        found.append(levels[number] * scale)
    return torch.cat(found)


class EightBitAdamW(torch.optim.Optimizer):
    """Each tensor's moments are rounded behind every update, as they are stored."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (first_beta, second_beta), rate = group["betas"], group["lr"]
            for weight in group["params"]:
                state, gradient = self.state[weight], weight.grad.flatten()
                state["step"] = step = state.get("step", 0) + 1
                first = state.get("first", torch.zeros_like(gradient)).lerp(gradient, 1 - first_beta)
                second = state.get("second", torch.zeros_like(gradient)) * second_beta
                second = second + (1 - second_beta) * gradient * gradient
                root = second.sqrt() / math.sqrt(1 - second_beta**step) + group["eps"]
                weight.mul_(1 - rate * group["weight_decay"])
                weight.sub_((rate / (1 - first_beta**step) * first / root).view_as(weight))
                state["first"], state["second"] = in_eight_bits(first, True), in_eight_bits(second, False)
