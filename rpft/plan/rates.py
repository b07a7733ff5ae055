"""What links, optimizer, memory and disk of a machine move and update a second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rates:
    """What moves bytes and updates parameters, a second."""

    up: float
    """Bytes from host to one device."""
    down: float
    update: float
    """Parameters that the optimizer updates."""
    workers_per_switch: int = 1
    """Workers whose links meet in one switch."""
    switch_share: float = 0.0
    """A link's bytes a second over those of its switch; 0 where the switch carries all its links at once."""
    memory: float = np.inf
    """Bytes of copies for which an update beside them ends a second later, since it gets of the host's memory what
    copies leave: at ``c`` bytes a second they leave it ``1 - c / memory`` of its rate."""
    copies_beside: float = 1.0
    """Share of its rate that an upload of weights keeps while an update is under way. Hidden states wait for
    compute rather than for the link, and are not slowed down."""
    moments: float = np.inf
    """Parameters whose moments the disk reads and writes back; without end where they lie in RAM."""


ASSUMED_RATES = Rates(up=25e9, down=25e9, update=2e9, memory=70e9)
"""PCIe 4 x16 and a desktop's memory, where nothing was measured."""

AT_ONCE = Rates(np.inf, np.inf, np.inf)
"""Where only compute takes time."""
