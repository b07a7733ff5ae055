"""DeepSpeed ZeRO-3 with parameters and optimizer in RAM, as its users run it: no block is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rpft.peers.harness import DataParallel, Place, groups, set_rate
from rpft.peers.model import LossSum, buffers_to, load_model
from rpft.peers.work import Placed, Work


class ZeroThree(DataParallel):
    """A shard of the model. Gradients are summed as its defaults have it."""

    on_device = False

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(place)
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        model = load_model(work, torch.device("cpu"))
        buffers_to(model, place.device)
        # Its hooks are on modules: the head has to be called as one, and compiled blocks would break at each.
        loss = LossSum(model, compiled=False, head_as_module=True)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        optimizer = DeepSpeedCPUAdam(groups(named, work), lr=0.0, betas=work.betas, eps=work.eps, adamw_mode=True)
        self._engine: Any = deepspeed.initialize(model=loss, optimizer=optimizer, config=_config(work))[0]

    def set_rate(self, rate: float) -> None:
        set_rate(self._engine.optimizer, rate)

    def step(self, step: list[Placed], trained_tokens: int) -> Tensor:
        total = torch.zeros((), device=self.devices[0])
        for number, rows in enumerate(step):
            # Steps may have different numbers of microbatches, so they are not told to it beforehand.
            self._engine.set_gradient_accumulation_boundary(number == len(step) - 1)
            loss = self._engine(rows)
            # It takes the mean over processes, and the run the sum.
            self._engine.backward(loss * (self._place.world / trained_tokens))
            self._engine.step()
            total += loss.detach()
        return total


def _config(work: Work) -> dict[str, Any]:
    in_ram = {"device": "cpu", "pin_memory": work.device == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # said because it must be; microbatches are given as they are
        "gradient_accumulation_steps": 1,
        "gradient_clipping": work.max_grad_norm or 0.0,
        "bf16": {"enabled": work.dtype == "bfloat16"},
        "fp16": {"enabled": work.dtype == "float16", "loss_scale": 1.0},
        "zero_optimization": {"stage": 3, "offload_optimizer": in_ram, "offload_param": in_ram},
        "steps_per_print": 1 << 30,
    }


def build(work: Work, place: Place) -> ZeroThree:
    """The adapter."""
    return ZeroThree(work, place)
