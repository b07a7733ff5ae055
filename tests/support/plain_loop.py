"""Training in plain PyTorch over the same microbatches: the numbers that every run of the engine must reach.

Nothing of rpft is used but the shape of a microbatch. The transformers model runs whole, gradients of a step's
microbatches are summed, ``clip_grad_norm_`` clips and ``torch.optim.AdamW`` updates fp32 masters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM


@dataclass
class PlainOutcome:
    """What the loop leaves behind; ``weights`` by the model's own names, float32 masters."""

    loss_sums: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def plain_loop(
    folder: Path,
    steps: int,
    batches_of: Callable[[int], list[Any]],
    *,
    learning_rate: float,
    weight_decay: float,
    max_grad_norm: float,
    eps: float = 1e-8,
    dtype: torch.dtype = torch.float32,
    delayed: bool = False,
    change: Callable[[Any], Any] = lambda model: model,
    router_loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> PlainOutcome:
    """Trains the model in ``folder``; ``delayed`` applies each gradient after the next step's is known.

    ``change`` makes of that model the one that is trained, of which frozen parameters stay as they are.
    ``router_loss``: of (what the model gives, the microbatch), a sum that is trained too and not part of the loss.
    """
    model = change(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)).eval()  # eval: no dropout
    working = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    masters = {name: parameter.detach().float().clone() for name, parameter in working.items()}
    plain = [m for name, m in masters.items() if m.dim() < 2 or name.endswith("bias")]
    matrices = [m for name, m in masters.items() if not (m.dim() < 2 or name.endswith("bias"))]
    optimizer = optimizer_class(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=learning_rate,
        eps=eps,
    )
    loss_sums, grad_norms = [], []
    waiting: list[dict[str, torch.Tensor]] = []

    def apply(gradients: dict[str, torch.Tensor]) -> None:
        for name, master in masters.items():
            master.grad = gradients[name]
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(list(masters.values()), max_grad_norm)))
        optimizer.step()
        with torch.no_grad():
            for name, parameter in working.items():
                parameter.copy_(masters[name])

    for step in range(1, steps + 1):
        batches = batches_of(step)
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        loss_sum = 0.0
        for batch in batches:
            routers = {} if router_loss is None else {"output_router_logits": True}
            output = model(input_ids=batch.input_ids, **routers)
            logits = output.logits.flatten(0, 1)[batch.trained_at]
            loss = F.cross_entropy(logits.float(), batch.targets, reduction="sum")
            loss_sum += loss.item()
            if router_loss is not None:
                loss = loss + router_loss(output, batch)
            for name, grad in zip(sums, torch.autograd.grad(loss, list(working.values())), strict=True):
                sums[name] += grad
        loss_sums.append(loss_sum)
        trained = sum(batch.targets.numel() for batch in batches)
        waiting.append({name: total / trained for name, total in sums.items()})
        if len(waiting) > delayed:
            apply(waiting.pop(0))
    for gradients in waiting:
        apply(gradients)
    return PlainOutcome(loss_sums, grad_norms, {name: m.detach() for name, m in masters.items()})
