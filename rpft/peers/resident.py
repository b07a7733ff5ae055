"""Plain PyTorch: the model whole on every device, with fused AdamW on float32 masters, or, the roof, without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rpft.peers.harness import DataParallel, Place, groups, set_rate
from rpft.peers.model import LossSum, attention_of, compile_blocks, load_model
from rpft.peers.work import Placed, Work

MakeOptimizer = Callable[[list[dict[str, Any]], Work], Any]


class Masters:
    """Float32 masters of trained parameters, in whose gradients those of all microbatches are summed."""

    def __init__(self, model: Any) -> None:
        self.working, self.named = [], []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            master = parameter
            if parameter.dtype != torch.float32:
                master = nn.Parameter(parameter.detach().float())
                parameter.register_post_accumulate_grad_hook(partial(_add_to, master))
            self.working.append(parameter)
            self.named.append((name, master))
        self.all = [master for _, master in self.named]

    def gather(self, max_norm: float | None) -> None:
        """Adds up the gradients of all processes and clips them."""
        for master in self.all:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(master.grad)
        if max_norm:
            nn.utils.clip_grad_norm_(self.all, max_norm)

    @torch.no_grad()
    def hand_back(self) -> None:
        """Rounds the masters into the weights that compute, and drops the gradients."""
        for parameter, master in zip(self.working, self.all, strict=True):
            if parameter is not master:
                parameter.copy_(master)
            master.grad = None


def _add_to(master: nn.Parameter, parameter: Tensor) -> None:
    grad = parameter.grad
    assert grad is not None
    if master.grad is None:
        master.grad = grad.float()
    else:
        master.grad.add_(grad)
    parameter.grad = None


class Resident(DataParallel):
    """The model on this process's device."""

    def __init__(self, work: Work, place: Place, make_optimizer: MakeOptimizer | None) -> None:
        super().__init__(place)
        self._work = work
        self._model = load_model(work, place.device)
        if work.compile:
            compile_blocks(self._model)
        self._loss = LossSum(self._model, work.compile)
        self.optimizer = None
        if make_optimizer is not None:
            self.masters = Masters(self._model)
            self.optimizer = make_optimizer(groups(self.masters.named, work), work)

    def scope(self) -> AbstractContextManager[Any]:
        return attention_of(self._work)

    def set_rate(self, rate: float) -> None:
        if self.optimizer is not None:
            set_rate(self.optimizer, rate)

    def step(self, step: list[Placed], trained_tokens: int) -> Tensor:
        total = torch.zeros((), device=self.devices[0])
        for rows in step:
            loss = self._loss(rows)
            (loss / trained_tokens).backward()
            total += loss.detach()
        if self.optimizer is None:
            for parameter in self._model.parameters():
                parameter.grad = None
        else:
            self.update()
        return total

    def update(self) -> None:
        """Masters, then weights, from the gradients."""
        assert self.optimizer is not None
        self.masters.gather(self._work.max_grad_norm)
        self.optimizer.step()
        self.masters.hand_back()


def adamw(parameters: list[dict[str, Any]], work: Work) -> torch.optim.Optimizer:
    """torch's fused AdamW, on the devices of the parameters."""
    return torch.optim.AdamW(parameters, lr=0.0, betas=work.betas, eps=work.eps, fused=True)


def build(work: Work, place: Place) -> Resident:
    """Plain training."""
    return Resident(work, place, adamw)


def build_roof(work: Work, place: Place) -> Resident:
    """Forward, recompute and backward alone."""
    return Resident(work, place, None)
