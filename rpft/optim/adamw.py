"""AdamW on one layer's flat host buffers, through torch's fused CPU kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from rpft.model.host_store import HostLayer


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101); decay on matrices only."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def update(self, layer: HostLayer, learning_rate: float, updates_before: int, gradient_divisor: float) -> None:
        """One update of masters and moments from ``gradient / gradient_divisor``; the gradient is used up.

        ``updates_before`` is the number of updates that the layer has had, for the bias correction. The working
        weights are not written, unless they are their own masters.
        """
        decayed, total = layer.layout.num_decayed, layer.layout.num_trained
        for start, stop, decay in ((0, decayed, self.weight_decay), (decayed, total, 0.0)):
            if start == stop:
                continue
            gradient = layer.gradient[start:stop]
            if gradient_divisor != 1.0:
                gradient.div_(gradient_divisor)
            adamw(
                [layer.master[start:stop]],
                [gradient],
                [layer.exp_avg[start:stop]],
                [layer.exp_avg_sq[start:stop]],
                [],
                [torch.tensor(float(updates_before))],
                fused=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=learning_rate,
                weight_decay=decay,
                eps=self.eps,
                maximize=False,
            )
