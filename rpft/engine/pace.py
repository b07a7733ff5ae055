"""About when slots will run, as if each microbatch took the same time in all of them: one unit.

Nothing is decided by it but which memory is used again first.
"""

from __future__ import annotations


class Pace:
    """Slots in the order of dispatch, each on its worker."""

    def __init__(self, num_workers: int) -> None:
        self._free = [0] * num_workers
        """When each worker is done with its slots so far."""
        self._begun = 0

    def begin(self, worker: int, num_microbatches: int, follows: bool) -> int:
        """When the next slot takes up its first microbatch; each further one is a unit later.

        ``follows``: whether it takes its input from the slot before it.
        """
        start = max(self._free[worker], self._begun + 1 if follows else 0)
        self._begun, self._free[worker] = start, start + num_microbatches
        return start

    def rest(self) -> None:
        """What comes waits until all workers are done."""
        self._free = [max(self._free)] * len(self._free)
