"""Which worker gets which slot, where workers differ: in turn, or each slot where it would be done first.

Found once and written into the plan, so that it repeats every step: no number depends on it, and nothing is
decided while a run goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from rpft.plan.plan import Plan
from rpft.plan.pool import Pool
from rpft.plan.rates import Rates
from rpft.plan.simulate import PlayOn, Run, step_seconds, steps_seconds
from rpft.plan.step_shape import StepShape

_WORTH_LEAVING_TURNS = 0.005
"""Share of a step that an order other than in turn must save."""

_WORTH_A_CHANGE = 1e-3

_STEPS_PLAYED = 4
"""Of late updates, until what starting up changes is over."""

_MOST_PAIRED = 16
"""Moves that were best alone and are tried in pairs where none is good alone."""

_MOST_ORDERED = 300
"""Slots of a step for which an order is looked for."""

_MOST_PLAYED = 100_000
"""Slots in all that are played to improve an order."""


def dispatched(plan: Plan, shape: StepShape, rates: Rates) -> tuple[Plan, float]:
    """``plan`` with the order of workers that makes a step shortest, and the step's seconds.

    Each slot goes where it would be done first; from there, and from strict turns, single slots are moved to other
    workers as long as that makes a step shorter. Strict turns stay where that saves nothing.
    """
    in_turn = replace(plan, dispatch=())
    turns = step_seconds(in_turn, shape, rates)
    # Of many rounds the order of the first ones is given to the others too.
    few = replace(shape, rounds=max(1, min(shape.rounds, _MOST_ORDERED // plan.num_slots)))
    written = tuple(slot % shape.num_workers for slot in range(plan.num_slots * few.rounds))
    orders = (_earliest_finish(in_turn, few, rates), written)
    found = [_with_slots_moved(replace(plan, dispatch=order), few, rates) for order in orders]
    best, least = min(((order, step_seconds(order, shape, rates)) for order in found), key=lambda item: item[1])
    return (best, least) if least < turns * (1 - _WORTH_LEAVING_TURNS) else (in_turn, turns)


def _with_slots_moved(plan: Plan, shape: StepShape, rates: Rates) -> Plan:
    """``plan`` with slots given to other workers, one at a time or two, as long as that makes a step shorter."""
    best, least, left = plan, step_seconds(plan, shape, rates), _MOST_PLAYED
    while left > 0:
        ones = list(_moves(best.dispatch, shape.num_workers))
        others = [replace(best, dispatch=_moved(best.dispatch, [move])) for move in ones]
        times = steps_seconds(others, shape, rates)
        if times.min() >= least * (1 - _WORTH_A_CHANGE):
            likely = [ones[i] for i in np.argsort(times)[:_MOST_PAIRED]]
            others = [replace(best, dispatch=_moved(best.dispatch, two)) for two in combinations(likely, 2)]
            times = steps_seconds(others, shape, rates)
        left -= len(best.dispatch) * (len(ones) + len(others))
        first = int(np.argmin(times))
        if times[first] >= least * (1 - _WORTH_A_CHANGE):
            break
        best, least = others[first], float(times[first])
    return best


def _moves(order: tuple[int, ...], num_workers: int) -> Iterator[tuple[int, int]]:
    """(place, worker) for all other workers of each place."""
    for place, now in enumerate(order):
        yield from ((place, worker) for worker in range(num_workers) if worker != now)


def _moved(order: tuple[int, ...], moves: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    changed = list(order)
    for place, worker in moves:
        changed[place] = worker
    return tuple(changed)


def _earliest_finish(plan: Plan, shape: StepShape, rates: Rates) -> tuple[int, ...]:
    """The workers of a step's slots, each the one that would be done with it first."""
    chosen: list[int] = []

    def choose(pool: Pool, play_on: PlayOn) -> int:
        ends = [float(play_on(copy.deepcopy(pool), worker).computed[-1, 0]) for worker in range(shape.num_workers)]
        chosen.append(ends.index(min(ends)))
        return chosen[-1]

    Run([plan], shape, rates).play(_STEPS_PLAYED if shape.delayed else 1, choose)
    return tuple(chosen[-plan.num_slots * shape.rounds :])
