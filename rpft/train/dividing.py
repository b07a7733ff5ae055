"""How a step's rows are divided, where the recipe leaves that open: rows a microbatch, microbatches a round.

What can be chosen is planned, and held by the predicted step; nothing here knows how a plan is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rpft.errors import UserError
from rpft.plan.partition import is_small
from rpft.plan.rounds import divisors
from rpft.train.job import Job
from rpft.train.planned import AnyPlanned, Planned

_WORTH_ANOTHER = 0.005
"""Share of a step that another division than the first one tried must save."""

_WORTH_A_SEARCH = 0.02
_MOST_SEARCHES = 2
"""Other rounds get stages of their own if with those of the usual ones a step is at most so much longer, and at
most so many do."""


def fastest(
    tried: Sequence[AnyPlanned], seconds: Callable[[AnyPlanned], float], name: Callable[[AnyPlanned], object]
) -> tuple[AnyPlanned, str]:
    """The one with the shortest step of those that fit RAM and VRAM, the first unless another saves something.

    ``seconds``: of one's step; 0 where nothing is known. Where memory is too little for all, the one that lacks
    the smallest share. With it comes what the others would be, for people.
    """
    times = {i: seconds(planned) for i, planned in enumerate(tried) if planned.memory_short == 0}
    if times:
        least = min(times.values()) * (1 + _WORTH_ANOTHER)
        best = next(i for i, time in times.items() if time <= least)
    else:
        best = min(range(len(tried)), key=lambda i: tried[i].memory_short)
    said = []
    for i, planned in enumerate(tried):
        if i == best:
            continue
        if planned.memory_short > 0:
            said.append(f"{name(planned)}: too little memory")
        elif times[best] > 0:
            said.append(f"{name(planned)}: {100 * (times[i] / times[best] - 1):+.1f}% time")
    return tried[best], f" ({', '.join(said)})" if said else ""


def plan_rounds(job: Job, plan: Callable[[Job], Planned]) -> Planned:
    """``plan`` of ``job``; where the recipe leaves the rounds of a step open, of those that make it fastest.

    No number depends on the choice: tried are rounds that leave the host gradients as precise as they are, and the
    others only where none of these fits.
    """
    first = plan(job)
    if job.given is not None or job.recipe.engine.num_microbatches is not None:
        return first
    alike, others = [], []
    for size in divisors(job.recipe.train.gradient_accumulation_steps):
        if size == job.num_microbatches:
            continue
        try:
            other = job.with_rounds(size)
        except UserError:  # the recipe asks for gradients that so many rounds cannot have
            continue
        (alike if other.gradient_dtype == job.gradient_dtype else others).append(other)
    tried = [first, *map(plan, _promising(first, alike))]
    if all(planned.memory_short > 0 for planned in tried):
        tried += map(plan, others)
    chosen, instead = fastest(tried, _full_seconds, lambda p: p.num_microbatches)
    if len(tried) == 1:
        return chosen
    return replace(chosen, choices=(f"{chosen.num_microbatches} microbatch(es) a round{instead}",))


def _full_seconds(planned: Planned) -> float:
    return 0.0 if planned.profiles is None else planned.full_step_seconds


def _promising(first: Planned, jobs: Sequence[Job]) -> list[Job]:
    """Those of ``jobs``, which are ``first`` in other rounds, that may be faster, or fit where it does not.

    Of large models, whose plans take seconds to find, few: the fastest with the stages of ``first``.
    """
    if first.profiles is None:
        return [job for job in jobs if first.memory_short > 0 and job.rounds > first.rounds]
    if is_small(len(first.layouts)) or first.memory_short > 0:
        return list(jobs)
    most = first.full_step_seconds * (1 + _WORTH_A_SEARCH)
    # Many short rounds take long to play, and need not be where the links alone are too slow for them.
    sizes = [job.num_microbatches for job in jobs if job.rounds * first.round_upload_seconds() <= most]
    seconds = {size: first.seconds_in_rounds(size) for size in sizes}
    promising = [job for job in jobs if seconds.get(job.num_microbatches, math.inf) <= most]
    return sorted(promising, key=lambda job: seconds[job.num_microbatches])[:_MOST_SEARCHES]


def plan_rows(job: Job, plan: Callable[[Job], AnyPlanned]) -> AnyPlanned:
    """``plan`` of ``job``; where the rows of a microbatch are open, of the size that makes a step fastest.

    Tried are one row and then each time the next divisor of a step's rows that is at least twice as large, until
    one does not fit, or two in a row have a longer step than the best before.
    """
    if not job.open_rows or job.given is not None:
        return plan(job)
    in_step = job.rows * job.recipe.train.gradient_accumulation_steps
    tried: list[AnyPlanned] = []
    rows: int | None = 1
    while rows is not None:
        try:
            tried.append(plan(job.with_rows(rows)))
        except UserError:  # a single layer is too much, or rounds do not divide what is left
            if not tried:
                raise
            break
        if tried[-1].memory_short > 0 or _grows(tried):
            break
        rows = min((n for n in divisors(in_step) if n >= 2 * tried[-1].rows), default=None)
    chosen, instead = fastest(tried, lambda p: p.mean_step_seconds(), lambda p: p.rows)
    return replace(chosen, choices=(f"{chosen.rows} row(s) a microbatch{instead}", *chosen.choices))


def _grows(tried: Sequence[Planned]) -> bool:
    """Whether the last two take longer than the best before."""
    times = [planned.mean_step_seconds() for planned in tried]
    return len(times) > 2 and min(times[-2:]) > min(times[:-2])
