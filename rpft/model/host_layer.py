"""The host buffers of one layer, and what lies where in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rpft.model.layout import LayerLayout
from rpft.model.moments import Moments, StateFormat, moments_in
from rpft.model.moments_file import MomentsFile
from rpft.model.split_float import joined, split_into


@dataclass
class HostLayer:
    """The host buffers of one layer: ``weights`` uint8 [host_bytes], ``gradient`` [grad_elements].

    The gradient is float32 or bfloat16. Where frozen weights lie on the disk ``weights`` is the trained part only,
    uint8 [frozen_start].
    """

    layout: LayerLayout
    weights: torch.Tensor
    second: torch.Tensor
    """uint8: another copy of the trained part of ``weights``, or [0]."""
    gradient: torch.Tensor
    master: torch.Tensor
    """[num_trained]: float32, or the int16 half that ``working`` lacks (model/split_float.py); [0] where the
    working weights are float32 themselves."""
    state_format: StateFormat
    state: torch.Tensor
    """uint8: the moments of the trained parameters, one run of bytes; [0] where they lie in ``moments_file``."""
    moments_file: MomentsFile | None
    frozen: torch.Tensor
    """uint8 [frozen_bytes]: the end of ``weights``, or of a file."""
    latest: int = 0
    """The copy, 0 or 1, that belongs to the masters."""

    @property
    def moments(self) -> Moments:
        """What ``state`` holds, [num_trained]: only of a layer whose moments lie in RAM."""
        return moments_in(self.state, self.state_format, self.layout.num_trained)

    @property
    def exp_avg(self) -> torch.Tensor:
        return self.state_part("exp_avg", 0, self.layout.num_trained)

    @property
    def exp_avg_sq(self) -> torch.Tensor:
        return self.state_part("exp_avg_sq", 0, self.layout.num_trained)

    def state_part(self, kind: str, first: int, stop: int) -> torch.Tensor:
        """Elements ``first`` to ``stop`` of the field ``kind`` of the moments; of a file a copy."""
        if self.moments_file is not None:
            return self.moments_file.read(self.layout.layer, kind, first, stop)
        return getattr(self.moments, kind)[first:stop]

    def write_state(self, kind: str, first: int, values: torch.Tensor) -> None:
        """Stores ``values``, flat, as elements of the field ``kind`` of the moments, from ``first`` on."""
        if self.moments_file is not None:
            self.moments_file.write(self.layout.layer, kind, first, values)
        else:
            self.state_part(kind, first, first + len(values)).copy_(values)

    @property
    def on_disk(self) -> bool:
        """Whether the frozen part lies in a file."""
        return self.weights.numel() < self.layout.host_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained working weights."""
        return self.layout.trained_dtype

    @property
    def working(self) -> torch.Tensor:
        """The trained working weights that belong to the masters, flat [num_trained]."""
        return self.copy(self.latest)

    @property
    def lagging(self) -> torch.Tensor:
        """Those of one update ago, where there are two copies, flat [num_trained]."""
        return self.copy(1 - self.latest)

    def copy(self, number: int) -> torch.Tensor:
        """Copy ``number`` of the trained working weights, flat [num_trained]."""
        return self.run(number, 0, self.layout.num_trained * self.dtype.itemsize).view(self.dtype)

    def run(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Bytes ``start`` to ``stop`` of the layer for copy ``number``, uint8, where they lie in one buffer."""
        frozen_start = self.layout.frozen_start
        if start >= frozen_start:
            return self.frozen[start - frozen_start : stop - frozen_start]
        return (self.second if number == 1 and self.second.numel() else self.weights)[start:stop]

    def pieces(self, number: int, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """Bytes ``start`` to ``stop`` of the layer for copy ``number``: (offset from ``start``, uint8) of each."""
        apart = number == 1 or self.on_disk
        middle = min(max(start, self.layout.frozen_start), stop) if apart else start
        cuts = ((start, middle), (middle, stop))
        return [(a - start, self.run(number, a, b)) for a, b in cuts if a < b]

    @property
    def master_is_split(self) -> bool:
        """Whether working weights and ``master`` together are the masters."""
        return self.master.dtype == torch.int16

    def stored_masters(self, start: int = 0, stop: int | None = None) -> list[torch.Tensor]:
        """What masters ``start`` to ``stop`` lie in, flat views: they are these, joined (model/split_float.py)."""
        part = slice(start, stop)
        if self.master_is_split:
            return [self.working[part], self.master[part]]
        return [(self.working if self.dtype == torch.float32 else self.master)[part]]

    def master_values(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Masters ``start`` to ``stop`` as float32, flat: for reading, since it may be a copy."""
        return joined(self.stored_masters(start, stop))

    def write_master(self, values: torch.Tensor, start: int = 0) -> None:
        """Stores ``values``, float32 and flat, as masters from ``start`` on, and rounded as working weights."""
        part = slice(start, start + len(values))
        if self.master_is_split:
            split_into(self.working[part], self.master[part], values)
            return
        self.working[part].copy_(values)
        if self.dtype != torch.float32:
            self.master[part].copy_(values)
