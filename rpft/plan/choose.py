"""Chooses the plan of a run: the balanced one that fits, recomputing by stage where that fits, else by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import ModelShape, Workload, make_bill
from rpft.plan.costs import LayerCost, layer_costs, layer_loads, measured_costs
from rpft.plan.partition import Fits, Seconds, balanced_plan, improved, with_smaller_fused_stage
from rpft.plan.plan import Plan
from rpft.plan.profile import LayerProfile
from rpft.plan.simulate import ASSUMED_RATES, Rates, StepShape, steps_seconds

_FILLED_WITH_RESIDENTS = 0.95
"""Share of the device memory up to which frozen weights may stay: the allocator's fragments need some too."""

_WORTH_KEEPING = 0.005
"""Share of a step that keeping more must save."""

_WORTH_IMPROVING = 0.02
"""By how much of a step a way of keeping more may be behind the best before its own cuts are found."""


def model_shape(config: Any, itemsize: int) -> ModelShape:
    """What of a transformers ``config`` the bill needs; ``itemsize``: bytes of a working weight."""
    text = config.get_text_config()
    hidden = text.hidden_size
    intermediate = getattr(text, "intermediate_size", None) or 4 * hidden
    return ModelShape(hidden, intermediate, text.vocab_size, itemsize)


def choose_plan(
    layouts: list[LayerLayout],
    skeleton: Skeleton,
    work: Workload,
    num_workers: int,
    num_microbatches: int,
    recompute: str,
    vram_bytes: int | None,
    ram_bytes: int | None,
    rates: Rates = ASSUMED_RATES,
    speeds: Sequence[float] | None = None,
) -> Plan:
    """A plan for ``work`` on ``num_workers`` with ``vram_bytes`` each (None: no limit); ``recompute`` may be auto.

    Layers that run as graphs are recomputed one at a time where RAM allows, since a layer's recompute and
    backward as one graph is shorter; run by torch they are recomputed a stage at a time where VRAM allows, since
    fewer hidden states then cross the link. Where nothing fits, the plan with the smallest stages, whose bill says
    by how much. ``speeds``: of each worker, over that of the one that was measured, where they differ.
    """
    costs = layer_costs(layouts, skeleton) if work.profiles is None else measured_costs(work.profiles)
    rounds = -(-work.accumulation // num_microbatches)
    preferred = ("stage", "layer") if work.kernels == "eager" else ("layer", "stage")
    grains: Sequence[str] = preferred if recompute == "auto" else (recompute,)

    def fits(plan: Plan) -> bool:
        bill = make_bill(plan, layouts, work)
        return (vram_bytes is None or bill.device <= vram_bytes) and (ram_bytes is None or bill.host <= ram_bytes)

    def clock(costs: Sequence[LayerCost]) -> Seconds:
        shape = step_shape(layouts, work, costs, num_workers, rounds, speeds)
        return partial(steps_seconds, shape=shape, rates=rates)

    seconds = None if work.profiles is None else clock(costs)
    for grain in grains:
        plan = balanced_plan(costs, num_workers, num_microbatches, rounds, grain, fits, seconds)
        if plan is not None and recompute == "auto" and work.profiles is not None:
            plan = _keeping_more(plan, work.profiles, rounds, fits, clock)
        if plan is not None:
            return plan if vram_bytes is None else _with_residents(plan, layouts, work, vram_bytes)
    smallest = "layer" if recompute == "auto" else recompute
    plan = balanced_plan(costs, num_workers, num_microbatches, rounds, smallest, _has_smallest_stages)
    assert plan is not None
    return plan


def step_shape(
    layouts: Sequence[LayerLayout],
    work: Workload,
    costs: Sequence[LayerCost],
    num_workers: int,
    rounds: int,
    speeds: Sequence[float] | None = None,
) -> StepShape:
    """What the simulator is told of a run whose layers take ``costs``, in seconds."""
    boundary_bytes = work.max_tokens * work.shape.hidden_size * work.shape.itemsize
    loads = layer_loads(costs, layouts, work.gradient_dtype.itemsize)
    return StepShape(loads, work.max_tokens, boundary_bytes, num_workers, rounds, work.delayed, speeds=speeds)


def _keeping_more(
    plan: Plan,
    profiles: Sequence[LayerProfile],
    rounds: int,
    fits: Fits,
    clock: Callable[[Sequence[LayerCost]], Seconds],
) -> Plan:
    """``plan``, or one like it whose forward keeps what shortens a step, where link, RAM and VRAM have room."""
    if plan.recompute != "layer":
        return plan
    options = {size for profile in profiles for size, _ in profile.keep_options}
    # What is kept takes VRAM on its way, which fewer layers in the fused stage make room for.
    others = [with_smaller_fused_stage(replace(plan, keep_bytes_per_token=size), fits) for size in sorted(options)]
    clocks = {p: clock(measured_costs(profiles, p.keep_bytes_per_token)) for p in others if p is not None}
    before = {other: float(seconds([other])[0]) for other, seconds in clocks.items()}
    most = min(before.values()) * (1 + _WORTH_IMPROVING)
    found = dict(improved(p, fits, seconds, rounds) for p, seconds in clocks.items() if before[p] <= most)
    # What is kept fills RAM and link: it must be worth something.
    least = min(found.values()) * (1 + _WORTH_KEEPING)
    return min((p for p in found if found[p] <= least), key=lambda p: p.keep_bytes_per_token)


def _with_residents(plan: Plan, layouts: list[LayerLayout], work: Workload, vram_bytes: int) -> Plan:
    """``plan`` with frozen weights that stay on the workers, as many as fit; those first that go up most often."""
    often = [layout for layout in layouts if layout.frozen_bytes]
    often.sort(key=lambda layout: (layout.layer >= plan.fused.first, layout.layer))
    for layout in often:
        more = replace(plan, resident=(*plan.resident, layout.layer))
        if make_bill(more, layouts, work).device <= _FILLED_WITH_RESIDENTS * vram_bytes:
            plan = more
    return plan


def _has_smallest_stages(plan: Plan) -> bool:
    """One block a stage; the embedding may share the lowest one."""
    return all(len(stage.layers) <= 2 for stage in plan.backward)
