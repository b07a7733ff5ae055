"""Whose turn the next slot is: the worker that carries it out, and about when."""

from __future__ import annotations

from typing import NamedTuple

from rpft.engine.pace import Pace
from rpft.plan.plan import Plan


class Turn(NamedTuple):
    """A slot's place in the order of dispatch."""

    number: int
    """Of the slot in the run."""
    worker: int
    begins: int
    """About when, see ``Pace``."""


class Turns:
    """Those of one run."""

    def __init__(self, plan: Plan, num_workers: int) -> None:
        self._plan, self._num_workers = plan, num_workers
        self._dispatched = 0
        self._pace = Pace(num_workers)

    def next(self, place: int | None, num_microbatches: int, follows: bool) -> Turn:
        """The next slot's: on the worker that the plan says, or the next by a count that runs on and on.

        ``place``: of the slot in its step; None in an evaluation, which goes in turn. ``follows``: see ``Pace``.
        """
        number = self._dispatched
        self._dispatched += 1
        planned = None if place is None else self._plan.worker_of(place, self._num_workers)
        worker = number % self._num_workers if planned is None else planned
        return Turn(number, worker, self._pace.begin(worker, num_microbatches, follows))

    def rest(self) -> None:
        """See ``Pace``."""
        self._pace.rest()
