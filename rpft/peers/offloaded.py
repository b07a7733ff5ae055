"""torchao: the model whole on every device, the optimizer's state and work in RAM (CPUOffloadOptimizer)."""

from __future__ import annotations

from typing import Any

import torch

from rpft.peers.harness import Place
from rpft.peers.resident import Resident
from rpft.peers.work import Work


class Offloaded(Resident):
    """The resident model whose masters are updated in RAM."""

    on_device = False

    def update(self) -> None:
        """It takes a gradient as the backward leaves it and cannot clip: it is given the clipped sum instead."""
        assert self.optimizer is not None
        masters = self.masters
        masters.gather(self._work.max_grad_norm)
        sums = [master.grad for master in masters.all]
        for master in masters.all:
            master.grad = None
        torch.autograd.backward(masters.all, sums)
        self.optimizer.step()
        masters.hand_back()


def _make_optimizer(parameters: list[dict[str, Any]], work: Work) -> Any:
    from torchao.optim import CPUOffloadOptimizer

    how = {"lr": 0.0, "betas": work.betas, "eps": work.eps, "fused": True}
    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, **how)


def build(work: Work, place: Place) -> Offloaded:
    """The adapter."""
    return Offloaded(work, place, _make_optimizer)
