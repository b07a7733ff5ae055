"""What a worker needs of one microbatch, on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceBatch:
    """One microbatch, small beside its hidden state. Shapes: see each."""

    input_ids: torch.Tensor
    """[rows, sequence] int64."""
    position_ids: torch.Tensor | None
    """[rows, sequence] int64, or None: 0, 1, ... in every row."""
    trained_at: torch.Tensor
    """[trained tokens] int64: places in the flattened microbatch whose logits are scored."""
    targets: torch.Tensor
    """[trained tokens] int64: the token that each of them must predict."""
    row_starts: torch.Tensor | None = None
    """Of packed rows, for kernels that take it; see model/packed_attention.py."""

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Ids, and positions if any."""
        return [self.input_ids] if self.position_ids is None else [self.input_ids, self.position_ids]
