"""Random numbers with which a module is tried whose parameters have none; the same every time."""

from __future__ import annotations

import torch
from torch import nn


class Probe:
    """Draws tensors of one precision on one device, in the order in which they are asked for."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal(0, ``scale``)."""
        drawn = torch.randn(*shape, generator=self._generator, device=self._device)
        return drawn.mul_(scale).to(self._dtype)

    def weights(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """A tensor a parameter of ``module``, by name: matrices that keep the size of what is given, ones."""
        return {
            name: self.normal(*p.shape, scale=p.shape[-1] ** -0.5)
            if p.dim() > 1
            else torch.ones(p.shape, device=self._device, dtype=self._dtype)
            for name, p in module.named_parameters()
        }
