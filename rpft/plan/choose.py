"""Chooses the plan of a run for given rounds: the fastest by prediction that fits, stages and recompute grain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import Billing, Workload
from rpft.plan.costs import LayerCost, layer_costs, layer_loads, measured_costs
from rpft.plan.dispatch import dispatched
from rpft.plan.estimate import ModelShape
from rpft.plan.partition import (
    USUAL_EFFORT,
    Effort,
    Fits,
    Seconds,
    balanced_plan,
    improved,
    is_small,
    with_smaller_fused_stage,
)
from rpft.plan.plan import Plan, smallest_stages
from rpft.plan.profile import LayerProfile
from rpft.plan.rates import ASSUMED_RATES, Rates
from rpft.plan.simulate import step_seconds, steps_seconds
from rpft.plan.step_shape import StepShape

_FILLED_WITH_RESIDENTS = 0.95
"""Share of the device memory up to which frozen weights may stay: the allocator's fragments need some too."""

_WORTH_KEEPING = 0.005
"""Share of a step that keeping more must save."""

_FILLED = 0.97
"""Of a worker's memory, what plans that could take less may take: freed memory is not always of use."""

_WORTH_IMPROVING = 0.02
"""By how much of a step a way of keeping more may be behind before its own cuts are found."""

_WORTH_SEARCHING = 0.05
"""The same of another grain, whose search goes further."""

_WORTH_THE_OTHER_GRAIN = 0.005
"""Share of a step that the grain which is not preferred must save."""


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
    near: Plan | None = None,
    effort: Effort = USUAL_EFFORT,
) -> Plan:
    """A plan for ``work`` on ``num_workers`` with ``vram_bytes`` each (None: no limit); ``recompute`` may be auto.

    Where times are known ``auto`` is the grain with the shorter step. Of those as good as equally fast, and where
    times are not known, layers that run as graphs are recomputed one at a time, since a layer's recompute and
    backward as one graph is shorter; run by torch they are recomputed a stage at a time, since fewer hidden
    states then cross the link. Where nothing fits, the plan with the smallest stages, whose bill says by how much.
    ``speeds``: of each worker, over that of the one that was measured, where they differ. ``near``: a plan whose
    stages are good for much the same work: the search starts from them and a few others, and is over sooner.
    ``effort``: of the search.
    """
    rounds = -(-work.accumulation // num_microbatches)
    preferred = ("stage", "layer") if work.kernels == "eager" else ("layer", "stage")
    grains: Sequence[str] = preferred if recompute == "auto" else (recompute,)

    def costs_of(grain: str, keep_bytes_per_token: int = 0) -> Sequence[LayerCost]:
        if work.profiles is None:
            return layer_costs(layouts, skeleton)
        return measured_costs(work.profiles, keep_bytes_per_token, grain)

    billing = Billing(layouts, work)

    def within(most: int | None) -> Fits:
        return lambda plan: billing.fits(plan, most, ram_bytes)

    def shape_of(costs: Sequence[LayerCost]) -> StepShape:
        return step_shape(layouts, work, costs, num_workers, rounds, speeds)

    def clock(costs: Sequence[LayerCost]) -> Seconds:
        return partial(steps_seconds, shape=shape_of(costs), rates=rates)

    def searched(
        costs: Sequence[LayerCost],
        grain: str,
        fits: Fits,
        seconds: Seconds | None,
        near: Plan | None,
        like: Plan | None = None,
    ) -> Plan | None:
        sizes = num_workers, num_microbatches, rounds, grain
        return balanced_plan(costs, *sizes, fits, seconds, near, like, work.delayed, effort)

    def search(fits: Fits) -> dict[Plan, float]:
        """The best plan of each grain that is worth a look, and its seconds."""
        found: dict[Plan, float] = {}
        for grain in grains:
            costs = costs_of(grain)
            seconds = None if work.profiles is None else clock(costs)
            behind = _WORTH_SEARCHING if near is None else -_WORTH_THE_OTHER_GRAIN
            if found and (
                seconds is None or not _could_be_faster(grain, next(iter(found.items())), seconds, behind)
            ):
                continue
            beside = near if not found else next(iter(found))  # stages for one grain are near those for the other
            plan = searched(costs, grain, fits, seconds, beside)
            if plan is None:
                continue
            if recompute == "auto" and work.profiles is not None:
                plan = _keeping_more(plan, work.profiles, fits, shape_of, rates)
            shape = shape_of(costs_of(grain, plan.keep_bytes_per_token))
            if seconds is None:
                found[plan] = 0.0
            elif not shape.mixed:
                found[plan] = step_seconds(plan, shape, rates)
            else:
                # Stages for workers that are alike suit an order in which the faster ones have more of them.
                alike, _ = improved(plan, fits, replace(shape, speeds=None), rates)
                orders = [dispatched(each, shape, rates) for each in (plan, alike)]
                best, _ = min(orders, key=lambda order: order[1])
                moved, _ = improved(best, fits, shape, rates)
                orders.append(dispatched(moved, shape, rates))
                found.update([min(orders, key=lambda order: order[1])])
        return found

    found = search(within(None if vram_bytes is None else int(_FILLED * vram_bytes)))
    if not found and vram_bytes is not None:
        found = search(within(vram_bytes))
    if found:
        least = min(found.values()) * (1 + _WORTH_THE_OTHER_GRAIN)
        plan = next(plan for plan, seconds in found.items() if seconds <= least)
        if vram_bytes is None:
            return plan
        plan = _with_residents(plan, layouts, billing, vram_bytes)
        shape = shape_of(costs_of(plan.recompute, plan.keep_bytes_per_token))
        if not plan.resident or work.profiles is None or shape.mixed:
            return plan
        # The cuts were found for uploads that are now spared.
        most = max(billing.of(plan).device, int(_FILLED_WITH_RESIDENTS * vram_bytes))
        seconds, fits = partial(steps_seconds, shape=shape, rates=rates), within(most)
        costs = costs_of(plan.recompute, plan.keep_bytes_per_token)
        return searched(costs, plan.recompute, fits, seconds, near=plan, like=plan) or plan
    smallest = "layer" if recompute == "auto" else recompute
    single = smallest_stages(len(layouts), num_microbatches, smallest)
    if within(vram_bytes)(single):  # balanced forward stages hold several layers, which here is too many
        return single
    plan = balanced_plan(costs_of(smallest), num_workers, num_microbatches, rounds, smallest, _has_smallest_stages)
    return single if plan is None else plan  # layers much smaller than others are never balanced alone


def _could_be_faster(grain: str, found: tuple[Plan, float], seconds: Seconds, behind: float) -> bool:
    """Whether a search with another ``grain`` is worth its time: the stages ``found`` are as good there.

    They may be ``behind`` by such a share of a step.
    """
    plan, least = found
    same = replace(plan, recompute=grain, keep_bytes_per_token=0)
    return is_small(plan.num_layers) or float(seconds([same])[0]) < least * (1 + behind)


def step_shape(
    layouts: Sequence[LayerLayout],
    work: Workload,
    costs: Sequence[LayerCost],
    num_workers: int,
    rounds: int,
    speeds: Sequence[float] | None = None,
) -> StepShape:
    """What the simulator is told of a run whose layers take ``costs``, in seconds."""
    # What is wider than a hidden state counts by its mean: the simulator knows one size.
    extra = sum(layout.extra_input_bytes for layout in layouts) / len(layouts)
    boundary_bytes = round(work.max_tokens * (work.shape.hidden_size * work.shape.itemsize + extra))
    loads = layer_loads(costs, layouts, work.gradient_dtype.itemsize)
    return StepShape(loads, work.max_tokens, boundary_bytes, num_workers, rounds, work.delayed, speeds=speeds)


def _keeping_more(
    plan: Plan,
    profiles: Sequence[LayerProfile],
    fits: Fits,
    shape_of: Callable[[Sequence[LayerCost]], StepShape],
    rates: Rates,
) -> Plan:
    """``plan``, or one like it whose forward keeps what shortens a step, where link, RAM and VRAM have room."""
    if plan.recompute != "layer":
        return plan
    options = {size for profile in profiles for size, _ in profile.keep_options}
    # What is kept takes VRAM on its way, which fewer layers in the fused stage make room for.
    others = [with_smaller_fused_stage(replace(plan, keep_bytes_per_token=size), fits) for size in sorted(options)]
    shapes = {p: shape_of(measured_costs(profiles, p.keep_bytes_per_token)) for p in others if p is not None}
    before = {other: step_seconds(other, shape, rates) for other, shape in shapes.items()}
    most = min(before.values()) * (1 + _WORTH_IMPROVING)
    found = dict(improved(p, fits, shape, rates) for p, shape in shapes.items() if before[p] <= most)
    # What is kept fills RAM and link: it must be worth something.
    least = min(found.values()) * (1 + _WORTH_KEEPING)
    return min((p for p in found if found[p] <= least), key=lambda p: p.keep_bytes_per_token)


def _with_residents(plan: Plan, layouts: Sequence[LayerLayout], billing: Billing, vram_bytes: int) -> Plan:
    """``plan`` with frozen weights that stay on the workers, as many as fit; those first that go up most often."""
    often = [layout for layout in layouts if layout.frozen_bytes]
    often.sort(key=lambda layout: (layout.layer >= plan.fused.first, layout.layer))
    for layout in often:
        more = replace(plan, resident=(*plan.resident, layout.layer))
        if billing.of(more).device <= _FILLED_WITH_RESIDENTS * vram_bytes:
            plan = more
    return plan


def _has_smallest_stages(plan: Plan) -> bool:
    """One block a stage; the embedding may share the lowest one."""
    return all(len(stage.layers) <= 2 for stage in plan.backward)
