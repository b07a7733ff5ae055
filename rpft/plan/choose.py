"""Chooses the plan of a run: the balanced one that fits, recomputing by stage where that fits, else by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import ModelShape, Workload, make_bill
from rpft.plan.costs import LayerCost, layer_costs, measured_costs
from rpft.plan.partition import balanced_plan, improved
from rpft.plan.plan import Plan
from rpft.plan.simulate import ASSUMED_RATES, Rates, StepShape, step_seconds

_FILLED_WITH_RESIDENTS = 0.95
"""Share of the device memory up to which frozen weights may stay: the allocator's fragments need some too."""

_WORTH_KEEPING = 0.005
"""Share of a step that keeping more must save."""


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
) -> Plan:
    """A plan for ``work`` on ``num_workers`` with ``vram_bytes`` each (None: no limit); ``recompute`` may be auto.

    Layers that run as graphs are recomputed one at a time where RAM allows, since a layer's recompute and
    backward as one graph is shorter; run by torch they are recomputed a stage at a time where VRAM allows, since
    fewer hidden states then cross the link. Where nothing fits, the plan with the smallest stages, whose bill says
    by how much.
    """
    costs = layer_costs(layouts, skeleton) if work.profiles is None else measured_costs(work.profiles)
    rounds = -(-work.accumulation // num_microbatches)
    preferred = ("stage", "layer") if work.kernels == "eager" else ("layer", "stage")
    grains: Sequence[str] = preferred if recompute == "auto" else (recompute,)

    def fits(plan: Plan) -> bool:
        bill = make_bill(plan, layouts, work)
        return (vram_bytes is None or bill.device <= vram_bytes) and (ram_bytes is None or bill.host <= ram_bytes)

    seconds = None
    if work.profiles is not None:
        seconds = partial(step_seconds, shape=_step_shape(layouts, work, costs, num_workers, rounds), rates=rates)

    for grain in grains:
        plan = balanced_plan(costs, num_workers, num_microbatches, rounds, grain, fits, seconds)
        if plan is not None and recompute == "auto" and work.profiles is not None:
            plan = _keeping_more(plan, layouts, work, num_workers, rounds, fits, rates)
        if plan is not None:
            return plan if vram_bytes is None else _with_residents(plan, layouts, work, vram_bytes)
    smallest = "layer" if recompute == "auto" else recompute
    plan = balanced_plan(costs, num_workers, num_microbatches, rounds, smallest, _has_smallest_stages)
    assert plan is not None
    return plan


def _step_shape(
    layouts: list[LayerLayout], work: Workload, costs: Sequence[LayerCost], num_workers: int, rounds: int
) -> StepShape:
    boundary_bytes = work.max_tokens * work.shape.hidden_size * work.shape.itemsize
    size = work.gradient_dtype.itemsize
    return StepShape(layouts, costs, work.max_tokens, boundary_bytes, size, num_workers, rounds, work.delayed)


def _keeping_more(
    plan: Plan,
    layouts: list[LayerLayout],
    work: Workload,
    num_workers: int,
    rounds: int,
    fits: Callable[[Plan], bool],
    rates: Rates,
) -> Plan:
    """``plan``, or one like it whose forward keeps what shortens a step, where link, RAM and VRAM have room."""
    profiles = work.profiles
    assert profiles is not None
    if plan.recompute != "layer":
        return plan
    options = {size for profile in profiles for size, _ in profile.keep_options}
    found: dict[Plan, float] = {}
    for size in sorted(options):
        costs = measured_costs(profiles, size)
        shape = _step_shape(layouts, work, costs, num_workers, rounds)
        other = replace(plan, keep_bytes_per_token=size)
        if fits(other):
            seconds = partial(step_seconds, shape=shape, rates=rates)
            known = {other: seconds(other)}
            best = improved(other, known, fits, seconds, rounds)
            found[best] = known[best]
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
