"""FSDP2 as PyTorch users build it: CPU offload, compiled and checkpointed blocks, fused AdamW on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from rpft.peers.harness import DataParallel, Place, groups, set_rate
from rpft.peers.model import LossSum, attention_of, blocks_of, buffers_to, compile_blocks, load_model
from rpft.peers.work import Placed, Work


class Sharded(DataParallel):
    """A shard of the model; weights of trained parameters are float32, computed with in the run's precision."""

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(place)
        self._work = work
        resident = "resident" in work.options
        self.on_device = resident
        model = load_model(work, torch.device("cpu"))
        if work.compile:
            compile_blocks(model)
        # Gradients are summed in float32 over microbatches and processes, as the run's are.
        precision = MixedPrecisionPolicy(getattr(torch, work.dtype), torch.float32)
        mesh = init_device_mesh(place.device.type, (place.world,))
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "reshard_after_forward": True}
        if not resident:
            how["offload_policy"] = CPUOffloadPolicy(pin_memory=place.device.type == "cuda")
        for block in blocks_of(model):
            _as_masters(block)
            fully_shard(block, **how)
        _as_masters(model)
        self._loss: Any = fully_shard(LossSum(model, work.compile), **how)
        buffers_to(model, place.device)
        if resident:
            self._loss.to(place.device)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self.optimizer = torch.optim.AdamW(groups(named, work), lr=0.0, betas=work.betas, eps=work.eps, fused=True)

    def scope(self) -> AbstractContextManager[Any]:
        return attention_of(self._work)

    def set_rate(self, rate: float) -> None:
        set_rate(self.optimizer, rate)

    def step(self, step: list[Placed], trained_tokens: int) -> Tensor:
        total = torch.zeros((), device=self.devices[0])
        for number, rows in enumerate(step):
            self._loss.set_requires_gradient_sync(number == len(step) - 1)
            loss = self._loss(rows)
            # It takes the mean over processes, and the run the sum.
            (loss * (self._place.world / trained_tokens)).backward()
            total += loss.detach()
        if self._work.max_grad_norm:
            grads = [p.grad for p in self._parameters if p.grad is not None]
            norm: Any = nn.utils.get_total_norm(grads)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            nn.utils.clip_grads_with_norm_(self._parameters, self._work.max_grad_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def _as_masters(module: nn.Module) -> None:
    """Makes the trained weights of ``module`` float32, where they are not yet shards."""
    for parameter in module.parameters():
        if parameter.requires_grad and not hasattr(parameter, "full_tensor"):
            parameter.data = parameter.data.float()


def build(work: Work, place: Place) -> Sharded:
    """The adapter."""
    if not dist.is_initialized():
        raise RuntimeError("FSDP2 needs a process group: start it by torchrun, also for one worker")
    return Sharded(work, place)
