"""Chooses the plan of a run: the balanced one that fits, recomputing by stage where that fits, else by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import ModelShape, Workload, make_bill
from rpft.plan.costs import layer_costs, measured_costs
from rpft.plan.partition import balanced_plan
from rpft.plan.plan import Plan
from rpft.plan.simulate import ASSUMED_RATES, Rates, StepShape, step_seconds


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

    seconds: Callable[[Plan], float] | None = None
    if work.profiles is not None:
        boundary_bytes = work.max_tokens * work.shape.hidden_size * work.shape.itemsize
        size = work.gradient_dtype.itemsize
        shape = StepShape(layouts, costs, boundary_bytes, size, num_workers, rounds, work.delayed)
        seconds = partial(step_seconds, shape=shape, rates=rates)

    for grain in grains:
        plan = balanced_plan(costs, num_workers, num_microbatches, rounds, grain, fits, seconds)
        if plan is not None:
            return plan
    smallest = "layer" if recompute == "auto" else recompute
    plan = balanced_plan(costs, num_workers, num_microbatches, rounds, smallest, _has_smallest_stages)
    assert plan is not None
    return plan


def _has_smallest_stages(plan: Plan) -> bool:
    """One block a stage; the embedding may share the lowest one."""
    return all(len(stage.layers) <= 2 for stage in plan.backward)
